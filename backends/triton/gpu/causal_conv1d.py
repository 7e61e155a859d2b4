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


class Strides(NamedTuple):
    """Of an array of samples' positions of channels, or of states; 0 for an axis that it lacks, or for no array."""

    batch: int = 0
    position: int = 0
    channel: int = 0


class SequenceStrides(NamedTuple):
    """Of all that inputs meet; in ``weight`` taps are positions."""

    x: Strides
    weight: Strides
    bias: Strides
    state: Strides
    segments: Strides


class CotangentStrides(NamedTuple):
    """Of d_y and of the final state's cotangent."""

    y: Strides
    state: Strides


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
def own_channels(extents, tile: tl.constexpr):
    """(the part of all sequences that is this program's, its channels, which of them there are)."""
    part = tl.program_id(0) // extents.tiles_channels
    c = tl.program_id(0) % extents.tiles_channels * tile.block_channels + tl.arange(0, tile.block_channels)
    return part, c.to(tl.int64), c < extents.channels


@triton.jit
def load_positions(x, batch, t, c, c_ok, extents, strides, tile: tl.constexpr):
    """Of a sample at positions t: (positions, channels), 0 where there are none."""
    ok = ((t >= 0) & (t < extents.length))[:, None] & c_ok[None, :]
    at = x + batch * strides.batch + (t.to(tl.int64) * strides.position)[:, None] + (c * strides.channel)[None, :]
    return tl.load(at, mask=ok, other=0.0).to(tile.acc_dtype)


@triton.jit
def load_inputs(x, state, batch, t, c, c_ok, extents, strides, tile: tl.constexpr):
    """The inputs at positions t, of which the initial state has those before 0."""
    found = load_positions(x, batch, t, c, c_ok, extents, strides.x, tile)
    if state is not None:
        ok = ((t < 0) & (t >= -tile.past))[:, None] & c_ok[None, :]
        row = (t + tile.past).to(tl.int64) * strides.state.position
        at = state + batch * strides.state.batch + row[:, None] + (c * strides.state.channel)[None, :]
        found = tl.where(ok, tl.load(at, mask=ok, other=0.0).to(tile.acc_dtype), found)
    return found


@triton.jit
def inputs_around(x, state, batch, t, number: tl.constexpr, c, c_ok, extents, strides, tile: tl.constexpr):
    """The inputs at positions t - past, t - past + 1 ... : ``number`` tiles."""
    found = ()
    for j in tl.static_range(number):
        one = load_inputs(x, state, batch, t + (j - tile.past), c, c_ok, extents, strides, tile)
        found = found + (one,)  # type: ignore[assignment]
    return found


@triton.jit
def load_segments(segments, batch, t, extents, strides):
    """The segments of positions t, as a column. Those before the first are of that one's."""
    t = tl.minimum(tl.maximum(t, 0), extents.length - 1)
    return tl.load(segments + batch * strides.segments.batch + t.to(tl.int64) * strides.segments.position)[:, None]


@triton.jit
def segments_around(segments, batch, t, number: tl.constexpr, extents, strides, tile: tl.constexpr):
    """The segments of what :func:`inputs_around` loads."""
    found = ()
    for j in tl.static_range(number):
        one = load_segments(segments, batch, t + (j - tile.past), extents, strides)
        found = found + (one,)  # type: ignore[assignment]
    return found


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
    at, found = weight + c * strides.weight.channel, ()
    for j in tl.static_range(tile.past + 1):
        one = tl.load(at + j * strides.weight.position, mask=c_ok, other=0.0).to(tile.acc_dtype)[None, :]
        found = found + (one,)  # type: ignore[assignment]
    return found


@triton.jit
def load_bias(bias, c, c_ok, strides, tile: tl.constexpr):
    """The bias of channels c, or 0, at each position of a tile."""
    found = tl.full([tile.block_length, tile.block_channels], 0.0, tile.acc_dtype)
    if bias is not None:
        found += tl.load(bias + c * strides.bias.channel, mask=c_ok, other=0.0).to(tile.acc_dtype)[None, :]
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
    inputs = inputs_around(x, taps.state, batch, t, tile.past + 1, c, c_ok, extents, strides, tile)
    ids = None
    if taps.segments is not None:
        ids = segments_around(taps.segments, batch, t, tile.past + 1, extents, strides, tile)
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
            place = final_state + (batch * extents.channels + c)[None, :] * tile.past + row[:, None]
            tl.store(place, state.to(final_state.dtype.element_ty), mask=(row < tile.past)[:, None] & c_ok[None, :])


@triton.jit
def cotangent(z, d_y, batch, t, c, c_ok, extents, steps, activation: tl.constexpr, tile: tl.constexpr):
    """d_z at positions t, 0 where there are none."""
    d = load_positions(d_y, batch, t, c, c_ok, extents, steps, tile)
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
def gradient_of_inputs(d_z, d, weights, ids, tile: tl.constexpr):
    """d + sum over j of weight[j] d_z[e - j] at a tile's positions e, of those of the same segment."""
    for j in tl.static_range(len(weights)):
        own = None if ids is None else ids[2 * tile.past - j]
        other = None if ids is None else ids[tile.past]
        d += of_own_segment(d_z[tile.past - j], own, other) * weights[j]
    return d


@triton.jit
def cotangent_of_state(d_final, steps, segments, batch, t, c, c_ok, extents, strides, tile: tl.constexpr):
    """What the final state adds to the gradient of the inputs at positions t; d_final may be None."""
    d = tl.full([tile.block_length, tile.block_channels], 0.0, tile.acc_dtype)
    if d_final is not None:
        row = t - (extents.length - tile.past)
        at = d_final + batch * steps.batch + (row.to(tl.int64) * steps.position)[:, None]
        ok = ((row >= 0) & (row < tile.past))[:, None] & c_ok[None, :]
        d += tl.load(at + (c * steps.channel)[None, :], mask=ok, other=0.0).to(tile.acc_dtype)
        d = of_last_segment(d, segments, batch, t, extents, strides)
    return d


@triton.jit
def add_products(sums, d_z, inputs, ids, ok, tile: tl.constexpr):
    """sums[j] + d_z X[t + j] at positions t, those that are ``ok``, of the same segment."""
    own = None if ids is None else ids[tile.past]
    found = ()
    for j in tl.static_range(len(sums)):
        seen = of_own_segment(inputs[j], own, None if ids is None else ids[j])
        found = found + (sums[j] + tl.where(ok, d_z * seen, 0.0),)  # type: ignore[assignment]
    return found


@triton.jit
def causal_conv1d_vjp_kernel(
    x, taps, d_y, d_final, results, extents, strides, cotangents, activation: tl.constexpr, tile: tl.constexpr
):
    """d_final: the cotangent of the final state, or None. cotangents: strides of d_y and of d_final."""
    part, c, c_ok = own_channels(extents, tile)
    groups = tl.cdiv(extents.tiles_length * tile.block_length, extents.group)
    batch, group = (part // groups).to(tl.int64), part % groups
    begin = 0 if taps.state is None else -tile.past
    weights = load_weights(taps.weight, c, c_ok, strides, tile)
    bias = load_bias(taps.bias, c, c_ok, strides, tile)
    of_bias, of_weights = tl.full([tile.block_length, tile.block_channels], 0.0, tile.acc_dtype), ()
    for _ in tl.static_range(len(weights)):
        one = tl.full([tile.block_length, tile.block_channels], 0.0, tile.acc_dtype)
        of_weights = of_weights + (one,)  # type: ignore[assignment]
    first = begin + group * extents.group
    for start in range(first, min(first + extents.group, extents.length), tile.block_length):
        t = start + tl.arange(0, tile.block_length)
        inputs = inputs_around(x, taps.state, batch, t, 2 * tile.past + 1, c, c_ok, extents, strides, tile)
        ids = None
        if taps.segments is not None:
            ids = segments_around(taps.segments, batch, t, 2 * tile.past + 1, extents, strides, tile)
        d_z = ()
        for i in tl.static_range(len(weights)):
            z = convolved(inputs, i, weights, bias, ids, tile)
            one = cotangent(z, d_y, batch, t + i, c, c_ok, extents, cotangents.y, activation, tile)
            d_z = d_z + (one,)  # type: ignore[assignment]
        if results.d_x is not None or results.d_state is not None:
            d = cotangent_of_state(d_final, cotangents.state, taps.segments, batch, t, c, c_ok, extents, strides, tile)
            store_inputs(gradient_of_inputs(d_z, d, weights, ids, tile), results, batch, t, c, c_ok, extents, tile)
        if results.d_weights is not None:
            ok = ((t >= 0) & (t < extents.length))[:, None]
            of_weights = add_products(of_weights, d_z[0], inputs, ids, ok, tile)  # type: ignore[misc]
        if results.d_biases is not None:
            of_bias += d_z[0]  # type: ignore[misc]
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


def strides_of(call: Call, name: str, *axes: str) -> Strides:
    """Those of an array with these axes in this order."""
    array = call.arrays[name]
    return Strides() if array is None else Strides(**dict(zip(axes, array.stride(), strict=True)))


def operands(call: Call) -> tuple[Filter, SequenceStrides]:
    """What inputs meet, and the strides of all."""
    taps = Filter(*(call.arrays[name] for name in ("weight", "bias", "initial_state", "segment_ids")))
    return taps, SequenceStrides(
        strides_of(call, "x", "batch", "position", "channel"),
        strides_of(call, "weight", "channel", "position"),
        strides_of(call, "bias", "channel"),
        strides_of(call, "initial_state", "batch", "channel", "position"),
        strides_of(call, "segment_ids", "batch", "position"),
    )


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
           CotangentStrides(strides_of(call, "d_y", "batch", "position", "channel"),
                            strides_of(call, "d_final_state", "batch", "channel", "position")),
           activation=call.options["activation"], tile=tile_of(call, config), num_warps=config.num_warps)  # fmt: skip
    d_weight = None if of_weight is None else add_up(call, {"d_weight": of_weight})["d_weight"].reshape(channels, width)
    d_bias = None if of_bias is None else add_up(call, {"d_bias": of_bias})["d_bias"]
    return d_x, d_weight, d_bias, d_state
