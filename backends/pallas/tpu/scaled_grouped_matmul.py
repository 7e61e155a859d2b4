"""Matrix products of groups of rows of 8-bit numbers with scales on TPUs, each group with a matrix of its own.

    c[i, j] = sum_p scale_a[i, p] scale_b[g, p, j] (sum_{k in block p} a[i, k] b[g, k, j]) + bias[g, j]

a: (rows, k), b: (groups, k, n), scales by blocks, ends: (groups,), where each group ends -> c: (rows, n). The grid is
(n blocks, visits, k steps). Visits are grouped_matmul's: of one block of rows for one group, which writes the rows that
are that group's; those of rows of no group write zeros. The steps along k of a visit are scaled_matmul's, with the
scales of the block's rows, and the matrix, the scales and the bias of the group.

Source: JAX's megablox, after Gale et al., "MegaBlocks" (2023), section 5, for visits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import ProductConfig
from portakern.backends.pallas.lib.blocks import Refs, step_along
from portakern.backends.pallas.lib.mosaic_tpu.chip import launch
from portakern.backends.pallas.tpu import scaled_matmul as scaled
from portakern.backends.pallas.tpu.grouped_matmul import RowVisits, too_many, write
from portakern.backends.pallas.tpu.scaled_matmul import BlockSteps, blocks, laid_out, repeated, resident, wide_dtype
from portakern.core.call import Call
from portakern.specs.scaled_matmul import of_integers, scale_blocks


def kernel(ref: Refs, *, steps: BlockSteps, wide: Any, integers: bool) -> None:
    visit, step, last = pl.program_id(1), step_along(2), pl.num_programs(2) - 1
    first, end, multiplied = ref.first[visit], ref.end[visit], ref.multiplied[visit] == 1
    pl.when(multiplied)(lambda: scaled.add_step(ref, step, steps, wide, integers))

    @pl.when((step == last) & multiplied)
    def finish() -> None:
        write(ref, scaled.finished(ref, steps), first, end)

    @pl.when((step == last) & (multiplied ^ True) & (end > first))
    def clear() -> None:
        write(ref, jnp.zeros(ref.c.shape, jnp.float32), first, end)


def supports(call: Call, config: ProductConfig) -> str | None:
    rows, groups = call.dims["rows"], call.dims["groups"]
    visits = pl.cdiv(rows, blocks(call, config, rows)[0]) + groups
    return scaled.refused(call, config, rows) or too_many(rows, visits, len(RowVisits._fields))


def operands(call: Call, config: ProductConfig, steps: BlockSteps, tile: tuple[int, int]) -> dict[str, Any]:
    """The arrays that a step reads by name, and how they are cut into blocks."""
    dims, (bm, bn), (_, width), bias = call.dims, tile, scale_blocks(call), call.arrays["bias"]
    a, b = (laid_out(call.arrays[name], 1, steps, width) for name in ("a", "b"))
    if call.interpret:  # a host converts all of an 8-bit array at each step, since it computes with none
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    scale_a = repeated(call.arrays["scale_a"], (1, dims["rows"]), steps, 1)
    columns = (dims["n_width"], dims["n"])
    scale_b = jax.vmap(lambda scale: repeated(scale, columns, steps, 0))(call.arrays["scale_b"])
    shared = len(scale_b) == 1

    def along_k(v: Any, s: Any, visits: RowVisits) -> Any:
        return jnp.where(visits.multiplied[v] == 1, s, steps.number - 1)

    def of_a(j: Any, v: Any, s: Any, *scalars: Any) -> Any:
        of = RowVisits(*scalars)
        return of.source[v], along_k(v, s, of)

    def of_b(j: Any, v: Any, s: Any, *scalars: Any) -> Any:
        of = RowVisits(*scalars)
        return of.matrix[v], along_k(v, s, of), j

    def of_scale_b(j: Any, v: Any, s: Any, *scalars: Any) -> Any:
        return 0 if shared else RowVisits(*scalars).matrix[v], 0, j

    inputs = {
        "a": (a, pl.BlockSpec((bm, steps.resident), of_a)),
        "b": (b, pl.BlockSpec((None, steps.resident, bn), of_b)),
        "scale_a": (
            scale_a,
            pl.BlockSpec((bm, scale_a.shape[1]), lambda j, v, s, *scalars: (RowVisits(*scalars).source[v], 0)),
        ),
        "scale_b": (scale_b, pl.BlockSpec((None, scale_b.shape[1], bn), of_scale_b)),
    }
    if bias is not None:
        own = pl.BlockSpec((None, 1, bn), lambda j, v, s, *scalars: (RowVisits(*scalars).matrix[v], 0, j))
        inputs["bias"] = (bias[:, None], own)
    return inputs


@BACKEND.implements("scaled_grouped_matmul", key=scaled.key, supports=supports, config=ProductConfig)
def scaled_grouped_matmul(call: Call, config: ProductConfig) -> tuple[jax.Array]:
    (rows, n), dtype = call.outputs["c"]
    steps, tile, integers = BlockSteps.of(call, config), blocks(call, config, rows), of_integers(call)
    visits = RowVisits.of(call.arrays["group_ends"], rows, tile[0])
    inputs = operands(call, config, steps, tile)
    read = inputs["a"][0].size * pl.cdiv(n, tile[1]) + inputs["b"][0].size
    found = launch(
        call,
        partial(kernel, steps=steps, wide=wide_dtype(call), integers=integers),
        "portakern_scaled_grouped_matmul",
        (pl.cdiv(n, tile[1]), visits.block.size, steps.number),
        in_order=2,
        scalars=visits._asdict(),
        inputs=inputs,
        outputs={
            "c": (
                jax.ShapeDtypeStruct((rows, n), dtype),
                pl.BlockSpec(tile, lambda j, v, s, *scalars: (RowVisits(*scalars).block[v], j)),
            )
        },
        scratch=scaled.sums_of(steps, tile, integers),
        vmem=resident(call, config, rows),
        cost=pl.CostEstimate(
            flops=2 * rows * n * call.dims["k"], transcendentals=0, bytes_accessed=read + rows * n * 4
        ),
    )
    return (found["c"],)
