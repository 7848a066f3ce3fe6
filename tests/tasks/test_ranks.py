"""The train stage over ranks: the same losses and decisions whatever their number; one that ends takes the others with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks.ranks import Assignment, ranks_here
from tasks.workspace import REPOSITORY
from tests.tasks.test_train import (
    PATIENCE_SECONDS,
    campaign,
    events,
    inputs,
    make_workspace,
    run_train,
    stage_process,
    steps,
    wait_for_step,
)
from trainer.config.load import lay_over
from trainer.errors import ConfigError, DivergedError, RankError, StopRequested, TitheError
from trainer.files import read_json, write_json
from trainer.metrics import STAGE_PID, read_lines

pytestmark = pytest.mark.smoke
assert inputs  # a fixture

TWO_STAGES: dict[str, Any] = {
    "train": {
        "heartbeat": {"warmup_steps": 2},
        "stages": [{"name": "first", "steps": 3, "sources": ["plus"]}, {"name": "second", "steps": 2, "sources": ["minus"]}],
        "heldout": {"every_steps": 2},
        "checkpoints": {"every_steps": 2},
    },
    "anchors": {"refresh_every": 2, "audit_every": 2, "audit_samples": 8},
    "preflight": {"num_prompts": 2},
}
# sgd: a rule that normalises would make the rounding of a step without signal as large as a step
SHARDED = lay_over(
    TWO_STAGES,
    {
        "train": {
            "method": "full",
            "optimizer": {"kind": "stateless", "rule": "sgd", "learning_rate": 0.05, "weight_decay": 0.0},
            "memory": {"weights": "sharded"},
        }
    },
)


COMPARED = ("loss/total", "reward/mean", "kl/mean", "grad/norm", "update/relative", "heldout/accuracy", "anchors/audit_exact")


def over(ranks: int, difference: dict[str, Any] | None = None) -> Any:
    return campaign(
        lay_over(
            lay_over(SHARDED, difference or {}),
            {"machine": {"ranks": ranks, "threads": ranks, "device": "cpu"}},
        )
    )


def test_more_ranks_than_gpus_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    on_gpus = [campaign(lay_over(SHARDED, {"machine": {"ranks": ranks}})) for ranks in (0, 1, 3)]
    assert [ranks_here(config) for config in on_gpus[:2]] == [2, 1]
    with pytest.raises(ConfigError, match=r"machine\.ranks.*3.*NCCL takes one rank a GPU, and here are 2"):
        ranks_here(on_gpus[2])
    assert ranks_here(over(3)) == 3


def metrics(run: Path) -> list[dict[str, float]]:
    return [line["metrics"] for line in read_lines(run / "metrics.jsonl")]


def told(run: Path) -> list[tuple[str, Any, str]]:
    return [(e["kind"], e["step"], e["reason"].partition(":")[0]) for e in read_lines(run / "events.jsonl")]


@pytest.fixture(scope="module")
def runs(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same campaign in one process with whole weights, and over 1 and 2 ranks."""
    root = tmp_path_factory.mktemp("ranks")
    resident = campaign(lay_over(SHARDED, {"train": {"memory": {"weights": "resident"}}}))
    run_train(inputs, root / "resident", resident)
    for ranks in (1, 2):
        run_train(inputs, root / str(ranks), over(ranks))
    return {name: root / name for name in ("resident", "1", "2")}


@pytest.mark.parametrize("name", ["1", "2"])
def test_ranks_change_nothing_but_the_order_of_sums(runs: dict[str, Path], name: str) -> None:
    expected, found = metrics(runs["resident"]), metrics(runs[name])
    assert len(found) == len(expected) == 6, "written once"
    for one, other in zip(expected, found, strict=True):
        for key in [key for key in COMPARED if key in one]:
            assert other[key] == pytest.approx(one[key], rel=2e-3, abs=1e-5), key
    assert told(runs[name]) == told(runs["resident"])
    models = [AutoModelForCausalLM.from_pretrained(runs[n].with_name(f"{n}-policy")) for n in ("resident", name)]
    for weight, same in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(weight, same, rtol=1e-3, atol=1e-4)


def test_all_ranks_decide_alike_and_only_the_first_writes(runs: dict[str, Path]) -> None:
    first, other = runs["2"], runs["2"] / "ranks" / "1"
    own = ("time/", "throughput/", "memory/", "anchors/guard")
    for one, same in zip(metrics(first), metrics(other), strict=True):
        assert {k: v for k, v in one.items() if not k.startswith(own)} == {k: v for k, v in same.items() if not k.startswith(own)}
    assert told(first) == told(other)
    assert [p.name for p in sorted((first / "checkpoints").iterdir())] == ["step_000004", "step_000005"]
    assert not (other / "checkpoints").exists()
    assert not (other / "anchors").exists()
    assert sorted(p.name for p in (first / "anchors").iterdir()) == ["v000001", "v000002"]
    assert not (first / "tiers").exists()
    held = [run[-1]["memory/shard_bytes"] for run in (metrics(runs["1"]), metrics(first))]
    assert held[1] <= 0.6 * held[0]


def test_ranks_end_with_the_stage_that_is_killed_and_another_number_goes_on(
    inputs: dict[str, Path], runs: dict[str, Path], tmp_path: Path
) -> None:
    root = make_workspace(tmp_path / "killed", inputs, over(2, {"limits": {"retries": 0}}))
    with stage_process(root) as process:
        wait_for_step(process, root, 3)  # the checkpoint of step 2 is whole
        ranks = list(ranks_of(process.pid).values())
        process.kill()
    assert len(ranks) == 2
    assert all(gone(rank) for rank in ranks)
    run, identity = root / "run" / "train", identity_of(root)
    run_train(inputs, run, over(1), identity)
    [resumed] = events(run, "resume")
    assert resumed["step"] in (2, 4)
    for one, other in zip(metrics(runs["2"]), metrics(run), strict=True):
        for key in [key for key in COMPARED if key in one]:
            assert other[key] == pytest.approx(one[key], rel=2e-3, abs=1e-5), key


def identity_of(root: Path) -> str:
    """Return whose the checkpoints of a run are."""
    newest = sorted((root / "run" / "train" / "checkpoints").glob("step_*"))[-1]
    identity: str = read_json(newest / "manifest.json")["identity"]
    return identity


LONG = {"train": {"stages": [{"name": "first", "steps": 500}]}}


@contextmanager
def meanwhile(run: Path, act: Callable[[], None]) -> Iterator[None]:
    """Do something once the line of step 2 is written, beside the block."""
    given_up = threading.Event()

    def wait_and_act() -> None:
        while not given_up.wait(0.01):
            if max(steps(run), default=-1) >= 2:
                return act()

    thread = threading.Thread(target=wait_and_act, daemon=True)
    thread.start()
    try:
        yield
    finally:
        given_up.set()
        thread.join()


def test_a_rank_that_is_killed_takes_the_others_with_it(inputs: dict[str, Path], tmp_path: Path) -> None:
    seen: dict[int, psutil.Process] = {}

    def kill_one() -> None:
        seen.update(ranks_of(os.getpid()))
        seen[1].kill()

    with (
        meanwhile(tmp_path / "run", kill_one),
        pytest.raises(RankError, match=r"rank 1 \(pid \d+\) was ended by SIGKILL, and the others with it") as error,
    ):
        run_train(inputs, tmp_path / "run", over(2, LONG))
    assert error.value.exit_code == 11
    assert sorted(seen) == [0, 1]
    assert gone(seen[0])


def test_a_wish_to_stop_that_reaches_one_rank_is_everybodys(inputs: dict[str, Path], tmp_path: Path) -> None:
    with (
        meanwhile(tmp_path / "run", lambda: ranks_of(os.getpid())[1].terminate()),
        pytest.raises(StopRequested, match="stopped by SIGTERM after a checkpoint; run the same command again to go on"),
    ):
        run_train(inputs, tmp_path / "run", over(2, LONG))
    last = steps(tmp_path / "run")[-1]
    assert (tmp_path / "run" / "checkpoints" / f"step_{last:06d}").is_dir()


def test_a_stage_that_is_asked_to_stop_passes_it_on(inputs: dict[str, Path], tmp_path: Path) -> None:
    with (
        meanwhile(tmp_path / "run", lambda: os.kill(os.getpid(), signal.SIGTERM)),
        pytest.raises(StopRequested, match="stopped by SIGTERM after a checkpoint"),
    ):
        run_train(inputs, tmp_path / "run", over(1, LONG))


def ranks_of(stage: int) -> dict[int, psutil.Process]:
    """Return the ranks that a stage has started, by number."""
    found = {}
    for child in psutil.Process(stage).children():
        with suppress(psutil.NoSuchProcess):  # another child, which has ended meanwhile
            if "tasks.ranks" in child.cmdline():
                found[int(child.environ()["RANK"])] = child
    return found


def gone(process: psutil.Process) -> bool:
    """Wait until a process is not there any more."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    with suppress(psutil.NoSuchProcess):  # between two questions
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
    return True


def test_a_rank_whose_stage_was_gone_before_it_began_ends(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    file = tmp_path / "ranks" / "assignment.json"
    write_json(file, asdict(Assignment({}, {}, "", str(tmp_path), "", dead.pid, 1)))
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "RANK": "0", STAGE_PID: str(dead.pid)}
    command = [sys.executable, "-m", "tasks.ranks", str(file)]
    assert subprocess.run(command, env=environment, check=False).returncode == StopRequested.exit_code
    assert read_json(tmp_path / "ranks" / "0.json")["message"] == "the process that started this one is gone"


def test_three_skips_in_a_row_end_all_ranks_by_name(inputs: dict[str, Path], tmp_path: Path) -> None:
    """A learning rate that overflows: no rank has a finite loss any more."""
    with pytest.raises(TitheError, match="optimizer steps in a row were skipped") as error:
        run_train(inputs, tmp_path / "run", over(2, {"train": {"optimizer": {"rule": "sgd", "learning_rate": 1e30}}}))
    assert error.value.exit_code == DivergedError.exit_code
    assert len(events(tmp_path / "run", "skip")) == 3
