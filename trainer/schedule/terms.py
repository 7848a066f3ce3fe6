"""What the configuration says about ordering groups, as the pool wants it; the same for learner and samplers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.config.schema import CampaignConfig, Train
from trainer.experience.database import Database
from trainer.experience.pool import Order, Terms
from trainer.schedule.prompts import PromptCursor
from trainer.types import Prompt, Request, derive_seed

DATABASE, POLICIES = "experience.db", "policies"
LEARNER = "learner"  # its name in the pool


def make_terms(train: Train) -> Terms:
    """Return the terms of a configuration."""
    batch, pool = train.batch, train.pool
    capacity = pool.capacity // batch.group_size
    high = max(int(capacity * pool.high_watermark), batch.prompts_per_step)
    return Terms(
        groups_per_stage=tuple(stage.steps * batch.prompts_per_step for stage in train.stages),
        groups_per_step=batch.prompts_per_step,
        group_size=batch.group_size,
        updates_per_step=batch.optimizer_steps_per_step,
        max_lag=train.sync.max_policy_update_lag,
        capacity_groups=capacity,
        high_groups=high,
        low_groups=min(int(capacity * pool.low_watermark), high),
        max_attempts=pool.max_attempts,
    )


def groups_per_claim(train: Train) -> int:
    """Return how many groups an embedded sampler takes at once."""
    fills = max(train.sampler.slots // train.batch.group_size, 1)
    return train.sampler.groups_per_claim or min(fills, train.batch.prompts_per_step)


def probe_tolerance(config: CampaignConfig) -> float:
    """Return the tolerance of the probe."""
    sampler = config.train.sampler
    fp8_cache = sampler.kind == "vllm" and sampler.vllm.kv_cache_dtype != "auto"
    coarse = config.base.dtype != "float32" or sampler.quantization != "none" or fp8_cache
    return config.train.sync.probe_tolerance or (5e-2 if coarse else 1e-3)


def threads_each(threads: int, processes: int) -> int:
    """Return the torch threads of learner and samplers: more threads than cores make all of them many times slower."""
    return max(1, threads // (1 + processes))


def pool_url(train: Train, run: Path) -> str:
    return train.pool.url or f"sqlite:///{run.resolve() / DATABASE}"


def open_database(
    train: Train, run: Path, lost: Callable[[str], None] | None = None, waiting: Callable[[str], None] | None = None
) -> Database:
    """Open the database of a run's pool."""
    return Database(pool_url(train, run), str(run.resolve()), train.watchdog.deadline_seconds, lost, waiting)


class OrderBook:
    """Turns orders into requests: an order's RL stage and number decide its prompt and its seeds.

    Args:
        prompts: all training prompts.
        train: RL stages and group size.
        seed: the campaign's.
    """

    def __init__(self, prompts: Sequence[Prompt], train: Train, seed: int):
        self.train, self.seed = train, seed
        self.by_id = {prompt.id: prompt for prompt in prompts}
        self.cursors = [PromptCursor(prompts, stage, train.batch.prompts_per_step, seed) for stage in train.stages]

    def prompt_of(self, stage: int, ordinal: int) -> str:
        return self.cursors[stage].at(ordinal).id

    def requests(self, order: Order) -> list[Request]:
        """Return the requests of a group; who samples it, and when, changes no seed."""
        prompt, name = self.by_id[order.prompt_id], self.train.stages[order.stage].name
        return [
            Request(prompt.id, prompt.token_ids, derive_seed(self.seed, "rollout", name, order.ordinal, prompt.id, index), index)
            for index in range(self.train.batch.group_size)
        ]
