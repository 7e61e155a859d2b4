"""The k greatest or least numbers of each row of any strided view, and their places.

A number and its position become one integer, the rank: above the number's bits, turned so that integers order them as
floats, and below them the complement of the position. No two ranks of a row are equal, and of equal numbers the first
is greater. So the k greatest ranks in order are the result, whatever order they are compared in, and no comparison
rounds or flushes. NaN have the greatest bits of all, and -0 those of 0. Values are loaded again, at their places.

    rank = turned(bits(x)) << p | (2^p - 1 - position)        p = 16 of 16-bit numbers and rows below 2^16, else 32

Two kernels:

* ``top_k_kernel``: a program owns ``block_rows`` rows and reads each once, ``block_n`` numbers at a time. The k
  greatest ranks of a tile are its own by a bitonic top-k. Of two such lists, one rising and one falling, the larger of
  each pair are the k greatest of both, and a bitonic merge puts them in order.
* ``top_k_passes_kernel``: of float64, for which no integer holds a rank, and of k above ``MOST``. Pass t reads the row
  again, and finds the greatest of what is less than the last one found.

The gradient is zeros, into which cotangents are stored at the places of their numbers: two kernels, since stores of one
program are in no order.

Sources: Shanbhag, Pirk and Madden, "Efficient top-k query processing on massively parallel hardware" (2018), for the
bitonic top-k; the ranks are those of OpenAI's triton_kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import TopKConfig
from portakern.backends.triton.launch import cdiv, lanes, launch, refuse_tile, torch_dtype
from portakern.backends.triton.layout import TensorRows, fresh, pow2_at_least, walk_rows
from portakern.backends.triton.lib.rows import RowExtents, own_rows, start_of

if TYPE_CHECKING:
    from portakern.core.call import Call

MOST = 256
"""The largest k of the bitonic kernel: its code grows with the square of log k."""


class TopKPlan(NamedTuple):
    """What the kernels are compiled for.

    Attributes:
      block_rows, block_n: the extents of a tile; kept: the power of two that covers k.
      flat, unit: of :meth:`TensorRows.known`.
      bits: the integer of x's width; word: that of a rank; most: of turned bits the greatest, NaN's.
      mask: 2^p - 1; shift: p. least: no rank is less.
      largest: whether the greatest are chosen.
    """

    block_rows: int
    block_n: int
    kept: int
    flat: bool
    unit: int
    bits: tl.dtype
    word: tl.dtype
    most: int
    shift: int
    mask: int
    least: int
    largest: bool


class ScatterPlan(NamedTuple):
    """What the gradient's kernel is compiled for: the extents of a tile of indices, and ``flat`` and ``unit`` of
    :meth:`TensorRows.known`."""

    block_rows: int
    block_k: int
    flat: bool
    unit: int


@triton.jit
def turned(x, plan: tl.constexpr):
    """Integers in the order of the numbers: those of NaN are the greatest, and those of -0 and 0 are equal."""
    wide: tl.constexpr = tl.int64 if plan.bits == tl.int64 else tl.int32
    bits = x.to(plan.bits, bitcast=True).to(wide)
    key = bits ^ ((bits >> (63 if wide == tl.int64 else 31)) & plan.most)
    key = tl.where(key == -1, 0, key)
    key = tl.where(x != x, plan.most, key)
    return key if plan.largest else ~key


@triton.jit
def ranks_of(x_row, position, n, row_ok, x_n, plan: tl.constexpr):
    """The ranks of a tile of rows, those beyond a row less than all others."""
    inside = row_ok & (position < n)
    key = turned(tl.load(x_row + position * x_n, mask=inside, other=0.0), plan)
    rank = (key.to(plan.word) << plan.shift) | (plan.mask - position).to(plan.word)
    return tl.where(inside, rank, plan.least)


@triton.jit
def top_k_kernel(x, values, indices, extents, x_strides, k, plan: tl.constexpr):
    row, n = own_rows(extents, plan)
    row_ok = (row < extents.height)[:, None]
    x_row = start_of(x, row, extents, x_strides, plan)
    lane = tl.arange(0, plan.block_n)[None, :].to(tl.int64)

    best = tl.topk(ranks_of(x_row, lane, n, row_ok, x_strides.n, plan), plan.kept)
    for first in range(plan.block_n, n, plan.block_n):
        more = tl.topk(ranks_of(x_row, first + lane, n, row_ok, x_strides.n, plan), plan.kept)
        best = tl.bitonic_merge(tl.maximum(tl.bitonic_merge(best), more), descending=True)

    t = tl.arange(0, plan.kept)[None, :]
    position = plan.mask - (best & plan.mask).to(tl.int64)
    at, ok = row[:, None] * k + t, row_ok & (t < k)
    tl.store(indices + at, position.to(tl.int32), mask=ok)
    tl.store(values + at, tl.load(x_row + position * x_strides.n, mask=ok, other=0.0), mask=ok)


@triton.jit
def top_k_passes_kernel(x, values, indices, extents, x_strides, k, plan: tl.constexpr):
    """Pass t finds the greatest number, and of equal ones the first, of those that come after the last one found."""
    row, n = own_rows(extents, plan)
    row_ok = row < extents.height
    x_row = start_of(x, row, extents, x_strides, plan)
    lane = tl.arange(0, plan.block_n)[None, :].to(tl.int64)

    found = tl.full([plan.block_rows], plan.most, tl.int64)  # nothing is greater, and no position is before -1
    at = tl.full([plan.block_rows], -1, tl.int64)
    for t in range(k):
        best, best_at = tl.full([plan.block_rows], plan.least, tl.int64), tl.full([plan.block_rows], 0, tl.int64) + n
        for first in range(0, n, plan.block_n):
            position = first + lane
            inside = row_ok[:, None] & (position < n)
            key = turned(tl.load(x_row + position * x_strides.n, mask=inside, other=0.0), plan).to(tl.int64)
            later = (key < found[:, None]) | ((key == found[:, None]) & (position > at[:, None]))
            key = tl.where(inside & later, key, plan.least)
            top = tl.max(key, 1)
            top_at = tl.min(tl.where(inside & later & (key == top[:, None]), position, n), 1)
            better = (top_at < n) & ((top > best) | (best_at == n))
            best, best_at = tl.where(better, top, best), tl.where(better, top_at, best_at)
        found, at = best, best_at
        tl.store(indices + row * k + t, at.to(tl.int32), mask=row_ok)
        number = tl.load(x_row + (at * x_strides.n)[:, None], mask=row_ok[:, None], other=0.0)
        tl.store(values + (row * k + t)[:, None], number, mask=row_ok[:, None])


@triton.jit
def top_k_vjp_zeros_kernel(d_x, size, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    tl.store(d_x + at, tl.full([block], 0.0, d_x.dtype.element_ty), mask=at < size)


@triton.jit
def top_k_vjp_kernel(indices, d_values, d_x, extents, indices_strides, d_values_strides, n, plan: tl.constexpr):
    """Rows of k numbers, each to its position in a row of n."""
    row, k = own_rows(extents, plan)
    row_ok = (row < extents.height)[:, None]
    i_row = start_of(indices, row, extents, indices_strides, plan)
    g_row = start_of(d_values, row, extents, d_values_strides, plan)
    for first in range(0, k, plan.block_k):
        t = first + tl.arange(0, plan.block_k)[None, :].to(tl.int64)
        inside = row_ok & (t < k)
        position = tl.load(i_row + t * indices_strides.n, mask=inside, other=-1)
        g = tl.load(g_row + t * d_values_strides.n, mask=inside, other=0.0)
        tl.store(d_x + row[:, None] * n + position, g, mask=inside & (position >= 0) & (position < n))


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "n": call.dims["n"], "k": call.dims["k"]}


def in_passes(call: Call) -> bool:
    return bool(call.dtype == "float64" or call.dims["k"] > MOST)


def kept(call: Call) -> int:
    """The ranks of a row that the bitonic kernel keeps; a list of one has no order to merge."""
    return pow2_at_least(call.dims["k"], 2)


def width(call: Call, config: TopKConfig) -> int:
    """The numbers of a tile: a tile has as many as are kept of it."""
    return config.block_n if in_passes(call) else max(config.block_n, kept(call))


def default_tiling(call: Call) -> TopKConfig:
    """Not measured: a thread has 8 ranks of a tile of up to 1024 numbers, and a program 4 warps."""
    block_n = pow2_at_least(call.dims["n"], 16, 1024)
    tile = 4 * lanes(call.target.arch) * 8
    return TopKConfig(block_rows=max(tile // max(block_n, kept(call)), 1), block_n=block_n, num_warps=4)


def supports(call: Call, config: TopKConfig) -> str | None:
    wide = config.replace(block_n=width(call, config))
    return refuse_tile(call, wide, height(call))


def supports_gradient(call: Call, config: TopKConfig) -> str | None:
    return refuse_tile(call, config, height(call))


def height(call: Call) -> int:
    """The number of rows."""
    x: int = call.arrays["x"].numel() // call.dims["n"]
    return x


def plan_of(call: Call, rows: TensorRows, config: TopKConfig) -> TopKPlan:
    size = call.arrays["x"].element_size()
    narrow = size == 2 and call.dims["n"] < 2**16
    shift, word = (16, tl.int32) if narrow else (32, tl.int64)
    bits = {2: tl.int16, 4: tl.int32, 8: tl.int64}[size]
    return TopKPlan(
        config.block_rows, width(call, config), kept(call), **rows.known(call.dtype), bits=bits, word=word,
        most=2 ** (8 * size - 1) - 1, shift=shift, mask=2**shift - 1, least=-(2 ** (31 if narrow else 63)),
        largest=call.options["largest"],
    )  # fmt: skip


@BACKEND.implements("top_k", key=key, tiling=default_tiling, supports=supports, config=TopKConfig)
def top_k(call: Call, config: TopKConfig) -> tuple[Any, ...]:
    x, k, n = call.arrays["x"], call.dims["k"], call.dims["n"]
    values = fresh(call.outputs["values"][0], x.dtype, x.device)
    indices = fresh(values.shape, torch_dtype("int32"), x.device)
    (x,), rows = walk_rows(x.ndim - 1, x)
    kernel = top_k_passes_kernel if in_passes(call) else top_k_kernel
    launch(kernel, cdiv(rows.height, config.block_rows), call, x, values, indices,
           RowExtents(rows.height, rows.inner, n), rows.strides[0], k, plan=plan_of(call, rows, config),
           num_warps=config.num_warps)  # fmt: skip
    return values, indices


def gradient_tiling(call: Call) -> TopKConfig:
    """Not measured: a thread stores 16 zeros beside each other."""
    block_n = pow2_at_least(call.dims["n"], 16, 1024)
    return TopKConfig(block_rows=max(4 * lanes(call.target.arch) * 16 // block_n, 1), block_n=block_n, num_warps=4)


@BACKEND.implements("top_k_vjp", key=key, tiling=gradient_tiling, supports=supports_gradient, config=TopKConfig)
def top_k_vjp(call: Call, config: TopKConfig) -> tuple[Any, ...]:
    x, k, n = call.arrays["x"], call.dims["k"], call.dims["n"]
    d_x, tile = fresh(x.shape, x.dtype, x.device), config.block_rows * config.block_n
    launch(top_k_vjp_zeros_kernel, cdiv(d_x.numel(), tile), call, d_x, d_x.numel(), block=tile,
           num_warps=config.num_warps)  # fmt: skip
    (indices, d_values), rows = walk_rows(x.ndim - 1, call.arrays["indices"], call.arrays["d_values"])
    plan = ScatterPlan(config.block_rows, min(pow2_at_least(k), config.block_n), **rows.known("float32"))
    launch(top_k_vjp_kernel, cdiv(rows.height, config.block_rows), call, indices, d_values, d_x,
           RowExtents(rows.height, rows.inner, k), *rows.strides[:2], n, plan=plan,
           num_warps=config.num_warps)  # fmt: skip
    return (d_x,)
