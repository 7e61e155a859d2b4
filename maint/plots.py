"""The report's plots: ops under a chip's roof, how each compiles for each chip, and speeds and errors at a glance."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import atan2, degrees, prod
from typing import Any, NamedTuple

import numpy as np

from maint.kept import Kept, chip, known_targets
from portakern.core import registry, targets
from portakern.core.binder import unchecked
from portakern.core.targets import Hardware
from portakern.errors import SpecError
from portakern.spec.dtypes import numpy_dtype
from portakern.tools.bench.plots import (
    COLOURS,
    FAINT,
    INK,
    MARKERS,
    SOFT,
    best_of_each_call,
    draw,
    most_timed,
    rate,
    short,
)  # fmt: skip
from portakern.tools.bench.roof import unit_of
from portakern.tools.compile import forms

__all__ = ["Point", "Work", "drawn", "glance", "heatmap", "plots", "roofline", "work"]

Row = Mapping[str, Any]
FILLS = {"fits": "#b7dfc9", "spills": "#f6dd9c", "fails": "#ee9a8d"}
GLANCED = ("bfloat16", "float32")  # a figure for those who see portakern for the first time has no room for more


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
        spills = any(k.get("spills") for k in row["kernels"])
        found = (0 if not row["ok"] else 1 if spills else 2, any(k["matrix"] for k in row["kernels"]))
        key = row["op"], row["dtype"], row["target"]
        cells[key] = max(found, cells.get(key, found))
    names = known_targets(t for _, _, t in cells)
    lines: dict[str, list[Any]] = {f"{op} {dtype}": [] for op, dtype, _ in sorted(cells)}
    for op, dtype in sorted({(o, d) for o, d, _ in cells}):
        here = [cells.get((op, dtype, t)) for t in names]
        lines[f"{op} {dtype}"] = [None if c is None else [order[c[0]], c[1]] for c in here]
    return {"kind": "heatmap", "targets": names, "rows": lines}


def glance(devices: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """Speed over the best peer's and error over the bound, an op a line, on the device with most calls."""
    device, found = most_timed(devices)
    rows = [r for r in found if r["dtype"] in GLANCED]
    points = [{"op": b["op"], "dtype": b["dtype"], "x": b["ratio"]} for b in best_of_each_call(rows) if b.get("ratio")]
    errors = [
        {"op": r["op"], "dtype": r["dtype"], "x": r["error"], "subject": r["subject"]} for r in rows if r.get("error")
    ]
    return {"kind": "glance", "title": device, "speeds": points, "errors": errors}


def plots(kept: Kept) -> Mapping[str, dict[str, Any]]:
    """Name of the file -> what it shows: how everything compiles, the roof of each chip that was measured, and speeds and
    errors at a glance."""
    compiled = kept.rows("compile-matrix")
    timed = {chip(device) for _, device in _timed(kept)}
    found = {"heatmap.svg": heatmap(kept)} if compiled else {}
    found |= {f"roofline-{h.name}.svg": roofline(kept, h) for h in targets.HARDWARE.values() if h.name in timed}
    bench = kept.rows("bench")
    seen = glance({d: [row for row, r in bench if r.device == d] for d in dict.fromkeys(r.device for _, r in bench)})
    return found | ({"glance.svg": seen} if seen["speeds"] else {})


def _roofline(figure: Any, data: Mapping[str, Any]) -> None:
    figure.set_size_inches(8.4, 5.2)
    axes = figure.add_subplot()
    points, roofs, bandwidth = data["points"], data["roofs"], data["bandwidth"]
    axes.set_title(f"{data['target']}: {data['product']}", loc="left")
    if not points or not bandwidth:
        axes.text(0.5, 0.5, "no rate is published for what compiles", ha="center", transform=axes.transAxes)
        return
    intensities = [p["intensity"] for p in [*points, *data["measured"]]] + [peak / bandwidth for peak in roofs.values()]
    rates = [p["bound"] for p in points] + [m["measured"] for m in data["measured"]]
    left, right, top = min(intensities) / 8, max(intensities) * 300, max(roofs.values())
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(min(rates) / 6, top * 3))
    axes.set(xlabel="operations a byte of device memory", ylabel="floating-point operations a second")
    axes.xaxis.set_major_formatter(lambda value, position: f"{value:,.10g}")
    axes.yaxis.set_major_formatter(lambda value, position: rate(value))
    axes.minorticks_off()
    axes.grid(color=SOFT, linewidth=0.5)
    axes.set_axisbelow(True)
    colours = {d: COLOURS[i % len(COLOURS)] for i, d in enumerate(sorted(roofs))}
    axes.plot([left, top / bandwidth], [left * bandwidth, top], color=INK, linewidth=1.2)
    _along(axes, min(rates) / 3 / bandwidth, min(rates) / 3, f"{bandwidth / 1e9:,.0f} GB/s")
    for dtype, peak in roofs.items():
        axes.plot([peak / bandwidth, right], [peak, peak], color=colours[dtype], linewidth=1.4)
        axes.annotate(
            f"{dtype}: {rate(peak)}flop/s",
            (right, peak),
            (-2, 4),
            textcoords="offset points",
            ha="right",
            color=colours[dtype],
        )
    for m in data["measured"]:
        axes.plot(
            [m["intensity"]] * 2,
            [m["measured"], m["bound"]],
            color=colours[m["dtype"]],
            linewidth=0.6,
            linestyle=":",
            zorder=2,
        )
        axes.plot([m["intensity"]], [m["measured"]], "o", markersize=4, color=colours[m["dtype"]], zorder=3)
    for p in points:
        axes.plot(
            [p["intensity"]],
            [p["bound"]],
            "o",
            markersize=5,
            markerfacecolor="white",
            markeredgecolor=colours[p["dtype"]],
            zorder=4,
        )
    _labels(axes, points, colours)
    _legend(axes, data)


def _along(axes: Any, x: float, y: float, text: str) -> None:
    """A text under the slope of the roof."""
    (x0, y0), (x1, y1) = axes.transData.transform([(x, y), (10 * x, 10 * y)])
    axes.annotate(
        text,
        (x, y),
        (6, -4),
        textcoords="offset points",
        rotation=degrees(atan2(y1 - y0, x1 - x0)),
        rotation_mode="anchor",
        va="top",
        color=INK,
    )


def _labels(axes: Any, points: list[dict[str, Any]], colours: dict[str, str]) -> None:
    """Labels in two columns right of the points that they name, where the plot is empty, in an order in which no two
    leaders of a column cross.
    """

    def height(p: dict[str, Any]) -> float:
        point = axes.transData.transform((p["intensity"], p["bound"]))
        return float(axes.transAxes.inverted().transform(point)[1])

    for slope, column in ((True, 0.3), (False, 0.71)):
        order = sorted(
            (p for p in points if p["by_memory"] == slope), key=lambda p: (-p["bound"], -p["intensity"], p["op"])
        )
        if not order:
            continue
        step = min(0.046, 0.6 / len(order))
        start = max(
            height(order[0]) - 0.02 if slope else min(map(height, order)) - 0.05, 0.03 + step * (len(order) - 1)
        )
        for i, p in enumerate(order):
            text = f"{p['op']} {short(p['dtype'])}: {p['intensity']:{',.0f' if p['intensity'] >= 100 else '.2g'}} op/B"
            text += f", {p['share']:.0%}" if p["share"] is not None else ""
            axes.annotate(
                text, (p["intensity"], p["bound"]), (column, start - i * step), textcoords="axes fraction", fontsize=8,
                color=colours[p["dtype"]],
                va="center", ha="left", zorder=5,
                arrowprops={"arrowstyle": "-", "color": FAINT, "linewidth": 0.4, "shrinkA": 1, "shrinkB": 3,
                "patchA": None, "relpos": (0, 0.5)},
            )  # fmt: skip


def _legend(axes: Any, data: Mapping[str, Any]) -> None:
    said = ["○ what the roof allows the op's typical call,", "every array touched once"]
    if data["measured"]:
        said += ["● measured; in words: its share of what", "the roof allows the typical call"]
    if data["without"]:
        said += [f"not shown: {', '.join(data['without'])}, for which", "no peak rate is published"]
    axes.text(0.02, 0.98, "\n".join(said), transform=axes.transAxes, va="top", fontsize=8, color=INK)


def _heatmap(figure: Any, data: Mapping[str, Any]) -> None:
    names, rows = data["targets"], data["rows"]
    figure.set_size_inches(0.62 * len(names) + 2.2, 0.28 * len(rows) + 1.1)
    axes = figure.add_subplot()
    axes.set(xlim=(0, len(names)), ylim=(len(rows), 0))
    for y, cells in enumerate(rows.values()):
        for x, cell in enumerate(cells):
            if cell is not None:
                axes.fill(
                    [x, x + 1, x + 1, x], [y, y, y + 1, y + 1], color=FILLS[cell[0]], edgecolor="white", linewidth=1.5
                )
                axes.text(x + 0.5, y + 0.5, "M" if cell[1] else "", ha="center", va="center", fontsize=8, color=INK)
    axes.set_xticks([x + 0.5 for x in range(len(names))], names, fontsize=8)
    axes.set_yticks([y + 0.5 for y in range(len(rows))], list(rows))
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    words = {
        "fits": "compiles and fits",
        "spills": "compiles, with registers spilled",
        "fails": "does not compile, or does not fit",
    }
    for kind, word in words.items():
        axes.plot([], [], "s", markersize=9, color=FILLS[kind], label=word)
    axes.plot([], [], marker=r"$\mathrm{M}$", markersize=7, linestyle="", color=INK, label="matrix instructions")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.01), ncols=4, frameon=False, fontsize=8, handletextpad=0.4)


def _glance(figure: Any, data: Mapping[str, Any]) -> None:
    """An op a line: left how fast it is beside the best peer, right how far results err beside what is permitted."""
    speeds, errors = data["speeds"], data["errors"]
    ops = sorted({p["op"] for p in speeds})
    dtypes = sorted({p["dtype"] for p in speeds})
    figure.set_size_inches(9.2, 0.27 * len(ops) + 1.5)
    left, right = figure.subplots(1, 2, sharey=True)
    left.set_title("Speed over the best peer's, a point a call", loc="left", fontsize=9)
    right.set_title("Largest error over the derived bound, a point a result", loc="left", fontsize=9)
    for axes in (left, right):
        axes.set(xscale="log", ylim=(len(ops) - 0.4, -0.6))
        axes.set_yticks(range(len(ops)), ops)
        axes.tick_params(axis="y", length=0)
        axes.axvline(1, color=INK, linewidth=1.0)
        axes.grid(color=SOFT, linewidth=0.5)
        axes.set_axisbelow(True)
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(lambda value, position: f"{value:g}")
    ratios = [p["x"] for p in speeds]
    least, most = min(*ratios, 0.45), max(*ratios, 1.2)
    left.set_xlim(least / 1.1, most * 1.1)
    left.set_xticks([t for t in (0.1, 0.2, 0.5, 0.7, 1, 1.5, 2, 5, 10) if least / 1.1 <= t <= most * 1.1])
    left.set_xlabel("1: as fast as the best of them")
    right.set_xlabel("1: the bound; beyond it a result is wrong")
    for i, dtype in enumerate(dtypes):
        y = {op: n + 0.36 * ((i + 1) / (len(dtypes) + 1) - 0.5) for n, op in enumerate(ops)}
        look = {"color": COLOURS[i], "marker": MARKERS[i], "markersize": 5, "linestyle": "", "alpha": 0.85}
        mine = [p for p in speeds if p["dtype"] == dtype]
        left.plot([p["x"] for p in mine], [y[p["op"]] for p in mine], label=f"portakern, {short(dtype)}", **look)
        for subject, more in ((False, {"color": FAINT, "markerfacecolor": "none", "zorder": 1.9}), (True, {})):
            mine = [p for p in errors if p["dtype"] == dtype and p["subject"] is subject and p["op"] in y]
            label = None if subject else f"peers, {short(dtype)}"
            right.plot([p["x"] for p in mine], [y[p["op"]] for p in mine], label=label, **(look | more))
    handles = [h for axes in (left, right) for h in axes.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="lower right", ncols=len(handles), frameon=False, fontsize=8)
    figure.suptitle(f"Measured on {data['title']}", x=0.01, ha="left", y=0.995, fontsize=10)
    figure.tight_layout(rect=(0, 0.06, 1, 1))


def drawn(data: Mapping[str, Any]) -> str:
    """The SVG of a plot."""
    return draw(data, {"roofline": _roofline, "heatmap": _heatmap, "glance": _glance})
