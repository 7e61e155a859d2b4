"""What a call of an op looks like, as Python's own tools ask: the signature for ``inspect``, the text for ``help``."""

from __future__ import annotations

import functools
import inspect
import textwrap
import typing
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from portakern.spec import Output, Spec
from portakern.spec.options import GRADIENT_DTYPE

__all__ = ["described", "lone_output", "signature"]


@functools.cache
def signature(spec: Spec[Any]) -> inspect.Signature:
    """The spec's parameters with their defaults and types, ``wants`` for a gradient op, ``overwrite`` for one whose
    results may lie over inputs, and what a call returns."""
    hints = typing.get_type_hints(spec.fn)
    declared = inspect.signature(spec.fn).parameters.values()
    parameters = [p.replace(annotation=hints[p.name]) for p in declared]
    made = [o for o in spec.options if o.name not in hints]
    parameters += [inspect.Parameter(o.name, inspect.Parameter.KEYWORD_ONLY, default=o.default, annotation=Any | None)
                   for o in made]  # fmt: skip
    if spec.is_vjp:
        names = tuple(o.name for o in spec.outputs)
        wants = Iterable[Literal[names]] | None  # type: ignore[valid-type]
        parameters.append(inspect.Parameter("wants", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=wants))
    if spec.aliases:
        inputs = tuple(spec.aliases.values())
        over = Literal[inputs] | Iterable[Literal[inputs]] | None  # type: ignore[valid-type]
        parameters.append(inspect.Parameter("overwrite", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=over))
    return inspect.Signature(parameters, return_annotation=_returned(spec))


def lone_output(spec: Spec[Any]) -> Output | None:
    """The output that a call returns by itself, outside the named tuple, unless options ask for more; None for none."""
    always = [o for o in spec.shown if o.wanted_by is None]
    return always[0] if len(always) == 1 and not spec.is_vjp else None


def _returned(spec: Spec[Any]) -> Any:
    lone = lone_output(spec)
    if lone is None:
        return spec.result
    array = typing.get_type_hints(spec.result)[lone.name]
    return array if len(spec.shown) == 1 else array | spec.result


@functools.cache
def described(spec: Spec[Any]) -> str:
    """The op's documentation under a line that shows how it is called, as functions without Python source have it."""
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature(spec).parameters.values()]
    text = f"{spec.name}{inspect.Signature(bare)}\n\n{spec.doc}"
    return "\n\n".join([text, *(textwrap.fill(said, 116) for said in _of_keywords(spec))])


def _of_keywords(spec: Spec[Any]) -> Iterator[str]:
    """What the keywords do that no signature of an op declares."""
    sums = [o.name for o in spec.outputs if o.dtype_option == GRADIENT_DTYPE.name]
    if sums:
        yield (
            f"With {GRADIENT_DTYPE.name}='float32' {' and '.join(sums)} {'is' if len(sums) == 1 else 'are'} float32, "
            "as shares of a sum want it that is rounded once. Gradients that autograd asks for have their input's "
            "dtype."
        )
    if spec.aliases:
        pairs = " and ".join(f"{out} over {name}" for out, name in spec.aliases.items())
        names = " or ".join(repr(name) for name in spec.aliases.values())
        yield (
            f"With overwrite={names} results are written over arguments ({pairs}), which must be contiguous and share "
            "their memory with no other argument: the result is that very array."
        )
