"""The public interface of ops, on top of :mod:`portakern.core`: ``portakern.op`` and the class ``Op``."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from portakern.core import registry
from portakern.core.backend import Backend
from portakern.core.binder import bind, binder, unbound, unchecked
from portakern.core.cache import BoundedCache
from portakern.core.call import Call
from portakern.core.dispatch import Choice
from portakern.core.framework import frameworks
from portakern.core.observe import OBSERVERS
from portakern.core.plan import CallPlan, call_through
from portakern.core.signatures import ALIKE, Signature, matcher, reader
from portakern.errors import SpecError
from portakern.spec import Spec
from portakern.spec.signature import described, signature

if TYPE_CHECKING:
    from portakern.tools.compile.build import Build
    from portakern.tools.compile.warming import Warmed

__all__ = ["Op", "build_kernels", "op", "warm"]

RECORDERS = tuple(f for f in frameworks().values() if f.records)
"""The frameworks that may record a call instead of running it."""
RECORDING = tuple(f.recorder() for f in RECORDERS)


def op(
    which: str | Spec[Any],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> Op:
    """Get an op by name. The result is callable.

    Args:
      which: the op's name (see :func:`portakern.ops`), or its spec.
      backend: a backend's name or object; a call runs on this backend or raises. None: chosen per call from the arrays
        (PyTorch on an NVIDIA or AMD GPU: triton; JAX on a TPU: pallas; a CPU: the float64 oracle, which is slow and
        logs this once).
      variant: a variant of the backend, by the name in ``explain()``. None: the first in the declared order that
        supports the call.
      tiling: tile sizes and launch parameters that replace the defaults; powers of two within the declared ranges
        (num_stages: any integer). ``portakern show OP`` lists them.

    Raises:
      SpecError: an unknown op, backend, variant or tile.
    """
    for framework in RECORDERS:
        if framework.recording_python():
            made: Op = framework.recorded_op(make, which, backend, variant, tiling)
            return made
    return make(which, backend, variant, tiling)


def make(
    which: str | Spec[Any], backend: str | Backend | None, variant: str | None, tiling: Mapping[str, int] | None
) -> Op:
    """The op of :func:`op`, without recording. Equal arguments give the same object, whose cached plans are shared."""
    spec = which if isinstance(which, Spec) else registry.find_spec(str(which))
    if variant is not None or tiling is not None:
        return Op(spec, Choice.from_names(spec, backend, variant, tiling))
    key = spec, None if backend is None else registry.backend(backend)
    return _made.get(key) or _made.keep(key, Op(spec, Choice.from_names(spec, backend, None, None)))


_made: BoundedCache[tuple[Spec[Any], Backend | None], Op] = BoundedCache()


class FromSpec:
    """An attribute of an op that is computed from its spec on access."""

    def __init__(self, work_out: Callable[[Spec[Any]], Any], on_the_class: Any = None) -> None:
        self.work_out, self.on_the_class = work_out, on_the_class

    def __get__(self, op: Op | None, owner: type[Op]) -> Any:
        return self.on_the_class if op is None else self.work_out(op.spec)


class Op:
    """A callable op, as :func:`op` makes it.

    ``op(*arrays, **options)`` takes NumPy, PyTorch or JAX arrays and returns the same kind. ``help(op)`` and
    ``inspect.signature(op)`` show the arguments.
    """

    __doc__ = FromSpec(described, __doc__)
    __signature__ = FromSpec(signature)

    def __init__(self, spec: Spec[Any], choice: Choice) -> None:
        self.spec, self.choice = spec, choice
        self.__name__ = f"portakern_{spec.name}"  # by which jax.jit calls a program of it, and profiles the program
        self._bind, self._casts = binder(spec), spec.autocast is not None
        self._alone = [] if spec.is_vjp else [o.name for o in spec.outputs]  # outputs that may be the result itself
        self._bare, self._shown = len(self._alone) == 1, len(spec.shown)
        self.kept = {f.name: f.keep(self) for f in RECORDERS}
        self._plans: BoundedCache[Signature, CallPlan] = choice.plans
        self._recent: BoundedCache[Any, tuple[tuple[Callable[..., Any], CallPlan], ...]] = BoundedCache()
        self._alike, self._read = ALIKE, reader(spec)

    @property
    def backend(self) -> Backend | None:
        """The backend that was named; None: chosen per call."""
        return self.choice.backend

    @property
    def user_tiling(self) -> Mapping[str, int]:
        """The tiles that were named, by name."""
        return self.choice.tiling

    def __repr__(self) -> str:
        variant = f", variant {self.choice.variant}" if self.choice.variant else ""
        return f"<portakern op {self.spec.name} on {self.backend.name if self.backend else 'auto'}{variant}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Op) and self.spec is other.spec and self.choice == other.choice

    def __hash__(self) -> int:
        """Equal ops hash equally: ``jax.jit`` does not trace each again, and pytrees of layers compare equal."""
        return hash((self.spec, self.choice))

    def __copy__(self) -> Op:
        return self  # it never changes

    def __deepcopy__(self, memo: dict[int, Any]) -> Op:
        return self

    def __reduce__(self) -> tuple[Callable[..., Op], tuple[Any, ...]]:
        """Pickle names only; loading finds the op and the backend by name."""
        backend = self.choice.backend
        if not registry.has_name(self.spec):
            raise pickle.PicklingError(
                f"{self!r} cannot be pickled: its spec is not installed under the name {self.spec.name!r}; "
                "add an entry point of the group portakern.specs"
            )
        if backend is not None and not registry.known(backend):
            raise pickle.PicklingError(
                f"{self!r} cannot be pickled: its backend {backend.name!r} is not registered under that name; "
                "call portakern.register here and where it is loaded, or add an entry point of the group "
                "portakern.backends"
            )
        named = None if backend is None else backend.name
        return make, (self.spec.name, named, self.choice.variant, dict(self.choice.tiling))

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        for recording in RECORDING:  # whoever does traces this very function, and would trace what reads signatures
            if recording():
                return self._anew(None, args, kwargs)
        known: CallPlan | None = None
        try:
            for match, plan in self._recent.get(_shapes(args), ()) if args else ():
                found = match(*args, **kwargs)
                if found is not None:
                    known, arrays = plan, found
                    break
        except (TypeError, AttributeError, RuntimeError):  # binding says in the op's words what is wrong
            pass
        if known is None:
            return self._by_signature(args, kwargs)
        outputs = known.serve(arrays)
        return outputs[0] if self._bare else self._result(known.call, outputs)

    def _by_signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that is like none of the recent ones."""
        try:
            key, arrays = self._read(*args, **kwargs)
            known = self._plans.get(key) if key else None
        except (TypeError, AttributeError, RuntimeError):
            key = known = None
        if known is None or OBSERVERS:
            return self._anew(key if known is None else None, args, kwargs)
        if args:
            self._remember(known, args, kwargs, arrays)
        outputs = known.serve(arrays)
        return outputs[0] if self._bare else self._result(known.call, outputs)

    def _remember(
        self, plan: CallPlan, args: tuple[Any, ...], kwargs: dict[str, Any], arrays: Mapping[str, Any]
    ) -> None:
        """Keep what tells that a later call is like this one, which has a plan, sooner than its signature does."""
        shapes = _shapes(args)
        recent = self._recent.get(shapes, ())
        if len(recent) < self._alike:
            match = matcher(self.spec, arrays, {n: v for n, v in kwargs.items() if n not in arrays})
            if match is None:
                self._alike = 0
            else:
                self._recent.keep(shapes, ((match, plan), *recent))

    def _result(self, call: Call, outputs: tuple[Any, ...]) -> Any:
        """The return value of a call, from all outputs in the spec's order."""
        if len(call.wants) == 1 and self._alone:
            return outputs[0] if len(outputs) == 1 else outputs[self._alone.index(call.wants[0])]
        return call.spec.result(*outputs[: self._shown])

    def _anew(self, key: Signature | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call without a cached plan. ``key``: its signature, under which the plan is cached. An argument whose
        type has ``__portakern_op__(spec, args, kwargs)`` takes the call over, and gives the bound call and its outputs.
        """
        for framework in RECORDERS:
            how = framework.interposes(self._casts)
            if how == "records" and any(framework.is_array(a) for a in (*args, *kwargs.values())):
                return framework.record(self, args, kwargs)
            if how != "records" and framework.distributes(self.spec, args, kwargs):
                self._bound(args, kwargs)  # says what is wrong with the call
                return framework.record(self, args, kwargs)
            if how == "profiles":
                return framework.profiled(self, args, kwargs)
            if how == "casts":
                args, kwargs = framework.cast(self.spec, args, kwargs)
        traced = next((a for a in (*args, *kwargs.values()) if hasattr(type(a), "__portakern_op__")), None)
        if traced is not None:
            call, outputs = traced.__portakern_op__(self.spec, args, kwargs)
            return outputs[0] if self._bare else self._result(call, outputs)
        call = self._bound(args, kwargs)
        outputs, plan = call_through(call, self.choice)
        if key is not None and plan is not None:
            self._plans.keep(key, plan)
        return outputs[0] if self._bare else self._result(call, outputs)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        try:
            return self._bind(*args, **kwargs)
        except (TypeError, RuntimeError) as e:
            raise unbound(self.spec, e, args, kwargs) from None

    def bind(self, /, *args: Any, **kwargs: Any) -> Call:
        """Check the arguments and compute the dimensions; nothing runs."""
        return bind(self.spec, *args, **kwargs)

    def lower(self, /, *args: Any, target: str | None = None, cycles: bool = False, **kwargs: Any) -> Build:
        """Compile the call for a target, which may be absent. The arrays' values are not read.

        Args:
          target: an architecture (``"sm_90"``, ``"gfx942"``, ``"v6e"``); None: that of the arrays' device.
          cycles: for TPUs, also get the compiler's estimate of cycles, which takes up to a minute.

        Returns:
          The compiler's output: ``.ok``, or ``.reason`` of a failure; ``.kernels`` with registers, spills, on-chip
          memory and matrix instructions; ``.assembly``; for TPUs ``.least``, the estimated cycles.
        """
        from portakern.tools.compile.matrix import lower  # a tool: a call loads none

        return lower(unchecked(self.spec, *args, **kwargs), self.choice, target, cycles=cycles)

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """Explain which implementation would serve this call, its tiling and source of the tiling, and why others would
        not; of DTensors, also what would move between devices and why. Nothing runs."""
        from portakern.core.explain import explain

        parted = any(f.distributes(self.spec, args, kwargs) for f in RECORDERS)  # no kernel reads such arrays whole
        return explain(self._bound(args, kwargs) if parted else self.bind(*args, **kwargs), self.choice)


def _shapes(args: tuple[Any, ...]) -> Any:
    """What tells most calls of an op apart: the shapes of its first two arrays."""
    return args[0].shape if len(args) == 1 or args[1] is None else (args[0].shape, args[1].shape)


def warm(
    calls: Iterable[functools.partial[Any]],
    *,
    train: bool = True,
    target: str | None = None,
    processes: int | None = None,
    progress: bool | None = None,
) -> Warmed:
    """Compile the kernels of many calls beside each other, in processes of their own, before the first of these calls.

    A call that is not made yet is a ``functools.partial`` of an op with its arguments. Only shapes, strides, dtypes and
    options of these count: values are not read, so that arrays may be on ``device="meta"``. The kernels lie in Triton's
    cache on disk afterwards, where the calls find them, in this process and in later ones.

    >>> attention = pk.op("attention")
    >>> q = torch.empty(2, 2048, 32, 128, dtype=torch.bfloat16, device="cuda")
    >>> print(pk.warm([functools.partial(attention, q, q, q, is_causal=True)]))

    Args:
      calls: the calls. Equal ones count once.
      train: the calls as they run where gradients are wanted, and the gradients, with respect to the arrays that
        require one, else to all arrays that have one. False: the calls as they run without gradients.
      target: the architecture to compile for, such as "sm_90"; None: that of each call's arrays.
      processes: at most so many at a time; None: one for each core that this process may use.
      progress: whether a line on standard error shows how far it is; None: on a terminal.

    Returns:
      The numbers of calls and kernels, the seconds, and ``failures``: each call that was refused or whose kernels were
      not compiled, and why. Failures are logged too.

    Raises:
      SpecError: an argument is wrong, or a call is.
    """
    bound = []
    for number, call in enumerate(calls):
        if not (isinstance(call, functools.partial) and isinstance(call.func, Op)):
            raise SpecError(
                f"warm: call {number} is a {type(call).__name__}; expected a functools.partial of an op: "
                'functools.partial(pk.op("softmax"), x)'
            )
        try:
            bound.append((unchecked(call.func.spec, *call.args, **call.keywords), call.func.choice))
        except SpecError as e:
            raise SpecError(f"warm: call {number}: {e}") from None
    return build_kernels(bound, train=train, target=target, processes=processes, progress=progress)


def build_kernels(calls: Iterable[tuple[Call, Choice]], **options: Any) -> Warmed:
    """:func:`warm` for calls that are bound, with the choice of who serves each."""
    from portakern.tools.compile import warming  # a tool: a call loads none

    return warming.build_kernels(calls, **options)
