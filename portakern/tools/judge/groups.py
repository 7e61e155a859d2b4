"""A control group (version 2) of the candidate's processes, where the system lets a user make one: the kernel itself
counts their memory, that of files in memory too, and their tasks."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

__all__ = ["ControlGroup"]

ROOT = Path("/sys/fs/cgroup")
CONTROLLERS = {"memory", "pids"}
ATTEMPTS = 50
TASKS_OF_A_PROCESS = 16
"""Libraries start threads, which the kernel counts as it counts processes: so many a process are allowed."""


class ControlGroup:
    """``folder``: the group's; it holds nothing till :meth:`holds`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def made(cls, name: str, memory: int, processes: int, root: Path = ROOT, own: str = "") -> ControlGroup | None:
        """A group beside this process's, within these limits; None where the system does not let it be made.

        Args:
          name: the group's; memory: bytes; processes: their number.
          root: where groups are mounted; own: the path of this process's, "": what the kernel says.
        """
        at = root / (own or _own()).lstrip("/")
        base = at if at == root else at.parent  # a group with processes has none below it, but the root
        folder = base / name
        try:
            if not {*(base / "cgroup.subtree_control").read_text().split()} >= CONTROLLERS:
                return None
            folder.mkdir()
        except OSError:
            return None
        group = cls(folder)
        try:
            _set(folder / "memory.max", str(memory))
            _set(folder / "pids.max", str(processes * TASKS_OF_A_PROCESS))
            with contextlib.suppress(OSError):  # a system without swap has no such file
                _set(folder / "memory.swap.max", "0")
        except OSError:
            group.end()
            return None
        return group

    def holds(self, pid: int) -> bool:
        """Move a process into the group; whether the system permits it."""
        try:
            _set(self.folder / "cgroup.procs", str(pid))
        except OSError:
            return False
        return True

    @property
    def ran_out(self) -> bool:
        """Whether the kernel ended a process of the group for its memory."""
        with contextlib.suppress(OSError, ValueError):
            lines = (line.split() for line in (self.folder / "memory.events").read_text().splitlines())
            return any(int(count) > 0 for name, count in lines if name == "oom_kill")
        return False

    def end(self) -> None:
        """End what is left in it, and remove it."""
        with contextlib.suppress(OSError):
            _set(self.folder / "cgroup.kill", "1")
        for _ in range(ATTEMPTS):  # what was killed ends a moment later
            try:
                os.rmdir(self.folder)
                return
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.02)


def _set(control: Path, value: str) -> None:
    """Tell the kernel, which reads its files at each write."""
    with control.open("w", encoding="ascii") as file:
        file.write(value)


def _own() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        return next(line for line in lines if line.startswith("0::"))[3:]
    return "/"
