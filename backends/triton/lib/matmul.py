"""Matrix products: the order of tiles, how products are taken, and the product that a gradient is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from portakern.backends.triton.launch import (
    dot_precision,
    torch_dtype,
)
from portakern.core.binder import sibling
from portakern.core.registry import find_spec
from portakern.specs.matmul import batch_axes, product_dtype

if TYPE_CHECKING:
    from portakern.core.call import Call


@triton.jit
def tile_index(tile, tiles_m, tiles_n, group: tl.constexpr):
    """The row and the column of tiles of the ``tile``-th: ``group`` rows of tiles are finished column by column."""
    first_m = tile // (group * tiles_n) * group
    rest = tile % (group * tiles_n)
    group_m = min(tiles_m - first_m, group)
    return first_m + rest % group_m, rest // group_m


def products(call: Call, dtype: str) -> str:
    """How products of ``dtype`` are taken, which decides what a tile costs: "16-bit", "tf32" or "ieee"."""
    if dtype in ("float16", "bfloat16"):
        return "16-bit"
    return dot_precision(call if dtype == call.dtype else call.replace(dtype=dtype))


def product(call: Call, name: str) -> Call:
    """The call of matmul that gives a gradient: (*kept, i, K) times (*kept, K, j).

    K is the summed batch axes and, innermost, n (d_a) or m (d_b).
    """
    rank, dtype = len(call.dims["batch"]), torch_dtype(product_dtype(call))
    a, b, d_c = (x[(None,) * (rank + 2 - x.ndim)].to(dtype) for x in (call.arrays[n] for n in ("a", "b", "d_c")))
    left, right = (d_c, b.mT) if name == "d_a" else (a.mT, d_c)
    kept, summed = batch_axes(call, name)
    left = left.permute(*kept, rank, *summed, rank + 1).reshape(*(left.shape[i] for i in kept), left.shape[-2], -1)
    right = right.permute(*kept, *summed, rank, rank + 1).reshape(*(right.shape[i] for i in kept), -1, right.shape[-1])
    return sibling(
        call, find_spec("matmul"), left, right, precision=call.options["precision"], out_dtype=call.outputs[name][1]
    )
