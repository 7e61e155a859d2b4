"""Which parts of a call devices compute, given how its arrays lie on a mesh of them.

The rules are those of :mod:`portakern.core.partitions`. Each axis of the mesh cuts the call along one of them, so that
little has to be moved. A call that is cut along two rules is cut twice: the parts of a part. Nothing here knows how
devices communicate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from portakern.core.binder import bind
from portakern.core.call import Call
from portakern.core.partitions import JOINED_IN_WORDS, CutAxis, PartitionRule, partition_rules
from portakern.spec.dtypes import DTYPES

__all__ = ["Cut", "CutCall", "Gathered", "MeshAxes", "chosen_cuts", "identity", "part_of"]

MeshAxes = tuple[tuple[str, ...], ...]
"""For each axis of an array, the axes of the mesh over which it is cut, most significant first."""


class Cut(NamedTuple):
    """A rule along which a call, or each part of one, is cut: ``number`` equal parts over these axes of the mesh, the
    most significant first. ``call``: what is cut, the first part of the cuts before."""

    rule: PartitionRule
    over: tuple[str, ...]
    number: int
    call: Call


class Gathered(NamedTuple):
    """An array's axis that is cut over an axis of the mesh and is moved before the call, and why."""

    array: str
    axis: int
    over: str
    why: str

    def __str__(self) -> str:
        return f"{self.array} is cut along axis {self.axis} over the mesh's axis {self.over!r} and gathered: {self.why}"


@dataclass(frozen=True)
class CutCall:
    """A call that is cut: ``cuts``, the outermost first; ``gathered``: what moves first."""

    call: Call
    cuts: tuple[Cut, ...]
    gathered: tuple[Gathered, ...]

    @property
    def part(self) -> Call:
        """The first part."""
        return part_of(self.cuts[-1].call, self.cuts[-1].rule, 0, self.cuts[-1].number) if self.cuts else self.call

    @property
    def over(self) -> tuple[str, ...]:
        """The axes of the mesh that cut, in the order in which :meth:`parts` counts."""
        return tuple(name for cut in self.cuts for name in cut.over)

    def parts(self) -> list[Call]:
        """The call of each part, the innermost cut's counted fastest; one for all where all are the same."""
        found = _parts(self.call, self.cuts)
        return found[:1] if len({identity(c) for c in found}) == 1 else found

    def array_lies(self, name: str) -> MeshAxes:
        """How an array lies on the mesh: what each of its axes is cut over."""
        return self._lies(len(self.call.arrays[name].shape), [_of_array(c.rule, name) for c in self.cuts])

    def output_lies(self, name: str) -> MeshAxes:
        """How a result lies on the mesh; what is cut over nothing is the same on every device."""
        return self._lies(len(self.call.outputs[name][0]), [_of_output(c.rule, name) for c in self.cuts])

    def _lies(self, rank: int, along: Sequence[CutAxis | None]) -> MeshAxes:
        axes: list[tuple[str, ...]] = [()] * rank
        for cut, at in zip(self.cuts, along, strict=True):
            if at is not None:
                axes[at.axis] = (*axes[at.axis], *cut.over)
        return tuple(axes)

    def lines(self) -> Iterator[str]:
        """How the call is served, in words."""
        for cut in self.cuts:
            results = ", ".join(f"{n}: {JOINED_IN_WORDS[j.kind]}" for n, j in cut.rule.outputs.items())
            over = " and ".join(map(repr, cut.over))
            yield f"cut along {cut.rule.name} into {cut.number} parts over {over}: {results}"
        yield from map(str, self.gathered)
        if self.cuts:
            yield f"each part: {self.part!r}"


def _of_array(rule: PartitionRule, name: str) -> CutAxis | None:
    return rule.arrays.get(name)


def _of_output(rule: PartitionRule, name: str) -> CutAxis | None:
    joined = rule.outputs.get(name)
    return None if joined is None else joined.at


def identity(call: Call) -> tuple[Any, ...]:
    """What tells the parts of a call apart, all of the same extents: the arrays that are given, options and wants."""
    return call.present, tuple(call.options.items()), call.wants


def part_of(call: Call, rule: PartitionRule, index: int, number: int) -> Call:
    """One of so many equal parts of a call, of arrays without values."""
    extent = rule.extent // number
    arrays = {}
    for name, array in call.arrays.items():
        if array is None or (index and name in rule.once):
            continue
        shape, at = list(array.shape), rule.arrays[name]
        if at is not None:
            shape[at.axis] = extent * at.inner
        arrays[name] = call.framework.abstract(tuple(shape), call.dtype_of(name))
    options = {**call.options, **rule.options_at(index * extent, extent)}
    weights = {how.by for how in rule.outputs.values() if how.by}
    wants = {n for n in call.wants if not index or rule.outputs[n].kind != "first"} | weights
    return bind(call.spec, **arrays, **options).replace(
        wants=tuple(o.name for o in call.spec.outputs if o.name in wants)
    )


def _parts(call: Call, cuts: Sequence[Cut]) -> list[Call]:
    if not cuts:
        return [call]
    name, number = cuts[0].rule.name, cuts[0].number
    rule = next(r for r in partition_rules(call) if r.name == name)
    alike = not rule.once and not rule.starts  # else each part is another call
    found = [_parts(part_of(call, rule, i, number), cuts[1:]) for i in range(1 if alike else number)]
    return [part for some in found for part in some] * (number if alike else 1)


def chosen_cuts(
    call: Call, arrays: Mapping[str, MeshAxes], sizes: Mapping[str, int], outputs: Mapping[str, MeshAxes] | None = None
) -> CutCall:
    """How a call is cut.

    Args:
      arrays: how each of its arrays lies on the mesh; sizes: axis of the mesh -> number of devices along it.
      outputs: how results are wanted, where that is known: it counts before the arrays.
    """
    rules = {r.name: r for r in partition_rules(call)}
    placed = list(_placed(call, rules, arrays, outputs or {}))
    of: dict[str, tuple[str, ...]] = {}  # rule -> axes of the mesh
    for axis, devices in sizes.items():
        wanted = {p.rule for p in placed if axis in p.over and p.result}
        moved = {p.rule: _moved_bytes(call, rules[p.rule], axis, devices, arrays) for p in placed if axis in p.over}
        for _, _, name in sorted((n not in wanted, moved[n], n) for n in moved):
            over = (*of.get(name, ()), axis)
            if _why_not(rules[name], math.prod(sizes[a] for a in over)) is None:
                of[name] = over
                break
    cuts: list[Cut] = []
    inner = call
    for name, over in of.items():
        number = math.prod(sizes[a] for a in over)
        rule = next((r for r in partition_rules(inner) if r.name == name), None)
        if rule is None or _why_not(rule, number) is not None:
            continue
        ordered = next((p.over for p in placed if p.rule == name and {*p.over} == {*over}), over)
        cuts.append(Cut(rule, ordered, number, inner))
        inner = part_of(inner, rule, 0, number)
    found = CutCall(call, tuple(cuts), ())
    return CutCall(call, tuple(cuts), tuple(_moved(found, rules, arrays, sizes)))


class _Placed(NamedTuple):
    """An array, or a result, that is cut along a rule already, and over what."""

    rule: str
    over: tuple[str, ...]
    result: bool


def _placed(
    call: Call, rules: Mapping[str, PartitionRule], arrays: Mapping[str, MeshAxes], outputs: Mapping[str, MeshAxes]
) -> Iterator[_Placed]:
    for rule in rules.values():
        every = [(_of_array(rule, n), axes, False) for n, axes in arrays.items()]
        every += [(_of_output(rule, n), axes, True) for n, axes in outputs.items()]
        yield from (_Placed(rule.name, axes[at.axis], r) for at, axes, r in every if at is not None and axes[at.axis])


def _moved_bytes(call: Call, rule: PartitionRule, axis: str, devices: int, arrays: Mapping[str, MeshAxes]) -> float:
    """What each device receives if an axis of the mesh cuts along a rule: of an array that is cut otherwise all, or its
    new part, and twice what is added."""
    moved = 0.0
    for name, axes in arrays.items():
        at = rule.arrays[name]
        if any(axis in over for over in axes) and (at is None or axis not in axes[at.axis]):
            size = math.prod(call.arrays[name].shape) * DTYPES[call.dtype_of(name)].bits / 8
            moved += size if at is None else size / devices
    for name, how in rule.outputs.items():
        if how.kind != "beside":
            shape, dtype = call.outputs[name]
            moved += 2 * math.prod(shape) * DTYPES[dtype].bits / 8
    return moved


def _why_not(rule: PartitionRule, number: int) -> str | None:
    """Why a call is not cut into so many equal parts along a rule; None where it may be."""
    if rule.refusal is not None:
        return rule.refusal
    if not rule.extent or rule.extent % number:
        return f"{rule.name} is {rule.extent}, which {number} parts do not divide"
    return None


def _moved(
    found: CutCall, rules: Mapping[str, PartitionRule], arrays: Mapping[str, MeshAxes], sizes: Mapping[str, int]
) -> Iterator[Gathered]:
    """What lies otherwise than its part needs, and why."""
    along = {axis: cut.rule for cut in found.cuts for axis in cut.over}
    for name, axes in arrays.items():
        lies = found.array_lies(name)
        for i, over in enumerate(axes):
            for axis in over:
                if axis in lies[i]:
                    continue
                own = [r for r in rules.values() if (at := r.arrays[name]) is not None and at.axis == i]
                if axis in along:
                    why = f"the mesh's axis cuts {along[axis].name}"
                elif own:
                    number = math.prod(sizes[a] for a in over)
                    why = _why_not(own[0], number) or f"{own[0].name} is not cut beside the others"
                else:
                    why = f"{found.call.spec.name} is not cut along this axis"
                yield Gathered(name, i, axis, why)
