"""A filter of system calls (seccomp) for a candidate's process: no sockets, no mounts, no namespaces, no memory of
other processes, and nothing that administers the system.

The filter is a program of the kernel's classic BPF. It looks at the number of a call and at plain arguments, never at
memory. What it refuses returns EPERM.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Iterator, Mapping

__all__ = ["REFUSED", "filter_calls", "program"]

REFUSED: Mapping[str, tuple[int, int]] = {
    # what reaches other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440), "kcmp": (312, 272), "userfaultfd": (323, 282), "perf_event_open": (298, 241),
    # what leaves the sandbox
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    # what passes by a filter of calls: another way to make the same ones
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # keys, and what administers the system
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
    "syslog": (103, 116), "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266),
    "adjtimex": (159, 171), "sethostname": (170, 161), "setdomainname": (171, 162), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "fanotify_init": (300, 262), "vhangup": (153, 58), "iopl": (172, -1),
    "ioperm": (173, -1),
    # memory that no process has: it would not be counted
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180), "memfd_secret": (447, 447), "memfd_create": (319, 279),
}  # fmt: skip
"""System call -> its number on x86-64 and on 64-bit Arm (-1: there is none)."""

LOOKED_AT = {"socket": (41, 198), "clone": (56, 220), "ioctl": (16, 29), "fcntl": (72, 25), "clone3": (435, 435)}
"""Those of which an argument decides; clone3 has its arguments in memory, so that libraries fall back on clone."""

DRIVERS_NEED = ("memfd_create",)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine -> (the column of its numbers, the kernel's name for it)."""

NAMESPACES = 0x7E020080
"""Flags of clone that make a namespace."""

TYPES_TO_A_TERMINAL, SETS_LEASE, SETS_NOTICE = (0x5412, 0x541C), 1024, 1026
AF_UNIX, SOCK_SEQPACKET, SOCK_TYPE = 1, 5, 0xF
PR_SET_SECCOMP, MODE_FILTER = 22, 2
LOAD, EQUAL, AT_LEAST, ANY_OF, MASKED, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
ARGUMENT = 16
"""Where the arguments begin, of 8 bytes each, after number, machine and address."""

Step = tuple[int, int, int, int]
"""(what is done, steps to skip if it holds, steps to skip if it does not, a number)."""


def program(machine: str, drivers: bool) -> list[Step]:
    """The filter's steps; ``drivers``: the process needs what an accelerator's driver does, sockets between its own
    threads and shared memory."""
    column, name = MACHINES[machine]
    no = REFUSE | errno.EPERM
    steps: list[Step] = [
        (LOAD, 0, 0, 4), (EQUAL, 1, 0, name), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0),
        (AT_LEAST, 0, 1, 1 << 30), (RETURN, 0, 0, no),  # x86's second set of numbers
    ]  # fmt: skip
    for call, numbers in REFUSED.items():
        if numbers[column] >= 0 and not (drivers and call in DRIVERS_NEED):
            steps += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, no)]
    for call, numbers in LOOKED_AT.items():
        inner = [*_looked_at(call, drivers), (RETURN, 0, 0, ALLOW)]
        steps += [(EQUAL, 0, len(inner), numbers[column]), *inner]
    return [*steps, (RETURN, 0, 0, ALLOW)]


def _looked_at(call: str, drivers: bool) -> Iterator[Step]:
    """The steps for one of LOOKED_AT: they end the filter, or what follows allows the call."""
    no = (RETURN, 0, 0, REFUSE | errno.EPERM)
    if call == "socket":
        if not drivers:
            yield no
            return
        yield from ((LOAD, 0, 0, ARGUMENT), (EQUAL, 1, 0, AF_UNIX), no)
        yield from ((LOAD, 0, 0, ARGUMENT + 8), (MASKED, 0, 0, SOCK_TYPE), (EQUAL, 1, 0, SOCK_SEQPACKET), no)
    elif call == "clone":
        yield from ((LOAD, 0, 0, ARGUMENT), (ANY_OF, 0, 1, NAMESPACES), no)
    elif call == "clone3":
        yield (RETURN, 0, 0, REFUSE | errno.ENOSYS)
    else:
        yield (LOAD, 0, 0, ARGUMENT + 8)
        for value in TYPES_TO_A_TERMINAL if call == "ioctl" else (SETS_LEASE, SETS_NOTICE):
            yield from ((EQUAL, 0, 1, value), no)


def filter_calls(libc: ctypes.CDLL, drivers: bool) -> bool:
    """Filter the calls of this process and of all that it starts, for good; False where the system does not. No new
    privileges may be possible any more."""
    machine = platform.machine()
    if machine not in MACHINES:
        return False
    steps = [struct.pack("HBBI", *step) for step in program(machine, drivers)]
    held = ctypes.create_string_buffer(b"".join(steps), 8 * len(steps))
    described = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(held))
    return bool(libc.prctl(PR_SET_SECCOMP, MODE_FILTER, described, 0, 0) == 0)
