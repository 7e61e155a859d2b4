"""Attention of packed sequences: each by itself, as ``attention`` has it."""

from __future__ import annotations

import math

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.attention import attention
from portakern.core.call import Call
from portakern.core.config import Config
from portakern.specs.varlen_attention import each_sequence


@BACKEND.implements("varlen_attention")
def varlen_attention(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    """o (tokens, heads, dv), lse and lse_low (heads, tokens): those of ``attention`` on each sequence's q, k and v.

    Where no sequence has a query, and a key or a sink, o and lse_low are 0 and lse is -inf.
    """
    return each_sequence(call, lambda one, _: attention(one, config), None, (0.0, -math.inf, 0.0))
