"""The producer/consumer pipeline of Hopper's kernels: one warpgroup brings tiles through rings of buffers, the others
compute.

Two barriers for each buffer say that it has arrived and that it is free. Every arrival at a barrier is waited for once:
a kernel that ends before would leave the barrier in another phase.

Source: Shah et al., "FlashAttention-3" (2024), section 3.1; Thakkar et al., CUTLASS, "Efficient GEMM in CUDA".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

REGISTERS = 40, 232
"""Registers that a thread keeps: of 65536, what the producer gives up goes to two consumers."""


def warp_specialized(
    warpgroup: Any,
    consumers: int,
    produce: Callable[[], None],
    consume: Callable[[], None],
    registers: tuple[int, int] = REGISTERS,
) -> None:
    """Have the warpgroup after the consumers produce, and those before it consume and wait until all that they wrote
    has left."""

    @pl.when(warpgroup == consumers)
    def producer() -> None:
        plgpu.set_max_registers(registers[0], action="decrease")
        produce()

    @pl.when(warpgroup < consumers)
    def consumer() -> None:
        plgpu.set_max_registers(registers[1], action="increase")
        consume()
        plgpu.wait_smem_to_gmem(0)


def free_all(*free: Any) -> None:
    """Say that all buffers of rings are free."""
    for buffer in range(free[0].shape[0]):
        for ring in free:
            plgpu.barrier_arrive(ring.at[buffer])


def drain(*free: Any) -> None:
    """Wait until all buffers of rings that began with :func:`free_all` are free."""
    for ring in free:
        for buffer in range(ring.shape[0]):
            plgpu.barrier_wait(ring.at[buffer])


def drain_last(free: Any, count: Any, stages: Any) -> None:
    """Wait until the buffers of the last of so many tiles are free, of a ring whose first tiles waited for nothing."""
    pl.loop(jnp.maximum(count - stages, 0), count)(lambda n: plgpu.barrier_wait(free.at[lax.rem(n, jnp.int32(stages))]))
