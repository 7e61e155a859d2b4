"""Op calls under the names that PyTorch's profiler shows: ``portakern::softmax``, ``portakern::softmax_vjp``.

Nothing here runs while no profiler does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler

__all__ = ["begun", "named", "recorded"]


class _ProfiledThread(threading.local):
    """Whether the next op call of this thread stands in a profile already."""

    already = False


_state = _ProfiledThread()


def begun() -> bool:
    """Whether the op call that begins stands in a profile already; asked once by every call while a profiler runs."""
    already, _state.already = _state.already, False
    return already


def recorded(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call of an op as one event of the profile, with all that the host does for it."""
    with named(op.spec.name, (*args, *kwargs.values())):
        _state.already = True
        return op(*args, **kwargs)


def named(op: str, values: Iterable[Any]) -> AbstractContextManager[Any]:
    """An event of the profile under an op's name, with the shapes of those values that are tensors."""
    if not profiler._is_profiler_enabled:
        return nullcontext()
    event: AbstractContextManager[Any] = torch._C._profiler._RecordFunctionFast(
        f"portakern::{op}", [v for v in values if isinstance(v, torch.Tensor)]
    )
    return event
