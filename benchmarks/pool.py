"""Throughput of the experience pool: one process puts samples in, another takes them out, at the same time.

    python -m benchmarks.pool [--samples 40000] [--url postgresql://...]

Expected on two cores: at least 2,000 samples of 2 KB a second in and out on SQLite. Writes benchmarks/results/pool.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

from trainer.experience.database import Database
from trainer.experience.pool import Pool, Terms
from trainer.types import Completion, Group, Prompt, Sample, Verdict

GROUP_SIZE, GROUPS_PER_STEP, GROUPS_PER_CLAIM, TOKENS = 8, 32, 8, 224  # 224 tokens: 8 bytes each and about 200 of text
PROMPTS = {f"p{i}": Prompt(f"p{i}", "main", "train", "12+34=", (1, 2, 10, 3, 4, 11), "46") for i in range(256)}
RESULTS = Path(__file__).parent / "results"


def terms(groups: int) -> Terms:
    capacity = 4096 // GROUP_SIZE
    return Terms((groups,), GROUPS_PER_STEP, GROUP_SIZE, 1, 10**9, capacity, capacity, capacity * 3 // 4)


def sample(prompt: Prompt, index: int) -> Sample:
    completion = Completion(prompt.id, index, tuple(range(TOKENS)), (-0.5,) * TOKENS, "stop", 0, "s0")
    return Sample(prompt, completion, "x" * 200, Verdict("ok", float(index % 2), {"exact": 1.0}, 0.001, "", {"exact": "ok"}))


def put(url: str, key: str, groups: int) -> None:
    pool = Pool(Database(url, key, 60.0), "bench", PROMPTS, "s0", 60.0)
    made = {prompt.id: Group(prompt, tuple(sample(prompt, i) for i in range(GROUP_SIZE))) for prompt in PROMPTS.values()}
    while True:
        taken = pool.take_orders(GROUPS_PER_CLAIM, 0, terms(groups), lambda stage, ordinal: f"p{ordinal % 256}")
        if taken.orders:
            pool.deliver([(order, made[order.prompt_id]) for order in taken.orders])
        elif taken.denial == "done":
            break
        else:
            time.sleep(0.005)
    pool.close()


def measure(url: str, num_samples: int) -> dict[str, float]:
    """Return samples per second through the pool, and the longest time that the taker waited for one transaction."""
    steps = num_samples // (GROUP_SIZE * GROUPS_PER_STEP)
    key = f"bench {time.time()}"
    pool = Pool(Database(url, key, 60.0), "bench", PROMPTS, "learner", 60.0)
    process = multiprocessing.get_context("spawn").Process(target=put, args=(url, key, steps * GROUPS_PER_STEP))
    process.start()
    while not pool.counts():
        time.sleep(0.005)
    begin, step, longest = time.perf_counter(), 0, 0.0
    while step < steps:
        asked = time.perf_counter()
        claim = pool.claim(GROUPS_PER_STEP, 0, 0)
        longest = max(longest, time.perf_counter() - asked)
        if claim is None:
            time.sleep(0.005)
            continue
        step += 1
        pool.consume(claim, step, step - 1, step)
    seconds = time.perf_counter() - begin
    process.join()
    pool.database.remove()
    pool.close()
    return {
        "samples": steps * GROUPS_PER_STEP * GROUP_SIZE,
        "samples_per_second": step * GROUPS_PER_STEP * GROUP_SIZE / seconds,
        "longest_wait_seconds": longest,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=40_000)
    parser.add_argument("--url", help="a PostgreSQL database; default: SQLite in a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        url = options.url or f"sqlite:///{directory}/experience.db"
        result = measure(url, options.samples)
    result |= {"load_average": os.getloadavg()[0], "cores": os.cpu_count() or 1}
    name = "pool_postgresql" if options.url else "pool"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"{result['samples_per_second']:,.0f} samples/s in and out, longest wait {result['longest_wait_seconds']:.2f} s")


if __name__ == "__main__":
    main()
