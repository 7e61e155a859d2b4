"""Tables of compiled kernels that were not run: verdicts, registers and memory, tilings, cycles beside those of other
kernels."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from maint.markdown import NONE, fold, table
from maint.measurements import STALE, Row, StoredResults, changed, footnote, known_targets, source
from portakern.core import registry, targets
from portakern.core.machine_code import FOLLOWED, Kernel
from portakern.tools.compile.build import CYCLES

__all__ = ["beside", "cycles", "legal", "matrix", "resources", "roofs", "tilings"]

UNFOLDED = 25  # rows that a table may have without being folded
MISSING = (
    "Nothing was compiled yet: `portakern compile --all --json > compile-matrix.json`, and `portakern report --add "
    "compile-matrix.json`."
)


def _cells(kept: StoredResults) -> tuple[list[Row], str]:
    rows = kept.rows("compile-matrix")
    return [row for row, _ in rows], source(r for _, r in rows)


def _by_op(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """(op, dtype) -> its rows."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda r: (r["op"], r["dtype"])):
        found.setdefault((row["op"], row["dtype"]), []).append(row)
    return found


# ------------------------------------------------------------------------------------------------------------- verdicts
def matrix(kept: StoredResults) -> str:
    """Op and dtype by target: whether the typical call compiles and fits."""
    rows, said = _cells(kept)
    if not rows:
        return MISSING
    columns, reasons, lines = known_targets(r["target"] for r in rows), list[str](), []
    names = _makers(rows)
    for (op, dtype), mine in _by_op(rows).items():
        for team in _teams(rows, names):
            there = {r["target"]: r for r in mine if names[r["backend"], r.get("variant")] in team}
            makers = {names[r["backend"], r.get("variant")] for r in there.values()}
            if there:
                verdicts = [_verdict(there.get(t), reasons) for t in columns]
                lines.append([f"`{op}`", dtype, ", ".join(b for b in team if b in makers), *verdicts])
    footnotes = "\n".join(f"{i}. {reason}" for i, reason in enumerate(reasons, 1))
    count = f"{sum(r['ok'] for r in rows)} of {len(rows)} typical calls compile and fit."
    shown = table(["op", "dtype", "by", *columns], lines, words=3 + len(columns))
    return "\n\n".join(p for p in (shown, footnotes, count, said) if p)


def _makers(rows: Iterable[Row]) -> dict[tuple[str, str | None], str]:
    """(backend, variant) -> what the table calls it: the variant for the most targets goes by the backend's name."""
    reach: dict[str, dict[str | None, set[str]]] = {}
    for row in rows:
        reach.setdefault(row["backend"], {}).setdefault(row.get("variant"), set()).add(row["target"])
    names: dict[tuple[str, str | None], str] = {}
    for backend, variants in reach.items():
        widest = max(variants, key=lambda v: len(variants[v]))
        names |= {(backend, v): backend if v == widest else f"{backend} {v}" for v in variants}
    return names


def _teams(rows: Iterable[Row], makers: Mapping[tuple[str, str | None], str]) -> list[list[str]]:
    """The makers, those together that share no target: a line of the table serves a team."""
    reach: dict[str, set[str]] = {}
    for row in rows:
        reach.setdefault(makers[row["backend"], row.get("variant")], set()).add(row["target"])
    order = [b for b in registry.backends() if b in reach] + sorted(b for b in reach if b not in registry.backends())
    teams: list[list[str]] = []
    for name in sorted(order, key=lambda b: -len(reach[b])):
        team = next((t for t in teams if all(not reach[name] & reach[other] for other in t)), None)
        if team is None:
            teams.append([name])
        else:
            team.append(name)
    return teams


def _verdict(row: Row | None, reasons: list[str]) -> str:
    if row is None:
        return NONE
    if row["ok"]:
        return "ok"
    reason = row["reason"] or "no reason was given"
    if reason not in reasons:
        reasons.append(reason)
    return f"**no** ({reasons.index(reason) + 1})"


# ------------------------------------------------------------------------------------------------------------ resources
TARGET_HEADS = [
    "target", "chip", "calls that fit", "with matrix instructions", "with spills", "on-chip memory, at most",
    "occupancy, at least",
]  # fmt: skip
CALL_HEADS = [
    "op", "dtype", "target", "launches", "registers", "spills", "on-chip memory", "occupancy", "matrix instruction",
]  # fmt: skip
RESOURCES_NOTES = (
    "A call with several kernels has the largest number of registers, the sum of the spills, the largest memory and "
    "the smallest occupancy. Spills are bytes for each thread on a GPU, and stored vector registers in the code of a "
    "TPU kernel. Memory is that of one program, with its share of the permitted memory."
)


def resources(kept: StoredResults) -> str:
    """What kernels take of each chip: a line a target, and folded beneath a line a call."""
    rows, said = _cells(kept)
    if not rows:
        return MISSING
    limits = {t: found for _, r in kept.rows("compile-matrix") for t, found in r.extra["limits"].items()}
    names = known_targets(r["target"] for r in rows)
    summary = [_target_line(t, [r for r in rows if r["target"] == t], limits.get(t, {})) for t in names]
    text = [table(TARGET_HEADS, summary, words=2)]
    platforms = {t: h.platform if (h := targets.HARDWARE.get(t)) else "other" for t in names}
    for platform in dict.fromkeys(platforms.values()):
        here = [t for t in names if platforms[t] == platform]
        there = [r for r in rows if r["target"] in here]
        lines = sorted(there, key=lambda r: (r["op"], r["dtype"], here.index(r["target"])))
        text.append(fold(f"{platform} ({', '.join(here)}): {len(lines)} calls", _details(lines, limits)))
    return "\n\n".join([*text, RESOURCES_NOTES, said])


def _target_line(target: str, rows: list[Row], limits: Mapping[str, int]) -> list[str]:
    fitting = [r for r in rows if r["ok"]]
    shares = [share for r in fitting if (share := _memory(r, limits)[0]) is not None]
    occupancies = [o for r in fitting for o in _known(r, "occupancy")]
    return [
        target,
        targets.HARDWARE[target].product if target in targets.HARDWARE else "",
        f"{len(fitting)} of {len(rows)}",
        *(str(sum(any(k.get(what) for k in r["kernels"]) for r in fitting)) for what in ("matrix", "spills")),
        f"{max(shares):.0%}" if shares else NONE,
        f"{min(occupancies):.0%}" if occupancies else NONE,
    ]


def _memory(row: Row, limits: Mapping[str, int]) -> tuple[float | None, str]:
    """(share of the limit, in words) of the memory that a call fills most."""
    used = [(n, m) for k in row["kernels"] for m, n in k["on_chip"].items() if limits.get(m)]
    found = [(n / limits[m], f"{m} {n} B" if n < 1024 else f"{m} {n / 1024:.0f} KiB") for n, m in used]
    return max(found, default=(None, NONE), key=lambda f: f[0] or 0)


def _known(row: Row, field: str) -> list[Any]:
    return [k[field] for k in row["kernels"] if k.get(field) is not None]


def _matrix_instruction(row: Row) -> str:
    counts: dict[str, int] = {}
    for k in row["kernels"]:
        for name, n in k["matrix"].items():
            counts[name] = counts.get(name, 0) + n
    if not counts:
        return "none"
    more = f" and {len(counts) - 1} more" if len(counts) > 1 else ""
    waits = ", one at a time" if any(k.get("serialised") for k in row["kernels"]) else ""
    return f"`{max(counts, key=lambda n: counts[n])}`{more}{waits}"


def _details(rows: list[Row], limits: Mapping[str, Mapping[str, int]]) -> str:
    """A line a call, without the columns about which nothing is known."""

    def shown(values: list[Any], statistic: Callable[[list[Any]], Any], template: str = "") -> str:
        return format(statistic(values), template) if values else NONE

    lines = []
    for r in rows:
        share, words = _memory(r, limits.get(r["target"], {}))
        lines.append(
            [
                f"`{r['op']}`", r["dtype"], r["target"], str(sum(k["launches"] for k in r["kernels"])),
                shown(_known(r, "registers"), max), shown(_known(r, "spills"), sum),
                words if share is None else f"{words} ({share:.0%})", shown(_known(r, "occupancy"), min, ".0%"),
                _matrix_instruction(r),
            ]
        )  # fmt: skip
    used = [i for i in range(len(CALL_HEADS)) if any(line[i] != NONE for line in lines)]
    return table([CALL_HEADS[i] for i in used], [[line[i] for i in used] for line in lines], words=3)


# -------------------------------------------------------------------------------------------------------------- tilings
def tilings(kept: StoredResults) -> str:
    """The default tiles of each op's typical call, targets that share them together."""
    rows, said = _cells(kept)
    if not rows:
        return MISSING
    found: dict[str, dict[tuple[str, str, str], list[str]]] = {}
    order = known_targets(r["target"] for r in rows)
    for r in sorted(rows, key=lambda r: (r["op"], r["dtype"], order.index(r["target"]))):
        tiles = " ".join(f"{n}={v}" for n, v in r["tiling"].items())
        found.setdefault(r["op"], {}).setdefault((r["dtype"], r["backend"], tiles), []).append(r["target"])
    heads = ["dtype", "by", "targets", "tiling"]
    parts = {
        op: [[dtype, by, ", ".join(where), f"`{tiles}`"] for (dtype, by, tiles), where in lines.items()]
        for op, lines in found.items()
    }
    if sum(map(len, parts.values())) <= UNFOLDED:
        whole = [[f"`{op}`", *line] for op, lines in parts.items() for line in lines]
        return table(["op", *heads], whole, words=5) + "\n\n" + said
    folded = (fold(f"<code>{op}</code>", table(heads, lines, words=4)) for op, lines in parts.items())
    return "\n\n".join([*folded, said])


# --------------------------------------------------------------------------------------------------------------- cycles
def _whole_run(row: Row) -> float | None:
    """Cycles of the whole call, nothing run; None where the compiler does not tell them of every kernel."""
    hardware = targets.HARDWARE.get(row["target"])
    kernels = [Kernel("", **{n: v for n, v in k.items() if n != "name" and v is not None}) for k in row["kernels"]]
    found = [k.least(hardware) for k in kernels] if hardware else []
    return sum(f or 0.0 for f in found) if found and None not in found else None


def cycles(kept: StoredResults) -> str:
    """What a whole call takes by machine code, grid and bytes, where a compiler tells it."""
    rows, said = _cells(kept)
    found = {id(r): _whole_run(r) for r in rows}
    rows = [r for r in rows if found[id(r)]]
    if not rows:
        return "No cycle counts are stored." + (f"\n\n{said}" if said else "")
    columns = known_targets(r["target"] for r in rows)
    lines = []
    for (op, dtype), mine in _by_op(rows).items():
        there = {r["target"]: found[id(r)] for r in mine}
        lines.append([f"`{op}`", dtype, *(f"{n / 1000:,.0f}" if (n := there.get(t)) else NONE for t in columns)])
    notes = (
        f"Thousands of cycles of the typical call, {CYCLES}. The program's cycles are the compiler's estimate, or the "
        f"issue cycles if the estimate is under {FOLLOWED:.0%} of these and must have missed a branch. No chip has "
        f"confirmed a figure. {NONE}: the bundles of the code were not counted."
    )
    return "\n\n".join([table(["op", "dtype", *columns], lines, words=2), notes, said])


OVER = "over_"
BEHIND = 1.03
"""Times the best other from which a figure stands in bold."""
BESIDE_NOTES = (
    "Thousands of cycles of portakern's kernels with default tilings, estimated and not run on a chip, + the cycles of "
    "XLA's operations around them, such as copies. In brackets: the ratio of both to the best other program, and its "
    "name, in bold if portakern is slower by more than 3 %. XLA: its own program for the formula. Flash, splash: JAX's "
    "kernels with the best of several block sizes. Both sides are counted by one rule. Beside XLA: the compiler's "
    "estimate, or the issue cycles if the estimate is missing or impossible. Beside kernels: the issue cycles. Neither "
    "is less than the cycles in which memory moves the bytes. On v5p two cores share a launch along its first parallel "
    "axis, which is the heads in splash: one head has one core."
)


def beside(kept: StoredResults) -> str:
    """Programs beside what others make of the same maths: a line a case, a column a target."""
    rows = kept.rows("tpu-cycles")
    if not rows:
        return "No comparison with other kernels is stored: `python benchmarks/tpu_cycles.py --target v5e --json FILE`."
    columns = known_targets(row["target"] for row, _ in rows)
    cells: dict[str, dict[str, str]] = {}
    for row, _ in rows:
        cells.setdefault(row["case"], {})[row["target"]] = _beside_others(row)
    shown = table(["case", *columns], [[case, *(there.get(t, NONE) for t in columns)] for case, there in cells.items()])
    seconds = sum({r.name: r.extra["wall_seconds"] for _, r in rows}.values())
    behind = sum("**" in cell for there in cells.values() for cell in there.values())
    took = f"{behind} of {len(rows)} are slower by more than 3 %. Compiling all took {seconds / 60:.0f} minutes."
    text = fold(f"{len(cells)} cases", shown) if len(cells) > UNFOLDED else shown
    return "\n\n".join([text, BESIDE_NOTES, took, source(r for _, r in rows)])


def _beside_others(row: Row) -> str:
    took, around = row["portakern"].get("least"), row["portakern"].get("around")
    if took is None:
        return NONE
    ratios = {n.removeprefix(OVER): v for n, v in row.items() if n.startswith(OVER) and v}
    text = f"{took / 1000:,.0f}" + (f" + {around / 1000:,.0f}" if around else "")
    if not ratios:
        return text
    best = max(ratios, key=lambda n: ratios[n])
    return f"{text} ({f'**{ratios[best]:.2f}**' if ratios[best] > BEHIND else f'{ratios[best]:.2f}'} {best})"


# --------------------------------------------------------------------------------------------- tilings that libtpu took
LEGAL_NOTES = (
    "Random calls with random tilings that `supports` accepts, compiled by libtpu without a chip: their number, and in "
    "brackets the largest share of the permitted VMEM that a kernel took. libtpu reports the VMEM of a kernel to the "
    "byte, spilled registers included, and refuses a kernel that needs more than is permitted. The last column is for "
    "tilings with an estimate of at least half of the permitted VMEM, on all targets: the smallest and the median "
    "ratio of the estimate to the VMEM that the kernel took; a ratio of at least 1 is safe. The blocks of the shorter "
    "last chunk of linear_cross_entropy are not estimated."
)


def legal(kept: StoredResults) -> str:
    """Random tilings that libtpu took: a line an op, a column a target."""
    found = kept.rows("tpu-legal")
    if not found:
        return "No tilings were tried yet: `python benchmarks/tpu_legal.py --target v6e --json FILE`."
    rows = [row for row, _ in found]
    columns = known_targets(row["target"] for row in rows)
    ops: dict[str, dict[str, Row]] = {}
    for row in rows:
        ops.setdefault(row["op"], {})[row["target"]] = row
    lines = []
    for op, there in sorted(ops.items()):
        cells = [_vmem_share(there[t], kept.root) if t in there else NONE for t in columns]
        lines.append([f"`{op}`", *cells, _estimates([*there.values()])])
    refused = [text for row in rows for text in row["refused"]]
    said = (
        f"{sum(row['tilings'] for row in rows):,} tilings, {len(refused)} of them refused by libtpu; compiling them "
        f"took {sum(row['seconds'] for row in rows) / 60:.0f} minutes of processes that shared their cores."
    )
    shown = fold(f"{len(lines)} ops", table(["op", *columns, "estimates"], lines))
    parts = [said, shown, LEGAL_NOTES, footnote(rows, kept.root), *(f"* {text}" for text in refused)]
    return "\n\n".join(part for part in [*parts, source(run for _, run in found)] if part)


def _vmem_share(row: Row, root: Path) -> str:
    bad = f", **{len(row['refused'])} refused**" if row["refused"] else ""
    return f"{row['tilings']} ({row['largest_share']:.0%}{bad}){STALE * changed(row, root)}"


def _estimates(rows: Sequence[Row]) -> str:
    known = [row for row in rows if row.get("smallest_ratio")]
    if not known:
        return NONE
    medians = [row["median_ratio"] for row in known for _ in range(row["large_tilings"])]
    return f"{min(row['smallest_ratio'] for row in known):.2f}, {statistics.median(medians):.2f}"


# ---------------------------------------------------------------------------------------------------------------- roofs
def roofs(kept: StoredResults) -> str:
    """The published limits of every chip of the table: bandwidth, rates, and where one begins to bind before the
    other."""
    columns = ("float32", "tf32", "bfloat16", "float8_e4m3fn", "int8")
    lines = []
    for h in targets.HARDWARE.values():
        rates = [h.flops.get(d) for d in columns]
        peak = h.flops.get("bfloat16")
        lines.append(
            [
                h.name, h.product, NONE if h.bandwidth is None else f"{h.bandwidth / 1e9:,.0f}",
                *(NONE if rate is None else f"{rate / 1e12:,.4g}" for rate in rates),
                NONE if not peak or not h.bandwidth else f"{peak / h.bandwidth:,.0f}",
            ]
        )  # fmt: skip
    heads = ["target", "chip", "GB/s", *(f"{d}, TFLOP/s" for d in columns), "bfloat16 operations a byte at the ridge"]
    notes = (
        "From [targets.py](portakern/core/targets.py), which names the document of each figure. Left of the ridge a "
        "call is bound by memory, right of it by arithmetic."
    )
    return table(heads, lines, words=2) + "\n\n" + notes
