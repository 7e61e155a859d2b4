"""Root mean square normalisation on TPUs along the last axis, in codes of 8 bits and one scale for each group of a row.

    y = xh weight        xh = x r        r = (mean(x^2) + eps)^-1/2        (``narrow``: xh is rounded to x's dtype)
    scale = max |y| / L of a group        q = y / scale, no further from 0 than L, rounded to nearest, ties to even

x, q: (*batch, n); weight: (n) or None; scale: (*batch, groups). A step has whole rows, on 32 of which at a time, a
native tile of 8-bit values, it works piece by piece (`Strip`): the squares, then of each group its greatest magnitude
and its codes. y is made anew in each of these, of what lies in VMEM. Codes are made as in quantize. Groups of a
multiple of 128 numbers, or of a whole row, lie in registers of their own; others are told apart by masks.

block_rows: rows a block holds. All of a row lies in VMEM at once.

Sources: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4; Micikevicius et al., "FP8
formats for deep learning" (2022).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import WholeRowsConfig
from portakern.backends.pallas.lib.blocks import Refs, positions, quotient, row_block, settled
from portakern.backends.pallas.lib.mosaic_tpu.chip import (
    LANES,
    dtype_refused,
    launch,
    off_grid,
    over_vmem,
    vmem_granted,
    whole_lanes,
)
from portakern.backends.pallas.lib.mosaic_tpu.rows import PIECE, BlockWalk, Strip, StripSlice
from portakern.backends.pallas.tpu.quantize import PACKED, code_of, inverse, scale_of
from portakern.backends.pallas.tpu.rmsnorm import rounds_before
from portakern.core.call import Call
from portakern.specs.quantize import largest, scale_limits

Rows = Callable[[StripSlice], jax.Array]


def pieces(strip: Strip, start: int, stop: int) -> Iterator[StripSlice]:
    """A group of each row in pieces of as many elements as a few registers hold."""
    width = PIECE // strip.walk.block_rows
    for at in range(start, stop, width):
        yield StripSlice(strip, at, min(at + width, stop))


def greatest(strip: Strip, start: int, stop: int, function: Rows) -> jax.Array:
    """The largest along a group of each row of what ``function`` makes of each piece."""
    found: dict[int, list[jax.Array]] = {}
    for at in pieces(strip, start, stop):
        found.setdefault(at.stop - at.start, []).append(function(at))
    along = [jnp.max(functools.reduce(jnp.maximum, same), axis=1, keepdims=True) for same in found.values()]
    return functools.reduce(jnp.maximum, along)


def scale_of_group(strip: Strip, start: int, stop: int, y: Rows, call: Call) -> jax.Array:
    """The scale of the numbers of each row from ``start`` to ``stop``."""
    top = greatest(strip, start, stop, lambda at: jnp.where(y(at) == y(at), jnp.abs(y(at)), 0.0))
    lost = greatest(strip, start, stop, lambda at: jnp.where(y(at) == y(at), 0.0, 1.0))
    found = scale_of(top, largest(call), scale_limits(call), call.options["scales"] == "power_of_two")
    return jnp.where(lost > 0, jnp.nan, found)


def write_codes(ref: Refs, strip: Strip, y: Callable[[Refs, StripSlice], jax.Array], call: Call) -> None:
    """Codes and scales of a strip's rows, of what y makes of pieces of the arrays in ``ref``."""
    width, to, most = call.options["width"], call.options["to"], largest(call)
    if not on_registers(width, strip.n):
        write_masked_codes(ref, strip, y, call)
        return
    for group, start in enumerate(range(0, strip.n, width)):
        stop = min(start + width, strip.n)
        scale = scale_of_group(strip, start, stop, partial(y, ref), call)
        ref.scale[:, group : group + 1] = scale
        share = inverse(scale)
        for at in pieces(strip, start, stop):
            at.write(ref.q, code_of(y(ref, at) * share, to, most))


def write_masked_codes(ref: Refs, strip: Strip, y: Callable[[Refs, StripSlice], jax.Array], call: Call) -> None:
    """The same of groups that share registers: each is masked in those that it lies in. ``ref.share``: what each number
    is multiplied with."""
    width, to, most = call.options["width"], call.options["to"], largest(call)
    wide = ref.q.shape[1]
    span = min(whole_lanes(width) + LANES, wide)

    def on_group(group: Any, none: Any) -> Any:
        first = group * np.int32(width)
        start = jnp.minimum(quotient(first, LANES) * np.int32(LANES), np.int32(wide - span))
        here = pl.ds(pl.multiple_of(start, LANES), span)
        near = Refs(**{name: a.at[:, here] for name, a in vars(ref).items() if name != "scale"})

        def within(at: StripSlice, inside: Any, beyond: Any) -> jax.Array:
            place = positions((PACKED, at.stop - at.start), 1, start + np.int32(at.start))
            return jnp.where((place >= first) & (place < jnp.minimum(first + width, strip.n)), inside, beyond)

        scale = scale_of_group(strip, 0, span, lambda at: within(at, y(near, at), 0.0), call)
        ref.scale[...] = jnp.where(positions(ref.scale.shape, 1, 0) == group, scale, ref.scale[...])
        share = inverse(scale)
        for at in pieces(strip, 0, span):
            at.write(near.share, within(at, share, at(near.share)))
        return none

    lax.fori_loop(np.int32(0), np.int32(-(-strip.n // width)), on_group, np.int32(0))
    for at in pieces(strip, 0, strip.n):
        at.write(ref.q, code_of(y(ref, at) * at(ref.share), to, most))


def on_registers(width: int, n: int) -> bool:
    """Whether each group of a row lies in registers of its own."""
    return width >= n or width % LANES == 0


def through(values: jax.Array, dtype: Any, call: Call) -> jax.Array:
    """Rounded to a dtype and back. Of interpreted calls XLA would leave both out, for more precision."""
    stored = values.astype(dtype)
    return (settled(stored) if call.interpret else stored).astype(jnp.float32)


def kernel(ref: Refs, strip: Strip, call: Call) -> None:
    """Of a strip's rows, or of those of a sum where there is a residual."""
    narrow = rounds_before(call)

    def x(ref: Refs, at: StripSlice) -> jax.Array:
        return through(at(ref.x) + at(ref.residual), ref.x.dtype, call) if "residual" in ref else at(ref.x)

    (squares,) = strip.sums(lambda at: (jnp.square(x(ref, at)),))
    r = lax.rsqrt(squares / strip.n + call.options["eps"])

    def y(ref: Refs, at: StripSlice) -> jax.Array:
        xh = through(x(ref, at) * r, ref.x.dtype, call) if narrow else x(ref, at) * r
        return xh * at(ref.weight) if "weight" in ref else xh

    write_codes(ref, strip, y, call)
    if "residual_out" in ref:
        for at in pieces(strip, 0, strip.n):
            at.write(ref.residual_out, x(ref, at))


def view(call: Call, name: str) -> tuple[int, int]:
    """An array's shape in two axes, (rows, n)."""
    shape = call.arrays[name].shape
    return math.prod(shape[:-1]), shape[-1]


def needed(call: Call, name: str, block_rows: int, arrays: int) -> int:
    """Bytes of VMEM: two blocks of so many arrays of the call's dtype, of the codes and of the scales, and two of
    a strip, which are made of them."""
    n = whole_lanes(view(call, name)[1])
    groups = whole_lanes(-(-n // call.options["width"]))
    of_row = 2 * (n * (arrays * jnp.dtype(call.dtype).itemsize + 1) + 4 * groups)
    return block_rows * of_row + 2 * PACKED * n * 4


def whole_rows(name: str, arrays: int) -> dict[str, Any]:
    """What an op on so many arrays of rows, one of them of that name, declares beside its function."""

    def key(call: Call) -> dict[str, str | int]:
        return {"dtype": call.dtype, "n": view(call, name)[1]}

    def tiling(call: Call) -> WholeRowsConfig:
        """As many rows as fit what a kernel gets of VMEM unasked; 32 at least."""
        fitting = [
            v
            for v in call.spec.tiling["block_rows"].values
            if v % PACKED == 0 and needed(call, name, v, arrays) <= vmem_granted(call)
        ]
        return WholeRowsConfig(block_rows=max(fitting, default=PACKED))

    def supports(call: Call, config: WholeRowsConfig) -> str | None:
        rows, block_rows = view(call, name)[0], row_block(call, view(call, name)[0], config.block_rows, PACKED)
        return (
            dtype_refused(call)
            or off_grid("block_rows", config.block_rows, rows, PACKED)
            or over_vmem(call, needed(call, name, block_rows, arrays), "block_rows, or shorter rows")
        )

    return {"key": key, "config": WholeRowsConfig, "tiling": tiling, "supports": supports}


def coded_rows(
    call: Call,
    config: WholeRowsConfig,
    kernel: Callable[[Refs, Strip, Call], None],
    names: tuple[str, ...],
    more: tuple[str, ...] = (),
    flops: int = 16,
) -> dict[str, jax.Array]:
    """Codes, scales and ``more`` outputs like the inputs, of arrays of rows of these names and a weight: what
    ``kernel`` writes of each strip."""
    x = call.arrays[names[0]]
    (rows, n), groups = view(call, names[0]), call.outputs["scale"][0][-1]
    block_rows = row_block(call, rows, config.block_rows, PACKED)
    weight = call.arrays.get("weight")
    wide = whole_lanes(n)
    by_rows, walk = pl.BlockSpec((block_rows, wide), lambda i: (i, 0)), BlockWalk((rows, n), 1, PACKED, wide, 1)

    def on_block(ref: Refs) -> None:
        def on_strip(i: Any, none: Any) -> Any:
            first = pl.multiple_of(i * PACKED, PACKED)
            here = {k: a if k in ("weight", "share") else a.at[pl.ds(first, PACKED)] for k, a in vars(ref).items()}
            kernel(Refs(**here), Strip(walk, 0, first, PACKED), call)
            return none

        lax.fori_loop(np.int32(0), np.int32(block_rows // PACKED), on_strip, np.int32(0))

    of_weight = {} if weight is None else {"weight": (weight.reshape(1, n), pl.BlockSpec((1, wide), lambda i: (0, 0)))}
    found = launch(
        call,
        on_block,
        f"portakern_{call.spec.name}",
        (pl.cdiv(rows, block_rows),),
        in_order=0,
        inputs={name: (call.arrays[name].reshape(rows, n), by_rows) for name in names} | of_weight,
        outputs={
            "q": (jax.ShapeDtypeStruct((rows, n), jnp.int8), by_rows),
            "scale": (
                jax.ShapeDtypeStruct((rows, groups), jnp.float32),
                pl.BlockSpec((block_rows, groups), lambda i: (i, 0)),
            ),
            **{name: (jax.ShapeDtypeStruct((rows, n), x.dtype), by_rows) for name in more},
        },
        scratch={} if on_registers(call.options["width"], n) else {"share": (PACKED, wide)},
        vmem=needed(call, names[0], block_rows, len(names) + len(more)),
        cost=pl.CostEstimate(
            flops=flops * x.size,
            transcendentals=rows,
            bytes_accessed=x.size * ((len(names) + len(more)) * x.dtype.itemsize + 1) + 4 * rows * groups,
        ),
    )
    to = call.options["to"]
    q = found["q"] if to == "int8" else lax.bitcast_convert_type(found["q"], jnp.dtype(to))
    found |= {"q": q, "scale": found["scale"].reshape(*x.shape[:-1], groups)}
    return found | {name: found[name].reshape(x.shape) for name in ("q", *more)}


@BACKEND.implements("rmsnorm_quantize", **whole_rows("x", arrays=1))
def rmsnorm_quantize(call: Call, config: WholeRowsConfig) -> tuple[jax.Array, ...]:
    found = coded_rows(call, config, kernel, ("x",))
    return found["q"], found["scale"]
