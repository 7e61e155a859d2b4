"""Calls on arrays that lie on several devices: each device computes its part, and collectives put parts together.

Where a call may be cut is the op's rule (:mod:`portakern.core.partitions`), and which cuts are made follows from how
its arrays lie (:mod:`portakern.core.placements`). There are two ways, by when that is known:

* **Explicit axes** of a mesh are part of a type. Where the call is traced its results get their types, and it is
  lowered as a ``jax.shard_map`` over these axes, on every platform.
* **Auto axes** are known when XLA partitions the program. The call is lowered through ``custom_partitioning``, with a
  rule for Shardy that is made of the op's rules. Not on TPUs, where jax does not serve it.

Axes of ``jax.vmap`` are cut like any other: along them samples lie side by side.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.sharding_impls import parse_flatten_op_sharding  # jax has no public name for reading XLA's shardings
from jax.experimental.custom_partitioning import CompoundFactor, SdyShardingRule, custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from portakern.core.call import Call
from portakern.core.dispatch import Choice
from portakern.core.observe import say
from portakern.core.partitions import aligned, partition_rules
from portakern.core.placements import Cut, CutCall, MeshAxes, chosen_cuts, identity
from portakern.core.targets import Target
from portakern.frameworks.jax.sharding import refused
from portakern.frameworks.jax.staged import StaticCall, output_dtype, static_call
from portakern.spec.dtypes import DTYPES

__all__ = [
    "auto_axes", "devices_of", "explained", "explicit_mesh", "explicit_placement", "explicit_sharding", "gathered",
    "lowering_mesh", "manual_axes", "on_parts", "partitioned",
]  # fmt: skip

Bind = Callable[[StaticCall, Sequence[Any]], Sequence[Any]]
"""The wanted outputs of a call, from its arrays, on one device."""


@dataclass(frozen=True)
class Placement:
    """How the parts of a call, and of the samples of ``jax.vmap`` around it, lie on a mesh.

    Attributes:
      found: the call within all ``jax.vmap``, and how it is cut.
      mapped: for each ``jax.vmap``, the outermost first, the axes of the mesh over which its samples are cut.
    """

    static: StaticCall
    found: CutCall
    mapped: MeshAxes

    @property
    def in_specs(self) -> tuple[PartitionSpec, ...]:
        depths = _mapped_in(self.static)
        lies = (self.found.array_lies(n) for n in self.static.given)
        return tuple(
            _spec([over for over, own in zip(self.mapped, depth, strict=True) if own] + [*axes])
            for depth, axes in zip(depths, lies, strict=True)
        )

    @property
    def out_specs(self) -> tuple[PartitionSpec, ...]:
        return tuple(_spec([*self.mapped, *self.found.output_lies(n)]) for n in self.static.wants)

    def local(self, bind: Bind) -> Callable[..., tuple[Any, ...]]:
        """What each device computes of the arrays that it holds: the results that it shall hold."""
        function = functools.partial(_part, self.static, self.found, bind)
        for axes in self.static.vmaps:
            function = jax.vmap(function, in_axes=axes)
        return function

    def announce(self) -> None:
        """Say, once in a process, what is moved."""
        for moved in self.found.gathered:
            say(f"portakern: {self.static.spec.name}: {moved}")


def _mapped_in(static: StaticCall) -> list[list[bool]]:
    """For each array: which of the enclosing ``jax.vmap``, the outermost first, map it."""
    return [[axes[i] is not None for axes in reversed(static.vmaps)] for i in range(len(static.given))]


def _spec(axes: Sequence[tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(over if len(over) > 1 else over[0] if over else None for over in axes))


def spec_axes(spec: Any, rank: int, among: Sequence[str]) -> MeshAxes:
    """The axes of the mesh, those among some, over which each axis of an array of this rank is cut."""
    entries = [*spec, *[None] * (rank - len(spec))]
    every = (e if isinstance(e, tuple) else (e,) if isinstance(e, str) else () for e in entries)
    return tuple(tuple(name for name in e if name in among) for e in every)


def placement(
    static: StaticCall,
    avals: Sequence[Any],
    arrays: Sequence[MeshAxes],
    sizes: Mapping[str, int],
    results: Sequence[MeshAxes] = (),
) -> Placement:
    """How a call is cut whose arrays lie so on a mesh. ``sizes``: axis of the mesh -> number of devices along it;
    ``results``: how the wanted outputs shall lie, where that is known."""
    lead, call = static.unbatched(avals)
    depths = _mapped_in(static)
    mapped: list[tuple[str, ...]] = []
    taken: set[str] = set()
    for level, extent in enumerate(lead):
        own = [axes[sum(d[:level])] for axes, d in zip(arrays, depths, strict=True) if d[level]]
        over: tuple[str, ...] = ()
        for axis in dict.fromkeys(a for axes in (*(r[level] for r in results), *own) for a in axes):
            if axis not in taken and extent % math.prod(sizes[a] for a in (*over, axis)) == 0:
                over = (*over, axis)
                taken.add(axis)
        mapped.append(next((axes for axes in own if {*axes} == {*over}), over))
    left = {a: n for a, n in sizes.items() if a not in taken}

    def inner(axes: MeshAxes, levels: int) -> MeshAxes:
        return tuple(tuple(a for a in over if a in left) for over in axes[levels:])

    given = {n: inner(a, sum(d)) for n, a, d in zip(static.given, arrays, depths, strict=True)}
    wanted = {n: inner(r, len(lead)) for n, r in zip(static.wants, results, strict=False)}
    return Placement(static, chosen_cuts(call, given, left, wanted), tuple(mapped))


# ------------------------------------------------------------------------------------------------------------- one part
def _part(static: StaticCall, found: CutCall, bind: Bind, *arrays: Any) -> tuple[Any, ...]:
    """The part of a device, and its share in putting results together."""
    calls = found.parts()
    first = calls[0]

    def run(call: Call, *arrays: Any) -> tuple[Any, ...]:
        given = dict(zip(static.given, arrays, strict=True))
        own = replace(static, given=call.present, options=tuple(call.options.items()), wants=call.wants, vmaps=())
        outputs = bind(own, [given[n] for n in call.present]) if call.wants else ()
        named = dict(zip(call.wants, outputs, strict=True))
        forms = ((n, *first.outputs[n]) for n in first.wants)
        return tuple(named[n] if n in named else jnp.zeros(shape, output_dtype(d)) for n, shape, d in forms)

    if len(calls) == 1:
        outputs = run(first, *arrays)
    else:  # parts that are told where they begin, or of which the first is given more
        kinds = {identity(c): c for c in calls}
        numbers = np.array([[*kinds].index(identity(c)) for c in calls], np.int32)
        here = jnp.asarray(numbers)[jax.lax.axis_index(found.over)]
        outputs = jax.lax.switch(here, [functools.partial(run, c) for c in kinds.values()], *arrays)
    named = dict(zip(first.wants, outputs, strict=True))
    for cut in reversed(found.cuts):
        named = {n: _joined(cut, n, named) for n in cut.call.wants}
    return tuple(named[n].astype(output_dtype(found.call.outputs[n][1])) for n in static.wants)


def _joined(cut: Cut, name: str, parts: Mapping[str, Any]) -> Any:
    """An output of a call that is cut, of those of its parts: sums and means are taken in 32 bits or more."""
    how, part = cut.rule.outputs[name], parts[name]
    if how.kind == "beside":
        return part
    if how.kind in ("sum", "first"):
        return jax.lax.psum(part, cut.over)
    dtype = cut.call.outputs[name][1]
    wide = output_dtype(dtype if DTYPES[dtype].bits >= 32 else "float32")
    log = (part if how.kind == "weight" else parts[how.by]).astype(wide)
    top = jax.lax.pmax(log, cut.over)
    weight = jnp.exp(log - jnp.where(jnp.isneginf(top), 0, top))
    total = jax.lax.psum(weight, cut.over)
    if how.kind == "weight":
        return jnp.where(jnp.isinf(top), top, top + jnp.log(total)).astype(part.dtype)
    share, none = (aligned(cut.call, how.by, name, a) for a in (weight / total, jnp.isneginf(log)))
    return jax.lax.psum(jnp.where(none, 0, share * part.astype(wide)), cut.over).astype(output_dtype(dtype))


# -------------------------------------------------------------------------------------------------------- Explicit axes
def explicit_mesh(avals: Sequence[Any]) -> Any:
    """The mesh of these types where it has axes that are Explicit here, else None: those of an enclosing
    ``jax.shard_map`` are Manual."""
    for aval in avals:
        mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
        if mesh is not None and not mesh.empty:
            return mesh if explicit_axes(mesh) else None
    return None


def explicit_axes(mesh: Any) -> dict[str, int]:
    return {n: mesh.shape[n] for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Explicit}


def explicit_sharding(aval: Any) -> NamedSharding | None:
    """How an array of this type lies on Explicit axes; None where its mesh has none here."""
    mesh = explicit_mesh([aval])
    return None if mesh is None else NamedSharding(mesh, aval.sharding.spec)


def explicit_placement(static: StaticCall, avals: Sequence[Any], mesh: Any) -> Placement:
    sizes = explicit_axes(mesh)
    return placement(static, avals, [spec_axes(a.sharding.spec, len(a.shape), [*sizes]) for a in avals], sizes)


def on_parts(static: StaticCall, avals: Sequence[Any], axes: Any, bind: Bind, *arrays: Any) -> tuple[Any, ...]:
    """A call on arrays with Explicit axes, written in JAX. ``axes``: what jax says of devices where it lowers."""
    mesh = explicit_mesh(avals)
    placed = explicit_placement(static, avals, mesh)
    placed.announce()
    moved = [
        jax.sharding.reshard(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, placed.in_specs, strict=True)
    ]
    found: tuple[Any, ...] = jax.shard_map(
        placed.local(bind),
        mesh=mesh if manual_axes(axes) else lowering_mesh(axes) or mesh,  # inside another one jax wants the type's own
        in_specs=placed.in_specs,
        out_specs=placed.out_specs,
        axis_names={*explicit_axes(mesh)},
        check_vma=False,
    )(*moved)
    return found


# ------------------------------------------------------------------------------------------------------------ Auto axes
def manual_axes(axes: Any) -> frozenset[str]:
    found: frozenset[str] = getattr(axes, "manual_axes", frozenset())
    return found


def lowering_mesh(axes: Any) -> Mesh | None:
    """The mesh of the devices that jax lowers for; None where it has none that has names and devices."""
    own = getattr(axes, "mesh", None)  # of shard_map
    if own is not None:
        return own if type(own) is Mesh else None
    form, devices = getattr(axes, "abstract_mesh", None), getattr(axes, "device_assignment", None) or ()
    if form is None or form.empty or form.size != len(devices):
        return None
    return Mesh(np.array(devices).reshape(form.axis_sizes), form.axis_names, axis_types=form.axis_types)


def devices_of(axes: Any) -> int:
    """Over how many devices XLA partitions what is lowered here: those along Manual axes do not count."""
    devices = getattr(axes, "num_devices", None)
    if devices is None and hasattr(axes, "mesh"):
        devices = math.prod(n for name, n in axes.mesh.shape.items() if name not in manual_axes(axes))
    return devices or 1


def auto_axes(axes: Any) -> tuple[str, ...]:
    """The axes of the mesh along which XLA partitions what is lowered here."""
    mesh = lowering_mesh(axes)
    left = () if mesh is None else tuple(n for n in mesh.axis_names if n not in manual_axes(axes))
    return tuple(n for n in left if mesh is not None and mesh.shape[n] > 1)


def gathered(axes: Any, function: Callable[..., Any], *arrays: Any) -> Any:
    """What a function that is not cut gives of arrays with Auto axes: all devices hold arrays and results whole."""
    everywhere = NamedSharding(lowering_mesh(axes), PartitionSpec())
    return jax.lax.with_sharding_constraint(function(*jax.lax.with_sharding_constraint(arrays, everywhere)), everywhere)


def partitioned(static: StaticCall, avals: Sequence[Any], axes: Any, bind: Bind) -> Callable[..., tuple[Any, ...]]:
    """A call that XLA partitions, as a function of its arrays."""
    mesh, left = lowering_mesh(axes), auto_axes(axes)
    assert mesh is not None
    # beside Manual axes XLA numbers devices along the others alone
    seen = Mesh(mesh.devices[tuple(slice(None) if n in left else 0 for n in mesh.axis_names)], left)

    def lies(some: Sequence[Any]) -> list[MeshAxes]:
        shardings = [(a.sharding._to_xla_hlo_sharding(len(a.shape)), len(a.shape)) for a in some]
        return [spec_axes(parse_flatten_op_sharding(s, seen)[0], rank, left) for s, rank in shardings]

    def on_no_mesh(local: Callable[..., Any], *arrays: Any) -> Any:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # the user's has axes that are settled here
            return local(*arrays)

    def full(*arrays: Any) -> tuple[Any, ...]:
        return tuple(bind(static, arrays))

    def partition(_: Any, given: Sequence[Any], results: Sequence[Any]) -> Any:
        placed = placement(static, given, lies(given), dict(seen.shape), lies(results))
        placed.announce()
        outputs, inputs = (
            tuple(NamedSharding(seen, s) for s in specs) for specs in (placed.out_specs, placed.in_specs)
        )
        return mesh, functools.partial(on_no_mesh, placed.local(bind)), outputs, inputs

    function = custom_partitioning(full)
    function.def_partition(partition, sharding_rule=shardy_rule(static, avals))
    found: Callable[..., tuple[Any, ...]] = function
    return found


def shardy_rule(static: StaticCall, avals: Sequence[Any]) -> SdyShardingRule:
    """The op's rules in Shardy's words: a factor for each axis that may be cut. One that no result has is reduced.
    Where some results have it and others are sums, it is cut all the same: :func:`partitioned` adds what is added."""
    lead, call = static.unbatched(avals)
    rules = [r for r in partition_rules(call) if r.refusal is None and r.extent > 1]
    own = (f"own{i}" for i in itertools.count())
    sizes: dict[str, int] = {}
    uncut: list[str] = []

    def factors(levels: Sequence[int], shape: Sequence[int], along: Mapping[int, tuple[int, int]]) -> Iterator[Any]:
        """One axis after the other; ``along``: axis -> (the rule that cuts it, elements of an index)."""
        yield from (f"vmap{level}" for level in levels)
        for axis, extent in enumerate(shape):
            rule, inner = along.get(axis, (None, 1))
            if rule is None or inner > 1:
                uncut.append(next(own))
            if rule is not None and inner > 1:
                sizes[uncut[-1]], sizes[f"rule{rule}"] = inner, extent // inner
                yield CompoundFactor(f"rule{rule}", uncut[-1])
            else:
                yield uncut[-1] if rule is None else f"rule{rule}"

    def of_array(name: str, depth: Sequence[bool]) -> tuple[Any, ...]:
        along = {at.axis: (i, at.inner) for i, r in enumerate(rules) if (at := r.arrays[name]) is not None}
        return tuple(factors([i for i, own in enumerate(depth) if own], call.arrays[name].shape, along))

    def of_output(name: str) -> tuple[Any, ...]:
        along = {at.axis: (i, at.inner) for i, r in enumerate(rules) if (at := r.outputs[name].at) is not None}
        return tuple(factors(range(len(lead)), call.outputs[name][0], along))

    operands = tuple(of_array(n, d) for n, d in zip(static.given, _mapped_in(static), strict=True))
    results = tuple(of_output(n) for n in call.wants)
    alone = {f for axes in (*operands, *results) for f in axes if isinstance(f, str)}
    reduced = [f"rule{i}" for i, r in enumerate(rules) if all(how.at is None for how in r.outputs.values())]
    return SdyShardingRule(
        operands,
        results,
        reduction_factors=tuple(reduced),
        need_replication_factors=tuple(uncut),
        **{f: n for f, n in sizes.items() if f not in alone},
    )


# ------------------------------------------------------------------------------------------------------------- in words
def explained(call: Call, target: Target, oracle: bool) -> tuple[list[str], Call]:
    """How a call is served whose arrays several devices hold, and the part of the first; no lines where one holds them.

    Raises:
      UnsupportedError: it is not.
    """
    given = [a for a in call.arrays.values() if a is not None]
    avals, static = [jax.typeof(a) for a in given], static_call(call, Choice())
    mesh = explicit_mesh(avals)
    if mesh is not None:
        placed = explicit_placement(static, avals, mesh)
        return [
            f"  devices: {_mesh_in_words(mesh)}",
            *(f"    {line}" for line in placed.found.lines()),
        ], placed.found.part
    meshes = {m for a in given if (m := _auto_mesh(a)) is not None}
    if not meshes:
        return [], call
    if target.platform == "tpu":
        raise refused(call, "is given arrays with Auto axes of a mesh, for which jax has no way on TPUs")
    mesh = meshes.pop()
    head = f"  devices: {_mesh_in_words(mesh)}"
    if oracle:
        return [f"{head}; the oracle gathers all arrays"], call
    if meshes or any(isinstance(a, jax.core.Tracer) for a in given):
        return [f"{head}; XLA chooses the cuts when it partitions the program"], call
    rank = {n: len(a.shape) for n, a in zip(static.given, given, strict=True)}
    specs = (getattr(a.sharding, "spec", ()) for a in given)
    lies = [spec_axes(s, r, mesh.axis_names) for s, r in zip(specs, rank.values(), strict=True)]
    found = placement(static, avals, lies, dict(mesh.shape)).found
    return [
        f"{head}; XLA partitions the program, here as the arrays lie",
        *(f"    {n}" for n in found.lines()),
    ], found.part


def _auto_mesh(array: Any) -> Any:
    """The mesh of an array that has Auto axes and several devices; None where it has none."""
    own = jax.typeof(array).sharding.mesh
    mesh = own if isinstance(array, jax.core.Tracer) else getattr(array.sharding, "mesh", None)
    if mesh is None or mesh.empty or mesh.size == 1 or AxisType.Auto not in mesh.axis_types:
        return None
    return mesh if AxisType.Manual not in mesh.axis_types else own


def _mesh_in_words(mesh: Any) -> str:
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return ", ".join(f"{size} along {name!r} ({kind.name})" for name, size, kind in axes)
