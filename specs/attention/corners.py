"""Corners of attention and of its gradients: calls that chance seldom draws, which the checker visits.

See :class:`portakern.spec.Edge`. For a gradient, what is planted are the forward call's arrays and the cotangents; o
and lse follow.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import numpy as np

from portakern.specs.attention.contract import attention, attention_vjp
from portakern.specs.attention.planting import (
    SEGMENTS,
    blind_queries,
    far_logits,
    hidden_keys,
    infinite_queries,
    nan_queries,
    odd_bias_of_hidden_keys,
    queries_and_keys_apart,
    rows_masked_by_bias,
    rows_of_a_low_bias,
    segments,
    show_one_key,
    slopes,
    some,
    usual_slopes,
)
from portakern.specs.attention.scores import allowed

if TYPE_CHECKING:
    from portakern.core.call import Call


IN_PLACE = {"q_start": None, "kv_start": None}
"""The options of an edge whose masks shall fall where lengths alone put them."""


@attention.locate
def mask_region(call: Call, output: str, index: tuple[int, ...]) -> str:
    """How many keys the element's row sees, and between which."""
    b, i = index[0], index[1] if output == "o" else index[2]
    keys = np.flatnonzero(allowed(call, b)[i])
    span = f", keys {keys[0]} to {keys[-1]}" if keys.size else ""
    return f"query {i} of {call.dims['q_len']} sees {keys.size} of {call.dims['kv_len']} keys{span}"


@attention.edge(given=("bias",))
def rows_that_bias_masks(arrays, rng, options):
    """A row whose bias is all -inf is zeros with lse = -inf, beside rows that are not."""
    rows_masked_by_bias(arrays, rng)


@attention.edge(
    dims={"q_len": (1, 40), "kv_len": (128, 128)}, given=SEGMENTS, options={"is_causal": False, "window": None}
)
def rows_that_segments_mask(arrays, rng, options):
    """A query whose segment no key has is zeros with lse = -inf, also where no other mask touches a tile of keys."""
    blind_queries(arrays, rng)


@attention.edge(dims={"q_len": (20, 80), "kv_len": (1, 19)}, options={**IN_PLACE, "is_causal": True}, absent=SEGMENTS)
def more_queries_than_keys(arrays, rng, options):
    """Causal masks are aligned at the bottom right: the first queries see nothing."""


@attention.edge(dims={"q_len": (20, 80), "kv_len": (1, 140)}, options={**IN_PLACE, "window": (2, 0), "is_causal": True})
def narrow_windows(arrays, rng, options):
    """A window of three keys: whole tiles are skipped, and rows may see none."""


@attention.edge(dims={"q_len": (1, 70), "kv_len": (2, 140)}, given=SEGMENTS)
def nan_in_masked_keys(arrays, rng, options):
    """NaN in k at a masked pair never leaks."""
    hidden = hidden_keys(arrays, rng)
    arrays["k"][:, hidden] = np.nan


@attention.edge(dims={"q_len": (2, 140), "kv_len": (2, 140)}, options={**IN_PLACE, "is_causal": True}, absent=SEGMENTS)
def nan_in_the_last_key(arrays, rng, options):
    """Under a causal mask only the last query sees the last key, so only its row is NaN."""
    arrays["k"][:, -1] = np.nan


@attention.edge(dims={"q_len": (1, 70), "kv_len": (1, 140)})
def nan_in_queries(arrays, rng, options):
    """NaN in q reaches its row and no other."""
    nan_queries(arrays, rng)


@attention.edge(dims={"q_len": (1, 70), "kv_len": (1, 140)})
def nan_and_inf_in_values(arrays, rng, options):
    """NaN and inf in v at an existing key reach the rows that see it."""
    v = arrays["v"]
    v[:, some(rng, v.shape[1]), :, 0] = rng.choice([np.nan, inf, -inf])


@attention.edge(dims={"q_len": (1, 70), "kv_len": (1, 140)}, options={"softcap": None})
def infinite_logits(arrays, rng, options):
    """A +inf logit makes the whole row NaN, o and lse."""
    infinite_queries(arrays, rng)


@attention.edge(
    dims={"q_len": (1, 70), "kv_len": (2, 140)},
    given=SEGMENTS,
    options={"scale": 1.0, "softcap": None},
    absent=("bias",),
)
def logits_of_minus_1e5(arrays, rng, options):
    """Logits near -1e5 beside fully masked rows stay exact: no finite mask value is that low."""
    far_logits(arrays, rng)


@attention.edge(
    dims={"q_len": (1, 40), "kv_len": (33, 140), "d": (17, 40), "dv": (1, 15)},
    options={"is_causal": False, "window": None},
)
def values_shorter_than_keys(arrays, rng, options):
    """Value heads that fill a narrower tile than query heads, over many keys.

    An assembler has formed wrong addresses for such pairs of tiles.
    """


@attention.edge(dims={"kv_len": (2, 140)}, given=("bias",))
def bias_of_finfo_min(arrays, rng, options):
    """Rows of a bias of finfo.min give a convex average or zeros, never NaN."""
    rows_of_a_low_bias(arrays, rng, low=-3.3e38)


@attention.edge(
    dims={"kv_len": (2, 140)}, given=SEGMENTS, options={"is_causal": False, "window": None}, absent=("bias",)
)
def one_visible_key(arrays, rng, options):
    """A row that sees one key returns its value, whatever the score."""
    show_one_key(arrays, rng)


@attention.edge(dims={"group": (3, 8), "kv_heads": (2, 4), "d": (8, 48), "dv": (8, 48)})
def many_query_heads_a_key_head(arrays, rng, options):
    """Query head h reads key head h // group, with head dimensions that no power of two matches."""


@attention.edge(
    dims={"q_len": (1, 40), "kv_len": (129, 140)},
    options={"is_causal": False, "window": None},
    absent=("bias", *SEGMENTS),
)
def values_at_tile_borders(arrays, rng, options):
    """All weights are equal and only the keys beside the borders of tiles hold a value; the last tile is ragged.

    A key that is dropped or repeated shows.
    """
    n = arrays["k"].shape[1]
    arrays["k"][...], arrays["v"][...] = 0, 0
    arrays["v"][:, [0, 15, 16, 31, 32, 63, 64, 127, 128, n - 1]] = 1


@attention.edge(
    dims={"q_len": (32, 32), "kv_len": (46, 46)},
    options={**IN_PLACE, "is_causal": True, "window": None, "return_lse": False},
    absent=("bias", *SEGMENTS),
    smallest_tiles=True,
)
def causal_edge_at_a_tile_border(arrays, rng, options):
    """The first query of a tile of 16 sees all but the last key of another."""


@attention.edge(
    dims={"q_len": (48, 48), "kv_len": (48, 48)},
    options={**IN_PLACE, "is_causal": False, "window": (30, None), "return_lse": False},
    absent=("bias", *SEGMENTS),
    smallest_tiles=True,
)
def windows_open_to_the_right(arrays, rng, options):
    """A left edge alone: the last query of a tile of 16 sees all but the first key of another.

    The keys fill an odd number of such tiles: a kernel that takes two at a time has no mask there that would hide the
    keys after the last one.
    """


@attention.edge(
    dims={"q_len": (80, 80), "kv_len": (83, 83)},
    options={**IN_PLACE, "is_causal": False, "window": (20, 20), "return_lse": False},
    absent=("bias", *SEGMENTS),
    smallest_tiles=True,
)
def windows_of_several_tiles(arrays, rng, options):
    """Both edges, with whole tiles of 16 between them.

    16 queries see 56 keys, and those lie in 5 tiles, one more than 56 take.
    """


@attention.edge(
    dims={"q_len": (256, 256), "kv_len": (256, 256)},
    options={**IN_PLACE, "is_causal": False, "window": (126, 126), "return_lse": True},
    absent=("bias", *SEGMENTS),
    smallest_tiles=True,
)
def window_corners_at_tile_corners(arrays, rng, options):
    """For tiles of any power of two up to 128, both edges cut off one key of a tile.

    A tile's last query sees all but the first key of some tile, and its first query all but the last of another.
    """


@attention.edge(
    dims={"q_len": (1, 20), "kv_len": (100, 140)},
    options={"scale": 1.0, "softcap": None, "is_causal": False, "window": None},
    absent=("bias",),
    smallest_tiles=True,
)
def slowly_rising_scores(arrays, rng, options):
    """Every tile raises the maximum by less than a hundredth, so that a rescaling that is left out changes little."""
    arrays["q"][...], arrays["k"][...] = 0, 0
    arrays["q"][..., 0] = 1
    arrays["k"][..., 0] = np.linspace(0, 0.05, arrays["k"].shape[1])[:, None]


@attention.edge(
    dims={"q_len": (40, 70), "kv_len": (1, 8)},
    absent=("bias", *SEGMENTS),
    options={"scale": 1.0, "softcap": 30.0, "is_causal": False, "window": None, "return_lse": True},
)
def steep_softcap(arrays, rng, options):
    """Every query scores all its keys alike, from 0 to 4 times the softcap.

    Its lse is the softcap times tanh of that, and shows where an approximation errs.
    """
    arrays["q"][...], arrays["k"][...] = 0, 0
    arrays["q"][..., 0] = 30 * np.linspace(0, 4, arrays["q"].shape[1])[:, None]
    arrays["k"][..., 0] = 1


@attention.edge(dims={"q_len": (1, 70), "kv_len": (2, 140)}, given=("bias", *SEGMENTS))
def nan_bias_at_masked_pairs(arrays, rng, options):
    """The mask selects last: what a masked pair's bias holds leaves no trace."""
    odd_bias_of_hidden_keys(arrays, rng)


# --- parts of a sequence ---


@attention.edge(
    dims={"q_len": (20, 80), "kv_len": (1, 40)},
    options={"is_causal": True, "q_start": 0, "kv_start": 30, "return_lse": True},
)
def keys_ahead_of_queries(arrays, rng, options):
    """A part of the keys that begins behind the first queries: those see nothing, later ones some or all of it."""


@attention.edge(
    dims={"q_len": (20, 80), "kv_len": (90, 140)},
    options={"is_causal": False, "window": (4, 0), "q_start": 100, "kv_start": 0, "return_lse": True},
    smallest_tiles=True,
)
def keys_that_queries_have_passed(arrays, rng, options):
    """A window that leaves the keys behind: the first queries see the last of them, and the others none."""


@attention.edge(
    dims={"q_len": (1, 40), "kv_len": (1, 140)},
    options={"is_causal": True, "q_start": 0, "kv_start": 500, "return_lse": True},
)
def keys_of_the_future(arrays, rng, options):
    """No query sees a key of this part: zeros with an lse of -inf, or of the sink."""


@attention.edge(
    dims={"q_len": (80, 80), "kv_len": (83, 83)},
    options={"is_causal": False, "window": (20, 20), "q_start": 50, "kv_start": 18, "return_lse": True},
    absent=("bias", *SEGMENTS),
    smallest_tiles=True,
)
def windows_of_several_tiles_moved(arrays, rng, options):
    """Both edges, with whole tiles of 16 between them, where starts put them."""


@attention.edge(
    dims={"q_len": (1, 4), "kv_len": (1030, 1100), "group": (1, 4)},
    options={"is_causal": True, "window": None, "q_start": 1500, "kv_start": 700, "return_lse": True},
    absent=("bias", *SEGMENTS),
)
def decoding_a_part_of_the_keys(arrays, rng, options):
    """Few queries and keys that are split, of which they see the first 801 to 804."""


# --- sinks ---


@attention.edge(dims={"q_len": (1, 70), "kv_len": (2, 140)}, given=("sinks", *SEGMENTS), options={"return_lse": True})
def sinks_of_rows_without_keys(arrays, rng, options):
    """A row that sees no key is zeros, and its lse the sink, to the bit."""
    blind_queries(arrays, rng)


@attention.edge(dims={"q_len": (1, 70), "kv_len": (2, 140)}, given=("sinks",), options={"return_lse": True})
def absent_sinks_beside_others(arrays, rng, options):
    """A sink of -inf is none: also of rows that a bias of -inf, or a mask, hides wholly."""
    arrays["sinks"][some(rng, arrays["sinks"].shape[0])] = -inf
    if arrays.get("bias") is not None:
        rows_masked_by_bias(arrays, rng)


@attention.edge(dims={"q_len": (1, 70), "kv_len": (1, 140)}, given=("sinks",), options={"return_lse": True})
def odd_sinks(arrays, rng, options):
    """NaN and inf in a sink make every row of its head NaN, o and lse, and no other."""
    arrays["sinks"][some(rng, arrays["sinks"].shape[0])] = rng.choice([np.nan, inf])


@attention.edge(
    dims={"q_len": (1, 40), "kv_len": (2, 140)},
    given=("sinks",),
    absent=("bias",),
    options={"scale": 0.125, "softcap": None, "return_lse": True},
)
def sinks_above_all_scores(arrays, rng, options):
    """The sink is the row's maximum, by a little and by much: it is neither scaled nor capped."""
    arrays["sinks"][...] = rng.choice([3.0, 8.0, 30.0], arrays["sinks"].shape)


@attention.edge(
    dims={"q_len": (1, 40), "kv_len": (2, 140)},
    given=("sinks",),
    absent=("bias",),
    options={"scale": 1.0, "softcap": None, "return_lse": True},
)
def sinks_beside_logits_of_minus_1e5(arrays, rng, options):
    """Sinks beside scores near -1e5, above them, and within a few units of them."""
    q, k = arrays["q"], arrays["k"]
    q[...], k[..., 1:] = 0, 0
    q[..., 0], k[..., 0] = 400, -250 + rng.integers(0, 2, k.shape[:-1])
    if arrays["sinks"].dtype != np.float16:
        arrays["sinks"][
            some(rng, arrays["sinks"].shape[0])
        ] = -99840.0  # a number of bfloat16, within 240 of the scores


@attention.edge(
    dims={"q_len": (1, 2), "kv_len": (1030, 1100), "group": (1, 4)},
    given=("sinks",),
    options={"is_causal": False, "window": None, "return_lse": True},
    absent=("bias", *SEGMENTS),
)
def decoding_with_sinks(arrays, rng, options):
    """Keys that are split: the sink is in the denominator once, not once for each split."""
    arrays["sinks"][...] = 5 + np.abs(arrays["sinks"])


# --- slopes ---

ALIBI = {"given": ("alibi_slopes",), "absent": ("bias", *SEGMENTS)}


@attention.edge(
    dims={"q_len": (20, 80), "kv_len": (1, 140)},
    options={**IN_PLACE, "is_causal": True, "window": (9, 0), "return_lse": True},
    smallest_tiles=True,
    **ALIBI,
)
def slopes_in_a_window(arrays, rng, options):
    """Distances count from a query's own place also where a window hides most tiles, and rows may see none."""


@attention.edge(
    dims={"q_len": (1, 70), "kv_len": (2, 140)}, options={"is_causal": False, "window": None}, given=("alibi_slopes",)
)
def one_huge_slope(arrays, rng, options):
    """A row of that head sees the key at its own place alone, or the nearest; other heads do not feel it."""
    arrays["alibi_slopes"][rng.integers(arrays["alibi_slopes"].shape[0])] = rng.choice([1e4, 1e9, 1e30])


@attention.edge(
    dims={"group": (2, 8), "kv_heads": (2, 4), "q_len": (1, 9), "kv_len": (20, 70)}, smallest_tiles=True, **ALIBI
)
def slopes_of_grouped_heads(arrays, rng, options):
    """Every query head has a slope of its own, also where heads of a group share a tile of rows."""
    arrays["alibi_slopes"][...] = 1.0 / np.arange(1, arrays["alibi_slopes"].shape[0] + 1)


@attention.edge(dims={"q_len": (1, 40), "kv_len": (1, 140)}, given=("alibi_slopes",), options={"return_lse": True})
def odd_slopes(arrays, rng, options):
    """NaN makes every row of its head NaN that sees a key. An infinite slope leaves a row the key at its own place,
    whose score is NaN, or none."""
    arrays["alibi_slopes"][some(rng, arrays["alibi_slopes"].shape[0])] = rng.choice([np.nan, inf, -inf])


@attention.edge(
    dims={"q_len": (1, 4), "kv_len": (1030, 1100), "group": (1, 4)},
    options={"is_causal": False, "window": None, "return_lse": True},
    **ALIBI,
)
def decoding_with_slopes(arrays, rng, options):
    """Few queries and keys that are split: every split counts from the same place."""
    arrays["alibi_slopes"][...] = usual_slopes(arrays["alibi_slopes"].shape[0]) / 32


@attention.edge(
    dims={"q_len": (1, 40), "kv_len": (1, 140)},
    options={"is_causal": False, "window": None, "q_start": 2**25 + 77, "kv_start": 5, "return_lse": True},
    **ALIBI,
)
def slopes_of_far_keys(arrays, rng, options):
    """Distances that float32 does not hold one by one, all of them alike."""
    arrays["alibi_slopes"][...] = 1e-3


@attention.edge(
    dims={"q_len": (20, 80), "kv_len": (20, 80)},
    options={"is_causal": False, "window": None, "q_start": 10, "kv_start": 40, "softcap": 2.0, "return_lse": True},
    given=("alibi_slopes", "bias"),
)
def slopes_on_both_sides(arrays, rng, options):
    """Keys before a query and behind it, a softcap that leaves slopes as they are, and a bias."""
    arrays["alibi_slopes"][...] = 0.25


# --- as people run it ---

LONE = {"absent": ("bias", *SEGMENTS)}


@attention.edge(
    dims={"q_len": (2, 5), "kv_len": (257, 257), "d": (65, 80)},
    options={**IN_PLACE, "is_causal": True, "window": None},
    **LONE,
)
def causal_with_odd_heads_and_one_key_beyond(arrays, rng, options):
    """Heads that end in a tile of 16, and a key in a tile of its own behind tiles of 128 and 256."""


@attention.edge(
    dims={"q_len": (2, 2), "kv_len": (2, 140)}, options={**IN_PLACE, "is_causal": True, "window": None}, absent=SEGMENTS
)
def two_causal_queries(arrays, rng, options):
    """As few queries as there are masked ones: the first does not see the last key."""


@attention.edge(
    dims={"q_len": (1, 40), "kv_len": (130, 200), "d": (128, 128)}, options={**IN_PLACE, "is_causal": True}, **LONE
)
def causal_heads_of_128(arrays, rng, options):
    """The heads of most models, causal over more keys than a tile has."""


@attention.edge(dims={"q_len": (1, 1), "kv_len": (769, 1030)}, options={"is_causal": False, "window": None}, **LONE)
def decoding_over_many_keys(arrays, rng, options):
    """One query: a kernel splits the keys, and the last share is ragged."""


attention.values("q_segment_ids")(segments)
attention.values("kv_segment_ids")(segments)
attention.values("alibi_slopes")(slopes)


# ---------------------------------------------------------------------------------------------------------- gradient
@attention_vjp.locate
def mask_region_vjp(call: Call, output: str, index: tuple[int, ...]) -> str:
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


# --- rows that see nothing ---


@attention_vjp.edge(given=("bias",))
def rows_that_bias_masks_vjp(arrays, rng, options):
    """A row whose bias is all -inf has no gradient and leaves none, in d_bias neither."""
    rows_masked_by_bias(arrays, rng)


@attention_vjp.edge(given=("bias",))
def pairs_that_bias_masks(arrays, rng, options):
    """bias = -inf at some keys: their d_bias is 0."""
    bias = arrays["bias"]
    bias[rng.random(bias.shape) < 0.4] = -inf


@attention_vjp.edge(given=SEGMENTS)
def rows_that_segments_mask_vjp(arrays, rng, options):
    """A query of a segment that no key has, and a key that no query sees: zeros."""
    queries_and_keys_apart(arrays, rng)


@attention_vjp.edge(
    dims={"q_len": (20, 80), "kv_len": (1, 19)}, options={**IN_PLACE, "is_causal": True}, absent=SEGMENTS
)
def more_queries_than_keys_vjp(arrays, rng, options):
    """Causal masks are aligned at the bottom right: the first queries see nothing."""


@attention_vjp.edge(dims={"q_len": (2, 140), "kv_len": (2, 140)}, given=("d_lse", *SEGMENTS), absent=("bias",))
def nan_cotangent_of_a_masked_row(arrays, rng, options):
    """NaN in d_o and d_lse of a row that sees nothing: its d_q is 0, and no other query or key of q and k feels it."""
    rows = blind_queries(arrays, rng)
    arrays["d_o"][:, rows], arrays["d_lse"][:, :, rows] = np.nan, np.nan


# --- the mask's edge ---


@attention_vjp.edge(
    dims={"q_len": (20, 80), "kv_len": (1, 140)}, options={**IN_PLACE, "window": (2, 0), "is_causal": True}
)
def narrow_windows_vjp(arrays, rng, options):
    """A window of three keys: whole tiles are skipped, and rows may see none."""


@attention_vjp.edge(
    dims={"q_len": (20, 80), "kv_len": (100, 140)},
    options={**IN_PLACE, "window": (0, 0), "is_causal": False},
    absent=SEGMENTS,
    smallest_tiles=True,
)
def keys_that_no_query_sees(arrays, rng, options):
    """More keys than queries and a window of one: the first keys' gradients are zeros that somebody has to write."""


BAND = {"absent": ("bias", *SEGMENTS), "smallest_tiles": True}


@attention_vjp.edge(
    dims={"q_len": (32, 32), "kv_len": (46, 46)}, options={**IN_PLACE, "is_causal": True, "window": None}, **BAND
)
def causal_edge_at_a_tile_border_vjp(arrays, rng, options):
    """The first query of a tile of 16 sees all but the last key of another."""


@attention_vjp.edge(
    dims={"q_len": (48, 48), "kv_len": (32, 32)}, options={**IN_PLACE, "is_causal": False, "window": (None, 17)}, **BAND
)
def windows_open_to_the_left(arrays, rng, options):
    """A right edge alone, beyond the diagonal by a tile.

    The last query of a tile of 16 sees the first key of another, and no more of it.
    """


@attention_vjp.edge(
    dims={"q_len": (48, 48), "kv_len": (48, 48)}, options={**IN_PLACE, "is_causal": False, "window": (30, None)}, **BAND
)
def windows_open_to_the_right_vjp(arrays, rng, options):
    """A left edge alone: the last query of a tile of 16 sees all but the first key of another."""


@attention_vjp.edge(
    dims={"q_len": (80, 80), "kv_len": (80, 80)}, options={**IN_PLACE, "is_causal": False, "window": (30, 30)}, **BAND
)
def windows_of_several_tiles_vjp(arrays, rng, options):
    """Both edges, with a whole tile of 16 between them: each just misses the corner of a tile."""


@attention_vjp.edge(
    dims={"q_len": (80, 80), "kv_len": (80, 80)}, options={**IN_PLACE, "is_causal": False, "window": (17, 17)}, **BAND
)
def windows_that_reach_one_key_of_a_tile(arrays, rng, options):
    """Both edges just reach the corner of a tile of 16.

    16 queries see 50 keys, and those lie in 5 tiles, one more than 50 take.
    """


@attention_vjp.edge(
    dims={"q_len": (256, 256), "kv_len": (256, 256)},
    options={**IN_PLACE, "is_causal": False, "window": (126, 126)},
    **BAND,
)
def window_corners_at_tile_corners_vjp(arrays, rng, options):
    """For tiles of any power of two up to 128, both edges cut off one pair of a tile: of its last query the first key,
    and of its first query the last."""


# --- parts of a sequence ---


@attention_vjp.edge(
    dims={"q_len": (20, 80), "kv_len": (1, 40)}, options={"is_causal": True, "q_start": 0, "kv_start": 30}
)
def keys_ahead_of_queries_vjp(arrays, rng, options):
    """A part of the keys that begins behind the first queries, which have no gradient."""


@attention_vjp.edge(
    dims={"q_len": (20, 80), "kv_len": (90, 140)},
    options={"is_causal": False, "window": (4, 0), "q_start": 100, "kv_start": 0},
    smallest_tiles=True,
)
def keys_that_queries_have_passed_vjp(arrays, rng, options):
    """A window that leaves the keys behind: the last keys are seen by the first queries, and the others by none."""


@attention_vjp.edge(
    dims={"q_len": (1, 40), "kv_len": (1, 140)}, options={"is_causal": True, "q_start": 0, "kv_start": 500}
)
def keys_of_the_future_vjp(arrays, rng, options):
    """No query sees a key of this part: zeros that somebody has to write."""


@attention_vjp.edge(
    dims={"q_len": (80, 80), "kv_len": (83, 83)},
    options={"is_causal": False, "window": (20, 20), "q_start": 50, "kv_start": 18},
    **BAND,
)
def windows_of_several_tiles_moved_vjp(arrays, rng, options):
    """Both edges, with a whole tile of 16 between them, where starts put them."""


# --- NaN and inf ---


@attention_vjp.edge(dims={"q_len": (1, 70), "kv_len": (2, 140)}, given=SEGMENTS)
def nan_in_masked_keys_vjp(arrays, rng, options):
    """NaN in k and v at masked pairs never leaks into d_k, d_v or d_bias."""
    hidden = hidden_keys(arrays, rng)
    arrays["k"][:, hidden], arrays["v"][:, hidden] = np.nan, np.nan


@attention_vjp.edge(dims={"q_len": (1, 70), "kv_len": (2, 140)}, given=SEGMENTS)
def nan_in_masked_values(arrays, rng, options):
    """NaN in v at masked pairs never leaks: dS is selected after the arithmetic, so that d_q stays whole too."""
    hidden = hidden_keys(arrays, rng)
    arrays["v"][:, hidden] = rng.choice([np.nan, inf])


@attention_vjp.edge(
    dims={"q_len": (2, 140), "kv_len": (2, 140)}, options={**IN_PLACE, "is_causal": True}, absent=SEGMENTS
)
def nan_in_the_last_value(arrays, rng, options):
    """Under a causal mask only the last query sees the last key, so only its row is NaN, and what that row reaches."""
    arrays["v"][:, -1] = np.nan


@attention_vjp.edge(
    dims={"q_len": (2, 140), "kv_len": (2, 140)},
    options={**IN_PLACE, "is_causal": True, "window": None},
    absent=("bias", *SEGMENTS),
)
def nan_in_the_first_cotangents(arrays, rng, options):
    """NaN in d_o of a row reaches the keys that it sees."""
    arrays["d_o"][:, rng.integers(arrays["d_o"].shape[1])] = np.nan


@attention_vjp.edge(dims={"q_len": (1, 70), "kv_len": (1, 140)})
def nan_in_queries_vjp(arrays, rng, options):
    """NaN in q makes its row's lse NaN: d_q, and the gradients of the keys that it sees."""
    nan_queries(arrays, rng)


@attention_vjp.edge(dims={"q_len": (1, 70), "kv_len": (1, 140)}, options={"softcap": None})
def infinite_logits_vjp(arrays, rng, options):
    """A +inf logit makes its row NaN, and the gradients of the keys that it sees."""
    infinite_queries(arrays, rng)


@attention_vjp.edge(dims={"q_len": (1, 70), "kv_len": (2, 140)}, given=("bias", *SEGMENTS))
def nan_bias_at_masked_pairs_vjp(arrays, rng, options):
    """The mask selects last: what a masked pair's bias holds leaves no trace."""
    odd_bias_of_hidden_keys(arrays, rng)


# --- scores far away ---


@attention_vjp.edge(
    dims={"q_len": (1, 70), "kv_len": (2, 140)},
    given=SEGMENTS,
    options={"scale": 1.0, "softcap": None},
    absent=("bias",),
)
def logits_of_minus_1e5_vjp(arrays, rng, options):
    """Logits near -1e5 beside fully masked rows stay as exact as lse: no finite mask value is that low."""
    far_logits(arrays, rng)


@attention_vjp.edge(dims={"kv_len": (2, 140)}, given=("bias",))
def bias_of_finfo_min_vjp(arrays, rng, options):
    """Rows of a bias of finfo.min weigh keys by anything from 0 to 1, never by NaN, which would reach every key."""
    rows_of_a_low_bias(arrays, rng, low=-3.38e38)


@attention_vjp.edge(dims={"kv_len": (2, 140)}, options={"softcap": 1.0, "scale": 0.3})
def steep_softcap_vjp(arrays, rng, options):
    """Scores on the bend of tanh, where its slope changes most."""


@attention_vjp.edge(dims={"kv_len": (2, 140)}, options={"softcap": 2.0, "scale": 1.0})
def flat_softcap(arrays, rng, options):
    """Scores far beyond the cap: the slope is next to nothing, and 1 - t^2 of rounding."""
    arrays["q"] *= 8


# --- shapes and sums ---


@attention_vjp.edge(
    dims={"kv_len": (2, 140)}, given=SEGMENTS, options={"is_causal": False, "window": None}, absent=("bias", "d_lse")
)
def one_visible_key_vjp(arrays, rng, options):
    """A row that sees one key does not depend on its score: d_q is next to 0, and d_v takes the whole d_o."""
    show_one_key(arrays, rng)


@attention_vjp.edge(dims={"group": (3, 8), "kv_heads": (2, 4), "d": (8, 48), "dv": (8, 48)})
def many_query_heads_a_key_head_vjp(arrays, rng, options):
    """d_k and d_v sum over the query heads h with h // group = their head.

    No power of two matches the head dimensions.
    """


@attention_vjp.edge(
    dims={"batch": (2, 3), "group": (1, 3), "q_len": (17, 40), "kv_len": (17, 40)}, given=("bias",), smallest_tiles=True
)
def gradients_of_a_bias(arrays, rng, options):
    """d_bias sums over the axes along which bias is broadcast, across tiles, and over no others."""


@attention_vjp.edge(
    dims={"q_len": (33, 40), "kv_len": (2, 40)},
    options={"is_causal": False, "window": None},
    given=("bias",),
    absent=SEGMENTS,
    stretched={"bias": ("q_len",)},
    smallest_tiles=True,
)
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


# --- sinks ---


@attention_vjp.edge(dims={"q_len": (2, 70), "kv_len": (2, 140)}, given=("sinks", "d_lse", *SEGMENTS))
def sinks_of_rows_without_keys_vjp(arrays, rng, options):
    """lse is the sink where a row sees no key: all of its d_lse is the sink's."""
    blind_queries(arrays, rng)


@attention_vjp.edge(dims={"q_len": (2, 70), "kv_len": (2, 140)}, given=("sinks",))
def absent_sinks_beside_others_vjp(arrays, rng, options):
    """A sink of -inf has no gradient: also of rows whose lse is -inf."""
    arrays["sinks"][some(rng, arrays["sinks"].shape[0])] = -inf
    if arrays.get("bias") is not None:
        rows_masked_by_bias(arrays, rng)


@attention_vjp.edge(dims={"batch": (2, 3), "q_len": (120, 140), "kv_len": (1, 20)}, given=("sinks",))
def a_sink_above_all_scores(arrays, rng, options):
    """Most of each row's weight is the sink's; its gradient is a sum over all batch entries and queries."""
    arrays["sinks"][...] = rng.choice([3.0, 8.0], arrays["sinks"].shape)


@attention_vjp.edge(dims={"batch": (2, 3), "q_len": (1100, 1200), "kv_len": (1, 4), "d": (1, 8), "dv": (1, 8)},
                    given=("sinks",), absent=("bias",))  # fmt: skip
def a_sink_of_many_rows(arrays, rng, options):
    """More rows than a program takes at a time, of which the last ones are few."""


@attention_vjp.edge(
    dims={"q_len": (128, 128), "kv_len": (128, 128)},
    options={"is_causal": False, "window": None},
    given=SEGMENTS,
    absent=("bias",),
)
def segments_alone(arrays, rng, options):
    """Segments count also where no other mask touches a tile, and no tile is ragged.

    Some queries see no key, and some keys are seen by none.
    """
    queries_and_keys_apart(arrays, rng)


# --- slopes ---


@attention_vjp.edge(
    dims={"q_len": (20, 80), "kv_len": (1, 140)},
    options={**IN_PLACE, "is_causal": True, "window": (9, 0)},
    smallest_tiles=True,
    **ALIBI,
)
def slopes_in_a_window_vjp(arrays, rng, options):
    """Distances count from a key's own place among the queries, as from a query's among the keys."""


@attention_vjp.edge(
    dims={"q_len": (1, 70), "kv_len": (2, 140)}, options={"is_causal": False, "window": None}, given=("alibi_slopes",)
)
def one_huge_slope_vjp(arrays, rng, options):
    """Weights of 1 and of 0 in one head, and those of other heads as they are."""
    arrays["alibi_slopes"][rng.integers(arrays["alibi_slopes"].shape[0])] = rng.choice([1e4, 1e9])


@attention_vjp.edge(
    dims={"group": (2, 6), "kv_heads": (2, 3), "q_len": (1, 20), "kv_len": (20, 40)}, smallest_tiles=True, **ALIBI
)
def slopes_of_grouped_heads_vjp(arrays, rng, options):
    """d_k and d_v sum over query heads, of which each has a slope of its own."""
    arrays["alibi_slopes"][...] = 1.0 / np.arange(1, arrays["alibi_slopes"].shape[0] + 1)


@attention_vjp.edge(dims={"q_len": (1, 40), "kv_len": (1, 60)}, given=("alibi_slopes",))
def odd_slopes_vjp(arrays, rng, options):
    """NaN and infinite slopes reach the keys of their head."""
    arrays["alibi_slopes"][some(rng, arrays["alibi_slopes"].shape[0])] = rng.choice([np.nan, inf])


@attention_vjp.edge(
    dims={"q_len": (1, 40), "kv_len": (1, 60)},
    options={"is_causal": False, "window": None, "q_start": 2**25 + 77, "kv_start": 5},
    **ALIBI,
)
def slopes_of_far_keys_vjp(arrays, rng, options):
    """Scores and lse near -3e4, of distances that float32 does not hold one by one."""
    arrays["alibi_slopes"][...] = 1e-3


@attention_vjp.edge(
    dims={"batch": (2, 3), "q_len": (20, 40), "kv_len": (20, 40)},
    options={"is_causal": False, "window": None, "q_start": 10, "kv_start": 20, "softcap": 2.0},
    given=("alibi_slopes", "bias"),
    smallest_tiles=True,
)
def slopes_beside_a_bias(arrays, rng, options):
    """The softcap's slope is of scores before those of distances, and d_bias has all of them."""
    arrays["alibi_slopes"][...] = 0.25


# --- as people run it ---

attention_vjp.edges.update(
    (plant.__name__, attention.edges[plant.__name__])
    for plant in (causal_with_odd_heads_and_one_key_beyond, two_causal_queries, causal_heads_of_128)
)
