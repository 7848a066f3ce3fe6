"""The watchdog against a sampler that froze inside a transaction, so that nobody else can write into the pool."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.trainer.schedule import freezing
from tests.trainer.schedule.test_asynchronous import Stage
from trainer.errors import StopRequested
from trainer.experience.database import is_postgresql
from trainer.metrics import RunWriter, read_heartbeat, read_lines
from trainer.schedule import supervisor
from trainer.schedule.stop import StopWish
from trainer.schedule.supervisor import Supervisor

pytestmark = pytest.mark.smoke


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(supervisor, "COMMAND", (sys.executable, freezing.__file__))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def make_stage(root: Path, deadline_seconds: float, url: str = "") -> Stage:
    watchdog = {"deadline_seconds": deadline_seconds, "restarts": 50}
    pool = {"pool": {"url": url}} if url else {}
    return Stage(root, {"train": {"watchdog": watchdog, "sampler": {"processes": 2}, **pool}})


def wait(ready: Callable[[], object]) -> None:
    end = time.monotonic() + 300
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_who_froze_inside_a_transaction_is_ended_and_nobody_else(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = "" if kind == "sqlite" else request.getfixturevalue("postgresql_url")
    stage = make_stage(tmp_path, 8.0, url)
    stage.run(stage.schedule(), "good", begin_at=stage.directory / freezing.FROZEN)
    stage.check_log()
    restarts = [event for event in read_lines(stage.directory / "events.jsonl") if event["kind"] == "restart"]
    assert {event["culprit"] for event in restarts} <= {"s0"}
    if not is_postgresql(stage.config.train.pool.url):  # its server ends the session before the watchdog's deadline
        assert "while in a transaction" in restarts[0]["reason"]


def test_a_wish_to_stop_does_not_wait_for_the_deadline_of_who_froze(tmp_path: Path) -> None:
    stage, wish = make_stage(tmp_path, 10_000.0), StopWish()
    schedule = stage.schedule(wish)
    waiting, reasons = schedule.pool.database.waiting, []

    def asked(reason: str) -> None:
        wish.signal_name = "SIGTERM"
        reasons.append(reason)
        waiting(reason)

    schedule.pool.database.waiting = asked
    with pytest.raises(StopRequested, match="SIGTERM"):
        stage.run(schedule, "good", begin_at=stage.directory / freezing.FROZEN)
    assert any("held by process" in reason for reason in reasons)


def test_a_frozen_sampler_that_a_dead_learner_left_behind_does_not_hold_up_the_next(tmp_path: Path) -> None:
    stage = make_stage(tmp_path, 10_000.0)
    first = stage.schedule()
    left = Supervisor(first._assignments(1)[:1], first.pool, stage.config.train.watchdog, RunWriter(stage.directory))
    left.start()
    wait((stage.directory / freezing.FROZEN).exists)
    beat = read_heartbeat(left.children[0].assignment.directory)
    assert beat is not None
    wait(lambda: psutil.Process(beat["pid"]).status() == psutil.STATUS_STOPPED)
    second = stage.schedule()
    second.pool.set_fact("free", "yes")
    second.pool.close()
    assert not psutil.pid_exists(beat["pid"])
    left.children[0].process.wait(300)
    first.pool.close()
