"""Processes that must not outlive the one that started them, and the most memory that this one held. Importable without torch.

`python -m trainer.processes <pid> <program> <arguments>` becomes a program of any other environment that gets SIGTERM when the
process <pid>, which must be the one that started it, ends.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainer.errors import StopRequested

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
RETURNED_BYTES = 2**20  # smaller blocks are a model's that is small itself, and cost more to map than they hold


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


@contextmanager
def importing() -> Iterator[None]:
    """Let the garbage collector rest while thousands of modules are imported: it looks at all of them again and again (15 %)."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def return_freed_memory(block_bytes: int = RETURNED_BYTES) -> bool:
    """Let malloc give every freed block of some size back to the system at once; return whether it does.

    By default glibc keeps freed blocks of up to 32 MB, and the holes between them: a process then peaks far above its live
    tensors. What a person set in the environment stays as it is.

    Args:
        block_bytes: from which size on blocks are mapped by themselves.
    """
    chosen = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_"} & os.environ.keys()
    if chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and all(mallopt(option, block_bytes) == 1 for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))


def peak_memory_bytes() -> float:
    """Return the highest resident memory of this process since it began, or since `forget_peak_memory` (Linux)."""
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


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
