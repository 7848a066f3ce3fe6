"""Processes that must not outlive the one that started them. Importable without torch."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable

from trainer.errors import StopRequested

_PR_SET_PDEATHSIG = 1


def die_with_parent(is_alive: Callable[[], bool]) -> None:
    """Ask the kernel for SIGTERM when the process that started this one ends, however it ends (Linux).

    Args:
        is_alive: whether that process is still there; asked afterwards, because it may have ended before.

    Raises:
        StopRequested: it has ended already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if not is_alive():
        raise StopRequested("the process that started this one is gone")
