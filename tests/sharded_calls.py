"""Calls on arrays that eight devices of JAX hold, those of a CPU that poses as eight: an op for each kind of rule, two
rules at once, gradients and ``jax.vmap``; with HYPOTHESIS_PROFILE=deep every op along every dimension that its rules
allow. Run by tests/test_jax_sharded.py in processes of their own: ``python -m tests.sharded_calls Explicit rules``.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import portakern as pk
from portakern.core import registry
from portakern.core.binder import bind
from portakern.core.call import Call
from portakern.core.dispatch import find_routes, pick
from portakern.core.framework import frameworks
from portakern.core.partitions import PartitionRule, described, partition_rules
from portakern.core.placements import Cut, CutCall, chosen_cuts
from portakern.core.targets import HOST
from portakern.testing.partitioned import combined_bounds, pieces_of
from portakern.testing.verdict import compare_bounds, expected
from tests.ops import of_each_kind, record, records
from tests.ops.record import ForwardRecord, Sample
from tests.places import DEEP

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute")


class Sharded(NamedTuple):
    """A call and how its arrays lie: rule -> the number of devices along it."""

    op: str
    sample: Sample
    dtype: str
    along: dict[str, int]


def bound(op: str, sample: Sample, dtype: str) -> Call:
    wants = {"wants": sample.wants} if sample.wants else {}
    return bind(registry.find_spec(op), **sample.arrays(op, dtype), **sample.options, **wants)


def samples(op: str) -> list[Sample]:
    """Calls of a record, those with the fewest numbers first."""
    own = record(op)
    found = [replace(s, tiling={}) for s in (*own.small.values(), *own.usual)]
    return sorted(found, key=lambda s: sum(int(np.prod(shape)) for shape in s.shapes.values()))


def served(call: Call) -> bool:
    try:
        plan(call)
    except pk.UnsupportedError:
        return False
    return not call.degenerate


def plan(call: Call) -> Any:
    """The variant and the tiling that serve a call of Pallas in its interpreter."""
    jax_arrays = {
        n: None if a is None else frameworks()["jax"].abstract(a.shape, call.dtype_of(n))
        for n, a in call.arrays.items()
    }
    inner = call.replace(arrays=jax_arrays, framework=frameworks()["jax"], concrete=False, device=None)
    routes = find_routes(registry.backend("pallas"), inner, HOST)
    inner.target, inner.interpret = routes[0].target, routes[0].interpret
    route, config = pick(routes, inner, {})
    return route.impl.family.name, dict(config)


def usable(call: Call) -> list[PartitionRule]:
    return [r for r in partition_rules(call) if r.refusal is None]


def divisor(rule: PartitionRule, most: int = 8) -> int | None:
    return next((n for n in range(most, 1, -1) if rule.extent % n == 0), None)


def along_every_dimension() -> Iterator[Sharded]:
    """For each dimension along which an op may be cut the smallest call that is, in float32 and, where parts are added,
    in bfloat16; in float32 also the smallest whose parts are told where they begin, or of which one is given more; and
    for each op one that is cut along two."""
    for op in records():
        for dtype in ("float32", "bfloat16"):
            left = {row["dimension"] for row in described(registry.find_spec(op))}
            both = dtype == "float32" and len(left) > 1
            unlike = set(left) if dtype == "float32" else set[str]()
            for sample in samples(op):
                call = bound(op, sample, dtype) if left or both or unlike else None
                if call is None or not served(call):
                    continue
                rules = [r for r in usable(call) if dtype == "float32" or added(r)]
                for rule in rules:
                    n = divisor(rule)
                    told = rule.dimension in unlike and bool(rule.starts or rule.once)
                    if n and (rule.dimension in left or told):
                        left.discard(rule.dimension)
                        unlike -= {rule.dimension} if told else set()
                        yield Sharded(op, sample, dtype, {rule.name: n})
                halves = {r.dimension: r.name for r in rules if r.extent % 2 == 0}
                if both and len(halves) > 1:
                    both = False
                    yield Sharded(op, sample, dtype, dict.fromkeys([*halves.values()][-2:], 2))
            assert dtype == "bfloat16" or not left, f"{op}: no call of its record is cut along {left}"


def of_each_rule(cases: list[Sharded]) -> list[Sharded]:
    """Of calls whose rules are alike in all that devices do differently the one with the fewest numbers."""
    found: dict[Any, Sharded] = {}
    for case in sorted(cases, key=lambda c: sum(int(np.prod(shape)) for shape in c.sample.shapes.values())):
        call = bound(case.op, case.sample, case.dtype)
        cut = [r for r in partition_rules(call) if r.name in case.along]
        found.setdefault((case.dtype, call.spec.is_vjp, tuple(map(kind_of_rule, cut))), case)
    return list(found.values())


def kind_of_rule(rule: PartitionRule) -> tuple[Any, ...]:
    joined = frozenset(how.kind for how in rule.outputs.values())
    whole = any(at is None for at in rule.arrays.values())
    return joined, whole, rule.equal, bool(rule.starts), bool(rule.once), bool(rule.options_at(0, 0))


def added(rule: PartitionRule) -> bool:
    return any(how.kind == "sum" for how in rule.outputs.values())


# ------------------------------------------------------------------------------------------------------------- one call
def mesh_of(kind: str, along: dict[str, int]) -> Any:
    sizes = tuple(along.values())
    names = tuple(f"d{i}" for i in range(len(sizes)))
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, names, axis_types=(AxisType[kind],) * len(sizes), devices=devices)


def lies(call: Call, rules: dict[str, PartitionRule], along: dict[str, int], name: str) -> tuple[Any, ...]:
    spec: list[Any] = [None] * call.arrays[name].ndim
    for i, rule in enumerate(along):
        at = rules[rule].arrays[name]
        if at is not None:
            spec[at.axis] = f"d{i}"
    return tuple(spec)


def compiled(function: Any, *arrays: Any) -> tuple[list[np.ndarray], str, list[Any]]:
    program = jax.jit(function, compiler_options={"xla_backend_optimization_level": 0}).lower(*arrays).compile()
    outputs = jax.tree.leaves(program(*arrays))
    return [np.asarray(o) for o in outputs], program.as_text(), outputs


def same_bits(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return np.array_equal(ours.astype(np.float64), theirs.astype(np.float64), equal_nan=True)


def check(kind: str, case: Sharded) -> None:
    """The results of a call on devices are within the bounds of its parts put together; those that lie side by side,
    where one plan serves both, have the bits of one device, and need nothing from other devices."""
    call = bound(case.op, case.sample, case.dtype)
    rules = {r.name: r for r in usable(call)}
    given = [n for n, a in call.arrays.items() if a is not None]
    op = pk.op(case.op, backend="pallas")
    wants = {"wants": case.sample.wants} if case.sample.wants else {}

    def function(*arrays: Any) -> Any:
        found = op(**dict(zip(given, arrays, strict=True)), **case.sample.options, **wants)
        return [o for o in jax.tree.leaves(found) if o is not None]

    mesh = mesh_of(kind, case.along)
    specs = [PartitionSpec(*lies(call, rules, case.along, n)) for n in given]
    placed = [jax.device_put(call.arrays[n], NamedSharding(mesh, s)) for n, s in zip(given, specs, strict=True)]
    outputs, text, arrays = compiled(function, *placed)
    alone, *_ = compiled(function, *(jnp.asarray(call.arrays[n]) for n in given))
    axes = {n: tuple((s,) if s else () for s in spec) for n, spec in zip(given, specs, strict=True)}
    cut = chosen_cuts(call, axes, dict(mesh.shape))
    assert {c.rule.name for c in cut.cuts} == {*case.along}, cut
    assert not cut.gathered, cut
    hold(case, call, cut, outputs, alone)
    joined = {how.kind for c in cut.cuts for how in c.rule.outputs.values()} - {"beside"}
    found = {name for name in COLLECTIVES if re.search(rf"= \S+ {name}\(", text) or f" {name}(" in text}
    assert found <= ({"all-reduce"} if joined else set()), (found, joined)
    for name, array in zip(call.wants, arrays, strict=True):
        wanted = PartitionSpec(*(s[0] if s else None for s in cut.output_lies(name)))
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, wanted), array.ndim), (name, array.sharding, wanted)


def hold(case: Sharded, call: Call, cut: CutCall, outputs: list[np.ndarray], alone: list[np.ndarray]) -> None:
    known = expected(call)
    first = cut.cuts[0]
    if len(cut.cuts) == 1 and any(how.kind != "beside" for how in first.rule.outputs.values()):
        pieces = pieces_of(call, first.rule, [first.rule.extent // first.number] * first.number)
        parts = [bind(call.spec, **p.arrays, **{**call.options, **p.options}) for p in pieces]
        parts = [c.replace(wants=p.wants) if call.spec.is_vjp else c for c, p in zip(parts, pieces, strict=True)]
        known = (known[0], known[1], combined_bounds(call, first.rule, known, [expected(p) for p in parts]))
    one_plan = plan(call) == plan(cut.part)
    beside = {n for n in call.wants if all(c.rule.outputs[n].kind == "beside" for c in cut.cuts)}
    for name, ours, theirs in zip(call.wants, outputs, alone, strict=True):
        if name in beside and one_plan and not same_bits(ours, theirs):
            # XLA's products on CPUs may add in another order for other extents: then the parts have these bits alone
            assert len(cut.cuts) == 1, f"{name} has other bits than on one device"
            assert same_bits(ours, side_by_side(call, first, name)), f"{name} has other bits than its parts alone"
    if len(cut.cuts) == 1 or len(beside) == len(call.wants):
        compare_bounds(call, outputs, known=known)
    else:  # parts of parts: no bound is derived, and each is a few roundings of the other
        for ours, theirs in zip(outputs, alone, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5 * max(1.0, float(np.abs(theirs).max())))


def side_by_side(call: Call, cut: Cut, name: str) -> np.ndarray:
    """An output of the parts, each computed on one device."""
    found, at = [], cut.rule.outputs[name].at
    assert at is not None
    for piece in pieces_of(call, cut.rule, [cut.rule.extent // cut.number] * cut.number):
        wants = {"wants": piece.wants} if call.spec.is_vjp else {}
        options = {**call.options, **piece.options, **wants}
        arrays = {n: jnp.asarray(a) for n, a in piece.arrays.items()}
        outputs = pk.op(call.spec.name, backend="pallas")(**arrays, **options)
        names = [o.name for o in call.spec.outputs]
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        found.append(np.asarray(outputs[names.index(name)]))
    return np.concatenate(found, axis=at.axis)


# ----------------------------------------------------------------------------------------------------- jax's transforms
def transformed(kind: str, op: str) -> Iterator[tuple[str, Any]]:
    """Gradients of an op and samples of ``jax.vmap``, on devices and on one."""
    for sample in samples(op):
        call = bound(op, sample, "float32")
        rule = next((r for r in usable(call) if divisor(r)), None)
        if rule is not None and served(call):
            break
    else:
        raise AssertionError(f"{op}: no call of its record is cut")
    along = {rule.name: divisor(rule) or 1}
    mesh, given = mesh_of(kind, along), [n for n, a in call.arrays.items() if a is not None]
    places = record(op).differentiable(sample) if call.spec.vjp else ()

    def function(*arrays: Any) -> Any:
        return pk.op(op, backend="pallas")(**dict(zip(given, arrays, strict=True)), **sample.options)

    def loss(*arrays: Any) -> Any:
        floats = [o for o in jax.tree.leaves(function(*arrays)) if jnp.issubdtype(o.dtype, jnp.floating)]
        return jnp.sin(floats[0].astype(jnp.float32)).sum()

    arrays = [call.arrays[n] for n in given]
    specs = [lies(call, {rule.name: rule}, along, n) for n in given]
    if places:
        yield "grad", (mesh, jax.grad(loss, places), arrays, specs)
    if not places:
        stacked = [np.stack([a] * next(iter(along.values()))) for a in arrays]
        yield "vmap", (mesh, jax.vmap(function), stacked, [("d0",)] * len(arrays))
    inner = mesh_of(kind, {"samples": 2, **dict.fromkeys(along, divisor(rule, 4) or 1)})
    if places:
        each = [(None, *("d1" if s else None for s in spec)) for spec in specs]
        mapped = [("d0", *spec[1:]) for spec in each]
        yield "vmap of grad", (inner, jax.vmap(jax.grad(loss, places)), [np.stack([a] * 2) for a in arrays], mapped)


def agree(mesh: Any, function: Any, arrays: list[np.ndarray], specs: list[Any]) -> None:
    placed = [jax.device_put(a, NamedSharding(mesh, PartitionSpec(*s))) for a, s in zip(arrays, specs, strict=True)]
    with jax.set_mesh(mesh):
        ours = compiled(function, *placed)[0]
    theirs = compiled(function, *map(jnp.asarray, arrays))[0]
    for one, other in zip(ours, theirs, strict=True):
        most = max(1.0, float(np.abs(other.astype(np.float64)).max(initial=0)))
        np.testing.assert_allclose(one.astype(np.float64), other.astype(np.float64), rtol=2e-5, atol=2e-5 * most)


def main(kind: str, what: str, only: str = "") -> None:
    failed = 0
    cases: list[tuple[str, Any]] = []
    some = kind == "Auto"  # how parts are added, and transforms of primitives, are the same for both kinds
    if what == "rules":
        every = [c for c in along_every_dimension() if c.dtype == "float32" or not some]
        every = every if DEEP else of_each_rule(every)
        cases = [(f"{c.op} {c.dtype} {c.along}", lambda c=c: check(kind, c)) for c in every]
    else:
        for r in records().values() if DEEP and not some else of_each_kind():
            if isinstance(r, ForwardRecord) and described(r.spec):
                cases += [(f"{r.op} {name}", lambda a=args: agree(*a)) for name, args in transformed(kind, r.op)]
    cases = [(name, run) for name, run in cases if name.startswith(only)]
    for name, run in cases:
        try:
            run()
        except Exception as e:
            failed += 1
            print(f"{kind} {name}: {type(e).__name__}: {str(e)[:1500]}", flush=True)
    print(f"{len(cases)} cases, {failed} failed")


if __name__ == "__main__":
    main(*sys.argv[1:])
