"""Random tilings that the kernels accept, as a compiler for a chip that is not here took them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from portakern.core import targets
from portakern.reporting.kept import Kept, known_targets, source
from portakern.reporting.markdown import NONE, fold, table
from portakern.reporting.staleness import STALE, changed, footnote

__all__ = ["legal"]

Row = Mapping[str, Any]
COMMAND = "python benchmarks/tpu_legal.py --target v6e --json FILE"
NOTES = (
    "Random calls with random tilings that `supports` accepts, compiled by libtpu, with no chip: how many, and in "
    "brackets how near one came to the limit, the largest share that a kernel took of the VMEM that it may take. "
    "libtpu tells that to the byte, what it keeps there for want of registers counted, and takes a kernel if and only "
    "if it is no more than it may be. Of those of which `supports` estimates at least half of that, the last column "
    "has the least and the median of the estimate over what was taken, all targets together: from 1 on it is enough. "
    "The shorter last chunk of linear_cross_entropy has blocks of its own, which are not among those estimated."
)


def legal(kept: Kept) -> str:
    """A line an op, a column a target."""
    rows = [(_placed(row), run) for row, run in kept.rows("tpu-legal")]
    if not rows:
        return f"No tilings were tried yet: `{COMMAND}`."
    columns = known_targets(row["chip"] for row, _ in rows)
    ops: dict[str, dict[str, Row]] = {}
    for row, _ in rows:
        ops.setdefault(row["op"], {})[row["chip"]] = row
    lines = []
    for op, there in sorted(ops.items()):
        cells = [_cell(there[t], kept.root) if t in there else NONE for t in columns]
        lines.append([f"`{op}`", *cells, _estimates([*there.values()])])
    runs = {r.file: r for _, r in rows}.values()
    refused = [text for row, _ in rows for text in row["refused"]]
    seconds = sum(row["seconds"] for row, _ in rows)
    total = sum(row["tilings"] for row, _ in rows)
    said = (
        f"{total:,} tilings, {len(refused)} of them refused by libtpu; compiling them took {seconds / 60:.0f} minutes "
        "of processes that shared their cores."
    )
    shown = fold(f"{len(lines)} ops", table(["op", *columns, "estimates"], lines))
    changes = footnote((row for row, _ in rows), kept.root)
    parts = [said, shown, NOTES, changes, *(f"* {text}" for text in refused), source(runs)]
    return "\n\n".join(part for part in parts if part)


def _placed(row: Row) -> Row:
    """A row with its target as rows of other benchmarks name theirs."""
    return {**row, "chip": row["target"], "target": f"{targets.find(row['target']).platform} {row['target']}"}


def _cell(row: Row, root: Path) -> str:
    bad = f", **{len(row['refused'])} refused**" if row["refused"] else ""
    return f"{row['tilings']} ({row['nearest']:.0%}{bad}){STALE * changed(row, root)}"


def _estimates(rows: list[Row]) -> str:
    known = [row for row in rows if row.get("least")]
    if not known:
        return NONE
    medians = [row["median"] for row in known for _ in range(row["large"])]
    return f"{min(row['least'] for row in known):.2f}, {statistics.median(medians):.2f}"
