"""JAX arrays. Nothing here imports jax until an array of its has been seen or asked for."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from portakern.core.framework import Framework, load_library
from portakern.core.instruments import Instruments
from portakern.core.targets import Target
from portakern.errors import SpecError, UnavailableError, UnsupportedError
from portakern.spec.dtypes import numpy_dtype

if TYPE_CHECKING:
    from portakern.core.backend import Implementation
    from portakern.core.call import Call
    from portakern.core.config import Config
    from portakern.core.dispatch import Choice
    from portakern.core.program import Program

__all__ = ["Jax", "refuse_deleted", "refuse_forked"]


def refuse_deleted(op: str, **arrays: Any) -> None:
    """SpecError for an array that has no memory any more. Values that JAX traces, and what is no array of its, pass."""
    jax = sys.modules["jax"]
    for name, array in arrays.items():
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) and array.is_deleted():
            raise SpecError(
                f"{op}: {name} was deleted, or donated to another computation; pass an array that still has its values"
            )


_forked = False


def _note_fork() -> None:
    """In a process that was forked: whether JAX had begun in the process that it is of."""
    global _forked
    bridge = sys.modules.get("jax._src.xla_bridge")  # whose own question takes a lock that another thread may have held
    _forked = _forked or bool(getattr(bridge, "_backends", None))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def refuse_forked() -> None:
    """UnavailableError in a process that was forked after JAX had begun: of JAX's threads none is here, and what waits
    for one waits for ever."""
    if _forked:
        raise UnavailableError(
            "JAX cannot run in this process, which was forked after JAX had begun: its threads are not here, and calls "
            "would wait for them for ever. Start processes by 'spawn' or 'forkserver' (multiprocessing.get_context, "
            "DataLoader(multiprocessing_context=...)), fork before JAX is used, or name a backend that needs no JAX"
        )


def _under_jit(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that cannot be traced is called as it was."""
    jax = sys.modules["jax"]

    def called(*args: Any, **kwargs: Any) -> Any:
        arrays = {n: v for n, v in kwargs.items() if isinstance(v, jax.Array)}
        others = {n: v for n, v in kwargs.items() if n not in arrays}
        try:
            return jax.jit(lambda args, arrays: fn(*args, **arrays, **others))(args, arrays)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
            return fn(*args, **kwargs)

    return called


class Jax(Framework):
    name, title, wrapper = "jax", "JAX", "jax.numpy.asarray"
    hallmark = "sharding"
    twins = MappingProxyType(
        {
            "dot_product_attention": "attention",
            "dot_general": "matmul",
            "ragged_dot": "grouped_matmul",
            "ragged_paged_attention": "paged_attention",
            "scaled_matmul": "scaled_matmul",
            "take": "embedding",
        }
    )
    immutable = True
    environment = ("JAX_PLATFORMS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION", "CUDA_VISIBLE_DEVICES")
    compiles_ahead = (
        "jax.jit(f).lower(...).compile() compiles one before its first call, and "
        "jax.config.update('jax_compilation_cache_dir', folder) keeps it for later processes"
    )
    donates = "let XLA give away the memory of an argument of a jitted function: jax.jit(f, donate_argnums=...)"
    embeds = ("cuda", "rocm")

    @staticmethod
    def device(array: Any) -> Any:
        jax = sys.modules["jax"]
        if isinstance(array, (jax.core.Tracer, jax.ShapeDtypeStruct)):  # its device is chosen at lowering
            if not all(isinstance(n, int) for n in array.shape):
                raise UnsupportedError(
                    f"an array of shape ({', '.join(map(str, array.shape))}) has a symbolic extent, and kernels are "
                    "compiled for extents that are known: export once for each that is needed, with numbers in its "
                    "jax.ShapeDtypeStruct"
                )
            return None
        devices, mesh = array.sharding.device_set, getattr(array.sharding, "mesh", None)
        if len(devices) > 1 or (mesh is not None and jax.sharding.AxisType.Explicit in mesh.axis_types):
            return None  # the call is part of a program over these devices, or has types that say how results lie
        return next(iter(devices))

    def load(self) -> Any:
        return load_library("jax", "pallas")

    def is_array(self, value: Any) -> bool:
        jax = sys.modules.get("jax")
        return jax is not None and isinstance(value, (jax.Array, jax.ShapeDtypeStruct))

    def target(self, device: Any) -> Target:
        if device is None:
            return Target("traced")
        if device.platform == "gpu":
            if "rocm" in device.client.platform_version.lower():
                return Target("rocm", "")
            capability = getattr(device, "compute_capability", None)  # a device that is only described has none
            return Target("cuda", f"sm_{capability.replace('.', '')}" if capability else "")
        if device.platform == "tpu":
            return Target("tpu", device.device_kind.lower().removeprefix("tpu").strip().replace(" lite", "e"))
        return Target(device.platform)

    def abstract(
        self, shape: tuple[int, ...], dtype: str, strides: Sequence[int] | None = None, past_alignment: int = 0
    ) -> Any:
        return self.load().ShapeDtypeStruct(shape, numpy_dtype(dtype))

    def devices(self) -> list[Any]:
        jax = self.load()
        return list(dict.fromkeys([*jax.local_devices(), *jax.local_devices(backend="cpu")]))

    def check(self, call: Call) -> bool:
        refuse_deleted(call.spec.name, **call.arrays)
        return False

    def outside(self) -> AbstractContextManager[Any]:
        from portakern.frameworks.jax import tracing

        return tracing.outside()

    def to_numpy(self, array: Any) -> np.ndarray:
        return np.asarray(array)

    def from_numpy(self, array: np.ndarray, device: Any) -> Any:
        jax = self.load()
        refuse_forked()
        self.check_fits(array)
        return jax.device_put(array, device if device is not None else jax.local_devices(backend="cpu")[0])

    def call_variants(self) -> Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]:
        return {**super().call_variants(), "under jax.jit": _under_jit}

    def stored_dtype(self, dtype: str) -> str:
        return str(self.load().dtypes.canonicalize_dtype(numpy_dtype(dtype)).name)

    def check_fits(self, array: np.ndarray) -> None:
        """UnsupportedError for values that JAX would not hold as they are: without x64 it has no type of 64 bits."""
        if array.dtype.itemsize == 8 and not self.load().config.jax_enable_x64:
            if array.dtype.kind == "f":
                raise UnsupportedError(
                    "JAX would narrow this float64 array to float32; cast it first, or enable jax_enable_x64"
                )
            if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
                raise UnsupportedError(
                    "JAX would wrap this int64 array to int32 and its values do not fit; enable jax_enable_x64, or use "
                    "smaller ids"
                )

    def for_dlpack(self, array: Any, copy: bool) -> Any:
        return self.load().numpy.array(array, copy=True) if copy else array

    def from_dlpack(self, array: Any) -> Any:
        return self.load().dlpack.from_dlpack(array)

    def accelerator_names(self) -> list[str]:
        if not importlib.util.find_spec("jax"):
            return []
        return [d.device_kind for d in self.load().local_devices() if d.platform != "cpu"]

    def instruments(self, device: Any) -> Instruments:
        from portakern.frameworks.jax import timing

        return timing.JaxInstruments(self, device)

    # --- calls are jitted where arrays are here, and staged where they are not ---

    def run(self, impl: Implementation, call: Call, config: Config) -> tuple[Any, ...]:
        from portakern.frameworks.jax import tracing

        refuse_forked()
        return tracing.run(impl, call, config)

    def refuses_descriptors(self) -> str | None:
        from portakern.frameworks.jax import embedding

        return embedding.refuses_descriptors()

    def embed(self, program: Program, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        from portakern.frameworks.jax import embedding

        return embedding.embed(program, arrays)

    def lowering_target(self) -> Target | None:
        from portakern.frameworks.jax import tracing

        return tracing.lowering_target()

    def in_parts(self, call: Call, choice: Choice, target: Target, oracle: bool) -> tuple[list[str], Call]:
        from portakern.frameworks.jax import partitioned

        return partitioned.explained(call, target, oracle)

    def trace(self, call: Call, choice: Choice) -> tuple[Any, ...]:
        from portakern.frameworks.jax import tracing

        refuse_forked()
        return tracing.trace(call, choice)
