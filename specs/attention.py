"""Scaled dot-product attention with grouped queries."""

from __future__ import annotations

from math import inf, log, sqrt
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Float32, Int

from portakern.spec import Rule, Tile, spec
from portakern.spec.options import Range
from portakern.spec.tolerance import KAPPA, abs_matmul, chain, dot_spread, magnitude, round_to, store_spread, units

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class AttentionOut(NamedTuple):
    o: Float[A, "batch q_len kv_heads*group dv"]
    lse: Float32[A, "batch kv_heads*group q_len"]


@spec(
    tiling={"block_q": Tile(16, 1024, of="q_len"), "block_kv": Tile(16, 1024, of="kv_len")},
    returns={"lse": "return_lse"},
    or_float32=("bias",),
    masks=("bias",),
    positive=("kv_heads", "group", "d", "dv"),
    empty={"kv_len": {"o": 0.0, "lse": -inf}},
    require=[
        Rule(
            lambda call: (call.arrays["q_segment_ids"] is None) == (call.arrays["kv_segment_ids"] is None),
            "q_segment_ids and kv_segment_ids come together; pass both, or neither",
        )
    ],
    vjp="attention_vjp",
    autocast="lower",
    typical={
        "batch": 4,
        "kv_heads": 4,
        "group": 4,
        "q_len": 4096,
        "kv_len": 4096,
        "d": 128,
        "dv": 128,
        "is_causal": True,
    },
    flops=lambda call: (
        2.0
        * call.dims["batch"]
        * call.dims["kv_heads"]
        * call.dims["group"]
        * allowed_pairs(call)
        * (call.dims["d"] + call.dims["dv"])
    ),
)
def attention(
    q: Float[A, "batch q_len kv_heads*group d"],
    k: Float[A, "batch kv_len kv_heads d"],
    v: Float[A, "batch kv_len kv_heads dv"],
    bias: Float[A, "#batch #kv_heads*group #q_len kv_len"] | None = None,
    q_segment_ids: Int[A, "batch q_len"] | None = None,
    kv_segment_ids: Int[A, "batch kv_len"] | None = None,
    *,
    is_causal: bool = False,
    window: Annotated[tuple[int | None, int | None], Range(0, typical=((3, 0), (None, 2), (5, 5), (0, 0)))]
    | None = None,
    scale: Annotated[float, Range(typical=(0.125, 1.0, 0.3))] | None = None,
    softcap: Annotated[float, Range(0.0, 1e30, open=True, typical=(2.0, 30.0))] | None = None,
    precision: Literal["ieee", "tf32"] = "ieee",
    return_lse: bool = False,
) -> AttentionOut:
    """o = softmax(softcap(scale q k^T) + bias, masked) v, one row at a time and never storing the scores (Dao 2023, FlashAttention-2, algorithm 1).

    Args:
      q: (batch, q_len, kv_heads*group, d); k: (batch, kv_len, kv_heads, d); v: (batch, kv_len, kv_heads, dv). Query head h reads key head h // group.
      bias: added to the scaled scores; (batch, heads, q_len, kv_len), where the first three may be 1; q's dtype or float32. -inf masks the pair.
      q_segment_ids, kv_segment_ids: (batch, q_len), (batch, kv_len): a pair is allowed where they are equal. Both or neither.
      is_causal: query i sees keys up to i + kv_len - q_len (aligned at the bottom right: the last query sees every key).
      window: (left, right): query i sees keys from i + kv_len - q_len - left to i + kv_len - q_len + right; None on a side is unbounded.
      scale: None is 1/sqrt(d).
      softcap: c: scores become c tanh(s/c), before the bias.
      precision: for float32 operands, as in matmul.
      return_lse: also return the log-sum-exp.

    Returns:
      o: (batch, q_len, kv_heads*group, dv), q's dtype; with return_lse also lse: (batch, kv_heads*group, q_len), float32, natural log.
      A row that may see no key is zeros, its lse -inf.
    """
    raise NotImplementedError


def allowed_pairs(call) -> float:
    """Number of (query, key) pairs of one head that the causal mask and the window allow; segments and bias are data and do not count."""
    q_len, kv_len = call.dims["q_len"], call.dims["kv_len"]
    left, right = call.options["window"] or (None, None)
    if call.options["is_causal"]:
        right = 0 if right is None else min(right, 0)
    total = 0
    for i in range(kv_len - q_len, kv_len):
        lo = 0 if left is None else max(i - left, 0)
        hi = kv_len if right is None else min(i + right + 1, kv_len)
        total += max(hi - lo, 0)
    return float(total)


def allowed(call: Call, b: int) -> np.ndarray:
    """(q_len, kv_len): may query i of batch b see key j? Positions are aligned at the bottom right: the last query stands at the last key."""
    q_len, kv_len = call.dims["q_len"], call.dims["kv_len"]
    ahead = (
        np.arange(kv_len) - np.arange(kv_len - q_len, kv_len)[:, None]
    )  # how far the key lies beyond the query's own position
    left, right = call.options["window"] or (None, None)
    mask = np.ones((q_len, kv_len), bool)
    if call.options["is_causal"]:
        mask &= ahead <= 0
    if left is not None:
        mask &= ahead >= -left
    if right is not None:
        mask &= ahead <= right
    if call.arrays["q_segment_ids"] is not None:
        mask &= call.arrays["q_segment_ids"][b][:, None] == call.arrays["kv_segment_ids"][b]
    return mask


@attention.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Bounds of o and lse from ds, the error of a score; d = m - s, p = exp(-d), l = sum p, all sums over the n keys that a row sees.

    ds = ((D+6) u + tf32) S + 6u d + 4u |bias| + 10u c + ex + flushed operands,  S = |scale| |q||k|^T, c the softcap or 0: the dot and its scaling; m - s and
    exp2 of it (a running maximum splits d into parts that sum to d); the bias addition; an accurate tanh, which also passes on no more than its slope
    of the terms before it; exp.
    A weight p moves by g = p (e^ds - 1) at most, and l down to l' = sum p e^-ds at most, so o = sum p v / l moves by (g|V| + |o| sum g) / l'.
    The product adds (U + tf32 + steps) (p + g)|V| / l': p is rounded to v's dtype, and steps = u (min(20 n, N) + 32): a tile costs a multiplication and
    an addition in acc and in l, 4u, and the exp of the maximum's rise twice, 2 ex = 16u; at most n tiles hold a key that is seen, and
    N/16 tiles in all, whose 16u each leave 6u for an exp, which is enough on any hardware known; a lone tile has N additions.
    lost = (eta sum|v| + flush l + n tau) / l' is underflow: of p in its dtype, of v, of products.
    Whatever the scores, o is a convex average of v: no error passes C = (max|v| + |o|)(1 + 4 (U + tf32 + steps)) + 2 lost l'.
    B_o = E (1 + U) + U|o| + eta, E = min(the sum of the above, C).
    B_lse = E (1 + U) + U|lse| + eta, E = max(log(1 + sum g / l), log(l / l')) + steps + 4u (|m| + |lse|).

    A row that sees no key: eta, and an exact lse. +inf: where a score's terms reach 2^127 (the row) or sum|v| does; where a masked key holds NaN or inf in
    v (0 * NaN inside a tile cannot be undone); where a key that is seen holds inf but its weight may be 0 (inf or NaN).
    """
    o, lse = ref
    unit, group = units(call), call.dims["group"]
    bound_o, bound_lse = np.empty_like(o), None if lse is None else np.empty_like(lse)
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(o.shape[0], o.shape[2]):
            rows = _Rows.of(call, unit, b, h)
            bound_o[b, :, h] = _bound_o(call, unit, rows, call.arrays["v"][b, :, h // group], o[b, :, h])
            if bound_lse is not None:
                bound_lse[b, h] = _bound_lse(call, unit, rows, lse[b, h])
    return bound_o, bound_lse


class _Rows(NamedTuple):
    """The scores of one head, (q_len, kv_len) or (q_len, 1): see :func:`bound`."""

    seen: np.ndarray
    n: np.ndarray
    m: np.ndarray
    d: np.ndarray
    ds: np.ndarray
    p: np.ndarray
    l: np.ndarray
    g: np.ndarray
    least: np.ndarray
    steps: np.ndarray
    overflows: np.ndarray

    @classmethod
    def of(cls, call, unit, b, h):
        s, ds, _, overflows = score_errors(call, unit, b, h)
        may = allowed(call, b)
        seen = may & (s != -inf)
        m = np.where(seen, s, -inf).max(1, keepdims=True, initial=-inf)
        d = np.where(seen, m - s, inf)
        ds = np.where(seen, ds + 6 * unit.u * d + unit.ex, 0)
        p = np.exp(-d)
        g = np.where(ds < 1, p * np.expm1(ds), np.exp(np.minimum(ds - d, 700)))
        n = seen.sum(1, keepdims=True)
        steps = unit.u * (np.minimum(20 * n, call.dims["kv_len"]) + 32)
        return cls(
            seen,
            n,
            m,
            d,
            ds,
            p,
            p.sum(1, keepdims=True),
            g,
            (p * np.exp(-ds)).sum(1, keepdims=True),
            steps,
            (may & overflows).any(1, keepdims=True),
        )


def score_errors(call, unit, b, h):
    """Of one head, (q_len, kv_len): its scores, how far rounding may move them with and without the bias, which of them may overflow."""
    q, k, bias = call.arrays["q"][b, :, h], call.arrays["k"][b, :, h // call.dims["group"]], call.arrays["bias"]
    depth, u, scale, softcap = call.dims["d"], unit.u, scale_of(call), call.options["softcap"]
    size = abs_matmul(q, k.T, unit)
    s, ds = scale * (q @ k.T), ((depth + 6) * u + unit.tf32) * abs(scale) * size
    ds += (
        abs(scale) * (unit.flush * (magnitude(q).sum(1, keepdims=True) + magnitude(k).sum(1)) + depth * unit.tau)
        + unit.tau * size
    )
    if softcap is not None:
        toward_0 = softcap * np.tanh((np.abs(s) - ds) / softcap)  # where tanh is steeper
        s = softcap * np.tanh(s / softcap)
        ds = np.abs(s) - toward_0 + 10 * u * softcap
    capped = ds
    if bias is not None:
        bias = head_of_bias(call, b, h)
        s, ds = s + bias, ds + 4 * u * np.abs(bias)
    return s, ds, capped, (size * max(1, abs(scale)) >= unit.huge) | (np.isfinite(s) & (s >= unit.huge))


def scale_of(call: Call) -> float:
    """The scale that None stands for."""
    return 1 / sqrt(call.dims["d"]) if call.options["scale"] is None else call.options["scale"]


def head_of_bias(call: Call, b: int, h: int) -> np.ndarray:
    """(q_len, kv_len) of bias, or (1, kv_len) where it is the same for all queries."""
    bias = call.arrays["bias"]
    return bias[b % bias.shape[0], h % bias.shape[1]]


def _bound_o(call, unit, row, v, o):
    size, rounding = magnitude(v), unit.U + unit.tf32 + row.steps
    total = row.seen @ size
    lost = unit.eta * total + unit.flush * row.l + row.n * unit.tau
    err = (
        row.g @ size + np.abs(o) * row.g.sum(1, keepdims=True) + rounding * ((row.p + row.g) @ size) + lost
    ) / row.least
    err = np.fmin(err, (size.max(0) + np.abs(o)) * (1 + 4 * rounding) + 2 * lost)
    err = np.where(row.n == 0, 0.0, err)
    masked = (~row.seen).astype(float) @ ~np.isfinite(v) > 0
    faint = (row.seen & (row.d > -log(unit.eta) - 7)).astype(float) @ np.isinf(v) > 0
    return round_to(
        np.where(row.overflows | (total >= unit.huge) | (masked & ~np.isnan(o)) | faint, inf, err), o, call.dtype
    )


def _bound_lse(call, unit, row, lse):
    largest = np.where(row.d - row.ds < 745, row.ds, 0).max(
        1
    )  # lse moves by no more than the largest error of a score that counts
    moved = np.maximum(np.log1p(row.g.sum(1) / row.l[:, 0]), np.log(row.l / row.least)[:, 0])
    err = np.where(largest > 1, largest, moved) + row.steps[:, 0] + 4 * unit.u * (np.abs(row.m[:, 0]) + np.abs(lse))
    err = np.where(row.overflows[:, 0], inf, np.where(row.n[:, 0] == 0, 0.0, err))
    return round_to(err, lse, call.outputs["lse"][1])


@attention.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Let f_j be the RMS error of score j apart from its neighbours, P = p / l, k = KAPPA u, and (x, y) a dot's coefficients (``dot_spread``):

    f^2 = J^2 (x t^2 + y scale^2 q^2 @ k^2 + 2 (k t)^2) + (2uc)^2 + k^2 (2 s^2 + 6 d^2) + (ex/4)^2,  t the score before the softcap, J = 1 - tanh(t/c)^2
    its slope (1 without one): the dot, two products, tanh, m and bias rounding at the size of s, m - s in up to 6 parts (a running maximum's), exp.
    sigma_o^2 = store^2 + sum P^2 f^2 (v - o)^2 + (KAPPA U)^2 sum P^2 v^2 [v of 16 bits] + x o^2 + y sum P^2 v^2 + (R + (ex/4)^2) o^2 + eta^2 sum v^2 / 3 l^2:
    an error of P_j moves o along v_j - o, since l takes part; P is rounded beside l; the product over N keys; the rest; underflow of P.
    sigma_lse^2 = store^2 + sum P^2 f^2 + x (sum P J t)^2 + u^2 (m^2 + H^2) + R: what leans one way in every score adds up on average, a cut dot by x, and
    the rounded constants scale and scale log2(e) by u m and u H, H = sum P d. A constant is one draw for all rows: its largest error stands for the RMS.
    R = k^2 (c_N / 3 + 8) + (ex/4)^2: l's sum, log or division, and the exp of a rise of the maximum, by which acc and l are rescaled.

    +inf where the first order fails: rows with an f of 2^-4 or more at a key that counts, and elements without a bound.
    """
    o, lse = ref
    unit, group = units(call), call.dims["group"]
    rest = (KAPPA * unit.u) ** 2 * (chain(call.dims["kv_len"]) / 3 + 8) + (unit.ex / 4) ** 2
    sigma_o, sigma_lse = np.empty_like(o), None if lse is None else np.empty_like(lse)
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(o.shape[0], o.shape[2]):
            row = _Rows.of(call, unit, b, h)
            share, (f2, lean) = row.p / row.l, _score_spread(call, unit, row, b, h)
            unknown = row.overflows | (np.where(row.d < 100, f2, 0.0).max(1, keepdims=True) >= 2.0**-8)
            moved = np.where(row.p > 0, np.square(share) * f2, 0.0)
            sigma_o[b, :, h] = np.where(
                unknown,
                inf,
                _o_spread(call, unit, row, share, moved, rest, call.arrays["v"][b, :, h // group], o[b, :, h]),
            )
            if sigma_lse is not None:
                entropy = np.where(row.p > 0, share * row.d, 0.0).sum(1)
                variance = (
                    moved.sum(1) + (share * lean).sum(1) ** 2 + unit.u**2 * (row.m[:, 0] ** 2 + entropy**2) + rest
                )
                sigma_lse[b, h] = np.where(
                    unknown[:, 0], inf, np.hypot(store_spread(lse[b, h], call.outputs["lse"][1]), np.sqrt(variance))
                )
    return sigma_o, sigma_lse


def _score_spread(call, unit, row, b, h):
    """f^2, the variance of each score, and sqrt(x) J t, the part of the dot's error that leans the same way in every key."""
    f2, lean = score_spread(call, unit, b, h)
    f2 = f2 + (KAPPA * unit.u) ** 2 * (2 * (row.m - row.d) ** 2 + 6 * row.d**2) + (unit.ex / 4) ** 2
    return np.where(row.seen, f2, 0.0), np.where(row.seen, lean, 0.0)


def score_spread(call, unit, b, h):
    """Of one head, (q_len, kv_len): the variance of its scores up to the softcap, and what leans the same way in all of them."""
    q, k = (
        np.where(np.isfinite(a), a, 0.0)
        for a in (call.arrays["q"][b, :, h], call.arrays["k"][b, :, h // call.dims["group"]])
    )
    x, y = dot_spread(call, call.dims["d"])
    scale, softcap, kappa_u = scale_of(call), call.options["softcap"], KAPPA * unit.u
    t, squares = scale * (q @ k.T), scale**2 * (np.square(q) @ np.square(k).T)
    slope = 1.0 if softcap is None else 1 - np.tanh(t / softcap) ** 2
    f2 = slope**2 * (x * t**2 + y * squares + 2 * (kappa_u * t) ** 2) + (2 * unit.u * (softcap or 0.0)) ** 2
    return f2, sqrt(x) * slope * t


def _o_spread(call, unit, row, share, moved, rest, v, o):
    v, o = (np.where(np.isfinite(a), a, 0.0) for a in (v, o))
    x, y = dot_spread(call, call.dims["kv_len"])
    products, rounded_p = (
        np.square(share) @ np.square(v),
        (KAPPA * unit.U) ** 2 if call.dtype in ("float16", "bfloat16") else 0.0,
    )
    along = moved @ np.square(v) - 2 * o * (moved @ v) + np.square(o) * moved.sum(1, keepdims=True)
    variance = np.maximum(along, 0) + (y + rounded_p) * products + np.square(o) * (x + rest + (unit.ex / 4) ** 2)
    return np.hypot(
        store_spread(o, call.dtype), np.sqrt(variance + unit.eta**2 / 3 * (row.seen @ np.square(v)) / row.l**2)
    )


def score_unit(call: Call) -> tuple[float | None, float]:
    """(what dots are multiplied by before anything else, None for nothing; the positive factor that takes scores from there to natural units).

    A kernel that keeps scores in the unit in which they arise, and scales the difference s - m instead of s, never rounds s two ways: m is one of the s, so no
    weight exceeds 1 and one of them is 1. Scaled first, a product may be fused into the difference and not into m, and an ulp of a score of 1e10 is 1024.
    """
    scale, softcap = call.options["scale"], call.options["softcap"]
    scale = call.dims["d"] ** -0.5 if scale is None else scale
    biased = call.arrays["bias"] is not None
    if softcap is not None:
        return scale / softcap, 1.0 if biased else softcap
    if biased or scale == 0.0:
        return scale, 1.0
    return (None if scale > 0 else -1.0), abs(scale)


from portakern.specs import _attention_edges as _attention_edges  # noqa: E402  declares the op's edges and laws
