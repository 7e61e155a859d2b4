"""The walk that the ops on rows share (softmax, layernorm, rmsnorm and their gradients): two sweeps over each row.

A row may be longer than what fits into VMEM, and what is written of its first element depends on its last. So the grid
ends in (row blocks, sweeps, steps): the steps of sweep 0 read a row from block to block and gather its statistics in
VMEM, those of sweep 1 read it again and write. A row that fits one block needs one sweep, which does both.

During sweep 0 an output stays on the block that sweep 1 writes first: a block leaves VMEM when its index changes, and
nothing unwritten may leave it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from portakern.backends.pallas.common import Blocks, block, row_block, step_along, within
from portakern.backends.pallas.tpu._chip import (
    LANES,
    dtype_refused,
    launch,
    off_grid,
    over_vmem,
    sublanes,
    vmem_granted,
    whole_lanes,
)
from portakern.core.call import Call


class Walk(NamedTuple):
    """How a kernel walks the rows of one array.

    Attributes:
      shape: the array as the grid sees it: (rows, n), (outer, rows, n) or (outer, n, rows), where n runs along a row.
      along: the axis of a block that runs along a row: 1, along lanes, or 0, along sublanes, where rows lie side by
        side as in the last of these shapes. Either is reduced as it lies: nothing is transposed.
      block_rows, block_n: the rows of a block, and how much of each it holds.
      sweeps: how often a row is read; 1 where it fits one block, or where nothing of it is needed beforehand.
    """

    shape: tuple[int, ...]
    along: int
    block_rows: int
    block_n: int
    sweeps: int

    @classmethod
    def over(cls, call: Call, tiling: Mapping[str, int], shape: tuple[int, ...], along: int) -> Walk:
        """The walk of an op that needs a whole row before it writes any of it."""
        n, height = shape[-2:][along], shape[-2:][1 - along]
        of_rows, of_n = grains(call, along)
        block_n = block(n, tiling["block_n"], of_n)
        block_rows = row_block(call, height, tiling["block_rows"], of_rows)
        return cls(shape, along, block_rows, block_n, min(pl.cdiv(n, block_n), 2))

    @property
    def n(self) -> int:
        """The length of a row."""
        return self.shape[-2:][self.along]

    @property
    def height(self) -> int:
        """The number of rows, in one outer entry where there are several."""
        return self.shape[-2:][1 - self.along]

    @property
    def groups(self) -> int:
        """The number of row blocks."""
        return pl.cdiv(self.height, self.block_rows)

    @property
    def grid(self) -> tuple[int, ...]:
        return (*self.shape[:-2], self.groups, self.sweeps, pl.cdiv(self.n, self.block_n))

    @property
    def statistic(self) -> tuple[int, int]:
        """The shape of one number a row, beside a block of rows."""
        return (1, self.block_rows) if self.along == 0 else (self.block_rows, 1)

    # The blocks of operands

    def read(self) -> pl.BlockSpec:
        """The blocks of an array of rows that every sweep reads."""
        return self._rows(in_every_sweep=True)

    def written(self) -> pl.BlockSpec:
        """The blocks of an array of rows that the last sweep writes."""
        return self._rows(in_every_sweep=False)

    def _rows(self, in_every_sweep: bool) -> pl.BlockSpec:
        def index(*at: Any) -> tuple[Any, ...]:
            *outer, group, sweep, step = at
            place = step if in_every_sweep else self._in_last_sweep(sweep, step)
            return (*outer, place, group) if self.along == 0 else (*outer, group, place)

        lengths = (self.block_n, self.block_rows) if self.along == 0 else (self.block_rows, self.block_n)
        return pl.BlockSpec((*(None for _ in self.shape[:-2]), *lengths), index)

    def _in_last_sweep(self, sweep: Any, step: Any) -> Any:
        """The block along a row of what the last sweep alone reads or writes: the first one as long as sweep 0 runs."""
        return step if self.sweeps == 1 else sweep * step

    def weights(self, in_every_sweep: bool) -> pl.BlockSpec:
        """The blocks of one row (1, n) that is read beside every row block, in every sweep or in the last one alone."""

        def index(group: Any, sweep: Any, step: Any) -> tuple[Any, Any]:
            return 0, step if in_every_sweep else self._in_last_sweep(sweep, step)

        return pl.BlockSpec((1, self.block_n), index)

    def partial_sums(self) -> pl.BlockSpec:
        """The blocks of a (groups, 1, n) array of sums over the rows of each row block, which the last sweep writes."""

        def index(group: Any, sweep: Any, step: Any) -> tuple[Any, Any, Any]:
            return group, 0, self._in_last_sweep(sweep, step)

        return pl.BlockSpec((None, 1, self.block_n), index)

    # What a kernel asks for at a step

    def group(self) -> Any:
        """The row block of this grid step."""
        return step_along(len(self.shape) - 2)

    def sweep_and_step(self) -> tuple[Any, Any]:
        """The sweep of this grid step, and the step along the row."""
        return step_along(len(self.shape) - 1), step_along(len(self.shape))

    def within_rows(self, x: Any, step: Any, beyond: float = 0.0) -> Any:
        """x, a block, with the number `beyond` for what lies beyond the end of its rows."""
        return within(x, self.along, step * self.block_n, self.n, beyond)

    def sum_along_rows(self, values: Any, step: Any) -> Any:
        """The sum of a block's values along each row, without what lies beyond the row's end."""
        return jnp.sum(self.within_rows(values, step), axis=self.along, keepdims=True)

    def sum_over_rows(self, values: Any, group: Any) -> Any:
        """The sum over the rows of a block, its first axis here, without what lies beyond the last row."""
        return jnp.sum(within(values, 0, group * self.block_rows, self.height), axis=0, keepdims=True)

    # What a TPU refuses

    def refused(self, call: Call, tiling: Mapping[str, int], streamed: int, computed: int) -> str | None:
        """Why a TPU cannot walk like this, or None.

        ``streamed`` arrays of the call's dtype come and go, each with two blocks in VMEM so that one is moved while the
        other is used, and ``computed`` blocks of float32 are made of them.
        """
        lanes = whole_lanes(self.block_rows) if self.along == 0 else self.block_rows
        needed = lanes * self.block_n * (2 * streamed * jnp.dtype(call.dtype).itemsize + 4 * computed)
        return (
            dtype_refused(call)
            or off_grid("block_rows", tiling["block_rows"], self.height, grains(call, self.along)[0])
            or over_vmem(call, needed, "block_rows or block_n", vmem_granted(call))
        )


def launched(
    call: Call,
    kernel: Callable[..., None],
    walk: Walk,
    *,
    inputs: Blocks,
    outputs: Blocks,
    statistics: tuple[str, ...],
    reads: int,
    flops: int,
    transcendentals: int,
) -> dict[str, jax.Array]:
    """What ``kernel(ref, walk=walk)``, which keeps the named statistics of each row, writes by name.

    A sweep reads so many arrays of rows, and makes so many operations an element; transcendental functions are counted
    for the whole walk. These numbers are an estimate for XLA, no more.
    """
    size = math.prod(walk.shape)
    return launch(
        call,
        partial(kernel, walk=walk),
        f"portakern_{call.spec.name}",
        walk.grid,
        in_order=2,
        inputs=inputs,
        outputs=outputs,
        scratch=dict.fromkeys(statistics, walk.statistic),
        cost=pl.CostEstimate(
            flops=flops * size,
            transcendentals=transcendentals,
            bytes_accessed=(reads * walk.sweeps + 1) * size * jnp.dtype(call.dtype).itemsize,
        ),
    )


def grains(call: Call, along: int) -> tuple[int, int]:
    """The native grid that block_rows and block_n lie on, by the axis that runs along a row."""
    rows = sublanes(call.dtype)
    return (LANES, rows) if along == 0 else (rows, LANES)
