"""Softmax on Hopper along one axis, and its gradient.

    y = exp(x - max x) / sum exp(x - max x)        d_x = y (d_y - Delta)        Delta = sum y d_y

x, y, d_y, d_x: (*shape). Arrays are viewed as (rows, n) with n the softmax axis; where that is not the last, XLA
transposes before and after. A row of up to ``block_n`` elements of each array stays in registers. Of a longer one a
first read keeps the running maximum m and the sum l of exp(x - m), or sums y d_y, and a second one writes (`rows`).
Forward exponentials are the chip's own, of a product with log2(e), as the bound has them.

block_rows: rows of a block; block_n: elements of a row that are worked on at a time; row_warps: warps to a row;
cluster: blocks to a row that is longer than one keeps.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), algorithm 3.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import HopperRowsConfig
from portakern.backends.pallas.lib.mosaic_gpu import rows as row_walk
from portakern.backends.pallas.lib.mosaic_gpu.rows import Formula, WarpRowWalk, Weights, launched
from portakern.core.call import Call


def view(call: Call) -> tuple[int, int]:
    """The rows and the elements of each."""
    shape = call.dims["shape"]
    n = shape[call.options["axis"]]
    return math.prod(shape) // n, n


def inner(call: Call) -> int:
    """Elements from one of the softmax axis to the next."""
    return math.prod(call.dims["shape"][call.options["axis"] :][1:])


def copies(call: Call, config: HopperRowsConfig) -> str | None:
    moved = f"axis {call.options['axis']} is moved to the end, and back in the results" if inner(call) > 1 else None
    return "; ".join(filter(None, (moved, row_walk.copies(call, view(call)[1])))) or None


class SoftmaxFormula(Formula):
    """The formula of a row; its statistics are m and l."""

    empty = -math.inf, 0.0

    def whole_row(self, x: Any, walk: WarpRowWalk, weights: Weights) -> tuple[Any, tuple[Any, ...]]:
        x = walk.within(x, -jnp.inf)
        p = jnp.exp(x - walk.spread(jnp.max(x, axis=1)))
        return p * walk.spread(1.0 / jnp.sum(p, axis=1)), ()

    def of_chunk(self, x: Any, walk: WarpRowWalk, start: Any, weights: Weights) -> tuple[Any, ...]:
        x = walk.within(x, -jnp.inf, start)
        m = jnp.max(x, axis=1)
        return m, jnp.sum(jnp.exp(x - walk.spread(shift_of(m))), axis=1)

    def merged(self, before: tuple[Any, ...], after: tuple[Any, ...], seen: Any, here: Any) -> tuple[Any, ...]:
        """One step of the online softmax."""
        (m_before, l_before), (m_after, l_after) = before, after
        m = jnp.maximum(m_before, m_after)
        return m, l_before * jnp.exp(m_before - shift_of(m)) + l_after * jnp.exp(m_after - shift_of(m))

    def result(self, statistics: tuple[Any, ...], x: Any, walk: WarpRowWalk, weights: Weights) -> Any:
        m, l = statistics
        return jnp.exp(x - walk.spread(m)) * walk.spread(1.0 / l)


def shift_of(m: Any) -> Any:
    """What numbers are taken against whose maximum is m. Where all are -inf it is 0: they have weights of 0, and not
    the NaN of inf - inf."""
    return jnp.where(m == -jnp.inf, 0.0, m)


@BACKEND.implements("softmax", **row_walk.declared(view, copies))
def softmax(call: Call, config: HopperRowsConfig) -> tuple[jax.Array]:
    x, axis, n = call.arrays["x"], call.options["axis"], view(call)[1]
    rows = jnp.moveaxis(x, axis, -1)
    y, _ = launched(call, config, (rows.reshape(-1, n),), SoftmaxFormula(), {}, approximate=True)
    return (jnp.moveaxis(y.reshape(rows.shape), -1, axis),)


class SoftmaxVjp(Formula):
    """The formula of a row of y and d_y; its statistic is Delta."""

    empty = (0.0,)

    def of_chunk(self, x: Any, walk: WarpRowWalk, start: Any, weights: Weights) -> tuple[Any, ...]:
        y, d_y = x
        return (jnp.sum(walk.within(y * d_y, 0.0, start), axis=1),)

    def result(self, statistics: tuple[Any, ...], x: Any, walk: WarpRowWalk, weights: Weights) -> Any:
        y, d_y = x
        return y * (d_y - walk.spread(statistics[0]))


@BACKEND.implements("softmax_vjp", **row_walk.declared(view, copies, arrays=2))
def softmax_vjp(call: Call, config: HopperRowsConfig) -> tuple[jax.Array]:
    axis, n = call.options["axis"], view(call)[1]
    y, d_y = (jnp.moveaxis(call.arrays[name], axis, -1) for name in ("y", "d_y"))
    d_x, _ = launched(call, config, (y.reshape(-1, n), d_y.reshape(-1, n)), SoftmaxVjp(), {})
    return (jnp.moveaxis(d_x.reshape(y.shape), -1, axis),)
