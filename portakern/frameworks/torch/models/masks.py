"""A causal model that is called without a mask and without a cache needs no mask of length x length.

Without positions each token sees all that came before. Where positions are given, several sequences may be packed in
one row, each of which begins where a position is not the one before and 1: then each token has the number of its
sequence, and attention skips the tiles of others. transformers waits for the device to see whether there are several,
and then, and always under torch.compile, builds the mask.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from portakern.frameworks.torch.models.prototypes import find, names_in, with_names
from portakern.frameworks.torch.models.served import Heart, Recipe, expected

__all__ = ["served_mask"]

SAID = ("attention_mask", "past_key_values")
"""Arguments of a model that say which tokens see which, beside ``position_ids``."""

MAKERS = ("create_causal_mask", "create_sliding_window_causal_mask")

CAUSAL: dict[str, str | None] = {
    "llama.LlamaModel": None,
    "mistral.MistralModel": None,
    "qwen2.Qwen2Model": None,
    "qwen3.Qwen3Model": None,
    "gemma.GemmaModel": None,
    "gemma2.Gemma2Model": None,
    "gemma3.Gemma3TextModel": "use_bidirectional_attention",
    "gpt2.GPT2Model": None,
}
"""Prototype -> a setting of its config with which a token sees later ones."""

SETTINGS = {path: (setting,) for path, setting in CAUSAL.items()}


def served_mask(model: nn.Module, implementation: str) -> Recipe | None:
    """The forward that stands for that of a model between embeddings and head, whose attention is ``implementation``;
    None for what is no such model."""
    config, found = getattr(model, "config", None), find(type(model), SETTINGS)
    if found is None or not getattr(config, "is_causal", True):
        return None
    if found[0] is not None and getattr(config, found[0], False):
        return None
    asking = [m for m in model.modules() if "ALL_ATTENTION_FUNCTIONS" in names_in(m)]
    if getattr(config, "sliding_window", None) is not None and not all(map(_hands_on_its_window, asking)):
        return None
    return Recipe(_without_mask, type(model), (implementation,))


def _without_mask(kind: Any, implementation: str) -> Heart:
    expected(find(kind, SETTINGS), kind)
    theirs = inspect.unwrap(kind.forward)
    parameters = [*inspect.signature(theirs).parameters][1:]
    makers = {name: theirs.__globals__[name] for name in MAKERS if name in theirs.__globals__}
    unpacked = with_names(theirs, "mask", dict.fromkeys(makers, no_mask))
    packed = with_names(theirs, "packed_mask", dict.fromkeys(makers, sequence_ids))

    def unless(model: Any) -> str:
        replaced = [name for name, maker in makers.items() if theirs.__globals__[name] is not maker]
        return f"its module's {replaced[0]} was replaced since" if replaced else ""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(parameters, args, strict=False)) | kwargs
        positions, asked = given.get("position_ids"), any(given.get(name) is not None for name in SAID)
        if asked or self.config._attn_implementation != implementation or unless(self):
            return theirs(self, *args, **kwargs)
        return (unpacked if positions is None else packed)(self, *args, **kwargs)

    return Heart(forward, unless)


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Stands for the functions that make masks, where a mask would say no more than that a token sees those before."""


def sequence_ids(
    config: Any, inputs_embeds: torch.Tensor, *, position_ids: torch.Tensor, past_key_values: Any = None, **others: Any
) -> torch.Tensor | None:
    """Stands for the functions that make masks of packed sequences: (batch, length), the number of each token's
    sequence. None where the model made a cache, for which transformers does not ask whether sequences are packed."""
    if past_key_values is not None:
        return None
    first = position_ids[:, :1] - 1
    begins = torch.diff(position_ids, prepend=first, dim=-1) != 1
    return begins.cumsum(-1, dtype=torch.int32).expand(inputs_embeds.shape[0], -1)


def _hands_on_its_window(attention: nn.Module) -> bool:
    """Whether an attention tells the function that it calls how far back a token sees."""
    code = inspect.unwrap(type(attention).forward).__code__
    return any(isinstance(k, tuple) and "sliding_window" in k for k in code.co_consts)
