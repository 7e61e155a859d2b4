"""Corners of attention: calls that chance seldom draws, which the checker visits (:class:`portakern.spec.Edge`)."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import numpy as np

from portakern.specs.attention.contract import attention
from portakern.specs.attention.planting import (
    SEGMENTS,
    blind_queries,
    far_logits,
    hidden_keys,
    infinite_queries,
    nan_queries,
    odd_bias_of_hidden_keys,
    rows_masked_by_bias,
    rows_of_a_low_bias,
    segments,
    show_one_key,
    some,
)
from portakern.specs.attention.scores import allowed

if TYPE_CHECKING:
    from portakern.core.call import Call


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


@attention.edge(dims={"q_len": (20, 80), "kv_len": (1, 19)}, options={"is_causal": True}, absent=SEGMENTS)
def more_queries_than_keys(arrays, rng, options):
    """Causal masks are aligned at the bottom right: the first queries see nothing."""


@attention.edge(dims={"q_len": (20, 80), "kv_len": (1, 140)}, options={"window": (2, 0), "is_causal": True})
def narrow_windows(arrays, rng, options):
    """A window of three keys: whole tiles are skipped, and rows may see none."""


@attention.edge(dims={"q_len": (1, 70), "kv_len": (2, 140)}, given=SEGMENTS)
def nan_in_masked_keys(arrays, rng, options):
    """NaN in k at a masked pair never leaks."""
    hidden = hidden_keys(arrays, rng)
    arrays["k"][:, hidden] = np.nan


@attention.edge(dims={"q_len": (2, 140), "kv_len": (2, 140)}, options={"is_causal": True}, absent=SEGMENTS)
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
    options={"is_causal": True, "window": None, "return_lse": False},
    absent=("bias", *SEGMENTS),
    smallest_tiles=True,
)
def causal_edge_at_a_tile_border(arrays, rng, options):
    """The first query of a tile of 16 sees all but the last key of another."""


@attention.edge(
    dims={"q_len": (48, 48), "kv_len": (48, 48)},
    options={"is_causal": False, "window": (30, None), "return_lse": False},
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
    options={"is_causal": False, "window": (20, 20), "return_lse": False},
    absent=("bias", *SEGMENTS),
    smallest_tiles=True,
)
def windows_of_several_tiles(arrays, rng, options):
    """Both edges, with whole tiles of 16 between them.

    16 queries see 56 keys, and those lie in 5 tiles, one more than 56 take.
    """


@attention.edge(
    dims={"q_len": (256, 256), "kv_len": (256, 256)},
    options={"is_causal": False, "window": (126, 126), "return_lse": True},
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


# --- as people run it ---

LONE = {"absent": ("bias", *SEGMENTS)}


@attention.edge(
    dims={"q_len": (2, 5), "kv_len": (257, 257), "d": (65, 80)}, options={"is_causal": True, "window": None}, **LONE
)
def causal_with_odd_heads_and_one_key_beyond(arrays, rng, options):
    """Heads that end in a tile of 16, and a key in a tile of its own behind tiles of 128 and 256."""


@attention.edge(
    dims={"q_len": (2, 2), "kv_len": (2, 140)}, options={"is_causal": True, "window": None}, absent=SEGMENTS
)
def two_causal_queries(arrays, rng, options):
    """As few queries as there are masked ones: the first does not see the last key."""


@attention.edge(dims={"q_len": (1, 40), "kv_len": (130, 200), "d": (128, 128)}, options={"is_causal": True}, **LONE)
def causal_heads_of_128(arrays, rng, options):
    """The heads of most models, causal over more keys than a tile has."""


@attention.edge(dims={"q_len": (1, 1), "kv_len": (769, 1030)}, options={"is_causal": False, "window": None}, **LONE)
def decoding_over_many_keys(arrays, rng, options):
    """One query: a kernel splits the keys, and the last share is ragged."""


attention.values("q_segment_ids")(segments)
attention.values("kv_segment_ids")(segments)
