"""What ``portakern bench`` found, in tables and as the data of plots: no figure without the verdict beside it."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from portakern.files import write_atomically
from portakern.reporting import plots as drawing
from portakern.reporting.kept import Kept, source
from portakern.reporting.markdown import NONE, fold, table
from portakern.reporting.staleness import STALE, changed, footnote
from portakern.tools.bench import suites
from portakern.tools.bench.rows import FAR_BEHIND

__all__ = ["best_of_each_call", "draw_into", "figures", "ratios", "speed"]

Row = Mapping[str, Any]
GLANCED = ("bfloat16", "float32")  # a figure for those who see portakern for the first time has no room for more
FAR_NOTE = (
    "Far behind: not timed on this call, since each of at least two calls of the same suite, op and dtype before it "
    "had found that peer wrong, or twice as slow as the best (`--every-peer` times it)."
)
NOTHING = (
    "Nothing was measured yet: `portakern bench --json bench.json` on an accelerator, and `portakern report --add "
    "bench.json`."
)


def _calls(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """(op, dtype, call) -> its contenders."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for r in sorted(rows, key=lambda r: (r["op"], r["dtype"])):
        found.setdefault((r["op"], r["dtype"], r["call"]), []).append(r)
    return found


def _timed(r: Row) -> bool:
    return r["verdict"] == "right" and bool(r.get("median_us"))


def _best(rows: Iterable[Row]) -> Row | None:
    """The fastest right variant of the subject."""
    return min((r for r in rows if r["subject"] and _timed(r)), key=lambda r: r["median_us"], default=None)


def best_of_each_call(rows: Iterable[Row]) -> list[Row]:
    """The fastest right variant of ours on every call that one finished."""
    return [best for mine in _calls(rows).values() if (best := _best(mine))]


def ratios(rows: Iterable[Row]) -> list[float]:
    """The best peer's time over that of our fastest right variant, of every call that both finished."""
    return [b["ratio"] for b in best_of_each_call(rows) if b.get("ratio")]


# --------------------------------------------------------------------------------------------------------------- tables
def speed(kept: Kept) -> str:
    """Each op beside the best peer, and folded beneath each call with all contenders."""
    found = kept.rows("bench")
    if not found:
        return NOTHING
    text = []
    for device in dict.fromkeys(r.device for _, r in found):
        rows = [row for row, r in found if r.device == device]
        text += [f"**{device}**", _summary(rows), *_details(rows, kept.root), footnote(rows, kept.root)]
    notes = (
        "Device time alone, caches cold, contenders in turns, the median. Roof: a copy and products measured in the "
        "same run. Of the best peer's speed: above 1 is faster than all of them; what is wrong has no time, and is "
        "nobody's peer. Error: the largest, as a share of the derived bound."
    )
    far = [FAR_NOTE] if any(row["verdict"] == FAR_BEHIND for row, _ in found) else []
    return "\n\n".join(t for t in [*text, notes, *far, *_beside(kept), source(r for _, r in found)] if t)


def _beside(kept: Kept) -> list[str]:
    """What was left out of runs, and who took no part."""
    runs = {r.file: r for _, r in kept.rows("bench")}.values()
    absent = {name: why.partition(";")[0] for r in runs for name, why in r.extra["absent"].items()}
    left = [name.partition(" ")[0] for r in runs for name in r.extra["left_out"]]
    told = [f"Took no part: {', '.join(f'{n} ({why})' for n, why in absent.items())}."] if absent else []
    counted = ", ".join(f"{n} of {name}" for name, n in Counter(left).items())
    return told + ([f"Left out when the budget ended: {counted}."] if left else [])


def _summary(rows: Sequence[Row]) -> str:
    lines = []
    for op in sorted({r["op"] for r in rows}):
        calls = {key: mine for key, mine in _calls(rows).items() if key[0] == op}
        best = best_of_each_call(r for mine in calls.values() for r in mine)
        found = ratios(r for mine in calls.values() for r in mine)
        shares = [b["share"] for b in best if b.get("share")]
        wrong = sum(r["subject"] and r["verdict"] in ("wrong", "failed") for mine in calls.values() for r in mine)
        lines.append(
            [
                f"`{op}`",
                str(len(calls)),
                *(f"{of(found):.2f}" if found else NONE for of in (statistics.median, min, max)),
                f"{statistics.median(shares):.0%}" if shares else NONE,
                str(wrong),
            ]
        )
    heads = ["op", "calls", "of the best peer's speed, median", "least", "most", "of the roof, median", "wrong"]
    return table(heads, lines)


def _details(rows: Sequence[Row], root: Path) -> list[str]:
    heads = [
        "dtype",
        "call",
        "by",
        "others, µs",
        "µs",
        "from, to",
        "host, µs",
        "rate",
        "of the roof",
        "of the best",
        "error",
    ]
    found = []
    for op in sorted({r["op"] for r in rows}):
        lines = [
            _line(r, mine, root)
            for (name, _, _), mine in _calls(rows).items()
            if name == op
            for r in mine
            if r["subject"]
        ]
        found.append(fold(f"<code>{op}</code>: {len(lines)} lines", table(heads, lines, words=4)))
    return found


def _line(r: Row, among: Sequence[Row], root: Path) -> list[str]:
    """One variant of the subject on a call, with everybody else on it."""
    others = sorted((o for o in among if not o["subject"]), key=lambda o: (not _timed(o), o.get("median_us") or 0.0))
    said = ", ".join(f"{o['contender']} {_outcome(o, root)}" for o in others if o["verdict"] != "refused")
    first = [r["dtype"], _short(r["call"]), r["contender"], said or NONE]
    if not _timed(r):
        return [*first, f"**{_outcome(r, root)}**", *[NONE] * 5, _error(r)]
    mark = STALE if changed(r, root) else ""
    return [
        *first,
        _us(r["median_us"]) + mark,
        f"{_us(r['best_us'])}, {_us(r['worst_us'])}",
        _us(r["host_us"]),
        rate(r),
        NONE if r.get("share") is None else f"{r['share']:.0%}",
        NONE if r.get("ratio") is None else f"{r['ratio']:.2f}",
        _error(r),
    ]


def _outcome(r: Row, root: Path) -> str:
    if _timed(r):
        return _us(r["median_us"]) + (STALE if changed(r, root) else "")
    return f"{r['verdict']}, {r['error']:.3g} × its bound" if r.get("error") else str(r["verdict"])


def _error(r: Row) -> str:
    return NONE if r.get("error") is None else f"{r['error']:.2f}"


def rate(r: Row) -> str:
    """Of what limits the call: bytes or operations a second."""
    if r.get("limit") == "copy":
        return f"{r['byte_rate'] / 1e9:,.0f} GB/s"
    return f"{r['flop_rate'] / 1e12:,.3g} TFLOP/s"


def _us(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


# ---------------------------------------------------------------------------------------------------------------- plots
def figures(kept: Kept) -> dict[str, dict[str, Any]]:
    """Name of the file -> what it shows."""
    found = kept.rows("bench")
    devices = {d: [row for row, r in found if r.device == d] for d in dict.fromkeys(r.device for _, r in found)}
    glance = _glance(devices)
    drawn = _figures(devices, [row for row, _ in kept.rows("tune")])
    return drawn | ({"glance.svg": glance} if glance["speeds"] else {})


def draw_into(folder: Path, record: Mapping[str, Any]) -> list[Path]:
    """Draw what one run found; the files."""
    found = []
    for name, data in _figures({record.get("device") or "": record["rows"]}, []).items():
        write_atomically(folder / name, drawing.draw(data))
        found.append(folder / name)
    return found


def _figures(devices: Mapping[str, Sequence[Row]], tuned: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """``devices``: the rows of each. Times of two devices are not to be compared, so that a plot of times shows one:
    that with most calls of the plot. Errors are of all."""
    rows = [r for mine in devices.values() for r in mine]
    found = {"speed.svg": _bars(*_most(devices)), "errors.svg": _errors(rows), "tuned.svg": _tuned(tuned)}
    for name in suites.names():
        x = None if name in (suites.TYPICAL, suites.SAMPLES) else suites.read(name).x
        if x is not None:
            timed = {d: [r for r in mine if r["suite"] == name and _timed(r)] for d, mine in devices.items()}
            device, mine = _most(timed)
            file = name.replace("_", "-")
            found[f"{file}-rate.svg"] = _curves(device, mine, x, "flop_rate", "operations a second")
            found[f"{file}-memory.svg"] = _curves(device, mine, x, "peak_bytes", "bytes at the height of a call")
    return {name: data for name, data in found.items() if data.get("bars") or data.get("panels") or data.get("points")}


def _most(devices: Mapping[str, Sequence[Row]]) -> tuple[str, Sequence[Row]]:
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
                    "call": _short(best["call"]).replace(", ", " "),
                    "ratio": best["ratio"],
                    "peer": best["best_peer"],
                }
            )
    title = _titled("Speed over the best peer's, on every call", device)
    return {"kind": "bars", "title": title, "bars": sorted(bars, key=lambda b: (b["op"], b["dtype"], b["ratio"]))}


def _glance(devices: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """Speed over the best peer's and error over the bound, an op a line, on the device with most calls."""
    device, found = _most(devices)
    rows = [r for r in found if r["dtype"] in GLANCED]
    points = [{"op": b["op"], "dtype": b["dtype"], "x": b["ratio"]} for b in best_of_each_call(rows) if b.get("ratio")]
    errors = [
        {"op": r["op"], "dtype": r["dtype"], "x": r["error"], "subject": r["subject"]} for r in rows if r.get("error")
    ]
    return {"kind": "glance", "title": device, "speeds": points, "errors": errors}


def _short(call: str) -> str:
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
    inside, between, beside = _short(r["call"]).partition("; ")
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


def _tuned(rows: Sequence[Row]) -> dict[str, Any]:
    """The shipped choice against the best found, of each call and target that was tuned."""
    points = [
        {"op": r["op"], "target": r["target"], "dtype": r["dtype"], "default": r["default"], "best": r["best"]}
        for r in rows
        if r["default"] and r["best"]
    ]
    return {"kind": "tuned", "title": "Shipped tilings against the best found", "points": points}
