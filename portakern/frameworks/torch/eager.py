"""Eager calls that autograd or ``torch.func`` watches."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from portakern.core.binder import unchecked
from portakern.core.call import Call
from portakern.core.gradients import Wiring
from portakern.core.route import Choice, routes
from portakern.core.serve import serve
from portakern.frameworks.torch.autograd import Arrays, Run, Step, differentiable, gradient_of, spent
from portakern.frameworks.torch.custom_ops import calling, tell_counters
from portakern.frameworks.torch.profiling import named
from portakern.spec import Spec

__all__ = ["differentiate"]


def differentiate(call: Call, choice: Choice, late: bool = False) -> tuple[Any, ...]:
    """The outputs of a watched call in the spec's order, None for one that the call does not want.

    ``late``: what has no gradient is refused only when asked for one."""
    spec = call.spec
    names = tuple(n for n, a in call.arrays.items() if a is not None)
    arrays = [call.arrays[n] for n in names]
    wired: Wiring | None = None
    backward: Run | None = None
    training = call
    differentiated = [n for n, a in zip(names, arrays, strict=True) if a.requires_grad]
    if differentiated and torch.is_grad_enabled() and not late:
        wired, vjp = gradient_of(call, choice, differentiated)
        backward = functools.partial(_run, wired.vjp, vjp, True)
        training = wired.training(call)

    def forward(*tensors: Any) -> tuple[Any, ...]:
        training.arrays = training.arrays | dict(zip(names, tensors, strict=True))
        return tuple(o for o in _served(training, choice) if o is not None)

    again = functools.partial(_run, spec, choice, late)
    step = Step(spec, names, call.options, training.wants, wired, forward, backward, again)
    named = dict(zip(step.wants, differentiable(step, arrays), strict=True))
    step.forward = spent  # it holds the tensors, which a graph must not
    return tuple(named[o.name] if o.name in call.wants else None for o in spec.outputs)


def _served(call: Call, choice: Choice) -> tuple[Any, ...]:
    candidates = routes(call, choice)
    assert candidates is not None
    return serve(call, candidates, choice.tiling, keep=True)  # the arrays are saved, or somebody else's


def _run(
    spec: Spec[Any], choice: Choice, late: bool, arrays: Arrays, options: Mapping[str, Any], wants: tuple[str, ...]
) -> tuple[Any, ...]:
    """The outputs ``wants`` of a call that the library makes itself."""
    # torch.autograd.grad(is_grads_batched=True): only the dispatcher sees through; and its modes want to see the call
    if torch._C._len_torch_dispatch_stack() or any(map(torch._C._functorch.is_legacy_batchedtensor, arrays.values())):
        tell_counters(spec)
        return calling(spec, choice)(arrays, options, wants)
    with named(spec.name, arrays.values()):
        call = unchecked(spec, **arrays, **options)
        call.wants = tuple(o.name for o in spec.outputs if o.name in wants)
        watched = call.framework.check(call)
        outputs = differentiate(call, choice, late) if watched else _served(call, choice)
    return tuple(o for o in outputs if o is not None)
