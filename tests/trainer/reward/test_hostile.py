"""Hostile answers: contained, never right, and the next answer on the same worker is judged as if nothing had been."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from trainer.errors import ConfigError
from trainer.reward.code import CodeChannel, choose_kind, to_job
from trainer.reward.pool import Finding, Pool
from trainer.reward.sandbox.jail import Limits
from trainer.types import Prompt

_SPEC = importlib.util.spec_from_file_location("hostile", Path(__file__).with_name("hostile.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
hostile = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(hostile)

TIGHT = vars(Limits(wall_seconds=0.5, cpu_seconds=1, memory_bytes=256 * 1024**2))
ROOMY = vars(Limits(wall_seconds=60.0, cpu_seconds=60))
HONEST = "def add(a, b):\n    import os\n    return a + b if os.listdir('/tmp') == [] else None\n"
HONEST_SCRIPT = "a, b = map(int, input().split())\nprint(a + b)\n"
ALL = {**dict.fromkeys(hostile.PROGRAMS, "function"), **{f"script: {name}": "program" for name in hostile.SCRIPTS}}


def prompt(scorer: dict[str, Any]) -> Prompt:
    return Prompt("0" * 16, "main", "train", "add two numbers", (1,), "", scorer)


FUNCTION = prompt({"entry_point": "add", "tests": "assert add(2, 3) == 5\nassert add(10, -4) == 6\nassert add(0, 7) == 7\n"})
PROGRAM = prompt({"tests": [{"stdin": "2 3\n", "stdout": "5\n"}, {"stdin": "10 -4\n", "stdout": "6\n"}]})


def jobs() -> list[dict[str, Any]]:
    """Each hostile answer, followed by an honest one for the same worker."""
    made = []
    for name in hostile.PROGRAMS:
        made += [to_job(FUNCTION, hostile.PROGRAMS[name], TIGHT), to_job(FUNCTION, HONEST, ROOMY)]
    for name in hostile.SCRIPTS:
        made += [to_job(PROGRAM, hostile.SCRIPTS[name], TIGHT), to_job(PROGRAM, HONEST_SCRIPT, ROOMY)]
    return made


@pytest.fixture(scope="module", params=["auto", pytest.param("namespaces", marks=pytest.mark.smoke)])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    try:
        kind = choose_kind(request.param)
    except ConfigError as error:
        pytest.skip(str(error))
    made = Pool([CodeChannel(kind) for _ in range(4)], 120.0)
    yield made
    made.close()


def processes() -> int:
    """Every process below this one: keepers, and what candidates left behind."""
    return len(psutil.Process(os.getpid()).children(recursive=True))


@pytest.fixture(scope="module")
def findings(pool: Pool) -> dict[str, tuple[Finding, Finding]]:
    pool.run([to_job(FUNCTION, HONEST, ROOMY)] * 4)
    before = processes()
    found = pool.run(jobs())
    end = time.monotonic() + 120
    while processes() > before and time.monotonic() < end:  # what was killed takes its time
        time.sleep(0.05)
    assert processes() <= before
    return dict(zip(ALL, zip(found[::2], found[1::2], strict=True), strict=True))


@pytest.mark.parametrize("name", ALL)
def test_a_hostile_answer_is_contained(name: str, findings: dict[str, tuple[Finding, Finding]]) -> None:
    finding, after = findings[name]
    assert finding.score < 1
    assert finding.status in ("wrong", "unparsable", "timeout"), finding
    assert finding.seconds < 30
    assert after.status == "ok", after


def test_there_are_enough() -> None:
    assert len(ALL) >= 40


def test_an_attempt_that_works_would_pass(pool: Pool) -> None:
    """The programs can win: with an attempt that nothing forbids, `escaped` gives the right sums."""
    (finding,) = pool.run([to_job(FUNCTION, hostile._if_it_works("import os\nos.getpid()"), ROOMY)])
    assert finding.status == "ok"


def test_forks_are_counted_where_they_are_allowed(pool: Pool) -> None:
    limits = {**ROOMY, "processes": 4, "wall_seconds": 20.0}
    some = hostile._if_it_works("import os\nfor _ in range(2):\n    if os.fork() == 0:\n        os._exit(0)\n    os.wait()")
    many = hostile._if_it_works(
        "import os, time\nfor _ in range(20):\n    if os.fork() == 0:\n        time.sleep(30)\n        os._exit(0)"
    )
    allowed, refused = pool.run([to_job(FUNCTION, some, limits), to_job(FUNCTION, many, limits)])
    assert allowed.status == "ok", allowed
    assert refused.status == "wrong", refused
