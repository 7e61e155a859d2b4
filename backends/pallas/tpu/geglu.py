"""The gated product of a feed-forward layer with gelu on TPUs, and its gradients, element by element.

    y = g P(g) u        P(g) = (1 + erf(g / sqrt 2)) / 2, or s(t) with t = 2 sqrt(2 / pi) (g + 0.044715 g^3)
    d_g = d_y u D(g)        d_u = d_y g P(g)        D(g) = P + g exp(-g^2 / 2) / sqrt(2 pi)

or of the tanh form D(g) = s (1 + g t' q), q = 1 - s and g t' = 2 sqrt(2 / pi) g (1 + 3 0.044715 g^2). That form is a
sigmoid, as exact where it is small as anywhere. The slope is taken of a gate that is kept within 40: beyond it is 1 or
0, and the cube would make inf 0 of it. gate, up, y, d_y, d_gate, d_up: (*batch), in blocks as swiglu has them.

Sources: Shazeer, "GLU variants improve transformer" (2020), equation 5; Hendrycks and Gimpel, "Gaussian error linear
units" (2016).
"""

from __future__ import annotations

from functools import partial
from math import pi, sqrt
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import RowsConfig
from portakern.backends.pallas.lib.blocks import Refs
from portakern.backends.pallas.tpu.swiglu import element_by_element, key, open_and_shut, supports, supports_gradient
from portakern.core.call import Call

K, C = 2 * sqrt(2 / pi), 0.044715


def share(g: Any, approximate: str) -> Any:
    """The share of a gate that is open."""
    if approximate == "tanh":
        s, _ = open_and_shut(K * g * (1.0 + C * g * g))
        return s
    return 0.5 * (1.0 + lax.erf(g * sqrt(0.5)))


def kernel(ref: Refs, *, approximate: str) -> None:
    g = ref.gate[...].astype(jnp.float32)
    ref.y[...] = (g * share(g, approximate) * ref.up[...].astype(jnp.float32)).astype(ref.y.dtype)


@BACKEND.implements("geglu", key=key, supports=supports, config=RowsConfig)
def geglu(call: Call, config: RowsConfig) -> tuple[jax.Array]:
    of = partial(kernel, approximate=call.options["approximate"])
    return (element_by_element(call, config, of, ("gate", "up"), ("y",), flops=10)["y"],)


FAR = 40.0


def opening(g: Any, approximate: str) -> tuple[Any, Any]:
    """The share of a gate that is open, and the slope of their product."""
    g = jnp.where(g > FAR, FAR, jnp.where(g < -FAR, -FAR, g))
    if approximate == "tanh":
        s, q = open_and_shut(K * g * (1.0 + C * g * g))
        return s, s * (1.0 + K * g * (1.0 + 3.0 * C * g * g) * q)
    p = share(g, approximate)
    return p, p + g * (jnp.exp(-0.5 * g * g) * (1 / sqrt(2 * pi)))


def gradient_kernel(ref: Refs, *, approximate: str) -> None:
    g, d_y = ref.gate[...].astype(jnp.float32), ref.d_y[...].astype(jnp.float32)
    p, slope = opening(g, approximate)
    if "d_gate" in ref:
        ref.d_gate[...] = (d_y * ref.up[...].astype(jnp.float32) * slope).astype(ref.d_gate.dtype)
    if "d_up" in ref:
        ref.d_up[...] = (d_y * (g * p)).astype(ref.d_up.dtype)


@BACKEND.implements("geglu_vjp", key=key, supports=supports_gradient, config=RowsConfig)
def geglu_vjp(call: Call, config: RowsConfig) -> tuple[jax.Array | None, ...]:
    inputs = ("gate", "up", "d_y") if "d_gate" in call.wants else ("gate", "d_y")
    of = partial(gradient_kernel, approximate=call.options["approximate"])
    found = element_by_element(call, config, of, inputs, call.wants, flops=18)
    return found.get("d_gate"), found.get("d_up")
