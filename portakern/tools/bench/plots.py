"""Plots of ``portakern bench``: the data of each plot, and how it is drawn."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from portakern import install
from portakern.errors import UnavailableError
from portakern.files import write_atomically
from portakern.tools.bench import suites

__all__ = [
    "COLOURS", "FAINT", "INK", "MARKERS", "SOFT", "best_of_each_call", "call_without_op", "contenders", "draw",
    "draw_into", "most_timed", "rate_text", "right_and_timed", "short",
]  # fmt: skip

Row = Mapping[str, Any]
COLUMNS = 2
LONGEST = 76  # letters of a call under a bar
INK, FAINT, SOFT = "#222222", "#8a8a8a", "#d9d9d9"
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#e69f00",
)  # Okabe and Ito's, which colour-blind readers tell apart
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""Beside colours: print may have none."""

STYLE = {
    "svg.hashsalt": "portakern", "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 9,
    "axes.edgecolor": FAINT, "axes.labelcolor": INK,
    "text.color": INK, "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False,
    "path.simplify": False,
}  # fmt: skip


def rate_text(value: float) -> str:
    """Operations a second in words."""
    return (
        f"{value / 1e15:.3g} P"
        if value >= 1e15
        else f"{value / 1e12:.3g} T"
        if value >= 1e12
        else f"{value / 1e9:.3g} G"
    )


def short(dtype: str) -> str:
    """A dtype in few letters."""
    return dtype.replace("bfloat", "bf").replace("float", "f")


# -------------------------------------------------------------------------------------------------------- what is shown
def contenders(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """(op, dtype, call) -> its contenders."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for r in sorted(rows, key=lambda r: (r["op"], r["dtype"])):
        found.setdefault((r["op"], r["dtype"], r["call"]), []).append(r)
    return found


def right_and_timed(r: Row) -> bool:
    return r["verdict"] == "right" and bool(r.get("median_us"))


def _best(rows: Iterable[Row]) -> Row | None:
    """The fastest right variant of the subject."""
    return min((r for r in rows if r["subject"] and right_and_timed(r)), key=lambda r: r["median_us"], default=None)


def best_of_each_call(rows: Iterable[Row]) -> list[Row]:
    """The fastest right variant of portakern's on every call that one finished."""
    return [best for mine in contenders(rows).values() if (best := _best(mine))]


def draw_into(folder: Path, record: Mapping[str, Any]) -> list[Path]:
    """Draw what one run found; the files."""
    found = []
    for name, data in _figures({record.get("device") or "": record["rows"]}).items():
        write_atomically(folder / name, draw(data))
        found.append(folder / name)
    return found


def _figures(devices: Mapping[str, Sequence[Row]]) -> dict[str, dict[str, Any]]:
    """``devices``: the rows of each. Times of two devices are not to be compared, so that a plot of times shows one:
    that with most calls of the plot. Errors are of all."""
    rows = [r for mine in devices.values() for r in mine]
    found = {"speed.svg": _bars(*most_timed(devices)), "errors.svg": _errors(rows)}
    for name in suites.names():
        x = None if name in (suites.TYPICAL, suites.SAMPLES) else suites.read(name).x
        if x is not None:
            timed = {d: [r for r in mine if r["suite"] == name and right_and_timed(r)] for d, mine in devices.items()}
            device, mine = most_timed(timed)
            file = name.replace("_", "-")
            found[f"{file}-rate.svg"] = _curves(device, mine, x, "flop_rate", "operations a second")
            found[f"{file}-memory.svg"] = _curves(device, mine, x, "peak_bytes", "bytes at the height of a call")
    return {name: data for name, data in found.items() if data.get("bars") or data.get("panels") or data.get("points")}


def most_timed(devices: Mapping[str, Sequence[Row]]) -> tuple[str, Sequence[Row]]:
    """The device on which most calls were timed, and its rows."""
    device = max(devices, key=lambda d: len(best_of_each_call(devices[d])), default="")
    return device, devices.get(device, ())


def _titled(title: str, device: str) -> str:
    return f"{title}; {device}" if device else title


def _bars(device: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Speed over the best peer's on one device, a bar a call."""
    bars = []
    for best in best_of_each_call(rows):
        if best.get("ratio"):
            bars.append(
                {
                    "op": best["op"],
                    "dtype": best["dtype"],
                    "call": call_without_op(best["call"]).replace(", ", " "),
                    "ratio": best["ratio"],
                    "peer": best["best_peer"],
                }
            )
    title = _titled("Speed over the best peer's, on every call", device)
    return {"kind": "bars", "title": title, "bars": sorted(bars, key=lambda b: (b["op"], b["dtype"], b["ratio"]))}


def call_without_op(call: str) -> str:
    """A call without its op and dtype, which stand beside it: its extents and options; and what comes behind."""
    head, between, beside = call.partition("); ")
    inside = head.removesuffix(")").partition("(")[2].partition("; ")[2]
    return inside.replace("is_causal=True", "causal").replace("batch=(), ", "") + (f"; {beside}" if between else "")


def _curves(device: str, rows: Sequence[Row], x: str, field: str, label: str) -> dict[str, Any]:
    """A panel an op, dtype and what else does not grow; in it a curve a contender, all on one device."""
    panels: dict[str, dict[str, list[list[float]]]] = {}
    for r in rows:
        if r.get(field) and isinstance(r["dims"].get(x), int):
            title = _panel(r, x)
            panels.setdefault(title, {}).setdefault(r["contender"], []).append([r["dims"][x], r[field]])
    shown = {
        title: {name: sorted(points) for name, points in sorted(curves.items())}
        for title, curves in sorted(panels.items())
        if any(len(points) > 1 for points in curves.values())
    }
    subjects = sorted({r["contender"] for r in rows if r["subject"]})
    title = _titled(f"{label[0].upper()}{label[1:]} against {x}", device)
    return {"kind": "curves", "title": title, "x": x, "panels": shown, "subjects": subjects}


def _panel(r: Row, x: str) -> str:
    """What the calls of a curve share: the extents beside those that grow, and the options."""
    inside, between, beside = call_without_op(r["call"]).partition("; ")
    grows = {x, "batch", *(n for n, e in r["dims"].items() if e == r["dims"][x])}
    fixed = [part for part in inside.split(", ") if part.partition("=")[0] not in grows]
    return f"{r['op']} {r['dtype']}: {', '.join(fixed)}{between}{beside}"


def _errors(rows: Sequence[Row]) -> dict[str, Any]:
    """Largest errors as shares of the bound, by op and dtype."""
    points = [
        {"op": r["op"], "dtype": r["dtype"], "error": r["error"], "subject": r["subject"], "contender": r["contender"]}
        for r in rows
        if r.get("error")
    ]
    return {"kind": "errors", "title": "Largest error of each result, as a share of the bound", "points": points}


# ------------------------------------------------------------------------------------------------------ how it is drawn
def draw(data: Mapping[str, Any], kinds: Mapping[str, Callable[[Any, Any], None]] | None = None) -> str:
    """The SVG of one plot, whose kind says what draws it; UnavailableError where matplotlib is missing."""
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as e:
        raise UnavailableError(f"plots need matplotlib, which is not installed; {install.command('plots')}") from e
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, "backend": "svg", **STYLE}):
        figure = Figure()
        FigureCanvasSVG(figure)
        {**KINDS, **(kinds or {})}[data["kind"]](figure, data)
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


def bars(figure: Any, data: Mapping[str, Any]) -> None:
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


def curves(figure: Any, data: Mapping[str, Any]) -> None:
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
        axes.yaxis.set_major_formatter(lambda value, position: rate_text(value) if value else "0")
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    handles = {label: h for axes in grid for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    ordered = [n for n in names if n in handles]
    figure.legend([handles[n] for n in ordered], ordered, loc="lower left", ncols=5, frameon=False, fontsize=8)
    figure.suptitle(data["title"], x=0.02, ha="left", y=0.995, fontsize=10)
    figure.tight_layout(rect=(0, 0.16 / rows, 1, 0.99))


def _thousands(extent: int) -> str:
    return f"{extent // 1024}k" if extent >= 1024 and extent % 1024 == 0 else str(extent)


def errors(figure: Any, data: Mapping[str, Any]) -> None:
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


KINDS: Mapping[str, Callable[[Any, Mapping[str, Any]], None]] = {"bars": bars, "curves": curves, "errors": errors}
"""What draws each kind of plot."""
