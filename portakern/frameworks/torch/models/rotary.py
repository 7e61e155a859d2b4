"""Rotary embedding of a model on the rope op: its attention as it is written, with another ``apply_rotary_pos_emb``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from portakern.frameworks.torch.functions import kept_op
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
    return "rope", with_names(forward, f"rope_{backend}", {NAME: _rotary(backend)})


def _rotary(backend: str | None) -> Callable[..., tuple[Tensor, Tensor]]:
    rope = kept_op("rope", backend)

    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        """q, k: (batch, heads, length, d), or with unsqueeze_dim=2 (batch, length, heads, d); cos, sin: (batch or 1,
        length, d), whose halves are equal."""
        pairs = cos.shape[-1] // 2
        cos, sin = (table[..., :pairs].detach() for table in (cos, sin))
        if cos.dtype.itemsize < q.dtype.itemsize:
            cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        if unsqueeze_dim == 2:
            return rope(q, cos, sin), rope(k, cos, sin)
        turned = (rope(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k))
        return next(turned), next(turned)

    return apply_rotary_pos_emb
