"""Matrix product, batched with broadcasting."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from portakern.options import DType
from portakern.spec import Tile, spec
from portakern.tolerance import abs_matmul, magnitude, round_to, units

if TYPE_CHECKING:
    from portakern.call import Call

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


@matmul.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """B = E (1 + U) + U|c| + eta,  E = ((K+6) u + tf32) |A||B| + flush (sum_k |a| + sum_k |b|) + K tau.

    Sums in any order cost (K-1) u |A||B| and the products u (Higham, section 3.1); the rest of the 6 u is for split-k partial sums. tf32: both operands
    of a product are cut to 10 bits. flush: subnormal operands read as 0, each next to the other operand; tau: subnormal products and sums become 0.
    U and eta belong to the output's dtype. Where |A||B| reaches 2^127 a partial sum may overflow, and nothing is promised.
    """
    a, b = call.arrays["a"], call.arrays["b"]
    unit, k = units(call), call.dims["k"]
    with np.errstate(all="ignore"):
        flushed = unit.flush * (magnitude(a).sum(-1, keepdims=True) + magnitude(b).sum(-2, keepdims=True)) + k * unit.tau
        err = ((k + 6) * unit.u + unit.tf32) * abs_matmul(a, b, unit) + flushed
    return (round_to(err, ref[0], call.outputs["c"][1]),)
