"""The dtypes that a spec can name: one table, which binding, bounds, frameworks and the checker read."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["NUMPY_DTYPES", "numpy_dtype"]

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    n: np.dtype(n) for n in ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
}
NUMPY_DTYPES["bfloat16"] = np.dtype(ml_dtypes.bfloat16)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype object for a name; bfloat16 is ml_dtypes'."""
    return NUMPY_DTYPES[name]
