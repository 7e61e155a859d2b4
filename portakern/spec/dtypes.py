"""The dtypes that a spec can name: one table, which binding, bounds, frameworks and the checker read.

A spec writes them in jaxtyping's annotations. ``Float`` is the op's own dtype (see :func:`portakern.spec.spec`),
``Int`` an index, int32 or int64, as its caller has it; every other annotation names one dtype: ``Float32``,
``Float8e4m3fn``, ``Float8e5m2``, ``Int8``, ``UInt8``, ``Bool`` and so on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["ANY_INDEX", "DTYPES", "FLOATS", "USUAL", "DTypeInfo", "numpy_dtype"]


@dataclass(frozen=True)
class DTypeInfo:
    """One dtype.

    Attributes:
      name: what everybody calls it, PyTorch, JAX and NumPy (with ml_dtypes) included.
      numpy: NumPy's object for it.
      kind: float, int (signed), uint or bool.
      bits: its size.
      U: unit roundoff of rounding to nearest; 0 where nothing is rounded relative to its size.
      tiny: the least normal number; least: the least positive number, a subnormal one of a float and 1 of an integer.
      largest: the largest finite number.
      flushes: hardware may take its subnormals for zeros.
      overflows_to: what rounding gives beyond the largest number: inf, or nan in a float that has no infinities
        (float8_e4m3fn); an integer has nothing beyond it, so that conversion stops at the largest, as XLA's does.
    """

    name: str
    numpy: np.dtype[Any]
    kind: str
    bits: int
    U: float
    tiny: float
    least: float
    largest: float
    flushes: bool
    overflows_to: float

    @property
    def floating(self) -> bool:
        return self.kind == "float"

    @property
    def native(self) -> bool:
        """NumPy has it without ml_dtypes, and so has whatever takes NumPy's arrays."""
        return type(self.numpy.type(0)).__module__ == "numpy"

    @property
    def overflow(self) -> float:
        """The least magnitude that no longer rounds to the largest number or below: half a spacing beyond that.

        The tie itself goes to infinity, beside which the largest number is odd, but stays with float8_e4m3fn's 448,
        which is even. float64 has no wider dtype to say it in, and an integer no such magnitude: inf.
        """
        if not self.floating or self.name == "float64":
            return np.inf
        _, exponent = np.frexp(self.largest)
        tie = self.largest + self.U * 2.0 ** (int(exponent) - 1)
        return float(np.nextafter(tie, np.inf)) if np.isnan(self.overflows_to) else tie


def _float(name: str, flushes: bool) -> DTypeInfo:
    info, numpy = ml_dtypes.finfo(name), np.dtype(getattr(ml_dtypes, name, name))
    with np.errstate(over="ignore"):
        beyond = float(np.asarray(np.inf).astype(numpy))
    return DTypeInfo(
        name, numpy, "float", info.bits, float(info.eps) / 2, float(info.smallest_normal),
        float(info.smallest_subnormal), float(info.max), flushes, beyond,
    )  # fmt: skip


def _integer(name: str) -> DTypeInfo:
    numpy = np.dtype(name)
    kind = {"i": "int", "u": "uint", "b": "bool"}[numpy.kind]
    largest = 1 if kind == "bool" else np.iinfo(numpy).max
    return DTypeInfo(name, numpy, kind, 8 * numpy.itemsize, 0.0, 1.0, 1.0, float(largest), False, float(largest))


DTYPES: dict[str, DTypeInfo] = {
    d.name: d
    for d in (
        _float("float32", flushes=True),
        _float("float16", flushes=False),
        _float("bfloat16", flushes=True),
        _float("float64", flushes=True),
        _float("float8_e4m3fn", flushes=False),
        _float("float8_e5m2", flushes=False),
        *map(_integer, ("int32", "int64", "int16", "int8", "uint8", "bool")),
    )
}
"""Name -> dtype, of every dtype that an array of a call may have."""

FLOATS = tuple(d.name for d in DTYPES.values() if d.floating and d.bits > 8)
"""The dtypes that an op computes in unless its spec says otherwise, and that a dtype option may name."""

USUAL = ("bfloat16", "float32")
"""The dtypes that ops are compiled for and measured in where nobody names one."""

ANY_INDEX = ("int32", "int64")
"""What an annotation of several integer dtypes (``Int``) stands for: whatever frameworks give as an index."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype object for a name; those that NumPy lacks are ml_dtypes'."""
    return DTYPES[name].numpy
