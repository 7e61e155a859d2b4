"""Gradients of the gated product of a feed-forward layer on TPUs, element by element.

    d_g = d_y u s (1 + g q)        d_u = d_y g s        s = 1 / (1 + exp(-g))        q = 1 / (1 + exp(g))

gate, up, d_y, d_gate, d_up: (*batch), in blocks as swiglu has them.

Source: the derivatives of the formula of swiglu.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.common import Refs
from portakern.backends.pallas.tpu.swiglu import element_by_element, key, open_and_shut, refused
from portakern.core.call import Call


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    return refused(call, tiling, streamed=5, computed=4)


def kernel(ref: Refs) -> None:
    g, d_y = ref.gate[...].astype(jnp.float32), ref.d_y[...].astype(jnp.float32)
    s, q = open_and_shut(g)
    if "d_gate" in ref:
        ref.d_gate[...] = (d_y * ref.up[...].astype(jnp.float32) * (s * (1.0 + g * q))).astype(ref.d_gate.dtype)
    if "d_up" in ref:
        ref.d_up[...] = (d_y * (g * s)).astype(ref.d_up.dtype)


@BACKEND.implements("swiglu_vjp", key=key, supports=supports)
def swiglu_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array | None, ...]:
    inputs = ("gate", "up", "d_y") if "d_gate" in call.wants else ("gate", "d_y")
    found = element_by_element(call, tiling, kernel, inputs, call.wants, flops=11)
    return found.get("d_gate"), found.get("d_up")
