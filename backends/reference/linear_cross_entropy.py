"""Cross entropy with integer labels of the logits that a linear layer gives."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.attention import sum_in_two
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("linear_cross_entropy")
def linear_cross_entropy(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    """With x = hidden weight^T: loss = log l + (1 - e) (m - x_t) + e (m - mean x) + z lse^2 and slope = b weight.

    hidden: (*batch, d), weight: (n, d), labels t: (*batch) -> loss, lse: (*batch), slope: (*batch, d), logit_gradients
    b: (*batch, n). m = max x, or 0
    where that is infinite, l = sum exp(x - m), lse = m + log l, b_j = exp(min(x_j - lse, 0)) (1 + 2 z lse) - (1 - e)
    [j = t] -
    e / n; terms of a factor 0 are left out. All are 0 in ignored rows, b and not slope. No product is left out.
    """
    w, labels = call.arrays["weight"], call.arrays["labels"]
    e, z, ignored = (call.options[name] for name in ("label_smoothing", "z_loss", "ignore_index"))
    with np.errstate(all="ignore"):
        x = call.arrays["hidden"] @ w.T
        at = np.take_along_axis(x, np.where(labels == ignored, 0, labels)[..., None], -1)[..., 0]
        m = x.max(-1)
        m = np.where(np.isinf(m), 0.0, m)
        log = np.log(np.exp(x - m[..., None]).sum(-1))
        loss, (lse, low) = log + (1 - e) * (m - at), sum_in_two(call, m, log)
        loss = loss + e * (m - x.mean(-1)) if e else loss
        loss = loss + z * lse**2 if z else loss
        numbers = {"loss": loss, "lse": lse, "lse_low": low}
        found = {name: np.where(labels == ignored, 0.0, y) for name, y in numbers.items()}
        found["logit_gradients"] = brackets(call, x, m, log)
        found["slope"] = found["logit_gradients"] @ w
    return tuple(found[o.name] if o.name in call.wants else None for o in call.spec.outputs)


def brackets(call: Call, x: np.ndarray, high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """The derivative of each row's loss by its logits x, (*batch, n), of which the log-sum-exp is high + low; 0 in rows
    that are ignored."""
    labels, n = call.arrays["labels"][..., None], call.dims["n"]
    e, z, ignored = (call.options[name] for name in ("label_smoothing", "z_loss", "ignore_index"))
    p = np.exp(np.minimum((x - high[..., None]) - low[..., None], 0.0))
    p = p * (1 + 2 * z * (high + low))[..., None] if z else p
    return np.where(labels == ignored, 0.0, p - (1 - e) * (np.arange(n) == labels) - e / n)
