"""Gradients of the merge of two attentions over disjoint sets of keys."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.merge_states import beside, weights
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("merge_states_vjp")
def merge_states_vjp(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    """d_o_a = w_a d_o and d_lse_a = w_a d_lse + w_a w_b sum d_o (o_a - o_b); b has the opposite difference.

    A part without keys has no gradient, and the other's weight does not depend on it.
    """
    o_a, lse_a, o_b, lse_b, d_o, d_lse = call.arrays.values()
    empty_a, empty_b = np.isneginf(lse_a), np.isneginf(lse_b)
    with np.errstate(all="ignore"):
        w_a, w_b = weights(lse_a, lse_b)
        s = np.swapaxes((d_o * (o_a - o_b)).sum(-1), -1, -2)
        slope = np.where(empty_a | empty_b, 0.0, w_a * w_b * s)
        g = 0.0 if d_lse is None else d_lse
        found = {
            "d_o_a": np.where(beside(empty_a), 0.0, beside(w_a) * d_o),
            "d_lse_a": np.where(empty_a, 0.0, w_a * g + slope),
            "d_o_b": np.where(beside(empty_b), 0.0, beside(w_b) * d_o),
            "d_lse_b": np.where(empty_b, 0.0, w_b * g - slope),
        }
    return tuple(found[o.name] if o.name in call.wants else None for o in call.spec.outputs)
