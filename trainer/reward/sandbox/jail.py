"""Shut a fork of a keeper into its jail: namespaces of its own, an empty scratch folder, rlimits, no capabilities, seccomp.

    keeper --fork--> doorman: new user, process, mount and IPC namespaces --fork--> inmate (process 1 in there)

The doorman tells the keeper the inmate's pid and ends; the inmate becomes the keeper's child (the keeper is a subreaper),
and killing it kills every process of its namespace. After `shut` nothing in the process can undo any of it.
"""

from __future__ import annotations

import os
import resource
import signal
from dataclasses import dataclass

from . import kernel, seccomp

SCRATCH = "/tmp"
INNER_ID = 1000
NOBODY = 65534
MAX_THREADS = 64


@dataclass(frozen=True)
class Limits:
    """What one inmate may use. `memory_bytes` is for all its processes together."""

    wall_seconds: float = 5.0
    cpu_seconds: int = 5
    memory_bytes: int = 512 * 1024**2
    processes: int = 1
    open_files: int = 64
    scratch_bytes: int = 16 * 1024**2
    output_bytes: int = 1024**2


def become_nobody() -> None:
    """Leave root behind where we are root: rlimits on processes do not bind it. Where that is refused, stay."""
    if os.getuid() == 0 and kernel.has_capability(7) and kernel.has_capability(6):  # CAP_SETUID, CAP_SETGID
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)


def counts_tasks_per_namespace() -> bool:
    """Whether RLIMIT_NPROC counts inside a user namespace (Linux 5.14), and not all of the user's processes."""
    major, minor = (int(part) for part in os.uname().release.split(".")[:2])
    return (major, minor) >= (5, 14)


def set_rlimits(limits: Limits) -> None:
    """Bind this process and its children; soft limits equal hard ones, so no signal handler sees them coming."""
    if limits.processes > 1 or counts_tasks_per_namespace():
        tasks = limits.processes if limits.processes > 1 else MAX_THREADS
        resource.setrlimit(resource.RLIMIT_NPROC, (tasks, tasks))
    for kind, value in (
        (resource.RLIMIT_AS, limits.memory_bytes // limits.processes),
        (resource.RLIMIT_CPU, limits.cpu_seconds),
        (resource.RLIMIT_FSIZE, limits.scratch_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def new_namespaces() -> None:
    """Move the children of this process into namespaces of their own; needs no privilege but user namespaces."""
    user, group = os.getuid(), os.getgid()
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS)
    kernel.map_ids(INNER_ID, user, group)


def private_files(limits: Limits) -> None:
    """Put an empty scratch folder at /tmp and hide /proc; everything else is read-only already."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("scratch", SCRATCH, "tmpfs", flags, f"size={limits.scratch_bytes},nr_inodes=4096,mode=700")
    kernel.mount("nothing", "/proc", "tmpfs", flags | kernel.MS_RDONLY | kernel.MS_NOEXEC, "size=4k,nr_inodes=2,mode=555")


def close_all_but(*kept: int) -> None:
    """Close every descriptor above 2 that is not named."""
    last = 2
    for descriptor in sorted(kept):
        os.closerange(last + 1, descriptor)
        last = descriptor
    os.closerange(last + 1, 65536)


def shut(limits: Limits) -> None:
    """Bind the process for good: rlimits, no capabilities, seccomp."""
    signal.set_wakeup_fd(-1)
    set_rlimits(limits)
    kernel.drop_capabilities()
    seccomp.install(seccomp.assemble(os.uname().machine, limits.processes > 1))
