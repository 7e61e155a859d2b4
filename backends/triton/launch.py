"""One way to launch: the compiler on a GPU, the interpreter on the CPU, chosen by the call; and what the Python around
the kernels asks of the hardware. PyTorch is imported where its tensors are launched on, and not before: where another
library makes the launches, there may be none.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

import triton.language as tl
from triton.runtime.jit import JITFunction

from portakern.backends.triton.capture import CAPTURES, Launched, tracing
from portakern.backends.triton.configs import RowsConfig
from portakern.backends.triton.layout import SHAPES
from portakern.core import targets
from portakern.core.config import Config

if TYPE_CHECKING:
    import torch

    from portakern.backends.triton.launcher import Handles
    from portakern.core.call import Call

__all__ = [
    "GLUON", "MAX_GRID", "RECORDERS", "TILE_REGISTERS", "accumulator", "cdiv", "compiler_options", "dot_precision",
    "fits_registers",
    "lanes", "launch", "recording", "refuse_common", "refuse_over", "shared_limit", "tmem_columns", "torch_dtype",
]  # fmt: skip

MAX_GRID = 2**31 - 1  # of a grid's first dimension, on NVIDIA and AMD; the others end at 65535, so no kernel uses them

GLUON = "its kernels are Gluon's, which Triton compiles and has no interpreter for"
"""Why some kernels run on no CPU."""

TILE_REGISTERS = 128  # that a tile may take of a thread's

_launchers: dict[tuple[Any, ...], Callable[..., Handles | None]] = {}

Recorder = Callable[[JITFunction[Any], int, tuple[Any, ...], dict[str, Any]], None]

RECORDERS: list[Recorder] = []
"""Who is told of launches that do not take place: the last one (see :func:`recording`)."""


def launch(kernel: JITFunction[Any], grid: int, call: Call, *args: Any, **constexprs: Any) -> Handles | None:
    """Run ``kernel`` over ``grid`` programs on the device of the call's arrays. ``constexprs``: the kernel's, and
    Triton's own such as ``num_warps``.

    Returns: what was launched, where it is kept.
    """
    capture = CAPTURES.get(get_ident()) if CAPTURES else None
    handles = _launch(kernel, grid, call, args, constexprs) if capture is None or capture.runs else None
    if capture is not None:
        capture.launched(Launched(kernel, grid, args, constexprs, handles))
    return handles


def _launch(
    kernel: JITFunction[Any], grid: int, call: Call, args: tuple[Any, ...], constexprs: dict[str, Any]
) -> Handles | None:
    if call.interpret:
        if isinstance(args[0], tuple):
            raise TypeError(
                f"the first argument of {kernel.__name__} is {type(args[0]).__name__}; expected an array, on whose "
                "device a compiled kernel is launched"
            )
        _interpreter().run(kernel, grid, *args, **constexprs)
        return None
    if RECORDERS:
        RECORDERS[-1](kernel, grid, args, constexprs)
        return None
    types = (id(kernel), *constexprs, *map(type, args), *map(type, constexprs.values()))
    launcher = _launchers.get(types)
    if launcher is None:
        from portakern.backends.triton.launcher import learn

        launcher = _launchers.setdefault(types, learn(kernel, args, constexprs))
    return launcher(grid, *args, **constexprs)


@functools.cache
def _interpreter() -> Any:
    from portakern.backends.triton import interpreter

    return interpreter


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """While inside, ``recorder(kernel, grid, args, constexprs)`` is told of compiled launches, and none takes place:
    for a process that only compiles, and for one that runs them otherwise."""
    RECORDERS.append(recorder)
    try:
        yield
    finally:
        RECORDERS.pop()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def torch_dtype(name: str) -> torch.dtype:
    """What tensors of this dtype have as theirs."""
    trace = tracing() if CAPTURES else None
    dtype: torch.dtype = trace.dtype(name) if trace else getattr(sys.modules["torch"], name)
    return dtype


def accumulator(dtype: str) -> tl.dtype:
    """What sums of ``dtype`` are kept in."""
    return tl.float64 if dtype == "float64" else tl.float32


def dot_precision(call: Call) -> str:
    """``input_precision`` of this call's dots: tf32 only where float32 operands ask for it and the hardware has it."""
    asked = call.dtype == "float32" and call.options["precision"] == "tf32"
    return "tf32" if asked and "tf32" in targets.family(call.target.arch).matrix_dtypes else "ieee"


WITHOUT_E4M3 = ("sm_80", "sm_86")
"""Chips for which Triton has no conversion from float8_e4m3fn."""


def shared_limit(arch: str) -> int:
    """Bytes of shared memory (LDS) that one program may use."""
    memory = targets.family(arch).on_chip
    return memory["lds" if "lds" in memory else "shared"] or 0


def tmem_columns(arch: str) -> int:
    """Columns of the tensor memory in which Blackwell's matrix unit accumulates, 128 lanes of 32 bits each; 0 without
    it."""
    return (targets.family(arch).on_chip.get("tmem") or 0) // 512


def compiler_options(config: Config) -> dict[str, int]:
    """What a tiling says to Triton's compiler. ``matrix_instr_nonkdim``, rows and columns of one matrix instruction,
    stands in tilings for CDNA alone: NVIDIA's launch refuses the word."""
    return {n: config[n] for n in ("num_warps", "num_stages", "matrix_instr_nonkdim") if n in config}


def lanes(arch: str) -> int:
    """Threads of a warp or wave."""
    return targets.family(arch).lanes


def refuse_over(call: Call, num_warps: int, tile: int) -> str | None:
    """Why tiles of so many numbers cannot be written over an input. A number that several threads hold is read by each
    of them, and stored by one, which waits for nobody."""
    if not call.over or call.interpret:
        return None
    threads = num_warps * targets.family(call.target.arch).lanes
    if tile >= threads:
        return None
    return (
        f"of a tile of {tile} numbers {threads} threads hold several copies, and one might read {call.over[0]} where "
        "another has written over it; use a larger tile, fewer warps, or leave overwrite out"
    )


def refuse_common(call: Call, num_warps: int, programs: int, *tiles: tuple[str, int]) -> str | None:
    """What no Triton kernel can do, in a user's words. ``tiles``: what a program keeps at a time, and of how many
    32-bit numbers."""
    if programs > MAX_GRID:
        return f"{programs} tiles are more than a grid holds (2^31 - 1); use a larger tiling"
    if call.interpret:
        return None
    if call.dtype == "float64":
        return "float64 is not compiled for GPUs (it runs in the interpreter on CPU arrays only); use float32"
    hardware = targets.family(call.target.arch)
    threads, most = num_warps * hardware.lanes, hardware.program_threads or 0
    if threads > most:
        return f"num_warps = {num_warps} is {threads} threads a program on {call.target.arch}, more than {most}"
    held = min(threads * (hardware.thread_registers or 0), hardware.core_registers or 0)
    for name, values in tiles:
        # Operands of dots lie in registers too where no matrix unit takes them, about as many again. Spills of tens of
        # kilobytes a thread take minutes to compile.
        needed = values if call.dtype in hardware.matrix_dtypes or dot_precision(call) == "tf32" else 2 * values
        if needed > held:
            return (
                f"{name} needs about {needed} registers and {num_warps} warps of {call.target.arch} have {held}; "
                "use a smaller tile or more warps"
            )
    return None


def refuse_tile(call: Call, config: RowsConfig, rows: int) -> str | None:
    block_rows, num_warps = config.block_rows, config.num_warps
    reason = _refuse_tile(block_rows * config.block_n, num_warps, call.interpret)
    reason = reason or refuse_over(call, num_warps, block_rows * config.block_n)
    return reason or refuse_common(call, num_warps, cdiv(rows, block_rows))


def fits_registers(tile: int, num_warps: int) -> bool:
    """Whether the registers that a tile may take hold one of so many elements."""
    return tile <= num_warps * 32 * TILE_REGISTERS


@functools.lru_cache(SHAPES)
def _refuse_tile(tile: int, num_warps: int, interpret: bool) -> str | None:
    if tile > 1 << 20:
        return f"a tile of block_rows * block_n = {tile} elements is over Triton's limit of 2^20"
    if not interpret and not fits_registers(tile, num_warps):
        return (
            f"a tile of {tile} elements is over {TILE_REGISTERS} registers a thread at num_warps = {num_warps}; "
            "use a smaller block_n or more warps"
        )
    return None
