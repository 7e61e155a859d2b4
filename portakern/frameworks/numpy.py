"""NumPy arrays: host memory, any strides."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from portakern.core.framework import Framework, distinct
from portakern.core.targets import HOST, Target
from portakern.errors import SpecError
from portakern.spec.dtypes import numpy_dtype

if TYPE_CHECKING:
    from portakern.core.call import Call

__all__ = ["FRAMEWORK"]


def _read_only(fn: Callable[..., Any]) -> Callable[..., Any]:
    def shut(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        view = value.view()
        view.flags.writeable = False
        return view

    return lambda *args, **kwargs: fn(*map(shut, args), **{n: shut(v) for n, v in kwargs.items()})


class NumPy(Framework):
    name, title, wrapper = "numpy", "NumPy", "numpy.asarray"
    host_only = reverses = True
    device = staticmethod(lambda array: "cpu")

    def load(self) -> Any:
        return np

    def is_array(self, value: Any) -> bool:
        return isinstance(value, np.ndarray)

    def settled(self, kind: type) -> bool:
        return kind is np.ndarray or issubclass(kind, np.generic)

    def target(self, device: Any) -> Target:
        return HOST

    def devices(self) -> list[Any]:
        return ["cpu"]

    def abstract(
        self, shape: tuple[int, ...], dtype: str, strides: Sequence[int] | None = None, past_alignment: int = 0
    ) -> Any:
        return np.broadcast_to(np.zeros((), numpy_dtype(dtype)), shape)  # one element, stretched

    def call_variants(self) -> Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]:
        return {**super().call_variants(), "on arrays that nobody may write to": _read_only}

    def contiguous(self, array: Any) -> bool:
        return bool(array.flags.c_contiguous)

    def may_write(self, array: Any, others: Sequence[Any]) -> bool:
        overlaps = any(np.may_share_memory(array, o) for o in others)
        return bool(array.flags.writeable) and not overlaps and distinct(array.shape, array.strides)

    def memory(self, array: Any) -> np.ndarray | None:
        while isinstance(array.base, np.ndarray):
            array = array.base
        return np.array(array).view(np.uint8).reshape(-1) if array.flags.c_contiguous else None

    def copy(self, array: Any) -> Any:
        return np.array(array, order="C")

    def write(self, array: Any, values: Any) -> None:
        array[...] = values

    def check(self, call: Call) -> bool:
        for name, array in call.arrays.items():
            if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
                raise SpecError(
                    f"{call.spec.name}: {name} is a numpy.ma.MaskedArray, whose mask no kernel sees; pass "
                    f"{name}.filled(...) instead"
                )
            if isinstance(array, np.memmap):
                _refuse_cut(call.spec.name, name, array)
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


def _refuse_cut(op: str, name: str, array: np.memmap[Any, Any]) -> None:
    """SpecError for an array over a file that is shorter by now: to read beyond its end ends the process."""
    mapped: Any = getattr(array, "_mmap", None)
    if mapped is None or array.offset is None:
        return
    end = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY + len(mapped)
    if mapped.size() < end:
        raise SpecError(
            f"{op}: {name} is mapped from the first {end} bytes of a file that has {mapped.size()} now: "
            f"{array.filename}; "
            "map it anew, or pass numpy.array(...), a copy made before the file was cut"
        )


FRAMEWORK = NumPy()
