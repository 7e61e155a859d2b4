"""Sums over the rows of arrays on Hopper, which gradients of what all rows share are, in an order that only the number
of rows decides.

A block of one warpgroup owns some neighbouring columns of ``GROUP`` rows: each thread reads its columns of one row
after the other and adds up, which makes a row of partial sums a group. A second kernel adds those up as they follow
each other. The columns of the last block end with the array: some are those of the block before too, and are left out
at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from portakern.backends.pallas.lib.blocks import Refs, quotient
from portakern.backends.pallas.lib.mosaic_gpu.chip import BULK_BYTES, LANES, WARPS, launch, padded_rows, store
from portakern.core.call import Call

THREADS = LANES * WARPS

GROUP = 128
"""Rows of a partial sum."""

AHEAD = 4, 16
"""Rows that a thread reads before it adds the first of them: of arrays, and of partial sums."""


class ColumnTerms(NamedTuple):
    """What is added up: ``of(ref, row, columns)`` gives the terms of a row by name, read by ``columns(array)``."""

    names: tuple[str, ...]
    of: Callable[[Refs, Any, Callable[[Any], Any]], Mapping[str, Any]]


class ColumnPlan(NamedTuple):
    """How columns are cut: ``width`` of a block, ``vector`` neighbours to a thread; group, ahead: see above."""

    rows: int
    n: int
    group: int
    ahead: int
    vector: int

    @classmethod
    def over(cls, rows: int, n: int, itemsize: int) -> ColumnPlan:
        """Of an array in as few blocks as pieces of 16 bytes allow."""
        widths = (BULK_BYTES // itemsize >> i for i in range(BULK_BYTES))
        vector = next(v for v in widths if n % v == 0 and (v * THREADS <= n or v == 1))
        return cls(rows, n, GROUP, AHEAD[0], vector)

    @property
    def width(self) -> int:
        return THREADS * self.vector

    @property
    def blocks(self) -> int:
        return pl.cdiv(self.n, self.width)

    @property
    def groups(self) -> int:
        return pl.cdiv(self.rows, self.group)

    @property
    def layout(self) -> plgpu.Layout:
        """Neighbouring columns in a thread, and its neighbours' beside them."""
        tiles = (self.width,), (LANES * self.vector,), (self.vector,)
        return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-3,), (-2,), -1)

    def without_repeats(self, sums: jax.Array) -> jax.Array:
        """(..., n) of (..., blocks * width)."""
        first = (self.blocks - 1) * self.width
        if first + self.width == self.n:
            return sums
        return jnp.concatenate([sums[..., :first], sums[..., sums.shape[-1] - (self.n - first) :]], axis=-1)


def fewest_columns(n: int) -> int:
    """The columns that arrays of n are padded to: every thread has one."""
    return max(n, THREADS)


def column_sums(
    call: Call,
    arrays: Mapping[str, jax.Array],
    rows: Mapping[str, jax.Array],
    terms: ColumnTerms,
    dtype: Any = jnp.float32,
) -> dict[str, jax.Array]:
    """Sums over rows by name, (n,) in a dtype that they are rounded to once, of what ``terms`` makes of arrays, (rows,
    n) each, and ``rows``: what is known of each row."""
    height, n = next(iter(arrays.values())).shape
    whole = fewest_columns(n)
    plan = ColumnPlan.over(height, whole, max(x.dtype.itemsize for x in arrays.values()))
    inputs = {name: padded_rows(x, whole) for name, x in arrays.items()} | dict(rows)
    sums = _summed(call, "columns", plan, inputs, terms, dtype if plan.groups == 1 else jnp.float32)
    if plan.groups > 1:
        sums = in_order(call, sums.reshape(plan.groups, -1), dtype)
    found = plan.without_repeats(sums.reshape(len(terms.names), -1))[:, :n]
    return dict(zip(terms.names, found, strict=True))


def in_order(call: Call, sums: jax.Array, dtype: Any, ahead: int = AHEAD[1]) -> jax.Array:
    """Partial sums, (groups, n), added up as they follow each other: n elements, of which each thread has one column,
    so that n is a multiple of its threads."""
    groups, n = sums.shape
    terms = ColumnTerms(("sums",), lambda ref, row, columns: {"sums": columns(ref.x.at[row])})
    return _summed(call, "sum", ColumnPlan(groups, n, groups, ahead, 1), {"x": sums}, terms, dtype)


def _summed(
    call: Call, name: str, plan: ColumnPlan, inputs: Mapping[str, jax.Array], terms: ColumnTerms, dtype: Any
) -> jax.Array:
    """(groups, names, blocks * width)."""
    form = jax.ShapeDtypeStruct((plan.groups, len(terms.names), plan.blocks * plan.width), dtype)
    found = launch(
        call,
        partial(_kernel, plan=plan, terms=terms),
        f"{call.spec.name}_{name}",
        (plan.blocks * plan.groups,),
        inputs=inputs,
        outputs={"total": form},
        scratch={},
    )
    return found["total"]


def _kernel(ref: Refs, *, plan: ColumnPlan, terms: ColumnTerms) -> None:
    index = lax.axis_index("block")
    group, block = quotient(index, plan.blocks), lax.rem(index, jnp.int32(plan.blocks))
    start = jnp.minimum(block * plan.width, plan.n - plan.width)
    first = group * plan.group
    count = jnp.minimum(plan.rows - first, plan.group)

    def columns(row: Any) -> Any:
        there = row.at[pl.ds(pl.multiple_of(start, plan.vector), plan.width)]
        return plgpu.load(there, layout=plan.layout, optimized=False).astype(jnp.float32)

    def rows(number: int, begin: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        found = [terms.of(ref, begin + i, columns) for i in range(number)]
        for of_row in found:
            sums = tuple(total + of_row[name] for total, name in zip(sums, terms.names, strict=True))
        return sums

    zeros = tuple(plgpu.layout_cast(jnp.zeros((plan.width,), jnp.float32), plan.layout) for _ in terms.names)
    steps = lax.div(count, plan.ahead)
    sums = lax.fori_loop(0, steps, lambda i, sums: rows(plan.ahead, first + i * plan.ahead, sums), zeros)
    sums = lax.fori_loop(steps * plan.ahead, count, lambda i, sums: rows(1, first + i, sums), sums)
    for i, total in enumerate(sums):
        store(ref.total.at[group, i, pl.ds(block * plan.width, plan.width)], total.astype(ref.total.dtype))
