"""Starts, watches and ends the sampler processes of the async schedule.

    died        its orders go back to the pool, it is started anew
    silent      no sign of life for the deadline: killed, then as above
    refused     a mistake that another start would not heal (configuration, model, probe): the run stops with its words

Silence is seen in the samplers' files, not in the pool: one that froze inside a transaction keeps the others from writing there.
Every one is an event with the culprit's name. After too many starts the run stops: something is wrong that waiting does not
mend.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

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
from trainer.metrics import RunWriter, read_heartbeat
from trainer.schedule.sampler_process import SAMPLERS, STARTING, Assignment

_HOPELESS = {error.exit_code for error in (ConfigError, DataError, ModelError, DivergedError, ResourceError, MismatchError)}
_LOOK_SECONDS, _QUIET_SECONDS = 0.5, 5.0
_LEFTOVER_SECONDS = 30.0
COMMAND = (sys.executable, "-m", "trainer.schedule.sampler_process")
LOG = "stage.log"


@dataclass
class _Child:
    assignment: Assignment
    process: subprocess.Popen[bytes]
    moved_at: float  # when it was started or gave its last sign of life, by the clock of this process
    log_start: int
    starts: int = 1
    beat: dict[str, Any] | None = None  # its last sign of life
    ended: str | None = None  # why the supervisor ended it


def end_leftovers(run: Path) -> None:
    """End samplers that an earlier learner of this run left behind: one that is stopped does not hear that it should end."""
    for path in (run / SAMPLERS).glob("*.json"):
        beat = read_heartbeat(path.with_suffix(""))
        if beat is None:
            continue
        try:
            process = psutil.Process(beat["pid"])
            if str(path.resolve()) in process.cmdline():
                process.kill()
                process.wait(_LEFTOVER_SECONDS)
        except psutil.NoSuchProcess:
            continue


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
                [*COMMAND, str(path.resolve())],
                env={**os.environ, "OMP_NUM_THREADS": str(assignment.threads), "PYTHONPATH": python_path},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return process, start

    def look(self) -> None:
        """Read the samplers' signs of life from their files, which no lock on the pool can hold up."""
        for child in self.children:
            beat = read_heartbeat(child.assignment.directory)
            if beat != child.beat and beat is not None and beat["pid"] == child.process.pid:
                child.beat, child.moved_at = beat, time.monotonic()

    def end_silent(self, hurry_seconds: float | None = None) -> None:
        """End the samplers that gave no sign of life for the deadline; touches no pool, so it can be done while one waits for it.

        Args:
            hurry_seconds: a shorter deadline, when the run is to end anyway.
        """
        self.look()
        for child in self.children:
            doing = str(child.beat["doing"]) if child.beat else STARTING
            limit = self.watchdog.start_seconds if doing.startswith(STARTING) else self.watchdog.deadline_seconds
            age = time.monotonic() - child.moved_at
            if age > (hurry_seconds or limit) and child.process.poll() is None:
                child.ended = f"has given no sign of life for {age:.0f} s while {doing}"
                child.process.kill()  # SIGKILL reaches a stopped process too
                child.process.wait()

    def check(self) -> None:
        """Look after everybody, at most twice a second.

        Raises:
            TitheError: a sampler cannot go on, or was started too often.
        """
        if time.monotonic() - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        self.end_silent()
        self.workers = self.pool.workers()
        for child in self.children:
            code = child.process.poll()
            if code is not None:
                self._bury(child, child.ended or self._last_words(child, code), None if child.ended else code)

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
        child.moved_at, child.beat, child.ended, child.starts = time.monotonic(), None, None, child.starts + 1

    @property
    def is_watching(self) -> bool:
        """Whether a sampler has been silent for a while, so that it will be ended or give a sign of life by its deadline."""
        return any(time.monotonic() - child.moved_at > _QUIET_SECONDS for child in self.children)

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
                child.process.send_signal(signal.SIGCONT)  # a stopped process cannot hear
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
