"""What a tuner has found so far, a line an event, so that one that is killed continues where it was.

Lines are appended whole, and each is on the disk before the next thing is tried; of a last line that is only half there
nothing is believed. Several tuners may write to one journal.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from typing import Any

from portakern.files import cache_folder

__all__ = ["Journal"]


class Journal:
    """Values by (kind, name), kept in a file. ``about``: everything that they depend on."""

    def __init__(self, about: Any, fresh: bool = False) -> None:
        digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:32]
        self.path = cache_folder() / "tuning" / f"{digest}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if fresh:
            self.path.unlink(missing_ok=True)
        self._known: dict[tuple[str, str], Any] = {}
        self._running: dict[str, tuple[int, int]] = {}
        torn = self._read()
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        if torn:
            os.write(self._file, b"\n")

    def _read(self) -> bool:
        """Take in what is there; whether the last line is only half there."""
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return False
        for line in text.split(b"\n"):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                event = json.loads(line)
                self._take(str(event["kind"]), str(event["name"]), event["value"])
        return bool(text) and not text.endswith(b"\n")

    def _take(self, kind: str, name: str, value: Any) -> None:
        if kind == "begin":
            pid, among = value
            self._running[name] = int(pid), int(among)
        elif kind == "end":
            self._running.pop(name, None)
        else:
            self._known[kind, name] = value

    def get(self, kind: str, name: str) -> Any:
        """What was noted last, or None."""
        return self._known.get((kind, name))

    def note(self, kind: str, name: str, value: Any) -> None:
        """Keep a value."""
        self._take(kind, name, value)
        line = json.dumps({"kind": kind, "name": name, "value": value})
        os.write(self._file, line.encode() + b"\n")
        os.fsync(self._file)

    def begin(self, name: str, among: int = 1) -> None:
        """Note that something is about to be tried, one of so many at once, that might end this process."""
        self.note("begin", name, [os.getpid(), among])

    def end(self, name: str) -> None:
        """Note that it did not."""
        self.note("end", name, None)

    def fatal(self, name: str) -> int:
        """Among how many things a process that is no more was trying this when it ended; 0: it was not."""
        pid, among = self._running.get(name, (os.getpid(), 0))
        return among if pid != os.getpid() and not _alive(pid) else 0

    def close(self) -> None:
        """Let go of the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
