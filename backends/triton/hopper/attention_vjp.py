"""Gradients of attention for Hopper's copy engine and asynchronous matrix unit, in 16 bits: see ``_flash_gradients``.

What decides whether this variant serves a call is what its kernel is compiled for: dtype, head dimensions, and whether
there is a bias or segments; lengths and batches do not. Gluon is compiled alone: nothing of this runs in the
interpreter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from portakern.backends.triton import BACKEND
from portakern.backends.triton.hopper._flash_gradients import attention_vjp_gradients_kernel
from portakern.backends.triton.launch import GLUON, cdiv, launch, torch_dtype
from portakern.backends.triton.layout import fresh
from portakern.backends.triton.lib import attention_vjp as shared
from portakern.backends.triton.lib.attention import key, window_of
from portakern.backends.triton.lib.attention_vjp_gluon import (
    DRAWN,
    fit,
    in_parts,
    lines_of,
    plans,
    scores_of,
    supports,
)
from portakern.backends.triton.lib.gluon import Softmax
from portakern.backends.triton.lib.tma import QUERIES, REGISTERS, movable, processors, tiled
from portakern.spec import Count
from portakern.specs.attention import scale_of

if TYPE_CHECKING:
    from portakern.core.call import Call

KNOBS = {
    **shared.KNOBS,
    "consumers": Count(2, 3),
    "dq_consumers": Count(2, 3),
    "dq_stages": Count(1, 8),
    "ahead": Count(0, 1),
}


@BACKEND.implements("attention_vjp", key=key, fit=fit, supports=supports, knobs=KNOBS, drawn=DRAWN,
                    compiled_alone=GLUON)  # fmt: skip
def attention_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    dims, options = call.dims, call.options
    q, k, v, d_o, o = (movable(call.arrays[n]) for n in ("q", "k", "v", "d_o", "o"))
    out = {
        name: fresh(shape, torch_dtype(dtype), q.device) if name in call.wants else None
        for name, (shape, dtype) in call.outputs.items()
    }
    scale, (scores, rate) = scale_of(call), scores_of(call)
    lines, low, flags = lines_of(call, o, d_o, rate)
    left, right = window_of(options["is_causal"], options["window"], dims["q_len"] + dims["kv_len"])
    for wants, plan in plans(call, tiling).items():
        first, second = (out.get(n) if n in wants else None for n in (("d_k", "d_v") if plan.by_key else ("d_q", "")))
        keys = (k, v), dims["kv_len"], dims["kv_heads"]
        queries = (q, d_o), dims["q_len"], dims["kv_heads"] * dims["group"]
        (home, home_len, heads), (guests, _, _) = (keys, queries) if plan.by_key else (queries, keys)
        window = (right, left) if plan.by_key else (left, right)
        tiles_home = cdiv(home_len, QUERIES * plan.consumers)
        tiles = tiles_home * heads * dims["batch"]
        programs = min(tiles, processors(q.device)) if window == (None, None) else tiles
        described = [tiled(x, rows, columns)
                     for arrays, rows in ((home, QUERIES), (guests, plan.block))
                     for x, columns in zip(arrays, (plan.block_d, plan.block_dv), strict=True)]  # fmt: skip
        sums = [None if x is None else tiled(x, QUERIES, columns)
                for x, columns in ((first, plan.block_d), (second, plan.block_dv))]  # fmt: skip
        launch(attention_vjp_gradients_kernel, programs, call, *described,
               in_parts(lines, plan.block) if plan.by_key else lines, low, flags, *sums,
               Softmax(scores, window, scale), dims["group"], plan=plan, num_warps=4,
               maxnreg=REGISTERS[plan.consumers][1])  # fmt: skip
    return tuple(out.values())
