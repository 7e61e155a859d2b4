"""The gated product of a feed-forward layer with gelu, element by element over any strided views.

    y = g P(g) u        P(g) = (1 + erf(g / sqrt 2)) / 2, or s(t) with t = 2 sqrt(2 / pi) (g + 0.044715 g^3)

A program owns a tile as in swiglu. The tanh form is a sigmoid, whose exp takes -|t| alone, and is as exact where it is
small as anywhere, which 1 + tanh is not.

Sources: Shazeer, "GLU variants improve transformer" (2020), equation 5; Hendrycks and Gimpel, "Gaussian error linear
units" (2016).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.gpu.swiglu import KNOBS, fit, gated, key, open_share, product, supports
from portakern.backends.triton.lib.activations import C, K, erf_form

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


@BACKEND.implements("geglu", key=key, fit=fit, supports=supports, knobs=KNOBS)
def geglu(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    return (product(geglu_kernel, call, tiling, tanh=call.options["approximate"] == "tanh"),)
