"""The corners and laws of attention's gradients: what the checker visits by name (see :class:`portakern.spec.Edge`). o and lse come from what is planted."""

from __future__ import annotations

from math import inf, log
from typing import TYPE_CHECKING

import numpy as np

from portakern.spec.tolerance import format_of
from portakern.specs.attention import allowed
from portakern.specs.attention_vjp import attention_vjp

if TYPE_CHECKING:
    from portakern.core.call import Call

SEGMENTS = ("q_segment_ids", "kv_segment_ids")


@attention_vjp.locate
def mask_region(call: Call, output: str, index: tuple[int, ...]) -> str:
    """Which keys the element's query sees, or which queries see its key."""
    q_len, kv_len, b = call.dims["q_len"], call.dims["kv_len"], index[0]
    if output == "d_bias":
        at = f"query {index[2]}" if call.outputs["d_bias"][0][2] > 1 else f"the sum over {q_len} queries"
        return f"{at} of {q_len}, key {index[3]} of {kv_len}"
    i, pairs = index[1], allowed(call, b)
    seen = np.flatnonzero(pairs[i] if output == "d_q" else pairs[:, i])
    span = f", {seen[0]} to {seen[-1]}" if seen.size else ""
    if output == "d_q":
        return f"query {i} of {q_len} sees {seen.size} of {kv_len} keys{span}"
    return f"key {i} of {kv_len} is seen by {seen.size} of {q_len} queries{span}"


def _some(rng: np.random.Generator, n: int) -> np.ndarray:
    """A few positions below n, at least one."""
    return rng.choice(n, max(1, n // 4), replace=False)


# --- rows that see nothing ---


@attention_vjp.edge(given=("bias",))
def rows_that_bias_masks(arrays, rng, options):
    """A row whose bias is all -inf has no gradient and leaves none, in d_bias neither."""
    bias = arrays["bias"]
    bias[:, :, _some(rng, bias.shape[2])] = -inf


@attention_vjp.edge(given=("bias",))
def pairs_that_bias_masks(arrays, rng, options):
    """bias = -inf at some keys: their d_bias is 0."""
    bias = arrays["bias"]
    bias[rng.random(bias.shape) < 0.4] = -inf


@attention_vjp.edge(given=SEGMENTS)
def rows_that_segments_mask(arrays, rng, options):
    """A query of a segment that no key has, and a key that no query sees: zeros."""
    q_ids, kv_ids = arrays["q_segment_ids"], arrays["kv_segment_ids"]
    q_ids[:, _some(rng, q_ids.shape[1])] = 9
    kv_ids[:, _some(rng, kv_ids.shape[1])] = 8


@attention_vjp.edge(dims={"q_len": (20, 80), "kv_len": (1, 19)}, options={"is_causal": True}, absent=SEGMENTS)
def more_queries_than_keys(arrays, rng, options):
    """Causal masks are aligned at the bottom right: the first queries see nothing."""


@attention_vjp.edge(dims={"q_len": (2, 140), "kv_len": (2, 140)}, given=("d_lse", *SEGMENTS), absent=("bias",))
def nan_cotangent_of_a_masked_row(arrays, rng, options):
    """NaN in d_o and d_lse of a row that sees nothing: its d_q is 0, and no other query or key of q and k feels it."""
    rows = _some(rng, arrays["q"].shape[1])
    arrays["q_segment_ids"][:, rows] = 9
    arrays["d_o"][:, rows], arrays["d_lse"][:, :, rows] = np.nan, np.nan


# --- the mask's edge ---


@attention_vjp.edge(dims={"q_len": (20, 80), "kv_len": (1, 140)}, options={"window": (2, 0), "is_causal": True})
def narrow_windows(arrays, rng, options):
    """A window of three keys: whole tiles are skipped, and rows may see none."""


@attention_vjp.edge(
    dims={"q_len": (20, 80), "kv_len": (100, 140)},
    options={"window": (0, 0), "is_causal": False},
    absent=SEGMENTS,
    smallest_tiles=True,
)
def keys_that_no_query_sees(arrays, rng, options):
    """More keys than queries and a window of one: the first keys' gradients are zeros that somebody has to write."""


BAND = {"absent": ("bias", *SEGMENTS), "smallest_tiles": True}


@attention_vjp.edge(dims={"q_len": (32, 32), "kv_len": (46, 46)}, options={"is_causal": True, "window": None}, **BAND)
def causal_edge_at_a_tile_border(arrays, rng, options):
    """The first query of a tile of 16 sees all but the last key of another."""


@attention_vjp.edge(
    dims={"q_len": (48, 48), "kv_len": (32, 32)}, options={"is_causal": False, "window": (None, 17)}, **BAND
)
def windows_open_to_the_left(arrays, rng, options):
    """A right edge alone, beyond the diagonal by a tile: the last query of a tile of 16 sees the first key of another, and no more of it."""


@attention_vjp.edge(
    dims={"q_len": (48, 48), "kv_len": (48, 48)}, options={"is_causal": False, "window": (30, None)}, **BAND
)
def windows_open_to_the_right(arrays, rng, options):
    """A left edge alone: the last query of a tile of 16 sees all but the first key of another."""


@attention_vjp.edge(
    dims={"q_len": (80, 80), "kv_len": (80, 80)}, options={"is_causal": False, "window": (30, 30)}, **BAND
)
def windows_of_several_tiles(arrays, rng, options):
    """Both edges, with a whole tile of 16 between them: each just misses the corner of a tile."""


@attention_vjp.edge(
    dims={"q_len": (80, 80), "kv_len": (80, 80)}, options={"is_causal": False, "window": (17, 17)}, **BAND
)
def windows_that_reach_one_key_of_a_tile(arrays, rng, options):
    """Both edges just reach the corner of a tile of 16: 16 queries see 50 keys, and those lie in 5 tiles, one more than 50 take."""


# --- NaN and inf ---


@attention_vjp.edge(dims={"q_len": (1, 70), "kv_len": (2, 140)}, given=SEGMENTS)
def nan_in_masked_keys(arrays, rng, options):
    """NaN in k and v at masked pairs never leaks into d_k, d_v or d_bias."""
    hidden = _some(rng, arrays["k"].shape[1])
    arrays["kv_segment_ids"][:, hidden] = 9
    arrays["k"][:, hidden], arrays["v"][:, hidden] = np.nan, np.nan


@attention_vjp.edge(dims={"q_len": (1, 70), "kv_len": (2, 140)}, given=SEGMENTS)
def nan_in_masked_values(arrays, rng, options):
    """NaN in v at masked pairs never leaks: dS is selected after the arithmetic, so that d_q stays whole too."""
    hidden = _some(rng, arrays["v"].shape[1])
    arrays["kv_segment_ids"][:, hidden] = 9
    arrays["v"][:, hidden] = rng.choice([np.nan, inf])


@attention_vjp.edge(dims={"q_len": (2, 140), "kv_len": (2, 140)}, options={"is_causal": True}, absent=SEGMENTS)
def nan_in_the_last_value(arrays, rng, options):
    """Under a causal mask only the last query sees the last key, so only its row is NaN, and what that row reaches."""
    arrays["v"][:, -1] = np.nan


@attention_vjp.edge(
    dims={"q_len": (2, 140), "kv_len": (2, 140)},
    options={"is_causal": True, "window": None},
    absent=("bias", *SEGMENTS),
)
def nan_in_the_first_cotangents(arrays, rng, options):
    """NaN in d_o of a row reaches the keys that it sees."""
    arrays["d_o"][:, rng.integers(arrays["d_o"].shape[1])] = np.nan


@attention_vjp.edge(dims={"q_len": (1, 70), "kv_len": (1, 140)})
def nan_in_queries(arrays, rng, options):
    """NaN in q makes its row's lse NaN: d_q, and the gradients of the keys that it sees."""
    q = arrays["q"]
    q[:, _some(rng, q.shape[1]), :, 0] = np.nan


@attention_vjp.edge(dims={"q_len": (1, 70), "kv_len": (1, 140)}, options={"softcap": None})
def infinite_logits(arrays, rng, options):
    """A +inf logit makes its row NaN, and the gradients of the keys that it sees."""
    q, k = arrays["q"], arrays["k"]
    q[:, _some(rng, q.shape[1]), :, 0] = inf
    k[..., 0] = 1 + np.abs(k[..., 0])


@attention_vjp.edge(dims={"q_len": (1, 70), "kv_len": (2, 140)}, given=("bias", *SEGMENTS))
def nan_bias_at_masked_pairs(arrays, rng, options):
    """The mask selects last: what a masked pair's bias holds leaves no trace."""
    hidden = _some(rng, arrays["k"].shape[1])
    arrays["kv_segment_ids"][:, hidden] = 9
    arrays["bias"][..., hidden] = rng.choice([np.nan, inf])


# --- scores far away ---


@attention_vjp.edge(
    dims={"q_len": (1, 70), "kv_len": (2, 140)},
    given=SEGMENTS,
    options={"scale": 1.0, "softcap": None},
    absent=("bias",),
)
def logits_of_minus_1e5(arrays, rng, options):
    """Logits near -1e5 beside fully masked rows stay as exact as lse: no finite mask value is that low."""
    arrays["q"][...], arrays["k"][..., 1:] = 0, 0
    arrays["q"][..., 0], arrays["k"][..., 0] = 400, -250 + rng.integers(0, 2, arrays["k"].shape[:-1])
    arrays["q_segment_ids"][:, _some(rng, arrays["q"].shape[1])] = 9


@attention_vjp.edge(dims={"kv_len": (2, 140)}, given=("bias",))
def bias_of_finfo_min(arrays, rng, options):
    """Rows of a bias of finfo.min weigh their keys by anything from 0 to 1, never by NaN, which would reach every key."""
    bias = arrays["bias"]
    bias[...] = np.where(rng.random(bias.shape) < 0.5, 0, -6.5e4)
    bias[:, :, _some(rng, bias.shape[2])] = -3.38e38 if rng.random() < 0.5 else -6.5e4


@attention_vjp.edge(dims={"kv_len": (2, 140)}, options={"softcap": 1.0, "scale": 0.3})
def steep_softcap(arrays, rng, options):
    """Scores on the bend of tanh, where its slope changes most."""


@attention_vjp.edge(dims={"kv_len": (2, 140)}, options={"softcap": 2.0, "scale": 1.0})
def flat_softcap(arrays, rng, options):
    """Scores far beyond the cap: the slope is next to nothing, and 1 - t^2 of rounding."""
    arrays["q"] *= 8


# --- shapes and sums ---


@attention_vjp.edge(
    dims={"kv_len": (2, 140)}, given=SEGMENTS, options={"is_causal": False, "window": None}, absent=("bias", "d_lse")
)
def one_visible_key(arrays, rng, options):
    """A row that sees one key does not depend on its score: d_q is next to 0, and d_v takes the whole d_o."""
    arrays["kv_segment_ids"][...] = 9
    arrays["q_segment_ids"][...] = 3
    arrays["kv_segment_ids"][:, rng.integers(arrays["kv_segment_ids"].shape[1])] = 3


@attention_vjp.edge(dims={"group": (3, 8), "kv_heads": (2, 4), "d": (8, 48), "dv": (8, 48)})
def many_query_heads_a_key_head(arrays, rng, options):
    """d_k and d_v sum over the query heads h with h // group = their head, with head dimensions that no power of two matches."""


@attention_vjp.edge(
    dims={"batch": (2, 3), "group": (1, 3), "q_len": (17, 40), "kv_len": (17, 40)}, given=("bias",), smallest_tiles=True
)
def gradients_of_a_bias(arrays, rng, options):
    """d_bias sums over the axes along which bias is broadcast, across tiles, and over no others."""


@attention_vjp.edge(
    dims={"q_len": (33, 40), "kv_len": (2, 40)}, options={"is_causal": False, "window": None}, given=("bias",), absent=SEGMENTS,
    stretched={"bias": ("q_len",)}, smallest_tiles=True,
)  # fmt: skip
def a_bias_of_one_row(arrays, rng, options):
    """Its gradient is a sum over all queries: those of several tiles, the last of them ragged."""


@attention_vjp.edge(dims={"kv_len": (120, 140)}, regime="spikes")
def one_hot_keys_at_tile_borders(arrays, rng, options):
    """A dropped or repeated key or query shows as a missing or doubled spike."""
    arrays["q"] *= 30


@attention_vjp.edge(dims={"q_len": (120, 140), "kv_len": (1, 40)}, absent=("bias",))
def one_hot_cotangents(arrays, rng, options):
    """d_o of one query alone: a tile of queries that is dropped or met twice shows in d_k and d_v."""
    keep = rng.integers(arrays["d_o"].shape[1]) if rng.random() < 0.5 else -1
    kept = arrays["d_o"][:, keep].copy()
    arrays["d_o"][...] = 0
    arrays["d_o"][:, keep] = kept


@attention_vjp.edge(dims={"q_len": (2, 70), "kv_len": (2, 70)}, given=("d_lse",))
def only_lse_is_used(arrays, rng, options):
    """d_o = 0 and d_lse not: d_q = scale d_lse P k, and d_v = 0."""
    arrays["d_o"][...] = 0


@attention_vjp.edge(
    dims={"q_len": (128, 128), "kv_len": (128, 128)}, options={"is_causal": False, "window": None}, given=SEGMENTS, absent=("bias",)
)  # fmt: skip
def segments_alone(arrays, rng, options):
    """Segments count also where no other mask touches a tile, and no tile is ragged; some queries see no key, and some keys are seen by none."""
    q_ids, kv_ids = arrays["q_segment_ids"], arrays["kv_segment_ids"]
    q_ids[:, _some(rng, q_ids.shape[1])] = 9
    kv_ids[:, _some(rng, kv_ids.shape[1])] = 8


# --- laws ---


def _draw(draw, batch, q_len, kv_len, heads, kv_heads, d):
    """q, k, v, o, lse, d_o; o and lse as if from somewhere: gradients take them as they are. lse keeps P below 1."""
    q, o, d_o = (draw.normal(batch, q_len, heads, d) for _ in range(3))
    k, v = draw.normal(batch, kv_len, kv_heads, d), draw.normal(batch, kv_len, kv_heads, d)
    lse = draw.rng.uniform(1, 2, (batch, heads, q_len)) + log(kv_len)
    return q, k, v, o, lse.astype(np.float64 if draw.dtype == "float64" else np.float32), d_o


def _same(draw, got, want, what):
    for name, a, b in zip(("d_q", "d_k", "d_v"), got, want, strict=False):
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
    for name, x in zip(("d_q", "d_k", "d_v", "d_bias"), run(*arrays, d_o * 0, bias, softcap=3.0), strict=True):
        draw.same_bits(np.abs(x), np.zeros_like(x), f"{name} of d_o = 0")


@attention_vjp.law
def equal_weights_add_up(run, draw):
    """Cotangents of 1 make d_v the sum of P, within one rounding of P: all lie just below the next number of d_o's dtype, where cutting them leans most."""
    n, kv_len, unit = 2 ** draw.extent(0, 6), draw.extent(1, 90), format_of(draw.dtype).U
    q, k, v, o, lse, d_o = _draw(draw, 1, n, kv_len, 1, 1, 8)
    lse[...] = -log(0.5 + 0.95 * unit)  # unit is the distance of neighbours here
    d_v = run(q * 0, k, v, o, lse, d_o * 0 + d_o.dtype.type(1))[2]
    near = np.abs(d_v.astype(float) / (n * (0.5 + unit)) - 1) <= 1.25 * max(unit, 2.0**-16)
    draw.same_bits(near, np.ones_like(near), "whether d_v is the sum (1: yes)")


@attention_vjp.law
def the_future_has_no_gradient(run, draw):
    """Queries before a cut see no key behind it: with cotangents for them alone, later keys and values get zeros, to the bit."""
    n = draw.extent(20, 120)
    *arrays, d_o = _draw(draw, 1, n, n, 2, 1, draw.extent(4, 40))
    cut = draw.extent(1, n - 1)
    d_o[:, cut:] = 0
    _, d_k, d_v, _ = run(*arrays, d_o, is_causal=True)
    for name, x in (("d_k", d_k), ("d_v", d_v)):
        draw.same_bits(
            np.abs(x[:, cut:]), np.zeros_like(x[:, cut:]), f"{name} of keys that no query with a cotangent sees"
        )


@attention_vjp.law
def causal_prefix_ignores_the_future(run, draw):
    """What comes later changes no bit of an earlier query's gradient, on finite data."""
    n, d = draw.extent(20, 120), draw.extent(4, 40)
    q, k, v, *rest = _draw(draw, 1, n, n, 2, 1, d)
    cut = draw.extent(1, n - 1)
    later_k, later_v = k.copy(), v.copy()
    later_k[:, cut:], later_v[:, cut:] = draw.normal(1, n - cut, 1, d), draw.normal(1, n - cut, 1, d)
    got, want = run(q, later_k, later_v, *rest, is_causal=True)[0], run(q, k, v, *rest, is_causal=True)[0]
    draw.same_bits(got[:, :cut], want[:, :cut], "d_q of a causal prefix after the future changed")


@attention_vjp.law
def heads_and_batches_are_independent(run, draw):
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
def heads_may_change_places(run, draw):
    """Heads in another order: the same gradients in that order, to the bit."""
    arrays = _draw(draw, 1, draw.extent(1, 70), draw.extent(1, 120), 3, 3, draw.extent(4, 40))
    order = draw.rng.permutation(3)
    moved = run(*(x[:, order] if i == 4 else x[:, :, order] for i, x in enumerate(arrays)))
    _same(draw, moved, [x[:, :, order] for x in run(*arrays)[:3]], "heads in another order")


@attention_vjp.law
def queries_are_independent(run, draw):
    """The last queries alone: the same bits of d_q, as grouped heads and as repeated ones."""
    q_len, kv_len, d = draw.extent(2, 120), draw.extent(1, 120), draw.extent(4, 40)
    q, k, v, o, lse, d_o = _draw(draw, 1, q_len, kv_len, 2, 1, d)
    last, among = draw.extent(1, q_len), run(q, k, v, o, lse, d_o)[0]
    alone = run(q[:, -last:], np.repeat(k, 2, 2), np.repeat(v, 2, 2), o[:, -last:], lse[:, :, -last:], d_o[:, -last:])[
        0
    ]
    draw.same_bits(alone, among[:, -last:], "d_q of the last queries alone")
