"""Op calls under JAX: eager ones jitted, traced ones as a primitive that is lowered when the platform is known.

Under ``jax.jit`` the arrays have no device yet, and ``jax.lax.platform_dependent`` would trace every branch. So a traced call becomes one primitive
whose lowering chooses the backend for its platform, and raises there with the reason when there is none; lowering for a TPU works on a machine without one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from portakern import dispatch, registry
from portakern.call import Call
from portakern.errors import SpecError, UnsupportedError
from portakern.frameworks import FRAMEWORKS, Target, numpy_dtype
from portakern.registry import Backend, Implementation
from portakern.spec import Spec

__all__ = ["run", "trace"]

Axes = tuple[int | None, ...]


@dataclass(frozen=True)
class _Static:
    """Everything about a call but its arrays. ``vmaps``: the batched axes of each enclosing ``jax.vmap``, innermost first (0 or None an array)."""

    spec: Spec[Any]
    backend: Backend | None
    tiling: tuple[tuple[str, int], ...]
    given: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]
    vmaps: tuple[Axes, ...] = ()

    def bind(self, arrays: tuple[Any, ...]) -> Call:
        op = dispatch.op(self.spec)
        return op.bind(**dict(zip(self.given, arrays, strict=True)), **dict(self.options))


def _static(call: Call, backend: Backend | None, tiling: Mapping[str, int]) -> _Static:
    given = tuple(n for n, a in call.arrays.items() if a is not None)
    return _Static(call.spec, backend, tuple(sorted(tiling.items())), given, tuple(call.options.items()))


def _given(call: Call) -> list[Any]:
    return [a for a in call.arrays.values() if a is not None]


def _spread(call: Call, wanted: Any) -> tuple[Any, ...]:
    """Outputs in the spec's order, None where unwanted, from the wanted ones."""
    named = dict(zip(call.wants, wanted, strict=True))
    return tuple(named.get(o.name) for o in call.spec.outputs)


def _apply(impl: Implementation, static: _Static, target: Target, interpret: bool, *arrays: Any) -> tuple[Any, ...]:
    call = static.bind(arrays)
    call.target, call.interpret, call.concrete = target, interpret, False
    return tuple(o for o in impl.run(call, dict(static.tiling)) if o is not None)


_compiled = jax.jit(_apply, static_argnums=(0, 1, 2, 3))
# An interpreted kernel is compiled for the host, to run a few times: unoptimised it starts sooner, and without fused multiply-adds its bits do not depend on what
# else is compiled with it.
_interpreted = jax.jit(_apply, static_argnums=(0, 1, 2, 3), compiler_options={"xla_backend_optimization_level": 0})


def run(impl: Implementation, call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    """Run an implementation on concrete JAX arrays, compiled once per shape by ``jax.jit``."""
    return _spread(call, (_interpreted if call.interpret else _compiled)(impl, _static(call, impl.backend, tiling), call.target, call.interpret, *_given(call)))


def trace(call: Call, backend: Backend | None, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    """Stage a call on tracers; the outputs are tracers."""
    for name, array in call.arrays.items():
        if isinstance(array, jax.ShapeDtypeStruct):
            raise SpecError(f"{call.spec.name}: {name} is a jax.ShapeDtypeStruct, which has no values; pass the op and it to jax.eval_shape, or pass an array")
    if backend is not None and backend.framework != "jax" and not backend.oracle:
        others = [b.name for b in registry.backends().values() if b.framework == "jax" or b.oracle]
        raise UnsupportedError(
            f"{call.spec.name}: backend {backend.name!r} runs {backend.framework} kernels, which JAX cannot stage into a traced function; "
            f"call it outside jit, vmap and grad, or use one of: {', '.join(others)}"
        )
    if call.degenerate:
        gone = dispatch.degenerate_values(call)
        return tuple(jnp.full(s, gone.get(n, 0.0), numpy_dtype(d)) if n in call.wants else None for n, (s, d) in call.outputs.items())
    return _spread(call, _primitive.bind(*_given(call), static=_static(call, backend, tiling)))


def _lowered(platform: str, *arrays: Any, static: _Static) -> tuple[Any, ...]:
    """What the primitive does on a platform, written in JAX."""
    function: Callable[..., Any] = functools.partial(_on_platform, platform, static)
    for axes in static.vmaps:
        function = jax.vmap(function, in_axes=axes)
    out: tuple[Any, ...] = function(*arrays)
    return out


def _on_platform(platform: str, static: _Static, *arrays: Any) -> tuple[Any, ...]:
    call = static.bind(arrays)
    target = Target(platform)
    backend = static.backend or dispatch.choose(call.spec, FRAMEWORKS["jax"], target)
    route = dispatch.find_route(backend, call, target)
    dispatch.announce(backend, route, target)
    call.target, call.interpret, call.concrete = target, route.interpret, False
    if backend.oracle:
        return _callback(static, call, arrays)
    tiling = dispatch.resolve_tiling(route.impl, call, dict(static.tiling))
    return tuple(o for o in route.impl.run(call, tiling) if o is not None)


def _callback(static: _Static, call: Call, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    shapes = tuple(jax.ShapeDtypeStruct(s, numpy_dtype(d)) for n, (s, d) in call.outputs.items() if n in call.wants)

    def on_host(*values: Any) -> tuple[Any, ...]:
        inner = static.bind(tuple(FRAMEWORKS["numpy"].to_numpy(v) for v in values))
        return tuple(o for o in dispatch.rounded_oracle(inner) if o is not None)

    out: tuple[Any, ...] = jax.pure_callback(on_host, shapes, *arrays, vmap_method="sequential")
    return out


_primitive = Primitive("portakern_op")
_primitive.multiple_results = True


@_primitive.def_impl
def _evaluate(*arrays: Any, static: _Static) -> Any:
    return _evaluate_jitted(static, *arrays)


@functools.partial(jax.jit, static_argnums=0)
def _evaluate_jitted(static: _Static, *arrays: Any) -> Any:
    return _primitive.bind(*arrays, static=static)


@_primitive.def_abstract_eval
def _abstract(*avals: Any, static: _Static) -> list[Any]:
    lead: tuple[int, ...] = ()
    shapes = [a.shape for a in avals]
    for axes in reversed(static.vmaps):  # outermost first: peel the leading axes off
        lead += (next(s[0] for s, ax in zip(shapes, axes, strict=True) if ax is not None),)
        shapes = [s if ax is None else s[1:] for s, ax in zip(shapes, axes, strict=True)]
    inner = static.bind(tuple(jax.ShapeDtypeStruct(s, a.dtype) for s, a in zip(shapes, avals, strict=True)))
    varying = frozenset().union(*(getattr(a, "vma", frozenset()) for a in avals))
    extra = {"vma": varying} if varying else {}
    return [avals[0].update(shape=lead + s, dtype=numpy_dtype(d), weak_type=False, **extra) for n, (s, d) in inner.outputs.items() if n in inner.wants]


def _batch(arrays: tuple[Any, ...], axes: tuple[Any, ...], *, static: _Static) -> tuple[Any, list[int]]:
    mapped = tuple(None if ax is None else 0 for ax in axes)
    moved = [a if ax is None else jnp.moveaxis(a, ax, 0) for a, ax in zip(arrays, axes, strict=True)]
    outputs = _primitive.bind(*moved, static=replace(static, vmaps=(*static.vmaps, mapped)))
    return outputs, [0] * len(outputs)


def _refuse_gradient(primals: Any, tangents: Any, *, static: _Static) -> Any:
    raise UnsupportedError(f"{static.spec.name} has no gradient yet: jax.grad, jvp and vjp through it are refused; use jax.lax.stop_gradient on its inputs")


batching.primitive_batchers[_primitive] = _batch
ad.primitive_jvps[_primitive] = _refuse_gradient
for _platform in ("cpu", "tpu", "cuda", "rocm"):
    mlir.register_lowering(_primitive, mlir.lower_fun(functools.partial(_lowered, _platform), multiple_results=True), platform=_platform)
