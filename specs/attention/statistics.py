"""How far random rounding typically moves the results of attention and its gradients."""

from __future__ import annotations

from math import inf, log, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portakern.spec.dtypes import numpy_dtype
from portakern.spec.tolerance import KAPPA, dot_spread, store_spread, units
from portakern.specs._gradients import stored_spreads
from portakern.specs.attention.contract import attention, attention_vjp
from portakern.specs.attention.pairs import KeyHead, PairTerms, SinkPairs, SoftmaxRows, d_o_rounding, finite
from portakern.specs.attention.scores import distances, scale_of

if TYPE_CHECKING:
    from portakern.core.call import Call


@attention.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """RMS errors of o and lse; of lse_low nothing is said. The symbols are those of the bound; kappa = KAPPA u, P = p
    / l.

    f is the RMS error of one score apart from its neighbours, and (x, y) are a dot's coefficients (``dot_spread``):

        f^2 = J^2 (x t^2 + y scale^2 q^2 @ k^2 + 2 (kappa t)^2) + (2uc)^2 + kappa^2 (2 s^2 + 6 d^2) + (ex/4)^2

    where t is the score before the softcap c, J = 1 - tanh(t/c)^2 the softcap's slope (1 without one), and q^2 @ k^2
    the sum of the dot's squared products. In order: the dot, two products, tanh; m and the bias, which round at the
    size of s; m - s in up to 6 parts (a running maximum's); exp. With slopes f^2 has (2 kappa a)^2 besides, a slope
    times a distance.

        sigma_o^2 = store^2 + sum P^2 f^2 (v - o)^2 + (KAPPA U)^2 sum P^2 v^2 [v of 16 bits]
                    + x o^2 + y sum P^2 v^2 + (R + (ex/4)^2) o^2 + eta^2 sum v^2 / 3 l^2

    In order: storing o (``store_spread``); an error of P moves o along v - o, since l takes part; P is rounded beside
    l; the product over N keys; the rest R; underflow of P.

        sigma_lse^2 = store^2 + sum P^2 f^2 + x (sum P J t)^2 + u^2 (m^2 + H^2) + R,  H = sum P d

    What leans one way in every score adds up on average: a dot that is cut off by x, the rounded constants scale and
    scale log2(e) by u m and u H, and a rounded slope by u sum P a. A constant is one draw for all rows: its
    largest error stands for the RMS.

        R = kappa^2 (c_N / 3 + 8) + (ex/4)^2,  c_N = chain(N)

    is the sum l, log or division, and the exp of a rise of the maximum, by which accumulator and l are rescaled. A sink
    is one more term of both sums, with v = 0 and the f of a score that is given:

        f_0^2 = kappa^2 (2 sink^2 + 6 d^2 + 2) + (ex/4)^2

    +inf where the first order fails: rows with an f of 2^-4 or more at a key that counts, and elements without a bound.
    """
    o, lse, low = ref
    unit, group, sinks = units(call), call.dims["group"], call.arrays["sinks"]
    rest = (KAPPA * unit.u) ** 2 * (unit.chain(call.dims["kv_len"]) / 3 + 8) + (unit.ex / 4) ** 2
    sigma_o, sigma_lse = np.empty_like(o), None if lse is None else np.empty_like(lse)
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(o.shape[0], o.shape[2]):
            row = SoftmaxRows.of(call, unit, b, h)
            share, (f2, lean) = row.p / row.l, _row_spread(call, unit, row, b, h)
            sink = np.zeros(row.n.shape) if sinks is None else _sink_spread(unit, sinks[h], row)
            unknown = (
                row.overflows | (np.where(row.d < 100, f2, 0.0).max(1, keepdims=True) >= 2.0**-8) | (sink >= 2.0**-8)
            )
            moved = np.where(row.p > 0, np.square(share) * f2, 0.0)
            v = call.arrays["v"][b, :, h // group]
            of_o = _o_spread(call, unit, row, share, moved, rest + sink, v, o[b, :, h])
            sigma_o[b, :, h] = np.where(unknown, inf, of_o)
            if sigma_lse is not None:
                of_slope = np.square((share * unit.u * falls(call, h)).sum(1))
                of_lse = _lse_spread(call, unit, row, share, moved, lean, rest + sink[:, 0] + of_slope, lse[b, h])
                sigma_lse[b, h] = np.where(unknown[:, 0], inf, of_lse)
    return sigma_o, sigma_lse, None if low is None else np.full_like(low, inf)


def _row_spread(call, unit, row, b, h):
    """f^2, the variance of each score, and sqrt(x) J t, by which the dot's error leans the same way in every key."""
    f2, lean = score_spread(call, unit, b, h)
    sizes = 2 * (row.m - row.d) ** 2 + 6 * row.d**2 + 4 * falls(call, h) ** 2
    f2 = f2 + (KAPPA * unit.u) ** 2 * sizes + (unit.ex / 4) ** 2
    return np.where(row.seen, f2, 0.0), np.where(row.seen, lean, 0.0)


def _sink_spread(unit, sink, row):
    """P^2 f_0^2 of a sink, (q_len, 1): by how much it moves the logarithm of l, and o as a share of o."""
    d = np.where(np.isfinite(row.sink.d), row.sink.d, 0.0)
    f2 = (KAPPA * unit.u) ** 2 * (2 * sink**2 + 6 * d**2 + 2) + (unit.ex / 4) ** 2
    return np.where(row.sink.p > 0, np.square(row.sink.p / row.l) * f2, 0.0)


def falls(call, h):
    """(q_len, kv_len): by how much the slope of a head makes scores less, as far as that is finite; 0.0 without."""
    if (slopes := call.arrays["alibi_slopes"]) is None:
        return 0.0
    return finite(slopes[h] * distances(call))


def score_spread(call, unit, b, h):
    """Of one head, (q_len, kv_len): the variance of its scores up to the softcap, and what leans one way in all."""
    q, k = call.arrays["q"][b, :, h], call.arrays["k"][b, :, h // call.dims["group"]]
    q, k = (np.where(np.isfinite(a), a, 0.0) for a in (q, k))
    x, y = dot_spread(call, call.dims["d"])
    scale, softcap, kappa_u = scale_of(call), call.options["softcap"], KAPPA * unit.u
    t, squares = scale * (q @ k.T), scale**2 * (np.square(q) @ np.square(k).T)
    slope = 1.0 if softcap is None else 1 - np.tanh(t / softcap) ** 2
    f2 = slope**2 * (x * t**2 + y * squares + 2 * (kappa_u * t) ** 2) + (2 * unit.u * (softcap or 0.0)) ** 2
    return f2, sqrt(x) * slope * t


def _o_spread(call, unit, row, share, moved, rest, v, o):
    """sigma_o of one head, from P (``share``), P^2 f^2 (``moved``) and R (``rest``)."""
    v, o = (np.where(np.isfinite(a), a, 0.0) for a in (v, o))
    x, y = dot_spread(call, call.dims["kv_len"])
    products = np.square(share) @ np.square(v)
    rounded_p = (KAPPA * unit.U) ** 2 if call.dtype in ("float16", "bfloat16") else 0.0
    along = moved @ np.square(v) - 2 * o * (moved @ v) + np.square(o) * moved.sum(1, keepdims=True)
    variance = np.maximum(along, 0) + (y + rounded_p) * products + np.square(o) * (x + rest + (unit.ex / 4) ** 2)
    underflow = unit.eta**2 / 3 * (row.seen @ np.square(v)) / row.l**2
    return np.hypot(store_spread(o, call.outputs["o"][1]), np.sqrt(variance + underflow))


def _lse_spread(call, unit, row, share, moved, lean, rest, lse):
    """sigma_lse of one head, from P (``share``), P^2 f^2 (``moved``), sqrt(x) J t (``lean``) and R (``rest``)."""
    entropy = np.where(row.p > 0, share * row.d, 0.0).sum(1)
    constants = unit.u**2 * (row.m[:, 0] ** 2 + entropy**2)
    variance = moved.sum(1) + (share * lean).sum(1) ** 2 + constants + rest
    return np.hypot(store_spread(lse, call.outputs["lse"][1]), np.sqrt(variance))


# ---------------------------------------------------------------------------------------------------------- gradient
ALIKE = 2.0**-6
"""Values of P that are closer than this share of a unit in the last place are stored with errors that are alike."""

DRAWS = 64
"""How many errors of storing P have to be drawn, each for itself, for d_v to be evidence. Their mean, which every
element of d_v shares, is at most 0.56 / sqrt(draws) in units of sigma: of 64 a quarter is 3.6 times that."""

MOST = 2**17
"""Pairs of a head, at most, among which values of P are counted: of more, those of rows that lie evenly apart."""


@attention_vjp.sigma
def sigma_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """RMS errors in the bound's symbols, to first order.

    kappa = KAPPA u, r = KAPPA U for 16-bit inputs and 0 for others, c_dv = ``chain(dv)``; (x, y) are the coefficients
    of a dot whose number of products is that of the sum in question (``dot_spread``). f_c^2 is the variance of a score
    up to the softcap c, as in attention.

        f^2 = f_c^2 + kappa^2 (2 s^2 + 2 lse^2 + (s - lse)^2 + 4 fall^2) + (ex/4)^2
        w^2 = y d_o^2 @ v^2 + x dP^2 + kappa^2 a^2
        z^2 = kappa^2 (c_dv sum(d_o o)^2 / 3 + (c_dv/6 + 1) sum (d_o o)^2 + Delta^2 + d_lse^2)

    where fall is a slope times a distance, are the variances of s - lse at each pair by itself, of dP likewise, and of
    Delta, which is the same for a row, with (r d_o)^2 @ v^2 more in w^2 and P^2 @ (r d_o)^2 more in sigma_v^2 where d_o
    of float32 is rounded for products.
    They make those of dS, D and P at each pair by itself,

        var_S = dS^2 (f^2 + 3 kappa^2) + P^2 w^2 + flushed
        var_D = J^2 var_S + (r D)^2 + eta^2 / 3, with a softcap + dS^2 (4 t^2 f_c^2 / c^2 + kappa^2)
        var_P = P^2 (f^2 + r^2) + eta^2 / 3 + flushed

    where r and eta are of storing D and P in the inputs' dtype, and flushed = tau^2 (1 + a^2) / 3. And the gradients:

        sigma_q^2 = store^2 + scale^2 [var_D @ k^2 + y D^2 @ k^2 + (2 kappa^2 + x) (D @ k)^2 + (z P J @ k)^2 + lean]

    and so on, with (z P J)^2 added to var_D where rows are summed. lean: what leans one way in every term adds up
    before it is squared, as in attention's lse: dots that are cut off by sqrt(x), log2(e) and scale by u s and u lse.

    d_sinks sums terms dS = -P Delta of all rows, with f^2 = kappa^2 (lse^2 + 2 (sink - lse)^2) + (ex/4)^2 and nothing
    that leans.

    +inf where the first order fails: along rows and columns with an f of 2^-4 or more at a pair that counts, or that
    the bound's error of s - lse lets count. And of d_v wherever P has few values, as where all scores are alike: 1/k of
    k keys is stored with one error, towards 0 or away from it, and every element leans as that does.
    """
    unit, scale2 = units(call), scale_of(call) ** 2
    d_q, d_k, d_v = (np.zeros(call.arrays[n].shape) for n in ("q", "k", "v"))
    sums, d_bias, pairs_in_all = None if ref[3] is None else np.zeros((9, *ref[3].shape)), None, 0
    storing, of_sinks, d_sinks = _Storing(call), None if ref[4] is None else np.zeros((4, *ref[4].shape)), None
    with np.errstate(all="ignore"):
        for head in KeyHead.all_of(call):
            pairs = PairTerms.of(head)
            spread = _Spread.of(head, pairs)
            at, row_D = (head.b, slice(None), head.kv_head), spread.row * pairs.J
            lean_D = [x * pairs.J for x in spread.lean_S]
            by_query = _Noisy(pairs.D, spread.var_D, [*lean_D, row_D], spread.unknown)
            by_key = _Noisy(pairs.D, spread.var_D + np.square(row_D), lean_D, spread.unknown).T
            of_P = _Noisy(pairs.P, spread.var_P, [x * pairs.P for x in spread.lean], spread.unknown).T
            d_q[head.b, :, head.heads] = head.by_query(scale2 * _product_spread(call, unit, by_query, head.keys("k")))
            d_k[at] = scale2 * _product_spread(call, unit, by_key, head.queries("q"))
            narrowed = np.square(KAPPA * d_o_rounding(head))
            d_v[at] = _product_spread(call, unit, of_P, head.queries("d_o")) + np.square(pairs.P).T @ narrowed
            storing.add(pairs.P, unit.U)
            pairs_in_all += pairs.seen.size
            if sums is not None:
                values = [spread.unknown, spread.var_S + spread.row**2, np.square(pairs.dS), pairs.dS, *spread.lean_S]
                head.add_to_bias(sums, np.stack(values))
            if of_sinks is not None:
                of_sinks[:, head.heads] += [head.by_head(x).sum(1) for x in sink_terms(head)]
        if sums is not None:
            d_bias = spread_of_terms(unit, sums, pairs_in_all / ref[3].size)
        if of_sinks is not None:
            d_sinks = spread_of_terms(unit, of_sinks, call.dims["batch"] * call.dims["q_len"])
        return stored_spreads(call, ref, [d_q, d_k, d_v + (inf if storing.few else 0.0), d_bias, d_sinks])


def spread_of_terms(unit, sums, terms):
    """The variance of sums of so many terms dS, from those of (unknown, the variance of dS, dS^2, dS, what leans)."""
    c = unit.chain(terms)
    rounding = (KAPPA * unit.u) ** 2 * (c / 3 * np.square(sums[3]) + c / 6 * sums[2])
    return np.where(sums[0] > 0, inf, sums[1] + rounding + np.square(sums[4:]).sum(0))


def sink_terms(head):
    """What :func:`spread_of_terms` sums of the sinks of a group, each (group*q_len, 1). Nothing leans: a sink is given,
    and its difference to lse is scaled, not the two."""
    unit, kappa2, pairs = head.unit, (KAPPA * head.unit.u) ** 2, SinkPairs.of(head)
    lse, apart = (np.where(pairs.seen, finite(x), 0.0) for x in (head.statistic("lse"), pairs.apart))
    f2 = kappa2 * (lse**2 + 2 * apart**2) + (unit.ex / 4) ** 2
    flushed = np.where(pairs.seen, unit.tau**2 / 3 * (1 + np.square(pairs.a)) + 1e-300, 0.0)
    variance = np.square(pairs.dS) * (f2 + 3 * kappa2) + np.square(pairs.P) * _delta_spread(head, kappa2) + flushed
    unknown = pairs.seen & (pairs.apart + pairs.e > log(1e-40)) & (f2 >= 2.0**-8)
    return unknown, variance, np.square(pairs.dS), pairs.dS


class _Storing:
    """The errors of storing P in 16 bits, and how many draws they are: the inverse of the chance that two of them, each
    as likely as its square is great, are alike; more, as errors are smaller than random ones. Heads are added until
    there are enough."""

    def __init__(self, call: Call) -> None:
        self.dtype = numpy_dtype(call.dtype) if call.dtype in ("float16", "bfloat16") else None
        self.values: np.ndarray = np.zeros(0)
        self.squares: np.ndarray = np.zeros(0)
        self.random, self.draws = 0.0, inf

    @property
    def few(self) -> bool:
        return self.draws < DRAWS

    def add(self, P: np.ndarray, U: float) -> None:
        if self.dtype is None or (self.random and not self.few):
            return
        P = P[:: max(-(-P.size // MOST), 1)].ravel()
        squares = np.square(P.astype(self.dtype).astype(np.float64) - P)
        mantissa, exponent = np.frexp(P)
        values = np.append(self.values, np.ldexp(np.round(mantissa / (U * ALIKE)), exponent))
        self.values, inverse = np.unique(values, return_inverse=True)
        self.squares = np.bincount(inverse, np.append(self.squares, squares), minlength=self.values.size)
        self.random += (KAPPA * U) ** 2 * float(np.square(P).sum())
        repeated = float(np.square(self.squares).sum())
        self.draws = self.random * float(self.squares.sum()) / repeated if repeated else inf


class _Spread(NamedTuple):
    """Beside :class:`PairTerms`, (group*q_len, kv_len).

    Attributes:
      var_S, var_D, var_P: the variances of dS, D and P at each pair by itself.
      row: the RMS of what Delta, one draw for a row, moves dS by.
      lean: shares of P that lean one way in all pairs; lean_S: the parts of dS that do.
      unknown: pairs whose f is too large for the first order, and whose P is not 0 whatever rounding does.
    """

    var_S: np.ndarray
    var_D: np.ndarray
    var_P: np.ndarray
    row: np.ndarray
    lean: tuple[np.ndarray, ...]
    lean_S: tuple[np.ndarray, ...]
    unknown: np.ndarray

    @classmethod
    def of(cls, head: KeyHead, pairs: PairTerms) -> _Spread:
        call, unit, kappa2, P2 = head.call, head.unit, (KAPPA * head.unit.u) ** 2, np.square(pairs.P)
        heads = range(head.heads.start, head.heads.stop)
        spreads = (score_spread(call, unit, head.b, h) for h in heads)
        of_c, cut = (np.concatenate(x) for x in zip(*spreads, strict=True))
        lse = np.broadcast_to(head.statistic("lse"), pairs.seen.shape)
        s, lse = (np.where(pairs.seen & np.isfinite(x), x, 0.0) for x in (pairs.s, lse))
        parts = [np.broadcast_to(falls(call, h), of_c[: call.dims["q_len"]].shape) for h in heads]
        fallen = np.concatenate(parts)
        f2 = of_c + kappa2 * (2 * s**2 + 2 * lse**2 + (s - lse) ** 2 + 4 * fallen**2) + (unit.ex / 4) ** 2
        dP, of_dP, of_delta = _difference_spread(head, pairs, kappa2)
        var_S = np.square(pairs.dS) * (f2 + 3 * kappa2) + P2 * of_dP
        # 1e-300: squares of smaller values are lost
        flushed = np.where(pairs.seen, unit.tau**2 / 3 * (1 + np.square(pairs.a)) + 1e-300, 0.0)
        stored = (KAPPA * unit.U) ** 2 if call.dtype in ("float16", "bfloat16") else 0.0
        faint = np.where(pairs.seen, unit.eta**2 / 3, 0.0)
        var_S, var_P = var_S + flushed, P2 * (f2 + stored) + faint + flushed
        var_D = np.square(pairs.J) * var_S + stored * np.square(pairs.D) + faint
        if (cap := call.options["softcap"]) is not None:
            var_D = var_D + np.square(pairs.dS) * (4 * (1 - pairs.J) * of_c / cap**2 + kappa2)
        lean = cut, unit.u * s, unit.u * lse, unit.u * fallen
        lean_S = *(pairs.dS * x for x in lean), sqrt(dot_spread(call, call.dims["dv"])[0]) * pairs.P * dP
        unknown = pairs.seen & (pairs.P + pairs.g > 1e-40) & (f2 >= 2.0**-8)
        return cls(var_S, var_D, var_P, pairs.P * np.sqrt(of_delta), lean, lean_S, unknown)


def _difference_spread(head, pairs, kappa2):
    """dP, its variance w^2 at each pair by itself, and z^2, the variance of Delta, which is one draw for a row."""
    x, y = dot_spread(head.call, head.call.dims["dv"])
    d_o, v = finite(head.queries("d_o")), finite(head.keys("v"))
    dP = d_o @ v.T
    of_dP = (
        np.square(KAPPA * d_o_rounding(head)) @ np.square(v).T
        + y * np.square(d_o) @ np.square(v).T
        + x * dP**2
        + kappa2 * np.square(pairs.a)
    )
    return dP, of_dP, _delta_spread(head, kappa2)


def _delta_spread(head, kappa2):
    """z^2, (group*q_len, 1)."""
    c = head.unit.chain(head.call.dims["dv"])
    d_o, o, d_lse = (finite(a) for a in (head.queries("d_o"), head.queries("o"), head.statistic("d_lse")))
    products = d_o * o
    total, squares = products.sum(1, keepdims=True), np.square(products).sum(1, keepdims=True)
    sums = c / 3 * total**2 + (c / 6 + 1) * squares
    return kappa2 * (sums + (total - d_lse) ** 2 + np.square(d_lse))


class _Noisy(NamedTuple):
    """What a product multiplies its other operand by, a row a result.

    Attributes:
      value: P or D; variance: that of its error at each pair by itself.
      lean: errors that lean one way along a row.
      unknown: where the variance is not known.
    """

    value: np.ndarray
    variance: np.ndarray
    lean: list[np.ndarray]
    unknown: np.ndarray

    @property
    def T(self) -> _Noisy:
        return _Noisy(self.value.T, self.variance.T, [x.T for x in self.lean], self.unknown.T)


def _product_spread(call, unit, weights, other):
    """The variance of ``weights @ other``: of the weights, of the product's own rounding, of what leans one way."""
    x, y = dot_spread(call, weights.value.shape[1])
    other = finite(other)
    squares, total = np.square(other), weights.value @ other
    own = (x + 2 * (KAPPA * unit.u) ** 2) * np.square(total)
    leaning = sum(np.square(a @ other) for a in weights.lean)
    out = weights.variance @ squares + y * np.square(weights.value) @ squares + own + leaning
    return np.where(weights.unknown.any(1, keepdims=True), inf, out)
