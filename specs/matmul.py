"""Matrix product, batched with broadcasting."""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from portakern.spec import Tile, spec
from portakern.spec.options import DType
from portakern.spec.tolerance import abs_matmul, dot_spread, magnitude, round_to, store_spread, units

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class MatmulOut(NamedTuple):
    c: Float[A, "*batch m n"]


@spec(
    tiling={"block_m": Tile(16, 2048, of="m"), "block_n": Tile(16, 2048, of="n"), "block_k": Tile(16, 4096, of="k")},
    result_dtype={"c": "out_dtype"},
    empty={"k": {"c": 0.0}},
    apart=("batch", "m", "n"),
    vjp="matmul_vjp",
    autocast="lower",
    typical={"m": 4096, "n": 4096, "k": 4096},
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
      precision: for float32 operands: "ieee" keeps every product exact to float32, "tf32" lets the matrix unit keep 10
        bits of each operand, of which the largest, from 2^128 - 2^116 on, then may be infinite: what they are
        multiplied with is not promised.
      out_dtype: dtype of c; None: that of a and b.

    Returns:
      c: (*batch, m, n). k = 0 gives zeros.
    """
    raise NotImplementedError


@matmul.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bound of c, a sum of K = k products, with :class:`portakern.spec.tolerance.Units`:

        B = E (1 + U) + U |c| + eta
        E = ((K+6) u + tf32) |A| |B| + flush (sum_k |a| + sum_k |b|) + K tau

    Sums in any order cost (K-1) u |A| |B| and the products u (Higham, section 3.1); the rest of the 6 u is for split-k
    partial sums. tf32: both operands of a product are cut to 10 bits. flush: subnormal operands read as 0, each next to
    the other operand; tau: subnormal products and sums become 0. U and eta belong to the output's dtype. Where |A| |B|
    reaches 2^127 a partial sum may overflow, and where an operand is beyond tf32's range it may be read as infinite
    (:data:`portakern.spec.tolerance.TF32_END`): nothing is promised.
    """
    a, b = call.arrays["a"], call.arrays["b"]
    unit, k = units(call), call.dims["k"]
    with np.errstate(all="ignore"):
        operands = magnitude(a).sum(-1, keepdims=True) + magnitude(b).sum(-2, keepdims=True)
        flushed = unit.flush * operands + k * unit.tau
        err = ((k + 6) * unit.u + unit.tf32) * abs_matmul(a, b, unit) + flushed
    return (round_to(err, ref[0], call.outputs["c"][1]),)


@matmul.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """sigma^2 = store^2 + x c^2 + y (A^2 @ B^2) + flush^2 (sum_k a^2 + sum_k b^2), the RMS error of c.

    store is that of storing c (``store_spread``), x and y are those of a dot of K products (``dot_spread``), A^2 and
    B^2 are squared element by element.
    """
    a, b, c, unit = call.arrays["a"], call.arrays["b"], magnitude(ref[0]), units(call)
    x, y = dot_spread(call, call.dims["k"])
    with np.errstate(all="ignore"):
        a2, b2 = np.square(magnitude(a)), np.square(magnitude(b))
        operands = a2.sum(-1, keepdims=True) + b2.sum(-2, keepdims=True)
        variance = x * np.square(c) + y * (a2 @ b2) + unit.flush**2 * operands
        return (np.hypot(store_spread(c, call.outputs["c"][1]), np.sqrt(variance)),)


@matmul.exact
def exact(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Rows and columns of integers whose |A| |B| < 1/u.

    Every product and every partial sum of them, in any order, is an integer that the accumulator holds. Under tf32 the
    operands must keep their value when cut to 10 bits, that is 11 significant ones.
    """
    a, b, unit = call.arrays["a"], call.arrays["b"], units(call)

    def whole(x: np.ndarray) -> np.ndarray:
        kept = x == np.trunc(x)
        if unit.tf32:
            mantissa, _ = np.frexp(x)
            kept &= mantissa * 2**11 == np.trunc(mantissa * 2**11)
        return kept & np.isfinite(x)

    rows, columns = whole(a).all(-1, keepdims=True), whole(b).all(-2, keepdims=True)
    if not (rows.any() and columns.any()):
        return (np.zeros(ref[0].shape, bool),)
    return (rows & columns & (abs_matmul(a, b, unit) < 1 / unit.u),)


@matmul.edge(dims={"m": (1, 40), "k": (1, 140), "n": (1, 40)})
def nan_and_inf_in_a_row(arrays, rng, options):
    """NaN and inf in a row of a reach that row of c alone."""
    a = arrays["a"]
    a[..., rng.integers(a.shape[-2]), rng.integers(a.shape[-1])] = rng.choice([np.nan, inf])


@matmul.edge(dims={"m": (1, 40), "k": (1, 140), "n": (1, 40)})
def zero_times_inf(arrays, rng, options):
    """0 * inf is NaN: no product is left out."""
    j = rng.integers(arrays["a"].shape[-1])
    arrays["a"][..., j], arrays["b"][..., j, :] = 0, inf


@matmul.edge(dims={"k": (1, 1)})
def one_product(arrays, rng, options):
    """k = 1."""


@matmul.edge(dims={"m": (1, 1), "n": (1, 1), "k": (1, 300)})
def one_element(arrays, rng, options):
    """A dot product."""


@matmul.edge(dims={"k": (129, 300), "m": (2, 20), "n": (2, 20)}, regime="integers")
def exact_integers(arrays, rng, options):
    """Sums of small integers are exact."""


@matmul.edge(dims={"k": (129, 300)}, regime="spikes")
def one_hot_rows_at_tile_borders(arrays, rng, options):
    """A dropped or repeated step of k shows as a missing or doubled spike."""
    arrays["b"][...] = rng.integers(1, 5, arrays["b"].shape)


@matmul.edge(dims={"batch": (2, 3), "m": (1, 20), "n": (1, 20), "k": (1, 40)}, options={"out_dtype": "float32"})
def another_output_dtype(arrays, rng, options):
    """c in float32 is rounded once, from the accumulator."""


@matmul.edge(dims={"m": (129, 140), "n": (17, 29), "k": (1, 20)}, smallest_tiles=True)
def many_tiles_both_ways(arrays, rng, options):
    """However tiles are numbered, each is computed once.

    9 rows of tiles of 16 leave a last group of one for groups of 2, 4 and 8.
    """


@matmul.law
def rows_and_batches_are_independent(run, draw):
    """One row of one batch entry, alone, gives the same bits as among others."""
    m, k, n = draw.extent(2, 140), draw.extent(1, 140), draw.extent(1, 140)
    a, b = draw.normal(2, m, k), draw.normal(2, k, n)
    row = draw.extent(0, m - 1)
    draw.same_bits(run(a[1:, row : row + 1], b[1:]), run(a, b)[1:, row : row + 1], "a row alone")


@matmul.law
def identity(run, draw):
    """a I = a, to the bit."""
    a = draw.normal(draw.extent(1, 70), draw.extent(1, 140))
    draw.same_bits(run(a, np.eye(a.shape[1]).astype(a.dtype)), a, "a times the identity")


@matmul.law
def powers_of_two_scale_exactly(run, draw):
    """(2 a) b = 2 (a b), to the bit."""
    a = draw.normal(draw.extent(1, 70), draw.extent(1, 140))
    b = draw.normal(a.shape[1], draw.extent(1, 70))
    draw.same_bits(run(a * a.dtype.type(2), b), run(a, b) * a.dtype.type(2), "a doubled")


matmul.sample("one_product", dims={"batch": (), "m": 3, "n": 4, "k": 5})
matmul.sample("broadcast_batch", dims={"batch": (2,), "m": 3, "n": 4, "k": 5}, stretched={"b": ("batch",)})
matmul.sample("float32_result", dims={"batch": (), "m": 3, "n": 4, "k": 5}, options={"out_dtype": "float32"})
