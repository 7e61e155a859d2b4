"""The last projection of a language model with its loss, on the linear_cross_entropy op: in training logits are never
whole in memory, and the model's output has None for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from portakern.frameworks.torch.functions import kept_op
from portakern.frameworks.torch.models.losses import shifted, summed_up
from portakern.frameworks.torch.models.prototypes import find

__all__ = ["HEADS", "ServedHead", "served_head"]

HEADS = {
    "llama.LlamaForCausalLM": "",
    "gpt2.GPT2LMHeadModel": "",
    "gemma2.Gemma2ForCausalLM": "final_logit_softcapping",
}
"""Prototype -> a setting of its config that changes logits, with which it is not served."""

MARK = "loss_of_labels"
"""What a projection is marked with that takes labels: another one may be put in its place later, which does not."""


class ServedHead(NamedTuple):
    """The forwards that stand for those of a language model and of its projection."""

    model: Callable[..., Any]
    projection: Callable[..., Any]


def served_head(model: nn.Module, backend: str | None) -> ServedHead | str | None:
    """What serves a language model's projection and loss; why nothing does, in words; None for what is no language
    model known here."""
    setting, head = find(model, HEADS), getattr(model, "lm_head", None)
    if setting is None:
        return None
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward or head.bias is not None:
        return f"its lm_head is a {type(head).__name__}; expected a torch.nn.Linear without bias"
    if setting and getattr(model.config, setting) is not None:
        return f"{setting} comes between its logits and the loss"
    return ServedHead(_model(model), _projection(backend))


def _projection(backend: str | None) -> Callable[..., Any]:
    entropy = kept_op("linear_cross_entropy", backend)

    def forward(self: nn.Linear, input: Tensor, labels: Tensor | None = None, ignore_index: int = -100) -> Tensor:
        """Logits, or given labels the loss of each: the projection's hooks run before both."""
        if labels is None:
            return nn.functional.linear(input, self.weight, self.bias)
        return entropy(input, self.weight, labels, ignore_index=ignore_index)

    return forward


def _model(model: nn.Module) -> Callable[..., Any]:
    from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions, CausalLMOutputWithPast

    theirs = inspect.unwrap(type(model).forward)
    names = [*inspect.signature(theirs).parameters][1:]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        labels, keep = given.pop("labels", None), given.pop("logits_to_keep", 0)
        asked = not isinstance(keep, int) or keep != 0  # for the logits of some places
        if labels is None or not self.training or asked or not getattr(self.lm_head, MARK, False):
            return theirs(self, *args, **kwargs)
        outputs = self.base_model(**given)
        hidden, ignored = outputs.last_hidden_state, given.get("ignore_index", -100)
        aims = shifted(labels, ignored) if given.get("shift_labels") is None else given["shift_labels"]
        aims = aims.to(hidden.device)
        losses = self.lm_head(hidden, labels=aims.view(hidden.shape[:-1]), ignore_index=ignored)
        kept = {"past_key_values": outputs.past_key_values, "hidden_states": outputs.hidden_states}
        kept |= {"attentions": outputs.attentions}
        loss = summed_up(losses, aims, ignored, given.get("num_items_in_batch"))
        if hasattr(outputs, "cross_attentions"):
            crossed = outputs.cross_attentions
            return CausalLMOutputWithCrossAttentions(loss=loss, logits=None, cross_attentions=crossed, **kept)
        return CausalLMOutputWithPast(loss=loss, logits=None, **kept)

    return forward
