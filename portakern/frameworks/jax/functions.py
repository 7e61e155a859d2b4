"""Drop-in twins of JAX's own functions on portakern ops: the same arguments, the same semantics where JAX's differ from
the ops'.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from portakern.api import op
from portakern.errors import SpecError
from portakern.frameworks.jax.arrays import refuse_deleted
from portakern.spec.options import shown

__all__ = ["dot_product_attention", "lowered", "rotary_tables"]


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    broadcast_dropout: bool | None = None,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    promote_dtype: Any = None,
    force_fp32_for_softmax: bool = True,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
) -> Any:
    """``jax.nn.dot_product_attention`` on the attention op, also an ``attention_fn`` of flax's layers (nnx and linen).

    Causal masks and windows are aligned at the top left: query i is at the position of key i. A row with all keys
    masked is the mean of all values, and zeros if the query is beyond ``query_seq_lengths``. (A row masked by a bias of
    -inf is also the mean; JAX's XLA path gives NaN.)

    Args:
      query: (B, T, N, H) or (T, N, H); key, value: (B, S, K, H) or (S, K, H), where K divides N.
      bias: added to the scaled logits; mask: bool, True where a query attends to a key. Both have 4 axes (3 without B),
        broadcastable to (B, N, T, S).
      scale: factor of the logits; None: 1/sqrt(H).
      query_seq_lengths, key_value_seq_lengths: (B,) integers.
      local_window_size: (left, right) keys before and after its own that a query sees, or one int for both.
      implementation: a portakern backend (not JAX's xla or cudnn); None: chosen from the arrays.
      return_residual: also return the log-sum-exp, (B, T, N) in key's dtype, without a gradient.
      dtype: query, key and value are cast to it, by ``promote_dtype`` if that is given; None: no cast.
      broadcast_dropout, dropout_rng, dropout_rate, deterministic, precision, module, force_fp32_for_softmax,
        einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: arguments of flax's layers. Sums
        and weights are float32 for every precision; dropout, sown attention weights and replaced products are refused
        by name. A layer's mask may be numeric, where 0 masks a pair.

    Returns:
      query's shape with value's last axis; with return_residual a pair.

    Raises:
      SpecError: shapes or dtypes that do not agree. UnsupportedError: the backend cannot.
    """
    _refuse_what_layers_ask(
        dropout_rate=None if deterministic or not dropout_rate else dropout_rate,
        module=module, precision=lowered(precision), einsum_dot_general=einsum_dot_general,
        qk_attn_weights_einsum=qk_attn_weights_einsum, attn_weights_value_einsum=attn_weights_value_einsum,
    )  # fmt: skip
    refuse_deleted("dot_product_attention", query=query, key=key, value=value, bias=bias, mask=mask)
    if promote_dtype is not None:
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
    elif dtype is not None:
        query, key, value = (jnp.asarray(a).astype(dtype) for a in (query, key, value))
    if broadcast_dropout is not None and mask is not None:  # a layer calls, and flax's masks are numbers by default
        mask = jnp.asarray(mask) != 0
    attend = functools.partial(
        _attend, scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths, local_window_size=local_window_size,
        implementation=implementation, return_residual=return_residual,
    )  # fmt: skip
    if jnp.ndim(query) == 3:
        lone = [None if a is None else jnp.asarray(a)[None] for a in (query, key, value, bias, mask)]
        return jax.tree.map(lambda x: x[0], attend(*lone))
    return attend(query, key, value, bias, mask)


def _attend(
    query: Any, key: Any, value: Any, bias: Any, mask: Any, *, scale: float | None, is_causal: bool,
    query_seq_lengths: Any, key_value_seq_lengths: Any, local_window_size: Any, implementation: str | None,
    return_residual: bool,
) -> Any:  # fmt: skip
    """:func:`dot_product_attention` of arrays of 4 axes."""
    query, key, value = map(jnp.asarray, (query, key, value))
    attention = op("attention", backend=implementation)
    if query.ndim != 4 or key.ndim != 4:
        attention.bind(query, key, value)  # says what is wrong
    (batch, t, heads, _), s = query.shape, key.shape[1]
    bias = _additive(bias, mask, query.dtype, (batch, heads, t, s))
    left, right = _window(local_window_size, is_causal)
    rows = t if left is None else min(t, s + left)  # later queries are past every key that their window reaches
    columns = s if right is None else min(s, rows + right)  # later keys are past every query's
    segments = _segments(batch, (t, query_seq_lengths), (s, key_value_seq_lengths))
    hidden = bias is not None or segments is not None or left is not None
    delta = rows - columns  # the op aligns at the bottom right
    window = (
        None
        if left is None and right is None
        else (None if left is None else left - delta, None if right is None else right + delta)
    )
    ids = () if segments is None else (segments[0][:, :rows], segments[1][:, :columns])
    out = attention(
        query[:, :rows], key[:, :columns], value[:, :columns], None if bias is None else bias[:, :, :rows, :columns],
        *ids,
        scale=scale, window=window, return_lse=hidden or return_residual,
    )  # fmt: skip
    if not (hidden or return_residual):
        return out
    o = jnp.pad(out.o, ((0, 0), (0, t - rows), (0, 0), (0, 0)))
    lse = jnp.pad(jnp.swapaxes(out.lse, 1, 2), ((0, 0), (0, t - rows), (0, 0)), constant_values=-jnp.inf)
    blind = jnp.isneginf(lse)
    if hidden and s:
        o = jnp.where(_averaged(blind, query_seq_lengths)[..., None], _mean_value(value, heads).astype(o.dtype), o)
    if not return_residual:
        return o
    lowest = -0.7 * float(jnp.finfo(jnp.float32).max) + math.log(max(s, 1))
    return o, jax.lax.stop_gradient(jnp.where(blind, lowest, lse).astype(key.dtype))


_WHY = {
    "dropout_rate": "attention here drops no weights; pass deterministic=True, or leave dropout to another layer",
    "module": "weights are never stored, so that none can be shown to a module; pass sow_weights=False to the layer",
    "precision": "sums are as exact as float32 makes them; leave it out, or name a jax.lax.Precision",
}


def _refuse_what_layers_ask(**asked: Any) -> None:
    for name, value in asked.items():
        if value is not None:
            why = _WHY.get(name, "the products are the kernel's own; leave it out")
            raise SpecError(f"dot_product_attention: {name} is {shown(value)}; {why}")


def lowered(precision: Any) -> Any:
    """A precision that the op does not reach by being more exact, which is one that names its arithmetic; else None."""
    try:
        for one in precision if isinstance(precision, tuple) else (precision,):
            jax.lax.Precision(one)
    except ValueError:
        return precision
    return None


def _mean_value(value: jax.Array, heads: int) -> jax.Array:
    """The mean of all values, (B, 1, N, Hv) in float32."""
    mean = jnp.mean(value, axis=1, keepdims=True, dtype=jnp.float32)
    return jnp.repeat(mean, heads // value.shape[2], axis=2)


def _averaged(blind: jax.Array, query_seq_lengths: Any) -> jax.Array:
    """Which rows are the mean of all values, (B, T, N): those that see no key, but for queries beyond their length."""
    if query_seq_lengths is None:
        return blind
    within = jnp.arange(blind.shape[1]) < jnp.asarray(query_seq_lengths)[:, None]
    return blind & within[:, :, None]


def _additive(bias: Any, mask: Any, dtype: Any, full: tuple[int, ...]) -> Any:
    """bias and mask as one array to add, whose last axis is whole; None where there is neither."""
    for name, array in (("bias", bias), ("mask", mask)):
        if array is not None and (
            jnp.ndim(array) != 4 or any(n not in (1, m) for n, m in zip(jnp.shape(array), full, strict=True))
        ):
            raise SpecError(
                f"dot_product_attention: {name} has shape {jnp.shape(array)}; expected 4 axes that broadcast to (B, "
                f"N, T, S) = {full}"
            )
    if bias is not None:
        bias = jnp.asarray(bias)
        bias = bias if bias.dtype in (dtype, jnp.float32) else bias.astype(jnp.float32)
    if mask is not None:
        mask = jnp.asarray(mask)
        if mask.dtype != bool:
            raise SpecError(
                f"dot_product_attention: mask is {mask.dtype}; expected bool: pass an additive mask as bias"
            )
        bias = jnp.where(mask, jnp.zeros((), dtype) if bias is None else bias, -jnp.inf)
    return None if bias is None else jnp.broadcast_to(bias, (*bias.shape[:3], full[3]))


def _window(size: Any, is_causal: bool) -> tuple[int | None, int | None]:
    left, right = (None, None) if size is None else (size, size) if isinstance(size, int) else size
    return left, (0 if is_causal else right)


def _segments(batch: int, query: tuple[int, Any], key: tuple[int, Any]) -> tuple[jax.Array, jax.Array] | None:
    """Sequence lengths as segment ids: 0 within, and beyond what the other side does not have."""
    if query[1] is None and key[1] is None:
        return None

    def ids(length: int, lengths: Any, beyond: int) -> jax.Array:
        if lengths is None:
            return jnp.zeros((batch, length), jnp.int32)
        return jnp.where(jnp.arange(length) < jnp.asarray(lengths)[:, None], 0, beyond).astype(jnp.int32)

    return ids(*query, 1), ids(*key, 2)


def rotary_tables(
    positions: Any, inv_freq: Any, *, scaling: float = 1.0, dtype: Any = jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of the rope op, one column a pair: cos(p f) scaling and sin(p f) scaling.

    JAX has no float64 unless it is asked for, and an angle in float32 may be wrong by 0.008 at position 131072. So
    angles are counted in turns, in integers, of which whole turns fall away: f / 2 pi is a fraction of 2^64 (good to
    float64's 2^-53 of it), p times that is exact, and what remains is an eighth of a turn at most, to 2^-32 of a turn.
    The tables are within 2^-22 of exact ones, times scaling.

    Args:
      positions: (seq,) or (batch, seq), integers or floating-point numbers below 2^31, traced or not; of numbers that
        are not whole 2^-32 is what counts. inv_freq: (pairs,), values that are known while tracing: the angle of each
        pair from a token to the next, scaled as the model has it.
      scaling: the attention factor.
      dtype: dtype of the tables: float32, or that of the queries.

    Returns:
      cos, sin: (1 or batch, seq, pairs).

    Raises:
      SpecError: inv_freq is traced, or positions are no numbers, or too large.
    """
    if isinstance(inv_freq, jax.core.Tracer):
        raise SpecError(
            "rotary_tables: inv_freq is traced; expected values that are known while tracing, as NumPy's arrays are: "
            "compute it outside of the function that is transformed"
        )
    turns = np.asarray(inv_freq, np.float64) / (2 * np.pi) % 1.0
    high = np.floor(turns * 2.0**32)
    low = np.floor((turns * 2.0**32 - high) * 2.0**32)
    high, low = high.astype(np.uint32), low.astype(np.uint32)
    p, above, fraction = (x if x is None else jnp.asarray(x)[..., None] for x in _split(positions))
    part = p * jnp.asarray(high) + _upper(p, low) + above * jnp.asarray(low)
    if fraction is not None:
        part = part + _upper(fraction, high)
    eighth = part + jnp.uint32(1 << 29)  # the nearest quarter, and what is left of it, in 2^-32 of a turn
    quarter, rest = eighth >> 30, (eighth & jnp.uint32((1 << 30) - 1)).astype(jnp.int32) - (1 << 29)
    angle = rest.astype(jnp.float32) * np.float32(2 * np.pi / 2.0**32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    swapped = quarter % 2 == 1
    cos, sin = jnp.where(swapped, sin, cos), jnp.where(swapped, cos, sin)
    cos, sin = jnp.where((quarter == 1) | (quarter == 2), -cos, cos), jnp.where(quarter >= 2, -sin, sin)
    return (cos * scaling).astype(dtype), (sin * scaling).astype(dtype)


def _split(positions: Any) -> tuple[Any, Any, Any]:
    """Positions as 32-bit words: the lower and the upper one of their whole part in two's complement, and what is left
    in 2^-32, None of integers. NumPy's arrays are split by NumPy, for JAX would round them to 32 bits first."""
    here = not isinstance(positions, jax.Array)
    xp: Any = np if here else jnp
    p = xp.atleast_2d(np.asarray(positions) if here else positions)
    if not (jnp.issubdtype(p.dtype, jnp.integer) or jnp.issubdtype(p.dtype, jnp.floating)):
        raise SpecError(
            f"rotary_tables: positions are {p.dtype}; expected integers or floating-point numbers, where a token stands"
        )
    fraction = None
    if jnp.issubdtype(p.dtype, jnp.floating):
        if here and not np.all(np.abs(p) < 2.0**31):
            raise SpecError(
                f"rotary_tables: positions has {p[~(np.abs(p) < 2.0**31)][0]}; expected numbers below 2^31, where a "
                "token stands"
            )
        p = p if p.dtype.itemsize == 8 else p.astype(np.float32)
        whole = xp.floor(p)
        up = p - whole >= 1  # of a number just below 0 what is left is rounded to 1
        whole = whole + up
        fraction = (xp.where(up, 0, p - whole) * 2.0**32).astype(np.uint32)
        p = whole.astype(np.int64 if here else np.int32)
    above = p >> 32 if p.dtype.itemsize == 8 else xp.where(p < 0, -1, 0)
    return p.astype(np.uint32), above.astype(np.uint32), fraction


def _upper(a: jax.Array, b: Any) -> jax.Array:
    """The upper half of the product of two 32-bit numbers, in 32 bits."""
    b = jnp.asarray(b)
    a_low, a_high, b_low, b_high = a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16
    middle = a_high * b_low + (a_low * b_low >> 16)
    other = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (other >> 16)
