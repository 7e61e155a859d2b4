"""What every trainer of the example shares: the sizes, and what a run gives."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

__all__ = ["GIB", "SIZES", "Run", "Size"]

GIB = 2**30


@dataclass(frozen=True)
class Size:
    """Extents of a model and of its batches. ``optimizer``: a class of torch.optim; one without state leaves the peak
    in the memory to the model."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    words: int
    batch: int
    length: int
    steps: int
    optimizer: str = "AdamW"
    rate: float = 1e-3

    @property
    def head(self) -> int:
        """Numbers of one head."""
        return self.width // self.heads


SIZES = {
    "tiny": Size(1, 32, 48, 4, 2, 256, 2, 16, 2, rate=1e-2),
    "small": Size(4, 512, 1536, 8, 4, 256, 16, 512, 200),
    "reach": Size(8, 2048, 8192, 32, 8, 128256, 2, 4096, 20, "SGD", 1e-2),
}


@dataclass
class Run:
    """What one training run gave: the loss of every step, milliseconds of forward and backward of each, the peak of
    the memory in GiB, and what served it."""

    losses: list[float]
    times: list[float]
    memory: float | None
    served: str

    def step_ms(self) -> float:
        """The median, without the first fifth: what compiles, and what warms up."""
        return statistics.median(self.times[len(self.times) // 5 :])

    def row(self, who: str, seed: int, compiled: bool) -> dict[str, Any]:
        """A run, as results keep it."""
        return {
            "ops": who,
            "seed": seed,
            "compiled": compiled,
            "step_ms": round(self.step_ms(), 3),
            "memory_gib": None if self.memory is None else round(self.memory, 3),
            "final": round(statistics.mean(self.losses[-max(1, len(self.losses) // 10) :]), 5),
            "losses": [round(x, 5) for x in self.losses],
            "served": self.served.splitlines(),
        }
