"""What rounding does to the rows and scores of attention, and to the pairs of queries and keys, of which all its
gradients are sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portakern.spec.tolerance import Units, abs_matmul, format_of, magnitude
from portakern.specs.attention.scores import (
    allowed,
    distances,
    far_from,
    head_of_bias,
    scale_of,
    score_unit,
    units_of,
)

if TYPE_CHECKING:
    from portakern.core.call import Call


class SinkTerm(NamedTuple):
    """What a sink is to each row of its head, (q_len, 1), as one more key: its weight p and how far rounding may move
    that, g; its distance d from the maximum, and the error ds of its score. Without sinks p, g and ds are 0."""

    p: np.ndarray | float = 0.0
    g: np.ndarray | float = 0.0
    d: np.ndarray | float = inf
    ds: np.ndarray | float = 0.0

    @classmethod
    def of(cls, unit: Units, sink: float, m: np.ndarray, n: np.ndarray) -> SinkTerm:
        """Of rows with the maximum m, the sink included, that see n keys. A score that is given errs by nothing but
        what is made of it: 4u |sink| where it takes another unit, as a bias does, and 6u d + ex as any other. A kernel
        may add it when it knows log l of all keys: 4u (1 + log n) besides, since their l lies between 1 and n."""
        d = np.full(m.shape, inf) if sink == -inf else m - sink
        ds = unit.u * (4 * abs(sink) + 6 * d + 4 * (1 + np.log(np.maximum(n, 1)))) + unit.ex
        ds = np.where(d == inf, 0.0, ds)
        p = np.exp(-d)
        return cls(p, np.where(ds < 1, p * np.expm1(ds), np.exp(np.minimum(ds - d, 700))), d, ds)


class SoftmaxRows(NamedTuple):
    """The scores of one head and what they lead to, (q_len, kv_len), or (q_len, 1) for what a row has one of.

    Attributes:
      seen: which pairs are seen; n: how many keys a row sees.
      m, d, ds, p, l, g: as in :func:`portakern.specs.attention.bounds.bound`; least: its l'; steps: its steps.
      overflows: rows in which a score's terms may reach 2^127.
      sink: the head's, which m, l, least and steps count and the matrices do not hold.
    """

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
    sink: SinkTerm

    @classmethod
    def of(cls, call, unit, b, h):
        scores, may, sinks = ScoreErrors.of(call, unit, b, h), allowed(call, b), call.arrays["sinks"]
        seen = may & (scores.s != -inf)
        of_keys = np.where(seen, scores.s, -inf).max(1, keepdims=True, initial=-inf)
        m = of_keys if sinks is None else np.maximum(of_keys, sinks[h])
        d = np.where(seen, m - scores.s, inf)
        far = (np.abs(m) >= 2.0**23) | (np.abs(of_keys) >= 2.0**23)
        other_base = np.where(far, d, 0.0) if call.dtype != "float64" else 0.0
        ds = np.where(seen, scores.ds + 6 * unit.u * d + unit.ex + other_base, 0)
        p = np.exp(-d)
        n = seen.sum(1, keepdims=True)
        sink = SinkTerm() if sinks is None else SinkTerm.of(unit, sinks[h], m, n)
        beyond = sinks is not None and np.isfinite(sinks[h]) and abs(sinks[h]) >= unit.huge
        return cls(
            seen=seen,
            n=n,
            m=m,
            d=d,
            ds=ds,
            p=p,
            l=p.sum(1, keepdims=True) + sink.p,
            g=np.where(ds < 1, p * np.expm1(ds), np.exp(np.minimum(ds - d, 700))),
            least=(p * np.exp(-ds)).sum(1, keepdims=True) + sink.p * np.exp(-sink.ds),
            steps=unit.u * (np.minimum(20 * n, call.dims["kv_len"]) + (32 if sinks is None else 40)),
            overflows=(may & scores.overflows).any(1, keepdims=True) | beyond,
            sink=sink,
        )

    @property
    def moved(self) -> np.ndarray:
        """(q_len, 1): sum g, the sink's included."""
        return self.g.sum(1, keepdims=True) + self.sink.g


class ScoreErrors(NamedTuple):
    """The scores of one head, (q_len, kv_len), and what rounding does to them before the maximum is subtracted.

    Attributes:
      s: the scores; ds: how far rounding may move them.
      capped: how far it may move them up to the softcap, that is without the bias.
      overflows: which of them may reach 2^127 on the way.
    """

    s: np.ndarray
    ds: np.ndarray
    capped: np.ndarray
    overflows: np.ndarray

    @classmethod
    def of(cls, call, unit, b, h):
        q, k = call.arrays["q"][b, :, h], call.arrays["k"][b, :, h // call.dims["group"]]
        depth, u, scale, softcap = call.dims["d"], unit.u, scale_of(call), call.options["softcap"]
        size = abs_matmul(q, k.T, unit)
        s, ds = scale * (q @ k.T), ((depth + 6) * u + unit.tf32) * abs(scale) * size
        operands = magnitude(q).sum(1, keepdims=True) + magnitude(k).sum(1)
        ds += abs(scale) * (unit.flush * operands + depth * unit.tau) + unit.tau * size
        if softcap is not None:
            toward_0 = softcap * np.tanh((np.abs(s) - ds) / softcap)  # where tanh is steeper
            s = softcap * np.tanh(s / softcap)
            ds = np.abs(s) - toward_0 + 10 * u * softcap
        capped, large = ds, size * max(1, abs(scale)) >= unit.huge
        if call.arrays["alibi_slopes"] is not None:
            slope, away = call.arrays["alibi_slopes"][h], distances(call)
            s, ds = s - slope * away, ds + _of_slope(call, unit, slope, away)
            large |= magnitude(slope * away) * max(1, 1 / score_unit(call)[1]) >= unit.huge
        if call.arrays["bias"] is not None:
            bias = head_of_bias(call, b, h)
            s, ds = s + bias, _with_bias(call, u, s + bias, ds, bias)
        return cls(s, ds, capped, large | (np.isfinite(s) & (s >= unit.huge)))


def _of_slope(call, unit, slope, away):
    """What rounding adds to the error of scores that are less by ``slope`` times distances: 8u of the product. A kernel
    rounds the slope in the unit of its scores, and that unit's inverse; a distance from 2^24 on, as a difference of two
    numbers; the product; and up to three sums. What it may flush is less than tau in that unit, before it meets a
    distance and after."""
    size, most = magnitude(slope * away), max(1.0, score_unit(call)[1])
    return 8 * unit.u * size + unit.tau * most * (1 + away)


def _with_bias(call, u, s, ds, bias):
    """How far scores s may be off with their bias, which were off by ``ds`` before it was added: by 4u |bias| more, or
    where that is large by what rounding the sum once may come to."""
    rounded = ds + 4 * u * np.abs(bias)
    far = (np.abs(bias) >= 2.0**20) & np.isfinite(s)
    if call.dtype == "float64" or not far.any():
        return rounded
    at = np.where(far, s, 0.0)
    once = [np.abs((at + way * np.where(far, ds, 0.0)).astype(np.float32).astype(np.float64) - at) for way in (1, -1)]
    return np.where(far, np.minimum(rounded, np.maximum(*once)), rounded)


def sum_error(row: SoftmaxRows) -> np.ndarray:
    """E_lse of one head, (q_len,), without the additions of m. However large the errors, lse moves by no more than the
    largest that counts."""
    largest = np.where(row.d - row.ds < 745, row.ds, 0).max(1, keepdims=True)
    largest = np.maximum(largest, np.where(row.sink.d - row.sink.ds < 745, row.sink.ds, 0.0))[:, 0]
    moved = np.maximum(np.log1p(row.moved / row.l), np.log(row.l / row.least))[:, 0]
    err = np.where(largest > 1, largest, moved) + row.steps[:, 0]
    return np.where(row.overflows[:, 0], inf, np.where(row.n[:, 0] == 0, 0.0, err))


# ---------------------------------------------------------------------------------------------------------- gradient
class KeyHead(NamedTuple):
    """One key head of a batch entry, and the group of query heads that reads it.

    The group's queries, one head after another, are the rows of every matrix of pairs: (group*q_len, kv_len).
    """

    call: Call
    unit: Units
    b: int
    kv_head: int

    @classmethod
    def all_of(cls, call: Call) -> Iterator[KeyHead]:
        batch, _, kv_heads, _ = call.arrays["k"].shape
        unit = units_of(call)
        return (cls(call, unit, b, kv_head) for b, kv_head in np.ndindex(batch, kv_heads))

    @property
    def heads(self) -> slice:
        """The query heads of the group."""
        group = self.call.dims["group"]
        return slice(self.kv_head * group, (self.kv_head + 1) * group)

    def keys(self, name):
        """(kv_len, extent) of k or v."""
        return self.call.arrays[name][self.b, :, self.kv_head]

    def queries(self, name):
        """(group*q_len, extent) of q, o or d_o."""
        return self.of(self.call.arrays[name])

    def of(self, array):
        """(group*q_len, extent) of an array like q or o."""
        x = array[self.b, :, self.heads]
        return x.swapaxes(0, 1).reshape(-1, x.shape[2])

    def by_query(self, x):
        """(group*q_len, extent) as (q_len, group, extent)."""
        return x.reshape(self.call.dims["group"], -1, x.shape[1]).swapaxes(0, 1)

    def by_head(self, x):
        """(group*q_len, 1) or (group*q_len,) as (group, q_len)."""
        return x.reshape(self.call.dims["group"], -1)

    def statistic(self, name):
        """(group*q_len, 1) of lse, lse_low or d_lse; zeros for what was not given."""
        x = self.call.arrays[name]
        if x is None:
            return np.zeros((self.call.dims["group"] * self.call.dims["q_len"], 1))
        return x[self.b, self.heads].reshape(-1, 1)

    def add_to_bias(self, sums, values):
        """Add matrices of pairs, ``values`` (channels, group*q_len, kv_len), to ``sums`` (channels, *bias's shape)."""
        for i, value in enumerate(np.split(values, self.call.dims["group"], 1)):
            at = sums[:, self.b % sums.shape[1], (self.heads.start + i) % sums.shape[2]]
            at += value.sum(1, keepdims=True) if at.shape[1] == 1 else value


class SinkPairs(NamedTuple):
    """What the sinks of a group and their rows make of each other, (group*q_len, 1): as :class:`PairTerms` of one more
    key whose score is the sink and whose dP is 0, so that a = -Delta.

    P is the weight, dS = P a; the exponent sink - lse - lse_low errs by

        e = 4u |sink - L| + u min(|lse|, 512) + 16 u^2 |lse| + ex

    and g, E follow as there, with da = u ((dv+3) sum |d_o o| + 2 |d_lse| + |Delta|) + flushed operands.

    Attributes:
      seen: rows that count: those whose lse is not -inf. P, a, dS, E: 0 where not seen or not finite.
      e: as above. apart: the exponent. wild: nothing is promised.
    """

    seen: np.ndarray
    P: np.ndarray
    a: np.ndarray
    dS: np.ndarray
    E: np.ndarray
    e: np.ndarray
    apart: np.ndarray
    wild: np.ndarray

    @classmethod
    def of(cls, head: KeyHead) -> SinkPairs:
        unit, u, lse = head.unit, head.unit.u, head.statistic("lse")
        sink = np.repeat(head.call.arrays["sinks"][head.heads], head.call.dims["q_len"])[:, None]
        seen, size = lse != -inf, np.abs(lse)
        apart = (sink - lse) - head.statistic("lse_low")
        e = 4 * u * np.abs(apart) + u * np.minimum(size, 512) + 16 * u**2 * size + unit.ex + _of_sums(head)
        P = np.exp(np.minimum(apart, 0.0))
        g = np.where(e < 1, P * np.expm1(e), np.exp(np.minimum(e + apart, 700)))
        g = np.where(size < far_from(head.call), g, np.minimum(g, np.maximum(P, 1 - P) + unit.ex))
        delta, da, nan, wild = _deltas(head)
        dS, size_a = -P * delta, np.abs(delta)
        E = g * size_a + (P + g) * (da + 2 * u * (size_a + da)) + unit.tau * (1 + size_a + da)
        nan = nan | np.isnan(apart)
        wild = seen & ~nan & (wild | (lse >= unit.huge) | (sink == inf) | (apart > e) | (np.abs(dS) + E >= unit.huge))
        P, a, dS, E = (np.where(seen & np.isfinite(x), x, 0.0) for x in (P, -delta, dS, E))
        return cls(seen, P, a, dS, E, e, apart, wild)


def _deltas(head: KeyHead) -> tuple[Any, ...]:
    """Delta of finite operands, its error; where it holds NaN; where it holds inf or sums may overflow: by row."""
    unit, u, dv = head.unit, head.unit.u, head.call.dims["dv"]
    d_o, o, d_lse = head.queries("d_o"), head.queries("o"), head.statistic("d_lse")
    row = np.concatenate([d_o, o, d_lse], 1)
    nan, infinite = (x.any(1, keepdims=True) for x in (np.isnan(row), np.isinf(row)))
    d_o, o, d_lse = (finite(x) for x in (d_o, o, d_lse))
    products, delta = (np.abs(d_o) * np.abs(o)).sum(1, keepdims=True), (d_o * o).sum(1, keepdims=True) - d_lse
    operands = np.abs(d_o).sum(1, keepdims=True) + np.abs(o).sum(1, keepdims=True)
    da = u * ((dv + 3) * products + 2 * np.abs(d_lse) + np.abs(delta)) + unit.flush * operands + dv * unit.tau
    if "o" in head.call.off:
        da = da + (np.abs(d_o) * head.of(head.call.off["o"])).sum(1, keepdims=True)
    return delta, da, nan, infinite | (products >= unit.huge) | (np.abs(d_lse) >= unit.huge) | ~np.isfinite(da)


class PairTerms(NamedTuple):
    """What the queries of a group and their keys make of each other, (group*q_len, kv_len).

    s, t, P, dS, D and Delta are those of the contract, dP = d_o v^T, c the softcap, dv the extent of a value; u, ex,
    tau, tf32 are :class:`portakern.spec.tolerance.Units`.

    With L = lse + lse_low, the exponent s - L errs by e, with ds the error of a score as in attention, but without the
    share of the maximum:

        e = ds + 4u |s - L| + u min(|lse|, 512) + 16 u^2 |lse| + ex

    that is two differences and a product with log2(e), a rounded constant; lse_low, which a kernel may leave out where
    lse is near 0; what two float32 numbers lose of L in another unit (a kernel may keep scores in units of the scale,
    and L with them); exp. Nothing here divides by a sum of P, which moves by

        g = P (exp(e) - 1),  and where |lse| is at least far_from(call), g = min(P (exp(e) - 1), max(P, 1 - P) + ex)

    since kernels keep P at most 1 there. Where L may be off, e has attention's E_lse more, without what rounding
    takes from lse; where o may be, da has sum |d_o| times that.

    The difference a = dP - Delta moves by da, and dS = P a by E:

        da = ((dv+6) u + tf32) |d_o| |v|^T + u ((dv+3) sum |d_o o| + 2 |d_lse| + |dP| + |Delta|) + flushed operands
        E  = g |a| + (P + g) (da + 2u (|a| + da)) + tau (1 + |a| + da)

    The softcap's slope J = 1 - t^2 moves by dJ, where h is the error of t, that is attention's of c t over c; and
    D = dS J by F:

        dJ = min(h (2 |t| + h) + 4u, 1 + 4u)
        F  = E (J + dJ) + |dS| dJ + 2u (|D| + E) + tau

    Attributes:
      seen: which pairs count.
      s, P, g, a, dS, E, J, D, F: as above; P, dS, D and their errors are 0 where not seen or not finite.
      nan, nan_P: NaN enters D, P. wild, wild_P: nothing is promised of D, P.
    """

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
    def of(cls, head: KeyHead) -> PairTerms:
        call, unit, u = head.call, head.unit, head.unit.u
        heads = range(head.heads.start, head.heads.stop)
        scores = (ScoreErrors.of(call, unit, head.b, h) for h in heads)
        s, ds, capped, large = (np.concatenate(x) for x in zip(*scores, strict=True))
        may, lse = np.concatenate([allowed(call, head.b)] * len(heads)), head.statistic("lse")
        seen = may & (s != -inf) & (lse != -inf)
        apart = (s - lse) - head.statistic("lse_low")
        size = np.abs(lse)
        e = ds + 4 * u * np.abs(apart) + u * np.minimum(size, 512) + 16 * u**2 * size + unit.ex + _of_sums(head)
        P = np.exp(np.minimum(apart, 0.0))
        g = np.where(e < 1, P * np.expm1(e), np.exp(np.minimum(e + apart, 700)))
        g = np.where(size < far_from(call), g, np.minimum(g, np.maximum(P, 1 - P) + unit.ex))
        a, da, nan_a, wild_a = _differences(head)
        size = np.abs(a)
        dS, E = P * a, g * size + (P + g) * (da + 2 * u * (size + da)) + unit.tau * (1 + size + da)
        J, dJ = _slopes(head, capped)
        D = dS * J
        F = E * (J + dJ) + np.abs(dS) * dJ + 2 * u * (np.abs(D) + E) + unit.tau

        limit, infinite = min(format_of(call.dtype).overflow, unit.huge), _infinite(head)
        broken = large | infinite | (lse >= unit.huge) | (s == inf) | (apart > e)
        nan_P = np.isnan(s) | np.isnan(lse)
        nan, hidden = nan_P | nan_a, may & ~seen
        wild_P = seen & ~nan_P & (broken | (P + g >= limit)) | hidden & (large | infinite | nan_P)
        wild_D = broken | wild_a | (P + g >= limit) | ((np.abs(D) + F) * max(1, abs(scale_of(call))) >= limit)
        wild = seen & ~nan & wild_D | hidden & (large | infinite | wild_a | nan)
        P, g, dS, E, D, F = (np.where(seen & np.isfinite(x), x, 0.0) for x in (P, g, dS, E, D, F))
        return cls(seen, s, P, g, a, dS, E, J, D, F, nan, nan_P, wild, wild_P)


def _of_sums(head: KeyHead) -> np.ndarray | float:
    """How far lse + lse_low of a forward call may be off, (group*q_len, 1)."""
    if "lse" not in head.call.off:
        return 0.0
    rows = (SoftmaxRows.of(head.call, head.unit, head.b, h) for h in range(head.heads.start, head.heads.stop))
    return np.concatenate([sum_error(row) for row in rows])[:, None]


def _differences(head: KeyHead) -> tuple[Any, ...]:
    """a = dP - Delta, of finite operands, and its da; where it holds NaN; where it holds inf or sums may overflow."""
    unit, u, dv = head.unit, head.unit.u, head.call.dims["dv"]
    d_o, o, v, d_lse = within_range(head), head.queries("o"), head.keys("v"), head.statistic("d_lse")
    row = np.concatenate([d_o, o, d_lse], 1)
    nan = np.isnan(row).any(1, keepdims=True) | np.isnan(v).any(1)
    infinite = np.isinf(row).any(1, keepdims=True) | np.isinf(v).any(1)
    size = abs_matmul(d_o, v.T, unit)

    d_o, o, v, d_lse = (finite(x) for x in (d_o, o, v, d_lse))
    products = (np.abs(d_o) * np.abs(o)).sum(1, keepdims=True)
    dP, delta = d_o @ v.T, (d_o * o).sum(1, keepdims=True) - d_lse
    operands = np.abs(d_o).sum(1, keepdims=True) * 2 + np.abs(o).sum(1, keepdims=True) + np.abs(v).sum(1)
    of_delta = (dv + 3) * products + 2 * np.abs(d_lse) + np.abs(dP) + np.abs(delta)
    da = (
        ((dv + 6) * u + unit.tf32) * size
        + d_o_rounding(head) @ np.abs(v).T
        + u * of_delta
        + (unit.flush * operands + 2 * dv * unit.tau)
    )
    if "o" in head.call.off:
        da = da + (np.abs(d_o) * head.of(head.call.off["o"])).sum(1, keepdims=True)
    overflows = (size >= unit.huge) | (products >= unit.huge) | (np.abs(d_lse) >= unit.huge) | ~np.isfinite(da)
    return dP - delta, da, nan, overflows | infinite


def _narrowed(head: KeyHead) -> bool:
    """Whether d_o may be rounded to the dtype of v before they are multiplied."""
    return head.call.dtype in ("float16", "bfloat16") and head.call.dtype_of("d_o") == "float32"


def within_range(head: KeyHead) -> np.ndarray:
    """d_o, (group*q_len, dv), with infinity for what its rounding may make infinite."""
    d_o = head.queries("d_o")
    beyond = _narrowed(head) & (np.abs(d_o) >= format_of(head.call.dtype).overflow * (1 - head.unit.U))
    return np.where(beyond, np.copysign(inf, d_o), d_o)


def d_o_rounding(head: KeyHead) -> np.ndarray:
    """How far rounding may move d_o before a product takes it, (group*q_len, dv)."""
    size = np.abs(finite(head.queries("d_o")))
    return head.unit.U * size + head.unit.eta if _narrowed(head) else np.zeros(size.shape)


def _slopes(head: KeyHead, capped: np.ndarray) -> tuple[Any, Any]:
    """J = 1 - t^2, what the softcap leaves of a dot's gradient, and how far rounding may move it; 1 and 0 without one.

    ``capped``: how far rounding may move c t, the score up to the softcap.
    """
    if (cap := head.call.options["softcap"]) is None:
        return 1.0, 0.0
    t, h = scale_of(head.call) * (head.queries("q") @ head.keys("k").T) / cap, capped / cap
    u4 = 4 * head.unit.u
    return np.square(1 / np.cosh(t)), np.minimum(h * (2 * np.abs(np.tanh(t)) + h) + u4, 1 + u4)


def _infinite(head: KeyHead) -> np.ndarray:
    """Scores whose query or key holds an infinity."""
    return np.isinf(head.queries("q")).any(1, keepdims=True) | np.isinf(head.keys("k")).any(1)


def finite(x: np.ndarray) -> np.ndarray:
    """x with 0 in place of infinities and NaN."""
    return np.where(np.isfinite(x), x, 0.0)
