"""Each token's rows, where positions say that they stand, weighted and summed; and the gradients.

    y[t] = sum_j weights[t, j] x[positions[t, j]]
    d_x[positions[t, j]] = weights[t, j] d_y[t]        d_weights[t, j] = d_y[t] . x[positions[t, j]]

x: (rows, d), positions and weights: (tokens, k) -> y: (tokens, d). A program owns ``block_n`` numbers: of one token, or
of several short ones. It adds the terms of its tokens in the order of j, whatever others name. Of a position that is no
row nothing is read.

The gradient of x is gathered too, from ``owners``: integers that say which term names each row, written at the terms'
positions over a negative number. So every row is written once, that of no token with zeros, and nothing is added from
two sides. A program of the gradient of the weights owns some terms, and reads their rows and cotangents once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import EmbeddingConfig
from portakern.backends.triton.gpu.embedding import own_tile, programs, refused, rows_and_numbers
from portakern.backends.triton.launch import accumulator, cdiv, launch, torch_dtype
from portakern.backends.triton.layout import fresh

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call

INTEGERS = 1024
"""Integers that a program writes."""


class TermExtents(NamedTuple):
    """``tokens`` of ``terms`` each; ``rows`` of d numbers, of which terms name some."""

    tokens: int
    terms: int
    rows: int
    d: int


class TermsTile(NamedTuple):
    """What kernels are compiled for: the tokens, rows or terms that a program owns, the numbers of each that it reads
    at once, and what sums are kept in."""

    block_rows: int
    block_n: int
    acc_dtype: tl.dtype


@triton.jit
def unpermute_kernel(x, positions, weights, y, extents, strides, tile: tl.constexpr):
    """positions, weights: (tokens, terms), contiguous; weights of None are 1."""
    of_row, of_number = strides
    token, n = own_tile(extents.d, tile)
    token_ok, n_ok = token < extents.tokens, n < extents.d
    acc = tl.full([tile.block_rows, tile.block_n], 0.0, tile.acc_dtype)
    for j in range(extents.terms):
        term = token * extents.terms + j
        row = tl.load(positions + term, mask=token_ok, other=-1).to(tl.int64)
        there = (row >= 0) & (row < extents.rows)
        at = x + (row * of_row)[:, None] + (n * of_number)[None, :]
        found = tl.load(at, mask=there[:, None] & n_ok[None, :], other=0.0).to(tile.acc_dtype)
        if weights is not None:
            found *= tl.load(weights + term, mask=there, other=0.0).to(tile.acc_dtype)[:, None]
        acc += found
    ok = token_ok[:, None] & n_ok[None, :]
    tl.store(y + (token * extents.d)[:, None] + n[None, :], acc.to(y.dtype.element_ty), mask=ok)


@triton.jit
def unpermute_vjp_nobody_kernel(owners, rows, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    tl.store(owners + row, tl.full([block], -1, tl.int32), mask=row < rows)


@triton.jit
def unpermute_vjp_owners_kernel(positions, owners, terms, rows, block: tl.constexpr):
    term = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    row = tl.load(positions + term, mask=term < terms, other=-1).to(tl.int64)
    tl.store(owners + row, term.to(tl.int32), mask=(row >= 0) & (row < rows))


@triton.jit
def unpermute_vjp_kernel(owners, weights, d_y, d_x, extents, strides, tile: tl.constexpr):
    """Rows of d_x, each a cotangent times the weight of the term that names the row, or zeros."""
    of_token, of_number = strides
    row, n = own_tile(extents.d, tile)
    row_ok, n_ok = row < extents.rows, n < extents.d
    term = tl.load(owners + row, mask=row_ok, other=-1).to(tl.int64)
    there = term >= 0
    weight = tl.load(weights + term, mask=there, other=0.0).to(tile.acc_dtype)
    at = d_y + (term // extents.terms * of_token)[:, None] + (n * of_number)[None, :]
    g = tl.load(at, mask=there[:, None] & n_ok[None, :], other=0.0).to(tile.acc_dtype)
    found = (g * weight[:, None]).to(d_x.dtype.element_ty)
    tl.store(d_x + (row * extents.d)[:, None] + n[None, :], found, mask=row_ok[:, None] & n_ok[None, :])


@triton.jit
def unpermute_vjp_dots_kernel(x, positions, d_y, d_weights, extents, x_strides, d_y_strides, tile: tl.constexpr):
    """A dot of a row and a cotangent for each term; its sums lie across a tile until the last of them."""
    of_row, x_number = x_strides
    of_token, g_number = d_y_strides
    term = tl.program_id(0).to(tl.int64) * tile.block_rows + tl.arange(0, tile.block_rows)
    term_ok = term < tl.cast(extents.tokens, tl.int64) * extents.terms
    row = tl.load(positions + term, mask=term_ok, other=-1).to(tl.int64)
    there = (row >= 0) & (row < extents.rows)
    x_row, g_row = x + (row * of_row)[:, None], d_y + (term // extents.terms * of_token)[:, None]
    acc = tl.full([tile.block_rows, tile.block_n], 0.0, tile.acc_dtype)
    for first in range(0, extents.d, tile.block_n):
        n = (first + tl.arange(0, tile.block_n))[None, :].to(tl.int64)
        ok = there[:, None] & (n < extents.d)
        found = tl.load(x_row + n * x_number, mask=ok, other=0.0).to(tile.acc_dtype)
        acc += found * tl.load(g_row + n * g_number, mask=ok, other=0.0).to(tile.acc_dtype)
    tl.store(d_weights + term, tl.sum(acc, 1).to(d_weights.dtype.element_ty), mask=term_ok)


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype}


def default_tiling(call: Call) -> dict[str, int]:
    """Not measured: 8 sums in float32 for each thread of 4 warps."""
    return {"block_n": 1024, "num_warps": 4}


def extents_of(call: Call, x: torch.Tensor, positions: torch.Tensor) -> TermExtents:
    return TermExtents(*positions.shape, *x.shape)


def supports(call: Call, config: EmbeddingConfig) -> str | None:
    return refused(call, config, call.dims["tokens"])


def weighted_sums(
    call: Call, config: EmbeddingConfig, x: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """y of rows x; ``weights``: None for 1."""
    extents = extents_of(call, x, positions)
    y = fresh((extents.tokens, extents.d), x.dtype, x.device)
    tile = TermsTile(*rows_and_numbers(extents.d, config.block_n), accumulator(call.dtype))
    launch(unpermute_kernel, programs(extents.tokens, extents.d, config.block_n), call, x, positions.contiguous(),
           None if weights is None else weights.contiguous(), y, extents, x.stride(), tile=tile,
           num_warps=config.num_warps)  # fmt: skip
    return y


@BACKEND.implements("unpermute", tiling=default_tiling, key=key, supports=supports, config=EmbeddingConfig)
def unpermute(call: Call, config: EmbeddingConfig) -> tuple[Any]:
    arrays = call.arrays
    return (weighted_sums(call, config, arrays["x"], arrays["positions"], arrays["weights"]),)


# ------------------------------------------------------------------------------------------------------------- gradient
def supports_gradient(call: Call, config: EmbeddingConfig) -> str | None:
    terms = call.dims["tokens"] * call.dims["k"]
    if terms >= 2**31:
        return f"{terms} terms: they are counted to 2^31 - 1; take the gradients of fewer tokens at a time"
    return refused(call, config, max(call.dims["rows"], terms))


def owners_of(call: Call, config: EmbeddingConfig, positions: torch.Tensor, rows: int) -> torch.Tensor:
    """Which term names each row; -1 for none."""
    owners = fresh((rows,), torch_dtype("int32"), positions.device)
    launch(unpermute_vjp_nobody_kernel, cdiv(rows, INTEGERS), call, owners, rows, block=INTEGERS,
           num_warps=config.num_warps)  # fmt: skip
    terms = positions.numel()
    launch(unpermute_vjp_owners_kernel, cdiv(terms, INTEGERS), call, positions, owners, terms, rows, block=INTEGERS,
           num_warps=config.num_warps)  # fmt: skip
    return owners


@BACKEND.implements("unpermute_vjp", tiling=default_tiling, key=key, supports=supports_gradient, config=EmbeddingConfig)
def unpermute_vjp(call: Call, config: EmbeddingConfig) -> tuple[Any, ...]:
    x, d_y = call.arrays["x"], call.arrays["d_y"]
    positions, weights = (call.arrays[name].contiguous() for name in ("positions", "weights"))
    extents, d_x, d_weights = extents_of(call, x, positions), None, None
    tile = TermsTile(*rows_and_numbers(extents.d, config.block_n), accumulator(call.dtype))
    if "d_x" in call.wants:
        d_x = fresh(x.shape, torch_dtype(call.outputs["d_x"][1]), x.device)
        launch(unpermute_vjp_kernel, programs(extents.rows, extents.d, config.block_n), call,
               owners_of(call, config, positions, extents.rows), weights, d_y, d_x, extents, d_y.stride(), tile=tile,
               num_warps=config.num_warps)  # fmt: skip
    if "d_weights" in call.wants:
        d_weights = fresh(weights.shape, weights.dtype, weights.device)
        launch(unpermute_vjp_dots_kernel, cdiv(weights.numel(), tile.block_rows), call, x, positions, d_y, d_weights,
               extents, x.stride(), d_y.stride(), tile=tile, num_warps=config.num_warps)  # fmt: skip
    return d_x, d_weights
