"""The gated product of a feed-forward layer with gelu on TPUs, element by element.

    y = g P(g) u        P(g) = (1 + erf(g / sqrt 2)) / 2, or s(t) with t = 2 sqrt(2 / pi) (g + 0.044715 g^3)

gate, up: (*batch) -> y: (*batch), in blocks as swiglu has them. The tanh form is a sigmoid, as exact where it is small
as anywhere.

Sources: Shazeer, "GLU variants improve transformer" (2020), equation 5; Hendrycks and Gimpel, "Gaussian error linear
units" (2016).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import pi, sqrt
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.common import Refs
from portakern.backends.pallas.tpu.swiglu import element_by_element, key, open_and_shut, supports
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


@BACKEND.implements("geglu", key=key, supports=supports)
def geglu(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array]:
    of = partial(kernel, approximate=call.options["approximate"])
    return (element_by_element(call, tiling, of, ("gate", "up"), ("y",), flops=10)["y"],)
