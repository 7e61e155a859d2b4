"""Laws: what a law may draw, and how its assertion is checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from portakern.core.backend import ANY, Drawn
from portakern.core.binder import bind
from portakern.core.framework import Framework
from portakern.spec.dtypes import numpy_dtype
from portakern.testing.layouts import other_bits, row_major
from portakern.testing.sizes import Limits
from portakern.testing.subject import Subject
from portakern.testing.verdict import PROMISES, BrokenPromise

__all__ = ["ArgumentNotTaken", "Draw", "LawCase", "run_law"]


class ArgumentNotTaken(Exception):
    """A law needs an argument that the implementation does not take."""


@dataclass(frozen=True)
class LawCase:
    """One instance of a law; ``to_json`` gives the line that :func:`portakern.testing.replay` takes."""

    law: str
    dtype: str
    seed: int

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))


class Unordered(np.ndarray):
    """A non-deterministic output, or a value derived from it: laws do not compare its bits."""


class Draw:
    """Random extents and arrays for a law, and its assertion. ``dtype``: the op's; ``drawn``: the limits of a variant
    that supports few calls; ``compared``: whether anything was asserted yet."""

    def __init__(self, dtype: str, seed: int, drawn: Drawn = ANY) -> None:
        self.dtype = dtype
        self.drawn = drawn
        self.rng = np.random.default_rng(seed)
        self.compared = False

    def extent(self, lo: int, hi: int, dim: str = "") -> int:
        """From lo to hi; ``dim``: the dimension, where a variant may take only some."""
        return self.drawn.extent(dim, int(self.rng.integers(lo, hi + 1)))

    def normal(self, *shape: int) -> np.ndarray:
        """Standard normal values in the op's dtype."""
        return self.rng.standard_normal(shape).astype(numpy_dtype(self.dtype))

    def integers(self, lo: int, hi: int, *shape: int, dtype: str | None = None) -> np.ndarray:
        """Integers from lo to hi, both included, in the op's dtype or another."""
        return self.rng.integers(lo, hi + 1, shape).astype(numpy_dtype(dtype or self.dtype))

    def row_alone(self, run: Callable[[np.ndarray], np.ndarray]) -> None:
        """The law of an op on rows: a row gives the same bits alone and among others."""
        x = self.normal(self.extent(2, 40), self.extent(1, 300))
        row = self.extent(0, x.shape[0] - 1)
        self.same_bits(run(x[row : row + 1]), run(x)[row : row + 1], "a row alone")

    def same_bits(self, actual: np.ndarray, want: np.ndarray, what: str) -> None:
        """Assert that two results are equal to the bit, unless one is non-deterministic."""
        self.compared = True
        if actual.shape != want.shape or actual.dtype != want.dtype:
            raise BrokenPromise(
                f"{what}: {actual.dtype.name} {actual.shape} and {want.dtype.name} {want.shape}; expected the same",
                "laws",
                PROMISES["laws"],
            )
        if isinstance(actual, Unordered) or isinstance(want, Unordered):
            return
        differ = other_bits(actual, want)
        if differ.any():
            index = tuple(int(i) for i in np.unravel_index(int(np.argmax(differ)), differ.shape))
            raise BrokenPromise(
                f"{what}: {float(actual[index]):.9g} and {float(want[index]):.9g} at {list(index)}; "
                f"{int(differ.sum())} of {differ.size} elements differ",
                "laws",
                PROMISES["laws"],
            )


def run_law(subject: Subject, case: LawCase, limits: Limits | None = None) -> bool:
    """Assert one instance of a law on a subject; whether it asserted anything, as one of 16 bits does not in float32.

    Raises:
      BrokenPromise: it does not hold. ArgumentNotTaken: it needs an argument that ``limits`` or the subject do not
      have.
    """
    fw, spec = subject.framework, subject.spec
    limits = limits or Limits(arguments=subject.arguments)
    op = subject.run({})
    required, names = [a.name for a in spec.arrays if not a.optional], [o.name for o in spec.outputs]
    defaults = {o.name: o.default for o in spec.options if o.name in subject.always}

    def on_device(a: np.ndarray) -> Any:
        memory = np.ascontiguousarray(a).reshape(-1)
        return fw.strided(memory, a.shape, row_major(a.shape), 0, subject.device)

    def run(*arrays: np.ndarray | None, **options: Any) -> Any:
        given = {a.name: on_device(x) for a, x in zip(spec.arrays, arrays, strict=False) if x is not None}
        optional = {n: x for n, x in given.items() if n not in required}
        lacks = subject.always & {a.name for a in spec.arrays} - {*given}
        if lacks or not all(map(limits.takes, (*optional, *options))):
            raise ArgumentNotTaken
        with fw.compiled_each():
            out = op(*(given[n] for n in required), **optional, **{**defaults, **options})
        if isinstance(out, tuple | list) and not spec.is_vjp:
            wants = bind(spec, **given, **options).wants
            out = out[names.index(wants[0])] if len(wants) == 1 and len(out) == len(names) else out
        if not isinstance(out, tuple | list):
            return shown(names[0], out)
        return tuple(None if o is None else shown(name, o) for name, o in zip(names, out, strict=False))

    def shown(name: str, array: Any) -> np.ndarray:
        copied = _copy(fw, array)
        return copied.view(Unordered) if name in subject.unordered else copied

    law: Callable[..., None] = spec.laws[case.law]
    draw = Draw(case.dtype, case.seed, limits.drawn)
    law(run, draw)
    return draw.compared


def _copy(fw: Framework, array: Any) -> np.ndarray:
    """What an array holds now: the next call may overwrite it."""
    return np.array(fw.to_numpy(array))
