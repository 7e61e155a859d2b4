"""Attention written another way: one scalar at a time, and in plain operations of torch and JAX."""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np

from tests.ops._shared import normal64

inf = math.inf


def formula(q, k, v, bias=None, q_seg=None, kv_seg=None, sinks=None, slopes=None, is_causal=False, window=None,
            scale=None, softcap=None, return_lse=True, q_start=None, kv_start=None, out_dtype=None):  # fmt: skip
    """One scalar at a time, straight from the definition. Finite inputs, but for -inf in bias."""
    (batch, q_len, heads, d), (_, kv_len, kv_heads, dv) = q.shape, v.shape
    o, lse = np.zeros((batch, q_len, heads, dv)), np.full((batch, heads, q_len), -inf)
    scale = d**-0.5 if scale is None else scale
    left, right = window or (None, None)
    for b, h, i in np.ndindex(batch, heads, q_len):
        here, weights = i + (kv_len - q_len if q_start is None else q_start - (kv_start or 0)), {}
        for j in range(kv_len):
            s = scale * math.fsum(q[b, i, h, c] * k[b, j, h // (heads // kv_heads), c] for c in range(d))
            s = s if softcap is None else softcap * math.tanh(s / softcap)
            s = s if slopes is None else s - slopes[h] * abs(here - j)
            s = s if bias is None else s + bias[b % bias.shape[0], h % bias.shape[1], i % bias.shape[2], j]
            hidden = (
                (is_causal and j > here)
                or (left is not None and j < here - left)
                or (right is not None and j > here + right)
                or (q_seg is not None and q_seg[b, i] != kv_seg[b, j])
                or s == -inf
            )
            if not hidden:
                weights[j] = math.exp(s)
        beside = [] if sinks is None else [math.exp(sinks[h])]
        total = math.fsum([*weights.values(), *beside])
        if weights or beside:
            lse[b, h, i] = math.log(total)
            for c in range(dv):
                o[b, i, h, c] = math.fsum(p * v[b, j, h // (heads // kv_heads), c] for j, p in weights.items()) / total
    return o, lse


def formula_calls():
    windows = [None, (2, 0), (None, 1), (1, None), (0, 0), (3, 2), (None, None), (2**63 - 1, 2**80)]
    lengths = [(4, 4), (3, 7), (7, 3), (1, 5), (5, 1)]
    for (q_len, kv_len), causal, window in itertools.product(lengths, (False, True), windows):
        yield (
            f"{q_len} queries, {kv_len} keys, {'causal, ' * causal}window {window}",
            partial(masks_call, q_len, kv_len, {"is_causal": causal, "window": window}),
        )
    scores = [(None, None), (-0.7, None), (0.0, 2.0), (3.0, 1.5)]
    biases = [None, (1, 1, 1, 6), (2, 1, 5, 6), (1, 4, 1, 6), (2, 4, 5, 6)]
    for shape, (scale, softcap) in itertools.product(biases, scores):
        yield f"bias {shape}, scale {scale}, softcap {softcap}", partial(scores_call, shape, scale, softcap)
    for q_start, kv_start, window in itertools.product((0, 3, -2), (None, 0, 2, -4), (None, (2, 0), (1, None))):
        options = {"is_causal": window is None, "window": window, "q_start": q_start, "kv_start": kv_start}
        yield f"queries from {q_start}, keys from {kv_start}, window {window}", partial(masks_call, 5, 6, options)
    for options in ({}, {"q_start": 3, "kv_start": 7}, {"window": (2, 1), "softcap": 2.0, "q_start": 9}):
        yield f"slopes, {options}", partial(slopes_call, options)
    for masked in (False, True):
        yield f"sinks{', masked' * masked}", partial(sinks_call, masked)
    for dtype in ("int32", "int64"):
        yield f"segments of {dtype}", partial(segments_call, dtype)


def masks_call(q_len, kv_len, options):
    return (normal64(1, q_len, 2, 3), normal64(1, kv_len, 1, 3), normal64(1, kv_len, 1, 2)), options | {
        "return_lse": True
    }


def scores_call(shape, scale, softcap):
    q, k, v = normal64(2, 5, 4, 3), normal64(2, 6, 2, 3), normal64(2, 6, 2, 2)
    bias = None if shape is None else np.where(normal64(*shape) < -0.5, -inf, normal64(*shape))
    return (q, k, v, bias), {"return_lse": True} | {"scale": scale, "softcap": softcap, "is_causal": True}


def sinks_call(masked):
    sinks, arrays = normal64(4), (normal64(2, 5, 4, 3), normal64(2, 4, 2, 3), normal64(2, 4, 2, 2))
    return (*arrays, None, None, None, sinks), {"return_lse": True, "is_causal": masked, "softcap": 2.0}


def slopes_call(options):
    slopes, arrays = normal64(4), (normal64(2, 5, 4, 3), normal64(2, 6, 2, 3), normal64(2, 6, 2, 2))
    return (*arrays, normal64(1, 4, 1, 6), None, None, None, slopes), {"return_lse": True} | options


def segments_call(dtype):
    rng, top = np.random.default_rng(0), np.iinfo(dtype).max
    ids = [rng.choice([0, 1, top, top - 1], (2, n)).astype(dtype) for n in (5, 6)]
    return (normal64(2, 5, 2, 3), normal64(2, 6, 2, 3), normal64(2, 6, 2, 2), None, *ids), {"return_lse": True}


def visible(q, k, q_seg, kv_seg, is_causal, window):
    """Which pairs see each other, in what broadcasts over (batch, heads, q_len, kv_len), as NumPy and as arrays of
    q's.
    """
    here, j = np.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1], np.arange(k.shape[1])
    left, right = window or (None, None)
    seen = (j <= here) | (not is_causal)
    seen = seen if left is None else seen & (j >= here - left)
    seen = seen if right is None else seen & (j <= here + right)
    return seen, None if q_seg is None else (q_seg[:, None, :, None] == kv_seg[:, None, None, :])


def plain(xp, asarray, wide, narrow, q, k, v, bias=None, q_seg=None, kv_seg=None, sinks=None, slopes=None, *,
          is_causal=False, window=None, scale=None, softcap=None, return_lse=False, q_start=None, kv_start=None,
          out_dtype=None):  # fmt: skip
    """The same with the operations of ``xp``, torch or jax.numpy: scores in float32 at least, weights in v's dtype.

    Hidden pairs and rows without a key take no part in the arithmetic, so that they leave no NaN in a gradient either.
    """
    (batch, q_len, heads, d), (_, kv_len, kv_heads, dv) = q.shape, v.shape
    grouped = wide(q).reshape(batch, q_len, kv_heads, heads // kv_heads, d)
    s = xp.einsum("bikgd,bjkd->bkgij", grouped, wide(k)).reshape(batch, heads, q_len, kv_len)
    s = s * (d**-0.5 if scale is None else scale)
    s = s if softcap is None else softcap * xp.tanh(s / softcap)
    before = kv_len - q_len if q_start is None else q_start - (kv_start or 0)
    here, j = np.arange(q_len)[:, None] + before, np.arange(kv_len)
    s = s if slopes is None else s - wide(slopes)[:, None, None] * asarray(np.abs(here - j))
    s = s if bias is None else s + wide(bias)
    left, right = window or (None, None)
    seen = (j <= here) | (not is_causal)
    seen = seen if left is None else seen & (j >= here - left)
    seen = asarray(seen if right is None else seen & (j <= here + right))
    seen = seen if q_seg is None else seen & (q_seg[:, None, :, None] == kv_seg[:, None, None, :])
    m = xp.amax(xp.where(seen, s, -inf), -1)[..., None]
    if sinks is not None:
        m = xp.maximum(m, wide(sinks)[:, None, None])
    m = xp.where(xp.isinf(m), 0.0, m)
    p = xp.where(seen, xp.exp(xp.where(seen, s - m, 0.0)), 0.0)
    l = p.sum(-1)
    if sinks is not None:
        l = l + xp.exp(wide(sinks)[:, None, None] - m)[..., 0]
    none = l == 0
    l = xp.where(none, 1.0, l)
    weights = narrow((p / l[..., None]).reshape(batch, kv_heads, -1, q_len, kv_len), v.dtype)
    summed = v if out_dtype is None else wide(v)
    o = xp.einsum("bkgij,bjkd->bikgd", narrow(weights, summed.dtype), summed).reshape(batch, q_len, heads, dv)
    return (o, xp.where(none, -inf, m[..., 0] + xp.log(l))) if return_lse else o


def in_torch(q, *arrays, **options):
    import torch

    def wide(x):
        return x.float() if x.dtype.itemsize < 4 else x

    def narrow(x, dtype):
        return x.to(dtype)

    return plain(torch, partial(torch.as_tensor, device=q.device), wide, narrow, q, *arrays, **options)


def in_jax(q, *arrays, **options):
    import jax.numpy as jnp

    def wide(x):
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))

    def narrow(x, dtype):
        return x.astype(dtype)

    return plain(jnp, jnp.asarray, wide, narrow, q, *arrays, **options)
