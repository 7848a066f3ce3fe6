"""The code verifier: kinds of tests, extraction, partial credit, refusal to run unisolated."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest

from trainer.config.schema import Code, Reward
from trainer.errors import ConfigError, DataError
from trainer.reward import build_verifier, isolation
from trainer.reward.code import WALLS, CodeChannel, choose_kind, self_test, to_job
from trainer.reward.sandbox import codec, extract
from trainer.reward.sandbox.seccomp import DENIED, assemble
from trainer.reward.sandbox.test_side import same_output
from trainer.types import Prompt, Verdict, Verifier

needs_isolation = pytest.mark.usefixtures("sandbox_kind")


def prompt(tests: Any, entry_point: str = "", preamble: str = "") -> Prompt:
    scorer = {"kind": "fields", "tests": tests, "entry_point": entry_point, "preamble": preamble}
    return Prompt("0" * 16, "main", "train", "", (1,), "", scorer)


@pytest.fixture(scope="module")
def verifier(sandbox_kind: str) -> Iterator[Verifier]:
    made = build_verifier(Reward(verifier="code", timeout_seconds=20.0, num_workers=2))
    yield made
    made.close()


def judge(verifier: Verifier, one: Prompt, answer: str) -> Verdict:
    (verdict,) = verifier.score([(one, answer)])
    return verdict


ADD = prompt("assert add(2, 3) == 5\nassert add(10, -4) == 6", "add")
RIGHT = "def add(a, b):\n    return a + b\n"


@needs_isolation
@pytest.mark.parametrize(
    ("tests", "entry_point", "preamble", "answer"),
    [
        ("assert add(1, 2) == 3", "add", "", RIGHT),
        (["assert add(1, 2) == 3", "assert add(0, 0) == 0"], "", "", RIGHT),
        ("def check(candidate):\n    assert candidate(1, 2) == 3", "add", "", RIGHT),
        ("def check(f):\n    assert f(1, 2) == 3\ncheck(add)", "add", "", RIGHT),
        ("def test_one():\n    assert add(1, 2) == 3", "add", "", RIGHT),
        ("import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(add(1, 2), 3)",
         "add", "", RIGHT),
        ("import unittest\nclass T(unittest.TestCase):\n    @classmethod\n    def setUpClass(cls):\n        cls.sum = 3\n"
         "    def test(self):\n        self.assertEqual(add(1, 2), self.sum)", "add", "", RIGHT),
        ("if add(1, 2) != 3:\n    raise ValueError", "add", "", RIGHT),
        ("import math\nassert math.isclose(half(1), 0.5)", "half", "", "def half(x):\n    return x / 2"),
        ("assert add(1, 2) == 3", "add", "def add(a, b):\n    '''Sum.'''\n", "    return a + b\n"),
        ("assert add(1, 2) == 3", "add", "import math\n", "def add(a, b):\n    return math.fsum([a, b])\n"),
        ("assert double(3) == twice(3)", "double", "def twice(x):\n    return 2 * x\n", "def double(x):\n    return twice(x)\n"),
        ("x = [3, 1, 2]\norder(x)\nassert x == [1, 2, 3]", "order", "", "def order(x):\n    x.sort()\n"),
        ("try:\n    fail()\n    assert False\nexcept ValueError as e:\n    assert 'no' in str(e)", "fail", "",
         "def fail():\n    raise ValueError('no')"),
        ("assert list(up(3)) == [0, 1, 2]", "up", "", "def up(n):\n    yield from range(n)"),
        ("s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2\nassert len(s.items) == 1", "Stack", "",
         "class Stack:\n    def __init__(self):\n        self.items = []\n    def push(self, x):\n        self.items.append(x)\n"
         "    def pop(self):\n        return self.items.pop()"),
        ("assert pair() == (1, {2: {3}}, b'4', 5j, None, frozenset({6}))", "pair", "",
         "def pair():\n    return (1, {2: {3}}, b'4', 5j, None, frozenset({6}))"),
        ("assert big() == 2 ** 20000", "big", "", "def big():\n    return 2 ** 20000"),
        ("assert LIMIT == 5 and f() == 5", "f", "", "LIMIT = 5\ndef f():\n    return LIMIT"),
        ("from collections import Counter\nassert count('aab') == Counter('aab')", "count", "",
         "from collections import Counter\ndef count(s):\n    return Counter(s)"),
    ],
)  # fmt: skip
def test_right_programs_pass(tests: Any, entry_point: str, preamble: str, answer: str, verifier: Verifier) -> None:
    verdict = judge(verifier, prompt(tests, entry_point, preamble), answer)
    assert (verdict.status, verdict.score) == ("ok", 1.0), verdict


@needs_isolation
def test_wrong_programs_fail_with_a_reason_and_partial_credit(verifier: Verifier) -> None:
    half = judge(verifier, ADD, "def add(a, b):\n    return 5\n")
    assert (half.status, half.score) == ("wrong", 0.5)
    assert "add(10, -4) == 6" in half.detail
    assert judge(verifier, ADD, "def sub(a, b):\n    return a - b\n").status == "wrong"
    assert judge(verifier, ADD, "def add(a, b:\n").status == "unparsable"
    assert judge(verifier, ADD, "").status == "unparsable"
    assert judge(verifier, prompt("assert add(1, 2 == 3", "add"), RIGHT).status == "error"


@needs_isolation
def test_a_candidate_cannot_swell_its_share_by_turning_a_loop(verifier: Verifier) -> None:
    loop = prompt("for x in up(3):\n    assert x >= 0\nassert up(3) == [1, 2, 3]", "up")
    assert judge(verifier, loop, "def up(n):\n    return [0] * 5000\n").score == 0.5


@needs_isolation
def test_without_partial_credit_half_is_nothing() -> None:
    made = build_verifier(Reward(verifier="code", timeout_seconds=20.0, num_workers=1, partial_credit=False))
    try:
        verdict = judge(made, ADD, "def add(a, b):\n    return 5\n")
    finally:
        made.close()
    assert (verdict.status, verdict.score) == ("wrong", 0.0)


@needs_isolation
def test_programs_are_judged_by_stdin_and_stdout(verifier: Verifier) -> None:
    cases = prompt([{"stdin": "2 3\n", "stdout": "5\n"}, {"input": "10 -4", "output": "6"}])
    program = "a, b = map(int, input().split())\nprint(a + b)\n"
    assert judge(verifier, cases, program).status == "ok"
    assert judge(verifier, cases, f"Here it is:\n```python\n{program}```\nIt adds.").status == "ok"
    assert judge(verifier, cases, "if __name__ == '__main__':\n    print(sum(map(int, open(0).read().split())))").status == "ok"
    assert judge(verifier, cases, "print(5)").score == 0.5
    assert judge(verifier, prompt(json.dumps({"inputs": ["1\n"], "outputs": ["1\n"]})), "print(input())").status == "ok"


@needs_isolation
def test_a_timeout_scores_what_the_recipe_says() -> None:
    made = build_verifier(Reward(verifier="code", timeout_seconds=0.5, timeout_score=-0.5, num_workers=1))
    try:
        verdict = judge(made, ADD, "while True: pass")
    finally:
        made.close()
    assert (verdict.status, verdict.score) == ("timeout", -0.5)


@pytest.mark.smoke
@needs_isolation
def test_humaneval_canonical_solutions_pass_and_emptied_ones_fail(humaneval: list[dict[str, Any]], verifier: Verifier) -> None:
    prompts = [prompt(row["test"], row["entry_point"], row["prompt"]) for row in humaneval]
    whole = [f"```python\n{row['prompt']}{row['canonical_solution']}```" for row in humaneval]
    bodies = [row["canonical_solution"] for row in humaneval]
    for answers in (whole, bodies):
        verdicts = verifier.score(list(zip(prompts, answers, strict=True)))
        assert [row["task_id"] for row, v in zip(humaneval, verdicts, strict=True) if v.status != "ok"] == []
    emptied = verifier.score([(one, "    pass\n") for one in prompts])
    assert [row["task_id"] for row, v in zip(humaneval, emptied, strict=True) if v.score >= 1] == []


def test_a_machine_that_does_not_isolate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="bwrap is not installed"):
        choose_kind("bubblewrap")
    with pytest.raises(ConfigError, match="none-i-accept-the-risk"):
        build_verifier(Reward(verifier="code", code=Code(sandbox="bubblewrap")))


@needs_isolation
def test_the_self_test_sees_a_wall_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = choose_kind("auto")
    shown = isolation.binds()
    monkeypatch.setattr(isolation, "binds", lambda: [*shown, (__file__, __file__), ("/etc/passwd", "/etc/passwd")])
    problem = self_test(kind)
    assert problem is not None
    assert "other files" in problem
    assert "other files" in WALLS


def test_unisolated_runs_only_when_the_recipe_accepts_the_risk() -> None:
    made = build_verifier(
        Reward(verifier="code", num_workers=1, timeout_seconds=20.0, code=Code(sandbox="none-i-accept-the-risk"))
    )
    try:
        assert judge(made, ADD, RIGHT).status == "ok"
        assert judge(made, ADD, "import os\nos._exit(0)").status == "wrong"
    finally:
        made.close()


def lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_worker_closed_while_it_starts_leaves_nothing_behind(sandbox_kind: Any) -> None:
    for delay_seconds in (0.0, 0.002, 0.005, 0.01, 0.02):
        channel = CodeChannel(sandbox_kind)
        started = [psutil.Process(process.pid) for process in channel._processes]
        time.sleep(delay_seconds)
        family = [*started]
        for process in started:
            with suppress(psutil.NoSuchProcess):
                family += process.children(recursive=True)
        channel.close()
        end = time.monotonic() + 120
        while any(lives(process) for process in family) and time.monotonic() < end:
            time.sleep(0.01)
        assert [process for process in family if lives(process)] == []


def test_a_prompt_without_tests_is_named() -> None:
    with pytest.raises(DataError, match="no `tests`"):
        to_job(Prompt("0" * 16, "main", "train", "", (1,), "", {}), "", {})


@pytest.mark.parametrize(
    ("text", "preamble", "entry_point", "code"),
    [
        ("```python\nx = 1\n```", "", "", "x = 1\n"),
        ("a\n```py\nx = 1\n```\nb\n```\nx = 2\n```", "", "", "x = 2\n"),
        ("```python\ndef f(): pass\n```\nthen\n```python\nprint(f())\n```", "", "f", "def f(): pass\n"),
        ("```bash\nls\n```\n```python\nx = 1\n```", "", "", "x = 1\n"),
        ("~~~\nx = 1\n~~~", "", "", "x = 1\n"),
        ("```python\nx = 1", "", "", "x = 1"),
        ("x = 1\nThis sets x.", "", "", "x = 1"),
        ("    return 1\n\nThat is all of it.", "def f():\n", "f", "def f():\n    return 1\n"),
        ("def f():\n    return 1\n", "import math\ndef f():\n    ...\n", "f", "import math\n\ndef f():\n    return 1\n"),
    ],
)
def test_the_program_is_found_in_an_answer(text: str, preamble: str, entry_point: str, code: str) -> None:
    assert extract.find_code(text, preamble, entry_point) == code


@pytest.mark.parametrize(
    "value",
    [0, -(2**5000), True, None, 1.5, float("inf"), "x\ud800", [1, (2, {3})], {(1, 2): {"a": b"\0"}}, 1 + 2j, frozenset({1})],
)
def test_plain_data_comes_back_as_it_went(value: Any) -> None:
    back = codec.decode(codec.loads(codec.dumps(codec.encode(value))), lambda number, name: None)
    assert back == value
    assert type(back) is type(value)


def test_what_is_not_plain_stays_behind() -> None:
    class Liar(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    assert type(codec.decode(codec.encode(Liar(3)), lambda number, name: None)) is int
    with pytest.raises(codec.NotPlainError):
        codec.encode(object())


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [("5\n", "5", True), ("5 \n6\n\n", "5\n6", True), ("0.3333333", "0.33333333", True), ("5", "6", False),
     ("5 6", "5\n6", True), ("", "5", False), ("nan", "0.5", False), ("5.0", "5", False)],
)  # fmt: skip
def test_outputs_are_compared_like_a_judge(output: str, expected: str, same: bool) -> None:
    assert same_output(output, expected) is same


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_is_whole(machine: str) -> None:
    column = 0 if machine == "x86_64" else 1
    numbers = [pair[column] for pair in DENIED.values() if pair[column] is not None]
    assert len(set(numbers)) == len(numbers)
    assert len(assemble(machine, may_fork=True)) < len(assemble(machine, may_fork=False)) <= 8 * 4096
