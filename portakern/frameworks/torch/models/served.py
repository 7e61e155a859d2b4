"""A forward that stands for a module's own: :class:`ServedForward`, and who would notice that a module is passed over.

What stands in a model must live as the model does: it is copied, pickled and replicated with its module. It is
therefore no function but a recipe, from which the function is made again, and it asks at each call whether somebody
looks at what it would pass over.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from portakern.errors import UnsupportedError
from portakern.frameworks.torch.memory import is_distributed, unreadable
from portakern.frameworks.torch.models.prototypes import rewrapped

__all__ = [
    "REPLICATE",
    "Heart",
    "Recipe",
    "Remade",
    "ServedForward",
    "expected",
    "has_plain_parameters",
    "is_bare",
    "onlookers",
    "place_of",
    "served_by",
    "watched",
]


class Heart(NamedTuple):
    """A function that computes what a module does, as it is called: with the module first.

    Attributes:
      unless: given the module, why its own forward runs now, in words; "" where the function serves. The function asks
        it itself.
      adds: whether the function takes a residual that is to be added to its result.
    """

    forward: Callable[..., Any]
    unless: Callable[[Any], str] | None = None
    adds: bool = False


class Recipe(NamedTuple):
    """How a heart is made: ``make(kind, *args)``, of a class of modules and of values that can be pickled."""

    make: Callable[..., Heart]
    kind: type
    args: tuple[Any, ...] = ()

    def made(self) -> Heart:
        return self.make(self.kind, *self.args)


class ServedForward:
    """Stands as ``forward`` in one module, as a bound method of it would; copies and pickles stand in their modules."""

    __slots__ = ("__weakref__", "adds", "function", "heart", "module", "original", "others", "recipe", "unless")
    __name__ = "forward"

    def __init__(self, module: nn.Module, recipe: Recipe) -> None:
        self.__setstate__((module, recipe))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if type(module).forward is self.original:
            return self.function(module, *args, **kwargs)
        if vars(module).get("forward") is not self:
            return self.function(module, *args, **kwargs)
        function = _found(module) if torch.compiler.is_compiling() else self.followed()
        return function(module, *args, **kwargs)

    def __getstate__(self) -> Any:
        return self.module, self.recipe

    def __setstate__(self, state: Any) -> None:
        self.module, self.recipe = state
        kind: Any = self.recipe.kind
        heart = self.recipe.made()
        self.original, self.heart = kind.forward, heart.forward
        self.function, self.unless, self.adds = rewrapped(self.original, self.heart), heart.unless, heart.adds
        self.others: dict[Any, Callable[..., Any]] = {}

    def bound_to(self, module: nn.Module) -> ServedForward:
        """The same in another module of the class, which shares the functions."""
        other = copy.copy(self)
        other.module = module
        return other

    def __copy__(self) -> ServedForward:
        other = object.__new__(type(self))
        for name in self.__slots__[1:]:
            setattr(other, name, getattr(self, name))
        return other

    def followed(self) -> Callable[..., Any]:
        """What serves the module, whose class may have come to another forward: fully_shard gives it a class of its
        own, which wraps the forward of its layer again. Another forward than that is somebody's, and serves itself.
        What
        somebody took from the module before, and calls, stays what it was, as a bound method does."""
        own: Any = type(self.module).forward
        if own is self.original or vars(self.module).get("forward") is not self:
            return self.function
        if inspect.unwrap(own) is not inspect.unwrap(self.original):
            found: Callable[..., Any] = own
            return found
        if own not in self.others:
            self.others[own] = rewrapped(own, self.heart)
        return self.others[own]

    def why_not(self) -> str:
        """Why the module's own forward runs now, in words; "" where this serves it."""
        if self.followed() is type(self.module).forward:
            return f"{type(self.module).__name__}.forward was replaced since"
        return "" if self.unless is None else self.unless(self.module)

    @property
    def __self__(self) -> nn.Module:
        return self.module

    @property
    def __func__(self) -> Callable[..., Any]:
        return self.function

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the module's own forward: a trainer reads from it which columns of a data set the model takes."""
        return inspect.signature(MethodType(self.original, self.module))


@torch.compiler.assume_constant_result
def _found(module: nn.Module) -> Callable[..., Any]:
    """What ``followed`` finds, looked up once while torch.compile traces."""
    served: ServedForward = vars(module)["forward"]
    return served.followed()


class Remade:
    """A function that is pickled as what makes it: ``make(*args)``."""

    __slots__ = ("args", "function", "make")

    def __init__(self, make: Callable[..., Callable[..., Any]], *args: Any) -> None:
        self.__setstate__((make, args))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __getstate__(self) -> Any:
        return self.make, self.args

    def __setstate__(self, state: Any) -> None:
        self.make, self.args = state
        self.function = self.make(*self.args)


REPLICATE = "_replicate_for_data_parallel"


class Replicate:
    """Stands as that method in a module: a replica of ``torch.nn.DataParallel``'s has the
    attributes of its original, among them a forward that reads the original's parameters."""

    __slots__ = ("module",)

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self) -> nn.Module:
        replica: nn.Module = type(self.module)._replicate_for_data_parallel(self.module)
        own = vars(replica)
        for name, value in list(own.items()):
            if isinstance(value, ServedForward) and value.module is self.module:
                own[name] = value.bound_to(replica)
            elif isinstance(value, Replicate):
                own[name] = Replicate(replica)
        return replica


def place_of(module: nn.Module) -> str | None:
    """The attribute of a module in which a forward stands that it has from its class, or would stand; None where it has
    a forward of somebody's. accelerate keeps the one that it wraps beside its own, and calls it there."""
    own = vars(module)
    if "forward" not in own or _is_of_class(own["forward"], module):
        return "forward"
    if "_hf_hook" in own and _is_of_class(own.get("_old_forward"), module):
        return "_old_forward"
    return None


def _is_of_class(forward: Any, module: nn.Module) -> bool:
    ours = isinstance(forward, MethodType) and forward.__self__ is module
    return ours and forward.__func__ is type(module).forward


def served_by(module: Any) -> ServedForward | None:
    """What stands for a module's forward, where a call of the module comes to it alone."""
    there = vars(module).get("forward")
    ours = isinstance(there, ServedForward) and there.module is module and type(module).forward is there.original
    return there if ours and not _called_otherwise(module) else None


def watched(module: nn.Module) -> str:
    """Who would notice that a module is not called, or is called otherwise, in words; "" for nobody."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return "has hooks"
    return "is seen by hooks on all modules" if nn.modules.module._has_any_global_hook() else ""


def _called_otherwise(module: nn.Module) -> bool:
    """Whether a call of a module is not that of its forward."""
    kind = type(module)
    return kind.__call__ is not nn.Module.__call__ or kind._call_impl is not nn.Module._call_impl


def is_bare(module: nn.Module) -> str:
    """Why a module cannot be passed over, in words: its hooks, a forward of somebody's, parameters that are not what
    they seem; "" where nobody would notice. Shards are gathered by the time that they are needed, or are not
    (``has_plain_parameters``)."""
    why = watched(module)
    if why:
        return why
    if "forward" in vars(module) or _called_otherwise(module):
        return "has a forward of its own"
    return "" if has_plain_parameters(module) or _is_sharded(module) else "has no plain weight"


def has_plain_parameters(module: nn.Module) -> bool:
    """Whether the parameters of a module are what they seem now: those of shards are so while they are gathered."""
    there = (type(p) for p in module._parameters.values() if p is not None)
    return all(kind is nn.Parameter or unreadable(kind) is None for kind in there)


def _is_sharded(module: nn.Module) -> bool:
    return all(is_distributed(p) for p in module._parameters.values() if p is not None)


def onlookers(module: nn.Module) -> str:
    """Who sees what a module returns, in words, but for PyTorch's own shards, which hand it on; "" for nobody."""
    if module._backward_hooks or module._backward_pre_hooks or nn.modules.module._has_any_global_hook():
        return watched(module)
    theirs = [h for h in module._forward_hooks.values() if not str(h.__module__).startswith("torch.distributed.")]
    return "has hooks" if theirs else ""


def expected(found: Any, kind: type) -> Any:
    """What a maker found of a class that it was found of before; the class may have changed since it was pickled."""
    if found is None:
        raise UnsupportedError(
            f"apply: {kind.__name__} computes something else than when apply was called; expected the release of "
            "transformers with which the model was saved: call undo() before saving, and apply after loading"
        )
    return found
