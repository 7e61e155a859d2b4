"""The report's plots: how each op compiles for each chip, and speeds and errors at a glance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from maint.measurements import Row, StoredResults, known_targets
from portakern.tools.bench.plots import COLOURS, FAINT, INK, MARKERS, SOFT, best_of_each_call, draw, most_timed, short

__all__ = ["drawn", "glance", "heatmap", "plots"]

FILLS = {"fits": "#b7dfc9", "spills": "#f6dd9c", "fails": "#ee9a8d"}
SAID = {
    "fits": "compiles and fits",
    "spills": "compiles, with registers spilled",
    "fails": "does not compile, or does not fit",
}
GLANCED = ("bfloat16", "float32")  # a figure for those who see portakern for the first time has no room for more


def plots(kept: StoredResults) -> Mapping[str, dict[str, Any]]:
    """Name of the file -> what it shows."""
    bench = kept.rows("bench")
    seen = glance({d: [row for row, r in bench if r.device == d] for d in dict.fromkeys(r.device for _, r in bench)})
    found = {"heatmap.svg": heatmap(kept)} if kept.rows("compile-matrix") else {}
    return found | ({"glance.svg": seen} if seen["speeds"] else {})


def drawn(data: Mapping[str, Any]) -> str:
    """The SVG of a plot."""
    return draw(data, {"heatmap": _heatmap, "glance": _glance})


def heatmap(kept: StoredResults) -> dict[str, Any]:
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
    lines: dict[str, list[Any]] = {}
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


# ---------------------------------------------------------------------------------------------------------- how drawn
def _heatmap(figure: Any, data: Mapping[str, Any]) -> None:
    names, rows = data["targets"], data["rows"]
    figure.set_size_inches(0.62 * len(names) + 2.2, 0.28 * len(rows) + 1.1)
    axes = figure.add_subplot()
    axes.set(xlim=(0, len(names)), ylim=(len(rows), 0))
    for y, cells in enumerate(rows.values()):
        for x, cell in enumerate(cells):
            if cell is not None:
                corners = [x, x + 1, x + 1, x], [y, y, y + 1, y + 1]
                axes.fill(*corners, color=FILLS[cell[0]], edgecolor="white", linewidth=1.5)
                axes.text(x + 0.5, y + 0.5, "M" if cell[1] else "", ha="center", va="center", fontsize=8, color=INK)
    axes.set_xticks([x + 0.5 for x in range(len(names))], names, fontsize=8)
    axes.set_yticks([y + 0.5 for y in range(len(rows))], list(rows))
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for kind, words in SAID.items():
        axes.plot([], [], "s", markersize=9, color=FILLS[kind], label=words)
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
