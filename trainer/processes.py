"""Processes that must not outlive the one that started them, a port for a server, and the most memory that this one held.

`python -m trainer.processes <pid> <program> <arguments>` becomes a program of any other environment that gets SIGTERM when the
process <pid>, which must be the one that started it, ends. Importable without torch.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer.errors import StopRequested

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
RETURNED_BYTES, KEPT_BYTES = 2**18, 2**25  # the second is the most that glibc takes
SMALL_MODEL_BYTES = 2**25
_PORTS = range(20_000, 32_768)  # below those that Linux gives to whoever connects to something
_NICENESS = 5


def die_with_parent(is_alive: Callable[[], bool], number: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel for a signal when the process that started this one ends, however it ends (Linux).

    Args:
        is_alive: whether that process is still there; asked afterwards, because it may have ended before.
        number: the signal.

    Raises:
        StopRequested: it has ended already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if not is_alive():
        raise StopRequested("the process that started this one is gone")


def free_port() -> int:
    """Return a port of the loopback interface that is free, and that nobody takes by chance before a server binds it."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def yield_to_work() -> None:
    """Let this process have only what the campaign leaves idle, also where the scheduler groups processes by session.

    Training's threads wait for each other: whoever takes one's core for a moment holds up all.
    """
    os.nice(_NICENESS)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_NICENESS), encoding="utf-8")


@contextmanager
def importing() -> Iterator[None]:
    """Let the garbage collector rest while thousands of modules are imported: it looks at all of them again and again (15 %)."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Late(ModuleType):
    """Stands for a module until something of it is used; importlib's own LazyLoader loads at the import already."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # whoever looks through all modules does not mean this one
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def import_late(name: str) -> None:
    """Have a module loaded when something of it is first used, by whoever imports it from now on."""
    sys.modules.setdefault(name, _Late(name))


def fit_malloc(model: Path) -> bool:
    """Let malloc give freed blocks of 256 KiB and more back at once beside a model; one of a few megabytes keeps up to 32 MiB.

    By default glibc keeps freed blocks of up to 32 MiB, and the holes between them: a process then peaks far above its live
    tensors, by half with long sequences. Mapping blocks anew costs time; beside a small model they hold next to nothing.

    Args:
        model: directory with its weights.

    Returns:
        Whether it was done. What a person chose in the environment stays as it is.
    """
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return return_blocks(KEPT_BYTES if size < SMALL_MODEL_BYTES else RETURNED_BYTES)


def malloc_choice() -> str:
    """Return the environment variable by which a person told malloc what to keep; nothing where none is set."""
    names = [name for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_") if name in os.environ]
    tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    return next(iter(names), "GLIBC_TUNABLES" if tuned else "")


def return_blocks(least_bytes: int = RETURNED_BYTES) -> bool:
    """Let malloc map blocks from some size on by themselves, so that they go back when they are freed; see `fit_malloc`.

    Called before torch is imported, it keeps the holes away that imports leave: about 40 MB.
    """
    if malloc_choice():
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):  # musl has none
        return False
    return all(libc.mallopt(option, least_bytes) == 1 for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))


def peak_memory_bytes() -> float:
    """Return the highest resident memory of this process since it began, or since `forget_peak_memory` (Linux).

    From /proc where there is one: `ru_maxrss` begins with what the process held that started this one.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024.0 * int(status.partition("VmHWM:")[2].split(maxsplit=1)[0])


def forget_peak_memory() -> bool:
    """Let the peak begin anew at what is held now; return whether the kernel allowed it."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return False
    return True


if __name__ == "__main__":
    parent = int(sys.argv[1])
    die_with_parent(lambda: os.getppid() == parent)
    os.execvp(sys.argv[2], sys.argv[2:])
