"""How far rounding may move the gradients of attention."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portakern.spec.tolerance import beyond_range, magnitude
from portakern.specs._gradients import stored_bounds
from portakern.specs.attention.scores import scale_of, units_of
from portakern.specs.attention_vjp.contract import attention_vjp
from portakern.specs.attention_vjp.pairs import KeyHead, Pairs

if TYPE_CHECKING:
    from portakern.core.call import Call


@attention_vjp.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Bounds of the gradients, from those of P, dS and D at each pair that a row sees: g, E and F of :class:`Pairs`.

    P, dS and D are those of the contract; u, U, tau, eta, flush, tf32 are :class:`portakern.spec.tolerance.Units`.

    Into the products go P and D as the inputs' dtype, which moves P' = P + g and D' = |D| + F by

        W_P = g + U P' + eta,  W = F + U D' + eta

    A product over n seen pairs adds its own (n+8) u + tf32, and flushes:

        E_q = |scale| [W |k| + ((n+8) u + tf32) (|D| + W) |k| + flush sum (|D| + W) + n tau]
        E_k the same over the queries, with |q|;  E_v with W_P, P and |d_o|, and no scale
        E_bias = sum E + (n+8) u sum (|dS| + E) over the pairs that an element of bias stands for

    With E_x any of them, B = E_x (1 + U) + U |gradient| + eta.

    +inf, beside where terms reach 2^127 (P and D also where they leave the range of the inputs' dtype) and where an
    operand of float32 is beyond tf32's range, as in attention: where inf is met at a seen pair (inf times a weight that
    may round to 0); at pairs that only bias masks, where what P = 0 multiplies is not finite; and where 0 in P or D, at
    any pair that is not seen, multiplies a q, k or d_o that is not finite. NaN at a seen pair has no such excuse.
    """
    unit, scale, d_bias = units_of(call), abs(scale_of(call)), np.zeros(())
    d_q, d_k, d_v = (np.zeros(call.arrays[n].shape) for n in ("q", "k", "v"))
    sums = None if ref[3] is None else np.zeros((4, *ref[3].shape))
    with np.errstate(all="ignore"):
        for head in KeyHead.all_of(call):
            pairs = Pairs.of(head)
            D = _Weights(pairs.seen, pairs.D, pairs.F, pairs.nan, pairs.wild)
            P = _Weights(pairs.seen, pairs.P, pairs.g, pairs.nan_P, pairs.wild_P)
            d_q[head.b, :, head.heads] = head.by_query(_product(unit, D, head.keys("k"), scale))
            d_k[head.b, :, head.kv_head] = _product(unit, D.T, head.queries("q"), scale)
            d_v[head.b, :, head.kv_head] = _product(unit, P.T, head.queries("d_o"))
            if sums is not None:
                values = [pairs.E, np.abs(pairs.dS) + pairs.E, pairs.seen, pairs.wild]
                head.add_to_bias(sums, np.stack(values))
        if sums is not None:
            err, total, n, wild = sums
            d_bias = np.where((wild > 0) | (total >= unit.huge), inf, err + (n + 8) * unit.u * total)
    return stored_bounds(call, ref, [d_q, d_k, d_v, d_bias])


class _Weights(NamedTuple):
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
    def T(self) -> _Weights:
        return _Weights(*(x.T for x in self))


def _product(unit, weights, other, scale=1.0):
    """The error of ``scale weights @ other``."""
    seen, value, err, nan, wild = weights
    size, n = magnitude(other), seen.sum(1, keepdims=True)
    moved = np.where(seen, err + unit.U * (np.abs(value) + err) + unit.eta, 0.0)
    largest = np.abs(value) + moved
    total = largest @ size
    flushed = unit.flush * largest.sum(1, keepdims=True)
    out = moved @ size + ((n + 8) * unit.u + unit.tf32) * total + flushed + n * unit.tau
    met = _meet(~seen, ~np.isfinite(other)) | _meet(seen & ~nan, np.isinf(other))
    unsure = wild.any(1, keepdims=True) | met | (total >= unit.huge) | beyond_range(other, unit, 0)
    return np.where(unsure, inf, scale * out)


def _meet(pairs, odd):
    """Whether a row of ``pairs`` meets a column of ``odd``: the matrix product of two bools."""
    return pairs.astype(float) @ odd > 0
