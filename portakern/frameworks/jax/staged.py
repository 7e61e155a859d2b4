"""A call as a parameter of JAX's primitive: everything about it but its arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from portakern.core.backend import Backend
from portakern.core.binder import bind
from portakern.core.call import Call
from portakern.core.dispatch import Choice
from portakern.core.framework import frameworks
from portakern.spec import Spec
from portakern.spec.dtypes import numpy_dtype

__all__ = ["Axes", "StaticCall", "output_dtype", "static_call"]

Axes = tuple[int | None, ...]


@dataclass(frozen=True)
class StaticCall:
    """Everything about a call but its arrays. ``vmaps``: the batched axes of each enclosing ``jax.vmap``, innermost
    first (0 or None an array)."""

    spec: Spec[Any]
    backend: Backend | None
    variant: str | None
    tiling: tuple[tuple[str, int], ...]
    given: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]
    wants: tuple[str, ...]
    vmaps: tuple[Axes, ...] = ()

    def bind(self, arrays: Sequence[Any]) -> Call:
        call = bind(self.spec, **dict(zip(self.given, arrays, strict=True)), **dict(self.options))
        return call.replace(wants=self.wants)

    def unbatched(self, avals: Sequence[Any]) -> tuple[tuple[int, ...], Call]:
        """The extents that enclosing ``jax.vmap`` give, outermost first, and the call within them."""
        lead: tuple[int, ...] = ()
        shapes = [a.shape for a in avals]
        for axes in reversed(self.vmaps):  # outermost first: peel the leading axes off
            lead += (next(s[0] for s, ax in zip(shapes, axes, strict=True) if ax is not None),)
            shapes = [s if ax is None else s[1:] for s, ax in zip(shapes, axes, strict=True)]
        return lead, self.bind([jax.ShapeDtypeStruct(s, a.dtype) for s, a in zip(shapes, avals, strict=True)])

    @property
    def choice(self) -> Choice:
        return Choice(self.backend, self.variant, dict(self.tiling))


def static_call(call: Call, choice: Choice) -> StaticCall:
    given = tuple(n for n, a in call.arrays.items() if a is not None)
    tiling = tuple(sorted(choice.tiling.items()))
    return StaticCall(call.spec, choice.backend, choice.variant, tiling, given, tuple(call.options.items()), call.wants)


def output_dtype(dtype: str) -> Any:
    """NumPy's object for the dtype in which JAX holds an output."""
    return numpy_dtype(frameworks()["jax"].stored_dtype(dtype))
