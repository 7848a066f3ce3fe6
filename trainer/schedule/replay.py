"""Exact replay of an async run: the same groups in the same order give the same policy, bit for bit.

Nothing is sampled and no sampler is needed: the pool holds token ids, log-probs and verdicts, the consumption log says which
groups each step used. Along the way every version that was handed over is compared with what was recorded of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from trainer.anchors.guard import AnchorGuard
from trainer.config.schema import RLStage
from trainer.errors import DataError
from trainer.experience.pool import Pool
from trainer.learn.learner import Learner
from trainer.policy.versions import weights_sha256
from trainer.schedule.prompts import locate

THREADS = "threads"  # fact in the pool: torch threads of the learner, on which sums depend to the last bit


@dataclass(frozen=True)
class Replayed:
    num_steps: int
    version: int
    compared: int  # versions whose recorded weights were compared
    differing: tuple[int, ...]  # those that came out otherwise

    @property
    def identical(self) -> bool:
        return self.compared > 0 and not self.differing


def replay(
    learner: Learner,
    pool: Pool,
    stages: Sequence[RLStage],
    on_step: Callable[[int, int], None] = lambda step, total: None,
    guard: AnchorGuard | None = None,
) -> Replayed:
    """Learn the whole consumption log again.

    Args:
        learner: as it was before the first step.
        pool: of the run.
        stages: the run's RL stages.
        on_step: called with (step, number of steps) after each.
        guard: makes anchors anew where the run did.

    Raises:
        DataError: the log is empty, has a gap, or leads to other versions than recorded.
    """
    log, recorded = pool.steps(), pool.versions()
    where = pool.database.where
    if not log:
        raise DataError(where, "holds no consumed step, so there is nothing to replay")
    if [entry.step for entry in log] != list(range(1, len(log) + 1)):
        raise DataError(where, "its consumption log has a gap; the pool is not whole")
    threads = pool.fact(THREADS)
    if threads is not None:
        torch.set_num_threads(int(threads))
    differing, compared = [], 0
    for entry in log:
        position = locate(stages, entry.step)
        if position.step == 1 and position.index > 0:
            learner.begin_stage(position.stage)
        groups = pool.groups(entry.group_ids)
        stats = learner.step(groups, entry.step)
        if stats.version != entry.version_after:
            raise DataError(where, f"step {entry.step} led to version {entry.version_after}, its replay to {stats.version}")
        if stats.version in recorded:
            compared += 1
            if weights_sha256(learner.policy) != recorded[stats.version]:
                differing.append(stats.version)
        if guard is not None:
            samples = [sample for group in groups for sample in group.samples]
            last = entry.step == sum(stage.steps for stage in stages)
            guard.after_step(entry.step, position.stage, samples, stats.metrics, last)
        on_step(entry.step, len(log))
    return Replayed(len(log), learner.version, compared, tuple(differing))
