"""Rotary embedding of a model on the rope op: its attention as it is written, with another ``apply_rotary_pos_emb``."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn

from portakern.frameworks.torch.functions import apply_rotary_pos_emb
from portakern.frameworks.torch.models.prototypes import function_is, names_in, with_names
from portakern.frameworks.torch.models.served import Heart, Recipe

__all__ = ["served_rotary"]

NAME = "apply_rotary_pos_emb"
PROTOTYPE = f"llama.{NAME}"
OTHER = f"an {NAME} that is not that of Llama"


def served_rotary(module: nn.Module, backend: str | None) -> tuple[str, Recipe] | str | None:
    """The op that turns an attention's queries and keys, and the forward that stands for the module's own; why there is
    none, in words; None for what turns nothing."""
    if NAME not in names_in(module):
        return None
    if not _turns_as_known(inspect.unwrap(type(module).forward).__globals__):
        return OTHER
    return "rope", Recipe(_rotary, type(module), (backend,))


def _rotary(kind: Any, backend: str | None) -> Heart:
    theirs = inspect.unwrap(kind.forward)
    names, known = theirs.__globals__, theirs.__globals__.get(NAME)
    changed = f"its module's {NAME} was replaced since"
    if not _turns_as_known(names):
        return Heart(theirs, lambda module: OTHER)
    ours = with_names(theirs, f"rope_{backend}", {NAME: functools.partial(apply_rotary_pos_emb, backend=backend)})

    def unless(module: nn.Module) -> str:
        return "" if names.get(NAME) is known else changed

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return theirs(self, *args, **kwargs) if unless(self) else ours(self, *args, **kwargs)

    return Heart(forward, unless)


def _turns_as_known(names: dict[str, Any]) -> bool:
    return NAME in names and function_is(names[NAME], PROTOTYPE)
