"""The error bounds of every op, for other people's tests: NumPy arrays in, a bound for each element out. No array
library but NumPy is imported.

>>> import numpy as np
>>> from portakern import bounds
>>> rng = np.random.default_rng(0)
>>> a, b = (bounds.rounded(rng.normal(size=s), "bfloat16") for s in ((64, 256), (256, 32)))
>>> found = bounds.matmul(a, b)
>>> found.reference.shape, found.error.shape, found.output().dtype
((64, 32), (64, 32), 'bfloat16')
>>> right = bounds.rounded(found.reference, "bfloat16")
>>> found.accepts(right), found.accepts(np.zeros_like(right)), found.accepts(-right)
(True, False, False)

``bounds.matmul(a, b)`` is ``bounds.of("matmul", a, b)``, and so for each op. Arrays of float64 or float32 are taken for
those of another dtype where ``dtype`` says so: what a test has of a bfloat16 tensor is ``tensor.float().numpy()``.

>>> bounds.softmax(np.float32([[0, 1, 2]]), dtype="bfloat16").output().dtype
'bfloat16'
>>> found.check(np.zeros((64, 32)))
Traceback (most recent call last):
    ...
portakern.testing.verdict.Broken: c[0, 0] is 0; the oracle says ...; 2048 of 2048 elements are out of bounds
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from portakern.core import registry, targets
from portakern.core.binder import bind
from portakern.core.call import Call
from portakern.errors import SpecError
from portakern.spec import ArrayArg, Spec
from portakern.spec.dtypes import DTYPES, numpy_dtype
from portakern.spec.options import shown
from portakern.spec.tolerance import Comparison, compare, permitted_error, rounded
from portakern.testing.threads import one_thread
from portakern.testing.verdict import Broken, describe, expected

__all__ = ["Bound", "OutputBound", "of", "rounded"]

WIDE = ("float64", "float32")
"""Dtypes in which a test holds the values of narrower ones."""


@dataclass(frozen=True)
class OutputBound:
    """One output of a call.

    Attributes:
      name: of the output; dtype: in which a kernel stores it.
      reference: the exact result of the given arrays, in float64; error: the largest |result - reference| of a right
        kernel, in each element; +inf where the op promises nothing.
      typical: the RMS error of random rounding, in each element; None: the op does not say.
      codes: the result is a code, and ``error`` that of the value before it is rounded.
    """

    name: str
    dtype: str
    reference: np.ndarray
    error: np.ndarray
    typical: np.ndarray | None
    codes: bool = False

    def compare(self, actual: Any) -> Comparison:
        """Which elements are out of bounds, with the rules of the dtype on NaN, infinities and overflow."""
        actual = np.asarray(actual)
        if actual.shape != self.reference.shape:
            raise SpecError(f"{self.name} has shape {actual.shape}; expected {self.reference.shape}")
        return compare(actual, self.reference, self.error, self.dtype, self.codes)

    def typical_share(self, actual: Any) -> float:
        """The RMS of error / typical error: about 1 for a right kernel that rounds at random, and no more than 2."""
        if self.typical is None:
            raise SpecError(f"{self.name}: the op gives no typical error; compare with its bound")
        with np.errstate(all="ignore"):
            z = np.abs(np.asarray(actual).astype(np.float64) - self.reference) / self.typical
        z = z[np.isfinite(z)]
        return float(np.sqrt(np.mean(np.square(z)))) if z.size else 0.0


@dataclass(frozen=True)
class Bound:
    """The bounds of a call's outputs, by name. ``reference``, ``error`` and ``typical`` are those of the first."""

    call: Call
    outputs: Mapping[str, OutputBound]

    @classmethod
    def of(
        cls,
        op: str | Spec[Any],
        *arrays: Any,
        dtype: str | Mapping[str, str] | None = None,
        target: str | None = None,
        any_order: bool = True,
        **options: Any,
    ) -> Bound:
        """The exact results of a call and the permitted error of each of their elements.

        Args:
          op: the op's name or spec; arrays: its arrays, in order; NumPy's, also of ml_dtypes. options: its options,
            and arrays by name.
          dtype: what float32 and float64 arrays stand for: the op's dtype, or argument -> dtype for some. Their
            values must be numbers of this dtype (:func:`rounded` makes them so): a kernel is not to blame for what its
            inputs lost.
          target: the architecture that the kernel runs on, as sm_90 or gfx90a: where the typical error, or what the
            hardware does to subnormals, depends on it. None: a host.
          any_order: whether the kernel may add terms in any order, one after the other too. False: chains of additions
            as short as portakern's own kernels promise, for a tighter bound.

        Raises:
          SpecError: the call is wrong, or an array has values that its dtype does not hold.
        """
        spec = registry.find_spec(op) if isinstance(op, str) else op
        names = [a.name for a in spec.arrays]
        if len(arrays) > len(names):
            raise SpecError(f"bounds of {spec.name}: {len(arrays)} arrays came; expected {', '.join(names)}")
        given = {n: x for n, x in zip(names, arrays, strict=False) if x is not None}
        given |= {a.name: options.pop(a.name) for a in spec.arrays if options.get(a.name) is not None}
        bound_call = bind(
            spec, **{n: _stored(spec.argument(n), np.asarray(x), dtype) for n, x in given.items()}, **options
        )
        return cls.of_call(bound_call, target, any_order)

    @classmethod
    def of_call(cls, call: Call, target: str | None = None, any_order: bool = True) -> Bound:
        """:meth:`of` for a bound call of NumPy arrays."""
        call.any_order = any_order
        if target is not None:
            call.target = targets.find(target).target
        wide, exact, errors = expected(call)
        with one_thread(), np.errstate(all="ignore"):
            typical: tuple[Any, ...] = (
                call.spec.spread(wide, exact) if call.spec.spread and not call.degenerate else (None,) * len(exact)
            )
        found = {}
        for i, o in enumerate(call.spec.outputs):
            if o.name in call.wants:
                shape, stored = call.outputs[o.name]
                error = np.broadcast_to(np.asarray(errors[i]), shape)
                usual = None if typical[i] is None else np.broadcast_to(typical[i], shape)
                found[o.name] = OutputBound(o.name, stored, exact[i], error, usual, o.codes)
        return cls(wide, found)

    def output(self, name: str | None = None) -> OutputBound:
        """An output; None: the first."""
        if name is not None and name not in self.outputs:
            raise SpecError(
                f"{self.call.spec.name}: no output {shown(name)}; expected one of {', '.join(self.outputs)}"
            )
        return self.outputs[next(iter(self.outputs)) if name is None else name]

    @property
    def reference(self) -> np.ndarray:
        return self.output().reference

    @property
    def error(self) -> np.ndarray:
        return self.output().error

    @property
    def typical(self) -> np.ndarray | None:
        return self.output().typical

    @property
    def derivation(self) -> str:
        """The formula of the bound and how it is derived, and that of the typical error."""
        spec = self.call.spec
        return "\n\n".join(inspect.cleandoc(fn.__doc__) for fn in (spec.bound, spec.spread) if fn and fn.__doc__)

    def accepts(self, *actual: Any) -> bool:
        """Whether every element of the outputs, in their order, is within its bound."""
        return all(not o.compare(x).bad.any() for o, x in self._paired(actual))

    def share(self, *actual: Any) -> float:
        """The largest error of any element as a share of its bound."""
        return max((o.compare(x).worst for o, x in self._paired(actual)), default=0.0)

    def check(self, *actual: Any) -> None:
        """Raise :class:`portakern.testing.Broken`, an AssertionError, with the first element that is out of bounds."""
        for o, x in self._paired(actual):
            found = o.compare(x)
            if found.bad.any():
                permitted = permitted_error(o.error, o.reference, o.dtype, o.codes)
                raise Broken(describe(self.call, o.name, np.asarray(x), o.reference, permitted, found.bad, {}))

    def _paired(self, actual: tuple[Any, ...]) -> list[tuple[OutputBound, Any]]:
        if len(actual) != len(self.outputs):
            raise SpecError(
                f"{self.call.spec.name}: {len(actual)} outputs came; expected {len(self.outputs)}: "
                f"{', '.join(self.outputs)}"
            )
        return list(zip(self.outputs.values(), actual, strict=True))


of = Bound.of


def _stored(a: ArrayArg, array: np.ndarray, dtype: str | Mapping[str, str] | None) -> np.ndarray:
    """An argument in the dtype that it stands for."""
    if dtype is None or array.dtype.name not in WIDE:
        return array
    if isinstance(dtype, Mapping):
        wanted = dtype.get(a.name)
    else:
        wanted = dtype if a.follows else "float32" if a.statistic and dtype != "float64" else None
        wanted = wanted or (dtype if dtype in a.dtypes else None)
    if wanted is None:
        return array
    if wanted not in DTYPES:
        raise SpecError(f"bounds: dtype is {shown(wanted)}; expected one of {', '.join(DTYPES)}")
    with np.errstate(over="ignore", invalid="ignore"):
        found = array.astype(numpy_dtype(wanted))
        other = (found.astype(np.float64) != array.astype(np.float64)) & ~np.isnan(array)
    if other.any():
        index = tuple(int(i) for i in np.unravel_index(int(np.argmax(other)), other.shape))
        raise SpecError(
            f"bounds: {a.name}{[*index]} is {float(array[index])!r}, which {wanted} does not hold; pass what the "
            f"kernel was given, or bounds.rounded({a.name}, {wanted!r}) to both"
        )
    return found


def __getattr__(name: str) -> Callable[..., Bound]:
    if name.startswith("_") or name not in registry.ops():
        raise AttributeError(
            f"portakern.bounds has no {name!r}; expected of, rounded, or an op: {', '.join(registry.ops())}"
        )
    found = functools.partial(of, name)
    found.__doc__ = f"The bound of {name}: ``of({name!r}, ...)``."
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, *registry.ops()])
