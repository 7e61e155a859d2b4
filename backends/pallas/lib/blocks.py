"""What Pallas kernels share, whatever chip they are written for: index arithmetic, masks and the launch.

Nothing here knows a chip: what a TPU adds (its native grid, its memory, its matrix unit) lies in ``mosaic_tpu``, and
what a GPU adds in ``mosaic_gpu``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from portakern.core.call import Call

Blocks = dict[str, tuple[Any, pl.BlockSpec]]
"""Operands of a kernel by name: an array, or the form of one that is written, and how it is cut into blocks."""


class Refs(SimpleNamespace):
    """What a kernel works on, by name: ``ref.x[...]`` is the resident block of x.

    ``"bias" in ref`` says whether the call has a bias.
    """

    def __contains__(self, name: str) -> bool:
        return name in vars(self)


def launch(
    call: Call,
    kernel: Callable[[Refs], None],
    name: str,
    grid: tuple[int, ...],
    *,
    inputs: Blocks,
    outputs: Blocks,
    scratch: Mapping[str, Any],
    compiler_params: Any,
    cost: pl.CostEstimate,
    scalars: Mapping[str, jax.Array] = MappingProxyType({}),
    prefetching: Callable[..., Any] | None = None,
    over: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, jax.Array]:
    """Run ``kernel(ref)`` at every step of the grid, and return what it wrote by name.

    An operand that a call does not have is left out of ``inputs`` or ``outputs``, and is then no attribute of ``ref``
    either. ``scratch`` names what keeps its value from step to step. Interpreted calls run in the interpreter that
    ``call.interpret`` asks for; inside ``pltpu.force_tpu_interpret_mode`` the one chosen there wins.

    ``scalars``: numbers that are there before the first step: each index map takes these arrays after the step's
    indices, in this order, and ``ref`` has them too. ``prefetching``: the chip's form of such a grid.

    ``over``: output -> the input in whose memory it lies, which XLA copies before unless nobody reads it any more.
    What no step writes is what was there.
    """
    names = (*scalars, *inputs, *outputs, *scratch)

    def on_named_refs(*refs: Any) -> None:
        kernel(Refs(**dict(zip(names, refs, strict=True))))

    walk: dict[str, Any] = {
        "grid": grid,
        "in_specs": [blocks for _, blocks in inputs.values()],
        "out_specs": [blocks for _, blocks in outputs.values()],
        "scratch_shapes": [*scratch.values()],
    }
    if scalars:
        assert prefetching is not None
        walk = {"grid_spec": prefetching(num_scalar_prefetch=len(scalars), **walk)}
    results = pl.pallas_call(
        on_named_refs,
        **walk,
        out_shape=[form for form, _ in outputs.values()],
        compiler_params=compiler_params,
        cost_estimate=cost,
        interpret=call.interpret,
        name=name,
        input_output_aliases={names.index(given): list(outputs).index(out) for out, given in over.items()},
    )(*scalars.values(), *(array for array, _ in inputs.values()))
    return dict(zip(outputs, results, strict=True))


def padded(extent: int, grain: int) -> int:
    """The extent, rounded up to a multiple of the grain."""
    return pl.cdiv(extent, grain) * grain


def block(extent: int, tile: int, grain: int) -> int:
    """The block for an extent: the tile, or the extent rounded up to the native grid where the tile covers it, so that
    a tile off that grid is on it."""
    return padded(min(extent, tile), grain)


def even_block(extent: int, tile: int, grain: int) -> int:
    """`block`, no larger than cuts the extent as evenly as the native grid allows into as many blocks: of 2304 at most
    1024 wide three of 768, and not three of 1024, of which a quarter is padding."""
    return padded(pl.cdiv(extent, pl.cdiv(extent, tile)), grain)


def row_block(call: Call, extent: int, tile: int, grain: int, even: bool = False) -> int:
    """`block`, or with ``even`` `even_block`, for rows that share a block but do not depend on each other.

    An interpreted call always takes the whole tile: on a CPU, matrix products and sums choose their order by shape, and
    the bits of a row must not depend on how many rows come with it. An accelerator's units have one order.
    """
    if call.interpret:
        return padded(tile, grain)
    return even_block(extent, tile, grain) if even else block(extent, tile, grain)


def first_lacking(lacks: Mapping[str, str], *dtypes: str | None) -> str | None:
    """Why a chip cannot compute in one of these dtypes, or None.

    ``lacks`` gives the reason for each dtype that the chip does not have.
    """
    return next((reason for dtype, reason in lacks.items() if dtype in dtypes), None)


def step_along(axis: int) -> Any:
    """The index of this step along a grid axis.

    It is the plain 0 where the axis has one step, so that whatever hangs on it is decided while tracing.
    """
    return 0 if pl.num_programs(axis) == 1 else pl.program_id(axis)


def quotient(a: Any, b: int) -> Any:
    """a // b of indices that are not negative.

    Truncation is then right and no sign is looked at; an int32 stays an int32 under jax_enable_x64. A power of two is a
    shift, which takes one instruction, and which a compiler that follows the grid's indices can follow: what it cannot,
    it counts as branches that are not taken.
    """
    if isinstance(a, int):
        return a // b
    if b & (b - 1) == 0:
        return lax.shift_right_logical(a, a.dtype.type(b.bit_length() - 1))
    return lax.div(a, a.dtype.type(b))


def positions(shape: tuple[int, ...], axis: int, start: Any) -> Any:
    """The index along `axis` of every element of a block that begins at `start`."""
    return start + lax.broadcasted_iota(jnp.int32, shape, axis)


def within(x: Any, axis: int, start: Any, length: int, beyond: float = 0.0, divisor: int | None = None) -> Any:
    """x, a block that begins at `start` along `axis`, with the number `beyond` for what lies beyond `length`.

    There lies anything, and what a sum or a product runs over may hold no NaN: 0 * NaN is NaN. A block size that
    divides the length leaves nothing beyond it, and no mask is made; ``divisor``: the size of the block that x is a
    part of.
    """
    if length % (divisor or x.shape[axis]) == 0:
        return x
    return jnp.where(positions(x.shape, axis, start) < length, x, beyond)


def settled(x: Any) -> Any:
    """x, rounded as it stands whatever is done with it next; for interpreted calls.

    A compiler for a host copies a cheap expression into each loop that uses it, and contracts a product with the sum
    that follows in some of them. Then a row's maximum is not one of its scores, which at scores of 1e9, whose ulp is
    64, moves its weights by exp(64). No contraction reaches through this choice, whose two sides agree: infinities and
    NaN are their own doubles.
    """
    return jnp.where(jnp.isfinite(x), x, x + x)


def words(ids: jax.Array, number: int) -> jax.Array:
    """(batch, len) segment ids as (batch, number, len) int32, the lowest word first: a TPU has no 64-bit integers.

    Queries and keys are compared word by word, so that both sides have the same number of words: an int32 beside an
    int64 gets the word that holds its sign.
    """
    if ids.dtype.itemsize == 8:
        return jnp.moveaxis(lax.bitcast_convert_type(ids, jnp.int32), -1, 1)
    low = ids.astype(jnp.int32)
    return jnp.stack([low, low >> 31][:number], axis=1)
