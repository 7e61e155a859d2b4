"""Gradients of layer normalisation over the last axis."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.layernorm import mean_of
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("layernorm_vjp")
def layernorm_vjp(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    """The gradients by way of the normalised row xh:

        r = (var + eps)^-1/2, xh = (x - mean) r, h = d_y weight
        d_x = r (h - mean h - xh mean(h xh)), d_weight = sum over rows of d_y xh, d_bias = sum over rows of d_y

    x, d_y: (*batch, n), weight, bias: (n) or None -> d_x: (*batch, n), d_weight, d_bias: (n).
    An inf or NaN in a row of x makes its xh NaN, and so its d_x and all of d_weight. One in d_y reaches its row of d_x
    and its column of the others.
    """
    x, d_y, weight = call.arrays["x"], call.arrays["d_y"], call.arrays["weight"]
    n = x.shape[-1]
    with np.errstate(all="ignore"):
        centred = x - mean_of(x)
        r = 1 / np.sqrt(np.square(centred).sum(-1, keepdims=True) / n + call.options["eps"])
        xh, h = centred * r, d_y if weight is None else d_y * weight
        d_x = r * (h - h.sum(-1, keepdims=True) / n - xh * ((h * xh).sum(-1, keepdims=True) / n))
        sums = {"d_x": d_x, "d_weight": (d_y * xh).reshape(-1, n).sum(0), "d_bias": d_y.reshape(-1, n).sum(0)}
    return tuple(sums[o.name] if o.name in call.wants else None for o in call.spec.outputs)
