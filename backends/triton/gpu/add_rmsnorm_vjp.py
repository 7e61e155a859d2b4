"""Gradients of a residual added and the root mean square normalisation of the sum.

    d_x = d_residual_out + the d_x of rmsnorm_vjp at the sum, which is the gradient of both terms

Kernels, programs and partial sums are those of rmsnorm_vjp, whose d_x meets the other cotangent before it is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from portakern.backends.triton import BACKEND
from portakern.backends.triton.gpu.layernorm import key
from portakern.backends.triton.gpu.layernorm_vjp import KNOBS, default_tiling, supports
from portakern.backends.triton.gpu.rmsnorm_vjp import gradients

if TYPE_CHECKING:
    from portakern.core.call import Call


@BACKEND.implements("add_rmsnorm_vjp", key=key, tiling=default_tiling, supports=supports, knobs=KNOBS)
def add_rmsnorm_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    return gradients(call, tiling, call.arrays["residual_out"], call.arrays["d_residual_out"])
