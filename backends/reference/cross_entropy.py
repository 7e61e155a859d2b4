"""Cross entropy of logits with integer labels."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.attention import sum_in_two
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("cross_entropy")
def cross_entropy(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    """loss = log l + (1 - e) (m - x_t) + e (m - mean x) + z lse^2, l = sum exp(x - m), lse = m + log l; 0 where
    ignored.

    logits x: (*batch, n), labels t: (*batch) -> loss, lse: (*batch). m = max x, or 0 where that is infinite; terms of a
    factor 0 are left out. inf - inf is NaN by plain arithmetic.
    """
    x, labels, n = call.arrays["logits"], call.arrays["labels"], call.dims["n"]
    e, z, ignored = (call.options[name] for name in ("label_smoothing", "z_loss", "ignore_index"))
    at = np.take_along_axis(x, np.where(labels == ignored, 0, labels)[..., None], -1)[..., 0]
    with np.errstate(all="ignore"):
        m = x.max(-1)
        m = np.where(np.isinf(m), 0.0, m)
        log = np.log(np.exp(x - m[..., None]).sum(-1))
        loss, (lse, low) = log + (1 - e) * (m - at), sum_in_two(call, m, log)
        loss = loss + e * (m - x.sum(-1) / n) if e else loss
        loss = loss + z * lse**2 if z else loss
    found = {"loss": loss, "lse": lse, "lse_low": low}
    return tuple(
        np.where(labels == ignored, 0.0, found[o.name]) if o.name in call.wants else None for o in call.spec.outputs
    )
