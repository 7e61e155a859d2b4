"""What holds between calls of attention, and of its gradients, to the bit (see :meth:`portakern.spec.Spec.law`)."""

from __future__ import annotations

from math import log

import numpy as np

from portakern.spec.dtypes import numpy_dtype
from portakern.spec.tolerance import format_of
from portakern.specs.attention.contract import attention, attention_vjp
from portakern.specs.attention.planting import usual_slopes

NO_MASK = (None,) * 3  # the arguments between v and sinks


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


MASKED = ({"is_causal": True}, {"window": (9, 3)}, {"window": (40, None), "is_causal": True}, {"window": (None, 20)})
"""Masks that starts move."""


@attention.law
def queries_in_their_place(run, draw):
    """Queries from the midst of a masked call, alone but for where they begin: the same bits."""
    q_len, kv_len, d = draw.extent(2, 150), draw.extent(1, 150), draw.extent(4, 40, "d")
    q, k, v = draw.normal(1, q_len, 2, d), draw.normal(1, kv_len, 2, d), draw.normal(1, kv_len, 2, d)
    first = draw.extent(0, q_len - 1)
    last, options = draw.extent(first + 1, q_len), MASKED[draw.extent(0, len(MASKED) - 1)]
    whole = run(q, k, v, return_lse=True, **options)
    part = run(q[:, first:last], k, v, return_lse=True, q_start=kv_len - q_len + first, **options)
    draw.same_bits(part[0], whole[0][:, first:last], "o of queries alone")
    draw.same_bits(part[1], whole[1][..., first:last], "lse of queries alone")


@attention.law
def starts_count_from_anywhere(run, draw):
    """Both starts more by as much: the same bits, and those of no starts where these say the same."""
    q_len, kv_len, d = draw.extent(1, 70), draw.extent(1, 150), draw.extent(4, 40, "d")
    q, k, v = draw.normal(1, q_len, 2, d), draw.normal(1, kv_len, 1, d), draw.normal(1, kv_len, 1, d)
    options, moved = MASKED[draw.extent(0, len(MASKED) - 1)], draw.extent(0, 300) - 150
    start = draw.extent(0, 90)
    first = run(q, k, v, q_start=start, kv_start=3, **options)
    draw.same_bits(run(q, k, v, q_start=start + moved, kv_start=3 + moved, **options), first, "moved starts")
    draw.same_bits(run(q, k, v, q_start=kv_len - q_len, **options), run(q, k, v, **options), "a start as without one")


@attention.law
def a_sink_of_minus_infinity_is_none(run, draw):
    """The same bits, o and lse, of rows that see keys and of rows that see none, over one split and over several."""
    for kv_len in (draw.extent(1, 150), draw.extent(1030, 1100)):
        q_len, d = draw.extent(1, 40), draw.extent(4, 40, "d")
        q, k, v = draw.normal(1, q_len, 4, d), draw.normal(1, kv_len, 2, d), draw.normal(1, kv_len, 2, d)
        none = np.full(4, -np.inf, q.dtype)
        bound = [run(q, k, v, *NO_MASK, x, window=(None, 0), return_lse=True) for x in (none, None)]
        for name, a, b in zip(("o", "lse"), *bound, strict=True):
            draw.same_bits(a, b, f"{name} with sinks of -inf")


@attention.law
def sinks_of_other_heads(run, draw):
    """A head's bits do not depend on the sinks of other heads, and a lone query's not on company."""
    q_len, kv_len, d = draw.extent(2, 70), draw.extent(1, 150), draw.extent(4, 40, "d")
    q, k, v = draw.normal(2, q_len, 4, d), draw.normal(2, kv_len, 2, d), draw.normal(2, kv_len, 2, d)
    sinks = draw.normal(4)
    other = sinks.copy()
    other[:2] += 1
    draw.same_bits(
        run(q, k, v, *NO_MASK, other)[:, :, 2:],
        run(q, k, v, *NO_MASK, sinks)[:, :, 2:],
        "heads 2 and 3 after sinks 0 and 1",
    )
    draw.same_bits(
        run(q[1:, -1:, 2:], k[1:, :, 1:], v[1:, :, 1:], *NO_MASK, sinks[2:]),
        run(q, k, v, *NO_MASK, sinks)[1:, -1:, 2:],
        "a lone query with its head's sink",
    )


def _slopes(draw, heads):
    """The usual slopes in the dtype of a call."""
    return usual_slopes(heads).astype(np.float64 if draw.dtype == "float64" else np.float32)


@attention.law
def slopes_of_zero_change_nothing(run, draw):
    """The same bits, o and lse, as without slopes, over one split and over several."""
    for kv_len in (draw.extent(1, 150), draw.extent(1030, 1100)):
        q_len, d = draw.extent(1, 40), draw.extent(4, 40, "d")
        q, k, v = draw.normal(1, q_len, 4, d), draw.normal(1, kv_len, 2, d), draw.normal(1, kv_len, 2, d)
        zeros = _slopes(draw, 4) * 0
        bound = [run(q, k, v, *NO_MASK, None, x, window=(40, 3), return_lse=True) for x in (zeros, None)]
        for name, a, b in zip(("o", "lse"), *bound, strict=True):
            draw.same_bits(a, b, f"{name} with slopes of 0")


@attention.law
def slopes_are_a_bias_that_is_not_stored(run, draw):
    """What a bias with the products gives, within a few roundings; where starts put it."""
    q_len, kv_len, d = draw.extent(1, 70), draw.extent(1, 150), draw.extent(4, 40, "d")
    q, k, v = draw.normal(1, q_len, 4, d), draw.normal(1, kv_len, 2, d), draw.normal(1, kv_len, 2, d)
    slopes, start = _slopes(draw, 4), draw.extent(0, 200)
    away = np.abs(np.arange(q_len)[:, None] + start - np.arange(kv_len))
    bias = (-slopes[:, None, None] * away)[None].astype(slopes.dtype)
    near = 8 * max(format_of(draw.dtype).U, 2.0**-16) * float(np.abs(v.astype(float)).max())
    for options in ({}, {"is_causal": True}):
        o = run(q, k, v, *NO_MASK, None, slopes, q_start=start, **options).astype(float)
        same = np.abs(o - run(q, k, v, bias, q_start=start, **options).astype(float)) <= near
        draw.same_bits(same, np.ones_like(same), "whether o is near that of a bias (1: yes)")


@attention.law
def slopes_in_any_company(run, draw):
    """Queries from the midst, alone but for where they begin, and one key head with its queries: the same bits."""
    q_len, kv_len, d = draw.extent(2, 150), draw.extent(1, 150), draw.extent(4, 40, "d")
    q, k, v = draw.normal(2, q_len, 4, d), draw.normal(2, kv_len, 2, d), draw.normal(2, kv_len, 2, d)
    first, slopes = draw.extent(0, q_len - 1), _slopes(draw, 4)
    last, whole = draw.extent(first + 1, q_len), run(q, k, v, *NO_MASK, None, slopes)
    alone = run(q[:, first:last], k, v, *NO_MASK, None, slopes, q_start=kv_len - q_len + first)
    draw.same_bits(alone, whole[:, first:last], "queries alone, with slopes")
    of_head = run(q[1:, :, 2:], k[1:, :, 1:], v[1:, :, 1:], *NO_MASK, None, slopes[2:])
    draw.same_bits(of_head, whole[1:, :, 2:], "one key head alone, with slopes")


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


# ---------------------------------------------------------------------------------------------------------- gradient
NOTHING_ELSE = (None,) * 5  # the arguments between d_o and sinks


def _draw(draw, batch, q_len, kv_len, heads, kv_heads, d):
    """q, k, v, o, lse, d_o; o and lse as if from somewhere: gradients take them as they are. lse keeps P below 1."""
    q, o, d_o = (draw.normal(batch, q_len, heads, d) for _ in range(3))
    k, v = draw.normal(batch, kv_len, kv_heads, d), draw.normal(batch, kv_len, kv_heads, d)
    lse = draw.rng.uniform(1, 2, (batch, heads, q_len)) + log(kv_len)
    return q, k, v, o, lse.astype(np.float64 if draw.dtype == "float64" else np.float32), d_o


def _same(draw, actual, want, what):
    for name, a, b in zip(("d_q", "d_k", "d_v"), actual, want, strict=False):
        draw.same_bits(a, b, f"{name} of {what}")


@attention_vjp.law
def linear_in_the_cotangents(run, draw):
    """d_o and d_lse times a power of two: gradients times it, to the bit. float16 rounds D, which may be subnormal."""
    arrays = _draw(draw, 1, draw.extent(1, 70), draw.extent(1, 90), 2, 1, draw.extent(4, 40))
    if draw.dtype == "float16":
        return
    d_o, d_lse = arrays[5], draw.rng.standard_normal(arrays[4].shape).astype(arrays[4].dtype)
    by = 2.0 ** draw.extent(1, 6)
    many = run(
        *arrays[:5], (d_o * d_o.dtype.type(by)).astype(d_o.dtype), None, None, None, d_lse * d_lse.dtype.type(by)
    )
    once = run(*arrays, None, None, None, d_lse)
    want = tuple((x * x.dtype.type(by)).astype(x.dtype) for x in once[:3])
    _same(draw, many, want, "cotangents times a power of two")


@attention_vjp.law
def no_cotangent_no_gradient(run, draw):
    """d_o = 0: zeros, not what rounding makes of them."""
    *arrays, d_o = _draw(draw, 1, draw.extent(1, 70), draw.extent(1, 90), 2, 2, draw.extent(4, 40))
    bias = draw.normal(1, 2, 1, arrays[1].shape[1])
    names, sinks = ("d_q", "d_k", "d_v", "d_bias", "d_sinks"), draw.normal(2)
    for name, x in zip(names, run(*arrays, d_o * 0, bias, *NOTHING_ELSE[1:], sinks, softcap=3.0), strict=True):
        draw.same_bits(np.abs(x), np.zeros_like(x), f"{name} of d_o = 0")


@attention_vjp.law
def float32_gradients_keep_their_digits(run, draw):
    """gradient_dtype="float32" beside 16 bits: sums of products have more digits than the inputs' dtype, and keep
    them. Bounds do not tell, as P and D are rounded to that dtype before."""
    narrow = numpy_dtype(draw.dtype)
    if narrow.itemsize > 2:
        return
    arrays = _draw(draw, 1, draw.extent(2, 70), draw.extent(2, 90), 2, 1, draw.extent(8, 40))
    for name, x in zip(("d_q", "d_k", "d_v"), run(*arrays, gradient_dtype="float32"), strict=False):
        same = np.mean(x == x.astype(narrow).astype(x.dtype)) > 0.5
        draw.same_bits(same, np.zeros_like(same), f"whether {name} has no more digits than {draw.dtype} (1: yes)")


@attention_vjp.law
def equal_weights_add_up(run, draw):
    """Cotangents of 1 make d_v the sum of P, within one rounding of P.

    All P lie just below the next number of d_o's dtype, where cutting them leans most.
    """
    n, kv_len, unit = 2 ** draw.extent(0, 6), draw.extent(1, 90), format_of(draw.dtype).U
    q, k, v, o, lse, d_o = _draw(draw, 1, n, kv_len, 1, 1, 8)
    lse[...] = -log(0.5 + 0.95 * unit)  # unit is the distance of neighbours here
    d_v = run(q * 0, k, v, o, lse, d_o * 0 + d_o.dtype.type(1))[2]
    near = np.abs(d_v.astype(float) / (n * (0.5 + unit)) - 1) <= 1.25 * max(unit, 2.0**-16)
    draw.same_bits(near, np.ones_like(near), "whether d_v is the sum (1: yes)")


@attention_vjp.law
def the_future_has_no_gradient(run, draw):
    """Queries before a cut see no key behind it.

    With cotangents for them alone, later keys and values get zeros, to the bit.
    """
    n = draw.extent(20, 120)
    *arrays, d_o = _draw(draw, 1, n, n, 2, 1, draw.extent(4, 40))
    cut = draw.extent(1, n - 1)
    d_o[:, cut:] = 0
    d_k, d_v = run(*arrays, d_o, is_causal=True)[1:3]
    for name, x in (("d_k", d_k), ("d_v", d_v)):
        draw.same_bits(
            np.abs(x[:, cut:]), np.zeros_like(x[:, cut:]), f"{name} of keys that no query with a cotangent sees"
        )


@attention_vjp.law
def causal_prefix_ignores_the_future_vjp(run, draw):
    """What comes later changes no bit of an earlier query's gradient, on finite data."""
    n, d = draw.extent(20, 120), draw.extent(4, 40)
    q, k, v, *rest = _draw(draw, 1, n, n, 2, 1, d)
    cut = draw.extent(1, n - 1)
    later_k, later_v = k.copy(), v.copy()
    later_k[:, cut:], later_v[:, cut:] = draw.normal(1, n - cut, 1, d), draw.normal(1, n - cut, 1, d)
    got, want = run(q, later_k, later_v, *rest, is_causal=True)[0], run(q, k, v, *rest, is_causal=True)[0]
    draw.same_bits(got[:, :cut], want[:, :cut], "d_q of a causal prefix after the future changed")


@attention_vjp.law
def heads_and_batches_are_independent_vjp(run, draw):
    """One batch entry and one key head with its queries, alone, give the same bits as among others."""
    q, k, v, o, lse, d_o = _draw(draw, 3, draw.extent(1, 70), draw.extent(1, 120), 4, 2, draw.extent(4, 40))
    alone = run(q[1:2, :, 2:], k[1:2, :, 1:], v[1:2, :, 1:], o[1:2, :, 2:], lse[1:2, 2:], d_o[1:2, :, 2:])
    among = run(q, k, v, o, lse, d_o)
    _same(
        draw,
        alone,
        (among[0][1:2, :, 2:], among[1][1:2, :, 1:], among[2][1:2, :, 1:]),
        "one batch entry and key head alone",
    )


@attention_vjp.law
def queries_in_their_place_vjp(run, draw):
    """Queries from the midst of a masked call, alone but for where they begin: the same bits of d_q. Both starts more
    by as much: the same bits of all gradients."""
    q_len, kv_len = draw.extent(2, 120), draw.extent(1, 120)
    q, k, v, o, lse, d_o = _draw(draw, 1, q_len, kv_len, 2, 1, draw.extent(4, 40))
    first = draw.extent(0, q_len - 1)
    last, options = draw.extent(first + 1, q_len), MASKED[draw.extent(0, len(MASKED) - 1)]
    here, place = slice(first, last), kv_len - q_len + first
    part = q[:, here], k, v, o[:, here], lse[..., here], d_o[:, here]
    whole, alone = run(q, k, v, o, lse, d_o, **options)[0], run(*part, q_start=place, **options)
    draw.same_bits(alone[0], whole[:, here], "d_q of queries alone")
    moved = draw.extent(0, 300) - 150
    _same(draw, run(*part, q_start=place + moved, kv_start=moved, **options), alone, "moved starts")


@attention_vjp.law
def sinks_in_any_company(run, draw):
    """The other gradients know of sinks by lse alone, and have the same bits without them. d_sinks has the same bits
    asked for alone and of its head alone; it doubles with the cotangent, and a sink of -inf has none."""
    arrays = _draw(draw, 2, draw.extent(1, 70), draw.extent(1, 40), 4, 2, draw.extent(4, 40))
    sinks = draw.normal(4)
    sinks[1] = -np.inf
    among = run(*arrays, *NOTHING_ELSE, sinks)
    _same(draw, among[:3], run(*arrays)[:3], "a call with sinks")
    draw.same_bits(run(*arrays, *NOTHING_ELSE, sinks, wants=("d_sinks",))[4], among[4], "d_sinks alone")
    draw.same_bits(np.abs(among[4][1:2]), np.zeros_like(sinks[:1]), "d_sinks of a sink of -inf")
    of_head = [x[:, 2:] if i == 4 else x[:, :, (1 if i in (1, 2) else 2) :] for i, x in enumerate(arrays)]
    draw.same_bits(run(*of_head, *NOTHING_ELSE, sinks[2:])[4], among[4][2:], "d_sinks of one key head's queries")
    if draw.dtype != "float16":
        *rest, d_o = arrays
        twice = run(*rest, d_o * d_o.dtype.type(2), *NOTHING_ELSE, sinks)[4]
        draw.same_bits(twice, among[4] * sinks.dtype.type(2), "d_sinks of a cotangent doubled")


@attention_vjp.law
def slopes_of_zero_change_no_gradient(run, draw):
    """The same bits as without slopes."""
    arrays = _draw(draw, 1, draw.extent(1, 70), draw.extent(1, 90), 4, 2, draw.extent(4, 40))
    with_zeros = run(*arrays, *NOTHING_ELSE, None, _slopes(draw, 4) * 0, window=(40, 3))
    _same(draw, with_zeros[:3], run(*arrays, window=(40, 3))[:3], "slopes of 0")


@attention_vjp.law
def slopes_in_any_company_vjp(run, draw):
    """One batch entry and one key head with its queries and slopes, and queries alone but for where they begin: the
    same bits."""
    q_len, kv_len = draw.extent(2, 90), draw.extent(1, 90)
    arrays, slopes = _draw(draw, 2, q_len, kv_len, 4, 2, draw.extent(4, 40)), _slopes(draw, 4)
    among = run(*arrays, *NOTHING_ELSE, None, slopes)
    of_head = [x[1:, 2:] if i == 4 else x[1:, :, (1 if i in (1, 2) else 2) :] for i, x in enumerate(arrays)]
    want = among[0][1:, :, 2:], among[1][1:, :, 1:], among[2][1:, :, 1:]
    _same(draw, run(*of_head, *NOTHING_ELSE, None, slopes[2:])[:3], want, "one key head with its slopes")
    first = draw.extent(0, q_len - 1)
    here = slice(first, draw.extent(first + 1, q_len))
    part = [x[..., here] if i == 4 else x if i in (1, 2) else x[:, here] for i, x in enumerate(arrays)]
    alone = run(*part, *NOTHING_ELSE, None, slopes, q_start=kv_len - q_len + first)[0]
    draw.same_bits(alone, among[0][:, here], "d_q of queries alone, with slopes")


@attention_vjp.law
def heads_may_change_places(run, draw):
    """Heads in another order: the same gradients in that order, to the bit."""
    arrays = _draw(draw, 1, draw.extent(1, 70), draw.extent(1, 120), 3, 3, draw.extent(4, 40))
    order = draw.rng.permutation(3)
    moved = run(*(x[:, order] if i == 4 else x[:, :, order] for i, x in enumerate(arrays)))
    _same(draw, moved, [x[:, :, order] for x in run(*arrays)[:3]], "heads in another order")


@attention_vjp.law
def queries_are_independent_vjp(run, draw):
    """The last queries alone: the same bits of d_q, as grouped heads and as repeated ones."""
    q_len, kv_len, d = draw.extent(2, 120), draw.extent(1, 120), draw.extent(4, 40)
    q, k, v, o, lse, d_o = _draw(draw, 1, q_len, kv_len, 2, 1, d)
    last, among = draw.extent(1, q_len), run(q, k, v, o, lse, d_o)[0]
    keys = np.repeat(k, 2, 2), np.repeat(v, 2, 2)
    alone, *_ = run(q[:, -last:], *keys, o[:, -last:], lse[:, :, -last:], d_o[:, -last:])
    draw.same_bits(alone, among[:, -last:], "d_q of the last queries alone")
