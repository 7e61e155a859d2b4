"""A library's own function as a backend's op, and the op of its gradients by the library's own autograd."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

from portakern.core import registry
from portakern.core.backend import Backend, Tiling
from portakern.core.call import Call
from portakern.spec import Spec

__all__ = ["LACKS", "Provided", "provides"]

F = TypeVar("F", bound=Callable[..., Any])
Arrays = Mapping[str, Any]
Refuses = Callable[[Call], str | None]
Around = Callable[[Call], AbstractContextManager[Any]]

LACKS = r"its \w+ (has|gives) no \w+"
"""What every peer may refuse with: an argument that its function does not take, an output that it does not give."""


def _nothing(call: Call) -> str | None:
    return None


def _nowhere(call: Call) -> AbstractContextManager[Any]:
    return nullcontext()


def provides(
    backend: Backend, *, refuses: Refuses = _nothing, gradients: bool = True, around: Around = _nowhere
) -> Callable[[F], F]:
    """Register the decorated function as the op of its name, with ``gradients`` also as the op of its gradients.

    The function takes the spec's arguments by name, as many as the library knows, and returns the spec's first output.

    Args:
      backend: whose op it becomes.
      refuses: None, or why the library cannot serve a call that uses nothing but arguments of the function, in a user's
        words.
      gradients: whether the library differentiates it.
      around: a context that the library runs a call in.
    """

    def register(fn: F) -> F:
        made = {fn.__name__: Provided(fn, refuses, around)}
        if gradients:
            made[f"{fn.__name__}_vjp"] = Gradients(fn, refuses, around)
        for op, provided in made.items():
            backend.implements(op, supports=provided.supports, takes=provided.takes)(provided)
        return fn

    return register


class Provided:
    """An implementation by a library's function ``fn`` (see :func:`provides`)."""

    def __init__(self, fn: Callable[..., Any], refuses: Refuses, around: Around) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.refuses, self.around = fn, refuses, around
        self.known = frozenset(inspect.signature(fn).parameters)

    def takes(self, spec: Spec[Any]) -> frozenset[str]:
        """The arguments of a spec that it can be given."""
        return self.known | {a.name for a in spec.arrays if not a.optional}

    def supports(self, call: Call, tiling: Tiling) -> str | None:
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
        for output in call.wants[1:]:
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

    def __call__(self, call: Call, tiling: Tiling) -> tuple[Any, ...]:
        outputs = dict(zip(call.wants, self.prepared(call)(), strict=True))
        whole = {n: y if call.framework.contiguous(y) else y.contiguous() for n, y in outputs.items()}
        return tuple(whole.get(o.name) for o in call.spec.outputs)


class Gradients(Provided):
    """The op of the gradients of ``fn``, by the library's own autograd.

    Nothing of the library's own was saved, so that it computes the forward op again. Saved outputs that the spec hands
    over (o and lse of attention) are not read: where they are not what the forward op gives, the gradients are those of
    its own.
    """

    def gives(self, call: Call) -> str | None:
        """Autograd takes a cotangent in the dtype of what it is the cotangent of, which is that of the first input."""
        first, cotangent = call.spec.arrays[0].name, self._cotangent(call)
        if call.arrays[cotangent].dtype == call.arrays[first].dtype:
            return None
        gradient = call.spec.outputs[0].name
        return f"its {self.fn.__name__} gives no {gradient} of a {cotangent} in another dtype than {first}; cast it"

    def prepared(self, call: Call) -> Callable[[], tuple[Any, ...]]:
        """The backward pass alone: the forward op is computed here."""
        given = self.arguments(call)
        arrays = {a.name: given.pop(a.name) for a in self._forward(call).arrays if a.name in given}
        wanted = [o.gradient_of for o in call.spec.outputs if o.name in call.wants and o.gradient_of]
        fn, cotangent = functools.partial(self.fn, **given), call.arrays[self._cotangent(call)]
        with self.around(call):
            run = _STAGES[call.framework.name].backward(fn, arrays, wanted, cotangent)
        return functools.partial(self._inside, call, run)

    def _cotangent(self, call: Call) -> str:
        return f"d_{self._forward(call).outputs[0].name}"

    def _forward(self, call: Call) -> Spec[Any]:
        forward = registry.forward_of(call.spec)
        assert forward is not None
        return forward


def _torch_forward(fn: Callable[..., Any], arrays: Arrays) -> Callable[[], tuple[Any, ...]]:
    return lambda: (fn(**arrays),)


def _jax_forward(fn: Callable[..., Any], arrays: Arrays) -> Callable[[], tuple[Any, ...]]:
    """Compiled whole, as JAX's users have it; its arrays are arguments, since constants may be folded."""
    import jax

    compiled = jax.jit(fn)
    return lambda: (compiled(**arrays),)


def _torch_gradients(
    fn: Callable[..., Any], arrays: Arrays, wanted: list[str], cotangent: Any
) -> Callable[[], tuple[Any, ...]]:
    """Runs ``fn`` and returns its backward pass."""
    import torch

    leaves = {n: a if a is None else a.detach().requires_grad_(n in wanted) for n, a in arrays.items()}
    with torch.enable_grad():
        y = fn(**leaves)
    return lambda: torch.autograd.grad(y, [leaves[n] for n in wanted], cotangent, retain_graph=True)


def _jax_gradients(
    fn: Callable[..., Any], arrays: Arrays, wanted: list[str], cotangent: Any
) -> Callable[[], tuple[Any, ...]]:
    """Runs ``fn`` and returns its backward pass."""
    import jax

    def of_wanted(values: Any, others: Any) -> Any:
        _, pull_back = jax.vjp(lambda *given: fn(**{**others, **dict(zip(wanted, given, strict=True))}), *values)
        return pull_back

    # both passes compiled by themselves: what the first saves are results of it, and arguments of the second
    saved = jax.jit(of_wanted)([arrays[n] for n in wanted], dict(arrays))
    backward = jax.jit(lambda pull_back, d_y: tuple(pull_back(d_y)))
    return lambda: backward(saved, cotangent)


class _Stages(NamedTuple):
    """How a library runs a function of its users, and its backward pass."""

    forward: Callable[..., Callable[[], tuple[Any, ...]]]
    backward: Callable[..., Callable[[], tuple[Any, ...]]]


_STAGES = {
    "torch": _Stages(_torch_forward, _torch_gradients),
    "jax": _Stages(_jax_forward, _jax_gradients),
}
