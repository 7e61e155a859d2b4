"""How far rounding may move the results of attention and its gradients."""

from __future__ import annotations

from math import inf, log
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portakern.spec.tolerance import beyond_range, magnitude, round_to
from portakern.specs._gradients import stored_bounds
from portakern.specs.attention.contract import attention, attention_vjp
from portakern.specs.attention.pairs import (
    KeyHead,
    PairTerms,
    SinkPairs,
    SoftmaxRows,
    d_o_rounding,
    sum_error,
    within_range,
)
from portakern.specs.attention.scores import scale_of, units_of

if TYPE_CHECKING:
    from portakern.core.call import Call


@attention.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Bounds of o, lse and lse_low, from the error of a score.

    Of one query, all sums over the n keys that it sees among N = kv_len: the scores s, their maximum m, the
    differences d = m - s, the weights p = exp(-d) and their sum l. Then o = sum p v / l and lse = m + log l.
    D is the extent of a query; u, U, ex, tau, eta, flush, tf32 are :class:`portakern.spec.tolerance.Units`.

    A score errs by ds, beside what flushed operands add to it:

        ds = ((D+6) u + tf32) S + 6u d + 8u |a| + 4u |bias| + 10u c + ex,  S = |scale| |q| |k|^T,  c the softcap or 0

    In order: the dot and its scaling; m - s and exp2 of it (a running maximum splits d into parts that sum to d); a, a
    slope times a distance (:func:`portakern.specs.attention.pairs._of_slope`); the addition of the bias; an accurate
    tanh, which also passes on no more than its slope of the terms before it; exp.

    A bias of 2^20 or more is added in natural units, and its share is what float32 makes of the sum: nothing where the
    bias absorbs the score, as finfo.min does. In a row with |m| of 2^23 or more, where scores in units of log2(e) have
    no binary places left, ds has d besides: weights may be powers of another base there.

    A sink is one more key with a score of its own error (:class:`portakern.specs.attention.pairs.SinkTerm`) and a value
    of 0: it counts in m, in all sums of p and of g, and adds 8u to steps, for a sum, a quotient and a product.

    A weight p moves by g = p (e^ds - 1) at most, and l down to l' = sum p e^-ds at most, so that o moves by

        (sum g |v| + |o| sum g) / l'

    The product with v adds (U + tf32 + steps) sum (p + g) |v| / l': p is rounded to v's dtype, and

        steps = u (min(20 n, N) + 32)

    A tile costs a multiplication and an addition in the accumulator and in l, 4u, and the exp of the maximum's rise
    twice, 2 ex = 16u. At most n tiles hold a key that is seen; of all tiles there are N/16, whose 16u each leave 6u for
    an exp, which is enough on any hardware known; a lone tile has N additions.

    Underflow costs lost = (eta sum |v| + flush l + n tau) / l': that of p in its dtype, of v, of products.

    Whatever the scores, o is a convex average of v, and no error passes

        C = (max |v| + |o|) (1 + 4 (U + tf32 + steps)) + 2 lost l'

    With E_o the sum of the above, but C at most, and E_lse what moves the logarithm,

        E_lse = max(log(1 + sum g / l), log(l / l')) + steps + 4u (|m| + |lse|)
        B_o = E_o (1 + U) + U |o| + eta,  B_lse = E_lse (1 + U) + U |lse| + eta,  U and eta each of the output's dtype

    lse_low is the rest of lse, and its reference that of lse rounded once: it may be off by 2 B_lse + U |lse|. That the
    two together are exact shows in gradients.

    A row that sees no key: eta, and an exact lse, which is the sink if there is one. +inf: where a score's terms, or a
    sink, reach 2^127 (the row) or sum |v| does; where an operand of float32 is beyond tf32's range
    (:data:`portakern.spec.tolerance.TF32_END`);
    where a masked key holds NaN or inf in v (0 * NaN inside a tile cannot be undone); where a key that is seen holds
    inf but its weight may be 0 (inf or NaN).
    """
    o, lse, low = ref
    unit, group = units_of(call), call.dims["group"]
    bound_o, bound_lse = np.empty_like(o), np.empty((o.shape[0], o.shape[2], o.shape[1]))
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(o.shape[0], o.shape[2]):
            rows = SoftmaxRows.of(call, unit, b, h)
            bound_o[b, :, h] = _bound_o(call, unit, rows, call.arrays["v"][b, :, h // group], o[b, :, h])
            if lse is not None or low is not None:
                bound_lse[b, h] = _bound_lse(call, unit, rows)
    of_low = None if low is None else np.where(np.isfinite(bound_lse), 3 * bound_lse, inf)
    return bound_o, None if lse is None else bound_lse, of_low


def _bound_o(call, unit, row, v, o):
    """B_o of one head: v (kv_len, dv), o (q_len, dv)."""
    size, rounding = magnitude(v), unit.U + unit.tf32 + row.steps
    total = row.seen @ size
    lost = unit.eta * total + unit.flush * row.l + row.n * unit.tau
    moved = row.g @ size + np.abs(o) * row.moved
    err = (moved + rounding * ((row.p + row.g) @ size) + lost) / row.least
    err = np.fmin(err, (size.max(0) + np.abs(o)) * (1 + 4 * rounding) + 2 * lost)
    err = np.where(row.n == 0, 0.0, err)
    masked = (~row.seen).astype(float) @ ~np.isfinite(v) > 0
    faint = (row.seen & (row.d > -log(unit.eta) - 7)).astype(float) @ np.isinf(v) > 0
    unsure = row.overflows | (total >= unit.huge) | (masked & ~np.isnan(o)) | faint | beyond_range(v, unit, 0)
    return round_to(np.where(unsure, inf, err), o, call.outputs["o"][1])


def _bound_lse(call, unit, row):
    """B_lse of one head, (q_len,)."""
    lse = (row.m + np.log(row.l))[:, 0]
    err = sum_error(row) + np.where(row.n[:, 0] == 0, 0.0, 4 * unit.u * (np.abs(row.m[:, 0]) + np.abs(lse)))
    err = np.where(row.overflows[:, 0], inf, err)  # also where the terms' sum is NaN, as of infinities in float64
    return round_to(err, lse, "float64" if call.dtype == "float64" else "float32")


# ---------------------------------------------------------------------------------------------------------- gradient
@attention_vjp.tolerance
def bound_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Bounds of the gradients, from those of P, dS and D at each pair that a row sees: g, E and F of
    :class:`PairTerms`.

    P, dS and D are those of the contract; u, U, tau, eta, flush, tf32 are :class:`portakern.spec.tolerance.Units`.

    Into the products go P and D as the inputs' dtype, which moves P' = P + g and D' = |D| + F by

        W_P = g + U P' + eta,  W = F + U D' + eta

    A product over n seen pairs adds its own (n+8) u + tf32, and flushes:

        E_q = |scale| [W |k| + ((n+8) u + tf32) (|D| + W) |k| + flush sum (|D| + W) + n tau]
        E_k the same over the queries, with |q|;  E_v with W_P, P and |d_o|, and no scale
        E_bias = sum E + (n+8) u sum (|dS| + E) over the pairs that an element of bias stands for
        E_sinks the same over all n rows of a head, with E of :class:`SinkPairs`, in a sum of ``chain(n)``

    d_o of float32 beside 16-bit inputs is rounded to their dtype before products: (U |d_o| + eta) |v|^T more in da, and
    P' (U |d_o| + eta) more in E_v; where it leaves their range nothing is promised.

    With E_x any of them, B = E_x (1 + U) + U |gradient| + eta.

    +inf, beside where terms reach 2^127 (P and D also where they leave the range of the inputs' dtype) and where an
    operand of float32 is beyond tf32's range, as in attention: where inf is met at a seen pair (inf times a weight that
    may round to 0); at pairs that only bias masks, where what P = 0 multiplies is not finite; and where 0 in P or D, at
    any pair that is not seen, multiplies a q, k or d_o that is not finite. NaN at a seen pair has no such excuse.
    """
    unit, scale = units_of(call), abs(scale_of(call))
    d_q, d_k, d_v = (np.zeros(call.arrays[n].shape) for n in ("q", "k", "v"))
    sums = None if ref[3] is None else np.zeros((4, *ref[3].shape))
    of_sinks = None if ref[4] is None else np.zeros((4, *ref[4].shape))
    with np.errstate(all="ignore"):
        for head in KeyHead.all_of(call):
            pairs = PairTerms.of(head)
            D = _ProductWeights(pairs.seen, pairs.D, pairs.F, pairs.nan, pairs.wild)
            P = _ProductWeights(pairs.seen, pairs.P, pairs.g, pairs.nan_P, pairs.wild_P)
            d_q[head.b, :, head.heads] = head.by_query(_product(unit, D, head.keys("k"), scale))
            d_k[head.b, :, head.kv_head] = _product(unit, D.T, head.queries("q"), scale)
            d_v[head.b, :, head.kv_head] = _product(unit, P.T, within_range(head), moved=d_o_rounding(head))
            if sums is not None:
                values = [pairs.E, np.abs(pairs.dS) + pairs.E, pairs.seen, pairs.wild]
                head.add_to_bias(sums, np.stack(values))
            if of_sinks is not None:
                sink = SinkPairs.of(head)
                values = [sink.E, np.abs(sink.dS) + sink.E, sink.seen, sink.wild]
                of_sinks[:, head.heads] += [head.by_head(x).sum(1) for x in values]
        d_bias = None if sums is None else error_of_terms(unit, sums, sums[2])
        d_sinks = None if of_sinks is None else error_of_terms(unit, of_sinks, unit.chain(of_sinks[2]))
    return stored_bounds(call, ref, [d_q, d_k, d_v, d_bias, d_sinks])


def error_of_terms(unit, sums, roundings):
    """The error of sums of terms dS with so many roundings on the way, from the sums of E, of |dS| + E, of the terms
    that there are, and of those of which nothing is promised."""
    err, total, _, wild = sums
    return np.where((wild > 0) | (total >= unit.huge), inf, err + (roundings + 8) * unit.u * total)


class _ProductWeights(NamedTuple):
    """What a product multiplies its other operand by, a row a result.

    Attributes:
      seen: which pairs count.
      value: P or D; err: how far it may be off before it is rounded to the operands' dtype.
      nan: where NaN enters it; wild: where nothing is promised of it.
    """

    seen: np.ndarray
    value: np.ndarray
    err: np.ndarray
    nan: np.ndarray
    wild: np.ndarray

    @property
    def T(self) -> _ProductWeights:
        return _ProductWeights(*(x.T for x in self))


def _product(unit, weights, other, scale=1.0, moved=None):
    """The error of ``scale weights @ other``, whose elements are ``moved`` by so much at most before they meet."""
    seen, value, err, nan, wild = weights
    size, n = magnitude(other), seen.sum(1, keepdims=True)
    shift = 0.0 if moved is None else (np.abs(value) + err) @ moved
    moved = np.where(seen, err + unit.U * (np.abs(value) + err) + unit.eta, 0.0)
    largest = np.abs(value) + moved
    total = largest @ size
    flushed = unit.flush * largest.sum(1, keepdims=True)
    out = shift + moved @ size + ((n + 8) * unit.u + unit.tf32) * total + flushed + n * unit.tau
    met = _meet(~seen, ~np.isfinite(other)) | _meet(seen & ~nan, np.isinf(other))
    unsure = wild.any(1, keepdims=True) | met | (total >= unit.huge) | beyond_range(other, unit, 0)
    return np.where(unsure, inf, scale * out)


def _meet(pairs, odd):
    """Whether a row of ``pairs`` meets a column of ``odd``: the matrix product of two bools."""
    return pairs.astype(float) @ odd > 0
