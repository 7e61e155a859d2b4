"""Gradients of the gated product of a feed-forward layer, element by element over any strided views.

    d_g = d_y u s (1 + g q)        d_u = d_y g s        s = 1 / (1 + exp(-g))        q = 1 / (1 + exp(g))

A program owns a tile as in swiglu.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.gpu.swiglu import KNOBS, fit, key, own_elements, place, share, supports
from portakern.backends.triton.launch import launch
from portakern.backends.triton.layout import result_like
from portakern.backends.triton.lib.activations import of_silu

if TYPE_CHECKING:
    from portakern.core.call import Call


@triton.jit
def gated_vjp(
    gate, up, d_y, d_gate, d_up, extents, gate_strides, up_strides, d_y_strides, out_strides, opening: tl.constexpr,
    tile: tl.constexpr,
):  # fmt: skip
    """Either result may be None; up is None where d_up alone is wanted. ``opening`` of a gate g gives the share of it
    that is open, and the slope of their product."""
    row, col, ok = own_elements(extents, tile)
    g = tl.load(place(gate, row, col, gate_strides, tile), mask=ok, other=0.0)
    d = tl.load(place(d_y, row, col, d_y_strides, tile), mask=ok, other=0.0)
    g, d = g.to(tile.acc_dtype), d.to(tile.acc_dtype)
    s, slope = opening(g)
    if d_gate is not None:
        u = tl.load(place(up, row, col, up_strides, tile), mask=ok, other=0.0)
        d_gate_at = place(d_gate, row, col, out_strides, tile)
        tl.store(d_gate_at, (d * u.to(tile.acc_dtype) * slope).to(d_gate.dtype.element_ty), mask=ok)
    if d_up is not None:
        d_up_at = place(d_up, row, col, out_strides, tile)
        tl.store(d_up_at, (d * (g * s)).to(d_up.dtype.element_ty), mask=ok)


@triton.jit
def swiglu_vjp_kernel(
    gate, up, d_y, d_gate, d_up, extents, gate_strides, up_strides, d_y_strides, out_strides, tile: tl.constexpr
):  # fmt: skip
    gated_vjp(gate, up, d_y, d_gate, d_up, extents, gate_strides, up_strides, d_y_strides, out_strides, of_silu, tile)


def gradients(kernel: Any, call: Call, tiling: Mapping[str, int], **forms: Any) -> tuple[Any, ...]:
    """What a kernel like swiglu_vjp's, which may have several ``forms``, makes of the call's arrays.

    Without fusion: the compiler would contract a product into a sum where nothing else reads the product, and whether
    d_u does depends on what is wanted; the bits of d_g must not.
    """
    gate, up, d_y = (call.arrays[name] for name in ("gate", "up", "d_y"))
    d_gate, d_up = (result_like(gate, call, name) if name in call.wants else None for name in ("d_gate", "d_up"))
    (gate, up, d_y), tiles = share(call, tiling, gate, up, d_y)
    launch(kernel, tiles.programs, call, gate, None if d_gate is None else up, d_y, d_gate, d_up, tiles.extents,
           *tiles.strides, **forms, tile=tiles.tile, num_warps=tiling["num_warps"],
           enable_fp_fusion=False)  # fmt: skip
    return d_gate, d_up


@BACKEND.implements("swiglu_vjp", key=key, fit=fit, supports=supports, knobs=KNOBS, overwrites=True)
def swiglu_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    return gradients(swiglu_vjp_kernel, call, tiling)
