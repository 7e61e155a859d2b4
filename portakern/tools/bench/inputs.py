"""The arrays of a timed call, on the host for the oracle and on the device for the contenders."""

from __future__ import annotations

import functools
import hashlib
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from portakern.core.binder import bind
from portakern.core.call import Call, dropped_dims, shape_of
from portakern.core.framework import Framework
from portakern.core.gradients import wiring
from portakern.core.targets import HOST
from portakern.errors import SpecError
from portakern.spec import Spec
from portakern.spec.dtypes import DTYPES, numpy_dtype
from portakern.testing.cases import Case, generators
from portakern.testing.layouts import LAYOUTS, Buffer
from portakern.tools.bench.suites import TimedCase

__all__ = ["Inputs", "for_gradient", "make"]

PERIOD = 4_194_301
"""Of random values that repeat, a prime: no two tiles or rows of an array hold the same ones in the same places."""


@dataclass(frozen=True)
class Inputs:
    """A call's arrays: ``buffers`` on the host, ``call`` bound to those on the device. ``options``: those given.
    ``runs``: arrays whose values lie in an order that is part of the call."""

    spec: Spec[Any]
    buffers: Mapping[str, Buffer]
    call: Call
    options: Mapping[str, Any]
    runs: frozenset[str] = frozenset()

    def mark(self, names: Iterable[str]) -> str:
        """A digest of these arrays' values."""
        digest = hashlib.blake2b(digest_size=16)
        for name in names:
            digest.update(self.buffers[name].memory.view(np.uint8).data)
        return digest.hexdigest()

    def counted(self, call: Call) -> Call:
        """A contender's call with the values of integer arrays on the host, from which a spec may count operations."""
        integers = {n: b.view() for n, b in self.buffers.items() if b.memory.dtype.kind == "i"}
        return call.replace(arrays={**call.arrays, **integers})

    def of_others(self, arrays: Mapping[str, np.ndarray]) -> Inputs:
        """The op with the same options on other arrays, on the same device."""
        buffers = {n: _contiguous(x) for n, x in arrays.items()}
        return _placed(self.spec, buffers, self.options, self.call.framework, self.call.device, self.call.over)

    @property
    def strided(self) -> bool:
        """Whether any array lies otherwise than contiguous."""
        return any(not b.view().flags.c_contiguous for b in self.buffers.values())


def make(case: TimedCase, framework: Framework, device: Any, seed: int = 0, measured: bool = True) -> Inputs:
    """Random arrays of a forward call: the values that the suite gives, standard normal ones, or what an argument's
    generator makes; ``measured``: that for measuring where there is one, such as sequences of equal lengths.

    Raises:
      SpecError: a dimension has no extent, or the op refuses the call.
    """
    spec = case.forward
    missing = [d for d in spec.dims if d not in case.dims]
    if missing:
        raise SpecError(f"{spec.name}: the suite {case.suite!r} gives no extent for {', '.join(missing)}")
    dims = {**case.dims, **dropped_dims(spec, case.dims, case.options)}
    given = [a for a in spec.arrays if not a.optional or a.name in case.given]
    shapes = {a.name: shape_of(a.dims, dims) for a in given}
    drawn = Case(
        case.dtype, shapes, seed=seed, options=case.options, dtypes={**_own(spec, case.dtype), **case.array_dtypes}
    )
    made = {**generators(spec, None), **(spec.measured if measured else {})}
    buffers = {}
    for a in given:
        dtype = drawn.dtype_of(a)
        if a.name in case.runs:
            position = np.arange(shapes[a.name][-1]) // case.runs[a.name]
            values = np.broadcast_to(position.astype(numpy_dtype(dtype)), shapes[a.name])
        elif a.name in case.values:
            values = _given(spec, a.name, case.values[a.name], shapes[a.name], dtype)
        elif DTYPES[dtype].floating and a.name not in made:
            values = _normal(shapes[a.name], dtype, (seed, zlib.crc32(a.name.encode())))
        else:
            values = drawn.drawn(spec, a.name, measured=measured).astype(numpy_dtype(dtype))
        buffers[a.name] = _laid(values, case.layouts.get(a.name))
    return replace(
        _placed(spec, buffers, case.options, framework, device, case.overwrite),
        runs=frozenset((*case.runs, *case.values, *spec.measured)),
    )


def _given(spec: Spec[Any], name: str, value: Any, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """The values that a suite gives: a number for all elements, or a list of the array's shape."""
    values = np.asarray(value)
    if values.shape not in ((), shape) or values.dtype.kind not in "iu":
        raise SpecError(
            f"{spec.name}: the values of {name} have shape {values.shape} and are {values.dtype}; expected a whole "
            f"number, or a list of shape {shape}"
        )
    return np.broadcast_to(values.astype(numpy_dtype(dtype)), shape)


def for_gradient(forward: Inputs, outputs: Mapping[str, Any], seed: int = 0) -> Inputs:
    """The arrays of the op of the gradients: what it takes of the forward call's arrays and ``outputs``, which lie on
    the device, and random cotangents: of what the forward op always gives, and others that the gradient op needs."""
    call = forward.call
    wired, framework = wiring(forward.spec), forward.call.framework
    needed = {a.name for a in wired.vjp.arrays if not a.optional}
    needed |= {wired.cotangents[o.name] for o in forward.spec.outputs if o.name in wired.cotangents and not o.wanted_by}
    buffers = {n: forward.buffers[n] for n in wired.inputs if n in forward.buffers}
    saved = wired.saves(call.options)
    on_device = {n: call.arrays[n] for n in buffers} | {n: outputs[n] for n in saved}
    buffers |= {n: _contiguous(framework.to_numpy(outputs[n])) for n in saved}
    for output, name in wired.cotangents.items():
        if name in needed:
            shape, dtype = call.outputs[output]
            buffers[name] = _contiguous(_normal(shape, dtype, (seed, zlib.crc32(name.encode()))))
            on_device[name] = _on_device(buffers[name], framework, call.device)
    options = {n: v for n, v in forward.options.items() if n in wired.options}
    return Inputs(wired.vjp, buffers, bind(wired.vjp, **on_device, **options), options, forward.runs)


def _placed(
    spec: Spec[Any], buffers: dict[str, Buffer], options: Mapping[str, Any], framework: Framework, device: Any,
    overwrite: tuple[str, ...] = (),
) -> Inputs:  # fmt: skip
    arrays = {n: _on_device(b, framework, device) for n, b in buffers.items()}
    over = {"overwrite": overwrite} if overwrite else {}
    return Inputs(spec, buffers, bind(spec, **arrays, **options, **over), options)


def _on_device(b: Buffer, framework: Framework, device: Any) -> Any:
    """Memory of its own: on a CPU a framework may share NumPy's, which the oracle reads."""
    here = framework.target(device).platform == HOST.platform
    memory = b.memory.view(np.uint8).copy().view(b.memory.dtype) if here else b.memory
    return framework.strided(memory, b.shape, b.strides, b.offset, device)


def _own(spec: Spec[Any], dtype: str) -> dict[str, str]:
    """Arrays that may have a dtype of their own have the op's where they can."""
    return {a.name: dtype for a in spec.arrays if not a.follows and dtype in a.dtypes}


def _normal(shape: tuple[int, ...], dtype: str, seed: tuple[int, ...]) -> np.ndarray:
    """Drawing them all would take longer than the kernels do."""
    values = _period(dtype, seed)
    bits = values.view(f"u{values.itemsize}")  # NumPy copies what it does not know as a number an element at a time
    return np.resize(bits, shape).view(values.dtype) if math.prod(shape) else np.empty(shape, values.dtype)


@functools.lru_cache(maxsize=16)
def _period(dtype: str, seed: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(PERIOD).astype(numpy_dtype(dtype))


def _contiguous(values: np.ndarray) -> Buffer:
    values = np.ascontiguousarray(values)
    strides = [s // values.itemsize for s in values.strides]
    return Buffer(values.reshape(-1), values.shape, tuple(strides), 0)


def _laid(values: np.ndarray, layout: str | None) -> Buffer:
    return LAYOUTS[layout](values) if layout else _contiguous(values)
