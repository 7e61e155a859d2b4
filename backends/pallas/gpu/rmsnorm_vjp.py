"""Gradients of root mean square normalisation on Hopper, over the last axis.

    xh = x r        r = (mean(x^2) + eps)^-1/2        h = weight d_y
    d_x = r (h - xh mean(h xh))        d_weight = sum over rows of d_y xh

x, d_y: (*batch, n), weight: (n) or None -> d_x: (*batch, n), d_weight: (n). As layernorm_vjp's: one kernel walks the
rows, adds up x^2 and h x, writes d_x, and r of each row; a second one walks the columns and adds up d_weight. With
``narrow`` h, and xh where d_weight meets it, are rounded to x's dtype.

block_rows: rows of a block; block_n: elements of a row that are worked on at a time; row_warps: warps to a row;
cluster: blocks to a row that is longer than one keeps.

Source: the derivative of Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.gpu._rows import KNOBS, Formula, Walk, Weights
from portakern.backends.pallas.gpu.layernorm import key
from portakern.backends.pallas.gpu.layernorm_vjp import copies, cotangent, default_tiling, gradients, supports
from portakern.backends.pallas.gpu.rmsnorm import narrow_dtype, narrowed
from portakern.core.call import Call


@dataclass(frozen=True)
class RmsNormVjp(Formula):
    """The formula of a row of x and d_y; its statistics are the sums of x^2 and of h x."""

    empty = 0.0, 0.0
    eps: float
    narrow: str | None

    def of_chunk(self, x: Any, walk: Walk, start: Any, weights: Weights) -> tuple[Any, ...]:
        x, h = walk.within(x[0], 0.0, start), walk.within(self.cotangent(x[1], weights), 0.0, start)
        return jnp.sum(x * x, axis=1), jnp.sum(h * x, axis=1)

    def result(self, statistics: tuple[Any, ...], x: Any, walk: Walk, weights: Weights) -> Any:
        (r,) = self.told(statistics, walk)
        xh = x[0] * walk.spread(r)
        return walk.spread(r) * (self.cotangent(x[1], weights) - xh * walk.spread(r * (statistics[1] / walk.n)))

    def told(self, statistics: tuple[Any, ...], walk: Walk) -> tuple[Any, ...]:
        return (lax.rsqrt(statistics[0] / walk.n + self.eps),)

    def cotangent(self, d_y: Any, weights: Weights) -> Any:
        """h of a block."""
        return narrowed(cotangent(d_y, weights), self.narrow) if "weight" in weights else d_y


@BACKEND.implements("rmsnorm_vjp", key=key, tiling=default_tiling, supports=supports, knobs=KNOBS, copies=copies)
def rmsnorm_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array | None, ...]:
    narrow = narrow_dtype(call)

    def normalised(x: Any, r: Any) -> Any:
        """xh of some columns of a row."""
        return narrowed(x * r, narrow)

    return gradients(call, tiling, RmsNormVjp(call.options["eps"], narrow), normalised, told=1)
