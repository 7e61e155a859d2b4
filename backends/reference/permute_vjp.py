"""d_x[t] = sum of d_y[positions[t, j]] over j."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.unpermute import weighted_sums
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("permute_vjp")
def permute_vjp(call: Call, config: Config) -> tuple[np.ndarray]:
    positions = call.arrays["positions"]
    return (weighted_sums(call.arrays["d_y"], positions, np.ones(positions.shape)),)
