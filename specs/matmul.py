"""Matrix product, batched with broadcasting, and its gradients.

c = a b, and d_a = d_c b^T, d_b = a^T d_c.
"""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from portakern.spec import Tile, spec
from portakern.spec.options import DType
from portakern.spec.tolerance import abs_matmul, dot_spread, magnitude, round_to, store_spread, units
from portakern.specs._gradients import doubled, each_alone

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
    sums={"k": "c"},
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

    def integral(x: np.ndarray) -> np.ndarray:
        kept = x == np.trunc(x)
        if unit.tf32:
            mantissa, _ = np.frexp(x)
            kept &= mantissa * 2**11 == np.trunc(mantissa * 2**11)
        return kept & np.isfinite(x)

    rows, columns = integral(a).all(-1, keepdims=True), integral(b).all(-2, keepdims=True)
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


# ---------------------------------------------------------------------------------------------------------- gradient
class MatmulVjpOut(NamedTuple):
    d_a: Float[A, "*#batch m k"]
    d_b: Float[A, "*#batch k n"]


@spec(
    tiling={"block_m": Tile(16, 2048, of="m"), "block_n": Tile(16, 2048, of="n"), "block_k": Tile(16, 4096, of="k")},
    own_dtype=("d_c",),
    gradient_dtype=("d_a", "d_b"),
    apart=lambda options, wants: ("k", *(["m"] if "d_b" not in wants else []), *(["n"] if "d_a" not in wants else [])),
    flops=lambda call: (
        2.0 * len(call.wants) * prod(call.dims["batch"]) * call.dims["m"] * call.dims["n"] * call.dims["k"]
    ),
)
def matmul_vjp(
    a: Float[A, "*#batch m k"],
    b: Float[A, "*#batch k n"],
    d_c: Float[A, "*batch m n"],
    *,
    precision: Literal["ieee", "tf32"] = "ieee",
) -> MatmulVjpOut:
    """d_a = d_c b^T and d_b = a^T d_c, accumulated in float32 and rounded once.

    Each is summed over the batch axes along which its operand was broadcast. A batch axis that is summed is one more
    factor of the contraction: with it folded in beside n (d_a) or m (d_b), each gradient is one matrix product.

    Args:
      a: (*batch, m, k); b: (*batch, k, n), as in matmul.
      d_c: (*batch, m, n), the cotangent of c, of any float dtype. A product of two dtypes is taken in float32, or in
        float64 where one of them is.
      precision: for float32 products, as in matmul.

    Returns:
      d_a, d_b: the shape and dtype of a and of b.
    """
    raise NotImplementedError


def product_dtype(call: Call) -> str:
    """The dtype in which a product of d_c and another operand is taken: theirs, or the least that holds both."""
    dtypes = {call.dtype, call.dtype_of("d_c")}
    return dtypes.pop() if len(dtypes) == 1 else "float64" if "float64" in dtypes else "float32"


def batch_axes(call: Call, name: str) -> tuple[list[int], list[int]]:
    """The batch axes that a gradient keeps, and those over which it is summed: missing from it or of extent 1."""
    rank, shape = len(call.dims["batch"]), call.outputs[name][0]
    own = (1,) * (rank + 2 - len(shape)) + shape[:-2]
    return [i for i, extent in enumerate(own) if extent != 1], [i for i, extent in enumerate(own) if extent == 1]


def folded(call: Call, name: str) -> Call:
    """The matmul that gives ``name``: left (*kept, i, K) @ right (*kept, K, j) -> (*kept, i, j).

    The result is the gradient without its axes of extent 1. K runs over the batch axes along which the operand was
    broadcast and, innermost, over n (d_a) or m (d_b). Like all calls here, it is of float64 arrays.
    """
    batch, (shape, dtype) = call.dims["batch"], call.outputs[name]
    a, b, d_c = (np.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (call.arrays[n] for n in ("a", "b", "d_c")))
    left, right = (d_c, np.swapaxes(b, -1, -2)) if name == "d_a" else (np.swapaxes(a, -1, -2), d_c)
    own, row, column = (1,) * (len(batch) + 2 - len(shape)) + shape[:-2], len(batch), len(batch) + 1
    kept, summed = ([axis for axis, extent in enumerate(own) if (extent == 1) == one] for one in (False, True))
    extents = [own[axis] for axis in kept]
    left = left.transpose(*kept, row, *summed, column).reshape(*extents, left.shape[-2], -1)
    right = right.transpose(*kept, *summed, row, column).reshape(*extents, -1, right.shape[-1])
    dims = {"batch": left.shape[:-2], "m": left.shape[-2], "k": left.shape[-1], "n": right.shape[-1]}
    return call.replace(
        spec=matmul,
        arrays={"a": left, "b": right},
        options={"precision": call.options["precision"], "out_dtype": dtype},
        dims=dims,
        dtype=product_dtype(call),
        wants=("c",),
        given=None,
    )


def _as_products(call: Call, ref: tuple[Any, ...], measure: str) -> tuple[Any, ...]:
    """What matmul's ``measure`` says of each wanted gradient."""
    found: list[Any] = []
    for o, exact_value in zip(call.spec.outputs, ref, strict=True):
        if exact_value is None:
            found.append(None)
            continue
        product = folded(call, o.name)
        (value,) = getattr(product.spec, measure)(product, (exact_value.reshape(product.outputs["c"][0]),))
        found.append(value.reshape(exact_value.shape))
    return tuple(found)


@matmul_vjp.tolerance
def bound_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Each gradient is one matmul (:func:`folded`) and has matmul's bound.

    Its K is n (d_a) or m (d_b) times the batch entries that are summed. u, tf32 and flush are those of the dtype in
    which products are taken (:func:`product_dtype`), U and eta those of the gradient's. Adding up batch entries after
    their products, in float32, is one more order of the same sum.
    """
    return _as_products(call, ref, "bound")


@matmul_vjp.sigma
def sigma_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """That of the :func:`folded` matmul."""
    return _as_products(call, ref, "spread")


@matmul_vjp.exact
def exact_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Integers whose sums the accumulator holds, as in the :func:`folded` matmul."""
    return _as_products(call, ref, "forced")


def _one_hot(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Zeros but for a one in each row, where tiles begin and end."""
    beside_tiles = (p + s for p in (16, 32, 64, 128, 256) for s in (-1, 0))
    edges = [i for i in {0, shape[-1] - 1, *beside_tiles} if 0 <= i < shape[-1]]
    values = np.zeros(shape)
    np.put_along_axis(values, rng.choice(edges, (*shape[:-1], 1)), 1.0, -1)
    return values


@matmul_vjp.edge(dims={"batch": (2, 5), "m": (1, 20), "k": (1, 20), "n": (1, 20)})
def batches_that_are_summed(arrays, rng, options):
    """An operand that is broadcast along a batch axis, missing or of extent 1, has a gradient summed along it."""


@matmul_vjp.edge(dims={"batch": (3, 6), "m": (1, 6), "k": (1, 6), "n": (1, 6)}, regime="integers")
def many_batches_of_integers(arrays, rng, options):
    """Sums over batches are exact: an entry that is dropped or counted twice shows."""


@matmul_vjp.edge(dims={"m": (1, 40), "k": (1, 40), "n": (1, 40)})
def nan_and_inf_in_a_cotangent(arrays, rng, options):
    """A NaN in d_c reaches a row of d_a and a column of d_b alone."""
    d_c = arrays["d_c"]
    d_c[..., rng.integers(d_c.shape[-2]), rng.integers(d_c.shape[-1])] = rng.choice([np.nan, inf])


@matmul_vjp.edge(dims={"m": (1, 40), "k": (1, 140), "n": (1, 40)})
def zero_times_inf_vjp(arrays, rng, options):
    """0 * inf is NaN: no product is left out."""
    j = rng.integers(arrays["b"].shape[-1])
    arrays["d_c"][..., j], arrays["b"][..., j] = 0, inf


@matmul_vjp.edge(dims={"k": (1, 1)})
def outer_products(arrays, rng, options):
    """k = 1: gradients of a single column and a single row."""


@matmul_vjp.edge(dims={"m": (1, 1), "n": (1, 300), "k": (1, 300)})
def one_row(arrays, rng, options):
    """m = 1: each element of d_b is one product of each batch entry."""


@matmul_vjp.edge(dims={"n": (129, 300), "m": (2, 20), "k": (2, 20)}, regime="integers")
def exact_integers_vjp(arrays, rng, options):
    """Sums of small integers are exact."""


@matmul_vjp.edge(dims={"n": (129, 300), "m": (1, 30), "k": (1, 30)}, regime="integers")
def one_hot_rows_at_tile_borders_vjp(arrays, rng, options):
    """A dropped or repeated step along n shows in d_a as a missing or doubled row of b."""
    arrays["d_c"][...] = _one_hot(rng, arrays["d_c"].shape)


@matmul_vjp.edge(dims={"m": (129, 300), "n": (1, 30), "k": (1, 30)}, regime="integers")
def one_hot_columns_at_tile_borders(arrays, rng, options):
    """The same along m, in d_b."""
    columns = np.swapaxes(arrays["d_c"], -1, -2)
    columns[...] = _one_hot(rng, columns.shape)


@matmul_vjp.edge(dims={"batch": (1, 3), "m": (1, 40), "k": (1, 40), "n": (1, 40)}, options={"precision": "tf32"})
def products_of_10_bits(arrays, rng, options):
    """precision counts where products are of float32."""


@matmul_vjp.edge(dims={"m": (80, 150), "k": (33, 70), "n": (1, 20)}, smallest_tiles=True)
def many_tiles_both_ways_vjp(arrays, rng, options):
    """However tiles are numbered, each is computed once."""


@matmul_vjp.law
def rows_and_batches_are_independent_vjp(run, draw):
    """One row of one batch entry of d_a, alone, has the same bits as among others."""
    m, k, n = draw.extent(2, 140), draw.extent(1, 70), draw.extent(1, 140)
    a, b, d_c = draw.normal(2, m, k), draw.normal(2, k, n), draw.normal(2, m, n)
    first = draw.extent(0, m - 1)
    row = slice(first, first + 1)
    draw.same_bits(run(a[1:, row], b[1:], d_c[1:, row])[0], run(a, b, d_c)[0][1:, row], "a row alone")


@matmul_vjp.law
def gradients_do_not_depend_on_which_are_wanted(run, draw):
    """Each gradient, asked for alone, has the same bits."""
    m, k, n = draw.extent(1, 70), draw.extent(1, 70), draw.extent(1, 70)
    arrays = draw.normal(2, m, k), draw.normal(k, n), draw.normal(2, m, n)
    each_alone(run, draw, ("d_a", "d_b"), arrays)


@matmul_vjp.law
def identity_vjp(run, draw):
    """A cotangent that is the identity makes d_a = b^T and d_b = a^T, to the bit."""
    m, k = draw.extent(1, 70), draw.extent(1, 140)
    a, b = draw.normal(m, k), draw.normal(k, m)
    d_a, d_b = run(a, b, np.eye(m).astype(a.dtype))
    draw.same_bits(d_a, b.T, "d_a of the identity")
    draw.same_bits(d_b, a.T, "d_b of the identity")


@matmul_vjp.law
def powers_of_two_scale_exactly_vjp(run, draw):
    """A cotangent that is doubled doubles both gradients, to the bit."""
    m, k, n = draw.extent(1, 70), draw.extent(1, 70), draw.extent(1, 140)
    a, b, d_c = draw.normal(m, k), draw.normal(k, n), draw.normal(m, n)
    doubled(lambda d_c: run(a, b, d_c), draw, ("d_a", "d_b"), d_c)


@matmul_vjp.law
def an_axis_of_1_is_a_missing_axis(run, draw):
    """Both are broadcast, and both gradients are the same sum."""
    m, k, n, batch = draw.extent(1, 40), draw.extent(1, 40), draw.extent(1, 40), draw.extent(1, 5)
    a, b, d_c = draw.normal(m, k), draw.normal(batch, k, n), draw.normal(batch, m, n)
    draw.same_bits(run(a[None], b, d_c)[0][0], run(a, b, d_c)[0], "an axis of 1 in place of none")
