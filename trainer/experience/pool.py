"""The experience pool: samplers put judged groups in, the learner takes them out, and nothing is lost or used twice.

    sampler   take_orders -> deliver                 learner   claim -> consume (with the consumption log)
    anybody   sweep (claims past their lease come back), release (those of a worker that is known to be dead), beat

*Orders.* Groups are numbered within their RL stage; the number decides prompt and seeds. A sampler is given the groups that
came back first, then new ones, as long as the stage needs some, the pool has room (once full, it drains to the low watermark
first), and the group can be consumed before it is too old: the learner's version by then is known, because groups are consumed
in order.

*Age.* `claim` throws away what is older than the bound and never hands it out; what is thrown away is ordered anew.

*Consumption log.* `consume` writes in one transaction which groups a step used, in order. A run that was killed goes on by
learning the logged steps again from its checkpoint, so every group counts exactly once whatever happened.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeVar

from sqlalchemy import ColumnElement, Text, cast, delete, func, insert, select, text, type_coerce, update
from sqlalchemy.exc import DatabaseError, OperationalError, ProgrammingError
from sqlalchemy.orm import Session

from trainer.errors import BusyError
from trainer.experience.database import Database, is_postgresql
from trainer.experience.models import (
    CONSUMED,
    DROPPED,
    FORMAT,
    LEARNING,
    LIVE,
    OPEN,
    READY,
    SAMPLING,
    Cause,
    ConsumptionRow,
    CursorRow,
    DropRow,
    GroupRow,
    MetaRow,
    SampleRow,
    StepRow,
    Table,
    VersionRow,
    WorkerRow,
)
from trainer.types import Completion, Group, Prompt, Sample, Verdict

T = TypeVar("T")
Denial = Literal["full", "lag", "done"]
_LONG_WAIT_SECONDS = 1.0
_GROUPS_PUT_AT_ONCE, _GAP_SECONDS = 16, 0.003
_JSON = ("parts", "statuses")
_APART = {"synchronize_session": False}  # no row of the session is touched by the statement


@dataclass(frozen=True)
class Terms:
    """What decides whether a sampler may begin a group. Counted in groups and in optimizer steps."""

    groups_per_stage: tuple[int, ...]  # that each RL stage consumes
    groups_per_step: int
    group_size: int
    updates_per_step: int
    max_lag: int
    capacity_groups: int
    high_groups: int  # samplers are held back from here on ...
    low_groups: int  # ... until so few are left
    max_attempts: int = 5  # a group handed out so often is given up


@dataclass(frozen=True)
class Order:
    """A group that somebody is to sample."""

    group_id: int
    stage: int
    ordinal: int
    prompt_id: str
    attempt: int


@dataclass(frozen=True)
class Orders:
    orders: tuple[Order, ...]
    denial: Denial | None = None  # why there are none


@dataclass(frozen=True)
class Claim:
    """Groups that the learner holds, oldest first."""

    token: str
    group_ids: tuple[int, ...]
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Step:
    """A line of the consumption log."""

    step: int
    version_before: int
    version_after: int
    group_ids: tuple[int, ...]


@dataclass(frozen=True)
class Worker:
    id: str
    kind: str
    host: str
    pid: int
    doing: str
    version: int
    age_seconds: float  # since its last sign of life ...
    beat_at: float  # ... which was then, by the pool's clock
    facts: dict[str, Any]


class Pool:
    """One run's experience.

    Args:
        database: where it lies.
        owner: identity of the run; a pool of another run is refused.
        prompts: by id, to give groups their prompts back.
        worker: name of this process in claims.
        lease_seconds: how long a claim lasts without a renewal.

    Raises:
        BusyError: the pool is another run's, or of another format.
    """

    def __init__(self, database: Database, owner: str, prompts: dict[str, Prompt], worker: str, lease_seconds: float):
        self.database, self.prompts, self.worker, self.lease_seconds = database, prompts, worker, lease_seconds
        self.postgresql = is_postgresql(database.url)
        self._ahead: dict[int, Group] = {}  # groups that were read before they were asked for
        wanted = {"format": str(FORMAT), "owner": owner}

        def make(session: Session) -> dict[str, str]:
            Table.metadata.create_all(session.connection())
            if session.get(CursorRow, 1) is None:
                session.add(CursorRow(id=1, learner_version=0, held_back=False))
                session.add_all(MetaRow(key=key, value=value) for key, value in wanted.items())
            session.flush()
            return {row.key: row.value for row in session.scalars(select(MetaRow))}

        try:
            try:  # a pool that is there is opened without its lock
                found = database.read(lambda session: {row.key: row.value for row in session.scalars(select(MetaRow))})
            except (OperationalError, ProgrammingError):
                found = {}
            found = found or database.write(make)
        except DatabaseError as error:
            database.close()
            raise BusyError(f"{database.where} cannot be used as a pool ({error.orig}); name another file or database") from error
        for key, value in wanted.items():
            if found.get(key) != value:
                database.close()
                raise BusyError(
                    f"{database.where} holds the experience of another run ({key} {found.get(key, '')[:12]}, this one is "
                    f"{value[:12]}); name another file or database in train.pool.url, or remove it to begin anew"
                )

    # -- samplers -------------------------------------------------------------------------------------------------------

    def take_orders(self, num_groups: int, sampler_version: int, terms: Terms, prompt_of: Callable[[int, int], str]) -> Orders:
        """Return groups to sample, at most so many, or the reason why there are none now.

        Args:
            num_groups: most groups to hand out.
            sampler_version: policy version that will sample them.
            terms: capacity, watermarks, lag bound.
            prompt_of: prompt id of (RL stage, ordinal).
        """
        token = uuid.uuid4().hex

        def take(session: Session) -> Orders:
            mine = session.scalars(select(GroupRow).where(GroupRow.token == token).order_by(GroupRow.id)).all()
            if mine:  # the answer of an earlier attempt was lost
                return Orders(tuple(_order(row) for row in mine))
            cursor = session.scalars(select(CursorRow).where(CursorRow.id == 1).with_for_update()).one()
            now = self._sweep(session, terms.max_attempts)
            rows = self._returned(session, num_groups, cursor.learner_version - sampler_version <= terms.max_lag)
            denial: Denial | None = "lag" if cursor.learner_version - sampler_version > terms.max_lag else None
            if len(rows) < num_groups and denial is None:
                new, denial = self._new_orders(session, cursor, num_groups - len(rows), sampler_version, terms, prompt_of)
                rows += new
            for row in rows:
                row.state, row.owner, row.token = SAMPLING, self.worker, token
                row.lease_until, row.attempt = now + self.lease_seconds, row.attempt + 1
            session.flush()
            return Orders(tuple(_order(row) for row in rows), None if rows else denial)

        return self._write(take)

    def _returned(self, session: Session, num_groups: int, fresh: bool) -> list[GroupRow]:
        """Return groups that came back from a dead sampler."""
        if not fresh:
            return []
        query = select(GroupRow).where(GroupRow.state == OPEN).order_by(GroupRow.stage, GroupRow.ordinal).limit(num_groups)
        return list(session.scalars(query.with_for_update(skip_locked=True)))

    def _new_orders(
        self,
        session: Session,
        cursor: CursorRow,
        num_groups: int,
        sampler_version: int,
        terms: Terms,
        prompt_of: Callable[[int, int], str],
    ) -> tuple[list[GroupRow], Denial | None]:
        """Return rows of new groups: as many as the stages need, the watermarks allow and the lag bound admits."""
        live = _count(session, GroupRow.state.in_(LIVE))
        if cursor.held_back and live > terms.low_groups:
            return [], "full"
        cursor.held_back = live >= terms.high_groups
        room = terms.high_groups - live
        steps_ahead = (terms.max_lag - (cursor.learner_version - sampler_version)) // terms.updates_per_step
        in_time = (steps_ahead + 1) * terms.groups_per_step - live
        if min(room, in_time) <= 0:
            return [], "full" if room <= 0 else "lag"
        rows: list[GroupRow] = []
        left = min(num_groups, room, in_time)
        for stage, wanted in enumerate(terms.groups_per_stage):
            there = _count(session, GroupRow.stage == stage, GroupRow.state != DROPPED)
            highest = select(func.coalesce(func.max(GroupRow.ordinal), -1)).where(GroupRow.stage == stage)
            first = session.scalars(highest).one() + 1
            for ordinal in range(first, first + min(left, wanted - there)):
                rows.append(_new_row(stage, ordinal, prompt_of(stage, ordinal), terms.group_size))
                left -= 1
        session.add_all(rows)
        return rows, None if rows else "done"

    def deliver(self, delivered: Sequence[tuple[Order, Group]]) -> list[Order]:
        """Put judged groups in, some at a time, so that nobody waits long for the lock.

        Args:
            delivered: orders of one `take_orders`, each with its group.

        Returns:
            The orders that were somebody else's by now, because their lease had ended; their samples are counted as late.
        """
        late: list[Order] = []
        for first in range(0, len(delivered), _GROUPS_PUT_AT_ONCE):
            if first and not self.postgresql:
                time.sleep(_GAP_SECONDS)  # SQLite's lock has no queue
            late += self._put(delivered[first : first + _GROUPS_PUT_AT_ONCE])
        return late

    def _put(self, delivered: Sequence[tuple[Order, Group]]) -> list[Order]:
        values_of = {  # made before the lock is held
            order.group_id: [_sample_values(order.group_id, position, s) for position, s in enumerate(group.samples)]
            for order, group in delivered
        }

        def put(session: Session) -> list[Order]:
            now, late, values = self._now(session), [], []
            ids = [order.group_id for order, _ in delivered]
            rows = {row.id: row for row in session.scalars(select(GroupRow).where(GroupRow.id.in_(ids)).with_for_update())}
            for order, group in delivered:
                row = rows[order.group_id]
                mine = row.owner == self.worker and row.attempt == order.attempt
                if mine and row.state == READY:
                    continue  # stored by an earlier attempt whose answer was lost
                if not mine or row.state != SAMPLING:
                    late.append(order)
                    session.add(self._drop("late", order.group_id, len(group.samples), now))
                    continue
                row.state, row.lease_until = READY, 0.0
                row.version = min(sample.completion.policy_version for sample in group.samples)
                values += values_of[order.group_id]
            session.flush()
            if values:
                session.execute(insert(SampleRow), values)
            return late

        return self._write(put)

    def renew(self) -> None:
        """Put off the end of this worker's leases."""

        def put_off(session: Session) -> None:
            until = self._now(session) + self.lease_seconds
            held = (GroupRow.owner == self.worker) & GroupRow.state.in_((SAMPLING, LEARNING))
            session.execute(update(GroupRow).where(held).values(lease_until=until))

        self._write(put_off)

    # -- learner --------------------------------------------------------------------------------------------------------

    def claim(self, num_groups: int, stage: int, min_version: int) -> Claim | None:
        """Return exactly so many groups of an RL stage, or None when fewer are ready. Groups older than the bound are dropped.

        Args:
            num_groups: of a step.
            stage: index of the RL stage.
            min_version: lowest policy version that may still be learnt from.
        """
        token = uuid.uuid4().hex

        def take(session: Session) -> tuple[int, ...] | None:
            again = session.scalars(select(GroupRow.id).where(GroupRow.token == token).order_by(GroupRow.ordinal)).all()
            if again:
                return tuple(again)
            now = self._sweep(session, None)
            self._drop_stale(session, min_version, now)
            query = select(GroupRow.id).where(GroupRow.state == READY, GroupRow.stage == stage).order_by(GroupRow.ordinal)
            ids = session.scalars(query.limit(num_groups).with_for_update(skip_locked=True)).all()
            if len(ids) < num_groups:
                return None
            mine = {"state": LEARNING, "owner": self.worker, "token": token, "lease_until": now + self.lease_seconds}
            session.execute(update(GroupRow).where(GroupRow.id.in_(ids)).values(**mine), execution_options=_APART)
            return tuple(ids)

        ids = self._write(take)
        return None if ids is None else Claim(token, ids, self.groups(ids))

    def _drop_stale(self, session: Session, min_version: int, now: float) -> None:
        old = (GroupRow.state == READY) & (GroupRow.version < min_version)
        for row in session.scalars(select(GroupRow).where(old).with_for_update(skip_locked=True)).all():
            row.state = DROPPED
            session.add(self._drop("stale", row.id, row.num_samples, now, row.owner))

    def consume(self, claim: Claim, step: int, version_before: int, version_after: int) -> None:
        """Write into the log that a step used the claimed groups, in their order.

        Raises:
            BusyError: another learner took them in the meantime; the step must not count.
        """

        def write(session: Session) -> bool:
            done = session.get(StepRow, step)
            if done is not None:
                return done.token == claim.token
            held = (GroupRow.id.in_(claim.group_ids)) & (GroupRow.token == claim.token) & GroupRow.state.in_((LEARNING, READY))
            mine = session.scalars(select(GroupRow.id).where(held).with_for_update()).all()
            if len(mine) != len(claim.group_ids):
                return False
            used = update(GroupRow).where(GroupRow.id.in_(mine)).values(state=CONSUMED, lease_until=0.0)
            session.execute(used, execution_options=_APART)
            positions = enumerate(claim.group_ids)
            session.add(StepRow(step=step, version_before=version_before, version_after=version_after, token=claim.token))
            session.execute(insert(ConsumptionRow), [{"step": step, "position": p, "group_id": g} for p, g in positions])
            self._set_learner_version(session, version_after)
            return True

        if not self._write(write):
            raise BusyError(f"{self.database.where}: another learner took the samples of step {step}; only one learner per pool")

    def set_learner_version(self, version: int) -> None:
        """Say where the learner is: decides which orders are still in time."""
        self._write(lambda session: self._set_learner_version(session, version))

    @staticmethod
    def _set_learner_version(session: Session, version: int) -> None:
        session.execute(update(CursorRow).where(CursorRow.id == 1).values(learner_version=version))

    def steps(self, after: int = 0) -> list[Step]:
        """Return the consumption log, from the step after a given one."""

        def read(session: Session) -> list[Step]:
            used: dict[int, list[int]] = {}
            query = select(ConsumptionRow).where(ConsumptionRow.step > after)
            for row in session.scalars(query.order_by(ConsumptionRow.step, ConsumptionRow.position)):
                used.setdefault(row.step, []).append(row.group_id)
            rows = session.scalars(select(StepRow).where(StepRow.step > after).order_by(StepRow.step)).all()
            return [Step(r.step, r.version_before, r.version_after, tuple(used.get(r.step, ()))) for r in rows]

        return self.database.read(read)

    def last_step(self) -> int:
        """Return the last step of the consumption log; 0 where it is empty."""
        return self.database.read(lambda session: session.scalar(select(func.max(StepRow.step))) or 0)

    def num_ready(self, stage: int) -> int:
        """Return how many groups of an RL stage wait to be claimed; takes no lock."""
        return self.database.read(lambda session: _count(session, GroupRow.state == READY, GroupRow.stage == stage))

    def read_ahead(self, num_groups: int, stage: int) -> None:
        """Read the groups that will be claimed next, so that the claim need not; what is stored of a group never changes."""
        ready = (GroupRow.state == READY) & (GroupRow.stage == stage)
        query = select(GroupRow.id).where(ready).order_by(GroupRow.ordinal).limit(num_groups)
        ids = self.database.read(lambda session: session.scalars(query).all())
        known = self._ahead
        new = self._read([group_id for group_id in ids if group_id not in known])
        self._ahead = {group_id: known.get(group_id) or new[group_id] for group_id in ids}

    def groups(self, ids: Sequence[int]) -> tuple[Group, ...]:
        """Return groups with their samples, in the order of the ids."""
        known = self._ahead
        found = self._read([group_id for group_id in ids if group_id not in known])
        return tuple(known.get(group_id) or found[group_id] for group_id in ids)

    def _read(self, ids: Sequence[int]) -> dict[int, Group]:
        if not ids:
            return {}

        def read(session: Session) -> tuple[dict[int, str], Sequence[Any]]:
            prompts = dict(session.execute(select(GroupRow.id, GroupRow.prompt_id).where(GroupRow.id.in_(ids))).all())
            table = SampleRow.__table__.c
            as_text = cast if self.postgresql else type_coerce
            columns = [as_text(column, Text).label(column.name) if column.name in _JSON else column for column in table]
            query = select(*columns).where(SampleRow.group_id.in_(ids)).order_by(SampleRow.group_id, SampleRow.position)
            return prompts, session.execute(query).all()

        prompt_ids, rows = self.database.read(read)
        samples: dict[int, list[Sample]] = {group_id: [] for group_id in ids}
        for row in rows:
            samples[row.group_id].append(_sample(row, self.prompts[prompt_ids[row.group_id]]))
        return {group_id: Group(self.prompts[prompt_ids[group_id]], tuple(each)) for group_id, each in samples.items()}

    # -- anybody --------------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Bring back what was claimed by somebody whose lease has ended."""
        self._write(lambda session: self._sweep(session, None))

    def _sweep(self, session: Session, max_attempts: int | None) -> float:
        now = self._now(session)
        ended = (GroupRow.lease_until < now) & GroupRow.state.in_((SAMPLING, LEARNING))
        self._bring_back(session, ended, max_attempts, now)
        return now

    def release(self, worker: str) -> int:
        """Bring back what a worker held, because it is gone; return how many groups that were."""

        def bring(session: Session) -> int:
            held = (GroupRow.owner == worker) & GroupRow.state.in_((SAMPLING, LEARNING))
            return self._bring_back(session, held, None, self._now(session))

        return self._write(bring)

    def release_learner(self) -> int:
        """Bring back what any earlier learner held: there is one learner, and it is this process."""

        def bring(session: Session) -> int:
            return self._bring_back(session, GroupRow.state == LEARNING, None, self._now(session))

        return self._write(bring)

    def _bring_back(self, session: Session, which: ColumnElement[bool], max_attempts: int | None, now: float) -> int:
        rows = session.scalars(select(GroupRow).where(which).with_for_update(skip_locked=True)).all()
        for row in rows:
            if row.state == LEARNING:
                row.state, row.lease_until = READY, 0.0  # the token stays: its learner may only have been slow
            elif max_attempts is not None and row.attempt >= max_attempts:
                row.state = DROPPED
                session.add(self._drop("abandoned", row.id, row.num_samples, now, row.owner))
            else:
                row.state, row.owner, row.token, row.lease_until = OPEN, None, None, 0.0
        session.flush()
        return len(rows)

    def enlist(self, kind: str, lives: Callable[[Worker], bool]) -> None:
        """Give the first sign of life under a name that nobody else may have.

        Args:
            kind: of worker.
            lives: whether the process that had the name before is still there.

        Raises:
            BusyError: it is.
        """

        def write(session: Session) -> Worker | None:
            row, now = session.get(WorkerRow, self.worker), self._now(session)
            if row is not None and (row.host, row.pid) != (socket.gethostname(), os.getpid()) and lives(_worker(row, now)):
                return _worker(row, now)
            self._beat(session, kind, "starting", 0, {})
            return None

        other = self._write(write)
        if other is not None:
            raise BusyError(
                f"{self.database.where} has a {self.worker} already: process {other.pid} on {other.host}, {other.doing}, seen "
                f"{other.age_seconds:.0f} s ago. A pool has one {self.worker}: stop it, or name another pool in train.pool.url"
            )

    def beat(self, kind: str, doing: str, version: int, **facts: Any) -> None:
        """Say that this worker lives and what it does."""
        self._write(lambda session: self._beat(session, kind, doing, version, facts))

    def _beat(self, session: Session, kind: str, doing: str, version: int, facts: dict[str, Any]) -> None:
        now = self._now(session)
        row = session.get(WorkerRow, self.worker)
        if row is None or row.pid != os.getpid():
            if row is not None:
                session.delete(row)
                session.flush()
            row = WorkerRow(id=self.worker, kind=kind, host=socket.gethostname(), pid=os.getpid(), started_at=now)
            session.add(row)
        row.doing, row.version, row.beat_at, row.facts = doing, version, now, facts

    def workers(self) -> list[Worker]:
        """Return everybody who ever gave a sign of life and was not forgotten."""

        def read(session: Session) -> list[Worker]:
            now = self._now(session)
            rows = session.scalars(select(WorkerRow).order_by(WorkerRow.id))
            return [_worker(row, now) for row in rows]

        return self.database.read(read)

    def forget_worker(self, worker: str) -> None:
        self._write(lambda session: session.execute(delete(WorkerRow).where(WorkerRow.id == worker)) and None)

    def record_version(self, version: int, step: int, weights_sha256: str) -> bool:
        """Write down what a policy version is; return whether it is what it was before, if it was there before."""

        def write(session: Session) -> bool:
            row = session.get(VersionRow, version)
            if row is not None:
                same = row.weights_sha256 == weights_sha256
                row.weights_sha256 = weights_sha256
                return same
            values = {"version": version, "step": step, "weights_sha256": weights_sha256}
            session.add(VersionRow(**values, published_at=self._now(session)))
            return True

        return self._write(write)

    def versions(self) -> dict[int, str]:
        """Return the hash of the weights of every recorded version."""
        query = select(VersionRow.version, VersionRow.weights_sha256)
        return self.database.read(lambda session: {row.version: row.weights_sha256 for row in session.execute(query)})

    def counts(self) -> dict[str, int]:
        """Return groups by state, `drop/<cause>` in samples, and `samples` that were ever stored."""

        def read(session: Session) -> dict[str, int]:
            by_state = select(GroupRow.state, func.count()).group_by(GroupRow.state)
            by_cause = select(DropRow.cause, func.sum(DropRow.num_samples)).group_by(DropRow.cause)
            found = {state: int(number) for state, number in session.execute(by_state)}
            return found | {f"drop/{cause}": int(number) for cause, number in session.execute(by_cause)}

        return self.database.read(read)

    def set_fact(self, key: str, value: str) -> None:
        """Remember a small fact about the run beside its samples."""
        self._write(lambda session: session.merge(MetaRow(key=key, value=value)) and None)

    def fact(self, key: str) -> str | None:
        row = self.database.read(lambda session: session.get(MetaRow, key))
        return row.value if row else None

    def close(self) -> None:
        self.database.close()

    def _write(self, work: Callable[[Session], T]) -> T:
        """Run work in one writing transaction. While nobody could write, nobody could renew: leases are longer by that time."""
        began = time.monotonic()

        def timed(session: Session) -> T:
            session.connection()
            waited = time.monotonic() - began
            if waited > _LONG_WAIT_SECONDS:
                held = GroupRow.state.in_((SAMPLING, LEARNING)) & (GroupRow.lease_until >= self._now(session) - waited)
                session.execute(update(GroupRow).where(held).values(lease_until=GroupRow.lease_until + waited))
            return work(session)

        return self.database.write(timed)

    # -- small things ---------------------------------------------------------------------------------------------------

    def _now(self, session: Session) -> float:
        """Return the pool's clock in seconds: the server's, so that workers on several machines agree."""
        if self.postgresql:
            return float(session.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())
        return time.time()

    def _drop(self, cause: Cause, group_id: int, num_samples: int, now: float, owner: str | None = None) -> DropRow:
        return DropRow(cause=cause, group_id=group_id, num_samples=num_samples, owner=owner or self.worker, at=now)


def _worker(row: WorkerRow, now: float) -> Worker:
    return Worker(row.id, row.kind, row.host, row.pid, row.doing, row.version, now - row.beat_at, row.beat_at, row.facts)


def _count(session: Session, *where: ColumnElement[bool]) -> int:
    return session.scalar(select(func.count()).select_from(GroupRow).where(*where)) or 0


def _order(row: GroupRow) -> Order:
    return Order(row.id, row.stage, row.ordinal, row.prompt_id, row.attempt)


def _new_row(stage: int, ordinal: int, prompt_id: str, group_size: int) -> GroupRow:
    return GroupRow(
        stage=stage, ordinal=ordinal, prompt_id=prompt_id, state=OPEN, lease_until=0.0, attempt=0, num_samples=group_size
    )


def _sample_values(group_id: int, position: int, sample: Sample) -> dict[str, Any]:
    completion, verdict = sample.completion, sample.verdict
    return {
        "group_id": group_id,
        "position": position,
        "sample_index": completion.sample_index,
        "token_ids": struct.pack(f"<{len(completion.token_ids)}i", *completion.token_ids),
        "logprobs": struct.pack(f"<{len(completion.logprobs)}f", *completion.logprobs),
        "policy_version": completion.policy_version,
        "finish_reason": completion.finish_reason,
        "sampler_id": completion.sampler_id,
        "text": str(sample.text).replace("\0", "\ufffd"),
        "reward": verdict.score,
        "status": verdict.status,
        "parts": verdict.parts,
        "statuses": verdict.statuses,
        "detail": verdict.detail.replace("\0", "\ufffd"),
        "seconds": verdict.seconds,
    }


def _sample(row: Any, prompt: Prompt) -> Sample:
    completion = Completion(
        prompt_id=prompt.id,
        sample_index=row.sample_index,
        token_ids=struct.unpack(f"<{len(row.token_ids) // 4}i", row.token_ids),
        logprobs=struct.unpack(f"<{len(row.logprobs) // 4}f", row.logprobs),
        finish_reason=row.finish_reason,
        policy_version=row.policy_version,
        sampler_id=row.sampler_id,
    )
    verdict = Verdict(row.status, row.reward, _parse(row.parts), row.seconds, row.detail, _parse(row.statuses))
    return Sample(prompt, completion, row.text, verdict)


@lru_cache(4096)
def _parse(text: str) -> Any:
    """Return a small JSON object; most samples have one of a few."""
    return json.loads(text)
