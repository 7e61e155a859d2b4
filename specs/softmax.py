"""Softmax along one axis."""

from __future__ import annotations

from math import prod
from typing import Annotated, NamedTuple, TypeVar

from jaxtyping import Float

from portakern.options import Axis
from portakern.spec import Tile, spec

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


