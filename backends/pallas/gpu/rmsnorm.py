"""Root mean square normalisation on Hopper along the last axis, and its gradients.

    xh = x r        r = (mean(x^2) + eps)^-1/2        y = xh weight        h = weight d_y
    d_x = r (h - xh mean(h xh))        d_weight = sum over rows of d_y xh

x, y, d_y, d_x: (*batch, n); weight: (n) or None; d_weight: (n). As layernorm's kernels: a row of up to ``block_n``
elements stays in registers, of a longer one a first read adds up the squares, and h x of a gradient, and a second one
writes (`rows`). With ``narrow`` xh is rounded to x's dtype before the weight, and in the gradients so are h, and xh
where d_weight meets it.

block_rows: rows of a block; block_n: elements of a row that are worked on at a time; row_warps: warps to a row;
cluster: blocks to a row that is longer than one keeps.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4, and its derivative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import HopperRowsConfig
from portakern.backends.pallas.gpu.layernorm import copies, gradient_copies, gradients, normalised, view
from portakern.backends.pallas.lib.mosaic_gpu.norms import RmsNormVjp, narrow_dtype, narrowed
from portakern.backends.pallas.lib.mosaic_gpu.rows import Formula, WarpRowWalk, Weights, declared
from portakern.core.call import Call


@dataclass(frozen=True)
class RmsNormFormula(Formula):
    """The formula of a row; its statistic is the sum of squares."""

    empty = (0.0,)
    eps: float
    narrow: str | None

    def of_chunk(self, x: Any, walk: WarpRowWalk, start: Any, weights: Weights) -> tuple[Any, ...]:
        x = walk.within(x, 0.0, start)
        return (jnp.sum(x * x, axis=1),)

    def result(self, statistics: tuple[Any, ...], x: Any, walk: WarpRowWalk, weights: Weights) -> Any:
        y = x * walk.spread(lax.rsqrt(statistics[0] / walk.n + self.eps))
        y = narrowed(y, self.narrow)
        return y * weights["weight"]() if "weight" in weights else y


@BACKEND.implements("rmsnorm", **declared(view, copies))
def rmsnorm(call: Call, config: HopperRowsConfig) -> tuple[jax.Array]:
    return normalised(call, config, RmsNormFormula(call.options["eps"], narrow_dtype(call)))


@BACKEND.implements("rmsnorm_vjp", **declared(view, gradient_copies, arrays=2))
def rmsnorm_vjp(call: Call, config: HopperRowsConfig) -> tuple[jax.Array | None, ...]:
    narrow = narrow_dtype(call)

    def normalised(x: Any, r: Any) -> Any:
        """xh of some columns of a row."""
        return narrowed(x * r, narrow)

    return gradients(call, config, RmsNormVjp(call.options["eps"], narrow), normalised, extra_numbers=1)
