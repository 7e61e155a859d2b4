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
def geglu_kernel(gate, up, y, rows, n, steps, gate_row, gate_n, up_row, up_n, y_row, y_n,
                 tanh: tl.constexpr, block_rows: tl.constexpr, block_n: tl.constexpr, acc_dtype: tl.constexpr,
                 unit: tl.constexpr):  # fmt: skip
    if tanh:
        gated(gate, up, y, rows, n, steps, gate_row, gate_n, up_row, up_n, y_row, y_n, tanh_form,
              block_rows, block_n, acc_dtype, unit)  # fmt: skip
    else:
        gated(gate, up, y, rows, n, steps, gate_row, gate_n, up_row, up_n, y_row, y_n, erf_form,
              block_rows, block_n, acc_dtype, unit)  # fmt: skip


@BACKEND.implements("geglu", key=key, fit=fit, supports=supports, knobs=KNOBS)
def geglu(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    return (product(geglu_kernel, call, tiling, tanh=call.options["approximate"] == "tanh"),)
