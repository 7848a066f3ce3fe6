"""Weights on a disk: memory by depth, step time by tokens, a model larger than its limit, and accelerate's disk offload.

    depth     peak memory of a step for 8, 16 and 32 layers of one width, weights tiered
    time      seconds of a step: resident, tiered with prefetch, tiered without; by tokens a step. Nothing stays in the page
              cache, so every read is from the disk
    limit     a step of a model at least four times as large as the memory it is allowed (RLIMIT_DATA): tiered, resident, AdamW
    forward   scoring of a batch from the disk, float32 on both sides: tithe (units read ahead) beside accelerate (layers that it
              keeps in memory), each with every read from the disk and with all files in the page cache

One process a case, median of several rounds. Random weights: no claim of quality.

    python -m benchmarks.tiers [depth time limit forward]        make bench-tiers        expected: the table in docs/method-s.md
"""

from __future__ import annotations

import argparse
import json
import os
import resource
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

from benchmarks.models import Shape, environment, forget_peak, memory, plain_step, stateless_step, warm_up, whole_model, works
from trainer.files import write_json

RESULTS = Path(__file__).parent / "results"
PARTS = ("depth", "time", "limit", "forward")


def shape_of(layers: int, hidden: int) -> Shape:
    return Shape(hidden, hidden * 8 // 3 // 64 * 64, layers, vocabulary=8192, heads=8)


def timed(step: Any, rounds: int, before: Any = lambda: None) -> float:
    seconds = []
    for number in range(rounds + 1):
        before()
        begin = time.perf_counter()
        step()
        if number:  # the first one warms up
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def offloaded(shape: Shape, given: Any, directory: Path, kept: int, drop_cache: bool) -> Any:
    """Return a function that scores a batch with accelerate's disk offload, and one that empties the page cache of its files."""
    from accelerate import dispatch_model

    places = {f"model.layers.{index}": "cpu" if index < kept else "disk" for index in range(shape.layers)}
    places |= {"model.rotary_emb": "cpu"} | dict.fromkeys(("model.embed_tokens", "model.norm", "lm_head"), "disk")
    model: Any = dispatch_model(whole_model(shape, torch.float32), places, main_device="cpu", offload_dir=str(directory))

    @torch.no_grad()
    def step() -> None:
        for work in given:
            logits = model(input_ids=work.input_ids_BS, use_cache=False).logits[0]
            logits.gather(-1, work.ids_TK) - torch.logsumexp(logits, -1, keepdim=True)

    def forget() -> None:
        for path in directory.iterdir() if drop_cache else ():
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    return step, forget


def child(case: str, shape: Shape, micro_batches: int, columns: int, rounds: int, limit_bytes: int) -> dict[str, Any]:
    """Measure one case in this process."""
    torch.set_num_threads(1)
    given = works(shape, micro_batches, rows=1, columns=columns)
    warm_up()
    base = forget_peak()
    if limit_bytes:
        data = (
            int(next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmData")).split()[1]) * 1024
        )
        resource.setrlimit(resource.RLIMIT_DATA, (data + limit_bytes, data + limit_bytes))
    with tempfile.TemporaryDirectory(prefix="tithe-bench-") as folder:
        directory = Path(folder) / "tiers"
        engine, before = None, lambda: None
        kind, _, setting = case.partition(":")
        drop_cache = not limit_bytes and "cached" not in setting
        if kind in ("adamw", "sgd"):
            step = plain_step(shape, kind, given)
        elif kind == "accelerate":
            step, before = offloaded(shape, given, directory, int(setting[0]), drop_cache)
        else:
            prefetch = 0 if kind == "no-prefetch" else int(setting[0]) if setting else 2
            dtype = "float32" if kind == "forward" else "bfloat16"
            tiers = None if kind == "resident" else directory
            step, engine = stateless_step(shape, dtype, given, tiers, prefetch, drop_cache=drop_cache)
            if kind == "forward":
                running, step = engine, lambda: running.score(given)
        if kind in ("accelerate", "forward"):
            base = min(base, forget_peak())
        seconds = timed(step, rounds, before)
        facts = {"peak_bytes": memory("VmHWM") - base, "step_seconds": seconds}
        if engine is not None:
            facts |= engine.residency.source.metrics()
            engine.residency.source.shutdown()
    return facts


def run(
    case: str, layers: int, hidden: int, micro_batches: int, columns: int, rounds: int, limit_bytes: int = 0
) -> dict[str, Any]:
    """Measure one case in a process of its own; one that dies says so."""
    numbers = [layers, hidden, micro_batches, columns, rounds, limit_bytes]
    command = [sys.executable, "-m", "benchmarks.tiers", "--case", case, "--numbers", *(str(number) for number in numbers)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["killed"])[-1]
        return {"failed": last[:200]}
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts | {"parameters": shape_of(*numbers[:2]).num_parameters}


def megabytes(facts: dict[str, Any]) -> str:
    return facts.get("failed", "") or f"{facts['peak_bytes'] / 1e6:.0f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=PARTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12, help="of `time` and `forward`")
    parser.add_argument("--deep", type=int, default=72, help="layers of `limit`")
    parser.add_argument("--limit", type=int, default=250, help="MB that `limit` allows")
    parser.add_argument("--tokens", type=int, nargs="*", default=(8, 32, 128, 512))
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--numbers", type=int, nargs=6, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        layers, hidden, *rest = given.numbers
        print(json.dumps(child(given.case, shape_of(layers, hidden), *rest)))
        return
    results: dict[str, Any] = {"hidden": given.hidden, "rounds": given.rounds}
    table = Table(title=f"hidden size {given.hidden}, bfloat16 on disk, one thread")
    for column in ("part", "case", "peak", "seconds/step", "waited for the disk"):
        table.add_column(column)

    def row(part: str, name: str, case: str, *numbers: int) -> None:
        facts = run(case, *numbers)
        results.setdefault(part, {})[name] = facts
        seconds, stalled = facts.get("step_seconds"), facts.get("tiers/stalled_seconds")
        table.add_row(part, name, megabytes(facts), f"{seconds:.2f}" if seconds else "-", f"{stalled:.2f} s" if stalled else "-")
        write_json(RESULTS / "tiers.json", results)

    if "depth" in given.parts:
        for layers in (8, 16, 32):
            row("depth", f"{layers} layers", "tiered", layers, given.hidden, 2, 32, 1, 0)
    if "time" in given.parts:
        for tokens in given.tokens:
            for case in ("resident", "tiered", "no-prefetch"):
                row("time", f"{case}, {tokens} tokens", case, given.layers, given.hidden, 1, tokens, given.rounds, 0)
    if "limit" in given.parts:
        for case in ("tiered", "resident", "adamw"):
            row("limit", f"{case}, {given.limit} MB allowed", case, given.deep, given.hidden, 1, 32, 1, given.limit * 10**6)
    if "forward" in given.parts:
        for cache in ("", "cached"):
            for case in ("forward:1", "forward:0", "accelerate:2", "accelerate:0"):
                name = case.replace("forward", "tithe") + (" ahead" if "forward" in case else " kept")
                name += ", page cache" if cache else ", disk"
                row("forward", name, case + cache, given.layers, given.hidden, 1, 128, given.rounds, 0)
    Console().print(table)


if __name__ == "__main__":
    main()
