"""A candidate in its own process, as a function of NumPy arrays that the checker can call."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from portakern.core.binder import bind
from portakern.core.failing import Ended
from portakern.errors import SpecError
from portakern.spec import Spec
from portakern.spec.dtypes import DTYPES, numpy_dtype
from portakern.testing.evidence import FILL
from portakern.testing.layouts import BESIDE, same_bits
from portakern.testing.verdict import LOOKS, Broken
from portakern.tools.judge.mapping import Slot
from portakern.tools.judge.process import Process
from portakern.tools.judge.wire import WireOutput

__all__ = ["Remote", "signature_of"]

SLACK = 1 << 16
"""Bytes more than expected that outputs may have, so that one of another dtype can be told."""


class Remote:
    """Calls a candidate. Effects on memory are reproduced in this process: an input that the candidate writes to is
    changed here, and outputs that share memory with inputs or earlier outputs share memory here.

    ``places``: of the op's arguments; ``theirs``: array -> the candidate's shape of it, where axes were flattened.
    """

    def __init__(
        self,
        process: Process,
        spec: Spec[Any],
        slots: Mapping[str, Slot],
        fixed: Mapping[str, Any],
        shapes: Mapping[str, Sequence[int]],
        signature: inspect.Signature,
    ) -> None:
        self.process, self.spec, self.places, self.theirs = process, spec, slots, shapes
        self.fixed = fixed
        self.__signature__ = signature
        self.ended: Ended | None = None
        self.before: list[np.ndarray] = []
        self.kept: list[np.ndarray] = []
        self.fill: float | None = None

    @contextmanager
    def fresh(self, like: tuple[Any, ...]) -> Iterator[None]:
        """Inside, arrays that the candidate is handed to write to hold a number, not NaN."""
        self.fill = FILL
        try:
            yield
        finally:
            self.fill = None

    def __call__(self, /, *args: Any, **named: Any) -> tuple[Any, ...]:
        if self.ended:
            raise self.ended
        required = [a.name for a in self.spec.arrays if not a.optional]
        given = {**dict(zip(required, args, strict=True)), **named}
        arrays = {a.name: given.pop(a.name) for a in self.spec.arrays if given.get(a.name) is not None}
        ours = {name: _memory(x) for name, x in arrays.items()}
        sent = {name: self.sent(name, x, ours[name]) for name, x in arrays.items()}
        new = [*map(_where, ours.values())] != [*map(_where, self.before)]
        self.before = [*ours.values()]  # while they are held nobody else has their memory
        if new:
            self.kept.clear()
        try:
            return self.call_remotely(arrays, given, sent, new)
        except Ended as e:
            self.ended = e
            self.process.end()
            raise
        finally:
            for name, x in arrays.items():
                self.returned(name, x, ours[name], *sent[name])

    def call_remotely(
        self, arrays: Mapping[str, np.ndarray], options: Mapping[str, Any], sent: Mapping[str, Any], new: bool
    ) -> tuple[Any, ...]:
        """The outputs of one call over there."""
        built_in = {n: v for n, v in self.fixed.items() if n not in options}
        call = bind(self.spec, **arrays, **options, **built_in)
        forms: dict[str, Any] = {
            n: {"shape": [*self.theirs_of(n, s)], "dtype": d, "fill": self.fill}
            for n, (s, d) in call.outputs.items()
            if n in call.wants
        }
        most = sum(math.prod(f["shape"]) * DTYPES[f["dtype"]].numpy.itemsize for f in forms.values())
        first: dict[int, str] = {}
        same, described, memories, at = [], [], [], 0
        for name, x in arrays.items():
            if id(x) in first:
                same.append([name, first[id(x)]])
                continue
            first[id(x)] = name
            memory, view = sent[name]
            start = view.ctypes.data - memory.ctypes.data
            described.append({
                "name": name, "dtype": view.dtype.name, "shape": [*view.shape], "at": at, "bytes": memory.nbytes,
                "strides": [s // view.itemsize for s in view.strides], "offset": start // view.itemsize,
            })  # fmt: skip
            memories.append(memory)
            at += -(-memory.nbytes // 64) * 64
        handed = {n: list(v) if isinstance(v, tuple) else v for n, v in options.items()}
        ask = {"arrays": described, "same": same, "options": handed, "forms": forms, "forget": new, "poison": new}
        told, payload = self.process.call(ask, memories, 2 * most + SLACK)
        return self.outputs(told, payload, arrays, call.wants)

    def outputs(
        self, descriptions: Sequence[WireOutput], payload: Sequence[np.ndarray] | None,
        arrays: Mapping[str, np.ndarray], names: Sequence[str],
    ) -> tuple[Any, ...]:  # fmt: skip
        """The outputs as the checker sees them."""
        found: list[Any] = []
        left = [*(payload or ())]
        for i, o in enumerate(descriptions):
            name = names[i] if i < len(names) else f"output {i}"
            if o.kind:
                found.append(type(o.kind, (), {})())
                continue
            if payload is None or o.dtype not in DTYPES:
                raise Broken(f"{name} is {o.dtype} of shape {o.shape}", "form", LOOKS["form"])
            try:
                value = left.pop(0).view(numpy_dtype(o.dtype)).reshape(o.shape)
                found.append(self.placed(name, value, o, arrays))
            except ValueError:  # NumPy has no such shape, or it has not the axes that --map names
                raise Broken(f"{name} is {o.dtype} of shape {o.shape}", "form", LOOKS["form"]) from None
        return tuple(found)

    def placed(self, name: str, value: np.ndarray, description: WireOutput, arrays: Mapping[str, np.ndarray]) -> Any:
        """An output in memory that it shares with what it shared it with over there."""
        place = self.places.get(name)
        value = place.views.to_op(value) if place else value
        inputs = [arrays[n] for n in description.shares if n in arrays and arrays[n].shape == value.shape]
        if inputs and inputs[0].dtype == value.dtype:
            return inputs[0][...]
        earlier = [self.kept[i] for i in description.before if i < len(self.kept)]
        earlier = [e for e in earlier if e.shape == value.shape and e.dtype == value.dtype]
        if earlier:
            earlier[0][...] = value
            value = earlier[0][...]
        elif not description.contiguous:
            wide = np.empty((*value.shape, 2), value.dtype)
            wide[..., 0] = value
            value = wide[..., 0]
        else:
            value = np.ascontiguousarray(value)
        self.kept.append(value)
        return value

    def theirs_of(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The candidate's shape of an output that it is handed to write to."""
        place = self.places.get(name)
        if place is None:
            return tuple(shape)
        example = np.broadcast_to(np.zeros((), np.int8), tuple(shape))
        return place.views.back(example, self.theirs.get(name)).shape

    def sent(self, name: str, x: np.ndarray, array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(a memory, the view of it that the candidate gets) of an array, whose own memory that is unless the candidate
        sees it otherwise."""
        place = self.places.get(name)
        if place is None or not place.views.name:
            return array, x
        theirs = place.views.back(x, self.theirs.get(name))
        if x.flags.c_contiguous and theirs.flags.c_contiguous and np.may_share_memory(x, theirs):
            return array, theirs
        beside = BESIDE if array.nbytes > x.nbytes else 0
        memory = np.full(theirs.size + 2 * beside, np.nan if x.dtype.kind not in "iub" else 119, x.dtype)
        view = memory[beside : beside + theirs.size].reshape(theirs.shape)
        view[...] = theirs
        return memory.view(np.uint8), view

    def returned(self, name: str, x: np.ndarray, array: np.ndarray, memory: np.ndarray, view: np.ndarray) -> None:
        """What the candidate did to a memory of which the array is a view, done to the array."""
        if memory is array:
            return
        values = self.places[name].views.to_op(view)
        if not same_bits(values, x):
            x[...] = values
        beside = (memory.nbytes // view.itemsize - view.size) // 2
        around = memory.view(view.dtype)
        poison = around[:beside], around[beside + view.size :]
        fresh = np.full(beside, np.nan if x.dtype.kind not in "iub" else 119, x.dtype)
        if beside and not all(same_bits(p, fresh) for p in poison):
            array[0] ^= 255


def _memory(x: np.ndarray) -> np.ndarray:
    """The bytes of all that an array is a view of."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x if x.dtype == np.uint8 and x.ndim == 1 else x.view(np.uint8).reshape(-1)


def _where(memory: np.ndarray) -> tuple[int, int]:
    return memory.ctypes.data, memory.nbytes


def signature_of(spec: Spec[Any], parameters: Any, slots: Mapping[str, Slot], who: str) -> inspect.Signature:
    """Which of the op's arguments a candidate takes: those that were mapped, else those that it names.

    Raises:
      SpecError: it cannot be called so.
    """
    required = [a.name for a in spec.arrays if not a.optional]
    known = {a.name for a in spec.arrays if a.optional} | {o.name for o in spec.options}
    if any(p.position is not None or p.keyword or p.parameter for p in slots.values()):
        lacks = [n for n in required if n not in slots]
        if lacks:
            raise SpecError(f"judge: --map lacks {lacks[0]}, which every {spec.name} has: add {lacks[0]}=0")
        taken = known & {*slots}
        always = {n for n in taken if slots[n].parameter}  # else a module keeps what it was given before
    else:
        unknown = [(n, "POSITIONAL_OR_KEYWORD", True) for n in required]  # what is built in does not say
        taken, always = _named_by(spec, required, known, parameters or unknown, who)
    empty, kinds = inspect.Parameter.empty, inspect.Parameter
    return inspect.Signature([
        *(kinds(n, kinds.POSITIONAL_ONLY) for n in required),
        *(kinds(n, kinds.KEYWORD_ONLY, default=empty if n in always else None) for n in sorted(taken)),
    ])  # fmt: skip


def _named_by(
    spec: Spec[Any], required: Sequence[str], known: set[str], parameters: Any, who: str
) -> tuple[set[str], set[str]]:
    """(the op's arguments that a candidate names beside those that come by position, those of them without a
    default)."""
    found = [(str(n), str(k), bool(e)) for n, k, e in parameters]
    by_place = [p for p in found if p[1].startswith("POSITIONAL")]
    if len(by_place) < len(required) and not any(k == "VAR_POSITIONAL" for _, k, _ in found):
        raise SpecError(
            f"judge: {who} takes {len(by_place)} arguments by position; expected {len(required)} for "
            f"{', '.join(required)}: say with --map where they go, {required[0]}=0"
        )
    rest = [p for p in found if p not in by_place[: len(required)] and not p[1].startswith("VAR_")]
    strange = [n for n, _, lone in rest if lone and n not in known]
    if strange:
        raise SpecError(
            f"judge: {who} needs {strange[0]}, which {spec.name} does not have; say with --map what it is, as in "
            f"{spec.outputs[0].name}={strange[0]} for an array that it writes to"
        )
    return {n for n, _, _ in rest if n in known}, {n for n, _, lone in rest if lone}
