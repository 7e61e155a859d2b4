"""DTensors: ops run on the shards of arrays that PyTorch distributes over a mesh of devices.

Which placements an op takes, and which it gives, follows from the rules of its spec (:mod:`portakern.core.partitions`):
what is cut along a dimension is ``Shard``, a sum of parts is ``Partial``, all else is ``Replicate``. Arrays that are
placed otherwise are redistributed by PyTorch. Parts of a sum of 16 bits are float32: they are added at once, and the
sum is rounded (:func:`run_on_shards`). Not taken are cuts that need more than the same call on each shard: dimensions
along which a part is told where it begins, means that are weighted, and arrays that count once. Arrays that are cut
there are gathered.

The strategies are registered with the propagator of DTensor, since the public ``register_sharding`` keeps them by
integer arguments alone: a rule that depends on another option would be another call's.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from portakern.core.binder import unchecked
from portakern.core.call import Call
from portakern.core.gradients import wiring
from portakern.core.observe import say
from portakern.core.partitions import Joined, PartitionRule, partition_rules
from portakern.errors import SpecError, UnsupportedError
from portakern.frameworks.torch.custom_ops import ON_SHARDS, ROUTING, define, read_options
from portakern.spec import Spec

__all__ = ["are_distributed", "register", "schema_of", "why_moved", "with_float32_parts"]

EVERY_ARGUMENT = 100
"""Arguments before this one are arrays: of these DTensor keeps shapes and placements."""


def are_distributed(spec: Spec[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the arrays of a call are DTensors.

    Raises:
      SpecError: some are, and others are not.
    """
    dtensor = sys.modules["torch.distributed.tensor"].DTensor
    names = [a.name for a in spec.arrays]
    given = {n: a for n, a in {**dict(zip(names, args, strict=False)), **kwargs}.items() if n in names}
    placed = [n for n, a in given.items() if isinstance(a, dtensor)]
    for name, array in given.items():
        if placed and array is not None and name not in placed:
            raise SpecError(
                f"{spec.name}: {name} is a {type(array).__name__} beside {placed[0]}, a DTensor; place it on the same "
                f"mesh: distribute_tensor({name}, mesh, [Replicate()])"
            )
    return bool(placed)


@functools.cache
def register(spec: Spec[Any]) -> None:
    """Tell PyTorch on which placements an op runs, and its gradients.

    Raises:
      UnsupportedError: this release of PyTorch does not let ops say so.
    """
    try:
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

        propagator = DTensor._op_dispatcher.sharding_propagator
        propagated = propagator.register_op_strategy
    except (ImportError, AttributeError):
        raise UnsupportedError(
            f"{spec.name}: DTensors need a release of PyTorch with which ops declare placements; torch "
            f"{torch.__version__} is not one: pass x.to_local(), or update PyTorch"
        ) from None
    options = [*(o.name for o in spec.options), *ROUTING]
    info = RuntimeSchemaInfo(EVERY_ARGUMENT, options, needs_pytree=True)
    propagated(define(spec), functools.partial(_strategy, spec), info)
    ON_SHARDS[spec] = functools.partial(run_on_shards, spec)
    if spec.vjp:
        register(wiring(spec).vjp)


# ------------------------------------------------------------------------------------------------------- float32 parts
def run_on_shards(spec: Spec[Any], run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of DTensors. ``run``: the op as PyTorch runs it on shards, where each part is the same call.

    Sums of parts that have 16 bits are asked for in float32, added over the devices and rounded once."""
    dtensor = sys.modules["torch.distributed.tensor"].DTensor
    placed = [a._spec if isinstance(a, dtensor) else None for a in args]
    if not any(placed) or torch.is_inference_mode_enabled():  # where no op of DTensors comes here
        return run(*args, **kwargs)
    schema = schema_of(spec, placed, kwargs)
    wide = with_float32_parts(spec, schema)
    if wide is None:
        return run(*args, **kwargs)
    outputs, names = run(*args, **wide.schema.kwargs_schema), [o.name for o in spec.outputs]
    every = outputs if len(names) > 1 else (outputs,)
    found = tuple(_rounded(x, wide.dtypes.get(n)) for n, x in zip(names, every, strict=True))
    return found if len(names) > 1 else found[0]


def _rounded(x: Any, dtype: torch.dtype | None) -> Any:
    """A result of float32 parts in its own dtype; None: it is no such result."""
    from torch.distributed.tensor import Replicate

    if dtype is None:
        return x
    with torch.no_grad():
        whole = [Replicate() if p.is_partial() else p for p in x.placements]
        return x.redistribute(placements=whole).to(dtype)


def schema_of(spec: Spec[Any], placed: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A call as the propagator of DTensor has it. ``placed``: the placements of each array, None for one that is not
    given."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import OpSchema

    op, propagator = define(spec), DTensor._op_dispatcher.sharding_propagator
    return OpSchema(op, tuple(placed), dict(kwargs), propagator.op_to_schema_info[op])


class Float32Parts(NamedTuple):
    """A call that is asked for float32 parts of sums.

    Attributes:
      schema: that call. dtypes: output -> the dtype to which its sum is rounded.
    """

    schema: Any
    dtypes: Mapping[str, torch.dtype]


def with_float32_parts(spec: Spec[Any], schema: Any) -> Float32Parts | None:
    """How a call is asked for float32 parts of its sums of 16 bits; None where it has none, as its arrays lie."""
    try:
        return _float32_parts(spec, schema)
    except TypeError:  # symbols among its extents, which have no hash
        return _float32_parts.__wrapped__(spec, schema)


@functools.lru_cache(1024)
def _float32_parts(spec: Spec[Any], schema: Any) -> Float32Parts | None:
    from torch.distributed.tensor import DTensor

    call, _ = _call_of(spec, schema)
    asked = {
        n: v for r in partition_rules(call) if r.refusal is None for n, v in r.options.items() if n in _dtypes_of(spec)
    }
    if not asked:
        return None
    kwargs = {**schema.kwargs_schema, **{n: getattr(torch, v) for n, v in asked.items()}}
    wide = schema_of(spec, schema.args_schema, kwargs)
    found = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached(wide).output_spec
    every = found if isinstance(found, tuple | list) else (found,)
    if not any(p.is_partial() for o in every if o is not None for p in o.placements):
        return None
    forms = call.outputs
    named = [o.name for o in spec.outputs if o.name in call.wants and o.dtype_option in asked]
    return Float32Parts(wide, {n: getattr(torch, forms[n][1]) for n in named})


def _dtypes_of(spec: Spec[Any]) -> set[str]:
    """The options that name the dtype of a result."""
    return {o.dtype_option for o in spec.outputs if o.dtype_option}


# ----------------------------------------------------------------------------------------------------------- strategies
def _strategy(spec: Spec[Any], schema: Any) -> Any:
    """Every combination of placements on the axes of the mesh."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

    call, names = _call_of(spec, schema)
    mesh = schema.get_mesh_from_args()
    every = partition_rules(call)
    rules = [r for r in every if _why_not(r) is None]
    table = [[Replicate()] * (len(spec.outputs) + len(names))]
    for rule in rules:
        table.append([*(_placed(rule.outputs.get(o.name)) for o in spec.outputs), *(_shard(rule, n) for n in names)])
    _say_gathered(spec, mesh, dict(zip(names, _given(schema), strict=True)), every)
    return expand_to_full_mesh_op_strategy(
        mesh,
        schema,
        table,
        input_index=len(spec.outputs),
        is_valid_strategy_cb=lambda inputs, outputs: _divides(spec, mesh, rules, dict(zip(names, inputs, strict=True))),
    )


def _given(schema: Any) -> list[Any]:
    """The placed arrays of a call, without those that are not passed."""
    every = (a.strategies[0].output_spec if hasattr(a, "strategies") else a for a in schema.args_schema)
    return [a for a in every if hasattr(a, "tensor_meta")]


def _call_of(spec: Spec[Any], schema: Any) -> tuple[Call, list[str]]:
    """The call of full arrays without memory, and the names of its arrays."""
    passed = [a for a, x in zip(spec.arrays, schema.args_schema, strict=False) if x is not None]
    metas = {a.name: placed.tensor_meta for a, placed in zip(passed, _given(schema), strict=True)}
    arrays = {n: torch.empty_strided(m.shape, m.stride, dtype=m.dtype, device="meta") for n, m in metas.items()}
    options, wants = read_options(spec, schema.kwargs_schema)
    if spec.is_vjp and wants:
        options["wants"] = wants
    call = unchecked(spec, **arrays, **options)
    if wants:
        call.wants = tuple(o.name for o in spec.outputs if o.name in wants)
    return call, [*metas]


def _why_not(rule: PartitionRule) -> str | None:
    """Why a shard is not served by the call that is made of the full arrays, in words; None where it is, and PyTorch
    puts the results together."""
    if rule.refusal is not None:
        return rule.refusal
    options = rule.options_at(0, 0)
    if options:
        return f"its parts are asked with other {', '.join(options)}; pass to_local() and such options, or gather it"
    if rule.once:
        return f"{', '.join(rule.once)} must be given to the first part alone"
    kinds = {how.kind for how in rule.outputs.values()} - {"beside", "sum"}
    return f"PyTorch has no placement for results that are {' or '.join(sorted(kinds))}" if kinds else None


def _placed(how: Joined | None) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if how is None:
        return Replicate()
    return Shard(how.at.axis) if how.at is not None else Partial()


def _shard(rule: PartitionRule, name: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    at = rule.arrays[name]
    return Replicate() if at is None else Shard(at.axis)


def _divides(spec: Spec[Any], mesh: Any, rules: Sequence[PartitionRule], inputs: dict[str, Any]) -> bool:
    """Whether shards are calls of the op: equal ones where a product of dimensions is cut, and none of a dimension that
    may not be 0."""
    for rule in rules:
        for name, at in rule.arrays.items():
            if at is None:
                continue
            parts = [mesh.size(i) for i, p in enumerate(inputs[name].placements) if p.is_shard(at.axis)]
            if _unequal(spec, rule, math.prod(parts)):
                return False
    return True


def _say_gathered(spec: Spec[Any], mesh: Any, given: dict[str, Any], rules: Sequence[PartitionRule]) -> None:
    """Log what is gathered since no shard of it is a call of the op, once in a process."""
    for name, placed in given.items():
        for i, placement in enumerate(placed.placements):
            why = _why_gathered(spec, mesh.size(i), name, placement, rules)
            if why:
                say(f"portakern: {spec.name}: {name} is cut along axis {placement.dim} and gathered: {why}")


def _why_gathered(
    spec: Spec[Any], number: int, name: str, placement: Any, rules: Sequence[PartitionRule]
) -> str | None:
    """Why so many shards of an array are no calls of the op, in words; None where they are, or it has none."""
    cut = getattr(placement, "dim", None)
    if cut is None:
        return None
    if not placement.is_shard():
        return "its parts do not lie side by side: an axis was cut before it was merged with others"
    along = [r for r in rules if (at := r.arrays[name]) is not None and at.axis == cut]
    whys = [_why_not(r) or _unequal(spec, r, number) for r in along]
    return None if None in whys else next(iter(whys), f"{spec.name} is not cut along this axis")


def why_moved(spec: Spec[Any], schema: Any, needed: Mapping[str, Any]) -> dict[str, str]:
    """Array -> why it is placed otherwise for the op, in words, of the arrays that are. ``schema``: the call as the
    propagator of DTensor has it; ``needed``: array -> its placement for the op."""
    call, names = _call_of(spec, schema)
    rules, found = partition_rules(call), {}
    for name, now in zip(names, schema.args_spec, strict=True):
        for i, (p, q) in enumerate(zip(now.placements, needed[name].placements, strict=True)):
            if p == q or name in found or not hasattr(p, "dim"):
                continue
            why = _why_gathered(spec, now.mesh.size(i), name, p, rules)
            found[name] = why or "the call is cut along another dimension there"
    return found


def _unequal(spec: Spec[Any], rule: PartitionRule, number: int) -> str | None:
    """Why so many shards along an axis are no calls of the op, in words; None where they are."""
    if rule.extent % number and (rule.equal or rule.dimension in spec.positive):
        return f"{rule.dimension} is {rule.extent}, which {number} shards do not divide"
    return None
