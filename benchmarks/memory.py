"""Bytes per parameter while training: method S beside AdamW, SGD and LOMO, on a random Llama.

One process a case; the peak of its resident memory above what it was once everything was imported and loaded, with weights;
median and range of several rounds. AdamW, SGD and LOMO hold float32 weights, as they need on a CPU, and checkpoint their
activations; the same two micro-batches everywhere. LOMO has no accumulation and takes each of them as a step. Random weights:
no claim of quality.

    python -m benchmarks.memory         make bench-memory         expected: at most 2.6 for bfloat16 (the limit is 2.0)
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.models import Shape, environment, forget_peak, memory, plain_step, stateless_step, warm_up, works
from trainer.files import write_json

RESULTS = Path(__file__).parent / "results"
CASES = ("adamw", "sgd", "lomo", "stateless-float32", "stateless-split", "stateless-bfloat16", "tiered-bfloat16")


def child(case: str, shape: Shape, steps: int, columns: int) -> dict[str, Any]:
    """Measure one case in this process."""
    torch.set_num_threads(1)
    given = works(shape, num_micro_batches=2, rows=1, columns=columns)
    if case == "lomo":
        __import__("lomo_optim")
    warm_up()
    base = forget_peak()
    method, _, dtype = case.partition("-")
    with tempfile.TemporaryDirectory(prefix="tithe-bench-") as directory:
        if method in ("stateless", "tiered"):
            tiers = Path(directory) / "tiers" if method == "tiered" else None
            step, _ = stateless_step(shape, "float32" if dtype == "float32" else "bfloat16", given, tiers, split=dtype == "split")
        else:
            step = plain_step(shape, method, given)
        seconds = []
        for _ in range(steps):
            begin = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begin)
    peak = memory("VmHWM") - base
    return {"bytes_per_parameter": peak / shape.num_parameters, "peak_bytes": peak, "step_seconds": statistics.median(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--columns", type=int, default=128, help="tokens of a micro-batch")
    parser.add_argument("--cases", nargs="*", default=CASES, choices=CASES)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    shape = Shape(given.hidden, given.hidden * 11 // 4, given.layers)
    if given.case:
        print(json.dumps(child(given.case, shape, given.steps, given.columns)))
        return
    table = Table(title=f"{shape.num_parameters / 1e6:.0f} M parameters, {2 * given.columns} tokens a step, peak above imports")
    for column in ("case", "bytes/parameter", "range", "seconds/step"):
        table.add_column(column)
    results: dict[str, Any] = {"num_parameters": shape.num_parameters, "rounds": given.rounds, "cases": {}}
    for case in given.cases:
        command = [sys.executable, "-m", "benchmarks.memory", "--case", case, "--steps", str(given.steps)]
        command += ["--hidden", str(given.hidden), "--layers", str(given.layers), "--columns", str(given.columns)]
        runs = []
        for _ in range(given.rounds):
            done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
        taken = sorted(run["bytes_per_parameter"] for run in runs)
        seconds = statistics.median(run["step_seconds"] for run in runs)
        table.add_row(case, f"{statistics.median(taken):.2f}", f"{taken[0]:.2f} - {taken[-1]:.2f}", f"{seconds:.1f}")
        results["cases"][case] = runs
        write_json(RESULTS / "memory.json", results)
    Console().print(table)


if __name__ == "__main__":
    main()
