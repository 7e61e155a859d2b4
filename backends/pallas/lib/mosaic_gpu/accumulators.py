"""Sums of products as the tensor cores leave them, for kernels that issue products and compute beside them.

A wait for products names no register. Compilers, which know of none that it is for, may do with a part of a sum what
comes next before the wait, where nothing keeps them: a change of sign was seen there. What is returned here is known
only after the wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax

from portakern.backends.pallas.lib.mosaic_gpu import chip


def finished(acc: Any, later: int) -> Any:
    """What an accumulator holds when all but the ``later`` products issued last are done."""
    return lax.optimization_barrier(chip.finished(acc, later))


def in_registers(
    interpret: bool, work: Callable[[Any, Any], None], accumulators: tuple[Any, ...], others: tuple[Any, ...] = ()
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """As :func:`chip.in_registers`: run ``work(accumulators, others)``, and return what these hold when all products
    that it issued are done."""
    sums, after = chip.in_registers(interpret, work, accumulators, others)
    return tuple(lax.optimization_barrier(value) for value in sums), after
