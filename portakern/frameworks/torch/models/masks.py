"""A causal model that is called without a mask, without positions and without a cache sees all that came before:
there is nothing to find out from arrays, and no mask to build.

transformers looks whether the positions, which it made itself, are of several packed sequences: it waits for the
device, and under torch.compile, where nobody can look, it builds the mask, of length x length.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from portakern.frameworks.torch.models.prototypes import find, names_in, with_names
from portakern.frameworks.torch.models.served import Heart, Recipe, expected

__all__ = ["served_mask"]

SAID = ("attention_mask", "position_ids", "past_key_values")
"""Arguments of a model that say which tokens see which."""

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
    ours = with_names(theirs, "mask", dict.fromkeys(makers, no_mask))

    def unless(model: Any) -> str:
        replaced = [name for name, maker in makers.items() if theirs.__globals__[name] is not maker]
        return f"its module's {replaced[0]} was replaced since" if replaced else ""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(parameters, args, strict=False)) | kwargs
        asked = any(given.get(name) is not None for name in SAID)
        if asked or self.config._attn_implementation != implementation or unless(self):
            return theirs(self, *args, **kwargs)
        return ours(self, *args, **kwargs)

    return Heart(forward, unless)


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Stands for the functions that make masks, where a mask would say no more than that a token sees those before."""


def _hands_on_its_window(attention: nn.Module) -> bool:
    """Whether an attention tells the function that it calls how far back a token sees."""
    code = inspect.unwrap(type(attention).forward).__code__
    return any(isinstance(k, tuple) and "sliding_window" in k for k in code.co_consts)
