"""From a bound call to the implementation that serves it, and back to the caller's arrays. Nothing falls back in silence."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from portakern import registry, staging
from portakern.call import Call, binder
from portakern.core import tilings
from portakern.errors import SpecError, UnavailableError, UnsupportedError
from portakern.frameworks import FRAMEWORKS, HOST, Framework, Target, convert, numpy_dtype
from portakern.options import shown
from portakern.registry import Backend, Implementation
from portakern.spec import Spec

if TYPE_CHECKING:
    from portakern.compiling.report import Build

__all__ = ["Op", "Served", "observe", "op", "oracle", "rounded"]

log = logging.getLogger("portakern")
_said: set[str] = set()
_binders: dict[Spec[Any], Callable[..., Call]] = {}
_observers: list[Callable[[Served], None]] = []


@dataclass(frozen=True)
class Served:
    """One finished op call, as :func:`observe` hands it out: the caller's ``call``, who served it, its outputs (None where unwanted)."""

    call: Call
    backend: str
    interpret: bool
    tiling: Mapping[str, int]
    outputs: tuple[Any, ...]


@dataclass(frozen=True)
class Route:
    """Where calls of one framework and device go."""

    impl: Implementation
    interpret: bool
    target: Target
    framework: Framework  # the implementation's
    direct: bool = field(init=False)
    """Its kernels take the arrays as they are: no oracle, no JAX, whose calls may be traced."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "direct", not self.impl.backend.oracle and self.framework.name != "jax")


@contextmanager
def observe(callback: Callable[[Served], None]) -> Iterator[None]:
    """While inside, ``callback`` sees every op call after it was served, and those of functions that ``jax.jit`` compiles while inside, as NumPy arrays, when they run."""
    _observers.append(callback)
    try:
        yield
    finally:
        _observers.remove(callback)


def observed() -> bool:
    """Whether anybody observes."""
    return bool(_observers)


def tell(served: Served) -> None:
    """Show the observers a call."""
    for callback in _observers:
        callback(served)


def op(which: str | Spec[Any], *, backend: str | Backend | None = None, tiling: Mapping[str, int] | None = None) -> Op:
    """An op to call.

    Args:
      which: the op's name (see :func:`portakern.ops`), or its spec.
      backend: who must serve it, by name or as an object; it runs there or raises. None: chosen per call from the arrays (PyTorch on an NVIDIA or AMD GPU: triton; JAX on a TPU: pallas;
        anything on a CPU: the float64 oracle, which is slow and says so once in the log).
      tiling: overrides of the default tile extents and launch knobs, powers of two within the declared ranges (stages: any number).

    Raises:
      SpecError: an unknown op, backend or tile.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.compiler.is_compiling():
        made: Op = getattr(staging.FOUND, staging.prepare(which, backend, tiling))
        return made
    return Op(which if isinstance(which, Spec) else registry.find_spec(str(which)), backend, tiling)


class Op:
    """A callable op. ``op(*arrays, **options)`` takes NumPy, PyTorch or JAX arrays and returns the same kind; see ``op.spec.doc`` for the arguments."""

    def __init__(self, spec: Spec[Any], backend: str | Backend | None, tiling: Mapping[str, int] | None) -> None:
        self.spec = spec
        self.backend = None if backend is None else registry.backend(backend)
        self.user_tiling = _checked_tiling(spec, tiling or {})
        self._routes: dict[tuple[Framework, Any], Route] = {}
        self.gradients: dict[Any, Op] = {}  # kept by portakern.autograd
        self._bare = len(spec.outputs) == 1 and not spec.is_vjp  # the result is the one output itself
        self._bind = _binders.get(spec) or _binders.setdefault(spec, binder(spec))
        self.__doc__ = spec.doc
        for name, value in self.user_tiling.items():
            if name not in spec.tiling and backend is None:
                raise SpecError(
                    f"{spec.name}: tiling has no {name!r}; expected one of {', '.join(spec.tiling)} (launch knobs need backend=)"
                )
            if name in spec.tiling and value not in spec.tiling[name]:
                raise SpecError(
                    f"{spec.name}: tiling[{name!r}] is {shown(value)}; expected one of {', '.join(map(str, spec.tiling[name].values))}: leave it out for the default"
                )
        self.key, self._namesake = staging.keep(self)

    def __repr__(self) -> str:
        return f"<portakern op {self.spec.name} on {self.backend.name if self.backend else 'auto'}>"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None:
            # somebody records the call, or has tensors without memory
            if (
                torch.compiler.is_compiling()
                or torch._C._len_torch_dispatch_stack()
                or torch._C._get_tracing_state() is not None
            ):
                if any(isinstance(a, torch.Tensor) for a in (*args, *kwargs.values())):
                    staging.stage(self.key, len(args), tuple(kwargs))
                    return getattr(staging.FOUND, self.key)(*args, **kwargs)
            elif self.spec.autocast and torch._C._is_any_autocast_enabled():
                from portakern.autograd import autocast

                args, kwargs = autocast(self.spec, args, kwargs)
        try:  # as in ``unchecked``, which is one call more
            call = self._bind(*args, **kwargs)
        except (TypeError, RuntimeError) as e:
            self._unbound(e, args, kwargs)
        watched = call.framework.check(call)
        route = self._routes.get((call.framework, call.device)) or self._route(call)
        if route is None:
            from portakern import tracing

            return self._result(call, tracing.trace(call, self.backend, self.user_tiling))
        if watched:
            from portakern import autograd

            return self._result(call, autograd.apply(self, call))
        return self._result(call, self.serve(call, route))

    def bind(self, /, *args: Any, **kwargs: Any) -> Call:
        """Check the arguments and solve for the dimensions, without running anything."""
        call = self.unchecked(*args, **kwargs)
        call.framework.check(call)
        return call

    def unchecked(self, /, *args: Any, **kwargs: Any) -> Call:
        """:meth:`bind` for arrays of any standing: abstract ones, or ones that want a gradient."""
        try:
            return self._bind(*args, **kwargs)
        except (TypeError, RuntimeError) as e:
            self._unbound(e, args, kwargs)

    def _unbound(self, error: Exception, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NoReturn:
        """Raise what a failed binding means to the caller."""
        if isinstance(error, RuntimeError):
            raise _unreadable(self.spec, args, kwargs, error) from error
        if isinstance(error, SpecError) or (error.__traceback__ and error.__traceback__.tb_next):
            raise error
        raise self.misfit(str(error).replace("bind()", self.spec.name + "()")) from None

    def misfit(self, what: str) -> SpecError:
        """The error for arguments that the signature does not have."""
        arrays = ", ".join(a.name for a in self.spec.arrays)
        options = ", ".join(o.name for o in self.spec.options)
        return SpecError(f"{what}; arrays: {arrays}; keyword options: {options}")

    def route(self, call: Call) -> Route | None:
        """Who serves calls like this one; None while JAX is tracing."""
        return self._routes.get((call.framework, call.device)) or self._route(call)

    def _route(self, call: Call) -> Route | None:
        """Choose who serves calls like this one, and remember it."""
        target = call.framework.target(call.device)
        if target.platform == "traced":
            return None
        chosen = self.backend or choose(call.spec, call.framework, target)
        route = find_route(chosen, call, target)
        announce(chosen, route, target)
        self._routes[call.framework, call.device] = route
        return route

    def serve(self, call: Call, route: Route) -> tuple[Any, ...]:
        """Run a checked call: every output in the spec's order, None for an unwanted one."""
        call.target, call.interpret = route.target, route.interpret
        tiling: Mapping[str, int] = {}
        if call.degenerate:
            outputs = degenerate_outputs(call)
        elif route.direct and route.framework is call.framework:
            tiling = resolve_tiling(route.impl, call, self.user_tiling)
            outputs = route.impl.run(call, tiling)
        elif route.impl.backend.oracle:
            tiling = resolve_tiling(route.impl, call, self.user_tiling)
            outputs = _outputs_back(call, route.framework, rounded_oracle(call), copy=False)
        else:
            inner = call if route.framework is call.framework else to_framework(call, route.framework)
            tiling = resolve_tiling(route.impl, inner, self.user_tiling)
            if route.framework.name == "jax":
                from portakern import tracing

                outputs = tracing.run(route.impl, inner, tiling)
            else:
                outputs = route.impl.run(inner, tiling)
            if inner is not call:
                outputs = _outputs_back(
                    call, route.framework, outputs, copy="jax" in (call.framework.name, route.framework.name)
                )
        if _observers:
            tell(Served(call, route.impl.backend.name, route.interpret, dict(tiling), outputs))
        return outputs

    def _result(self, call: Call, outputs: tuple[Any, ...]) -> Any:
        if self._bare:
            return outputs[0]
        if len(call.wants) == 1 and not call.spec.is_vjp:
            return (
                outputs[0] if len(outputs) == 1 else outputs[[o.name for o in call.spec.outputs].index(call.wants[0])]
            )
        return call.spec.result(*outputs)

    def lower(self, /, *args: Any, target: str | None = None, **kwargs: Any) -> Build:
        """Compile the call for a target that need not be here (``"sm_90"``, ``"gfx942"``, ``"v6e"``; None: where the arrays are); their values are not read.

        Returns:
          what the compiler made: ``.ok`` or ``.reason``, ``.kernels`` with registers, spills, on-chip memory and matrix instructions, and ``.assembly``.
        """
        from portakern.compile import lower

        return lower(self, self.unchecked(*args, **kwargs), target)

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """Which implementation would serve this call, with which tiling from where, and why not the others. Nothing runs."""
        from portakern.explain import explain

        return explain(self, self.bind(*args, **kwargs))


def _checked_tiling(spec: Spec[Any], tiling: Any) -> dict[str, int]:
    """Python integers by name; whether the names and values are legal is known later, with the backend."""
    if not isinstance(tiling, Mapping):
        raise SpecError(
            f"{spec.name}: tiling is {shown(tiling)}; expected a dict from tile name to extent: {{{next(iter(spec.tiling), 'name')!r}: 128}}"
        )
    return {
        name: int(value) if hasattr(value, "__index__") and not isinstance(value, bool) else value
        for name, value in tiling.items()
    }


def _unreadable(spec: Spec[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception) -> Exception:
    """The error for an array that cannot even say its shape (a nested or uninitialised tensor); ``error`` itself where there is none."""
    for name, value in [*zip((a.name for a in spec.arrays), args, strict=False), *kwargs.items()]:
        try:
            _ = getattr(value, "shape", None)
        except Exception as e:
            why = str(e).partition("\n")[0]
            return SpecError(
                f"{spec.name}: {name} is a {type(value).__name__} without a shape ({why}); expected a dense array with values in it"
            )
    return error


def choose(spec: Spec[Any], framework: Framework, target: Target) -> Backend:
    """The backend that serves a framework's arrays on a target when none was named; UnsupportedError lists why none does."""
    known = registry.backends().values()
    for b in known:
        if b.auto and b.framework == framework.name and target.platform in b.compiles and not b.oracle:
            return b
    if target.platform == "cpu":
        return next(b for b in known if b.oracle)
    reasons = [f"{b.name}: {why_not(b, spec, target)}" for b in known if not b.oracle and why_not(b, spec, target)]
    serving = [f"backend={b.name!r}" for b in known if why_not(b, spec, target) is None]
    raise UnsupportedError(
        f"{spec.name}: no backend serves {framework.name} arrays on {target} by itself. {'; '.join(reasons)}. These serve it when named: {', '.join(serving) or 'none'}"
    )


def why_not(b: Backend, spec: Spec[Any], target: Target) -> str | None:
    """None if ``b`` can serve ``spec`` on ``target``, else the reason."""
    missing = b.unavailable()
    if missing:
        return missing
    home = b.package_for(target.platform)
    if home is None:
        return f"it compiles for {' and '.join(b.compiles)}{', interprets on cpu' if b.interprets else ''}, and has nothing for {target.platform} yet"
    return None if b.has(spec.name, home[0]) else f"it has no {spec.name}" + (f" in {home[0]}" if home[0] else "")


def find_route(b: Backend, call: Call, target: Target) -> Route:
    """The implementation of ``call`` on ``b``, or the error that says why there is none."""
    b.check_available()
    reason = why_not(b, call.spec, target)
    home = b.package_for(target.platform)
    impl = None if reason or home is None else b.implementation(call.spec.name, home[0])
    if home is None or impl is None:
        others = ", ".join(
            o.name for o in registry.backends().values() if o is not b and why_not(o, call.spec, target) is None
        )
        raise UnsupportedError(
            f"{call.spec.name} on {target}: backend {b.name!r} cannot: {reason or 'it has none'}. Backends that can: {others or 'none'}"
        )
    return Route(impl, home[1], target, FRAMEWORKS[b.framework])


def resolve_tiling(impl: Implementation, call: Call, user: Mapping[str, int]) -> Mapping[str, int]:
    """The default tiling under the user's, checked; UnsupportedError where the backend cannot serve the call with it."""
    return tilings.resolve(impl, call, user).tiling


def degenerate_values(call: Call) -> Mapping[str, float]:
    """Output name -> its value when a reduced extent is 0."""
    return next((values for dim, values in call.spec.empty.items() if call.dims[dim] == 0), {})


def degenerate_outputs(call: Call) -> tuple[Any, ...]:
    """The outputs of a call that has nothing to compute: empty ones, or the spec's value for a reduced extent of 0."""
    gone, full = degenerate_values(call), call.framework.full
    return tuple(
        full(shape, dtype, gone.get(n, 0.0), call.device) if n in call.wants else None
        for n, (shape, dtype) in call.outputs.items()
    )


def to_framework(call: Call, framework: Framework) -> Call:
    """The same call with its arrays in another framework."""
    arrays = {n: a if a is None else convert(a, call.framework, framework) for n, a in call.arrays.items()}
    device = framework.device(next(iter(arrays.values())))
    return call.replace(arrays=arrays, framework=framework, device=device)


def _outputs_back(call: Call, framework: Framework, outputs: tuple[Any, ...], copy: bool) -> tuple[Any, ...]:
    """Outputs as the caller's arrays. JAX's never change, so none may share memory that a kernel keeps (a workspace) or that somebody may write to."""
    return tuple(None if o is None else convert(o, framework, call.framework, call.device, copy) for o in outputs)


def oracle(call: Call) -> tuple[Any, ...]:
    """Every output of ``call`` in float64 NumPy, unrounded; None for an output the call does not want."""
    b = next(b for b in registry.backends().values() if b.oracle)
    impl = b.implementation(call.spec.name, b.compiles["cpu"])
    if impl is None:
        raise UnavailableError(
            f"{call.spec.name} has no oracle: {b.compiles['cpu']}.{call.spec.name} is missing; register one with @pk.backends()[{b.name!r}].implements({call.spec.name!r})"
        )
    return impl.run(as_float64(call), {})


def as_float64(call: Call) -> Call:
    """The call as the oracle sees it: NumPy, floating-point arrays widened to float64, integers as they are."""
    arrays = {n: a if a is None else _widen(call.framework.to_numpy(a)) for n, a in call.arrays.items()}
    given = {n: call.dtype_of(n) for n, a in call.arrays.items() if a is not None}
    return call.replace(arrays=arrays, framework=FRAMEWORKS["numpy"], device="cpu", given=given)


def _widen(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.kind in "iub" else array.astype(np.float64)


def rounded_oracle(call: Call) -> tuple[Any, ...]:
    """The oracle's outputs as NumPy arrays in the declared dtypes."""
    return tuple(
        None if y is None else rounded(y, dtype)
        for y, (_, dtype) in zip(oracle(call), call.outputs.values(), strict=True)
    )


def rounded(exact: np.ndarray, dtype: str) -> np.ndarray:
    """Round float64 once, to nearest even. ml_dtypes goes through float32, where a value beside a tie of bfloat16 may land on it: step off again."""
    with np.errstate(over="ignore"):
        if dtype != "bfloat16":
            return exact.astype(numpy_dtype(dtype), order="C")
        single = exact.astype(np.float32, order="C")
        on_tie = (single.view(np.uint32) & 0xFFFF == 0x8000) & (single != exact)
        beside = np.nextafter(single, np.where(exact > single, np.inf, -np.inf).astype(np.float32))
        return np.where(on_tie, beside, single).astype(numpy_dtype(dtype))


def announce(b: Backend, route: Route, target: Target) -> None:
    """Say once that a slow path was taken."""
    text = None
    if route.interpret:
        text = f"portakern: {b.name} runs in its interpreter on CPU arrays: exact semantics, slow"
    elif b.oracle and target != HOST:
        text = f"portakern: {b.name} copies arrays from {target} to the host: it is the float64 oracle, and slow"
    elif b.oracle:
        text = f"portakern: CPU arrays are served by {b.name}, the float64 oracle: right, and slow"
    if text:
        say(text)


def say(text: str, level: int = logging.WARNING) -> None:
    """Log a line, once in a process."""
    if text not in _said:
        _said.add(text)
        log.log(level, text)
