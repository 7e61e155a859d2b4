"""Softmax attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from portakern.backends.mojo import BACKEND
from portakern.backends.mojo.configs import AttentionConfig
from portakern.backends.mojo.launch import MojoFunction, accumulator, in_parts, layout, new, wide
from portakern.backends.mojo.products import packed
from portakern.core.call import Call
from portakern.specs.attention import first_place, over_cap, scale_of

KERNEL = MojoFunction("attention")


def tiling(call: Call) -> Mapping[str, int]:
    return {"block_q": 64, "block_kv": 256}


def window(call: Call) -> tuple[int, int]:
    """How many keys a query sees left and right of its own place, at most all of them."""
    left, right = call.options["window"] or (None, None)
    right = 0 if call.options["is_causal"] else right
    far = call.dims["q_len"] + call.dims["kv_len"] + abs(first_place(call))
    return tuple(far if side is None else min(side, far) for side in (left, right))


def scores(call: Call) -> tuple[Any, ...]:
    """What makes a score of a dot: bias, slopes, sinks; scale, softcap."""
    (batch, q_len, heads, _), cap = call.arrays["q"].shape, call.options["softcap"]
    bias, slopes, sinks = (call.arrays[name] for name in ("bias", "alibi_slopes", "sinks"))
    if bias is not None:
        bias = bias if call.dtype != "float64" else wide(bias, call.dtype)
        bias = layout(np.broadcast_to(bias, (batch, heads, q_len, call.dims["kv_len"])))
    scale = scale_of(call) if cap is None else over_cap(scale_of(call), cap)
    return bias, wide(slopes, call.dtype), wide(sinks, call.dtype), scale, cap or 0.0


@BACKEND.implements("attention", tiling=tiling, config=AttentionConfig, same_bits=True)
def attention(call: Call, config: AttentionConfig) -> tuple[np.ndarray | None, ...]:
    q, k, v = (call.arrays[name] for name in ("q", "k", "v"))
    (batch, q_len, heads, d), (_, kv_len, _, dv) = q.shape, v.shape
    left = packed(q.transpose(0, 2, 1, 3), q_len, call.dtype, right=False)
    keys = packed(k.transpose(0, 2, 1, 3), kv_len, call.dtype, right=True)
    values = packed(v.transpose(0, 2, 3, 1), dv, call.dtype, right=True)
    rows, columns = left.panels.shape[-1], keys.panels.shape[-1]
    block_q = -(-min(config.block_q, q_len) // rows) * rows
    width, dtype = -(-kv_len // columns) * columns, accumulator(call.dtype)
    o = new((batch, q_len, heads, dv), call.outputs["o"][1])
    lse, low = (np.empty((batch, heads, q_len), dtype) if n in call.wants else None for n in ("lse", "lse_low"))
    segments = (call.arrays[name] for name in ("q_segment_ids", "kv_segment_ids"))
    ids = [None if s is None else np.ascontiguousarray(s, np.int64) for s in segments]
    bias, slopes, sinks, scale, cap = scores(call)
    to = layout(o.transpose(0, 2, 1, 3))

    def run(first: int, end: int) -> None:
        space = np.empty(block_q * (width + -(-dv // columns) * columns + 1) + width, dtype)
        KERNEL(
            left.panels, keys.panels, values.panels, to, lse, low, bias, slopes, sinks, *ids, float(scale), float(cap),
            first_place(call), *window(call), int(call.dtype == "float64"), heads, call.dims["group"], q_len, kv_len, d,
            dv, block_q, config.block_kv, space, first, end,
        )  # fmt: skip

    blocks = batch * heads * -(-q_len // block_q)
    in_parts(run, blocks, batch * heads * q_len * kv_len * (d + dv) / 8)
    return o, lse, low
