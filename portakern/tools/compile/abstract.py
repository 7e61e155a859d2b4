"""Calls without arrays: the typical calls of ops for the compile matrix, and calls that users describe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from portakern.core import registry
from portakern.core.backend import Backend, Family, Implementation
from portakern.core.binder import unchecked
from portakern.core.call import Call, dropped_dims, shape_of
from portakern.core.config import Config
from portakern.core.framework import Framework, frameworks
from portakern.core.gradients import wiring
from portakern.core.targets import Hardware, Target
from portakern.core.tilings import resolve
from portakern.errors import SpecError
from portakern.spec import ArrayArg, Spec

__all__ = [
    "CallSignature",
    "abstract_call",
    "bind_signature",
    "cells",
    "compilers",
    "direction",
    "extents",
    "gradient_signature",
    "named_signature",
    "signature_of",
    "training_signature",
    "typical_signature",
]  # fmt: skip

CallSignature = dict[str, Any]
"""A call as plain data: ``arrays``: name -> [shape, dtype, strides or None]; ``options``; ``wants``: outputs, or None
for the default; ``over``: the arrays that results are written over, where there are any; ``past_alignment``: of those
that begin off a multiple of 16 bytes how many bytes after one."""


def typical(spec: Spec[Any]) -> Mapping[str, Any]:
    """What the spec, or for a gradient op its forward's, declares as a typical call."""
    source = spec if spec.typical or not spec.is_vjp else registry.forward_of(spec)
    if source is None or not source.typical:
        raise SpecError(
            f"{spec.name} declares no typical call; add typical={{dimension: extent, option: value, optional array: "
            f"True}} to its @spec(...)"
        )
    return source.typical


def typical_signature(spec: Spec[Any], dtype: str, others: Mapping[str, Any] = MappingProxyType({})) -> CallSignature:
    """The spec's typical call in one dtype; ``others``: dimensions, options and optional arrays that it has otherwise.

    Raises:
      SpecError: the op has no such dtype, dimension, option or array, or a dimension cannot have that extent.
    """
    whole = not spec.typical and not set(spec.dims) - set(others)  # nothing is missing that a typical call would say
    usual = {} if whole else {n: v for n, v in typical(spec).items() if n in _names(spec)}
    return named_signature(spec, dtype, {**usual, **others})


def named_signature(spec: Spec[Any], dtype: str, values: Mapping[str, Any]) -> CallSignature:
    """The call in one dtype that has these dimensions, options and optional arrays, and no others.

    Raises:
      SpecError: as :func:`typical_signature`.
    """
    known = _names(spec)
    for name in values:
        if name not in known:
            raise SpecError(f"{spec.name} has no {name!r}; expected one of {', '.join(known)}")
    if dtype not in spec.dtypes:
        raise SpecError(f"{spec.name}: dtype {dtype!r} is none of {', '.join(spec.dtypes)}")
    dims = extents(spec, {o.name: o.default for o in spec.extents} | dict(values))
    dims |= dropped_dims(spec, dims, values)
    options = {o.name: values[o.name] for o in spec.options if o.name in values}
    arrays = {
        a.name: [list(shape_of(a.dims, dims)), _dtype(a, dtype), None]
        for a in spec.arrays
        if not a.optional or values.get(a.name) or spec.reads_under(a.name, options, False)
    }
    return {"arrays": arrays, "options": options, "wants": None}


def _names(spec: Spec[Any]) -> list[str]:
    return [*spec.dims, *(o.name for o in spec.options if not o.extent), *(a.name for a in spec.arrays if a.optional)]


def extents(spec: Spec[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The extent of each dimension of an op, of a run of axes a tuple: one number is a run of one, nothing of none.

    Raises:
      SpecError: a dimension has no extent, or something that is none.
    """
    runs = {d.factors[0] for a in spec.arrays for d in a.dims if d.variadic}
    found: dict[str, Any] = {}
    for name in spec.dims:
        value = values.get(name, () if name in runs else None)
        if value is None:
            raise SpecError(f"{spec.name}: no extent for {name}; pass one, e.g. {name}=64")
        run = value if isinstance(value, (tuple, list)) and name in runs else (value,)
        if not all(type(extent) is int and extent > 0 for extent in run):
            of = "whole numbers of at least 1, as in 8x1024" if name in runs else "a whole number of at least 1"
            raise SpecError(f"{spec.name}: {name} is {_as_written(value)}; expected {of}")
        found[name] = tuple(run) if name in runs else value
    return found


def _as_written(value: Any) -> str:
    """An extent as a user writes it: 8x1024 for a tuple."""
    return "x".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _dtype(a: ArrayArg, dtype: str) -> str:
    if a.statistic:
        return "float64" if dtype == "float64" else "float32"
    return dtype if dtype in a.dtypes else a.dtypes[0]


def signature_of(call: Call) -> CallSignature:
    """The form of a bound call."""
    arrays = {
        n: [list(a.shape), call.dtype_of(n), call.framework.strides(a)] for n, a in call.arrays.items() if a is not None
    }
    options = {o.name: call.options[o.name] for o in call.spec.options}
    more: dict[str, Any] = {"over": list(call.over)} if call.over else {}
    past = {n: call.framework.past_alignment(a) for n, a in call.arrays.items() if a is not None}
    if any(past.values()):
        more["past_alignment"] = {n: after for n, after in past.items() if after}
    return {"arrays": arrays, "options": options, "wants": list(call.wants), **more}


def abstract_call(
    spec: Spec[Any], impl: Implementation, signature: CallSignature, hardware: Hardware, user: Mapping[str, int]
) -> tuple[Call, Config]:
    """The call on arrays without memory, and its tiling under the tiles that the user named.

    Raises:
      UnsupportedError: the implementation refuses the call.
    """
    call = bind_signature(spec, signature, frameworks()[impl.backend.framework], hardware.target)
    return call, resolve(impl, call, user).tiling


def bind_signature(
    spec: Spec[Any], signature: CallSignature, framework: Framework, target: Target, interpret: bool = False
) -> Call:
    """The call on a framework's arrays without memory, for a target."""
    framework.load()
    past = signature.get("past_alignment", {})
    arrays = {
        n: framework.abstract(tuple(shape), dtype, strides, **({"past_alignment": past[n]} if n in past else {}))
        for n, (shape, dtype, strides) in signature["arrays"].items()
    }
    options = {n: tuple(v) if isinstance(v, list) else v for n, v in signature["options"].items()}
    call = unchecked(spec, **arrays, **options)
    wants = call.wants if signature["wants"] is None else tuple(signature["wants"])
    return call.replace(
        target=target, interpret=interpret, concrete=False, wants=wants, over=tuple(signature.get("over", ()))
    )


def training_signature(spec: Spec[Any], signature: CallSignature) -> CallSignature | None:
    """The form of the same forward call as a gradient needs it, with the outputs that its op saves; None where those
    are what the call gives anyway, or there is no gradient."""
    if not spec.vjp:
        return None
    options = {o.name: o.default for o in spec.options} | signature["options"]
    shown = [o.name for o in spec.shown if not o.wanted_by or options[o.wanted_by]]
    saved = wiring(spec).saves(options)
    return (
        None
        if {*saved} <= {*shown}
        else signature | {"wants": [o.name for o in spec.outputs if o.name in (*shown, *saved)]}
    )


def gradient_signature(spec: Spec[Any], call: Call, differentiated: Sequence[str] = ()) -> CallSignature | None:
    """The form of the gradients' call of a forward call, with respect to the arrays named, by default to all that
    have one; None where there is no gradient. Residuals and cotangents lie as the op's outputs do."""
    wired = wiring(spec)
    given = [n for n, a in call.arrays.items() if a is not None]
    wants = wired.wants([n for n in differentiated or wired.gradients if n in given])
    if not wants:
        return None
    forward = signature_of(call)
    saved = {n: call.outputs[n] for n in wired.saves(call.options)}
    shown = {d: call.outputs[o] for o, d in wired.cotangents.items() if o in call.wants or _required(wired.vjp, d)}
    return {
        "arrays": {n: forward["arrays"][n] for n in wired.inputs if n in given}
        | {n: [list(shape), dtype, None] for n, (shape, dtype) in {**saved, **shown}.items()},
        "options": {n: forward["options"][n] for n in wired.options},
        "wants": list(wants),
        "past_alignment": {n: b for n, b in forward.get("past_alignment", {}).items() if n in wired.inputs},
    }


def _required(spec: Spec[Any], array: str) -> bool:
    return any(a.name == array and not a.optional for a in spec.arrays)


def direction(spec: Spec[Any], signature: CallSignature) -> str:
    """Which pass of a model a call belongs to: forward, backward, or training, forward with what gradients read."""
    hidden = {o.name for o in spec.outputs} - {o.name for o in spec.shown}
    return "backward" if spec.is_vjp else "training" if hidden & {*(signature["wants"] or ())} else "forward"


def compilers(
    spec_name: str, hardware: Hardware, backend: Backend | None = None, variant: str | None = None
) -> list[tuple[Backend, Family]]:
    """The variants, of every backend or of the one named, that compile an op for a target ahead of time."""
    among = [backend] if backend else [b for b in registry.backends().values() if not b.oracle]
    return [
        (b, family)
        for b in among
        for family in b.families
        if family.compiler
        and family.compiles_for(hardware.target)
        and b.module_of(spec_name, family) is not None
        and variant in (None, family.name)
    ]


def uncompiled(hardware: Iterable[Hardware], backend: Backend | None = None) -> list[str]:
    """In words, what must be installed before kernels for these targets can be compiled that cannot be now: of the
    backend that is named, else of each that is there."""
    among = [backend] if backend else [b for b in registry.backends().values() if not b.unavailable()]
    return list(
        dict.fromkeys(
            f"backend {b.name!r}: {why}" for h in hardware for b in among for why in b.missing_kernels(h.target)
        )
    )


def cells(
    names: list[str],
    hardware: list[Hardware],
    dtypes: Sequence[str] | None,
    backend: Backend | None,
    variant: str | None = None,
) -> Iterator[tuple[Spec[Any], Backend, Family, Hardware, str]]:
    """Every op, target and dtype with the variants that compile it, a target at a time; ``dtypes`` None: each op's
    usual ones."""
    for h in hardware:
        for name in names:
            for b, family in compilers(name, h, backend, variant):
                spec = registry.find_spec(name)
                named = spec.usual_dtypes if dtypes is None else [d for d in dtypes if d in spec.dtypes]
                yield from ((spec, b, family, h, dtype) for dtype in named)
