"""What a call executes on an AMD GPU, counted by the emulator, one line a tiling: instructions of all waves, those of
the matrix unit, bytes that lanes load from memory and move through LDS, and passes that conflicts of LDS banks add.

    python benchmarks/emulated_counts.py matmul --target gfx942 --shape m=256,n=256,k=256 --dtype float16 \\
        --tiling block_m=64,block_n=64,block_k=32 --tiling block_m=128,block_n=64,block_k=32

The counts are exact by the documents. That fewer of them are faster is a model, checked against no clock: it knows no
latency, no cache, no occupancy, and of banks only that there are 32 of 4 bytes. Needs PORTAKERN_TINYGRAD and clang.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import numpy as np
import torch

import portakern as pk
from portakern.backends.triton.emulator import profile
from portakern.core import registry
from portakern.core.call import shape_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op")
    parser.add_argument("--target", default="gfx942")
    parser.add_argument("--shape", type=_numbers, required=True)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--tiling", type=_numbers, action="append", help="tiles that differ from the default ones")
    asked = parser.parse_args()
    backend = registry.backend("triton")
    with backend.profile("emulated", asked.target):
        for tiling in asked.tiling or [{}]:
            found = count(asked.op, asked.shape, asked.dtype, tiling)
            told = ", ".join(f"{name} {number:,}" for name, number in found.items())
            print(f"{asked.op} {asked.target} {asked.dtype} {tiling or 'default'}: {told}", flush=True)


def _numbers(text: str) -> dict[str, int]:
    return {name: int(value) for name, _, value in (part.partition("=") for part in text.split(","))}


def count(op: str, shape: dict[str, int], dtype: str, tiling: dict[str, int]) -> dict[str, int]:
    """What one call executes, on the required arrays of an op with normal values."""
    spec, rng = registry.find_spec(op), np.random.default_rng(0)
    several = {d.factors[0] for a in spec.arrays for d in a.dims if d.variadic}
    dims: dict[str, Any] = {n: shape.get(n, 1) for n in spec.dims if n not in several}
    dims |= {n: (shape[n],) if n in shape else () for n in several}
    arrays = [
        torch.from_numpy(rng.standard_normal(shape_of(a.dims, dims))).to(getattr(torch, dtype))
        for a in spec.arrays
        if not a.optional
    ]
    profile.forget()
    pk.op(op, backend="triton", tiling=tiling)(*arrays)
    counts = profile.counted()
    matrix: Counter[str] = Counter()
    for name, times in counts["instructions"].items():
        matrix["matrix instructions"] += times * name.startswith(("V_MFMA", "V_WMMA"))
    return {"instructions": counts["instructions"].total(), **matrix, **counts["moved"]}


if __name__ == "__main__":
    main()
