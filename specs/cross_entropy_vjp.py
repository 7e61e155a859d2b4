"""Gradient of the cross entropy of logits with integer labels."""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Float32, Int

from portakern.spec import Tile, spec
from portakern.spec.options import Range
from portakern.spec.tolerance import KAPPA, Units, magnitude, round_to, store_spread, units
from portakern.specs._rows import plant
from portakern.specs.cross_entropy import LABELS, Parts

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class CrossEntropyVjpOut(NamedTuple):
    d_logits: Float[A, "*batch n"]


@spec(
    tiling={"block_rows": Tile(1, 256), "block_n": Tile(128, 65536, of="n")},
    require=(LABELS,),
    positive=("n",),
    aliases={"d_logits": "logits"},
    apart=("batch",),
    flops=lambda call: 6.0 * prod(call.dims["batch"]) * call.dims["n"],
)
def cross_entropy_vjp(
    logits: Float[A, "*batch n"],
    labels: Int[A, "*batch"],
    lse: Float32[A, "*batch"],
    d_loss: Float32[A, "*batch"],
    lse_low: Float32[A, "*batch"] | None = None,
    *,
    ignore_index: Annotated[int, Range(-(2**31), 2**31 - 1, typical=(-100, 0, -1))] = -100,
    label_smoothing: Annotated[float, Range(0.0, 1.0, typical=(0.0, 0.1))] = 0.0,
    z_loss: Annotated[float, Range(0.0, typical=(0.0, 1e-4))] = 0.0,
) -> CrossEntropyVjpOut:
    """d_logits_j = d_loss [p_j (1 + 2 z lse) - (1 - e) [j = t] - e / n], p = exp(min(logits - lse - lse_low, 0)).

    With t the label, e = label_smoothing and z = z_loss; in float32, in float64 for float64.

    Args:
      logits, labels, ignore_index, label_smoothing, z_loss: what cross_entropy was given.
      lse, lse_low: (*batch), what it found, lse_low None being 0; d_loss: (*batch), the cotangent of its loss.

    Returns:
      d_logits: the shape and dtype of logits, 0 in rows that are ignored. An infinite lse makes p 0, and NaN beside a
      logit of the same infinity.
    """
    raise NotImplementedError


def apart_of(x: np.ndarray, lse: np.ndarray, low: np.ndarray | None) -> np.ndarray:
    """x - lse - lse_low of logits x, (*batch, n)."""
    apart = x - lse[..., None]
    return np.asarray(apart if low is None else apart - low[..., None])


def sum_error(call: Call, unit: Units) -> np.ndarray:
    """How far lse + lse_low of a forward call may be off, (*batch): what log l is, and what two numbers lose of it."""
    part = Parts.of(call)
    return np.asarray(part.log_error(unit, call.dims["n"]) + 16 * unit.u**2 * magnitude(part.lse))


class Bracket(NamedTuple):
    """What d_loss meets, (*batch, n).

    Attributes:
      value; err: how far it may be off. p; d: |x - lse - lse_low|, 0 where p is. w: 1 + 2 z |lse|, (*batch, 1). hit:
      the target's
        share at each class. g: d_loss, (*batch, 1). counted: whether a row takes part, (*batch, 1).
    """

    value: np.ndarray
    err: np.ndarray
    p: np.ndarray
    d: np.ndarray
    w: np.ndarray
    hit: np.ndarray
    g: np.ndarray
    counted: np.ndarray

    @classmethod
    def of(cls, call: Call) -> Bracket:
        x, labels, lse, g = (call.arrays[name] for name in ("logits", "labels", "lse", "d_loss"))
        e, z, n, unit = call.options["label_smoothing"], call.options["z_loss"], call.dims["n"], units(call)
        apart = apart_of(x, lse, call.arrays["lse_low"])
        p = np.exp(np.minimum(apart, 0.0))
        d = np.where(p > 0, magnitude(apart), 0.0)
        w = (1 + 2 * z * magnitude(lse))[..., None]
        hit = (1 - e) * (np.arange(n) == labels[..., None]) + e / n
        value = p * (1 + 2 * z * lse if z else np.ones(lse.shape))[..., None] - hit
        err = magnitude(p) * w * (5 * unit.u * d + unit.ex + 6 * unit.u) + 4 * unit.u * hit + unit.tau * (3 + w)
        if "lse" in call.off:
            off, shift = (np.nan_to_num(a, nan=inf)[..., None] for a in (call.off["lse"], sum_error(call, unit)))
            moved = np.minimum(p * np.expm1(np.minimum(shift, 700.0)), np.maximum(p, 1 - p))
            err = err * (1 + np.minimum(shift, 1)) + moved * w + (2 * z * off * (p + moved) if z else 0.0)
        return cls(value, err, p, d, w, hit, g[..., None], (labels != call.options["ignore_index"])[..., None])

    def overflows(self, unit: Units) -> np.ndarray:
        """Where p W is beyond what is summed in, though it is finite here."""
        large = magnitude(self.p) * self.w
        return np.asarray(np.isfinite(large) & (large >= unit.huge))


@cross_entropy_vjp.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bound of d_logits, with d = x - lse - lse_low, W = 1 + 2 z |lse|, hit = (1 - e) [j = t] + e / n and
    :class:`portakern.spec.tolerance.Units`:

        B = E (1 + U) + U |d_logits| + eta
        E = |d_loss| [p W (5u |d| + ex + 6u) + 4u hit + 3u |bracket| + tau (3 + W)] + tau (|bracket| + 1)

    d rounds by u of itself, twice, and is then the argument of exp, which errs by 3u of that and ex; W is two
    products and a
    sum, and meets p; the target's share is a sum or a quotient that is rounded; two differences and the product with
    d_loss are 3u of the bracket. lse and lse_low are taken as they were saved; where they may be off, so that their sum
    is by s (:func:`sum_error`), p moves by m = min(p (e^s - 1), max(p, 1 - p)), the bracket by m W, and by 2 z (p + m)
    times what lse is off by.

    Nothing is promised where d_loss W reaches 2^127, or p W, which is at most W where lse is that of the row but not
    where it is another's, nor where an infinite d_loss meets a bracket that may be of either sign.
    """
    unit = units(call)
    with np.errstate(all="ignore"):
        at = Bracket.of(call)
        value, g = magnitude(at.value), magnitude(at.g)
        inner = at.err + 3 * unit.u * (value + magnitude(at.p) * at.w + at.hit)
        err = g * inner + unit.tau * (value + 1)
        unsure = (g * at.w >= unit.huge) | at.overflows(unit) | (np.isinf(at.g) & (value <= inner))
        err = np.where(at.counted, np.where(unsure, inf, err), 0.0)
    return (round_to(err, ref[0], call.dtype),)


@cross_entropy_vjp.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS error of d_logits, with the symbols of the bound and k = KAPPA u:

        sigma^2 = store^2 + d_loss^2 [p^2 W^2 ((u d)^2 + (ex/4)^2 + k^2 (d^2 + 4)) + k^2 (2 hit^2 + 3 bracket^2)]

    store is the RMS error of storing (``store_spread``). exp leans one way in all elements alike, as in softmax.
    """
    unit = units(call)
    with np.errstate(all="ignore"):
        at, k2 = Bracket.of(call), (KAPPA * unit.u) ** 2
        of_p = (unit.u * at.d) ** 2 + (unit.ex / 4) ** 2 + k2 * (at.d**2 + 4)
        inner = magnitude(at.p * at.w) ** 2 * of_p + k2 * (2 * at.hit**2 + 3 * magnitude(at.value) ** 2)
        own = np.where(at.counted, magnitude(at.g) * np.sqrt(inner), 0.0)
        return (np.hypot(store_spread(ref[0], call.dtype), own),)


@cross_entropy_vjp.exact
def exact(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """An ignored row is 0, whatever its logits and its cotangent are."""
    ignored = call.arrays["labels"] == call.options["ignore_index"]
    return (np.broadcast_to(ignored[..., None], ref[0].shape),)


@cross_entropy_vjp.edge(dims={"n": (2, 140)})
def ignored_rows_of_nan(arrays, rng, options):
    """NaN and infinities in an ignored row, and in its cotangent, reach nothing."""
    ignored = arrays["labels"] == options["ignore_index"]
    arrays["logits"][ignored] = rng.choice([np.nan, inf, -inf])
    arrays["d_loss"][ignored] = rng.choice([np.nan, inf])


@cross_entropy_vjp.edge(dims={"n": (2, 140)})
def hidden_classes(arrays, rng, options):
    """Logits of -inf have a gradient of 0 but for their share of the target."""
    hidden = rng.random(arrays["logits"].shape) < 0.3
    hidden[..., 0] = False
    arrays["logits"][hidden] = -inf


@cross_entropy_vjp.edge(dims={"n": (2, 140)})
def infinite_logits(arrays, rng, options):
    """A +inf makes NaN of its own element and of no other of its row; a NaN of all of it."""
    plant(rng, arrays["logits"], rng.choice([inf, np.nan]))


@cross_entropy_vjp.edge(dims={"n": (2, 140)})
def nan_or_inf_in_cotangents(arrays, rng, options):
    """An infinite cotangent gives infinities by the sign of the bracket, a NaN a row of NaN."""
    arrays["d_loss"][rng.random(arrays["d_loss"].shape) < 0.5] = rng.choice([np.nan, inf, -inf])


@cross_entropy_vjp.edge(dims={"batch": (1, 1), "n": (257, 390)}, options={"label_smoothing": 0.3}, smallest_tiles=True)
def labels_at_both_ends(arrays, rng, options):
    """The first or the last class, in several tiles of which the last is ragged; all classes share the target.

    Of one row, as a tile of several rows may have to be a wide one.
    """
    arrays["labels"][...] = rng.choice([0, arrays["logits"].shape[-1] - 1], arrays["labels"].shape)


@cross_entropy_vjp.edge(dims={"n": (2, 140)}, options={"z_loss": 0.5})
def a_heavy_z_loss(arrays, rng, options):
    """2 z lse is most of what p meets."""
    arrays["logits"] += 20


@cross_entropy_vjp.edge(dims={"n": (1, 1)})
def one_class(arrays, rng, options):
    """The only class is certain: p is 1, and so is its target."""


@cross_entropy_vjp.law
def rows_are_independent(run, draw):
    """A row alone has the same bits as among others."""
    rows, n = draw.extent(2, 40), draw.extent(1, 300)
    x, labels = draw.normal(rows, n), draw.integers(0, n - 1, rows, dtype="int64")
    wide = "float64" if draw.dtype == "float64" else "float32"
    lse, d_loss = (draw.integers(1, 9, rows, dtype=wide) for _ in range(2))
    first = draw.extent(0, rows - 1)
    row = slice(first, first + 1)
    alone = run(x[row], labels[row], lse[row], d_loss[row])[0]
    draw.same_bits(alone, run(x, labels, lse, d_loss)[0][row], "a row alone")


@cross_entropy_vjp.law
def the_target_is_subtracted(run, draw):
    """Where p is 0 what is left is the target: -d_loss at the label, and 0 beside it, to the bit."""
    rows, n = draw.extent(1, 20), draw.extent(2, 300)
    x, labels = draw.integers(-8, 8, rows, n), draw.integers(0, n - 1, rows, dtype="int64")
    wide = "float64" if draw.dtype == "float64" else "float32"
    lse, d_loss = draw.integers(800, 900, rows, dtype=wide), draw.integers(1, 9, rows, dtype=wide)
    got = run(x, labels, lse, d_loss)[0]
    want = np.where(np.arange(n) == labels[:, None], -d_loss[:, None], 0).astype(got.dtype)
    draw.same_bits(got + 0, want, "the target alone")  # a zero of either sign


@cross_entropy_vjp.law
def powers_of_two_scale_exactly(run, draw):
    """A cotangent that is doubled doubles the gradient, to the bit."""
    rows, n = draw.extent(1, 40), draw.extent(2, 60)
    x, labels = draw.normal(rows, n), draw.integers(0, n - 1, rows, dtype="int64")
    wide = "float64" if draw.dtype == "float64" else "float32"
    lse, d_loss = draw.integers(2, 5, rows, dtype=wide), draw.integers(64, 99, rows, dtype=wide)
    twice = run(x, labels, lse, d_loss * d_loss.dtype.type(2))[0]
    draw.same_bits(twice, run(x, labels, lse, d_loss)[0] * x.dtype.type(2), "a cotangent doubled")
