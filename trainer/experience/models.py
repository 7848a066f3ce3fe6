"""The tables of the experience pool, as typed SQLAlchemy models.

    cursor       one row: the learner's version, whether samplers are held back
    groups       all completions of one prompt together; handed out, returned and consumed whole
    samples      the completions: token ids and log-probs as bytes, verdict, policy version
    consumption  which groups each step used, in order; steps: the policy version before and after
    versions     policies that were handed over          workers: who is alive and what it does
    drops        what was thrown away and why            meta: format and owner of the pool

States of a group:

    open -> sampling -> ready -> learning -> consumed
      ^________|          |__________|
     (claimer died)    (too old) -> dropped
"""

from __future__ import annotations

from typing import Any, Literal

from sqlalchemy import JSON, ForeignKey, Index, String, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

FORMAT = 1

OPEN, SAMPLING, READY, LEARNING, CONSUMED, DROPPED = "open", "sampling", "ready", "learning", "consumed", "dropped"
LIVE = (OPEN, SAMPLING, READY, LEARNING)
Cause = Literal["stale", "late", "abandoned"]


class Table(DeclarativeBase):
    pass


class GroupRow(Table):
    __tablename__ = "groups"
    __table_args__ = (UniqueConstraint("stage", "ordinal"), Index("by_state", "state", "stage", "ordinal"))

    id: Mapped[int] = mapped_column(primary_key=True)
    stage: Mapped[int]  # index of the RL stage
    ordinal: Mapped[int]  # 0, 1, 2, ... within the RL stage; decides the prompt and the seeds
    prompt_id: Mapped[str]
    state: Mapped[str] = mapped_column(String(16))
    owner: Mapped[str | None]  # worker that holds the claim
    token: Mapped[str | None]  # of the claim, so that a claim whose answer was lost can be asked for again
    lease_until: Mapped[float]  # the pool's clock; 0 without a claim
    attempt: Mapped[int]  # times that it was handed to a sampler
    version: Mapped[int | None]  # lowest policy version among its samples
    num_samples: Mapped[int]


class SampleRow(Table):
    __tablename__ = "samples"

    group_id: Mapped[int] = mapped_column(ForeignKey("groups.id"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)  # within the group
    sample_index: Mapped[int]
    token_ids: Mapped[bytes]  # int32, little-endian
    logprobs: Mapped[bytes]  # float32, little-endian, one for each token
    policy_version: Mapped[int]
    finish_reason: Mapped[str]
    sampler_id: Mapped[str]
    text: Mapped[str]
    reward: Mapped[float]
    status: Mapped[str]
    parts: Mapped[dict[str, Any]] = mapped_column(JSON)
    statuses: Mapped[dict[str, Any]] = mapped_column(JSON)
    detail: Mapped[str]
    seconds: Mapped[float]


class ConsumptionRow(Table):
    __tablename__ = "consumption"

    step: Mapped[int] = mapped_column(primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    group_id: Mapped[int] = mapped_column(ForeignKey("groups.id"), unique=True)


class StepRow(Table):
    __tablename__ = "steps"

    step: Mapped[int] = mapped_column(primary_key=True)
    version_before: Mapped[int]
    version_after: Mapped[int]
    token: Mapped[str]


class VersionRow(Table):
    __tablename__ = "versions"

    version: Mapped[int] = mapped_column(primary_key=True)
    step: Mapped[int]
    weights_sha256: Mapped[str]
    published_at: Mapped[float]


class WorkerRow(Table):
    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]  # learner or sampler
    host: Mapped[str]
    pid: Mapped[int]
    doing: Mapped[str]
    version: Mapped[int]  # policy version that it works with
    started_at: Mapped[float]
    beat_at: Mapped[float]
    facts: Mapped[dict[str, Any]] = mapped_column(JSON)


class DropRow(Table):
    __tablename__ = "drops"

    id: Mapped[int] = mapped_column(primary_key=True)
    cause: Mapped[str]
    group_id: Mapped[int]
    num_samples: Mapped[int]
    owner: Mapped[str]
    at: Mapped[float]


class CursorRow(Table):
    __tablename__ = "cursor"

    id: Mapped[int] = mapped_column(primary_key=True)
    learner_version: Mapped[int]
    held_back: Mapped[bool]  # samplers wait until the pool has drained to the low watermark


class MetaRow(Table):
    __tablename__ = "meta"

    key: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]
