"""A kernel's source on its way to another process, which compiles it: what Triton specialised, with functions by their
names. Neither the call nor PyTorch is needed there."""

from __future__ import annotations

import base64
import functools
import importlib
import io
import pickle
from typing import Any

from triton.runtime.jit import JITCallable

__all__ = ["packed", "unpacked"]


def packed(source: Any, options: dict[str, Any]) -> str:
    """A source and the compiler's options as text.

    Raises:
      pickle.PicklingError: a function is not to be found under its name.
    """
    file = io.BytesIO()
    parts = type(source), source.fn, source.signature, source.constants, source.attrs, options
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(parts)
    return base64.b64encode(file.getvalue()).decode()


def unpacked(text: str) -> tuple[Any, dict[str, Any]]:
    """What :func:`packed` made text of."""
    kind, kernel, signature, constants, attributes, options = pickle.loads(base64.b64decode(text))
    return kind(kernel, signature, constants, attributes), options


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, JITCallable):
            return NotImplemented
        name = value.__module__, value.__qualname__
        try:
            known = _function(*name)
        except (ImportError, AttributeError):
            known = None
        if known is not value:
            raise pickle.PicklingError(f"no other process finds {'.'.join(name)} under this name")
        return _function, name


def _function(module: str, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))
