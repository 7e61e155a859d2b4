"""Op calls under JAX: eager ones jitted, traced ones as a primitive that is lowered when the platform is known.

Under ``jax.jit`` the arrays have no device yet, and ``jax.lax.platform_dependent`` would trace every branch. So a
traced call becomes one primitive whose lowering chooses the backend for its platform, and raises there with the reason
when there is none; lowering for a TPU works on a machine without one.

Gradients are a ``jax.custom_vjp`` around that primitive: its backward pass calls the op that the spec names (see
:mod:`portakern.core.gradients`) for those inputs that are differentiated and no others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import dispatch  # jax has no public name for primitives whose lowering asks for devices
from jax._src.config import (  # jax has no public name for leaving shard_map's check of varying axes, nor for this
    _check_vma,
    eager_constant_folding,
)
from jax._src.core import (  # jax has no public name for asking whether anything is traced, nor for stepping out of it
    eval_context,
    eval_trace,
    trace_ctx,
)
from jax._src.effects import Effect  # jax has no public name for it
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from portakern.core import registry
from portakern.core.backend import Backend, Implementation
from portakern.core.batching import fold
from portakern.core.binder import bind
from portakern.core.call import Call
from portakern.core.config import Config
from portakern.core.dispatch import Choice, Route, announce, choose, find_routes, gradient_choice, pick
from portakern.core.framework import frameworks, host_framework
from portakern.core.gradients import wiring
from portakern.core.observe import OBSERVERS, Served, say, tell
from portakern.core.oracle import degenerate_values, rounded_oracle
from portakern.core.plan import call_through
from portakern.core.targets import Target, find
from portakern.errors import SpecError, UnsupportedError
from portakern.frameworks.jax.partitioned import (
    auto_axes,
    devices_of,
    explicit_mesh,
    explicit_placement,
    explicit_sharding,
    gathered,
    lowering_mesh,
    manual_axes,
    on_parts,
    partitioned,
)
from portakern.frameworks.jax.sharding import refused
from portakern.frameworks.jax.staged import Axes, StaticCall, output_dtype, static_call
from portakern.spec import Spec

__all__ = ["axes_of", "lowered_for", "lowering_target", "run", "to_varying", "trace", "varying_alike"]


def _given(call: Call) -> list[Any]:
    return [a for a in call.arrays.values() if a is not None]


def _spread(call: Call, wanted: Any) -> tuple[Any, ...]:
    """Outputs in the spec's order, None where unwanted, from the wanted ones."""
    named = dict(zip(call.wants, wanted, strict=True))
    return tuple(named.get(o.name) for o in call.spec.outputs)


def _apply(impl: Implementation, static: StaticCall, target: Target, interpret: bool, *arrays: Any) -> tuple[Any, ...]:
    call = static.bind(arrays)
    call.target, call.interpret, call.concrete = target, interpret, False
    return tuple(o for o in impl.run(call, impl.configured(call.spec, dict(static.tiling))) if o is not None)


def scoped(op: str) -> AbstractContextManager[Any]:
    """What is traced inside has the op's name in its own, which JAX's profiles show."""
    return jax.named_scope(f"{NAMED}{op}")


NAMED = "portakern."


@functools.cache
def _program(op: str, interpret: bool) -> Callable[..., tuple[Any, ...]]:
    """Eager calls of an op as programs of its name. An interpreted kernel is compiled for the host, to run a few times:
    unoptimised it starts sooner, and without fused multiply-adds its bits do not depend on what else is compiled with
    it."""

    def apply(
        impl: Implementation, static: StaticCall, target: Target, interpret: bool, *arrays: Any
    ) -> tuple[Any, ...]:
        with scoped(op):
            return _apply(impl, static, target, interpret, *arrays)

    apply.__name__ = apply.__qualname__ = f"portakern_{op}"
    options = {"xla_backend_optimization_level": 0} if interpret else None
    return jax.jit(apply, static_argnums=(0, 1, 2, 3), compiler_options=options)


def run(impl: Implementation, call: Call, config: Config) -> tuple[Any, ...]:
    """Run an implementation on concrete JAX arrays, compiled once per shape by ``jax.jit``.

    While JAX traces, a call on constants is part of what it traces."""
    if trace_ctx.trace is not eval_trace:
        return trace(call, Choice(impl.backend, impl.family.name, config))
    program, static = _program(call.spec.name, call.interpret), static_call(call, Choice(impl.backend, tiling=config))
    with _compiled():
        return _spread(call, program(impl, static, call.target, call.interpret, *_given(call)))


@contextmanager
def _compiled() -> Iterator[None]:
    """While inside, ops with values are compiled as ever: ``jax.disable_jit`` and ``jax.ensure_compile_time_eval`` are
    for what users write around them, and would evaluate kernels line by line."""
    with jax.disable_jit(False), eager_constant_folding(False):
        yield


def outside() -> AbstractContextManager[Any]:
    """While inside, what is called with values gives values: it is no part of what JAX may be tracing."""
    return nullcontext() if trace_ctx.trace is eval_trace else eval_context()


def trace(call: Call, choice: Choice) -> tuple[Any, ...]:
    """Stage a call on tracers; the outputs are tracers."""
    for name, array in call.arrays.items():
        if isinstance(array, jax.ShapeDtypeStruct):
            raise SpecError(
                f"{call.spec.name}: {name} is a jax.ShapeDtypeStruct, which has no values; pass the op and it to "
                "jax.eval_shape, or pass an array"
            )
    backend = choice.backend
    if backend is not None and not _stageable(backend, choice.variant):
        raise _cannot_stage(call, backend)
    if call.degenerate:
        gone = degenerate_values(call)
        return tuple(
            jnp.full(s, gone.get(n, 0.0), output_dtype(d)) if n in call.wants else None
            for n, (s, d) in call.outputs.items()
        )
    static, arrays = static_call(call, choice), varying_alike(_given(call))
    return _spread(call, _step(static, arrays) if call.spec.vjp else _primitive.bind(*arrays, static=static))


def _stageable(backend: Backend, variant: str | None) -> bool:
    """Whether JAX's programs can hold calls of a backend on some platform."""
    families = (f for f in backend.families if variant in (None, f.name))
    return backend.framework == "jax" or backend.oracle or any(f.stages for f in families)


def _cannot_stage(call: Call, backend: Backend, why: str = "") -> UnsupportedError:
    others = [b.name for b in registry.backends().values() if b.framework == "jax" or b.oracle]
    return UnsupportedError(
        f"{call.spec.name}: backend {backend.name!r} runs {backend.framework} kernels, which JAX cannot stage into "
        f"a traced function{why}; call it outside jit, vmap and grad, or use one of: {', '.join(others)}"
    )


def _step(static: StaticCall, arrays: list[Any]) -> Any:
    """The outputs of an op that has a gradient, as a step of what JAX traces."""
    try:
        return _differentiable(static, *arrays)
    except TypeError as e:
        if "forward-mode" not in str(e):  # what JAX says of every function that has its own reverse mode
            raise
        raise _first_order(static.spec) from None
    except NotImplementedError as e:
        if "symbolic_zeros support with shard_map" not in str(e):
            raise
        # shard_map without jit runs step by step, and knows no such step; nothing differentiates this one, or the
        # primitive says so
        return _primitive.bind(*arrays, static=static)


def varying_alike(arrays: list[Any]) -> list[Any]:
    """Inside ``jax.shard_map``: every array varies along the mesh axes that any of them varies along. An array that is
    replicated there, such as a weight beside sharded rows, gets the sum of its shards' gradients by the transposition
    of this very step."""
    varies = [axes_of(jax.typeof(a)) for a in arrays]
    everywhere = frozenset().union(*varies)
    return [
        a if mine == everywhere else to_varying(a, tuple(sorted(everywhere - mine)))
        for a, mine in zip(arrays, varies, strict=True)
    ]


def axes_of(aval: Any) -> frozenset[str]:
    """The mesh axes that a value varies along inside ``jax.shard_map``."""
    found: frozenset[str] = (
        aval.manual_axis_type.varying if hasattr(aval, "manual_axis_type") else getattr(aval, "vma", frozenset())
    )
    return found


def to_varying(array: Any, axes: tuple[str, ...]) -> Any:
    return jax.lax.pcast(array, axes, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(array, axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(static: StaticCall, *arrays: Any) -> tuple[Any, ...]:
    return tuple(_primitive.bind(*arrays, static=static))


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Residuals:
    """What the backward pass knows beside the saved arrays: their names, the gradients that are wanted, and how the
    arrays lie on Explicit axes of a mesh, as their gradients shall (None: there are none)."""

    names: tuple[str, ...]
    wants: tuple[str, ...]
    lies: tuple[NamedSharding | None, ...]


def _forward(static: StaticCall, *primals: Any) -> tuple[tuple[Any, ...], tuple[_Residuals, tuple[Any, ...]]]:
    """The primals arrive with a mark that says whether they are differentiated."""
    wired = wiring(static.spec)
    wants = wired.wants(
        tuple(
            n
            for n, p in zip(static.given, primals, strict=True)
            if p.perturbed and jnp.issubdtype(p.value.dtype, jnp.floating)
        )
    )
    values = dict(zip(static.given, (p.value for p in primals), strict=True))
    kept = wired.saves(dict(static.options))
    training = tuple(o.name for o in static.spec.outputs if o.name in (*static.wants, *kept))
    outputs = dict(
        zip(training, _primitive.bind(*values.values(), static=replace(static, wants=training)), strict=True)
    )
    saved = {n: values[n] for n in wired.inputs if n in values} | {n: outputs[n] for n in kept}
    lies = tuple(explicit_sharding(jax.typeof(p.value)) for p in primals)
    return tuple(outputs[n] for n in static.wants), (_Residuals(tuple(saved), wants, lies), tuple(saved.values()))


def _is_zero(cotangent: Any) -> bool:
    """Whether a cotangent is known to be 0, as JAX says it, or as whoever calls a vjp function says it of integers."""
    return isinstance(cotangent, SymbolicZero) or cotangent.dtype == jax.dtypes.float0


def _backward(
    static: StaticCall, residuals: tuple[_Residuals, tuple[Any, ...]], cotangents: tuple[Any, ...]
) -> tuple[Any, ...]:
    saved, arrays = residuals
    wired = wiring(static.spec)
    given = dict(zip(saved.names, arrays, strict=True))
    some = {n: d for n, d in zip(static.wants, cotangents, strict=True) if not _is_zero(d)}
    if not some:
        return (None,) * len(static.given)
    required = {a.name for a in wired.vjp.arrays if not a.optional}
    for name, cotangent in zip(static.wants, cotangents, strict=True):
        if name in some and name not in wired.cotangents:
            raise UnsupportedError(
                f"{wired.vjp.name} takes no cotangent of {name}; cut the graph behind it with jax.lax.stop_gradient"
            )
        argument = wired.cotangents.get(name)
        if argument is not None and (name in some or argument in required):
            given[argument] = some[name] if name in some else jnp.zeros(cotangent.shape, cotangent.dtype)
    options = {n: v for n, v in static.options if n in wired.options}
    gradients: dict[str, Any] = {}
    if saved.wants:
        call = bind(wired.vjp, **given, **options, wants=saved.wants)
        outputs, _ = call_through(call, gradient_choice(static.backend, wired.vjp, static.choice))
        gradients = dict(zip((o.name for o in wired.vjp.outputs), outputs, strict=True))
    found = [gradients.get(wired.gradients.get(n, ""), wired.passed(n, given)) for n in static.given]
    return tuple(
        d if d is None or lie is None else jax.sharding.reshard(d, lie)
        for d, lie in zip(found, saved.lies, strict=True)
    )


_differentiable.defvjp(_forward, _backward, symbolic_zeros=True)


def _lowered(target: Target, exported: bool, *arrays: Any, static: StaticCall) -> tuple[Any, ...]:
    """What the primitive does on a chip, written in JAX. ``exported``: in a program that another process may run."""
    function: Callable[..., Any] = functools.partial(_on_target, target, exported, static)
    for axes in static.vmaps:
        function = jax.vmap(function, in_axes=axes)
    with scoped(static.spec.name):
        out: tuple[Any, ...] = function(*arrays)
    return out


@functools.cache
def _named() -> Any:
    """The architecture that :func:`lowered_for` names; JAX keeps what it traced and lowered under it apart. Made when
    somebody names one: under a new context JAX traces everything again, what it is tracing now too."""
    return jax.make_user_context(None)


@contextmanager
def lowered_for(arch: str) -> Iterator[None]:
    """A context in which JAX lowers for the chip ``arch``, present or not, when it lowers for that chip's platform.

    JAX's own arguments name only the platform (``lowering_platforms`` of ``lower``, ``platforms`` of
    ``jax.export.export``), not the chip.

    Args:
      arch: ``"sm_90"``, ``"gfx942"``, ``"v6e"`` and so on.

    Raises:
      SpecError: an unknown architecture.
    """
    with _named()(find(arch).name):
        yield


def _named_target() -> Target | None:
    named = _named().value if _named.cache_info().currsize else None
    return None if named is None else find(named).target


def lowering_target() -> Target | None:
    """The chip that :func:`lowered_for` names, or that of the devices that JAX takes by default, where they are of one
    kind."""
    found = {_named_target() or frameworks()["jax"].target(d) for d in jax.local_devices()}
    return found.pop() if len(found) == 1 else None


def _target(platform: str, context: Any = None) -> Target:
    """The chip that a platform means: that of the devices for which the computation is lowered, where its ``context``
    knows them, else that of this process's own, where they are of one kind. What is lowered for elsewhere is for the
    one that :func:`lowered_for` names, or for any.
    """
    named = _named_target()
    if named is not None and named.platform == platform:
        return named
    framework = frameworks()["jax"]
    mesh = getattr(context, "mesh", None)  # of shard_map; an abstract mesh has no devices
    here = () if mesh is None or isinstance(mesh, AbstractMesh) else tuple(mesh.devices.flat)
    assigned = getattr(context, "device_assignment", None) or here
    found: set[Target] = set()
    for devices in (assigned, jax.local_devices()):  # of another platform where a program is lowered for elsewhere
        found = found or {t for d in devices if (t := framework.target(d)).platform == platform}
    return found.pop() if len(found) == 1 else Target(platform)


def _on_target(target: Target, exported: bool, static: StaticCall, *arrays: Any) -> tuple[Any, ...]:
    call = static.bind(arrays)
    backend = static.backend or choose(call.spec, frameworks()["jax"], target)
    candidates = find_routes(backend, call, target, static.variant)
    route = candidates[0]
    call.target, call.interpret, call.concrete = route.target, route.interpret, False
    if route.framework is not frameworks()["jax"] and not backend.oracle:
        raise _cannot_stage(call, backend, f" for {target}")
    announce(route)
    if backend.oracle and exported:
        raise UnsupportedError(
            f"{call.spec.name}: backend {backend.name!r} computes in this process, where a program calls back, and "
            "jax.export keeps no calls back; name a backend whose kernels are part of the program: "
            f"{', '.join(b.name for b in registry.backends().values() if b.framework == 'jax' and not b.peer)}"
        )
    if backend.oracle:
        return _callback(static, call, arrays)
    route, config = pick(candidates, call, dict(static.tiling))
    outputs = tuple(o for o in route.impl.run(call, config) if o is not None)
    if OBSERVERS:
        jax.debug.callback(functools.partial(_tell, static, route, config), arrays, outputs)
    return outputs


def _tell(static: StaticCall, route: Route, config: Config, arrays: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
    call = static.bind(tuple(map(np.asarray, arrays))).replace(target=route.target, interpret=route.interpret)
    impl, told = route.impl, _spread(call, tuple(map(np.asarray, outputs)))
    tell(Served(call, impl.backend.name, impl.family.name, route.interpret, dict(config), told))


def _callback(static: StaticCall, call: Call, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    shapes = tuple(jax.ShapeDtypeStruct(s, output_dtype(d)) for n, (s, d) in call.outputs.items() if n in call.wants)

    def on_host(*values: Any) -> tuple[Any, ...]:
        inner = static.bind(tuple(host_framework().to_numpy(v) for v in values))
        ours: Any = frameworks()["jax"]
        outputs = [o for o in rounded_oracle(inner) if o is not None]
        for o in outputs:
            ours.check_fits(o)
        return tuple(o.astype(s.dtype, copy=False) for o, s in zip(outputs, shapes, strict=True))

    out: tuple[Any, ...] = jax.pure_callback(on_host, shapes, *arrays, vmap_method="sequential")
    return out


_primitive = Primitive("portakern_op")
_primitive.multiple_results = True


@_primitive.def_impl
def _evaluate(*arrays: Any, static: StaticCall) -> Any:
    with _compiled():  # without jit this very primitive would be evaluated again
        return _evaluate_jitted(static, *arrays)


@functools.partial(jax.jit, static_argnums=0)
def _evaluate_jitted(static: StaticCall, *arrays: Any) -> Any:
    return _primitive.bind(*arrays, static=static)


@_primitive.def_abstract_eval
def _abstract(*avals: Any, static: StaticCall) -> list[Any]:
    lead, inner = static.unbatched(avals)
    first = avals[0]  # it varies along the same mesh axes as all of them: see varying_alike
    forms = [(lead + s, d) for n, (s, d) in inner.outputs.items() if n in inner.wants]
    mesh = explicit_mesh(avals)
    if mesh is not None:
        shardings = [NamedSharding(mesh, s) for s in explicit_placement(static, avals, mesh).out_specs]
    else:
        shardings = [first.sharding.update(spec=PartitionSpec(*(None,) * len(s))) for s, _ in forms]
    return [
        first.update(shape=s, dtype=output_dtype(d), weak_type=False, sharding=sharding)
        for (s, d), sharding in zip(forms, shardings, strict=True)
    ]


def _batch(arrays: tuple[Any, ...], axes: tuple[Any, ...], *, static: StaticCall) -> tuple[Any, list[int]]:
    mapped = tuple(None if ax is None else 0 for ax in axes)
    moved = [a if ax is None else jnp.moveaxis(a, ax, 0) for a, ax in zip(arrays, axes, strict=True)]
    own = static.backend is not None and static.backend.framework != "jax" and not static.vmaps
    if own and explicit_mesh([jax.typeof(a) for a in moved]) is None:  # parts join theirs
        joined = _joined(static, moved, mapped)
        if joined is not None:
            return joined, [0] * len(joined)
    nested = replace(static, vmaps=(*static.vmaps, mapped))
    lead, inner = nested.unbatched([jax.typeof(a) for a in moved])
    if 0 in lead:  # of no sample there is nothing to compute, and nothing that a kernel can be mapped over
        shapes = [lead + s for n, (s, _) in inner.outputs.items() if n in inner.wants]
        outputs = [jnp.zeros(s, output_dtype(inner.outputs[n][1])) for n, s in zip(inner.wants, shapes, strict=True)]
    else:
        outputs = _primitive.bind(*moved, static=nested)
    return outputs, [0] * len(outputs)


def _joined(static: StaticCall, arrays: list[Any], mapped: Axes) -> list[Any] | None:
    """The outputs of all samples by one call whose batch they join, None where they cannot. Kernels of another library
    know nothing of ``jax.vmap``: it would call them sample by sample."""
    n = next(a.shape[0] for a, ax in zip(arrays, mapped, strict=True) if ax is not None)
    one = static.bind(
        [jax.ShapeDtypeStruct(a.shape if ax is None else a.shape[1:], a.dtype)
         for a, ax in zip(arrays, mapped, strict=True)]
    )  # fmt: skip
    own = {name for name, ax in zip(static.given, mapped, strict=True) if ax is not None}
    folding = fold(one, own, static.wants, n)
    if folding is None:
        return None
    folded = [
        a if into is None else jnp.reshape(jnp.broadcast_to(a if name in own else a[None], into.wide), into.shape)
        for name, a, into in zip(static.given, arrays, (folding.arrays[n] for n in static.given), strict=True)
    ]
    outputs = _primitive.bind(*folded, static=replace(static, options=tuple(folding.options.items())))
    shapes = (shape for name, (shape, _) in one.outputs.items() if name in static.wants)
    return [jnp.reshape(o, (n, *shape)) for o, shape in zip(outputs, shapes, strict=True)]


def _refuse_gradient(primals: Any, tangents: Any, *, static: StaticCall) -> Any:
    wiring(static.spec)  # raises where there is none
    raise _first_order(static.spec)


def _first_order(spec: Spec[Any]) -> UnsupportedError:
    return UnsupportedError(
        f"{spec.name}: gradients are of first order and in reverse mode; a gradient of a gradient, jax.jvp, "
        "jax.jacfwd, jax.linearize and jax.hessian are not there: use jax.grad, jax.vjp or jax.jacrev once"
    )


def _bind(static: StaticCall, arrays: Sequence[Any]) -> Sequence[Any]:
    found: Sequence[Any] = _primitive.bind(*arrays, static=static)
    return found


def _written(platform: str, ctx: mlir.LoweringRuleContext, static: StaticCall) -> Callable[..., Any]:
    """What the primitive is on a platform, in JAX's words: the call on one device, or on those that hold its arrays."""
    axes = ctx.module_context.axis_context
    if explicit_mesh(ctx.avals_in) is not None:
        return functools.partial(on_parts, static, ctx.avals_in, axes, _bind)
    exported = bool(getattr(ctx.module_context.lowering_parameters, "for_export", False))
    target = _target(platform, axes)
    alone = functools.partial(_lowered, target, exported, static=static)
    if devices_of(axes) == 1:
        return alone
    oracle = (static.backend or choose(static.spec, frameworks()["jax"], target)).oracle
    why = _why_not_partitioned(platform, axes, exported, oracle)
    if why is not None:
        told = f"is part of a computation that jax.jit partitions over {devices_of(axes)} devices, {why}"
        raise refused(static.unbatched(ctx.avals_in)[1], told, backend=static.backend.name if static.backend else None)
    if oracle:
        say(f"portakern: {static.spec.name}: the float64 oracle gathers arrays that jax.jit partitions: exact, slow")
        return functools.partial(gathered, axes, alone)
    return partitioned(static, ctx.avals_in, axes, _bind)


def _why_not_partitioned(platform: str, axes: Any, exported: bool, oracle: bool) -> str | None:
    """Why XLA cannot be asked for an op's parts, in words; None where it can. While it partitions no part may call the
    host: the process would end."""
    if platform == "tpu":
        return "for which jax has no way on TPUs"
    if exported:
        return "which jax.export does not keep: each of them would run it whole"
    if OBSERVERS:
        return "which observe() cannot look into"
    if oracle and manual_axes(axes):
        return (
            "beside the axes of a jax.shard_map that does not name all, where the oracle cannot be called on the host"
        )
    if manual_axes(axes) and len(auto_axes(axes)) > 1:
        named = " and ".join(map(repr, auto_axes(axes)))
        return (
            f"along {named}, beside the axes of a jax.shard_map, where XLA does not tell them apart: name all but one"
        )
    if lowering_mesh(axes) is None:
        return "whose mesh is not known here: place the arrays on one that jax.make_mesh makes, or name all of its axes"
    return None


def _interpreter_refused(static: StaticCall) -> UnsupportedError:
    """An interpreter that keeps a chip's memory on the host calls there step by step. jax orders such calls among those
    of a program that it sees, and what an op does is not seen before it is lowered."""
    return UnsupportedError(
        f"{static.spec.name}: the interpreter of {static.backend.name if static.backend else 'this backend'} variant "
        f"{static.variant!r} calls the host in an order that a traced function does not keep; call the op outside jit, "
        "grad and vmap, or on the hardware"
    )


def _lowering(platform: str) -> Callable[..., Any]:
    def rule(ctx: mlir.LoweringRuleContext, *operands: Any, static: StaticCall) -> Any:
        # Below this point every device computes on what it holds: which mesh axes a value varies along is settled, and
        # kernels need not carry it.
        with _check_vma(False):
            inner = mlir.lower_fun(_written(platform, ctx, static), multiple_results=True)
            forms = [jax.core.ShapedArray(a.shape, a.dtype, sharding=a.sharding) for a in ctx.avals_in]
            try:
                return inner(ctx.replace(avals_in=forms), *operands)
            except KeyError as e:
                if not (e.args and isinstance(e.args[0], Effect)):
                    raise
                raise _interpreter_refused(static) from None

    return rule


dispatch.prim_requires_devices_during_lowering.add(_primitive)  # what XLA partitions is told of its mesh
batching.primitive_batchers[_primitive] = _batch
ad.primitive_jvps[_primitive] = _refuse_gradient
for _platform in ("cpu", "tpu", "cuda", "rocm"):
    mlir.register_lowering(_primitive, _lowering(_platform), platform=_platform)
