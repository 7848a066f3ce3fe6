"""A sampler, a verifier and a wish to stop for ranks that run one schedule in step.

    sampler    prompts are split over ranks, completions go to all
    verifier   the first rank judges, verdicts go to all
    stop       a wish that reaches one rank is everybody's, at the same point of the schedule

So every rank holds the same groups and decides the same things.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from trainer.engine.team import Team
from trainer.schedule.stop import StopWish
from trainer.types import Completion, Prompt, Request, Sampler, SamplingParams, Verdict, Verifier


class TeamVerifier:
    """A `Verifier` that judges on the first rank.

    Args:
        team: of all ranks.
        verifier: on the first rank; None on the others.
    """

    def __init__(self, team: Team, verifier: Verifier | None):
        self.team, self.verifier = team, verifier

    def score(self, answers: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        def judge() -> list[Verdict]:
            assert self.verifier is not None
            return self.verifier.score(answers)

        return self.team.share(judge)

    def close(self) -> None:
        if self.verifier is not None:
            self.verifier.close()


class TeamSampler:
    """A `Sampler` whose prompts are split over ranks; the groups of a prompt stay together.

    Args:
        team: of all ranks.
        sampler: of this rank.
        together: lets ranks run different numbers of forward passes for the span of a block.
    """

    def __init__(self, team: Team, sampler: Sampler, together: Callable[[], AbstractContextManager[object]] = nullcontext):
        self.team, self.sampler, self.together = team, sampler, together

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        prompts = {request.token_ids: None for request in requests}
        rank_of = {prompt: index % self.team.size for index, prompt in enumerate(prompts)}
        ranks = [rank_of[request.token_ids] for request in requests]
        mine = [request for request, rank in zip(requests, ranks, strict=True) if rank == self.team.rank]
        with self.together():
            completions = self.sampler.generate(mine, params)
        parts = [iter(part) for part in self.team.gather(completions)]
        return [next(parts[rank]) for rank in ranks]

    def load_policy(self, version: int) -> None:
        self.sampler.load_policy(version)

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float) -> list[list[float]]:
        """Return log-probs by plain forward passes, which all ranks run alike."""
        return self.sampler.score(sequences, temperature)

    def close(self) -> None:
        self.sampler.close()


class TeamWish(StopWish):
    """A wish to stop that all ranks learn of when they ask; they must ask together.

    Args:
        team: of all ranks.
        own: what this rank was told.
    """

    def __init__(self, team: Team, own: StopWish):
        super().__init__()
        self.team, self.own = team, own

    def __bool__(self) -> bool:
        if self.signal_name is None:
            self.signal_name = next((name for name in self.team.gather(self.own.signal_name) if name), None)
        return self.signal_name is not None
