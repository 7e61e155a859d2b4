"""What the specs of gradients share: how errors are stored, and laws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from portakern.spec.tolerance import round_to, store_spread

if TYPE_CHECKING:
    from portakern.core.call import Call


def stored_bounds(call: Call, ref: tuple[Any, ...], errors: Sequence[Any]) -> tuple[Any, ...]:
    """The bounds on the gradients as they are stored, from those before; None for one that is not wanted."""
    return tuple(
        None if y is None else round_to(err, y, dtype)
        for err, y, (_, dtype) in zip(errors, ref, call.outputs.values(), strict=True)
    )


def stored_spreads(call: Call, ref: tuple[Any, ...], variances: Sequence[Any]) -> tuple[Any, ...]:
    """The RMS errors of the gradients as they are stored, from the variances before; None for an unwanted one."""
    return tuple(
        None if y is None else np.hypot(store_spread(y, dtype), np.sqrt(variance))
        for variance, y, (_, dtype) in zip(variances, ref, call.outputs.values(), strict=True)
    )


def row_alone(run: Callable[..., Any], draw: Any, *, weighted: bool) -> None:
    """The law of a gradient along rows: a row of the first one has the same bits alone and among others."""
    rows, n = draw.extent(2, 40), draw.extent(1, 300)
    x, d_y = draw.normal(rows, n), draw.normal(rows, n)
    weight = (draw.normal(n),) if weighted else ()
    first = draw.extent(0, rows - 1)
    row = slice(first, first + 1)
    draw.same_bits(run(x[row], d_y[row], *weight)[0], run(x, d_y, *weight)[0][row], "a row alone")


def each_alone(run: Callable[..., Any], draw: Any, names: Sequence[str], arrays: Sequence[Any]) -> None:
    """The law that each gradient, asked for alone, has the same bits as among all."""
    for i, (name, together) in enumerate(zip(names, run(*arrays), strict=True)):
        draw.same_bits(run(*arrays, wants=(name,))[i], together, f"{name} alone")


def doubled(bound: Callable[[Any], tuple[Any, ...]], draw: Any, names: Sequence[str], cotangent: Any) -> None:
    """The law that a doubled cotangent doubles every gradient, to the bit. ``bound`` gives those of a cotangent."""
    two, cotangent = cotangent.dtype.type(2), cotangent * cotangent.dtype.type(64)  # far from subnormal results
    for name, twice, once in zip(names, bound(cotangent * two), bound(cotangent), strict=True):
        draw.same_bits(twice, once * two, f"{name} of a cotangent doubled")
