"""Tables of checks: errors as shares of the bound, machine code in an emulator, planted faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from maint.markdown import NONE, by_device, table
from maint.measurements import STALE, Row, StoredResults, changed, footnote, set_of, source
from portakern.results import EMULATED, HOST_CPU, Result

__all__ = ["caught", "emulated", "errors", "faults", "found", "invariances", "machine_faults", "soundness"]


def errors(kept: StoredResults) -> str:
    """Each op's and output's worst error as a fraction of its bound, a column for everything that the checker ran."""
    rows = [(row, r) for row, r in kept.rows("conformance") if r.device != EMULATED]
    if not rows:
        return (
            "No conformance run is stored yet: `portakern check --backend NAME --json FILE`, and `portakern report "
            "--add FILE`."
        )
    columns: dict[str, dict[str, Row]] = {}
    for row, r in sorted(rows, key=lambda x: (x[1].device, x[0]["subject"])):
        head = row["subject"] if r.device == HOST_CPU else f"{row['subject']}, {r.device}"
        columns.setdefault(head, {})[row["op"]] = row
    lines = []
    for op in sorted({row["op"] for row, _ in rows}):
        for output in dict.fromkeys(o for row, _ in rows if row["op"] == op for o in row["worst"]) or [NONE]:
            worst = [_worst(there.get(op), output, kept.root) for there in columns.values()]
            lines.append([f"`{op}`", output, *worst])
    notes = [f"- {head}: {_count(there.values())}" for head, there in columns.items()]
    changes = footnote((row for row, _ in rows), kept.root)
    text = [table(["op", "output", *columns], lines, words=2), changes, "\n".join(notes), source(r for _, r in rows)]
    return "\n\n".join(t for t in text if t)


def emulated(kept: StoredResults) -> str:
    """What the checker found of machine code that an emulator executed, a line an op and architecture."""
    rows = [(row, r) for row, r in kept.rows("conformance") if r.device == EMULATED]
    if not rows:
        return (
            "Nothing was emulated yet: `python benchmarks/emulated.py --json FILE`, and `portakern report --add FILE`."
        )
    dtypes = list(dict.fromkeys(name.partition(" | ")[0] for row, _ in rows for name in row["combinations"]))
    lines = []
    for row, _ in sorted(rows, key=lambda x: (x[0]["op"], str(x[0]["target"]))):
        by_dtype, default = Counter(dict.fromkeys(dtypes, 0)), 0
        for combination, count in row["combinations"].items():
            dtype, _, tiling = combination.partition(" | ")
            by_dtype[dtype] += count
            default += count * (tiling == "default")
        worst = f"{max(row['worst'].values(), default=0.0):.3f}" + STALE * changed(row, kept.root)
        lacking = sum((row.get("not_emulated") or {}).values())
        lines.append(
            [f"`{row['op']}`", str(row["target"]).split()[-1], *(str(by_dtype[d]) for d in dtypes), str(default),
             str(sum(row["laws"].values())), worst if row["passed"] else f"**failed**, {worst}", str(lacking),
             f"{row['seconds']:.0f}"]
        )  # fmt: skip
    heads = ["op", "architecture", *dtypes, "of them in the default tiling", "laws", "worst error", "not emulated", "s"]
    reasons: Counter[str] = Counter()
    for row, _ in rows:
        reasons.update(row.get("not_emulated") or {})
    said = [f"- not emulated, {n} times: {reason}" for reason, n in reasons.most_common()]
    ops, places = ({row[key] for row, _ in rows} for key in ("op", "target"))
    lined = f"{_some(len(ops), 'op')} on {_some(len(places), 'architecture')}"
    total = "- all: " + _count(row for row, _ in rows).replace(_some(len(rows), "op"), lined)
    changes = footnote((row for row, _ in rows), kept.root)
    text = [table(heads, lines, words=2), changes, "\n".join([total, *said]), source(r for _, r in rows)]
    return "\n\n".join(t for t in text if t)


def machine_faults(kept: StoredResults) -> str:
    """Faults planted in compiled kernels, a line an op and architecture: how many of each kind were seen."""
    rows = kept.rows("machine_faults")
    if not rows:
        return (
            "No faults were planted in machine code yet: `python -m tests.mutants.machine_code --json FILE`, and "
            "`portakern report --add FILE`."
        )
    kinds = list(dict.fromkeys(row["kind"] for row, _ in rows))
    groups = sorted({(row["op"], row["target"]) for row, _ in rows})
    lines = []
    for op, target in groups:
        mine = [row for row, _ in rows if (row["op"], row["target"]) == (op, target)]
        lines.append([f"`{op}`", target, *(_seen([r for r in mine if r["kind"] == k]) for k in kinds)])
    lines.append(["**all**", "", *(_seen([row for row, _ in rows if row["kind"] == k]) for k in kinds)])
    how = Counter(row["detected_by"] for row, _ in rows if row["caught"])
    told = "Seen as: " + ", ".join(f"{what} {n}" for what, n in how.most_common()) + "."
    return "\n\n".join([table(["op", "architecture", *kinds], lines), told, source(r for _, r in rows)])


def _seen(rows: Sequence[Row]) -> str:
    return f"{sum(r['caught'] for r in rows)} of {len(rows)}" if rows else NONE


def _worst(row: Row | None, output: str, root: Path) -> str:
    if row is None:
        return "not run"
    figure = f"{row['worst'][output]:.3f}" if output in row["worst"] else NONE
    figure += STALE if changed(row, root) else ""
    return figure if row["passed"] else f"**failed**, {figure}"


def _count(rows: Iterable[Row]) -> str:
    rows = list(rows)
    failed = [r["op"] for r in rows if not r["passed"]]
    laws = sum(sum(r["laws"].values()) for r in rows)
    ended = "failed: " + ", ".join(failed) if failed else "all within their bounds"
    return (
        f"{sum(r['examples'] for r in rows):,} cases and {laws:,} instances of laws across calls, of "
        f"{_some(len(rows), 'op')}, {ended}; {sum(r['seconds'] for r in rows):,.0f} s, summed over processes"
    )


def _some(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def invariances(kept: StoredResults) -> str:
    """Who keeps which bits: a line an op and subject, a column a property."""
    found = kept.rows("invariance")
    if not found:
        return (
            "Not measured: `python -m benchmarks.batch_invariance --json FILE` on a GPU, `portakern report --add FILE`."
        )

    def render(mine: list[Row]) -> str:
        columns = list(dict.fromkeys(row["name"] for row in mine))
        lines = []
        for op, peer, subject in sorted({(r["op"], r["peer"], r["subject"]) for r in mine}):
            own = [r for r in mine if (r["op"], r["subject"]) == (op, subject)]
            name = (subject if peer else f"**{subject}**") + STALE * any(changed(r, kept.root) for r in own)
            lines.append([f"`{op}`", name, *(_same_bits([r for r in own if r["name"] == c]) for c in columns)])
        return table(["op", "with", *columns], lines)

    notes = (
        "Calls with the same bits, of drawn calls; where some differ, along which dimension, in which layout or by "
        "which law, and the largest difference. Portakern's backends are in bold. Peers have their default settings."
    )
    text = [by_device(found, render), notes, footnote((r for r, _ in found), kept.root), source(r for _, r in found)]
    return "\n\n".join(t for t in text if t)


def _same_bits(rows: Sequence[Row]) -> str:
    """How many of a property's calls had the same bits."""
    cases = sum(r["cases"] for r in rows)
    broken = [r for r in rows if r["failed"] or r["same"] < r["cases"]]
    if not cases and not broken:
        return NONE
    named = ", ".join(r["along"] for r in broken if r["along"])
    largest = f" ({named + ': ' if named else ''}{max(r['largest'] for r in broken):.2g})" if broken else ""
    return f"{sum(r['same'] for r in rows)} of {cases}{largest}"


def soundness(kept: StoredResults) -> str:
    """What the sanitizer said of compiled kernels, and what became of calls drawn at random."""
    lines, used = [], []
    for title, name, say in (("Sanitizer", "sanitizer", _sanitized), ("Fuzzed calls", "fuzz", _fuzzed)):
        rows = kept.rows(name)
        lines.append(f"- {title}: {say(rows) if rows else 'not run'}")
        used += [r for _, r in rows]
    return "\n\n".join(["\n".join(lines), source(used)]) if used else lines[0]


def _sanitized(rows: Sequence[tuple[Row, Result]]) -> str:
    tools = ", ".join(sorted({row["tool"] for row, _ in rows}))
    bad, ended = Counter[str](), []
    for row, _ in rows:
        variant = f", variant {row['variant']}," if row.get("variant") else ""
        what = f"`{row['op']}` on {row['backend']}{variant} by {row['tool']}"
        bad[what] += row.get("errors") or 0
        ended += [f"{what}: {row['problem']}"] if row.get("problem") else []
    found = f"{bad.total()} errors" + "".join(f"; {n} of {what}" for what, n in bad.items() if n)
    found += f"; unfinished: {', '.join(ended)}" if ended else ""
    fewest = min(row["examples"] for row, _ in rows)
    ops = {backend: len({row["op"] for row, _ in rows if row["backend"] == backend}) for backend in
           sorted({row["backend"] for row, _ in rows})}  # fmt: skip
    of_each = ", ".join(f"{n} of `{backend}`" for backend, n in ops.items())
    return f"{tools} over ops, {of_each}, at least {fewest} examples each: {found}"


def _fuzzed(rows: Sequence[tuple[Row, Result]]) -> str:
    told = {"dressed": "right calls written differently, with the same bits", "accepted": "altered and still legal"}
    verdicts = ", ".join(
        f"{row['calls']:,} {told.get(row['verdict'], 'refused with ' + row['verdict'])}" for row, _ in rows
    )
    runs = [r.extra for r in set_of(r for _, r in rows)]
    return (
        f"{sum(r['calls'] for r in runs):,} ({verdicts}): {sum(len(r['broken']) for r in runs)} crashed, hung or gave "
        "a wrong value; worst error "
        f"{max(r['worst'] for r in runs):.3f} of its bound, slowest call "
        f"{max(r['slowest_seconds'] for r in runs):.2f} s"
    )


def caught(row: Row) -> bool:
    """Whether a planted fault was found on every seed that it met."""
    return bool(row["seeds"]) and all(s.get("caught") for s in row["seeds"].values())


def faults(kept: StoredResults) -> str:
    """Faults planted in the shipped kernels: how many the checker finds on every seed, and how many a flat tolerance
    lets through.
    """
    rows = kept.rows("mutants")
    if not rows:
        return "No faults were planted yet: `python -m tests.mutants --json FILE`, and `portakern report --add FILE`."
    text = [by_device(rows, _fault_table)]
    for run in set_of(r for _, r in rows):
        done, _, planned = str(run.extra["tasks"]).partition(" of ")
        if done != planned:
            text.append(
                f"An unfinished run, {done} of {planned} tasks: every fault ran on at least one seed, and counts as "
                "caught on every seed if it was caught on each seed that ran."
            )
    text.append(_slipping(rows))
    missed = [
        f"- `{row['name']}` ({sum(bool(s.get('caught')) for s in row['seeds'].values())} of {len(row['seeds'])} "
        f"seeds): {row['what']}"
        for row, _ in rows
        if not caught(row)
    ]
    text += ["\n".join(["Not caught on every seed:", *missed])] if missed else []
    broken = [
        f"- {k['backend']} `{k['op']}`, seed {k['seed']}: {k.get('error') or k.get('what')}"
        for r in set_of(r for _, r in rows)
        for k in r.extra["kernels"]
        if k.get("failed", True)
    ]
    told = "Seeds on which the kernel without a fault fails too:"
    text += ["\n".join([told, *broken])] if broken else []
    return "\n\n".join([*text, source(r for _, r in rows)])


def found(kept: StoredResults) -> str:
    """The same in two sentences."""
    rows = kept.rows("mutants")
    if not rows:
        return "Not measured yet."
    seeds = max(len(row["seeds"]) for row, _ in rows)
    most = max(s.get("examples", 0) for row, _ in rows for s in row["seeds"].values())
    everywhere = sum(caught(row) for row, _ in rows)
    return (
        f"{everywhere} of {len(rows)} planted mistakes are found on every one of {seeds} seeds, by "
        f"example {most} at the latest. {_slipping(rows)}"
    )


FAULT_HEADS = [
    "backend", "op", "faults", "caught on every seed", "error below 1e-2", "of these caught",
    "missed by a flat 1e-2",
]  # fmt: skip


def _fault_table(rows: list[Row]) -> str:
    pairs = sorted({(r["backend"], r["op"]) for r in rows})
    groups = {(b, f"`{op}`"): [r for r in rows if (r["backend"], r["op"]) == (b, op)] for b, op in pairs}
    lines = []
    for name, mine in {**groups, ("**all**", ""): rows}.items():
        # as declared, where it was not measured
        small = [r for r in mine if (r["small"] if r.get("max_error") is None else r["max_error"] < 1e-2)]
        flat = [f["sees_at"] for r in mine for f in r["flat_tolerance"].values() if "sees_at" in f]
        seen = [sum(map(caught, some)) for some in (mine, small)]
        slip = f"{sum(f is None for f in flat) / len(flat):.0%}" if flat else "not run"
        lines.append([*name, str(len(mine)), str(seen[0]), str(len(small)), str(seen[1]), slip])
    return table(FAULT_HEADS, lines, words=2)


def _slipping(rows: Sequence[tuple[Row, Result]]) -> str:
    """What a flat tolerance lets through: on inputs as most tests draw them, and on the checker's own cases."""
    seen = [f["sees_at"] for row, _ in rows for f in row["flat_tolerance"].values() if "sees_at" in f]
    errors = [row["max_error"] for row, _ in rows if row.get("max_error") is not None]
    calls, alarms = (
        sum(k.get(n, 0) for r in set_of(r for _, r in rows) for k in r.extra["kernels"])
        for n in ("calls", "false_alarms")
    )
    if not (seen and errors and calls):
        return "How many of them `assert_allclose(rtol=atol=1e-2)` misses was not measured."
    small, missed = sum(e < 1e-2 for e in errors), sum(s is None for s in seen)
    return (
        f"`assert_allclose(rtol=atol=1e-2)` misses {small} of {len(errors)} ({small / len(errors):.0%}) on ordinary "
        "inputs, N(0, 1) in common shapes, on which their errors are below 1e-2. On the checker's own cases it misses "
        f"{missed} of {len(seen)} ({missed / len(seen):.0%}), and it rejects {alarms} of {calls} calls "
        f"({alarms / calls:.0%}) of the kernels without a fault."
    )
