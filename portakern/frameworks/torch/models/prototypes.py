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
import types
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

__all__ = ["find", "function_is", "names_in"]

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
        near = vars(owner).get(name) if owner is not None else None
        near = f.__globals__.get(name) if near is None else near
        near = inspect.unwrap(near) if callable(near) else near
        if isinstance(near, types.FunctionType) and near.__module__ == f.__module__:
            called.append((name, _meaning(near, owner, (*seen, f))))
    return _body(f.__code__, f.__doc__ is not None), tuple(called)


def _home(kind: type) -> type:
    """The class of a module's MRO that wrote its forward: FSDP and others put empty classes in front of it."""
    return next((c for c in kind.__mro__ if "forward" in vars(c)), kind)


@functools.cache
def _of_class(kind: type) -> tuple[Any, ...]:
    home = _home(kind)
    return _meaning(home.forward, home) if isinstance(inspect.unwrap(home.forward), types.FunctionType) else ()


@functools.cache
def _prototype(path: str) -> Any:
    """What ``"family.Name"`` of transformers' models names; None where this transformers has it not."""
    family, name = path.split(".")
    try:
        return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name, None)
    except ImportError:
        return None


def find(module: nn.Module, rows: Mapping[str, Row]) -> Row | None:
    """The row of a table whose key, ``"family.Class"`` of transformers' models, names a class that a module is like."""
    meaning = _of_class(type(module))
    if not meaning or _home(type(module)).__module__.startswith("torch."):
        return None
    for path, row in rows.items():
        prototype = _prototype(path)
        if prototype is not None and _of_class(prototype) == meaning:
            return row
    return None


def function_is(function: Any, path: str) -> bool:
    """Whether a function computes what the function ``path`` of transformers' models does."""
    prototype = _prototype(path)
    return prototype is not None and _meaning(function, None) == _meaning(prototype, None)


def names_in(module: nn.Module) -> tuple[str, ...]:
    """The names that a module's forward looks up, in the order in which they first come."""
    code = getattr(inspect.unwrap(_home(type(module)).forward), "__code__", None)
    return () if code is None else code.co_names
