"""Gradients of the cross entropy of the logits that a linear layer gives."""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Float32, Int

from portakern.spec import Tile, spec
from portakern.spec.options import Range
from portakern.spec.tolerance import KAPPA, magnitude, units
from portakern.specs._gradients import each_alone, stored_bounds, stored_spreads
from portakern.specs._rows import plant
from portakern.specs.cross_entropy import LABELS
from portakern.specs.linear_cross_entropy import (
    Logits,
    bracket_error,
    bracket_values,
    bracket_variance,
    lost,
    of_brackets,
    of_matmul,
    room,
    rows_of,
)

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class LinearCrossEntropyVjpOut(NamedTuple):
    d_hidden: Float[A, "*batch d"]
    d_weight: Float[A, "n d"]


@spec(
    tiling={"chunk_n": Tile(16, 65536, of="n")},
    require=(LABELS,),
    positive=("n", "d"),
    aliases={"d_hidden": "slope"},
    apart=lambda options, wants: ("batch",) if set(wants) == {"d_hidden"} else (),
    flops=lambda call: (
        (4.0 * call.dims["n"] * ("d_weight" in call.wants) + ("d_hidden" in call.wants))
        * prod(call.dims["batch"])
        * call.dims["d"]
    ),
)
def linear_cross_entropy_vjp(
    hidden: Float[A, "*batch d"],
    weight: Float[A, "n d"],
    labels: Int[A, "*batch"],
    lse: Float32[A, "*batch"],
    slope: Float[A, "*batch d"],
    d_loss: Float32[A, "*batch"],
    lse_low: Float32[A, "*batch"] | None = None,
    *,
    ignore_index: Annotated[int, Range(-(2**31), 2**31 - 1, typical=(-100, 0, -1))] = -100,
    label_smoothing: Annotated[float, Range(0.0, 1.0, typical=(0.0, 0.1))] = 0.0,
    z_loss: Annotated[float, Range(0.0, typical=(0.0, 1e-4))] = 0.0,
    precision: Literal["ieee", "tf32"] = "ieee",
) -> LinearCrossEntropyVjpOut:
    """d_hidden = d_loss slope and d_weight_j = sum of d_loss b_j h over all rows h of hidden, b as in
    linear_cross_entropy.

    Logits are taken again, as there, of ``chunk_n`` classes at a time: what a class needs of the others is in lse, so
    that all rows go into one sum, which is rounded once. d_loss b may be rounded to hidden's dtype, once.

    Taking logits again where gradients need them is Cut Cross-Entropy's way (Wijmans et al. 2024, "Cut your losses in
    large-vocabulary language models", section 4), here for one of the two.

    Args:
      hidden, weight, labels, ignore_index, label_smoothing, z_loss, precision: what linear_cross_entropy was given.
      lse, slope, lse_low: what it found, lse_low None being 0; d_loss: (*batch), the cotangent of its loss.

    Returns:
      d_hidden: the shape and dtype of hidden, 0 in rows that are ignored; d_weight: those of weight, to which an
      ignored row adds 0 times what is in it. Nothing is promised of d_weight where a logit, or d_loss b, may be beyond
      what hidden's dtype holds, or p beyond float32.
    """
    raise NotImplementedError


def brackets(call: Call, at: Logits) -> tuple[Call, np.ndarray]:
    """The call of cross_entropy_vjp whose gradient meets hidden, and its values: d_loss b, (rows, n)."""
    lse, d_loss, low = (call.arrays[name] for name in ("lse", "d_loss", "lse_low"))
    of = at.brackets(call, lse.reshape(-1), d_loss.reshape(-1), None if low is None else low.reshape(-1))
    return of, bracket_values(of)


@linear_cross_entropy_vjp.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bounds, each E (1 + U) + U |value| + eta in the gradient's dtype, with what linear_cross_entropy's have:

        d_hidden: E = u |d_hidden| + tau (|slope| + |d_loss| + 1)
        d_weight: matmul's, K the number of rows, for d_loss b as large as they may be, and sum E_b |h| beside it

    E_b is a bracket's there, for S = 0: lse is taken as it was saved. Where it may be off, S is what it is off by, and
    d_hidden has |d_loss| times what slope is off by more.
    """
    unit = units(call)
    found: list[Any] = [None, None]
    with np.errstate(all="ignore"):
        g, slope = call.arrays["d_loss"][..., None], call.arrays["slope"]
        if ref[0] is not None:
            err = unit.u * magnitude(ref[0]) + unit.tau * (magnitude(slope) + magnitude(g) + 1)
            err = err + (1 + 2 * unit.u) * np.where(g != 0, magnitude(g) * call.off.get("slope", 0.0), 0.0)
            small = [(x != 0) & (np.abs(x) < unit.tau) for x in (g, slope)]
            err = np.where((np.isinf(slope) & small[0]) | (np.isinf(g) & small[1]), inf, err)
            err = np.where(counted(call), err, 0.0)
            found[0] = stored_bounds(call, (ref[0], None), (err, None))[0]
        if ref[1] is not None:
            at = Logits.of(call)
            of, b = brackets(call, at)
            err = bracket_error(call, at, of, b, np.zeros(len(b)) + np.reshape(call.off.get("lse", 0.0), -1))
            found[1] = of_brackets(call, b.T, err.T, rows_of(call), ref[1])
    return tuple(found)


def counted(call: Call) -> np.ndarray:
    """Whether each row takes part, (*batch, 1)."""
    return np.asarray(call.arrays["labels"] != call.options["ignore_index"])[..., None]


@linear_cross_entropy_vjp.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS errors, with the symbols of linear_cross_entropy's and k = KAPPA u:

        d_hidden: store^2 + k^2 d_hidden^2          store: of storing it (``store_spread``)
        d_weight: s_c^2 + R sum (s_b^2 + d_loss^2 p^2 s_x^2) h^2          s_c: of the product alone

    R is the ``room`` for what the brackets of classes that are not ``lost`` draw.
    """
    found: list[Any] = [None, None]
    with np.errstate(all="ignore"):
        if ref[0] is not None:
            variance = np.where(counted(call), (KAPPA * units(call).u * magnitude(ref[0])) ** 2, 0.0)
            found[0] = stored_spreads(call, (ref[0], None), (variance, None))[0]
        if ref[1] is not None:
            at, h = Logits.of(call), rows_of(call)
            of, b = brackets(call, at)
            product = of_matmul(call, "spread", b.T, h, ref[1])
            rounds, moved = bracket_variance(call, at, of, b)
            variance = rounds + moved
            unknown = (np.isinf(variance).any(0, keepdims=True) | lost(call, b, 0)).T
            met = np.where(unknown, 0.0, variance.T) @ magnitude(h) ** 2
            found[1] = np.where(unknown, inf, np.sqrt(product**2 + room(call, np.where(unknown, 0.0, b.T)) * met))
    return tuple(found)


@linear_cross_entropy_vjp.exact
def exact(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """An ignored row of d_hidden is 0, whatever its slope and its cotangent are."""
    return None if ref[0] is None else np.broadcast_to(~counted(call), ref[0].shape), None


@linear_cross_entropy_vjp.edge(dims={"n": (2, 140), "d": (1, 40)})
def ignored_rows_of_nan_cotangents(arrays, rng, options):
    """NaN and infinities in the cotangent of an ignored row reach nothing."""
    arrays["d_loss"][arrays["labels"] == options["ignore_index"]] = rng.choice([np.nan, inf])


@linear_cross_entropy_vjp.edge(dims={"n": (2, 140), "d": (1, 40)})
def infinite_rows(arrays, rng, options):
    """An infinity or NaN in a row of hidden makes NaN of each class's gradient where it lies."""
    plant(rng, arrays["hidden"], rng.choice([inf, np.nan]))


@linear_cross_entropy_vjp.edge(dims={"n": (2, 140), "d": (1, 40)})
def nan_or_inf_in_cotangents(arrays, rng, options):
    """A NaN makes a row of d_hidden NaN, and all of d_weight; an infinity gives infinities by the sign."""
    arrays["d_loss"][rng.random(arrays["d_loss"].shape) < 0.5] = rng.choice([np.nan, inf, -inf])


@linear_cross_entropy_vjp.edge(dims={"batch": (17, 40), "n": (129, 300), "d": (17, 33)}, smallest_tiles=True)
def several_chunks(arrays, rng, options):
    """Chunks of classes of which the last is ragged; labels among them all."""
    labels, n = arrays["labels"], len(arrays["weight"])  # which may be less where kernels are emulated
    ends = [label for label in (0, 15, 16, 127, 128) if label < n]
    labels[...] = np.where(labels == options["ignore_index"], labels, rng.choice(ends, labels.shape))


@linear_cross_entropy_vjp.edge(dims={"batch": (1, 1), "n": (33, 70), "d": (1, 20)},
                               options={"label_smoothing": 0.3, "ignore_index": 0}, smallest_tiles=True)  # fmt: skip
def an_ignored_class_in_the_first_chunk(arrays, rng, options):
    """Label 16 is the first of its chunk, and not the ignored label 0; all classes share the target."""
    arrays["labels"][...] = 16


@linear_cross_entropy_vjp.edge(dims={"n": (2, 140), "d": (1, 40)}, options={"z_loss": 0.5})
def a_heavy_z_loss(arrays, rng, options):
    """2 z lse is most of what p meets."""


@linear_cross_entropy_vjp.edge(dims={"n": (1, 1), "d": (1, 40)})
def one_class(arrays, rng, options):
    """The only class is certain."""


@linear_cross_entropy_vjp.edge(dims={"batch": (1, 9), "n": (2, 40), "d": (1, 40)}, options={"precision": "tf32"})
def products_of_10_bits(arrays, rng, options):
    """precision counts where products are of float32."""


def drawn(draw):
    """Arrays of a call whose logits are small integers and whose p is no subnormal number, in any dtype."""
    rows, n, d = draw.extent(1, 40), draw.extent(2, 60), draw.extent(1, 3)
    h, w, slope = draw.integers(-1, 1, rows, d), draw.integers(-1, 1, n, d), draw.normal(rows, d)
    labels, wide = draw.integers(0, n - 1, rows, dtype="int64"), "float64" if draw.dtype == "float64" else "float32"
    lse, d_loss = draw.integers(2, 4, rows, dtype=wide), draw.integers(64, 99, rows, dtype=wide)
    return h, w, labels, lse, slope, d_loss


@linear_cross_entropy_vjp.law
def rows_are_independent(run, draw):
    """A row of d_hidden alone has the same bits as among others."""
    h, w, labels, lse, slope, d_loss = drawn(draw)
    first = draw.extent(0, len(h) - 1)
    row = slice(first, first + 1)
    alone = run(h[row], w, labels[row], lse[row], slope[row], d_loss[row])[0]
    draw.same_bits(alone, run(h, w, labels, lse, slope, d_loss)[0][row], "a row alone")


@linear_cross_entropy_vjp.law
def gradients_do_not_depend_on_which_are_wanted(run, draw):
    """Each gradient, asked for alone, has the same bits."""
    each_alone(run, draw, ("d_hidden", "d_weight"), drawn(draw))


@linear_cross_entropy_vjp.law
def powers_of_two_scale_exactly(run, draw):
    """A cotangent that is doubled doubles both gradients, to the bit."""
    *arrays, d_loss = drawn(draw)
    two = arrays[0].dtype.type(2)
    for name, twice, once in zip(("d_hidden", "d_weight"), run(*arrays, d_loss * 2), run(*arrays, d_loss), strict=True):
        draw.same_bits(twice, once * two, f"{name} of a cotangent doubled")


@linear_cross_entropy_vjp.law
def the_target_is_subtracted(run, draw):
    """Where p is 0 what is left is the target: -d_loss times the only row that picks a class, to the bit."""
    n, d = draw.extent(2, 200), draw.extent(1, 40)
    rows = min(n, draw.extent(1, 40))
    h, w = draw.integers(-8, 8, rows, d), draw.integers(-1, 1, n, d)
    labels = np.random.default_rng(rows).permutation(n)[:rows].astype(np.int64)
    wide = "float64" if draw.dtype == "float64" else "float32"
    lse, d_loss = np.full(rows, 1000, wide), draw.integers(1, 9, rows, dtype=wide)
    got = run(h, w, labels, lse, h, d_loss)[1]
    want = np.zeros((n, d))
    want[labels] = -d_loss[:, None].astype(np.float64) * h.astype(np.float64)
    draw.same_bits(got + 0, want.astype(got.dtype) + 0, "the target alone")  # a zero of either sign
