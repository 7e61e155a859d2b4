"""Gradient of softmax on Hopper: d_x = y (d_y - Delta), Delta = sum y d_y along one axis.

y, d_y: (*shape) -> d_x: (*shape), viewed as (rows, n) as softmax views its array. A row of up to ``block_n`` elements
of both stays in registers. Of a longer one a first read sums y d_y, and a second one writes (`_rows`).

block_rows: rows of a block; block_n: elements of a row that are worked on at a time; row_warps: warps to a row;
cluster: blocks to a row that is longer than one keeps.

Source: the derivative of the formula of softmax, with y as the forward pass stored it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.gpu import _rows
from portakern.backends.pallas.gpu._rows import KNOBS, Formula, Walk, Weights, launched
from portakern.backends.pallas.gpu.softmax import copies, key, view
from portakern.core.call import Call


def default_tiling(call: Call) -> dict[str, int]:
    return _rows.default_tiling(view(call)[1], call.dtype, arrays=2)


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    return _rows.supports(call, tiling, *view(call), arrays=2)


class SoftmaxVjp(Formula):
    """The formula of a row of y and d_y; its statistic is Delta."""

    empty = (0.0,)

    def of_chunk(self, x: Any, walk: Walk, start: Any, weights: Weights) -> tuple[Any, ...]:
        y, d_y = x
        return (jnp.sum(walk.within(y * d_y, 0.0, start), axis=1),)

    def result(self, statistics: tuple[Any, ...], x: Any, walk: Walk, weights: Weights) -> Any:
        y, d_y = x
        return y * (d_y - walk.spread(statistics[0]))


@BACKEND.implements("softmax_vjp", key=key, tiling=default_tiling, supports=supports, knobs=KNOBS, copies=copies)
def softmax_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array]:
    axis, n = call.options["axis"], view(call)[1]
    y, d_y = (jnp.moveaxis(call.arrays[name], axis, -1) for name in ("y", "d_y"))
    d_x, _ = launched(call, tiling, (y.reshape(-1, n), d_y.reshape(-1, n)), SoftmaxVjp(), {})
    return (jnp.moveaxis(d_x.reshape(y.shape), -1, axis),)
