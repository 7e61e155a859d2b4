"""What torch.compile reads of an Op while it traces a function, in forms that it can trace. Nothing here imports torch by itself.

Dynamo runs ``prepare`` and ``stage`` as they are and takes what they return for constants, which may be strings but neither functions nor Ops. So they leave
those as attributes of ``FOUND``, where dynamo looks them up by name, and looks again before it runs the compiled function.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from portakern import registry
from portakern.registry import Backend
from portakern.spec import Spec

if TYPE_CHECKING:
    from portakern.dispatch import Op

__all__ = ["FOUND", "keep", "prepare", "stage"]

_kept: weakref.WeakValueDictionary[str, Op] = weakref.WeakValueDictionary()


class _Found:
    """Ops and staged functions as attributes."""


FOUND = _Found()


def _constant(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compiler.assume_constant_result does, for a module that must not import torch."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def keep(this: Op) -> tuple[str, Op | None]:
    """A name that Ops of one spec, backend and tiling share, and the first Op of that name, whom the others keep alive.

    torch.compile compares names, not objects, so that two layers with an Op each share compiled code."""
    first = key = f"{this.spec.name} {this.backend.name if this.backend else ''} {sorted(this.user_tiling.items())}"
    n = 1
    while (other := _kept.setdefault(key, this)).spec is not this.spec or other.backend is not this.backend:
        n += 1
        key = f"{first} {n}"
    return key, None if other is this else other


@_constant
def prepare(which: str | Spec[Any], backend: str | Backend | None, tiling: Mapping[str, int] | None) -> str:
    """Make the Op that a traced function asks for; its attribute of ``FOUND``."""
    from portakern.dispatch import Op

    made = Op(which if isinstance(which, Spec) else registry.find_spec(str(which)), backend, tiling)
    setattr(FOUND, f"op {made.key}", made)
    return f"op {made.key}"


@_constant
def stage(key: str, given: int, named: tuple[str, ...]) -> None:
    """Put the function that stands for the Ops called ``key`` in a graph under that name. A call with the wrong arguments, ``given`` by position and ``named``, is
    refused here."""
    from portakern import torch_ops

    made = _kept[key]
    try:
        inspect.signature(made._bind).bind(*[None] * given, **dict.fromkeys(named))
    except TypeError as e:
        raise made.misfit(f"{made.spec.name}() {e}") from None
    setattr(FOUND, key, torch_ops.staged(made))
