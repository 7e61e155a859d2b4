"""Gradients of attention: whole score matrices, one head at a time."""

from __future__ import annotations

import math

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.attention import scores, weighted_sum
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("attention_vjp")
def attention_vjp(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    """The gradients of attention by the scores, and from there by its arguments:

        P = exp(min(s - lse - lse_low, 0)), Delta = sum(d_o * o) - d_lse, dS = P (d_o v^T - Delta)
        D = dS (1 - tanh^2)
        d_q = scale D k, d_k = scale D^T q, d_v = P^T d_o, d_bias = dS
        d_sinks = -exp(min(sink - lse - lse_low, 0)) Delta

    Shapes are the inputs'. d_k and d_v are summed over the query heads of a key head, d_bias over the axes along which
    bias has an extent of 1, d_sinks over batch entries and queries. Masked pairs have s = -inf, and so P = dS = 0, as
    has a row with lse = -inf, which adds nothing to d_sinks; what is masked leaves no trace.
    """
    q, k, v, o, d_o, lse, bias = (call.arrays[n] for n in ("q", "k", "v", "o", "d_o", "lse", "bias"))
    d_lse, low = call.arrays["d_lse"], call.arrays["lse_low"]
    scale = 1 / math.sqrt(call.dims["d"]) if call.options["scale"] is None else call.options["scale"]
    d_q, d_k, d_v = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    d_bias = None if bias is None else np.zeros(bias.shape)
    sinks, of_sinks = call.arrays["sinks"], np.zeros(lse.shape)
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(lse.shape[:2]):
            kv_head, row = h // call.dims["group"], lse[b, h][:, None]
            s = scores(call, b, h)
            seen = (s != -np.inf) & (row != -np.inf)
            apart = (s - row) - (0.0 if low is None else low[b, h][:, None])
            p = np.where(seen, np.exp(np.minimum(apart, 0.0)), 0.0)
            delta = (d_o[b, :, h] * o[b, :, h]).sum(-1, keepdims=True)
            if d_lse is not None:
                delta = delta - d_lse[b, h][:, None]
            ds = np.where(seen, p * (d_o[b, :, h] @ v[b, :, kv_head].T - delta), 0.0)
            D = np.where(seen, ds * slope(call, scale, q[b, :, h], k[b, :, kv_head]), 0.0)
            d_q[b, :, h] = scale * weighted_sum(D, seen, k[b, :, kv_head])
            d_k[b, :, kv_head] += scale * weighted_sum(D.T, seen.T, q[b, :, h])
            d_v[b, :, kv_head] += weighted_sum(p.T, seen.T, d_o[b, :, h])
            if sinks is not None:
                apart = (sinks[h] - row) - (0.0 if low is None else low[b, h][:, None])
                p = np.exp(np.minimum(apart, 0.0))
                of_sinks[b, h] = np.where(row != -np.inf, -p * delta, 0.0)[:, 0]
            if d_bias is not None:
                at_b, at_h = (i if extent > 1 else 0 for i, extent in zip((b, h), bias.shape, strict=False))
                d_bias[at_b, at_h] += ds if bias.shape[2] == ds.shape[0] else ds.sum(0, keepdims=True)
    gradients = {"d_q": d_q, "d_k": d_k, "d_v": d_v, "d_bias": d_bias, "d_sinks": of_sinks.sum((0, 2))}
    return tuple(gradients[name] if name in call.wants else None for name in gradients)


def slope(call: Call, scale: float, q: np.ndarray, k: np.ndarray) -> np.ndarray | float:
    """By how much the softcap moves a score with its dot: 1 - tanh(scale q.k / c)^2.

    It is computed as 1 / cosh^2, since 1 - tanh^2 cancels.
    """
    cap = call.options["softcap"]
    if cap is None:
        return 1.0
    return np.square(1 / np.cosh(scale * (q @ k.T) / cap))
