"""Programs that were compiled and not run, beside what others make of the same maths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from portakern.reporting.compiled import UNFOLDED
from portakern.reporting.kept import Kept, known_targets, source
from portakern.reporting.markdown import NONE, fold, table

__all__ = ["beside"]

Row = Mapping[str, Any]
OVER = "over_"
BEHIND = 1.03
"""Times the best other from which a figure stands in bold."""
NOTES = (
    "Thousands of cycles of the kernels by default tilings, no chip ran one; + those of what XLA puts around them, "
    "such as copies; in brackets both over what the best other takes, and who that is, in bold where ours are behind "
    "by more than 3 %. XLA: its own program for the formula. Flash, splash: JAX's kernels with the best of several "
    "sets of blocks. Both sides count by one rule: beside XLA the compiler's estimate, or what is issued where that "
    "is missing or impossible; beside kernels what is issued; never less than memory takes for the bytes. On v5p two "
    "cores share a launch along its first parallel axis, which of splash is heads: one head has one core."
)


def beside(kept: Kept) -> str:
    """A line a case, a column a target."""
    rows = kept.rows("tpu-cycles")
    if not rows:
        return "Nothing was compiled beside others yet: `python benchmarks/tpu_cycles.py --target v5e --json FILE`."
    columns = known_targets(row["target"] for row, _ in rows)
    cells: dict[str, dict[str, str]] = {}
    for row, _ in rows:
        cells.setdefault(row["case"], {})[row["target"]] = _cell(row)
    lines = [[case, *(there.get(t, NONE) for t in columns)] for case, there in cells.items()]
    shown = table(["case", *columns], lines)
    runs = {r.file: r for _, r in rows}.values()
    seconds = sum(r.extra["wall_seconds"] for r in runs)
    behind = sum("**" in cell for there in cells.values() for cell in there.values())
    took = f"{behind} of {len(rows)} are behind. Compiling all took {seconds / 60:.0f} minutes, program by program."
    text = fold(f"{len(lines)} cases", shown) if len(lines) > UNFOLDED else shown
    return "\n\n".join([text, NOTES, took, source(runs)])


def _cell(row: Row) -> str:
    ours = row["ours"]
    cycles = ours.get("least")
    if cycles is None:
        return NONE
    ratios = {n.removeprefix(OVER): v for n, v in row.items() if n.startswith(OVER) and v}
    around = ours.get("around")
    text = f"{cycles / 1000:,.0f}" + (f" + {around / 1000:,.0f}" if around else "")
    if not ratios:
        return text
    best = max(ratios, key=lambda n: ratios[n])
    return f"{text} ({f'**{ratios[best]:.2f}**' if ratios[best] > BEHIND else f'{ratios[best]:.2f}'} {best})"
