"""The projections of a feed-forward layer without a gate on the linear op: the first with its bias and the activation
behind it, the second with the residual that its block adds.

A product by itself is what libraries do as well, so that there has to be something to win: an implementation says in
which dtypes it was measured to be no slower than the library's product and what follows it, one after the other
(``ahead``), and on a GPU these alone are served. Everything else is the layer's own forward, which is decided anew for
each call: what torch.autocast makes of it counts, and hooks on what would be passed over.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from portakern.core import registry
from portakern.core.dispatch import ahead
from portakern.core.framework import frameworks
from portakern.frameworks.torch.casting import widened
from portakern.frameworks.torch.functions import kept_op
from portakern.frameworks.torch.models.prototypes import find, is_of_library
from portakern.frameworks.torch.models.served import (
    Heart,
    Recipe,
    expected,
    has_plain_parameters,
    is_bare,
    served_by,
    watched,
)

__all__ = ["ACTIVATIONS", "MLPS", "Mlp", "ServedMlp", "dtypes_served", "served_mlp", "with_residual"]


@dataclass(frozen=True)
class Mlp:
    """Where a feed-forward layer keeps its first projection, the function behind it, and the second projection and the
    dropout behind that, where it has them."""

    projection: str
    act: str
    second: str | None = None
    drop: str | None = None


MLPS = {
    "gpt2.GPT2MLP": Mlp("c_fc", "act", "c_proj", "dropout"),
    "vit.ViTMLP": Mlp("fc1", "activation_fn", "fc2"),
    "bert.BertIntermediate": Mlp("dense", "intermediate_act_fn"),
}
"""Prototype -> what it is made of: drop(second(act(projection(x))))."""

ACTIVATIONS = {
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "ReLU": "relu",
    "SiLU": "silu",
    "SiLUActivation": "silu",
}
"""Class of an activation, of PyTorch or transformers -> what the op calls it."""

DTYPES = {getattr(torch, name): name for name in ("float16", "bfloat16", "float32", "float64")}


class ServedMlp(NamedTuple):
    """The forward that stands for a layer's own.

    Attributes:
      projection: the one that it does not call. only: in which dtypes, in words that follow the name of who serves.
    """

    forward: Recipe
    projection: nn.Module
    only: str


def dtypes_served(backend: str | None, device: torch.device) -> frozenset[str]:
    """The dtypes in which the op serves projections on a device."""
    if device.type == "meta":
        return frozenset()
    framework = frameworks()["torch"]
    named = None if backend is None else registry.backend(backend)
    return ahead(registry.find_spec("linear"), framework, framework.target(device), named)


def served_mlp(module: nn.Module, backend: str | None) -> ServedMlp | str | None:
    """What serves a feed-forward layer; why nothing does, in words; None for what is no such layer."""
    mlp = find(type(module), MLPS)
    if mlp is None:
        return None
    projection, act = getattr(module, mlp.projection), getattr(module, mlp.act)
    name = type(act).__name__
    if name not in ACTIVATIONS or not is_of_library(type(act)):
        return f"no op is a projection with {name} behind it; those with an op are {', '.join(ACTIVATIONS)}"
    if not (is_linear(projection) or is_conv1d(projection)):
        owner = type(projection).__module__.partition(".")[0]
        return f"its {mlp.projection} is {owner}'s {type(projection).__name__}, which is called as it is"
    where = projection.weight.device
    planned = dtypes_served(backend, where)
    if not planned and where.type != "meta":
        return f"a product and {name} take no less time in one kernel on {frameworks()['torch'].target(where)}"
    recipe = Recipe(_activated, type(module), (type(projection), type(act), where, planned, backend))
    return ServedMlp(recipe, projection, _only(planned))


def _activated(
    original: Any, kind: type, act: type, where: torch.device, planned: frozenset[str], backend: str | None
) -> Heart:
    mlp: Mlp = expected(find(original, MLPS), original)
    own_forward, activation = inspect.unwrap(original.forward), ACTIVATIONS[act.__name__]
    known: dict[tuple[str, int | None], frozenset[str]] = {(where.type, where.index): planned}
    linear = kept_op("linear", backend)

    def unless(self: nn.Module) -> str:
        for name, of in ((mlp.projection, kind), (mlp.act, act)):
            there = getattr(self, name)
            if type(there) is not of:
                return f"its {name} is now {type(there).__name__}"
            why = is_bare(there)
            if why:
                return f"its {name} {why}"
        return ""

    def forward(self: nn.Module, x: Tensor, residual: Tensor | None = None) -> Tensor:
        opening: Any = getattr(self, mlp.projection)
        device = x.device.type, x.device.index
        if device not in known:
            known[device] = _dtypes_served(backend, x.device)
        if _dtype_of(x) not in known[device] or unless(self) or not has_plain_parameters(opening):
            y: Tensor = own_forward(self, x)
            return y if residual is None else residual + y
        y = linear(x, _rows_of(opening), opening.bias, activation=activation)
        if mlp.second is None:
            return y
        second, drop = getattr(self, mlp.second), None if mlp.drop is None else getattr(self, mlp.drop)
        if residual is not None and (drop is None or _is_idle(drop)) and _takes(second, y, residual):
            return linear(y, _rows_of(second), second.bias, residual)
        y = second(y) if drop is None else drop(second(y))
        return y if residual is None else residual + y

    return Heart(forward, unless, adds=mlp.second is not None)


def with_residual(layer: nn.Module, x: Tensor, residual: Tensor, drop: nn.Module | None = None) -> Tensor:
    """residual + drop(layer(x)); by the layer, where it takes the residual and nobody sees what it returns."""
    there = served_by(layer)
    if there is not None and there.adds and (drop is None or _is_idle(drop)) and not watched(layer):
        y: Tensor = layer(x, residual)
        return y
    y = layer(x)
    return residual + (y if drop is None else drop(y))


def _takes(second: nn.Module, x: Tensor, residual: Tensor) -> bool:
    """Whether the op adds a residual to what a projection makes of x: sums of two dtypes are PyTorch's, and so is a
    weight that lies across and gets a gradient, which autograd would copy: that takes longer than the sum."""
    if is_bare(second) or not has_plain_parameters(second) or DTYPES.get(residual.dtype) != _dtype_of(x):
        return False
    trained = torch.is_grad_enabled() and any(p.requires_grad for p in second.parameters(recurse=False))
    return is_linear(second) or (is_conv1d(second) and not trained)


def _rows_of(projection: Any) -> Tensor:
    """A projection's weight, a row for each number that it gives."""
    weight: Tensor = projection.weight
    return weight.mT if is_conv1d(projection) else weight


def _is_idle(drop: nn.Module) -> bool:
    """Whether a module drops nothing, and nobody would miss it."""
    return type(drop) is nn.Dropout and (drop.p == 0.0 or not drop.training) and not is_bare(drop)


def _only(served: frozenset[str]) -> str:
    if not served or served >= {*DTYPES.values()}:
        return ""
    return f" in {' and '.join(sorted(served))}, otherwise PyTorch"


@torch.compiler.assume_constant_result
def _dtypes_served(backend: str | None, device: torch.device) -> frozenset[str]:
    """Of a device that the model was not on when it was read."""
    return dtypes_served(backend, device)


def _dtype_of(x: Tensor) -> str | None:
    """The dtype in which a projection of x is computed."""
    cast = widened(x) and x.dtype is not torch.float64
    return DTYPES.get(torch.get_autocast_dtype(x.device.type) if cast else x.dtype)


def is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear


def is_conv1d(module: nn.Module) -> bool:
    """Whether a projection is transformers' that keeps its weight as (in, out), which the op reads by its strides."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
