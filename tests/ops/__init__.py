"""One record an op, found by walking this folder: a module that does not begin with an underscore, and is called like
an op, holds its ``RECORD``.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from tests.ops.record import ForwardRecord, GradientRecord, OpRecord

__all__ = ["forward_records", "gradient_records", "record", "records"]


@functools.cache
def records() -> dict[str, OpRecord]:
    """Op -> its record, in alphabetical order."""
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_") and m.name != "record")
    return {name: importlib.import_module(f"{__name__}.{name}").RECORD for name in names}


def record(op: str) -> OpRecord:
    return records()[op]


def forward_records() -> list[ForwardRecord]:
    return [r for r in records().values() if isinstance(r, ForwardRecord)]


def gradient_records() -> list[GradientRecord]:
    return [r for r in records().values() if isinstance(r, GradientRecord)]
