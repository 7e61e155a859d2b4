"""Which pairs of a query and a key are seen, and how a score is made of them."""

from __future__ import annotations

from dataclasses import replace
from math import copysign, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from portakern.spec.tolerance import TF32_END, Units, units

if TYPE_CHECKING:
    from portakern.core.call import Call
    from portakern.spec import Spec


def units_of(call: Call) -> Units:
    """The units of a call. Products of float32 may be three of tf32 in "ieee" too, whose range is tf32's."""
    return replace(units(call), end=TF32_END) if call.dtype == "float32" else units(call)


def options_for(spec: Spec[Any], call: Call) -> dict[str, Any]:
    """The options of a call of ``spec`` that says what one of another op says: its own, and defaults for the others."""
    return {o.name: call.options.get(o.name, o.default) for o in spec.options}


def distances(call: Call) -> np.ndarray:
    """(q_len, kv_len): how far key j stands from query i, on either side."""
    places = np.arange(call.dims["q_len"], dtype=np.float64) + first_place(call)
    return np.abs(places[:, None] - np.arange(call.dims["kv_len"]))


def first_place(call: Call) -> int:
    """The key beside which query 0 stands, counted from the call's first key: it may lie before or behind them all.

    Without ``q_start`` positions are aligned at the bottom right: the last query stands at the last key.
    """
    start = call.options["q_start"]
    return call.dims["kv_len"] - call.dims["q_len"] if start is None else start - (call.options["kv_start"] or 0)


def sight(call: Call) -> tuple[int | None, int | None]:
    """The causal mask and the window as one window (left, right), and starts as its shift: query i sees the keys from
    i + kv_len - q_len - left to i + kv_len - q_len + right, None for all on that side.

    Of a part either number may be negative. They are at most as large as lengths make a difference, so that 32 bits
    hold them.
    """
    left, right = call.options["window"] or (None, None)
    if call.options["is_causal"]:
        right = 0 if right is None else min(right, 0)
    q_len, kv_len = call.dims["q_len"], call.dims["kv_len"]
    moved, far = first_place(call) - (kv_len - q_len), q_len + kv_len
    return (
        None if left is None else max(-far, min(left - moved, far)),
        None if right is None else max(-far, min(right + moved, far)),
    )


def allowed_pairs(call: Call) -> float:
    """Number of (query, key) pairs of one head that the causal mask, the window and the segments allow; of batch
    entries whose segments differ, the mean.

    Segments count where the call has their ids as NumPy arrays, as a benchmark has; of other calls their ids are not
    read. A bias is data and does not count.
    """
    q_len, kv_len, (left, right) = call.dims["q_len"], call.dims["kv_len"], sight(call)
    place = np.arange(kv_len - q_len, kv_len)
    lo = np.zeros_like(place) if left is None else np.maximum(place - left, 0)
    hi = np.full_like(place, kv_len) if right is None else np.minimum(place + right + 1, kv_len)
    lo, hi = np.minimum(lo, kv_len), np.maximum(hi, np.minimum(lo, kv_len))
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
    """(q_len, kv_len): may query i of batch b see key j?"""
    # how far the key lies beyond the query's own position
    ahead = np.arange(call.dims["kv_len"]) - (np.arange(call.dims["q_len"]) + first_place(call))[:, None]
    left, right = call.options["window"] or (None, None)
    mask = np.ones(ahead.shape, bool)
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
