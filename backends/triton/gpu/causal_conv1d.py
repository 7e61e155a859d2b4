"""A short causal convolution of each channel along a sequence, and its gradients.

    z[t] = bias + sum over j of weight[j] X[t + j]        y = f(z)        X: the initial state, then x

x: (batch, length, channels) of any strides, weight: (channels, width), past = width - 1. A program owns block_length
positions of block_channels channels of one sample, and reads them once for each tap, each time one position later: all
but the first come from cache, and a position costs one read and one write of memory. The programs of a sequence's last
positions write the final state too.

    d_z = d_y f'(z)        d_X[e] = sum over j of weight[j] d_z[e - j]        d_weight[j] = sum of d_z[t] X[t + j]

The gradient keeps nothing of the forward pass but its arguments. A program reads the inputs of a tile shifted by -past
to past, from which it computes z, and d_z, at the tile's positions and at the ``past`` that follow, in registers. It
walks ``blocks_per_program`` tiles of one sample and leaves their sums of d_weight and d_bias, which one kernel adds up
in a fixed order. Where there is an initial state positions begin at -past, so that its gradient is d_X there.

Source: Dao's package causal_conv1d for the states and what its gradient computes again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import SequenceConfig, SequenceGradientsConfig
from portakern.backends.triton.launch import TILE_REGISTERS, accumulator, cdiv, launch, refuse_common
from portakern.backends.triton.layout import fresh, pow2_at_least
from portakern.backends.triton.lib.activations import activated, of_silu
from portakern.backends.triton.lib.column_sums import add_up, scratch

if TYPE_CHECKING:
    from portakern.core.call import Call


class Filter(NamedTuple):
    """What inputs meet: weight, and bias, the initial state and the segments, each of which may be None."""

    weight: Any
    bias: Any
    state: Any
    segments: Any


class SequenceExtents(NamedTuple):
    """``tiles_length``, ``tiles_channels``: of a sample; ``group``: positions that a program walks."""

    length: int
    channels: int
    tiles_length: int
    tiles_channels: int
    group: int


class SequenceStrides(NamedTuple):
    """Of x and d_y (batch, length, channels), of weight (channels, width), of bias, of states (batch, channels, past)
    and of segments (batch, length); 0 for what is absent."""

    x: tuple[int, ...]
    weight: tuple[int, ...]
    bias: int
    state: tuple[int, ...]
    segments: tuple[int, ...]
    d_y: tuple[int, ...] = (0, 0, 0)
    d_final: tuple[int, ...] = (0, 0, 0)


class ChannelTile(NamedTuple):
    """What kernels are compiled for: the tile, inputs that an output sees before its own, a power of two that holds the
    positions of a state, and what sums are kept in."""

    block_length: int
    block_channels: int
    past: int
    block_state: int
    acc_dtype: tl.dtype


class SequenceGradients(NamedTuple):
    """d_x, d_initial_state, and sums of d_weight (parts, channels, width) and d_bias (parts, channels); any may be
    None."""

    d_x: Any
    d_state: Any
    d_weights: Any
    d_biases: Any


@triton.jit
def counted(number: tl.constexpr):
    """0, 1 ... for a comprehension, which walks a tuple that is written out."""
    return (
        0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30
    )[:number]  # fmt: skip


@triton.jit
def own_channels(extents, tile: tl.constexpr):
    """(the part of all sequences that is this program's, its channels, which of them there are)."""
    part = tl.program_id(0) // extents.tiles_channels
    c = tl.program_id(0) % extents.tiles_channels * tile.block_channels + tl.arange(0, tile.block_channels)
    return part, c.to(tl.int64), c < extents.channels


@triton.jit
def load_positions(x, batch, t, c, c_ok, extents, strides, tile: tl.constexpr):
    """Of a sample at positions t: (positions, channels), 0 where there are none."""
    ok = ((t >= 0) & (t < extents.length))[:, None] & c_ok[None, :]
    at = x + batch * strides[0] + (t.to(tl.int64) * strides[1])[:, None] + (c * strides[2])[None, :]
    return tl.load(at, mask=ok, other=0.0).to(tile.acc_dtype)


@triton.jit
def load_inputs(x, state, batch, t, c, c_ok, extents, strides, tile: tl.constexpr):
    """The inputs at positions t, of which the initial state has those before 0."""
    found = load_positions(x, batch, t, c, c_ok, extents, strides.x, tile)
    if state is not None:
        ok = ((t < 0) & (t >= -tile.past))[:, None] & c_ok[None, :]
        of_batch, of_channel, of_position = strides.state
        row = (t + tile.past).to(tl.int64) * of_position
        at = state + batch * of_batch + row[:, None] + (c * of_channel)[None, :]
        found = tl.where(ok, tl.load(at, mask=ok, other=0.0).to(tile.acc_dtype), found)
    return found


@triton.jit
def load_segments(segments, batch, t, extents, strides):
    """The segments of positions t, as a column. Those before the first are of that one's."""
    t = tl.minimum(tl.maximum(t, 0), extents.length - 1)
    return tl.load(segments + batch * strides.segments[0] + t.to(tl.int64) * strides.segments[1])[:, None]


@triton.jit
def of_last_segment(value, segments, batch, t, extents, strides):
    """What a final state holds of values at positions t: 0 for those of another segment than the last."""
    if segments is None:
        return value
    else:
        own = load_segments(segments, batch, t, extents, strides)
        last = load_segments(segments, batch, t * 0 + extents.length, extents, strides)
        return tl.where(own == last, value, 0.0)


@triton.jit
def load_weights(weight, c, c_ok, strides, tile: tl.constexpr):
    """Each tap of channels c, as a row."""
    at = weight + c * strides.weight[0]
    return [
        tl.load(at + j * strides.weight[1], mask=c_ok, other=0.0).to(tile.acc_dtype)[None, :]
        for j in counted(tile.past + 1)
    ]


@triton.jit
def load_bias(bias, c, c_ok, strides, tile: tl.constexpr):
    """The bias of channels c, or 0, at each position of a tile."""
    found = tl.full([tile.block_length, tile.block_channels], 0.0, tile.acc_dtype)
    if bias is not None:
        found += tl.load(bias + c * strides.bias, mask=c_ok, other=0.0).to(tile.acc_dtype)[None, :]
    return found


@triton.jit
def of_own_segment(value, own, other):
    """0 where the segments differ."""
    if own is None:
        return value
    else:
        return tl.where(own == other, value, 0.0)


@triton.jit
def convolved(inputs, first: tl.constexpr, weights, bias, ids, tile: tl.constexpr):
    """z of the positions whose taps meet inputs[first], inputs[first + 1] ... ; ids: of the inputs' positions."""
    z = bias
    for j in tl.static_range(len(weights)):
        own = None if ids is None else ids[first + tile.past]
        other = None if ids is None else ids[first + j]
        z += of_own_segment(inputs[first + j], own, other) * weights[j]
    return z


@triton.jit
def causal_conv1d_kernel(x, taps, y, final_state, extents, strides, activation: tl.constexpr, tile: tl.constexpr):
    """final_state may be None."""
    part, c, c_ok = own_channels(extents, tile)
    batch, first = (part // extents.tiles_length).to(tl.int64), part % extents.tiles_length * tile.block_length
    t = first + tl.arange(0, tile.block_length)
    weights = load_weights(taps.weight, c, c_ok, strides, tile)
    inputs = [
        load_inputs(x, taps.state, batch, t + (j - tile.past), c, c_ok, extents, strides, tile)
        for j in counted(tile.past + 1)
    ]
    ids = None
    if taps.segments is not None:
        ids = [
            load_segments(taps.segments, batch, t + (j - tile.past), extents, strides) for j in counted(tile.past + 1)
        ]
    z = convolved(inputs, 0, weights, load_bias(taps.bias, c, c_ok, strides, tile), ids, tile)
    out = activated(z, activation, False).to(y.dtype.element_ty)
    at = y + (batch * extents.length + t)[:, None] * extents.channels + c[None, :]
    tl.store(at, out, mask=(t < extents.length)[:, None] & c_ok[None, :])
    if final_state is not None:  # noqa: SIM102, the first is known when the kernel is compiled
        if first + tile.block_length >= extents.length:
            row = tl.arange(0, tile.block_state)
            last = extents.length - tile.past + row
            state = load_inputs(x, taps.state, batch, last, c, c_ok, extents, strides, tile)
            state = of_last_segment(state, taps.segments, batch, last, extents, strides)
            at = final_state + (batch * extents.channels + c)[None, :] * tile.past + row[:, None]
            tl.store(at, state.to(final_state.dtype.element_ty), mask=(row < tile.past)[:, None] & c_ok[None, :])


@triton.jit
def cotangent(z, d_y, batch, t, c, c_ok, extents, strides, activation: tl.constexpr, tile: tl.constexpr):
    """d_z at positions t, 0 where there are none."""
    d = load_positions(d_y, batch, t, c, c_ok, extents, strides.d_y, tile)
    if activation == "silu":
        _, slope = of_silu(z)
        d = tl.where(((t >= 0) & (t < extents.length))[:, None], d * slope, 0.0)
    return d


@triton.jit
def store_inputs(d, results, batch, t, c, c_ok, extents, tile: tl.constexpr):
    """The gradient of the inputs at positions t: of x, and before 0 of the initial state."""
    if results.d_x is not None:
        ok = ((t >= 0) & (t < extents.length))[:, None] & c_ok[None, :]
        at = results.d_x + (batch * extents.length + t)[:, None] * extents.channels + c[None, :]
        tl.store(at, d.to(results.d_x.dtype.element_ty), mask=ok)
    if results.d_state is not None:
        ok = (t < 0)[:, None] & c_ok[None, :]
        at = results.d_state + (batch * extents.channels + c)[None, :] * tile.past + (t + tile.past)[:, None]
        tl.store(at, d.to(results.d_state.dtype.element_ty), mask=ok)


@triton.jit
def causal_conv1d_vjp_kernel(
    x, taps, d_y, d_final, results, extents, strides, activation: tl.constexpr, tile: tl.constexpr
):
    """d_final: the cotangent of the final state, or None."""
    part, c, c_ok = own_channels(extents, tile)
    groups = tl.cdiv(extents.tiles_length * tile.block_length, extents.group)
    batch, group = (part // groups).to(tl.int64), part % groups
    begin = 0 if taps.state is None else -tile.past
    weights = load_weights(taps.weight, c, c_ok, strides, tile)
    bias = load_bias(taps.bias, c, c_ok, strides, tile)
    zero = tl.full([tile.block_length, tile.block_channels], 0.0, tile.acc_dtype)
    of_weights, of_bias = [zero for j in counted(tile.past + 1)], zero
    first = begin + group * extents.group
    for start in range(first, min(first + extents.group, extents.length), tile.block_length):
        t = start + tl.arange(0, tile.block_length)
        inputs = [
            load_inputs(x, taps.state, batch, t + (q - tile.past), c, c_ok, extents, strides, tile)
            for q in counted(2 * tile.past + 1)
        ]
        ids = None
        if taps.segments is not None:
            ids = [
                load_segments(taps.segments, batch, t + (q - tile.past), extents, strides)
                for q in counted(2 * tile.past + 1)
            ]
        d_z = [
            cotangent(
                convolved(inputs, i, weights, bias, ids, tile),
                d_y,
                batch,
                t + i,
                c,
                c_ok,
                extents,
                strides,
                activation,
                tile,
            )
            for i in counted(tile.past + 1)
        ]
        if results.d_x is not None or results.d_state is not None:
            d = zero
            if d_final is not None:
                row = t - (extents.length - tile.past)
                at = d_final + batch * strides.d_final[0] + (row.to(tl.int64) * strides.d_final[2])[:, None]
                ok = ((row >= 0) & (row < tile.past))[:, None] & c_ok[None, :]
                d += tl.load(at + (c * strides.d_final[1])[None, :], mask=ok, other=0.0).to(tile.acc_dtype)
                d = of_last_segment(d, taps.segments, batch, t, extents, strides)
            for j in tl.static_range(len(weights)):
                own = None if ids is None else ids[2 * tile.past - j]
                other = None if ids is None else ids[tile.past]
                d += of_own_segment(d_z[tile.past - j], own, other) * weights[j]
            store_inputs(d, results, batch, t, c, c_ok, extents, tile)
        if results.d_weights is not None:
            there = ((t >= 0) & (t < extents.length))[:, None]
            own = None if ids is None else ids[tile.past]
            of_weights = [
                of_weights[j]
                + tl.where(there, d_z[0] * of_own_segment(inputs[j], own, None if ids is None else ids[j]), 0.0)
                for j in counted(tile.past + 1)
            ]
        if results.d_biases is not None:
            of_bias += d_z[0]
    if results.d_weights is not None:
        at = results.d_weights + (part.to(tl.int64) * extents.channels + c) * len(weights)
        for j in tl.static_range(len(weights)):
            tl.store(at + j, tl.sum(of_weights[j], 0), mask=c_ok)
    if results.d_biases is not None:
        tl.store(results.d_biases + part.to(tl.int64) * extents.channels + c, tl.sum(of_bias, 0), mask=c_ok)


# -------------------------------------------------------------------------------------------------------------- launch
def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "past": call.dims["past"]}


def default_tiling(call: Call) -> dict[str, int]:
    """Not measured: 32 numbers a thread, a row of the tile being 128 bytes of 16-bit numbers; with many taps 8."""
    return {"block_length": 64 if call.dims["past"] <= 4 else 16, "block_channels": 64, "num_warps": 4}


def gradient_tiling(call: Call) -> dict[str, int]:
    """Not measured: 8 numbers a thread, of which 16 tiles are held with four taps; with many taps 4."""
    length = 32 if call.dims["past"] <= 7 else 16
    return {"block_length": length, "block_channels": 64, "blocks_per_program": 8, "num_warps": 8}


def refused(call: Call, config: SequenceConfig, tiles: int, programs: int) -> str | None:
    """Why programs cannot hold so many tiles at once."""
    tile = config.block_length * config.block_channels
    name = f"a tile of block_length * block_channels = {config.block_length} * {config.block_channels} numbers"
    if tile > 1 << 20:
        return f"{name} is over Triton's limit of 2^20 elements; use a smaller tile"
    if not call.interpret and tiles * tile > config.num_warps * 32 * 2 * TILE_REGISTERS:
        return (
            f"{name} is there {tiles} times, for its taps, which is over {2 * TILE_REGISTERS} registers a thread "
            f"at num_warps = {config.num_warps}; use a smaller tile or more warps"
        )
    return refuse_common(call, config.num_warps, programs)


def extents_of(call: Call, config: SequenceConfig, positions: int, blocks: int) -> SequenceExtents:
    """Of so many positions a sample, so many blocks of which a program walks."""
    tiles = cdiv(positions, config.block_length)
    return SequenceExtents(call.dims["length"], call.dims["channels"], tiles,
                           cdiv(call.dims["channels"], config.block_channels),
                           blocks * config.block_length)  # fmt: skip


def tile_of(call: Call, config: SequenceConfig) -> ChannelTile:
    past = call.dims["past"]
    return ChannelTile(config.block_length, config.block_channels, past, pow2_at_least(past, 1),
                       accumulator(call.dtype))  # fmt: skip


def operands(call: Call) -> tuple[Filter, SequenceStrides]:
    """What inputs meet, and all strides."""
    arrays = call.arrays
    taps = Filter(*(arrays[name] for name in ("weight", "bias", "initial_state", "segment_ids")))

    def strides(name: str, axes: int) -> tuple[int, ...]:
        array = arrays.get(name)
        return (0,) * axes if array is None else tuple(array.stride())

    return taps, SequenceStrides(
        strides("x", 3), strides("weight", 2), strides("bias", 1)[0], strides("initial_state", 3),
        strides("segment_ids", 2), strides("d_y", 3), strides("d_final_state", 3),
    )  # fmt: skip


def programs_of(call: Call, extents: SequenceExtents, config: SequenceConfig) -> int:
    groups = cdiv(extents.tiles_length * config.block_length, extents.group)
    return int(call.dims["batch"] * groups * extents.tiles_channels)


def supports(call: Call, config: SequenceConfig) -> str | None:
    extents = extents_of(call, config, call.dims["length"], 1)
    return refused(call, config, call.dims["past"] + 2, programs_of(call, extents, config))


@BACKEND.implements("causal_conv1d", key=key, tiling=default_tiling, supports=supports, config=SequenceConfig)
def causal_conv1d(call: Call, config: SequenceConfig) -> tuple[Any, ...]:
    x, dims = call.arrays["x"], call.dims
    y, state = fresh(x.shape, x.dtype, x.device), None
    if "final_state" in call.wants:
        state = fresh((dims["batch"], dims["channels"], dims["past"]), x.dtype, x.device)
    extents, (taps, strides) = extents_of(call, config, dims["length"], 1), operands(call)
    launch(causal_conv1d_kernel, programs_of(call, extents, config), call, x, taps, y, state, extents, strides,
           activation=call.options["activation"], tile=tile_of(call, config), num_warps=config.num_warps)  # fmt: skip
    return y, state


def walk(call: Call, config: SequenceGradientsConfig) -> SequenceExtents:
    """Positions begin before x where there is an initial state. Whatever is wanted, sums are over the same tiles."""
    before = 0 if call.arrays["initial_state"] is None else call.dims["past"]
    sums = {"d_weight", "d_bias"} & {*call.wants}
    return extents_of(call, config, call.dims["length"] + before, config.blocks_per_program if sums else 1)


def supports_gradient(call: Call, config: SequenceGradientsConfig) -> str | None:
    return refused(call, config, 4 * call.dims["past"] + 4, programs_of(call, walk(call, config), config))


@BACKEND.implements(
    "causal_conv1d_vjp", key=key, tiling=gradient_tiling, supports=supports_gradient, config=SequenceGradientsConfig
)
def causal_conv1d_vjp(call: Call, config: SequenceGradientsConfig) -> tuple[Any, ...]:
    x, dims, wants = call.arrays["x"], call.dims, call.wants
    width, channels = dims["past"] + 1, dims["channels"]
    extents, (taps, strides) = walk(call, config), operands(call)
    programs = programs_of(call, extents, config)
    parts = programs // extents.tiles_channels
    d_x, d_state = (
        fresh(call.arrays[of].shape, x.dtype, x.device) if f"d_{of}" in wants else None for of in ("x", "initial_state")
    )
    of_weight = scratch(call, parts, channels * width) if "d_weight" in wants else None
    of_bias = scratch(call, parts, channels) if "d_bias" in wants else None
    launch(causal_conv1d_vjp_kernel, programs, call, x, taps, call.arrays["d_y"], call.arrays["d_final_state"],
           SequenceGradients(d_x, d_state, of_weight, of_bias), extents, strides,
           activation=call.options["activation"], tile=tile_of(call, config), num_warps=config.num_warps)  # fmt: skip
    d_weight = None if of_weight is None else add_up(call, {"d_weight": of_weight})["d_weight"].reshape(channels, width)
    d_bias = None if of_bias is None else add_up(call, {"d_bias": of_bias})["d_bias"]
    return d_x, d_weight, d_bias, d_state
