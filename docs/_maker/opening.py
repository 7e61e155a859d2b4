"""How an op's page begins: a call to copy, what is promised of its result, and how fast it is, with a plot."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from maint.markdown import NONE, fold, table
from maint.measurements import AGED, STALE, Row, StoredResults, changed, source
from portakern.results import Result
from portakern.spec import ArrayArg, Spec
from portakern.spec.dtypes import DTYPES
from portakern.testing import Case, sample_case
from portakern.tools.bench.plots import (
    COLOURS,
    FAINT,
    INK,
    MARKERS,
    SOFT,
    best_of_each_call,
    call_without_op,
    contenders,
    draw,
    most_timed,
    right_and_timed,
    short,
)

SHOWN = 6
"""Calls that a page shows before a reader opens the others."""
ROWS = 14
"""Calls in a plot."""
PEERS = len(COLOURS) - 1
LONGEST = 84
"""Letters of a call beside its row of a plot."""


def example(s: Spec[Any]) -> str:
    """A call that runs when it is copied alone, on arrays that NumPy makes."""
    case = sample_case(s)
    options = "".join(f", {name}={value!r}" for name, value in case.options.items())
    if s.is_vjp:
        lines = [
            "import portakern as pk",
            "",
            f'arrays, options = pk.testing.sample_arrays("{s.name}")  # small arrays, by the argument\'s name',
            f'gradients = pk.op("{s.name}")(**arrays, **options)',
        ]
        return "\n".join(["```python", *lines, "```"])
    given = [a for a in s.arrays if a.name in case.shapes]
    drawn = [f"{a.name} = {_drawn(s, case, a)}  # {a.shape}" for a in given]
    names = [o.name for o in s.outputs if not o.wanted_by and not o.saved]
    in_order = list(itertools.takewhile(case.shapes.__contains__, (a.name for a in s.arrays)))
    passed = [n if n in in_order else f"{n}={n}" for n in case.shapes]
    call = f'{", ".join(names)} = pk.op("{s.name}")({", ".join(passed)}{options})'
    own = ["import ml_dtypes"] if any("ml_dtypes." in line for line in drawn) else []
    lines = [*own, "import numpy as np", "import portakern as pk", "", "rng = np.random.default_rng(0)", *drawn, call]
    return "\n".join(["```python", *lines, "```"])


def _drawn(s: Spec[Any], case: Case, a: ArrayArg) -> str:
    dtype, shape = case.dtype if case.dtype in a.dtypes else a.dtypes[0], case.shapes[a.name]
    extents = f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
    if DTYPES[dtype].floating:
        if not DTYPES[dtype].native:
            return f"rng.standard_normal({extents}).astype(ml_dtypes.{dtype})"
        return f"rng.standard_normal({extents}, dtype=np.{dtype})"
    if a.name in s.generators:  # values with a meaning, such as offsets
        return f"np.array({case.drawn(s, a.name).tolist()})"
    alone = len(a.dtypes) == 1 and DTYPES[dtype].kind in ("int", "uint")  # no index, which NumPy's own integers are
    return f"rng.integers(0, 2, {extents}{f', dtype=np.{dtype}' if alone else ''})"


# -------------------------------------------------------------------------------------------------------------- promise
def promise(s: Spec[Any], kept: StoredResults) -> str:
    """What holds of every result, and the largest errors that the checker met."""
    text = ["## Error"]
    first = (inspect.getdoc(s.bound) or "").partition("\n\n")[0].replace("\n", " ") if s.bound else ""
    text.append(
        "Every element of a result is within a bound that is derived from rounding, not chosen"
        + (" ([formula](#error-bound))." if first else ".")
    )
    found = [(row, run) for row, run in kept.rows("conformance") if row["op"] == s.name]
    lines = [
        [
            row["subject"],
            run.device,
            str(row["examples"]),
            f"{max(row['worst'].values(), default=0.0):.3f}" + STALE * changed(row, kept.root),
            "yes" if row["passed"] else "**no**",
        ]
        for row, run in sorted(found, key=lambda x: (x[1].device, x[0]["subject"]))
    ]
    if not lines:
        return "\n\n".join([*text, "The checker's results for this op are not stored."])
    worst = max((max(row["worst"].values(), default=0.0) for row, _ in found), default=0.0)
    cases = sum(row["examples"] for row, _ in found)
    devices = ", ".join(sorted({run.device for _, run in found}))
    text.append(
        f"The checker compared {cases:,} drawn cases with the float64 oracle ({devices}). The largest error was "
        f"{worst:.3f} of the bound; above 1 is wrong."
    )
    heads = ["implementation", "device", "cases", "largest error / bound", "right"]
    stale = [AGED] if any(STALE in line[3] for line in lines) else []
    details = "\n\n".join([table(heads, lines, words=2), *stale, source(run for _, run in found)])
    return "\n\n".join([*text, fold("Each implementation and device", details)])


# ---------------------------------------------------------------------------------------------------------------- speed
class Timed(NamedTuple):
    """What was timed of an op on one device: our fastest row of each call, everybody's rows by call, and the runs."""

    device: str
    best: Sequence[Row]
    calls: Mapping[tuple[str, str, str], Sequence[Row]]
    runs: Sequence[Result]

    def beside(self, best: Row) -> Sequence[Row]:
        """Everybody's rows of the call of one of ours."""
        return self.calls[best["op"], best["dtype"], best["call"]]


def speed(s: Spec[Any], kept: StoredResults, timed: Timed, plot: str | None) -> str:
    """The fastest implementation beside the fastest peer, a line a call, on the device with most calls."""
    device, rows = timed.device, timed.best
    if not rows:
        return "## Speed\n\nNot measured."
    shared, calls = _apart([call_without_op(row["call"]) for row in rows])
    lines = [_line(row, call, timed.beside(row), kept) for row, call in zip(rows, calls, strict=True)]
    heads = ["dtype", "call", "µs", "by", "best peer", "its µs", "speed / best peer's"]
    text = [
        f"## Speed\n\nMeasured on one {device}: device time, caches cold, medians. A ratio above 1 is faster than "
        "every peer that was measured." + (f" All calls: {shared}." if shared else ""),
        *([f"![Speed of {s.name} on {device}: portakern and its peers, a row a call]({plot})"] if plot else []),
        table(heads, lines[:SHOWN], words=2),
    ]
    if len(lines) > SHOWN:
        text.append(fold(f"{len(lines) - SHOWN} more calls", table(heads, lines[SHOWN:], words=2)))
    if any(STALE in cell for line in lines for cell in line):
        text.append(AGED)
    return "\n\n".join([*text, fold("The runs", source(timed.runs))])


def timed(s: Spec[Any], kept: StoredResults) -> Timed:
    """What was timed of an op on the device with most calls."""
    devices: dict[str, list[tuple[Row, Result]]] = {}
    for row, run in kept.rows("bench"):
        if row["op"] == s.name:
            devices.setdefault(run.device, []).append((row, run))
    device, rows = most_timed({name: [row for row, _ in found] for name, found in devices.items()})
    return Timed(device, best_of_each_call(rows), contenders(rows), [run for _, run in devices.get(device, ())])


def _apart(calls: Sequence[str]) -> tuple[str, list[str]]:
    """What all calls share, and of each call the rest."""
    parts = [call.split(", ") for call in calls]
    shared = [part for part in parts[0] if all(part in others for others in parts)] if len(calls) > 1 else []
    rest = [", ".join(part for part in mine if part not in shared) for mine in parts]
    return (", ".join(shared), rest) if all(rest) else ("", list(calls))


def _line(best: Row, call: str, rows: Sequence[Row], kept: StoredResults) -> list[str]:
    """Our fastest variant on a call beside the fastest peer."""
    peer = next((r for r in rows if r["contender"] == best.get("best_peer")), None)
    return [
        short(best["dtype"]), call, _us(best, kept), best["contender"],
        NONE if peer is None else peer["contender"], NONE if peer is None else _us(peer, kept),
        f"{best['ratio']:.2f}" if best.get("ratio") else NONE,
    ]  # fmt: skip


def _us(row: Row, kept: StoredResults) -> str:
    return f"{row['median_us']:,.4g}" + STALE * changed(row, kept.root)


# ----------------------------------------------------------------------------------------------------------------- plot
def plotted(s: Spec[Any], timed: Timed) -> Mapping[str, Any] | None:
    """What the plot of an op's speed shows; None where no call has a peer's time."""
    _, calls = _apart([call_without_op(row["call"]) for row in timed.best]) if timed.best else ("", [])
    lines = []
    for best, call in zip(timed.best, calls, strict=True):
        others = {r["contender"]: best["median_us"] / r["median_us"] for r in timed.beside(best)
                  if not r["subject"] and right_and_timed(r)}  # fmt: skip
        if others:
            lines.append({"call": f"{short(best['dtype'])} {call}", "peers": others})
    return {"kind": "beside", "title": f"{s.name} on {timed.device}", "lines": lines[:ROWS]} if lines else None


def drawn(data: Mapping[str, Any]) -> str:
    """The SVG of a plot of speeds."""
    return draw(data, {"beside": _beside})


def _beside(figure: Any, data: Mapping[str, Any]) -> None:
    """A row a call: where each peer's speed lies beside ours, which is 1."""
    lines = data["lines"]
    figure.set_size_inches(8.2, 0.26 * len(lines) + 1.35)
    axes = figure.add_subplot()
    axes.set(xscale="log", ylim=(len(lines) - 0.4, -0.6))
    axes.axvline(1, color=COLOURS[0], linewidth=2, label="portakern")
    for i, name in enumerate(_by_frequency(lines)[:PEERS]):
        at = [(line["peers"][name], y) for y, line in enumerate(lines) if name in line["peers"]]
        axes.plot([x for x, _ in at], [y for _, y in at], linestyle="", marker=MARKERS[i % len(MARKERS)],
                  color=COLOURS[1 + i], markersize=5, alpha=0.9, label=name)  # fmt: skip
    speeds = [x for line in lines for x in line["peers"].values()]
    least, most = min(*speeds, 0.8) / 1.1, max(*speeds, 1.25) * 1.1
    axes.set_xlim(least, most)
    axes.set_xticks([t for t in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10) if least <= t <= most])
    axes.xaxis.set_major_formatter(lambda value, position: f"{value:g}")
    axes.minorticks_off()
    axes.set_yticks(range(len(lines)), [line["call"][:LONGEST] for line in lines], fontsize=6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=SOFT, linewidth=0.5)
    axes.grid(axis="y", color=SOFT, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines["left"].set_color(FAINT)
    axes.set_xlabel("speed of a peer over portakern's, log scale; left of the line it is slower", fontsize=8, color=INK)
    axes.set_title(data["title"], loc="left", fontsize=10)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.legend(loc="lower left", ncols=6, frameon=False, fontsize=8)


def _by_frequency(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Peers, the one with most calls first."""
    counts: dict[str, int] = {}
    for line in lines:
        for name in line["peers"]:
            counts[name] = counts.get(name, 0) + 1
    return sorted(counts, key=lambda n: (-counts[n], n))
