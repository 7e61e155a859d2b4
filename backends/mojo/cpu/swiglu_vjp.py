"""Gradients of the gated product."""

from __future__ import annotations

import numpy as np

from portakern.backends.mojo import BACKEND
from portakern.backends.mojo.launch import MojoFunction, new, over_elements
from portakern.core.call import Call
from portakern.core.config import Config

KERNEL = MojoFunction("swiglu_vjp")


@BACKEND.implements("swiglu_vjp")
def swiglu_vjp(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    gate, up, d_y = (call.arrays[name] for name in ("gate", "up", "d_y"))
    d_gate, d_up = (new(gate.shape, call.dtype) if name in call.wants else None for name in ("d_gate", "d_up"))
    over_elements(KERNEL, gate, up, d_y, d_gate, d_up, space=4, cost=8)
    return d_gate, d_up
