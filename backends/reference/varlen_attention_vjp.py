"""Gradients of attention of packed sequences: each by itself, as ``attention_vjp`` has them."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.attention_vjp import attention_vjp
from portakern.core.call import Call
from portakern.core.config import Config
from portakern.specs.varlen_attention import each_sequence


@BACKEND.implements("varlen_attention_vjp")
def varlen_attention_vjp(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    """d_q (tokens, heads, d), d_k (kv_tokens, kv_heads, d), d_v (kv_tokens, kv_heads, dv): those of ``attention_vjp``
    on what each sequence has of the arguments. Where no sequence has a query and a key they are 0. d_sinks (heads):
    their sum over sequences."""
    return each_sequence(call, lambda one, _: attention_vjp(one, config), None, (0.0, 0.0, 0.0, 0.0))
