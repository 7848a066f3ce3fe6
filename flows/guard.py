"""`python -m flows.guard [--yield] <parent pid> <module> <arguments>`: run a module as a program that ends when its parent does.

For servers: one that outlived a killed `tithe` would hold its port and its database. The kernel sends SIGTERM; a server that
is still at work a minute later, with requests that nobody answers any more, is killed, and what it started in its group too.
Prefect's worker alone leaves what it started: flow runs go on by themselves. With `--yield` it has the cores that others leave.
"""

from __future__ import annotations

import os
import runpy
import select
import signal
import sys
import threading
import time

from trainer.processes import die_with_parent, importing, yield_to_work

GRACE_SECONDS = 60.0


def kill_after(parent: int, leaves_children: bool) -> None:
    """Wait for the end of a process, which costs nothing, give this one its time, then kill it."""
    try:
        end = os.pidfd_open(parent)
        select.select([end], [], [])
    except ProcessLookupError:
        pass
    time.sleep(GRACE_SECONDS)
    if leaves_children:
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "--yield":
        del sys.argv[1]
        yield_to_work()
    parent = int(sys.argv[1])
    die_with_parent(lambda: os.getppid() == parent)
    sys.argv = sys.argv[2:]
    is_worker = sys.argv[:2] == ["prefect", "worker"]
    threading.Thread(target=kill_after, args=(parent, is_worker), name="kill-after", daemon=True).start()
    with importing():  # a server's start is nothing else; it may go on like that, it lives as long as its parent
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
