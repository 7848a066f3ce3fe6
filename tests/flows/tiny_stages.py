"""Stages that take no time and do what `tiny.json` in the workspace says: for tests of the platform around them.

    {"seconds": 0.05, "steps": 5, "crash_at": 3, "kill_at": 3, "hang_at": 3, "config_error": true, "alarm_at": 3,
     "wait_in": "report", "wait_at": 3, "ballast_bytes": 100000}

A crash, kill or hang happens at the first attempt only, and leaves a mark (`hang_at.happened`); `wait_in` is a stage, `wait_at` a
step of training that waits until it is killed or the wish is gone.
Imports nothing heavy.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from tasks.registry import Stage, StagePaths
from trainer.config import CampaignConfig
from trainer.errors import ConfigError, StopRequested
from trainer.files import read_json, read_manifest, write_json
from trainer.metrics import RunWriter

CODE = ("tests/flows/tiny_stages.py",)


def plan(paths: StagePaths) -> dict[str, Any]:
    file = paths.run.parents[2] / "tiny.json"
    return dict(read_json(file)) if file.exists() else {}


def note(paths: StagePaths, name: str) -> None:
    """Write down that a stage really ran."""
    with open(paths.run.parents[2] / "made.txt", "a") as made:
        made.write(name + "\n")


def wait_if_planned(paths: StagePaths, name: str) -> None:
    """Stay in a stage as long as the plan says so."""
    while plan(paths).get("wait_in") == name:
        RunWriter(paths.run).heartbeat("waiting")
        time.sleep(0.05)


def say_threads() -> None:
    """Print on how many threads this stage would compute."""
    torch = sys.modules.get("torch")  # there where it was forked
    print(f"threads: {torch.get_num_threads() if torch else os.environ['OMP_NUM_THREADS']}", flush=True)


def run_prepare(config: CampaignConfig, paths: StagePaths) -> dict[str, Any]:
    note(paths, "prepare")
    say_threads()
    wait_if_planned(paths, "prepare")
    (paths.out / "train.jsonl").write_text(json.dumps({"heldout": config.prepare.heldout_fraction}) + "\n")
    return {"num_prompts": 1}


def once(paths: StagePaths, wish: str, step: int) -> bool:
    """Whether a misfortune is planned for this step and has not happened yet."""
    marker = paths.run / f"{wish}.happened"
    if plan(paths).get(wish) != step or marker.exists():
        return False
    marker.touch()
    return True


def run_train(config: CampaignConfig, paths: StagePaths) -> dict[str, Any]:
    """Count to `steps`, with a checkpoint after every step: the model of a real trainer."""
    wishes = plan(paths)
    note(paths, "train")
    say_threads()
    wait_if_planned(paths, "train")
    if wishes.get("config_error"):
        raise ConfigError("train.lora.rank", 3, "planned mistake; set another")
    checkpoint = paths.run / "checkpoint.json"
    step = read_json(checkpoint)["step"] if checkpoint.exists() else 0
    resumed = step
    writer = RunWriter(paths.run, resume_step=step)
    steps = wishes.get("steps", 5)
    try:
        rate = config.train.optimizer.learning_rate
        while step < steps:
            share = (step + 1) / steps
            writer.metrics(step + 1, {"reward/mean": share, "lr": rate, "heldout/reward_mean": share * rate * 1e3})
            step += 1  # a checkpoint of a step never lacks its line
            writer.heartbeat("learning", step, steps)
            while plan(paths).get("wait_at") == step:
                writer.heartbeat("waiting", step, steps)
                time.sleep(0.05)
            deadline = time.monotonic() + wishes.get("seconds", 0.01)
            while time.monotonic() < deadline:
                time.sleep(0.01)
            if once(paths, "alarm_at", step):
                writer.event("alarm", "KL to the reference is 0.4", step=step, signal="kl", value=0.4, threshold=0.3)
            if once(paths, "crash_at", step):
                raise RuntimeError("planned crash")
            if once(paths, "kill_at", step):
                os.kill(os.getpid(), signal.SIGKILL)
            if once(paths, "hang_at", step):
                time.sleep(600)
            write_json(checkpoint, {"step": step, "ballast": "x" * wishes.get("ballast_bytes", 0) * step})
    except StopRequested:
        write_json(checkpoint, {"step": step, "stopped": True})
        raise
    (paths.out / "curve.csv").write_text("step,reward_mean\n" + "".join(f"{n},{n / steps}\n" for n in range(1, steps + 1)))
    (paths.out / "adapter.bin").write_bytes(str(config.train.optimizer.learning_rate).encode())
    if checkpoint.exists():
        checkpoint.unlink()
    return {"policy_version": steps, "resumed_from": resumed} if wishes.get("tell") else {"policy_version": steps}


def run_evaluate(config: CampaignConfig, paths: StagePaths) -> dict[str, Any]:
    note(paths, "evaluate")
    wait_if_planned(paths, "evaluate")
    assert read_manifest(paths.inputs["policy"]) is not None
    three = {"value": 0.9, "low": 0.85, "high": 0.95}
    write_json(paths.out / "evaluation.json", {"base": {"pass@1": 0.4}, "trained": {"pass@1": three}, "num_prompts": 16})
    return {}


def run_report(config: CampaignConfig, paths: StagePaths) -> dict[str, Any]:
    note(paths, "report")
    wait_if_planned(paths, "report")
    (paths.out / "report.html").write_text(f"<h1>{config.campaign.name}</h1>")
    return {}


class TinyStage(Stage):
    @property
    def function(self) -> Any:
        return {"prepare": run_prepare, "train": run_train, "evaluate": run_evaluate, "report": run_report}[self.name]


STAGES: tuple[Stage, ...] = (
    TinyStage("prepare", "prompts", (), ("prepare", "campaign.seed"), CODE),
    TinyStage(
        "train",
        "policy",
        ("prompts",),
        ("train", "campaign.seed"),
        CODE,
        plots=(("curve.csv", ("reward_mean",)),),
        upload="stage",
    ),
    TinyStage("evaluate", "evaluation", ("prompts", "policy"), ("evaluate",), CODE, metrics=("evaluation.json",), upload="stage"),
    TinyStage("report", "report", ("evaluation",), ("report", "campaign.name"), CODE, upload="campaign"),
)
