"""Additions by the copy engine, told to Pallas's GPU interpreter, which knows its copies alone.

An addition is a copy that reads what was there. Where races are looked for, other additions to the same place are none:
each is whole, in whatever order they come.
"""

from __future__ import annotations

import threading
from typing import Any

import jax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

_copy = gpu_callbacks.copy_smem_to_gmem
_whole = threading.Lock()


class Addition(gpu_callbacks.AsyncCopySmemToGmemTask):
    """A copy from shared memory, added to what device memory holds."""

    def __call__(self, tma_thread_id: int) -> None:
        memory = gpu_callbacks._get_shared_memory()
        self.pre_read(tma_thread_id, memory)
        source, key = (self.src_allocation_key, self.src_access), self.dst_allocation_key
        more, _, _ = memory.get_buffer_content(*source, self.thread, logging_info=self.logging_info)
        self.post_read(tma_thread_id, memory)
        with _whole:
            within = gpu_callbacks._clip_store_to_shape(self.dst_access, more, memory.buffer_shape_and_dtype(key).shape)
            if within is not None:  # as of a copy, what lies beyond the array is dropped
                access, more = within
                before, _, _ = memory.get_buffer_content(key, access, self.thread, logging_info=self.logging_info)
                memory.store_buffer_content(key, access, before + more, self.thread, logging_info=self.logging_info)
        self.post_write(tma_thread_id, memory)

    def post_read(self, tma_thread_id: int, shared_memory: Any) -> None:
        """As of a copy, but that nothing is written that another addition must not write."""
        if shared_memory.detect_races:
            self.clock.inc(tma_thread_id)
            self.write_clock = self.clock.copy()


@gpu_callbacks.fail_on_exception
def _added(*, token: Any, mesh_location: Any, thread: Any, source_info: Any, **params: Any) -> Any:
    """What ``copy_smem_to_gmem`` does for ``reduction_op="add"``."""
    keys = {
        f"{side}_allocation_key": gpu_callbacks.HostAllocationKey.from_array(params[f"{side}_allocation_key_as_array"])
        for side in ("src", "dst")
    }
    memory = gpu_callbacks._get_shared_memory()
    places = {}
    for side in ("src", "dst"):
        transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(params[f"{side}_transforms"]))
        places[f"{side}_access"] = memory.access(keys[f"{side}_allocation_key"], transforms)
    clock = memory.incr_clock(thread) if memory.detect_races else None
    memory.execute_async_task(
        Addition(mesh_location=mesh_location, thread=thread, source_info=source_info, clock=clock, **keys, **places)
    )
    return token


def _copied_or_added(**params: Any) -> Any:
    if params["reduction_op"] is None:
        return _copy(**params)
    if params["reduction_op"] != "add" or params["predicate"] is not None:
        raise NotImplementedError("of the copy engine's reductions the interpreter was told of additions alone")
    return _added(**params)


def known() -> None:
    """From now on the interpreter adds where the copy engine does. It looks its functions up when a kernel runs, in
    threads of its own, so that this holds for the process: copies stay what they are."""
    gpu_callbacks.copy_smem_to_gmem = _copied_or_added
