"""Rotary embedding of a model on the rope op: its attention as it is written, with another ``apply_rotary_pos_emb``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from portakern.frameworks.torch.functions import apply_rotary_pos_emb
from portakern.frameworks.torch.models.prototypes import function_is, names_in, with_names

__all__ = ["served_rotary"]

NAME = "apply_rotary_pos_emb"
PROTOTYPE = f"llama.{NAME}"


def served_rotary(module: nn.Module, backend: str | None) -> tuple[str, Callable[..., Any]] | str | None:
    """The op that turns an attention's queries and keys, and the forward that stands for the module's own; why there is
    none, in words; None for what turns nothing."""
    if NAME not in names_in(module):
        return None
    forward = inspect.unwrap(type(module).forward)
    theirs = forward.__globals__.get(NAME)
    if theirs is None or not function_is(theirs, PROTOTYPE):
        return f"an {NAME} that is not that of Llama"
    return "rope", with_names(
        forward, f"rope_{backend}", {NAME: functools.partial(apply_rotary_pos_emb, backend=backend)}
    )
