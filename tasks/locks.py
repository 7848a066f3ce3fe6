"""Rights that only one process can hold, and who holds them.

hold(path)        a file lock with its owner's pid inside; it dies with its process, so none is ever stale
wait_for(path)    the same, but waits its turn
Owner             a process by host, pid and start time: a pid alone may have been given to another process since
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import BusyError


@dataclass(frozen=True)
class Owner:
    host: str
    pid: int
    started_ticks: int  # clock ticks between boot and the process's start

    @classmethod
    def of(cls, pid: int) -> Owner:
        return cls(socket.gethostname(), pid, started_ticks(pid) or 0)

    @classmethod
    def me(cls) -> Owner:
        return cls.of(os.getpid())

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Owner:
        return cls(str(value["host"]), int(value["pid"]), int(value["started_ticks"]))

    def to_json(self) -> dict[str, Any]:
        return {"host": self.host, "pid": self.pid, "started_ticks": self.started_ticks}

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs; one on another host cannot be seen and counts as alive."""
        return not self.is_here or started_ticks(self.pid) == self.started_ticks


def started_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot, or None where there is none (a zombie is none)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


@contextmanager
def hold(path: Path, what: str, fix: str = "wait for it or stop it") -> Iterator[None]:
    """Hold a lock file.

    Args:
        path: the lock file; it stays, only the lock on it matters.
        what: what is busy when somebody else holds it, as the start of a sentence.
        fix: what a person can do then.

    Raises:
        BusyError: somebody else holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise BusyError(f"{what} (pid {file.read().strip()}); {fix}") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextmanager
def wait_for(path: Path) -> Iterator[None]:
    """Hold a lock file, waiting until it is free: for short work that two processes may want at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
