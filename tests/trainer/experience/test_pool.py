"""The pool's promises, on SQLite and PostgreSQL alike: nothing lost, nothing twice, nothing too old."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import text

from tests.postgresql import PASSWORD
from tests.trainer.experience.kit import PROMPTS, expire, fill, group_for, take
from trainer.errors import BusyError, ConfigError, StalledError
from trainer.experience.database import Database, is_postgresql
from trainer.experience.pool import Pool

Open = Callable[..., Pool]


def test_a_group_comes_out_as_it_went_in(open_pool: Open) -> None:
    sampler, learner = open_pool("s0"), open_pool("learner")
    orders = fill(sampler, 2, version=7)
    claim = learner.claim(2, 0, min_version=0)
    assert claim is not None
    assert claim.groups == tuple(group_for(order, 7) for order in orders)


def test_orders_are_numbered_and_name_their_prompt(open_pool: Open) -> None:
    a, b = open_pool("s0"), open_pool("s1")
    orders = [*take(a, 3).orders, *take(b, 2).orders, *take(a, 1).orders]
    assert [order.ordinal for order in orders] == [0, 1, 2, 3, 4, 5]
    assert [order.prompt_id for order in orders] == [f"p{i}" for i in range(6)]


def test_a_step_is_claimed_whole_or_not_at_all(open_pool: Open) -> None:
    sampler, learner = open_pool("s0"), open_pool("learner")
    fill(sampler, 3)
    assert learner.claim(4, 0, 0) is None
    assert learner.counts()["ready"] == 3
    claim = learner.claim(2, 0, 0)
    assert claim is not None
    assert claim.group_ids == (1, 2)
    assert learner.claim(2, 0, 0) is None


def test_the_log_says_what_each_step_used_in_order(open_pool: Open) -> None:
    sampler, learner = open_pool("s0"), open_pool("learner")
    fill(sampler, 4)
    used = []
    for step in (1, 2):
        claim = learner.claim(2, 0, 0)
        assert claim is not None
        learner.consume(claim, step, step - 1, step)
        used.append(claim.group_ids)
    steps = learner.steps()
    assert [(s.step, s.version_before, s.version_after, s.group_ids) for s in steps] == [(1, 0, 1, used[0]), (2, 1, 2, used[1])]
    assert [s.step for s in learner.steps(after=1)] == [2]
    assert learner.counts()["consumed"] == 4


def test_samples_older_than_the_bound_are_dropped_counted_and_ordered_anew(open_pool: Open) -> None:
    sampler, learner = open_pool("s0"), open_pool("learner")
    fill(sampler, 2, version=0, groups_per_stage=(4,))
    fill(sampler, 2, version=5, groups_per_stage=(4,))
    assert take(sampler, 1, groups_per_stage=(4,)).denial == "done"
    claim = learner.claim(2, 0, min_version=3)
    assert claim is not None
    assert [sample.completion.policy_version for group in claim.groups for sample in group.samples] == [5] * 4
    assert learner.counts()["drop/stale"] == 4  # samples, not groups
    anew = take(sampler, 5, version=5, groups_per_stage=(4,))
    assert [order.ordinal for order in anew.orders] == [4, 5]


def test_a_dead_samplers_groups_come_back_when_their_lease_ends(open_pool: Open) -> None:
    dead, alive = open_pool("s0"), open_pool("s1")
    lost = take(dead, 2).orders
    [held] = take(alive, 1).orders
    assert held.ordinal == 2
    assert alive.deliver([(held, group_for(held))]) == []
    expire(dead)
    again = take(alive, 2).orders
    assert [order.group_id for order in again] == [order.group_id for order in lost]
    assert [order.attempt for order in again] == [2, 2]


def test_a_renewed_lease_holds(open_pool: Open) -> None:
    slow, other = open_pool("s0"), open_pool("s1")
    take(slow, 1)
    expire(slow)
    slow.renew()
    assert [order.ordinal for order in take(other, 1).orders] == [1]


def test_what_a_frozen_sampler_delivers_too_late_is_refused_and_counted(open_pool: Open) -> None:
    frozen, other, learner = open_pool("s0"), open_pool("s1"), open_pool("learner")
    order = take(frozen, 1).orders[0]
    assert learner.release("s0") == 1
    again = take(other, 1).orders[0]
    assert again.group_id == order.group_id
    assert frozen.deliver([(order, group_for(order, 1))]) == [order]
    assert other.deliver([(again, group_for(again, 2))]) == []
    assert frozen.deliver([(order, group_for(order, 1))]) == [order]
    claim = learner.claim(1, 0, 0)
    assert claim is not None
    assert claim.groups == (group_for(again, 2),)
    assert learner.counts()["drop/late"] == 4


def test_an_attempt_of_a_samplers_earlier_life_is_refused(open_pool: Open) -> None:
    """A sampler that is started anew keeps its name, and may be given the very group that its frozen predecessor holds."""
    frozen, again = open_pool("s0"), open_pool("s0")
    order = take(frozen, 1).orders[0]
    frozen.release("s0")
    second = take(again, 1).orders[0]
    assert (second.group_id, second.attempt) == (order.group_id, 2)
    assert frozen.deliver([(order, group_for(order, 1))]) == [order]
    assert again.deliver([(second, group_for(second, 2))]) == []
    claim = again.claim(1, 0, 0)
    assert claim is not None
    assert claim.groups == (group_for(second, 2),)


def test_groups_that_came_back_are_not_given_to_a_sampler_that_is_too_far_behind(open_pool: Open) -> None:
    lost, behind = open_pool("s0"), open_pool("s1")
    take(lost, 1)
    lost.release("s0")
    lost.set_learner_version(9)
    assert take(behind, 1, version=0, max_lag=8).denial == "lag"
    assert [order.ordinal for order in take(behind, 1, version=1, max_lag=8).orders] == [0]


def test_leases_last_longer_by_the_time_in_which_nobody_could_write(
    open_pool: Open, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_postgresql(url):
        pytest.skip("the server's clock is its own")
    slow, other = open_pool("s0"), open_pool("s1")
    [order] = take(slow, 1).orders
    ticks = iter([0.0, 100.0])  # before and after the wait for the database
    clock = SimpleNamespace(monotonic=lambda: next(ticks), time=lambda: time.time() + 100)
    with monkeypatch.context() as patch:
        patch.setattr("trainer.experience.pool.time", clock)
        assert [found.ordinal for found in take(other, 1).orders] == [1], "s0 could not have renewed its lease of 60 s"
    assert slow.deliver([(order, group_for(order))]) == []


def test_a_group_that_kills_every_sampler_is_given_up(open_pool: Open) -> None:
    sampler = open_pool("s0", lease_seconds=0.0)
    for attempt in (1, 2, 3):
        assert [(o.ordinal, o.attempt) for o in take(sampler, 1, max_attempts=3).orders] == [(0, attempt)]
        time.sleep(0.01)
    assert [order.ordinal for order in take(sampler, 1, max_attempts=3).orders] == [1]
    assert sampler.counts()["drop/abandoned"] == 2


def test_a_killed_learners_claim_comes_back_and_counts_once(open_pool: Open) -> None:
    sampler, first, second = open_pool("s0"), open_pool("learner"), open_pool("learner")
    fill(sampler, 2)
    lost = first.claim(2, 0, 0)
    assert lost is not None
    assert second.release_learner() == 2
    claim = second.claim(2, 0, 0)
    assert claim is not None
    assert claim.group_ids == lost.group_ids
    with pytest.raises(BusyError, match="another learner took the samples of step 1"):
        first.consume(lost, 1, 0, 1)
    second.consume(claim, 1, 0, 1)
    with pytest.raises(BusyError, match="another learner took the samples of step 1"):
        first.consume(lost, 1, 0, 1)
    assert [step.group_ids for step in second.steps()] == [claim.group_ids]


def test_a_slow_learner_keeps_what_nobody_else_took(open_pool: Open) -> None:
    sampler, learner = open_pool("s0"), open_pool("learner")
    fill(sampler, 2)
    claim = learner.claim(2, 0, 0)
    assert claim is not None
    expire(learner)
    sampler.sweep()
    learner.consume(claim, 1, 0, 1)
    learner.consume(claim, 1, 0, 1)  # asked again after a lost answer
    assert len(learner.steps()) == 1


def test_a_full_pool_holds_samplers_back_until_it_has_drained_to_the_low_watermark(open_pool: Open) -> None:
    sampler, learner = open_pool("s0"), open_pool("learner")
    marks = {"high_groups": 6, "low_groups": 2}
    fill(sampler, 4, **marks)
    assert len(take(sampler, 4, **marks).orders) == 2  # what fits
    assert take(sampler, 1, **marks).denial == "full"
    for step, denial in ((1, "full"), (2, None)):
        claim = learner.claim(2, 0, 0)
        assert claim is not None
        learner.consume(claim, step, step - 1, step)
        assert take(sampler, 1, **marks).denial == denial


def test_no_order_is_given_that_would_be_too_old_when_its_turn_comes(open_pool: Open) -> None:
    """Two groups a step, 4 optimizer steps a step, bound 8: at version 0 the steps that begin at 0, 4 and 8 are admitted."""
    sampler, learner = open_pool("s0"), open_pool("learner")
    bound = {"max_lag": 8, "updates_per_step": 4}
    fill(sampler, 6, **bound)
    assert take(sampler, 1, **bound).denial == "lag"
    claim = learner.claim(2, 0, 0)
    assert claim is not None
    learner.consume(claim, 1, 0, 4)
    assert take(sampler, 1, version=0, **bound).denial == "lag"
    assert len(take(sampler, 9, version=4, **bound).orders) == 2
    learner.set_learner_version(20)
    assert take(sampler, 1, version=4, **bound).denial == "lag"


def test_rl_stages_are_ordered_one_after_the_other(open_pool: Open) -> None:
    sampler, learner = open_pool("s0"), open_pool("learner")
    stages = {"groups_per_stage": (2, 3)}
    orders = take(sampler, 9, **stages).orders
    assert [(o.stage, o.ordinal) for o in orders] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    sampler.deliver([(order, group_for(order)) for order in orders])
    assert learner.claim(3, 0, 0) is None
    claim = learner.claim(2, 1, 0)
    assert claim is not None
    assert [group.prompt.id for group in claim.groups] == ["p7", "p8"]


def test_heartbeats_are_seen_and_forgotten(open_pool: Open) -> None:
    sampler, learner = open_pool("s0"), open_pool("learner")
    sampler.beat("sampler", "sampling", 3, finished=5)
    learner.beat("learner", "learning", 4)
    seen = {worker.id: worker for worker in learner.workers()}
    assert (seen["s0"].doing, seen["s0"].version, seen["s0"].facts) == ("sampling", 3, {"finished": 5})
    assert 0 <= seen["s0"].age_seconds < 120
    learner.forget_worker("s0")
    assert [worker.id for worker in learner.workers()] == ["learner"]


def test_a_version_is_one_set_of_weights(open_pool: Open) -> None:
    pool = open_pool("learner")
    assert pool.record_version(3, 1, "a" * 64)
    assert pool.record_version(3, 1, "a" * 64)
    assert not pool.record_version(3, 1, "b" * 64)
    assert pool.versions() == {3: "b" * 64}


def test_another_runs_pool_is_refused(open_pool: Open) -> None:
    open_pool("learner", owner="a" * 64)
    with pytest.raises(BusyError, match="another run"):
        open_pool("learner", owner="b" * 64)


def test_a_name_that_a_living_process_has_is_refused(open_pool: Open) -> None:
    first = open_pool("learner")
    first.enlist("learner", lambda other: True)  # nobody had it, or this process
    first.enlist("learner", lambda other: False)
    with first.database.engine.begin() as connection:
        connection.execute(text("UPDATE workers SET pid = pid + 1, doing = 'learning'"))
    with pytest.raises(BusyError, match=r"has a learner already: process \d+ on .*, learning, seen \d+ s ago"):
        first.enlist("learner", lambda other: other.pid == os.getpid() + 1)
    first.enlist("learner", lambda other: False)  # it is dead
    assert [worker.pid for worker in first.workers()] == [os.getpid()]


def test_a_file_that_is_removed_or_replaced_under_its_user_is_named(tmp_path: Path) -> None:
    file = tmp_path / "experience.db"
    pool = Pool(Database(f"sqlite:///{file}", str(tmp_path), 5.0), "run", PROMPTS, "s0", 60.0)
    fill(pool, 2)
    file.rename(tmp_path / "away")
    for act in (lambda: take(pool, 1), pool.workers, pool.database.checkpoint):
        with pytest.raises(StalledError, match="was removed or replaced while the run used it"):
            act()
    assert not file.exists(), "no new one was made"
    file.write_bytes(b"")
    with pytest.raises(StalledError, match="was removed or replaced"):
        pool.counts()
    (tmp_path / "away").replace(file)
    assert pool.counts()["ready"] == 2
    pool.close()


def test_facts_and_a_removed_pool(open_pool: Open) -> None:
    pool = open_pool("learner")
    pool.set_fact("threads", "1")
    pool.set_fact("threads", "2")
    assert pool.fact("threads") == "2"
    fill(pool, 2)
    pool.database.checkpoint()
    pool.database.remove()
    assert open_pool("learner", owner="other").counts() == {}


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_text("no database" * 100)
    with pytest.raises(BusyError, match=r"x\.db cannot be used as a pool"):
        Pool(Database(f"sqlite:///{tmp_path}/x.db", "k", 1.0), "run", PROMPTS, "s0", 1.0)


def test_a_pool_in_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="shared by processes"):
        Database("sqlite://", "k", 1.0)


def test_a_database_that_is_not_there_is_named_after_the_deadline() -> None:
    with pytest.raises(StalledError, match=r"postgresql.*127\.0\.0\.1:9/none.*could not be written or read for 0 s"):
        Database("postgresql://tithe:secret@127.0.0.1:9/none", "k", 0.2)


def test_a_password_comes_from_the_environment_and_a_wrong_one_is_no_outage(
    guarded_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSFILE", str(tmp_path / "none"))
    for password in (None, "wr0ng"):
        monkeypatch.delenv("PGPASSWORD", raising=False)
        if password is not None:
            monkeypatch.setenv("PGPASSWORD", password)
        with pytest.raises(ConfigError, match=r"train\.pool\.url = 'postgresql.*guarded@.*PGPASSWORD or in ~/\.pgpass") as error:
            Database(guarded_url, str(tmp_path), 600.0)
        assert "wr0ng" not in str(error.value)
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    pool = Pool(Database(guarded_url, str(tmp_path), 5.0), "run", PROMPTS, "s0", 60.0)
    fill(pool, 2)
    pool.close()


def test_a_lost_connection_is_taken_up_again(open_pool: Open, url: str) -> None:
    """PostgreSQL ends the connections of a pool in the middle of its work; nothing is lost and nothing comes twice."""
    if not is_postgresql(url):
        pytest.skip("SQLite has no connection that can be lost")
    pool, killer = open_pool("s0"), open_pool("killer")
    lost: list[str] = []
    pool.database.lost = lost.append
    tried: list[int] = []

    def interrupted(session: object) -> int:
        tried.append(1)
        pid = session.execute(text("SELECT pg_backend_pid()")).scalar_one()  # type: ignore[attr-defined]
        session.execute(text("INSERT INTO meta VALUES (:key, 'x')"), {"key": f"try {len(tried)}"})  # type: ignore[attr-defined]
        if len(tried) == 1:
            killer.database.read(lambda other: other.execute(text(f"SELECT pg_terminate_backend({pid})")).all())
        return session.execute(text("SELECT count(*) FROM meta WHERE key LIKE 'try%'")).scalar_one()  # type: ignore[attr-defined]

    assert pool.database.write(interrupted) == 1  # the first attempt left nothing behind
    assert len(tried) == 2
    assert len(lost) == 1
    fill(pool, 2)


def _sample_all(url: str, key: str, worker: str, total: int) -> None:
    pool = Pool(Database(url, key, 30.0), "run", PROMPTS, worker, 60.0)
    while True:
        taken = take(pool, 3, groups_per_stage=(total,))
        if taken.denial == "done":
            break
        pool.deliver([(order, group_for(order)) for order in taken.orders])
    pool.close()


def test_three_processes_hand_out_and_use_every_group_once(open_pool: Open, url: str, tmp_path: Path) -> None:
    total = 120
    learner = open_pool("learner")
    context = multiprocessing.get_context("spawn")
    samplers = [context.Process(target=_sample_all, args=(url, str(tmp_path), f"s{i}", total)) for i in range(2)]
    for process in samplers:
        process.start()
    step, end = 0, time.monotonic() + 300
    while step < total // 4 and time.monotonic() < end:
        claim = learner.claim(4, 0, 0)
        if claim is None:
            time.sleep(0.02)
            continue
        step += 1
        learner.consume(claim, step, step - 1, step)
    for process in samplers:
        process.join(300)
    assert [process.exitcode for process in samplers] == [0, 0]
    used = Counter(group_id for s in learner.steps() for group_id in s.group_ids)
    assert len(used) == total
    assert set(used.values()) == {1}
    assert learner.counts() == {"consumed": total}
