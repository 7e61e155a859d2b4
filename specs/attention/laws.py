"""What holds between calls of attention, to the bit (see :meth:`portakern.spec.Spec.law`)."""

from __future__ import annotations

from math import log

import numpy as np

from portakern.spec.tolerance import format_of
from portakern.specs.attention.contract import attention


@attention.law
def causal_prefix_ignores_the_future(run, draw):
    """What comes later changes no bit of an earlier row, on finite data."""
    n, d = draw.extent(20, 150), draw.extent(4, 40, "d")
    q, k, v = draw.normal(1, n, 2, d), draw.normal(1, n, 1, d), draw.normal(1, n, 1, d)
    cut = draw.extent(1, n - 1)
    later_k, later_v = k.copy(), v.copy()
    later_k[:, cut:], later_v[:, cut:] = draw.normal(1, n - cut, 1, d), draw.normal(1, n - cut, 1, d)
    draw.same_bits(
        run(q, later_k, later_v, is_causal=True)[:, :cut],
        run(q, k, v, is_causal=True)[:, :cut],
        "a causal prefix after the future changed",
    )


@attention.law
def heads_and_batches_are_independent(run, draw):
    """One batch entry and one key head, alone, give the same bits as among others."""
    q_len, kv_len, d = draw.extent(1, 70), draw.extent(1, 150), draw.extent(4, 40, "d")
    q, k, v = draw.normal(3, q_len, 4, d), draw.normal(3, kv_len, 2, d), draw.normal(3, kv_len, 2, d)
    draw.same_bits(
        run(q[1:2, :, 2:], k[1:2, :, 1:], v[1:2, :, 1:]), run(q, k, v)[1:2, :, 2:], "one batch entry and key head alone"
    )


@attention.law
def grouped_heads_equal_repeated_heads(run, draw):
    """Grouped queries are a way to address keys, not another sum."""
    q, k, v = draw.normal(1, 20, 6, 16), draw.normal(1, 33, 2, 16), draw.normal(1, 33, 2, 16)
    draw.same_bits(run(q, k, v), run(q, np.repeat(k, 3, 2), np.repeat(v, 3, 2)), "key heads repeated")


@attention.law
def queries_are_independent(run, draw):
    """The last queries alone give the same bits: they keep their place beside the keys."""
    q_len, kv_len, d = draw.extent(2, 150), draw.extent(1, 150), draw.extent(4, 40, "d")
    q, k, v = draw.normal(1, q_len, 2, d), draw.normal(1, kv_len, 2, d), draw.normal(1, kv_len, 2, d)
    last = draw.extent(1, q_len)
    draw.same_bits(run(q[:, -last:], k, v), run(q, k, v)[:, -last:], "the last queries alone")


@attention.law
def few_queries_over_many_keys(run, draw):
    """How many queries a call has changes no bit of one, over keys that are worth more than one program."""
    q_len, kv_len, d = draw.extent(70, 140), draw.extent(1030, 1500), draw.extent(4, 40, "d")
    q, k, v = draw.normal(1, q_len, 4, d), draw.normal(1, kv_len, 2, d), draw.normal(1, kv_len, 2, d)
    last = draw.extent(1, 9)
    draw.same_bits(
        run(q[:, -last:], k, v, is_causal=True), run(q, k, v, is_causal=True)[:, -last:], "a few queries alone"
    )


@attention.law
def equal_values_come_back(run, draw):
    """Values of 1 give 1, within one rounding of the weights.

    All weights but one lie just below the next number of v's dtype, where cutting them leans most.
    """
    q_len, kv_len, dtype, unit = draw.extent(1, 40), draw.extent(40, 150), draw.normal(1).dtype, format_of(draw.dtype).U
    q, k, v = (np.zeros((1, n, 1, 8), dtype) for n in (q_len, kv_len, kv_len))
    score = log(0.5 + 0.95 * unit)  # unit is the distance of neighbours here
    q[..., :2], v[...] = 1, 1
    k[:, 1:, :, 0] = score
    k[:, 1:, :, 1] = score - k[0, 1, 0, 0].astype(float)
    o = run(q, k, v, scale=1.0)
    near = np.abs(o.astype(float) - 1) <= 1.25 * max(unit, 2.0**-16)
    draw.same_bits(near, np.ones_like(near), "whether o is 1 (1: yes)")
