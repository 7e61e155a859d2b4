"""Gradients of a short causal convolution of each channel along a sequence."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.causal_conv1d import of_last_segment, same_segment, sums, through_tap
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("causal_conv1d_vjp")
def causal_conv1d_vjp(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    """With d_z = d_y f'(z): d_X[e] = sum over j of weight[:, j] d_z[e - j] and the final state's cotangent, where X is
    the initial state and then x; d_weight[:, j] = sum of d_z[t] X[t + j], d_bias = sum of d_z."""
    weight, d_z, last = (call.arrays[name] for name in ("weight", "d_y", "d_final_state"))
    batch, length, channels, past = (call.dims[name] for name in ("batch", "length", "channels", "past"))
    with np.errstate(all="ignore"):
        if call.options["activation"] == "silu":
            z = sums(call)
            s, q = 1 / (1 + np.exp(-z)), 1 / (1 + np.exp(z))
            d_z = d_z * (s * (1 + z * q))
        d_inputs = np.zeros((batch, past + length, channels))
        d_weight = np.zeros(weight.shape)
        for j in range(past + 1):
            met = np.zeros(d_inputs.shape)
            met[:, j : j + length] = np.where(same_segment(call, past - j), d_z, 0.0)
            d_inputs = d_inputs + met * weight[:, j]
            d_weight[:, j] = (d_z * through_tap(call, j)).sum((0, 1))
        if last is not None:
            d_inputs[:, length:] += np.where(of_last_segment(call), last.transpose(0, 2, 1), 0.0)
    found = {
        "d_x": d_inputs[:, past:],
        "d_weight": d_weight,
        "d_bias": d_z.sum((0, 1)),
        "d_initial_state": d_inputs[:, :past].transpose(0, 2, 1),
    }
    return tuple(found[o.name] if o.name in call.wants else None for o in call.spec.outputs)
