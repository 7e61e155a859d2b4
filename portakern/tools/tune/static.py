"""Scores of machine code that nothing ran: what of a compiler's report stands for time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from portakern.core.call import Call
from portakern.core.targets import Hardware
from portakern.tools.compile.build import Build

__all__ = ["Cycles", "Model", "Occupied", "model_of"]


class Model(Protocol):
    """Scores of builds, less being better.

    Attributes:
      metric, unit: what a score is. estimates: whether the compiler's own estimate, which takes longer, is better.
    """

    metric: str
    unit: str
    estimates: bool

    def estimated(self, built: Build) -> bool:
        """Whether the compiler's own estimate is there."""

    def score(self, built: Build, tiling: Mapping[str, int]) -> float:
        """Of one build."""


def model_of(built: Build, hardware: Hardware, call: Call) -> Model:
    """The best model for what a target's compiler tells."""
    if any(k.issued is not None or k.cycles is not None for k in built.kernels) and hardware.clock:
        return Cycles(hardware, call)
    return Occupied(call)


@dataclass
class Cycles:
    """The larger of cycles and of the time that memory takes, kernel by kernel.

    Compilers' estimates assume more memory bandwidth than chips have: the bytes that the kernel's windows move, over
    the bandwidth of the chip's data sheet, bound them from below, and so do the operations over the peak rate.
    """

    hardware: Hardware
    call: Call
    metric: str = "static cycles: the larger of the program's and of memory's"
    unit: str = "cycles"
    estimates: bool = True

    def estimated(self, built: Build) -> bool:
        return all(k.cycles is not None for k in built.kernels)

    def score(self, built: Build, tiling: Mapping[str, int]) -> float:
        cores = max((k.cores for k in built.kernels), default=1)
        return max(built.least, self._least / cores) if built.least else math.inf

    @property
    def _least(self) -> float:
        """Cycles that the operations take one core at the peak rate, where one is known."""
        rate = self.hardware.flops.get(self.call.dtype)
        return self.call.flops / rate * (self.hardware.clock or 0.0) * (self.hardware.cores or 1) if rate else 0.0


@dataclass
class Occupied:
    """The most occupancy times tile of what does not spill: a guess where nothing counts cycles.

    The product of the tile's extents stands for how often what was read is used again, occupancy for how much latency
    is hidden; a byte that a thread spills is read and written in every step.
    """

    call: Call
    metric: str = "compile report: the most occupancy times tile of what does not spill; a guess"
    unit: str = "1 / (occupancy x tile)"
    estimates: bool = False

    def estimated(self, built: Build) -> bool:
        return False

    def score(self, built: Build, tiling: Mapping[str, int]) -> float:
        tile = math.prod(extent for name, extent in tiling.items() if name in self.call.spec.tiling)
        occupancy = min((k.occupancy for k in built.kernels if k.occupancy is not None), default=1.0)
        spilled = sum(k.spills or 0 for k in built.kernels)
        return (1 + spilled) / (max(occupancy, 1e-3) * math.sqrt(tile))
