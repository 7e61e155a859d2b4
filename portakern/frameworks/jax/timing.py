"""What is measured of calls on JAX's arrays.

JAX has neither events nor a stream that its caller sees, so that nothing can be timed on the device's queue from
outside. What it ships is CUPTI's record of each kernel (``jax.experimental.mosaic.gpu.profiler``): the kernels' own
time on the device, which no host can delay. That profiler's public function compiles what it is given anew, arrays and
all, as constants that XLA may fold; so its two inner functions are called here, around a call as a user makes it.
CUPTI's sum leaves out the gaps between kernels, about a microsecond each, and copies that are no kernels: against
events on a stream, which count both, JAX's calls look better by that much and never worse.

Where CUPTI is not there, calls are queued and the host waits once; where kernels are short, that is the host's time.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from portakern.core.instruments import Instruments, Roof, Run, Sample, Stopwatch

__all__ = ["Cupti", "JaxInstruments", "Queued"]

FILLER = 2**28
"""Bytes that are written before each call: more than the L2 cache of any GPU here."""

QUEUED = 8
"""Calls that are queued for one sample."""


ROOF = {"cpu": (2**20, 128)}
ROOF_ELSEWHERE = 2**28, 8192
"""Elements of the copy and extent of the products that are the roof, by platform."""


class JaxInstruments(Instruments):
    """Of JAX's arrays; their memory is theirs alone, and none is handed out unwritten."""

    def wait(self, result: Any) -> None:
        import jax

        jax.block_until_ready(result)

    def stopwatch(self, run: Run) -> Stopwatch:
        """By CUPTI on NVIDIA's GPUs, by a queue of calls on other accelerators, by the host's clock on a CPU."""
        if self.device.platform == "cpu":
            return super().stopwatch(run)
        profiler = _cupti() if self.device.platform == "gpu" else None
        return Cupti(run, self.device, profiler) if profiler else Queued(run, self.device)

    def same(self, a: Any, b: Any) -> bool:
        import jax.numpy as jnp

        return a.dtype == b.dtype and bool(jnp.array_equal(a, b))

    def has_nan(self, array: Any) -> bool:
        import jax.numpy as jnp

        return bool(jnp.isnan(array).any())

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
    """A queue of calls, each behind one that overwrites the cache; the time of these alone is taken off."""

    clock = "queue, with the host where it is slower"

    def __init__(self, run: Run, device: Any) -> None:
        self.run, self.device = run, device

    def sample(self) -> Sample:
        fill = _fill(self.device)

        def both() -> Any:
            fill()
            return self.run()

        alone, _ = _wall(fill)
        together, host = _wall(both)
        filling = _wall(fill)[1]
        return Sample(max(together - alone, 0.0), max(host - filling, 0.0))


class Cupti(Stopwatch):
    """The sum of what CUPTI says each kernel of a call took. Where CUPTI gives nothing, as while another tool holds it,
    the calls are queued instead (:class:`Queued`), and ``clock`` says so."""

    clock = "cupti"

    def __init__(self, run: Run, device: Any, profiler: Any) -> None:
        self.run, self.device, self.profiler = run, device, profiler
        self._instead: Queued | None = None

    def sample(self) -> Sample:
        if self._instead is None:
            found = self._once()
            if found is not None:
                return found
            self._instead = Queued(self.run, self.device)
            self.clock = self._instead.clock
        return self._instead.sample()

    def _once(self) -> Sample | None:
        import jax

        jax.block_until_ready(_fill(self.device)())
        try:
            self.profiler._cupti_init()
        except RuntimeError:  # another tool is CUPTI's one subscriber
            return None
        try:
            begin = time.perf_counter()
            result = self.run()
            host_us = 1e6 * (time.perf_counter() - begin)
            jax.block_until_ready(result)
        finally:
            kernels = self.profiler._cupti_get_timings(False)
        return Sample(1e3 * sum(ms for _, ms in kernels), host_us) if kernels else None


def _cupti() -> Any:
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


def _wall(call: Run) -> tuple[float, float]:
    """Microseconds a call, until the last result is there and until the last call came back."""
    import jax

    start = time.perf_counter()
    results = [call() for _ in range(QUEUED)]
    back = time.perf_counter()
    jax.block_until_ready(results)
    return 1e6 * (time.perf_counter() - start) / QUEUED, 1e6 * (back - start) / QUEUED
