"""Root mean square normalisation on Hopper along the last axis, and its gradients.

    xh = x r        r = (mean(x^2) + eps)^-1/2        y = xh weight        h = weight d_y
    d_x = r (h - xh mean(h xh))        d_weight = sum over rows of d_y xh

x, y, d_y, d_x: (*batch, n); weight: (n) or None; d_weight: (n). As layernorm's kernels: a row of up to ``block_n``
elements stays in registers, of a longer one a first read adds up the squares, and h x of a gradient, and a second one
writes (`_rows`). With ``narrow`` xh is rounded to x's dtype before the weight, and in the gradients so are h, and xh
where d_weight meets it.

block_rows: rows of a block; block_n: elements of a row that are worked on at a time; row_warps: warps to a row;
cluster: blocks to a row that is longer than one keeps.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4, and its derivative.
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
from portakern.backends.pallas.gpu.layernorm import (
    copies,
    cotangent,
    default_tiling,
    gradient_copies,
    gradient_tiling,
    gradients,
    key,
    normalised,
    supports,
    supports_gradient,
)
from portakern.core.call import Call


@dataclass(frozen=True)
class RmsNorm(Formula):
    """The formula of a row; its statistic is the sum of squares."""

    empty = (0.0,)
    eps: float
    narrow: str | None

    def of_chunk(self, x: Any, walk: Walk, start: Any, weights: Weights) -> tuple[Any, ...]:
        x = walk.within(x, 0.0, start)
        return (jnp.sum(x * x, axis=1),)

    def result(self, statistics: tuple[Any, ...], x: Any, walk: Walk, weights: Weights) -> Any:
        y = x * walk.spread(lax.rsqrt(statistics[0] / walk.n + self.eps))
        y = narrowed(y, self.narrow)
        return y * weights["weight"]() if "weight" in weights else y


def narrow_dtype(call: Call) -> str | None:
    """The dtype that a normalised row is rounded to before the weight, or None."""
    before = call.options["rounding"] == "before_weight" and call.dtype in ("float16", "bfloat16")
    return call.dtype if before else None


def narrowed(y: Any, dtype: str | None) -> Any:
    """float32 numbers, rounded to a dtype if there is one."""
    return y.astype(dtype).astype(jnp.float32) if dtype else y


@BACKEND.implements("rmsnorm", key=key, tiling=default_tiling, supports=supports, knobs=KNOBS, copies=copies)
def rmsnorm(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array]:
    return normalised(call, tiling, RmsNorm(call.options["eps"], narrow_dtype(call)))


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


@BACKEND.implements(
    "rmsnorm_vjp", key=key, tiling=gradient_tiling, supports=supports_gradient, knobs=KNOBS, copies=gradient_copies
)
def rmsnorm_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array | None, ...]:
    narrow = narrow_dtype(call)

    def normalised(x: Any, r: Any) -> Any:
        """xh of some columns of a row."""
        return narrowed(x * r, narrow)

    return gradients(call, tiling, RmsNormVjp(call.options["eps"], narrow), normalised, told=1)
