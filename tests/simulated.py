"""Simulated kernels: float32 NumPy in the order of the real ones. A keyword plants a fault or flushes subnormals."""

from __future__ import annotations

import numpy as np

from portakern.spec.dtypes import numpy_dtype

F32, TAU = np.float32, np.float32(2.0**-126)
"""The accumulator's type and its smallest normal number."""


def flush(x, on):
    return np.where(np.abs(x) < TAU, F32(0), x) if on else x


def truncate(x, dtype):
    """x in a 16-bit dtype, cut towards 0 where it should be rounded."""
    near = x.astype(numpy_dtype(dtype))
    return (near.view(np.uint16) - (np.abs(near.astype(x.dtype)) > np.abs(x))).view(near.dtype)


def cut(x, precision):
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(F32) if precision == "tf32" else x


def sim_matmul(a, b, block=32, precision="ieee", ftz=False, tail=True, out=None, low=None):
    a, b = (flush(cut(np.ascontiguousarray(x, F32), precision), ftz) for x in (a, b))
    acc = np.zeros((*a.shape[:-1], b.shape[-1]), F32)
    stop = a.shape[-1] if tail else a.shape[-1] // block * block
    for k in range(0, stop, block):
        acc = flush(acc + a[..., k : k + block] @ b[..., k : k + block, :], ftz)
        acc = acc if low is None else acc.astype(low).astype(F32)
    return (acc,)


def sim_softmax(x, axis=-1, block=None, ftz=False, shift=True, base2=True, tail=True, factor=1.0):
    x = flush(np.moveaxis(x.astype(F32), axis, -1), ftz)
    exp = (lambda t: flush(np.exp2(t * F32(np.log2(np.e))), ftz)) if base2 else (lambda t: flush(np.exp(t), ftz))
    n = x.shape[-1]
    block = block or n
    m, l = np.full(x.shape[:-1] + (1,), -np.inf, F32), np.zeros(x.shape[:-1] + (1,), F32)
    for j in range(0, n if tail else n // block * block, block):
        part = x[..., j : j + block]
        new = np.maximum(m, part.max(-1, keepdims=True)) if shift else np.zeros_like(m)
        l = l * exp(m - new) + exp(part - new).sum(-1, keepdims=True)
        m = new
    return (np.moveaxis(flush(exp(x - m) / l * F32(factor), ftz), -1, axis),)


def sim_layernorm(x, weight=None, bias=None, eps=1e-5, block=None, ftz=False, moments=False, ddof=0):
    x, eps, n = flush(x.astype(F32), ftz), F32(eps), x.shape[-1]
    if block:  # merge (count, mean, sum of squares) of each block
        mean, m2 = F32(0), F32(0)
        for j in range(0, n, block):
            part = x[..., j : j + block]
            here = part.shape[-1]
            delta = part.mean(-1, keepdims=True) - mean
            m2 = (
                m2
                + np.square(part - part.mean(-1, keepdims=True)).sum(-1, keepdims=True)
                + delta * (delta * F32(here / (j + here) * j))
            )
            mean = mean + delta * F32(here / (j + here))
        var = m2 / F32(n)
    else:
        mean = x.sum(-1, keepdims=True) / F32(n)
        squares = flush(np.square(x if moments else x - mean), ftz).sum(-1, keepdims=True)
        var = squares / F32(n) - np.square(mean) if moments else squares / F32(n - ddof)
    y = (x - mean) * (F32(1) / np.sqrt(flush(var + eps, ftz)))
    y = y if weight is None else y * weight.astype(F32)
    return (flush(y if bias is None else y + bias.astype(F32), ftz),)


def sim_rmsnorm(x, weight=None, eps=1e-6, block=None, ftz=False, over=0, outside=False, tail=True, low=None):
    x, eps, n = flush(x.astype(F32), ftz), F32(eps), x.shape[-1]
    block, total = block or n, F32(0)
    for j in range(0, n if tail else n // block * block, block):
        total = total + flush(np.square(x[..., j : j + block]), ftz).sum(-1, keepdims=True)
        total = total if low is None else total.astype(low).astype(F32)
    mean = total / F32(n + over)
    r = F32(1) / (np.sqrt(mean) + eps if outside else np.sqrt(flush(mean + eps, ftz)))
    return (flush(x * r if weight is None else flush(x * r, ftz) * flush(weight.astype(F32), ftz), ftz),)


def sim_attention(q, k, v, bias=None, is_causal=False, scale=None, softcap=None, precision="ieee", return_lse=True, block=16, ftz=False,
                  sentinel=None, drop=None, factor=1.0, shift=True, round_q=False, tail=True, truncate_p=False, low=None, tanh=np.tanh):  # fmt: skip
    (batch, q_len, heads, depth), (kv_len, kv_heads) = q.shape, k.shape[1:3]
    scale = F32((1 / np.sqrt(depth) if scale is None else scale) * factor)
    o, lse = np.empty((batch, q_len, heads, v.shape[-1]), F32), np.empty((batch, heads, q_len), F32)
    behind = np.arange(q_len)[:, None] + kv_len - q_len
    for b, h in np.ndindex(batch, heads):
        qh, kh, vh = q[b, :, h], k[b, :, h * kv_heads // heads], v[b, :, h * kv_heads // heads]
        qh = (qh * scale).astype(q.dtype) if round_q else qh
        m, l, acc = np.full((q_len, 1), -np.inf, F32), np.zeros((q_len, 1), F32), np.zeros((q_len, v.shape[-1]), F32)
        for j in range(0, kv_len if tail else kv_len // block * block, block):
            here = np.arange(j, min(j + block, kv_len))
            s = sim_matmul(qh, kh[here].T, depth, precision, ftz)[0] * (F32(1) if round_q else scale)
            s = s if softcap is None else F32(softcap) * tanh(s / F32(softcap))
            s = (
                s
                if bias is None
                else s + np.broadcast_to(bias, (batch, heads, q_len, kv_len))[b, h][:, here].astype(F32)
            )
            hide = (here > behind) & is_causal | (here == drop)
            s = np.where(hide, -F32(np.inf) if sentinel is None else F32(sentinel), s)
            new = np.maximum(m, s.max(1, keepdims=True)) if shift else np.zeros_like(m)
            origin = np.where(new == -np.inf, F32(0), new)
            p, alpha = flush(np.exp(s - origin), ftz), flush(np.exp(m - origin), ftz)
            l, m = l * alpha + p.sum(1, keepdims=True), new
            acc = (
                acc * alpha
                + sim_matmul(
                    truncate(p, v.dtype.name) if truncate_p else p.astype(v.dtype), vh[here], block, precision, ftz
                )[0]
            )
            acc = acc if low is None else acc.astype(low).astype(F32)
        o[b, :, h] = np.where(l == 0, F32(0), acc / l)
        lse[b, h] = (m + np.log(l))[:, 0]
    return o, lse


SIMS = {
    "matmul": sim_matmul,
    "softmax": sim_softmax,
    "layernorm": sim_layernorm,
    "rmsnorm": sim_rmsnorm,
    "attention": sim_attention,
}


def draw(rng, shape, dtype, regime="normal"):
    x = rng.standard_normal(shape)
    if regime == "wide":
        x = x * 2.0 ** rng.integers(-12, 4, shape)
    elif regime == "spread":  # logits far apart
        x = x * 20
    elif regime == "large mean":
        x = 0.02 * x + (200 if dtype == "float32" else 3)
    elif regime == "constant":
        x = np.full(shape, 1.1)
    elif regime == "subnormal":
        x = x * (2.0**-18 if dtype == "float16" else 2.0**-128)
    elif regime == "rising":
        x = np.broadcast_to(np.linspace(0, 3, shape[-1]), shape) + 0 * x
    return x.astype(F32).astype(numpy_dtype(dtype))


REGIMES = ("normal", "wide", "spread", "large mean", "constant", "subnormal", "rising")
