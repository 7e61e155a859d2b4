"""Rotary position embedding."""

from __future__ import annotations

import numpy as np

from portakern.backends.mojo import BACKEND
from portakern.backends.mojo.launch import MojoFunction, layout, new, over_rows, wide
from portakern.core.call import Call
from portakern.core.config import Config

KERNEL = MojoFunction("rope")


@BACKEND.implements("rope")
def rope(call: Call, config: Config) -> tuple[np.ndarray]:
    return (turned(call, call.arrays["x"], call.arrays["sin"]),)


def turned(call: Call, x: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """x turned by the angles of the call's cosines and of these sines; what is in no pair stays."""
    batch, seq, heads, _ = x.shape
    y, pairs = new(x.shape, call.dtype), sin.shape[-1]
    paired = call.options["interleaved"]
    a, b = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if paired else (slice(pairs), slice(pairs, 2 * pairs))
    tables = [wide(t, call.dtype) for t in (call.arrays["cos"], sin)]
    over_rows(
        KERNEL,
        layout(x[..., a]),
        layout(x[..., b]),
        *(layout(np.broadcast_to(t, (batch, seq, pairs))) for t in tables),
        layout(y[..., a]),
        layout(y[..., b]),
        pairs,
        heads,
        rows=batch * seq,
        n=pairs,
        space=4,
        dtype=call.dtype,
        cost=2 * heads,
    )
    y[..., 2 * pairs :] = x[..., 2 * pairs :]
    return y
