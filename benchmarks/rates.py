"""Learning rates of method S by rule, and how long it takes beside LoRA with AdamW, on the quickstart's task.

    sweep      every rule at rates a factor of about three apart: held-out accuracy (greedy) after training, and how far each step
               moves the weights. Every run is one of MLflow's, like any other campaign's (experiment `rates`)
    compare    stateless and LoRA + AdamW: seconds of training until held-out accuracy is above 0.85, and pass@1 by stage evaluate

Prompts, base and anchors are made once and copied, so a run costs its training only. Same prompts, seed and threads everywhere.

    python -m benchmarks.rates [sweep compare]      make bench-rates
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flows.workspaces import resolve_config
from tasks.registry import get_stage
from tasks.workspace import REPOSITORY, Workspace
from trainer.config import as_tree
from trainer.files import read_json, write_json
from trainer.metrics import METRICS, read_lines

RESULTS = Path(__file__).parent / "results"
PARTS = ("sweep", "compare")
PREPARED = ("prepare", "base", "anchors")
RATES = {
    "sgd": (1e-2, 3e-2, 1e-1, 3e-1, 1.0),
    "sign": (1e-5, 3e-5, 1e-4, 3e-4, 1e-3),
    "rms": (1e-5, 3e-5, 1e-4, 3e-4, 1e-3),
    "sinkhorn": (1e-5, 3e-5, 1e-4, 3e-4, 1e-3),
}
LORA_RATES = (1e-3, 3e-3, 1e-2)
GOAL = 0.85


def run_stages(workspace: Workspace, stages: Sequence[str]) -> str:
    """Run stages of a workspace, each in a process of its own; return what the first one that failed said."""
    workspace.root.mkdir(parents=True, exist_ok=True)
    write_json(workspace.root / "config.json", as_tree(workspace.config))
    for stage in stages:
        command = [sys.executable, "-m", "tasks", stage, "--workspace", str(workspace.root)]
        command += ["--config", str(workspace.root / "config.json")]
        done = subprocess.run(command, cwd=REPOSITORY, env=os.environ, capture_output=True, text=True, check=False)
        if done.returncode:
            return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return ""


def prepared(folder: Path, overrides: list[str]) -> Workspace:
    """Return the workspace whose prompts, base and anchors every run uses."""
    workspace = Workspace(folder / "prepared", resolve_config(REPOSITORY / "recipes" / "stateless.yaml", overrides))
    said = run_stages(workspace, PREPARED)
    if said:
        sys.exit(said)
    return workspace


def train(base: Workspace, name: str, overrides: list[str], stages: Sequence[str] = ("train",)) -> dict[str, Any]:
    """Train from the prepared base and return what came of it."""
    recipe = REPOSITORY / "recipes" / "stateless.yaml"
    workspace = Workspace(base.root.parent / name, resolve_config(recipe, [*overrides, "campaign.name=rates"]))
    for stage in PREPARED:
        artifact = get_stage(stage).artifact
        shutil.copytree(base.artifact(artifact), workspace.artifact(artifact), dirs_exist_ok=True)
    said = run_stages(workspace, stages)
    lines = [line["metrics"] for line in read_lines(workspace.run / "train" / METRICS)]
    found: dict[str, Any] = {"overrides": overrides, "failed": said, **learnt(lines)}
    evaluation = workspace.artifact("evaluation") / "evaluation.json"
    if evaluation.exists():
        found["evaluation"] = read_json(evaluation)
    return found


def learnt(lines: list[dict[str, float]]) -> dict[str, Any]:
    """Return accuracies, the time to the goal, and the size of steps, from a run's metrics."""
    seconds, reached, accuracies, moved = 0.0, None, [], []
    for line in lines:
        seconds += line.get("time/step_seconds", 0.0)
        if "heldout/accuracy" in line:
            accuracies.append(line["heldout/accuracy"])
            if reached is None and accuracies[-1] >= GOAL:
                reached = seconds
        if "update/relative" in line:
            moved.append(line["update/relative"])
    return {
        "before": accuracies[0] if accuracies else None,
        "after": accuracies[-1] if accuracies else None,
        "best": max(accuracies, default=None),
        "seconds": seconds,
        "seconds_to_goal": reached,
        "update_relative": sorted(moved)[len(moved) // 2] if moved else None,
        "skipped": sum(line.get("update/skipped", 0.0) for line in lines),
    }


def sweep(base: Workspace, common: list[str], rules: Sequence[str]) -> dict[str, Any]:
    """Train at every rate of every rule."""
    table = Table(title="held-out accuracy (greedy) by rule and learning rate")
    for column in ("rule", "rate", "before", "after", "best", "update/relative", "seconds to 0.85", "skipped"):
        table.add_column(column, justify="right")
    found: dict[str, Any] = {}
    for rule in rules:
        for rate in RATES[rule]:
            options = [f"train.optimizer.rule={rule}", f"train.optimizer.learning_rate={rate:g}"]
            one = found[f"{rule} {rate:g}"] = train(base, f"{rule}-{rate:g}", [*common, *options])
            cells = [one["before"], one["after"], one["best"], one["update_relative"], one["seconds_to_goal"], one["skipped"]]
            table.add_row(rule, f"{rate:g}", *("-" if value is None else f"{value:.3g}" for value in cells))
            write_json(RESULTS / "rates.json", {"sweep": found})
    Console().print(table)
    return found


def compare(base: Workspace, common: list[str]) -> dict[str, Any]:
    """Run both methods to the end and evaluate them; LoRA gets several learning rates and is judged by its fastest."""
    lora = ["train.method=lora", "train.optimizer.kind=adamw", "train.optimizer.max_grad_norm=1.0", "train.lora.rank=8"]
    lora += ["train.lora.alpha=16"]
    table = Table(title="until held-out accuracy is above 0.85, and pass@1 of stage evaluate")
    for column in ("method", "seconds to 0.85", "seconds in all", "pass@1"):
        table.add_column(column, justify="right")
    found: dict[str, Any] = {}
    cases: dict[str, list[str]] = {"stateless rms 1e-4": []}
    cases |= {f"LoRA + AdamW {rate:g}": [*lora, f"train.optimizer.learning_rate={rate:g}"] for rate in LORA_RATES}
    for name, options in cases.items():
        one = found[name] = train(base, name.replace(" ", "-").lower(), [*common, *options], ("train", "merge", "evaluate"))
        passed = one["evaluation"]["trained"]["pass@1"]["value"] if "evaluation" in one else None
        cells = [one["seconds_to_goal"], one["seconds"], passed]
        table.add_row(name, *("-" if cell is None else f"{cell:.3g}" for cell in cells))
    Console().print(table)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=PARTS)
    parser.add_argument("--rules", nargs="*", default=list(RATES), choices=RATES)
    parser.add_argument("--steps", type=int, default=30, help="of each run")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "campaigns" / "rates", help="where workspaces are made")
    parser.add_argument("--set", "-S", action="append", default=[], metavar="KEY=VALUE", help="change every campaign")
    given = parser.parse_args()
    common = [f"train.stages.0.steps={given.steps}", *given.set]
    base = prepared(given.folder.resolve(), common)
    results: dict[str, Any] = {"steps": given.steps}
    if "sweep" in given.parts:
        results["sweep"] = sweep(base, common, given.rules)
    if "compare" in given.parts:
        results["compare"] = compare(base, common)
    write_json(RESULTS / "rates.json", results)


if __name__ == "__main__":
    main()
