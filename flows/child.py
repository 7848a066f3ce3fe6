"""A stage as a process of its own: started, watched, and ended with everything that it started.

    Launcher.start  `python -m tasks <stage>` in its own session, output to a log file. On a machine without an accelerator the
                    process is forked from one that holds torch already (multiprocessing's fork server): 0.05 s, not 5
    watch           until it ends, falls silent, takes too long or is to be stopped; looks twice a second
    end             SIGTERM to its group, time for a checkpoint, SIGKILL
    Lease           who runs the stage, in a file: a survivor of an earlier attempt is found and ended before a second
                    writer starts

The child dies with the flow, even when that is killed with SIGKILL: a new interpreter gets SIGTERM from the kernel
(trainer.processes.die_with_parent), a forked process watches the pipe that the flow held.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, Literal, Protocol

from tasks.command import FLOW_PID
from tasks.command import main as run_tasks
from tasks.locks import Owner
from tasks.workspace import REPOSITORY
from trainer.config import CampaignConfig
from trainer.errors import BusyError
from trainer.files import read_json, write_json
from trainer.metrics import HEARTBEAT

POLL_SECONDS = 0.5
THREADS = "OMP_NUM_THREADS"
_ONE_AT_A_TIME = threading.RLock()  # multiprocessing's book of children is not made for several threads, and a sweep has them


class Child(Protocol):
    """A running stage."""

    @property
    def pid(self) -> int: ...

    def wait(self, timeout_seconds: float) -> int | None:
        """Return the exit code (negative: ended by that signal), or None when it still runs after the timeout."""
        ...


class PlainChild:
    def __init__(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]):
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tasks", *arguments],
                cwd=REPOSITORY,
                env={**os.environ, **environment, FLOW_PID: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def wait(self, timeout_seconds: float) -> int | None:
        try:
            return self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None


class ForkedChild:
    def __init__(self, process: ForkServerProcess):
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    def wait(self, timeout_seconds: float) -> int | None:
        wait([self._process.sentinel], timeout_seconds)
        with _ONE_AT_A_TIME:
            self._process.join(0)
            return self._process.exitcode


def _enter(arguments: Sequence[str], log: str, environment: Mapping[str, str]) -> None:
    """Become `python -m tasks <arguments>` in a freshly forked process."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # which the process that it was forked from puts off
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    os.chdir(REPOSITORY)
    os.environ.update(environment)
    if THREADS in environment:  # torch read another number before the fork
        import torch

        torch.set_num_threads(int(environment[THREADS]))
    threading.Thread(target=_stop_after_flow, name="stop-after-flow", daemon=True).start()
    sys.exit(run_tasks(list(arguments)))


def _stop_after_flow() -> None:
    """Send this process SIGTERM when the flow is gone: the kernel cannot, its parent is the fork server."""
    flow = multiprocessing.parent_process()
    assert flow is not None
    wait([flow.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


def has_accelerator() -> bool:
    """Whether this machine has one; a process that may use it is not forked from another that loaded torch."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()


class Launcher:
    """Starts stages.

    Args:
        fork: fork from a process that holds torch, or start a new interpreter each time; None decides by the machine.
    """

    def __init__(self, config: CampaignConfig, fork: bool | None = None):
        self._server: ForkServerContext | None = None
        if fork if fork is not None else (config.machine.device == "cpu" or not has_accelerator()):
            self._server = multiprocessing.get_context("forkserver")
            self._server.set_forkserver_preload(["tasks.preload"])

    def warm(self) -> None:
        """Begin to load what stages need, without waiting for it."""
        if self._server is not None:
            from multiprocessing.forkserver import ensure_running

            with _ONE_AT_A_TIME, _nameless_program():
                ensure_running()

    def start(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> Child:
        log.parent.mkdir(parents=True, exist_ok=True)
        if self._server is None:
            return PlainChild(arguments, log, environment)
        process = self._server.Process(target=_enter, args=(list(arguments), str(log), dict(environment)), name=arguments[0])
        with _ONE_AT_A_TIME, _nameless_program():
            process.start()
        return ForkedChild(process)


@contextmanager
def _nameless_program() -> Iterator[None]:
    """Hide this program from multiprocessing, which would have every child import it; a stage needs nothing of it."""
    program = sys.modules["__main__"]
    hidden: dict[str, Any] = {name: program.__dict__.pop(name) for name in ("__file__", "__spec__") if name in program.__dict__}
    program.__dict__["__spec__"] = None
    try:
        yield
    finally:
        program.__dict__.update(hidden)


def signal_group(pid: int, number: int) -> bool:
    """Send a signal to a stage and all that it started; return whether anything was there to get it."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        try:  # before it has become the leader of its own group
            os.kill(pid, number)
        except ProcessLookupError:
            return False
    return True


def end(child: Child, grace_seconds: float) -> int | None:
    """Ask a stage to stop, give it time for its checkpoint, then kill what is left of its group; return its exit code."""
    code = child.wait(0)
    if code is None:
        signal_group(child.pid, signal.SIGTERM)
        code = child.wait(grace_seconds)
    signal_group(child.pid, signal.SIGKILL)
    return child.wait(5) if code is None else code


Ending = Literal["exited", "stopped", "silent", "late"]


@dataclass(frozen=True)
class Limits:
    """How long a stage may take and be silent, in seconds."""

    total_seconds: float
    silence_seconds: float
    grace_seconds: float


def watch(
    child: Child, run: Path, limits: Limits, stop_wanted: Callable[[], bool], on_beat: Callable[[dict[str, Any]], None]
) -> tuple[Ending, int | None]:
    """Wait for a stage to end, and end it where it must be; nothing it started is left behind, whatever happens here.

    Args:
        run: the stage's run directory, where its heartbeat is.
        stop_wanted: asked at every look; True ends the stage.
        on_beat: called with each new heartbeat.

    Returns:
        Why it ended, and its exit code.
    """
    started = heard = time.monotonic()  # no clock that somebody may set
    seen: float | None = None
    try:
        while True:
            code = child.wait(POLL_SECONDS)
            if code is not None:
                return "exited", code
            beat = read_beat(run, child.pid)
            if beat and beat["time"] != seen:
                seen, heard = beat["time"], time.monotonic()
                on_beat(beat)
            if stop_wanted():
                return "stopped", end(child, limits.grace_seconds)
            if seen is not None and time.monotonic() - heard > limits.silence_seconds:
                return "silent", end(child, limits.grace_seconds)
            if time.monotonic() - started > limits.total_seconds:
                return "late", end(child, limits.grace_seconds)
    finally:
        end(child, limits.grace_seconds)


def read_beat(run: Path, pid: int) -> dict[str, Any] | None:
    """Return the last heartbeat of a process, or None when it gave none yet."""
    try:
        beat: dict[str, Any] = read_json(run / HEARTBEAT)
    except (FileNotFoundError, ValueError):
        return None
    return beat if beat.get("pid") == pid else None


@dataclass(frozen=True)
class Lease:
    """The file that says which process runs a stage in a workspace."""

    path: Path

    def take(self, child: Child) -> None:
        write_json(self.path, Owner.of(child.pid).to_json())

    def drop(self) -> None:
        self.path.unlink(missing_ok=True)

    def end_survivor(self, grace_seconds: float) -> bool:
        """End the process that an earlier, dead flow left running, and return whether there was one.

        Raises:
            BusyError: the lease is held on another host, which cannot be asked.
        """
        try:
            owner = Owner.from_json(read_json(self.path))
        except (FileNotFoundError, ValueError, KeyError):
            return False
        if not owner.is_here:
            raise BusyError(
                f"{self.path}: process {owner.pid} on host {owner.host} may still write; remove the file if it does not"
            )
        found = owner.is_alive
        if found:
            signal_group(owner.pid, signal.SIGTERM)
            deadline = time.monotonic() + grace_seconds
            while owner.is_alive and time.monotonic() < deadline:
                time.sleep(0.1)
            signal_group(owner.pid, signal.SIGKILL)
            while owner.is_alive:
                time.sleep(0.05)
        self.drop()
        return found
