"""A real short run: planned before, measured after, both in MLflow's own store, and what later plans learn from it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.plan import Asked, beside, calibrate, calibrated, gate, gather, prepared_lengths, quick_hardware, record_measurement
from tasks.record import finish
from tasks.registry import get_stage
from tasks.stage import run_stage
from tasks.tracking import Mirror, Sidecar, begin_campaign
from tasks.workspace import REPOSITORY, Workspace
from trainer.config import validate
from trainer.metrics import METRICS, read_lines
from trainer.plan.hardware import Hardware
from trainer.plan.plan import make_plan
from trainer.plan.request import plan_request

pytestmark = pytest.mark.smoke

CAMPAIGN: dict[str, Any] = {
    "campaign": {"name": "small"},
    "prepare": {
        "sources": [
            {
                "source": "reasoning_gym:basic_arithmetic",
                "num_rows": 60,
                "prompt_template": "{expression}=",
                "remove_whitespace": True,
                "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+"]},
            }
        ],
        "heldout_fraction": 0.2,
    },
    "base": {
        "source": "scratch",
        "scratch": {
            "alphabet": "0123456789+-()=",
            "hidden_size": 32,
            "num_heads": 2,
            "steps": 8,
            "decay_steps": 0,
            "batch_size": 8,
        },
    },
    "train": {
        "method": "lora",
        "lora": {"rank": 4, "alpha": 8},
        "optimizer": {"learning_rate": 1e-3},
        "batch": {"prompts_per_step": 4, "group_size": 4},
        "sampling": {"max_completion_tokens": 4},
        "heldout": {"every_steps": 0},
        "checkpoints": {"every_steps": 4},
        "stages": [{"steps": 4}],
    },
    "reward": {"verifier": "exact"},
    "preflight": {"num_prompts": 0},
}


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory whose MLflow store was made in a process of its own, as always."""
    state = tmp_path_factory.mktemp("state")
    environment = {**os.environ, "TITHE_STATE": str(state), "PYTHONPATH": str(REPOSITORY)}
    environment.pop("MLFLOW_TRACKING_URI", None)
    subprocess.run([sys.executable, "-m", "tasks.tracking", "initialise"], cwd=REPOSITORY, env=environment, check=True)
    return state


@pytest.fixture(scope="module")
def workspace(state: Path, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A campaign that was planned, ran its training, and was measured."""
    workspace = Workspace(tmp_path_factory.mktemp("campaign"), validate(CAMPAIGN))
    workspace.claim_run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TITHE_STATE", str(state))
        begin_campaign(workspace)
        assert any("plan: fits" in sentence for sentence in gate(workspace))
        for name in ("prepare", "base", "anchors", "train"):
            run_stage(workspace, get_stage(name))
        record_measurement(workspace)
        finish(workspace.run, "FINISHED")
    return workspace


@pytest.fixture(autouse=True)
def same_state(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITHE_STATE", str(state))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def test_prediction_and_measurement_stand_in_mlflow(workspace: Workspace, state: Path) -> None:
    mirror = Mirror(f"sqlite:///{state / 'mlflow.db'}")
    mirror.sync(workspace.run)
    metrics = mirror._client.get_run(Sidecar.read(workspace.run).run_id).data.metrics
    for key in (
        "peak_bytes",
        "sample_bytes",
        "learn_bytes",
        "step_seconds",
        "sample_seconds",
        "learn_seconds",
        "tokens_per_second",
    ):
        assert metrics[f"plan/predicted_{key}"] > 0
        assert metrics[f"plan/measured_{key}"] > 0
        assert metrics[f"plan/ratio_{key}"] == pytest.approx(metrics[f"plan/predicted_{key}"] / metrics[f"plan/measured_{key}"])
    assert metrics["plan/measured_learn_bytes"] <= metrics["plan/measured_peak_bytes"]
    assert [row[0] for row in beside(workspace.run)][:2] == ["memory, highest", "memory while sampling, highest"]


def test_a_run_calibrates_this_machine(workspace: Workspace) -> None:
    config = workspace.config
    hardware = quick_hardware(config)
    assert hardware is not None
    measured = {row[0]: row[2] for row in beside(workspace.run)}
    calibrate(workspace.run, hardware)
    learned = calibrated(hardware)
    assert learned.notes[-1] == f"calibrated on {workspace.run_id}"

    def seconds(known: Hardware) -> tuple[str, str]:
        lengths = {**prepared_lengths(workspace), "completion_tokens": completion_tokens(workspace)}
        schedule = make_plan(plan_request(config, known, lengths=lengths)).schedule
        return f"{schedule.sample_seconds:.3g} s", f"{schedule.train_seconds + schedule.score_seconds:.3g} s"

    phases = (measured["sampling in a step"], measured["learning in a step"])
    assert seconds(hardware) != phases
    assert seconds(learned) == phases
    # every later plan on this machine uses it, and no other machine's does
    assert gather(Asked(hardware="h100-80gb", model="qwen3-8b")).hardware.efficiency.train == 1.0


def completion_tokens(workspace: Workspace) -> float:
    lines = [line["metrics"] for line in read_lines(workspace.run / "train" / METRICS)]
    lengths = [line["completion/length_mean"] for line in lines if "time/step_seconds" in line]
    return sum(lengths) / len(lengths)


def test_calibration_from_the_command_line_changes_the_next_plan(workspace: Workspace, state: Path) -> None:
    def tithe(*arguments: str) -> str:
        command = [sys.executable, "-m", "flows.cli", "plan", *arguments]
        environment = {**os.environ, "TITHE_STATE": str(state), "COLUMNS": "200"}
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    (state / "calibration.json").unlink(missing_ok=True)
    assert f"learned from {workspace.run_id}" in tithe("--calibrate", str(workspace.run))
    assert f"calibrated on {workspace.run_id}" in tithe()
