"""What a call of DTensors would move between devices, in words, and the call that each device then runs: what
``explain`` says of it. Nothing runs, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from portakern.core.binder import unchecked
from portakern.core.call import Call
from portakern.core.dispatch import Choice
from portakern.core.gradients import wiring
from portakern.errors import SpecError, UnsupportedError
from portakern.frameworks.torch.custom_ops import encoded, read_options
from portakern.frameworks.torch.sharded import schema_of, why_moved, with_float32_parts
from portakern.spec import Spec

__all__ = ["explained"]


class OpPlacements(NamedTuple):
    """Where PyTorch puts the arrays of a call before the op runs.

    Attributes:
      given, needed: array -> its placement now, and where the op needs it. outputs: output -> its placement.
      schema: the call as PyTorch has it. summed: the outputs whose parts are float32, and which are added and rounded.
    """

    given: Mapping[str, DTensorSpec]
    needed: Mapping[str, DTensorSpec]
    outputs: Mapping[str, DTensorSpec]
    schema: OpSchema
    summed: Collection[str]


def explained(call: Call, choice: Choice) -> tuple[list[str], Call]:
    """(what moves, what is pending and why, in lines; the call of one device's parts)."""
    arrays = {n: a for n, a in call.arrays.items() if a is not None}
    specs = {n: a._spec for n, a in arrays.items()}
    placed = _placed(call.spec, specs, call.options, call.wants, choice)
    lines = [f"  devices: {_mesh_in_words(_mesh(placed))}", *_in_words(call.spec, placed)]
    differentiated = [n for n, a in arrays.items() if a.requires_grad]
    if differentiated and torch.is_grad_enabled() and call.spec.vjp:
        lines += _gradients(call, placed, differentiated, choice)
    part = _of_one_device(call, arrays, placed)
    return [*lines, f"  each device runs: {part!r}"], part


def _placed(
    spec: Spec[Any],
    given: Mapping[str, DTensorSpec],
    options: Mapping[str, Any],
    wants: Sequence[str],
    choice: Choice,
) -> OpPlacements:
    """What PyTorch decides for a call of arrays of these placements."""
    places = [given.get(a.name) for a in spec.arrays]
    schema = schema_of(spec, places, encoded(spec, options, wants, choice))
    wide = with_float32_parts(spec, schema)
    schema = schema if wide is None else wide.schema
    found = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached(schema)
    needed = found.redistribute_schema.args_schema if found.redistribute_schema else schema.args_schema
    there = [a.name for a in spec.arrays if a.name in given]
    outputs = found.output_spec if isinstance(found.output_spec, tuple) else (found.output_spec,)
    lie = {o.name: s for o, s in zip(spec.outputs, outputs, strict=True) if o.name in wants}
    summed = [n for n in wide.dtypes if any(p.is_partial() for p in lie[n].placements)] if wide else []
    return OpPlacements(
        given,
        dict(zip(there, (s for s in needed if isinstance(s, DTensorSpec)), strict=True)),
        {n: _added(s) if n in summed else s for n, s in lie.items()},
        schema,
        summed,
    )


def _added(spec: DTensorSpec) -> DTensorSpec:
    """Where a sum of parts lies once it is added; also where the cotangent of a pending sum lies, the same for all of
    its parts."""
    placements = tuple(Replicate() if p.is_partial() else p for p in spec.placements)
    return DTensorSpec(spec.mesh, placements, spec.tensor_meta)


def _mesh(placed: OpPlacements) -> Any:
    return next(iter(placed.given.values())).mesh


def _mesh_in_words(mesh: Any) -> str:
    names = f" ({', '.join(mesh.mesh_dim_names)})" if mesh.mesh_dim_names else ""
    return f"{' x '.join(map(str, mesh.shape))}{names} of {mesh.device_type}"


def _in_words(spec: Spec[Any], placed: OpPlacements) -> Iterator[str]:
    """A line for each array and each result."""
    mesh = _mesh(placed)
    whys = why_moved(spec, placed.schema, placed.needed)
    for name, now in placed.given.items():
        then = placed.needed[name]
        if now.placements == then.placements:
            yield f"    {name}: {_shown(now)}, stays"
            continue
        steps = [_step(p, q, _axis_of(mesh, i)) for i, (p, q) in enumerate(_pairs(now, then)) if p != q]
        arrives = _bytes(then) - _bytes(now)
        size = f", {arrives:,} bytes more on each device" if arrives > 0 else ""
        why = f": {whys[name]}" if name in whys else ""
        yield f"    {name}: {_shown(now)} -> {_shown(then)}, {' and '.join(steps)}{size}{why}"
    for name, at in placed.outputs.items():
        pending = any(p.is_partial() for p in at.placements)
        how = ", a sum that is pending: added where it is read" * pending
        how += ", a sum of float32 parts, added and rounded once" * (name in placed.summed)
        yield f"    {name}: {_shown(at)}{how}"


def _pairs(now: DTensorSpec, then: DTensorSpec) -> Iterator[tuple[Any, Any]]:
    return zip(now.placements, then.placements, strict=True)


def _axis_of(mesh: Any, i: int) -> str:
    return mesh.mesh_dim_names[i] if mesh.mesh_dim_names else f"axis {i} of the devices"


def _shown(spec: DTensorSpec) -> str:
    shown = ", ".join(repr(p).replace("dim=", "") for p in spec.placements)
    return shown if len(spec.placements) == 1 else f"({shown})"


def _step(now: Any, then: Any, along: str) -> str:
    """What becomes of one placement on one axis of the mesh."""
    if now.is_partial():
        return f"its pending sum is added over {along}" + (" and cut" if then.is_shard() else "")
    if now.is_replicate():
        return f"cut over {along}, which sends nothing" if then.is_shard() else f"one part of a sum over {along}"
    return f"gathered over {along}" if then.is_replicate() else f"cut otherwise over {along} (all to all)"


def _local_shape(spec: DTensorSpec) -> tuple[int, ...]:
    return tuple(compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)[0])


def _bytes(spec: DTensorSpec) -> int:
    assert spec.tensor_meta is not None
    return int(torch.Size(_local_shape(spec)).numel()) * spec.tensor_meta.dtype.itemsize


def _of_one_device(call: Call, arrays: Mapping[str, Any], placed: OpPlacements) -> Call:
    """The call of the parts of this process's device, without memory."""
    parts, needed = {}, placed.needed
    for name, array in arrays.items():
        local = array._local_tensor
        stays = array.placements == needed[name].placements
        shape = local.shape if stays else _local_shape(needed[name])
        strides = local.stride() if stays else torch.empty(shape, device="meta").stride()
        parts[name] = torch.empty_strided(shape, strides, dtype=local.dtype, device="meta")
    wants = {"wants": call.wants} if call.spec.is_vjp else {}
    part = unchecked(call.spec, **parts, **read_options(call.spec, placed.schema.kwargs_schema)[0], **wants)
    part.wants, part.device = call.wants, call.device
    return part


def _gradients(call: Call, placed: OpPlacements, differentiated: Sequence[str], choice: Choice) -> Iterator[str]:
    """What the gradients move, of cotangents that lie as the results do."""
    wired = wiring(call.spec)
    try:
        wants = wired.wants(differentiated)
    except UnsupportedError as e:
        yield f"  refused in the gradients: {e}"
        return
    training = wired.training(call)
    outputs = _placed(call.spec, placed.given, call.options, training.wants, choice).outputs
    forms = {n: _like(outputs[n], *call.outputs[n]) for n in training.wants}
    given = {n: placed.given[n] for n in wired.inputs if n in placed.given}
    given |= {n: forms[n] for n in wired.saves(call.options) if n in forms}
    given |= {d: _added(forms[n]) for n, d in wired.cotangents.items() if n in call.wants}
    options = {n: call.options[n] for n in wired.options}
    ordered = {a.name: given[a.name] for a in wired.vjp.arrays if a.name in given}
    try:
        found = _placed(wired.vjp, ordered, options, wants, choice)
    except (RuntimeError, SpecError) as e:
        yield f"  refused in the gradients: {e}"
        return
    yield f"  in the gradients, {wired.vjp.name}:"
    yield from _in_words(wired.vjp, found)


def _like(spec: DTensorSpec, shape: tuple[int, ...], dtype: str) -> DTensorSpec:
    strides = torch.empty(shape, device="meta").stride()
    return DTensorSpec(spec.mesh, spec.placements, TensorMeta(torch.Size(shape), strides, getattr(torch, dtype)))
