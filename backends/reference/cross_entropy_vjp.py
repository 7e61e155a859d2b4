"""Gradient of the cross entropy of logits with integer labels."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("cross_entropy_vjp")
def cross_entropy_vjp(call: Call, config: Config) -> tuple[np.ndarray]:
    """d_logits_j = d_loss [p_j (1 + 2 z lse) - (1 - e) [j = t] - e / n], p = exp(min(logits - lse - lse_low, 0)); 0
    where ignored. Logits are of n classes from the first one on, of all that n stands for in the formula.

    logits: (*batch, n), labels t, lse, lse_low, d_loss: (*batch) -> d_logits: (*batch, n). inf - inf is NaN by plain
    arithmetic.
    """
    x, labels, lse, g = (call.arrays[name][..., None] for name in ("logits", "labels", "lse", "d_loss"))
    x, own = x[..., 0], call.options["first_class"] + np.arange(call.dims["n"])
    classes = call.options["classes"] or call.options["first_class"] + call.dims["n"]
    e, z, ignored = (call.options[name] for name in ("label_smoothing", "z_loss", "ignore_index"))
    with np.errstate(all="ignore"):
        low = call.arrays["lse_low"]
        p = np.exp(np.minimum((x - lse) - (0.0 if low is None else low[..., None]), 0.0))
        p = p * (1 + 2 * z * lse) if z else p
        d_logits = g * (p - (1 - e) * (own == labels) - e / classes)
    return (np.where(labels == ignored, 0.0, d_logits),)
