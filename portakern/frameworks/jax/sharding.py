"""What to write for arrays that lie on several devices: the call inside ``jax.shard_map``, where each device runs the
op on what it holds. Nothing here imports jax.
"""

from __future__ import annotations

from typing import Any

from portakern.core import registry
from portakern.core.call import Call
from portakern.errors import UnsupportedError
from portakern.spec import ArrayArg, Dim, Output

__all__ = ["refused"]


def refused(call: Call, why: str, axis: Any = None, backend: str | None = None) -> UnsupportedError:
    """The refusal of a call, with the call that serves it.

    ``axis``: the mesh's, if it is known, along which the samples lie; ``backend``: the one that was named."""
    return UnsupportedError(f"{call.spec.name} {why}; {_instead(call, axis, backend)}")


def _instead(call: Call, axis: Any, backend: str | None) -> str:
    forward = registry.forward_of(call.spec)
    if forward is not None:
        return f"call {forward.name} inside jax.shard_map, whose gradient sums what several devices share"
    lead = call.spec.lead
    at = _samples(call, lead)
    specs = {a.name: _spec(call, a, at, axis) for a in call.spec.arrays if call.arrays[a.name] is not None}
    outputs = {_spec(call, o, at, axis) for o in call.spec.outputs if o.name in call.wants}
    if at is None or len(outputs) != 1:
        return "call it inside jax.shard_map, which says what each device holds"
    names = ", ".join(specs)
    of_backend = f", backend={backend!r}" if backend else ""
    options = [
        f"{o.name}={call.options[o.name]!r}" for o in call.spec.options if call.options[o.name] != _default(call, o)
    ]
    keywords = ", ".join([*(f"{n}={n}" for n in specs), *options])
    held = f"({', '.join(specs.values())},)"
    return (
        f"say what each device holds, here samples along the mesh's axis {axis or 'data'!r} and the rest whole: "
        f"jax.shard_map(lambda {names}: portakern.op({call.spec.name!r}{of_backend})({keywords}), mesh=mesh, "
        f"in_specs={held}, out_specs={outputs.pop()})({names})"
    )


def _default(call: Call, option: Any) -> Any:
    """The default of an option as a call holds it: an axis counted from the front."""
    if option.axis_of:
        return option.default % len(call.arrays[option.axis_of].shape)
    return option.default


def _samples(call: Call, lead: ArrayArg) -> int | None:
    """The axis of the first array whose entries do not see each other: a leading dimension called batch, or one of
    those of an op along an axis that are not that axis. None where there is none."""
    first, rank = lead.dims[0], len(call.arrays[lead.name].shape)
    if first.factors == ("batch",):
        return 0 if not first.variadic or call.dims["batch"] else None
    axes = {call.options[o.name] for o in call.spec.options if o.axis_of == lead.name}
    if not axes or not first.variadic or len(lead.dims) != 1:
        return None
    return next((i for i in range(rank) if i not in axes), None)


def _spec(call: Call, argument: ArrayArg | Output, at: int | None, axis: Any) -> str:
    """How an array is cut among the devices, as a PartitionSpec: along its samples, or not at all."""
    lead, array = call.spec.lead, call.arrays.get(argument.name)
    shared = bool(argument.dims) and _same(argument.dims[0], lead.dims[0])
    if isinstance(argument, Output):
        shared = shared or argument.alias_of == lead.name or argument.gradient_of == lead.name
    if at is None or not shared:
        return "jax.P()"
    if array is not None:  # an axis that is broadcast, or missing, is the same on every device
        missing = len(call.arrays[lead.name].shape) - len(array.shape)
        if (missing and argument.dims[0].variadic) or array.shape[at] != call.arrays[lead.name].shape[at]:
            return "jax.P()"
    return f"jax.P({'None, ' * at}{axis or 'data'!r})"


def _same(one: Dim, other: Dim) -> bool:
    return one.name == other.name and one.variadic == other.variadic
