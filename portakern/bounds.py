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

__all__ = ["Bound", "OutputBound", "OutputBounds", "of", "rounded", "stored"]

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
class OutputBounds:
    """The bounds of several arrays, by name. ``reference``, ``error`` and ``typical`` are those of the first."""

    outputs: Mapping[str, OutputBound]

    def output(self, name: str | None = None) -> OutputBound:
        """An output; None: the first."""
        if name is not None and name not in self.outputs:
            raise SpecError(f"bounds: no output {shown(name)}; expected one of {', '.join(self.outputs)}")
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

    def accepts(self, *actual: Any) -> bool:
        """Whether every element of the outputs, in their order, is within its bound."""
        return all(not o.compare(x).bad.any() for o, x in self.paired(actual))

    def share(self, *actual: Any) -> float:
        """The largest error of any element as a share of its bound."""
        return max((o.compare(x).worst for o, x in self.paired(actual)), default=0.0)

    def check(self, *actual: Any) -> None:
        """Raise :class:`portakern.testing.Broken`, an AssertionError, with the first element that is out of bounds."""
        for o, x in self.paired(actual):
            found = o.compare(x)
            if found.bad.any():
                raise Broken(self.message(o, np.asarray(x), found.bad))

    def message(self, o: OutputBound, actual: np.ndarray, bad: np.ndarray) -> str:
        """The first wrong element in words."""
        at = tuple(int(i) for i in np.unravel_index(int(np.argmax(bad)), bad.shape))
        return (
            f"{o.name}{[*at]} is {float(actual[at]):.9g}; the reference is {o.reference[at]:.9g}, permitted error "
            f"{o.error[at]:.3g}; {int(bad.sum())} of {bad.size} elements are out of bounds"
        )

    def paired(self, actual: tuple[Any, ...]) -> list[tuple[OutputBound, Any]]:
        """Each output with the array that is compared with it."""
        if len(actual) != len(self.outputs):
            raise SpecError(
                f"bounds: {len(actual)} outputs came; expected {len(self.outputs)}: {', '.join(self.outputs)}"
            )
        return list(zip(self.outputs.values(), actual, strict=True))


@dataclass(frozen=True)
class Bound(OutputBounds):
    """The bounds of one call of an op. ``call``: the call in float64."""

    call: Call

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
            spec, **{n: stored(n, np.asarray(x), _wanted(spec.argument(n), dtype)) for n, x in given.items()}, **options
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
        return cls(found, wide)

    @property
    def derivation(self) -> str:
        """The formula of the bound and how it is derived, and that of the typical error."""
        spec = self.call.spec
        return "\n\n".join(inspect.cleandoc(fn.__doc__) for fn in (spec.bound, spec.spread) if fn and fn.__doc__)

    def message(self, o: OutputBound, actual: np.ndarray, bad: np.ndarray) -> str:
        permitted = permitted_error(o.error, o.reference, o.dtype, o.codes)
        return describe(self.call, o.name, actual, o.reference, permitted, bad, {})


of = Bound.of


def _wanted(a: ArrayArg, dtype: str | Mapping[str, str] | None) -> str | None:
    """The dtype that a wide array of an argument stands for; None: its own."""
    if dtype is None or isinstance(dtype, Mapping):
        return None if dtype is None else dtype.get(a.name)
    if a.follows:
        return dtype
    if a.statistic and dtype != "float64":
        return "float32"
    return dtype if dtype in a.dtypes else None


def stored(name: str, array: np.ndarray, dtype: str | None) -> np.ndarray:
    """An array in the dtype that it stands for.

    Raises:
      SpecError: it has values that the dtype does not hold.
    """
    if dtype is None or array.dtype.name not in WIDE:
        return array
    if dtype not in DTYPES:
        raise SpecError(f"bounds: dtype is {shown(dtype)}; expected one of {', '.join(DTYPES)}")
    with np.errstate(over="ignore", invalid="ignore"):
        found = array.astype(numpy_dtype(dtype))
        other = (found.astype(np.float64) != array.astype(np.float64)) & ~np.isnan(array)
    if other.any():
        index = tuple(int(i) for i in np.unravel_index(int(np.argmax(other)), other.shape))
        raise SpecError(
            f"bounds: {name}{[*index]} is {float(array[index])!r}, which {dtype} does not hold; pass what the kernel "
            f"was given, or bounds.rounded(array, {dtype!r}) to both"
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
