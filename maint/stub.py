"""The type stub of ``portakern.op``, written from the specs, with the signature of each op for type checkers and
editors.

``portakern/_typed.pyi`` has no Python file beside it; ``portakern/__init__.py`` imports it for type checkers alone.
There ``op("attention")`` gives an ``AttentionOp``: an ``Op`` whose call has the spec's parameters and returns what the
options ask for, in the library of its arrays. Each signature stands there twice. NumPy's array types carry a shape and
a dtype, which a result need not share, so NumPy's arrays have one of their own. The arrays of other libraries have one
plain type, which the other signature hands through; it knows them by an attribute, so that checkers need not read those
libraries.
"""

from __future__ import annotations

import inspect
import json
import math
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from inspect import Parameter
from typing import Any, Literal, NamedTuple

from portakern import api
from portakern.core import registry
from portakern.core.framework import frameworks
from portakern.spec import Output, Spec
from portakern.spec.signature import lone_output, signature

__all__ = ["FILE", "stub"]

FILE = "portakern/_typed.pyi"
WIDTH = 120
HEAD = '''\
# Written by "portakern report" from the specs: change those, and run it again.
"""What type checkers and editors see of ``portakern.op``: each op's own signature, by its name."""

from collections.abc import Iterable, Mapping
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, overload

from numpy.typing import NDArray

from portakern.api import Op
from portakern.core.backend import Backend
from portakern.spec import Spec
'''
ARRAY = '''\
class {name}(Protocol):
    """Whatever has this attribute is an array of {title}."""

    @property
    def {hallmark}(self) -> Any: ...
'''
ROUTING = (
    "*",
    "backend: str | Backend | None = None",
    "variant: str | None = None",
    "tiling: Mapping[str, int] | None = None",
)


def stub() -> str:
    """The text of the stub: portakern's own ops, whatever else is installed."""
    specs = [registry.find_spec(name) for name in sorted(registry.own_modules())]
    return "\n".join([HEAD, *_arrays(), *(text for s in specs for text in (*_result(s), _typed_op(s))), _op(specs)])


# ------------------------------------------------------------------------------------------------- arrays and results
def _arrays() -> Iterator[str]:
    """The kinds of array that are handed through, and the type variables: one for an array, T for an output."""
    marked = {f"{f.title}Array": f for f in frameworks().values() if f.hallmark}
    for name, f in marked.items():
        yield ARRAY.format(name=name, title=f.title, hallmark=f.hallmark)
    yield f'Array = TypeVar("Array", bound={" | ".join(marked)})\nT = TypeVar("T", covariant=True)\n'


def _result(spec: Spec[Any]) -> Iterator[str]:
    """The named tuple of an op's outputs, where any call returns it."""
    if spec.is_vjp or len(spec.shown) > 1:
        fields = (f"    {o.name}: {'T | None' if _may_miss(spec, o) else 'T'}\n" for o in spec.shown)
        yield f"class {spec.result.__name__}(NamedTuple, Generic[T]):\n{''.join(fields)}"


def _may_miss(spec: Spec[Any], output: Output) -> bool:
    """Whether an output may be None in a named tuple that a call returns without naming what it wants."""
    if spec.is_vjp:
        return any(a.optional and a.name == output.gradient_of for a in spec.arrays)
    return output.wanted_by is not None and not (lone_output(spec) and len(spec.shown) == 2)


# ------------------------------------------------------------------------------------------------------- ops and calls
class Overload(NamedTuple):
    """One way to call an op: the text of parameters that it narrows, and what it then returns (``{}``: an array)."""

    narrowed: Mapping[str, str]
    returns: str


def _overloads(spec: Spec[Any]) -> list[Overload]:
    """The ways to call an op that return different things, the first of them as without any option."""
    result, lone = spec.result.__name__, lone_output(spec)
    if spec.is_vjp:
        wants = _type(signature(spec).parameters["wants"].annotation)
        return [
            Overload({"wants": "None = None"}, f"{result}[{{}}]"),
            Overload({"wants": wants}, f"{result}[{{}} | None]"),
        ]
    if len(spec.shown) == 1:
        return [Overload({}, "{}")]
    asking = [o.wanted_by for o in spec.shown if o.wanted_by]
    if lone is None:  # several outputs always, or none but what options ask for
        return [Overload({}, f"{result}[{{}}]" if len(spec.shown) > len(asking) else f"{{0}} | {result}[{{0}}]")]
    none = Overload({name: _literal(spec, name, False) for name in asking}, "{}")
    return [
        none,
        *(Overload({name: _literal(spec, name, True)}, f"{result}[{{}}]") for name in asking),
        Overload({}, f"{{0}} | {result}[{{0}}]"),
    ]


def _literal(spec: Spec[Any], option: str, value: bool) -> str:
    """A bool option that has this value."""
    return f"Literal[{value}]" + f" = {value}" * (spec.option(option).default is value)


def _typed_op(spec: Spec[Any]) -> str:
    """The class of an op; its documentation stands in the first of its signatures."""
    calls = [
        _function("__call__", ("self", *_parameters(spec, array, way)), way.returns.format(array))
        for array in ("Array", "NDArray[Any]")
        for way in _overloads(spec)
    ]
    calls[0] = _documented(calls[0], spec.doc, "        ")
    body = "".join(textwrap.indent(f"@overload\n{call}", "    ") for call in calls)
    return f"class {_class(spec)}(Op):\n{body}"


def _class(spec: Spec[Any]) -> str:
    return "".join(word.capitalize() for word in spec.name.split("_")) + "Op"


def _parameters(spec: Spec[Any], array: str, overload: Overload) -> Iterator[str]:
    arrays = {a.name for a in spec.arrays}
    keywords = False
    for p in signature(spec).parameters.values():
        if p.kind is Parameter.KEYWORD_ONLY and not keywords:
            keywords = True
            yield "*"
        if p.name in overload.narrowed:
            yield f"{p.name}: {overload.narrowed[p.name]}"
            continue
        optional = " | None" if p.default is None else ""
        kind = array + optional if p.name in arrays else _type(p.annotation)
        yield f"{p.name}: {kind}" + ("" if p.default is Parameter.empty else f" = {_value(p.default)}")


def _op(specs: list[Spec[Any]]) -> str:
    """``op`` itself: by the names that are known, and by any other."""
    known = (_function("op", (f'which: Literal["{s.name}"]', *ROUTING), _class(s)) for s in specs)
    any_other = _function("op", ("which: str | Spec[Any]", *ROUTING), "Op")
    any_other = _documented(any_other, inspect.getdoc(api.op) or "", "    ")
    return "".join(f"@overload\n{text}" for text in (*known, any_other))


# ---------------------------------------------------------------------------------------------------------------- text
def _function(name: str, parameters: Sequence[str], returns: str) -> str:
    """A function without a body, as ruff formats it, inside a class or out."""
    line = f"def {name}({', '.join(parameters)}) -> {returns}: ...\n"
    if len(line) <= WIDTH - 4:
        return line
    one_a_line = "".join(f"    {p},\n" for p in parameters)
    return f"def {name}(\n{one_a_line}) -> {returns}: ...\n"


def _documented(function: str, doc: str, indent: str) -> str:
    """The function with documentation in place of its dots, which will stand behind ``indent``."""
    quoted = '"""' + doc.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    lines = [wrapped for line in quoted.splitlines() for wrapped in _wrapped(line, WIDTH - len(indent))]
    text = textwrap.indent("\n".join([*lines, '"""']), "    ")
    head = function.removesuffix(" ...\n")
    return f"{head}\n{text}\n"


def _wrapped(line: str, width: int) -> list[str]:
    """A line of documentation as lines that fit; what is indented hangs further in."""
    margin = line[: len(line) - len(line.lstrip())]
    hanging = margin + "  " * bool(margin)
    return textwrap.wrap(line, width, subsequent_indent=hanging, break_on_hyphens=False) or [""]


def _type(hint: Any) -> str:
    """A type as source code."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is types.NoneType:
        return "None"
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_type, inner))
    if origin is Literal:
        return f"Literal[{', '.join(map(_value, inner))}]"
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_type, inner))}]"
    return str(hint.__name__)


def _value(value: Any) -> str:
    """A default as source code; dots where it has none that is short."""
    if isinstance(value, str):
        return json.dumps(value)
    plain = value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))
    return repr(value) if plain else "..."
