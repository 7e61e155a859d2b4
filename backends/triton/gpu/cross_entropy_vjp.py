"""Gradient of the cross entropy of logits with integer labels, over the last axis of any strided view.

    d_x_j = d_loss [p_j (1 + 2 z lse) - (1 - e) [j = t] - e / n]        p = exp(min(x - lse - lse_low, 0))

lse and lse_low were saved, so that no element waits for another: a program owns a tile of ``block_rows`` rows by
``block_n``
elements of each, and what an ignored row holds counts nowhere. Long rows that lie one after another are one row. Where
rows lie side by side, logits are read along memory and the gradient is written along its own. e and z are known to the
compiler.

Source: the derivative of the formula of cross_entropy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from portakern.backends.triton import BACKEND
from portakern.backends.triton.copies import in_order
from portakern.backends.triton.gpu.softmax import key
from portakern.backends.triton.launch import cdiv, refuse_tile
from portakern.backends.triton.layout import result_like
from portakern.backends.triton.lib.columns import lead, side_by_side
from portakern.backends.triton.lib.cross_entropy_vjp import (
    gradient_into,
    tile_brackets,
    tile_turned,
)
from portakern.spec import Tile

if TYPE_CHECKING:
    from portakern.core.call import Call


def default_tiling(call: Call) -> dict[str, int]:
    x, axis = lead(call)
    return tile_turned(call) if side_by_side(x, axis) else tile_brackets(x.shape[axis], call.target.arch)


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    n, block_n = call.dims["n"], tiling["block_n"]
    return refuse_tile(call, tiling, call.arrays["labels"].numel() * (cdiv(n, block_n) + (n > block_n)))


@BACKEND.implements(
    "cross_entropy_vjp",
    key=key,
    tiling=default_tiling,
    supports=supports,
    knobs={"num_warps": Tile(1, 32)},
    overwrites=True,
)
def cross_entropy_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    x = call.arrays["logits"]
    labels, lse, d_loss = (in_order(call, call.arrays[name]) for name in ("labels", "lse", "d_loss"))
    low = None if call.arrays["lse_low"] is None else in_order(call, call.arrays["lse_low"])
    d_x = result_like(x, call, "d_logits")
    gradient_into(call, x, labels, (lse, low), d_loss, d_x, tiling, 0, call.dims["n"])
    return (d_x,)
