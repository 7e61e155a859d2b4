"""Batching of calls, for vmap: the samples over which a library maps a call become part of the batch dimension of one
call."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from portakern.core.call import Call
from portakern.spec import Spec

__all__ = ["Folding", "Into", "fold"]


class Into(NamedTuple):
    """How one array of a mapped call becomes an array of the batched call. Its first axis holds the samples, or is new
    with extent 1 if all samples share the array. The array is broadcast to ``wide``, then reshaped to ``shape``."""

    wide: tuple[int, ...]
    shape: tuple[int, ...]


class Folding(NamedTuple):
    """How a mapped call becomes one call. ``arrays``: name -> how the array changes, None if all samples share it
    unchanged. ``options``: the options of the one call."""

    arrays: Mapping[str, Into | None]
    options: Mapping[str, Any]


def fold(one: Call, mapped: Collection[str], wants: Collection[str], n: int) -> Folding | None:
    """How ``n`` calls become one, with the mapped axis inside the spec's batch; None where not everything that matters
    carries it.

    A variadic batch gets one more axis; a batch of one axis grows n-fold. What is shared is broadcast where the
    notation allows it, else repeated (without a copy where the library has strides, but for a single axis that must
    then be merged). A gradient belongs to a sample, so its array may not be shared.

    Args:
      one: the call of a sample. mapped: names of the arrays of which each sample has its own.
    """
    spec, batch = one.spec, one.spec.batch
    outputs = [o for o in spec.outputs if o.name in wants]
    if batch is None or not all(_leads(spec, o.dims, batch) for o in outputs):
        return None
    own = {o.gradient_of for o in outputs}
    arrays: dict[str, Into | None] = {}
    options = dict(one.options)
    for a in spec.arrays:
        array = one.arrays[a.name]
        if array is None:
            continue
        shape, lead = tuple(array.shape), a.dims[0] if _leads(spec, a.dims, batch) else None
        if lead is None and a.name in mapped:
            return None
        extent = one.dims[lead.factors[0] if lead else batch]
        single = lead is not None and not lead.variadic and lead.broadcast and shape[0] != extent
        if single and a.name in own:  # its gradient is a sum over the batch, sample by sample
            return None
        shared = a.name not in mapped and a.name not in own
        if lead is None or (shared and lead.broadcast and (lead.variadic or shape[0] == 1)):
            arrays[a.name] = None
        elif lead.variadic:
            missing = len(extent) + len(a.dims) - len(shape) - 1
            arrays[a.name] = Into((n, *shape), (n, *(1,) * missing, *shape))
            options.update({o.name: one.options[o.name] + 1 for o in spec.options if o.axis_of == a.name})
        else:
            wide = (n, extent if single else shape[0], *shape[1:])
            arrays[a.name] = Into(wide, (wide[0] * wide[1], *wide[2:]))
    return Folding(arrays, options)


def _leads(spec: Spec[Any], dims: Sequence[Any], batch: str) -> bool:
    """Whether the first axis is the batch's, or that of the batch without the axis along which the op works."""
    if not dims or not dims[0].alone:
        return False
    whole = spec.dropped(dims[0].factors[0])
    return (whole[0] if whole else dims[0].factors[0]) == batch
