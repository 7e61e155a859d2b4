"""Pallas's GPU interpreter as a check profile in which a race is an error, and so is waiting for ever.

Every interpreted call runs with the memories, barriers and copies of a GPU, each of which happens when it is waited
for as far as the others can tell: what is read before its barrier, or sent off before it is committed, is a race.
Buffers that nothing wrote hold NaN, and an index beyond a buffer raises. Where all warpgroups that are not done wait
at barriers, nobody is left who could arrive: a GPU would wait for ever, and so would the interpreter.

The interpreter is Pallas's own (``plgpu.InterpretGPUParams``), which prints races and goes on. That they raise when
their kernel ends, that a kernel which raised leaves nothing behind, and who waits, is told to it through functions that
jax keeps to itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
from jax.experimental.pallas import mosaic_gpu as plgpu

PARAMS = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")

_initialize, _clean_up = gpu_callbacks._initialize_shared_memory, gpu_callbacks._clean_up_shared_memory
_wait, _finish = shared_memory.Barrier.wait, shared_memory.GPUSharedMemory.kernel_thread_finished


class Waiting:
    """Which warpgroups of a kernel wait, for which phase of which barrier, and which are done. Blocks come one cluster
    after another, and a cluster's end is that of all of its warpgroups."""

    def __init__(self, memory: Any) -> None:
        self.memory, self.lock = memory, threading.Lock()
        self.running = self._all()
        self.at: dict[Any, tuple[Any, int]] = {}

    def _all(self) -> set[Any]:
        return {t for t in self.memory.all_concurrent_threads if isinstance(t, shared_memory.Warpgroup)}

    def begins(self, thread: Any, barrier: Any) -> None:
        with self.lock:
            self.at[thread] = barrier, barrier.last_observed_phase_by_thread.get(thread, 0)
            self._look()

    def ends(self, thread: Any) -> None:
        with self.lock:
            self.at.pop(thread, None)

    def done(self, thread: Any) -> None:
        with self.lock:
            self.running.discard(thread)
            self.running = self.running or self._all()
            self._look()

    def _look(self) -> None:
        """Raise if all wait. One that the last arrival freed may not have run since: its barrier is a phase ahead."""
        if self.running <= self.at.keys() and all(barrier.phase == phase for barrier, phase in self.at.values()):
            raise RuntimeError(
                f"the interpreted GPU waits for ever: all warpgroups that are not done, {len(self.at)}, wait at "
                "barriers, and nobody is left who could arrive there"
            )


@contextmanager
def raising() -> Iterator[None]:
    """Within this context interpreted calls raise where they race, and where they would wait for ever. They share the
    interpreter's memory, so only one thread may make them."""
    with (
        patch.object(gpu_callbacks, "_initialize_shared_memory", _begin),
        patch.object(gpu_callbacks, "_clean_up_shared_memory", _end),
        patch.object(shared_memory.Barrier, "wait", _await),
        patch.object(shared_memory.GPUSharedMemory, "kernel_thread_finished", _done),
        plgpu.force_gpu_interpret_mode(PARAMS),
    ):
        yield


def _begin(*args: Any, **kwargs: Any) -> Any:
    """As a kernel begins: forget one that raised."""
    gpu_callbacks.reset_gpu_interpret_mode_state()
    found = _initialize(*args, **kwargs)
    memory = gpu_callbacks._get_shared_memory()
    memory.waiting = Waiting(memory)
    return found


def _await(barrier: Any, thread: Any, *args: Any, **kwargs: Any) -> None:
    """As a warpgroup waits at a barrier."""
    waiting = barrier.shared_memory.waiting
    waiting.begins(thread, barrier)
    try:
        _wait(barrier, thread, *args, **kwargs)
    finally:
        waiting.ends(thread)


def _done(memory: Any, thread: Any) -> None:
    """As a warpgroup ends."""
    _finish(memory, thread)
    memory.waiting.done(thread)


def _end(*args: Any, **kwargs: Any) -> Any:
    """As a kernel ends: raise if it raced."""
    races = gpu_callbacks.get_races()
    if races is not None and races.races_found:
        raise RuntimeError("threads or copies of the interpreted GPU raced for memory; the interpreter printed where")
    return _clean_up(*args, **kwargs)
