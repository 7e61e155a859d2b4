"""Gradient of the weights of each token's experts."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.router import sigmoid, softmax
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("router_vjp")
@np.errstate(all="ignore")
def router_vjp(call: Call, config: Config) -> tuple[np.ndarray]:
    """Of softmax that is not divided again over all experts, else over the chosen ones alone."""
    x, indices, g, scale = (*(call.arrays[n] for n in ("logits", "indices", "d_weights")), call.options["scale"])
    softly, normalize = call.options["scoring"] == "softmax", call.options["normalize"]
    d_x = np.zeros(x.shape)
    if softly and not normalize:
        np.put_along_axis(d_x, indices, g, -1)
        return (scale * slope(softmax(x), d_x),)
    chosen = np.take_along_axis(x, indices, -1)
    s, q = sigmoid(chosen), sigmoid(-chosen)
    if softly:
        d_chosen = slope(softmax(chosen), g)
    elif normalize:
        d_chosen = q * slope(s / (s.sum(-1, keepdims=True) + 1e-20), g)
    else:
        d_chosen = s * q * g
    np.put_along_axis(d_x, indices, scale * d_chosen, -1)
    return (d_x,)


def slope(y: np.ndarray, g: np.ndarray) -> np.ndarray:
    return y * (g - (y * g).sum(-1, keepdims=True))
