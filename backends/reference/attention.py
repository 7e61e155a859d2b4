"""Softmax attention with grouped queries, masks, softcap and log-sum-exp: whole score matrices, one head at a time."""

from __future__ import annotations

import math

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config
from portakern.spec.tolerance import rounded
from portakern.specs.attention import allowed, distances


@BACKEND.implements("attention")
def attention(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    """Every query's mean of the values that it sees, weighted by the exponentials of its scores:

        p_j = exp(s_j - m), m = max s_j, l = sum_j p_j;  o = sum_j p_j v_j / l, lse + lse_low = m + log l

    A sink is one more score of each row of its head, with a value of 0: m = max(s_j, sink) and
    l = exp(sink - m) + sum p_j.

    q: (batch, q_len, heads, d), k: (batch, kv_len, kv_heads, d), v: (batch, kv_len, kv_heads, dv)
    -> o: (batch, q_len, heads, dv), lse and lse_low: (batch, heads, q_len).
    Masked pairs have s = -inf. A row that sees no key has m = -inf and l = 0: its o is 0, its lse -inf. A +inf score
    (inf - inf) or a NaN score makes p, and so the row, NaN.
    """
    v, sinks = call.arrays["v"], call.arrays["sinks"]
    (batch, q_len, heads, _), group = call.arrays["q"].shape, call.dims["group"]
    o = np.empty((batch, q_len, heads, v.shape[-1]))
    lse, low = np.empty((batch, heads, q_len)), np.empty((batch, heads, q_len))
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(batch, heads):
            s = scores(call, b, h)
            m = s.max(-1, keepdims=True, initial=-np.inf)
            if sinks is not None:
                m = np.maximum(m, sinks[h])
            shift = np.where(m == -np.inf, 0.0, m)
            p = np.exp(s - shift)
            l = p.sum(-1, keepdims=True)
            if sinks is not None:
                l = l + np.exp(sinks[h] - shift)
            o[b, :, h] = weighted_sum(p, s != -np.inf, v[b, :, h // group]) / np.where(l == 0, 1.0, l)
            lse[b, h], low[b, h] = sum_in_two(call, m[:, 0], np.log(l[:, 0]))
    return o, lse if "lse" in call.wants else None, low if "lse_low" in call.wants else None


def sum_in_two(call: Call, m: np.ndarray, log: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(lse, lse_low) of the maximum m and log l: their sum, and what storing it as float32 (float64 in a float64 call)
    rounds away; 0 where the sum is not finite.

    Two numbers, since the sum alone holds no log l beside an m of 1e17, in float64 neither.
    """
    total = m + log
    stored = rounded(total, "float64" if call.dtype == "float64" else "float32").astype(np.float64)
    return total, np.where(np.isfinite(stored), (m - stored) + log, 0.0)


def scores(call: Call, b: int, h: int) -> np.ndarray:
    """s (q_len, kv_len) of one head: softcap(scale q.k) - slope |distance| + bias, and -inf where the pair is masked.

    The mask selects last: what it hides leaves no trace.
    """
    q, k, bias = (call.arrays[name] for name in ("q", "k", "bias"))
    scale, cap = call.options["scale"], call.options["softcap"]
    s = (1 / math.sqrt(q.shape[-1]) if scale is None else scale) * (q[b, :, h] @ k[b, :, h // call.dims["group"]].T)
    if cap is not None:
        s = cap * np.tanh(s / cap)
    if call.arrays["alibi_slopes"] is not None:
        s = s - call.arrays["alibi_slopes"][h] * distances(call)
    if bias is not None:
        s = s + np.broadcast_to(bias, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))[b, h]
    return np.where(allowed(call, b), s, -np.inf)


def weighted_sum(p: np.ndarray, seen: np.ndarray, v: np.ndarray) -> np.ndarray:
    """p @ v over seen pairs only.

    NaN and inf in v reach the rows that see their key, and 0 * NaN of a masked pair never arises.
    """
    finite = np.where(np.isfinite(v), v, 0.0)
    total = p @ finite
    for j in np.flatnonzero((v != finite).any(-1)):
        total += np.where(seen[:, j, None], p[:, j, None] * (v[j] - finite[j]), 0.0)
    return total
