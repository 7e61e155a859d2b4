"""Cross entropy with integer labels of the logits that a linear layer gives, which are never whole in memory, and its
gradients.

loss = cross_entropy(weight h) of each row h of hidden; with b the gradient of that with respect to the logits:
d_hidden = d_loss sum_j b_j weight_j and d_weight_j = sum of d_loss b_j h.
"""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Float32, Int

from portakern.spec import Tile, When, spec
from portakern.spec.dtypes import DTYPES
from portakern.spec.options import Range
from portakern.spec.tolerance import KAPPA, abs_matmul, format_of, magnitude, round_to, rounded, store_spread, units
from portakern.specs._gradients import each_alone, stored_bounds, stored_spreads
from portakern.specs._rows import plant
from portakern.specs.cross_entropy import (
    LABELS,
    Bracket,
    LossTerms,
    LowSaved,
    apart_of,
    cross_entropy,
    cross_entropy_vjp,
    low_bound,
    with_ignored,
)
from portakern.specs.logsumexp import Exponentials
from portakern.specs.matmul import matmul

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class LinearCrossEntropyOut(NamedTuple):
    loss: Float32[A, "*batch"]
    lse: Float32[A, "*batch"]
    slope: Float[A, "*batch d"]
    logit_gradients: Float[A, "*batch n"]


@spec(
    tiling={"chunk_rows": Tile(16, 65536)},
    require=(LABELS,),
    positive=("n", "d"),
    returns={"lse": "return_lse", "slope": "return_slope", "logit_gradients": "return_logit_gradients"},
    saved=LowSaved,
    apart=("batch",),
    vjp="linear_cross_entropy_vjp",
    autocast="lower",
    typical={"batch": (4096,), "n": 4096, "d": 4096},
    flops=lambda call: (
        (4.0 if "slope" in call.wants else 2.0) * prod(call.dims["batch"]) * call.dims["n"] * call.dims["d"]
    ),
)
def linear_cross_entropy(
    hidden: Float[A, "*batch d"],
    weight: Float[A, "n d"],
    labels: Int[A, "*batch"],
    *,
    ignore_index: Annotated[int, Range(-(2**31), 2**31 - 1, typical=(-100, 0, -1))] = -100,
    label_smoothing: Annotated[float, Range(0.0, 1.0, typical=(0.0, 0.1))] = 0.0,
    z_loss: Annotated[float, Range(0.0, typical=(0.0, 1e-4))] = 0.0,
    precision: Literal["ieee", "tf32"] = "ieee",
    keep_logit_gradients: bool = False,
    return_lse: bool = False,
    return_slope: bool = False,
    return_logit_gradients: bool = False,
) -> LinearCrossEntropyOut:
    """The cross_entropy of each row x = weight h of logits, h a row of hidden, in float32 (float64 for float64).

    Logits are sums in float32 that may be rounded to hidden's dtype, and so may b, below, each once. They are taken
    ``chunk_rows`` rows at a time, so that no more of them are ever in memory, unless b is kept; how many makes no
    difference to a row.

    The slope of a row is the gradient of its loss with respect to h,

        sum_j b_j weight_j        b_j = p_j (1 + 2 z lse) - (1 - e) [j = t] - e / n        p = exp(min(x - lse, 0))

    with t the label, e = label_smoothing and z = z_loss. It needs the logits of its row and no other's, so that it is
    taken where these are at hand, and the gradient needs no second look: it is slope times the loss's cotangent. The
    weight's gradient needs b of all rows. Where a call that is differentiated keeps b (``keep_logit_gradients``), in
    hidden's dtype, no product is taken twice; else logits and b are taken again, by a fourth product.

    The source is the fused linear cross entropy of Hsu et al. 2024, "Liger Kernel", section 3.2, for chunks of rows;
    for what the other gradient needs, see linear_cross_entropy_vjp.

    Args:
      hidden: (*batch, d); weight: (n, d), a row for each of n classes; labels: (*batch), int32 or int64.
      ignore_index, label_smoothing, z_loss: as in cross_entropy; the logits of an ignored row take no part.
      precision: of products of float32, as in matmul.
      keep_logit_gradients: whether b is kept for the gradient of weight: as many numbers of hidden's dtype as there are
        logits, from the forward pass to the backward pass. It changes nothing where nothing is differentiated.
      return_lse, return_slope, return_logit_gradients: whether lse, slope and b come with the loss.

    Returns:
      loss, lse: (*batch), float32 whatever hidden is (float64 for float64), as in cross_entropy; slope: (*batch, d),
      and logit_gradients: (*batch, n), which is b, of hidden's dtype. All are 0 in a row that is ignored, but that in
      slope 0 times an infinite weight is NaN: no product is left out. Nothing is promised of a row of which a logit may
      be beyond what hidden's dtype holds.
    """
    raise NotImplementedError


linear_cross_entropy.values("labels")(with_ignored)

LINEAR = 0.25
"""The RMS error of a logit up to which exp moves in proportion to it."""

SLACK = 1 + 2.0**-10
"""The roundings of cross_entropy are those at the exact logits. At the ones that a kernel has they differ by a share
of how far these are off, which is no more than (log n)^2 u."""


def as_product(call: Call, a: np.ndarray, b: np.ndarray, dtype: str | None = None) -> Call:
    """The call of matmul that multiplies a (m, k) and b (k, n), stored as ``dtype`` or as the op's."""
    return call.replace(
        spec=matmul,
        arrays={"a": a, "b": b},
        options={"precision": call.options["precision"], "out_dtype": dtype},
        dims={"batch": (), "m": a.shape[0], "n": b.shape[1], "k": a.shape[1]},
        wants=("c",),
        given=None,
    )


def of_matmul(
    call: Call, measure: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, stored: str | None = None
) -> np.ndarray:
    """What matmul's ``measure`` ("bound" or "spread") says of c = a b, stored as ``stored`` or in the op's dtype."""
    (found,) = measured(as_product(call, a, b, stored), measure, c)
    return found


def measured(loss_call: Call, measure: str, *outputs: np.ndarray | None) -> tuple[np.ndarray, ...]:
    """What the ``measure`` ("bound" or "spread") of a call's op says of its outputs."""
    found: tuple[np.ndarray, ...] = getattr(loss_call.spec, measure)(loss_call, outputs)
    return found


class Logits(NamedTuple):
    """The logits of all rows, (rows, n), and what of a kernel's may differ from them.

    Attributes:
      x: they are exact; err: how far those of a kernel may be off, +inf where they may not be finite. labels: (rows,);
        counted: whether a row takes part.
    """

    x: np.ndarray
    err: np.ndarray
    labels: np.ndarray
    counted: np.ndarray

    @classmethod
    def of(cls, call: Call) -> Logits:
        h, w, labels = rows_of(call), call.arrays["weight"].T, call.arrays["labels"].reshape(-1)
        x = h @ w
        err = of_matmul(call, "bound", h, w, x)
        err = np.where(magnitude(x) + err >= format_of(call.dtype).overflow, inf, err)
        return cls(x, err, labels, labels != call.options["ignore_index"])

    def losses(self, call: Call, wants: tuple[str, ...] = ("loss", "lse")) -> Call:
        """The call of cross_entropy on them."""
        return self._call(call, cross_entropy, {"logits": self.x, "labels": self.labels}, wants)

    def brackets(self, call: Call, lse: np.ndarray, d_loss: np.ndarray, low: np.ndarray | None = None) -> Call:
        """The call of cross_entropy_vjp on them."""
        arrays = {"logits": self.x, "labels": self.labels, "lse": lse, "d_loss": d_loss, "lse_low": low}
        return self._call(call, cross_entropy_vjp, arrays, ("d_logits",))

    def _call(self, call: Call, spec: Any, arrays: dict[str, Any], wants: tuple[str, ...]) -> Call:
        options = {o.name: call.options.get(o.name, o.default) for o in spec.options}
        dims = {"batch": self.labels.shape, "n": self.x.shape[1]}
        return call.replace(spec=spec, arrays=arrays, options=options, dims=dims, wants=wants, given=None, off={})

    def rise(self) -> np.ndarray:
        """How far lse may move as each logit moves by its ``err``, (rows,): log sum p exp(err), +inf where one of those
        is; down it moves by no more."""
        top = self.x.max(-1, keepdims=True)
        top = np.where(np.isfinite(top), top, 0.0)
        known = np.where(np.isfinite(self.err), self.err, 0.0)
        peak = (self.x + known).max(-1, keepdims=True)
        peak = np.where(np.isfinite(peak), peak, 0.0)
        moved = peak - top + np.log(np.exp(self.x + known - peak).sum(-1, keepdims=True))
        found = (moved - np.log(np.exp(self.x - top).sum(-1, keepdims=True)))[:, 0]
        found = np.where(np.isnan(found), 0.0, np.maximum(found, 0.0))
        return np.where(np.isposinf(self.err).any(-1), inf, found)


def rows_of(call: Call) -> np.ndarray:
    """hidden as (rows, d)."""
    return np.asarray(call.arrays["hidden"].reshape(-1, call.dims["d"]))


def wider(base: np.ndarray, more: np.ndarray, ref: np.ndarray) -> np.ndarray:
    """A bound that is ``more`` wider; beside a reference that is no number only where nothing is promised."""
    more = np.where(np.isfinite(ref) | np.isposinf(more), more, 0.0)
    return base + np.where(np.isnan(more), inf, more)


def bracket_error(call: Call, at: Logits, loss_call: Call, b: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """How far the brackets b that a kernel multiplies may be off, (rows, n), where its logits are.

    cross_entropy_vjp's own bound, to which comes that p is exp of a difference which is off by err + ``shift``, as far
    as lse is off; no p exceeds 1. Where a logit may not be finite, p may be no number.
    """
    (own,) = measured(loss_call, "bound", b)
    lse, z = loss_call.arrays["lse"][:, None], call.options["z_loss"]
    g, w = magnitude(loss_call.arrays["d_loss"])[:, None], 1 + 2 * z * magnitude(lse)
    theta = at.err + shift[:, None]
    apart = apart_of(at.x, loss_call.arrays["lse"], loss_call.arrays["lse_low"])
    p = np.exp(np.minimum(apart, 0.0))
    moved = np.maximum(np.exp(np.minimum(apart + theta, 0.0)) - p, p * -np.expm1(-theta))
    moved = np.where(np.isposinf(theta), inf, np.where(np.isnan(moved), 0.0, moved))
    far = (apart < inf) & ((p + moved) * w >= units(call).huge)  # p w may overflow before d_loss meets it
    far |= apart > theta + 1e-2  # the lse of other logits: nothing is promised of what exceeds it
    more = moved * w + (2 * z * shift[:, None] * (magnitude(p) + moved) if z else 0.0)
    more = SLACK * (1 + units(call).U) * np.where(g > 0, g * more, 0.0)
    return np.where(at.counted[:, None], np.where(far, inf, wider(own, more, b)), 0.0)


def of_brackets(
    call: Call, b: np.ndarray, err: np.ndarray, y: np.ndarray, ref: np.ndarray, stored: str | None = None
) -> np.ndarray:
    """The bound of b y, stored as ``stored`` or in the op's dtype, where each b (m, k) may be off by its ``err`` before
    they are multiplied."""
    unit = units(call)
    unknown = np.isposinf(err) | (magnitude(b) + err >= format_of(call.dtype).overflow)
    known = np.where(unknown, 0.0, err)
    base = of_matmul(call, "bound", magnitude(b) + known, y, ref, stored)
    found = wider(base, (1 + unit.U) * (known @ magnitude(y)), ref)
    # What may be 0 or of either sign decides what an infinity beside it gives, and may be lost beside a sum of others.
    either = (magnitude(b) <= err) & (b != 0) & np.isfinite(b)
    unsure = unknown.any(-1, keepdims=True) | ((either.astype(float) @ np.isinf(y).astype(float)) > 0)
    return np.where(unsure | np.isinf(abs_matmul(b, y, unit)), inf, found)


@linear_cross_entropy.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bounds, from those of matmul (B_x of a logit, K = d), cross_entropy and cross_entropy_vjp at the exact logits
    x, with :class:`portakern.spec.tolerance.Units` and p = exp(x - lse):

        lse:   B_lse  + s R                     R = log sum_j p_j exp(B_xj);  lse_low: 3 times that
        loss:  B_loss + s [R (1 + 2 z |lse| + z R) + (1 - e) B_xt + e mean B_x]
        slope: B_c    + (1 + U) sum_j E_j |weight_j|
        logit_gradients: E_j
        E_j = B_bj + s (1 + U) [D_j (1 + 2 z |lse|) + 2 z S (p_j + D_j)]

    A logit is one product, stored in hidden's dtype, and lse moves by no more than R where each moves by its bound (the
    mean of exp is at most its largest, and at least 1 over that of the inverse). B_b has what storing the brackets b
    costs; p is exp of x - lse, whose parts are off by B_x and S = R + B_lse, so that it moves by D at most: to
    p exp(B_x + S), but never beyond 1, or to p exp(-B_x - S). B_c is matmul's for brackets as large
    as they may be, K = n. s = ``SLACK``.
    """
    with np.errstate(all="ignore"):
        at = Logits.of(call)
        z, e = call.options["z_loss"], call.options["label_smoothing"]
        rise = at.rise()
        exact = cross_entropy_outputs(call, at)
        own = measured(at.losses(call), "bound", *exact, None)
        hit = np.take_along_axis(at.err, np.clip(at.labels, 0, call.dims["n"] - 1)[:, None], -1)[:, 0]
        of_loss = rise * (1 + 2 * z * magnitude(exact[1]) + z * rise) + (1 - e) * hit
        of_loss = of_loss + e * at.err.mean(-1) if e else of_loss
        found: list[Any] = [
            np.where(at.counted, wider(base, SLACK * np.nan_to_num(more, nan=inf), y), 0.0)
            for base, more, y in zip(own[:2], (of_loss, rise), exact, strict=True)
        ]
        found += [None, None]
        if ref[2] is not None or ref[3] is not None:
            shift = rise + np.where(np.isfinite(exact[1]), own[1], 0.0)
            of = at.brackets(call, exact[1], np.ones(len(rise)))
            b = bracket_values(of)
            found[3] = bracket_error(call, at, of, b, shift)
        if ref[2] is not None:
            found[2] = of_brackets(call, b, found[3], call.arrays["weight"], ref[2].reshape(-1, call.dims["d"]))
        return shaped(ref, [*found, low_bound(call, exact[1], np.where(at.counted, found[1], 0.0))])


def shaped(ref: tuple[Any, ...], found: list[Any]) -> tuple[Any, ...]:
    """What is known of rows in the shapes of the outputs, None for one that is not wanted."""
    return tuple(None if y is None else each.reshape(y.shape) for y, each in zip(ref, found, strict=True))


def cross_entropy_outputs(call: Call, at: Logits) -> tuple[np.ndarray, np.ndarray]:
    """loss and lse of exact logits."""
    part = LossTerms.of(at.losses(call))
    loss = part.log + part.target + part.even + part.square
    lse = np.where(np.isposinf(at.x.max(-1)), inf, part.lse)
    return np.where(at.counted, loss, 0.0), np.where(at.counted, lse, 0.0)


def bracket_values(loss_call: Call) -> np.ndarray:
    """d_logits of a call of cross_entropy_vjp."""
    at = Bracket.of(loss_call)
    return np.where(at.counted, at.g * at.value, 0.0)


def bracket_variance(call: Call, at: Logits, loss_call: Call, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the brackets that a kernel multiplies: the variance of their own roundings, and g^2 p^2 (1 + 2 z lse)^2 times
    that of the logits they are made of, (rows, n). +inf, not known, where a logit is off by so much that p does not
    follow in proportion (``LINEAR``)."""
    h, w = rows_of(call), call.arrays["weight"].T
    (own,) = measured(loss_call, "spread", b)
    lse, apart = loss_call.arrays["lse"][:, None], apart_of(at.x, loss_call.arrays["lse"], loss_call.arrays["lse_low"])
    p = np.exp(np.minimum(apart, 0.0)) * (1 + 2 * call.options["z_loss"] * lse)
    s_x = of_matmul(call, "spread", h, w, at.x)
    of_x = magnitude(loss_call.arrays["d_loss"][:, None] * p * s_x) ** 2
    of_x = np.where(s_x.max(-1, keepdims=True) > LINEAR, inf, of_x)
    counted = at.counted[:, None]
    return np.where(counted, np.asarray(own) ** 2, 0.0), np.where(counted, of_x, 0.0)


def lost(call: Call, b: np.ndarray, axis: int) -> np.ndarray:
    """Whether all brackets along an axis are so small that to store them is to lose them: towards 0, all alike."""
    return magnitude(b).max(axis, keepdims=True) < DTYPES[call.dtype].tiny


def variance_factor(call: Call, a: np.ndarray) -> float:
    """1 + 8/D + 400/D^2, by which the variance is multiplied that storing numbers a, (lines, terms), brings to a @ x.

    A number is one draw for the whole line of the result that it meets. Where it outweighs the others of its line, what
    it draws is a lean there: D = L^2 / sum of (sum a^4) / (sum a^2)^2 over the L lines that are not 0 is how many draws
    there are. Half of an error is each result's own, so that the mean of D draws has a deviation of 0.7 / sqrt(D) or
    less; with this room 0.25, the lean that is right (``testing.statistics``), is three of it or more at any D. A line
    with a number beyond what the dtype holds has no finite result, and draws nothing.
    """
    a = magnitude(a)
    a = a[a.any(-1) & (a <= DTYPES[call.dtype].largest).all(-1)]
    if not len(a):
        return 1.0
    square = (a / a.max(-1, keepdims=True)) ** 2
    draws = len(square) / np.mean((square**2).sum(-1) / square.sum(-1) ** 2)
    return float(1 + 8 / draws + 400 / draws**2)


def alike(call: Call, b: np.ndarray, p: np.ndarray) -> np.ndarray:
    """By how much brackets are off, once they are stored, of which p is 0 or 1: they are one of four numbers in all
    rows, and no draw at random."""
    U = units(call).U
    certain = (p <= U * call.options["label_smoothing"] / call.dims["n"]) | (np.abs(1 - p) <= U)
    return np.where(certain & np.isfinite(b), rounded(b, call.dtype).astype(np.float64) - b, 0.0)


@linear_cross_entropy.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS errors, with s_x that of a logit and s_b of a bracket as it is stored, s_lse of lse by itself:

        loss, lse: s^2 + sum_j a_j^2 s_xj^2       s cross_entropy's own; a: the derivative by a logit, b or p
        logit_gradients: s_b^2 + p^2 (1 + 2 z lse)^2 (s_x^2 + S^2) + (2 z p S)^2
        slope:     s_c^2 + R [sum_j s_bj^2 w_j^2 + sum_j p_j^2 s_xj^2 (w_j - m)^2 + (s_lse^2 + (2 z S)^2) m^2]

    The slope's is not known where a logit may be off by more than ``LINEAR``, b be ``lost``, or much of it rounded
    ``alike``.
    With w = weight, m = sum p w, s_c of the product alone, S that of lse: a logit moves p and, by lse, all others
    against it, and the factor of all. R is the ``variance_factor`` for what brackets draw. logit_gradients' is not
    known where the slope's is not, nor where b is subnormal, or rounded ``alike``.
    """
    with np.errstate(all="ignore"):
        at = Logits.of(call)
        exact, h, w = cross_entropy_outputs(call, at), rows_of(call), call.arrays["weight"]
        of = at.brackets(call, exact[1], np.ones(len(h)))
        b, share = bracket_values(of), Exponentials.of(at.x, -1).p
        of_x = of_matmul(call, "spread", h, w.T, at.x) ** 2
        own = measured(at.losses(call), "spread", *exact, None)
        found: list[Any] = [
            np.where(at.counted, np.sqrt(s**2 + (magnitude(a) ** 2 * of_x).sum(-1)), 0.0)
            for s, a in zip(own[:2], (b, share), strict=True)
        ]
        rounds, moved = bracket_variance(call, at, of, b)
        unknown = np.isinf(moved).any(-1, keepdims=True) | lost(call, b, -1)
        moved, z = np.where(unknown, 0.0, moved), call.options["z_loss"]
        same = alike(call, b, share)
        found += [None, None]
        if ref[2] is not None:
            mean, w2 = magnitude(share @ w), magnitude(w) ** 2
            about = moved @ w2 - 2 * (share @ w) * (moved @ w) + mean**2 * moved.sum(-1, keepdims=True)
            shared = (own[1] ** 2 + (2 * z * found[1]) ** 2)[:, None] * mean**2
            slope = ref[2].reshape(-1, call.dims["d"])
            product = of_matmul(call, "spread", b, w, slope)
            whole = product**2 + variance_factor(call, b) * (rounds @ w2 + np.maximum(about, 0.0) + shared)
            found[2] = np.where(unknown | (np.abs(same @ w) > np.sqrt(whole) / 4), inf, np.sqrt(whole))
        if ref[3] is not None:
            grown = magnitude(1 + 2 * z * exact[1]) + 2 * z
            of_lse = magnitude(share * (grown * found[1])[:, None])
            few = (magnitude(b) < DTYPES[call.dtype].tiny) | (same != 0)
            found[3] = np.where(unknown | few, inf, np.sqrt(rounds + moved + of_lse**2))
            found[3] = np.where(at.counted[:, None], found[3], 0.0)
        return shaped(ref, [*found, np.full(len(h), inf)])


@linear_cross_entropy.exact
def exact(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """An ignored row is 0, whatever it holds; its slope where all weights are finite."""
    ignored = call.arrays["labels"] == call.options["ignore_index"]
    finite = bool(np.isfinite(call.arrays["weight"]).all())
    whole = None if ref[2] is None else np.broadcast_to(ignored[..., None] & finite, ref[2].shape)
    loss, lse, low = (None if y is None else ignored for y in (ref[0], ref[1], ref[4]))
    b = None if ref[3] is None else np.broadcast_to(ignored[..., None], ref[3].shape)
    return loss, lse, whole, b, low


@linear_cross_entropy.edge(dims={"n": (2, 140), "d": (1, 40)}, options={"return_slope": True})
def ignored_rows_of_nan(arrays, rng, options):
    """NaN and infinities in an ignored row of hidden reach nothing."""
    arrays["hidden"][arrays["labels"] == options["ignore_index"]] = rng.choice([np.nan, inf, -inf])


@linear_cross_entropy.edge(dims={"batch": (3, 7), "n": (2, 40), "d": (1, 20)}, options={"return_slope": True})
def every_row_is_ignored(arrays, rng, options):
    """A batch of nothing but padding: zeros."""
    arrays["labels"][...] = options["ignore_index"]


@linear_cross_entropy.edge(dims={"n": (2, 140), "d": (1, 40)})
def infinite_rows(arrays, rng, options):
    """An infinity or NaN in a row of hidden makes infinite logits of both signs, or NaN, and reaches no other row."""
    plant(rng, arrays["hidden"], rng.choice([inf, np.nan]))


@linear_cross_entropy.edge(dims={"n": (2, 140), "d": (1, 40)}, options={"return_slope": True})
def a_class_of_infinite_weight(arrays, rng, options):
    """Its logit is -inf in some rows, +inf or NaN in others; where it is not the label and nothing is smoothed, p is 0
    and 0 times its weight NaN."""
    w = arrays["weight"]
    w[rng.integers(w.shape[0]), rng.integers(w.shape[1])] = rng.choice([inf, -inf])


@linear_cross_entropy.edge(dims={"batch": (1, 40), "n": (2, 140), "d": (1, 40)}, regime="integers")
def logits_of_integers(arrays, rng, options):
    """Logits that no sum rounds."""


@linear_cross_entropy.edge(dims={"batch": (33, 50), "n": (129, 300), "d": (17, 33)}, smallest_tiles=True,
                           options={"return_slope": True})  # fmt: skip
def several_chunks(arrays, rng, options):
    """Chunks of rows of which the last is ragged: each row has its own label, and no chunk the logits of another."""


@linear_cross_entropy.edge(dims={"n": (2, 140), "d": (1, 40)}, options={"label_smoothing": 1.0, "z_loss": 0.5,
                                                                       "return_slope": True})  # fmt: skip
def all_of_the_target_is_even(arrays, rng, options):
    """e = 1: the label does not matter; and a z loss that is most of the loss."""


@linear_cross_entropy.edge(dims={"n": (1, 1), "d": (1, 300)}, options={"return_slope": True})
def one_class(arrays, rng, options):
    """The only class is certain: no slope."""


@linear_cross_entropy.edge(dims={"batch": (1, 9), "n": (2, 40), "d": (1, 40)},
                           options={"precision": "tf32", "return_slope": True})  # fmt: skip
def products_of_10_bits(arrays, rng, options):
    """precision counts where products are of float32."""


@linear_cross_entropy.law
def rows_are_independent(run, draw):
    """A row alone gives the same bits as among others, however many chunks these make."""
    rows, n, d = draw.extent(2, 40), draw.extent(1, 200), draw.extent(1, 70)
    h, w = draw.normal(rows, d), draw.normal(n, d)
    labels = draw.integers(0, n - 1, rows, dtype="int64")
    first = draw.extent(0, rows - 1)
    row = slice(first, first + 1)
    every = {"return_lse": True, "return_slope": True, "return_logit_gradients": True}
    alone, among = (run(h[r], w, labels[r], **every) for r in (row, slice(None)))
    for name, one, all_ in zip(("loss", "lse", "slope", "logit_gradients"), alone, among, strict=True):
        draw.same_bits(one, all_[row], f"{name} of a row alone")


@linear_cross_entropy.law
def the_integer_type_does_not_matter(run, draw):
    """Labels in int32 and in int64 give the same bits."""
    rows, n, d = draw.extent(1, 20), draw.extent(1, 100), draw.extent(1, 30)
    h, w, labels = draw.normal(rows, d), draw.normal(n, d), draw.integers(0, n - 1, rows, dtype="int64")
    draw.same_bits(run(h, w, labels.astype(np.int32)), run(h, w, labels.astype(np.int64)), "labels in the other type")


@linear_cross_entropy.law
def what_else_is_asked_for_does_not_matter(run, draw):
    """The loss has the same bits with and without its slope, and the slope with and without b."""
    rows, n, d = draw.extent(1, 40), draw.extent(1, 100), draw.extent(1, 30)
    h, w, labels = draw.normal(rows, d), draw.normal(n, d), draw.integers(0, n - 1, rows, dtype="int64")
    sloped = run(h, w, labels, return_slope=True)
    draw.same_bits(sloped[0], run(h, w, labels), "the loss beside its slope")
    both = run(h, w, labels, return_slope=True, return_logit_gradients=True)
    draw.same_bits(both[2], sloped[2], "the slope beside what it is made of")


@linear_cross_entropy.law
def a_certain_label_costs_nothing(run, draw):
    """Rows of hidden that pick a column of weight have it for logits, to the bit: a label that is above the others by
    200 has a loss of 0, and another its distance."""
    rows, n, d = draw.extent(1, 20), draw.extent(2, 100), draw.extent(1, 30)
    w, picked = draw.integers(-8, 8, n, d), draw.integers(0, d - 1, rows, dtype="int64")
    labels = draw.integers(0, n - 1, d, dtype="int64")
    w[labels, np.arange(d)] = 248
    h = np.eye(d)[picked].astype(w.dtype)
    sure = run(h, w, labels[picked])
    draw.same_bits(sure, np.zeros(rows, sure.dtype), "a certain label")
    other = (labels[picked] + 1) % n
    beside = w[other, picked].astype(sure.dtype)
    draw.same_bits(run(h, w, other), 248 - beside, "another label")


linear_cross_entropy.sample("rows", dims={"batch": (5,), "n": 7, "d": 3})
linear_cross_entropy.sample("two_axes", dims={"batch": (2, 3), "n": 4, "d": 5}, options={"ignore_index": 0})
linear_cross_entropy.sample(
    "smoothed", dims={"batch": (5,), "n": 7, "d": 3}, options={"label_smoothing": 0.1, "z_loss": 1e-2}
)
linear_cross_entropy.sample(
    "keeping", dims={"batch": (5,), "n": 7, "d": 3}, options={"keep_logit_gradients": True, "z_loss": 1e-2}
)
linear_cross_entropy.sample(
    "with_slope", dims={"batch": (5,), "n": 7, "d": 3}, options={"return_lse": True, "return_slope": True}
)


# ---------------------------------------------------------------------------------------------------------- gradient
class LinearCrossEntropyVjpOut(NamedTuple):
    d_hidden: Float[A, "*batch d"]
    d_weight: Float[A, "n d"]


@spec(
    tiling={"chunk_n": Tile(16, 65536, of="n")},
    gradient_dtype=("d_weight",),
    require=(LABELS,),
    positive=("n", "d"),
    aliases={"d_hidden": "slope"},
    reads={
        "logit_gradients": When(lambda options: options["keep_logit_gradients"], "where keep_logit_gradients is True")
    },
    apart=lambda options, wants: ("batch",) if set(wants) == {"d_hidden"} else (),
    flops=lambda call: (
        (
            (2.0 if call.options["keep_logit_gradients"] else 4.0) * call.dims["n"] * ("d_weight" in call.wants)
            + ("d_hidden" in call.wants)
        )
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
    logit_gradients: Float[A, "*batch n"] | None = None,
    *,
    ignore_index: Annotated[int, Range(-(2**31), 2**31 - 1, typical=(-100, 0, -1))] = -100,
    label_smoothing: Annotated[float, Range(0.0, 1.0, typical=(0.0, 0.1))] = 0.0,
    z_loss: Annotated[float, Range(0.0, typical=(0.0, 1e-4))] = 0.0,
    precision: Literal["ieee", "tf32"] = "ieee",
    keep_logit_gradients: bool = False,
) -> LinearCrossEntropyVjpOut:
    """d_hidden = d_loss slope and d_weight_j = sum of d_loss b_j h over all rows h of hidden, b as in
    linear_cross_entropy.

    Logits are taken again, as there, of ``chunk_n`` classes at a time: what a class needs of the others is in lse, so
    that all rows go into one sum, which is rounded once. d_loss b may be rounded to hidden's dtype, once. Where b was
    kept it is met by d_loss h, which may be rounded to hidden's dtype, once: d fewer numbers a row than d_loss b has.

    Taking logits again where gradients need them is Cut Cross-Entropy's way (Wijmans et al. 2024, "Cut your losses in
    large-vocabulary language models", section 4), here for one of the two.

    Args:
      hidden, weight, labels, ignore_index, label_smoothing, z_loss, precision, keep_logit_gradients: what
        linear_cross_entropy was given.
      lse, slope, lse_low: what it found, lse_low None being 0; d_loss: (*batch), the cotangent of its loss.
      logit_gradients: (*batch, n), the b that it kept; None where it kept none. With it lse is not read.

    Returns:
      d_hidden: the shape and dtype of hidden, 0 in rows that are ignored; d_weight: those of weight, to which an
      ignored row adds 0 times what is in it, or in b where that was kept. Nothing is promised of d_weight where a
      logit, or d_loss b, may be beyond what hidden's dtype holds, or p beyond float32; where b was kept, where d_loss h
      may be.
    """
    raise NotImplementedError


def brackets(call: Call, at: Logits) -> tuple[Call, np.ndarray]:
    """The call of cross_entropy_vjp whose gradient meets hidden, and its values: d_loss b, (rows, n)."""
    lse, d_loss, low = (call.arrays[name] for name in ("lse", "d_loss", "lse_low"))
    of = at.brackets(call, lse.reshape(-1), d_loss.reshape(-1), None if low is None else low.reshape(-1))
    return of, bracket_values(of)


@linear_cross_entropy_vjp.tolerance
def bound_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bounds, each E (1 + U) + U |value| + eta in the gradient's dtype, with what linear_cross_entropy's have:

        d_hidden: E = u |d_hidden| + tau (|slope| + |d_loss| + 1)
        d_weight: matmul's, K the number of rows, for d_loss b as large as they may be, and sum E_b |h| beside it

    E_b is a bracket's there, for S = 0: lse is taken as it was saved. Where it may be off, S is what it is off by, and
    d_hidden has |d_loss| times what slope is off by more. Of b that was kept, d_weight's is

        matmul's, for d_loss h as large as they may be, and sum (E_g |b| + (|d_loss h| + E_g) O) beside it
        E_g = [u |d_loss h| + tau (|d_loss| + |h| + 1)] (1 + U) + U |d_loss h| + eta

    O being what b is off by: E_j of linear_cross_entropy.
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
        if ref[1] is not None and call.options["keep_logit_gradients"]:
            found[1] = of_kept(call, ref[1])
        elif ref[1] is not None:
            at = Logits.of(call)
            of, b = brackets(call, at)
            err = bracket_error(call, at, of, b, np.zeros(len(b)) + np.reshape(call.off.get("lse", 0.0), -1))
            found[1] = of_brackets(call, b.T, err.T, rows_of(call), ref[1], call.outputs["d_weight"][1])
    return tuple(found)


class Weighed(NamedTuple):
    """Of each row the numbers d_loss h, 0 where it is ignored, and b that was kept, by which they are multiplied.

    Attributes:
      value: (rows, d), exact; err: how far a kernel's may be off; b: (rows, n).
    """

    value: np.ndarray
    err: np.ndarray
    b: np.ndarray

    @classmethod
    def of(cls, call: Call) -> Weighed:
        unit, h = units(call), rows_of(call)
        g, among = call.arrays["d_loss"].reshape(-1, 1), counted(call).reshape(-1, 1)
        value = np.where(among, g * h, 0.0)
        err = unit.u * magnitude(value) + unit.tau * (magnitude(g) + magnitude(h) + 1)
        err = np.where(among, round_to(err, value, call.dtype), 0.0)
        return cls(value, err, call.arrays["logit_gradients"].reshape(len(h), -1))


def of_kept(call: Call, ref: np.ndarray) -> np.ndarray:
    """The bound of d_weight where b was kept."""
    at = Weighed.of(call)
    found = of_brackets(call, at.value.T, at.err.T, at.b, ref.T, call.outputs["d_weight"][1])
    off = np.broadcast_to(call.off.get("logit_gradients", 0.0), call.arrays["logit_gradients"].shape)
    return wider(found, (1 + units(call).U) * ((magnitude(at.value) + at.err).T @ off.reshape(at.b.shape)), ref.T).T


def spread_of_kept(call: Call, ref: np.ndarray) -> np.ndarray:
    """The RMS error of d_weight where b was kept."""
    at, unit = Weighed.of(call), units(call)
    product = of_matmul(call, "spread", at.value.T, at.b, ref.T, call.outputs["d_weight"][1])
    variance = store_spread(at.value, call.dtype) ** 2 + (KAPPA * unit.u * at.value) ** 2
    unknown = lost(call, at.value, 0).T
    met = np.where(unknown, 0.0, variance.T) @ magnitude(at.b) ** 2
    factor = variance_factor(call, np.where(unknown, 0.0, at.value.T))
    return np.where(unknown, inf, np.sqrt(product**2 + factor * met)).T


def counted(call: Call) -> np.ndarray:
    """Whether each row takes part, (*batch, 1)."""
    return np.asarray(call.arrays["labels"] != call.options["ignore_index"])[..., None]


@linear_cross_entropy_vjp.sigma
def sigma_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS errors, with the symbols of linear_cross_entropy's and k = KAPPA u:

        d_hidden: store^2 + k^2 d_hidden^2          store: of storing it (``store_spread``)
        d_weight: s_c^2 + R sum (s_b^2 + d_loss^2 p^2 s_x^2) h^2          s_c: of the product alone

    R is the ``variance_factor`` for what the brackets of classes that are not ``lost`` draw. Of b that was kept
    d_weight's is s_c^2 + R sum s_g^2 b^2, s_g what storing d_loss h draws.
    """
    found: list[Any] = [None, None]
    with np.errstate(all="ignore"):
        if ref[0] is not None:
            variance = np.where(counted(call), (KAPPA * units(call).u * magnitude(ref[0])) ** 2, 0.0)
            found[0] = stored_spreads(call, (ref[0], None), (variance, None))[0]
        if ref[1] is not None and call.options["keep_logit_gradients"]:
            found[1] = spread_of_kept(call, ref[1])
        elif ref[1] is not None:
            at, h = Logits.of(call), rows_of(call)
            of, b = brackets(call, at)
            product = of_matmul(call, "spread", b.T, h, ref[1], call.outputs["d_weight"][1])
            rounds, moved = bracket_variance(call, at, of, b)
            variance = rounds + moved
            unknown = (np.isinf(variance).any(0, keepdims=True) | lost(call, b, 0)).T
            met = np.where(unknown, 0.0, variance.T) @ magnitude(h) ** 2
            found[1] = np.where(
                unknown, inf, np.sqrt(product**2 + variance_factor(call, np.where(unknown, 0.0, b.T)) * met)
            )
    return tuple(found)


@linear_cross_entropy_vjp.exact
def exact_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """An ignored row of d_hidden is 0, whatever its slope and its cotangent are."""
    return None if ref[0] is None else np.broadcast_to(~counted(call), ref[0].shape), None


@linear_cross_entropy_vjp.edge(dims={"n": (2, 140), "d": (1, 40)})
def ignored_rows_of_nan_cotangents(arrays, rng, options):
    """NaN and infinities in the cotangent of an ignored row reach nothing."""
    arrays["d_loss"][arrays["labels"] == options["ignore_index"]] = rng.choice([np.nan, inf])


@linear_cross_entropy_vjp.edge(dims={"n": (2, 140), "d": (1, 40)})
def infinite_rows_vjp(arrays, rng, options):
    """An infinity or NaN in a row of hidden makes NaN of each class's gradient where it lies."""
    plant(rng, arrays["hidden"], rng.choice([inf, np.nan]))


@linear_cross_entropy_vjp.edge(dims={"n": (2, 140), "d": (1, 40)})
def nan_or_inf_in_cotangents(arrays, rng, options):
    """A NaN makes a row of d_hidden NaN, and all of d_weight; an infinity gives infinities by the sign."""
    arrays["d_loss"][rng.random(arrays["d_loss"].shape) < 0.5] = rng.choice([np.nan, inf, -inf])


@linear_cross_entropy_vjp.edge(dims={"batch": (17, 40), "n": (129, 300), "d": (17, 33)}, smallest_tiles=True)
def several_chunks_vjp(arrays, rng, options):
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


@linear_cross_entropy_vjp.edge(dims={"batch": (17, 40), "n": (129, 300), "d": (17, 33)},
                               options={"keep_logit_gradients": True}, smallest_tiles=True)  # fmt: skip
def brackets_that_were_kept(arrays, rng, options):
    """They are met as they are, whatever the logits of these arrays would make of them."""


@linear_cross_entropy_vjp.edge(dims={"n": (1, 1), "d": (1, 40)})
def one_class_vjp(arrays, rng, options):
    """The only class is certain."""


@linear_cross_entropy_vjp.edge(dims={"batch": (1, 9), "n": (2, 40), "d": (1, 40)}, options={"precision": "tf32"})
def products_of_10_bits_vjp(arrays, rng, options):
    """precision counts where products are of float32."""


def drawn(draw):
    """Arrays of a call whose logits are small integers and whose p is no subnormal number, in any dtype."""
    rows, n, d = draw.extent(1, 40), draw.extent(2, 60), draw.extent(1, 3)
    h, w, slope = draw.integers(-1, 1, rows, d), draw.integers(-1, 1, n, d), draw.normal(rows, d)
    labels, wide = draw.integers(0, n - 1, rows, dtype="int64"), "float64" if draw.dtype == "float64" else "float32"
    lse, d_loss = draw.integers(2, 4, rows, dtype=wide), draw.integers(64, 99, rows, dtype=wide)
    return h, w, labels, lse, slope, d_loss


@linear_cross_entropy_vjp.law
def rows_are_independent_vjp(run, draw):
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
def what_was_kept_is_multiplied(run, draw):
    """d_weight is the sum over rows of b h, to the bit where all are small integers; ignored rows add nothing."""
    h, w, labels, lse, slope, _ = drawn(draw)
    rows, n = len(h), len(w)
    b, d_loss = draw.integers(-8, 8, rows, n), draw.integers(0, 1, rows, dtype=str(lse.dtype))
    labels[0] = -100
    got = run(h, w, labels, lse, slope, d_loss, None, b, keep_logit_gradients=True)[1]
    taken = (np.where(labels == -100, 0, d_loss)[:, None] * b.astype(np.float64)).T @ h.astype(np.float64)
    draw.same_bits(got + 0, taken.astype(got.dtype) + 0, "the product with what was kept")


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
