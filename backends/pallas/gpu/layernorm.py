"""Layer normalisation on Hopper along the last axis, and its gradients.

    xh = (x - mean) r        r = (var + eps)^-1/2        y = xh weight + bias        h = weight d_y
    d_x = r (h - mean(h) - xh mean(h xh))        d_weight = sum over rows of d_y xh        d_bias = sum over rows of d_y

x, y, d_y, d_x: (*batch, n); weight, bias: (n) or None; d_weight, d_bias: (n). A row of up to ``block_n`` elements stays
in registers: its mean, then the mean square of what is left of it. Of a longer one a first read merges the mean and the
sum of squares about it (m2) of each chunk into those of the row, of a gradient also the sums of h and of h (x - mean),
and a second one writes (`rows`). Of each row the gradient's kernel tells mean and r; another one walks the columns,
and adds up d_weight and d_bias from x, d_y and these (`columns`). No difference of large squares is ever taken, so a
large mean costs no more than its own rounding; and a constant row leaves 0 (`mean_of`).

block_rows: rows of a block; block_n: elements of a row that are worked on at a time; row_warps: warps to a row;
cluster: blocks to a row that is longer than one keeps.

Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979),
equation 2.1; Ba, Kiros and Hinton, "Layer Normalization" (2016), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import HopperRowsConfig
from portakern.backends.pallas.lib.blocks import Refs
from portakern.backends.pallas.lib.mosaic_gpu import rows as row_walk
from portakern.backends.pallas.lib.mosaic_gpu.columns import ColumnTerms, column_sums, fewest_columns
from portakern.backends.pallas.lib.mosaic_gpu.norms import (
    SUMS,
    LayerNormVjp,
    mean_of,
    normalised_columns,
    parted,
)
from portakern.backends.pallas.lib.mosaic_gpu.rows import Formula, WarpRowWalk, Weights, launched
from portakern.core.call import Call


def view(call: Call) -> tuple[int, int]:
    """The rows and the elements of each."""
    return math.prod(call.dims["batch"]), call.dims["n"]


def copies(call: Call, config: HopperRowsConfig) -> str | None:
    return row_walk.copies(call, call.dims["n"])


@dataclass(frozen=True)
class LayerNorm(Formula):
    """The formula of a row; its statistics are the mean and m2."""

    empty = 0.0, 0.0
    eps: float

    def whole_row(self, x: Any, walk: WarpRowWalk, weights: Weights) -> tuple[Any, tuple[Any, ...]]:
        mean = mean_of(x, walk)
        centred = walk.within(x - walk.spread(mean), 0.0)
        return self.scaled(centred, jnp.sum(centred * centred, axis=1), walk, weights), ()

    def of_chunk(self, x: Any, walk: WarpRowWalk, start: Any, weights: Weights) -> tuple[Any, ...]:
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

    def result(self, statistics: tuple[Any, ...], x: Any, walk: WarpRowWalk, weights: Weights) -> Any:
        mean, m2 = statistics
        return self.scaled(x - walk.spread(mean), m2, walk, weights)

    def scaled(self, centred: Any, m2: Any, walk: WarpRowWalk, weights: Weights) -> Any:
        """x - mean of a block, normalised."""
        y = centred * walk.spread(lax.rsqrt(m2 / walk.n + self.eps))
        if "weight" in weights:
            y = y * weights["weight"]()
        return y + weights["bias"]() if "bias" in weights else y


@BACKEND.implements("layernorm", **row_walk.declared(view, copies))
def layernorm(call: Call, config: HopperRowsConfig) -> tuple[jax.Array]:
    return normalised(call, config, LayerNorm(call.options["eps"]))


def normalised(call: Call, config: HopperRowsConfig, formula: Formula) -> tuple[jax.Array]:
    """y of a normalisation along the last axis, with the weight and bias that the call has."""
    x = call.arrays["x"]
    weights = {n: call.arrays[n] for n in ("weight", "bias") if call.arrays.get(n) is not None}
    y, _ = launched(call, config, (x.reshape(-1, call.dims["n"]),), formula, weights)
    return (y.reshape(x.shape),)


def gradient_copies(call: Call, config: HopperRowsConfig) -> str | None:
    n = call.dims["n"]
    columns = fewest_columns(n)
    padded = f"for sums over rows, rows of {n} elements are padded to {columns}: each thread has a column"
    summed = columns > n and any(name in call.wants for name in SUMS)
    return "; ".join(filter(None, (row_walk.copies(call, n), padded if summed else None))) or None


@BACKEND.implements("layernorm_vjp", **row_walk.declared(view, gradient_copies, arrays=2))
def layernorm_vjp(call: Call, config: HopperRowsConfig) -> tuple[jax.Array | None, ...]:
    return gradients(call, config, LayerNormVjp(call.options["eps"]), normalised_columns, extra_numbers=2)


def gradients(
    call: Call, config: HopperRowsConfig, formula: Formula, normalised_columns: Callable[..., Any], extra_numbers: int
) -> tuple[jax.Array | None, ...]:
    """The gradients of a normalisation along the last axis that the call wants. ``formula`` makes d_x and tells so many
    numbers of each row, with which ``normalised_columns`` makes xh of some of its columns.

    Each kernel makes the same whichever gradients are wanted: what a compiler fuses hangs on what stands beside it, so
    that a kernel of some of them would have other bits. Where d_bias alone is wanted x is not read: sums without a
    product have nothing to fuse."""
    n, weight = call.dims["n"], call.arrays["weight"]
    x, d_y = (call.arrays[name].reshape(-1, n) for name in ("x", "d_y"))
    found: dict[str, jax.Array] = {}
    of_rows: dict[str, jax.Array] = {}
    sums = tuple(o.name for o in call.spec.outputs if o.name in SUMS) if "d_weight" in call.wants else ("d_bias",)
    if "d_x" in call.wants or "d_weight" in sums:
        weights = {} if weight is None else {"weight": weight}
        d_x, numbers = launched(call, config, (x, d_y), formula, weights, extra_numbers=extra_numbers)
        assert numbers is not None
        found["d_x"], of_rows = d_x.reshape(call.arrays["x"].shape), {"told": numbers}

    def terms(ref: Refs, row: Any, columns: Callable[[Any], Any]) -> dict[str, Any]:
        """Of d_weight and d_bias in one row."""
        g = columns(ref.d_y.at[row])
        if "d_weight" not in sums:
            return {"d_bias": g}
        xh = normalised_columns(columns(ref.x.at[row]), *(ref.told[i, row] for i in range(extra_numbers)))
        return {"d_weight": g * xh, "d_bias": g}

    if any(name in call.wants for name in sums):
        arrays, known = ({"x": x, "d_y": d_y}, of_rows) if "d_weight" in sums else ({"d_y": d_y}, {})
        of_columns = column_sums(call, arrays, known, ColumnTerms(sums, terms))
        found |= {name: y.astype(call.outputs[name][1]) for name, y in of_columns.items() if name in call.wants}
    return tuple(found.get(o.name) if o.name in call.wants else None for o in call.spec.outputs)
