"""The stored results of a checkout, the source lines below a table, and whether a result is stale."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from maint import store
from maint.store import FOLDER, Row
from portakern import sources
from portakern.core import registry, targets
from portakern.core.targets import Target
from portakern.errors import SpecError, UnavailableError
from portakern.results import Result

__all__ = [
    "AGED",
    "FOLDER",
    "STALE",
    "Row",
    "StoredResults",
    "changed",
    "fingerprint",
    "footnote",
    "known_targets",
    "set_of",
    "source",
]

STALE = ", stale"
AGED = "Stale: measured before the kernel, or the call of a peer, was last changed."
CORE = {
    "portakern",
    "python",
    "system",
    "numpy",
    "ml_dtypes",
    "jaxtyping",
    "hypothesis",
    "jaxlib",
}  # versions that decide no kernel


@dataclass(frozen=True)
class StoredResults:
    """A checkout and the results in it."""

    root: Path
    results: tuple[Result, ...]

    @classmethod
    def load(cls, root: Path) -> StoredResults:
        return cls(root, tuple(store.read(root / FOLDER)))

    def rows(self, benchmark: str) -> list[tuple[Row, Result]]:
        """The rows of a benchmark with the run that each is of (:func:`maint.store.newest`)."""
        return [*store.newest(r for r in self.results if r.benchmark == benchmark).values()]


def source(used: Iterable[Result]) -> str:
    """A line that says which runs a table shows."""
    lines = []
    for r in sorted(set_of(used), key=lambda r: r.name):
        versions = ", ".join(f"{n} {v}" for n, v in r.environment.items() if v and n not in CORE)
        run = " ".join([r.date, *_commits(r)])
        lines.append(
            f"[{r.name}]({FOLDER}/{r.file.name}): {run}, {r.device}, {versions or 'no framework'}; `{r.command}`"
        )
    return "\n".join(f"<sub>{line}</sub>" + ("  " if i < len(lines) - 1 else "") for i, line in enumerate(lines))


def _commits(run: Result) -> list[str]:
    """The commit that was run, or those of its rows, where somebody wrote them down."""
    known = dict.fromkeys([run.commit] if run.commit else (row.get("commit") for row in run.rows))
    return [f"at {', '.join(found)}"] if (found := [c for c in known if c]) else []


def set_of(used: Iterable[Result]) -> list[Result]:
    """Each run once."""
    return list({(r.file, r.name): r for r in used}.values())


def known_targets(names: Iterable[str]) -> list[str]:
    """Targets in the order of the table of hardware, and behind them those that it lacks."""
    wanted = set(names)
    return [t for t in targets.HARDWARE if t in wanted] + sorted(wanted - set(targets.HARDWARE))


def fingerprint(row: Row, root: Path) -> str | None:
    """The hash of what a row measured as it is in a checkout; None where it is there no more."""
    chip, (platform, _, arch) = targets.HARDWARE.get(row["target"]), row["target"].partition(" ")
    target = chip.target if chip else Target(platform, arch)
    return sources.fingerprint(row["op"], registry.backend(row["backend"]), row.get("variant"), target, root)


def changed(row: Row, root: Path) -> bool:
    """Whether the sources that a row measured are others in a checkout, or gone; no row knows that of somebody
    else's."""
    if not row.get("sources") or not row.get("target"):
        return False
    try:
        return fingerprint(row, root) != row["sources"]
    except (SpecError, UnavailableError):
        return False


def footnote(rows: Iterable[Row], root: Path) -> str:
    """What the mark means, where any row has it."""
    count = sum(changed(r, root) for r in rows)
    return f"{AGED.removesuffix('.')} ({count} in all)." if count else ""
