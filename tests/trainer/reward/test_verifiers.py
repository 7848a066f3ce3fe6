"""Verifiers: statuses, order, partial credit, and workers that hang or die."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from trainer.config.schema import Reward
from trainer.reward import build_verifier
from trainer.types import Prompt, Verifier


def prompt(answer: str, scorer: dict[str, Any] | None = None, text: str = "32+15=") -> Prompt:
    return Prompt("0" * 16, "main", "train", text, (1, 2), answer, scorer or {})


def addition(answer: str) -> Prompt:
    entry = {"question": "Calculate 32 + 15.", "answer": answer, "metadata": {}}
    return prompt(answer, {"kind": "reasoning_gym", "task": "basic_arithmetic", "entry": entry})


@contextmanager
def verifier(**options: Any) -> Iterator[Verifier]:
    made = build_verifier(Reward(**options))
    try:
        yield made
    finally:
        made.close()


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


def test_unknown_task_is_an_error_verdict_not_an_exception() -> None:
    with verifier(verifier="reasoning_gym") as judge:
        (verdict,) = judge.score([(prompt("1", {"task": "no_such_task", "entry": {}}), "1")])
    assert verdict.status == "error"
    assert "no_such_task" in verdict.detail


def test_a_hanging_answer_times_out_and_the_others_are_judged() -> None:
    with verifier(verifier="math", timeout_seconds=1.5) as judge:
        answers = [r"\boxed{47}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{48}", r"\boxed{47}"]
        verdicts = judge.score([(prompt("47"), answer) for answer in answers])
    assert [v.status for v in verdicts] == ["ok", "timeout", "wrong", "ok"]
