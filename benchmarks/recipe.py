"""The quickstart's task learnt by both methods, train stages side by side: the default campaign, and recipes/lora-async.yaml.

    python -m benchmarks.recipe [--steps 80]

Prompts, base and anchors are made once. Expected: async ends within 0.03 of sync's held-out accuracy, in at most 1.3 times its
wall time; no sample is older than the bound; the pool is waited for in less than 2 % of the time. About four minutes on two idle
cores. Writes benchmarks/results/recipe.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from trainer.config import as_tree, load_config
from trainer.files import write_json
from trainer.metrics import read_lines

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
RECIPES = {"sync": REPOSITORY / "params.yaml", "async": REPOSITORY / "recipes" / "lora-async.yaml"}
PREPARED = ("prepare", "base", "anchors")
WITHIN, SLOWER, WAITING = 0.03, 1.3, 0.02


def run_stages(root: Path, stages: tuple[str, ...]) -> tuple[float, float]:
    """Run stages in a workspace and return their wall seconds and CPU seconds, of all processes."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    for stage in stages:
        options = ["--workspace", str(root), "--config", str(root / "config.json"), "--no-tracking"]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        subprocess.run([sys.executable, "-m", "tasks", stage, *options], env=environment, cwd=REPOSITORY, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(name: str, folder: Path, steps: int) -> dict[str, Any]:
    """Train by one recipe and return what came of it."""
    overrides = [f"train.stages.0.steps={steps}"] if steps else []
    config = load_config(RECIPES[name], overrides, RECIPES["sync"])
    root = folder / name
    made = folder / "sync" / "artifacts"
    if root != made.parent:
        shutil.copytree(made, root / "artifacts", ignore=shutil.ignore_patterns("policy*"))
    write_json(root / "config.json", as_tree(config))
    run_stages(root, PREPARED)
    wall, cpu = run_stages(root, ("train",))
    [path] = root.glob("runs/*/train/metrics.jsonl")
    lines = [line["metrics"] for line in read_lines(path)]
    found = {
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "heldout": [m["heldout/accuracy"] for m in lines if "heldout/accuracy" in m],
    }
    if name == "async":
        found["lag_max"] = max(m["lag/max"] for m in lines if "lag/max" in m)
        found["lag_bound"] = config.train.sync.max_policy_update_lag
        steps = [(m["pool/wait_fraction"], m["time/step_seconds"]) for m in lines if "pool/wait_fraction" in m]
        found["wait_fraction"] = sum(share * seconds for share, seconds in steps) / sum(seconds for _, seconds in steps)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=0, help="of each; 0 takes the recipes' own")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = {name: measure(name, Path(directory), options.steps) for name in RECIPES}
    one, other = result["sync"], result["async"]
    ratio, apart = other["wall_seconds"] / one["wall_seconds"], one["heldout"][-1] - other["heldout"][-1]
    print(f"{'':6} {'held out':>17} {'wall':>8} {'CPU':>8}")
    for name, found in result.items():
        first, last = found["heldout"][0], found["heldout"][-1]
        print(f"{name:6} {first:7.3f} -> {last:6.3f} {found['wall_seconds']:6.0f} s {found['cpu_seconds']:6.0f} s")
    checks = {
        f"held-out accuracy {apart:+.3f} behind (at most {WITHIN})": apart <= WITHIN,
        f"{ratio:.2f}x the wall time (at most {SLOWER})": ratio <= SLOWER,
        f"oldest sample {other['lag_max']:.0f} updates (bound {other['lag_bound']})": other["lag_max"] <= other["lag_bound"],
        f"pool waited for in {other['wait_fraction']:.2%} of the time (below {WAITING:.0%})": other["wait_fraction"] < WAITING,
    }
    for said, met in checks.items():
        print(f"{'ok ' if met else 'NOT'} {said}")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "recipe.json").write_text(json.dumps({**result, "ratio": ratio, "behind": apart}, indent=2) + "\n")


if __name__ == "__main__":
    main()
