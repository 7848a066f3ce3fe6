"""What a worker runs: one function per verifier, from (prompt, gold answer, scorer data, answer) to a finding.

Each factory is called once in a worker's nursery with the options of its part, imports what it needs there, and returns
the judge. A judge may hang, crash or raise: the pool sees to it. Scores are in [0, 1], but a user's function and a remote
judge may give any finite number.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from typing import Any

from trainer.processes import import_late
from trainer.reward.child import Finding, Judge, Payload, resolve

THINK_THEN_ANSWER = r"\s*<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?:(?!</?think>|</?answer>).)*</answer>\s*"


def graded(score: float) -> Finding:
    """Return the finding of a score: `ok` from 1 on, `wrong` below."""
    if not math.isfinite(score):
        return "error", 0.0, f"the score is {score}"
    return ("ok" if score >= 1.0 else "wrong"), float(score), ""


def make_extractor(extract: str) -> Callable[[str], str | None]:
    """Return the function that takes from an answer what is to be judged; None where it is missing."""
    from trainer.reward import math_answers

    def tag(text: str) -> str | None:
        found = math_answers.TAG.findall(text)
        return found[-1].strip() if found else None

    kinds: dict[str, Callable[[str], str | None]] = {
        "whole": str.strip,
        "tag": tag,
        "boxed": math_answers.find_boxed,
        "auto": math_answers.find_answer,
    }
    return kinds[extract]


def make_exact(extract: str) -> Judge:
    """Return the judge that compares what was extracted with the gold answer, blanks around them apart."""
    extracted = make_extractor(extract)

    def judge(payload: Payload) -> Finding:
        _, gold, _, answer = payload
        found = extracted(answer)
        return graded(float(found == gold.strip())) if found else ("unparsable", 0.0, "no answer found")

    return judge


def reasoning_gym_tasks() -> dict[str, Any]:
    """Return reasoning_gym's tasks by name: (dataset class, configuration class)."""
    import_late("cellpylib")  # two tasks' own, and half of the loading, since it brings matplotlib
    from reasoning_gym.factory import DATASETS

    tasks: dict[str, Any] = DATASETS
    return tasks


def make_reasoning_gym(extract: str) -> Judge:
    """Return the judge that asks the task's own `score_answer`; scorer data: {"task": name, "entry": row}."""
    tasks = reasoning_gym_tasks()
    extracted = make_extractor(extract)
    scorers: dict[str, Any] = {}

    def judge(payload: Payload) -> Finding:
        _, _, scorer, answer = payload
        task = scorer["task"]
        if task not in scorers:
            dataset_class, config_class = tasks[task]
            scorers[task] = dataset_class(config_class(size=1, seed=0)).score_answer
        found = extracted(answer)
        return graded(scorers[task](found, scorer["entry"])) if found else ("unparsable", 0.0, "no answer found")

    return judge


def make_math() -> Judge:
    """Return the judge of `trainer.reward.math_answers`; a gold answer may be a whole solution that ends in its answer."""
    import math_verify  # noqa: F401  (slow to import: here, once, and not in every worker)

    from trainer.reward.math_answers import find_answer, math_verify_same, same_answer

    logging.disable(logging.ERROR)  # it warns of every formula that it cannot read

    def judge(payload: Payload) -> Finding:
        _, gold, _, answer = payload
        found = find_answer(answer)
        if found is None:
            return "unparsable", 0.0, "no final answer found"
        wanted = find_answer(gold) if "####" in gold or "boxed" in gold else gold
        return graded(float(same_answer(wanted or gold, found, math_verify_same)))

    for formula in (r"\frac{1}{\sqrt{2}}", "x^2+2x", r"(-\infty, 2)", r"\{1, \pi\}"):
        same_answer(formula, "x", math_verify_same)  # builds the parser's tables before the forks
    return judge


def make_regex(pattern: str) -> Judge:
    """Return the judge that looks for a pattern; with a group, the last match's first group must equal the gold answer."""
    compiled = re.compile(pattern, re.DOTALL)

    def judge(payload: Payload) -> Finding:
        _, gold, _, answer = payload
        matches = list(compiled.finditer(answer))
        if not compiled.groups:
            return graded(float(bool(matches)))
        if not matches:
            return "unparsable", 0.0, "the pattern is not found"
        return graded(float((matches[-1].group(1) or "").strip() == gold.strip()))

    return judge


def make_format(pattern: str | None) -> Judge:
    """Return the judge that wants the whole answer to fit a pattern."""
    compiled = re.compile(pattern or THINK_THEN_ANSWER, re.DOTALL)

    def judge(payload: Payload) -> Finding:
        return graded(float(compiled.fullmatch(payload[3]) is not None))

    return judge


def make_python(function: str) -> Judge:
    """Return the judge that calls the user's function (prompt, answer, gold, scorer) -> number or bool."""
    call = resolve(function)

    def judge(payload: Payload) -> Finding:
        text, gold, scorer, answer = payload
        return graded(float(call(text, answer, gold, scorer)))

    return judge


def make_http(url: str, token_variable: str | None, retries: int, backoff_seconds: float, deadline_seconds: float) -> Judge:
    """Return the judge that asks a remote one."""
    from trainer.reward.remote_judge import RemoteJudge

    remote = RemoteJudge(url, token_variable, retries, backoff_seconds, deadline_seconds)

    def judge(payload: Payload) -> Finding:
        text, gold, scorer, answer = payload
        try:
            return graded(remote.ask({"prompt": text, "answer": answer, "gold": gold, "scorer": scorer}))
        except TimeoutError as error:
            return "timeout", 0.0, str(error)

    return judge


def exact(gold: str, answer: str) -> Finding:
    """Compare whole answers after stripping: the judge that needs no worker."""
    answer = answer.strip()
    return graded(float(answer == gold.strip())) if answer else ("unparsable", 0.0, "empty answer")


def over_long(length: int, max_length: int, buffer: int) -> Finding:
    """Return 0 up to `max_length - buffer`, -1 from `max_length` on, linear between (DAPO, arXiv 2503.14476, eq. 13)."""
    over = length - (max_length - buffer)
    if over <= 0:
        return "ok", 0.0, ""
    return "wrong", -min(1.0, over / buffer) if buffer else -1.0, ""
