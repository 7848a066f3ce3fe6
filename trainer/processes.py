"""Processes that must not outlive the one that started them. Importable without torch.

`python -m trainer.processes <pid> <program> <arguments>` becomes a program of any other environment that gets SIGTERM when the
process <pid>, which must be the one that started it, ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

from trainer.errors import StopRequested

_PR_SET_PDEATHSIG = 1


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


if __name__ == "__main__":
    parent = int(sys.argv[1])
    die_with_parent(lambda: os.getppid() == parent)
    os.execvp(sys.argv[2], sys.argv[2:])
