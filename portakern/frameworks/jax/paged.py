"""The drop-in twin of JAX's ``ragged_paged_attention`` for TPUs on the paged_attention op."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from portakern.api import op
from portakern.errors import SpecError, UnsupportedError
from portakern.frameworks.jax.arrays import refuse_deleted

__all__ = ["ragged_paged_attention"]

NAME = "ragged_paged_attention"
LOWEST = -0.7 * float(jnp.finfo(jnp.float32).max)
"""JAX's default of what it adds to masked scores."""


def ragged_paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = LOWEST,
    k_scale: float | None = None,
    v_scale: float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """``jax.experimental.pallas.ops.tpu.ragged_paged_attention.ragged_paged_attention`` on the paged_attention op:
    causal attention of queries of several sequences over keys and values in pages, for decoding and chunks of prompts.

    A cache in which keys and values take turns is copied at each call, into one of keys and one of values: JAX's arrays
    have no strides. Where that counts keep two arrays, and call ``portakern.op("paged_attention")``.

    Args:
      q: (tokens, heads, d), the queries of one sequence behind those of the other.
      kv_pages: (pages, page_size, 2 * kv_heads, d): keys of head h at 2 h, its values at 2 h + 1. kv_heads divides
        heads.
      kv_lens: (sequences,), int32 or int64: how many keys each has, those of its own queries among them.
      page_indices: (sequences, pages_each), the pages of each sequence in the order of its keys.
      cu_q_lens: (sequences + 1,): where the queries of each begin, from 0 on, and where the last one's end.
      num_seqs: (1,): how many sequences there are. What kv_lens, page_indices and cu_q_lens hold behind these is not
        read.
      sm_scale: factor of the scores; the default is JAX's, 1 and not 1/sqrt(d).
      sliding_window: how many keys a query sees at most, its own among them.
      soft_cap: c: scores become c tanh(s/c).
      mask_value: JAX's default, None or -inf: a masked key has no weight, whatever the scores are.
      k_scale, v_scale: None: scales of 8-bit pages, which the op takes for each key head, are not passed on.
      num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes: not read: the op has tiles of its own.
      implementation: a portakern backend; None: chosen from the arrays.

    Returns:
      (tokens, heads, d), q's dtype. Tokens behind the last sequence, and queries that see no key, are zeros. No
      gradient, as in JAX.

    Raises:
      SpecError: shapes or dtypes that do not agree, a window or cap that is not positive. UnsupportedError: k_scale,
        v_scale, another mask_value; a gradient.
    """
    refuse_deleted(NAME, q=q, kv_pages=kv_pages, kv_lens=kv_lens, page_indices=page_indices, cu_q_lens=cu_q_lens)
    _refuse(sliding_window, soft_cap, mask_value, k_scale, v_scale)
    q, kv_pages = jnp.asarray(q), jnp.asarray(kv_pages)
    kv_lens, page_indices, cu_q_lens = map(jnp.asarray, (kv_lens, page_indices, cu_q_lens))
    _check(q, kv_pages, kv_lens, page_indices, cu_q_lens, jnp.shape(num_seqs))
    pages, size, combined, d = kv_pages.shape
    pairs = kv_pages.reshape(pages, size, combined // 2, 2, d)
    number = jnp.asarray(num_seqs)[0]
    at = jnp.arange(len(cu_q_lens))
    starts = jnp.where(at <= number, cu_q_lens, cu_q_lens[number])
    lens = jnp.where(at[:-1] < number, kv_lens, 0)
    found: jax.Array = op("paged_attention", backend=implementation)(
        q, pairs[..., 0, :], pairs[..., 1, :], page_indices, lens, starts,
        window=None if sliding_window is None else (sliding_window - 1, 0), scale=sm_scale, softcap=soft_cap,
    )  # fmt: skip
    return found


def _refuse(window: Any, cap: Any, mask_value: Any, k_scale: Any, v_scale: Any) -> None:
    """Refuse by name what the op cannot do."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            raise UnsupportedError(
                f"{NAME}: {name} is {scale!r}; expected None: a scale of 8-bit pages is not passed on; call "
                'portakern.op("paged_attention") with a scale for each key head'
            )
    if mask_value is not None and mask_value not in (LOWEST, -math.inf):
        raise UnsupportedError(
            f"{NAME}: mask_value is {mask_value!r}; expected {LOWEST}, JAX's default, -inf or None: a masked key has "
            "no weight here; leave it out"
        )
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window <= 0):
        raise SpecError(f"{NAME}: sliding_window is {window!r}; expected None or a number of keys, 1 or more")
    if cap is not None and not (isinstance(cap, int | float) and cap > 0):
        raise SpecError(f"{NAME}: soft_cap is {cap!r}; expected None or a number above 0")


def _check(
    q: jax.Array, kv_pages: jax.Array, kv_lens: jax.Array, page_indices: jax.Array, cu_q_lens: jax.Array,
    number: tuple[int, ...],
) -> None:  # fmt: skip
    """SpecError unless the shapes are JAX's."""
    for name, x, axes in (
        ("q", q, "(tokens, heads, d)"), ("kv_pages", kv_pages, "(pages, page_size, 2 * kv_heads, d)"),
        ("kv_lens", kv_lens, "(sequences,)"), ("page_indices", page_indices, "(sequences, pages_each)"),
        ("cu_q_lens", cu_q_lens, "(sequences + 1,)"),
    ):  # fmt: skip
        if x.ndim != axes.count(",") + 1 - axes.endswith(",)"):
            raise SpecError(f"{NAME}: {name} has shape {x.shape}; expected {axes}; reshape it")
    for name, x in (("kv_lens", kv_lens), ("page_indices", page_indices), ("cu_q_lens", cu_q_lens)):
        if x.dtype not in (jnp.int32, jnp.int64):
            raise SpecError(f"{NAME}: {name} is {x.dtype}; expected int32 or int64: cast it")
    combined, d = kv_pages.shape[2:]
    if combined % 2 or not combined or q.shape[1] % (combined // 2):
        raise SpecError(
            f"{NAME}: kv_pages has {combined} heads and q {q.shape[1]}; expected keys and values in turns, twice a "
            "number that divides q's"
        )
    if d != q.shape[2]:
        raise SpecError(f"{NAME}: kv_pages has heads of {d} elements and q of {q.shape[2]}; expected as many")
    if kv_pages.dtype != q.dtype:
        raise SpecError(f"{NAME}: kv_pages is {kv_pages.dtype} and q {q.dtype}; expected one dtype: cast kv_pages")
    sequences = len(page_indices)
    for name, shape, want in (
        ("kv_lens", kv_lens.shape, (sequences,)), ("cu_q_lens", cu_q_lens.shape, (sequences + 1,)),
        ("num_seqs", number, (1,)),
    ):  # fmt: skip
        if shape != want:
            raise SpecError(
                f"{NAME}: {name} has shape {shape}; expected {want}, of page_indices for {sequences} sequences"
            )
