"""Attention over a sequence that lies on the devices of a mesh's axis, inside ``jax.shard_map``: keys and values travel
around their ring while each device attends to those that it has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from portakern.api import op
from portakern.core.ring import Layout, Pair, Visible, check_shapes, checked_lengths, chunks, pairs, steps, zigzag_order
from portakern.errors import SpecError, UnsupportedError
from portakern.frameworks.jax.tracing import varying_alike

__all__ = ["from_zigzag", "ring_attention", "to_zigzag"]

NAME = "ring_attention"
NARROW = (jnp.float16, jnp.bfloat16)
"""Dtypes in which partial results would be rounded before they are added."""


def to_zigzag(x: Any, count: int, axis: int = 1) -> jax.Array:
    """A full sequence in the order in which ``count`` devices hold it: what ``jax.shard_map`` cuts along ``axis`` for
    :func:`ring_attention`.

    Device r holds chunks r and 2 count - 1 - r of 2 count equal chunks, so that all have equal work under a causal
    mask. Labels and positions (``jnp.arange``) are cut in the same way.

    Args:
      x: (..., length, ...), of which ``axis`` is the sequence; count: the devices.

    Raises:
      SpecError: a length that 2 count does not divide.
    """
    return jnp.take(x, jnp.array(zigzag_order(x.shape[axis], count)), axis)


def from_zigzag(x: Any, count: int, axis: int = 1) -> jax.Array:
    """The sequence whose order :func:`to_zigzag` changed.

    Raises:
      SpecError: a length that 2 count does not divide.
    """
    return jnp.take(x, jnp.argsort(jnp.array(zigzag_order(x.shape[axis], count))), axis)


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    axis_name: str,
    *,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    precision: str = "ieee",
    order: str = "zigzag",
    lengths: Sequence[int] | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of the queries of this device to the keys of all devices along an axis of the mesh, with gradients:
    inside ``jax.shard_map``, which cuts query, key and value along the sequence.

    Keys and values go around the ring of devices by ``ppermute``, which depends on no call of a step, so that the
    compiler may run both at once. Partial results are float32, merged by their log-sum-exp, and rounded once (float64
    for float64). In the backward pass the gradients of keys and values travel with them, in float32, and each device
    computes the pairs of the forward pass again, given the full o and log-sum-exp. Where a window leaves pairs of
    devices without a pair of tokens, the ring stops early.

    The sources are Liu, Zaharia, Abbeel 2023, "Ring attention with blockwise transformers", and the zigzag order of
    Zhu 2024, "ring-flash-attention".

    Args:
      query: (batch, tokens, heads, d); key: (batch, tokens, kv_heads, d); value: (batch, tokens, kv_heads, dv).
        kv_heads divides heads. All of the same tokens.
      axis_name: the axis of the mesh along which the sequence lies.
      is_causal: a token sees those before it in the sequence, and itself.
      window: (left, right): a token sees those from left before it to right behind it, None on a side without an end.
      scale, softcap, precision: as in the op ``attention``.
      order: "zigzag": devices hold what :func:`to_zigzag` gives them; "contiguous": device r holds the tokens behind
        those of device r - 1.
      lengths: how many tokens each device holds, in "contiguous" order, where they are not as many as the array has:
        what lies behind them is padding, which nobody sees and whose results and gradients are 0.
      return_lse: whether the log-sum-exp comes with the result.
      backend: the backend that must run it; None: chosen from the arrays.

    Returns:
      (batch, tokens, heads, dv), query's dtype; with return_lse a pair with lse, (batch, heads, tokens), float32
      (float64 for float64). Both have gradients, of first order.

    Raises:
      SpecError: shapes that do not agree, an unknown order, lengths that are not of all devices or longer than the
        array, or that are odd or differ in zigzag. UnsupportedError: outside shard_map, or an axis that it does not
        have.
    """
    _check(query, key, value)
    try:
        count = lax.axis_size(axis_name)
    except NameError:
        raise UnsupportedError(
            f"{NAME}: axis_name is {axis_name!r}, which no shard_map around this call has; call it inside "
            f"jax.shard_map with arrays cut along the sequence, in_specs=(jax.P(None, {axis_name!r}),) * 3"
        ) from None
    tokens = query.shape[1]
    sizes = checked_lengths(lengths, tokens, count)
    if max(sizes) > tokens:
        raise SpecError(
            f"{NAME}: lengths is {sizes} on devices that hold {tokens} tokens each, padding among them; expected no "
            "number above that"
        )
    options = (("scale", scale), ("softcap", softcap), ("precision", precision))
    # what the op refuses is refused where no call is made too
    op("attention", backend=backend).bind(query, key, value, **dict(options), is_causal=is_causal, window=window)
    mask = (("is_causal", is_causal), ("window", None if window is None else tuple(window)))
    visible = Visible.of(is_causal, window)
    ring = RotatingCall(axis_name, count, chunks(order, sizes), visible, mask, options, backend, return_lse)
    found = _attention(ring, *varying_alike([query, key, value]))
    return found if return_lse else found[0]


def _check(query: Any, key: Any, value: Any) -> None:
    check_shapes(query=query.shape, key=key.shape, value=value.shape)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise SpecError(f"{NAME}: {name} is {x.dtype}; expected {query.dtype}, as query is: cast it")


class RotatingCall(NamedTuple):
    """The devices of a call, and the options of its parts.

    Attributes:
      axis; devices: the mesh's axis, and its devices. layout: of each the chunks of the sequence that it holds.
      visible: the keys that a query sees, as the options ``mask`` say it. options: of all calls. with_lse: whether the
        log-sum-exp is a result.
    """

    axis: str
    devices: int
    layout: Layout
    visible: Visible
    mask: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]
    backend: str | None
    with_lse: bool

    @property
    def steps(self) -> int:
        return steps(self.layout, self.visible)

    def shifted(self, arrays: Any, by: int) -> Any:
        """What the device ``by`` before this one on the ring has."""
        routes = [(r, (r + by) % self.devices) for r in range(self.devices)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, routes), arrays)

    def each_device(self, step: int, body: Callable[..., Any], *arrays: Any) -> Any:
        """``body`` of the calls that this device makes at a step: a branch for each of those that devices make."""
        calls = [pairs(self.layout, self.visible, r, (r - step) % self.devices) for r in range(self.devices)]
        kinds = list(dict.fromkeys(calls))
        branches = [functools.partial(body, kind) for kind in kinds]
        if len(kinds) == 1:
            return branches[0](*arrays)
        return lax.switch(jnp.array([kinds.index(c) for c in calls])[lax.axis_index(self.axis)], branches, *arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(ring: RotatingCall, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    return _saving(ring, q, k, v)[0]


def _saving(ring: RotatingCall, q: Any, k: Any, v: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    o, lse = _forward(ring, q, k, v)
    return (o, lse) if ring.with_lse else (o,), (q, k, v, o, lse)


def _forward(ring: RotatingCall, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    attention, merge = op("attention", backend=ring.backend), op("merge_states", backend=ring.backend)
    wide = jnp.float32 if q.dtype in NARROW else q.dtype

    def body(calls: tuple[Pair, ...], state: tuple[Any, Any] | None, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        o, lse = _no_keys(q, v, wide) if state is None else state
        for pair in calls:
            rows, keys = slice(pair.q_first, pair.q_end), slice(pair.kv_first, pair.kv_end)
            found = attention(
                q[:, rows],
                k[:, keys],
                v[:, keys],
                return_lse=True,
                out_dtype="float32" if q.dtype in NARROW else None,
                **pair.options(dict(ring.options), dict(ring.mask)),
            )
            if state is not None or len(calls) > 1:
                found = merge(o[:, rows], lse[:, :, rows], *found)
            o, lse = o.at[:, rows].set(found[0]), lse.at[:, :, rows].set(found[1])
        return o, lse

    state: Any = None
    for step in range(ring.steps):
        coming = ring.shifted((k, v), 1) if step < ring.steps - 1 else None
        state = ring.each_device(step, body, state, q, k, v)
        k, v = (k, v) if coming is None else coming
    o, lse = state
    return o.astype(q.dtype), lse


def _no_keys(q: Any, v: Any, dtype: Any) -> tuple[Any, Any]:
    """o and lse of queries that have seen no key."""
    batch, tokens, heads, _ = q.shape
    o, lse = jnp.zeros((batch, tokens, heads, v.shape[3]), dtype), jnp.full((batch, heads, tokens), -jnp.inf, dtype)
    o, lse, _ = varying_alike([o, lse, q])
    return o, lse


def _backward(ring: RotatingCall, saved: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """d_q, d_k, d_v. What a device adds to d_k and d_v follows the keys by a step."""
    (q, k, v, o, lse), vjp = saved, op("attention_vjp", backend=ring.backend)
    d_o, d_lse = (*cotangents, None)[:2]
    wide = jnp.float32 if q.dtype in NARROW else q.dtype

    def body(calls: tuple[Pair, ...], sums: tuple[Any, ...], k: Any, v: Any, *given: Any) -> tuple[Any, ...]:
        (d_q, d_k, d_v), (q, o, lse, d_o, *of_lse) = sums, given
        for pair in calls:
            rows, keys = slice(pair.q_first, pair.q_end), slice(pair.kv_first, pair.kv_end)
            by_q, by_k, by_v = vjp(
                q[:, rows],
                k[:, keys],
                v[:, keys],
                o[:, rows],
                lse[:, :, rows],
                d_o[:, rows],
                d_lse=of_lse[0][:, :, rows] if of_lse else None,
                wants=("d_q", "d_k", "d_v"),
                gradient_dtype="float32" if q.dtype in NARROW else None,
                **pair.options(dict(ring.options), dict(ring.mask)),
            )[:3]
            d_q, d_k, d_v = d_q.at[:, rows].add(by_q), d_k.at[:, keys].add(by_k), d_v.at[:, keys].add(by_v)
        return d_q, d_k, d_v

    given = (q, o, lse, d_o) if d_lse is None else (q, o, lse, d_o, d_lse)
    d_q, own_k, own_v = (varying_alike([jnp.zeros(x.shape, wide), q])[0] for x in (q, k, v))
    sums: Any = None
    for step in range(ring.steps):
        summed = None if sums is None else ring.shifted(sums, 1)
        coming = ring.shifted((k, v), 1) if step < ring.steps - 1 else None
        d_q, *own = ring.each_device(step, body, (d_q, own_k, own_v), k, v, *given)
        sums = own if summed is None else jax.tree.map(jnp.add, summed, own)
        k, v = (k, v) if coming is None else coming
    d_k, d_v = ring.shifted(sums, 1 - ring.steps) if ring.steps > 1 else sums
    return d_q.astype(q.dtype), d_k.astype(q.dtype), d_v.astype(q.dtype)


_attention.defvjp(_saving, _backward)
