"""Who is slower than the best peer, who is as fast, who is faster, and what nobody timed: in words, from kept runs."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from portakern.reporting.kept import Kept
from portakern.reporting.speed import best_of_each_call
from portakern.reporting.staleness import AGED, changed

__all__ = ["losses"]

Row = Mapping[str, Any]
EVEN = 0.03
"""Times that differ by less are called the same."""
HOST = {"forward": ("op", "torch"), "with its gradient": ("op, forward and backward", "torch, forward and backward")}
"""Ways of calling, as ``benchmarks/launch.py`` names them: ours, and PyTorch's own function."""
SAME = "the same"
WIDTH = 118


def losses(kept: Kept) -> str:
    """A list a device: times over the best peer's, an op after another, from the worst; then the host's."""
    text = []
    for device in dict.fromkeys(r.device for _, r in kept.rows("bench")):
        rows = [row for row, r in kept.rows("bench") if r.device == device]
        text.append(f"Time over the best peer's, {device}; what differs by less than {EVEN:.0%} counts as the same:")
        text.append("\n".join(_items(kept, rows)))
        text += [AGED] if any(changed(r, kept.root) for r in rows) else []
    return "\n\n".join([*(_filled(t) for t in text), *map(_filled, _host(kept))] or ["Nothing was timed yet."])


def _filled(text: str) -> str:
    return "\n".join(
        textwrap.fill(line, WIDTH, subsequent_indent="  " if line.startswith("*") else "", break_on_hyphens=False)
        for line in text.splitlines()
    )


def _speeds(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Op -> our fastest right variant on each call that a peer finished too."""
    found: dict[str, list[Row]] = {}
    for best in best_of_each_call(rows):
        if best.get("ratio"):
            found.setdefault(best["op"], []).append(best)
    return found


def _items(kept: Kept, rows: Sequence[Row]) -> list[str]:
    kinds: dict[str, list[str]] = {"slower": [], SAME: [], "faster": []}
    speeds = _speeds(rows)
    for op, mine in sorted(speeds.items(), key=lambda x: min(r["ratio"] for r in x[1])):
        worst = min(mine, key=lambda r: r["ratio"])
        slow = sum(1 / r["ratio"] > 1 + EVEN for r in mine)
        if slow:
            where = f"{worst['dtype']}, beside {worst['best_peer']}"
            kinds["slower"].append(f"`{op}` on {slow} of {len(mine)} calls, at most {1 / worst['ratio']:.2f} ({where})")
        elif statistics.median(1 / r["ratio"] for r in mine) < 1 - EVEN:
            kinds["faster"].append(f"`{op}` {_range(1 / r['ratio'] for r in mine)}")
        else:
            kinds[SAME].append(f"`{op}`")
    broken = sorted({f"`{r['op']}` {r['dtype']}" for r in rows if r["subject"] and r["verdict"] in ("wrong", "failed")})
    alone = _untimed(kept, {(r["op"], r["dtype"]) for mine in speeds.values() for r in mine})
    kinds |= {"**wrong**": broken} if broken else {}
    kinds |= {"timed beside no peer": alone} if alone else {}
    return [f"* {kind}: {'; '.join(said) or 'none'}." for kind, said in kinds.items()]


def _untimed(kept: Kept, timed: Collection[tuple[str, str]]) -> list[str]:
    """What compiles, and no peer's time stands beside: ops, with their dtypes where another was timed."""
    found: dict[str, dict[str, None]] = {}
    for row, _ in kept.rows("compile-matrix"):
        if (row["op"], row["dtype"]) not in timed:
            found.setdefault(row["op"], {})[row["dtype"]] = None
    some, groups = {op for op, _ in timed}, dict[str, list[str]]()
    for op, dtypes in sorted(found.items()):
        groups.setdefault(f"in {' and '.join(dtypes)} " if op in some else "", []).append(f"`{op}`")
    return [where + ", ".join(ops) for where, ops in sorted(groups.items())]


def _range(values: Iterable[float]) -> str:
    """The least and the most, once where they read the same."""
    found = sorted(values)
    least, most = f"{found[0]:.2f}", f"{found[-1]:.2f}"
    return least if least == most else f"{least} to {most}"


def _host(kept: Kept) -> list[str]:
    """A sentence a device on the host's time over PyTorch's own, over all ops."""
    told = []
    for device in dict.fromkeys(r.device for _, r in kept.rows("launch")):
        us = {(row["op"], row["way"]): row["median_us"] for row, r in kept.rows("launch") if r.device == device}
        parts = []
        for what, (ours, theirs) in HOST.items():
            shares = [us[op, ours] / us[op, theirs] for op, way in us if way == ours and (op, theirs) in us]
            parts += [f"{_range(shares)} times {what}"] if shares else []
        if parts:
            told.append(
                f"Host time of an eager call over that of PyTorch's own function, {device}: {', '.join(parts)}."
            )
    return told
