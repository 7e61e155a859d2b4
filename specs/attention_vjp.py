"""Gradients of scaled dot-product attention with grouped queries."""

from __future__ import annotations

from math import inf, log, sqrt
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Float32, Int

from portakern.spec import Rule, Tile, spec
from portakern.spec.options import Range
from portakern.spec.tolerance import (
    KAPPA,
    abs_matmul,
    chain,
    dot_spread,
    format_of,
    magnitude,
    round_to,
    store_spread,
    units,
)
from portakern.specs.attention import allowed, allowed_pairs, scale_of, score_errors, score_spread

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class AttentionGradients(NamedTuple):
    d_q: Float[A, "batch q_len kv_heads*group d"]
    d_k: Float[A, "batch kv_len kv_heads d"]
    d_v: Float[A, "batch kv_len kv_heads dv"]
    d_bias: Float[A, "#batch #kv_heads*group #q_len kv_len"]


def _flops(call: Call) -> float:
    """Scores and dP again, and a product for each gradient."""
    d, dv = call.dims["d"], call.dims["dv"]
    each = {"d_q": d, "d_k": d, "d_v": dv}
    depth = d + dv + sum(each.get(name, 0) for name in call.wants)
    return 2.0 * call.dims["batch"] * call.dims["kv_heads"] * call.dims["group"] * allowed_pairs(call) * depth


@spec(
    tiling={"block_q": Tile(16, 1024, of="q_len"), "block_kv": Tile(16, 1024, of="kv_len")},
    or_float32=("bias",),
    masks=("bias",),
    positive=("kv_heads", "group", "d", "dv"),
    require=[
        Rule(
            lambda call: (call.arrays["q_segment_ids"] is None) == (call.arrays["kv_segment_ids"] is None),
            "q_segment_ids and kv_segment_ids come together; pass both, or neither",
        )
    ],
    flops=_flops,
)
def attention_vjp(
    q: Float[A, "batch q_len kv_heads*group d"],
    k: Float[A, "batch kv_len kv_heads d"],
    v: Float[A, "batch kv_len kv_heads dv"],
    o: Float[A, "batch q_len kv_heads*group dv"],
    lse: Float32[A, "batch kv_heads*group q_len"],
    d_o: Float[A, "batch q_len kv_heads*group dv"],
    bias: Float[A, "#batch #kv_heads*group #q_len kv_len"] | None = None,
    q_segment_ids: Int[A, "batch q_len"] | None = None,
    kv_segment_ids: Int[A, "batch kv_len"] | None = None,
    d_lse: Float32[A, "batch kv_heads*group q_len"] | None = None,
    *,
    is_causal: bool = False,
    window: Annotated[tuple[int | None, int | None], Range(0, typical=((3, 0), (None, 2), (5, 5), (0, 0)))]
    | None = None,
    scale: Annotated[float, Range(typical=(0.125, 1.0, 0.3))] | None = None,
    softcap: Annotated[float, Range(0.0, 1e30, open=True, typical=(2.0, 30.0))] | None = None,
    precision: Literal["ieee", "tf32"] = "ieee",
) -> AttentionGradients:
    """Gradients of attention from its own results, the scores recomputed and never stored (Dao 2023, FlashAttention-2, algorithm 2):

        t = tanh(scale q k^T / c), s = c t + bias, P = exp(s - lse);  without a softcap s = scale q k^T + bias
        Delta = rowsum(d_o * o) - d_lse;  dS = P (d_o v^T - Delta);  D = dS (1 - t^2), without a softcap dS
        d_q = scale D k;  d_k = scale D^T q and d_v = P^T d_o, summed over the query heads of a key head;  d_bias = dS, summed over the axes that bias broadcasts

    At pairs that causal, window or segments mask, P and dS are 0, whatever lse, d_o, v and the rest hold there: select after the arithmetic.
    A row with lse = -inf saw no key: its P is 0. Where bias = -inf, P is 0 as exp gives it. o and lse are taken as they are, rounded. Where a bias of finfo.min
    throughout makes lse so low that lse log2(e) overflows, P is from 0 to 1, never NaN: NaN there would reach every key.
    NaN and inf reach what they meet at allowed pairs. 0 in P or D times a q, k or d_o that is NaN or inf, inside a tile, may be NaN; beyond an extent never.

    Args:
      q, k, v, bias, q_segment_ids, kv_segment_ids, is_causal, window, scale, softcap, precision: as in attention.
      o, lse: what attention returned.
      d_o, d_lse: cotangents of o (its dtype) and lse (float32); d_lse None is 0.

    Returns:
      d_q, d_k, d_v, d_bias: the shapes and dtypes of q, k, v and bias. A row that saw no key has no gradient and leaves none.
      For 16-bit inputs P and D are rounded to nearest before their products, as P is in attention.
    """
    raise NotImplementedError


@attention_vjp.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Bounds of the gradients from those of P and dS at each pair that a row sees; ds, of the score s, as in attention but for d; c the softcap.

    e = ds + 4u (|s| + |lse|) + ex: two products with log2(e), a rounded constant and the difference s - lse; exp. P moves by g = P (exp(e) - 1) at most: here
    nothing divides by a sum of P, and no kernel has to keep P below 1. Where lse is so low that lse log2(e) overflows, as under a bias of finfo.min throughout,
    P may be off by P + 1: anything from 0 to 1 is half of what is permitted.
    a = dP - Delta moves by da = ((dv+6) u + tf32) |d_o||v|^T + u ((dv+3) sum|d_o o| + 2 |d_lse| + |dP| + |Delta|) + flushed operands,
    dS = P a by E = g |a| + (P + g) (da + 2u (|a| + da)) + tau (1 + |a| + da),
    J = 1 - t^2 by dJ = min(h (2|t| + h) + 4u, 1 + 4u), h the error of t: attention's of c t, over c;
    D = dS J by F = E (J + dJ) + |dS| dJ + 2u (|D| + E) + tau.
    Into the products go P and D as the inputs' dtype: P + g = P' moves by W_P = g + U P' + eta, D' = |D| + F by W = F + U D' + eta. A product over n seen pairs
    adds its own ((n+8) u + tf32) and flushes:
    E_q = |scale| [W |k| + ((n+8) u + tf32) (|D| + W) |k| + flush sum (|D| + W) + n tau];  E_k the same over the queries, with |q|;  E_v with W_P, P and |d_o|.
    E_bias = sum E + (n+8) u sum (|dS| + E) over the pairs that an element of bias stands for.
    B = E (1 + U) + U |gradient| + eta.

    +inf, beside where terms reach 2^127 (P and D also where they leave the range of the inputs' dtype): where inf is met at a seen pair (inf times a weight that may
    round to 0); at pairs that only bias masks, where what P = 0 multiplies is not finite; and where 0 in P or D, at any pair that is not seen, multiplies
    a q, k or d_o that is not finite. NaN at a seen pair has no such excuse.
    """
    unit, group, scale = units(call), call.dims["group"], abs(scale_of(call))
    k, d_bias = call.arrays["k"], np.zeros(())
    d_q, d_k, d_v = (np.zeros(call.arrays[n].shape) for n in ("q", "k", "v"))
    sums = None if ref[3] is None else np.zeros((4, *ref[3].shape))
    with np.errstate(all="ignore"):
        for b, kv_head in np.ndindex(k.shape[0], k.shape[2]):
            pairs = _Pairs.of(call, unit, b, kv_head)
            D, P = (
                (pairs.seen, pairs.D, pairs.F, pairs.nan, pairs.wild),
                (pairs.seen, pairs.P, pairs.g, pairs.nan_P, pairs.wild_P),
            )
            d_q[b, :, kv_head * group : (kv_head + 1) * group] = _by_head(
                _product(unit, D, k[b, :, kv_head], scale), group
            )
            d_k[b, :, kv_head] = _product(unit, tuple(x.T for x in D), _stacked(_group(call, "q", b, kv_head)), scale)
            d_v[b, :, kv_head] = _product(unit, tuple(x.T for x in P), _stacked(_group(call, "d_o", b, kv_head)))
            if sums is not None:
                _add_to_bias(
                    sums, np.stack([pairs.E, np.abs(pairs.dS) + pairs.E, pairs.seen, pairs.wild]), b, kv_head, group
                )
        if sums is not None:
            err, total, n, wild = sums
            d_bias = np.where((wild > 0) | (total >= unit.huge), inf, err + (n + 8) * unit.u * total)
    errors = {"d_q": d_q, "d_k": d_k, "d_v": d_v, "d_bias": d_bias}
    return tuple(
        None if r is None else round_to(errors[name], r, call.outputs[name][1])
        for name, r in zip(errors, ref, strict=True)
    )


class _Pairs(NamedTuple):
    """What the queries of a key head's group (one head after another) and its keys make of each other, (group * q_len, kv_len); 0 where not seen or not finite.

    nan, nan_P: NaN enters D, P; wild, wild_P: nothing is promised of D, P. The others: see :func:`bound`."""

    seen: np.ndarray
    s: np.ndarray
    P: np.ndarray
    g: np.ndarray
    a: np.ndarray
    dS: np.ndarray
    E: np.ndarray
    J: np.ndarray | float
    D: np.ndarray
    F: np.ndarray
    nan: np.ndarray
    nan_P: np.ndarray
    wild: np.ndarray
    wild_P: np.ndarray

    @classmethod
    def of(cls, call, unit, b, kv_head):
        heads, u = range(kv_head * call.dims["group"], (kv_head + 1) * call.dims["group"]), unit.u
        s, ds, capped, large = (
            np.concatenate(x) for x in zip(*(score_errors(call, unit, b, h) for h in heads), strict=True)
        )
        may, lse = np.concatenate([allowed(call, b)] * len(heads)), call.arrays["lse"][b, heads].reshape(-1, 1)
        seen = may & (s != -inf) & (lse != -inf)
        e = ds + 4 * u * (np.abs(s) + np.abs(lse)) + unit.ex
        P = np.exp(np.minimum(s - lse, 700))
        lost = lse <= -log(4) * unit.huge  # lse log2(e) overflows
        g = np.where(lost, P + 1, np.where(e < 1, P * np.expm1(e), np.exp(np.minimum(e + s - lse, 700))))
        a, da, nan_a, wild_a = _differences(call, unit, b, kv_head)
        size = np.abs(a)
        dS, E = P * a, g * size + (P + g) * (da + 2 * u * (size + da)) + unit.tau * (1 + size + da)
        J, dJ = _slopes(call, unit, b, kv_head, capped)
        D = dS * J
        F = E * (J + dJ) + np.abs(dS) * dJ + 2 * u * (np.abs(D) + E) + unit.tau

        limit, infinite = min(format_of(call.dtype).overflow, unit.huge), _infinite(call, b, kv_head)
        broken = large | infinite | (lse >= unit.huge) | (s == inf)
        nan_P = np.isnan(s) | np.isnan(lse)
        nan, hidden = nan_P | nan_a, may & ~seen
        wild_P = seen & ~nan_P & (broken | (P + g >= limit)) | hidden & (large | infinite | nan_P)
        wild_D = broken | wild_a | (P + g >= limit) | ((np.abs(D) + F) * max(1, abs(scale_of(call))) >= limit)
        wild = seen & ~nan & wild_D | hidden & (large | infinite | wild_a | nan)
        P, g, dS, E, D, F = (np.where(seen & np.isfinite(x), x, 0.0) for x in (P, g, dS, E, D, F))
        return cls(seen, s, P, g, a, dS, E, J, D, F, nan, nan_P, wild, wild_P)


def _differences(call, unit, b, kv_head):
    """a = dP - Delta of finite operands, how far rounding may move it, and where it holds NaN, or inf or sums that may overflow."""
    d_o, o, v, d_lse = (
        _stacked(_group(call, "d_o", b, kv_head)),
        _stacked(_group(call, "o", b, kv_head)),
        call.arrays["v"][b, :, kv_head],
        call.arrays["d_lse"],
    )
    group, u, dv = call.dims["group"], unit.u, call.dims["dv"]
    d_lse = (
        np.zeros((d_o.shape[0], 1))
        if d_lse is None
        else d_lse[b, kv_head * group : (kv_head + 1) * group].reshape(-1, 1)
    )
    clean_d_o, clean_o, clean_v, clean_d_lse = (_finite(x) for x in (d_o, o, v, d_lse))
    products, size = (np.abs(clean_d_o) * np.abs(clean_o)).sum(1, keepdims=True), abs_matmul(d_o, v.T, unit)
    dP, delta = clean_d_o @ clean_v.T, (clean_d_o * clean_o).sum(1, keepdims=True) - clean_d_lse
    flushed = (
        unit.flush
        * (np.abs(clean_d_o).sum(1, keepdims=True) * 2 + np.abs(clean_o).sum(1, keepdims=True) + np.abs(clean_v).sum(1))
        + 2 * dv * unit.tau
    )
    da = (
        ((dv + 6) * u + unit.tf32) * size
        + u * ((dv + 3) * products + 2 * np.abs(clean_d_lse) + np.abs(dP) + np.abs(delta))
        + flushed
    )
    row = np.concatenate([d_o, o, d_lse], 1)
    nan = np.isnan(row).any(1, keepdims=True) | np.isnan(v).any(1)
    overflows = (size >= unit.huge) | (products >= unit.huge) | (np.abs(clean_d_lse) >= unit.huge)
    return dP - delta, da, nan, overflows | np.isinf(row).any(1, keepdims=True) | np.isinf(v).any(1)


def _slopes(call, unit, b, kv_head, capped):
    """J = 1 - tanh(t)^2, what the softcap leaves of a dot's gradient, and how far rounding may move it; 1 and 0 without one."""
    if (cap := call.options["softcap"]) is None:
        return 1.0, 0.0
    q, k = _stacked(_group(call, "q", b, kv_head)), call.arrays["k"][b, :, kv_head]
    t, h = scale_of(call) * (q @ k.T) / cap, capped / cap
    return np.square(1 / np.cosh(t)), np.minimum(h * (2 * np.abs(np.tanh(t)) + h) + 4 * unit.u, 1 + 4 * unit.u)


def _infinite(call, b, kv_head):
    """Scores whose query or key holds an infinity."""
    return np.isinf(_stacked(_group(call, "q", b, kv_head))).any(1, keepdims=True) | np.isinf(
        call.arrays["k"][b, :, kv_head]
    ).any(1)


def _group(call, name, b, kv_head):
    """The queries' side of ``name`` that a key head meets: (q_len, group, extent)."""
    group = call.dims["group"]
    return call.arrays[name][b, :, kv_head * group : (kv_head + 1) * group]


def _stacked(x):
    """(q_len, group, extent) as the rows of :class:`_Pairs`."""
    return x.swapaxes(0, 1).reshape(-1, x.shape[2])


def _by_head(x, group):
    """The rows of :class:`_Pairs` as (q_len, group, extent)."""
    return x.reshape(group, -1, x.shape[1]).swapaxes(0, 1)


def _product(unit, weights, other, scale=1.0):
    """The error of ``scale weight @ other``, where the weights err by ``err`` before they are rounded to the operands' dtype."""
    seen, weight, err, nan, wild = weights
    size, n = magnitude(other), seen.sum(1, keepdims=True)
    moved = np.where(seen, err + unit.U * (np.abs(weight) + err) + unit.eta, 0.0)
    largest = np.abs(weight) + moved
    total = largest @ size
    out = (
        moved @ size
        + ((n + 8) * unit.u + unit.tf32) * total
        + unit.flush * largest.sum(1, keepdims=True)
        + n * unit.tau
    )
    met = _meet(~seen, ~np.isfinite(other)) | _meet(seen & ~nan, np.isinf(other))
    return np.where(wild.any(1, keepdims=True) | met | (total >= unit.huge), inf, scale * out)


def _meet(pairs, odd):
    return pairs.astype(float) @ odd > 0


def _add_to_bias(sums, values, b, kv_head, group):
    """Add ``values`` (channels, rows of :class:`_Pairs`, kv_len) to ``sums`` (channels, *bias's shape)."""
    for i, value in enumerate(np.split(values, group, 1)):
        at = sums[:, b % sums.shape[1], (kv_head * group + i) % sums.shape[2]]
        at += value.sum(1, keepdims=True) if at.shape[1] == 1 else value


@attention_vjp.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """RMS errors in the bound's symbols, to first order; f of attention, k = KAPPA u, r = KAPPA U for 16-bit inputs, (x, y) a dot's coefficients (``dot_spread``).

    f^2 = attention's up to the softcap + k^2 (2 s^2 + 2 lse^2 + (s - lse)^2) + (ex/4)^2 is the variance of s - lse at each pair by itself, w^2 that of
    dP: y d_o^2 @ v^2 + x dP^2 + k^2 a^2, z^2 that of Delta, the same for a row: k^2 (c sum(d_o o)^2 / 3 + (c/6 + 1) sum (d_o o)^2 + Delta^2 + d_lse^2), c = c_dv.
    pair: dS^2 (f^2 + 3 k^2) + P^2 w^2, times J^2 for D, + dS^2 (4 t^2 f_c^2 / c^2 + k^2) with a softcap; stored, + (r D)^2 + eta^2 / 3; P: P^2 f^2, stored alike.
    sigma_q^2 = store^2 + scale^2 [pair @ k^2 + y D^2 @ k^2 + (2 k^2 + x) (D @ k)^2 + (z P J @ k)^2 + lean], and so on; where rows are summed, z counts to pair.
    lean: what leans one way in every term adds up before it is squared, as in attention's lse: cut dots by sqrt(x), log2(e) and scale by u s and u lse.

    +inf where the first order fails: along rows and columns with an f of 2^-4 or more at a pair that counts.
    """
    unit, group, k, scale2 = units(call), call.dims["group"], call.arrays["k"], scale_of(call) ** 2
    d_q, d_k, d_v = (np.zeros(call.arrays[n].shape) for n in ("q", "k", "v"))
    sums = None if ref[3] is None else np.zeros((8, *ref[3].shape))
    with np.errstate(all="ignore"):
        for b, kv_head in np.ndindex(k.shape[0], k.shape[2]):
            pairs = _Pairs.of(call, unit, b, kv_head)
            spread = _Spread.of(call, unit, pairs, b, kv_head)
            D, var_D, P, lean, row = pairs.D, spread.var_D, pairs.P, spread.lean, spread.row
            of_q = _product_spread(
                call,
                unit,
                D,
                var_D,
                [*(x * pairs.J for x in spread.lean_S), row * pairs.J],
                k[b, :, kv_head],
                spread.unknown,
            )
            d_q[b, :, kv_head * group : (kv_head + 1) * group] = _by_head(scale2 * of_q, group)
            by_key = D.T, (var_D + np.square(row * pairs.J)).T, [(x * pairs.J).T for x in spread.lean_S]
            d_k[b, :, kv_head] = scale2 * _product_spread(
                call, unit, *by_key, _stacked(_group(call, "q", b, kv_head)), spread.unknown.T
            )
            by_key = P.T, spread.var_P.T, [(x * P).T for x in lean]
            d_v[b, :, kv_head] = _product_spread(
                call, unit, *by_key, _stacked(_group(call, "d_o", b, kv_head)), spread.unknown.T
            )
            if sums is not None:
                values = [spread.unknown, spread.var_S + row**2, np.square(pairs.dS), pairs.dS, *spread.lean_S]
                _add_to_bias(sums, np.stack(values), b, kv_head, group)
        variances = {"d_q": d_q, "d_k": d_k, "d_v": d_v}
        if sums is not None:
            c = chain(pairs.seen.size * k.shape[0] * k.shape[2] / ref[3].size)
            rounding = (KAPPA * unit.u) ** 2 * (c / 3 * np.square(sums[3]) + c / 6 * sums[2])
            variances["d_bias"] = np.where(sums[0] > 0, inf, sums[1] + rounding + np.square(sums[4:]).sum(0))
        return tuple(
            None if r is None else np.hypot(store_spread(r, dtype), np.sqrt(variances[name]))
            for (name, (_, dtype)), r in zip(call.outputs.items(), ref, strict=True)
        )


class _Spread(NamedTuple):
    """Beside :class:`_Pairs`: variances of dS, D and P by themselves; row: the RMS of what Delta moves dS by; lean: shares of P (lean_S: parts of dS) that lean one way;
    unknown: f too large for the first order."""

    var_S: np.ndarray
    var_D: np.ndarray
    var_P: np.ndarray
    row: np.ndarray
    lean: tuple[np.ndarray, ...]
    lean_S: tuple[np.ndarray, ...]
    unknown: np.ndarray

    @classmethod
    def of(cls, call, unit, pairs, b, kv_head):
        group, ku2, (x, y) = call.dims["group"], (KAPPA * unit.u) ** 2, dot_spread(call, call.dims["dv"])
        heads = range(kv_head * group, (kv_head + 1) * group)
        f2, cut = (np.concatenate(x) for x in zip(*(score_spread(call, unit, b, h) for h in heads), strict=True))
        lse = np.broadcast_to(call.arrays["lse"][b, heads].reshape(-1, 1), pairs.seen.shape)
        s, lse = (np.where(pairs.seen & np.isfinite(x), x, 0.0) for x in (pairs.s, lse))
        of_c, f2 = f2, f2 + ku2 * (2 * s**2 + 2 * lse**2 + (s - lse) ** 2) + (unit.ex / 4) ** 2
        d_o, o, v = (
            _finite(a)
            for a in (
                _stacked(_group(call, "d_o", b, kv_head)),
                _stacked(_group(call, "o", b, kv_head)),
                call.arrays["v"][b, :, kv_head],
            )
        )
        d_lse = 0.0 if call.arrays["d_lse"] is None else _finite(call.arrays["d_lse"][b, heads]).reshape(-1, 1)
        dP, products, c = d_o @ v.T, d_o * o, chain(call.dims["dv"])
        total, P2 = products.sum(1, keepdims=True), np.square(pairs.P)
        of_delta = ku2 * (
            c / 3 * total**2
            + (c / 6 + 1) * np.square(products).sum(1, keepdims=True)
            + (total - d_lse) ** 2
            + np.square(d_lse)
        )
        var_S = np.square(pairs.dS) * (f2 + 3 * ku2) + P2 * (
            y * np.square(d_o) @ np.square(v).T + x * dP**2 + ku2 * np.square(pairs.a)
        )
        flushed = np.where(
            pairs.seen, unit.tau**2 / 3 * (1 + np.square(pairs.a)) + 1e-300, 0.0
        )  # 1e-300: squares of smaller values are lost
        stored = (KAPPA * unit.U) ** 2 if call.dtype in ("float16", "bfloat16") else 0.0
        faint = np.where(pairs.seen, unit.eta**2 / 3, 0.0)
        var_S, var_P = var_S + flushed, P2 * (f2 + stored) + faint + flushed
        var_D = np.square(pairs.J) * var_S + stored * np.square(pairs.D) + faint
        if (cap := call.options["softcap"]) is not None:
            var_D = var_D + np.square(pairs.dS) * (4 * (1 - pairs.J) * of_c / cap**2 + ku2)
        lean = cut, unit.u * s, unit.u * lse
        lean_S = *(pairs.dS * x for x in lean), sqrt(x) * pairs.P * dP
        unknown = pairs.seen & (pairs.P > 1e-40) & (f2 >= 2.0**-8)
        return cls(var_S, var_D, var_P, pairs.P * np.sqrt(of_delta), lean, lean_S, unknown)


def _finite(x):
    return np.where(np.isfinite(x), x, 0.0)


def _product_spread(call, unit, weight, variance, lean, other, unknown):
    """The variance of ``weight @ other``: of the weights, of the product's own rounding, of what leans one way."""
    x, y = dot_spread(call, weight.shape[1])
    other = _finite(other)
    squares, total = np.square(other), weight @ other
    out = (
        variance @ squares
        + y * np.square(weight) @ squares
        + (x + 2 * (KAPPA * unit.u) ** 2) * np.square(total)
        + sum(np.square(a @ other) for a in lean)
    )
    return np.where(unknown.any(1, keepdims=True), inf, out)


from portakern.specs import _attention_vjp_edges as _attention_vjp_edges  # noqa: E402  declares the op's edges and laws
