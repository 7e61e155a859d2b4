"""The last projection of a language model with its loss, on the linear_cross_entropy op: in training logits are never
whole in memory but where a memory limit has room for them, and the model's output has None for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from portakern.frameworks.torch.functions import kept_op, logits_fit
from portakern.frameworks.torch.models.arguments import OF_LOSSES, asks_more
from portakern.frameworks.torch.models.losses import computes, shifted, summed_up
from portakern.frameworks.torch.models.prototypes import find
from portakern.frameworks.torch.models.served import Heart, Recipe, expected, has_plain_parameters, is_bare, onlookers

__all__ = ["HEADS", "served_head"]


class Head(NamedTuple):
    """What is known of a language model.

    Attributes:
      setting: of its config, that changes logits, with which it is not served.
      unnamed: the arguments that it hands to the model between embeddings and head without their names.
    """

    setting: str = ""
    unnamed: tuple[str, ...] = ()


HEADS = {
    "llama.LlamaForCausalLM": Head(),
    "gpt2.GPT2LMHeadModel": Head(unnamed=("input_ids",)),
    "gemma2.Gemma2ForCausalLM": Head("final_logit_softcapping"),
}
"""Prototype -> what is known of it."""

ADDED = "ForCausalLMLoss"
"""The loss that a head is served with, as transformers calls it."""


def served_head(model: nn.Module, backend: str | None, memory_limit: int) -> Recipe | str | None:
    """What serves a language model's projection and loss; why nothing does, in words; None for what is no language
    model known here. memory_limit: as ``apply`` takes it."""
    known = find(type(model), HEADS)
    if known is None:
        return None
    return _why_not(model, known.setting) or Recipe(_with_loss, type(model), (backend, memory_limit))


def _why_not(model: Any, setting: str) -> str:
    """Why a model's projection and loss are not one op, in words; "" where they can be."""
    head = getattr(model, "lm_head", None)
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward or head.bias is not None:
        return f"its lm_head is a {type(head).__name__}; expected a torch.nn.Linear without bias"
    if setting and getattr(model.config, setting) is not None:
        return f"{setting} comes between its logits and the loss"
    if not computes(model.loss_function, ADDED):
        return f"its loss_function is {getattr(model.loss_function, '__name__', 'its own')}; expected {ADDED}"
    return ""


def _with_loss(kind: Any, backend: str | None, memory_limit: int) -> Heart:
    from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions, CausalLMOutputWithPast

    known: Head = expected(find(kind, HEADS), kind)
    theirs = inspect.unwrap(kind.forward)
    parameters = [*inspect.signature(theirs).parameters.values()][1:]
    names = [p.name for p in parameters]
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    entropy = kept_op("linear_cross_entropy", backend)

    def unless(model: Any) -> str:
        why, seen = is_bare(model.lm_head), onlookers(model)
        return (
            (why and f"its lm_head {why}")
            or (seen and f"it {seen}, which see logits")
            or _why_not(model, known.setting)
        )

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = defaults | dict(zip(names, args, strict=False)) | kwargs
        labels, keep = given.pop("labels", None), given.pop("logits_to_keep", 0)
        asked = not isinstance(keep, int) or keep != 0  # for the logits of some places
        if labels is None or not self.training or asked or unless(self) or _asks(self, given, names):
            return theirs(self, *args, **kwargs)
        first = [given.pop(name) for name in known.unnamed]
        outputs = self.base_model(*first, **given)
        hidden, ignored = outputs.last_hidden_state, given.get("ignore_index", -100)
        aims = shifted(labels, ignored) if given.get("shift_labels") is None else given["shift_labels"]
        aims = aims.to(hidden.device).view(hidden.shape[:-1])
        weight = self.lm_head.weight
        keeps = logits_fit(hidden, weight, memory_limit)
        losses = entropy(hidden, weight, aims, ignore_index=ignored, keep_logit_gradients=keeps)
        kept = {"past_key_values": outputs.past_key_values, "hidden_states": outputs.hidden_states}
        kept |= {"attentions": outputs.attentions}
        loss = summed_up(losses, aims, ignored, given.get("num_items_in_batch")).float()  # as transformers' own
        if hasattr(outputs, "cross_attentions"):
            crossed = outputs.cross_attentions
            return CausalLMOutputWithCrossAttentions(loss=loss, logits=None, cross_attentions=crossed, **kept)
        return CausalLMOutputWithPast(loss=loss, logits=None, **kept)

    return Heart(forward, unless)


def _asks(model: Any, given: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether a call asks for what the op does not have."""
    if not has_plain_parameters(model.lm_head):
        return True
    return asks_more({k: v for k, v in given.items() if k not in OF_LOSSES and k not in names})
