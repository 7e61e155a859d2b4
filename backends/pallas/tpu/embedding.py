"""The rows of a table that ids name on TPUs, and the gradient of the table.

    y[t] = weight[ids[t]]        d_weight[r] = sum of d_y[t] over the tokens t with ids[t] = r

weight: (rows, d), ids: (tokens) -> y: (tokens, d). Forward the grid is (blocks of tokens, blocks of d). A block has as
many tokens as a native tile has rows, and for each of them a step reads the ``TALL`` rows of the table among which its
own lies, the fewest that can be moved: their block's index is read in scalar memory by the index map. Numbers are words
of 32 bits, or halves of them, which are chosen and put together as integers, so that no bit of one changes. A row that
there is not is NaN.

    order = tokens by row, those of one row as they came        (XLA's stable sort)

Of the gradient XLA sorts the tokens and gathers their cotangents. The grid is (blocks of d, visits): a visit adds the
tokens of one block, ``block_tokens`` of them beside each other in that order, to the rows of one block of the table,
which stays in VMEM until all of its tokens were added. A block of rows without tokens has one visit, which writes
zeros. Each row is the sum over its tokens one after the other, whatever lies beside them in a block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import EmbeddingConfig, EmbeddingGradientConfig
from portakern.backends.pallas.lib.blocks import Blocks, Refs, even_block, padded, quotient
from portakern.backends.pallas.lib.mosaic_tpu.chip import (
    LANES,
    dtype_refused,
    launch,
    off_grid,
    over_vmem,
    sublanes,
)
from portakern.backends.pallas.tpu.kv_append import MOST_SCALARS
from portakern.core.call import Call

TALL = 8
"""Rows of the table that are read for one token."""


# ------------------------------------------------------------------------------------------------------------- forward
def kernel(ref: Refs, *, tokens: int, missing: float) -> None:
    """``found``: the numbers of the block of y, as integers of 32 bits, of two rows each where numbers have 16;
    ``missing``: those of a row that there is not."""
    dtype, first, low = ref.y.dtype, pl.program_id(0) * tokens, None
    half = dtype.itemsize == 2
    nothing = int(np.array(missing, dtype).view(np.uint16 if half else np.uint32))
    for j in range(tokens):
        row = ref.ids[first + j]
        word = jnp.where(row < 0, nothing, word_of(ref, j, row))
        if half and j % 2 == 0:
            low = word
        elif half:
            ref.found[j // 2 : j // 2 + 1, :] = low | (word << 16)
        else:
            ref.found[j : j + 1, :] = word
    ref.y[...] = pltpu.bitcast(ref.found[...], dtype)


def word_of(ref: Refs, j: int, row: Any) -> Any:
    """The numbers of the row of token ``j`` of a block, as integers of 32 bits, (1, n): its bits, or those of 16 below.
    ``words``: what was read, of two rows each where numbers have 16 bits."""
    x, at = vars(ref)[f"row{j}"], row & (TALL - 1)
    if x.dtype.itemsize == 4:
        return lax.bitcast_convert_type(x[pl.ds(at, 1), :], jnp.int32)
    begin = j * (TALL // 2)
    ref.words[begin : begin + TALL // 2, :] = pltpu.bitcast(x[...], jnp.int32)
    word = ref.words[pl.ds(begin + (at >> 1), 1), :]
    return lax.shift_right_logical(word, jnp.full(word.shape, (at & 1) * 16, jnp.int32)) & 0xFFFF


def rows_named(call: Call) -> jax.Array:
    """The row that each token names; a negative number where its id is none."""
    ids = call.arrays["ids"].reshape(-1)
    return jnp.where((ids >= 0) & (ids < call.dims["rows"]), ids, -1).astype(jnp.int32)


def tokens_of(call: Call) -> int:
    return prod(call.dims["batch"])


def too_many_scalars(needed: int, what: str) -> str | None:
    """Why scalar memory does not hold so many bytes, or None."""
    if needed <= MOST_SCALARS:
        return None
    return f"{what} take {needed} bytes of scalar memory, which has {MOST_SCALARS} for them: give fewer tokens at once"


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype}


def default_tiling(call: Call) -> EmbeddingConfig:
    """Not measured: the rows that are read for a block of tokens, twice, are 4 MiB."""
    return EmbeddingConfig(block_n=4096)


def supports(call: Call, config: EmbeddingConfig) -> str | None:
    return refused(call, config, tokens_of(call), f"the ids of {tokens_of(call)} tokens")


def refused(call: Call, config: EmbeddingConfig, number: int, what: str) -> str | None:
    """Why :func:`gathered` cannot take ``number`` rows."""
    dtype, d = jnp.dtype(call.dtype), call.dims["d"]
    tokens, n = sublanes(dtype), even_block(d, config.block_n, LANES)
    return (
        dtype_refused(call)
        or off_grid("block_n", config.block_n, d, LANES)
        or too_many_scalars(4 * padded(number, tokens), what)
        or over_vmem(call, resident(tokens, n, dtype.itemsize), "block_n")
    )


def scratch_of(tokens: int, n: int, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The words of :func:`kernel`, with numbers of ``size`` bytes."""
    heights = {"found": tokens * size // 4} | ({"words": tokens * TALL // 2} if size == 2 else {})
    return {name: jax.ShapeDtypeStruct((height, n), jnp.int32) for name, height in heights.items()}


def resident(tokens: int, n: int, size: int) -> int:
    """The VMEM, in bytes, of one step: rows and results, each twice, and words."""
    words = sum(4 * prod(form.shape) for form in scratch_of(tokens, n, size).values())
    return 2 * tokens * (TALL + 1) * n * size + words


@BACKEND.implements("embedding", key=key, tiling=default_tiling, supports=supports, config=EmbeddingConfig)
def embedding(call: Call, config: EmbeddingConfig) -> tuple[jax.Array]:
    y = gathered(call, config, call.arrays["weight"], rows_named(call), np.nan)
    return (y.reshape(*call.dims["batch"], call.dims["d"]),)


def gathered(call: Call, config: EmbeddingConfig, table: jax.Array, ids: jax.Array, missing: float) -> jax.Array:
    """The rows that ids name, (ids, d); of a negative id nothing but ``missing``."""
    number, d, size = ids.size, call.dims["d"], table.dtype.itemsize
    tokens, n = sublanes(table.dtype), even_block(d, config.block_n, LANES)
    ids = jnp.pad(ids, (0, padded(number, tokens) - number), constant_values=-1)
    found = launch(
        call,
        partial(kernel, tokens=tokens, missing=missing),
        f"portakern_{call.spec.name}",
        (pl.cdiv(number, tokens), pl.cdiv(d, n)),
        in_order=0,
        scalars={"ids": ids},
        inputs=rows_of(table, tokens, n, lambda j, i, c: i * tokens + j),
        outputs={
            "y": (jax.ShapeDtypeStruct((number, d), table.dtype), pl.BlockSpec((tokens, n), lambda i, c, _: (i, c)))
        },
        scratch=scratch_of(tokens, n, size),
        vmem=resident(tokens, n, size),
        cost=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=(TALL + 1) * number * d * size),
    )
    return found["y"]


def rows_of(table: jax.Array, tokens: int, n: int, position: Callable[..., Any]) -> Blocks:
    """For each token of a block the rows among which the one lies that an id names: the id at ``position(j, *step)`` of
    token ``j``. The second number of a step is that of the block along d."""

    def index(j: int, *step: Any) -> tuple[Any, Any]:
        return quotient(jnp.maximum(step[-1][position(j, *step[:-1])], 0), TALL), step[1]

    return {f"row{j}": (table, pl.BlockSpec((TALL, n), partial(index, j))) for j in range(tokens)}


# ------------------------------------------------------------------------------------------------------------- gradient
class TokenVisits(NamedTuple):
    """What each step along the visits of the gradient does, in scalar memory.

    Attributes:
      rows, tokens: the block of rows that is summed, and that of tokens which are added.
      first, end: of these the ones that are the block's, from the block's first token on.
      begins, finishes: whether the sums of the block begin, and whether they are whole.
    """

    rows: jax.Array
    tokens: jax.Array
    first: jax.Array
    end: jax.Array
    begins: jax.Array
    finishes: jax.Array

    @classmethod
    def of(cls, row: jax.Array, rows: int, block_rows: int, block_tokens: int) -> TokenVisits:
        """``row``: of each token in order; tokens of no row stand last."""
        down, across = pl.cdiv(rows, block_rows), pl.cdiv(row.size, block_tokens)
        borders = jnp.minimum(jnp.arange(down + 1, dtype=jnp.int32) * block_rows, rows)
        border = jnp.searchsorted(row, borders, side="left").astype(jnp.int32)
        start, end = border[:-1], border[1:]
        before = quotient(start, block_tokens)
        count = jnp.where(end > start, quotient(end + (block_tokens - 1), block_tokens) - before, 1)
        after = jnp.cumsum(count, dtype=jnp.int32)
        step = jnp.arange(down + across, dtype=jnp.int32)
        there, one = step < after[-1], jnp.minimum(step, after[-1] - 1)
        block = jnp.searchsorted(after, one, side="right").astype(jnp.int32)
        at = jnp.minimum(before[block] + one - (after - count)[block], across - 1)
        first, last = (jnp.clip(x[block] - at * block_tokens, 0, block_tokens) for x in (start, end))
        last = jnp.where(there, last, first)
        begins, finishes = there & (one == (after - count)[block]), there & (one == after[block] - 1)
        return cls(block, at, first, last, begins.astype(jnp.int32), finishes.astype(jnp.int32))


def sum_of_tokens(ref: Refs) -> None:
    """A visit: each of its tokens is added to its row."""
    visit, tokens, rows = pl.program_id(1), ref.wide.shape[0], ref.acc.shape[0]

    @pl.when(ref.begins[visit] == 1)
    def begin() -> None:
        ref.acc[...] = jnp.zeros_like(ref.acc)

    @pl.when(ref.end[visit] > ref.first[visit])
    def add() -> None:
        ref.wide[...] = ref.d_y[...].astype(jnp.float32)
        start, base = ref.tokens[visit] * tokens, ref.rows[visit] * rows

        def one(t: Any, _: Any) -> Any:
            own = pl.ds(ref.row[start + t] - base, 1)
            ref.acc[own, :] += ref.wide[pl.ds(t, 1), :]
            return _

        lax.fori_loop(ref.first[visit], ref.end[visit], one, None)

    @pl.when(ref.finishes[visit] == 1)
    def write() -> None:
        ref.d_weight[...] = ref.acc[...].astype(ref.d_weight.dtype)


class GradientBlocks(NamedTuple):
    """Rows, tokens and numbers of a block."""

    rows: int
    tokens: int
    n: int

    @classmethod
    def of(cls, call: Call, config: EmbeddingGradientConfig) -> GradientBlocks:
        grain = sublanes(call.arrays["d_y"].dtype)
        rows, tokens = (padded(x, grain) for x in (config.block_rows, config.block_tokens))
        return cls(rows, tokens, even_block(call.dims["d"], config.block_n, LANES))

    def resident(self, call: Call) -> int:
        """The VMEM, in bytes, of one step."""
        stored, size = (jnp.dtype(d).itemsize for d in (call.outputs["d_weight"][1], call.arrays["d_y"].dtype))
        return self.n * (self.rows * (4 + 2 * stored) + self.tokens * (4 + 2 * size))


def gradient_tiling(call: Call) -> EmbeddingGradientConfig:
    """Not measured: of 4096 numbers a block of rows, its sums and a block of tokens are 8 MiB in 16 bits, 12 in 32."""
    return EmbeddingGradientConfig(block_rows=128, block_tokens=128, block_n=4096)


def supports_gradient(call: Call, config: EmbeddingGradientConfig) -> str | None:
    blocks, rows, tokens = GradientBlocks.of(call, config), call.dims["rows"], tokens_of(call)
    grain = sublanes(call.arrays["d_y"].dtype)
    visits = pl.cdiv(rows, blocks.rows) + pl.cdiv(tokens, blocks.tokens)
    return (
        dtype_refused(call)
        or off_grid("block_rows", config.block_rows, rows, grain)
        or off_grid("block_tokens", config.block_tokens, tokens, grain)
        or off_grid("block_n", config.block_n, call.dims["d"], LANES)
        or too_many_scalars(4 * (tokens + len(TokenVisits._fields) * visits), f"{tokens} tokens and {visits} visits")
        or over_vmem(call, blocks.resident(call), "block_rows, block_tokens or block_n")
    )


@BACKEND.implements(
    "embedding_vjp", key=key, tiling=gradient_tiling, supports=supports_gradient, config=EmbeddingGradientConfig
)
def embedding_vjp(call: Call, config: EmbeddingGradientConfig) -> tuple[jax.Array]:
    rows, d, tokens = call.dims["rows"], call.dims["d"], tokens_of(call)
    d_y, padding = call.arrays["d_y"].reshape(tokens, d), call.options["padding_index"]
    size, stored = d_y.dtype.itemsize, jnp.dtype(call.outputs["d_weight"][1])
    if not tokens:
        return (jnp.zeros((rows, d), stored),)
    blocks, row = GradientBlocks.of(call, config), rows_named(call)
    nowhere = (row < 0) if padding is None else (row < 0) | (row == padding)
    row, order = lax.sort((jnp.where(nowhere, rows, row), jnp.arange(tokens, dtype=jnp.int32)), num_keys=1)
    d_y = d_y.at[order].get(mode="promise_in_bounds", unique_indices=True)
    visits = TokenVisits.of(row, rows, blocks.rows, blocks.tokens)
    found = launch(
        call,
        sum_of_tokens,
        "portakern_embedding_vjp",
        (pl.cdiv(d, blocks.n), visits.rows.size),
        in_order=1,
        scalars={**visits._asdict(), "row": row},
        inputs={
            "d_y": (d_y, pl.BlockSpec((blocks.tokens, blocks.n), lambda c, v, *s: (TokenVisits(*s[:-1]).tokens[v], c)))
        },
        outputs={
            "d_weight": (
                jax.ShapeDtypeStruct((rows, d), stored),
                pl.BlockSpec((blocks.rows, blocks.n), lambda c, v, *s: (TokenVisits(*s[:-1]).rows[v], c)),
            )
        },
        scratch={"acc": (blocks.rows, blocks.n), "wide": (blocks.tokens, blocks.n)},
        vmem=blocks.resident(call),
        cost=pl.CostEstimate(
            flops=tokens * d, transcendentals=0, bytes_accessed=d * (tokens * size + rows * stored.itemsize)
        ),
    )
    return (found["d_weight"],)
