"""Verifiers: the port `Verifier` over one judge each, and their mix.

    LocalVerifier    in process: where nothing can hang (exact, length)
    PoolVerifier     in killable workers (math, reasoning_gym, regex, format, a user's function, a remote judge)
    CodeVerifier     in the sandbox
    MixVerifier      the weighted sum of several, behind gates
    (RewardModelVerifier, the only one with torch, is in `trainer.reward.reward_model`)

Every verifier gives its raw findings to `settle`, which applies what a recipe says of partial credit and timeouts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

from trainer.config.schema import Code, Judge, RewardPart
from trainer.errors import DataError
from trainer.reward.child import Finding as Judged
from trainer.reward.code import CodeChannel, choose_kind, to_job
from trainer.reward.pool import Finding, Nursery, NurseryChannel, Pool
from trainer.reward.sandbox.jail import Limits
from trainer.types import Prompt, Verdict, VerdictStatus, Verifier

WORKER_MEMORY_BYTES = 4 * 1024**3  # of address space: an answer such as 9^9^9 must not fill the machine
KILL_GRACE_SECONDS = 0.8  # what a worker that keeps its own clock gets on top, before it is killed

Answers = Sequence[tuple[Prompt, str]]


def settle(judge: Judge, name: str, finding: Finding) -> Verdict:
    """Return the verdict of a finding: partial credit and the score of a timeout as the recipe has them."""
    score = finding.score
    if finding.status == "timeout":
        score = judge.timeout_score
    elif finding.status == "wrong" and not judge.partial_credit and 0 < score < 1:
        score = 0.0
    return Verdict(cast(VerdictStatus, finding.status), score, {name: score}, finding.seconds, finding.detail)


class LocalVerifier:
    """A judge that cannot hang, called in process."""

    def __init__(self, judge: Judge, name: str, function: Callable[[Prompt, str], Judged]):
        self.judge, self.name, self.function = judge, name, function

    def score(self, answers: Answers) -> list[Verdict]:
        found = [self.function(prompt, answer) for prompt, answer in answers]
        return [settle(self.judge, self.name, Finding(status, score, detail, 0.0)) for status, score, detail in found]

    def close(self) -> None:
        """Nothing is held."""


class PoolVerifier:
    """A judge in a pool of killable workers. They begin to start when it is built; the first answer waits for them.

    Args:
        factory, arguments: how a worker's nursery builds the judge.
        key: configuration key to name when it cannot be built.
        keeps_clock: the judge ends by itself at the limit; it is killed a little later if it does not.
    """

    def __init__(
        self, judge: Judge, name: str, factory: str, arguments: dict[str, Any], key: str, num_workers: int, keeps_clock: bool
    ):
        self.judge, self.name, self.key, self.num_workers = judge, name, key, num_workers
        self.factory, self.arguments = factory, arguments
        self.limit_seconds = judge.timeout_seconds + (KILL_GRACE_SECONDS if keeps_clock else 0.0)
        self._pool: Pool | None = None
        self._nursery: Nursery | None = self._begin()

    def _begin(self) -> Nursery:
        memory_bytes = 0 if self.judge.verifier == "python" else WORKER_MEMORY_BYTES
        return Nursery(self.factory, self.arguments, self.key, memory_bytes)

    def _started(self) -> Pool:
        if self._pool is None:
            nursery = self._nursery = self._nursery or self._begin()
            self._pool = Pool([NurseryChannel(nursery) for _ in range(self.num_workers)], self.limit_seconds)
        return self._pool

    def score(self, answers: Answers) -> list[Verdict]:
        """Return one verdict per answer, in order."""
        payloads = [(prompt.text, prompt.answer, prompt.scorer, str(answer)) for prompt, answer in answers]
        return [settle(self.judge, self.name, finding) for finding in self._started().run(payloads)]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        if self._nursery is not None:
            self._nursery.close()
        self._pool = self._nursery = None


def limits_of(code: Code, timeout_seconds: float) -> Limits:
    names = {field.name for field in dataclasses.fields(Limits)} - {"wall_seconds"}
    return Limits(wall_seconds=timeout_seconds, **{name: getattr(code, name) for name in names})


class CodeVerifier:
    """Programs in the sandbox. Building it tries the sandbox: a machine that cannot isolate is refused before any sampling."""

    def __init__(self, judge: Judge, name: str, key: str, num_workers: int):
        self.judge, self.name, self.num_workers = judge, name, num_workers
        self.kind = choose_kind(judge.code.sandbox, f"{key}.code.sandbox")
        self.limits = vars(limits_of(judge.code, judge.timeout_seconds))
        self._pool: Pool | None = self._begin()

    def _begin(self) -> Pool:
        channels = [CodeChannel(self.kind, self.judge.code.preload) for _ in range(self.num_workers)]
        return Pool(channels, self.judge.timeout_seconds + KILL_GRACE_SECONDS)

    def score(self, answers: Answers) -> list[Verdict]:
        """Return one verdict per answer, in order.

        Raises:
            DataError: a prompt has no tests.
        """
        self._pool = self._pool or self._begin()
        jobs = [to_job(prompt, str(answer), self.limits) for prompt, answer in answers]
        return [settle(self.judge, self.name, finding) for finding in self._pool.run(jobs)]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


class MixVerifier:
    """The weighted sum of several verifiers, behind gates.

    Args:
        parts: each with its verifier; the first one's status is the answer's.
        gate_score: reward of an answer that a gate refuses; its other parts are recorded all the same.
    """

    def __init__(self, parts: Sequence[tuple[RewardPart, Verifier]], gate_score: float):
        self.parts, self.gate_score = parts, gate_score

    def score(self, answers: Answers) -> list[Verdict]:
        by_part = [verifier.score(answers) for _, verifier in self.parts]
        return [self._sum(verdicts) for verdicts in zip(*by_part, strict=True)]

    def _sum(self, verdicts: Sequence[Verdict]) -> Verdict:
        terms, shut = {}, []
        total = 0.0
        for (part, _), verdict in zip(self.parts, verdicts, strict=True):
            terms[part.label] = verdict.score if part.gate else part.weight * verdict.score
            if not part.gate:
                total += terms[part.label]
            elif verdict.score < part.gate_at:
                shut.append(part.label)
        details = [f"{part.label}: {v.detail}" for (part, _), v in zip(self.parts, verdicts, strict=True) if v.detail]
        return Verdict(
            verdicts[0].status,
            self.gate_score if shut else total,
            terms,
            sum(verdict.seconds for verdict in verdicts),
            "; ".join([*(f"gate {label} shut" for label in shut), *details]),
            {part.label: verdict.status for (part, _), verdict in zip(self.parts, verdicts, strict=True)},
        )

    def close(self) -> None:
        for _, verifier in self.parts:
            verifier.close()


def judge_length(judge: Judge) -> Callable[[Prompt, str], Judged]:
    """Return the function behind `length`. Tokens are those that were sampled, so the text must know them."""
    from trainer.reward.judges import over_long

    options = judge.length

    def function(prompt: Prompt, answer: str) -> Judged:
        length = len(answer) if options.unit == "characters" else getattr(answer, "num_tokens", None)
        if length is None:
            raise DataError(prompt.id, "reward.length.unit: tokens needs a trainer.types.AnswerText; set unit: characters")
        return over_long(length, options.max_length, options.buffer)

    return function
