"""Root mean square normalisation on Hopper: y = x (sum(x^2) / n + eps)^-1/2 weight along the last axis.

x: (*batch, n), weight: (n) or None -> y: (*batch, n). A row of up to ``block_n`` elements stays in registers. Of a
longer one a first read adds up the squares and a second one normalises (`_rows`). With ``narrow`` the normalised row is
rounded to x's dtype before the weight.

block_rows: rows of a block; block_n: elements of a row that are worked on at a time; row_warps: warps to a row.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.gpu._rows import KNOBS, Walk, Weights
from portakern.backends.pallas.gpu.layernorm import copies, default_tiling, key, normalised, supports
from portakern.core.call import Call


class RmsNorm(NamedTuple):
    """The formula of a row; its statistic is the sum of squares."""

    eps: float
    narrow: str | None

    def whole(self, x: Any, walk: Walk, weights: Weights) -> Any:
        return self.result(self.gather(self.start(walk), x, walk, 0), x, walk, weights)

    def start(self, walk: Walk) -> tuple[Any, ...]:
        return (walk.full(0.0),)

    def gather(self, statistics: tuple[Any, ...], x: Any, walk: Walk, start: Any) -> tuple[Any, ...]:
        x = walk.within(x, 0.0, start)
        return (statistics[0] + jnp.sum(x * x, axis=1),)

    def result(self, statistics: tuple[Any, ...], x: Any, walk: Walk, weights: Weights) -> Any:
        y = x * walk.spread(lax.rsqrt(statistics[0] / walk.n + self.eps))
        if self.narrow:
            y = y.astype(self.narrow).astype(jnp.float32)
        return y * weights["weight"]() if "weight" in weights else y


@BACKEND.implements("rmsnorm", key=key, tiling=default_tiling, supports=supports, knobs=KNOBS, copies=copies)
def rmsnorm(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array]:
    before = call.options["rounding"] == "before_weight" and call.dtype in ("float16", "bfloat16")
    return normalised(call, tiling, RmsNorm(call.options["eps"], call.dtype if before else None))
