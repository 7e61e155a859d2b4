"""What torch.compile reads of an Op while it traces a function, in forms that it can trace. Nothing here imports torch
by itself.

Dynamo runs ``prepare`` and ``stage`` as they are and takes what they return for constants, which may be strings but
neither functions nor Ops. So they leave those as attributes of ``FOUND``, where dynamo looks them up by name, and looks
again before it runs the compiled function.
"""

from __future__ import annotations

import ctypes
import inspect
import re
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from portakern.core.backend import Backend
from portakern.core.binder import binder, misfit
from portakern.core.dispatch import Choice
from portakern.errors import UnsupportedError
from portakern.frameworks.torch.memory import assumed
from portakern.spec import Spec

__all__ = ["FOUND", "OpKey", "constant", "keep", "prepare", "stage"]


class OpLike(Protocol):
    """What this module reads of an op object."""

    spec: Spec[Any]
    choice: Choice
    kept: dict[str, Any]


class OpKey(NamedTuple):
    """What an op keeps: the name that it shares with ops that agree in everything, and the first op of that name, None
    if it is that itself.
    """

    key: str
    namesake: OpLike | None


_kept: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


class _Found:
    """Ops and staged functions as attributes."""


FOUND = _Found()


def _object(address: int) -> Any:
    """The object there, which the function that is traced holds."""
    return ctypes.cast(address, ctypes.py_object).value


def keep(this: OpLike) -> OpKey:
    """A name that ops of one spec and choice share, and the first op of that name, whom the others keep alive.

    torch.compile compares names, not objects, so that two layers with an op each share compiled code."""
    choice = this.choice
    words = [this.spec.name, choice.backend.name if choice.backend else "", choice.variant or ""]
    # an attribute's name, in which dynamo takes a dot for the next attribute; the same words may become of others
    first = key = re.sub(r"[^\w ]", "_", f"{' '.join((*words, *choice.spends))} {sorted(choice.tiling.items())}")
    n = 1
    while (other := _kept.setdefault(key, this)).spec is not this.spec or other.choice != choice:
        n += 1
        key = f"{first} {n}"
    return OpKey(key, None if other is this else other)


def constant(given: Any) -> tuple[bool, Any]:
    """An argument of :func:`prepare` as dynamo takes one: (whether it is an address, itself or its address). Before
    torch 2.13 dynamo hands no spec and no backend on, but it knows where one lies, and looks again before it runs the
    compiled function."""
    return (True, id(given)) if isinstance(given, (Spec, Backend)) else (False, given)


@assumed
def prepare(make: Callable[..., OpLike], *args: tuple[bool, Any]) -> str:
    """Make the op that a traced function asks for, of what :func:`constant` made of its arguments; its attribute of
    ``FOUND``."""
    made = make(*[_object(given) if lies else given for lies, given in args])
    name = f"op {made.kept['torch'].key}"
    setattr(FOUND, name, made)
    return name


@assumed
def stage(key: str, given: int, named: tuple[str, ...]) -> None:
    """Put the function that stands for the ops called ``key`` in a graph under that name.

    A call with the wrong arguments, ``given`` by position and ``named``, is refused here."""
    from portakern.frameworks.torch import custom_ops

    made = _kept[key]
    if "overwrite" in named:
        raise UnsupportedError(
            f"{made.spec.name}: overwrite is given in a call that PyTorch records, and what is recorded writes to no "
            "input; leave it out: torch.compile finds memory for results by itself"
        )
    try:
        inspect.signature(binder(made.spec)).bind(*[None] * given, **dict.fromkeys(named))
    except TypeError as e:
        raise misfit(made.spec, f"{made.spec.name}() {e}") from None
    custom_ops.tell_counters(made.spec)
    if "torch.distributed.tensor" in sys.modules:
        from portakern.frameworks.torch import sharded

        with suppress(UnsupportedError):  # an old release, of whose DTensors PyTorch says that the op takes none
            sharded.register(made.spec)
    setattr(FOUND, key, custom_ops.staged(made.spec, made.choice))
