"""What judging costs, and whether hostile answers are contained: verdicts per second, deadlines, the next call.

    python -m benchmarks.rewards            make bench-rewards

Expected on 2 idle cores: at least 50 small code verdicts a second and 300 math verdicts a second, warm; every call past its
limit dead within 1 s of it; no hostile program right, none slowing the next call by more than 2x. The hostile programs are
those of tests/trainer/reward/hostile.py. "The next call" is an honest answer on the same worker, beside the same answer after
an honest one; one that looks slow is measured again, because a single call of some ten milliseconds is easily disturbed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.table import Table

from trainer.config.schema import Reward
from trainer.files import write_json
from trainer.reward import build_verifier
from trainer.reward.code import CodeChannel, choose_kind, to_job
from trainer.reward.pool import Pool
from trainer.reward.sandbox.jail import Limits
from trainer.types import Prompt

RESULTS = Path(__file__).parent / "results"
HOSTILE = Path(__file__).parents[1] / "tests" / "trainer" / "reward" / "hostile.py"
LIMIT_SECONDS = 1.0
ATTEMPTS = 3  # a next call that looks slow is measured again: a call of 20 ms is easily disturbed
HONEST, HONEST_SCRIPT = "def add(a, b):\n    return a + b\n", "a, b = map(int, input().split())\nprint(a + b)\n"
MATH = (  # gold, answer; {n} is another number every time, so that nothing is found in a cache
    ("{n}200", "#### {n},200"),
    ("{n}", "So she makes ${n} every day."),
    ("{n}/2", r"so it is \boxed{\frac{{n}}{2}}"),
    ("{n}", r"\boxed{1{n}}"),
    (r"\frac{\sqrt{{n}}}{{n}}", r"\boxed{\frac{1}{\sqrt{{n}}}}"),
    (r"(-\infty, {n})", r"\boxed{(-\infty, {n})}"),
    ("x^2+{n}x", r"\boxed{x(x+{n})}"),
    ("{n}", "I do not know"),
)


def prompt(answer: str = "", scorer: dict[str, Any] | None = None) -> Prompt:
    return Prompt("0" * 16, "bench", "train", "", (1,), answer, scorer or {})


def load_hostile() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hostile", HOSTILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FUNCTION = prompt("", {"entry_point": "add", "tests": "assert add(2, 3) == 5\nassert add(10, -4) == 6\nassert add(0, 7) == 7\n"})
PROGRAM = prompt("", {"tests": [{"stdin": "2 3\n", "stdout": "5\n"}, {"stdin": "10 -4\n", "stdout": "6\n"}]})
SUM = prompt("47", {"kind": "reasoning_gym", "task": "basic_arithmetic", "entry": {"answer": "47", "metadata": {}}})


def throughput(verifier: str, answers: list[tuple[Prompt, str]], workers: int, rounds: int) -> float:
    """Return warm verdicts per second, the median of several rounds."""
    judge = build_verifier(Reward.model_validate({"verifier": verifier, "num_workers": workers, "timeout_seconds": 20.0}))
    try:
        judge.score(answers[: 4 * workers])
        rates = []
        for _ in range(rounds):
            begin = time.perf_counter()
            judge.score(answers)
            rates.append(len(answers) / (time.perf_counter() - begin))
    finally:
        judge.close()
    return statistics.median(rates)


def deadlines() -> float:
    """Return by how many seconds, at worst, a call past its limit outlives it: sleeping, looping, deaf to signals, in C."""
    hostile = load_hostile()
    names = ("sleep", "endless loop in the call", "ignores every signal", "one long C call", "backtracking regex")
    limits = vars(Limits(wall_seconds=LIMIT_SECONDS, cpu_seconds=60))
    pool = Pool([CodeChannel(choose_kind("auto"))], 30.0)
    worst = 0.0
    try:
        pool.run([to_job(FUNCTION, HONEST, limits)])
        for name in names:
            begin = time.perf_counter()
            (finding,) = pool.run([to_job(FUNCTION, hostile.PROGRAMS[name], limits)])
            assert finding.status == "timeout", (name, finding)
            worst = max(worst, time.perf_counter() - begin - LIMIT_SECONDS)
    finally:
        pool.close()
    judge = build_verifier(Reward(verifier="math", timeout_seconds=LIMIT_SECONDS, num_workers=1))
    try:
        judge.score([(prompt("1"), "1")])
        begin = time.perf_counter()
        (verdict,) = judge.score([(prompt("1"), r"\boxed{9^{9^{9^{9}}}}")])
        assert verdict.status == "timeout", verdict
        worst = max(worst, time.perf_counter() - begin - LIMIT_SECONDS)
    finally:
        judge.close()
    return worst


def hostile_programs() -> dict[str, Any]:
    """Judge every hostile program, and an honest one right after it on the same worker."""
    hostile = load_hostile()
    limits = vars(Limits(wall_seconds=LIMIT_SECONDS, cpu_seconds=1, memory_bytes=256 * 1024**2))
    cases = [(FUNCTION, text, HONEST, name) for name, text in hostile.PROGRAMS.items()]
    cases += [(PROGRAM, text, HONEST_SCRIPT, f"script: {name}") for name, text in hostile.SCRIPTS.items()]
    right, uncontained, slowdowns = [], [], {}
    pool = Pool([CodeChannel(choose_kind("auto"))], 60.0)

    def seconds(one: Prompt, honest: str) -> float:
        begin = time.perf_counter()
        (finding,) = pool.run([to_job(one, honest, vars(Limits(wall_seconds=30.0, cpu_seconds=30)))])
        if finding.status != "ok":
            uncontained.append(finding.detail)
        return time.perf_counter() - begin

    try:
        for one, text, honest, name in cases:
            for _ in range(ATTEMPTS):
                before = statistics.median(seconds(one, honest) for _ in range(5))
                (finding,) = pool.run([to_job(one, text, limits)])
                if finding.score >= 1:
                    right.append(name)
                slowdowns[name] = min(slowdowns.get(name, 1e9), seconds(one, honest) / before)
                if slowdowns[name] <= 2:
                    break
    finally:
        pool.close()
    worst = max(slowdowns, key=lambda name: slowdowns[name])
    return {
        "programs": len(cases),
        "judged_right": right,
        "honest_answers_spoilt": uncontained,
        "next_call_median": statistics.median(slowdowns.values()),
        "next_call_worst": slowdowns[worst],
        "next_call_worst_program": worst,
        "next_call_over_2x": sum(value > 2 for value in slowdowns.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    numbers = [str(n) for n in range(101, 176)]
    math_answers = [(prompt(gold.replace("{n}", n)), text.replace("{n}", n)) for n in numbers for gold, text in MATH]
    found: dict[str, Any] = {
        "workers": options.workers,
        "load": os.getloadavg()[0],
        "code_per_second": throughput("code", [(FUNCTION, HONEST)] * 200, options.workers, options.rounds),
        "script_per_second": throughput("code", [(PROGRAM, HONEST_SCRIPT)] * 100, options.workers, options.rounds),
        "math_per_second": throughput("math", math_answers, options.workers, options.rounds),
        "reasoning_gym_per_second": throughput(
            "reasoning_gym", [(SUM, "47"), (SUM, "48")] * 5000, options.workers, options.rounds
        ),
        "worst_overrun_seconds": deadlines(),
        "sandbox": choose_kind("auto"),
        **hostile_programs(),
    }
    table = Table("measured", "value", "goal", title=f"{options.workers} workers, load {found['load']:.1f}")
    table.add_row("code verdicts per second, warm", f"{found['code_per_second']:.0f}", ">= 50")
    table.add_row("scripts (two cases) per second, warm", f"{found['script_per_second']:.0f}", "")
    table.add_row("math verdicts per second", f"{found['math_per_second']:.0f}", ">= 300")
    table.add_row("reasoning_gym verdicts per second", f"{found['reasoning_gym_per_second']:.0f}", ">= 20000")
    table.add_row("a call past its limit lives on for", f"{found['worst_overrun_seconds']:.2f} s", "<= 1 s")
    table.add_row(f"hostile programs of {found['programs']} judged right", str(len(found["judged_right"])), "0")
    table.add_row("next call, median", f"{found['next_call_median']:.2f}x", "<= 2x")
    table.add_row(f"next call, worst ({found['next_call_worst_program']})", f"{found['next_call_worst']:.2f}x", "<= 2x")
    Console().print(table)
    RESULTS.mkdir(exist_ok=True)
    write_json(RESULTS / "rewards.json", found)


if __name__ == "__main__":
    main()
