"""Runs side by side: what differs, who is best, a page that needs nothing beside itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.compare import Row, differing, from_files, page, ranked, table
from tasks.runs import locate, locate_all, read_run
from tasks.workspace import REPOSITORY
from trainer.config import as_tree, load_config
from trainer.errors import DataError
from trainer.files import write_json
from trainer.metrics import RunWriter

OBJECTIVE = "heldout/reward_mean"


def make_run(root: Path, name: str, rate: str, rewards: list[float], torn: bool = False) -> Path:
    """Write a run directory as training leaves it."""
    run = root / "runs" / name
    config = load_config(REPOSITORY / "params.yaml", [f"train.optimizer.learning_rate={rate}", f"machine.threads={len(name)}"])
    write_json(run / "config.json", as_tree(config))
    writer = RunWriter(run / "train")
    for step, reward in enumerate(rewards, start=1):
        writer.metrics(step, {OBJECTIVE: reward, "reward/mean": reward / 2, "kl/mean": 0.01 * step, "time/step_seconds": 1.0})
    if torn:
        with open(run / "train" / "metrics.jsonl", "a") as file:
            file.write('{"step": 9, "met\n[1, 2]\n\x00\x00\n{"step": "x", "metrics": {}}\n{"metrics": 3, "step": 4}\n{"step": 1')
    return run


@pytest.fixture
def rows(tmp_path: Path) -> list[Row]:
    runs = [
        make_run(tmp_path, "slow-1", "1e-4", [0.1, 0.2, 0.3]),
        make_run(tmp_path, "fast-12", "4e-4", [0.3, 0.9, 0.8]),
        make_run(tmp_path, "torn-123", "2e-4", [0.2, 0.4], torn=True),
        make_run(tmp_path, "empty-1234", "3e-4", []),
    ]
    return from_files([read_run(run) for run in runs])


def test_only_what_differs_and_decides_is_shown_the_best_first(rows: list[Row]) -> None:
    assert differing(rows) == ["train.optimizer.learning_rate"]
    assert [row.name for row in ranked(rows, OBJECTIVE)] == ["fast-12", "torn-123", "slow-1", "empty-1234"]
    lines = table(rows, OBJECTIVE)
    assert lines[0]["learning_rate"] == "0.0004"
    assert (lines[0][OBJECTIVE], lines[0]["best"]) == ("0.8", "0.9 at 2")
    assert (lines[3][OBJECTIVE], lines[3]["best"]) == ("-", "-")
    assert len({tuple(line) for line in lines}) == 1


def test_broken_lines_are_passed_over(tmp_path: Path) -> None:
    facts = read_run(make_run(tmp_path, "torn", "2e-4", [0.2, 0.4], torn=True))
    assert facts.series[OBJECTIVE] == [(1, 0.2), (2, 0.4)]
    assert facts.broken_lines == 5  # a line without an end is one that is still being written
    assert facts.status == "never begun"


def test_the_page_holds_the_table_a_line_per_run_and_no_script(rows: list[Row]) -> None:
    hostile = Row("<script>alert(1)</script>", "finished", {}, {OBJECTIVE: [(1, 0.5), (2, 0.6)]}, {})
    text = page("sweep", [*rows[:3], hostile], OBJECTIVE)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert text.count("<svg") == 1  # one metric that all of them have
    assert text.count('class="line s') == 4
    torn = Row("no step", "failed", {}, {}, {})  # its curves that are missing take none from the others
    assert page("sweep", [*rows[:3], torn], OBJECTIVE).count("<svg") == page("sweep", rows[:3], OBJECTIVE).count("<svg") > 1
    many = page("many", [Row(str(n), "finished", {}, {OBJECTIVE: [(1, n), (2, n)]}, {}) for n in range(14)], OBJECTIVE)
    assert "4 more are in the table" in many


def test_a_run_is_found_by_what_a_person_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.runs.REPOSITORY", tmp_path)
    monkeypatch.setenv("TITHE_CAMPAIGNS", str(tmp_path / "campaigns"))
    monkeypatch.chdir(tmp_path)
    old = make_run(tmp_path / "campaigns" / "mine", "mine-1", "1e-4", [0.1])
    new = make_run(tmp_path / "campaigns" / "mine", "mine-2", "2e-4", [0.1])
    for run, started in ((old, 1.0), (new, 2.0)):
        record: dict[str, Any] = {"id": run.name, "kind": "campaign", "name": run.name, "campaign": "mine", "identity": ""}
        record |= {"status": "FINISHED", "attempt": 1, "started": started, "ended": 3.0, "owner": {}, "params": {}, "tags": {}}
        write_json(run / "record.json", record)
    assert locate("mine-1") == old
    assert locate("mine") == new
    assert locate("campaigns/mine") == new
    assert locate("campaigns/mine/runs/mine-1") == old
    assert locate(str(old / "train")) == old
    assert locate_all(["mine-1", "campaigns/mine", "mine-1"]) == [old, new]
    with pytest.raises(DataError, match=r"no such run; did you mean 'mine-[12]'"):
        locate("mine-l")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: is no run directory: it has no config\.json"):
        locate("empty")


def test_a_damaged_configuration_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, "x", "1e-4", [0.1])
    for text in ("{", json.dumps({"campaign": {"name": "x"}}), ""):
        (run / "config.json").write_text(text)
        with pytest.raises(DataError, match=r"config\.json: cannot be read"):
            read_run(run)
