"""What a kernel with a likely mistake computes in place of a call, for the words of a failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from portakern.specs.attention.contract import attention, attention_vjp
from portakern.specs.attention.scores import first_place

if TYPE_CHECKING:
    from portakern.core.call import Call

__all__ = ["aligned_at_the_top", "moved_diagonal"]


def _placed(call: Call, first: int) -> Call | None:
    """The call with its first query at another of its keys; None if no mask compares places."""
    if not call.options["is_causal"] and call.options["window"] is None:
        return None
    return call.replace(options={**call.options, "q_start": first + (call.options["kv_start"] or 0)})


def moved_diagonal(by: int) -> Callable[[Call], Call | None]:
    """The masks' diagonal, some keys further."""
    return lambda call: _placed(call, first_place(call) + by)


def aligned_at_the_top(call: Call) -> Call | None:
    """The first query beside the first key."""
    return _placed(call, 0)


for op in (attention, attention_vjp):
    op.mistake("the mask is off by one: each query sees one key more at the diagonal")(moved_diagonal(1))
    op.mistake("the mask is off by one: each query sees one key less at the diagonal")(moved_diagonal(-1))
    op.mistake("the mask is aligned at the top left, not at the bottom right")(aligned_at_the_top)
