"""Results whose sources have changed since they were measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from portakern import sources
from portakern.core import registry
from portakern.core.targets import Target
from portakern.errors import SpecError, UnavailableError

__all__ = ["AGED", "STALE", "changed", "footnote"]

Row = Mapping[str, Any]
STALE = "†"
AGED = f"{STALE} stale: the sources of what was measured (portakern's kernel, or the call of a peer) have changed."


def changed(row: Row, root: Path) -> bool:
    """Whether the sources that a row measured are others in a checkout, or gone; no row knows that of somebody
    else's."""
    if not row.get("sources") or not row.get("target"):
        return False
    platform, _, arch = row["target"].partition(" ")
    try:
        backend = registry.backend(row["backend"])
        now = sources.fingerprint(row["op"], backend, row.get("variant"), Target(platform, arch), root)
    except (SpecError, UnavailableError):
        return False
    return now != row["sources"]


def footnote(rows: Iterable[Row], root: Path) -> str:
    """What the mark means, where any row has it."""
    count = sum(changed(r, root) for r in rows)
    return f"{STALE} its sources have changed since it was measured ({count} in all)." if count else ""
