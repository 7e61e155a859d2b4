"""Gradients, ``torch.func`` and autocast under PyTorch: how autograd and vmap see through an op call.

A call comes here only when somebody watches it: an input requires a gradient, or ``torch.func`` wraps one. It then runs
inside a ``torch.autograd.Function``, whose backward calls the op that the spec names as its vjp (see
:mod:`portakern.core.gradients`) on the same backend. That call runs inside such a Function too when it is watched
itself, and its backward refuses: gradients are of first order. :mod:`portakern.frameworks.torch.eager` makes such calls
for an eager caller, :mod:`portakern.frameworks.torch.custom_ops` below torch.compile.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch._functorch.utils import enable_single_level_autograd_function, unwrap_dead_wrappers

from portakern.core import registry
from portakern.core.batching import Into, fold
from portakern.core.binder import unchecked
from portakern.core.call import Call
from portakern.core.dispatch import Choice, gradient_choice, routes
from portakern.core.framework import frameworks
from portakern.core.gradients import Wiring, wiring
from portakern.core.observe import say
from portakern.errors import SpecError, UnsupportedError
from portakern.spec import Spec

__all__ = [
    "Arrays",
    "Gradient",
    "Run",
    "WatchedCall",
    "autocast",
    "differentiable",
    "function",
    "gradient_of",
    "over_samples",
    "refusal",
    "refuse_forward_mode",
    "spent",
]

TORCH = frameworks()["torch"]
Arrays = dict[str, Any]
Run = Callable[[Arrays, Mapping[str, Any], tuple[str, ...]], tuple[Any, ...]]
"""(arrays by name, options, outputs wanted) -> those outputs."""


class WatchedCall:
    """One watched call, all but its tensors.

    Attributes:
      spec, options: of the call; names: the arrays given, in the order in which the Function takes them; wants: the
        outputs that it returns.
      wiring: how its gradients are computed; None: they are not (see :func:`refusal`).
      forward: tensors -> the wanted outputs. backward: the vjp op. again: this op on other arrays, for vmap.
      inside: it is called where autograd already works, below the dispatcher.
      over: those of the saved tensors that nobody else reads, over which the vjp may write gradients (:meth:`room`).
    """

    __slots__ = (
        "again",
        "backward",
        "forms",
        "forward",
        "inside",
        "names",
        "options",
        "over",
        "saved",
        "spec",
        "wants",
        "wiring",
    )

    def __init__(
        self,
        spec: Spec[Any],
        names: tuple[str, ...],
        options: Mapping[str, Any],
        wants: tuple[str, ...],
        wiring: Wiring | None,
        forward: Callable[..., tuple[Any, ...]],
        backward: Run | None,
        again: Run | None = None,
        inside: bool = False,
        over: tuple[str, ...] = (),
    ) -> None:
        self.spec, self.names, self.options, self.wants, self.wiring = spec, names, options, wants, wiring
        self.forward, self.backward, self.again, self.inside = forward, backward, again, inside
        self.over = over
        self.saved: list[str] = []
        self.forms: list[tuple[Any, torch.dtype]] = []

    def save(self, ctx: Any, arrays: Sequence[Any], outputs: Sequence[Any]) -> None:
        ctx.step = self
        ctx.unseen = bool(self.over) and unseen()
        ctx.set_materialize_grads(False)
        if self.wiring is not None:  # the same for each call of a form
            named = dict(zip(self.wants, outputs, strict=True)) | dict(zip(self.names, arrays, strict=True))
            self.saved = [n for n in self.wiring.inputs + self.wiring.saves(self.options) if n in named]
            self.forms = [(o.shape, o.dtype) for o in outputs]
            ctx.save_for_backward(*(named[n] for n in self.saved))

    def gradients(self, ctx: Any, cotangents: Sequence[Any], saved: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
        """The gradient of each array, None where nobody needs it. ``saved``: the saved tensors, where they were read.
        Activation checkpointing lets a backward pass read them once."""
        wired, run = self.wiring, self.backward
        if wired is None or run is None:
            raise UnsupportedError(refusal(self.spec))
        wants = wired.wants([n for n, needed in zip(self.names, ctx.needs_input_grad[1:], strict=True) if needed])
        like = next((c for c in cotangents if c is not None), None)
        if like is None:
            return (None,) * len(self.names)
        saved = unwrap_dead_wrappers(ctx.saved_tensors if saved is None else saved)
        arrays = dict(zip(self.saved, saved, strict=True)) | self._cotangents(wired, cotangents, like)
        found = self._found(run, arrays, self.may_overwrite(ctx, wants, arrays), wants) if wants else ()
        given = dict(zip(wants, found, strict=True))
        return tuple(given.get(wired.gradients.get(n, ""), wired.passed(n, arrays)) for n in self.names)

    def _found(self, run: Run, arrays: Arrays, over: tuple[str, ...], wants: tuple[str, ...]) -> tuple[Any, ...]:
        """The gradients ``wants``, written over the arrays ``over`` unless the kernel refuses that."""
        assert self.wiring is not None
        options = {n: self.options[n] for n in self.wiring.options}
        if over:
            try:
                return run(arrays | {n: arrays[n].detach() for n in over}, {**options, "overwrite": over}, wants)
            except UnsupportedError:  # nothing ran, and the caller never asked for it
                pass
        return run(arrays, options, wants)

    def may_overwrite(self, ctx: Any, wants: Sequence[str], arrays: Mapping[Any, Any]) -> tuple[str, ...]:
        """The names of saved tensors over which this backward pass writes the gradients ``wants``: those of ``over``,
        in memory that no other of ``arrays`` shares, where no further pass reads them."""
        if not (ctx.unseen and last_pass() and self.wiring is not None):
            return ()
        found = []
        for out, name in self.wiring.vjp.aliases.items():
            if name in self.over and out in wants:
                others = [a for n, a in arrays.items() if n != name and a is not None]
                if TORCH.may_overwrite(arrays[name], others):
                    found.append(name)
        return tuple(found)

    def _cotangents(self, wired: Wiring, cotangents: Sequence[Any], like: Any) -> Arrays:
        arrays: Arrays = {}
        optional = {a.name for a in wired.vjp.arrays if a.optional}
        for name, cotangent, (shape, dtype) in zip(self.wants, cotangents, self.forms, strict=True):
            argument = wired.cotangents.get(name)
            if cotangent is not None and argument is None:
                raise UnsupportedError(
                    f"{self.spec.name}: {wired.vjp.name} takes no cotangent of {name}; detach {name}"
                )
            if argument is not None and cotangent is not None:
                arrays[argument] = cotangent
            elif argument is not None and argument not in optional:
                arrays[argument] = like.new_zeros(shape, dtype=dtype)
        return arrays


def unseen() -> bool:
    """Whether what is saved now is kept by autograd alone: no hook packs it (activation checkpointing and offloading
    do), and no transform or mode looks through it."""
    core = torch._C
    hooks = core._autograd._top_saved_tensors_default_hooks(True)
    return hooks is None and not (core._are_functorch_transforms_active() or core._len_torch_dispatch_stack())


def last_pass() -> bool:
    """Whether the backward pass that runs now frees what was saved, and nobody differentiates it."""
    return not (torch._C._autograd._get_current_graph_task_keep_graph() or torch.is_grad_enabled())


class _Watched(torch.autograd.Function):
    """``apply(step, *tensors)``: a tuple of ``step.wants``."""

    @staticmethod
    def forward(step: WatchedCall, *arrays: Any) -> tuple[Any, ...]:
        return step.forward(*arrays)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        inputs[0].save(ctx, inputs[1:], output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        return None, *ctx.step.gradients(ctx, cotangents)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError(refuse_forward_mode(ctx.step.spec))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], step: WatchedCall, *arrays: Any) -> tuple[tuple[Any, ...], int]:
        named, dims = dict(zip(step.names, arrays, strict=True)), dict(zip(step.names, in_dims[1:], strict=True))
        assert step.again is not None
        return over_samples(step.spec, named, dims, step.options, step.wants, info.batch_size, step.again)[1], 0

    directly: ClassVar[Callable[..., tuple[Any, ...]]]
    """``apply`` where no transform of torch.func is active: that of a Function that saves tensors as it runs, which
    takes one call less."""
    inside: ClassVar[Callable[..., tuple[Any, ...]]]
    """``apply`` of this one, without what transforms need. torch's own reads the class's signature on every call, 15
    us, for defaults, which there are none of."""

    @classmethod
    def apply(cls, step: WatchedCall, *arrays: Any) -> tuple[Any, ...]:
        if not torch._C._are_functorch_transforms_active():
            return cls.directly(step, *arrays)
        if step.inside:
            with enable_single_level_autograd_function():
                return cls.inside(step, *arrays)
        return super().apply(step, *arrays)


class _Direct(torch.autograd.Function):
    """What :class:`_Watched` does, in the form that transforms do not take."""

    @staticmethod
    def forward(ctx: Any, step: WatchedCall, *arrays: Any) -> tuple[Any, ...]:
        outputs = step.forward(*arrays)
        step.save(ctx, arrays, outputs)
        return outputs

    backward, jvp = staticmethod(_Watched.backward), staticmethod(_Watched.jvp)


@functools.cache
def function(name: str) -> type[_Watched]:
    """The Function under an op's own name, which is what profilers and graph printers show."""
    made: Any = type(name, (_Watched,), {})
    made.inside = super(torch.autograd.Function, made).apply
    direct: Any = type(name, (_Direct,), {})
    made.directly = super(torch.autograd.Function, direct).apply
    found: type[_Watched] = made
    return found


def differentiable(step: WatchedCall, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """``step.wants``, differentiable with respect to ``arrays``."""
    return function(step.spec.name).apply(step, *arrays)


def refusal(spec: Spec[Any]) -> str:
    """Why nobody can differentiate a call of ``spec`` that was recorded."""
    forward = registry.forward_of(spec)
    name = forward.name if forward else spec.name
    return (
        f"{name}: second-order gradients are not given: {spec.name} is what computes the first, and no op "
        "differentiates it"
    )


def refuse_forward_mode(spec: Spec[Any]) -> str:
    return (
        f"{spec.name}: forward-mode derivatives (jvp, jacfwd, hessian) are not given; use reverse mode: "
        "torch.func.vjp, grad or jacrev"
    )


class Gradient(NamedTuple):
    """What computes the gradients of an op's calls on one device.

    Attributes:
      wiring: how. choice: who serves the vjp. overwrites: whether whoever does writes over tensors.
    """

    wiring: Wiring
    choice: Choice
    overwrites: bool

    def spendable(self, call: Call, choice: Choice) -> tuple[str, ...]:
        """Those of the tensors that a forward call saves over which its gradients may be written (``over`` of
        :class:`WatchedCall`)."""
        return self.wiring.spent(call, choice.spends) if self.overwrites else ()


def gradient_of(call: Call, choice: Choice, differentiated: Sequence[str]) -> Gradient:
    """What differentiates a call with respect to the arrays named, on the same backend. Where nothing does, the forward
    call says so and not a backward pass."""
    spec = call.spec
    known: Gradient | None = choice.gradients.get(call.device)
    candidates = None if known is not None else routes(call, choice)
    name = differentiated[0]
    try:
        wired = wiring(spec)
        name = next((n for n in differentiated if n not in wired.gradients), name)
        wired.wants(differentiated)
        if known is None:
            assert candidates is not None
            vjp = gradient_choice(candidates[0].impl.backend, wired.vjp, choice)
            found = routes(call.replace(spec=wired.vjp), vjp) or ()
            overwrites = [r.impl.backend.oracle or (r.impl.overwrites and r.framework is call.framework) for r in found]
            known = choice.gradients.keep(call.device, Gradient(wired, vjp, bool(found) and all(overwrites)))
    except UnsupportedError as e:
        raise UnsupportedError(
            f"{spec.name}: {name} requires grad, and {e}; use torch.no_grad(), or pass {name}.detach()"
        ) from None
    return known


def spent(*tensors: Any) -> Any:
    raise AssertionError("a step runs once")


def autocast(spec: Spec[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as torch.autocast would have them: see ``autocast`` in :func:`portakern.spec.spec`. The casts are
    differentiable."""
    names = {a.name for a in spec.arrays if "float16" in a.dtypes}

    def cast(name: str, value: Any) -> Any:
        if (
            name not in names
            or not isinstance(value, torch.Tensor)
            or value.dtype not in (torch.float32, torch.float16, torch.bfloat16)
        ):
            return value
        kind = value.device.type
        if not torch.is_autocast_enabled(kind):
            return value
        if kind == "cpu" and spec.autocast == "float32":
            return value  # PyTorch's lists for CPUs leave reductions in the dtype in which they come
        return value.to(torch.float32 if spec.autocast == "float32" else torch.get_autocast_dtype(kind))

    named = tuple(cast(a.name, value) for a, value in zip(spec.arrays, args, strict=False))
    others = {name: cast(name, value) for name, value in kwargs.items()}
    if isinstance(over := kwargs.get("overwrite"), (str, tuple, list, set, frozenset)):
        _refuse_casts(spec, over, args, named, kwargs, others)
    return (*named, *args[len(named) :]), others


def _refuse_casts(spec: Spec[Any], over: Any, args: Any, named: Any, kwargs: Any, others: Any) -> None:
    """SpecError where an argument that is to be written over was cast: the result would lie over the cast's copy."""
    before = dict(zip((a.name for a in spec.arrays), args, strict=False)) | kwargs
    after = dict(zip((a.name for a in spec.arrays), named, strict=False)) | others
    for name in (over,) if isinstance(over, str) else [n for n in over if n in before]:
        if before.get(name) is not after.get(name):
            raise SpecError(
                f"{spec.name}: overwrite names {name}, which is {before[name].dtype} and torch.autocast casts to "
                f"{after[name].dtype}: the result would not lie over it; leave overwrite out, or call under "
                "torch.autocast(..., enabled=False)"
            )


def over_samples(
    spec: Spec[Any],
    arrays: Arrays,
    dims: Mapping[str, int | None],
    options: Mapping[str, Any],
    wants: tuple[str, ...],
    n: int,
    run: Run,
) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """n calls at once, as torch.vmap has it: ``dims`` says along which axis an array holds n, None for one that all
    share. One call where the n can join the batch, a loop where they cannot.

    Returns: the names of the outputs (``wants`` unless that is empty), and those outputs, stacked along a new first
      axis."""
    moved = {name: array if dims[name] is None else array.movedim(dims[name], 0) for name, array in arrays.items()}
    mapped = {name for name in arrays if dims[name] is not None}
    sample = {name: (a[0] if n else a.new_empty(a.shape[1:])) if name in mapped else a for name, a in moved.items()}
    one = unchecked(spec, **sample, **options)
    wants = tuple(o.name for o in spec.outputs if o.name in (wants or one.wants))
    if n == 0:
        forms = {name: (shape, getattr(torch, dtype)) for name, (shape, dtype) in one.outputs.items()}
        return wants, tuple(torch.empty((0, *forms[o][0]), dtype=forms[o][1], device=one.device) for o in wants)
    folding = fold(one, mapped, wants, n)
    if folding is None:
        say(
            f"portakern: torch.vmap over {spec.name} runs sample by sample here: what is mapped over, or wanted per "
            "sample, has no batch axis to join",
            logging.INFO,
        )
        samples = [
            run({name: a[i] if name in mapped else a for name, a in moved.items()}, one.options, wants)
            for i in range(n)
        ]
        return wants, tuple(torch.stack(outputs) for outputs in zip(*samples, strict=True))
    inputs = {name: _folded(a, folding.arrays[name], name in mapped) for name, a in moved.items()}
    shapes, shifted = one.outputs, folding.options
    return wants, tuple(
        o.reshape(n, *shapes[name][0]) for name, o in zip(wants, run(inputs, shifted, wants), strict=True)
    )


def _folded(array: torch.Tensor, into: Into | None, mapped: bool) -> torch.Tensor:
    if into is None:
        return array
    wide = (array if mapped else array[None]).expand(into.wide)
    return wide if into.shape == into.wide else wide.reshape(into.shape)
