"""What the Pallas kernels share: which interpreter runs them, how a tile meets an extent, and what a chip refuses.

A tile that a user names is never changed in silence. It is legal when it lies on the chip's grid of 8 sublanes (16 for 16-bit values) by 128 lanes,
or when it covers its whole extent: then the block is the extent rounded up to that grid, and the kernel masks what lies beyond.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from portakern.core import targets
from portakern.core.call import Call

LANES = 128
VMEM_BYTES = targets.least("tpu", "vmem")  # what a kernel may use by default on every chip


def interpreter(call: Call) -> Any:
    """The `interpret` argument of ``pl.pallas_call`` for this call; within ``pltpu.force_tpu_interpret_mode``, that wins."""
    return call.interpret


def sublanes(dtype: Any) -> int:
    """Rows of one native tile: 8 of 32-bit values, 16 of 16-bit values."""
    return 32 // jnp.dtype(dtype).itemsize


def block(extent: int, tile: int, grain: int) -> int:
    """The block for an extent: the tile, or the extent rounded up to the native grid where that is smaller."""
    return min(tile, pl.cdiv(extent, grain) * grain)


def row_block(call: Call, extent: int, tile: int, grain: int) -> int:
    """`block` for rows that share a block but do not depend on each other.

    An interpreted call always takes the whole tile: on a CPU, matrix products and sums choose their order by shape, and the bits of a row must not depend on how
    many rows come with it. A TPU's units have one order.
    """
    return padded(tile, grain) if call.interpret else block(extent, tile, grain)


def padded(extent: int, grain: int = LANES) -> int:
    return pl.cdiv(extent, grain) * grain


def off_grid(name: str, tile: int, extent: int, grain: int) -> str | None:
    """Why a tile is not legal for an extent, or None."""
    if tile % grain == 0 or tile >= extent:
        return None
    return f"{name}={tile} is off the TPU's native grid here: use a multiple of {grain}, or a tile that covers the whole extent of {extent}"


def over_vmem(needed: int, names: str) -> str | None:
    """Why blocks of so many bytes cannot be resident at once, or None."""
    if needed <= VMEM_BYTES:
        return None
    return f"this tiling needs about {needed / 2**20:.1f} MiB of VMEM and a TPU kernel has {VMEM_BYTES >> 20} MiB by default: choose smaller {names}"


def dtype_refused(call: Call, *more: str | None) -> str | None:
    """Why the chip cannot compute in one of these dtypes, or None."""
    used = {call.dtype, *more}
    if "float64" in used:
        return "TPUs have no float64: convert to float32, or use the reference backend"
    if "float16" in used and call.target.platform == "tpu":
        return "TPUs have no float16 (their compiler refuses even a load): convert to bfloat16 or float32"
    return None


def dot(a: Any, b: Any, contract: tuple[int, int]) -> Any:
    """One MXU product of 2-D blocks, accumulated in float32, contracting axis contract[0] of a with contract[1] of b.

    Mosaic multiplies float32 operands either as one bfloat16 pass, which is outside the tf32 bound as well as the ieee one, or in full: HIGHEST serves both.
    """
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def settled(x: Any) -> Any:
    """x, rounded as it stands whatever is done with it next; for interpreted calls.

    A compiler for a host copies a cheap expression into each loop that uses it, and contracts a product with the sum that follows in some of them. Then a
    row's maximum is not one of its scores, which at scores of 1e9, whose ulp is 64, moves its weights by exp(64). No contraction reaches through this
    choice, whose two sides agree: infinities and NaN are their own doubles.
    """
    return jnp.where(jnp.isfinite(x), x, x + x)


def step_along(axis: int) -> Any:
    """The index of this step along a grid axis; the plain 0 where the axis has one step, so that whatever hangs on it is decided while tracing."""
    return 0 if pl.num_programs(axis) == 1 else pl.program_id(axis)


def quotient(a: Any, b: int) -> Any:
    """a // b of indices that are not negative, so that truncation is right and no sign is looked at; int32 stays int32 under jax_enable_x64."""
    return a // b if isinstance(a, int) else lax.div(a, a.dtype.type(b))


def positions(shape: tuple[int, int], axis: int, start: Any) -> Any:
    """The index along `axis` of every element of a block that begins at `start`."""
    return start + lax.broadcasted_iota(jnp.int32, shape, axis)


def in_order(*semantics: str) -> pltpu.CompilerParams:
    """Grid axes that carry scratch from step to step are "arbitrary" (run in order); the others may be split over cores."""
    return pltpu.CompilerParams(dimension_semantics=semantics)
