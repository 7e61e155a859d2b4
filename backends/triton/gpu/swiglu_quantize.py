"""The gated product of a feed-forward layer, in codes of 8 bits and one scale for each group of a row.

    y = g s u        s = 1 / (1 + exp(-g))
    scale = max |y| / L of a group        q = y / scale, no further from 0 than L, rounded to nearest, ties to even

Programs, tiles and groups are those of rmsnorm_quantize: a row that stays in registers is read once, and others twice,
group by group. exp takes -|g| alone, so that it cannot overflow.

Sources: Shazeer, "GLU variants improve transformer" (2020), equation 5; Micikevicius et al., "FP8 formats for deep
learning" (2022).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import CodedRowsConfig
from portakern.backends.triton.gpu.layernorm import default_tiling, key
from portakern.backends.triton.gpu.rmsnorm_quantize import (
    CodedExtents,
    fresh_codes,
    group_plans,
    store_codes,
    walk_groups,
)
from portakern.backends.triton.gpu.swiglu import open_share
from portakern.backends.triton.launch import cdiv, launch
from portakern.backends.triton.layout import RowStrides, walk_rows
from portakern.backends.triton.lib.rows import load_tiles, own_rows, refuse_rows, row_tile, start_of, whole_rows
from portakern.specs.quantize import scale_limits

if TYPE_CHECKING:
    from portakern.core.call import Call


class GateStrides(NamedTuple):
    """Of both factors."""

    gate: RowStrides
    up: RowStrides


class GatedRows(NamedTuple):
    """Rows of both factors: where they begin, their steps, and which of them there are."""

    gate: Any
    gate_n: Any
    up: Any
    up_n: Any
    ok: Any


@triton.jit
def gated_columns(rows, lane, inside, last: tl.constexpr, narrow: tl.constexpr, tile: tl.constexpr):
    """y in columns ``lane``, those ``inside``."""
    ok = rows.ok & inside[None, :]
    g = tl.load(rows.gate + lane[None, :] * rows.gate_n, mask=ok, other=0.0).to(tile.acc_dtype)
    u = tl.load(rows.up + lane[None, :] * rows.up_n, mask=ok, other=0.0).to(tile.acc_dtype)
    return g * open_share(g) * u


@triton.jit
def swiglu_quantize_kernel(gate, up, q, scale, extents, strides, limits, codes: tl.constexpr, tile: tl.constexpr):
    row, n = own_rows(extents, tile)
    gate_row, up_row = start_of(gate, row, extents, strides.gate, tile), start_of(up, row, extents, strides.up, tile)
    row_ok = (row < extents.height)[:, None]
    q_row, scale_row = (q + row * n)[:, None], (scale + row * extents.groups)[:, None]

    if tile.tiles:
        _, _, col, ok = whole_rows(n, row_ok, tile)
        g = load_tiles(gate_row, strides.gate.n, col, ok, 0.0, tile.acc_dtype)
        u = load_tiles(up_row, strides.up.n, col, ok, 0.0, tile.acc_dtype)
        y = [g[i] * open_share(g[i]) * u[i] for i in (0, 1)[: len(g)]]
        store_codes(y, q_row, scale_row, col, ok, extents.groups, limits, codes)
    else:
        rows = GatedRows(gate_row, strides.gate.n, up_row, strides.up.n, row_ok)
        walk_groups(gated_columns, rows, q_row, scale_row, extents, limits, False, codes, tile)


def supports(call: Call, config: CodedRowsConfig) -> str | None:
    return refuse_rows(call, config, call.dims["n"], prod(call.dims["batch"]))


@BACKEND.implements("swiglu_quantize", key=key, tiling=default_tiling, supports=supports, config=CodedRowsConfig)
def swiglu_quantize(call: Call, config: CodedRowsConfig) -> tuple[Any, ...]:
    gate, up = call.arrays["gate"], call.arrays["up"]
    (gate, up), rows = walk_rows(gate.ndim - 1, gate, up)
    extents = CodedExtents.of(call, rows)
    codes, tile = group_plans(call, extents.width, row_tile(call, rows, extents.n, config))
    q, scale, stored = fresh_codes(call, gate, codes)
    launch(swiglu_quantize_kernel, cdiv(rows.height, config.block_rows), call, gate, up, stored, scale, extents,
           GateStrides(*rows.strides[:2]), scale_limits(call), codes=codes, tile=tile,
           num_warps=config.num_warps)  # fmt: skip
    return q, scale
