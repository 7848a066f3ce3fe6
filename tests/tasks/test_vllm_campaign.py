"""An async campaign's train stage on the real engine: the stage starts the server, which is killed in the midst of it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.registry import get_stage
from tasks.stage import run_stage
from tasks.workspace import Workspace
from tests.tasks.test_async import GROUPS, TREE, Trial, is_alive
from trainer.config import validate
from trainer.config.load import lay_over
from trainer.metrics import read_lines
from trainer.schedule.sampling import SYNC_MODE

PYTHON = Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "python"
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM's environment is not there (make vllm-env)"),
    pytest.mark.timeout(2400),
]

STEPS, LAG = 10, 4
DIFFERENCE: dict[str, Any] = {
    "base": {"scratch": {"hidden_size": 64, "num_heads": 2}},  # vLLM's attention on a CPU wants heads of 32
    "train": {
        "sampler": {"kind": "vllm", "slots": 16, "vllm": {"environment": {"VLLM_CPU_KVCACHE_SPACE": "1"}}},
        "sync": {"mode": "auto", "sync_every": 4, "max_policy_update_lag": LAG},
        "stages": [{"steps": STEPS}],
        "watchdog": {"start_seconds": 2000.0, "deadline_seconds": 600.0},
    },
}


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    config = validate(lay_over(TREE, DIFFERENCE))
    workspace = Workspace(tmp_path, config)
    for name in ("prepare", "base", "anchors"):
        run_stage(workspace, get_stage(name))
    trial = Trial(tmp_path, config)
    yield trial
    if trial.process is not None and trial.process.poll() is None:
        trial.process.terminate()
        trial.process.wait(120)


def wait_until(trial: Trial, ready: Callable[[], Any]) -> None:
    end = time.monotonic() + 2000
    while not ready():
        assert trial.process is not None
        assert trial.process.poll() is None, (trial.root / "log").read_text()
        assert time.monotonic() < end
        time.sleep(0.2)


def test_a_campaign_on_the_engine_survives_its_server(trial: Trial) -> None:
    trial.start()
    log = trial.run / "samplers" / "s0" / "events.jsonl"
    wait_until(trial, lambda: len(trial.steps()) >= 2 if (trial.run / "experience.db").exists() else False)
    server = json.loads((trial.run / "samplers" / "s0" / "vllm.json").read_text())
    os.killpg(server["pid"], signal.SIGKILL)  # the server and its engine, as the kernel does when memory is short
    trial.finish()
    (restart,) = trial.events("restart")
    assert "vLLM" in restart["reason"]
    assert "SIGKILL" in restart["reason"]
    lines = {line["step"]: line["metrics"] for line in read_lines(trial.run / "metrics.jsonl")}
    assert sorted(lines) == list(range(1, STEPS + 1))
    for metrics in lines.values():
        assert metrics["lag/max"] <= LAG
        assert metrics["mismatch/mean_abs_logprob"] < 0.2
        assert metrics["mismatch/probe"] < 1e-3
    on_policy = [metrics for metrics in lines.values() if metrics["lag/max"] == 0]
    assert all(metrics["mismatch/mean_abs_logprob"] < 1e-3 for metrics in on_policy)
    pool = trial.pool()
    try:
        taken = pool.fact(SYNC_MODE)
        steps = pool.steps()
    finally:
        pool.close()
    assert taken in ("adapter", "merge")
    assert len({group for step in steps for group in step.group_ids}) == STEPS * GROUPS  # none lost, none used twice
    measured = [event for event in read_lines(log) if "measured how" in event["reason"]]
    assert len(measured) == 1  # once a run, not once a start
    assert "tokens/s" in measured[0]["reason"]
    pids = (server["pid"], json.loads((log.parent / "vllm.json").read_text())["pid"])
    end = time.monotonic() + 300
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.2)
