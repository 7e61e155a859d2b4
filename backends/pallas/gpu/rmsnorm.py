"""Root mean square normalisation on Hopper: y = x (sum(x^2) / n + eps)^-1/2 weight along the last axis.

x: (*batch, n), weight: (n) or None -> y: (*batch, n). A row of up to ``block_n`` elements stays in registers. Of a
longer one a first read adds up the squares and a second one normalises (`_rows`). With ``narrow`` the normalised row is
rounded to x's dtype before the weight.

block_rows: rows of a block; block_n: elements of a row that are worked on at a time; row_warps: warps to a row;
cluster: blocks to a row that is longer than one keeps.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4.
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
from portakern.backends.pallas.gpu.layernorm import copies, default_tiling, key, normalised, supports
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
