"""How far rounding may move the results of attention."""

from __future__ import annotations

from math import inf, log
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portakern.spec.tolerance import abs_matmul, beyond_range, magnitude, round_to
from portakern.specs.attention.contract import attention
from portakern.specs.attention.scores import allowed, head_of_bias, scale_of, units_of

if TYPE_CHECKING:
    from portakern.core.call import Call


@attention.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Bounds of o, lse and lse_low, from the error of a score.

    Of one query, all sums over the n keys that it sees among N = kv_len: the scores s, their maximum m, the
    differences d = m - s, the weights p = exp(-d) and their sum l. Then o = sum p v / l and lse = m + log l.
    D is the extent of a query; u, U, ex, tau, eta, flush, tf32 are :class:`portakern.spec.tolerance.Units`.

    A score errs by ds, beside what flushed operands add to it:

        ds = ((D+6) u + tf32) S + 6u d + 4u |bias| + 10u c + ex,  S = |scale| |q| |k|^T,  c the softcap or 0

    In order: the dot and its scaling; m - s and exp2 of it (a running maximum splits d into parts that sum to d); the
    addition of the bias; an accurate tanh, which also passes on no more than its slope of the terms before it; exp.

    A bias of 2^20 or more is added in natural units, and its share is what float32 makes of the sum: nothing where the
    bias absorbs the score, as finfo.min does. In a row with |m| of 2^23 or more, where scores in units of log2(e) have
    no binary places left, ds has d besides: weights may be powers of another base there.

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

    A row that sees no key: eta, and an exact lse. +inf: where a score's terms reach 2^127 (the row) or sum |v| does;
    where an operand of float32 is beyond tf32's range (:data:`portakern.spec.tolerance.TF32_END`);
    where a masked key holds NaN or inf in v (0 * NaN inside a tile cannot be undone); where a key that is seen holds
    inf but its weight may be 0 (inf or NaN).
    """
    o, lse, low = ref
    unit, group = units_of(call), call.dims["group"]
    bound_o, bound_lse = np.empty_like(o), np.empty((o.shape[0], o.shape[2], o.shape[1]))
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(o.shape[0], o.shape[2]):
            rows = Rows.of(call, unit, b, h)
            bound_o[b, :, h] = _bound_o(call, unit, rows, call.arrays["v"][b, :, h // group], o[b, :, h])
            if lse is not None or low is not None:
                bound_lse[b, h] = _bound_lse(call, unit, rows)
    of_low = None if low is None else np.where(np.isfinite(bound_lse), 3 * bound_lse, inf)
    return bound_o, None if lse is None else bound_lse, of_low


class Rows(NamedTuple):
    """The scores of one head and what they lead to, (q_len, kv_len), or (q_len, 1) for what a row has one of.

    Attributes:
      seen: which pairs are seen; n: how many keys a row sees.
      m, d, ds, p, l, g: as in :func:`bound`; least: its l'; steps: its steps.
      overflows: rows in which a score's terms may reach 2^127.
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

    @classmethod
    def of(cls, call, unit, b, h):
        scores, may = Scores.of(call, unit, b, h), allowed(call, b)
        seen = may & (scores.s != -inf)
        m = np.where(seen, scores.s, -inf).max(1, keepdims=True, initial=-inf)
        d = np.where(seen, m - scores.s, inf)
        other_base = np.where(np.abs(m) >= 2.0**23, d, 0.0) if call.dtype != "float64" else 0.0
        ds = np.where(seen, scores.ds + 6 * unit.u * d + unit.ex + other_base, 0)
        p = np.exp(-d)
        n = seen.sum(1, keepdims=True)
        return cls(
            seen=seen,
            n=n,
            m=m,
            d=d,
            ds=ds,
            p=p,
            l=p.sum(1, keepdims=True),
            g=np.where(ds < 1, p * np.expm1(ds), np.exp(np.minimum(ds - d, 700))),
            least=(p * np.exp(-ds)).sum(1, keepdims=True),
            steps=unit.u * (np.minimum(20 * n, call.dims["kv_len"]) + 32),
            overflows=(may & scores.overflows).any(1, keepdims=True),
        )


class Scores(NamedTuple):
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
        capped = ds
        if call.arrays["bias"] is not None:
            bias = head_of_bias(call, b, h)
            s, ds = s + bias, _with_bias(call, u, s + bias, ds, bias)
        return cls(s, ds, capped, (size * max(1, abs(scale)) >= unit.huge) | (np.isfinite(s) & (s >= unit.huge)))


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


def _bound_o(call, unit, row, v, o):
    """B_o of one head: v (kv_len, dv), o (q_len, dv)."""
    size, rounding = magnitude(v), unit.U + unit.tf32 + row.steps
    total = row.seen @ size
    lost = unit.eta * total + unit.flush * row.l + row.n * unit.tau
    moved = row.g @ size + np.abs(o) * row.g.sum(1, keepdims=True)
    err = (moved + rounding * ((row.p + row.g) @ size) + lost) / row.least
    err = np.fmin(err, (size.max(0) + np.abs(o)) * (1 + 4 * rounding) + 2 * lost)
    err = np.where(row.n == 0, 0.0, err)
    masked = (~row.seen).astype(float) @ ~np.isfinite(v) > 0
    faint = (row.seen & (row.d > -log(unit.eta) - 7)).astype(float) @ np.isinf(v) > 0
    unsure = row.overflows | (total >= unit.huge) | (masked & ~np.isnan(o)) | faint | beyond_range(v, unit, 0)
    return round_to(np.where(unsure, inf, err), o, call.dtype)


def _bound_lse(call, unit, row):
    """B_lse of one head, (q_len,)."""
    lse = (row.m + np.log(row.l))[:, 0]
    err = sum_error(row) + np.where(row.n[:, 0] == 0, 0.0, 4 * unit.u * (np.abs(row.m[:, 0]) + np.abs(lse)))
    return round_to(err, lse, "float64" if call.dtype == "float64" else "float32")


def sum_error(row: Rows) -> np.ndarray:
    """E_lse of one head, (q_len,), without the additions of m. However large the errors, lse moves by no more than the
    largest that counts."""
    largest = np.where(row.d - row.ds < 745, row.ds, 0).max(1)
    moved = np.maximum(np.log1p(row.g.sum(1) / row.l[:, 0]), np.log(row.l / row.least)[:, 0])
    err = np.where(largest > 1, largest, moved) + row.steps[:, 0]
    return np.where(row.overflows[:, 0], inf, np.where(row.n[:, 0] == 0, 0.0, err))
