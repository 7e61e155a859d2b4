"""A residual that is added and normed in one pass: blocks whose order of sums and norms is known.

Each function here is the forward of such a block, with its norm called as ``norm(x, residual)``. A block is known if
its class is like a prototype and names what is written here, nothing else and in this order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from portakern.frameworks.torch.models.mlps import with_residual
from portakern.frameworks.torch.models.prototypes import find, names_in
from portakern.frameworks.torch.models.served import Heart, Recipe, expected, served_by, watched

__all__ = ["BLOCKS", "KnownBlock", "served_block"]


def pre_norm(block: nn.Module, x: Tensor, given: dict[str, Any]) -> Tensor:
    """h = x + attention(norm(x)); h + mlp(norm(h)): Llama."""
    attended, _ = block.self_attn(hidden_states=block.input_layernorm(x), **given)
    y, h = block.post_attention_layernorm(attended, x)
    return h + block.mlp(y)


def norms_on_both_sides(block: nn.Module, x: Tensor, given: dict[str, Any]) -> Tensor:
    """h = x + norm(attention(norm(x))); h + norm(mlp(norm(h))): Gemma 2."""
    attended, _ = block.self_attn(hidden_states=block.input_layernorm(x), **given)
    y, h = block.pre_feedforward_layernorm(block.post_attention_layernorm(attended), x)
    return h + block.post_feedforward_layernorm(block.mlp(y))


def gpt2(block: nn.Module, x: Tensor, given: dict[str, Any]) -> Tensor:
    """h = x + attention(norm(x)); h + mlp(norm(h)): GPT-2 without cross-attention."""
    del given["encoder_hidden_states"], given["encoder_attention_mask"]
    attended, _ = block.attn(block.ln_1(x), **given)
    y, h = block.ln_2(attended, x)
    return with_residual(block.mlp, y, h)


def vit(block: nn.Module, x: Tensor, given: dict[str, Any]) -> Tensor:
    """h = x + attention(norm(x)); h + mlp(norm(h)), both under dropout: ViT."""
    attended, _ = block.attention(block.layernorm_before(x), given.pop("attention_mask"), **given)
    y, h = block.layernorm_after(block.dropout(attended), x)
    return with_residual(block.mlp, y, h, block.dropout)


def post_norm(block: nn.Module, x: Tensor, given: dict[str, Any]) -> Tensor:
    """norm(dropout(dense(x)) + input): BERT."""
    y, _ = block.LayerNorm(block.dropout(block.dense(x)), given["input_tensor"])
    return y


@dataclass(frozen=True)
class KnownBlock:
    """A block that is known.

    Attributes:
      forward: what stands for its own. norm: its norm that takes the residual.
      names: all that its own forward looks up, in order.
      unless: an attribute, of which a block that has it is not served.
    """

    forward: Callable[[nn.Module, Tensor, dict[str, Any]], Tensor]
    norm: str
    names: tuple[str, ...]
    unless: str | None = None


_BERT = KnownBlock(post_norm, "LayerNorm", ("dense", "dropout", "LayerNorm"))
BLOCKS = {
    "llama.LlamaDecoderLayer": KnownBlock(
        pre_norm, "post_attention_layernorm", ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    ),
    "gemma2.Gemma2DecoderLayer": KnownBlock(
        norms_on_both_sides,
        "pre_feedforward_layernorm",
        (
            *("input_layernorm", "self_attn", "post_attention_layernorm"),
            *("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"),
        ),
    ),
    "gpt2.GPT2Block": KnownBlock(
        gpt2,
        "ln_2",
        ("ln_1", "attn", "hasattr", "ValueError", "ln_cross_attn", "crossattention", "ln_2", "mlp"),
        unless="crossattention",
    ),
    "vit.ViTLayer": KnownBlock(
        vit, "layernorm_after", ("layernorm_before", "attention", "dropout", "layernorm_after", "mlp")
    ),
    "bert.BertSelfOutput": _BERT,
    "bert.BertOutput": _BERT,
}
"""Prototype -> the block that it is."""


def served_block(module: nn.Module) -> tuple[str, Recipe] | None:
    """The name of the norm of a block that takes the residual, and the forward that stands for the block's own; None
    for what is no block known here."""
    block = find(type(module), BLOCKS)
    if block is None or names_in(module) != block.names or (block.unless and hasattr(module, block.unless)):
        return None
    return block.norm, Recipe(_fused, type(module))


def _fused(kind: Any) -> Heart:
    block: KnownBlock = expected(find(kind, BLOCKS), kind)
    theirs = inspect.unwrap(kind.forward)
    parameters = [*inspect.signature(theirs).parameters.values()][2:]  # after self and the hidden states
    names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

    def unless(self: nn.Module) -> str:
        norm = getattr(self, block.norm)
        why = watched(norm)
        if why:
            return f"its {block.norm} {why}"
        if served_by(norm) is None:
            return f"its {block.norm} has a forward of its own"
        return f"it has a {block.unless}" if block.unless and hasattr(self, block.unless) else ""

    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if unless(self):
            return theirs(self, hidden_states, *args, **kwargs)
        return block.forward(self, hidden_states, defaults | dict(zip(names, args, strict=False)) | kwargs)

    return Heart(forward, unless)
