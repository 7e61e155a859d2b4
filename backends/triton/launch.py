"""One way to launch: the compiler on a GPU, the interpreter on the CPU, chosen by the call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

from portakern.backends.triton import interpreter

if TYPE_CHECKING:
    from portakern.call import Call

__all__ = ["MAX_GRID", "accumulator", "cdiv", "dot_precision", "launch", "refuse_common", "shared_limit", "torch_dtype"]

MAX_GRID = 2**31 - 1  # of a grid's first dimension, on NVIDIA and AMD; the others end at 65535, so no kernel uses them

_SHARED = {"sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_103": 227, "sm_120": 99, "sm_121": 99, "gfx950": 160}


def launch(kernel: JITFunction[Any], grid: int, call: Call, *args: Any, **constexprs: Any) -> None:
    """Run ``kernel`` over ``grid`` programs on the device of the call's arrays."""
    if call.interpret:
        interpreter.run(kernel, grid, *args, **constexprs)
        return
    with torch.cuda.device(args[0].device):  # Triton launches on the current device, whichever the arrays are on
        kernel[(grid,)](*args, **constexprs)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def accumulator(dtype: str) -> tl.dtype:
    """What sums of ``dtype`` are kept in."""
    return tl.float64 if dtype == "float64" else tl.float32


def dot_precision(call: Call) -> str:
    """``input_precision`` of this call's dots: tf32 only where float32 operands ask for it and the hardware has it."""
    has_tf32 = call.target.arch in ("", "gfx942") or call.target.arch.startswith("sm_")
    return "tf32" if call.dtype == "float32" and call.options["precision"] == "tf32" and has_tf32 else "ieee"


def shared_limit(arch: str) -> int:
    """Bytes of shared memory (LDS) that one program may use."""
    return _SHARED.get(arch, 64 if arch.startswith("gfx") else 99) * 1024


def refuse_common(call: Call, num_warps: int, programs: int) -> str | None:
    """What no Triton kernel can do, in a user's words."""
    if programs > MAX_GRID:
        return f"{programs} tiles are more than a grid holds (2^31 - 1); use a larger tiling"
    if call.interpret:
        return None
    if call.dtype == "float64":
        return "float64 is not compiled for GPUs (it runs in the interpreter on CPU arrays only); use float32"
    wave = 64 if call.target.arch.startswith("gfx9") else 32
    if num_warps * wave > 1024:
        return f"num_warps = {num_warps} is {num_warps * wave} threads a program on {call.target.arch}, more than 1024"
    return None
