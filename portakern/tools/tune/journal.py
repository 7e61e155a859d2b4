"""The journal of a tuner, an SQLite database, with which a killed tuner can continue: each note is on disk before the
next trial. Several tuners may write to one journal."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from contextlib import suppress
from typing import Any

from portakern.errors import SpecError
from portakern.files import cache_folder

__all__ = ["Journal"]


class Journal:
    """Values by (kind, name), kept in a file. ``about``: everything that they depend on.

    Raises:
      SpecError: there is such a file, and it is no journal.
    """

    def __init__(self, about: Any, fresh: bool = False) -> None:
        digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:32]
        self.path = cache_folder() / "tuning" / f"{digest}.sqlite"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if fresh:
            self.path.unlink(missing_ok=True)
        self._database = sqlite3.connect(self.path, timeout=60, isolation_level=None)
        try:
            self._database.execute("CREATE TABLE IF NOT EXISTS notes (kind, name, value, PRIMARY KEY (kind, name))")
        except sqlite3.DatabaseError as e:
            raise SpecError(f"tune: the journal {self.path} cannot be used: {e}; --fresh starts a new one") from None

    def get(self, kind: str, name: str) -> Any:
        """What was noted last, or None."""
        row = self._database.execute("SELECT value FROM notes WHERE kind = ? AND name = ?", (kind, name)).fetchone()
        return json.loads(row[0]) if row else None

    def note(self, kind: str, name: str, value: Any) -> None:
        """Keep a value."""
        self._database.execute("REPLACE INTO notes VALUES (?, ?, ?)", (kind, name, json.dumps(value)))

    def begin(self, name: str, among: int = 1) -> None:
        """Note that something is about to be tried, one of so many at once, that might end this process."""
        self.note("begin", name, [os.getpid(), among])

    def end(self, name: str) -> None:
        """Note that it did not."""
        self._database.execute("DELETE FROM notes WHERE kind = 'begin' AND name = ?", (name,))

    def fatal(self, name: str) -> int:
        """Among how many things a process that is no more was trying this when it ended; 0: it was not."""
        pid, among = self.get("begin", name) or (os.getpid(), 0)
        return among if pid != os.getpid() and not _alive(pid) else 0

    def close(self) -> None:
        """Let go of the file."""
        self._database.close()


def _alive(pid: int) -> bool:
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True
