"""The k greatest or least numbers of each row on TPUs, and their places; and the gradient.

    values[t] = x[indices[t]]        d_x[indices[t]] = d_values[t], and 0 elsewhere

x, d_x: (*batch, n); values, indices, d_values: (*batch, k). All are read and written as rows, of which a step holds
some, whole. The grid is (row blocks): nothing is carried from step to step, and nothing is masked, as what lies beyond
an array reaches only what is dropped.

Numbers are compared by the integers that order their bits as floats, which float32 and bfloat16 share: those of NaN are
the greatest, and -0 has that of 0. No comparison flushes a subnormal number. Pass t of k finds the greatest of those
that come after the last one found, and of equal ones the first: a maximum, and a minimum of places. A number is copied
by its bits, as the maximum of one number and of the least integer. The gradient's pass t writes the cotangent t where
its position is.

block_rows: rows a block holds, with all their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import TokenRowsConfig
from portakern.backends.pallas.lib.blocks import Blocks, Refs, positions, row_block
from portakern.backends.pallas.lib.mosaic_tpu.chip import (
    dtype_refused,
    launch,
    off_grid,
    over_vmem,
    sublanes,
    vmem_granted,
    vmem_limit,
    whole_lanes,
)
from portakern.core.call import Call

LEAST, MOST = np.int32(-(2**31)), np.int32(2**31 - 1)


def bits(x: Any) -> Any:
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def number(x: Any, dtype: Any) -> Any:
    return lax.bitcast_convert_type(x, jnp.float32).astype(dtype)


def turned(x: Any, largest: bool) -> Any:
    """Integers in the order of the numbers, those of NaN the greatest, or in the opposite order."""
    b = bits(x)
    key = b ^ ((b >> 31) & MOST)
    key = jnp.where(key == -1, 0, key)
    key = jnp.where((b & MOST) > np.int32(0x7F800000), MOST, key)
    return key if largest else ~key


UNROLLED = 16  # passes of the gradient that are written out, so that their columns are known to the compiler


def column(x: Any, t: Any) -> Any:
    """Column t of integers, as a column: of one that is not known before, a maximum is taken."""
    if isinstance(t, int):
        return x[:, t : t + 1]
    return jnp.max(jnp.where(positions(x.shape, 1, 0) == t, x, LEAST), axis=1, keepdims=True)


def best(ref: Refs, x: Callable[[], Any], k: int) -> tuple[Any, Any]:
    """Of the k greatest keys of each row the bits of the number in x and the position, (rows, k) each."""
    rows, n = ref.key.shape
    position, lane = positions((rows, n), 1, 0), positions((rows, k), 1, 0)

    def one_pass(t: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
        found, at, numbers, places = state
        key = ref.key[...]
        later = (key < found) | ((key == found) & (position > at))
        top = jnp.max(jnp.where(later, key, LEAST), axis=1, keepdims=True)
        at = jnp.min(jnp.where(later & (key == top), position, n), axis=1, keepdims=True)
        chosen = jnp.max(jnp.where(position == at, bits(x()), LEAST), axis=1, keepdims=True)
        return top, at, jnp.where(lane == t, chosen, numbers), jnp.where(lane == t, at, places)

    nothing = jnp.zeros((rows, k), jnp.int32)
    start = jnp.full((rows, 1), MOST), jnp.full((rows, 1), np.int32(-1)), nothing, nothing
    _, _, numbers, places = lax.fori_loop(np.int32(0), np.int32(k), one_pass, start)
    return numbers, places


def kernel(ref: Refs, *, k: int, largest: bool) -> None:
    ref.key[...] = turned(ref.x[...], largest)
    numbers, places = best(ref, lambda: ref.x[...], k)
    ref.values[...] = number(numbers, ref.values.dtype)
    ref.indices[...] = places


def spread(k: int, one_pass: Callable[[Any, Any], Any], state: Any) -> Any:
    """What k passes make of a state, which take one column of indices each."""
    if k > UNROLLED:
        return lax.fori_loop(np.int32(0), np.int32(k), one_pass, state)
    for t in range(k):
        state = one_pass(t, state)
    return state


def gradient_kernel(ref: Refs, *, k: int) -> None:
    position = positions(ref.d_x.shape, 1, 0)

    def one_pass(t: Any, d_x: Any) -> Any:
        return jnp.where(position == column(ref.indices[...], t), column(bits(ref.d_values[...]), t), d_x)

    ref.d_x[...] = number(spread(k, one_pass, jnp.zeros(ref.d_x.shape, jnp.int32)), ref.d_x.dtype)


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "n": length(call), "k": call.dims["k"]}


def height(call: Call) -> int:
    """The number of rows."""
    return math.prod(call.dims["batch"])


def length(call: Call) -> int:
    """The numbers of a row."""
    n: int = call.arrays[call.spec.arrays[0].name].shape[-1]
    return n


def needed(call: Call, block_rows: int, values: int = 4) -> int:
    """Bytes of VMEM: blocks of rows of n and of k numbers that come and go, twice each, and ``values`` of 32 bits of
    each number beside."""
    wide, narrow = (block_rows * whole_lanes(extent) for extent in (length(call), call.dims["k"]))
    size = jnp.dtype(call.dtype).itemsize
    return wide * (2 * size + 4 * values) + narrow * (2 * (size + 4) + 4 * values)


def rows_that_fit(call: Call, values: int = 4) -> TokenRowsConfig:
    """Not measured: as many rows as a kernel gets VMEM for unasked, and no more than 256."""
    least = sublanes(call.dtype)
    rows = [v for v in call.spec.tiling["block_rows"].values if least <= v <= 256]
    fit = (v for v in rows if needed(call, v, values) <= vmem_granted(call))
    return TokenRowsConfig(block_rows=max(fit, default=least))


def refused(call: Call, config: TokenRowsConfig, values: int = 4) -> str | None:
    """Why a chip cannot take rows in such blocks, or None."""
    least = sublanes(call.dtype)
    limit = vmem_limit(call) if config.block_rows <= least else vmem_granted(call)
    return (
        dtype_refused(call)
        or off_grid("block_rows", config.block_rows, height(call), least)
        or over_vmem(call, needed(call, config.block_rows, values), "block_rows, or rows of fewer numbers", limit)
    )


def default_tiling(call: Call) -> TokenRowsConfig:
    return rows_that_fit(call)


def supports(call: Call, config: TokenRowsConfig) -> str | None:
    return refused(call, config)


def by_rows(
    call: Call,
    config: TokenRowsConfig,
    kernel: Callable[[Refs], None],
    inputs: dict[str, Any],
    written: dict[str, Any],
    *,
    values: int = 4,
    shared: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, jax.Array]:
    """What a kernel writes by name: arrays of rows, of n or of k numbers, of the forms ``written``; ``shared``: arrays
    of one row, which all rows see."""
    rows, n, k = height(call), length(call), call.dims["k"]
    block_rows = row_block(call, rows, config.block_rows, sublanes(call.dtype), even=True)

    def blocks(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((block_rows, shape[-1]), lambda group: (group, 0))

    flat = {name: x.reshape(rows, x.shape[-1]) for name, x in inputs.items()}
    forms = {name: jax.ShapeDtypeStruct((rows, f.shape[-1]), f.dtype) for name, f in written.items()}
    cut: Blocks = {name: (x, blocks(x.shape)) for name, x in flat.items()}
    cut |= {name: (x[None], pl.BlockSpec((1, n), lambda group: (0, 0))) for name, x in shared.items()}
    moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in (*flat.values(), *forms.values()))
    found = launch(
        call,
        kernel,
        f"portakern_{call.spec.name}",
        (pl.cdiv(rows, block_rows),),
        in_order=0,
        inputs=cut,
        outputs={name: (f, blocks(f.shape)) for name, f in forms.items()},
        scratch={} if call.spec.is_vjp else {"key": jax.ShapeDtypeStruct((block_rows, n), jnp.int32)},
        cost=pl.CostEstimate(flops=8 * rows * n * k, transcendentals=0, bytes_accessed=moved),
        vmem=needed(call, block_rows, values),
    )
    return {name: found[name].reshape(f.shape) for name, f in written.items()}


@BACKEND.implements("top_k", key=key, tiling=default_tiling, supports=supports, config=TokenRowsConfig)
def top_k(call: Call, config: TokenRowsConfig) -> tuple[jax.Array, ...]:
    x, shape = call.arrays["x"], call.outputs["values"][0]
    forms = {"values": jax.ShapeDtypeStruct(shape, x.dtype), "indices": jax.ShapeDtypeStruct(shape, jnp.int32)}
    one = partial(kernel, k=call.dims["k"], largest=call.options["largest"])
    found = by_rows(call, config, one, {"x": x}, forms)
    return found["values"], found["indices"]


@BACKEND.implements("top_k_vjp", key=key, tiling=default_tiling, supports=supports, config=TokenRowsConfig)
def top_k_vjp(call: Call, config: TokenRowsConfig) -> tuple[jax.Array]:
    x, given = call.arrays["x"], {name: call.arrays[name] for name in ("indices", "d_values")}
    form = {"d_x": jax.ShapeDtypeStruct(x.shape, x.dtype)}
    return (by_rows(call, config, partial(gradient_kernel, k=call.dims["k"]), given, form)["d_x"],)
