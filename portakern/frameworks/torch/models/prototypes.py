"""Whether a module computes what a class of transformers does whose mathematics is known here.

transformers writes most of its layers once and copies them from family to family. Two classes are alike here if their
forward methods are the same code, together with the methods and the functions of their files that those call: what
Llama's norm is known to compute, Mistral's computes too, whatever release of transformers writes it, and a class that
only has the name does not.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn

from portakern.errors import UnsupportedError

__all__ = ["find", "function_is", "is_of_library", "names_in", "rewrapped", "with_names"]

Row = TypeVar("Row")


def _body(code: types.CodeType, docstring: bool) -> tuple[Any, ...]:
    """What a piece of code does: its instructions, the names that it looks up and its constants, but for a docstring;
    not what its variables are called."""
    constants = code.co_consts[1:] if docstring else code.co_consts
    kept = (_body(k, False) if isinstance(k, types.CodeType) else (type(k), k) for k in constants)
    return code.co_code, code.co_names, tuple(kept)


def _meaning(function: Any, owner: type | None, seen: tuple[Any, ...] = ()) -> tuple[Any, ...]:
    """The body of a function, and those of the methods of its class and the functions of its file that it names."""
    f = inspect.unwrap(function)
    if f in seen:
        return ()
    called = []
    for name in f.__code__.co_names:
        near = getattr(owner, name, None) or f.__globals__.get(name)
        near = inspect.unwrap(near) if callable(near) else near
        if isinstance(near, types.FunctionType) and near.__module__ == f.__module__:
            called.append((name, _meaning(near, owner, (*seen, f))))
    return _body(f.__code__, f.__doc__ is not None), tuple(called)


def _of_class(kind: Any) -> tuple[Any, ...]:
    """The meaning of a class's forward, as it is now; of PyTorch's own classes, and of those without one, nothing."""
    f = inspect.unwrap(kind.forward)
    return _of_forward(kind, f) if isinstance(f, types.FunctionType) and not f.__module__.startswith("torch.") else ()


@functools.cache
def _of_forward(kind: Any, forward: Any) -> tuple[Any, ...]:
    return _meaning(forward, kind)


@functools.cache
def _named(path: str) -> Any:
    """What ``"family.Name"`` of transformers' models names; None where this transformers has it not."""
    family, name = path.split(".")
    try:
        return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name, None)
    except ImportError:
        return None


def _prototype(path: str) -> Any:
    """What ``"family.Name"`` of transformers' models names, as transformers has written it; None where somebody put
    something else in its place."""
    found = _named(path)
    if found is None:
        return None
    family, name = path.split(".")
    written = inspect.unwrap(getattr(found, "forward", found))
    if written.__module__ != f"transformers.models.{family}.modeling_{family}":
        return None
    return found if written.__qualname__.partition(".")[0] == name else None


def find(kind: type, rows: Mapping[str, Row]) -> Row | None:
    """The row of a table whose key, ``"family.Class"`` of transformers' models, names a class that a class is like."""
    meaning = _of_class(kind)
    if not meaning:
        return None
    for path, row in rows.items():
        prototype = _prototype(path)
        if prototype is not None and _of_class(prototype) == meaning:
            return row
    return None


def function_is(function: Any, path: str) -> bool:
    """Whether a function computes what the function ``path`` of transformers' models does."""
    prototype = _prototype(path)
    if prototype is None or not _is_of_transformers(function):
        return False
    return _meaning(function, None) == _meaning(prototype, None)


def _is_of_transformers(function: Any) -> bool:
    """Whether all that a function wraps and that wraps it was written there: ``functools.wraps`` hides the rest."""
    while function is not None:
        if not getattr(function, "__globals__", {}).get("__name__", "").startswith("transformers."):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def is_of_library(kind: type, modules: tuple[str, ...] = ("torch.nn.modules.", "transformers.activations")) -> bool:
    """Whether a class without a prototype is that of PyTorch or transformers, and not another one of its name."""
    return kind.__module__.startswith(modules)


def names_in(module: nn.Module) -> tuple[str, ...]:
    """The names that a module's forward looks up, in the order in which they first come."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names


def rewrapped(function: Callable[..., Any], inner_function: Callable[..., Any]) -> Callable[..., Any]:
    """What a function does around the one that it wraps, around another: transformers wraps the forward of a layer in
    its checkpoints. A function that wraps none is replaced whole."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return inner_function
    cells = function.__closure__ or ()
    if not any(cell.cell_contents is inner for cell in cells):
        raise UnsupportedError(
            f"apply: {function.__qualname__} wraps another function, which cannot be found; expected a plain forward: "
            "leave its part out of parts"
        )
    again = rewrapped(inner, inner_function)
    kept = tuple(types.CellType(again) if cell.cell_contents is inner else cell for cell in cells)
    made: Any = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, kept)
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    made.__wrapped__ = again
    return made


def with_names(function: types.FunctionType, label: str, names: Mapping[str, Any]) -> Callable[..., Any]:
    """A function as it is written, in whose module some names mean something else.

    The module is a copy beside the real one, which stays as it was. It can be imported, for torch.compile looks for
    what a function names in the module that it says it is of.

    Args:
      function: without wrappers. label: of the copy; the same label means the same names.
      names: what means something else.
    """
    module = f"{__name__}.copies.{function.__module__}.{label}".replace(".", "_")
    if module not in sys.modules:
        made = types.ModuleType(module)
        vars(made).update(function.__globals__ | dict(names) | {"__name__": module})
        sys.modules[module] = made
    again = types.FunctionType(
        function.__code__, vars(sys.modules[module]), function.__name__, function.__defaults__, function.__closure__
    )
    again.__kwdefaults__ = function.__kwdefaults__
    return again
