"""A causal model that is called without a mask, without positions and without a cache sees all that came before:
there is nothing to find out from arrays, and no mask to build.

transformers looks whether the positions, which it made itself, are of several packed sequences: it waits for the
device, and under torch.compile, where nobody can look, it builds the mask, of length x length.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from portakern.frameworks.torch.models.prototypes import find, names_in

__all__ = ["is_plain", "served_mask"]

PLAIN = (0, 0, 0, 0)
"""The shape of a mask that says no more than the model does: transformers hands a mask of four axes on as it is."""

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


def is_plain(mask: Tensor | None) -> bool:
    return mask is not None and mask.shape == PLAIN


def served_mask(model: nn.Module, implementation: str) -> Callable[..., Any] | None:
    """The forward that stands for that of a model between embeddings and head, whose attention is ``implementation``;
    None for what is no such model."""
    config, found = getattr(model, "config", None), find(model, {path: (setting,) for path, setting in CAUSAL.items()})
    if found is None or not getattr(config, "is_causal", True):
        return None
    if found[0] is not None and getattr(config, found[0], False):
        return None
    asking = [m for m in model.modules() if "ALL_ATTENTION_FUNCTIONS" in names_in(m)]
    if getattr(config, "sliding_window", None) is not None and not all(map(_hands_on_its_window, asking)):
        return None
    theirs = inspect.unwrap(type(model).forward)
    names = [*inspect.signature(theirs).parameters][1:]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        said = ("attention_mask", "position_ids", "past_key_values")
        if self.config._attn_implementation == implementation and all(given.get(name) is None for name in said):
            like = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
            device = None if like is None else like.device
            given["attention_mask"] = torch.empty(PLAIN, dtype=torch.bool, device=device)
        return theirs(self, **given)

    return forward


def _hands_on_its_window(attention: nn.Module) -> bool:
    """Whether an attention tells the function that it calls how far back a token sees."""
    code = inspect.unwrap(type(attention).forward).__code__
    return any(isinstance(k, tuple) and "sliding_window" in k for k in code.co_consts)
