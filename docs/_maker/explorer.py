"""The rows behind the tables of results, for the page that lets a reader filter them (``explorer.js``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from maint.measurements import Row, StoredResults, changed
from portakern.results import Result
from portakern.tools.bench.plots import call_without_op, short

FILE = "reference/results.json"
SPEED = ("op", "dtype", "call", "by", "device", "µs", "best peer's µs / ours", "error / bound", "verdict", "source")
ERRORS = ("op", "implementation", "device", "cases", "largest error / bound", "right", "source")
FILTERED = ("op", "dtype", "by", "implementation", "device", "verdict", "source")
"""Columns with a menu of their values."""


def rows(kept: StoredResults) -> str:
    """JSON: name of a table -> its columns, those with a menu, and its rows."""
    shown = {
        "speed": (SPEED, [_speed(row, run, kept) for row, run in kept.rows("bench")]),
        "errors": (ERRORS, [_error(row, run, kept) for row, run in kept.rows("conformance")]),
    }
    return json.dumps({name: _table(columns, lines) for name, (columns, lines) in shown.items()}, ensure_ascii=False)


def _table(columns: tuple[str, ...], lines: list[list[Any]]) -> Mapping[str, Any]:
    return {"columns": columns, "filtered": [c for c in columns if c in FILTERED], "rows": sorted(lines, key=str)}


def _speed(row: Row, run: Result, kept: StoredResults) -> list[Any]:
    return [
        row["op"], short(row["dtype"]), call_without_op(row["call"]), row["contender"], run.device,
        _rounded(row.get("median_us")), _rounded(row.get("ratio")), _rounded(row.get("error")), row["verdict"],
        "stale" if changed(row, kept.root) else "current",
    ]  # fmt: skip


def _error(row: Row, run: Result, kept: StoredResults) -> list[Any]:
    worst = max(row["worst"].values(), default=None)
    right = "yes" if row["passed"] else "no"
    stale = "stale" if changed(row, kept.root) else "current"
    return [row["op"], row["subject"], run.device, row["examples"], _rounded(worst), right, stale]


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
