"""Which prompts a step takes: shuffled epochs over a stage's prompts, decided by the seed and the step's number alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.config.schema import RLStage
from trainer.errors import DataError
from trainer.types import Prompt, Request, derive_seed


@dataclass(frozen=True)
class StagePosition:
    """Where a step lies among the RL stages."""

    index: int  # of the RL stage
    stage: RLStage
    step: int  # within the stage, >= 1


def locate(stages: Sequence[RLStage], step: int) -> StagePosition:
    """Return the RL stage of a step; steps count from 1 over all stages."""
    for index, stage in enumerate(stages):
        if step <= stage.steps:
            return StagePosition(index, stage, step)
        step -= stage.steps
    raise AssertionError("a step after the last RL stage")


class PromptCursor:
    """Walks through the prompts of one RL stage.

    Args:
        prompts: all training prompts.
        stage: whose sources it takes.
        per_step: prompts of a step.
        seed: the campaign's.

    Raises:
        DataError: the stage's sources hold no training prompt.
    """

    def __init__(self, prompts: Sequence[Prompt], stage: RLStage, per_step: int, seed: int):
        self.prompts = [p for p in prompts if stage.sources is None or p.source in stage.sources]
        self.stage, self.per_step, self.seed = stage, per_step, seed
        if not self.prompts:
            which = ", ".join(stage.sources or ("any source",))
            raise DataError(f"RL stage {stage.name!r}", f"there is no training prompt of {which}; run prepare again")
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def take(self, step: int) -> list[Prompt]:
        """Return the prompts of a step of the stage, counted from 1; one comes twice only when an epoch ends inside."""
        first = (step - 1) * self.per_step
        return [self.at(position) for position in range(first, first + self.per_step)]

    def at(self, position: int) -> Prompt:
        """Return the prompt at a position of the stage, counted from 0 over all its steps."""
        epoch, offset = divmod(position, len(self.prompts))
        if epoch != self._epoch:
            seed = derive_seed(self.seed, "prompts", self.stage.name, epoch)
            self._epoch, self._order = epoch, np.random.Generator(np.random.PCG64(seed)).permutation(len(self.prompts))
        return self.prompts[int(self._order[offset])]


def make_requests(prompts: Sequence[Prompt], group_size: int, step: int, seed: int) -> list[Request]:
    """Return `group_size` requests for each prompt, group by group.

    A prompt that comes twice in a step counts its samples on, so that no two requests of a step share a seed.
    """
    requests: list[Request] = []
    seen: Counter[str] = Counter()
    for prompt in prompts:
        for index in range(seen[prompt.id], seen[prompt.id] + group_size):
            requests.append(Request(prompt.id, prompt.token_ids, derive_seed(seed, "rollout", step, prompt.id, index), index))
        seen[prompt.id] += group_size
    return requests
