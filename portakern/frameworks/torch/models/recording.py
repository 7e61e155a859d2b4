"""The op calls of a model's step, found by running the model on tensors without memory: PyTorch's fake tensors, which
have a shape, strides and a device."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from portakern.core.call import Call
from portakern.core.dispatch import Choice
from portakern.errors import SpecError, UnsupportedError
from portakern.frameworks.torch.custom_ops import bound
from portakern.frameworks.torch.memory import is_distributed

__all__ = ["recorded_calls", "token_inputs"]

TOKEN_LOSSES = ("ForCausalLM", "ForMaskedLM", "ForTokenClassification", None)
"""transformers' names of losses whose labels are one for each token; None: it knows none by the name of the model, and
takes the first."""


HOST = torch.device("cpu")


class _CallRecorder(TorchDispatchMode):
    """Keeps the op calls that are made inside, forward and gradients, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Call, Choice]] = []

    def __torch_dispatch__(self, overload: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if overload.namespace == "portakern":
            self.calls.append(bound(overload, args, kwargs or {}))
        return overload(*args, **(kwargs or {}))


def token_inputs(model: nn.Module, batch: int | None, seq: int | None, train: bool) -> dict[str, Any]:
    """The arguments of a step of a model of tokens, on ``device="meta"``."""
    for name, given in (("batch", batch), ("seq", seq)):
        if type(given) is not int or given < 1:
            raise SpecError(f"warm: {name} is {given!r}; expected a whole number of at least 1, or inputs= instead")
    if getattr(model, "main_input_name", None) != "input_ids":
        raise SpecError(
            f"warm: {type(model).__name__} takes no input_ids; expected inputs=, the keyword arguments of its forward, "
            "as tensors of which only shape and dtype count"
        )
    ids = torch.empty((batch, seq), dtype=torch.int64, device="meta")
    takes_labels = "labels" in inspect.signature(type(model).forward).parameters
    labels = train and takes_labels and getattr(model, "loss_type", None) in TOKEN_LOSSES
    return {"input_ids": ids, **({"labels": ids} if labels else {})}


def recorded_calls(model: nn.Module, inputs: Mapping[str, Any], train: bool) -> list[tuple[Call, Choice]]:
    """The op calls of ``model(**inputs)``, and with ``train`` those of its gradients, on tensors without memory.

    The model stays as it is: neither its parameters, gradients and buffers nor random numbers change. The gradients are
    those of the loss that the model returns, or where it returns none of all that it returns.
    """
    _check_parameters(model)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    known = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    device = next((p.device for _, p in known if not p.is_meta), HOST)
    kept: dict[int, torch.Tensor] = {}
    state = {name: kept.setdefault(id(tensor), _parameter(fake, tensor)) for name, tensor in known}
    with _in_mode(model, train), torch.enable_grad() if train else torch.no_grad(), fake, _CallRecorder() as recorder:
        arguments = {name: _without_values(value, device) for name, value in inputs.items()}
        try:
            outputs = functional_call(model, state, (), arguments, tie_weights=False)
        except (DataDependentOutputException, DynamicOutputShapeException) as e:
            raise UnsupportedError(
                f"warm: {type(model).__name__} asks for the values of a tensor ({e}), on which its calls depend; pass "
                "calls by themselves to portakern.warm"
            ) from None
        if train:
            torch.autograd.backward(_differentiated(outputs))
    return recorder.calls


def _check_parameters(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if is_distributed(parameter):
            raise UnsupportedError(
                f"warm: {name} is sharded (a DTensor), and a model without memory gathers nothing; call warm before "
                "fully_shard, with the batch of one process"
            )


def _parameter(fake: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A parameter or buffer without memory; one that has none is on the host, since no model runs on meta alone."""
    with fake:
        made: torch.Tensor = (
            torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=HOST)
            if tensor.is_meta
            else fake.from_tensor(tensor.detach())
        )
    return made.requires_grad_(tensor.requires_grad)


def _without_values(value: Any, device: torch.device) -> Any:
    """A tensor of this form, on the model's device if it is on none."""
    if not isinstance(value, torch.Tensor):
        return value
    on = device if value.is_meta else value.device
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=on)


def _differentiated(outputs: Any) -> list[torch.Tensor]:
    """What a step calls ``backward`` of: the loss, reduced to one number, or each output's sum."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    found = [loss] if loss is not None else [*_tensors(outputs)]
    found = [x for x in found if x.requires_grad]
    if not found:
        raise SpecError("warm: the model returned nothing that wants a gradient; pass train=False for inference")
    return [x.sum() for x in found]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for member in value.values():
            yield from _tensors(member)
    elif isinstance(value, (tuple, list)):
        for member in value:
            yield from _tensors(member)


@contextmanager
def _in_mode(model: nn.Module, train: bool) -> Iterator[None]:
    """While inside, the model is in training, or in evaluation; one that is already keeps its exceptions."""
    before = {module: module.training for module in model.modules()} if model.training is not train else {}
    try:
        if before:
            model.train(train)
        yield
    finally:
        for module, training in before.items():
            module.training = training
