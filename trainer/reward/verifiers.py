"""Verifiers: the port `Verifier` over pools of killable workers, or in process where nothing can hang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from trainer.reward.judges import exact
from trainer.reward.pool import Nursery, NurseryChannel, Pool
from trainer.types import Prompt, Verdict, VerdictStatus


def to_verdict(name: str, status: str, score: float, detail: str, seconds: float) -> Verdict:
    return Verdict(cast(VerdictStatus, status), score, {name: score}, seconds, detail)


class ExactVerifier:
    """Equal to the gold answer after stripping; judged in process."""

    def score(self, answers: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        found = [exact(prompt.answer, answer) for prompt, answer in answers]
        return [to_verdict("exact", status, score, detail, 0.0) for status, score, detail in found]

    def close(self) -> None:
        """Nothing is held."""


class PoolVerifier:
    """A judge in a pool of killable workers, started at the first answer."""

    def __init__(self, name: str, factory: str, arguments: dict[str, object], limit_seconds: float, num_workers: int):
        self.name, self.factory, self.arguments = name, factory, arguments
        self.limit_seconds, self.num_workers = limit_seconds, num_workers
        self._nursery: Nursery | None = None
        self._pool: Pool | None = None

    def _started(self) -> Pool:
        if self._pool is None:
            self._nursery = Nursery(self.factory, self.arguments)
            self._pool = Pool([NurseryChannel(self._nursery) for _ in range(self.num_workers)], self.limit_seconds)
        return self._pool

    def score(self, answers: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Return one verdict per answer, in order."""
        payloads = [(prompt.text, prompt.answer, prompt.scorer, answer) for prompt, answer in answers]
        findings = self._started().run(payloads)
        return [to_verdict(self.name, f.status, f.score, f.detail, f.seconds) for f in findings]

    def close(self) -> None:
        if self._pool is not None and self._nursery is not None:
            self._pool.close()
            self._nursery.close()
            self._pool = self._nursery = None
