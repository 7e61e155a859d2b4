"""Arguments that models of transformers hand through all their layers, by what they change: each layer and each loss
takes any name, and picks its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ELSEWHERE", "IN_THE_MASK", "OF_LOSSES", "asks_more"]

OF_LOSSES = frozenset({"ignore_index", "num_items_in_batch", "shift_labels"})
"""Arguments of loss functions, which attention is given too and that do not concern it."""

IN_THE_MASK = frozenset({"cu_seq_lens_q", "cu_seq_lens_k"})
"""Arguments that a mask speaks of too, where there is one: attention does not need them beside it."""

ELSEWHERE = frozenset(
    {
        "cache_position",
        "deterministic",
        "layer_idx",
        "max_length_k",
        "max_length_q",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "target_dtype",
        "use_cache",
    }
)
"""Arguments that change neither what attention computes nor what a loss does."""

OF_ATTENTION = frozenset({"is_causal", "output_attentions", "seq_idx"})
"""Arguments of other layers that do not concern a loss."""


def asks_more(others: Mapping[str, Any]) -> bool:
    """Whether a loss function is given something, beside the arguments that are known, that may be meant for it."""
    known = ELSEWHERE | IN_THE_MASK | OF_ATTENTION
    return any(given is not None and given is not False and name not in known for name, given in others.items())
