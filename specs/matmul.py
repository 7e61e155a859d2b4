"""Matrix product, batched with broadcasting."""

from __future__ import annotations

from math import prod
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from jaxtyping import Float

from portakern.options import DType
from portakern.spec import Tile, spec

A = TypeVar("A")


class MatmulOut(NamedTuple):
    c: Float[A, "*batch m n"]


@spec(
    tiling={"block_m": Tile(16, 1024), "block_n": Tile(16, 1024), "block_k": Tile(16, 1024)},
    result_dtype={"c": "out_dtype"},
    empty={"k": {"c": 0.0}},
    flops=lambda call: 2.0 * prod(call.dims["batch"]) * call.dims["m"] * call.dims["n"] * call.dims["k"],
)
def matmul(
    a: Float[A, "*#batch m k"],
    b: Float[A, "*#batch k n"],
    *,
    precision: Literal["ieee", "tf32"] = "ieee",
    out_dtype: Annotated[Any, DType()] | None = None,
) -> MatmulOut:
    """c = a @ b, accumulated in float32 (float64 for float64) and rounded once.

    Args:
      a: (*batch, m, k); b: (*batch, k, n). The leading axes broadcast as NumPy's do.
      precision: for float32 operands: "ieee" keeps every product exact to float32, "tf32" lets the matrix unit keep 10 bits of each operand.
      out_dtype: dtype of c; None: that of a and b.

    Returns:
      c: (*batch, m, n). k = 0 gives zeros.
    """
    raise NotImplementedError


