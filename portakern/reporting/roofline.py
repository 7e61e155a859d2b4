"""What the plots show, as plain data: where ops lie under a chip's roof, and how each compiles for each chip. No
framework is needed, and no plotting library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from portakern.core import registry, targets
from portakern.core.binder import unchecked
from portakern.core.targets import Hardware
from portakern.errors import SpecError
from portakern.reporting.kept import Kept, chip, known_targets
from portakern.spec.dtypes import numpy_dtype
from portakern.tools.bench.roof import unit_of
from portakern.tools.compile import forms

__all__ = ["Point", "Work", "heatmap", "plots", "roofline", "work"]


@dataclass(frozen=True)
class Point:
    """An op's typical call: operations a byte, the operations a second that the roof allows, and the share of these
    that was measured.
    """

    op: str
    dtype: str
    intensity: float
    bound: float
    by_memory: bool
    share: float | None = None


class Work(NamedTuple):
    """What an op's typical call takes: operations, and bytes with every array touched once; ``options``: those that are
    not at their default, as results print them."""

    flops: int
    bytes: int
    options: Mapping[str, str]


def work(op: str, dtype: str) -> Work:
    """Of an op's typical call."""
    s = registry.find_spec(op)
    form = forms.typical_form(s, dtype)
    # one element each, however large
    arrays = {n: np.broadcast_to(np.zeros((), numpy_dtype(d)), shape) for n, (shape, d, _) in form["arrays"].items()}
    options = {n: tuple(v) if isinstance(v, list) else v for n, v in form["options"].items()}
    call = unchecked(s, **arrays, **options)
    moved = sum(a.size * a.itemsize for a in arrays.values())
    moved += sum(prod(shape) * numpy_dtype(d).itemsize for n, (shape, d) in call.outputs.items() if n in call.wants)
    return Work(round(s.flops(call)), moved, _options(op, repr(call)))


def _known_work(op: str, dtype: str) -> Work | None:
    """The same, or None where no such op is here, or it has no typical call."""
    try:
        return work(op, dtype)
    except SpecError:
        return None


def _options(op: str, call: str) -> dict[str, str]:
    """Option -> its value, of those that a call in words has at another than the default."""
    try:
        names = [o.name for o in registry.find_spec(op).options]
    except SpecError:  # results may be of an op that is no longer here
        return {}
    said = call.partition("); ")[0].removesuffix(")")
    return {n: m[1] for n in names if (m := re.search(rf"[,;] {n}=(\([^)]*\)|'[^']*'|[^,]+)", said))}


def _unit(row: Mapping[str, Any]) -> str:
    """The precision in which a row's products were made, under whose roof it lies."""
    return unit_of(row["dtype"], _options(row["op"], row["call"]).get("precision", "").strip("'"))


def _timed(kept: Kept) -> list[tuple[Mapping[str, Any], str]]:
    """(a row with op, dtype, bytes, operations and microseconds; the device's name) of whatever was timed: of a call
    that two benchmarks timed, what the later of them says, and of several variants the fastest."""
    found: dict[Any, tuple[Mapping[str, Any], str]] = {}
    for row, r in kept.rows("times"):
        if row["us"] and row["bytes"]:
            found[r.device, *_same(row)] = row, r.device
    ours = [(row, r.device) for row, r in kept.rows("bench") if row["subject"] and row.get("median_us")]
    for row, device in sorted(ours, key=lambda x: -x[0]["median_us"]):
        found[device, *_same(row)] = {**row, "us": row["median_us"]}, device
    return list(found.values())


def _same(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What rows of one call share, whichever benchmark timed it: its options too, of which one asks for other
    products."""
    options = tuple(_options(row["op"], row["call"]).items())
    return row["op"], row["dtype"], row["flops"], row["bytes"], options


def roofline(kept: Kept, h: Hardware) -> dict[str, Any]:
    """The roof of one chip, the typical calls that compile for it, and every call that was timed on it."""
    compiled = {
        (row["op"], row["dtype"]) for row, _ in kept.rows("compile-matrix") if row["target"] == h.name and row["ok"]
    }
    timed = [row for row, device in _timed(kept) if chip(device) == h.name]
    roofs = {d: peak for d, peak in h.flops.items() if peak is not None}

    def place(op: str, dtype: str, flops: int, moved: int) -> Point:
        rate = flops / moved * (h.bandwidth or 0)
        return Point(op, dtype, flops / moved, min(rate, roofs[dtype]), rate < roofs[dtype])

    points = []
    for op, dtype in sorted(compiled):
        known = _known_work(op, dtype)
        if known is None or dtype not in roofs:
            continue
        same = [row for row in timed if _same(row) == (op, dtype, known.flops, known.bytes, (*known.options.items(),))]
        p = place(op, dtype, known.flops, known.bytes)
        points.append(replace(p, share=known.flops / same[0]["us"] * 1e6 / p.bound if same else None))
    measured = [
        {**asdict(place(r["op"], _unit(r), r["flops"], r["bytes"])), "measured": r["flops"] / r["us"] * 1e6}
        for r in timed
        if _unit(r) in roofs
    ]
    used = {p.dtype for p in points} | {m["dtype"] for m in measured}
    return {
        "kind": "roofline", "target": h.name, "product": h.product, "bandwidth": h.bandwidth,
        "points": [asdict(p) for p in points], "measured": measured,
        "roofs": {d: peak for d, peak in roofs.items() if d in used},
        "without": sorted({d for _, d in compiled} - used),
    }  # fmt: skip


def heatmap(kept: Kept) -> dict[str, Any]:
    """Op and dtype by target: whether the call compiles, spills, and uses the matrix unit. Several backends of one
    target: the best of them.
    """
    order = ("fails", "spills", "fits")
    cells: dict[tuple[str, str, str], tuple[int, bool]] = {}
    for row, _ in kept.rows("compile-matrix"):
        spills = any(k["spills"] for k in row["kernels"])
        found = (0 if not row["ok"] else 1 if spills else 2, any(k["matrix"] for k in row["kernels"]))
        key = row["op"], row["dtype"], row["target"]
        cells[key] = max(found, cells.get(key, found))
    names = known_targets(t for _, _, t in cells)
    lines: dict[str, list[Any]] = {f"{op} {dtype}": [] for op, dtype, _ in sorted(cells)}
    for op, dtype in sorted({(o, d) for o, d, _ in cells}):
        here = [cells.get((op, dtype, t)) for t in names]
        lines[f"{op} {dtype}"] = [None if c is None else [order[c[0]], c[1]] for c in here]
    return {"kind": "heatmap", "targets": names, "rows": lines}


def plots(kept: Kept) -> Mapping[str, dict[str, Any]]:
    """Name of the file -> what it shows: how everything compiles, and the roof of each chip that was measured."""
    compiled_for = {row["target"] for row, _ in kept.rows("compile-matrix")}
    measured = {chip(device) for _, device in _timed(kept)}
    found = {f"roofline-{h.name}.svg": roofline(kept, h) for h in targets.HARDWARE.values() if h.name in measured}
    return ({"heatmap.svg": heatmap(kept)} if compiled_for else {}) | found
