"""Attention's corners and laws: what the checker visits by name (see :class:`portakern.spec.Edge`)."""

from __future__ import annotations

from math import inf, log
from typing import TYPE_CHECKING

import numpy as np

from portakern.spec.tolerance import format_of
from portakern.specs.attention import allowed, attention

if TYPE_CHECKING:
    from portakern.core.call import Call


@attention.locate
def mask_region(call: Call, output: str, index: tuple[int, ...]) -> str:
    """How many keys the element's row sees, and between which."""
    b, i = index[0], index[1] if output == "o" else index[2]
    keys = np.flatnonzero(allowed(call, b)[i])
    span = f", keys {keys[0]} to {keys[-1]}" if keys.size else ""
    return f"query {i} of {call.dims['q_len']} sees {keys.size} of {call.dims['kv_len']} keys{span}"


SEGMENTS = ("q_segment_ids", "kv_segment_ids")


def _some(rng: np.random.Generator, n: int) -> np.ndarray:
    """A few positions below n, at least one."""
    return rng.choice(n, max(1, n // 4), replace=False)


@attention.edge(given=("bias",))
def rows_that_bias_masks(arrays, rng, options):
    """A row whose bias is all -inf is zeros with lse = -inf, beside rows that are not."""
    bias = arrays["bias"]
    bias[:, :, _some(rng, bias.shape[2])] = -inf


@attention.edge(
    dims={"q_len": (1, 40), "kv_len": (128, 128)}, given=SEGMENTS, options={"is_causal": False, "window": None}
)
def rows_that_segments_mask(arrays, rng, options):
    """A query of a segment that no key has is zeros with lse = -inf, also where no other mask touches a tile of keys."""
    q_ids = arrays["q_segment_ids"]
    q_ids[:, _some(rng, q_ids.shape[1])] = 9


@attention.edge(dims={"q_len": (20, 80), "kv_len": (1, 19)}, options={"is_causal": True}, absent=SEGMENTS)
def more_queries_than_keys(arrays, rng, options):
    """Causal masks are aligned at the bottom right: the first queries see nothing."""


@attention.edge(dims={"q_len": (20, 80), "kv_len": (1, 140)}, options={"window": (2, 0), "is_causal": True})
def narrow_windows(arrays, rng, options):
    """A window of three keys: whole tiles are skipped, and rows may see none."""


@attention.edge(dims={"q_len": (1, 70), "kv_len": (2, 140)}, given=SEGMENTS)
def nan_in_masked_keys(arrays, rng, options):
    """NaN in k at a masked pair never leaks."""
    hidden = _some(rng, arrays["k"].shape[1])
    arrays["kv_segment_ids"][:, hidden] = 9
    arrays["k"][:, hidden] = np.nan


@attention.edge(dims={"q_len": (2, 140), "kv_len": (2, 140)}, options={"is_causal": True}, absent=SEGMENTS)
def nan_in_the_last_key(arrays, rng, options):
    """Under a causal mask only the last query sees the last key, so only its row is NaN."""
    arrays["k"][:, -1] = np.nan


@attention.edge(dims={"q_len": (1, 70), "kv_len": (1, 140)})
def nan_in_queries(arrays, rng, options):
    """NaN in q reaches its row and no other."""
    q = arrays["q"]
    q[:, _some(rng, q.shape[1]), :, 0] = np.nan


@attention.edge(dims={"q_len": (1, 70), "kv_len": (1, 140)})
def nan_and_inf_in_values(arrays, rng, options):
    """NaN and inf in v at an existing key reach the rows that see it."""
    v = arrays["v"]
    v[:, _some(rng, v.shape[1]), :, 0] = rng.choice([np.nan, inf, -inf])


@attention.edge(dims={"q_len": (1, 70), "kv_len": (1, 140)}, options={"softcap": None})
def infinite_logits(arrays, rng, options):
    """A +inf logit makes the whole row NaN, o and lse."""
    q, k = arrays["q"], arrays["k"]
    q[:, _some(rng, q.shape[1]), :, 0] = inf
    k[..., 0] = 1 + np.abs(k[..., 0])


@attention.edge(
    dims={"q_len": (1, 70), "kv_len": (2, 140)},
    given=SEGMENTS,
    options={"scale": 1.0, "softcap": None},
    absent=("bias",),
)
def logits_of_minus_1e5(arrays, rng, options):
    """Logits near -1e5 beside fully masked rows stay exact: no finite mask value is that low."""
    arrays["q"][...], arrays["k"][..., 1:] = 0, 0
    arrays["q"][..., 0], arrays["k"][..., 0] = 400, -250 + rng.integers(0, 2, arrays["k"].shape[:-1])
    arrays["q_segment_ids"][:, _some(rng, arrays["q"].shape[1])] = 9


@attention.edge(
    dims={"q_len": (1, 40), "kv_len": (33, 140), "d": (17, 40), "dv": (1, 15)},
    options={"is_causal": False, "window": None},
)
def values_shorter_than_keys(arrays, rng, options):
    """Value heads that fill a narrower tile than query heads, over many keys: an assembler has formed wrong addresses for such pairs of tiles."""


@attention.edge(dims={"kv_len": (2, 140)}, given=("bias",))
def bias_of_finfo_min(arrays, rng, options):
    """Rows of a bias of finfo.min give a convex average or zeros, never NaN."""
    bias = arrays["bias"]
    bias[...] = np.where(rng.random(bias.shape) < 0.5, 0, -6.5e4)
    bias[:, :, _some(rng, bias.shape[2])] = -3.3e38 if rng.random() < 0.5 else -6.5e4


@attention.edge(
    dims={"kv_len": (2, 140)}, given=SEGMENTS, options={"is_causal": False, "window": None}, absent=("bias",)
)
def one_visible_key(arrays, rng, options):
    """A row that sees one key returns its value, whatever the score."""
    arrays["kv_segment_ids"][...] = 9
    arrays["q_segment_ids"][...] = 3
    arrays["kv_segment_ids"][:, rng.integers(arrays["kv_segment_ids"].shape[1])] = 3


@attention.edge(dims={"group": (3, 8), "kv_heads": (2, 4), "d": (8, 48), "dv": (8, 48)})
def many_query_heads_a_key_head(arrays, rng, options):
    """Query head h reads key head h // group, with head dimensions that no power of two matches."""


@attention.edge(
    dims={"q_len": (1, 40), "kv_len": (129, 140)},
    options={"is_causal": False, "window": None},
    absent=("bias", *SEGMENTS),
)
def values_at_tile_borders(arrays, rng, options):
    """All weights are equal and only the keys beside the borders of tiles hold a value, so that one that is dropped or repeated shows; the last tile is ragged."""
    n = arrays["k"].shape[1]
    arrays["k"][...], arrays["v"][...] = 0, 0
    arrays["v"][:, [0, 15, 16, 31, 32, 63, 64, 127, 128, n - 1]] = 1


@attention.edge(dims={"q_len": (32, 32), "kv_len": (46, 46)}, options={"is_causal": True, "window": None, "return_lse": False}, absent=("bias", *SEGMENTS),
                smallest_tiles=True)  # fmt: skip
def causal_edge_at_a_tile_border(arrays, rng, options):
    """The first query of a tile of 16 sees all but the last key of another."""


@attention.edge(dims={"q_len": (48, 48), "kv_len": (48, 48)}, options={"is_causal": False, "window": (30, None), "return_lse": False}, absent=("bias", *SEGMENTS),
                smallest_tiles=True)  # fmt: skip
def windows_open_to_the_right(arrays, rng, options):
    """A left edge alone: the last query of a tile of 16 sees all but the first key of another."""


@attention.edge(dims={"q_len": (80, 80), "kv_len": (83, 83)}, options={"is_causal": False, "window": (20, 20), "return_lse": False}, absent=("bias", *SEGMENTS),
                smallest_tiles=True)  # fmt: skip
def windows_of_several_tiles(arrays, rng, options):
    """Both edges, with whole tiles of 16 between them: 16 queries see 56 keys, and those lie in 5 tiles, one more than 56 take."""


@attention.edge(dims={"q_len": (256, 256), "kv_len": (256, 256)}, options={"is_causal": False, "window": (126, 126), "return_lse": True}, absent=("bias", *SEGMENTS),
                smallest_tiles=True)  # fmt: skip
def window_corners_at_tile_corners(arrays, rng, options):
    """For tiles of any power of two up to 128: a tile's last query sees all but the first key of some tile, and its first query all but the last of another."""


@attention.edge(dims={"q_len": (1, 20), "kv_len": (100, 140)}, options={"scale": 1.0, "softcap": None, "is_causal": False, "window": None}, absent=("bias",),
                smallest_tiles=True)  # fmt: skip
def slowly_rising_scores(arrays, rng, options):
    """Every tile raises the maximum by less than a hundredth, so that a rescaling that is left out changes little."""
    arrays["q"][...], arrays["k"][...] = 0, 0
    arrays["q"][..., 0] = 1
    arrays["k"][..., 0] = np.linspace(0, 0.05, arrays["k"].shape[1])[:, None]


@attention.edge(dims={"q_len": (40, 70), "kv_len": (1, 8)}, absent=("bias", *SEGMENTS),
                options={"scale": 1.0, "softcap": 30.0, "is_causal": False, "window": None, "return_lse": True})  # fmt: skip
def steep_softcap(arrays, rng, options):
    """Every query scores all its keys alike, from 0 to 4 times the softcap: its lse is the softcap times tanh of that, and shows where an approximation errs."""
    arrays["q"][...], arrays["k"][...] = 0, 0
    arrays["q"][..., 0] = 30 * np.linspace(0, 4, arrays["q"].shape[1])[:, None]
    arrays["k"][..., 0] = 1


@attention.edge(dims={"q_len": (1, 70), "kv_len": (2, 140)}, given=("bias", *SEGMENTS))
def nan_bias_at_masked_pairs(arrays, rng, options):
    """The mask selects last: what a masked pair's bias holds leaves no trace."""
    hidden = _some(rng, arrays["k"].shape[1])
    arrays["kv_segment_ids"][:, hidden] = 9
    arrays["bias"][..., hidden] = rng.choice([np.nan, inf])


@attention.law
def causal_prefix_ignores_the_future(run, draw):
    """What comes later changes no bit of an earlier row, on finite data."""
    n, d = draw.extent(20, 150), draw.extent(4, 40)
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
    q_len, kv_len, d = draw.extent(1, 70), draw.extent(1, 150), draw.extent(4, 40)
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
    q_len, kv_len, d = draw.extent(2, 150), draw.extent(1, 150), draw.extent(4, 40)
    q, k, v = draw.normal(1, q_len, 2, d), draw.normal(1, kv_len, 2, d), draw.normal(1, kv_len, 2, d)
    last = draw.extent(1, q_len)
    draw.same_bits(run(q[:, -last:], k, v), run(q, k, v)[:, -last:], "the last queries alone")


@attention.law
def equal_values_come_back(run, draw):
    """Values of 1 give 1, within one rounding of the weights: all of these but one lie just below the next number of v's dtype, where cutting them leans most."""
    q_len, kv_len, dtype, unit = draw.extent(1, 40), draw.extent(40, 150), draw.normal(1).dtype, format_of(draw.dtype).U
    q, k, v = (np.zeros((1, n, 1, 8), dtype) for n in (q_len, kv_len, kv_len))
    score = log(0.5 + 0.95 * unit)  # unit is the distance of neighbours here
    q[..., :2], v[...] = 1, 1
    k[:, 1:, :, 0] = score
    k[:, 1:, :, 1] = score - k[0, 1, 0, 0].astype(float)
    o = run(q, k, v, scale=1.0)
    near = np.abs(o.astype(float) - 1) <= 1.25 * max(unit, 2.0**-16)
    draw.same_bits(near, np.ones_like(near), "whether o is 1 (1: yes)")
