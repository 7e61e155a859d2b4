"""Tables of what was compiled: verdicts, what each kernel takes of its chip, tilings, estimated cycles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from portakern.core import registry, targets
from portakern.reporting.kept import Kept, known_targets, source
from portakern.reporting.markdown import NONE, fold, table
from portakern.tools.compile.build import CYCLES, FOLLOWED, Kernel

__all__ = ["cycles", "matrix", "resources", "roofs", "tilings"]

Row = Mapping[str, Any]
UNFOLDED = 25  # rows that a table may have without being folded
MISSING = (
    "Nothing was compiled yet: `portakern compile --all --json > compile-matrix.json`, and `portakern report --add "
    "compile-matrix.json`."
)


def _cells(kept: Kept) -> tuple[list[Row], str]:
    rows = kept.rows("compile-matrix")
    return [row for row, _ in rows], source(r for _, r in rows)


def _by_op(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """(op, dtype) -> its rows."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda r: (r["op"], r["dtype"])):
        found.setdefault((row["op"], row["dtype"]), []).append(row)
    return found


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


def _teams(rows: Iterable[Row]) -> list[list[str]]:
    """The makers, those together that share no target: a line of the table serves a team."""
    rows = list(rows)
    makers = _makers(rows)
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


def matrix(kept: Kept) -> str:
    """Op and dtype by target: whether the typical call compiles and fits."""
    rows, said = _cells(kept)
    if not rows:
        return MISSING
    columns, reasons, lines = known_targets(r["target"] for r in rows), list[str](), []
    names = _makers(rows)
    for (op, dtype), mine in _by_op(rows).items():
        for team in _teams(rows):
            there = {r["target"]: r for r in mine if names[r["backend"], r.get("variant")] in team}
            makers = {names[r["backend"], r.get("variant")] for r in there.values()}
            if there:
                lines.append([f"`{op}`", dtype, ", ".join(b for b in team if b in makers)])
                lines[-1] += [_verdict(there.get(t), reasons) for t in columns]
    footnotes = "\n".join(f"{i}. {reason}" for i, reason in enumerate(reasons, 1))
    count = f"{sum(r['ok'] for r in rows)} of {len(rows)} typical calls compile and fit."
    return "\n\n".join(
        p for p in (table(["op", "dtype", "by", *columns], lines, words=3 + len(columns)), footnotes, count, said) if p
    )


def _verdict(row: Row | None, reasons: list[str]) -> str:
    if row is None:
        return NONE
    if row["ok"]:
        return "ok"
    reason = row["reason"] or "no reason was given"
    if reason not in reasons:
        reasons.append(reason)
    return f"**no** ({reasons.index(reason) + 1})"


def resources(kept: Kept) -> str:
    """What kernels take of each chip: a line a target, and folded beneath a line a call."""
    rows, said = _cells(kept)
    if not rows:
        return MISSING
    limits = {t: found for _, r in kept.rows("compile-matrix") for t, found in r.extra["limits"].items()}
    names = known_targets(r["target"] for r in rows)
    summary = [_target_line(t, [r for r in rows if r["target"] == t], limits.get(t, {})) for t in names]
    heads = [
        "target",
        "chip",
        "calls that fit",
        "with matrix instructions",
        "with spills",
        "on-chip memory, at most",
        "occupancy, at least",
    ]
    text = [table(heads, summary, words=2)]
    for platform in dict.fromkeys(_platform(t) for t in names):
        here = [t for t in names if _platform(t) == platform]
        lines = [
            r
            for found in _by_op(r for r in rows if r["target"] in here).values()
            for r in sorted(found, key=lambda r: here.index(r["target"]))
        ]
        text.append(fold(f"{platform} ({', '.join(here)}): {len(lines)} calls", _details(lines, limits)))
    notes = (
        "Of a call with several kernels: the most registers, all spills, the most memory, the least occupancy. Spills "
        "are bytes a thread on a GPU, and vector "
        "registers stored in the code of a TPU kernel. Memory is that of one program, with its share of what a "
        "program may have."
    )
    return "\n\n".join([*text, notes, said])


def _platform(target: str) -> str:
    return targets.HARDWARE[target].platform if target in targets.HARDWARE else "other"


def _target_line(target: str, rows: list[Row], limits: Mapping[str, int]) -> list[str]:
    fitting = [r for r in rows if r["ok"]]
    shares = [share for r in fitting if (share := _memory(r, limits)[0]) is not None]
    occupancies = [o for r in fitting if (o := _least(r, "occupancy")) is not None]
    return [
        target,
        targets.HARDWARE[target].product if target in targets.HARDWARE else "",
        f"{len(fitting)} of {len(rows)}",
        str(sum(any(k["matrix"] for k in r["kernels"]) for r in fitting)),
        str(sum(any(k["spills"] for k in r["kernels"]) for r in fitting)),
        f"{max(shares):.0%}" if shares else NONE,
        f"{min(occupancies):.0%}" if occupancies else NONE,
    ]


def _memory(row: Row, limits: Mapping[str, int]) -> tuple[float | None, str]:
    """(share of the limit, in words) of the memory that a call fills most."""
    found = [
        (used / limits[m], f"{m} {_size(used)}")
        for k in row["kernels"]
        for m, used in k["on_chip"].items()
        if limits.get(m)
    ]
    return max(found, default=(None, NONE), key=lambda f: f[0] or 0)


def _size(n: int) -> str:
    return f"{n} B" if n < 1024 else f"{n / 1024:.0f} KiB"


def _known(row: Row, field: str) -> list[Any]:
    return [k[field] for k in row["kernels"] if k.get(field) is not None]


def _least(row: Row, field: str) -> Any:
    return min(_known(row, field), default=None)


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

    def shown(values: list[Any], of: Callable[[list[Any]], Any], form: str = "") -> str:
        return format(of(values), form) if values else NONE

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
    heads = [
        "op",
        "dtype",
        "target",
        "launches",
        "registers",
        "spills",
        "on-chip memory",
        "occupancy",
        "matrix instruction",
    ]
    used = [i for i in range(len(heads)) if any(line[i] != NONE for line in lines)]
    return table([heads[i] for i in used], [[line[i] for i in used] for line in lines], words=3)


def tilings(kept: Kept) -> str:
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
        return (
            table(["op", *heads], [[f"`{op}`", *line] for op, lines in parts.items() for line in lines], words=5)
            + "\n\n"
            + said
        )
    return "\n\n".join(
        [*(fold(f"<code>{op}</code>", table(heads, lines, words=4)) for op, lines in parts.items()), said]
    )


def _whole_run(row: Row) -> float | None:
    """Cycles of the whole call, nothing run; None where the compiler does not tell them of every kernel."""
    hardware = targets.HARDWARE.get(row["target"])
    kernels = [Kernel(**{n: v for n, v in k.items() if v is not None}) for k in row["kernels"]]
    found = [k.least(hardware) for k in kernels] if hardware else []
    return sum(f or 0.0 for f in found) if found and None not in found else None


def cycles(kept: Kept) -> str:
    """What a whole call takes by machine code, grid and bytes, where a compiler tells it."""
    rows, said = _cells(kept)
    found = {id(r): _whole_run(r) for r in rows}
    rows = [r for r in rows if found[id(r)]]
    if not rows:
        return "No count of cycles is kept." + (f"\n\n{said}" if said else "")
    columns = known_targets(r["target"] for r in rows)
    lines = []
    for (op, dtype), mine in _by_op(rows).items():
        there = {r["target"]: found[id(r)] for r in mine}
        lines.append([f"`{op}`", dtype, *(f"{n / 1000:,.0f}" if (n := there.get(t)) else NONE for t in columns)])
    notes = (
        f"Thousands of cycles of the typical call, {CYCLES}: the compiler's estimate, or what is issued where an "
        f"estimate is under {FOLLOWED:.0%} of that, and must have missed a branch. No chip has confirmed one. {NONE}: "
        "the code's bundles were not counted."
    )
    return "\n\n".join([table(["op", "dtype", *columns], lines, words=2), notes, said])


def roofs(kept: Kept) -> str:
    """The published limits of every chip of the table: bandwidth, rates, and where one begins to bind before the
    other."""
    columns = ("float32", "tf32", "bfloat16", "float8_e4m3fn", "int8")
    lines = []
    for h in targets.HARDWARE.values():
        rates = [h.flops.get(d) for d in columns]
        peak = h.flops.get("bfloat16")
        lines.append(
            [
                h.name,
                h.product,
                NONE if h.bandwidth is None else f"{h.bandwidth / 1e9:,.0f}",
                *(NONE if rate is None else f"{rate / 1e12:,.4g}" for rate in rates),
                NONE if not peak or not h.bandwidth else f"{peak / h.bandwidth:,.0f}",
            ]
        )
    heads = ["target", "chip", "GB/s", *(f"{d}, TFLOP/s" for d in columns), "bfloat16 operations a byte at the ridge"]
    notes = (
        "From [targets.py](portakern/core/targets.py), which names the document of each figure. Left of the ridge a "
        "call is bound by memory, right of it by arithmetic."
    )
    return table(heads, lines, words=2) + "\n\n" + notes
