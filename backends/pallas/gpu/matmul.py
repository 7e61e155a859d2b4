"""Matrix multiplication on Hopper: C = A B, in tiles that warpgroups of two kinds make together.

a: (*#batch, m, k), b: (*#batch, k, n) -> c: (*batch, m, n). As many blocks run as there are multiprocessors, and each
takes one tile of C after the other. In a block one warpgroup produces: it copies (block_m, block_k) of A and (block_k,
block_n) of B into a ring of buffers, as soon as one is free. The others consume: each multiplies its half of a tile on
the tensor cores (wgmma, accumulators in float32 registers), rounds it once, and writes it while the next tile is on its
way. Two barriers for each buffer say that it has arrived and that it is free.

The copy engine leaves 0 for what lies beyond m, n or k, and writes nothing there. It wants rows 16 bytes apart or a
multiple of that, so that another k or n is padded by XLA; B's tiles, 64 columns wide, want n as a multiple of 64. Rows
of batched a that share one b are one taller matrix.

block_m, block_n: the tile of C; block_k: the share of k in a buffer; stages: buffers; band: tiles of C that lie beside
each other are finished first, so many rows of tiles wide.

Source: Thakkar et al., CUTLASS, "Efficient GEMM in CUDA" (warp-specialised persistent kernels for Hopper).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.common import Refs, padded
from portakern.backends.pallas.gpu._chip import (
    HOPPER,
    SWIZZLED_BYTES,
    Swizzled,
    dtype_refused,
    launch,
    over_shared,
    padded_rows,
    products_refused,
    tiled_buffer,
    whole_pieces,
)
from portakern.core.call import Call
from portakern.spec import Count

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
"""Registers that a thread keeps: of 65536, what the producer gives up goes to two consumers."""

FEW_ROWS = 64
"""Rows of the lowest tile that tensor cores multiply."""

OUT_SLOTS, OUT_ROWS = 2, 64
"""Buffers for what a consumer writes, and rows of each: one is filled while the other is on its way."""


class Plan(NamedTuple):
    """How one product is cut.

    Attributes:
      batch, m, n, k: extents; a_batch, b_batch: 1 where the operand is the same for every entry of the batch.
      block_m, block_n, block_k, stages, band: the tiling. consumers: warpgroups that multiply; along: the axis of a
        tile that they share, 0 or 1. size: bytes of an element; out: dtype of C.
    """

    batch: int
    m: int
    n: int
    k: int
    a_batch: int
    b_batch: int
    block_m: int
    block_n: int
    block_k: int
    stages: int
    band: int
    size: int
    out: Any

    @property
    def consumers(self) -> int:
        return 1 if self.block_m * self.block_n <= 64 * 64 else 2

    @property
    def along(self) -> int:
        return 1 if self.block_n > self.block_m or self.block_n == 256 else 0

    @property
    def part(self) -> tuple[int, int]:
        """The rows and columns of a tile that one consumer makes."""
        rows, columns = self.block_m, self.block_n
        return (rows // self.consumers, columns) if self.along == 0 else (rows, columns // self.consumers)

    @property
    def tiles(self) -> tuple[int, int]:
        return pl.cdiv(self.m, self.block_m), pl.cdiv(self.n, self.block_n)

    @property
    def steps(self) -> int:
        """Buffers that a tile takes."""
        return pl.cdiv(self.k, self.block_k)

    @property
    def out_columns(self) -> int:
        """Columns of C that are written at a time."""
        return SWIZZLED_BYTES // jnp.dtype(self.out).itemsize

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        ring = self.stages * (self.block_m + self.block_n) * self.block_k * self.size
        return ring + self.consumers * OUT_SLOTS * OUT_ROWS * SWIZZLED_BYTES


def plan_of(call: Call, tiling: Mapping[str, int]) -> Plan:
    batch, dims, m = math.prod(call.dims["batch"]), call.dims, rows_of(call)
    a, b = (_entries(call, name) for name in ("a", "b"))
    if m != dims["m"]:
        batch, a = 1, 1
    out = call.outputs["c"][1]
    return Plan(batch, m, dims["n"], dims["k"], a, b, **tiling, size=jnp.dtype(call.dtype).itemsize, out=jnp.dtype(out))


def rows_of(call: Call) -> int:
    """Rows of a product: where all entries of a batch share one b, they are one tall matrix."""
    batch, m = math.prod(call.dims["batch"]), call.dims["m"]
    return batch * m if (_entries(call, "a"), _entries(call, "b")) == (batch, 1) else m


def _entries(call: Call, name: str) -> int:
    """The entries of an operand's own batch: 1 where it has none, else the whole batch, to which XLA broadcasts what
    lacks some axes of it."""
    return 1 if math.prod(call.arrays[name].shape[:-2]) == 1 else math.prod(call.dims["batch"])


def key(call: Call) -> dict[str, str | int]:
    """Rows count by whether they fit one tile: an element's bits follow from the order of k alone, which every tile
    keeps on the tensor cores. The interpreter's own sums follow the tile."""
    few = not call.interpret and rows_of(call) <= FEW_ROWS
    return {"dtype": call.dtype, "rows": "few" if few else "many", "n": call.dims["n"]}


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    reason = products_refused(call) or dtype_refused(call, call.outputs["c"][1])
    if reason:
        return reason
    block_m, block_n, block_k = (tiling[f"block_{axis}"] for axis in "mnk")
    for name, tile, legal in (("block_m", block_m, (64, 128, 256)), ("block_n", block_n, (64, 128, 256))):
        if tile not in legal:
            return f"{name}={tile} is no tile of wgmma's here: use one of {', '.join(map(str, legal))}"
    if block_k != 64:
        return f"block_k={block_k} is not the {SWIZZLED_BYTES} bytes that a row of a buffer has: use 64"
    if block_m * block_n > 128 * 256:
        return (
            f"a tile of {block_m} x {block_n} does not fit into the registers of two warpgroups: use at most 128 x 256"
        )
    return over_shared(plan_of(call, tiling).shared, "block_m, block_n or stages")


def copies(call: Call, tiling: Mapping[str, int]) -> str | None:
    """What XLA copies besides, in words."""
    plan = plan_of(call, tiling)
    k, b_n, c_n = _padded_extents(plan)
    found = []
    if k != plan.k:
        found.append(f"k of a and b is padded from {plan.k} to {k}")
    if b_n != plan.n:
        found.append(f"n of b is padded from {plan.n} to {b_n}")
    if c_n != plan.n:
        found.append(f"c is cut from {c_n} columns to {plan.n}")
    batch = math.prod(call.dims["batch"])
    for name in ("a", "b"):
        if math.prod(call.arrays[name].shape[:-2]) not in (1, batch):
            found.append(f"{name} is repeated along the batch axes that it lacks")
    return "; ".join(found) or None


def _padded_extents(plan: Plan) -> tuple[int, int, int]:
    """k as the kernel sees it, and n of B and of C."""
    columns = SWIZZLED_BYTES // plan.size
    return padded(plan.k, 8), padded(plan.n, columns), whole_pieces(plan.n, plan.out)


def kernel(ref: Refs, *, plan: Plan) -> None:
    warpgroup = lax.axis_index("warpgroup")
    tiles_m, tiles_n = plan.tiles

    def place(tile: Any) -> tuple[Any, Any, Any]:
        """The batch entry, row and column of a tile: in bands of rows of tiles, so that operands stay in L2."""
        entry, within = lax.div(tile, tiles_m * tiles_n), lax.rem(tile, tiles_m * tiles_n)
        i, j = plgpu.planar_snake(within, (tiles_m, tiles_n), 0, plan.band)
        return entry, i * plan.block_m, j * plan.block_n

    def each_tile(work: Callable[..., None]) -> None:
        """Call ``work(entry, row, column, before)`` for the tiles of this block; ``before``: steps until then."""

        @plgpu.nd_loop((plan.batch * tiles_m * tiles_n,), collective_axes="block", init_carry=jnp.int32(0))
        def _(info: plgpu.NDLoopInfo, carry: Any) -> Any:
            work(*place(info.index[0]), carry)
            return carry + plan.steps

    @pl.when(warpgroup == plan.consumers)
    def producer() -> None:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        each_tile(partial(produce, ref, plan))
        for buffer in range(plan.stages):  # every arrival at a barrier is waited for once
            plgpu.barrier_wait(ref.free.at[buffer])

    @pl.when(warpgroup < plan.consumers)
    def consumer() -> None:
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        for buffer in range(plan.stages):
            plgpu.barrier_arrive(ref.free.at[buffer])
        each_tile(partial(consume, ref, plan, warpgroup))
        plgpu.wait_smem_to_gmem(0)


def produce(ref: Refs, plan: Plan, entry: Any, row: Any, column: Any, before: Any) -> None:
    """Bring what one tile of C is made of."""

    @pl.loop(0, plan.steps)
    def _(step: Any) -> None:
        buffer, k = lax.rem(before + step, plan.stages), step * plan.block_k
        plgpu.barrier_wait(ref.free.at[buffer])
        a = ref.a.at[entry if plan.a_batch > 1 else 0, pl.ds(row, plan.block_m), pl.ds(k, plan.block_k)]
        b = ref.b.at[entry if plan.b_batch > 1 else 0, pl.ds(k, plan.block_k), pl.ds(column, plan.block_n)]
        plgpu.copy_gmem_to_smem(a, ref.a_ring.copied.at[buffer], ref.arrived.at[buffer])
        plgpu.copy_gmem_to_smem(b, ref.b_ring.at[buffer], ref.arrived.at[buffer])


def consume(ref: Refs, plan: Plan, warpgroup: Any, entry: Any, row: Any, column: Any, before: Any) -> None:
    """Make this warpgroup's part of one tile of C, and write it."""
    rows, columns = plan.part
    mine = pl.ds(warpgroup * (rows if plan.along == 0 else columns), rows if plan.along == 0 else columns)

    def multiply(acc: Any) -> Any:
        @pl.loop(0, plan.steps)
        def _(step: Any) -> None:
            buffer = lax.rem(before + step, plan.stages)
            plgpu.barrier_wait(ref.arrived.at[buffer])
            a, b = ref.a_ring.tiled.at[buffer], ref.b_ring.at[buffer]
            plgpu.wgmma(acc, a.at[mine] if plan.along == 0 else a, b.at[:, mine] if plan.along == 1 else b)
            plgpu.wgmma_wait(1)  # the step before is done with its buffer

            @pl.when(step > 0)
            def _() -> None:
                plgpu.barrier_arrive(ref.free.at[lax.rem(before + step - 1, plan.stages)])

        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(ref.free.at[lax.rem(before + plan.steps - 1, plan.stages)])
        return acc[...]

    c = pl.run_scoped(multiply, plgpu.ACC((rows, columns), jnp.float32)).astype(plan.out)
    first_row, first_column = (row + mine.start, column) if plan.along == 0 else (row, column + mine.start)
    pieces = itertools.product(range(0, rows, OUT_ROWS), range(0, columns, plan.out_columns))
    for slot, (i, j) in zip(itertools.cycle(range(OUT_SLOTS)), pieces, strict=False):
        plgpu.wait_smem_to_gmem(OUT_SLOTS - 1, wait_read_only=True)
        ref.written.tiled[warpgroup, slot] = c[i : i + OUT_ROWS, j : j + plan.out_columns]
        plgpu.commit_smem()
        there = ref.c.at[entry, pl.ds(first_row + i, OUT_ROWS), pl.ds(first_column + j, plan.out_columns)]
        plgpu.copy_smem_to_gmem(ref.written.copied.at[warpgroup, slot], there)


KNOBS = {"stages": Count(2, 8), "band": Count(1, 16)}


@BACKEND.implements("matmul", key=key, supports=supports, knobs=KNOBS, copies=copies, same_bits=True)
def matmul(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array]:
    plan = plan_of(call, tiling)
    k, b_n, c_n = _padded_extents(plan)
    a, b = (_with_whole_batch(call, name) for name in ("a", "b"))
    a = padded_rows(a.reshape(plan.a_batch, -1, plan.k), k)
    b = padded_rows(b.reshape(plan.b_batch, plan.k, plan.n), b_n)
    b = jnp.pad(b, ((0, 0), (0, k - plan.k), (0, 0))) if k > plan.k else b
    dtype = call.arrays["a"].dtype
    found = launch(
        call,
        partial(kernel, plan=plan),
        "matmul",
        (min(HOPPER.cores or 1, plan.batch * math.prod(plan.tiles)),),
        inputs={"a": a, "b": b},
        outputs={"c": jax.ShapeDtypeStruct((plan.batch, plan.m, c_n), plan.out)},
        scratch={
            "a_ring": Swizzled((plan.stages, plan.block_m, plan.block_k), dtype),
            "b_ring": tiled_buffer((plan.stages, plan.block_k, plan.block_n), dtype),
            "written": Swizzled((plan.consumers, OUT_SLOTS, OUT_ROWS, plan.out_columns), plan.out),
            "arrived": plgpu.Barrier(num_arrivals=2, num_barriers=plan.stages),
            "free": plgpu.Barrier(num_arrivals=plan.consumers, num_barriers=plan.stages),
        },
        warpgroups=plan.consumers + 1,
    )
    c = found["c"] if c_n == plan.n else found["c"][..., : plan.n]
    return (c.reshape(call.outputs["c"][0]),)


def _with_whole_batch(call: Call, name: str) -> jax.Array:
    """An operand with all axes of the batch, or as it is where it has one entry."""
    x = call.arrays[name]
    if math.prod(x.shape[:-2]) in (1, math.prod(call.dims["batch"])):
        return x
    return jnp.broadcast_to(x, (*call.dims["batch"], *x.shape[-2:]))
