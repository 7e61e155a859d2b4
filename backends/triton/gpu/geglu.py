"""The gated product of a feed-forward layer with gelu, element by element over any strided views.

    y = g P(g) u        P(g) = (1 + erf(g / sqrt 2)) / 2, or s(t) with t = 2 sqrt(2 / pi) (g + 0.044715 g^3)

A program owns a tile as in swiglu. The tanh form is a sigmoid, whose exp takes -|t| alone, and is as exact where it is
small as anywhere, which 1 + tanh is not.

Sources: Shazeer, "GLU variants improve transformer" (2020), equation 5; Hendrycks and Gimpel, "Gaussian error linear
units" (2016).

Gradients of the gated product with gelu, element by element over any strided views.

    d_g = d_y u D(g)        d_u = d_y g P(g)        D(g) = P + g exp(-g^2 / 2) / sqrt(2 pi)

or of the tanh form D(g) = s (1 + g t' q), q = 1 - s and g t' = 2 sqrt(2 / pi) g (1 + 3 0.044715 g^2). The slope is
taken of a gate that is kept within 40: beyond it is 1 or 0, and the cube would make inf 0 of it. A program owns a tile
as in swiglu.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import RowsConfig
from portakern.backends.triton.gpu.swiglu import (
    fit,
    gated,
    gated_vjp,
    gradients,
    key,
    open_share,
    product,
    supports,
)
from portakern.backends.triton.lib.activations import C, K, erf_form, of_erf_form, of_tanh_form

if TYPE_CHECKING:
    from portakern.core.call import Call


@triton.jit
def tanh_form(g):
    """s(t) of a gate g."""
    return open_share(K * g * (1.0 + C * g * g))


@triton.jit
def geglu_kernel(gate, up, y, extents, gate_strides, up_strides, y_strides, tanh: tl.constexpr, tile: tl.constexpr):
    if tanh:
        gated(gate, up, y, extents, gate_strides, up_strides, y_strides, tanh_form, tile)
    else:
        gated(gate, up, y, extents, gate_strides, up_strides, y_strides, erf_form, tile)


@BACKEND.implements("geglu", key=key, fit=fit, supports=supports, config=RowsConfig)
def geglu(call: Call, config: RowsConfig) -> tuple[Any, ...]:
    return (product(geglu_kernel, call, config, tanh=call.options["approximate"] == "tanh"),)


@triton.jit
def geglu_vjp_kernel(
    gate, up, d_y, d_gate, d_up, extents, gate_strides, up_strides, d_y_strides, out_strides, tanh: tl.constexpr,
    tile: tl.constexpr,
):  # fmt: skip
    if tanh:
        gated_vjp(gate, up, d_y, d_gate, d_up, extents, gate_strides, up_strides, d_y_strides, out_strides,
                  of_tanh_form, tile)  # fmt: skip
    else:
        gated_vjp(gate, up, d_y, d_gate, d_up, extents, gate_strides, up_strides, d_y_strides, out_strides,
                  of_erf_form, tile)  # fmt: skip


@BACKEND.implements("geglu_vjp", key=key, fit=fit, supports=supports, config=RowsConfig, overwrites=True)
def geglu_vjp(call: Call, config: RowsConfig) -> tuple[Any, ...]:
    return gradients(geglu_vjp_kernel, call, config, tanh=call.options["approximate"] == "tanh")
