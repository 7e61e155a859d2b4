"""Gradients of root mean square normalisation over the last axis."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.rmsnorm import narrowed
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("rmsnorm_vjp")
def rmsnorm_vjp(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    """The gradients by way of the normalised row xh:

        r = (mean x^2 + eps)^-1/2, xh = x r, h = d_y weight
        d_x = r (h - xh mean(h xh)), d_weight = sum over rows of d_y xh

    Rounded "before_weight", h, and xh where d_weight meets it, are rounded to x's dtype.

    x, d_y: (*batch, n), weight: (n) or None -> d_x: (*batch, n), d_weight: (n).
    A NaN in a row of x makes its xh NaN, and so its d_x and all of d_weight; of an inf xh is NaN at its own element and
    0 at the others, and d_x NaN.
    """
    x, d_y, weight = call.arrays["x"], call.arrays["d_y"], call.arrays["weight"]
    n = x.shape[-1]
    with np.errstate(all="ignore"):
        r = 1 / np.sqrt(np.square(x).sum(-1, keepdims=True) / n + call.options["eps"])
        xh, h = x * r, d_y if weight is None else d_y * weight
        met = xh
        if call.options["rounding"] == "before_weight":
            met, h = narrowed(call, xh), narrowed(call, h)
        d_x = r * (h - xh * ((h * xh).sum(-1, keepdims=True) / n))
        sums = {"d_x": d_x, "d_weight": (d_y * met).reshape(-1, n).sum(0)}
    return tuple(sums[o.name] if o.name in call.wants else None for o in call.spec.outputs)
