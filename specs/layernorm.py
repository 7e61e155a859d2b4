"""Layer normalisation over the last axis."""

from __future__ import annotations

from math import prod
from typing import Annotated, NamedTuple, TypeVar

from jaxtyping import Float

from portakern.options import Range
from portakern.spec import Tile, spec

A = TypeVar("A")


class LayernormOut(NamedTuple):
    y: Float[A, "*batch n"]


@spec(
    tiling={"block_rows": Tile(1, 256), "block_n": Tile(128, 16384)},
    or_float32=("weight", "bias"),
    flops=lambda call: 8.0 * prod(call.dims["batch"]) * call.dims["n"],
)
def layernorm(
    x: Float[A, "*batch n"],
    weight: Float[A, "n"] | None = None,
    bias: Float[A, "n"] | None = None,
    *,
    eps: Annotated[float, Range(0.0, typical=(1e-5, 1e-12, 1e-2))] = 1e-5,
) -> LayernormOut:
    """y = (x - mean) / sqrt(var + eps) * weight + bias over the last axis, var the mean squared deviation (Ba, Kiros, Hinton 2016, eq. 3-4).

    Args:
      x: (*batch, n).
      weight, bias: (n,), x's dtype or float32; None is 1 and 0.
      eps: added to the variance, >= 0.

    Returns:
      y: the shape and dtype of x. A row that holds inf or NaN is all NaN.
    """
    raise NotImplementedError


