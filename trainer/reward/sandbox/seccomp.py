"""A seccomp filter, assembled by hand: which system calls fail inside the jail, and how.

A deny list, because candidates use much of libc: what is refused is whatever reaches past the process (network, mounts,
namespaces, other processes, kernel interfaces with a record of holes) or past its rlimits (memory files, shared memory).
Numbers from the kernel's tables for x86_64 and aarch64; another machine, or the x32 personality, is refused.
"""

from __future__ import annotations

import ctypes
import errno
import struct

from . import kernel

# name: (x86_64, aarch64); None where the machine has no such call
DENIED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "kcmp": (312, 272),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semctl": (66, 191),
    "msgget": (68, 186),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    "inotify_init1": (294, 26),
    "inotify_init": (253, None),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "syslog": (103, 116),
    "personality": (135, 92),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "vhangup": (153, 58),
    "setpriority": (141, 140),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "lookup_dcookie": (212, 18),
    "vmsplice": (278, 75),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "setsid": (112, 157),
    "setpgid": (109, 154),
}
FORKS: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
}
CLONE, CLONE3 = (56, 220), (435, 435)
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NAMESPACE_FLAGS = 0x7E020080  # user, pid, net, ipc, uts, cgroup, mount, time
CLONE_THREAD = 0x00010000
X32_BIT = 0x40000000

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER_OFFSET, ARCH_OFFSET, FIRST_ARGUMENT_OFFSET = 0, 4, 16


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def assemble(machine: str, may_fork: bool) -> bytes:
    """Return the filter's program for a machine.

    Args:
        may_fork: False lets only threads be made, and no other program be executed.
    """
    column = {"x86_64": 0, "aarch64": 1}[machine]
    deny = _instruction(RETURN, ERRNO | errno.EPERM)
    program = [
        _instruction(LOAD, ARCH_OFFSET),
        _instruction(JUMP_EQUAL, AUDIT_ARCH[machine], 1, 0),
        _instruction(RETURN, KILL),
        _instruction(LOAD, NUMBER_OFFSET),
        _instruction(JUMP_AT_LEAST, X32_BIT, 0, 1),
        deny,
    ]
    for numbers in (DENIED if may_fork else DENIED | FORKS).values():
        number = numbers[column]
        if number is not None:
            program += [_instruction(JUMP_EQUAL, number, 0, 1), deny]
    # clone3 hides its flags behind a pointer: pretend it does not exist, libc then uses clone
    program += [_instruction(JUMP_EQUAL, CLONE3[column], 0, 1), _instruction(RETURN, ERRNO | errno.ENOSYS)]
    clone_rules = [
        _instruction(LOAD, FIRST_ARGUMENT_OFFSET),
        _instruction(JUMP_ANY_BIT, NAMESPACE_FLAGS & ~0xFF, 0, 1),
        deny,
    ]
    if not may_fork:
        clone_rules += [_instruction(JUMP_ANY_BIT, CLONE_THREAD, 1, 0), _instruction(RETURN, ERRNO | errno.EAGAIN)]
    program += [_instruction(JUMP_EQUAL, CLONE[column], 0, len(clone_rules)), *clone_rules]
    program.append(_instruction(RETURN, ALLOW))
    return b"".join(program)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def install(program: bytes) -> None:
    """Put the filter on this process and all it makes. Needs no_new_privs, which `kernel.drop_capabilities` sets."""
    buffer = ctypes.create_string_buffer(program, len(program))
    record = _Program(len(program) // 8, ctypes.cast(buffer, ctypes.c_void_p).value)
    kernel.prctl(kernel.PR_SET_SECCOMP, kernel.SECCOMP_MODE_FILTER, ctypes.byref(record))
