"""A library's own function as a backend's op, and the op of its gradients by the library's own autograd."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

from portakern.core import registry
from portakern.core.backend import Backend
from portakern.core.call import Call
from portakern.core.config import Config
from portakern.spec import Spec

__all__ = ["LACKS", "Provided", "provides"]

F = TypeVar("F", bound=Callable[..., Any])
Arrays = Mapping[str, Any]
Refuses = Callable[[Call], str | None]
Around = Callable[[Call], AbstractContextManager[Any]]
Before = Callable[[Call], Mapping[str, Any]]

LACKS = r"its \w+ (has|gives) no \w+"
"""What every peer may refuse with: an argument that its function does not take, an output that it does not give."""


def _nothing(call: Call) -> str | None:
    return None


def _nowhere(call: Call) -> AbstractContextManager[Any]:
    return nullcontext()


def provides(
    backend: Backend,
    *,
    refuses: Refuses = _nothing,
    gradients: bool = True,
    around: Around = _nowhere,
    outputs: int = 1,
    before: Before | None = None,
) -> Callable[[F], F]:
    """Register the decorated function as the op of its name, with ``gradients`` also as the op of its gradients.

    The function takes the spec's arguments by name, as many as the library knows, and returns the spec's first output,
    or a tuple of as many as the library gives, in the spec's order.

    Args:
      backend: whose op it becomes.
      outputs: how many of the spec's outputs the function returns.
      refuses: None, or why the library cannot serve a call that uses nothing but arguments of the function, in a user's
        words.
      gradients: whether the library differentiates it.
      around: a context that the library runs a call in.
      before: arrays by name with which the function gives what a call of the gradients has saved, where that call has
        not the forward's own.
    """

    def register(fn: F) -> F:
        made = {fn.__name__: Provided(fn, refuses, around, outputs)}
        if gradients:
            made[f"{fn.__name__}_vjp"] = Gradients(fn, refuses, around, outputs, before)
        for op, provided in made.items():
            backend.implements(op, supports=provided.supports, takes=provided.takes)(provided)
        return fn

    return register


class Provided:
    """An implementation by a library's function ``fn`` (see :func:`provides`)."""

    def __init__(self, fn: Callable[..., Any], refuses: Refuses, around: Around, outputs: int) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.refuses, self.around, self.outputs = fn, refuses, around, outputs
        self.known = frozenset(inspect.signature(fn).parameters)

    def takes(self, spec: Spec[Any]) -> frozenset[str]:
        """The arguments of a spec that it can be given."""
        return self.known | {a.name for a in spec.arrays if not a.optional}

    def supports(self, call: Call, config: Config) -> str | None:
        """None, or what the call asks for and the library does not have."""
        name, takes = self.fn.__name__, self.takes(call.spec)
        for a in call.spec.arrays:
            if a.name not in takes and call.arrays[a.name] is not None:
                return f"its {name} has no {a.name}; leave it out, or name another backend"
        for o in call.spec.options:
            if o.name not in takes and call.options[o.name] != o.default:
                return f"its {name} has no {o.name}; leave it at {o.default!r}, or name another backend"
        return self.gives(call) or self.refuses(call)

    def gives(self, call: Call) -> str | None:
        """None, or the output that the call asks for and the library does not give."""
        given = {o.name for o in call.spec.outputs[: self.outputs]}
        for output in call.wants:
            if output not in given:
                return f"its {self.fn.__name__} gives no {output}, which was asked for or is saved for gradients"
        return None

    def arguments(self, call: Call) -> dict[str, Any]:
        """What the function takes of a call, by name."""
        return {n: v for n, v in {**call.arrays, **call.options}.items() if n in self.known}

    def prepared(self, call: Call) -> Callable[[], tuple[Any, ...]]:
        """The wanted outputs of a call, with everything done that is not the op's own work: what a benchmark times."""
        arguments = self.arguments(call)
        arrays = {n: arguments.pop(n) for n in call.arrays if n in arguments}
        run = _STAGES[call.framework.name].forward(functools.partial(self.fn, **arguments), arrays)
        return functools.partial(self._inside, call, run)

    def _inside(self, call: Call, run: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        with self.around(call):
            return run()

    def __call__(self, call: Call, config: Config) -> tuple[Any, ...]:
        outputs = dict(zip(call.wants, self.prepared(call)(), strict=True))
        whole = {n: y if call.framework.contiguous(y) else y.contiguous() for n, y in outputs.items()}
        return tuple(whole.get(o.name) for o in call.spec.outputs)


class Gradients(Provided):
    """The op of the gradients of ``fn``, by the library's own autograd.

    Nothing of the library's own was saved, so that it computes the forward op again. Saved outputs that the spec hands
    over (o and lse of attention) are not read: where they are not what the forward op gives, the gradients are those of
    its own.
    """

    def __init__(
        self, fn: Callable[..., Any], refuses: Refuses, around: Around, outputs: int, before: Before | None
    ) -> None:
        super().__init__(fn, refuses, around, outputs)
        self.before = before

    def takes(self, spec: Spec[Any]) -> frozenset[str]:
        """With what the forward op saved, which is not read, and the cotangents of what the function returns: both may
        be optional."""
        forward = registry.forward_of(spec)
        assert forward is not None
        saved = {o.name for o in forward.outputs}
        return super().takes(spec) | saved | {f"d_{o.name}" for o in forward.outputs[: self.outputs]}

    def gives(self, call: Call) -> str | None:
        """Autograd takes a cotangent in the dtype of what it is the cotangent of: that of the first input, unless the
        spec gives the output its own.
        """
        first, own = call.spec.arrays[0].name, {f"d_{o.name}" for o in self._forward(call).outputs if o.dtype}
        for name, cotangent in self._cotangents(call).items():
            if cotangent is not None and name not in own and cotangent.dtype != call.arrays[first].dtype:
                gradient = call.spec.outputs[0].name
                return f"its {self.fn.__name__} gives no {gradient} of a {name} in another dtype than {first}; cast it"
        return None

    def prepared(self, call: Call) -> Callable[[], tuple[Any, ...]]:
        """The backward pass alone: the forward op is computed here."""
        given = {**self.arguments(call), **(self.before(call) if self.before else {})}
        arrays = {a.name: given.pop(a.name) for a in self._forward(call).arrays if a.name in given}
        wanted = [o.gradient_of for o in call.spec.outputs if o.name in call.wants and o.gradient_of]
        fn, cotangents = functools.partial(self.fn, **given), tuple(self._cotangents(call).values())
        with self.around(call):
            run = _STAGES[call.framework.name].backward(fn, arrays, wanted, cotangents)
        return functools.partial(self._inside, call, run)

    def _cotangents(self, call: Call) -> dict[str, Any]:
        """The cotangents of what the function returns, by name, None for one that is absent."""
        names = [f"d_{o.name}" for o in self._forward(call).outputs[: self.outputs]]
        return {name: call.arrays.get(name) for name in names}

    def _forward(self, call: Call) -> Spec[Any]:
        forward = registry.forward_of(call.spec)
        assert forward is not None
        return forward


def _torch_forward(fn: Callable[..., Any], arrays: Arrays) -> Callable[[], tuple[Any, ...]]:
    return lambda: _tuple(fn(**arrays))


def _tuple(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def _jax_forward(fn: Callable[..., Any], arrays: Arrays) -> Callable[[], tuple[Any, ...]]:
    """Compiled whole, as JAX's users have it; its arrays are arguments, since constants may be folded."""
    import jax

    compiled = jax.jit(fn)
    return lambda: _tuple(compiled(**arrays))


def _torch_gradients(
    fn: Callable[..., Any], arrays: Arrays, wanted: list[str], cotangents: tuple[Any, ...]
) -> Callable[[], tuple[Any, ...]]:
    """Runs ``fn`` and returns its backward pass."""
    import torch

    leaves = {n: a if a is None else a.detach().requires_grad_(n in wanted) for n, a in arrays.items()}
    with torch.enable_grad():
        found = _tuple(fn(**leaves))
    given = [(y, d) for y, d in zip(found, cotangents, strict=True) if d is not None and y.requires_grad]
    ys, ds = zip(*given, strict=True)  # an output that no wanted input reaches has no graph
    return lambda: torch.autograd.grad(ys, [leaves[n] for n in wanted], ds, retain_graph=True)


def _jax_gradients(
    fn: Callable[..., Any], arrays: Arrays, wanted: list[str], cotangents: tuple[Any, ...]
) -> Callable[[], tuple[Any, ...]]:
    """Runs ``fn`` and returns its backward pass; an absent cotangent is zeros."""
    import jax

    def of_wanted(values: Any, others: Any) -> Any:
        return jax.vjp(lambda *given: _tuple(fn(**{**others, **dict(zip(wanted, given, strict=True))})), *values)

    # both passes compiled by themselves: what the first saves are results of it, and arguments of the second
    found, saved = jax.jit(of_wanted)([arrays[n] for n in wanted], dict(arrays))
    given = tuple(jax.numpy.zeros_like(y) if d is None else d for y, d in zip(found, cotangents, strict=True))
    backward = jax.jit(lambda pull_back, given: tuple(pull_back(given)))
    return lambda: backward(saved, given)


class _Stages(NamedTuple):
    """How a library runs a function of its users, and its backward pass."""

    forward: Callable[..., Callable[[], tuple[Any, ...]]]
    backward: Callable[..., Callable[[], tuple[Any, ...]]]


_STAGES = {
    "torch": _Stages(_torch_forward, _torch_gradients),
    "jax": _Stages(_jax_forward, _jax_gradients),
}
