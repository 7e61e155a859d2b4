"""Softmax along one axis."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from portakern.options import Axis
from portakern.spec import Tile, spec
from portakern.tolerance import chain, round_to, units

if TYPE_CHECKING:
    from portakern.call import Call

A = TypeVar("A")


class SoftmaxOut(NamedTuple):
    y: Float[A, "*shape"]


@spec(
    tiling={"block_rows": Tile(1, 256), "block_n": Tile(128, 16384)},
    flops=lambda call: 5.0 * prod(call.dims["shape"]),
)
def softmax(x: Float[A, "*shape"], *, axis: Annotated[int, Axis("x")] = -1) -> SoftmaxOut:
    """y = exp(x - max x) / sum exp(x - max x) along ``axis``, in float32 (float64 for float64).

    Args:
      x: any shape with at least one axis.
      axis: the axis that sums to 1.

    Returns:
      y: the shape and dtype of x. A row that holds NaN or +inf, or nothing but -inf, is all NaN.
    """
    raise NotImplementedError


@softmax.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """B = E (1 + U) + U y + eta,  E = y [4u (d + H) + 2 ex + (c_N + 8) u],  d = m - x, H = sum y d.

    x - m rounds by u d, and exp of it, taken as exp2 of a product with log2(e), errs by 4 u d + ex. The sum carries the average of that, 4 u H + ex, plus
    its chain of c_N additions; the division and whatever else a row passes through are within 8 u. exp(-d) below tau may be 0: the sum is at least 1, so
    eta covers it. A flushed subnormal x moves d by less than any of these.
    """
    x, y, axis, unit = call.arrays["x"], ref[0], call.options["axis"], units(call)
    with np.errstate(all="ignore"):
        d = np.where(y > 0, x.max(axis, keepdims=True, initial=-np.inf) - x, 0.0)
        entropy = (y * d).sum(axis, keepdims=True)
        err = y * (4 * unit.u * (d + entropy) + 2 * unit.ex + (chain(x.shape[axis]) + 8) * unit.u)
    return (round_to(err, y, call.dtype),)
