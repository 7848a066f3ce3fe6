"""Judges that can hang, run in workers that can be killed: many answers in, one finding each out, nothing waits for ever.

    Pool.run(payloads) -> findings      spreads payloads over channels, one clock per answer
    Channel                             the port: a worker behind a socket. `NurseryChannel` is a plain forked worker
                                        (math, reasoning_gym, regex, a user's function); the code sandbox has its own

A worker sends a frame the moment an answer is judged, so the parent always knows which answer is on the clock. Past the
limit the worker is killed and replaced, that answer is `timeout`, and the rest goes on. Nothing is tried twice.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trainer.errors import ConfigError, TitheError
from trainer.reward.sandbox.wire import FrameReader, frame, read_exactly, read_frame

START_SECONDS = 120.0
PACKAGE_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Finding:
    status: str
    score: float
    detail: str
    seconds: float


class Channel(Protocol):
    """A worker that takes numbered payloads and answers them in order."""

    batch_size: int  # payloads it likes to be sent at once

    def fileno(self) -> int: ...

    def send(self, batch: Sequence[tuple[int, Any]]) -> None: ...

    def receive(self) -> list[tuple[int, Finding]]:
        """Return what has arrived; raises EOFError when the worker is gone."""
        ...

    def restart(self) -> None:
        """Kill the worker, whatever it does, and put a fresh one in its place."""
        ...

    def close(self) -> None: ...


class Nursery:
    """Starts the process that forks workers (`trainer.reward.child`) for one judge; the first `spawn` waits until it is ready.

    Args:
        factory: `module:function` that builds the judge, called in the nursery with `arguments`.
        key: configuration key to name when the judge cannot be built.
        memory_bytes: address space of a worker; 0 sets no limit.
    """

    def __init__(self, factory: str, arguments: dict[str, Any], key: str = "reward.verifier", memory_bytes: int = 0):
        ours, theirs = socket.socketpair()
        paths = [str(PACKAGE_ROOT), os.getcwd(), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from trainer.reward.child import main; main()", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self.control = ours
        self.control.settimeout(START_SECONDS)
        self.control.sendall(frame(pickle.dumps((factory, arguments, memory_bytes))))
        self._key, self._what, self._ready = key, arguments or factory, False

    def wait_until_ready(self) -> None:
        """Wait until the judge is built.

        Raises:
            ConfigError: it cannot be built.
        """
        if self._ready:
            return
        try:
            answer = read_frame(self.control)
        except OSError:  # a timeout is one
            answer = None
        problem = "its worker died while starting" if answer is None else pickle.loads(answer)
        if problem:
            self.close()
            raise ConfigError(self._key, self._what, f"the judge cannot be built: {problem}")
        self._ready = True

    def spawn(self) -> tuple[int, socket.socket]:
        """Fork a worker and return its pid and the socket to it."""
        self.wait_until_ready()
        ours, theirs = socket.socketpair()
        socket.send_fds(self.control, [b"fork"], [theirs.fileno()])
        theirs.close()
        return int.from_bytes(self._answer(), "big"), ours

    def kill(self, pid: int) -> None:
        """Kill a worker and wait until it is gone."""
        self.control.sendall(pid.to_bytes(4, "big"))
        self._answer()

    def _answer(self) -> bytes:
        answer = read_exactly(self.control, 4)
        if answer is None:
            raise TitheError("the process that forks reward workers died; out of memory? lower reward.num_workers")
        return answer

    def close(self) -> None:
        """End the nursery and all its workers."""
        self.control.close()
        try:
            self.process.wait(timeout=30 if self._ready else 2)  # it may have workers to end; while it starts, it has none
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass
class NurseryChannel:
    """A forked worker, see `trainer.reward.child`."""

    nursery: Nursery
    batch_size: int = 64
    _pid: int = 0
    _stream: socket.socket = field(init=False)
    _reader: FrameReader = field(init=False)

    def __post_init__(self) -> None:
        self._fork()

    def _fork(self) -> None:
        self._pid, self._stream = self.nursery.spawn()
        self._reader = FrameReader()

    def fileno(self) -> int:
        return self._stream.fileno()

    def send(self, batch: Sequence[tuple[int, Any]]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a dead worker shows as EOF in receive
            self._stream.sendall(frame(pickle.dumps(batch)))

    def receive(self) -> list[tuple[int, Finding]]:
        try:
            data = self._stream.recv(1 << 18)
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError
        found = []
        for body in self._reader.feed(data):
            index, status, score, detail, seconds = pickle.loads(body)
            found.append((index, Finding(status, score, detail, seconds)))
        return found

    def restart(self) -> None:
        self._stream.close()
        self.nursery.kill(self._pid)
        self._fork()

    def close(self) -> None:
        self._stream.close()


@dataclass
class _Busy:
    """A channel at work: the indices it still owes, in order, and the clock of the first."""

    owed: deque[int]
    deadline: float


class Pool:
    """Spreads payloads over channels and keeps the clock of every answer.

    Args:
        limit_seconds: wall time of one answer; then its worker is killed.
    """

    def __init__(self, channels: Sequence[Channel], limit_seconds: float):
        assert channels
        self.channels = list(channels)
        self.limit_seconds = limit_seconds

    def run(self, payloads: Sequence[Any]) -> list[Finding]:
        """Return one finding per payload, in order: status `timeout` past the limit, `error` when the worker died."""
        findings: list[Finding | None] = [None] * len(payloads)
        waiting = deque(range(len(payloads)))
        busy: dict[int, _Busy] = {}
        with selectors.DefaultSelector() as selector:
            for number, channel in enumerate(self.channels):
                self._give(number, payloads, waiting, busy)
                if number in busy:
                    selector.register(channel.fileno(), selectors.EVENT_READ, number)
            while busy:
                nearest = min(work.deadline for work in busy.values())
                ready = {key.data for key, _ in selector.select(max(0.0, nearest - time.monotonic()))}
                for number in list(busy):
                    descriptor = self.channels[number].fileno()
                    trouble = self._collect(number, busy[number], findings, number in ready)
                    if trouble:
                        selector.unregister(descriptor)
                        findings[busy[number].owed.popleft()] = trouble
                        waiting.extendleft(reversed(busy.pop(number).owed))
                        self.channels[number].restart()
                    elif busy[number].owed:
                        continue
                    else:
                        selector.unregister(descriptor)
                        del busy[number]
                    self._give(number, payloads, waiting, busy)
                    if number in busy:
                        selector.register(self.channels[number].fileno(), selectors.EVENT_READ, number)
        assert all(finding is not None for finding in findings)
        return [finding for finding in findings if finding is not None]

    def _give(self, number: int, payloads: Sequence[Any], waiting: deque[int], busy: dict[int, _Busy]) -> None:
        """Hand the channel its next batch, smaller towards the end so that all channels end together."""
        if not waiting:
            return
        channel = self.channels[number]
        share = -(-len(waiting) // (2 * len(self.channels)))
        count = max(1, min(channel.batch_size, share)) if len(self.channels) > 1 else channel.batch_size
        batch = [waiting.popleft() for _ in range(min(count, len(waiting)))]
        channel.send([(index, payloads[index]) for index in batch])
        busy[number] = _Busy(deque(batch), time.monotonic() + self.limit_seconds)

    def _collect(self, number: int, work: _Busy, findings: list[Finding | None], ready: bool) -> Finding | None:
        """Take what a channel has sent; return what befell its current answer if the worker must be replaced."""
        if ready:
            try:
                for index, finding in self.channels[number].receive():
                    assert index == work.owed[0], (index, work.owed)
                    work.owed.popleft()
                    findings[index] = finding
                    work.deadline = time.monotonic() + self.limit_seconds
            except EOFError:
                return Finding("error", 0.0, "the worker died (crash, or out of memory)", 0.0)
        elif time.monotonic() >= work.deadline:
            return Finding("timeout", 0.0, f"no verdict within {self.limit_seconds:g} s", self.limit_seconds)
        return None

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
