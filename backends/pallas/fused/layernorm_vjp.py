"""Gradients of layer normalisation on Hopper, over the last axis, with every row read once.

    xh = (x - mean) r        r = (var + eps)^-1/2        h = weight d_y
    d_x = r (h - mean(h) - xh mean(h xh))        d_weight = sum over rows of d_y xh        d_bias = sum over rows of d_y

x, d_y: (*batch, n), weight, bias: (n) or None -> d_x: (*batch, n), d_weight, d_bias: (n). The formula of a row is that
of ``gpu.layernorm``. A block of one warpgroup owns neighbouring rows, all of which come by in a ring of buffers: of
each it writes d_x where x was, and adds d_y xh and d_y to sums that it keeps in registers, a thread those of its
columns. A second kernel adds up the blocks' sums in their order. How many rows a block owns follows from how many there
are.

block_rows: rows of a block at least; block_n: elements of a row, which has to fit; ring: rows that are on their way or
in use at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import HopperRowsConfig, RingConfig
from portakern.backends.pallas.lib.blocks import Refs
from portakern.backends.pallas.lib.mosaic_gpu import rows as rows_of
from portakern.backends.pallas.lib.mosaic_gpu.chip import (
    WARPS,
    aligned,
    dtype_refused,
    launch,
    over_shared,
    padded_rows,
    store,
)
from portakern.backends.pallas.lib.mosaic_gpu.columns import in_order
from portakern.backends.pallas.lib.mosaic_gpu.norms import SUMS, LayerNormVjp, key, normalised_columns
from portakern.backends.pallas.lib.mosaic_gpu.rows import (
    THREADS,
    Formula,
    WarpRowWalk,
    bring_rows,
    element_by_element,
    loaded,
    operand,
    send_rows,
    weights_of,
)
from portakern.core.backend import Drawn
from portakern.core.call import Call

LONGEST = 4096
"""Elements of a row at most: a thread holds those of two arrays and as many sums in its registers."""

BLOCKS, SHORT = 256, 2048
"""Blocks of many rows: two on a multiprocessor, where one's copies run beside the other's sums. A block of rows shorter
than ``SHORT`` waits for as long a row and does less meanwhile: of these there are as many more, four times at most."""

AHEAD = 64
"""Blocks' sums that a thread reads before it adds up the first of them."""

DRAWN = Drawn(multiples={"n": 8}, most={"n": 1024})


def default_tiling(call: Call) -> RingConfig:
    return RingConfig(block_rows=8, block_n=max(THREADS, pl.next_power_of_2(call.dims["n"])), ring=3)


def walk_of(call: Call, config: RingConfig) -> WarpRowWalk:
    """The walk of a block: a row at a time, in all warps."""
    rows, n = math.prod(call.dims["batch"]), call.dims["n"]
    blocks = BLOCKS * min(4, pl.cdiv(SHORT, config.block_n))
    of_block = max(config.block_rows, pl.cdiv(rows, blocks))
    of_rows = HopperRowsConfig(block_rows=of_block, block_n=config.block_n, row_warps=WARPS)
    return WarpRowWalk.over(call, of_rows, rows, n, arrays=2)


def supports(call: Call, config: RingConfig) -> str | None:
    n, block_n = call.dims["n"], config.block_n
    reason = dtype_refused(call)
    if reason:
        return reason
    if n > min(block_n, LONGEST):
        return f"rows of {n} elements do not fit the registers that {min(block_n, LONGEST)} take: use variant 'gpu'"
    if element_by_element(n, call.dtype):
        return f"rows of {n} elements are no whole pieces of 16 bytes, as the ring wants them: use variant 'gpu'"
    walk = walk_of(call, config)
    needed = config.ring * walk.arrays * walk.chunk * walk.itemsize
    return walk._replace(block_rows=1).refused() or over_shared(aligned(needed), "ring or block_n")


def copies(call: Call, config: RingConfig) -> str | None:
    return rows_of.copies(call, call.dims["n"])


@BACKEND.implements(
    "layernorm_vjp", key=key, tiling=default_tiling, supports=supports, config=RingConfig, copies=copies, drawn=DRAWN
)
def layernorm_vjp(call: Call, config: RingConfig) -> tuple[jax.Array | None, ...]:
    return gradients(call, config, LayerNormVjp(call.options["eps"]), normalised_columns)


def gradients(
    call: Call, config: RingConfig, formula: Formula, normalised_columns: Callable[..., Any]
) -> tuple[jax.Array | None, ...]:
    """The gradients of a normalisation along the last axis that the call wants. ``formula`` makes d_x, and with what it
    tells of a row ``normalised_columns`` makes xh.

    The kernels make all gradients that the op has, whichever are wanted: what a compiler fuses hangs on what stands
    beside it, so that kernels of some of them would have other bits."""
    walk, n, weight = walk_of(call, config), call.dims["n"], call.arrays["weight"]
    sums = tuple(o.name for o in call.spec.outputs if o.name in SUMS)
    blocks = pl.cdiv(walk.rows, walk.block_rows)
    inputs = {operand(i): padded_rows(call.arrays[name].reshape(-1, n)) for i, name in enumerate(("x", "d_y"))}
    outputs = {
        "y": jax.ShapeDtypeStruct((walk.rows, walk.pitch), inputs["x0"].dtype),
        "sums": jax.ShapeDtypeStruct((blocks, len(sums), walk.chunk), jnp.float32),
    }
    found = launch(
        call,
        partial(kernel, walk=walk, formula=formula, normalised_columns=normalised_columns, sums=sums, ring=config.ring),
        call.spec.name,
        (blocks,),
        inputs=inputs | ({} if weight is None else {"weight": padded_rows(weight, walk.chunk)}),
        outputs=outputs,
        scratch={
            "arrived": plgpu.Barrier(num_arrivals=walk.arrays, num_barriers=config.ring),
            "buffer": plgpu.SMEM((walk.arrays, config.ring, *walk.block), inputs["x0"].dtype),
        },
    )
    made = {"d_x": found["y"][:, :n].reshape(call.arrays["x"].shape)}
    if any(name in call.wants for name in sums):
        total = in_order(call, found["sums"].reshape(blocks, -1), jnp.float32, min(AHEAD, blocks))
        totals = zip(sums, total.reshape(len(sums), walk.chunk)[:, :n], strict=True)
        made |= {name: x.astype(call.outputs[name][1]) for name, x in totals if name in call.wants}
    return tuple(made.get(o.name) if o.name in call.wants else None for o in call.spec.outputs)


def kernel(
    ref: Refs,
    *,
    walk: WarpRowWalk,
    formula: Formula,
    normalised_columns: Callable[..., Any],
    sums: tuple[str, ...],
    ring: int,
) -> None:
    """The rows of a block, row i in buffer i modulo ``ring``."""
    block = lax.axis_index("block")
    first = block * walk.block_rows
    rows = jnp.minimum(walk.rows - first, walk.block_rows)
    weights = weights_of(ref, walk, tuple(name for name in ("weight",) if name in ref), 0)

    def read(i: Any) -> None:
        pl.when(i < rows)(lambda: bring_rows(ref, walk, first + i, 0, lax.rem(i, jnp.int32(ring))))

    def work(i: Any, totals: tuple[Any, ...]) -> tuple[Any, ...]:
        buffer = lax.rem(i, jnp.int32(ring))
        plgpu.barrier_wait(ref.arrived.at[buffer])
        x, d_y = loaded(ref, walk, buffer)
        statistics = formula.gather(formula.start(walk), (x, d_y), walk, 0, weights)
        send_rows(ref, walk, first + i, 0, buffer, formula.result(statistics, (x, d_y), walk, weights))
        xh = normalised_columns(x, *map(walk.spread, formula.row_numbers(statistics, walk)))
        terms = {"d_weight": d_y * xh, "d_bias": d_y}
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the row before has left its buffer, which is next
        read(i + ring - 1)
        return tuple(total + terms[name] for total, name in zip(totals, sums, strict=True))

    for i in range(ring - 1):
        read(jnp.int32(i))
    zeros = tuple(plgpu.layout_cast(jnp.zeros(walk.block, jnp.float32), walk.layout) for _ in sums)
    for k, total in enumerate(lax.fori_loop(0, rows, work, zeros)):
        store(ref.sums.at[pl.ds(block, 1), k, pl.ds(0, walk.chunk)], total)
    plgpu.wait_smem_to_gmem(0)
