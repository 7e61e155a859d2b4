"""What the kernels need to know of a TPU: its native grid, its memory and matrix unit, and what it refuses.

A vector register holds 8 sublanes (16 of 16-bit values) by 128 lanes, and the last two axes of a block are counted in
those. A tile that a user names is never changed in silence: it is legal when it lies on that grid, or when it covers
its whole extent. Then the block is the extent rounded up to the grid, and the kernel masks what lies beyond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from portakern.backends.pallas.lib import blocks
from portakern.backends.pallas.lib.blocks import Blocks, Refs
from portakern.core import targets
from portakern.core.call import Call

LANES = 128
VMEM_BYTES = targets.least("tpu", "vmem")  # what a kernel gets on every chip, unasked


def sublanes(dtype: Any) -> int:
    """Rows of one native tile: 8 of 32-bit values, 16 of 16-bit values."""
    return 32 // jnp.dtype(dtype).itemsize


def whole_lanes(extent: int) -> int:
    """An extent as it lies in VMEM along lanes: rounded up to whole vector registers."""
    return blocks.padded(extent, LANES)


def across(numbers: Any, lanes: int) -> Any:
    """One number a row, as a column or repeated along the lanes of a register, beside a block of so many lanes."""
    width = numbers.shape[1]
    return numbers if width == 1 else jnp.tile(numbers, (1, pl.cdiv(lanes, width)))[:, :lanes]


def off_grid(name: str, tile: int, extent: int, grain: int) -> str | None:
    """Why a tile is not legal for an extent, or None."""
    if tile % grain == 0 or tile >= extent:
        return None
    return (
        f"{name}={tile} is off the TPU's native grid here: use a multiple of {grain}, "
        f"or a tile that covers the whole extent of {extent}"
    )


def vmem_granted(call: Call) -> int:
    """Bytes of VMEM that a kernel gets on the call's chip without asking; of an unknown chip what every one has."""
    hardware = targets.HARDWARE.get(call.target.arch)
    return (hardware.scoped.get("vmem") if hardware else None) or VMEM_BYTES


def vmem_limit(call: Call) -> int:
    """Bytes of VMEM that a kernel may ask for: three quarters of what the chip has, since the program around it keeps
    some; of an unknown chip what every one grants."""
    hardware = targets.HARDWARE.get(call.target.arch)
    there = hardware.on_chip.get("vmem") if hardware else None
    return max(vmem_granted(call), (there or 0) * 3 // 4)


def over_vmem(call: Call, needed: int, names: str, limit: int | None = None) -> str | None:
    """Why blocks of so many bytes cannot be resident at once, or None.

    ``names`` are the tiles that would have to be smaller; ``limit``: of a kernel that does not ask for more than it is
    granted.
    """
    limit = vmem_limit(call) if limit is None else limit
    note(needed, limit)
    if needed <= limit:
        return None
    chip = f"{call.target.arch} lets a kernel have" if call.target.arch in targets.HARDWARE else "a TPU kernel has"
    return (
        f"this tiling needs about {needed / 2**20:.1f} MiB of VMEM and {chip} {limit >> 20} MiB: choose smaller {names}"
    )


@contextmanager
def estimates() -> Iterator[list[tuple[int, int]]]:
    """What is noted meanwhile: of kernels the bytes of VMEM that they are found to need, and those that they may have;
    to be held to those that the compiler takes."""
    noted: list[tuple[int, int]] = []
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)


_NOTED: ContextVar[list[tuple[int, int]] | None] = ContextVar("_NOTED", default=None)


def note(needed: int, limit: int) -> None:
    """Tell whoever asks for `estimates` of a kernel that needs so many bytes of VMEM, and may have as many."""
    noted = _NOTED.get()
    if noted is not None:
        noted.append((needed, limit))


def dtype_refused(call: Call, *more: str | None) -> str | None:
    """Why a TPU cannot compute in the call's dtype, or in one of these, or None."""
    lacks = {"float64": "TPUs have no float64: convert to float32, or use the reference backend"}
    if call.target.platform == "tpu":
        lacks["float16"] = "TPUs have no float16 (their compiler refuses even a load): convert to bfloat16 or float32"
    return blocks.first_lacking(lacks, call.dtype, *more)


def dot(a: Any, b: Any, contract: tuple[int, int]) -> Any:
    """One product of 2-D blocks on the matrix unit, accumulated in float32.

    It contracts axis contract[0] of a with axis contract[1] of b. Mosaic multiplies float32 operands either as one
    bfloat16 pass, which is outside the tf32 bound as well as the ieee one, or in full: HIGHEST serves both.
    """
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def launch(
    call: Call,
    kernel: Callable[[Refs], None],
    name: str,
    grid: tuple[int, ...],
    *,
    in_order: int,
    inputs: Blocks,
    outputs: Blocks,
    scratch: Mapping[str, tuple[int, ...] | jax.ShapeDtypeStruct] = MappingProxyType({}),
    cost: pl.CostEstimate,
    vmem: int = 0,
    scalars: Mapping[str, jax.Array] = MappingProxyType({}),
    over: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, jax.Array]:
    """Run ``kernel(ref)`` on a TPU's grid, and return what it wrote by name (`blocks.launch`).

    ``vmem``: bytes that it needs, as far as that is known. Where they are more than three quarters of what a kernel
    gets unasked, since masks and spilled values come to them, it asks for the chip's limit.

    The last ``in_order`` grid axes run one step after another, since ``scratch``, arrays of these forms in VMEM,
    float32 where a shape says no more, is carried along them ("arbitrary", in Mosaic's word). The axes before them are
    independent of each other and may be split over cores ("parallel").

    ``scalars``: numbers in scalar memory, which index maps read besides the step's indices. ``over``: output -> the
    input over which it lies.
    """
    return blocks.launch(
        call,
        kernel,
        name,
        grid,
        inputs=inputs,
        outputs=outputs,
        scratch={
            state: pltpu.VMEM(*((form, jnp.float32) if isinstance(form, tuple) else (form.shape, form.dtype)))
            for state, form in scratch.items()
        },
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * (len(grid) - in_order) + ("arbitrary",) * in_order,
            vmem_limit_bytes=vmem_limit(call) if 4 * vmem > 3 * vmem_granted(call) else None,
        ),
        cost=cost,
        scalars=scalars,
        prefetching=pltpu.PrefetchScalarGridSpec,
        over=over,
    )
