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
from portakern.backends.triton.gpu.swiglu import KNOBS, fit, key, share, supports
from portakern.backends.triton.launch import accumulator, launch
from portakern.backends.triton.layout import aligned, result_like, row_start
from portakern.backends.triton.lib.activations import of_silu
from portakern.backends.triton.lib.rows import tile_of

if TYPE_CHECKING:
    from portakern.core.call import Call


@triton.jit
def gated_vjp(gate, up, d_y, d_gate, d_up, rows, n, steps,
              gate_row, gate_n, up_row, up_n, d_y_row, d_y_n, out_row, out_n,
              opening: tl.constexpr, block_rows: tl.constexpr, block_n: tl.constexpr, acc_dtype: tl.constexpr,
              unit: tl.constexpr):  # fmt: skip
    """Either result may be None; up is None where d_up alone is wanted. ``opening`` of a gate g gives the share of it
    that is open, and the slope of their product."""
    n = aligned(n, unit)
    row, col = tile_of(steps, block_rows, block_n)
    ok = (row < rows)[:, None] & (col < n)
    g = tl.load(row_start(gate, row, 1, 0, gate_row, True, unit)[:, None] + col * gate_n, mask=ok, other=0.0)
    d = tl.load(row_start(d_y, row, 1, 0, d_y_row, True, unit)[:, None] + col * d_y_n, mask=ok, other=0.0)
    g, d = g.to(acc_dtype), d.to(acc_dtype)
    s, slope = opening(g)
    if d_gate is not None:
        u = tl.load(row_start(up, row, 1, 0, up_row, True, unit)[:, None] + col * up_n, mask=ok, other=0.0)
        d_gate_at = row_start(d_gate, row, 1, 0, out_row, True, unit)[:, None] + col * out_n
        tl.store(d_gate_at, (d * u.to(acc_dtype) * slope).to(d_gate.dtype.element_ty), mask=ok)
    if d_up is not None:
        d_up_at = row_start(d_up, row, 1, 0, out_row, True, unit)[:, None] + col * out_n
        tl.store(d_up_at, (d * (g * s)).to(d_up.dtype.element_ty), mask=ok)


@triton.jit
def swiglu_vjp_kernel(gate, up, d_y, d_gate, d_up, rows, n, steps,
                      gate_row, gate_n, up_row, up_n, d_y_row, d_y_n, out_row, out_n,
                      block_rows: tl.constexpr, block_n: tl.constexpr, acc_dtype: tl.constexpr,
                      unit: tl.constexpr):  # fmt: skip
    gated_vjp(gate, up, d_y, d_gate, d_up, rows, n, steps,
              gate_row, gate_n, up_row, up_n, d_y_row, d_y_n, out_row, out_n, of_silu,
              block_rows, block_n, acc_dtype, unit)  # fmt: skip


def gradients(kernel: Any, call: Call, tiling: Mapping[str, int], **forms: Any) -> tuple[Any, ...]:
    """What a kernel like swiglu_vjp's, which may have several ``forms``, makes of the call's arrays.

    Without fusion: the compiler would contract a product into a sum where nothing else reads the product, and whether
    d_u does depends on what is wanted; the bits of d_g must not.
    """
    gate, up, d_y = (call.arrays[name] for name in ("gate", "up", "d_y"))
    d_gate, d_up = (result_like(gate, call, name) if name in call.wants else None for name in ("d_gate", "d_up"))
    (gate, up, d_y), tiles = share(tiling, gate, up, d_y)
    launch(kernel, tiles.programs, call, gate, None if d_gate is None else up, d_y, d_gate, d_up,
           tiles.rows.height, tiles.n, tiles.steps, *tiles.strides, **forms, block_rows=tiles.block_rows,
           block_n=tiles.block_n, acc_dtype=accumulator(call.dtype), unit=tiles.rows.known(call.dtype)["unit"],
           num_warps=tiling["num_warps"], enable_fp_fusion=False)  # fmt: skip
    return d_gate, d_up


@BACKEND.implements("swiglu_vjp", key=key, fit=fit, supports=supports, knobs=KNOBS, overwrites=True)
def swiglu_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    return gradients(swiglu_vjp_kernel, call, tiling)
