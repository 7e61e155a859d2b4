"""The walk that the ops on rows share (softmax, layernorm, rmsnorm and their gradients): two sweeps over each row.

A row may be longer than what fits into VMEM, and what is written of its first element depends on its last. So the grid
ends in (row blocks, sweeps, steps): the steps of sweep 0 read a row from block to block and gather its statistics in
VMEM, those of sweep 1 read it again and write. A row that fits one block needs one sweep, which does both.

During sweep 0 an output stays on the block that sweep 1 writes first: a block leaves VMEM when its index changes, and
nothing unwritten may leave it. Where VMEM has room for whole rows, sweep 0 keeps what it reads, and sweep 1 takes it
from there: memory is read once.

A block is many times what registers hold, and an operation on all of it stores every result. So a kernel says what it
makes of a few registers (`StripSlice`) of a few rows (`Strip`), and a step does that for one after another.

Where XLA lays rows side by side (`SideBySide`) their blocks are turned as they come and go. A kernel works on the same
rows in the same way: the view changes no bit, and may depend on how many rows there are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from portakern.backends.pallas.configs import RowsConfig
from portakern.backends.pallas.lib.blocks import Blocks, Refs, even_block, row_block, step_along, within
from portakern.backends.pallas.lib.mosaic_tpu.chip import (
    LANES,
    dtype_refused,
    estimates,
    launch,
    note,
    off_grid,
    over_vmem,
    sublanes,
    vmem_granted,
    vmem_limit,
    whole_lanes,
)
from portakern.backends.pallas.lib.mosaic_tpu.layout import SideBySide, Turned, turned
from portakern.core import targets
from portakern.core.call import Call
from portakern.core.targets import Hardware


class VmemUse(NamedTuple):
    """What a step of an op holds in VMEM, in blocks of rows: ``streamed`` arrays of the call's dtype, each with two
    blocks so that one is moved while the other is used, and ``computed`` blocks of float32 that are made of them."""

    streamed: int
    computed: int

    def bytes(self, call: Call, elements: int) -> int:
        """The VMEM of blocks of so many elements."""
        return elements * (2 * self.streamed * jnp.dtype(call.dtype).itemsize + 4 * self.computed)


class BlockWalk(NamedTuple):
    """How a kernel walks the rows of one array.

    Attributes:
      shape: the array as the kernel sees it: (rows, n), (outer, rows, n) or (outer, n, rows), where n runs along a row.
      along: the axis of a block that runs along a row: 1, along lanes, or 0, along sublanes, where rows lie side by
        side as in the last of these shapes. Either is reduced as a kernel sees it.
      block_rows, block_n: the rows of a block, and how much of each it holds. A tiling names the most of both: an
        extent is cut evenly into as many blocks as that takes.
      sweeps: how often a row is read; 1 where it fits one block, or where nothing of it is needed beforehand.
      stored: of rows along lanes that lie side by side in memory, how: each block is turned.
      kept: whether sweep 1 takes from VMEM what sweep 0 read.
    """

    shape: tuple[int, ...]
    along: int
    block_rows: int
    block_n: int
    sweeps: int
    stored: SideBySide | None = None
    kept: bool = False

    @classmethod
    def over(
        cls, call: Call, config: RowsConfig, shape: tuple[int, ...], along: int, stored: SideBySide | None = None
    ) -> BlockWalk:
        """The walk of an op that needs a whole row before it writes any of it, over an array of that shape."""
        n, height = shape[-2:][along], shape[-2:][1 - along]
        of_rows, of_n = grains(call, along)
        block_n = even_block(n, config.block_n, of_n)
        block_rows = row_block(call, height, config.block_rows, LANES if stored else of_rows, even=True)
        return cls(shape, along, block_rows, block_n, min(pl.cdiv(n, block_n), 2), stored)

    @classmethod
    def along_last(cls, call: Call, config: RowsConfig, shape: tuple[int, ...]) -> BlockWalk:
        """`over` the rows along the last axis of an array, as XLA lays them out. Blocks of fewer rows than there are
        lanes, which a user may ask for, cannot be turned: XLA copies the array then."""
        stored = SideBySide.of(shape) if config.block_rows % LANES == 0 else None
        return cls.over(call, config, stored.rows if stored else (math.prod(shape[:-1]), shape[-1]), 1, stored)

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
    def elements(self) -> int:
        """What a block takes of VMEM."""
        return (whole_lanes(self.block_rows) if self.along == 0 else self.block_rows) * self.block_n

    @property
    def grid(self) -> tuple[int, ...]:
        return (*self.shape[:-2], self.groups, self.sweeps, pl.cdiv(self.n, self.block_n))

    @property
    def one_step(self) -> bool:
        """Whether a step meets whole rows, and no other step meets them."""
        return self.grid[-2:] == (1, 1)

    @property
    def statistic(self) -> tuple[int, int]:
        """The shape of one number a row, beside a block of rows."""
        return (1, self.block_rows) if self.along == 0 else (self.block_rows, 1)

    # Arrays of rows, and their blocks

    def viewed(self, array: Any) -> Any:
        """An array of rows as the grid sees it."""
        return self.stored.as_it_lies(array) if self.stored else array.reshape(self.shape)

    def restored(self, array: Any, shape: tuple[int, ...]) -> Any:
        """An array that the grid saw like that, in its own shape."""
        return self.stored.back(array) if self.stored else array.reshape(shape)

    def output_shape(self, dtype: Any) -> jax.ShapeDtypeStruct:
        """An array of rows that is written, as the grid sees it."""
        *outer, rows, n = self.shape
        return jax.ShapeDtypeStruct((*outer, n, rows) if self.stored else self.shape, dtype)

    def read(self) -> pl.BlockSpec:
        """The blocks of an array of rows that every sweep reads, or the first one for the second as well."""

        def row_block(sweep: Any, step: Any) -> Any:
            return step + sweep * (self.grid[-1] - 1 - step) if self.kept else step

        return self._rows(row_block)

    def in_last_sweep(self) -> pl.BlockSpec:
        """The blocks of an array of rows that the last sweep alone reads or writes."""
        return self._rows(self._in_last_sweep)

    def _rows(self, row_block: Callable[[Any, Any], Any]) -> pl.BlockSpec:
        side_by_side = self.along == 0 or self.stored is not None

        def index(*at: Any) -> tuple[Any, ...]:
            *outer, group, sweep, step = at
            here = row_block(sweep, step)
            return (*outer, here, group) if side_by_side else (*outer, group, here)

        lengths = (self.block_n, self.block_rows) if side_by_side else (self.block_rows, self.block_n)
        return pl.BlockSpec((*(None for _ in self.shape[:-2]), *lengths), index)

    def _in_last_sweep(self, sweep: Any, step: Any) -> Any:
        """The block along a row of what the last sweep alone reads or writes: the first one as long as sweep 0 runs."""
        return step if self.sweeps == 1 else sweep * step

    def keeps(self, dtype: Any) -> jax.ShapeDtypeStruct:
        """The VMEM that keeps the rows of a block from sweep 0 for sweep 1, block by block as a kernel sees them."""
        lengths = (self.block_n, self.block_rows) if self.along == 0 else (self.block_rows, self.block_n)
        return jax.ShapeDtypeStruct((self.grid[-1], *lengths), dtype)

    def has_room(self, call: Call, vmem_use: VmemUse) -> bool:
        """Whether rows that take two sweeps are kept, of as many arrays as an op can read."""
        kept = (vmem_use.streamed - 1) * self.grid[-1] * self.elements * jnp.dtype(call.dtype).itemsize
        return self.sweeps == 1 or vmem_use.bytes(call, self.elements) + kept <= vmem_limit(call)

    def weights(self, in_every_sweep: bool) -> pl.BlockSpec:
        """The blocks of one row (1, n) that is read beside every row block, in every sweep or in the last one alone."""

        def index(*at: Any) -> tuple[Any, Any]:
            *_, sweep, step = at
            return 0, step if in_every_sweep else self._in_last_sweep(sweep, step)

        return pl.BlockSpec((1, self.block_n), index)

    def partial_sums(self) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
        """An array (groups, 1, n) of float32 sums over the rows of each row block, or (outer, groups, 1, n), and its
        blocks, which the last sweep writes."""
        outer = self.shape[:-2]

        def index(*at: Any) -> tuple[Any, ...]:
            *block, sweep, step = at
            return *block, 0, self._in_last_sweep(sweep, step)

        form = jax.ShapeDtypeStruct((*outer, self.groups, 1, self.n), jnp.float32)
        return form, pl.BlockSpec((*(None for _ in outer), None, 1, self.block_n), index)

    def numbers(self) -> tuple[tuple[int, ...], pl.BlockSpec]:
        """The shape of an array of one number a row, as the grid sees it, and its blocks, (1, block_rows) each.

        They lie along lanes, where a column would waste 127 of 128. Rows that lie side by side keep their places; of
        others each row block has a row of its own, since block_rows need not be a multiple of 128.
        """
        outer = self.shape[:-2]
        whole: tuple[Any, ...] = tuple(None for _ in outer)
        if self.along == 0:
            return (*outer, 1, self.height), pl.BlockSpec(
                (*whole, 1, self.block_rows), lambda *at: (*at[:-3], 0, at[-3])
            )
        return (*outer, self.groups, 1, self.block_rows), pl.BlockSpec(
            (*whole, None, 1, self.block_rows), lambda *at: (*at[:-2], 0, 0)
        )

    def to_numbers(self, array: Any) -> Any:
        """An array of one number a row in the shape of `numbers`; what lies beyond the last row is 0."""
        if self.along == 0:
            return array.reshape(self.numbers()[0])
        rows = self.stored.numbers(array) if self.stored else array.reshape(*self.shape[:-2], self.height)
        beyond = self.groups * self.block_rows - self.height
        rows = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, beyond)]) if beyond else rows
        return rows.reshape(self.numbers()[0])

    def from_numbers(self, array: Any, shape: tuple[int, ...]) -> Any:
        """The numbers of `to_numbers` in an array of that shape."""
        if self.along == 0:
            return array.reshape(shape)
        rows = array.reshape(*self.shape[:-2], -1)[..., : self.height]
        return self.stored.numbers_back(rows) if self.stored else rows.reshape(shape)

    # What a kernel asks for at a step

    def turned(self, number: Any) -> Any:
        """One number a row, between how it stands beside a block of rows (`statistic`) and how `numbers` has it."""
        return number if self.along == 0 else number.T

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

    # What a TPU refuses

    def refused(self, call: Call, config: RowsConfig, vmem_use: VmemUse) -> str | None:
        """Why a TPU cannot walk like this, or None. Only blocks of the least number of rows, of those that are turned
        as many as there are lanes, may ask for more VMEM than a kernel gets unasked: code of larger ones would take
        minutes to compile."""
        least = LANES if self.stored else grains(call, self.along)[0]
        limit = vmem_limit(call) if self.block_rows <= least else vmem_granted(call)
        return (
            dtype_refused(call)
            or off_grid("block_rows", config.block_rows, self.height, least)
            or over_vmem(call, vmem_use.bytes(call, self.elements), "block_rows or block_n", limit)
        )


class Strip(NamedTuple):
    """Some rows of a grid step's block, on which a kernel works before it comes to the next ones. What it makes of a
    piece of them stays in registers: of whole blocks most of it would be stored, for want of registers, and read again.

    Attributes:
      walk: over blocks of so many rows; step: along the rows; first: the first of them, in blocks of ``of`` rows.
    """

    walk: BlockWalk
    step: Any
    first: Any
    of: int

    @property
    def n(self) -> int:
        """The length of a row."""
        return self.walk.n

    @property
    def register(self) -> int:
        """The elements of a row in one register."""
        return LANES if self.walk.along == 1 else SUBLANES

    def pieces(self) -> Iterator[StripSlice]:
        """The block of each row in pieces of as many elements as a few registers hold."""
        walk = self.walk
        width = max(PIECE // walk.block_rows, 2 * self.register)
        for start in range(0, walk.block_n, width):
            yield StripSlice(self, start, min(start + width, walk.block_n))

    def sums(self, function: Callable[[StripSlice], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Sums along each row of what ``function`` makes of each piece, without what lies beyond the row's end."""
        found = self.by_register(lambda at: tuple(map(at.within, function(at))), jnp.add)
        return tuple(jnp.sum(values, axis=self.walk.along, keepdims=True) for values in found)

    def maximum(self, function: Callable[[StripSlice], Any]) -> Any:
        """The largest along each row of what ``function`` makes of each piece; beyond the row's end ``function`` says
        what is."""
        (found,) = self.by_register(lambda at: (function(at),), jnp.maximum)
        return jnp.max(found, axis=self.walk.along, keepdims=True)

    def by_register(
        self, function: Callable[[StripSlice], tuple[Any, ...]], combine: Callable[[Any, Any], Any]
    ) -> list[Any]:
        """What ``function`` makes of all pieces, put together in as many elements of each row as lie in one register:
        pairs of registers, one after another, so that the order does not hang on how long a piece is, nor on how many
        rows it has. Of one register after another each would wait for the one before."""
        along = self.walk.along
        found: list[Any] = []
        for piece in self.pieces():
            for i, values in enumerate(function(piece)):
                for pair in cut(values, along, 2 * self.register):
                    part = functools.reduce(combine, cut(pair, along, self.register))
                    if i == len(found):
                        found.append(part)
                    else:
                        found[i] = combine(found[i], part)
        return found


def cut(values: Any, axis: int, length: int) -> list[Any]:
    """An array in parts that are so long along an axis; the last one as long as it is."""
    ends = [*range(length, values.shape[axis], length), values.shape[axis]]
    return [lax.slice_in_dim(values, start, end, axis=axis) for start, end in zip([0, *ends], ends, strict=False)]


class StripSlice(NamedTuple):
    """The elements of a strip from ``start`` to ``stop`` of the block that it has of each row."""

    strip: Strip
    start: int
    stop: int

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where it lies in an array of rows, or of one number for each element of a row."""
        here = slice(self.start, self.stop)
        return (here, slice(None)) if self.strip.walk.along == 0 else (slice(None), here)

    def __call__(self, ref: Any) -> Any:
        """What it holds of an array, in float32; of weights, one for each element of a row, what is to be multiplied
        with, or added to, every row."""
        values, walk = ref[self.slices].astype(jnp.float32), self.strip.walk
        repeated = walk.along == 1 and values.shape[0] == SUBLANES < walk.block_rows
        return jnp.tile(values, (walk.block_rows // SUBLANES, 1)) if repeated else values

    def write(self, ref: Any, values: Any) -> None:
        """Store it in an array of rows, in that array's dtype."""
        ref[self.slices] = values.astype(ref.dtype)

    def within(self, values: Any, beyond: float = 0.0) -> Any:
        """The piece, with the number `beyond` for what lies beyond the end of its rows. That is in the last block
        alone: a piece which ends before its rows do there is whole in each."""
        walk = self.strip.walk
        if self.stop <= walk.n - (walk.grid[-1] - 1) * walk.block_n:
            return values
        return within(
            values, walk.along, self.strip.step * walk.block_n + self.start, walk.n, beyond, divisor=walk.block_n
        )

    def add_to(self, ref: Any, values: Any) -> None:
        """Add the piece over its rows, without those beyond the last, to sums of `BlockWalk.partial_sums`. They are
        eight
        of each, which are added up when all rows of the block have come by: here sublanes would wait for each other."""
        walk = self.strip.walk
        values = within(values, 0, self.strip.first, walk.height, divisor=self.strip.of)
        ref[:, self.start : self.stop] += jnp.sum(values.reshape(-1, SUBLANES, values.shape[1]), axis=0)


SUBLANES = sublanes(jnp.float32)
PIECE = 8 * SUBLANES * LANES  # eight registers


class Phases(NamedTuple):
    """What a kernel does with a strip: before the first block of its rows, with each block in the first sweep, and with
    each in the last."""

    start: Callable[[], None]
    gather: Callable[[], None]
    write: Callable[[], None]


class RowScalar:
    """One number a row, of rows that one step alone meets: a value, where several steps share memory. A column of
    numbers in memory costs masked stores, which the next operation waits for."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.dtype, self.value = shape, jnp.dtype("float32"), jnp.zeros(shape, jnp.float32)

    def __getitem__(self, _: Any) -> Any:
        return self.value

    def __setitem__(self, _: Any, value: Any) -> None:
        self.value = value


def row_tiling(call: Call, n: int, along: int, vmem_use: VmemUse) -> RowsConfig:
    """Blocks of whole rows of n elements, so many as fit what a kernel gets of VMEM unasked; where that holds none, the
    least number that there is, and of a row as much as the chip allows. Of n, dtype and chip alone.

    Rows along lanes that may lie side by side are turned by so many as there are lanes: whole ones where three quarters
    of what a kernel may ask for hold them. Longer ones are cut to what one gets unasked: they are read once all the
    same, and short blocks compile sooner."""
    rows, parts = call.spec.tiling["block_rows"], call.spec.tiling["block_n"]
    least, of_n = grains(call, along)
    whole = limit = vmem_limit(call)
    if along == 1 and n % LANES:
        least, limit = LANES, vmem_granted(call)
        whole = max(limit, whole * 3 // 4)

    def needed(block_rows: int, block_n: int) -> int:
        return vmem_use.bytes(call, block_rows * even_block(n, block_n, of_n))

    block_n = next(v for v in parts.values if v >= min(n, parts.hi))
    if needed(least, block_n) > whole:
        while needed(least, block_n) > limit and block_n > parts.lo:
            block_n //= 2
    fitting = [v for v in rows.values if v >= least and needed(v, block_n) <= vmem_granted(call)]
    return RowsConfig(block_rows=max(fitting, default=least), block_n=block_n)


STEP = 600  # cycles that a step of the grid waits beyond its memory, about: by libtpu's estimates 400 to 1500


def cycles(call: Call, walk: BlockWalk, vmem_use: VmemUse, hardware: Hardware) -> float:
    """About how long a walk takes: each core its blocks of rows, of which the first are moved while nothing is done."""
    cores, size = hardware.cores or 1, vmem_use.streamed * jnp.dtype(call.dtype).itemsize
    moved = walk.elements * size * cores * (hardware.clock or 0.0) / (hardware.bandwidth or math.inf)
    *blocks, sweeps, steps = walk.grid
    return pl.cdiv(math.prod(blocks), cores) * steps * (moved + sweeps * STEP) + moved


def fitted(
    call: Call,
    config: RowsConfig,
    vmem_use: VmemUse,
    default: Callable[[Call, VmemUse], RowsConfig],
    walk_of: Callable[[Call, RowsConfig], BlockWalk],
) -> RowsConfig:
    """In place of the default's block_rows those with which the call's rows take least: an accelerator's units sum a
    row in one order whatever rows share its block. Blocks of fewer rows than there are lanes, which a table may have
    from where rows lay otherwise, become as many where XLA would copy the array for them."""
    hardware, asked = targets.HARDWARE.get(call.target.arch), config.block_rows
    if call.interpret or hardware is None:
        return config
    turned = walk_of(call, config.replace(block_rows=LANES)).stored is not None
    among: tuple[int, ...] = ()
    if config == default(call, vmem_use):
        among = tuple(v for v in call.spec.tiling["block_rows"].values[::-1] if not turned or v % LANES == 0)
    elif turned and asked % LANES:
        among = (LANES,)
    found: dict[int, float] = {}
    with estimates():  # of blocks that are only weighed nobody is told
        for v in among:
            other = config.replace(block_rows=v)
            walk = walk_of(call, other)
            if walk.refused(call, other, vmem_use) is None and (v <= asked or walk.has_room(call, vmem_use)):
                found[v] = cycles(call, walk, vmem_use, hardware)
    best = min(found, key=lambda v: (found[v], v != asked), default=asked)
    return config if best == asked else config.replace(block_rows=best)


def refused(
    call: Call, config: RowsConfig, vmem_use: VmemUse, walk_of: Callable[[Call, RowsConfig], BlockWalk]
) -> str | None:
    """Why a TPU cannot walk rows in such blocks, or None."""
    return walk_of(call, config).refused(call, config, vmem_use)


def in_walks(
    vmem_use: VmemUse,
    key: Callable[[Call], Mapping[str, str | int]],
    default: Callable[[Call, VmemUse], RowsConfig],
    walk_of: Callable[[Call, RowsConfig], BlockWalk],
) -> dict[str, Any]:
    """What an op that walks rows and holds so much declares beside its function."""
    return {
        "key": key,
        "config": RowsConfig,
        "tiling": lambda call: default(call, vmem_use),
        "fit": partial(fitted, vmem_use=vmem_use, default=default, walk_of=walk_of),
        "supports": partial(refused, vmem_use=vmem_use, walk_of=walk_of),
    }


def launched(
    call: Call,
    kernel: Callable[..., Phases | None],
    walk: BlockWalk,
    vmem_use: VmemUse,
    *,
    rows: Mapping[str, jax.Array],
    late: Mapping[str, jax.Array] = MappingProxyType({}),
    written: Mapping[str, Any] = MappingProxyType({}),
    inputs: Blocks | None = None,
    outputs: Blocks | None = None,
    statistics: tuple[str, ...],
    sums: tuple[str, ...] = (),
    strips: bool = False,
    flops: int,
    transcendentals: int,
) -> dict[str, jax.Array]:
    """What ``kernel(ref, walk=walk)``, which keeps the named statistics of each row, writes by name; with ``strips``
    what ``kernel(ref, strip=strip)`` says to do (`Phases`), with ``sums`` over rows by name.

    Arrays of rows, of any shape, are ``rows``, which every sweep reads, ``late``, which the last one reads, and those
    of the dtypes of ``written``, in the shape of the first of ``rows``; ``inputs`` and ``outputs`` are other operands.
    A kernel makes so many operations an element; transcendental functions are counted for the whole walk. These numbers
    are an estimate for XLA, no more.
    """
    shape, size = next(iter(rows.values())).shape, math.prod(walk.shape)
    walk, keeps, vmem = _keeping(call, walk, vmem_use, rows)
    by_rows = {name: (walk.viewed(array), walk.read()) for name, array in rows.items()}
    by_rows |= {name: (walk.viewed(array), walk.in_last_sweep()) for name, array in late.items()}
    reads = len(rows) * (1 if walk.kept else walk.sweeps) + len(late)
    state: dict[str, Any] = dict.fromkeys(() if walk.one_step else statistics, walk.statistic) | keeps
    others = {name: array.dtype for name, array in late.items()} | dict(written)
    run = partial(on_rows, others=tuple(others), statistics=statistics)
    if strips:
        run = partial(on_strips, late=tuple(late), written=tuple(written), statistics=statistics, sums=sums)
        repeated = (inputs or {}) if divided(walk, call.interpret)[0] > 1 else ()
        names = [*(f"sums_{name}" for name in sums), *(f"repeated_{name}" for name in repeated)]
        state |= dict.fromkeys(names, (SUBLANES, walk.block_n))
    outputs = (
        {name: (walk.output_shape(dtype), walk.in_last_sweep()) for name, dtype in written.items()}
        | {name: walk.partial_sums() for name in sums}
        | (outputs or {})
    )
    found = launch(
        call,
        partial(run, kernel=kernel, walk=walk, rows=tuple(rows), apart=call.interpret),
        f"portakern_{call.spec.name}",
        walk.grid,
        in_order=2,
        inputs=by_rows | (inputs or {}),
        outputs=outputs,
        scratch=state,
        vmem=vmem,
        cost=pl.CostEstimate(
            flops=flops * size,
            transcendentals=transcendentals,
            bytes_accessed=(reads + len(written)) * size * jnp.dtype(call.dtype).itemsize,
        ),
    )
    return found | {name: walk.restored(found[name], shape) for name in written}


def _keeping(
    call: Call, walk: BlockWalk, vmem_use: VmemUse, rows: Mapping[str, jax.Array]
) -> tuple[BlockWalk, dict[str, jax.ShapeDtypeStruct], int]:
    """The walk, which keeps what sweep 0 reads where VMEM has room for that; what is kept, by name; and the bytes of
    VMEM that a step needs."""
    vmem = vmem_use.bytes(call, walk.elements)
    keeps = {f"kept_{name}": walk.keeps(x.dtype) for name, x in rows.items()} if walk.sweeps > 1 else {}
    room = vmem + sum(math.prod(form.shape) * form.dtype.itemsize for form in keeps.values())
    if not keeps or room > vmem_limit(call):
        return walk, {}, vmem
    note(room, vmem_limit(call))
    return walk._replace(kept=True), keeps, room


def on_rows(
    ref: Refs,
    *,
    kernel: Callable[..., None],
    walk: BlockWalk,
    rows: tuple[str, ...],
    others: tuple[str, ...],
    statistics: tuple[str, ...],
    apart: bool,
) -> None:
    """A step of a kernel, to which every array of rows is one of rows along ``walk.along``, however it lies; what sweep
    1 reads again has been kept by sweep 0."""
    blocks: dict[str, Any] = dict(vars(ref))
    if walk.one_step:
        blocks |= {name: RowScalar(walk.statistic) for name in statistics}
    if walk.stored:
        blocks |= {name: Turned(blocks[name], once=walk.sweeps == 1, apart=apart) for name in (*rows, *others)}
    if walk.kept:
        sweep, step = walk.sweep_and_step()

        @pl.when(sweep == 0)
        def keep() -> None:
            for name in rows:
                blocks[f"kept_{name}"][step] = blocks[name][...]

        blocks |= {name: blocks[f"kept_{name}"].at[step] for name in rows}
    kernel(Refs(**blocks), walk=walk)


def on_strips(
    ref: Refs,
    *,
    kernel: Callable[..., Phases],
    walk: BlockWalk,
    rows: tuple[str, ...],
    late: tuple[str, ...],
    written: tuple[str, ...],
    statistics: tuple[str, ...],
    sums: tuple[str, ...],
    apart: bool,
) -> None:
    """A step of a kernel that works on strips of its block; on the whole of one whose rows lie side by side, which are
    turned piece by piece. What sweep 1 reads again has been kept by sweep 0."""
    sweep, step = walk.sweep_and_step()
    block = RowBlock(ref, kernel, walk, rows, (*rows, *late, *written), statistics, apart, step, walk.group())

    def write(*phases: str) -> None:
        for name in sums:
            block.homes[name][...] = jnp.zeros_like(block.homes[name])
        block.do(*phases)
        for name in sums:
            getattr(ref, name)[...] = jnp.sum(block.homes[name][...], axis=0, keepdims=True)

    for name in block.weights:  # once for all strips: to repeat a row along sublanes costs as much as a product with it
        repeated = block.homes[name]
        repeated[...] = jnp.broadcast_to(getattr(ref, name)[...].astype(jnp.float32), repeated.shape)
    if walk.one_step:
        write("start", "gather", "write")
        return
    if walk.kept:
        pl.when(sweep == 0)(block.keep)
    pl.when((sweep == 0) & (step == 0))(partial(block.do, "start"))
    pl.when(sweep == 0)(partial(block.do, "gather"))
    pl.when(sweep == walk.sweeps - 1)(partial(write, "write"))


class RowBlock:
    """The block of rows of one grid step, and where its strips find what a kernel names."""

    def __init__(
        self,
        ref: Refs,
        kernel: Callable[..., Phases],
        walk: BlockWalk,
        rows: tuple[str, ...],
        of_rows: tuple[str, ...],
        statistics: tuple[str, ...],
        apart: bool,
        step: Any,
        group: Any,
    ) -> None:
        self.ref, self.kernel, self.walk, self.apart = ref, kernel, walk, apart
        self.rows, self.of_rows, self.statistics = rows, of_rows, statistics
        self.step, self.above = step, group * walk.block_rows
        self.weights = [name for name in vars(ref) if f"repeated_{name}" in ref]
        self.homes: dict[str, Any] = dict(vars(ref))
        for kind in ("sums", "repeated"):
            self.homes |= {n: getattr(ref, f"{kind}_{n}") for n in vars(ref) if f"{kind}_{n}" in ref}
        if walk.kept:
            self.homes |= {name: getattr(ref, f"kept_{name}").at[step] for name in rows}

    def lying(self, name: str, index: Any = None) -> Any:
        """An array of rows, or those of a place, as rows that lie one after another."""
        block = self.homes[name]
        if not self.walk.stored or (self.walk.kept and name in self.rows):
            return block if index is None else block.at[index]
        return Turned(block if index is None else block.at[turned(index)], self.walk.sweeps == 1, self.apart)

    def keep(self) -> None:
        """Take what arrived to where the second sweep finds it."""
        for name in self.rows:
            arrived = getattr(self.ref, name)
            if self.walk.stored:
                arrived = Turned(arrived, once=True, apart=self.apart)
            for at in Strip(self.walk, self.step, self.above, self.walk.block_rows).pieces():
                self.homes[name][at.slices] = arrived[at.slices]

    def do(self, *phases: str) -> None:
        """These phases of every strip, in order."""
        walk, (number, strip) = self.walk, divided(self.walk, self.apart)

        def one(i: Any, none: Any) -> Any:
            start = i * strip.block_rows if number == 1 else pl.multiple_of(i * strip.block_rows, strip.block_rows)
            at, place = pl.ds(start, strip.block_rows), None
            if number > 1:
                place = (slice(None), at) if walk.along == 0 else (at, slice(None))
            named = self.homes | {name: self.lying(name, place) for name in self.of_rows}
            if walk.one_step:
                named |= {name: RowScalar(strip.statistic) for name in self.statistics}
            elif number > 1:
                named |= {name: self.homes[name].at[place] for name in self.statistics}
            rows = Strip(strip, self.step, self.above + start, walk.block_rows)
            todo = self.kernel(Refs(**named), strip=rows)
            for phase in phases:
                getattr(todo, phase)()
            return none

        if number == 1:
            one(0, 0)
        else:
            lax.fori_loop(np.int32(0), np.int32(number), one, np.int32(0), unroll=1 + (number % 2 == 0))


def divided(walk: BlockWalk, apart: bool) -> tuple[int, BlockWalk]:
    """How many strips a block has, and the walk of one: of as many rows as hide what a sum across a register waits.
    ``apart``: of interpreted calls, which sum rows in an order that hangs on how many there are, however they lie."""
    if walk.stored and not apart:
        return 1, walk  # strips of turned rows, of as many as lanes, take a tenth to a fifth longer
    most = LANES if walk.along == 0 else STRIP
    height = next(h for h in (most, STRIP, STRIP // 2, SUBLANES) if walk.block_rows % h == 0)
    return walk.block_rows // height, walk._replace(block_rows=height)


STRIP = 32


def grains(call: Call, along: int) -> tuple[int, int]:
    """The native grid that block_rows and block_n lie on, by the axis that runs along a row."""
    rows = sublanes(call.dtype)
    return (LANES, rows) if along == 0 else (rows, LANES)
