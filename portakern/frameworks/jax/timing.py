"""What is measured of calls on JAX's arrays.

JAX has neither events nor a stream that its caller sees, so that nothing can be put around a call on the device's queue
from outside. On NVIDIA's GPUs it ships a binding of CUPTI (``jax.experimental.mosaic.gpu.profiler``), whose record of
each kernel is the device's own time. That profiler's public function compiles what it is given anew, arrays and all, as
constants that XLA may fold; so its two inner functions are called here, around a call as a user makes it. They tell of
PyTorch's kernels too, so that calls of both libraries can be timed by one clock. On an H100 cuDNN's attention takes the
same time by CUPTI, called by JAX, as by events on a stream, called by PyTorch, to 3 % at 0.1 ms and to 0.2 % at 0.9 ms;
and twenty samples of 0.17 ms lay within 2 %, where those of a queue lay between 0 and 0.27 ms.

Elsewhere there is order: calls run one after the other, and the host may hand over many before it waits. So a queue of
calls is timed, each behind one that overwrites the cache, and the time of these alone is taken off.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from portakern.core.instruments import (
    ClockSample,
    Instruments,
    Recorder,
    Roof,
    Run,
    Stopwatch,
    clocked,
    host_us,
    renewed,
)

__all__ = ["Cupti", "JaxInstruments", "Queued"]

FILLER = 2**28
"""Bytes that are written before each call: more than any L2 cache, and more work than handing over two calls."""

QUEUED = 8
"""Calls that are queued for one sample at most: with those that overwrite, fewer than JAX lets run ahead."""

ENOUGH_US = 20_000.0
"""Of a queue: a long call is as well timed by fewer."""

LATE = 0.9
"""Where the host took this share of the queue's time to hand it over, the device may have waited."""


ROOF = {"cpu": (2**20, 128)}
ROOF_ELSEWHERE = 2**28, 8192
"""Elements of the copy and extent of the products that are the roof, by platform."""


class JaxInstruments(Instruments):
    """Of JAX's arrays; their memory is theirs alone, and none is handed out unwritten."""

    @property
    def shared(self) -> bool:
        return bool(self.device.platform != "tpu")

    def wait(self, result: Any) -> None:
        import jax

        jax.block_until_ready(result)

    @property
    def recorder(self) -> Recorder | None:
        """CUPTI, on NVIDIA's GPUs."""
        binding = _binding() if self.device.platform == "gpu" else None
        return Cupti(binding) if binding else None

    def own_clock(self, run: Run) -> Stopwatch:
        """A queue of calls on accelerators, the host's clock on a CPU."""
        return super().own_clock(run) if self.device.platform == "cpu" else Queued(run, self.device)

    def chill(self) -> None:
        if self.device.platform != "cpu":
            self.wait(_fill(self.device)())

    def same(self, a: Any, b: Any) -> bool:
        import jax.numpy as jnp

        return a.dtype == b.dtype and bool(jnp.array_equal(a, b))

    def taken(self, array: Any, indices: Iterable[tuple[int, np.ndarray]]) -> Any:
        import jax.numpy as jnp

        for axis, index in indices:
            array = jnp.take(array, index, axis=axis, unique_indices=True)
        return array

    def has_nan(self, array: Any) -> bool:
        import jax.numpy as jnp

        return bool(jnp.isnan(array).any())

    def kernels(self, run: Run) -> Sequence[tuple[str, float]] | None:
        """As CUPTI has them, on NVIDIA's GPUs."""
        recorder = self.recorder
        if recorder is None:
            return None
        self.wait(run())  # what compiles, and what XLA tries out, is no part of it
        self.chill()
        return recorder.record(lambda: self.wait(run()))

    def roofs(self) -> Mapping[str, Roof]:
        import jax
        import jax.numpy as jnp

        size, n = ROOF.get(self.device.platform, ROOF_ELSEWHERE)
        source = jax.device_put(jnp.ones(size, jnp.float32), self.device)
        copy = jax.jit(lambda x: -x)
        found = {"copy": Roof(lambda: copy(source), 8.0 * size, "bytes")}
        wide = jax.random.normal(jax.random.key(0), (n, n))
        for name, held, precision in (
            ("bfloat16", "bfloat16", None),
            ("tf32", "float32", "tensorfloat32"),
            ("float32", "float32", "highest"),
        ):
            a = jax.device_put(wide.astype(held), self.device)
            product = jax.jit(functools.partial(jnp.matmul, precision=precision))
            found[name] = Roof(functools.partial(product, a, a), 2.0 * n**3, "flops")
        return found


class Queued(Stopwatch):
    """Calls in a queue, each behind one that overwrites the cache, less the time of these alone.

    Overwriting takes the device longer than handing both over takes the host, so that the device never waits; where it
    does all the same, ``clock`` says so.
    """

    clock = "queue"

    def __init__(self, run: Run, device: Any) -> None:
        self.run, self.device = run, device
        self.count = QUEUED

    def sample(self) -> ClockSample:
        import jax

        fill = _fill(self.device)

        def both() -> Any:
            return fill(), self.run()

        before, _ = _wall(fill, self.count)
        renewed(self.run, self.count)
        together, handed_over = _wall(both, self.count)
        clocked(self.run)
        after, _ = _wall(fill, self.count)
        self.count = max(1, min(QUEUED, int(ENOUGH_US / max(together, 1.0))))
        if handed_over > LATE * together:
            self.clock = "queue, with waits for the host"
        return ClockSample(max(together - (before + after) / 2, 0.0), host_us(self.run, jax.block_until_ready))


class Cupti:
    """The record that CUPTI keeps of a process's kernels, whichever library launched them."""

    name = "cupti"

    def __init__(self, binding: Any) -> None:
        self.binding = binding

    def record(self, run: Run) -> list[tuple[str, float]] | None:
        """Name and microseconds of each kernel of a call that returns when its work is done; None where CUPTI gives
        nothing."""
        try:
            self.binding._cupti_init()
        except RuntimeError:  # another tool is CUPTI's one subscriber
            return None
        try:
            run()
        finally:
            kernels = self.binding._cupti_get_timings(False)
        return [(name, 1e3 * ms) for name, ms in kernels] or None


def _binding() -> Any:
    """JAX's binding of CUPTI, or None where this JAX has none."""
    try:
        from jax.experimental.mosaic.gpu.profiler import mosaic_gpu_lib
    except ImportError:
        return None
    inner = getattr(mosaic_gpu_lib, "_mosaic_gpu_ext", None)
    return inner if hasattr(inner, "_cupti_init") and hasattr(inner, "_cupti_get_timings") else None


@functools.lru_cache(maxsize=1)
def _fill(device: Any) -> Callable[[], Any]:
    """Overwrites the caches of a device."""
    import jax
    import jax.numpy as jnp

    memory = jax.device_put(jnp.zeros(FILLER, jnp.int8), device)
    write = jax.jit(lambda x: x + 1)
    return lambda: write(memory)


def _wall(call: Run, count: int) -> tuple[float, float]:
    """Microseconds a call of a queue of so many, until the last result is there, and until the last call came back."""
    import jax

    start = time.perf_counter()
    results = [call() for _ in range(count)]
    back = time.perf_counter()
    jax.block_until_ready(results)
    return 1e6 * (time.perf_counter() - start) / count, 1e6 * (back - start) / count
