"""Gradients of the gated product with gelu on TPUs, element by element.

    d_g = d_y u D(g)        d_u = d_y g P(g)        D(g) = P + g exp(-g^2 / 2) / sqrt(2 pi)

or of the tanh form D(g) = s (1 + g t' q), q = 1 - s and g t' = 2 sqrt(2 / pi) g (1 + 3 0.044715 g^2). The slope is
taken of a gate that is kept within 40: beyond it is 1 or 0, and the cube would make inf 0 of it.

gate, up, d_y, d_gate, d_up: (*batch), in blocks as swiglu has them. Source: the derivatives of the formula of geglu.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import pi, sqrt
from typing import Any

import jax
import jax.numpy as jnp

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.common import Refs
from portakern.backends.pallas.tpu.geglu import C, K, share
from portakern.backends.pallas.tpu.swiglu import element_by_element, key, open_and_shut
from portakern.backends.pallas.tpu.swiglu_vjp import supports
from portakern.core.call import Call

FAR = 40.0


def opening(g: Any, approximate: str) -> tuple[Any, Any]:
    """The share of a gate that is open, and the slope of their product."""
    g = jnp.where(g > FAR, FAR, jnp.where(g < -FAR, -FAR, g))
    if approximate == "tanh":
        s, q = open_and_shut(K * g * (1.0 + C * g * g))
        return s, s * (1.0 + K * g * (1.0 + 3.0 * C * g * g) * q)
    p = share(g, approximate)
    return p, p + g * (jnp.exp(-0.5 * g * g) * (1 / sqrt(2 * pi)))


def kernel(ref: Refs, *, approximate: str) -> None:
    g, d_y = ref.gate[...].astype(jnp.float32), ref.d_y[...].astype(jnp.float32)
    p, slope = opening(g, approximate)
    if "d_gate" in ref:
        ref.d_gate[...] = (d_y * ref.up[...].astype(jnp.float32) * slope).astype(ref.d_gate.dtype)
    if "d_up" in ref:
        ref.d_up[...] = (d_y * (g * p)).astype(ref.d_up.dtype)


@BACKEND.implements("geglu_vjp", key=key, supports=supports)
def geglu_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array | None, ...]:
    inputs = ("gate", "up", "d_y") if "d_gate" in call.wants else ("gate", "d_y")
    of = partial(kernel, approximate=call.options["approximate"])
    found = element_by_element(call, tiling, of, inputs, call.wants, flops=18)
    return found.get("d_gate"), found.get("d_up")
