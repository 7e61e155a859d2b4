"""The ops as ``torch.ops.portakern.<op>``: what ``torch.compile``, ``torch.export`` and every torch dispatch mode
record of an op call.

Schema, fake kernel, autograd, vmap and autocast rules derive from the spec. ``pk.op(...)`` objects call these by
themselves while torch is tracing; nobody else needs to. The schema is that of the spec, with two differences. Options
are typed where a schema has the type; a tuple of integers and None is a list of pairs, ``(3, None)`` being ``[1, 3, 0,
0]``: given or not, and its value. And four strings follow: ``wants`` (names of the outputs that are needed,
comma-separated; empty: as the options say), ``backend`` (a name; empty: chosen from the arrays), ``variant`` (of that
backend's; empty: the first that takes the call) and ``tiling`` (``block_m=64,block_n=128``). Every output is returned;
those not wanted are empty tensors. Nothing is written in place, as functionalisation wants it, and ``overwrite`` is
refused.

>>> torch.ops.portakern.attention(q, k, v, is_causal=True, window=[1, 128, 0, 0], wants="o,lse", backend="triton",
tiling="block_q=64")
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from portakern.core import codegen, registry
from portakern.core.backend import Backend
from portakern.core.binder import unchecked
from portakern.core.call import Call
from portakern.core.dispatch import Choice
from portakern.core.gradients import wiring
from portakern.core.observe import OBSERVERS
from portakern.core.plan import decide
from portakern.core.refusals import check_option
from portakern.core.signatures import Signature, reader
from portakern.errors import SpecError, UnsupportedError
from portakern.frameworks.torch import autograd
from portakern.spec import Spec
from portakern.spec.dtypes import DTYPES
from portakern.spec.options import Option

__all__ = ["ON_SHARDS", "ROUTING", "bound", "calling", "define", "encoded", "read_options", "staged", "tell_counters"]

LIBRARY = torch.library.Library("portakern", "FRAGMENT")
ROUTING = ("wants", "backend", "variant", "tiling")
AUTOCAST = ("AutocastCPU", "AutocastCUDA")
SCHEMA = {
    "bool": "bool",
    "int": "SymInt",
    "float": "float",
    "choice": "str",
    "dtype": "ScalarType",
    "tuple": "SymInt[]",
}

ON_SHARDS: dict[Spec[Any], Callable[..., Any]] = {}
"""Op -> what runs its calls of DTensors, below autograd: of the call, its arguments and its keyword arguments. Of an op
that is not here nobody has told PyTorch on which placements it runs."""

_named: dict[str, Spec[Any]] = {}
_backends: dict[str, Backend] = {}


def staged(spec: Spec[Any], choice: Choice) -> Callable[..., Any]:
    """A function with the spec's signature that calls the custom op: straight-line code that torch.compile traces, and
    the same for Ops that agree in everything."""
    return _write(spec, tuple(_routing(choice).items()))


@functools.cache
def _write(spec: Spec[Any], routing: tuple[tuple[str, str], ...]) -> Callable[..., Any]:
    env: dict[str, Any] = {"_custom_op": define(spec), "_result": spec.result, "_pairs": _pairs, "_dtype": _torch_dtype}
    env |= {f"_default_{o.name}": o.default for o in spec.options}
    wrap = {"tuple": "_pairs({0})", "dtype": "_dtype({0})"}
    keywords = [f"{o.name}=_default_{o.name}" for o in spec.options] + ["wants=None"] * spec.is_vjp
    params = [a.name + "=None" * a.optional for a in spec.arrays] + ["*"] * bool(keywords) + keywords
    options = [f"{o.name}={wrap.get(o.kind, '{0}').format(o.name)}" for o in spec.options]
    wants = "','.join(wants or ())" if spec.is_vjp else "''"
    how = "".join(f", {name}={value!r}" for name, value in routing)
    call = f"_custom_op({', '.join([a.name for a in spec.arrays] + options)}, wants={wants}{how})"
    lines = [f"def {spec.name}({', '.join(params)}):"]
    env |= {"_Tensor": torch.Tensor, "_SpecError": SpecError, "_isinstance": isinstance, "_type": type}
    for a in spec.arrays:  # here code that is traced can still catch it; of a custom op's own errors torch.compile dies
        dtypes, expected = a.dtypes, f"one of {', '.join(a.dtypes)}"
        if a.statistic:
            dtypes, expected = ("float32", "float64"), f"float32, or float64 where {spec.lead.name} is float64"
        env[f"_dtypes_{a.name}"] = tuple(getattr(torch, name) for name in dtypes)
        lines.append(f"    if _isinstance({a.name}, _Tensor) and {a.name}.dtype not in _dtypes_{a.name}:")
        said = f"{spec.name}: {a.name} is {{{a.name}.dtype}}; expected {expected}: cast it"
        lines.append(f"        raise _SpecError(f'{said}')")
    for o in spec.options:
        if o.kind in ("bool", "float"):
            env |= {"_PLAIN": _PLAIN, f"_number_{o.name}": _number(spec, o)}
            lines.append(f"    if _type({o.name}) not in _PLAIN: {o.name} = _number_{o.name}({o.name})")
    if len(spec.outputs) == 1:
        lines.append(f"    return _result({call})" if spec.is_vjp else f"    return {call}")
    else:
        lines.append(f"    {', '.join(f'_output_{o.name}' for o in spec.outputs)} = {call}")
        lines += _results(spec)
    written: Callable[..., Any] = codegen.written(f"staged {spec.name}", "\n".join(lines), env, spec.name)
    return written


_PLAIN = (float, int, bool, type(None), torch.SymFloat, torch.SymInt, torch.SymBool)


def _number(spec: Spec[Any], option: Option) -> Callable[[Any], Any]:
    """The value of an option that is no number of Python's: one that the option takes, or the error that says so.

    torch.compile takes NumPy's numbers for tensors, whose values no graph knows."""

    @torch.compiler.assume_constant_result
    def number(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            raise SpecError(
                f"{spec.name}: {option.name} is a tensor in a graph, or a NumPy number, which torch.compile makes one; "
                f"expected {option.expected}: pass a number of Python's, made before the compiled function: "
                f"{option.name} = {option.kind}({option.name})"
            )
        return check_option(spec, option, value)

    return number


def _results(spec: Spec[Any]) -> list[str]:
    """Return what :class:`portakern.api.Op` would: the only output that is wanted by itself, else all, None for an
    unwanted one."""
    optional = {a.name for a in spec.arrays if a.optional}
    conditions = {o.name: o.wanted_by for o in spec.shown}
    if spec.is_vjp:
        given = {o.name: f"{o.gradient_of} is not None" if o.gradient_of in optional else "True" for o in spec.outputs}
        conditions = {
            name: f"({condition} if wants is None else {name!r} in wants)" for name, condition in given.items()
        }
    every = ", ".join(
        f"_output_{name}" if condition is None else f"_output_{name} if {condition} else None"
        for name, condition in conditions.items()
    )
    always = [name for name, condition in conditions.items() if condition is None]
    lines = []
    if len(always) == 1 and not spec.is_vjp:
        lines.append(f"    if not ({' or '.join(c for c in conditions.values() if c)}): return _output_{always[0]}")
    return [*lines, f"    return _result({every})"]


def _pairs(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, (tuple, list)):
        return value  # which the schema refuses
    flat = []
    for element in value:
        if element is None:
            flat += [0, 0]
        else:
            flat += [1, element]
    return flat


def _unpaired(value: Sequence[Any] | None) -> tuple[Any, ...] | None:
    if value is None:
        return None
    return tuple(int(v) if given else None for given, v in zip(value[::2], value[1::2], strict=True))


_DTYPES = {name: getattr(torch, name) for name in DTYPES}


def _torch_dtype(value: Any) -> Any:
    return _DTYPES.get(value, value) if isinstance(value, str) else value


def _name_of(backend: Backend | None) -> str:
    """A string by which a graph names a backend, registered or not."""
    if backend is None:
        return ""
    name, n = backend.name, 1
    while _backends.setdefault(name, backend) is not backend:
        n += 1
        name = f"{backend.name}#{n}"
    return name


@functools.cache
def define(spec: Spec[Any]) -> Any:
    """Register an op with torch, once: the overload ``torch.ops.portakern.<op>.default``."""
    name, n = spec.name, 1
    while _named.setdefault(name, spec) is not spec:  # another spec of this name: somebody's own
        n += 1
        name = f"{spec.name}_{n}"
    arrays = [f"Tensor? {a.name}=None" if a.optional else f"Tensor {a.name}" for a in spec.arrays]
    options = [f"{SCHEMA[o.kind]}{'?' * o.optional} {o.name}={_literal(o)}" for o in spec.options]
    returns = ", ".join(f"Tensor {o.name}" for o in spec.outputs)
    routing = [f'str {r}=""' for r in ROUTING]
    LIBRARY.define(
        f"{name}({', '.join([*arrays, '*', *options, *routing])}) -> ({returns})", tags=(torch.Tag.pt2_compliant_tag,)
    )
    overload = getattr(torch.ops.portakern, name).default
    rules = _Rules(spec, overload)
    LIBRARY.impl(name, rules.run, "CompositeExplicitAutograd")
    LIBRARY.impl(name, rules.differentiate, "Autograd", with_keyset=True)
    torch.library.register_fake(f"portakern::{name}", rules.fake, lib=LIBRARY)
    torch.library.register_vmap(f"portakern::{name}", rules.vmap, lib=LIBRARY)
    if spec.autocast:
        for key in AUTOCAST:
            LIBRARY.impl(name, functools.partial(rules.autocast, key), key)
    return overload


def tell_counters(spec: Spec[Any]) -> None:
    """Tell ``torch.utils.flop_counter`` what a call of an op costs, and of its gradients, where that module is in use.

    A ``FlopCounterMode`` copies the registry when it is made, so that one which is active already is told by itself."""
    counting = sys.modules.get("torch.utils.flop_counter")
    if counting is None:
        return
    active = (getattr(mode, "counter", None) for mode in _get_current_dispatch_mode_stack())
    kept = [getattr(counter, "flop_registry", None) for counter in active]
    for one in (spec, wiring(spec).vjp) if spec.vjp else (spec,):
        for known in (counting.flop_registry, *kept):
            if known is not None:
                known.setdefault(define(one)._overloadpacket, _flops(one))


def bound(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Call, Choice]:
    """The call that a call of a custom op is, and who must serve it."""
    rules = _Rules(_named[overload._schema.name.partition("::")[2]], overload)
    return rules.bind(args, kwargs), rules.choice(kwargs)


@functools.cache
def _flops(spec: Spec[Any]) -> Callable[..., int]:
    """The floating-point operations of a call of the custom op, as the spec counts them."""
    rules = _Rules(spec, define(spec))

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return int(spec.flops(rules.bind(args, kwargs)))

    return count


def _literal(o: Option) -> str:
    if o.kind == "tuple":
        return str(_pairs(o.default))
    return f'"{o.default}"' if o.kind == "choice" and o.default is not None else str(o.default)


@functools.cache
def _choice(spec: Spec[Any], backend: str, variant: str, tiling: str) -> Choice:
    extents = dict(part.split("=") for part in tiling.split(",")) if tiling else {}
    named = _backends.get(backend) or (registry.backend(backend) if backend else None)
    return Choice.from_names(spec, named, variant or None, {name: int(value) for name, value in extents.items()})


def read_options(spec: Spec[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(options, outputs wanted or none) of a call of a custom op."""
    options = {}
    for o in spec.options:
        if o.name in kwargs:
            options[o.name] = _unpaired(kwargs[o.name]) if o.kind == "tuple" else kwargs[o.name]
    wants = tuple(filter(None, kwargs.get("wants", "").split(",")))
    names = [o.name for o in spec.outputs]
    for name in wants:
        if name not in names:
            raise SpecError(f"{spec.name}: wants names {name!r}; expected names among {', '.join(names)}")
    return options, wants


class _Rules:
    """What torch does with one op. ``args`` are the arrays in the spec's order; torch leaves out what equals its
    default."""

    def __init__(self, spec: Spec[Any], overload: Any) -> None:
        self.spec, self.overload = spec, overload
        self.names = tuple(o.name for o in spec.outputs)
        self.signature = reader(spec)

    def read(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
        """(arrays that are given, options, outputs wanted or none) of a call."""
        arrays = {a.name: x for a, x in zip(self.spec.arrays, args, strict=False) if x is not None}
        return arrays, *read_options(self.spec, kwargs)

    def choice(self, kwargs: Mapping[str, Any]) -> Choice:
        """Who must serve a call, as its strings say."""
        return _choice(self.spec, *(kwargs.get(r, "") for r in ROUTING[1:]))

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        arrays, options, wants = self.read(args, kwargs)
        if self.spec.is_vjp and wants:
            options["wants"] = wants
        call = unchecked(self.spec, **arrays, **options)
        if wants:
            call.wants = tuple(n for n in self.names if n in wants)
        return call

    def pack(self, outputs: Sequence[Any], like: torch.Tensor) -> Any:
        """The outputs as the schema has them."""
        packed = tuple(like.new_empty(0) if o is None else o for o in outputs)
        return packed if len(packed) > 1 else packed[0]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        signature, arrays = self.signature_of(args, kwargs)
        choice = self.choice(kwargs)
        known = None if signature is None or OBSERVERS else choice.plans.get(signature)
        if known is not None:
            return self.pack(known.serve(arrays), args[0])
        call = self.bind(args, kwargs)
        call.framework.check(call)
        plan = decide(call, choice)
        assert plan is not None
        outputs = plan.begin(call)
        if signature is not None and plan.lasting:
            choice.plans.keep(signature, plan)
        return self.pack(outputs, args[0])

    def signature_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Signature | None, dict[str, Any]]:
        """The signature of a call, of which ``wants`` are a part here, and its arrays; None for one that is bound each
        time."""
        try:
            arrays, options, wants = self.read(args, kwargs)
            said = {n: str(v) if isinstance(v, torch.dtype) else v for n, v in options.items()}
            found, named = self.signature(**arrays, **said, **({"wants": wants or None} if self.spec.is_vjp else {}))
        except (TypeError, AttributeError, RuntimeError):  # binding says in the op's words what is wrong
            return None, {}
        return found and (found, wants), named

    def fake(self, *args: Any, **kwargs: Any) -> Any:
        call = self.bind(args, kwargs)
        forms = ((name, shape, _DTYPES[dtype]) for name, (shape, dtype) in call.outputs.items())
        return self.pack(
            [torch.empty(s, dtype=d, device=call.device) if n in call.wants else None for n, s, d in forms], args[0]
        )

    def differentiate(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        below = keys & torch._C._after_autograd_keyset
        if torch.autograd.forward_ad._current_level >= 0 and any(
            torch.autograd.forward_ad.unpack_dual(a).tangent is not None for a in args if a is not None
        ):
            raise UnsupportedError(autograd.refuse_forward_mode(self.spec))

        def below_autograd(*args: Any, **kwargs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd(), _outer_levels():
                return self.overload.redispatch(below, *args, **kwargs)

        on_shards = ON_SHARDS.get(self.spec)
        redispatch = below_autograd if on_shards is None else functools.partial(on_shards, below_autograd)

        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
            return redispatch(*args, **kwargs)
        choice, call = self.choice(kwargs), self.bind(args, kwargs)
        named = {n: a for n, a in call.arrays.items() if a is not None}
        wired, backward, training = None, None, call
        if not self.spec.is_vjp:
            found = autograd.gradient_of(call, choice, [n for n, a in named.items() if a.requires_grad])
            wired, training = found.wiring, found.wiring.training(call)
            backward = calling(wired.vjp, found.choice)

        def forward(*tensors: Any) -> tuple[Any, ...]:
            given = dict(zip(named, tensors, strict=True))
            outputs = redispatch(
                *(given.get(a.name) for a in self.spec.arrays), **{**kwargs, "wants": ",".join(training.wants)}
            )
            every = dict(zip(self.names, outputs if len(self.names) > 1 else (outputs,), strict=True))
            return tuple(every[name] for name in training.wants)

        step = autograd.WatchedCall(
            self.spec, tuple(named), call.options, training.wants, wired, forward, backward, inside=True
        )
        outputs = dict(zip(training.wants, autograd.differentiable(step, tuple(named.values())), strict=True))
        step.forward = autograd.spent
        return self.pack([outputs[n] if n in call.wants else None for n in self.names], args[0])

    def autocast(self, key: str, *args: Any, **kwargs: Any) -> Any:
        arrays, _ = autograd.autocast(self.spec, args, {})
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))):
            return self.overload(*arrays, **kwargs)

    def vmap(self, info: Any, in_dims: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        arrays, options, wants = self.read(args, kwargs)
        dims = {a.name: d for a, d in zip(self.spec.arrays, in_dims, strict=False)}
        wants, outputs = autograd.over_samples(
            self.spec, arrays, dims, options, wants, info.batch_size, _calling(self.overload, kwargs)
        )
        named = dict(zip(wants, outputs, strict=True))
        packed = self.pack([named.get(n) for n in self.names], args[0])
        dims_out = tuple(0 if n in named else None for n in self.names)
        return packed, dims_out if len(self.names) > 1 else dims_out[0]


@contextmanager
def _outer_levels() -> Iterator[None]:
    """A Function turns gradients of both modes off; the outer levels of torch.func have theirs still to record."""
    if torch._C._are_functorch_transforms_active():
        with torch.enable_grad(), torch.autograd.forward_ad._set_fwd_grad_enabled(True):
            yield
    else:
        yield


def calling(spec: Spec[Any], choice: Choice) -> autograd.Run:
    """Calls of an op, through its custom op."""
    return _calling(define(spec), _routing(choice))


def _calling(overload: Any, kwargs: Mapping[str, Any]) -> autograd.Run:
    """Calls of ``overload`` with other arrays, options and wants, but the routing of ``kwargs``."""
    spec = _named[overload._schema.name.partition("::")[2]]
    routing = {r: kwargs[r] for r in ROUTING if r in kwargs}

    def run(arrays: dict[str, Any], options: Mapping[str, Any], wants: tuple[str, ...]) -> tuple[Any, ...]:
        encoded = {o.name: _encode(o, options[o.name]) for o in spec.options if o.name in options}
        outputs = overload(
            *(arrays.get(a.name) for a in spec.arrays), **encoded, **{**routing, "wants": ",".join(wants)}
        )
        named = dict(zip((o.name for o in spec.outputs), outputs if len(spec.outputs) > 1 else (outputs,), strict=True))
        return tuple(named[name] for name in wants)

    return run


def encoded(spec: Spec[Any], options: Mapping[str, Any], wants: Sequence[str], choice: Choice) -> dict[str, Any]:
    """The keyword arguments of a call of a custom op."""
    given = {o.name: _encode(o, options[o.name]) for o in spec.options if o.name in options}
    return {**given, **_routing(choice), "wants": ",".join(wants)}


def _encode(o: Option, value: Any) -> Any:
    return _pairs(value) if o.kind == "tuple" else _torch_dtype(value) if o.kind == "dtype" else value


def _routing(choice: Choice) -> dict[str, str]:
    """What a custom op takes to know who must serve it: the strings after ``wants``."""
    tiling = ",".join(f"{n}={v}" for n, v in sorted(choice.tiling.items()))
    return {"backend": _name_of(choice.backend), "variant": choice.variant or "", "tiling": tiling}
