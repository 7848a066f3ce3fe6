"""Verifiers: statuses, order, partial credit, and workers that hang or die."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from trainer.config.schema import Reward, RewardPart
from trainer.errors import ConfigError, DataError
from trainer.reward import build_verifier, summarise
from trainer.reward.pool import Nursery, NurseryChannel, Pool
from trainer.reward.summary import part_shares
from trainer.types import AnswerText, Prompt, Verdict, Verifier


def prompt(answer: str, scorer: dict[str, Any] | None = None, text: str = "32+15=") -> Prompt:
    return Prompt("0" * 16, "main", "train", text, (1, 2), answer, scorer or {})


def addition(answer: str) -> Prompt:
    entry = {"question": "Calculate 32 + 15.", "answer": answer, "metadata": {}}
    return prompt(answer, {"kind": "reasoning_gym", "task": "basic_arithmetic", "entry": entry})


@contextmanager
def verifier(**options: Any) -> Iterator[Verifier]:
    made = build_verifier(Reward.model_validate({"num_workers": 2, **options}))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def user_module(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return "user_rewards"


def test_exact_strips_and_compares() -> None:
    with verifier(verifier="exact") as judge:
        verdicts = judge.score([(prompt("47"), " 47\n"), (prompt("47"), "4 7"), (prompt("47"), " ")])
    assert [(v.status, v.score) for v in verdicts] == [("ok", 1.0), ("wrong", 0.0), ("unparsable", 0.0)]


@pytest.mark.parametrize(("partial_credit", "score"), [(True, 2 / 3), (False, 0.0)])
def test_reasoning_gym_uses_the_tasks_own_scorer(partial_credit: bool, score: float) -> None:
    with verifier(verifier="reasoning_gym", partial_credit=partial_credit) as judge:
        verdicts = judge.score([(addition("47"), "47"), (addition("47"), "147"), (addition("47"), "48"), (addition("47"), "")])
    assert [v.status for v in verdicts] == ["ok", "wrong", "wrong", "unparsable"]
    assert [v.score for v in verdicts] == pytest.approx([1.0, score, 0.0, 0.0])
    assert verdicts[0].parts == {"reasoning_gym": 1.0}


def test_workers_begin_to_start_with_their_verifier_and_end_with_it_even_unused() -> None:
    before = {child.pid for child in psutil.Process().children()}
    with verifier(verifier="reasoning_gym"):
        (nursery,) = [child for child in psutil.Process().children() if child.pid not in before]
    assert not nursery.is_running()


def test_a_verifier_that_is_closed_before_its_worker_is_there_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        with verifier(verifier="format"):
            pass
    assert capfd.readouterr().err == ""


def test_unknown_task_is_an_error_verdict_not_an_exception() -> None:
    with verifier(verifier="reasoning_gym") as judge:
        (verdict,) = judge.score([(prompt("1", {"task": "no_such_task", "entry": {}}), "1")])
    assert verdict.status == "error"
    assert "no_such_task" in verdict.detail


def test_an_answer_without_end_is_given_up_and_the_others_are_judged() -> None:
    with verifier(verifier="math", timeout_seconds=3.0) as judge:
        answers = [r"\boxed{47}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{48}", r"\boxed{47}"]
        verdicts = judge.score([(prompt("47"), answer) for answer in answers])
    assert verdicts[1].status in ("timeout", "unparsable")
    assert [v.status for v in verdicts[:1] + verdicts[2:]] == ["ok", "wrong", "ok"]


def test_a_worker_may_not_fill_the_memory(user_module: str) -> None:
    nursery = Nursery("user_rewards:make_glutton", {}, memory_bytes=1024**3)
    pool = Pool([NurseryChannel(nursery)], 20.0)
    payload = ("", "", {}, "")
    (finding,) = pool.run([payload])
    pool.close()
    nursery.close()
    assert (finding.status, finding.detail) == ("unparsable", "too deep or too large to judge (MemoryError)")


def test_a_function_of_the_user(user_module: str, capfd: pytest.CaptureFixture[str]) -> None:
    with verifier(verifier="python", function=f"{user_module}:length") as judge:
        verdicts = judge.score([(prompt(""), "x" * 5), (prompt(""), "x" * 20)])
    assert [(v.status, v.score) for v in verdicts] == [("wrong", 0.5), ("ok", 2.0)]
    with verifier(verifier="python", function=f"{user_module}:same") as judge:
        assert judge.score([(prompt("a"), "a")])[0].status == "ok"
    assert "must not" not in capfd.readouterr().out


def test_a_function_that_hangs_dies_or_raises_harms_nobody_else(user_module: str) -> None:
    answers = ["fine", "hang", "fine", "die", "raise", "nan", "fine"]
    with verifier(verifier="python", function=f"{user_module}:misbehaving", timeout_seconds=3.0, timeout_score=-1.0) as judge:
        for _ in range(2):
            verdicts = judge.score([(prompt(""), answer) for answer in answers])
            assert [v.status for v in verdicts] == ["ok", "timeout", "ok", "error", "error", "error", "ok"]
            assert verdicts[1].score == -1.0
            assert "KeyError" in verdicts[4].detail


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def test_a_function_that_forks_answers_once_and_leaves_nothing_behind(user_module: str, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    answers = ["fork and return"] * 3 + [f"leave a child {note}", "fine"]
    with verifier(verifier="python", function=f"{user_module}:forking", timeout_seconds=3.0, num_workers=1) as judge:
        verdicts = judge.score([(prompt(""), answer) for answer in answers])
        assert [v.status for v in verdicts] == ["ok", "ok", "ok", "timeout", "ok"]
        child = int(note.read_text(encoding="utf-8"))
        deadline = time.monotonic() + 120  # it was sent SIGKILL; a busy kernel takes its time
        while is_running(child):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_function_that_is_not_there_is_named(user_module: str) -> None:
    with (
        verifier(verifier="python", function="user_rewards:nothing") as judge,
        pytest.raises(ConfigError, match=r"reward\.function"),
    ):
        judge.score([(prompt(""), "")])


def test_regex_and_format() -> None:
    with verifier(verifier="regex", pattern=r"Answer: (\w+)") as judge:
        verdicts = judge.score([(prompt("B"), "Answer: A. No, Answer: B"), (prompt("B"), "Answer: C"), (prompt("B"), "B")])
    assert [v.status for v in verdicts] == ["ok", "wrong", "unparsable"]
    good = "<think>2+2\nis 4</think>\n<answer>4</answer>"
    with verifier(verifier="format") as judge:
        verdicts = judge.score([(prompt(""), good), (prompt(""), good + "!"), (prompt(""), good + good), (prompt(""), "4")])
    assert [v.score for v in verdicts] == [1.0, 0.0, 0.0, 0.0]


def test_a_pattern_that_backtracks_for_ever_is_killed() -> None:
    with verifier(verifier="regex", pattern=r"(?:a+)+$", timeout_seconds=3.0) as judge:
        verdicts = judge.score([(prompt(""), "a" * 60 + "b"), (prompt(""), "aaa")])
    assert [v.status for v in verdicts] == ["timeout", "ok"]


@pytest.mark.parametrize(("count", "score"), [(10, 0.0), (75, 0.0), (80, -0.2), (100, -1.0), (500, -1.0)])
def test_the_over_long_penalty_is_soft(count: int, score: float) -> None:
    with verifier(verifier="length", length={"max_length": 100, "buffer": 25}) as judge:
        (verdict,) = judge.score([(prompt(""), AnswerText("any text", count))])
    assert verdict.score == pytest.approx(score)
    with verifier(verifier="length", length={"max_length": 100, "buffer": 25, "unit": "characters"}) as judge:
        assert judge.score([(prompt(""), "x" * count)])[0].score == pytest.approx(score)


def test_length_in_tokens_needs_to_be_told_the_tokens() -> None:
    with verifier(verifier="length") as judge, pytest.raises(DataError, match="AnswerText"):
        judge.score([(prompt(""), "plain text")])


@pytest.mark.parametrize(("extract", "statuses"), [("tag", ["ok", "unparsable", "unparsable"]), ("auto", ["ok", "ok", "ok"])])
def test_what_is_judged_can_be_extracted(extract: str, statuses: list[str]) -> None:
    texts = ["<think>1</think><answer>47</answer>", r"so \boxed{47}", "It is 47."]
    with verifier(verifier="exact", extract=extract) as judge:
        assert [v.status for v in judge.score([(prompt("47"), text) for text in texts])] == statuses


MIX = [
    {"verifier": "exact", "extract": "tag", "weight": 2.0},
    {"verifier": "length", "weight": 0.5, "length": {"max_length": 50, "buffer": 10, "unit": "characters"}},
    {"verifier": "format", "gate": True},
]


def test_a_mix_adds_weighted_parts_behind_its_gates() -> None:
    answers = ["<think>a</think><answer>47</answer>", "<answer>47</answer>", "<think>" + "a" * 50 + "</think><answer>47</answer>"]
    with verifier(verifier="mix", parts=tuple(RewardPart.model_validate(part) for part in MIX), gate_score=-0.1) as judge:
        right, no_format, long = judge.score([(prompt("47"), answer) for answer in answers])
    assert right.score == 2.0
    assert right.parts == {"exact": 2.0, "length": 0.0, "format": 1.0}
    assert right.statuses == {"exact": "ok", "length": "ok", "format": "ok"}
    assert (no_format.status, no_format.score) == ("ok", -0.1)
    assert "gate format shut" in no_format.detail
    assert no_format.parts["exact"] == 2.0
    assert long.score == pytest.approx(2.0 - 0.5)


def test_verdicts_become_metrics() -> None:
    verdicts = [
        Verdict("ok", 1.5, {"a": 1.0, "b": 0.5}, 0.1, "", {"a": "ok", "b": "ok"}),
        Verdict("timeout", 0.0, {"a": 0.0, "b": 0.0}, 0.3, "", {"a": "timeout", "b": "wrong"}),
    ]
    metrics = summarise(verdicts)
    assert metrics["reward/status_ok_fraction"] == 0.5
    assert metrics["reward/status_timeout_fraction"] == 0.5
    assert metrics["reward/status_error_fraction"] == 0.0
    assert metrics["reward/part_a"] == 0.5
    assert metrics["reward/part_b"] == 0.25
    assert metrics["reward/part_a_status_timeout_fraction"] == 0.5
    assert metrics["reward/judge_seconds_mean"] == pytest.approx(0.2)
    assert metrics["reward/judge_seconds_max"] == pytest.approx(0.3)
    assert part_shares(verdicts) == {"part_a_ok_fraction": 0.5, "part_b_ok_fraction": 0.5}


def test_many_answers_keep_their_order_over_many_workers() -> None:
    with verifier(verifier="regex", pattern="(x+)", num_workers=4) as judge:
        verdicts = judge.score([(prompt("x" * (i % 7 + 1)), "x" * (i % 5 + 1)) for i in range(1000)])
    assert [v.status == "ok" for v in verdicts] == [i % 7 == i % 5 for i in range(1000)]


def test_torch_is_not_imported_for_rewards() -> None:
    program = "import sys, trainer.reward.code, trainer.reward.judges, trainer.reward.preflight; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, cwd=Path(__file__).parents[3]).returncode == 0
