"""Which pairs of a query and a key are seen, and how a score is made of them."""

from __future__ import annotations

from dataclasses import replace
from math import copysign, sqrt
from typing import TYPE_CHECKING

import numpy as np

from portakern.spec.tolerance import TF32_END, Units, units

if TYPE_CHECKING:
    from portakern.core.call import Call


def units_of(call: Call) -> Units:
    """The units of a call. Products of float32 may be three of tf32 in "ieee" too, whose range is tf32's."""
    return replace(units(call), end=TF32_END) if call.dtype == "float32" else units(call)


def allowed_pairs(call: Call) -> float:
    """Number of (query, key) pairs of one head that the causal mask, the window and the segments allow; of batch
    entries whose segments differ, the mean.

    Segments count where the call has their ids as NumPy arrays, as a benchmark has; of other calls their ids are not
    read. A bias is data and does not count.
    """
    q_len, kv_len = call.dims["q_len"], call.dims["kv_len"]
    left, right = call.options["window"] or (None, None)
    if call.options["is_causal"]:
        right = 0 if right is None else min(right, 0)
    place = np.arange(kv_len - q_len, kv_len)
    lo = np.zeros_like(place) if left is None else np.maximum(place - left, 0)
    hi = np.full_like(place, kv_len) if right is None else np.minimum(place + right + 1, kv_len)
    hi = np.maximum(hi, lo)
    ids = call.arrays["q_segment_ids"], call.arrays["kv_segment_ids"]
    if not all(isinstance(x, np.ndarray) for x in ids) or not call.dims["batch"]:
        return float((hi - lo).sum())
    return sum(_pairs_of_segments(q, k, lo, hi) for q, k in zip(*ids, strict=True)) / call.dims["batch"]


def _pairs_of_segments(q_ids: np.ndarray, kv_ids: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> int:
    """How many keys in the [lo, hi) of each query have its segment."""
    total = 0
    for segment in np.intersect1d(q_ids, kv_ids):
        queries, keys = np.flatnonzero(q_ids == segment), np.flatnonzero(kv_ids == segment)
        total += int((np.searchsorted(keys, hi[queries]) - np.searchsorted(keys, lo[queries])).sum())
    return total


def allowed(call: Call, b: int) -> np.ndarray:
    """(q_len, kv_len): may query i of batch b see key j?

    Positions are aligned at the bottom right: the last query stands at the last key.
    """
    q_len, kv_len = call.dims["q_len"], call.dims["kv_len"]
    # how far the key lies beyond the query's own position
    ahead = np.arange(kv_len) - np.arange(kv_len - q_len, kv_len)[:, None]
    left, right = call.options["window"] or (None, None)
    mask = np.ones((q_len, kv_len), bool)
    if call.options["is_causal"]:
        mask &= ahead <= 0
    if left is not None:
        mask &= ahead >= -left
    if right is not None:
        mask &= ahead <= right
    if call.arrays["q_segment_ids"] is not None:
        mask &= call.arrays["q_segment_ids"][b][:, None] == call.arrays["kv_segment_ids"][b]
    return mask


def far_from(call: Call) -> float:
    """The |lse| from which on a kernel for gradients needs lse_low, and a minimum that keeps weights at most 1.

    Below 512 half a unit in the last place of lse is 2^-16, and rounding hardly moves a score. Under a softcap of 1e5
    or more it does, since the tanh errs by a share of the softcap: then the number is negative, so that it holds for
    every query.
    """
    return -1.0 if (call.options["softcap"] or 0.0) >= 1e5 else 512.0


def scale_of(call: Call) -> float:
    """The scale that None stands for."""
    return 1 / sqrt(call.dims["d"]) if call.options["scale"] is None else call.options["scale"]


def head_of_bias(call: Call, b: int, h: int) -> np.ndarray:
    """(q_len, kv_len) of bias, or (1, kv_len) where it is the same for all queries."""
    bias = call.arrays["bias"]
    return bias[b % bias.shape[0], h % bias.shape[1]]


def over_cap(scale: float, softcap: float) -> float:
    """scale / softcap, or the most that float32 holds: an infinite factor would make NaN of a dot of 0. Where they
    differ tanh is 1 of every dot that does not flush."""
    return copysign(min(abs(scale / softcap), float(np.finfo(np.float32).max)), scale)


def score_unit(call: Call) -> tuple[float | None, float]:
    """In which unit a kernel keeps its scores.

    Returns:
      What dots are multiplied by before anything else, None for nothing; and the positive factor that takes scores
      from there to natural units.

    A kernel that keeps scores in the unit in which they arise, and scales the difference s - m to the row's maximum m
    instead of the score s, never rounds s two ways: m is one of the s, so no weight exceeds 1 and one of them is 1.
    Scaled first, a product may be fused into the difference and not into m, and an ulp of a score of 1e10 is 1024.
    ``exponents`` (specs/_exponents.py) has a way to fuse it all the same.

    Gradients keep scores in the same unit, and lse in it, so that a score is the number that it was in the forward
    pass.
    """
    scale, softcap = call.options["scale"], call.options["softcap"]
    scale = call.dims["d"] ** -0.5 if scale is None else scale
    biased = call.arrays["bias"] is not None
    if softcap is not None:
        return over_cap(scale, softcap), 1.0 if biased else softcap
    if biased or scale == 0.0:
        return scale, 1.0
    return (None if scale > 0 else -1.0), abs(scale)
