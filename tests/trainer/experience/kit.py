"""Prompts, terms and judged groups for tests of the pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sqlalchemy import update

from trainer.experience.models import GroupRow
from trainer.experience.pool import Order, Orders, Pool, Terms
from trainer.types import Completion, Group, Prompt, Sample, Verdict

PROMPTS = {f"p{i}": Prompt(f"p{i}", "main", "train", f"p{i}", (2, 3 + i % 7), "x") for i in range(64)}
TERMS = Terms(
    groups_per_stage=(1000,),
    groups_per_step=2,
    group_size=2,
    updates_per_step=1,
    max_lag=1000,
    capacity_groups=1000,
    high_groups=1000,
    low_groups=800,
)


def prompt_of(stage: int, ordinal: int) -> str:
    return f"p{(7 * stage + ordinal) % 64}"


def take(pool: Pool, number: int, version: int = 0, **changes: Any) -> Orders:
    return pool.take_orders(number, version, replace(TERMS, **changes), prompt_of)


def group_for(order: Order, version: int = 0, size: int = 2) -> Group:
    """Return a judged group whose content the order's number decides."""
    prompt = PROMPTS[order.prompt_id]
    samples = []
    for index in range(size):
        ids = (*(5 + (order.ordinal + index + j) % 9 for j in range(3)), 1)
        logprobs = tuple(-0.25 * (j + 1) for j in range(4))
        completion = Completion(prompt.id, index, ids, logprobs, "stop", version, "s0")
        parts, statuses = {"exact": float(index)}, {"exact": "ok"}
        samples.append(Sample(prompt, completion, f"text {index}", Verdict("ok", float(index), parts, 0.5, "seen", statuses)))
    return Group(prompt, tuple(samples))


def expire(pool: Pool) -> None:
    """Let all leases have ended a second ago, by the pool's own clock, however long the test has taken so far."""
    pool.database.write(lambda session: session.execute(update(GroupRow).values(lease_until=pool._now(session) - 1.0)))


def fill(pool: Pool, number: int, version: int = 0, **changes: Any) -> list[Order]:
    """Order and deliver so many groups."""
    orders = list(take(pool, number, version, **changes).orders)
    assert len(orders) == number
    assert pool.deliver([(order, group_for(order, version)) for order in orders]) == []
    return orders
