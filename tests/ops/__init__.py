"""A record of every op, found by walking this folder: a module that does not begin with an underscore, and is called
like an op, holds its ``RECORD``, and that of its gradient, ``GRADIENT``.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from tests.ops.record import ForwardRecord, GradientRecord, OpRecord

__all__ = ["forward_records", "gradient_records", "of_each_kind", "record", "records"]


@functools.cache
def records() -> dict[str, OpRecord]:
    """Op -> its record, in alphabetical order."""
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_") and m.name != "record")
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    found = [r for m in modules for r in (m.RECORD, getattr(m, "GRADIENT", None)) if r]
    return {r.op: r for r in sorted(found, key=lambda r: r.op)}


def record(op: str) -> OpRecord:
    return records()[op]


def forward_records() -> list[ForwardRecord]:
    return [r for r in records().values() if isinstance(r, ForwardRecord)]


def gradient_records() -> list[GradientRecord]:
    return [r for r in records().values() if isinstance(r, GradientRecord)]


def of_each_kind() -> list[OpRecord]:
    """The first record of each kind of signature, for what frameworks do with a call whatever its op computes: forward
    or gradient, with optional arrays, with integer arrays, with outputs that an option asks for, with several."""
    kinds = {
        (
            r.spec.is_vjp,
            any(a.optional for a in r.spec.arrays),
            bool(r.spec.generators),
            any(o.wanted_by for o in r.spec.outputs),
            len(r.spec.outputs) > 1,
        ): r
        for r in reversed(records().values())
    }
    return list(kinds.values())[::-1]
