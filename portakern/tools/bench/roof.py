"""The measured roof of the same run: the rates of a copy and of products in each precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, prod
from typing import Any

from portakern.core import registry
from portakern.core.call import Call
from portakern.core.instruments import Instruments, Recorder
from portakern.spec.dtypes import numpy_dtype
from portakern.tools.bench.timing import interleaved

__all__ = ["Ceiling", "ceiling", "floor", "measure", "moved", "unit_of"]

COPY = "copy"


@dataclass(frozen=True)
class Ceiling:
    """The minimum time of a call under the measured roof, and the limit that gives it."""

    us: float
    limit: str

    @property
    def what(self) -> str:
        """The limit in words."""
        return "device memory" if self.limit == COPY else f"products in {self.limit}"


def measure(instruments: Instruments, recorder: Recorder | None, rounds: int) -> dict[str, float]:
    """Name -> bytes or operations a second of each limit, the best of the rounds: a roof is what can be reached."""
    roofs = instruments.roofs()
    times = interleaved({n: instruments.stopwatch(r.run, recorder) for n, r in roofs.items()}, rounds)
    return {n: roofs[n].work / times[n].best_us * 1e6 for n in roofs if times[n].best_us > 0}


def ceiling(call: Call, rates: Mapping[str, float]) -> Ceiling | None:
    """What the roof allows a call; None where no rate of its precision was measured, and memory does not say either."""
    of_memory = moved(call) / rates[COPY] if COPY in rates else 0.0
    precision = unit_of(call.dtype, call.options.get("precision"))
    of_products = call.flops / rates[precision] if rates.get(precision) else inf
    if of_products == inf and not of_memory:
        return None
    if of_products == inf or of_memory >= of_products:
        return Ceiling(1e6 * of_memory, COPY)
    return Ceiling(1e6 * of_products, precision)


def floor(call: Call, rates: Mapping[str, float]) -> float:
    """Microseconds that no call can take less than, whatever units it uses and whichever dtypes it computes in:
    products
    at the best rate of all that were measured (float32's may be several of a narrower dtype), but for dtypes of 8 bits,
    whose rates were not; the wanted outputs written, and every array read, but of an op that may leave some unread."""
    fastest = max((r for n, r in rates.items() if n != COPY), default=0.0)
    of_products = call.flops / fastest if fastest and not _narrow(call) else 0.0
    some = {n: (shape, dtype) for n, (shape, dtype) in call.outputs.items() if n in call.wants}
    written = sum(prod(shape) * _width(dtype) for shape, dtype in some.values())
    forward = registry.forward_of(call.spec) or call.spec
    least = written if forward.stretches and not call.spec.bytes_moved else moved(call)
    return 1e6 * max(of_products, least / rates[COPY] if rates.get(COPY) else 0.0)


def _narrow(call: Call) -> bool:
    return any(_width(call.dtype_of(n)) == 1 for n, a in call.arrays.items() if a is not None)


def unit_of(dtype: str, precision: Any) -> str:
    """The precision in which products are made: that of the dtype, or of the option ``precision`` where a call has
    one."""
    return "tf32" if dtype == "float32" and precision == "tf32" else dtype


def moved(call: Call) -> int:
    """The fewest bytes: as the spec says, else each array read once, each wanted output written once."""
    if call.spec.bytes_moved:
        return round(call.spec.bytes_moved(call))
    read = sum(prod(a.shape) * _width(call.dtype_of(n)) for n, a in call.arrays.items() if a is not None)
    return read + sum(prod(shape) * _width(dtype) for n, (shape, dtype) in call.outputs.items() if n in call.wants)


def _width(dtype: Any) -> int:
    return numpy_dtype(dtype).itemsize
