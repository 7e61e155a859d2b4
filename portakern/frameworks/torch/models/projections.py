"""Which linear layers of a model are its projections, and the 8-bit layers that stand for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from portakern.errors import UnsupportedError
from portakern.frameworks.torch.float8 import RECIPES, Float8Linear, SharedCodes
from portakern.frameworks.torch.models.blocks import BLOCKS
from portakern.frameworks.torch.models.gates import GATES
from portakern.frameworks.torch.models.mlps import MLPS, is_conv1d
from portakern.frameworks.torch.models.prototypes import find, names_in
from portakern.frameworks.torch.models.served import is_bare

__all__ = ["Projection", "projections"]


class Projection(NamedTuple):
    """A linear layer of a model.

    Attributes:
      module: the layer. owners: the modules that have it, each with the attribute.
      served: what stands for it, or why it stays as it is, in words.
    """

    module: nn.Module
    owners: tuple[tuple[nn.Module, str], ...]
    served: Float8Linear | str


def projections(model: nn.Module, recipe: str, backend: str | None, by_name: Any) -> Iterator[Projection]:
    """Every linear layer of a model. by_name: whether a module has the name of an attention or a feed-forward layer,
    where no prototype is like it."""
    owners: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for owner in model.modules():
        for name, child in owner._modules.items():
            if child is not None and (isinstance(child, nn.Linear) or is_conv1d(child)):
                owners.setdefault(child, []).append((owner, name))
    uses = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    heads = {id(head) for head in _heads(model)}
    shared: dict[nn.Module, SharedCodes] = {}
    for module, having in owners.items():
        why = "it is the model's last projection" if id(module) in heads else _stays(module, having, uses, by_name)
        served: Float8Linear | str = why or _made(module, recipe, backend)
        if isinstance(served, Float8Linear):
            served.shared = shared.setdefault(having[0][0], SharedCodes())
        yield Projection(module, tuple(having), served)


def _heads(model: nn.Module) -> Iterator[Any]:
    """What models of transformers call their output embeddings."""
    for module in model.modules():
        if hasattr(module, "get_output_embeddings"):
            yield module.get_output_embeddings()


def _stays(module: Any, owners: list[tuple[nn.Module, str]], uses: Counter[int], by_name: Any) -> str:
    """Why a layer is no projection that codes may stand for, in words; "" where it is one."""
    if type(module) is not nn.Linear:
        return f"it is a {type(module).__name__}; expected a torch.nn.Linear"
    outside = next((owner for owner, name in owners if not _projects(owner, name, by_name)), None)
    if outside is not None:
        return f"{type(outside).__name__}, which has it, is no attention or feed-forward layer that is known"
    if uses[id(module.weight)] > 1:
        return "its weight is tied to another module's"
    why = is_bare(module)
    if why:
        return f"it {why}"
    kinds = {type(p).__name__ for p in module._parameters.values() if p is not None} - {"Parameter"}
    return f"its parameters are of {min(kinds)}" if kinds else ""


def _projects(owner: nn.Module, name: str, by_name: Any) -> bool:
    """Whether a module is attention, or a feed-forward layer, or a part of one, of which an attribute is a
    projection."""
    kind = type(owner)
    gate, mlp = find(kind, GATES), find(kind, MLPS)
    if gate is not None:
        return name in (gate.gate, gate.up, gate.down)
    if mlp is not None:
        return name in (mlp.projection, mlp.second)
    block = find(kind, BLOCKS)
    if block is not None:
        return name in block.names
    return "ALL_ATTENTION_FUNCTIONS" in names_in(owner) or by_name(owner)


def _made(module: Any, recipe: str, backend: str | None) -> Float8Linear | str:
    """The layer that stands for a linear layer; why none can, in words."""
    if module.training and not RECIPES[recipe].trains:
        return f"it is in training, and recipe {recipe!r} is for inference"
    try:
        return Float8Linear.from_linear(module, recipe, backend=backend)
    except UnsupportedError as e:
        return str(e).removeprefix("Float8Linear: ")
