"""Which experts of a mixture each token goes to, and how much each of them counts; and the gradient.

    s = softmax(logits) or 1 / (1 + exp(-logits)) of a token's experts
    indices: the k experts with the greatest s + bias, of the groups whose two best of these have the greatest sum
    weights = scale s[indices], or scale s[indices] / sum s[indices]

d_logits is 0 for experts that were not chosen, but for what they have in softmax's sum.
"""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Float32, Int32

from portakern.spec import Rule, Tile, spec
from portakern.spec.options import Extent, Range
from portakern.spec.tolerance import KAPPA, Units, magnitude, round_to, store_spread, units
from portakern.specs._gradients import stored_bounds
from portakern.specs.swiglu import Gate

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")

LEAST_SUM = 1e-20
"""What is added to a sum of sigmoids, all of which may be 0: DeepSeek-V3's."""


class RouterOut(NamedTuple):
    weights: Float32[A, "*batch k"]
    indices: Int32[A, "*batch k"]


def groups_kept(call: Call) -> int:
    """How many groups an expert may come from."""
    kept, groups = call.options["groups_kept"], call.dims["groups"]
    return int(groups if kept is None else kept)


def limited(call: Call) -> bool:
    """Whether some groups are left out."""
    return groups_kept(call) < call.dims["groups"]


ENOUGH = Rule(
    lambda call: call.dims["k"] <= groups_kept(call) * call.dims["width"],
    "k must be no more than the experts of the groups that are kept",
    mends=lambda dims: {"k": max(min(dims["k"], dims["width"] * min(dims["groups"], 2)), 1)},
)
EXPERTS = Rule(
    lambda call: call.dims["k"] <= call.dims["groups"] * call.dims["width"],
    "k must be no more than the experts, the extent of the last axis of logits",
    mends=lambda dims: {"k": max(min(dims["k"], dims["width"] * dims["groups"]), 1)},
)


def comparisons(call: Call) -> float:
    """Each score is made of an exponential, a sum and a quotient, and compared at least once."""
    return 4.0 * prod(call.dims["batch"]) * call.dims["groups"] * call.dims["width"]


@spec(
    tiling={"block_rows": Tile(1, 1024)},
    codes=("indices",),
    require=(
        Rule(lambda call: groups_kept(call) <= call.dims["groups"], "groups_kept must be no more than groups"),
        Rule(
            lambda call: call.dims["width"] > 1 or not limited(call),
            "a group must have two experts at least, whose scores are added, where groups_kept is less than groups",
            mends=lambda dims: {"width": max(dims["width"], 2 if dims["groups"] > 1 else 1)},
        ),
        ENOUGH,
    ),
    positive=("width",),
    apart=("batch",),
    vjp="router_vjp",
    typical={
        "batch": (4096,), "groups": 8, "width": 32, "k": 8, "groups_kept": 4, "scoring": "sigmoid", "normalize": True,
        "bias": True,
    },
    flops=comparisons,
)  # fmt: skip
def router(
    logits: Float[A, "*batch groups*width"],
    bias: Float32[A, "groups*width"] | None = None,
    *,
    k: Annotated[int, Extent()] = 1,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    groups: Annotated[int, Extent()] = 1,
    groups_kept: Annotated[int, Range(1, 2**31 - 1, typical=(1, 2, 3))] | None = None,
    normalize: bool = False,
    scale: Annotated[float, Range(2.0**-64, 2.0**64, typical=(1.0, 2.5, 0.125))] = 1.0,
) -> RouterOut:
    """The k experts of each token, the best first, and their weights, in float32 (float64 for float64).

    ``normalize=True`` divides the weights by their sum: Mixtral's router, and Qwen3-MoE's with norm_topk_prob. Of
    softmax that is the softmax of the k greatest logits, as gpt-oss writes it, and is computed so. DeepSeek-V3 has
    ``scoring="sigmoid"``, a bias, groups and a scale beside.

    The experts are chosen by s + bias, and without a bias by the logits themselves, exactly, as both scores rise with
    them. Of equal ones the expert with the lower index comes first, of equal groups the lower one; 0 and -0 are equal,
    and a NaN is greater than any other number and equal to every NaN, as in ``top_k``. Sums s + bias, and those of
    groups, are rounded: of two that are closer than that either is right, unless logits and biases are the same.

    Args:
      logits: (*batch, experts), any strides.
      bias: (experts), float32, added to scores for the choice alone: DeepSeek-V3's e_score_correction_bias. No weight
        depends on it, and it has no gradient.
      k: experts of a token.
      scoring: "softmax" of all experts, or "sigmoid" of each.
      groups: of experts that stand beside each other, all of one size.
      groups_kept: as many groups, those whose two best experts have the greatest sum of s + bias, may have experts
        chosen; None: all.
      normalize: weights are divided by their sum (of sigmoids, by 1e-20 more).
      scale: what weights are multiplied with in the end: routed_scaling_factor.

    Returns:
      weights: (*batch, k), float32. indices: (*batch, k), int32, no two of a row the same.
      Arithmetic says where NaN are: softmax makes a row of weights NaN where any logit is NaN or inf, or all are -inf;
      with ``normalize`` only chosen logits count, as they do for sigmoid.
    """
    raise NotImplementedError


# -------------------------------------------------------------------------------------------------------------- scores
class ExpertScores(NamedTuple):
    """ExpertScores before they are scaled, and how far rounding moves them.

    Attributes:
      s: the scores, 0 where they are not finite; share: the bound of their error, as a share; variance: the square of
        its RMS; lost: what may be lost of a score besides, where it or a term of its sum is flushed.
    """

    s: np.ndarray
    share: np.ndarray
    variance: np.ndarray
    lost: Any


def of_softmax(x: np.ndarray, among: np.ndarray, unit: Units) -> ExpertScores:
    """exp(x - m) / sum exp(among - m), by the steps of ``softmax``'s bound, with two more roundings of a scale.

    x are some of ``among``, whose maximum is m."""
    top = among.max(-1, keepdims=True)
    parts, c = np.exp(among - top), unit.chain(among.shape[-1])
    total = parts.sum(-1, keepdims=True)
    s = np.exp(x - top) / total
    away = np.where(parts > 0, top - among, 0.0)
    entropy = (parts / total * away).sum(-1, keepdims=True)
    d = np.where(s > 0, top - x, 0.0)
    share = 4 * unit.u * (d + entropy) + 2 * unit.ex + (c + 10) * unit.u
    variance = unit.u**2 * (d**2 + entropy**2) + 2 * (unit.ex / 4) ** 2 + (KAPPA * unit.u) ** 2 * (c / 3 + 6)
    return ExpertScores(magnitude(s), share, variance, 2 * unit.tau)


def of_sigmoid(x: np.ndarray, unit: Units) -> ExpertScores:
    """1 / (1 + exp(-x)), by the steps of ``swiglu``'s bound, with two more roundings of a scale."""
    at = Gate.of(x, unit)
    lean = (unit.u * at.g) ** 2 + (unit.ex / 4) ** 2
    variance = at.q**2 * lean + (KAPPA * unit.u) ** 2 * ((at.q * at.g) ** 2 + 6)
    return ExpertScores(at.s, at.ds + 2 * unit.u, variance, unit.tau)


def parts_of_sum(x: np.ndarray, unit: Units) -> ExpertScores:
    """Sigmoids over their sum: the sum carries the average of their errors and a chain of k additions, its 1e-20 and
    the quotient are 6u more, and what is flushed of any of them is next to the sum."""
    at, k = of_sigmoid(x, unit), x.shape[-1]
    total = at.s.sum(-1, keepdims=True) + LEAST_SUM
    s, c = at.s / total, unit.chain(k)
    share = at.share + (s * at.share).sum(-1, keepdims=True) + (c + 6) * unit.u
    together = (s**2 * at.variance).sum(-1, keepdims=True) + (KAPPA * unit.u) ** 2 * (c / 3 + 5)
    return ExpertScores(s, share, at.variance + together, (1 + k * s) * unit.tau / total + unit.tau)


def scores_at(call: Call, indices: np.ndarray) -> ExpertScores:
    """The weights at these places, before they are scaled."""
    x, unit = call.arrays["logits"], units(call)
    chosen = np.take_along_axis(x, indices.astype(np.int64), -1)
    if call.options["scoring"] == "softmax":
        return of_softmax(chosen, chosen if call.options["normalize"] else x, unit)
    return (parts_of_sum if call.options["normalize"] else of_sigmoid)(chosen, unit)


# --------------------------------------------------------------------------------------------------------------- doubts
class Ordered(NamedTuple):
    """Numbers that are ordered, a row each, and how far rounding moves them: the greater is better."""

    key: np.ndarray
    err: np.ndarray


def biased(call: Call) -> Ordered:
    """The scores of all experts with their bias, (rows, experts)."""
    x, bias, unit = call.arrays["logits"], call.arrays["bias"], units(call)
    x = x.reshape(-1, x.shape[-1])
    if call.options["scoring"] == "softmax":
        parts = np.exp(x - x.max(-1, keepdims=True))
        s, at = parts / parts.sum(-1, keepdims=True), of_softmax(x, x, unit)
    else:
        small = np.exp(-np.abs(x))
        s, at = np.where(x >= 0, 1.0, small) / (1 + small), of_sigmoid(x, unit)
    key = s if bias is None else s + bias
    err = at.s * at.share + at.lost + unit.u * magnitude(key) + 2 * unit.tau
    return Ordered(key, np.where(np.isfinite(key), err, 0.0))


def best_first(key: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Places in the order of their numbers, those not ``among`` last."""
    nan = np.isnan(key)
    return np.lexsort((-np.where(nan, 0.0, key), ~nan, ~among), axis=-1)


def same_numbers(call: Call, row: Any, sets: np.ndarray) -> bool:
    """Whether ``sets`` of experts, a row each, have the same logits and biases: equal to the bit, they have
    equal scores in any kernel."""
    x, bias = call.arrays["logits"], call.arrays["bias"]
    x = x.reshape(-1, x.shape[-1])[row][sets]
    b = np.zeros(x.shape) if bias is None else bias[sets]
    order = np.lexsort((x, b), axis=-1)
    found = [np.take_along_axis(a, order, -1) for a in (x, b)]
    return all(np.array_equal(a, np.broadcast_to(a[:1], a.shape), equal_nan=True) for a in found)


def groups_in_doubt(call: Call, scores: Ordered) -> tuple[np.ndarray, np.ndarray]:
    """(which experts are in groups that are kept, the rows in which another group may be kept): (rows, experts) and
    (rows)."""
    kept, groups, width = groups_kept(call), call.dims["groups"], call.dims["width"]
    shape = (scores.key.shape[0], groups, width)
    total = np.sort(scores.key.reshape(shape), -1)[..., -2:].sum(-1)
    unit = units(call)
    err = 2 * scores.err.reshape(shape).max(-1) + unit.u * magnitude(total) + unit.tau
    order = best_first(total, np.ones(total.shape, bool))
    chosen = np.zeros(total.shape, bool)
    np.put_along_axis(chosen, order[:, :kept], True, -1)
    known = np.isfinite(total)
    least = np.where(chosen & known, total - err, inf).min(-1)
    most = np.where(~chosen & known, total + err, -inf).max(-1)
    unsure, experts = least <= most, np.arange(groups * width).reshape(groups, width)
    for row in np.nonzero(unsure)[0]:
        t, e = total[row], err[row]
        close = (np.abs(t[:, None] - t) <= e[:, None] + e) & (chosen[row][:, None] & ~chosen[row])
        unsure[row] = any(not same_numbers(call, row, experts[[a, b]]) for a, b in np.argwhere(close))
    return np.repeat(chosen, width, -1), unsure


class Doubts(NamedTuple):
    """How far a right result may lie from the reference because another choice is right too: of weights and indices,
    (rows, k) each."""

    weights: np.ndarray
    indices: np.ndarray


def doubts(call: Call, ref: tuple[Any, ...]) -> Doubts:
    """Of numbers that follow each other in order, each within rounding of the next, any order is right, unless all are
    of the same logits and biases. A weight is from 0 to ``scale``."""
    n, k, scale = call.arrays["logits"].shape[-1], call.dims["k"], call.options["scale"]
    weights, indices = (y.reshape(-1, k) for y in ref)
    found = Doubts(np.zeros(weights.shape), np.zeros(weights.shape))
    if call.arrays["bias"] is None and not limited(call):
        return found
    scores = biased(call)
    among, unsure = np.ones(scores.key.shape, bool), np.zeros(len(weights), bool)
    if limited(call):
        among, unsure = groups_in_doubt(call, scores)
    found.indices[unsure] = np.maximum(indices, n - 1 - indices)[unsure]
    found.weights[unsure] = scale
    if call.arrays["bias"] is not None:
        runs_in_doubt(call, scores, among, indices, found)
    x = call.arrays["logits"].reshape(-1, n)
    special = ~np.isfinite(x).all(-1, keepdims=True) & (found.weights > 0)
    return found._replace(weights=np.where(special, inf, found.weights))


def runs_in_doubt(call: Call, scores: Ordered, among: np.ndarray, indices: np.ndarray, found: Doubts) -> None:
    """Add what runs of experts in doubt move: of each row some of ``among`` may be chosen."""
    k, scale, normalize = call.dims["k"], call.options["scale"], call.options["normalize"]
    order = best_first(scores.key, among)[:, : groups_kept(call) * call.dims["width"]]
    key, err = (np.take_along_axis(a, order, -1) for a in scores)
    close = (key[:, :-1] - key[:, 1:] <= err[:, :-1] + err[:, 1:]) & np.isfinite(key[:, :-1]) & np.isfinite(key[:, 1:])
    for row in np.nonzero(close[:, :k].any(-1))[0]:
        ends = np.nonzero(~np.append(close[row], False))[0]
        for first, last in zip(np.append(0, ends[:-1] + 1), ends, strict=True):
            run = order[row, first : last + 1]
            if first >= k or first == last or same_numbers(call, row, run[:, None]):
                continue
            mine = slice(first, min(last + 1, k))
            apart = np.abs(run - indices[row, mine, None]).max(-1)
            found.indices[row, mine] = np.maximum(found.indices[row, mine], apart)
            found.weights[row, slice(None) if normalize and last >= k else mine] = scale


# --------------------------------------------------------------------------------------------------------------- bounds
@router.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bound of a weight, with p its score or its part of the chosen scores:

        B = E (1 + U) + U |w| + eta,    E = scale (p share + lost) + tau

    share is that of ``softmax``, of all experts or of the chosen ones, with c_N + 10 for c_N + 8; or that of s in
    ``swiglu``, q (4u |x| + ex) + 7u, of which a sum carries the average, and c_k + 6 more. Scale is a constant that is
    rounded, and a product. An index is exact.

    Where two sums s + bias, or two groups', are within their errors of each other, the other choice is right too: any
    index of those in doubt, and any weight from 0 to scale.
    """
    unit, scale = units(call), call.options["scale"]
    with np.errstate(all="ignore"):
        at, unsure = scores_at(call, ref[1]), doubts(call, ref)
        err = scale * (at.s * at.share + at.lost) + unit.tau
        err = err + unsure.weights.reshape(err.shape)
        return round_to(err, ref[0], call.outputs["weights"][1]), unsure.indices.reshape(ref[1].shape)


@router.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS error of a weight, from the same steps as in ``softmax`` and ``swiglu``; unknown where another choice is
    right too. An index is right or wrong, and not measured."""
    with np.errstate(all="ignore"):
        at, unsure = scores_at(call, ref[1]), doubts(call, ref)
        own = magnitude(ref[0]) * np.sqrt(at.variance) + call.options["scale"] * at.lost
        own = np.where(unsure.weights.reshape(own.shape) > 0, inf, own)
        return np.hypot(store_spread(ref[0], call.outputs["weights"][1]), own), np.zeros(ref[1].shape)


# --------------------------------------------------------------------------------------------------------------- values
@router.values("bias")
def spread_biases(rng, shape, dims, options):
    """Biases as large as scores are."""
    return rng.uniform(-0.5, 0.5, shape)


# ---------------------------------------------------------------------------------------------------------------- edges
SMALL = {"batch": (1, 6), "width": (2, 40), "groups": (1, 4), "k": (1, 8)}
ALONE = {"batch": (1, 6), "width": (2, 70), "groups": (1, 1), "k": (1, 9)}
MANY = {"batch": (1, 4), "width": (2, 20), "groups": (3, 6), "k": (1, 4)}


@router.edge(dims=ALONE, absent=("bias",), options={"groups_kept": None})
def ties(arrays, rng, options):
    """Of equal logits the first come first, and where k cuts through them the others are left out."""
    arrays["logits"][...] = rng.choice([1.0, 2.0, 3.0], arrays["logits"].shape)


@router.edge(dims=SMALL, given=("bias",), options={"groups_kept": None})
def ties_of_sums(arrays, rng, options):
    """Experts with equal logits and equal biases are equal."""
    arrays["logits"][...] = rng.choice([1.0, 2.0], arrays["logits"].shape)
    arrays["bias"][...] = rng.choice([0.25, -0.5], arrays["bias"].shape)


@router.edge(dims=MANY, options={"groups_kept": 2})
def ties_of_groups(arrays, rng, options):
    """Of groups with the same experts the first are kept."""
    x, groups = arrays["logits"], options.get("groups", 1)
    for a in [x] if "bias" not in arrays else [x, arrays["bias"]]:
        rows = a.reshape(*a.shape[:-1], groups, -1)
        rows[...] = rows[..., :1, :]


@router.edge(dims=MANY, options={"groups_kept": 1})
def one_great_expert_is_no_great_group(arrays, rng, options):
    """The greatest logit stands in a group whose second best is low: two good ones elsewhere keep it out."""
    x, groups = arrays["logits"], options.get("groups", 1)
    x[...] = -4 - np.abs(x)
    rows = x.reshape(*x.shape[:-1], groups, -1)
    rows[..., 0, 0] = 3.0
    rows[..., 1, :2] = 2.5
    if "bias" in arrays:
        arrays["bias"][...] = 0


@router.edge(dims=MANY, given=("bias",), options={"groups_kept": 2})
def sums_below_zero(arrays, rng, options):
    """Biases of -2 and less: what is left out is no 0, which would be better."""
    arrays["bias"] -= 3


@router.edge(dims=SMALL, given=("bias",), options={"groups_kept": None, "normalize": False})
def a_bias_that_rules(arrays, rng, options):
    """The bias alone decides, and no weight has it."""
    bias = arrays["bias"]
    bias[...] = rng.permutation(bias.size)


@router.edge(dims=ALONE, absent=("bias",), options={"groups_kept": None})
def nan_and_infinities(arrays, rng, options):
    """NaN is the greatest logit, beyond inf."""
    x = arrays["logits"]
    x[...] = rng.choice([np.nan, inf, -inf, 1.0, 0.0], x.shape, p=[0.05, 0.05, 0.3, 0.3, 0.3])


@router.edge(dims=SMALL)
def masked_experts(arrays, rng, options):
    """A logit of -inf is a score of 0."""
    x = arrays["logits"]
    x[rng.random(x.shape) < 0.3] = -inf


@router.edge(dims=SMALL, given=("bias",), options={"scoring": "sigmoid"})
def special_biases(arrays, rng, options):
    """A bias of -inf leaves an expert for the last, one of inf or NaN takes it first; weights stay finite."""
    bias = arrays["bias"]
    bias[rng.random(bias.shape) < 0.3] = rng.choice([inf, -inf, np.nan])


@router.edge(dims=SMALL)
def far_apart(arrays, rng, options):
    """Logits of hundreds: sigmoids are 1 or next to nothing, and softmax has one expert."""
    arrays["logits"] *= 200


@router.edge(dims=ALONE, options={"scoring": "sigmoid", "normalize": True}, absent=("bias",))
def nothing_to_divide(arrays, rng, options):
    """All sigmoids of a row are 0, or next to it: no weight is NaN."""
    arrays["logits"][...] = -rng.uniform(40, 300, arrays["logits"].shape)


@router.edge(dims=ALONE, absent=("bias",), regime="subnormal", options={"groups_kept": None})
def subnormal_logits(arrays, rng, options):
    """They differ from each other and from 0, though their scores do not."""


@router.edge(dims={"batch": (1, 4), "width": (1, 40), "groups": (1, 1), "k": (1, 40)})
def every_expert(arrays, rng, options):
    """k may be all: experts are sorted."""


@router.edge(dims={"batch": (1, 3), "width": (60, 300), "groups": (1, 2), "k": (1, 9)}, smallest_tiles=True)
def the_last_expert_is_the_best(arrays, rng, options):
    """The last of a ragged row wins."""
    arrays["logits"][..., -1] = 8
    if "bias" in arrays:
        arrays["bias"][-1] = 1


# ----------------------------------------------------------------------------------------------------------------- laws
CALLS: tuple[dict[str, Any], ...] = (
    {"normalize": True},
    {},
    {"scoring": "sigmoid", "normalize": True, "scale": 2.5},
    {"scoring": "sigmoid"},
)


def wide(x: np.ndarray) -> Any:
    """The dtype of biases and weights beside logits x."""
    return np.result_type(x.dtype, np.float32)


@router.law
def rows_are_independent(run, draw):
    """A token alone has the experts and the weights that it has among others."""
    rows, n = draw.extent(2, 20), draw.extent(1, 100)
    x, options = draw.normal(rows, n), {"k": draw.extent(1, min(n, 9)), **CALLS[draw.extent(0, 3)]}
    first = draw.extent(0, rows - 1)
    for alone, among in zip(run(x[first : first + 1], **options), run(x, **options), strict=True):
        draw.same_bits(alone, among[first : first + 1], "a token alone")


@router.law
def fewer_are_the_first_of_more(run, draw):
    """The first j of k experts are those for k = j, with a bias too."""
    x, k = draw.normal(draw.extent(1, 9), draw.extent(9, 100)), draw.extent(1, 9)
    bias, j = draw.integers(-2, 2, x.shape[1]).astype(wide(x)), draw.extent(1, k)
    options = CALLS[draw.extent(0, 3)]
    draw.same_bits(run(x, bias, k=j, **options)[1], run(x, bias, k=k, **options)[1][:, :j], "the first of more")


@router.law
def softmax_is_shift_invariant(run, draw):
    """Logits that are all moved by a number, exactly, have the same experts and weights."""
    x, options = draw.integers(-8, 8, draw.extent(1, 5), draw.extent(9, 100)), CALLS[draw.extent(0, 1)]
    k, moved = draw.extent(1, 9), x + x.dtype.type(draw.extent(1, 100))
    for shifted, plain in zip(run(moved, k=k, **options), run(x, k=k, **options), strict=True):
        draw.same_bits(shifted, plain, "a shifted row")


@router.law
def all_groups_are_none(run, draw):
    """Where every group is kept, groups change nothing."""
    groups, width = draw.extent(2, 5), draw.extent(2, 20)
    x = draw.normal(draw.extent(1, 9), groups * width)
    bias = draw.normal(groups * width).astype(wide(x))
    options = {"k": draw.extent(1, width), **CALLS[draw.extent(0, 3)]}
    among = run(x, bias, groups=groups, groups_kept=groups, **options)
    for kept, plain in zip(among, run(x, bias, **options), strict=True):
        draw.same_bits(kept, plain, "all groups")


@router.law
def equal_experts_share(run, draw):
    """2^j experts with one logit have the weight 2^-j each, and indices in order."""
    k, rows = 2 ** draw.extent(0, 3), draw.extent(1, 9)
    x = np.repeat(draw.integers(-3, 3, rows, 1), draw.extent(9, 100), -1)
    weights, indices = run(x, k=k, normalize=True)
    draw.same_bits(weights, np.full((rows, k), 1 / k, wide(x)), "equal weights")
    draw.same_bits(indices, np.broadcast_to(np.arange(k, dtype=np.int32), (rows, k)), "indices of equal experts")


PLAIN = {"batch": (5,), "groups": 1, "width": 16, "k": 3}
GROUPED = {"batch": (2, 3), "groups": 4, "width": 6, "k": 4}
router.sample("mixtral", dims=PLAIN, options={"normalize": True})
router.sample("deepseek_v3", dims=GROUPED, given=("bias",),
              options={"scoring": "sigmoid", "groups_kept": 2, "normalize": True, "scale": 2.5})  # fmt: skip
router.sample("one_token", dims={"batch": (), "groups": 1, "width": 40, "k": 2})


# ------------------------------------------------------------------------------------------------------------- gradient
class RouterVjpOut(NamedTuple):
    d_logits: Float[A, "*batch groups*width"]


@spec(
    tiling={"block_rows": Tile(1, 1024)},
    require=(EXPERTS,),
    positive=("width",),
    apart=("batch",),
    flops=comparisons,
)
def router_vjp(
    logits: Float[A, "*batch groups*width"],
    indices: Int32[A, "*batch k"],
    d_weights: Float32[A, "*batch k"],
    *,
    k: Annotated[int, Extent()] = 1,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    groups: Annotated[int, Extent()] = 1,
    normalize: bool = False,
    scale: Annotated[float, Range(2.0**-64, 2.0**64, typical=(1.0, 2.5, 0.125))] = 1.0,
) -> RouterVjpOut:
    """The gradient of the weights, the choice as it was: in float32 (float64 for float64).

    With g = d_weights at the experts of ``indices`` and 0 elsewhere, s the scores, and h = s / sum of the chosen ones:

        sigmoid:                scale s (1 - s) g
        sigmoid, normalize:     scale h (1 - s) (g - sum g h)
        softmax, normalize:     scale h (g - sum g h)
        softmax:                scale s (g - sum g s), for experts that were not chosen too

    Elsewhere it is 0: an expert that was not chosen counts in softmax's sum alone, and no bias or group counts.

    Args:
      logits: (*batch, experts), what router was given.
      indices: (*batch, k), int32, what router gave: from 0 to experts - 1, no two of a row the same.
      d_weights: (*batch, k), float32, the cotangent of the weights.
      k, scoring, groups, normalize, scale: router's; how many groups there are changes nothing.

    Returns:
      d_logits: the shape and dtype of logits. A NaN in d_weights reaches its own expert, where weights are divided by a
      sum the chosen ones of its row, and of softmax without ``normalize`` the whole row.
    """
    raise NotImplementedError


class WeightSlopes(NamedTuple):
    """d_logits is a (g - D), D = sum h g, or 0 where not ``touched``: (*batch, experts) each.

    Attributes:
      g: the cotangents of all experts; h: the weights of D, 0 for none; a: the slopes; off_h, off_a: bounds of their
        absolute errors; rms_h, rms_a: their RMS errors; touched: where the gradient is not 0 for certain.
    """

    g: np.ndarray
    h: np.ndarray
    a: np.ndarray
    off_h: np.ndarray
    off_a: np.ndarray
    rms_h: np.ndarray
    rms_a: np.ndarray
    touched: np.ndarray

    @classmethod
    def of(cls, call: Call) -> WeightSlopes:
        x, indices, unit = call.arrays["logits"], call.arrays["indices"].astype(np.int64), units(call)
        normalize, sigmoid = call.options["normalize"], call.options["scoring"] == "sigmoid"

        def everywhere(values: Any) -> np.ndarray:
            found = np.zeros(x.shape)
            np.put_along_axis(found, indices, np.broadcast_to(values, indices.shape), -1)
            return found

        chosen, g = everywhere(1.0) > 0, everywhere(call.arrays["d_weights"])
        whole = not (sigmoid or normalize)
        at = of_softmax(x, x, unit) if whole else scores_at(call, indices)
        h, off, rms = at.s, at.s * at.share + at.lost, at.s * np.sqrt(at.variance) + at.lost
        a, off_a, rms_a = h, off, rms
        if sigmoid:
            gate = Gate.of(np.take_along_axis(x, indices, -1), unit)
            a, off_a = h * gate.q, off * gate.q + h * gate.q * (gate.dq + unit.u) + unit.tau * (h + gate.q + 1)
            lean = (unit.u * gate.g) ** 2 + (unit.ex / 4) ** 2 + 5 * (KAPPA * unit.u) ** 2
            rms_a = np.hypot(gate.q * rms, a * np.sqrt(lean))
        if sigmoid and not normalize:
            h = off = rms = np.zeros(indices.shape)
        if whole:
            return cls(g, h, a, off, off_a, rms, rms_a, np.ones(x.shape, bool))
        h, a, off, off_a, rms, rms_a = map(everywhere, (h, a, off, off_a, rms, rms_a))
        return cls(g, h, a, off, off_a, rms, rms_a, chosen)


@router_vjp.tolerance
def bound_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bound of d_logits = scale a (g - D), D = sum h g, along a row of N experts, c_N = chain(N):

        B = E (1 + U) + U |d_logits| + eta
        E = scale [o_a (|g - D| + e) + a (e + 4u (|g| + |D| + e))] + flushed,   e = sum o_h |g| + (c_N + 2) u sum h |g|

    a and h are weights of ``router`` before they are scaled, or such times 1 - s, and o their errors by its bound. e is
    the error of D; g - D, its product with a and the scale are 4u. flushed: factors are read as 0 where they are
    subnormal, each next to the others, and results become 0.

    Exactly 0 for experts that were not chosen, but of softmax without ``normalize``. Nothing is promised where |g| or
    its product with scale reaches 2^127, or an infinite g meets a slope that may be 0.
    """
    unit, scale = units(call), call.options["scale"]
    with np.errstate(all="ignore"):
        at = WeightSlopes.of(call)
        g, n = magnitude(at.g), at.g.shape[-1]
        size = ((at.h + at.off_h) * g).sum(-1, keepdims=True)
        d = (at.h * g * np.sign(np.nan_to_num(at.g))).sum(-1, keepdims=True)
        off = (at.off_h * g).sum(-1, keepdims=True) + (unit.chain(n) + 2) * unit.u * size
        off = off + n * unit.tau * (1 + g.max(-1, keepdims=True))
        apart = g + np.abs(d) + off
        err = at.off_a * (np.abs(magnitude(at.g) * np.sign(np.nan_to_num(at.g)) - d) + off)
        err = scale * (err + at.a * (off + 4 * unit.u * apart))
        err = err + unit.tau * ((scale + 1) * (apart + at.a + 1) + 1)
        far = (np.isinf(at.g) & at.touched).any(-1, keepdims=True)
        faint = (at.touched & (at.a <= 2 * at.off_a)).any(-1, keepdims=True)
        beyond = (g.max(-1, keepdims=True) + size) * max(scale, 1.0) >= unit.huge
        err = np.where((far & faint) | beyond, inf, err)
    return (np.where(at.touched, stored_bounds(call, ref, (err,))[0], 0.0),)


@router_vjp.sigma
def sigma_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS error of d_logits, with the symbols of the bound and k = KAPPA u:

        sigma^2 = store^2 + scale^2 [r_a^2 (g - D)^2 + a^2 (s^2 + k^2 (g^2 + D^2 + 3 (g - D)^2))]
        s^2 = sum r_h^2 g^2 + k^2 ((c_N / 3 + 1) D^2 + (c_N / 6 + log2 N + 1) sum (h g)^2)

    r are the RMS errors of a and h. s is one draw for a whole row, the error of D; then come g - D, its product with a,
    and the scale. What flushes is added whole.
    """
    unit, scale = units(call), call.options["scale"]
    with np.errstate(all="ignore"):
        at = WeightSlopes.of(call)
        g, n, k = magnitude(at.g) * np.sign(np.nan_to_num(at.g)), at.g.shape[-1], KAPPA * unit.u
        c, d = unit.chain(n), (at.h * g).sum(-1, keepdims=True)
        squares = ((at.h * g) ** 2).sum(-1, keepdims=True)
        rounds = k**2 * ((c / 3 + 1) * d**2 + (c / 6 + np.log2(n) + 1) * squares)
        shared = ((at.rms_h * g) ** 2).sum(-1, keepdims=True) + rounds
        steps = np.sqrt(shared + k**2 * (g**2 + d**2 + 3 * (g - d) ** 2))
        own = scale * np.hypot(at.rms_a * np.abs(g - d), at.a * steps)
        stored = np.hypot(store_spread(ref[0], call.dtype), own + unit.tau)
        return (np.where(at.touched, stored, 0.0),)


@router_vjp.edge(dims=SMALL)
def special_cotangents(arrays, rng, options):
    """NaN and infinities reach what their expert's weight depends on."""
    g = arrays["d_weights"]
    g[rng.random(g.shape) < 0.2] = rng.choice([np.nan, inf, -inf])


@router_vjp.edge(dims=ALONE)
def special_logits(arrays, rng, options):
    """NaN and infinities make NaN of weights, and of the gradients of what depends on them."""
    x = arrays["logits"]
    x[rng.random(x.shape) < 0.1] = rng.choice([np.nan, inf, -inf])


@router_vjp.edge(dims=ALONE, options={"normalize": True})
def constant_cotangents(arrays, rng, options):
    """Weights have a constant sum: a cotangent that is constant leaves nothing but rounding."""
    arrays["d_weights"][...] = rng.standard_normal((*arrays["d_weights"].shape[:-1], 1))


@router_vjp.edge(dims=SMALL)
def far_apart_vjp(arrays, rng, options):
    """Logits of hundreds: slopes are next to nothing, and never NaN."""
    arrays["logits"] *= 200


@router_vjp.edge(dims=ALONE, options={"scoring": "sigmoid"})
def faint_and_saturated(arrays, rng, options):
    """Sigmoids next to 0 and to 1: 1 - s is as exact as s."""
    arrays["logits"][...] = rng.choice([-1.0, 1.0]) * rng.uniform(8, 20, arrays["logits"].shape)


@router_vjp.edge(dims={"batch": (1, 4), "width": (1, 40), "groups": (1, 1), "k": (1, 40)})
def every_expert_vjp(arrays, rng, options):
    """All of a row are chosen."""


@router_vjp.edge(dims={"batch": (1, 3), "width": (60, 300), "groups": (1, 2), "k": (1, 20)}, smallest_tiles=True)
def ragged_rows(arrays, rng, options):
    """The last expert has a gradient as any other."""
    arrays["logits"][..., -1] = 8


@router_vjp.law
def rows_are_independent_vjp(run, draw):
    """A token alone has the same bits as among others."""
    rows, n, options = draw.extent(2, 20), draw.extent(1, 100), CALLS[draw.extent(0, 3)]
    k, first = draw.extent(1, min(n, 9)), draw.extent(0, rows - 1)
    x, row = draw.normal(rows, n), slice(first, first + 1)
    indices = np.argsort(-x.astype(np.float64), -1)[:, :k].astype(np.int32)
    g = draw.normal(rows, k).astype(wide(x))
    alone = run(x[row], indices[row], g[row], k=k, **options)[0]
    draw.same_bits(alone, run(x, indices, g, k=k, **options)[0][row], "a token alone")


@router_vjp.law
def others_have_none(run, draw):
    """Experts that were not chosen have a gradient of 0, but of softmax that is not divided again."""
    x, k = draw.normal(draw.extent(1, 9), draw.extent(9, 100)), draw.extent(1, 8)
    indices = np.argsort(-x.astype(np.float64), -1)[:, :k].astype(np.int32)
    g, options = draw.normal(len(x), k).astype(wide(x)), CALLS[(0, 2, 3)[draw.extent(0, 2)]]
    found = run(x, indices, g, k=k, **options)[0].copy()
    np.put_along_axis(found, indices, found.dtype.type(0), -1)
    draw.same_bits(np.abs(found), np.zeros_like(x), "the gradient of others")


@router_vjp.law
def powers_of_two_scale_exactly(run, draw):
    """A cotangent that is doubled doubles the gradient, to the bit, but where float16 would make it subnormal."""
    if draw.dtype == "float16":
        return
    x, k = draw.integers(-3, 3, draw.extent(1, 9), draw.extent(9, 100)), draw.extent(1, 8)
    indices = np.argsort(-x.astype(np.float64), -1)[:, :k].astype(np.int32)
    g, options = 64 * draw.normal(len(x), k).astype(wide(x)), CALLS[draw.extent(0, 3)]
    once, twice = (run(x, indices, c, k=k, **options)[0] for c in (g, 2 * g))
    draw.same_bits(twice, once * once.dtype.type(2), "a cotangent doubled")
