"""Tables of times: ops beside peers, a step of a model, the host's time of a call, and the gain of tuning."""

from __future__ import annotations

import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from maint.markdown import NONE, by_device, fold, table
from maint.measurements import AGED, STALE, Row, StoredResults, changed, footnote, known_targets, set_of, source
from portakern.results import Result
from portakern.tools.bench.plots import best_of_each_call, call_without_op, contenders, right_and_timed
from portakern.tools.bench.rows import FAR_BEHIND
from portakern.tools.tune.losses import MOST, SMALL, figures, searched

__all__ = ["launch", "losses", "speed", "speeds", "steps", "tuned"]

FINE = "float32"  # where no 16-bit store hides the error of the arithmetic


def _on_each_device(kept: StoredResults, benchmark: str) -> dict[str, list[Row]]:
    """Device -> the rows of a benchmark there."""
    found: dict[str, list[Row]] = {}
    for row, run in kept.rows(benchmark):
        found.setdefault(run.device, []).append(row)
    return found


def _ratios(rows: Iterable[Row]) -> list[float]:
    """The best peer's time over that of our fastest right variant, of every call that both finished."""
    return [b["ratio"] for b in best_of_each_call(rows) if b.get("ratio")]


def _us(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


# ---------------------------------------------------------------------------------------------------------------- speed
SPEED_NOTES = (
    "Median device time with cold caches; contenders alternate. Roof: a copy and products measured in the same run. "
    "Speed relative to the best peer: above 1 is faster than all of them. A wrong result has no time, and is no peer. "
    "Error: the largest, as a share of the derived bound."
)
FAR_NOTE = (
    "Far behind: not timed on this call, since the peer was wrong, or twice as slow as the best, on at least two "
    "earlier calls of the same suite, op and dtype (`--every-peer` times it)."
)


def speed(kept: StoredResults) -> str:
    """Each op beside the best peer, and folded beneath each call with all contenders."""
    found = kept.rows("bench")
    if not found:
        return (
            "Nothing was measured yet: `portakern bench --json bench.json` on an accelerator, and `portakern report "
            "--add bench.json`."
        )
    text = []
    for device, rows in _on_each_device(kept, "bench").items():
        text += [f"**{device}**", _summary(rows), *_details(rows, kept.root), footnote(rows, kept.root)]
    far = [FAR_NOTE] if any(row["verdict"] == FAR_BEHIND for row, _ in found) else []
    runs = set_of(r for _, r in found)
    absent = {name: why.partition(";")[0] for r in runs for name, why in r.extra["not_timed"].items()}
    told = [f"Not timed: {', '.join(f'{n} ({why})' for n, why in absent.items())}."] if absent else []
    left = Counter(name.partition(" ")[0] for r in runs for name in r.extra["left_out"])
    cut = ", ".join(f"{n} of {name}" for name, n in left.items())
    told += [f"Left out when the time limit was reached: {cut}."] if left else []
    return "\n\n".join(t for t in [*text, SPEED_NOTES, *far, *told, source(runs)] if t)


def _summary(rows: Sequence[Row]) -> str:
    lines = []
    for op in sorted({r["op"] for r in rows}):
        mine = [r for r in rows if r["op"] == op]
        found, shares = _ratios(mine), [b["roof_share"] for b in best_of_each_call(mine) if b.get("roof_share")]
        lines.append(
            [
                f"`{op}`", str(len(contenders(mine))),
                *(f"{of(found):.2f}" if found else NONE for of in (statistics.median, min, max)),
                f"{statistics.median(shares):.0%}" if shares else NONE,
                str(sum(r["subject"] and r["verdict"] in ("wrong", "failed") for r in mine)),
            ]
        )  # fmt: skip
    heads = ["op", "calls", "of the best peer's speed, median", "least", "most", "of the roof, median", "wrong"]
    return table(heads, lines)


def _details(rows: Sequence[Row], root: Path) -> list[str]:
    heads = [
        "dtype", "call", "by", "others, µs", "µs", "from, to", "host, µs", "rate", "of the roof", "of the best",
        "error",
    ]  # fmt: skip
    found = []
    for op in sorted({r["op"] for r in rows}):
        calls = contenders(r for r in rows if r["op"] == op).values()
        lines = [_line(r, mine, root) for mine in calls for r in mine if r["subject"]]
        found.append(fold(f"<code>{op}</code>: {len(lines)} lines", table(heads, lines, words=4)))
    return found


def _line(r: Row, among: Sequence[Row], root: Path) -> list[str]:
    """One variant of the subject on a call, with everybody else on it."""
    others = sorted(
        (o for o in among if not o["subject"]), key=lambda o: (not right_and_timed(o), o.get("median_us") or 0.0)
    )
    said = ", ".join(f"{o['contender']} {_outcome(o, root)}" for o in others if o["verdict"] != "refused")
    first = [r["dtype"], call_without_op(r["call"]), r["contender"], said or NONE]
    error = NONE if r.get("error") is None else f"{r['error']:.2f}"
    if not right_and_timed(r):
        return [*first, f"**{_outcome(r, root)}**", *[NONE] * 5, error]
    return [
        *first,
        _outcome(r, root),
        f"{_us(r['best_us'])}, {_us(r['worst_us'])}",
        _us(r["host_us"]),
        f"{r['byte_rate'] / 1e9:,.0f} GB/s"
        if r.get("limited_by") == "copy"
        else f"{r['flop_rate'] / 1e12:,.3g} TFLOP/s",
        NONE if r.get("roof_share") is None else f"{r['roof_share']:.0%}",
        NONE if r.get("ratio") is None else f"{r['ratio']:.2f}",
        error,
    ]


def _outcome(r: Row, root: Path) -> str:
    if right_and_timed(r):
        return _us(r["median_us"]) + (STALE if changed(r, root) else "")
    return f"{r['verdict']}, {r['error']:.3g} × its bound" if r.get("error") else str(r["verdict"])


# ------------------------------------------------------------------------------------------------------------- by op
SPEEDS_NOTES = (
    "The best peer's time divided by portakern's: the median of the timed calls, and the extremes; above 1 is faster "
    "than every peer. Error: the largest of any element of these calls, as a share of the derived bound; above 1 is "
    f"wrong. It is given in {FINE}, since every correct result in 16 bits comes close to 1."
)


def speeds(kept: StoredResults) -> str:
    """A line an op: how fast beside the best peer, and how far it errs in float32, on each device that timed it."""
    devices = _on_each_device(kept, "bench")
    lines = []
    for op in sorted({row["op"] for rows in devices.values() for row in rows}):
        of_op = [[r for r in rows if r["op"] == op] for rows in devices.values()]
        lines.append([f"`{op}`", *(cell for mine in of_op for cell in (_speed(mine, kept.root), _fine(mine)))])
    if not lines:
        return "Nothing was timed yet."
    shown = table(["op", *(head for d in devices for head in (d, f"error in {FINE} there"))], lines)
    return "\n\n".join([shown, *([AGED] if STALE in shown else []), textwrap.fill(SPEEDS_NOTES, 118)])


def _speed(rows: Sequence[Row], root: Path) -> str:
    """The calls of one op on one device, portakern's and those of peers."""
    if any(r["subject"] and r["verdict"] in ("wrong", "failed") for r in rows):
        return "**wrong**"
    found = _ratios(rows)
    if not found:
        return "not timed"
    middle, least, most = (f"{of(found):.2f}" for of in (statistics.median, min, max))
    mark = STALE if any(changed(r, root) for r in rows) else ""
    return (middle if least == most else f"{middle} ({least} to {most})") + mark


def _fine(rows: Iterable[Row]) -> str:
    found = [r["error"] for r in rows if r["subject"] and r["dtype"] == FINE and r.get("error") is not None]
    return f"{max(found):.2f}" if found else NONE


# --------------------------------------------------------------------------------------------------------------- losses
EVEN = 0.03
"""Times that differ by less are called the same."""
HOST = {"forward": ("op", "torch"), "with its gradient": ("op, forward and backward", "torch, forward and backward")}
"""Ways of calling, as ``benchmarks/launch.py`` names them: ours, and PyTorch's own function."""
SAME = "the same"
WIDTH = 118


def losses(kept: StoredResults) -> str:
    """A list a device: times over the best peer's, an op after another, from the worst; then the host's."""
    text = []
    for device, rows in _on_each_device(kept, "bench").items():
        text.append(f"Time divided by the best peer's, {device}; a difference below {EVEN:.0%} counts as the same:")
        text.append("\n".join(_kinds(kept, rows)))
        text += [AGED] if any(changed(r, kept.root) for r in rows) else []
    return "\n\n".join(_filled(t) for t in [*text, *_host(kept)] or ["Nothing was timed yet."])


def _filled(text: str) -> str:
    return "\n".join(
        textwrap.fill(line, WIDTH, subsequent_indent="  " if line.startswith("*") else "", break_on_hyphens=False)
        for line in text.splitlines()
    )


def _kinds(kept: StoredResults, rows: Sequence[Row]) -> list[str]:
    kinds: dict[str, list[str]] = {"slower": [], SAME: [], "faster": []}
    by_op: dict[str, list[Row]] = {}
    for best in best_of_each_call(rows):
        if best.get("ratio"):
            by_op.setdefault(best["op"], []).append(best)
    for op, mine in sorted(by_op.items(), key=lambda x: min(r["ratio"] for r in x[1])):
        worst, times = min(mine, key=lambda r: r["ratio"]), [1 / r["ratio"] for r in mine]
        slow = sum(t > 1 + EVEN for t in times)
        if slow:
            where = f"{worst['dtype']}, beside {worst['best_peer']}"
            kinds["slower"].append(f"`{op}` on {slow} of {len(mine)} calls, at most {max(times):.2f} ({where})")
        elif statistics.median(times) < 1 - EVEN:
            kinds["faster"].append(f"`{op}` {_range(times)}")
        else:
            kinds[SAME].append(f"`{op}`")
    broken = sorted({f"`{r['op']}` {r['dtype']}" for r in rows if r["subject"] and r["verdict"] in ("wrong", "failed")})
    alone = _untimed(kept, {(r["op"], r["dtype"]) for mine in by_op.values() for r in mine})
    kinds |= {"**wrong**": broken} if broken else {}
    kinds |= {"timed without a peer": alone} if alone else {}
    return [f"* {kind}: {'; '.join(said) or 'none'}." for kind, said in kinds.items()]


def _untimed(kept: StoredResults, timed: Collection[tuple[str, str]]) -> list[str]:
    """What compiles, and no peer's time stands beside: ops, with their dtypes where another was timed."""
    found: dict[str, dict[str, None]] = {}
    for row, _ in kept.rows("compile-matrix"):
        if (row["op"], row["dtype"]) not in timed:
            found.setdefault(row["op"], {})[row["dtype"]] = None
    some, groups = {op for op, _ in timed}, dict[str, list[str]]()
    for op, dtypes in sorted(found.items()):
        groups.setdefault(f"in {' and '.join(dtypes)} " if op in some else "", []).append(f"`{op}`")
    return [where + ", ".join(ops) for where, ops in sorted(groups.items())]


def _range(values: Sequence[float]) -> str:
    """The least and the most, once where they read the same."""
    least, most = f"{min(values):.2f}", f"{max(values):.2f}"
    return least if least == most else f"{least} to {most}"


def _host(kept: StoredResults) -> list[str]:
    """A sentence a device on the host's time over PyTorch's own, over all ops."""
    told = []
    for device, rows in _on_each_device(kept, "launch").items():
        us = {(row["op"], row["interface"]): row["median_us"] for row in rows}
        parts = []
        for what, (ours, theirs) in HOST.items():
            shares = [us[op, ours] / us[op, theirs] for op, interface in us if interface == ours and (op, theirs) in us]
            parts += [f"{_range(shares)} times {what}"] if shares else []
        if parts:
            which = f"Host time of an eager call, divided by that of PyTorch's own function, {device}"
            told.append(f"{which}: {', '.join(parts)}.")
    return told


# -------------------------------------------------------------------------------------------------- host time of a call
def launch(kept: StoredResults) -> str:
    """Host time of one eager call, by interface."""
    rows = kept.rows("launch")
    if not rows:
        return (
            "Nothing was measured yet: `python benchmarks/launch.py --json FILE` on a GPU, and `portakern report "
            "--add FILE`."
        )

    def render(mine: list[Row]) -> str:
        found: dict[str, dict[str, float]] = {}
        for row in mine:
            found.setdefault(row["op"], {})[row["interface"]] = row["median_us"]
        tables = []
        for interfaces in dict.fromkeys(map(tuple, found.values())):
            lines = [
                [f"`{op}`", *(f"{t:.1f}" for t in us.values())] for op, us in found.items() if tuple(us) == interfaces
            ]
            tables.append(table(["op", *interfaces], lines))
        return "\n\n".join(tables)

    graphs = [g for r in set_of(r for _, r in rows) for g in r.extra["graphs"]]
    wrong = [f"{g['op']} {g['dtype']}" for g in graphs if g["wrong"]]
    notes = "Microseconds of host time a call, median; [launch.py](benchmarks/launch.py) describes each interface."
    if graphs:
        notes += f" {len(graphs)} calls captured in a graph, their inputs changed, replayed: "
        notes += f"not the eager call's bits: {', '.join(wrong)}." if wrong else "the eager call's bits."
    return "\n\n".join([by_device(rows, render), notes, source(r for _, r in rows)])


# --------------------------------------------------------------------------------------------------------- model's step
STAGES = {
    "eager": "a Llama's step, eager",
    "compiled": "the same, torch.compile",
    "loss": "`linear_cross_entropy`",
    "fp8": "a Llama's step, eager, beside 8-bit projections",
    "forward": "a wider Llama's forward pass alone, eager",
    "forward-compiled": "the same, torch.compile",
}
NAMES = {"liger": "Liger", "torch": "PyTorch"}
STEP_HEADS = [
    "forward and backward of", "with", "ms, median", "best, worst", "ratio to portakern", "GiB at most",
    "error of gradients or logits",
]  # fmt: skip
STEP_NOTES = (
    "GiB: a step with its parameters; the loss without its arguments. Error of gradients: the norm of the difference "
    "divided by the norm of the gradient, or of the logits. The reference of a step is PyTorch's own functions in the "
    "same dtype; the reference of the loss is float64, for the gradients of hidden and of weight."
)
MOST_KERNELS = 6
"""Kernels that are named."""


def steps(kept: StoredResults) -> str:
    """A table a device, a line a stage and contender; what the contenders ran, and what their steps' time goes to."""
    found = kept.rows("model-step")
    if not found:
        return (
            "No step was timed yet: `python -m benchmarks.model_step --json model-step.json`, and `portakern report "
            "--add model-step.json`."
        )
    text = []
    for device, rows in _on_each_device(kept, "model-step").items():
        sizes: dict[str, str] = {}
        for _, run in found:
            sizes |= run.extra["sizes"] if run.device == device else {}
        wider = f" The wider Llama: {sizes['forward']}." if "forward" in sizes else ""
        text += [f"**{device}**", f"The Llama: {sizes['model']}. The loss: {sizes['loss']}.{wider}"]
        text += [table(STEP_HEADS, [_step(row, rows) for row in rows], words=2), *_step_kernels(rows)]
    return "\n\n".join([*text, STEP_NOTES, source(run for _, run in found)])


def _step(row: Row, rows: Sequence[Row]) -> list[str]:
    what = [STAGES[row["stage"]], str(NAMES.get(row["contender"], row["contender"]))]
    if row.get("ms") is None:
        return [*what, str(row.get("why") or "not timed"), *[NONE] * 4]
    ours = [r["ms"] for r in rows if (r["stage"], r["contender"]) == (row["stage"], "portakern") and r.get("ms")]
    memory, apart = row.get("peak_gib"), row.get("gradients_apart")
    off = ", ".join(f"{v:.5f}" for n, v in (row.get("errors") or {}).items() if n != "loss") or NONE
    return [
        *what, f"{row['ms']:.1f}", f"{row['best_ms']:.1f}, {row['worst_ms']:.1f}",
        f"{row['ms'] / ours[0]:.2f}" if ours else NONE, NONE if memory is None else f"{memory:.2f}",
        off if apart is None else f"{apart:.3f}",
    ]  # fmt: skip


def _step_kernels(rows: Sequence[Row]) -> list[str]:
    """A sentence a stage and contender on the kernels that take the most of its step, those of a library under the name
    that all of its kernels for an architecture begin with."""
    told = []
    for row in rows:
        took = Counter[str]()
        for name, ms in (row.get("kernels") or {}).items():
            took[re.split(r"_sm\d+|\(|<", name)[0]] += ms
        whole = took.pop("all", None)
        if whole:
            named = ", ".join(f"`{name}` {ms:.1f}" for name, ms in took.most_common(MOST_KERNELS))
            who = NAMES.get(row["contender"], row["contender"])
            told.append(f"Kernels of a step, {row['stage']}, {who}: {whole:.1f} ms, of which {named}.")
    return told


# --------------------------------------------------------------------------------------------------------------- tuning
TUNED_HEADS = [
    "target", "family", "backend", "calls", "tilings tried, median", "loss, median", "worst", f"beyond {SMALL:.0%}",
    f"beyond {MOST:.0%}", "gain of tuning", "not searched",
]  # fmt: skip
TUNED_NOTES = (
    "Loss: the time, or a model's figure, of the shipped tiling divided by that of the best tiling found for the call, "
    "less 1. Gain of tuning: the geometric mean of the ratios. A search finds only what it tries. Not searched: "
    "calls for which no other tiling was tried before the run ended; the other columns leave them out."
)


def tuned(kept: StoredResults) -> str:
    """A line a target, family and variant."""
    found = kept.rows("tune")
    if not found:
        return (
            "Nothing was tuned yet: `portakern tune --loss matmul --json loss.json`, and `portakern report --add "
            "loss.json`."
        )
    groups: dict[tuple[str, str, str], list[tuple[Row, Result]]] = {}
    for row, run in found:
        by = f"{row['backend']}, {row['variant']}"
        groups.setdefault((row["target"], row["family"], by), []).append((row, run))
    order = known_targets(target for target, _, _ in groups)
    lines = []
    for key, group in sorted(groups.items(), key=lambda x: (order.index(x[0][0]), x[0][1:])):
        mine = [row for row, run in group if searched(row, run.extra.get("keys_left"))]
        lines.append([*key, *(figures(mine) if mine else ["0", *[NONE] * 6]), str(len(group) - len(mine))])
    cut = [f"{run.name} {run.extra['keys_left']}" for run in set_of(r for _, r in found) if run.extra.get("keys_left")]
    unreached = (
        [f"Table keys that a run did not reach in time, whose calls have no row: {', '.join(cut)}."] if cut else []
    )
    return "\n\n".join([table(TUNED_HEADS, lines, words=3), TUNED_NOTES, *unreached, source(r for _, r in found)])
