"""Cross entropy of logits with integer labels."""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Float32, Int

from portakern.spec import Rule, Tile, spec
from portakern.spec.options import Range
from portakern.spec.tolerance import KAPPA, Units, magnitude, round_to, store_spread, units
from portakern.specs._rows import mean_variance, plant
from portakern.specs.logsumexp import Weights

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
    """Whether each label is one of the n classes or the ignored one."""
    labels = call.arrays["labels"]
    return bool(((labels == call.options["ignore_index"]) | ((labels >= 0) & (labels < call.dims["n"]))).all())


LABELS = Rule(names_a_class, "labels must be from 0 to n - 1, or ignore_index", values=True)


@spec(
    tiling={"block_rows": Tile(1, 256), "block_n": Tile(128, 65536, of="n")},
    require=(LABELS,),
    positive=("n",),
    returns={"lse": "return_lse"},
    saved=LowSaved,
    apart=("batch",),
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


class Parts(NamedTuple):
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
    weights: Weights
    mean: np.ndarray

    @classmethod
    def of(cls, call: Call) -> Parts:
        x, labels, n = call.arrays["logits"], call.arrays["labels"], call.dims["n"]
        e, z = call.options["label_smoothing"], call.options["z_loss"]
        counted = labels != call.options["ignore_index"]
        m = x.max(-1)
        m = np.where(np.isinf(m), 0.0, m)
        weights = Weights.of(x, -1)
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
        part = Parts.of(call)
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


def _stored(call: Call, ref: tuple[Any, ...], of: Any, store: Any) -> tuple[Any, ...]:
    return tuple(
        None if y is None else store(each, y, dtype)
        for each, y, (_, dtype) in zip(of, ref, call.outputs.values(), strict=False)
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
        part, x = Parts.of(call), call.arrays["logits"]
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
