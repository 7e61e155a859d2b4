"""Write tables of tilings without losing rows: under a lock, merged with the rows of the file, and atomically."""

from __future__ import annotations

import contextlib
import json
import os
import re
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from portakern import install
from portakern.core import tilings
from portakern.core.observe import say
from portakern.core.tilings import SCHEMA, Row
from portakern.errors import SpecError, UnavailableError
from portakern.files import write_atomically

__all__ = ["keep", "name_of", "text_of"]

LOCK_SECONDS = 60.0
WIDTH = 110


def keep(path: Path, op: str, variant: str, rows: Sequence[Row]) -> None:
    """Put rows of an op into a table; those that it has for the same keys give way, all others stay.

    A file that is no table is moved aside first, and that is said.

    Raises:
      SpecError: the folder cannot be written, or another process holds its lock.
    """
    target = path.stem
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            table = _read(path)
            entries = table["ops"].setdefault(op, {}).setdefault(variant, [])
            new = [_entry(row) for row in rows]
            keys = [entry["key"] for entry in new]
            kept = [entry for entry in entries if "from" in entry or entry["key"] not in keys]
            table["ops"][op][variant] = new + kept
            write_atomically(path, text_of({**table, "target": target}))
    except OSError as e:
        raise SpecError(f"tune: the table {path} cannot be written: {e.strerror or e}") from None
    tilings.forget()


def name_of(key: Mapping[str, Any]) -> str:
    """A row's name, from its key: "16-bit, aligned, n 4096, k 4096"."""
    words = (v if isinstance(v, str) else (n if v else f"not {n}") if isinstance(v, bool) else f"{n} {v}"
             for n, v in key.items())  # fmt: skip
    return ", ".join(map(str, words)) or "any"


def _entry(row: Row) -> dict[str, Any]:
    entry = {"name": row.name, "key": dict(row.key), "tiling": dict(row.tiling), "source": row.source}
    return entry | ({"made": dict(row.made)} if row.made else {})


def _read(path: Path) -> dict[str, Any]:
    """The table of a file; an empty one where there is none, or where it is none and was moved aside."""
    if not path.exists():
        return {"schema": SCHEMA, "target": path.stem, "notes": [], "ops": {}}
    try:
        tilings.check_table(path)
        table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return table
    except ValueError as e:
        aside = path.with_name(f"{path.name}.wrong-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
        os.replace(path, aside)
        say(f"portakern: {path} is not a table of tilings ({e}); it was renamed to {aside}, and a new table is started")
        return {"schema": SCHEMA, "target": path.stem, "notes": [], "ops": {}}


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Nobody else writes the table meanwhile. The lock's file stays: taking it away would let two in."""
    try:
        import filelock
    except ImportError:
        raise UnavailableError(f"filelock (a lock between tuners) is not installed; {install.command('cli')}") from None
    try:
        with filelock.FileLock(path.with_name(f".{path.name}.lock"), timeout=LOCK_SECONDS):
            yield
    except filelock.Timeout:
        raise SpecError(f"tune: another process has held the lock of {path} for {LOCK_SECONDS:.0f} s") from None


def text_of(table: Mapping[str, Any]) -> str:
    """A table as its file holds it: a line or three a row, as tables written by hand are."""
    lines = ["{", f' "schema": {SCHEMA},', f' "target": {json.dumps(table["target"])},']
    notes = ",\n".join(f"  {json.dumps(note)}" for note in table.get("notes", []))
    lines += [f' "notes": [\n{notes}\n ],' if notes else ' "notes": [],', ' "ops": {']
    ops = []
    for op, variants in table["ops"].items():
        each = []
        for variant, entries in variants.items():
            rows = ",\n".join(f"   {_row_text(entry)}" for entry in entries)
            each.append(f"{json.dumps(variant)}: [\n{rows}\n  ]" if rows else f"{json.dumps(variant)}: []")
        ops.append(f"  {json.dumps(op)}: {{{', '.join(each)}}}")
    return "\n".join(lines) + "\n" + ",\n".join(ops) + "\n }\n}\n"


def _row_text(entry: Mapping[str, Any]) -> str:
    """A row on one line, or on as many as keep within the width; a line ends between members, and not in a short
    object."""
    text = json.dumps(entry)
    for kept in (r'"(?:[^"\\]|\\.)*"(?:: )?', r"\{[^{}]{,53}\}"):
        text = re.sub(kept, lambda found: found[0].replace(" ", "\0"), text)
    return "\n    ".join(textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)).replace("\0", " ")
