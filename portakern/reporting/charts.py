"""Drawing what was measured: bars, curves and points."""

from __future__ import annotations

import math
from typing import Any

from portakern.reporting.style import COLOURS, FAINT, INK, MARKERS, SOFT, rate, short

__all__ = ["bars", "curves", "errors", "glance", "tuned"]

COLUMNS = 2
LONGEST = 76  # letters of a call under a bar


def bars(figure: Any, data: dict[str, Any]) -> None:
    """Speed over the best peer's: a bar a call, in two columns, an op after another."""
    found = data["bars"]
    rows = math.ceil(len(found) / COLUMNS)
    figure.set_size_inches(12.5, 0.145 * rows + 1.3)
    axes = figure.subplots(1, COLUMNS, squeeze=False)[0]
    ops = sorted({b["op"] for b in found})
    colours = {op: COLOURS[i % len(COLOURS)] for i, op in enumerate(ops)}
    most = max(max(b["ratio"] for b in found) * 1.25, 1.25)
    least = min(min(b["ratio"] for b in found) / 1.25, 0.8)
    for column, panel in enumerate(axes):
        mine = found[column * rows : (column + 1) * rows]
        panel.set(xscale="log", xlim=(least, most), ylim=(rows - 0.4, -0.6))
        for y, b in enumerate(mine):
            panel.barh(y, b["ratio"] - least, left=least, height=0.72, color=colours[b["op"]], linewidth=0)
            panel.text(b["ratio"] * 1.02, y, f"{b['ratio']:.2f}  {b['peer']}", va="center", fontsize=5.5, color=INK)
        labels = [f"{b['op']} {short(b['dtype'])} {b['call']}"[:LONGEST] for b in mine]
        panel.set_yticks(range(len(mine)), labels, fontsize=5.5)
        panel.axvline(1, color=INK, linewidth=0.8)
        panel.set_xticks([t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10) if least <= t <= most])
        panel.xaxis.set_major_formatter(lambda value, position: f"{value:g}")
        panel.minorticks_off()
        panel.tick_params(axis="y", length=0)
        panel.set_xlabel("of the best peer's speed, which stands beside the bar", fontsize=7)
        if not mine:
            panel.set_visible(False)
    figure.suptitle(data["title"], x=0.02, ha="left", y=0.995, fontsize=10)
    figure.tight_layout(rect=(0, 0, 1, 0.985))


def curves(figure: Any, data: dict[str, Any]) -> None:
    """A panel for calls that differ in one extent; a curve a contender, the subject's drawn thicker."""
    panels = data["panels"]
    names = sorted({name for found in panels.values() for name in found}, key=lambda n: (n not in data["subjects"], n))
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure.set_size_inches(5.4 * columns, 3.1 * rows + 0.5)
    grid = figure.subplots(rows, columns, squeeze=False).reshape(-1)
    for axes, (title, found) in zip(grid, panels.items(), strict=False):
        axes.set_title(title, loc="left", fontsize=8)
        axes.set(xscale="log", xlabel=data["x"])
        ticks = sorted({x for points in found.values() for x, _ in points})
        axes.set_xticks(ticks, [_thousands(x) for x in ticks])
        axes.minorticks_off()
        axes.grid(color=SOFT, linewidth=0.5)
        for name, points in found.items():
            i = names.index(name)
            axes.plot(
                *zip(*points, strict=True), marker=MARKERS[i % len(MARKERS)], color=COLOURS[i % len(COLOURS)],
                linewidth=2.2 if name in data["subjects"] else 1.0, markersize=4.5,
                linestyle="-" if i < len(COLOURS) else "--", label=name,
            )  # fmt: skip
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, position: rate(value) if value else "0")
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    handles = {label: h for axes in grid for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    ordered = [n for n in names if n in handles]
    figure.legend([handles[n] for n in ordered], ordered, loc="lower left", ncols=5, frameon=False, fontsize=8)
    figure.suptitle(data["title"], x=0.02, ha="left", y=0.995, fontsize=10)
    figure.tight_layout(rect=(0, 0.16 / rows, 1, 0.99))


def _thousands(extent: int) -> str:
    return f"{extent // 1024}k" if extent >= 1024 and extent % 1024 == 0 else str(extent)


def errors(figure: Any, data: dict[str, Any]) -> None:
    """A place an op and dtype; a point a result, those beyond the bound above the line."""
    points = data["points"]
    places = sorted({(p["op"], p["dtype"]) for p in points})
    figure.set_size_inches(max(6.0, 0.42 * len(places) + 1.6), 4.2)
    axes = figure.add_subplot()
    axes.set_title(data["title"], loc="left")
    axes.set(yscale="log", ylabel="share of the bound", xlim=(-0.6, len(places) - 0.4))
    axes.axhline(1, color=INK, linewidth=1.0)
    axes.text(-0.5, 1.06, "the bound: above it a result is wrong", fontsize=7, color=INK, va="bottom")
    for subject, place, marker, colour in ((False, -0.14, "o", FAINT), (True, 0.14, "s", COLOURS[0])):
        mine = [p for p in points if p["subject"] is subject]
        if mine:
            x = [places.index((p["op"], p["dtype"])) + place for p in mine]
            label = "portakern" if subject else "peers"
            axes.plot(x, [p["error"] for p in mine], marker, markersize=3.5, color=colour, label=label, alpha=0.8)
    axes.set_xticks(range(len(places)), [f"{op} {short(dtype)}" for op, dtype in places], rotation=60, ha="right")
    axes.tick_params(axis="x", labelsize=7)
    axes.yaxis.set_major_formatter(lambda value, position: f"{value:g}")
    axes.minorticks_off()
    axes.grid(axis="y", color=SOFT, linewidth=0.5)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.05), ncols=2, frameon=False, fontsize=8)


def glance(figure: Any, data: dict[str, Any]) -> None:
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


def tuned(figure: Any, data: dict[str, Any]) -> None:
    """The loss of the shipped choice, call by call from the least to the most, a curve a target."""
    points = data["points"]
    figure.set_size_inches(6.6, 3.8)
    axes = figure.add_subplot()
    axes.set_title(data["title"], loc="left")
    axes.set(xlabel="share of the calls", ylabel="what the shipped choice costs beyond the best found")
    for i, target in enumerate(sorted({p["target"] for p in points})):
        losses = sorted(100 * (p["default"] / p["best"] - 1) for p in points if p["target"] == target)
        shares = [100 * (k + 1) / len(losses) for k in range(len(losses))]
        axes.plot(
            shares, losses, color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], markersize=3,
            linewidth=1.4, label=f"{target}, {len(losses)} calls",
        )  # fmt: skip
    for limit, what in ((5, "the median's limit"), (15, "the worst's limit")):
        axes.axhline(limit, color=FAINT, linewidth=0.7, linestyle=":")
        axes.text(1, limit, what, fontsize=7, color=FAINT, va="bottom")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(lambda value, position: f"{value:g} %")
    axes.yaxis.set_major_formatter(lambda value, position: f"{value:g} %")
    axes.grid(color=SOFT, linewidth=0.5)
    axes.legend(frameon=False, fontsize=8)
