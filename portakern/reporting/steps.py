"""A training step of a model, and of the loss over its vocabulary, beside Liger and PyTorch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from portakern.reporting.kept import Kept, source
from portakern.reporting.markdown import NONE, table

__all__ = ["steps"]

Row = Mapping[str, Any]
OURS = "portakern"
STAGES = {
    "eager": "a Llama's step, eager",
    "compiled": "the same, torch.compile",
    "loss": "`linear_cross_entropy`",
}
NAMES = {"liger": "Liger", "torch": "PyTorch"}
HEADS = [
    "forward and backward of",
    "on",
    "ms, median",
    "best, worst",
    "over portakern's",
    "GiB at most",
    "gradients off",
]
NOTES = (
    "GiB: of a step with its parameters, of the loss beyond its arguments. Gradients off: the norm of the difference "
    "over that of the gradient; of a step, from those that PyTorch's own functions give in the same dtype; of the "
    "loss, from float64, those of hidden and of weight."
)
MOST = 6
"""Kernels that are named."""


def steps(kept: Kept) -> str:
    """A table a device, a line a stage and contender; what the contenders ran, and what their steps' time goes to."""
    found = kept.rows("model-step")
    if not found:
        return (
            "No step was timed yet: `python -m benchmarks.model_step --json model-step.json`, and `portakern report "
            "--add model-step.json`."
        )
    text = []
    for device in dict.fromkeys(run.device for _, run in found):
        runs = [run for _, run in found if run.device == device]
        rows = [row for row, run in found if run.device == device]
        sizes = runs[0].extra["sizes"]
        text += [f"**{device}**", f"The Llama: {sizes['model']}. The loss: {sizes['loss']}."]
        text += [table(HEADS, [_line(row, rows) for row in rows], words=2), *_kernels(rows)]
    return "\n\n".join([*text, NOTES, source(run for _, run in found)])


def _line(row: Row, rows: Sequence[Row]) -> list[str]:
    what = [STAGES[row["stage"]], str(NAMES.get(row["contender"], row["contender"]))]
    if row.get("ms") is None:
        return [*what, str(row.get("why") or "not timed"), *[NONE] * 4]
    ours = next((r["ms"] for r in rows if (r["stage"], r["contender"]) == (row["stage"], OURS) and r.get("ms")), None)
    memory = row.get("peak_gib")
    return [
        *what, f"{row['ms']:.1f}", f"{row['best_ms']:.1f}, {row['worst_ms']:.1f}",
        f"{row['ms'] / ours:.2f}" if ours else NONE, NONE if memory is None else f"{memory:.2f}", _off(row),
    ]  # fmt: skip


def _off(row: Row) -> str:
    if row.get("gradients_apart") is not None:
        return f"{row['gradients_apart']:.3f}"
    return ", ".join(f"{v:.5f}" for n, v in (row.get("errors") or {}).items() if n != "loss") or NONE


def _kernels(rows: Sequence[Row]) -> list[str]:
    """A sentence a stage and contender on the kernels that take the most of its step, those of a library under the name
    that all of its kernels for an architecture begin with."""
    told = []
    for row in rows:
        took: dict[str, float] = {}
        for name, ms in (row.get("kernels") or {}).items():
            short = re.split(r"_sm\d+|\(|<", name)[0]
            took[short] = took.get(short, 0.0) + ms
        whole = took.pop("all", None)
        if whole:
            most = sorted(took.items(), key=lambda item: -item[1])[:MOST]
            named = ", ".join(f"`{name}` {ms:.1f}" for name, ms in most)
            who = NAMES.get(row["contender"], row["contender"])
            told.append(f"Kernels of a step, {row['stage']}, {who}: {whole:.1f} ms, of which {named}.")
    return told
