"""Gradients of root mean square normalisation on Hopper, over the last axis, with every row read once.

    xh = x r        r = (mean(x^2) + eps)^-1/2        h = weight d_y
    d_x = r (h - xh mean(h xh))        d_weight = sum over rows of d_y xh

x, d_y: (*batch, n), weight: (n) or None -> d_x: (*batch, n), d_weight: (n). As ``fused.layernorm_vjp``, with the
formula of the gradient in ``gpu.rmsnorm``.

block_rows: rows of a block at least; block_n: elements of a row, which has to fit; ring: rows that are on their way or
in use at a time.
"""

from __future__ import annotations

from typing import Any

import jax

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import RingConfig
from portakern.backends.pallas.fused.layernorm_vjp import DRAWN, copies, default_tiling, gradients, supports
from portakern.backends.pallas.lib.mosaic_gpu.norms import RmsNormVjp, key, narrow_dtype, narrowed
from portakern.core.call import Call


@BACKEND.implements(
    "rmsnorm_vjp", key=key, tiling=default_tiling, supports=supports, config=RingConfig, copies=copies, drawn=DRAWN
)
def rmsnorm_vjp(call: Call, config: RingConfig) -> tuple[jax.Array | None, ...]:
    narrow = narrow_dtype(call)

    def normalised(x: Any, r: Any) -> Any:
        """xh of a row."""
        return narrowed(x * r, narrow)

    return gradients(call, config, RmsNormVjp(call.options["eps"], narrow), normalised)
