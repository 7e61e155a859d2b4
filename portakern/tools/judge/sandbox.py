"""The sandbox of a candidate's process (Linux). The process enters it before it imports the candidate, and cannot
leave it.

Each protection has a name. :func:`enter_sandbox` returns the names of those that the system granted, and the report
lists the others as missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Collection, Iterator
from typing import NamedTuple

from portakern.tools.judge.calls import filter_calls
from portakern.tools.judge.mounts import MS_PRIVATE, MS_REC, devices, own_mounts

__all__ = ["PROTECTIONS", "Sandbox", "enter_sandbox"]

PROTECTIONS = {
    "session": "its own session and process group, killed when the judge ends",
    "limits": "limits on address space, processor time, file size and core dumps",
    "privileges": "no capabilities, no new privileges, and its own user namespace without privileges over others",
    "processes": "its own process namespace: no signal reaches the judge, and child processes end with it",
    "network": "its own network namespace without interfaces",
    "mounts": "its own mount namespace: read-only but for a folder in memory, with its own /dev and /dev/shm",
    "files": "files are writable only in its own folder (Landlock)",
    "calls": "no sockets, mounts, namespaces, keys, nor memory that no process has (seccomp)",
    "counted": "a control group limits memory and tasks of all its processes (without: counted every 0.2 s)",
}
"""Name -> in words. The judge's side grants the last (:mod:`portakern.tools.judge.groups`)."""

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, CLEAR_ALL = 1, 24, 38, 47, 4
CAPABILITIES = 64
CAPABILITIES_3 = 0x20080522


class Sandbox(NamedTuple):
    """What a candidate's process gets.

    Attributes:
      folder: where files may be written; space: bytes that it holds, and /dev/shm.
      memory: bytes of address space, 0 for no limit (GPUs map more than they use).
      cpu_seconds: processor time of the process; file_bytes: size of one file.
      drivers: whether it reaches an accelerator, whose driver has devices and needs more of the system.
      without: names of protections to omit.
    """

    folder: str
    space: int
    memory: int
    cpu_seconds: int
    file_bytes: int
    drivers: bool = False
    without: Collection[str] = ()


def enter_sandbox(sandbox: Sandbox) -> list[str]:
    """Put this process into the sandbox; the names of the protections in force."""
    libc = ctypes.CDLL(None, use_errno=True)
    without = sandbox.without
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    in_force = ["session", *(name for name, granted in _namespaces(libc, sandbox).items() if granted)]
    if "limits" not in without:
        _limit(sandbox)
        in_force.append("limits")
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if "files" not in without and _landlock(libc, sandbox, "mounts" in in_force):
        in_force.append("files")
    if "privileges" not in without:
        _drop_capabilities(libc)
    if "calls" not in without and filter_calls(libc, sandbox.drivers):
        in_force.append("calls")
    return [name for name in PROTECTIONS if name in in_force]


def _limit(sandbox: Sandbox) -> None:
    for kind, limit in (
        (resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, sandbox.cpu_seconds),
        (resource.RLIMIT_FSIZE, sandbox.file_bytes),
        *(((resource.RLIMIT_AS, sandbox.memory),) if sandbox.memory else ()),
    ):  # fmt: skip
        hard = resource.getrlimit(kind)[1]
        least = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (least, least))


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Of all kinds, so that no program that is started has any."""
    for capability in range(CAPABILITIES):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    libc.prctl(PR_CAP_AMBIENT, CLEAR_ALL, 0, 0, 0)
    libc.capset(struct.pack("II", CAPABILITIES_3, 0), bytes(24))


def _namespaces(libc: ctypes.CDLL, sandbox: Sandbox) -> dict[str, bool]:
    """Leave the judge's namespaces. The process that returns is the second in its own: the first waits for it, and when
    that ends the kernel ends all others."""
    without = sandbox.without
    user, group = os.getuid(), os.getgid()
    granted = {"privileges": "privileges" not in without and libc.unshare(CLONE_NEWUSER) == 0}
    if granted["privileges"]:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    granted["network"] = "network" not in without and libc.unshare(CLONE_NEWNET | CLONE_NEWIPC) == 0
    granted["processes"] = "processes" not in without and libc.unshare(CLONE_NEWPID) == 0
    apart = libc.unshare(CLONE_NEWNS) == 0
    _wait_for_a_child(libc)  # with the namespace it is the first there, which the kernel shields from signals
    if granted["processes"] and apart and libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0:
        libc.mount(b"proc", b"/proc", b"proc", 0, None)  # of its own processes alone; a container may forbid it
    granted["mounts"] = (
        apart and "mounts" not in without and own_mounts(libc, sandbox.folder, sandbox.space, sandbox.drivers)
    )
    if granted["processes"]:
        _wait_for_a_child(libc)
    return granted


def _wait_for_a_child(libc: ctypes.CDLL) -> None:
    """Fork; the child returns, and this process ends as the child does."""
    child = os.fork()
    if child == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        return
    os.closerange(3, 256)  # the ends of pipes: the judge is to see them close
    for ended, status in iter(lambda: os.waitpid(-1, 0), (0, 0)):
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


# Landlock, linux/landlock.h: what a ruleset handles is forbidden but where a rule allows it

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
ALL_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
TRUNCATE, IOCTL = 1 << 14, 1 << 15
SCOPED = 3  # from version 6 on: no abstract sockets of others, no signals to them


def _landlock(libc: ctypes.CDLL, sandbox: Sandbox, own_devices: bool) -> bool:
    version = libc.syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        return False
    every = ALL_BY_VERSION[min(version, 5)]
    scoped = struct.pack("QQQ", every, 0, SCOPED)
    attributes = scoped if version >= 6 else scoped[:8]
    ruleset = libc.syscall(CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    for path, allowed in _rules(sandbox, every, own_devices):
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", allowed & every, parent)
        done = libc.syscall(ADD_RULE, ruleset, 1, rule, 0)
        os.close(parent)
        if done != 0:
            return False
    done = libc.syscall(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return bool(done == 0)


def _rules(sandbox: Sandbox, every: int, own_devices: bool) -> Iterator[tuple[str, int]]:
    """What may be done at and below which path; ``own_devices``: /dev and /dev/shm are the candidate's own."""
    reading = EXECUTE | READ_FILE | READ_DIR
    to_device = READ_FILE | WRITE_FILE | TRUNCATE | IOCTL  # what opens a file to write to it may cut it first
    yield "/", reading
    yield sandbox.folder, every
    for path in devices(sandbox.drivers):
        yield path, to_device | (READ_DIR if os.path.isdir(path) else 0)
    if own_devices:
        yield "/dev/shm", every
    if sandbox.drivers:
        yield "/proc/self", to_device | reading


if sys.platform != "linux":  # pragma: no cover
    raise ImportError("portakern.tools.judge.sandbox needs Linux")
