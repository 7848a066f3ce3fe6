"""The report page: one file, complete where there is something to tell, honest where there is not, and inert."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tasks.registry import StagePaths
from tasks.report import PAGE, as_interval, flatten, git_commit, read_metrics, run
from tasks.workspace import REPOSITORY
from trainer.config import load_config
from trainer.files import write_json, write_manifest
from trainer.metrics import METRICS, RunWriter

PARAMS = REPOSITORY / "params.yaml"
EVIL = '</div><script>alert("x")</script><img src=https://example.org/x.png onerror=alert(1)>{{ 7 * 7 }}'


class Reader(HTMLParser):
    """Collects tags, attributes that could load or run something, and text."""

    VOID = ("meta", "img", "link", "br", "circle", "line", "path")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.dangerous: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.dangerous += [
            f"{tag} {name}" for name, _ in attributes if name.startswith("on") or name in ("src", "href", "srcset")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag, tag

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def interval(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.02, "high": value + 0.02}


def side(value: float) -> dict[str, Any]:
    metrics = {name: interval(value) for name in ("pass@1", "pass@4", "pass@16", "greedy_accuracy", "mean_reward")}
    return {**metrics, "mean_length": interval(3.5), "statuses": {"ok": 9, "wrong": 1, "error": 0}}


@pytest.fixture
def paths(tmp_path: Path) -> StagePaths:
    """A campaign's files, as the stages before would leave them."""
    inputs = {name: tmp_path / "artifacts" / name for name in ("prompts", "policy", "evaluation")}
    for directory in inputs.values():
        directory.mkdir(parents=True)
    gain = {"pass@1": {"value": 0.4, "low": 0.35, "high": 0.45}}
    evaluation = {"split": "heldout", "num_prompts": 256, "base": side(0.5), "trained": side(0.9), "difference": gain}
    write_json(inputs["evaluation"] / "evaluation.json", evaluation)
    answers = [
        {"prompt": "11+22=", "answer": "33", "base": {"text": "33", "score": 1.0}, "trained": {"text": "33", "score": 1.0}},
        {"prompt": "45+67=", "answer": "112", "base": {"text": EVIL, "score": 0.0}, "trained": {"text": "112", "score": 1.0}},
    ]
    (inputs["evaluation"] / "samples.jsonl").write_text("".join(json.dumps(a) + "\n" for a in answers), encoding="utf-8")
    writer = RunWriter(tmp_path / "runs" / "quickstart-1" / "train")
    for step in range(1, 61):
        writer.metrics(step, {"reward/mean": step / 100, "kl/mean": float("nan"), "grad/norm": 1.0, "stage/index": step // 40})
    writer.event("skip", EVIL, 7)
    writer.event("checkpoint", "every 10 steps", 10)
    writer.event("warning", "few answers differ", 0, share=0.123456, detail={"long": ["list"]})
    write_manifest(inputs["prompts"], {})
    write_manifest(inputs["policy"], {"inputs": {"base": "b" * 64, "anchors": "a" * 64}})
    write_manifest(inputs["evaluation"], {"inputs": {"merged": "c" * 64}})
    (tmp_path / "out").mkdir()
    runs = {"train": tmp_path / "runs" / "quickstart-1" / "train"}
    return StagePaths(inputs, tmp_path / "out", tmp_path / "runs" / "quickstart-1" / "report", "identity", runs)


def page(paths: StagePaths, *overrides: str) -> tuple[str, Reader, dict[str, Any]]:
    facts = run(load_config(PARAMS, overrides), paths)
    html = (paths.out / PAGE).read_text(encoding="utf-8")
    assert [path.name for path in paths.out.iterdir()] == [PAGE]
    reader = Reader(html)
    assert reader.open == []  # every tag is closed
    return html, reader, facts


def test_the_page_tells_the_whole_campaign(paths: StagePaths) -> None:
    html, reader, facts = page(paths, "train.optimizer.learning_rate=3e-4")
    assert facts["missing"] == []
    for said in ("90.0%", "+40.0", "+35.0 to +45.0 points", "256 prompts of split heldout", "ok 90.0%, wrong 10.0%"):
        assert said in reader.text
    order = [reader.text.index(name) for name in ("pass@1", "pass@4", "pass@16", "greedy accuracy", "mean reward", "mean length")]
    assert order == sorted(order)
    assert reader.text.index("45+67=") < reader.text.index("11+22=")  # what changed comes first
    assert "train.optimizer.learning_rate" in reader.text
    assert "tithe run -S train.optimizer.learning_rate=0.0003" in reader.text
    for digest in ("a" * 64, "b" * 64, "c" * 64):
        assert digest in reader.text
    assert html.count("<figure") == 2  # reward and gradient norm; KL had no finite value
    assert "Not measured in this run: divergence from the base" in reader.text
    assert html.count("next RL stage at step 40") == 2
    assert "1 more in events.jsonl" in reader.text
    assert "few answers differ (share: 0.123)" in reader.text
    assert "error 0" not in reader.text


def test_what_was_planned_stands_beside_what_was_measured(paths: StagePaths) -> None:
    assert "Planned and measured" not in page(paths)[1].text  # nothing was planned
    for directory in (paths.run.parent, paths.runs["train"]):
        writer = RunWriter(directory)
        writer.metrics(1, {"plan/predicted_peak_bytes": 5e8, "plan/predicted_step_seconds": 2.0})
        writer.metrics(61, {"memory/rss_peak_bytes": 4e8, "time/step_seconds": 2.5})
    (paths.out / PAGE).unlink()
    html = page(paths)[0]
    assert "<td>memory, highest</td><td>500 MB</td><td>400 MB</td><td>+25%</td>" in html
    assert "<td>a step</td><td>2 s</td><td>2.5 s</td><td>-20%</td>" in html


def test_the_page_needs_nothing_and_runs_nothing(paths: StagePaths) -> None:
    html, reader, _ = page(paths)
    assert reader.dangerous == []
    assert {"script", "img", "link", "iframe", "form"} & set(reader.tags) == set()
    assert reader.text.count('alert("x")') == 2  # in the answer and in the event, as text
    assert "{{ 7 * 7 }}" in reader.text
    assert "default-src 'none'" in html
    assert "@import" not in html
    assert "url(" not in html


def test_equal_files_give_equal_pages(paths: StagePaths) -> None:
    first, _, _ = page(paths)
    second, _, _ = page(paths)
    assert first == second


def test_an_unchanged_campaign_says_so(paths: StagePaths) -> None:
    _, reader, _ = page(paths)
    assert "params.yaml, unchanged" in reader.text


def test_no_examples_are_shown_when_none_are_asked_for(paths: StagePaths) -> None:
    _, reader, facts = page(paths, "report.num_examples=0")
    assert "45+67=" not in reader.text
    assert facts["missing"] == []


@pytest.mark.parametrize("gone", ["evaluation", "samples", "metrics", "manifest", "everything"])
def test_what_is_missing_is_named(paths: StagePaths, gone: str) -> None:
    files = {
        "evaluation": paths.inputs["evaluation"] / "evaluation.json",
        "samples": paths.inputs["evaluation"] / "samples.jsonl",
        "metrics": paths.runs["train"] / METRICS,
        "manifest": paths.inputs["policy"] / "manifest.json",
    }
    if gone == "everything":
        paths = replace(paths, inputs={}, runs={})
    else:
        files[gone].unlink()
    _, reader, facts = page(paths)
    expected = {
        "evaluation": "no before and after",
        "samples": "no answers",
        "metrics": "no curves",
        "manifest": "policy has no manifest",
    }
    for name in expected if gone == "everything" else [gone]:
        if not (gone == "everything" and name == "manifest"):
            assert expected[name] in reader.text
    assert len(facts["missing"]) == (3 if gone == "everything" else 1)


def test_long_texts_are_cut_and_say_so(paths: StagePaths) -> None:
    line = {"prompt": "p", "answer": "", "base": {"text": "x" * 100_000, "score": 0.0}, "trained": {"text": "", "score": None}}
    (paths.inputs["evaluation"] / "samples.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    html, reader, _ = page(paths)
    assert "96,000 more characters" in reader.text
    assert len(html) < 60_000


def test_metrics_are_read_from_the_curve_when_the_run_directory_is_gone(paths: StagePaths) -> None:
    (paths.inputs["policy"] / "curve.csv").write_text(
        "step,reward_mean,learning_rate\n1,0.5,1e-4\n2,,1e-5\n3,nan,0\n", encoding="utf-8"
    )
    assert read_metrics(None, paths.inputs["policy"]) == {
        "reward/mean": [(1.0, 0.5)],
        "lr": [(1.0, 1e-4), (2.0, 1e-5), (3.0, 0.0)],
    }


def test_an_interval_is_read_or_refused() -> None:
    assert as_interval({"value": 1, "low": 0.5, "high": 2}) == (1.0, 0.5, 2.0)
    assert as_interval(0.5) == (0.5, 0.5, 0.5)
    for nothing in (None, True, "0.5", {"ok": 3}, {"value": float("nan"), "low": 0, "high": 1}):
        assert as_interval(nothing) is None


def test_a_tree_is_flattened_to_dotted_keys() -> None:
    assert flatten({"a": {"b": 1, "c": [{"d": 2}]}, "e": None}) == {"a.b": 1, "a.c": [{"d": 2}], "e": None}


def test_outside_a_checkout_there_is_no_commit(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None
