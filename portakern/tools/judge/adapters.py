"""Calls of a candidate, in its own process: a function, a PyTorch module in KernelBench's form, a launcher, a JAX
function, or a compiled extension.

The judge sees nothing of this module but the outputs.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["CalledCandidate", "imported_beside", "inputs_of", "load"]


IMPORTS = 1000
"""Files beside a problem that are told, at most."""


class CalledCandidate:
    """A callable with an op's arguments. ``places``: the op's argument -> position, keyword or parameter of the
    candidate; empty: required arrays by position, the others by name."""

    def __init__(self, fn: Callable[..., Any], ask: Mapping[str, Any], framework: Any, device: Any) -> None:
        self.fn, self.framework, self.device = fn, framework, device
        self.places: Mapping[str, Any] = ask["places"]
        self.required: list[str] = ask["required"]

    def described(self) -> dict[str, Any]:
        """The parameters of the candidate, as far as it says."""
        try:
            found = [
                (p.name, p.kind.name, p.default is p.empty) for p in inspect.signature(self.fn).parameters.values()
            ]
        except (TypeError, ValueError):
            found = None
        return {"parameters": found}

    def call(self, arrays: Mapping[str, Any], options: Mapping[str, Any], kinds: Mapping[str, Any]) -> tuple[Any, ...]:
        """What the candidate gives for these arrays, every output for itself. ``kinds``: output -> its shape and dtype,
        of those that are wanted, for a candidate that writes to arrays that it is handed."""
        positions: dict[int, Any] = {}
        named: dict[str, Any] = {}
        written: dict[str, Any] = {}
        given = {**arrays, **options}
        for name, value in given.items():
            place = self.places.get(name)
            if place is None and not self.places and name in self.required:
                positions[self.required.index(name)] = value
            elif place is None:
                named[name] = value
            elif place["position"] is not None:
                positions[place["position"]] = value
            elif place["keyword"] is not None:
                named[place["keyword"]] = value
            else:
                self.set_parameter(place["parameter"], value)
        for name, form in kinds.items():
            place = self.places.get(name, {})
            if place.get("position") is not None or place.get("keyword") is not None:
                nothing = float("nan") if form["fill"] is None else form["fill"]
                written[name] = self.framework.full(tuple(form["shape"]), form["dtype"], nothing, self.device)
                if place["position"] is not None:
                    positions[place["position"]] = written[name]
                else:
                    named[place["keyword"]] = written[name]
        result = self.fn(*(positions[i] for i in sorted(positions)), **named)
        if written:
            return tuple(written.values())
        return tuple(o for o in result if o is not None) if isinstance(result, tuple | list) else (result,)

    def set_parameter(self, path: str, value: Any) -> None:
        raise TypeError(f"the candidate is no torch.nn.Module and has no parameter {path}")


class ModuleCandidate(CalledCandidate):
    """A ``torch.nn.Module``. Its constructor gets the ``get_init_inputs`` of ``source``."""

    def __init__(self, made: type, ask: Mapping[str, Any], framework: Any, device: Any, source: Any) -> None:
        import torch

        initial = [*getattr(source, "get_init_inputs", list)()]
        module = made(*initial).to(device).eval()

        def forward(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                return module(*args, **kwargs)

        super().__init__(functools.update_wrapper(forward, module.forward), ask, framework, device)
        self.module = module

    def set_parameter(self, path: str, value: Any) -> None:
        import torch

        parameter = functools.reduce(getattr, path.split("."), self.module)
        with torch.no_grad():
            parameter.copy_(value.reshape(parameter.shape))


def load(ask: Mapping[str, Any], framework: Any, device: Any) -> CalledCandidate:
    """The candidate of a file by its name."""
    path, name = Path(ask["file"]), ask["name"]
    if path.suffix in (".so", ".pyd") and "::" in name:
        import torch

        torch.ops.load_library(str(path))
        return CalledCandidate(functools.reduce(getattr, name.split("::"), torch.ops), ask, framework, device)
    module = _module(path)
    found = functools.reduce(getattr, name.split("."), module)
    if ask["form"] == "module":
        return ModuleCandidate(
            found, ask, framework, device, _module(Path(ask["problem"])) if ask["problem"] else module
        )
    return CalledCandidate(found, ask, framework, device)


def inputs_of(path: Path) -> list[dict[str, Any]]:
    """Shape and dtype of each array that ``get_inputs`` of a problem's file gives. Files beside it are found last: none
    takes the place of a library's."""
    import torch

    source = _module(path, first=False)
    if not hasattr(source, "get_inputs"):
        raise AttributeError(f"{path.name} has no get_inputs")
    with torch.device("meta"):  # their shapes alone: they may be larger than memory
        tensors = [t for t in source.get_inputs() if isinstance(t, torch.Tensor)]
    return [{"shape": [*t.shape], "dtype": str(t.dtype).removeprefix("torch.")} for t in tensors]


def imported_beside(path: Path) -> list[str]:
    """The files in a problem's folder that it has imported, but for installed libraries."""
    files = {getattr(m, "__file__", None) for m in [*sys.modules.values()]}
    found = {Path(f) for f in files if isinstance(f, str)} - {path}
    libraries = {Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[2]}
    libraries |= {Path(p) for p in sys.path if p.endswith(("site-packages", "dist-packages"))}
    beside = (f for f in found if f.is_relative_to(path.parent))
    return sorted(str(f) for f in beside if not any(f.is_relative_to(x) for x in libraries))[:IMPORTS]


def _module(path: Path, first: bool = True) -> Any:
    """A file as a module; files beside it are found, as they are where it is run, ``first`` or last."""
    sys.path.insert(0 if first else len(sys.path), str(path.parent))
    if path.suffix == ".py":
        spec = importlib.util.spec_from_file_location(path.stem, path)
    else:
        name = path.name.partition(".")[0]
        loader = importlib.machinery.ExtensionFileLoader(name, str(path))
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module
