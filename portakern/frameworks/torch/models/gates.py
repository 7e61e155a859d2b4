"""The gated product of a feed-forward layer on the swiglu and geglu ops; its projections stay the module's own, so that
adapters on them (LoRA) and their hooks work as before. What plain projections return belongs to the layer alone, and a
backward pass that keeps no graph writes its gradients over it. Where the last projection multiplies codes of 8 bits and
no gradients are wanted, the op that computes the product gives them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from portakern.core import registry
from portakern.frameworks.torch.float8 import Float8Linear
from portakern.frameworks.torch.functions import kept_op
from portakern.frameworks.torch.models.prototypes import find, is_of_library
from portakern.frameworks.torch.models.served import Heart, Recipe, expected, is_bare, watched

__all__ = ["GATES", "GatedProjections", "served_gate"]


@dataclass(frozen=True)
class GatedProjections:
    """Where a feed-forward layer keeps its three projections and the function of its gate."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    act: str = "act_fn"


GATES = {"llama.LlamaMLP": GatedProjections()}
"""Prototype -> what it is made of: down(act(gate(x)) up(x))."""


@dataclass(frozen=True)
class Activation:
    """The op of a gate's function, and its options.

    Attributes:
      coded: the op that gives the product in codes of 8 bits, where there is one.
    """

    op: str
    options: Mapping[str, Any] = field(default_factory=dict)
    coded: str | None = None


ACTIVATIONS = {
    "SiLU": Activation("swiglu", coded="swiglu_quantize"),
    "SiLUActivation": Activation("swiglu", coded="swiglu_quantize"),
    "GELUActivation": Activation("geglu"),
    "GELUTanh": Activation("geglu", {"approximate": "tanh"}),
    "NewGELUActivation": Activation("geglu", {"approximate": "tanh"}),
    "PytorchGELUTanh": Activation("geglu", {"approximate": "tanh"}),
}
"""Class of a gate's function -> its op."""


def served_gate(module: nn.Module, backend: str | None) -> tuple[str, Recipe] | str | None:
    """The op that serves a feed-forward layer, and the forward that stands for the module's own; why there is none, in
    words; None for what is no such layer."""
    gate = find(type(module), GATES)
    if gate is None:
        return None
    kind = type(getattr(module, gate.act))
    act = ACTIVATIONS.get(kind.__name__) if is_of_library(kind) else None
    if act is None or act.op not in registry.ops():
        return f"no op is a gate of {kind.__name__}; those with an op are {', '.join(ACTIVATIONS)}"
    return act.op, Recipe(_gated, type(module), (kind, backend))


def _gated(original: Any, kind: type, backend: str | None) -> Heart:
    gate, act = expected(find(original, GATES), original), ACTIVATIONS[kind.__name__]
    own_forward, options = inspect.unwrap(original.forward), act.options
    shared, own = kept_op(act.op, backend), kept_op(act.op, backend, ("gate", "up"))
    coded = None if act.coded is None else kept_op(act.coded, backend)

    def unless(self: nn.Module) -> str:
        there = getattr(self, gate.act)
        if type(there) is not kind:
            return f"its {gate.act} is now {type(there).__name__}"
        why = is_bare(there)
        return why and f"its {gate.act} {why}"

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        if unless(self):
            y: Tensor = own_forward(self, x)
            return y
        opening, rising, down = (getattr(self, name) for name in (gate.gate, gate.up, gate.down))
        if coded is not None and type(down) is Float8Linear and down.takes_codes() and not is_bare(down):
            opened = opening(x)
            q, scale = coded(opened, rising(x), **options, **down.code_options())
            return down.of_codes(q, scale, opened)
        product = own if torch.is_grad_enabled() and unseen(opening) and unseen(rising) else shared
        y = down(product(opening(x), rising(x), **options))
        return y

    return Heart(forward, unless)


def unseen(projection: nn.Module) -> bool:
    """Whether nobody but its caller gets to see what a projection returns, so that gradients may be written over it: a
    ``torch.nn.Linear`` as PyTorch has it, or that of 8-bit floats, whose own backward passes do not read their results,
    without hooks, adapters, forwards of somebody's or modes that look through it. Not where torch.compile traces, which
    plans memory itself."""
    kind = type(projection)
    if torch.compiler.is_compiling() or kind not in FORWARDS or "forward" in vars(projection):
        return False
    if kind.forward is not FORWARDS[kind] or torch._C._len_torch_function_stack():
        return False
    return not watched(projection)


FORWARDS: Mapping[type, Any] = {kind: kind.forward for kind in (nn.Linear, Float8Linear)}
"""Those of layers that do not read their results again, before anybody put others in their place."""
