"""Starts, watches and ends the sampler processes of the async schedule.

    died        its orders go back to the pool, it is started anew
    silent      no sign of life for the deadline: killed, then as above
    refused     a mistake that another start would not heal (configuration, model, probe): the run stops with its words

Every one is an event with the culprit's name. After too many starts the run stops: something is wrong that waiting does not
mend.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config.schema import Watchdog
from trainer.errors import (
    ConfigError,
    DataError,
    DivergedError,
    MismatchError,
    ModelError,
    ResourceError,
    StalledError,
    StopRequested,
    TitheError,
)
from trainer.experience.pool import Pool, Worker
from trainer.metrics import RunWriter
from trainer.schedule.sampler_process import Assignment

_HOPELESS = {error.exit_code for error in (ConfigError, DataError, ModelError, DivergedError, ResourceError, MismatchError)}
_LOOK_SECONDS = 0.5
LOG = "stage.log"


@dataclass
class _Child:
    assignment: Assignment
    process: subprocess.Popen[bytes]
    started_at: float
    log_start: int
    starts: int = 1
    reasons: list[str] = field(default_factory=list)


class Supervisor:
    """The samplers of one run.

    Args:
        assignments: one for each.
        pool: where they give signs of life.
        watchdog: deadlines and restarts.
        writer: of the learner's run; takes the events.
    """

    def __init__(self, assignments: list[Assignment], pool: Pool, watchdog: Watchdog, writer: RunWriter):
        self.assignments, self.pool, self.watchdog, self.writer = assignments, pool, watchdog, writer
        self.children: list[_Child] = []
        self._looked_at = 0.0
        self.workers: list[Worker] = []

    def start(self) -> None:
        """Start all samplers. Their start is not waited for."""
        for assignment in self.assignments:
            self.pool.release(assignment.name)
            self.pool.forget_worker(assignment.name)
            process, log_start = self._spawn(assignment)
            self.children.append(_Child(assignment, process, time.monotonic(), log_start))

    def _spawn(self, assignment: Assignment) -> tuple[subprocess.Popen[bytes], int]:
        path = assignment.write()
        assignment.directory.mkdir(parents=True, exist_ok=True)
        log = assignment.directory / LOG
        start = log.stat().st_size if log.exists() else 0
        root = Path(__file__).resolve().parent.parent.parent
        python_path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "trainer.schedule.sampler_process", str(path)],
                env={**os.environ, "OMP_NUM_THREADS": str(assignment.threads), "PYTHONPATH": python_path},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return process, start

    def check(self) -> None:
        """Look after everybody, at most twice a second.

        Raises:
            TitheError: a sampler cannot go on, or was started too often.
        """
        if time.monotonic() - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        self.workers = self.pool.workers()
        seen = {worker.id: worker for worker in self.workers}
        for child in self.children:
            code = child.process.poll()
            if code is not None:
                self._bury(child, self._last_words(child, code), code)
                continue
            worker = seen.get(child.assignment.name)
            known = worker is not None and worker.pid == child.process.pid
            age = worker.age_seconds if known and worker is not None else time.monotonic() - child.started_at
            limit = self.watchdog.deadline_seconds if known else self.watchdog.start_seconds
            if age > limit:
                doing = worker.doing if known and worker is not None else "starting"
                child.process.kill()  # SIGKILL reaches a stopped process too
                child.process.wait()
                self._bury(child, f"has given no sign of life for {age:.0f} s while {doing}", None)

    def _last_words(self, child: _Child, code: int) -> str:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        text = (child.assignment.directory / LOG).read_bytes()[child.log_start :].decode(errors="replace").strip()
        return f"{how}: {text.splitlines()[-1]}" if text else how

    def _bury(self, child: _Child, reason: str, code: int | None) -> None:
        """Give a dead sampler's orders to others and start it anew, unless that is hopeless."""
        name, pid = child.assignment.name, child.process.pid
        returned = self.pool.release(name)
        self.pool.forget_worker(name)
        culprit = f"sampler {name} (pid {pid})"
        facts: dict[str, Any] = {"culprit": name, "pid": pid, "returned_groups": returned}
        if code in _HOPELESS:
            self.writer.event("stop", f"{culprit} {reason}", **facts)
            error = TitheError(f"{culprit} {reason.partition(': ')[2] or reason}")
            error.exit_code = code
            raise error
        if child.starts > self.watchdog.restarts:
            self.writer.event("stop", f"{culprit} {reason}; it was started {child.starts} times", **facts)
            raise StalledError(culprit, reason, f"it was started {child.starts} times; see {child.assignment.directory / LOG}")
        what = "was asked to stop" if code == StopRequested.exit_code else reason
        self.writer.event("restart", f"{culprit} {what}; its {returned} groups went back, it is started anew", **facts)
        child.process, child.log_start = self._spawn(child.assignment)
        child.started_at, child.starts = time.monotonic(), child.starts + 1

    @property
    def is_starting(self) -> bool:
        """Whether a sampler was started that has given no sign of life yet; `check` sees to it that this ends."""
        seen = {(worker.id, worker.pid) for worker in self.workers}
        return any((child.assignment.name, child.process.pid) not in seen for child in self.children)

    def describe(self) -> str:
        """Return who is there and what everybody does, for a message."""
        workers = [
            f"{w.id} (pid {w.pid}, {w.doing}, {w.age_seconds:.0f} s ago)" for w in self.pool.workers() if w.kind == "sampler"
        ]
        return ", ".join(workers) or "no sampler has given a sign of life"

    def stop(self, grace_seconds: float = 20.0) -> None:
        """Ask all samplers to stop, wait, kill who does not, and bring their orders back."""
        for child in self.children:
            if child.process.poll() is None:
                child.process.terminate()
                os.kill(child.process.pid, signal.SIGCONT)  # a stopped process cannot hear
        end = time.monotonic() + grace_seconds
        for child in self.children:
            try:
                child.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        for child in self.children:
            self.pool.release(child.assignment.name)
            self.pool.forget_worker(child.assignment.name)
        self.children = []
