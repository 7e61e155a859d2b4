"""Attention over keys and values in pages: of each sequence, gathered, as attention has it."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.attention import attention
from portakern.core.call import Call
from portakern.core.config import Config
from portakern.specs.paged_attention import sequences_of


@BACKEND.implements("paged_attention")
def paged_attention(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    """o and lse of attention, of each sequence by itself, whose k (1, kv_len, kv_heads, d) and v lie in its pages,
    times their head's scales.

    q: (tokens, heads, d) -> o: (tokens, heads, dv), lse: (heads, tokens). Zeros, and an lse of -inf, of tokens without
    a sequence and of sequences without keys or sinks.
    """
    (tokens, heads, _), dv = call.arrays["q"].shape, call.dims["dv"]
    o, lse = np.zeros((tokens, heads, dv)), np.full((heads, tokens), -np.inf)
    for of, sequence, _ in sequences_of(call):
        found = attention(sequence, config)
        o[of], lse[:, of] = found[0][0], found[1][0]  # type: ignore[index]
    return o, lse if "lse" in call.wants else None
