"""Pallas's GPU interpreter as a check profile in which a race is an error.

Every interpreted call runs with the memories, barriers and copies of a GPU, each of which happens when it is waited
for as far as the others can tell: what is read before its barrier, or sent off before it is committed, is a race.
Buffers that nothing wrote hold NaN, and an index beyond a buffer raises.

The interpreter is Pallas's own (``plgpu.InterpretGPUParams``), which prints races and goes on. That they raise when
their kernel ends, and that a kernel which raised leaves nothing behind, is told to it through functions that jax keeps
to itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

PARAMS = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")

_initialize, _clean_up = gpu_callbacks._initialize_shared_memory, gpu_callbacks._clean_up_shared_memory


@contextmanager
def raising() -> Iterator[None]:
    """Within this context interpreted calls raise where they race. They share the interpreter's memory, so only one
    thread may make them."""
    with (
        patch.object(gpu_callbacks, "_initialize_shared_memory", _begin),
        patch.object(gpu_callbacks, "_clean_up_shared_memory", _end),
        plgpu.force_gpu_interpret_mode(PARAMS),
    ):
        yield


def _begin(*args: Any, **kwargs: Any) -> Any:
    """As a kernel begins: forget one that raised."""
    gpu_callbacks.reset_gpu_interpret_mode_state()
    return _initialize(*args, **kwargs)


def _end(*args: Any, **kwargs: Any) -> Any:
    """As a kernel ends: raise if it raced."""
    races = gpu_callbacks.get_races()
    if races is not None and races.races_found:
        raise RuntimeError("threads or copies of the interpreted GPU raced for memory; the interpreter printed where")
    return _clean_up(*args, **kwargs)
