"""The files that a candidate's process sees: all read-only but its own folder, and devices of its own, among them no
terminal and no shared memory of others."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import struct
from collections.abc import Iterator

__all__ = ["devices", "own_mounts"]

MS_NOSUID, MS_NODEV, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x2000, 0x4000, 0x40000
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1
PLAIN = ("null", "zero", "full", "random", "urandom")
ACCELERATORS = ("nvidia*", "dri", "kfd", "accel*", "vfio", "gdrdrv", "infiniband")
LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
SYSTEM = ("sys", "irq", "bus", "fs", "acpi", "scsi", "sysrq-trigger", "mtrr")
"""What lies in /proc and is not of a process."""

INODES = 200_000
"""Files and folders that its own folder holds, at most."""


def devices(drivers: bool) -> Iterator[str]:
    """The devices that a candidate needs, by their paths; ``drivers``: an accelerator's too."""
    yield from (f"/dev/{name}" for name in PLAIN if os.path.exists(f"/dev/{name}"))
    for pattern in ACCELERATORS if drivers else ():
        yield from sorted(glob.glob(f"/dev/{pattern}"))


def own_mounts(libc: ctypes.CDLL, folder: str, space: int, drivers: bool) -> bool:
    """In a mount namespace of its own: give this process its own view of files; False where the system does not.

    Args:
      folder: stays writable, in memory: nothing of it outlives the process; space: bytes that it holds.
      drivers: whether the process reaches an accelerator, whose driver writes to /proc/self.
    """
    try:
        _mount(libc, "none", "/", None, MS_REC | MS_PRIVATE)
        if drivers:
            for path in (f"/proc/{name}" for name in SYSTEM):
                if os.path.exists(path):
                    _mount(libc, path, path, None, MS_BIND)
        limited = f"size={space},nr_inodes={INODES},mode=700"
        _mount(libc, "tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, limited)
        _mount_devices(libc, os.path.join(folder, ".dev"), limited, drivers)
        _read_only(libc, "/", True, recursive=True)
        for path in (folder, "/dev/shm", *(["/proc"] if drivers else [])):
            _read_only(libc, path, False)
        os.chdir(folder)
    except OSError:
        return False
    return True


def _mount_devices(libc: ctypes.CDLL, staged: str, limited: str, drivers: bool) -> None:
    """A /dev with what a candidate needs, made in another place and then moved there."""
    os.mkdir(staged)
    _mount(libc, "tmpfs", staged, "tmpfs", MS_NOSUID, "size=64k,mode=755")
    for path in devices(drivers):
        at = os.path.join(staged, os.path.basename(path))
        if os.path.isdir(path):
            os.mkdir(at)
        else:
            os.close(os.open(at, os.O_CREAT | os.O_WRONLY, 0o600))
        _mount(libc, path, at, None, MS_BIND | MS_REC)
    for name, to in LINKS.items():
        os.symlink(to, os.path.join(staged, name))
    shared = os.path.join(staged, "shm")
    os.mkdir(shared)
    _mount(libc, "tmpfs", shared, "tmpfs", MS_NOSUID | MS_NODEV, limited)
    _mount(libc, staged, "/dev", None, MS_MOVE)
    with contextlib.suppress(OSError):
        os.rmdir(staged)


def _mount(libc: ctypes.CDLL, source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    words = (source.encode(), target.encode(), kind.encode() if kind else None)
    if libc.mount(*words, ctypes.c_ulong(flags), data.encode() or None) != 0:
        raise OSError(ctypes.get_errno(), f"mount {target}")


def _read_only(libc: ctypes.CDLL, path: str, wanted: bool, recursive: bool = False) -> None:
    """Every mount at and below a path, or that one, as read-only or not."""
    attributes = struct.pack("QQQQ", *((READ_ONLY, 0) if wanted else (0, READ_ONLY)), 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    if libc.syscall(MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, attributes, len(attributes)) != 0:
        raise OSError(ctypes.get_errno(), f"mount_setattr {path}")
