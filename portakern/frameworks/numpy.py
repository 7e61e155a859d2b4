"""NumPy arrays: host memory, any strides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from portakern.core.framework import Framework
from portakern.core.targets import HOST, Target
from portakern.errors import SpecError

if TYPE_CHECKING:
    from portakern.core.call import Call

__all__ = ["FRAMEWORK"]


class NumPy(Framework):
    name, title, wrapper = "numpy", "NumPy", "numpy.asarray"
    host_only = True
    device = staticmethod(lambda array: "cpu")

    def load(self) -> Any:
        return np

    def is_array(self, value: Any) -> bool:
        return isinstance(value, np.ndarray)

    def target(self, device: Any) -> Target:
        return HOST

    def devices(self) -> list[Any]:
        return ["cpu"]

    def contiguous(self, array: Any) -> bool:
        return bool(array.flags.c_contiguous)

    def check(self, call: Call) -> bool:
        for name, array in call.arrays.items():
            if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
                raise SpecError(
                    f"{call.spec.name}: {name} is a numpy.ma.MaskedArray, whose mask no kernel sees; pass {name}.filled(...) instead"
                )
            if array is not None and type(array) is not np.ndarray:
                call.arrays[name] = array.view(
                    np.ndarray
                )  # a subclass may give operators another meaning: numpy.matrix does
        return False

    def to_numpy(self, array: Any) -> np.ndarray:
        return np.asarray(array)

    def strides(self, array: Any) -> list[int]:
        return [s // array.itemsize for s in array.strides]

    def from_numpy(self, array: np.ndarray, device: Any) -> np.ndarray:
        return array if array.flags.writeable else array.copy()


FRAMEWORK = NumPy()
