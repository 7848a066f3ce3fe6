"""A sandbox of our own for machines without bubblewrap: new namespaces, a root of read-only binds, then exec.

    main('{"binds": [[source, target], ...], "command": [...]}')

Runs as root or, where the kernel allows user namespaces, as anybody. The parent waits; killing it kills what is inside.
Standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from . import kernel

DEVICES = ("null", "zero", "full", "random", "urandom")
BASES = ("/mnt", "/media", "/srv", "/opt", "/run", "/tmp")


def unescape(path: str) -> str:
    """Return a path of /proc/self/mountinfo as it is: blanks and backslashes are octal there."""
    return path.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")


def mounts_below(target: str) -> list[str]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = [unescape(line.split()[4]) for line in file]
    return [point for point in points if point == target or point.startswith(target + "/")]


def bind_read_only(source: str, target: str) -> None:
    """Bind a file or folder with everything mounted below it, and make all of that read-only."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w", encoding="utf-8"):
            pass
    kernel.mount(source, target, "", kernel.MS_BIND | kernel.MS_REC)
    for point in mounts_below(target):
        kept = os.statvfs(point).f_flag & (kernel.MS_NODEV | kernel.MS_NOEXEC | kernel.MS_NOATIME | kernel.MS_NODIRATIME)
        flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kept
        kernel.mount("", point, "", flags)


def build_root(binds: list[tuple[str, str]]) -> str:
    """Mount an empty root somewhere, fill it, and return its path."""
    sources = [source for source, _ in binds]
    base = next(b for b in BASES if os.path.isdir(b) and not any(s == b or s.startswith(b + "/") for s in sources))
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("root", base, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,nr_inodes=4096,mode=755")
    for name in ("proc", "dev", "tmp"):
        os.mkdir(f"{base}/{name}")
    for source, target in binds:
        if os.path.islink(source):
            os.makedirs(os.path.dirname(base + target), exist_ok=True)
            os.symlink(os.readlink(source), base + target)
        else:
            bind_read_only(source, base + target)
    for name in DEVICES:
        with open(f"{base}/dev/{name}", "w", encoding="utf-8"):
            pass
        kernel.mount(f"/dev/{name}", f"{base}/dev/{name}", "", kernel.MS_BIND)
    return base


def move_in(base: str) -> None:
    """Make the new root the root, and the old one unreachable."""
    os.chdir(base)
    kernel.mount("proc", f"{base}/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    kernel.pivot_root(".", ".")
    kernel.umount(".", kernel.MNT_DETACH)
    os.chdir("/")
    flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("", "/", "", flags)


def main(order: str) -> None:
    """Build the sandbox and become, inside it, the command."""
    plan = json.loads(order)
    os.umask(0o022)
    user, group = os.getuid(), os.getgid()
    flags = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    if kernel.has_capability(21):
        kernel.unshare(flags)
    else:
        kernel.unshare(flags | kernel.CLONE_NEWUSER)
        kernel.map_ids(user, user, group)
    pid = os.fork()
    if pid == 0:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        move_in(build_root([(source, target) for source, target in plan["binds"]]))
        os.execv(plan["command"][0], plan["command"])
    os.closerange(3, 65536)
    _, status = os.waitpid(pid, 0)
    sys.exit(os.waitstatus_to_exitcode(status) & 255)
