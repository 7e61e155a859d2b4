"""The merge of two attentions over disjoint sets of keys into the attention over all of them, and its gradients.

With natural logarithms, w_a = 1 / (1 + exp(lse_b - lse_a)) and w_b = 1 - w_a:

    o = w_a o_a + w_b o_b        lse = log(exp(lse_a) + exp(lse_b))
    d_o_a = w_a d_o              d_lse_a = w_a d_lse + w_a w_b sum d_o (o_a - o_b)

and d_o_b and d_lse_b likewise, with a and b exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Float32

from portakern.spec import Tile, spec
from portakern.spec.tolerance import KAPPA, Units, format_of, magnitude, store_spread, units
from portakern.specs._gradients import doubled, each_alone, stored_bounds

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class MergeStatesOut(NamedTuple):
    o: Float[A, "*batch tokens heads d"]
    lse: Float32[A, "*batch heads tokens"]


def elements(call: Call) -> int:
    """The numbers of one part's o."""
    return prod(call.dims["batch"]) * call.dims["tokens"] * call.dims["heads"] * call.dims["d"]


@spec(
    tiling={"block_rows": Tile(1, 1024)},
    positive=("d",),
    apart=("batch", "tokens", "heads"),
    vjp="merge_states_vjp",
    typical={"batch": (), "tokens": 4096, "heads": 32, "d": 128},
    flops=lambda call: 3.0 * elements(call),
)
def merge_states(
    o_a: Float[A, "*batch tokens heads d"],
    lse_a: Float32[A, "*batch heads tokens"],
    o_b: Float[A, "*batch tokens heads d"],
    lse_b: Float32[A, "*batch heads tokens"],
) -> MergeStatesOut:
    """o = w_a o_a + w_b o_b and lse = log(exp(lse_a) + exp(lse_b)), with w_a = 1 / (1 + exp(lse_b - lse_a)).

    Logarithms are natural, as those of ``attention`` are: multiply a lse of base 2, such as FlashInfer's, by log(2)
    before. Parts are the attentions of the same queries over disjoint sets of keys: a shared prefix and a suffix,
    chunks of a long context, or what each device of a ring holds. The merge of all parts, in any order, is the
    attention over all keys, but for rounding. In float32 (float64 for float64).

    The source is Dao, Haziza, Massa, Sizov 2023, "Flash-Decoding"; the weights are those of cascade inference
    (Ye et al. 2024).

    Args:
      o_a, o_b: (*batch, tokens, heads, d), the outputs over either set of keys. lse_a, lse_b: (*batch, heads, tokens),
        float32 (float64 beside float64), their log-sum-exp. These are the layouts of the results of ``attention`` with
        ``return_lse``.

    Returns:
      o: the shape and dtype of o_a; lse: the shape of lse_a. Where parts a and b are exchanged the bits are the same.

      A part whose lse is -inf saw no key: its o is not read, so that NaN in it reaches nothing, and the result is the
      other part, to the bit. Where both are -inf, o is 0 and lse -inf. Otherwise by the formula: NaN in o reaches its
      own element, and NaN in lse its row of o and its lse. A lse of +inf outweighs any other (0 times an infinite o is
      NaN); two of them have no weights: o is NaN and lse +inf.
    """
    raise NotImplementedError


def beside(numbers: np.ndarray) -> np.ndarray:
    """One number a token and head, (*batch, heads, tokens), as it stands beside o: (*batch, tokens, heads, 1)."""
    return np.swapaxes(numbers, -1, -2)[..., None]


class Weights(NamedTuple):
    """What is known of the weights of two parts, and how far rounding may move them; (*batch, heads, tokens).

    Attributes:
      a, b: the weights, of which 1/2 stands for a NaN. apart: D = |lse_a - lse_b|, 0 where no rounding matters.
      share: the share by which exp(-D) may err. log: log(1 + exp(-D)).
      empty_a, empty_b: whether a part saw no key.
    """

    a: np.ndarray
    b: np.ndarray
    apart: np.ndarray
    share: np.ndarray
    log: np.ndarray
    empty_a: np.ndarray
    empty_b: np.ndarray

    @classmethod
    def of(cls, call: Call, unit: Units) -> Weights:
        """The difference of the lse rounds by u D, and exp errs by 4u D + ex. A lse that is subnormal may be read as 0:
        2 tau. exp(-inf) is 0, exactly."""
        lse_a, lse_b = call.arrays["lse_a"], call.arrays["lse_b"]
        with np.errstate(all="ignore"):
            signed = np.nan_to_num(lse_a - lse_b, nan=0.0, posinf=inf, neginf=-inf)
            e = np.exp(-np.abs(signed))
            high, low = 1 / (1 + e), e / (1 + e)
            a, b = np.where(signed >= 0, high, low), np.where(signed >= 0, low, high)
            apart = np.where(np.isfinite(signed), np.abs(signed), 0.0)
            share = np.minimum(5 * unit.u * apart + unit.ex + 2 * unit.tau, 1.0)  # of more, exp(-D) is 0
            share = np.where(np.isfinite(signed), share, 0.0)
            return cls(a, b, apart, share, np.log1p(e), np.isneginf(lse_a), np.isneginf(lse_b))

    def errors(self, unit: Units) -> tuple[np.ndarray, np.ndarray]:
        """The shares by which w_a and w_b err: of exp(-D) that of the other weight; a sum of u, a quotient of 4u and,
        of the smaller one, a product. A weight below tau may be lost."""
        return self.b * self.share + 6 * unit.u, self.a * self.share + 6 * unit.u

    def lean(self, unit: Units) -> np.ndarray:
        """The RMS error of exp(-D), as a share: the constant of exp leans one way in all elements alike, and so does
        exp itself; the difference and the argument of exp2 round."""
        rounded = np.sqrt(1 + 2 * KAPPA**2) * unit.u * self.apart
        return np.hypot(np.minimum(rounded, 1.0), unit.ex / 4)


def faint(weight: np.ndarray, unit: Units) -> np.ndarray:
    """Where a weight that is not 0 may become 0."""
    return (weight > 0) & (weight < 2 * unit.tau)


def read(call: Call, w: Weights) -> tuple[np.ndarray, np.ndarray]:
    """o_a and o_b, with 0 for those of parts that saw no key, which are not read."""
    return tuple(
        np.where(beside(empty), 0.0, call.arrays[name]) for name, empty in (("o_a", w.empty_a), ("o_b", w.empty_b))
    )  # type: ignore[return-value]


@merge_states.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bounds, with D = |lse_a - lse_b|, x = 5u D + ex and :class:`portakern.spec.tolerance.Units`:

        B = E (1 + U) + U |ref| + eta
        E of o = |w_a o_a| (w_b x + 8u) + |w_b o_b| (w_a x + 8u) + tau (|o_a| + |o_b| + 5)
        E of lse = min(w_a, w_b) x + u + 4u (1 + log(1 + exp(-D))) + u |lse| + 2 tau

    x is the share by which exp(-D) errs: the difference rounds, and exp errs by 4u D + ex. A weight is moved by the
    other weight's part of it, by a sum, a quotient of 4u and a product: 6u; then a product with o and a sum. tau: each
    weight may flush, beside o, each number of o, beside a weight of at most 1, each product and the sum. The logarithm
    is that of 1 + exp(-D), which rounds by u; it errs by 4u of 1 and of itself, and is added to the larger lse.

    Nothing is promised where |w_a o_a| + |w_b o_b| reaches 2^127, nor where an infinity meets a weight that may
    become 0.
    """
    unit = units(call)
    with np.errstate(all="ignore"):
        w = Weights.of(call, unit)
        err = unit.tau * 5 + np.zeros(ref[0].shape)
        total, unsure = np.zeros(ref[0].shape), np.zeros(ref[0].shape, bool)
        for o, weight, share in zip(read(call, w), (w.a, w.b), w.errors(unit), strict=True):
            part = beside(weight) * magnitude(o)
            err += part * (beside(share) + 2 * unit.u) + unit.tau * magnitude(o)
            total += part
            unsure |= np.isinf(o) & beside(faint(weight, unit))
        err = np.where(unsure | (total >= unit.huge), inf, err)
        lse = np.minimum(w.a, w.b) * w.share + unit.u * (5 + 4 * w.log) + unit.u * magnitude(ref[1]) + 2 * unit.tau
    return stored_bounds(call, ref, (err, lse))


@merge_states.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS errors, with the symbols of the bounds, k = KAPPA u and e^2 = (u D)^2 + (ex/4)^2 + 2 (k D)^2 the variance
    of exp(-D):

        of o: store^2 + (1 + 8/M) [(w_a w_b (o_a - o_b))^2 e^2 + 6 k^2 o^2] + 2 k^2 [(w_a o_a)^2 + (w_b o_b)^2] + lost^2
        of lse: store^2 + min(w_a, w_b)^2 e^2 + k^2 [2 + 2 log^2(1 + exp(-D)) + lse^2]

    store is that of storing (``store_spread``). Where one weight grows the other shrinks. Both have 1 / (1 + exp(-D)):
    a sum and a quotient, of twice a rounding; and o its own sum: 6. These errors are one draw for all d numbers of a
    row: 8/M makes room for what M rows may draw. Each part has a product, and the smaller weight one more. lost is what
    the bound has with tau, all of it.
    """
    unit = units(call)
    rows, k = max(elements(call) // call.dims["d"], 1), KAPPA * unit.u
    with np.errstate(all="ignore"):
        w = Weights.of(call, unit)
        lean, (a, b) = w.lean(unit), (np.where(np.isfinite(o), o, 0.0) for o in read(call, w))
        shared = np.hypot(beside(w.a * w.b * lean) * (a - b), np.sqrt(6) * k * magnitude(ref[0]))
        own = np.sqrt(2) * k * np.hypot(beside(w.a) * a, beside(w.b) * b)
        lost = unit.tau * (np.abs(a) + np.abs(b) + 5)
        o = np.hypot(np.hypot(np.sqrt(1 + 8 / rows) * shared, own), lost)
        lse = np.hypot(np.minimum(w.a, w.b) * lean, k * np.sqrt(2 + 2 * w.log**2 + magnitude(ref[1]) ** 2))
    return spreads(call, ref, (o, lse))


@merge_states.exact
def exact(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Where a part saw no key the other is the result."""
    unit = units(call)
    w = Weights.of(call, unit)
    alone = w.empty_a | w.empty_b
    return tuple(
        where & ((np.abs(y) >= max(unit.tau, format_of(dtype).eta)) | (y == 0))
        for where, y, (_, dtype) in zip((beside(alone), alone), ref, call.outputs.values(), strict=True)
    )


def spreads(call: Call, ref: tuple[Any, ...], errors: Sequence[Any]) -> tuple[Any, ...]:
    """The RMS errors as results are stored, from those before; None for one that is not wanted. Of roots, since the
    square of a small weight is 0."""
    return tuple(
        None if y is None else np.hypot(store_spread(y, dtype), error)
        for error, y, (_, dtype) in zip(errors, ref, call.outputs.values(), strict=True)
    )


def some(rng: np.random.Generator, arrays: Any, name: str, share: float, *values: float) -> None:
    """Plant one of the values in a share of the elements."""
    array = arrays[name]
    array[rng.random(array.shape) < share] = rng.choice(values)


def one_of(rng: np.random.Generator, stem: str) -> str:
    return str(rng.choice([f"{stem}_a", f"{stem}_b"]))


ROWS = {"tokens": (1, 20), "heads": (1, 4), "d": (1, 70)}


@merge_states.edge(dims=ROWS)
def parts_without_keys(arrays, rng, options):
    """A part whose lse is -inf is not read: whatever its o holds reaches nothing."""
    for part in "ab":
        empty = rng.random(arrays[f"lse_{part}"].shape) < 0.4
        arrays[f"lse_{part}"][empty] = -inf
        arrays[f"o_{part}"][np.broadcast_to(beside(empty), arrays[f"o_{part}"].shape)] = rng.choice([np.nan, inf, 3.0])


@merge_states.edge(dims=ROWS)
def no_keys_at_all(arrays, rng, options):
    """Two parts without keys give zeros, and -inf."""
    for part in "ab":
        arrays[f"lse_{part}"][...] = -inf
        arrays[f"o_{part}"][...] = np.nan


@merge_states.edge(dims=ROWS)
def special_numbers(arrays, rng, options):
    """An infinity or NaN in o reaches its own element."""
    some(rng, arrays, one_of(rng, "o"), 0.2, inf, -inf, np.nan)


@merge_states.edge(dims=ROWS)
def special_log_sums(arrays, rng, options):
    """A lse of +inf outweighs the other, two of them leave no weight; NaN reaches its row and lse."""
    for part in "ab":
        some(rng, arrays, f"lse_{part}", 0.3, inf, np.nan)


@merge_states.edge(dims=ROWS)
def far_log_sums(arrays, rng, options):
    """exp(lse) overflows or is 0 in both parts: the difference is taken first."""
    offset = rng.choice([-1000.0, 200.0, 5000.0], arrays["lse_a"].shape)
    for part in "ab":
        arrays[f"lse_{part}"] += offset


@merge_states.edge(dims=ROWS)
def a_small_weight_counts(arrays, rng, options):
    """Differences of 10 to 20 beside values that make up for them: a small weight is as exact as any."""
    gap = rng.uniform(10, 20, arrays["lse_a"].shape)
    arrays[one_of(rng, "lse")] += gap
    large = one_of(rng, "o")
    arrays[large] *= 2000


@merge_states.edge(dims=ROWS)
def cancelling_parts(arrays, rng, options):
    """Equal weights, and parts that all but cancel: the error is a share of the parts, and not of what is left."""
    arrays["lse_b"][...] = arrays["lse_a"]
    arrays["o_b"][...] = -arrays["o_a"] * (1 + 2.0**-9)


@merge_states.edge(dims=ROWS)
def sums_of_one(arrays, rng, options):
    """exp(lse_a) + exp(lse_b) near 1: a lse near 0 is as exact as others are."""
    share = rng.uniform(0.1, 0.9, arrays["lse_a"].shape)
    arrays["lse_a"][...], arrays["lse_b"][...] = np.log(share), np.log1p(-share)


@merge_states.edge(dims={"batch": (1, 3), "tokens": (3, 40), "heads": (1, 3), "d": (1, 9)}, smallest_tiles=True)
def several_ragged_tiles(arrays, rng, options):
    """The last token of the last tile counts as any other."""


@merge_states.edge(dims={"batch": (1, 1), "tokens": (1, 1), "heads": (1, 1), "d": (1, 1)})
def one_number(arrays, rng, options):
    """The smallest state."""


def drawn_states(draw: Any) -> tuple[np.ndarray, ...]:
    """Two states of some tokens and heads."""
    tokens, heads, d = draw.extent(1, 40), draw.extent(1, 5), draw.extent(1, 130)
    return tuple(a for _ in range(2) for a in (draw.normal(2, tokens, heads, d), log_sums(draw, 2, heads, tokens)))


def log_sums(draw: Any, *shape: int) -> np.ndarray:
    """lse as attentions have them, in their dtype."""
    return (3 * draw.rng.standard_normal(shape)).astype(np.float64 if draw.dtype == "float64" else np.float32)


@merge_states.law
def either_part_may_be_the_first(run, draw):
    """Parts that are exchanged give the same bits."""
    o_a, lse_a, o_b, lse_b = drawn_states(draw)
    lse_b[draw.rng.random(lse_b.shape) < 0.1] = -inf
    once, turned = run(o_a, lse_a, o_b, lse_b), run(o_b, lse_b, o_a, lse_a)
    draw.same_bits(turned[0], once[0], "o of parts exchanged")
    draw.same_bits(turned[1], once[1], "lse of parts exchanged")


@merge_states.law
def a_part_without_keys_changes_nothing(run, draw):
    """A lse of -inf beside an o of NaN leaves the other part, to the bit."""
    o_a, lse_a, o_b, lse_b = drawn_states(draw)
    o_b[...], lse_b[...] = np.nan, -inf
    o, lse = run(o_a, lse_a, o_b, lse_b)
    draw.same_bits(o, o_a, "o beside a part without keys")
    draw.same_bits(lse, lse_a, "lse beside a part without keys")


@merge_states.law
def rows_are_independent(run, draw):
    """A token alone, and a head alone, give the same bits as among others."""
    states = drawn_states(draw)
    _, tokens, heads, _ = states[0].shape
    i, h = draw.extent(0, tokens - 1), draw.extent(0, heads - 1)
    token, head = slice(i, i + 1), slice(h, h + 1)
    whole = run(*states)
    alone = run(*(a[:, token] if a.ndim == 4 else a[:, :, token] for a in states))
    draw.same_bits(alone[0], whole[0][:, token], "o of a token alone")
    draw.same_bits(alone[1], whole[1][:, :, token], "lse of a token alone")
    alone = run(*(a[:, :, head] if a.ndim == 4 else a[:, head] for a in states))
    draw.same_bits(alone[0], whole[0][:, :, head], "o of a head alone")


@merge_states.law
def a_common_offset_moves_lse_alone(run, draw):
    """Where the sums are exact, the same number added to both lse changes no bit of o."""
    o_a, lse_a, o_b, lse_b = drawn_states(draw)
    lse_a, lse_b = np.rint(lse_a), np.rint(lse_b)
    more = lse_a.dtype.type(draw.extent(1, 200))
    moved = run(o_a, lse_a + more, o_b, lse_b + more)[0]
    draw.same_bits(moved, run(o_a, lse_a, o_b, lse_b)[0], "o under another offset")


@merge_states.law
def equal_parts_are_their_mean(run, draw):
    """Equal lse have weights of 1/2: parts that are even integers have their mean, to the bit."""
    o_a, lse_a, o_b, _ = drawn_states(draw)
    o_a, o_b = (2 * draw.integers(-50, 50, *o.shape) for o in (o_a, o_b))
    half = o_a.dtype.type(0.5)
    draw.same_bits(run(o_a, lse_a, o_b, lse_a)[0] + 0, half * o_a + half * o_b + 0, "the mean of two parts")


@merge_states.law
def powers_of_two_scale_exactly(run, draw):
    """Parts that are doubled double o, to the bit, and leave lse."""
    o_a, lse_a, o_b, lse_b = drawn_states(draw)
    two = o_a.dtype.type(2)
    o_a, o_b = (o * o.dtype.type(64) for o in (o_a, o_b))  # far from subnormal results
    once, twice = run(o_a, lse_a, o_b, lse_b), run(o_a * two, lse_a, o_b * two, lse_b)
    draw.same_bits(twice[0], once[0] * two, "o of parts doubled")
    draw.same_bits(twice[1], once[1], "lse of parts doubled")


merge_states.sample("packed", dims={"batch": (), "tokens": 5, "heads": 2, "d": 4})
merge_states.sample("batched", dims={"batch": (2,), "tokens": 3, "heads": 2, "d": 5})
merge_states.sample("two_batch_axes", dims={"batch": (2, 2), "tokens": 3, "heads": 1, "d": 3})


# ---------------------------------------------------------------------------------------------------------- gradient
class MergeStatesVjpOut(NamedTuple):
    d_o_a: Float[A, "*batch tokens heads d"]
    d_lse_a: Float32[A, "*batch heads tokens"]
    d_o_b: Float[A, "*batch tokens heads d"]
    d_lse_b: Float32[A, "*batch heads tokens"]


@spec(
    tiling={"block_rows": Tile(1, 1024)},
    positive=("d",),
    apart=("batch", "tokens", "heads"),
    flops=lambda call: 5.0 * elements(call),
)
def merge_states_vjp(
    o_a: Float[A, "*batch tokens heads d"],
    lse_a: Float32[A, "*batch heads tokens"],
    o_b: Float[A, "*batch tokens heads d"],
    lse_b: Float32[A, "*batch heads tokens"],
    d_o: Float[A, "*batch tokens heads d"],
    d_lse: Float32[A, "*batch heads tokens"] | None = None,
) -> MergeStatesVjpOut:
    """d_o_a = w_a d_o and d_lse_a = w_a d_lse + w_a w_b S, S = sum d_o (o_a - o_b) over d; b likewise, exchanged.

    w_a = 1 / (1 + exp(lse_b - lse_a)), w_b = 1 - w_a, made again from both lse. In float32 (float64 for float64).

    Args:
      o_a, lse_a, o_b, lse_b: what merge_states was given.
      d_o, d_lse: cotangents of o (its dtype) and lse (float32; float64 beside float64); d_lse None is 0.

    Returns:
      d_o_a, d_lse_a, d_o_b, d_lse_b: the shapes and dtypes of what they are the gradients of. A part whose lse is -inf
      has gradients of 0, whatever the cotangents hold, and its o is not read: the other part's are then d_o and d_lse,
      to the bit. NaN and infinities otherwise reach what the formula says: one in d_o or o its row's d_lse.
    """
    raise NotImplementedError


class Slopes(NamedTuple):
    """Of each row S = sum d_o (o_a - o_b), and how far rounding may move it; (*batch, heads, tokens).

    Attributes:
      total: S, 0 where it is not finite, and not finite: whether it is not.
      size: T = sum |d_o (o_a - o_b)|; square_root: of the sum of the squared terms. lost: what may flush of it.
      unsure: whether an infinity may meet a 0, or a term overflow.
    """

    total: np.ndarray
    infinite: np.ndarray
    size: np.ndarray
    square_root: np.ndarray
    lost: np.ndarray
    unsure: np.ndarray

    @classmethod
    def of(cls, call: Call, w: Weights, unit: Units) -> Slopes:
        """Of rows in which a part saw no key: 0, as nothing is read there."""
        both = beside(~(w.empty_a | w.empty_b))
        (a, b), d_o = read(call, w), np.where(both, call.arrays["d_o"], 0.0)
        apart = np.where(both, a - b, 0.0)
        terms, distance, d = d_o * apart, magnitude(apart), magnitude(d_o)
        far = np.isfinite(a) & np.isfinite(b) & (np.abs(a) + np.abs(b) >= unit.huge) & both
        flushed = np.isinf(apart) & (d_o != 0) & (d < unit.tau) & np.isfinite(d_o)
        flushed |= np.isinf(d_o) & (distance < 2 * unit.tau) & ((a != 0) | (b != 0)) & np.isfinite(apart)
        size = (d * distance).sum(-1)
        lost = unit.tau * (3 * d.sum(-1) + distance.sum(-1) + 3 * d.shape[-1])
        total = terms.sum(-1)
        unsure = (far | flushed).any(-1) | (size >= unit.huge)
        square_root = np.sqrt(((d * distance) ** 2).sum(-1))
        found = np.where(np.isfinite(total), total, 0.0), ~np.isfinite(total), size, square_root, lost, unsure
        return cls(*(np.swapaxes(x, -1, -2) for x in found))


def cotangents(call: Call) -> np.ndarray:
    """d_lse, 0 where there is none."""
    d_lse = call.arrays["d_lse"]
    return np.zeros(call.arrays["lse_a"].shape) if d_lse is None else np.asarray(d_lse)


@merge_states_vjp.tolerance
def bound_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bounds, with the symbols of merge_states', T = sum |d_o (o_a - o_b)| and c = chain(d):

        B = E (1 + U) + U |ref| + eta
        E of d_o_a = |w_a d_o| (w_b x + 7u) + tau (|d_o| + 2)
        E of d_lse_a = |w_a d_lse| (w_b x + 8u) + w_a w_b [|S| (x + 15u) + (c + 2) u T] + tau (...)

    and of b with a and b exchanged. The weights err as in merge_states; a product follows, and in d_lse a sum. Each
    weight of w_a w_b errs by 6u and its part of x, both parts being x; two products follow and the sum: 15u. S has a
    difference and a product for each term, and its sum. tau: what flushes of d_o and o, of a difference and of a
    product in S, of a weight beside d_lse and S, and of each product.

    Nothing is promised of d_lse where T, or a pair of |o_a| + |o_b|, reaches 2^127, nor where an infinity meets what
    may become 0.
    """
    unit, d_lse = units(call), cotangents(call)
    with np.errstate(all="ignore"):
        w = Weights.of(call, unit)
        s = Slopes.of(call, w, unit)
        d_o, pair, found = call.arrays["d_o"], w.a * w.b, []
        slope = pair * (np.abs(s.total) * (w.share + 15 * unit.u) + (unit.chain(call.dims["d"]) + 2) * unit.u * s.size)
        slope = slope + unit.tau * (3 * np.abs(s.total) + 6) + s.lost
        unsure = s.unsure | (s.infinite & faint(pair, unit))
        for weight, share, empty in zip((w.a, w.b), w.errors(unit), (w.empty_a, w.empty_b), strict=True):
            g = beside(weight) * magnitude(d_o)
            err = g * (beside(share) + unit.u) + unit.tau * (magnitude(d_o) + 2)
            err = np.where(np.isinf(d_o) & beside(faint(weight, unit)), inf, err)
            of_lse = weight * magnitude(d_lse) * (share + 2 * unit.u) + unit.tau * magnitude(d_lse) + slope
            of_lse = np.where(unsure | (np.isinf(d_lse) & faint(weight, unit)), inf, of_lse)
            found += [np.where(beside(empty), 0.0, err), np.where(empty, 0.0, of_lse)]
    return stored_bounds(call, ref, found)


@merge_states_vjp.sigma
def sigma_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS errors, with the symbols of the bounds and of merge_states' own, Q = sum (d_o (o_a - o_b))^2:

        of d_o_a: store^2 + d_o_a^2 [(1 + 8/M) (w_b^2 e^2 + 5 k^2) + 2 k^2]
        of d_lse_a: store^2 + (w_a d_lse)^2 (w_b^2 e^2 + 7 k^2) + (w_a w_b)^2 [S^2 (e^2 + 14 k^2) + V] + k^2 d_lse_a^2
        V = k^2 [2 Q + c (S^2 / 3 + Q / 6)]

    V is what the terms of S and their sum bring: a partial sum after i of c additions is S i/c and a bridge of variance
    Q i/c (1 - i/c). A weight is one draw for a row, and M rows may draw more than their share. What the bounds have
    with tau is added whole.
    """
    unit, d_lse = units(call), cotangents(call)
    rows, k = max(elements(call) // call.dims["d"], 1), KAPPA * unit.u
    with np.errstate(all="ignore"):
        w = Weights.of(call, unit)
        s, lean, found = Slopes.of(call, w, unit), w.lean(unit), []
        chain = unit.chain(call.dims["d"])
        terms = k * np.hypot(np.sqrt(2 + chain / 6) * s.square_root, np.sqrt(chain / 3) * s.total)
        slope = w.a * w.b * np.hypot(s.total * np.hypot(lean, np.sqrt(14) * k), terms)
        slope = np.hypot(slope, s.lost + unit.tau * (3 * np.abs(s.total) + 6))
        for i, (weight, other) in enumerate(((w.a, w.b), (w.b, w.a))):
            d_o = magnitude(call.arrays["d_o"])
            shared = np.sqrt((1 + 8 / rows) * (beside(other * lean) ** 2 + 5 * k**2) + 2 * k**2)
            lse = np.hypot(weight * magnitude(d_lse) * np.hypot(other * lean, np.sqrt(7) * k), slope)
            lse = np.hypot(lse, unit.tau * magnitude(d_lse))
            if (y := ref[2 * i + 1]) is not None:
                lse = np.hypot(lse, k * magnitude(y))
            found += [np.hypot(beside(weight) * d_o * shared, unit.tau * (d_o + 2)), lse]
    return spreads(call, ref, found)


@merge_states_vjp.exact
def exact_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of parts without keys 0, and beside them the cotangents."""
    unit = units(call)
    w = Weights.of(call, unit)
    alone = w.empty_a | w.empty_b
    return tuple(
        None if y is None else where & ((np.abs(y) >= max(unit.tau, format_of(dtype).eta)) | (y == 0))
        for where, y, (_, dtype) in zip((beside(alone), alone) * 2, ref, call.outputs.values(), strict=True)
    )


@merge_states_vjp.edge(dims=ROWS)
def parts_without_keys_vjp(arrays, rng, options):
    """A part whose lse is -inf has no gradient and is not read; the other's are the cotangents."""
    parts_without_keys(arrays, rng, options)


@merge_states_vjp.edge(dims=ROWS)
def parts_without_keys_beside_nan(arrays, rng, options):
    """A part without keys has gradients of 0 where the cotangents are NaN or infinite, too."""
    parts_without_keys(arrays, rng, options)
    for name in ("d_o", "d_lse"):
        if name in arrays:
            some(rng, arrays, name, 0.5, np.nan, inf)


@merge_states_vjp.edge(dims=ROWS)
def special_cotangents(arrays, rng, options):
    """An infinity or NaN in a cotangent reaches its own d_o and its row's d_lse."""
    name = rng.choice([n for n in ("d_o", "d_lse") if n in arrays])
    some(rng, arrays, name, 0.2, inf, -inf, np.nan)


merge_states_vjp.edge(dims=ROWS)(special_numbers)
merge_states_vjp.edge(dims=ROWS)(special_log_sums)
merge_states_vjp.edge(dims=ROWS)(far_log_sums)


@merge_states_vjp.edge(dims=ROWS)
def a_small_weight_counts_vjp(arrays, rng, options):
    """Differences of 10 to 20 beside cotangents that make up for them: a small weight is as exact as any."""
    arrays[one_of(rng, "lse")] += rng.uniform(10, 20, arrays["lse_a"].shape)
    arrays["d_o"] *= 2000


@merge_states_vjp.edge(dims=ROWS)
def parts_all_but_equal(arrays, rng, options):
    """o_a - o_b is small beside both: the difference is taken before the product."""
    arrays["o_b"][...] = arrays["o_a"] * (1 + 2.0**-7)


merge_states_vjp.edge(
    dims={"batch": (1, 3), "tokens": (3, 40), "heads": (1, 3), "d": (1, 9)}, smallest_tiles=True
)(several_ragged_tiles)  # fmt: skip
merge_states_vjp.edge(dims={"batch": (1, 1), "tokens": (1, 1), "heads": (1, 1), "d": (1, 1)})(one_number)


def drawn_gradients(draw: Any) -> tuple[np.ndarray, ...]:
    """Two states, and the cotangents of what they merge to."""
    states = drawn_states(draw)
    return *states, draw.normal(*states[0].shape), log_sums(draw, *states[1].shape)


@merge_states_vjp.law
def gradients_alone_are_the_same(run, draw):
    """Each gradient, asked for alone, has the same bits as among all."""
    each_alone(run, draw, ("d_o_a", "d_lse_a", "d_o_b", "d_lse_b"), drawn_gradients(draw))


@merge_states_vjp.law
def either_part_may_be_the_first_vjp(run, draw):
    """Parts that are exchanged exchange their gradients, to the bit."""
    o_a, lse_a, o_b, lse_b, d_o, d_lse = drawn_gradients(draw)
    once, turned = run(o_a, lse_a, o_b, lse_b, d_o, d_lse), run(o_b, lse_b, o_a, lse_a, d_o, d_lse)
    for i, name in enumerate(("d_o_a", "d_lse_a", "d_o_b", "d_lse_b")):
        draw.same_bits(turned[i - 2], once[i], f"{name} of parts exchanged")


@merge_states_vjp.law
def a_part_without_keys_passes_on(run, draw):
    """Beside a lse of -inf the gradients are the cotangents, to the bit, and those of the part are 0."""
    o_a, lse_a, o_b, lse_b, d_o, d_lse = drawn_gradients(draw)
    o_b[...], lse_b[...] = np.nan, -inf
    d_o_a, d_lse_a, d_o_b, d_lse_b = run(o_a, lse_a, o_b, lse_b, d_o, d_lse)
    draw.same_bits(d_o_a, d_o, "d_o beside a part without keys")
    draw.same_bits(d_lse_a, d_lse, "d_lse beside a part without keys")
    draw.same_bits(d_o_b + 0, np.zeros_like(d_o), "d_o of a part without keys")
    draw.same_bits(d_lse_b + 0, np.zeros_like(d_lse), "d_lse of a part without keys")


@merge_states_vjp.law
def rows_are_independent_vjp(run, draw):
    """A token alone gives the same bits as among others."""
    arrays = drawn_gradients(draw)
    i = draw.extent(0, arrays[0].shape[1] - 1)
    token = slice(i, i + 1)
    whole = run(*arrays)
    alone = run(*(a[:, token] if a.ndim == 4 else a[:, :, token] for a in arrays))
    for name, few, all_of in zip(("d_o_a", "d_lse_a", "d_o_b", "d_lse_b"), alone, whole, strict=True):
        draw.same_bits(few, all_of[:, token] if few.ndim == 4 else all_of[:, :, token], f"{name} of a token alone")


@merge_states_vjp.law
def powers_of_two_scale_exactly_vjp(run, draw):
    """A cotangent that is doubled doubles every gradient, to the bit, where there is no other."""
    *states, d_o, _ = drawn_gradients(draw)
    doubled(lambda d_o: run(*states, d_o), draw, ("d_o_a", "d_lse_a", "d_o_b", "d_lse_b"), d_o)
