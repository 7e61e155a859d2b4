"""Layer normalisation on Hopper: y = (x - mean) / sqrt(var + eps) * weight + bias along the last axis.

x: (*batch, n), weight and bias: (n) or None -> y: (*batch, n). A row of up to ``block_n`` elements stays in registers:
its mean, then the mean square of what is left of it. Of a longer one a first read merges the mean and the sum of
squares about it (m2) of each chunk into those of the row, and a second one normalises (`_rows`). No difference of large
squares is ever taken, so a large mean costs no more than its own rounding; and a constant row leaves 0 (`mean_of`).

block_rows: rows of a block; block_n: elements of a row that are worked on at a time; row_warps: warps to a row;
cluster: blocks to a row that is longer than one keeps.

Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979),
equation 2.1; Ba, Kiros and Hinton, "Layer Normalization" (2016), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.gpu import _rows
from portakern.backends.pallas.gpu._rows import KNOBS, Formula, Walk, Weights, launched
from portakern.core.call import Call


def key(call: Call) -> dict[str, str | int]:
    return _rows.key(call, call.dims["n"])


def default_tiling(call: Call) -> dict[str, int]:
    return _rows.default_tiling(call.dims["n"], call.dtype)


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    return _rows.supports(call, tiling, math.prod(call.dims["batch"]), call.dims["n"])


def copies(call: Call, tiling: Mapping[str, int]) -> str | None:
    return _rows.copies(call, call.dims["n"])


@dataclass(frozen=True)
class LayerNorm(Formula):
    """The formula of a row; its statistics are the mean and m2."""

    empty = 0.0, 0.0
    eps: float

    def whole(self, x: Any, walk: Walk, weights: Weights) -> tuple[Any, tuple[Any, ...]]:
        mean = mean_of(x, walk)
        centred = walk.within(x - walk.spread(mean), 0.0)
        return self.scaled(centred, jnp.sum(centred * centred, axis=1), walk, weights), ()

    def of_chunk(self, x: Any, walk: Walk, start: Any, weights: Weights) -> tuple[Any, ...]:
        mean = mean_of(x, walk, start)
        centred = walk.within(x - walk.spread(mean), 0.0, start)
        return mean, jnp.sum(centred * centred, axis=1)

    def merged(self, before: tuple[Any, ...], after: tuple[Any, ...], seen: Any, here: Any) -> tuple[Any, ...]:
        """Equation 2.1."""
        (mean, m2), (mean_after, m2_after) = before, after
        share, weight = parted(seen, here)
        delta = mean_after - mean
        # delta is squared last: it is the whole mean in the first chunk, where its weight is 0
        return mean + delta * share, m2 + m2_after + delta * (delta * weight)

    def result(self, statistics: tuple[Any, ...], x: Any, walk: Walk, weights: Weights) -> Any:
        mean, m2 = statistics
        return self.scaled(x - walk.spread(mean), m2, walk, weights)

    def scaled(self, centred: Any, m2: Any, walk: Walk, weights: Weights) -> Any:
        """x - mean of a block, normalised."""
        y = centred * walk.spread(lax.rsqrt(m2 / walk.n + self.eps))
        if "weight" in weights:
            y = y * weights["weight"]()
        return y + weights["bias"]() if "bias" in weights else y


def mean_of(x: Any, walk: Walk, start: Any = None) -> Any:
    """The mean of a block, of a chunk that begins at ``start`` or of whole rows: a sum over a count, and the mean of
    what that leaves of each element. Equal numbers have themselves as their mean so, however both round."""
    at = () if start is None else (start,)
    count = walk.counted(start)[1] if at else walk.n
    rounded = jnp.sum(walk.within(x, 0.0, *at), axis=1) / count
    return rounded + jnp.sum(walk.within(x - walk.spread(rounded), 0.0, *at), axis=1) / count


def parted(seen: Any, here: Any) -> tuple[Any, Any]:
    """Of ``seen`` elements and ``here`` more: the share of these, and as many of the others (equation 2.1)."""
    seen, here = (lax.convert_element_type(count, jnp.float32) for count in (seen, here))
    share = here / (seen + here)
    return share, share * seen


@BACKEND.implements("layernorm", key=key, tiling=default_tiling, supports=supports, knobs=KNOBS, copies=copies)
def layernorm(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array]:
    return normalised(call, tiling, LayerNorm(call.options["eps"]))


def normalised(call: Call, tiling: Mapping[str, int], formula: Formula) -> tuple[jax.Array]:
    """y of a normalisation along the last axis, with the weight and bias that the call has."""
    x = call.arrays["x"]
    weights = {n: call.arrays[n] for n in ("weight", "bias") if call.arrays.get(n) is not None}
    y, _ = launched(call, tiling, (x.reshape(-1, call.dims["n"]),), formula, weights)
    return (y.reshape(x.shape),)
