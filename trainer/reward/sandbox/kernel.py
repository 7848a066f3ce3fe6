"""The few Linux system calls that Python 3.11 does not offer, by ctypes."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME = 1024, 2048
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
CAPABILITY_VERSION_3 = 0x20080522
LAST_CAPABILITY = 40
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    _checked(
        _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()), f"mount {target}"
    )


def umount(target: str, flags: int) -> None:
    _checked(_libc.umount2(target.encode(), flags), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    _checked(_libc.syscall(PIVOT_ROOT[os.uname().machine], new.encode(), old.encode()), "pivot_root")


def prctl(option: int, value: int = 0, pointer: object = 0) -> None:
    second = pointer if not isinstance(pointer, int) else ctypes.c_ulong(pointer)
    _checked(_libc.prctl(option, ctypes.c_ulong(value), second, ctypes.c_ulong(0), ctypes.c_ulong(0)), f"prctl {option}")


def map_ids(inner: int, user: int, group: int) -> None:
    """Map one user and one group of the parent user namespace to the id `inner` of the one just made."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inner} {user} 1"), ("gid_map", f"{inner} {group} 1")):
        descriptor = os.open(f"/proc/self/{name}", os.O_WRONLY)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def drop_capabilities() -> None:
    """Give up every capability, and the way to any: bounding set, the three sets, and new privileges through exec."""
    for capability in range(LAST_CAPABILITY + 1):
        _libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
    header, none = _CapabilityHeader(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    _checked(_libc.capset(ctypes.byref(header), none), "capset")
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def has_capability(number: int) -> bool:
    """Whether the process holds a capability effectively; 21 is CAP_SYS_ADMIN."""
    header, held = _CapabilityHeader(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    _checked(_libc.capget(ctypes.byref(header), held), "capget")
    return bool(held[3 * (number // 32)] >> (number % 32) & 1)
