"""What the corners of attention and of its gradients plant in the arrays of a call."""

from __future__ import annotations

from math import inf

import numpy as np

SEGMENTS = ("q_segment_ids", "kv_segment_ids")
NOBODY = 9  # a segment that only those have who shall see nothing, or not be seen


TABLES = (
    (0, 1, 2, 3),
    (0, 1, 2, 3),
    (0, 256, 2**16, 3 * 2**16 + 256),  # one in 8 bits, two and two in 16
    (2**24, 2**24 + 1, 2**24 + 2, 2**24 + 3),  # two and two in float32
    (-7, -5, -2, 0),
    (-300, -1, 4, 2**24 + 1),
)
"""What segments are called."""


def segments(rng, shape, dims, options):
    """A few segments, in order or not; of queries and keys alike, as both have the same extents."""
    turn = sum(n for n in dims.values() if isinstance(n, int))
    ids = rng.integers(0, 4, shape)
    return np.take(TABLES[turn // 2 % len(TABLES)], np.sort(ids, -1) if turn % 2 else ids)


def usual_slopes(heads: int) -> np.ndarray:
    """Those of Press, Smith and Lewis (2022) for a power of two of heads: from 2^(-8 / heads) to 2^-8."""
    return 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)


def slopes(rng, shape, dims, options):
    """The usual ones in half of the calls; in others some of them are 0, or all are small numbers of either sign, or
    larger than any model's."""
    usual, kind = usual_slopes(shape[0]), rng.integers(6)
    if kind == 3:
        usual[some(rng, shape[0])] = 0
    return {4: rng.standard_normal(shape) / 16, 5: usual * 40}.get(kind, usual)


def some(rng: np.random.Generator, n: int) -> np.ndarray:
    """A few positions below n, at least one."""
    return rng.choice(n, max(1, n // 4), replace=False)


def blind_queries(arrays, rng):
    """Give some queries a segment that no key has. Returns which."""
    rows = some(rng, arrays["q_segment_ids"].shape[1])
    arrays["q_segment_ids"][:, rows] = NOBODY
    return rows


def hidden_keys(arrays, rng):
    """Give some keys a segment that no query has. Returns which."""
    hidden = some(rng, arrays["kv_segment_ids"].shape[1])
    arrays["kv_segment_ids"][:, hidden] = NOBODY
    return hidden


def queries_and_keys_apart(arrays, rng):
    """Some queries see no key, and some keys are seen by no query."""
    blind_queries(arrays, rng)
    keys = arrays["kv_segment_ids"]
    keys[:, some(rng, keys.shape[1])] = NOBODY - 1


def show_one_key(arrays, rng):
    """Let every query of a batch entry see the same single key."""
    keys = arrays["kv_segment_ids"]
    keys[...] = NOBODY
    arrays["q_segment_ids"][...] = 3
    keys[:, rng.integers(keys.shape[1])] = 3


def rows_masked_by_bias(arrays, rng):
    """A bias of -inf throughout for some queries."""
    bias = arrays["bias"]
    bias[:, :, some(rng, bias.shape[2])] = -inf


def rows_of_a_low_bias(arrays, rng, low):
    """A bias of 0 and -6.5e4, near float16's finfo.min, and for some queries ``low`` or -6.5e4 throughout."""
    bias = arrays["bias"]
    bias[...] = np.where(rng.random(bias.shape) < 0.5, 0, -6.5e4)
    bias[:, :, some(rng, bias.shape[2])] = low if rng.random() < 0.5 else -6.5e4


def odd_bias_of_hidden_keys(arrays, rng):
    """NaN or inf in the bias of keys that no query sees."""
    hidden = hidden_keys(arrays, rng)
    arrays["bias"][..., hidden] = rng.choice([np.nan, inf])


def nan_queries(arrays, rng):
    """NaN in an element of some queries."""
    q = arrays["q"]
    q[:, some(rng, q.shape[1]), :, 0] = np.nan


def infinite_queries(arrays, rng):
    """An infinite element in some queries, that meets a positive one in every key."""
    q, k = arrays["q"], arrays["k"]
    q[:, some(rng, q.shape[1]), :, 0] = inf
    k[..., 0] = 1 + np.abs(k[..., 0])


def far_logits(arrays, rng):
    """Logits near -1e5 at a scale of 1, and some queries that see no key."""
    q, k = arrays["q"], arrays["k"]
    q[...], k[..., 1:] = 0, 0
    q[..., 0], k[..., 0] = 400, -250 + rng.integers(0, 2, k.shape[:-1])
    blind_queries(arrays, rng)
