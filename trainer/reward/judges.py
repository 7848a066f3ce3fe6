"""What a worker runs: one function per verifier, from (prompt, gold answer, scorer data, answer) to a finding.

Each factory is called once in a worker's nursery with the options of its part, imports what it needs there, and returns
the judge. A judge may hang, crash or raise: the pool sees to it. Scores are in [0, 1].
"""

from __future__ import annotations

from typing import Any

from trainer.reward.child import Finding, Judge, Payload


def graded(score: float, partial_credit: bool) -> Finding:
    """Return the finding of a score: `ok` at 1, `wrong` below, where it counts only with partial credit."""
    if score >= 1.0:
        return "ok", 1.0, ""
    return "wrong", max(0.0, float(score)) if partial_credit else 0.0, ""


def make_reasoning_gym(partial_credit: bool) -> Judge:
    """Return the judge that asks the task's own `score_answer`; scorer data: {"task": name, "entry": row}."""
    from reasoning_gym.factory import DATASETS

    scorers: dict[str, Any] = {}

    def judge(payload: Payload) -> Finding:
        _, _, scorer, answer = payload
        task = scorer["task"]
        if task not in scorers:
            dataset_class, config_class = DATASETS[task]
            scorers[task] = dataset_class(config_class(size=1, seed=0)).score_answer
        answer = answer.strip()
        if not answer:
            return "unparsable", 0.0, "empty answer"
        return graded(scorers[task](answer, scorer["entry"]), partial_credit)

    return judge


def make_math(partial_credit: bool) -> Judge:
    """Return the judge that compares with math-verify."""
    from math_verify import parse, verify

    def judge(payload: Payload) -> Finding:
        _, gold, _, answer = payload
        found = parse(answer, parsing_timeout=None)
        if not found:
            return "unparsable", 0.0, "no mathematical answer found"
        right = verify(parse(gold, parsing_timeout=None) or gold, found, timeout_seconds=None)
        return graded(float(right), partial_credit)

    return judge


def exact(gold: str, answer: str) -> Finding:
    """Compare with the gold answer after stripping."""
    answer = answer.strip()
    if not answer:
        return "unparsable", 0.0, "empty answer"
    return graded(float(answer == gold.strip()), False)
