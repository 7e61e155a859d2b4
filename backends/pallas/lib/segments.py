"""Which tiles of keys hold a segment that a tile of queries may have: packed documents visit no others.

Of each tile the least and the greatest id are known. Two tiles whose ranges of ids do not meet share no segment,
whatever the order of ids. A tile's span runs from the first to the last tile of the other side whose range meets its
own: for sorted ids a block on the diagonal, for shuffled ones all tiles. Pairs in a span are masked as before. A tile
all of whose pairs are masked leaves a row's sums as they are to the bit, so that no bit depends on what is passed by.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from portakern.backends.pallas.lib.blocks import padded
from portakern.core.call import Call

Span = tuple[Any, Any]
"""The first tile of a span, and the first one after it; both 0 where it holds none."""


def spans_of(
    call: Call,
    block_q: int,
    block_kv: int,
    *,
    by_key: bool = False,
    rows_per_query: int = 1,
    across_batch: bool = False,
) -> dict[str, jax.Array]:
    """A kernel's input ``spans``: :func:`spans` of a call's queries, or ``by_key`` of its keys. A call without segment
    ids has no such input. ``rows_per_query``: how many rows, of which block_q counts, a query has."""
    queries, keys = call.arrays["q_segment_ids"], call.arrays["kv_segment_ids"]
    if queries is None:
        return {}
    queries = jnp.repeat(queries, rows_per_query, axis=1) if rows_per_query > 1 else queries
    rows, columns = (queries, block_q), (keys, block_kv)
    return {"spans": spans(columns, rows, across_batch) if by_key else spans(rows, columns, across_batch)}


def spans(rows: tuple[jax.Array, int], columns: tuple[jax.Array, int], across_batch: bool = False) -> jax.Array:
    """(batch, tiles of rows, 2): the `Span` of each tile of rows, in tiles of columns, int32. ``rows``, ``columns``:
    segment ids, (batch, len), of any integers, and the length of a tile. ``across_batch``: one span for all batch
    entries, (1, tiles of rows, 2)."""
    dtype = jnp.promote_types(rows[0].dtype, columns[0].dtype)
    (least, most), (low, high) = (_ranges(ids.astype(dtype), block) for ids, block in (rows, columns))
    meets = (least[:, :, None] <= high[:, None, :]) & (low[:, None, :] <= most[:, :, None])
    if across_batch:
        meets = meets.any(axis=0, keepdims=True)
    tile, tiles = lax.broadcasted_iota(jnp.int32, meets.shape, 2), jnp.int32(meets.shape[2])
    first = jnp.min(jnp.where(meets, tile, tiles), axis=2)
    after = jnp.max(jnp.where(meets, tile + jnp.int32(1), jnp.int32(0)), axis=2)
    return jnp.stack([jnp.minimum(first, after), after], axis=2)


def span_at(spans: Any, batch: Any, tile: Any) -> Span:
    """The span of a tile, as a kernel reads it of :func:`spans` in memory."""
    return spans[batch, tile, 0], spans[batch, tile, 1]


def _ranges(ids: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """The least and the greatest id of each tile, (batch, tiles). What lies beyond the end has the last id."""
    batch, length = ids.shape
    whole = padded(length, block)
    tiles = jnp.pad(ids, ((0, 0), (0, whole - length)), "edge").reshape(batch, whole // block, block)
    return tiles.min(axis=2), tiles.max(axis=2)
