"""Loss functions of transformers' models on the cross_entropy op, by the convention of their ``loss_function``.

Logits are read in their own dtype: no copy of them in float32 is made, and their gradient has their dtype.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from portakern.core.observe import say
from portakern.errors import SpecError
from portakern.frameworks.torch.casting import widened
from portakern.frameworks.torch.functions import (
    LOSS_PARALLEL,
    cross_entropy,
    kept_op,
    loss_is_parallel,
    placed_beside,
)
from portakern.frameworks.torch.models.arguments import OF_LOSSES, asks_more
from portakern.frameworks.torch.models.prototypes import names_in, with_names
from portakern.frameworks.torch.models.served import Heart, Recipe, Remade, watched
from portakern.frameworks.torch.vocabulary import row_losses

__all__ = ["LOSSES", "computes", "served_loss", "shifted", "summed_up", "with_own_loss"]


def shifted(labels: Tensor, ignore_index: int) -> Tensor:
    """The label of each place that predicts its successor: (..., length) of the same; the last place predicts none."""
    return functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()


def summed_up(losses: Tensor, labels: Tensor, ignore_index: int, number: Tensor | int | None) -> Tensor:
    """The mean over labels that are not ignored, or the sum by ``number``, of one loss a label."""
    if number is None:
        return losses.sum() / (labels != ignore_index).sum()
    return losses.sum() / (number.to(losses.device) if isinstance(number, Tensor) else number)


def _entropy(backend: str | None) -> Callable[..., Tensor]:
    """(logits, labels of any shape, classes, ignore_index, number) -> the loss of all places (``summed_up``)."""

    entropy = kept_op("cross_entropy", backend)

    def loss(logits: Tensor, aims: Tensor, classes: int, ignore_index: int, number: Tensor | int | None) -> Tensor:
        aims = placed_beside(logits, aims.reshape(-1).to(logits.device))
        losses = row_losses(entropy, logits.reshape(-1, classes), aims, backend, ignore_index=ignore_index)
        return summed_up(losses, aims, ignore_index, number)

    return loss


def _is_theirs(logits: Tensor) -> bool:
    """Whether the loss of these logits is PyTorch's own, which the log says once."""
    if not loss_is_parallel(logits):
        return False
    say(f"portakern: the model's loss: {LOSS_PARALLEL}", logging.INFO)
    return True


def _causal(backend: str | None, original: Any) -> Callable[..., Tensor]:
    entropy = _entropy(backend)

    def loss(
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """transformers' ForCausalLMLoss: each place predicts its successor."""
        if asks_more(others) or _is_theirs(logits):
            given = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
            found: Tensor = original(logits, labels, vocab_size, shift_labels=shift_labels, **given, **others)
            return found
        if shift_labels is None and labels is None:
            raise SpecError("loss: labels is None, and so is shift_labels; expected one of them: pass labels")
        aims = shifted(labels, ignore_index) if shift_labels is None else shift_labels
        return entropy(logits, aims, vocab_size, ignore_index, num_items_in_batch).float()

    return loss


def _masked(backend: str | None, original: Any) -> Callable[..., Tensor]:
    entropy = _entropy(backend)

    def loss(
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        **others: Any,
    ) -> Tensor:
        """transformers' ForMaskedLMLoss."""
        if asks_more(others) or _is_theirs(logits):
            found: Tensor = original(logits, labels, vocab_size, num_items_in_batch, ignore_index, **others)
            return found
        return entropy(logits, labels, vocab_size, ignore_index, num_items_in_batch).float()

    return loss


def _classes(backend: str | None, original: Any) -> Callable[..., Tensor]:
    entropy = _entropy(backend)

    def loss(labels: Tensor, pooled_logits: Tensor, config: Any, **others: Any) -> Tensor:
        """transformers' ForSequenceClassificationLoss; its regressions and independent labels are transformers' own."""
        one_class = config.num_labels > 1 and labels.dtype in (torch.int64, torch.int32)
        if config.problem_type != "single_label_classification" and not (config.problem_type is None and one_class):
            return original(labels, pooled_logits, config, **others)
        if asks_more({k: v for k, v in others.items() if k not in OF_LOSSES}) or _is_theirs(pooled_logits):
            return original(labels, pooled_logits, config, **others)
        config.problem_type = "single_label_classification"
        ignored, number = others.get("ignore_index", -100), others.get("num_items_in_batch")
        found = entropy(pooled_logits, labels, config.num_labels, ignored, number)
        return found if widened(pooled_logits) else found.to(pooled_logits.dtype)

    return loss


NAME = nn.CrossEntropyLoss.__name__
LOSSES = {
    "ForCausalLMLoss": _causal,
    "ForMaskedLMLoss": _masked,
    "ForSequenceClassificationLoss": _classes,
}
"""transformers' loss function, by name -> what makes the one that stands for it."""


def served_loss(original: Any, backend: str | None) -> Remade | None:
    """The loss function that stands for one of transformers'; None where there is none."""
    return Remade(_loss, original, backend) if is_known(original) else None


def is_known(original: Any, names: Iterable[str] = LOSSES) -> bool:
    """Whether a loss function is one of transformers' that are known, and not another of its name."""
    from transformers.loss import loss_utils

    name = getattr(original, "__name__", "")
    return name in names and getattr(loss_utils, name, None) is original


def computes(loss: Any, name: str) -> bool:
    """Whether a loss function, portakern's or transformers', computes what that of transformers' of that name does."""
    return is_known(loss.args[0] if isinstance(loss, Remade) and loss.make is _loss else loss, (name,))


def _loss(original: Any, backend: str | None) -> Callable[..., Tensor]:
    return LOSSES[original.__name__](backend, original)


def with_own_loss(model: nn.Module, backend: str | None) -> Recipe | None:
    """The forward of a model that makes a ``CrossEntropyLoss`` itself (BERT), with another; None for one that does
    not."""
    kind: Any = type(model)
    makes = NAME in names_in(model) and inspect.unwrap(kind.forward).__globals__.get(NAME) is nn.CrossEntropyLoss
    return Recipe(_own_loss, kind, (backend,)) if makes else None


def _own_loss(kind: Any, backend: str | None) -> Heart:
    theirs = inspect.unwrap(kind.forward)

    class CrossEntropyLoss(nn.CrossEntropyLoss):
        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            return cross_entropy(
                input,
                target,
                self.weight,
                ignore_index=self.ignore_index,
                reduction=self.reduction,
                label_smoothing=self.label_smoothing,
                backend=backend,
            )

    ours = with_names(theirs, f"loss_{backend}", {NAME: CrossEntropyLoss})

    def unless(model: nn.Module) -> str:
        if nn.modules.module._has_any_global_hook():
            return watched(model)
        return "" if theirs.__globals__.get(NAME) is nn.CrossEntropyLoss else f"its module's {NAME} was replaced since"

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return theirs(self, *args, **kwargs) if unless(self) else ours(self, *args, **kwargs)

    return Heart(forward, unless)
