"""Gradients of the cross entropy of the logits that a linear layer gives."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.linear_cross_entropy import brackets
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("linear_cross_entropy_vjp")
def linear_cross_entropy_vjp(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    """d_hidden = d_loss slope, and d_weight_j = sum of d_loss b_j h over all rows h of hidden.

    hidden, slope: (*batch, d), weight: (n, d), labels, lse, d_loss: (*batch) -> d_hidden, d_weight as those.
    b is the derivative of a row's loss by its logits, with lse as it was saved. Rows that are ignored have a d_hidden
    of 0, and 0 for d_loss b. Where b was kept, logit_gradients, it meets d_loss h, which is 0 in those rows.
    """
    h, w, labels, slope = (call.arrays[name] for name in ("hidden", "weight", "labels", "slope"))
    lse, low = call.arrays["lse"], call.arrays["lse_low"]
    low = np.zeros(lse.shape) if low is None else low
    g, counted = call.arrays["d_loss"][..., None], (labels != call.options["ignore_index"])[..., None]
    d_hidden = d_weight = None
    with np.errstate(all="ignore"):
        if "d_hidden" in call.wants:
            d_hidden = np.where(counted, g * slope, 0.0)
        if "d_weight" in call.wants and call.options["keep_logit_gradients"]:
            of_rows = np.where(counted, g * h, 0.0).reshape(-1, call.dims["d"])
            d_weight = call.arrays["logit_gradients"].reshape(-1, call.dims["n"]).T @ of_rows
        elif "d_weight" in call.wants:
            d_x = np.where(counted, g * brackets(call, h @ w.T, lse, low), 0.0)
            d_weight = d_x.reshape(-1, call.dims["n"]).T @ h.reshape(-1, call.dims["d"])
    return d_hidden, d_weight
