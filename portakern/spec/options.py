"""An op's options: what each may be, read off its annotation, with the canonical Python value that backends see."""

from __future__ import annotations

import math
import numbers
import operator
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from portakern.spec.dtypes import FLOATS

__all__ = [
    "GRADIENT_DTYPE",
    "HUGE",
    "TINY",
    "Axis",
    "DType",
    "Extent",
    "Float32Result",
    "Option",
    "Range",
    "option_from_annotation",
    "shown",
]

TINY, HUGE = (
    2.0**-126,
    (2 - 2.0**-23) * 2.0**127,
)  # float32's normal numbers: kernels compute in it, and a scale that it cannot hold becomes 0 or inf in silence


@dataclass(frozen=True)
class Range:
    """Numbers from ``lo`` to ``hi``; ``open`` excludes the ends. ``typical``: the values that the checker draws."""

    lo: float = -math.inf
    hi: float = math.inf
    open: bool = False
    typical: tuple[float, ...] = ()

    def __contains__(self, x: float) -> bool:
        return self.lo < x < self.hi if self.open else self.lo <= x <= self.hi

    def __str__(self) -> str:
        if self.hi == math.inf and self.lo == -math.inf:
            return ""
        if self.hi == math.inf:
            return f"{'>' if self.open else '>='} {self.lo:g}"
        return f"in {'(' if self.open else '['}{self.lo:g}, {self.hi:g}{')' if self.open else ']'}"


def shown(value: Any, limit: int = 80) -> str:
    """Any value as text for an error message: its repr, cut."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= limit else f"{text[:limit]}... ({type(value).__name__})"


@dataclass(frozen=True)
class Axis:
    """An integer that names an axis of the array argument ``of``, counted from the end when negative."""

    of: str


@dataclass(frozen=True)
class Extent:
    """An integer that is the extent of the dimension which is called like the option: ``width: Annotated[int, Extent()]
    = 128`` beside the axis ``blocks*width``. At least 1, unless a ``Range`` says otherwise."""


@dataclass(frozen=True)
class DType:
    """A dtype among ``names``, floating-point ones of more than 8 bits unless the spec names others: a name, or
    NumPy's, PyTorch's or JAX's dtype object. Backends get the name."""

    names: tuple[str, ...] = FLOATS


Float32Result = Annotated[Any, DType(("float32",))]
"""The dtype of results that are added or merged before they are rounded."""


@dataclass(frozen=True)
class Option:
    """A keyword-only argument. ``check(value)`` returns the canonical value or raises ValueError with what it expected.

    ``kind``: bool, int, float, choice (a string), dtype (a name) or tuple (of integers and None); ``optional``: it may
    be None; ``range``: the range of a number, else None; ``extent``: it is a dimension's (:class:`Extent`)."""

    name: str
    default: Any
    check: Callable[[Any], Any]
    expected: str
    choices: tuple[Any, ...]
    axis_of: str | None = None
    kind: str = "float"
    optional: bool = False
    range: Range | None = None
    extent: bool = False


def option_from_annotation(name: str, hint: Any, default: Any) -> Option:
    """Read an option off its annotation: bool, Literal[...], Annotated[int | float | tuple, Range], Axis, Extent,
    DType; ``| None`` if None is allowed."""
    optional, inner = False, hint
    marks: tuple[Any, ...] = ()
    if typing.get_origin(inner) in (typing.Union, types.UnionType):
        rest = [a for a in typing.get_args(inner) if a is not types.NoneType]
        optional, inner = len(rest) < len(typing.get_args(inner)), rest[0]
    if typing.get_origin(inner) is Annotated:
        inner, *mark_list = typing.get_args(inner)
        marks = tuple(mark_list)
    extent = any(isinstance(m, Extent) for m in marks)
    if extent and not any(isinstance(m, Range) for m in marks):
        marks = (*marks, Range(1))
    check, expected, choices = _checker(inner, marks)
    if inner is int and not extent and not any(isinstance(m, Axis) for m in marks):
        check = _or_symbol(check)
    axis_of = next((mark.of for mark in marks if isinstance(mark, Axis)), None)
    kind = _kind(inner, marks)
    given = next((m for m in marks if isinstance(m, Range)), Range())
    reach = given if kind in ("float", "int", "tuple") and axis_of is None else None
    if optional:
        return Option(
            name,
            default,
            lambda v: None if v is None else check(v),
            f"{expected}, or None",
            (None, *choices),
            axis_of,
            kind,
            True,
            reach,
            extent,
        )
    return Option(name, default, check, expected, choices, axis_of, kind, range=reach, extent=extent)


def _kind(inner: Any, marks: tuple[Any, ...]) -> str:
    if any(isinstance(m, DType) for m in marks):
        return "dtype"
    return {Literal: "choice", tuple: "tuple"}.get(typing.get_origin(inner)) or str(inner.__name__)


def _checker(kind: Any, marks: tuple[Any, ...]) -> tuple[Callable[[Any], Any], str, tuple[Any, ...]]:
    bounds = next((m for m in marks if isinstance(m, Range)), Range())
    named = next((m.names for m in marks if isinstance(m, DType)), None)
    if named is not None:
        what = f"{'a floating-point' if named == FLOATS else 'a'} dtype ({', '.join(named)})"
        return (lambda v: _dtype(v, named)), what, named[:3]
    if typing.get_origin(kind) is Literal:
        allowed = typing.get_args(kind)
        return (lambda v: _member(v, allowed)), f"one of {', '.join(map(repr, allowed))}", allowed
    if typing.get_origin(kind) is tuple:
        length = len(typing.get_args(kind))
        return (
            (lambda v: _tuple(v, length, bounds)),
            f"a tuple of {length} integers {bounds} (None for no limit)",
            bounds.typical,
        )
    if kind is bool:
        return _bool, "True or False", (False, True)
    if kind is int:
        return (lambda v: _int(v, bounds)), f"an integer {bounds}".strip(), bounds.typical
    if kind is float:
        return (lambda v: _float(v, bounds)), f"a finite number in float32's range {bounds}".strip(), bounds.typical
    raise TypeError(f"an option cannot be annotated {kind!r}")


def _member(value: Any, allowed: tuple[Any, ...]) -> Any:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError
    return str(value)


def _bool(value: Any) -> bool:
    if isinstance(value, bool) or type(value).__name__ in (
        "bool_",
        "bool",
    ):  # NumPy's bool scalar, under its 1.x and 2.x names
        return bool(value)
    raise ValueError


def _int(value: Any, bounds: Range) -> int:
    if isinstance(value, bool):
        raise ValueError
    try:
        number = operator.index(value)
    except (TypeError, ValueError):
        raise ValueError from None
    if number not in bounds:
        raise ValueError
    return number


def _or_symbol(check: Callable[[Any], int]) -> Callable[[Any], Any]:
    """The same of an integer on which no shape depends: a graph's symbol stays one, so that one graph serves all its
    values, and is checked when the call is made."""
    return lambda value: value if type(value).__name__ == "SymInt" else check(value)


def _float(value: Any, bounds: Range) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError
    try:
        number = float(value)
    except OverflowError:
        raise ValueError from None
    if not (number == 0 or TINY <= abs(number) <= HUGE) or number not in bounds:
        raise ValueError
    return number


def _tuple(value: Any, length: int, bounds: Range) -> tuple[int | None, ...]:
    if not isinstance(value, (tuple, list)) or len(value) != length:
        raise ValueError
    return tuple(None if v is None else _int(v, bounds) for v in value)


def _dtype(value: Any, names: tuple[str, ...]) -> str:
    if isinstance(value, str):
        name = value
    elif isinstance(value, type):  # np.float32, jnp.float32, ml_dtypes.bfloat16
        name = value.__name__
    else:  # torch.float32 prints as 'torch.float32', np.dtype carries its name
        name = str(getattr(value, "name", value)).removeprefix("torch.")
    if name not in names or not getattr(value, "isnative", True):  # outputs have this machine's byte order
        raise ValueError
    return name


GRADIENT_DTYPE = option_from_annotation("gradient_dtype", Float32Result | None, None)
"""What an op of gradients has whose spec says ``gradient_dtype`` (:func:`portakern.spec.spec`)."""
