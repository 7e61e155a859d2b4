"""Drawing the plots: SVG whose bytes depend on what it shows and on this module, and on nothing else."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from math import atan2, degrees
from typing import Any

from portakern import install
from portakern.errors import UnavailableError
from portakern.reporting import charts
from portakern.reporting.style import COLOURS, FAINT, FILLS, INK, SOFT, STYLE, rate, short

__all__ = ["draw"]


def draw(data: dict[str, Any]) -> str:
    """The SVG of one plot; UnavailableError where matplotlib is missing."""
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as e:
        raise UnavailableError(
            f"the plots of portakern report need matplotlib, which is not installed; {install.command('plots')}"
        ) from e
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, "backend": "svg", **STYLE}):
        figure = Figure()
        FigureCanvasSVG(figure)
        KINDS[data["kind"]](figure, data)
        out = io.StringIO()
        figure.savefig(
            out, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight", pad_inches=0.12
        )
    return _shortened(out.getvalue()).replace(
        "font-family: 'DejaVu Sans'", "font-family: 'DejaVu Sans', Verdana, Arial, sans-serif"
    )


def _shortened(svg: str) -> str:
    """Coordinates to a hundredth of a point; what a reader reads stays as it is."""
    return re.sub(
        r">[^<]*<|-?\d+\.\d{3,}",
        lambda m: m[0] if m[0].startswith(">") else f"{float(m[0]):.2f}".rstrip("0").rstrip("."),
        svg,
    )


def _roofline(figure: Any, data: dict[str, Any]) -> None:
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


def _legend(axes: Any, data: dict[str, Any]) -> None:
    said = ["○ what the roof allows the op's typical call,", "every array touched once"]
    if data["measured"]:
        said += ["● measured; in words: its share of what", "the roof allows the typical call"]
    if data["without"]:
        said += [f"not shown: {', '.join(data['without'])}, for which", "no peak rate is published"]
    axes.text(0.02, 0.98, "\n".join(said), transform=axes.transAxes, va="top", fontsize=8, color=INK)


def _heatmap(figure: Any, data: dict[str, Any]) -> None:
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


KINDS: Mapping[str, Callable[[Any, dict[str, Any]], None]] = {
    "roofline": _roofline,
    "heatmap": _heatmap,
    "bars": charts.bars,
    "curves": charts.curves,
    "errors": charts.errors,
    "glance": charts.glance,
    "tuned": charts.tuned,
}
"""What draws each kind of plot."""
