"""What the shipped choice of tiles loses against the best that a tuner found, a line a family of calls."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from portakern.reporting.kept import Kept, known_targets, set_of, source
from portakern.reporting.markdown import NONE, table
from portakern.results import Result

__all__ = ["figures", "gain", "searched", "tuned"]

Row = Mapping[str, Any]
SMALL, MOST = 0.05, 0.15
"""What the median loss of a family, and its worst, may be."""

HEADS = [
    "target", "calls of", "by", "calls", "tilings tried, median", "loss, median", "worst", f"beyond {SMALL:.0%}",
    f"beyond {MOST:.0%}", "gain of tuning", "without time",
]  # fmt: skip

NOTES = (
    "Loss: the time, or the figure of a model, of what is shipped over that of the best tiling found for the very "
    "call, less 1. Gain of tuning: the same figures' geometric mean, as a factor. What was tried bounds what could be "
    "found. Calls without time: no other tiling was tried before the run ended, and they count for nothing."
)


def searched(row: Row, left: int | None = None) -> bool:
    """Whether anything beside the shipped tiling was tried, or there is nothing else; of rows that do not say so, by
    whether their run came to its end: ``left``, the keys that time did not reach."""
    ended = row.get("ended")
    return row["tried"] > 1 or row["refused"] > 0 or bool(not left if ended is None else ended)


def gain(rows: Iterable[Row]) -> float:
    """The default's figure over the best's, the geometric mean."""
    return statistics.geometric_mean(r["default"] / r["best"] for r in rows)


def figures(rows: Sequence[Row]) -> list[str]:
    """Calls, tilings tried, losses and gain of rows that were searched."""
    losses = [r["loss"] for r in rows]
    beyond = [sum(loss > most for loss in losses) for most in (SMALL, MOST)]
    return [
        str(len(rows)), f"{statistics.median(r['tried'] for r in rows):g}", f"{statistics.median(losses):.1%}",
        f"{max(losses):.1%}", *map(str, beyond), f"{gain(rows):.3f}",
    ]  # fmt: skip


def tuned(kept: Kept) -> str:
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
    order = {name: i for i, name in enumerate(known_targets(target for target, _, _ in groups))}
    lines = []
    for key in sorted(groups, key=lambda k: (order[k[0]], k[1:])):
        mine = [row for row, run in groups[key] if searched(row, run.extra.get("left"))]
        said = figures(mine) if mine else ["0", *[NONE] * 6]
        lines.append([*key, *said, str(len(groups[key]) - len(mine))])
    cut = [f"{run.file.name} {run.extra['left']}" for run in set_of(r for _, r in found) if run.extra.get("left")]
    unreached = [f"Keys that a run's time did not reach, whose calls have no row: {', '.join(cut)}."] if cut else []
    return "\n\n".join([table(HEADS, lines, words=3), NOTES, *unreached, source(run for _, run in found)])
