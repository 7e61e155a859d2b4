"""Gradients of a residual added and the root mean square normalisation of the sum."""

from __future__ import annotations

import numpy as np

from portakern.backends.mojo import BACKEND
from portakern.backends.mojo.cpu.rmsnorm_vjp import gradients
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("add_rmsnorm_vjp")
def add_rmsnorm_vjp(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    return gradients(call, call.arrays["residual_out"], call.arrays["d_residual_out"])
