"""Timed calls get other values each time, and their results are compared with these values.

A kernel that returned its earlier result would be the fastest of all. Therefore the values of the arrays are permuted
before each call, while the clock is stopped, along a dimension whose indices are independent: the result is permuted in
the same way. It is compared after the clock has stopped.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from portakern.core import registry
from portakern.core.call import Call
from portakern.testing.layouts import Buffer
from portakern.testing.sampled import along, apart, chosen_axes, extents_of, turned
from portakern.tools.bench.contenders import ReadyCall, UserCall
from portakern.tools.bench.verdicts import Judge

__all__ = ["Fresh", "StaleResult", "turning"]

ALWAYS, ONE_IN = 3, 4
"""Of the results whose bits are not those of the first in other places (a sum over what changed places adds in another
order) so many are held to the bound, and of the others one in so many: nobody knows which."""

AHEAD_BYTES = 1 << 31
"""Bytes of arrays that are made for calls that a clock makes one after the other."""

SHIFTS = 1024
"""More than there are samples."""

Axis = tuple[str, int]


class StaleResult(RuntimeError):
    """A timed call returned a result that does not belong to its values."""


def turning(call: Call, runs: Collection[str] = ()) -> Axis | None:
    """The dimension, and which of its axes, whose indices change places: of those that no wanted output, or else no
    result of the forward op, sees together, the longest; None where each has one index. Along what ``runs`` number,
    indices keep their places: other runs are other work."""
    spec = call.spec
    forward = registry.forward_of(spec)
    options = {**{o.name: o.default for o in (forward or spec).options}, **call.options}
    names = apart(spec, call.options, call.wants, call.present)
    if not names and forward is not None:
        names = apart(forward, options, [o.name for o in forward.outputs], call.present)
    found = [(n, i, e) for n in names if n in call.dims for i, e in enumerate(extents_of(call, n))]
    kept = {factor for a in spec.arrays if a.name in runs for factor in a.dims[-1].factors}
    kept |= {factor for a in spec.arrays for d in a.dims if d.plus for factor in d.factors}  # offsets
    if spec.rewriter:
        kept |= {factor for a in spec.arrays if a.name in spec.generators for d in a.dims for factor in d.factors}
    found = [(n, i, e) for n, i, e in found if e > 1 and n not in kept and not along(call, n, i)]
    return max(found, key=lambda f: f[2])[:2] if found else None


class Fresh:
    """A contender's call with new values each time, for a stopwatch.

    Attributes:
      entry: the contender's; before: its first result, which was right; judge: of the case.
      axis: what changes places (:func:`turning`). None where there is no such dimension, and for calls that a library
      prepared on arrays of its own: those are compared, on the same values.
    """

    def __init__(
        self, entry: ReadyCall, before: Sequence[Any], judge: Judge, working: dict[str, list[dict[str, Any]]]
    ) -> None:
        """``working``: array library -> sets of arrays that its calls are made on, for all contenders."""
        self.entry, self.before, self.judge = entry, before, judge
        self.call, self.instruments = entry.call, entry.instruments
        self.served = entry.run if isinstance(entry.run, UserCall) else None
        self.axis = turning(self.call, judge.inputs.runs) if self.served else None
        self.base = dict(self.served.first) if self.served else {}
        self.before_timing = self.served.arrays if self.served else {}
        self.made: list[dict[str, Any]] = []
        self.shifts: list[int] = []
        self.unused: list[int] = []
        self.calls = self.looked = 0
        self.result: Any = None
        if (self.axis or self.call.over) and not self.call.framework.immutable:
            here = f"{self.call.framework.name} {self.call.device}"
            if here not in working:  # one more for the call before the one that is clocked, on the host or over them
                sets = 2 if self.instruments.on_host or self.call.over else 1
                working[here] = [{n: self.own(n, a) for n, a in self.base.items()} for _ in range(sets)]
            self.made = working[here]

    def own(self, name: str, array: Any) -> Any:
        """The array in memory of its own, that lies as it does."""
        framework = self.call.framework
        if framework.contiguous(array):
            return framework.copy(array)
        b: Buffer = self.judge.inputs.buffers[name]
        memory = b.memory.view(np.uint8).copy().view(b.memory.dtype)
        return framework.strided(memory, b.shape, b.strides, b.offset, self.call.device)

    def renew(self, count: int = 1) -> None:
        """Other values for the next calls, before any clock runs. Nothing of the last result is left in memory."""
        self.result, self.calls = None, 0
        if self.axis is None and not self.made:
            return
        extent = extents_of(self.call, self.axis[0])[self.axis[1]] if self.axis else 1
        count = max(count, 2) if self.call.over else count
        size = sum(int(a.nbytes) for a in self.base.values())
        most = AHEAD_BYTES // max(size, 1) if self.call.framework.immutable else len(self.made)
        count = max(1, min(count, most))
        self.shifts = [self.shift(extent) for _ in range(count)]
        if self.call.framework.immutable:
            self.made = [dict(self.moved(self.base, shift)) for shift in self.shifts]
        else:
            for arrays, shift in zip(self.made, self.shifts, strict=False):
                for name, array in self.moved(self.base, shift):
                    once = _once(self.call.framework.strides(arrays[name]), tuple(array.shape))
                    self.instruments.put(arrays[name][once], array[once])
        self.instruments.wait([a for arrays in self.made for a in arrays.values()])

    def shift(self, extent: int) -> int:
        """Nobody knows which; none comes again before all others have come. 0 where nothing changes places."""
        if extent == 1:
            return 0
        if not self.unused:
            self.unused = secrets.SystemRandom().sample(range(1, extent), min(extent - 1, SHIFTS))
        return self.unused.pop()

    def moved(self, arrays: Mapping[str, Any], shift: int) -> Iterator[tuple[str, Any]]:
        """The arrays with their values in other places, of inputs or of outputs."""
        if self.axis is None:
            yield from arrays.items()
            return
        notation = {a.name: a.dims for a in self.call.spec.arrays} | {o.name: o.dims for o in self.call.spec.outputs}
        chosen = turned(self.call, *self.axis, shift)
        for name, array in arrays.items():
            found = chosen_axes(tuple(array.shape), notation[name], self.call, chosen)
            index = [(axis, i) for axis, i in found if not np.array_equal(i, np.arange(len(i)))]
            yield name, self.instruments.taken(array, index) if index else array

    def __call__(self) -> Any:
        if self.made and self.served:
            self.served.arrays = self.made[self.calls % len(self.shifts)]
        self.calls += 1
        self.result = self.entry.run()
        return self.result

    def clocked(self) -> None:
        """Hold the last result to what its values give; Stale where it is not that."""
        if self.result is None:
            return
        framework, outputs = self.call.framework, tuple(self.result)
        self.result = None
        if self.instruments.on_host:  # a thread of its own may still be at it
            outputs = tuple(framework.copy(o) if framework.owns(o) else o for o in outputs)
        names = self.call.wants
        right_form = len(outputs) == len(names) and all(
            framework.owns(o) and framework.settled(type(o)) and tuple(o.shape) == self.call.outputs[n][0]
            for n, o in zip(names, outputs, strict=False)
        )
        if right_form and self.shifts:
            back = -self.shifts[(self.calls - 1) % len(self.shifts)]
            outputs = tuple(o for _, o in self.moved(dict(zip(names, outputs, strict=True)), back))
        if right_form and all(map(self.instruments.same, outputs, self.before)):
            return
        self.looked += 1
        if self.looked > ALWAYS and secrets.randbelow(ONE_IN):
            return
        verdict = self.judge.verdict(self.entry.framework, outputs, self.call.target, self.call.interpret)
        if not verdict.right:
            raise StaleResult(f"right before it was timed, wrong on other values during timing: {verdict.why}")

    def close(self) -> None:
        """The contender's call is on its first values again."""
        self.result, self.made = None, []
        if self.served:
            self.served.arrays = self.before_timing


def _once(strides: Sequence[int] | None, shape: Sequence[int]) -> tuple[slice, ...]:
    """Each element of an array once, of which some axes may lie in no memory of their own."""
    return tuple(slice(0, 1) if s == 0 and n > 1 else slice(None) for s, n in zip(strides or (), shape, strict=True))
