"""Eager calls that autograd or ``torch.func`` watches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from portakern.core import codegen
from portakern.core.binder import unchecked
from portakern.core.cache import BoundedCache
from portakern.core.call import Call
from portakern.core.dispatch import Choice
from portakern.core.gradients import Wiring
from portakern.core.observe import OBSERVERS
from portakern.core.plan import CallPlan, decide, serve
from portakern.core.signatures import ALIKE, Signature, matcher, reader
from portakern.frameworks.torch.autograd import (
    TORCH,
    Arrays,
    Gradient,
    Run,
    WatchedCall,
    differentiable,
    function,
    gradient_of,
    spent,
    unseen,
)
from portakern.frameworks.torch.custom_ops import calling, tell_counters
from portakern.frameworks.torch.profiling import named
from portakern.spec import Spec

__all__ = ["differentiate", "plan_training"]


def differentiate(call: Call, choice: Choice, late: bool = False) -> tuple[tuple[Any, ...], Training | None]:
    """The outputs of a watched call in the spec's order, None for one that the call does not want; and what was decided
    for calls of its signature, where autograd alone watches.

    ``late``: what has no gradient is refused only when asked for one."""
    spec = call.spec
    names = tuple(n for n, a in call.arrays.items() if a is not None)
    arrays = [call.arrays[n] for n in names]
    if functionalized():  # which has no rule for a Function, and one for every custom op
        tell_counters(spec)
        outputs = calling(spec, choice)(call.arrays, call.options, call.wants)
        given = dict(zip(call.wants, outputs, strict=True))
        return tuple(given.get(o.name) for o in spec.outputs), None
    differentiated = [n for n, a in zip(names, arrays, strict=True) if a.requires_grad]
    wired: Wiring | None = None
    backward: Run | None = None
    over: tuple[str, ...] = ()
    training = call
    if differentiated and torch.is_grad_enabled() and not late:
        gradient = gradient_of(call, choice, differentiated)
        made = None if OBSERVERS or not TORCH.undisturbed(False) else plan_training(call, choice, gradient)
        if made is not None:
            return made.serve(call.arrays), made
        wired, over = gradient.wiring, gradient.spendable(call, choice)
        backward = _Backward(wired.vjp, gradient.choice)  # a graph that is kept may be walked often
        training = wired.training(call)

    def forward(*tensors: Any) -> tuple[Any, ...]:
        training.arrays = training.arrays | dict(zip(names, tensors, strict=True))
        training.framework.check(training)  # transforms of torch.func hide what they wrap
        return tuple(o for o in serve(training, choice) if o is not None)

    again = functools.partial(_run, spec, choice, late)
    step = WatchedCall(spec, names, call.options, training.wants, wired, forward, backward, again, over=over)
    named = dict(zip(step.wants, differentiable(step, arrays), strict=True))
    step.forward = spent  # it holds the tensors, which a graph must not
    return tuple(named[o.name] if o.name in call.wants else None for o in spec.outputs), None


def functionalized() -> bool:
    """Whether the innermost transform of torch.func that is active is ``functionalize``."""
    functorch = torch._C._functorch
    innermost = functorch.peek_interpreter_stack()
    return innermost is not None and innermost.key() == functorch.TransformType.Functionalize


class Training:
    """What was decided for calls of one signature that autograd watches: a step that any of them may take.

    Attributes:
      call: such a call, without its arrays. serve: see :class:`portakern.core.plan.CallPlan`.
    """

    __slots__ = ("_apply", "_as_they_are", "_names", "_step", "_wanted", "call")

    def __init__(self, call: Call, step: WatchedCall) -> None:
        self.call, self._step, self._names = call.replace(arrays={}), step, step.names
        self._apply = function(call.spec.name).directly
        places = {name: i for i, name in enumerate(step.wants)}
        self._wanted = [places[o.name] if o.name in call.wants else None for o in call.spec.outputs]
        self._as_they_are = self._wanted == [*range(len(step.wants))]

    def serve(self, arrays: Arrays) -> tuple[Any, ...]:
        outputs = self._apply(self._step, *[arrays[n] for n in self._names])
        if self._as_they_are:
            return outputs
        return tuple([None if i is None else outputs[i] for i in self._wanted])


def plan_training(call: Call, choice: Choice, gradient: Gradient) -> Training | None:
    """What is decided for calls that autograd alone watches; None where something is left to decide each time."""
    wired = gradient.wiring
    training = wired.training(call)
    kept = decide(training, choice)
    if kept is None or not kept.lasting:
        return None
    names = tuple(n for n, a in call.arrays.items() if a is not None)
    absent, all_of_them = dict.fromkeys(call.arrays), len(training.wants) == len(call.spec.outputs)

    def forward(*tensors: Any) -> tuple[Any, ...]:
        outputs = kept.serve({**absent, **dict(zip(names, tensors, strict=True))})
        return outputs if all_of_them else tuple([o for o in outputs if o is not None])

    again = functools.partial(_run, call.spec, choice, False)
    backward = _Backward(wired.vjp, gradient.choice)
    over = gradient.spendable(call, choice)
    step = _Again(call.spec, names, call.options, training.wants, wired, forward, backward, again, False, over)
    return Training(call, step)


Way = Callable[[tuple[Any, ...], Sequence[Any]], "tuple[Any, ...] | None"]
"""(saved tensors, cotangents) -> the gradient of each array, None where the long way must be gone."""


class _Again(WatchedCall):
    """A step that calls of one signature take. What they have in common is worked out for the first: where the saved
    tensors come from, and for each set of gradients that is asked for, how arguments and results of the vjp lie."""

    __slots__ = ("backwards", "places")

    def __init__(self, spec: Spec[Any], names: tuple[str, ...], *others: Any) -> None:
        super().__init__(spec, names, *others)
        assert self.wiring is not None
        given = {n: i for i, n in reversed([*enumerate((*names, *self.wants))])}
        self.saved = [n for n in self.wiring.inputs + self.wiring.saves(self.options) if n in given]
        self.places = [given[n] for n in self.saved]
        self.backwards: dict[tuple[Any, ...], Way] = {}

    def save(self, ctx: Any, arrays: Sequence[Any], outputs: Sequence[Any]) -> None:
        ctx.step = self
        ctx.unseen = bool(self.over) and unseen()
        ctx.set_materialize_grads(False)
        if not self.forms:
            self.forms = [(o.shape, o.dtype) for o in outputs]
        given = (*arrays, *outputs)
        ctx.save_for_backward(*[given[i] for i in self.places])

    def gradients(self, ctx: Any, cotangents: Sequence[Any], saved: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
        over: tuple[str, ...] = ()
        if ctx.unseen and any(c is not None for c in cotangents):
            assert self.wiring is not None
            saved, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
            wants = self.wiring.wants([n for n, gets in zip(self.names, needed, strict=True) if gets])
            given = dict(enumerate(cotangents)) | dict(zip(self.saved, saved, strict=True))
            over = self.may_overwrite(ctx, wants, given)
        asked = (over, ctx.needs_input_grad, *[c is None for c in cotangents])
        way, found = self.backwards.get(asked), None
        if way is not None and not OBSERVERS:
            saved = ctx.saved_tensors if saved is None else saved
            found = way(saved, cotangents)
        if found is None:
            found = super().gradients(ctx, cotangents, saved)
            if way is None:
                self.backwards[asked] = self._compiled_backward(ctx.needs_input_grad[1:], cotangents, over)
        return found

    def _compiled_backward(self, needed: Sequence[bool], cotangents: Sequence[Any], over: tuple[str, ...]) -> Way:
        """Straight-line code for cotangents of which these are there, and these gradients, written over ``over``."""
        wired, backward = self.wiring, self.backward
        assert wired is not None and isinstance(backward, _Backward)
        theirs = [wired.cotangents.get(n) for n in self.wants]  # None, of as many outputs as the vjp takes none of
        there = [n for n, c in zip(theirs, cotangents, strict=True) if c is not None and n is not None]
        wants = wired.wants([n for n, gets in zip(self.names, needed, strict=True) if gets])
        made = [a.name for a in wired.vjp.arrays if not a.optional and a.name in theirs and a.name not in there]
        if not wants or not there or made:  # nothing is to be done, or zeros are to be made
            return lambda saved, cotangents: None
        outputs = [o.name for o in wired.vjp.outputs]
        results = [wired.gradients.get(n) for n in self.names]
        text = _WAY.format(
            saved="".join(f"{n}, " for n in self.saved) or "*_",
            cotangents="".join(f"{n if n in there else '_'}, " for n in theirs),
            arguments=", ".join(
                a.name + ".detach()" * (a.name in over) if a.name in (*self.saved, *there) else "None"
                for a in wired.vjp.arrays
            ),
            options="".join(f"{n}=_options[{n!r}], " for n in wired.options) + "overwrite=_over, " * bool(over),
            results="".join(
                f"_out[{outputs.index(r)}], " if r in wants else f"{r}, " if r in there else "None, " for r in results
            ),
        )
        alike: BoundedCache[int, tuple[Callable[..., Any], CallPlan]] = BoundedCache()

        def remember(plan: CallPlan, arrays: Arrays, /, **options: Any) -> None:
            match = matcher(wired.vjp, arrays, options) if len(alike) < ALIKE else None
            if match is not None:
                alike.keep(len(alike), (match, plan))

        env: dict[str, Any] = {"_read": backward.read, "_plans": backward.choice.plans, "_options": self.options}
        env |= {"_wants": wants, "_over": over, "_RuntimeError": RuntimeError, "_alike": alike, "_remember": remember}
        way: Way = codegen.written(f"gradients of {self.spec.name}", text, env, "way")
        return way


_WAY = """
def way(_saved, _cotangents):
    {saved} = _saved
    {cotangents} = _cotangents
    try:
        for _match, _known in _alike.values():
            _given = _match({arguments}, {options}wants=_wants)
            if _given is not None:
                break
        else:
            _key, _given = _read({arguments}, {options}wants=_wants)
            _known = None if _key is None or _key[-1] else _plans.get(_key)
            if _known is None:  # somebody looks at the gradients' own call, or it is the first of its signature
                return None
            _remember(_known, _given, {options}wants=_wants)
    except _RuntimeError:  # a tensor that cannot be asked: of is_grads_batched, or without memory of its own
        return None
    _out = _known.serve(_given)
    return {results}
"""


class _Backward:
    """The gradients of calls of one signature, most of which are of one signature too."""

    def __init__(self, spec: Spec[Any], choice: Choice) -> None:
        self.spec, self.choice, self.read = spec, choice, reader(spec)

    def __call__(self, arrays: Arrays, options: Mapping[str, Any], wants: tuple[str, ...]) -> tuple[Any, ...]:
        if OBSERVERS or any(map(torch._C._functorch.is_legacy_batchedtensor, arrays.values())):
            return _run(self.spec, self.choice, True, arrays, options, wants)
        try:
            key, given = self.read(**arrays, **options, wants=wants)
        except RuntimeError:  # the long way materialises such a tensor, or says what is wrong with it
            key, given = None, arrays
        if key is None or key[-1]:  # somebody looks at the gradients' own call
            return _run(self.spec, self.choice, True, arrays, options, wants)
        known = self.choice.plans.get(key)
        if known is None:
            return self._first(key, arrays, options, wants)
        return tuple([o for o in known.serve(given) if o is not None])

    def _first(
        self, key: Signature, arrays: Arrays, options: Mapping[str, Any], wants: tuple[str, ...]
    ) -> tuple[Any, ...]:
        call = _bound(self.spec, arrays, options, wants)
        call.framework.check(call)
        plan = decide(call, self.choice)
        assert plan is not None
        outputs = plan.begin(call)
        if plan.lasting:
            self.choice.plans.keep(key, plan)
        return tuple(o for o in outputs if o is not None)


def _bound(spec: Spec[Any], arrays: Arrays, options: Mapping[str, Any], wants: tuple[str, ...]) -> Call:
    """A call for the outputs ``wants``, which the library makes itself."""
    call = unchecked(spec, **arrays, **options)
    call.wants = tuple(o.name for o in spec.outputs if o.name in wants)
    return call


def _run(
    spec: Spec[Any], choice: Choice, late: bool, arrays: Arrays, options: Mapping[str, Any], wants: tuple[str, ...]
) -> tuple[Any, ...]:
    """The outputs ``wants`` of a call that the library makes itself."""
    # torch.autograd.grad(is_grads_batched=True): only the dispatcher sees through; and its modes want to see the call
    if torch._C._len_torch_dispatch_stack() or any(map(torch._C._functorch.is_legacy_batchedtensor, arrays.values())):
        tell_counters(spec)
        return calling(spec, choice)(arrays, options, wants)
    with named(spec.name, arrays.values()):
        call = _bound(spec, arrays, options, wants)
        watched = call.framework.check(call)
        outputs = differentiate(call, choice, late)[0] if watched else serve(call, choice)
    return tuple(o for o in outputs if o is not None)
