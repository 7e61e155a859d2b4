"""Scores of machine code that was not run, from the compiler's report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from portakern.core.call import Call
from portakern.core.targets import Hardware
from portakern.tools.compile.build import Build

__all__ = ["Model", "model_of"]


class Model(NamedTuple):
    """Scores of builds, under their tilings, less being better.

    Attributes:
      metric, unit: what a score is. estimates: whether the compiler's own estimate, which takes longer, is better.
    """

    metric: str
    unit: str
    estimates: bool
    score: Callable[[Build, Mapping[str, int]], float]


def model_of(built: Build, hardware: Hardware, call: Call) -> Model:
    """The best model for what a target's compiler tells."""
    if any(k.issued is not None or k.cycles is not None for k in built.kernels) and hardware.clock:
        metric = "static cycles: the larger of the program's and of memory's"
        return Model(metric, "cycles", True, partial(_cycles, hardware, call))
    metric = "compile report: the largest occupancy x tile without spills, a guess"
    return Model(metric, "1 / (occupancy x tile)", False, partial(_occupied, call))


def _cycles(hardware: Hardware, call: Call, built: Build, tiling: Mapping[str, int]) -> float:
    """The larger of cycles and of the time that memory takes, kernel by kernel.

    Compilers' estimates assume more memory bandwidth than chips have: the bytes that the kernel's windows move, over
    the bandwidth of the chip's data sheet, bound them from below, and so do the operations over the peak rate.
    """
    rate, cores = hardware.flops.get(call.dtype), max((k.cores for k in built.kernels), default=1)
    least = call.flops / rate * (hardware.clock or 0.0) * (hardware.cores or 1) / cores if rate else 0.0
    return max(built.least, least) if built.least else math.inf


def _occupied(call: Call, built: Build, tiling: Mapping[str, int]) -> float:
    """The most occupancy times tile of what does not spill: a guess where nothing counts cycles.

    The product of the tile's extents stands for how often what was read is used again, occupancy for how much latency
    is hidden; a byte that a thread spills is read and written in every step.
    """
    tile = math.prod(extent for name, extent in tiling.items() if name in call.spec.tiling)
    occupancy = min((k.occupancy for k in built.kernels if k.occupancy is not None), default=1.0)
    spilled = sum(k.spills or 0 for k in built.kernels)
    return (1 + spilled) / (max(occupancy, 1e-3) * math.sqrt(tile))
