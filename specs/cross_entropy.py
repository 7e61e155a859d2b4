"""Cross entropy of logits with integer labels, and its gradient.

loss = lse - x_t for the label t of a row x, and d_x_j = d_loss (exp(x_j - lse) - [j = t]); with label smoothing and
z-loss.
"""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Float32, Int

from portakern.spec import Origin, Rule, Tile, spec
from portakern.spec.options import Range
from portakern.spec.tolerance import KAPPA, Units, magnitude, round_to, store_spread, units
from portakern.specs._rows import mean_variance, plant
from portakern.specs.logsumexp import Exponentials

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class CrossEntropyOut(NamedTuple):
    loss: Float32[A, "*batch"]
    lse: Float32[A, "*batch"]


class LowSaved(NamedTuple):
    """What rounding took from lse: the log-sum-exp is lse + lse_low to twice the precision, and lse_low 0 where lse is
    not finite. At logits near 1e8 the spacing of float32 is 8, and exp(x - lse) off by a factor of up to e^4."""

    lse_low: Float32[A, "*batch"]


def names_a_class(call: Call) -> bool:
    """Whether each label is one of all classes or the ignored one."""
    labels, classes = call.arrays["labels"], classes_of(call)
    return bool(((labels == call.options["ignore_index"]) | ((labels >= 0) & (labels < classes))).all())


def classes_of(call: Call) -> int:
    """The number of all classes, of which a call may have a part: the last one, where it does not say."""
    found: int | None = call.options.get("classes")
    return call.options.get("first_class", 0) + call.dims["n"] if found is None else found


LABELS = Rule(names_a_class, "labels must be from 0 to n - 1, or ignore_index", values=True)

AMONG_CLASSES = Rule(
    lambda call: call.options["first_class"] + call.dims["n"] <= classes_of(call),
    "the n classes from first_class on go beyond classes, the number of all; pass that of all parts, or leave it out",
)


@spec(
    tiling={"block_rows": Tile(1, 256), "block_n": Tile(128, 65536, of="n")},
    require=(LABELS,),
    positive=("n",),
    returns={"lse": "return_lse"},
    saved=LowSaved,
    apart=("batch",),
    starts={"n": Origin("first_class", total="classes", in_gradient=True)},
    vjp="cross_entropy_vjp",
    autocast="float32",
    typical={"batch": (4096,), "n": 4096},
    flops=lambda call: 5.0 * prod(call.dims["batch"]) * call.dims["n"],
)
def cross_entropy(
    logits: Float[A, "*batch n"],
    labels: Int[A, "*batch"],
    *,
    ignore_index: Annotated[int, Range(-(2**31), 2**31 - 1, typical=(-100, 0, -1))] = -100,
    label_smoothing: Annotated[float, Range(0.0, 1.0, typical=(0.0, 0.1))] = 0.0,
    z_loss: Annotated[float, Range(0.0, typical=(0.0, 1e-4))] = 0.0,
    return_lse: bool = False,
) -> CrossEntropyOut:
    """loss = log l + (1 - e) (m - x_t) + e (m - mean x) + z lse^2 of each row x of logits, t its label, in float32.

    With m = max x, or 0 where that is infinite, l = sum exp(x - m), lse = m + log l, e = label_smoothing and z =
    z_loss; in float64 for float64. A term whose factor e or z is 0 is left out. The sources are Szegedy et al. 2016,
    "Rethinking the inception architecture", section 7, for e, and de Brebisson and Vincent 2016, "The z-loss", in the
    form of Chowdhery et al. 2022, "PaLM", section 5, for z.

    Args:
      logits: (*batch, n), n classes a row; labels: (*batch), int32 or int64, the class of each row.
      ignore_index: a label whose row takes no part: whatever it holds, its loss, its lse and its gradients are 0.
      label_smoothing: the share of the target that all classes divide evenly, from 0 to 1.
      z_loss: the weight of lse^2, >= 0, which keeps logits near 0.
      return_lse: whether lse comes with the loss.

    Returns:
      loss: (*batch), float32 whatever the logits are (float64 for float64), not reduced; lse: of the same. NaN and
      infinities of a row reach its own loss by plain arithmetic: a -inf that is not the label adds nothing where e is
      0, one that is gives inf. What a label outside the classes gives is not promised; nothing is read out of bounds.
    """
    raise NotImplementedError


@cross_entropy.values("labels")
def with_ignored(rng, shape, dims, options):
    """Labels of which a fifth are ignored."""
    labels = rng.integers(0, dims["n"], shape)
    return np.where(rng.random(shape) < 0.2, options["ignore_index"], labels)


class LossTerms(NamedTuple):
    """What the loss of each row is made of, one number a row, before rounding.

    Attributes:
      counted: whether the row takes part; log: log l; lse; target: (1 - e) (m - x_t); even: e (m - mean x), 0 where e
        is; square: z lse^2, 0 where z is. weights: of the exponentials. mean: of |x|, 0 where e is 0.
    """

    counted: np.ndarray
    log: np.ndarray
    lse: np.ndarray
    target: np.ndarray
    even: np.ndarray
    square: np.ndarray
    weights: Exponentials
    mean: np.ndarray

    @classmethod
    def of(cls, call: Call) -> LossTerms:
        x, labels, n = call.arrays["logits"], call.arrays["labels"], call.dims["n"]
        e, z = call.options["label_smoothing"], call.options["z_loss"]
        counted = labels != call.options["ignore_index"]
        m = x.max(-1)
        m = np.where(np.isinf(m), 0.0, m)
        weights = Exponentials.of(x, -1)
        at = np.take_along_axis(x, np.clip(labels, 0, n - 1)[..., None], -1)[..., 0]
        log, none = np.log(weights.total[..., 0]), np.zeros(m.shape)
        lse = m + log
        even, mean = (e * (m - x.sum(-1) / n), np.abs(x).sum(-1) / n) if e else (none, none)
        return cls(counted, log, lse, (1 - e) * (m - at), even, z * lse**2 if z else none, weights, mean)

    def size(self) -> np.ndarray:
        """The sum of the magnitudes of the terms."""
        return np.abs(self.log) + np.abs(self.target) + np.abs(self.even) + self.square

    def in_order(self, call: Call) -> np.ndarray:
        """What a loss may be off by that is lse - (1 - e) x_t - e mean x: see the bound. 0 where no kernel that ran
        may add its terms so."""
        unit, e = units(call), call.options["label_smoothing"]
        if not unit.any_order:
            return np.zeros(self.log.shape)
        label = magnitude((1 - e) * (self.lse - self.log) - self.target)
        rest = 2 * label + magnitude(self.lse) * (1 + (unit.chain(call.dims["n"]) + 3) * e) if e else 0.0
        return np.asarray(unit.u * (magnitude(self.lse) + rest))

    def log_error(self, unit: Units, n: int) -> np.ndarray:
        """How far log l may be off: see logsumexp's bound, of which this is all but the addition of m."""
        share = 4 * unit.u * self.weights.entropy[..., 0] + unit.ex + (unit.chain(n) + 2) * unit.u
        return share + 4 * unit.u * (1 + np.abs(self.log)) + 2 * unit.tau

    def overflows(self, call: Call) -> np.ndarray:
        """Where a sum or a square on the way is beyond what is promised."""
        unit, n, x = units(call), call.dims["n"], magnitude(call.arrays["logits"])
        sums = (2 * x.max(-1) >= unit.huge) | (n * magnitude(self.mean) >= unit.huge)
        return sums | ((self.lse**2 >= unit.huge) if call.options["z_loss"] else False)


@cross_entropy.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bounds, each E (1 + U) + U |value| + eta with float32's U and eta, :class:`portakern.spec.tolerance.Units`:

        E of lse  = E_l + u |lse|, of lse_low 3 times that
        E of loss = E_l + 3u |T| + [(c_N + 3) u e mean |x| + 3u |V|] + z (2 |lse| E_lse + E_lse^2) + 4u Z
                    + 3u (|log l| + |T| + |V| + Z) + 4 tau

    E_l is what logsumexp's bound has for log l; T = (1 - e) (m - x_t), V = e (m - mean x), Z = z lse^2, c_N = chain(n).
    The label's logit is exact: T is a difference, a factor and a product, and so is V, with the sum and the quotient of
    the mean before it; Z has lse twice. Three additions put them together. Where the label is the largest logit by far,
    T is 0 and the loss as exact as log l is near 1.

    Taken as lse - x_t it would have lost u |lse|. That is another order of the same terms, as optax has it
    (``softmax_cross_entropy_with_integer_labels``): right where what ran never promised one, and then E of loss has

        u |lse| + [u (2 (1 - e) |x_t| + |lse|) + (c_N + 3) u e |lse|]

    besides, of which the bracket is there with smoothing: a product and a partial sum, and each class's x - lse.

    Nothing is promised where a difference m - x_t, the sum of |x| that a mean is made of, or lse^2 reaches 2^127. An
    ignored row is 0.
    """
    unit, n = units(call), call.dims["n"]
    with np.errstate(all="ignore"):
        part = LossTerms.of(call)
        of_log, z, e = part.log_error(unit, n), call.options["z_loss"], call.options["label_smoothing"]
        of_lse, lse = of_log + unit.u * np.abs(part.lse), np.abs(part.lse)
        err = of_log + 3 * unit.u * np.abs(part.target) + 3 * unit.u * part.size() + 4 * unit.tau
        err = err + part.in_order(call)
        if e:
            err = err + (unit.chain(n) + 3) * unit.u * e * part.mean + 3 * unit.u * np.abs(part.even)
        if z:
            err = err + z * (2 * lse * of_lse + of_lse**2) + 4 * unit.u * part.square
        err = np.where(part.overflows(call), inf, err)
    bounds = _stored(call, ref[:2], [np.where(part.counted, each, 0.0) for each in (err, of_lse)], round_to)
    return *bounds, None if ref[2] is None else low_bound(call, part.lse, np.where(part.counted, of_lse, 0.0))


def low_bound(call: Call, lse: np.ndarray, err: np.ndarray) -> np.ndarray:
    """The bound of lse_low, from how far lse may be off. Its reference is the rest of an lse that is rounded once;
    a kernel's is that of its own lse, and off by as much as that besides."""
    bound = 3 * round_to(err, lse, "float64" if call.dtype == "float64" else "float32")
    return np.where(np.isfinite(lse), bound, inf)


def _stored(call: Call, ref: tuple[Any, ...], errors: Any, store: Any) -> tuple[Any, ...]:
    return tuple(
        None if y is None else store(each, y, dtype)
        for each, y, (_, dtype) in zip(errors, ref, call.outputs.values(), strict=False)
    )


@cross_entropy.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS errors, with the symbols of the bound and k = KAPPA u:

        of lse:  store^2 + s_l^2 + k^2 lse^2,  s_l^2 what logsumexp has for log l
        of loss: store^2 + (1 + 2 z lse)^2 s_l^2 + 3 k^2 (T^2 + V^2 + 2 Z^2 + loss^2) + e^2 s^2(mean x)

    s^2(mean x) is ``mean_variance``; store the RMS error of storing (``store_spread``). In any order KAPPA of what the
    bound has for that comes to the loss.
    """
    n, unit = call.dims["n"], units(call)
    k2, z, e = (KAPPA * unit.u) ** 2, call.options["z_loss"], call.options["label_smoothing"]
    with np.errstate(all="ignore"):
        part, x = LossTerms.of(call), call.arrays["logits"]
        w, entropy = part.weights, part.weights.entropy[..., 0]
        own = (w.p**2 * (w.d**2 + 1)).sum(-1)
        of_log = (unit.u * entropy) ** 2 + (unit.ex / 4) ** 2 + k2 * (unit.chain(n) / 3 + own + 2 + 2 * part.log**2)
        loss2 = part.target**2 + part.even**2 + 2 * part.square**2 + part.size() ** 2
        variance = (1 + 2 * z * part.lse) ** 2 * of_log + 3 * k2 * loss2 + (KAPPA * part.in_order(call)) ** 2
        if e:
            variance = variance + e**2 * mean_variance(x, -1, unit.chain(n), k2)[..., 0]
        spreads = [np.where(part.counted, np.sqrt(v), 0.0) for v in (variance, of_log + k2 * part.lse**2)]
        found = _stored(call, ref[:2], spreads, lambda own, y, dtype: np.hypot(store_spread(y, dtype), own))
    return *found, None if ref[2] is None else np.full(ref[2].shape, inf)


@cross_entropy.exact
def exact(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """An ignored row is 0, whatever its logits are."""
    ignored = call.arrays["labels"] == call.options["ignore_index"]
    return tuple(None if y is None else ignored for y in ref)


@cross_entropy.edge(dims={"n": (2, 140)})
def ignored_rows_of_nan(arrays, rng, options):
    """NaN and infinities in an ignored row reach nothing."""
    arrays["logits"][arrays["labels"] == options["ignore_index"]] = rng.choice([np.nan, inf, -inf])


@cross_entropy.edge(dims={"batch": (3, 7), "n": (2, 40)})
def every_row_is_ignored(arrays, rng, options):
    """A batch of nothing but padding: zeros."""
    arrays["labels"][...] = options["ignore_index"]


@cross_entropy.edge(dims={"n": (2, 140)}, options={"label_smoothing": 0.0})
def hidden_classes(arrays, rng, options):
    """Logits of -inf, as a mask on a vocabulary makes them, add nothing; the label among them gives inf."""
    hidden = rng.random(arrays["logits"].shape) < 0.3
    arrays["logits"][hidden] = -inf


@cross_entropy.edge(dims={"n": (2, 140)})
def infinite_logits(arrays, rng, options):
    """A +inf makes lse inf; the loss is inf beside a finite label and NaN at it."""
    plant(rng, arrays["logits"], rng.choice([inf, np.nan]))


@cross_entropy.edge(dims={"n": (2, 140)}, options={"label_smoothing": 0.0, "z_loss": 0.0})
def certain_rows(arrays, rng, options):
    """The label is above the others by 3 to 15 and all are far from 0: the loss is small and keeps its digits."""
    rows, labels = arrays["logits"], np.clip(arrays["labels"], 0, arrays["logits"].shape[-1] - 1)
    rows[...] = 32 + 0.25 * np.round(rows)
    np.put_along_axis(rows, labels[..., None], 36 + rng.uniform(3, 15), -1)


@cross_entropy.edge(dims={"n": (300, 1030)}, smallest_tiles=True)
def rising_rows(arrays, rng, options):
    """Every tile raises the maximum, so that every tile rescales the sum."""
    arrays["logits"][...] = np.linspace(-8, 8, arrays["logits"].shape[-1])


@cross_entropy.edge(dims={"batch": (1, 1), "n": (257, 390)}, options={"label_smoothing": 0.3}, smallest_tiles=True)
def labels_at_both_ends(arrays, rng, options):
    """The first or the last class, in several tiles of which the last is ragged; all classes share the target.

    Of one row, as a tile of several rows may have to be a wide one.
    """
    arrays["labels"][...] = rng.choice([0, arrays["logits"].shape[-1] - 1], arrays["labels"].shape)


@cross_entropy.edge(dims={"n": (120, 390)}, options={"label_smoothing": 1.0}, smallest_tiles=True)
def all_of_the_target_is_even(arrays, rng, options):
    """e = 1: the label does not matter, and each class of each tile as much as any other."""


@cross_entropy.edge(dims={"n": (2, 140)}, options={"z_loss": 0.5})
def a_heavy_z_loss(arrays, rng, options):
    """lse^2 is most of the loss, and lse far from 0."""
    arrays["logits"] += 20


@cross_entropy.edge(dims={"n": (1, 1)})
def one_class(arrays, rng, options):
    """The only class is certain."""


@cross_entropy.law
def rows_are_independent(run, draw):
    """A row alone gives the same bits as among others."""
    rows, n = draw.extent(2, 40), draw.extent(1, 300)
    x, labels = draw.normal(rows, n), draw.integers(0, n - 1, rows, dtype="int64")
    first = draw.extent(0, rows - 1)
    row = slice(first, first + 1)
    draw.same_bits(run(x[row], labels[row]), run(x, labels)[row], "a row alone")


@cross_entropy.law
def the_integer_type_does_not_matter(run, draw):
    """Labels in int32 and in int64 give the same bits."""
    rows, n = draw.extent(1, 20), draw.extent(1, 300)
    x, labels = draw.normal(rows, n), draw.integers(0, n - 1, rows, dtype="int64")
    draw.same_bits(run(x, labels.astype(np.int32)), run(x, labels.astype(np.int64)), "labels in the other type")


@cross_entropy.law
def a_certain_label_costs_nothing(run, draw):
    """A label whose logit is above the others by 200 has a loss of 0, and any other label its distance, to the bit."""
    rows, n = draw.extent(1, 9), draw.extent(2, 300)
    x, labels = draw.integers(-8, 8, rows, n), draw.integers(0, n - 1, rows, dtype="int64")
    np.put_along_axis(x, labels[:, None], x.dtype.type(248), -1)
    other = (labels + 1) % n
    beside = np.take_along_axis(x, other[:, None], -1)[:, 0]
    draw.same_bits(run(x, labels), np.zeros(rows, run(x, labels).dtype), "a certain label")
    wide = run(x, other)
    draw.same_bits(wide, (248 - beside.astype(wide.dtype)), "another label")


cross_entropy.sample("rows", dims={"batch": (5,), "n": 7})
cross_entropy.sample("two_axes", dims={"batch": (2, 3), "n": 4}, options={"ignore_index": 0})
cross_entropy.sample("smoothed", dims={"batch": (5,), "n": 7}, options={"label_smoothing": 0.1, "z_loss": 1e-2})
cross_entropy.sample("with_lse", dims={"batch": (5,), "n": 7}, options={"return_lse": True})


# ---------------------------------------------------------------------------------------------------------- gradient
class CrossEntropyVjpOut(NamedTuple):
    d_logits: Float[A, "*batch n"]


@spec(
    tiling={"block_rows": Tile(1, 256), "block_n": Tile(128, 65536, of="n")},
    require=(LABELS, AMONG_CLASSES),
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
    first_class: Annotated[int, Range(0, 2**31 - 1, typical=(0, 3, 40))] = 0,
    classes: Annotated[int, Range(1, 2**31 - 1, typical=(1000, 5000))] | None = None,
) -> CrossEntropyVjpOut:
    """d_logits_j = d_loss [p_j (1 + 2 z lse) - (1 - e) [j = t] - e / n], p = exp(min(logits - lse - lse_low, 0)).

    With t the label, e = label_smoothing and z = z_loss; in float32, in float64 for float64.

    Of a part of the classes the gradient needs no other part, given lse of all: the logits are those of n classes from
    ``first_class`` on, of ``classes`` in all, for which n above then stands.

    Args:
      logits, labels, ignore_index, label_smoothing, z_loss: what cross_entropy was given.
      first_class, classes: which of all classes the logits are of; classes None: they are the last. Labels, lse and
        lse_low are those of all classes.
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
    part = LossTerms.of(call)
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
        own = call.options["first_class"] + np.arange(n)
        apart = apart_of(x, lse, call.arrays["lse_low"])
        p = np.exp(np.minimum(apart, 0.0))
        d = np.where(p > 0, magnitude(apart), 0.0)
        w = (1 + 2 * z * magnitude(lse))[..., None]
        hit = (1 - e) * (own == labels[..., None]) + e / classes_of(call)
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
def bound_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
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
def sigma_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
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
def exact_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """An ignored row is 0, whatever its logits and its cotangent are."""
    ignored = call.arrays["labels"] == call.options["ignore_index"]
    return (np.broadcast_to(ignored[..., None], ref[0].shape),)


@cross_entropy_vjp.edge(dims={"n": (2, 140)})
def ignored_rows_of_nan_vjp(arrays, rng, options):
    """NaN and infinities in an ignored row, and in its cotangent, reach nothing."""
    ignored = arrays["labels"] == options["ignore_index"]
    arrays["logits"][ignored] = rng.choice([np.nan, inf, -inf])
    arrays["d_loss"][ignored] = rng.choice([np.nan, inf])


@cross_entropy_vjp.edge(dims={"n": (2, 140)})
def hidden_classes_vjp(arrays, rng, options):
    """Logits of -inf have a gradient of 0 but for their share of the target."""
    hidden = rng.random(arrays["logits"].shape) < 0.3
    hidden[..., 0] = False
    arrays["logits"][hidden] = -inf


@cross_entropy_vjp.edge(dims={"n": (2, 140)})
def infinite_logits_vjp(arrays, rng, options):
    """A +inf makes NaN of its own element and of no other of its row; a NaN of all of it."""
    plant(rng, arrays["logits"], rng.choice([inf, np.nan]))


@cross_entropy_vjp.edge(dims={"n": (2, 140)})
def nan_or_inf_in_cotangents(arrays, rng, options):
    """An infinite cotangent gives infinities by the sign of the bracket, a NaN a row of NaN."""
    arrays["d_loss"][rng.random(arrays["d_loss"].shape) < 0.5] = rng.choice([np.nan, inf, -inf])


cross_entropy_vjp.edge(dims={"batch": (1, 1), "n": (257, 390)}, options={"label_smoothing": 0.3}, smallest_tiles=True)(
    labels_at_both_ends
)


@cross_entropy_vjp.edge(dims={"n": (2, 140)}, options={"z_loss": 0.5})
def a_heavy_z_loss_vjp(arrays, rng, options):
    """2 z lse is most of what p meets."""
    arrays["logits"] += 20


@cross_entropy_vjp.edge(dims={"n": (1, 1)})
def one_class_vjp(arrays, rng, options):
    """The only class is certain: p is 1, and so is its target."""


@cross_entropy_vjp.law
def rows_are_independent_vjp(run, draw):
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


@cross_entropy_vjp.law
def parts_of_the_classes_are_parts_of_the_gradient(run, draw):
    """The gradient by the logits of some classes, given the lse of all, has the bits that it has among all."""
    rows, n = draw.extent(1, 20), draw.extent(2, 300)
    x, labels = draw.normal(rows, n), draw.integers(0, n - 1, rows, dtype="int64")
    wide = "float64" if draw.dtype == "float64" else "float32"
    lse, d_loss = draw.integers(2, 9, rows, dtype=wide), draw.integers(1, 9, rows, dtype=wide)
    first = draw.extent(1, n - 1)
    part = run(x[:, first:], labels, lse, d_loss, first_class=first, classes=n)[0]
    draw.same_bits(part, run(x, labels, lse, d_loss)[0][:, first:], "a part of the classes")


cross_entropy_vjp.sample("a_part", dims={"batch": (5,), "n": 7}, options={"first_class": 3, "classes": 1000})
