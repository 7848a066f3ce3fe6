"""What six trials cost beside one: a sweep of the quickstart over its learning rate, and one training stage by itself.

one      `tithe run`: the seconds of its train stage, with all cores
sweep    `tithe sweep`, six learning rates, from nothing: prompts, base and anchors once, then trials side by side

python -m benchmarks.sweep            make bench-sweep       expected: at most 6 training stages and 20 %; 3 min on 2 cores
python -m benchmarks.sweep -S train.stages.0.steps=3         shrunken: it works, the share says nothing
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from flows.workspaces import resolve_config
from tasks.record import read_record
from tasks.workspace import REPOSITORY, Workspace
from trainer.files import write_json

RESULTS = Path(__file__).parent / "results"
RATES = "1.0e-4,1.5e-4,2.0e-4,2.5e-4,3.0e-4,4.0e-4"
NUM_TRIALS, BOUND = 6, 1.2


def tithe(*words: str) -> float:
    """Run a command and return its wall seconds."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", *words], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"tithe {' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a sweep costs beside one training stage.")
    parser.add_argument("--set", "-S", action="append", default=[], metavar="KEY=VALUE", help="change the default campaign")
    overrides: list[str] = parser.parse_args().set
    options = [word for override in overrides for word in ("-S", override)]
    with tempfile.TemporaryDirectory(prefix="tithe-sweep-") as name:
        place = Path(name)
        os.environ["TITHE_STATE"] = str(place / "state")
        tithe("initialise")
        shutil.copytree(place / "state", place / "fresh")
        tithe("run", *options, "--workspace", str(place / "one"))
        record = read_record(Workspace(place / "one", resolve_config(None, overrides)).run / "train")
        assert record is not None
        assert record.ended is not None
        one = record.ended - record.started
        print(f"one training stage: {one:.1f} s", flush=True)
        os.environ["TITHE_STATE"] = str(place / "fresh")  # nothing comes out of the first run's cache
        seconds = tithe("sweep", f"train.optimizer.learning_rate={RATES}", *options, "--workspace", str(place / "sweep"))
    share = seconds / (NUM_TRIALS * one)
    print(f"{NUM_TRIALS} trials: {seconds:.1f} s, {share:.2f} times {NUM_TRIALS} training stages")
    print(f"{'within' if share <= BOUND else 'NOT within'} {BOUND:g} times")
    write_json(RESULTS / "sweep.json", {"train_seconds": one, "sweep_seconds": seconds, "share": share})


if __name__ == "__main__":
    main()
