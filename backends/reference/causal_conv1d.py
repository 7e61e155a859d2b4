"""A short causal convolution of each channel along a sequence."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.linear import activated
from portakern.core.call import Call
from portakern.core.config import Config


def whole_inputs(call: Call) -> np.ndarray:
    """The inputs behind the initial state, or behind zeros: (batch, past + length, channels)."""
    x, state, past = call.arrays["x"], call.arrays["initial_state"], call.dims["past"]
    before = np.zeros((x.shape[0], past, x.shape[2])) if state is None else state.transpose(0, 2, 1)
    return np.concatenate((before, x), axis=1)


def same_segment(call: Call, lag: int) -> np.ndarray:
    """Which positions have the segment of the one so far before them, (batch, length, 1), the first before it."""
    ids, length = call.arrays["segment_ids"], call.dims["length"]
    before = np.maximum(np.arange(length) - lag, 0)
    found = np.ones((call.dims["batch"], length), bool) if ids is None else ids == ids[:, before]
    return found[..., None]


def of_last_segment(call: Call) -> np.ndarray:
    """Which of the last inputs, or of the initial state, have the segment of the last, (batch, past, 1)."""
    ids, length, past = call.arrays["segment_ids"], call.dims["length"], call.dims["past"]
    place = np.maximum(np.arange(length - past, length), 0)
    found = np.ones((call.dims["batch"], past), bool) if ids is None else ids[:, place] == ids[:, -1:]
    return found[..., None]


def through_tap(call: Call, j: int) -> np.ndarray:
    """The input that each output meets through a tap, (batch, length, channels)."""
    x, past, length = whole_inputs(call), call.dims["past"], call.dims["length"]
    return np.where(same_segment(call, past - j), x[:, j : j + length], 0.0)


def sums(call: Call) -> np.ndarray:
    """z, what the activation is given."""
    weight, bias = call.arrays["weight"], call.arrays["bias"]
    z = np.zeros(call.arrays["x"].shape) if bias is None else np.zeros(call.arrays["x"].shape) + bias
    for j in range(weight.shape[1]):
        z = z + through_tap(call, j) * weight[:, j]
    return z


@BACKEND.implements("causal_conv1d")
def causal_conv1d(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    """y[t] = f(bias + sum over j of weight[:, j] x[t - past + j]); the last inputs are the final state."""
    with np.errstate(all="ignore"):
        y = activated(sums(call), call.options["activation"])
    last = np.where(of_last_segment(call), whole_inputs(call)[:, call.dims["length"] :], 0.0)
    return y, last.transpose(0, 2, 1) if "final_state" in call.wants else None
