"""The verdict on each op in one line: how much of its kernel is a port's own, how fast it is, how far it errs."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from portakern.reporting import lines
from portakern.reporting.kept import Kept
from portakern.reporting.markdown import NONE, table
from portakern.reporting.speed import ratios
from portakern.reporting.staleness import AGED, STALE, changed
from portakern.results import HOST_CPU

__all__ = ["verdict"]

Row = Mapping[str, Any]
FINE = "float32"  # where no 16-bit store hides the error of the arithmetic
NOTES = (
    "Lines: code of the op's own module, and the share of it that no other backend's module of the op has. Speed: the "
    "best peer's time over ours, the median of the calls that were timed, and the extremes; above 1 is faster than "
    "every peer. Error: the worst of any element, as a share of what the derived bound permits; above 1 is wrong. A "
    "result in 16 bits comes close to 1 whatever computed it, since its last rounding is most of the bound: the column "
    f"of {FINE} shows what the arithmetic adds on the calls that were timed."
)


def verdict(kept: Kept) -> str:
    """A line an op: lines of each port and how many are its own; speed and error on each device that ran it."""
    written, timed, ran = lines.written(kept), kept.rows("bench"), kept.rows("conformance")
    ports = list(dict.fromkeys(port for there in written.values() for port in there))
    speeds = list(dict.fromkeys(r.device for _, r in timed))
    devices = sorted({r.device for _, r in ran} - {HOST_CPU}) + [HOST_CPU]
    rows = []
    for op, there in written.items():
        rows.append([f"`{op}`", *(_lines(there.get(port)) for port in ports)])
        for device in speeds:
            mine = [row for row, r in timed if r.device == device and row["op"] == op and row["subject"]]
            rows[-1] += [_speed([row for row, r in timed if r.device == device and row["op"] == op], kept), _fine(mine)]
        for device in devices:
            rows[-1].append(_error([row for row, r in ran if r.device == device and row["op"] == op], kept))
    heads = ["op", *(f"lines of {port} (its own)" for port in ports)]
    heads += [head for d in speeds for head in (f"of the best peer's speed, {d}", f"error in {FINE} there")]
    heads += ["error, interpreters" if d == HOST_CPU else f"error, {d}" for d in devices]
    shown = table(heads, rows)
    notes = f"{NOTES} {_alone(written)}".strip()
    return "\n\n".join([shown, *([AGED] if STALE in shown else []), textwrap.fill(notes, 118)])


def _alone(written: Mapping[str, Mapping[str, tuple[int, int]]]) -> str:
    """How much of a port is its own: of the median one, and of the one with the least."""
    shares = [(own / n, op, port) for op, there in written.items() for port, (n, own) in there.items() if n]
    if not shares:
        return ""
    least, op, port = min(shares)
    return (
        f"Half of the ports have at least {statistics.median(s for s, _, _ in shares):.0%} of their lines to "
        f"themselves; the least, {least:.0%}, has {port}'s `{op}`."
    )


def _lines(found: tuple[int, int] | None) -> str:
    return NONE if found is None or not found[0] else f"{found[0]} ({found[1] / found[0]:.0%})"


def _mark(rows: Iterable[Row], kept: Kept) -> str:
    return STALE if any(changed(r, kept.root) for r in rows) else ""


def _speed(rows: Sequence[Row], kept: Kept) -> str:
    """The calls of one op on one device, ours and those of peers."""
    ours = [r for r in rows if r["subject"]]
    if any(r["verdict"] in ("wrong", "failed") for r in ours):
        return "**wrong**"
    found = ratios(rows)
    if not found:
        return "not timed"
    middle, least, most = (f"{of(found):.2f}" for of in (statistics.median, min, max))
    return (middle if least == most else f"{middle} ({least} to {most})") + _mark(rows, kept)


def _fine(ours: Iterable[Row]) -> str:
    found = [r["error"] for r in ours if r["dtype"] == FINE and r.get("error") is not None]
    return f"{max(found):.2f}" if found else NONE


def _error(rows: Sequence[Row], kept: Kept) -> str:
    """What the checker found of one op on one device."""
    worst = [w for r in rows for w in r["worst"].values()]
    if not rows:
        return "not run"
    figure = (f"{max(worst):.3f}" if worst else NONE) + _mark(rows, kept)
    return figure if all(r["passed"] for r in rows) else f"**failed**, {figure}"
