"""A short causal convolution of each channel along a sequence on TPUs, and its gradients.

    z[t] = bias + sum over j of weight[j] X[t + j]        y = f(z)        X: the initial state, then x

x, y: (batch, length, channels), positions along sublanes and channels along lanes. The grid is (channel blocks,
samples, length blocks). A step has its block of x and, as a small block of the same array, the ``halo`` positions
before it, of which the first step of a sample takes the initial state instead. All lie one after the other in VMEM as
float32, where a tap is a slice that begins one position later. Weights come as (width, channels), and states as
(batch, halo, channels), which XLA turns; the final state is a few positions of x, which XLA copies.

    d_z = d_y f'(z)        d_X[e] = sum over j of weight[j] d_z[e - j]        d_weight[j] = sum of d_z[t] X[t + j]

The gradient has the halos on both sides: it computes z again, and d_z, of its block and of the positions that follow.
d_weight and d_bias stay in VMEM over all steps of a block of channels, which run in order. Segments come as a number a
position, whose bit k says whether the input k positions before is of the same one.

block_length: positions a block holds; block_channels: channels a block holds.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import SequenceConfig
from portakern.backends.pallas.lib.blocks import Blocks, Refs, block, padded, positions, quotient, step_along
from portakern.backends.pallas.lib.mosaic_tpu.chip import (
    LANES,
    dtype_refused,
    launch,
    off_grid,
    over_vmem,
    sublanes,
    whole_lanes,
)
from portakern.backends.pallas.tpu.linear import activated, times_slope
from portakern.core.call import Call


class SequenceBlocks(NamedTuple):
    """Positions and channels of a block, and positions of the small blocks beside it."""

    length: int
    channels: int
    halo: int

    @classmethod
    def of(cls, call: Call, config: SequenceConfig) -> SequenceBlocks:
        halo = padded(call.dims["past"], sublanes(call.dtype))
        length, channels = (call.dims[name] for name in ("length", "channels"))
        return cls(block(length, config.block_length, halo), block(channels, config.block_channels, LANES), halo)

    def resident(self, size: int, streamed: int, kept: int) -> int:
        """Bytes of VMEM of so many blocks in numbers of ``size`` bytes, each twice, and so many in float32."""
        return (self.length + 2 * self.halo) * self.channels * (2 * streamed * size + 4 * kept) + 2**18


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype}


def default_tiling(call: Call) -> dict[str, int]:
    """Not measured: a block of x, as it comes and as float32, and one of y are 2 MiB in 16 bits, and 3 in 32."""
    return {"block_length": 256, "block_channels": 512}


def gradient_tiling(call: Call) -> dict[str, int]:
    """Not measured: half as many numbers as forward, of which three blocks are moved and five are kept."""
    return {"block_length": 256, "block_channels": 256}


def refused(call: Call, config: SequenceConfig, streamed: int, kept: int) -> str | None:
    """Why a TPU cannot hold blocks of so many arrays twice, and so many of float32 beside them, or None."""
    blocks = SequenceBlocks.of(call, config)
    needed = blocks.resident(call.arrays["x"].dtype.itemsize, streamed, kept)
    if call.arrays["segment_ids"] is not None:
        needed += (blocks.length + blocks.halo) * (2 + 1) * 4 * whole_lanes(1)
    return (
        dtype_refused(call)
        or off_grid("block_length", config.block_length, call.dims["length"], blocks.halo)
        or off_grid("block_channels", config.block_channels, call.dims["channels"], LANES)
        or over_vmem(call, needed, "block_length or block_channels")
    )


def supports(call: Call, config: SequenceConfig) -> str | None:
    return refused(call, config, streamed=2, kept=4)


# ------------------------------------------------------------------------------------------------------------ operands
def same_segment(call: Call) -> jax.Array | None:
    """(batch, length, 1): bit k of a number says whether the position k before is of its segment. What lies before the
    first is of that one's."""
    ids = call.arrays["segment_ids"]
    if ids is None:
        return None
    bits, place = jnp.ones(ids.shape, jnp.int32), jnp.arange(ids.shape[1])
    for lag in range(1, call.dims["past"] + 1):
        bits |= (ids == ids[:, jnp.maximum(place - lag, 0)]).astype(jnp.int32) << lag
    return bits[..., None]


def of_last_segment(call: Call, state: jax.Array) -> jax.Array:
    """A final state (batch, channels, past), or its cotangent, with 0 for inputs of another segment than the last."""
    ids = call.arrays["segment_ids"]
    if ids is None:
        return state
    length = ids.shape[1]
    place = jnp.maximum(jnp.arange(length - state.shape[2], length), 0)
    return jnp.where((ids[:, place] == ids[:, -1:])[:, None], state, 0)


def as_positions(state: jax.Array, height: int) -> jax.Array:
    """(batch, channels, past) as (batch, height, channels), the past positions last."""
    return jnp.pad(jnp.swapaxes(state, 1, 2), [(0, 0), (height - state.shape[2], 0), (0, 0)])


def operands(call: Call, blocks: SequenceBlocks) -> Blocks:
    """Blocks of what both directions read, by name."""
    x, bias, state, past = (*(call.arrays[n] for n in ("x", "bias", "initial_state")), call.dims["past"])
    channels, of_channels = blocks.channels, lambda c, b, i: (0, c)
    found: Blocks = {
        "x": (x, here(blocks)),
        "before": (x, before(blocks)),
        "weight": (call.arrays["weight"].T, pl.BlockSpec((past + 1, channels), of_channels)),
    }
    if bias is not None:
        found["bias"] = (bias[None], pl.BlockSpec((1, channels), of_channels))
    if state is not None:
        found["state"] = (as_positions(state, blocks.halo), of_sample(blocks))
    bits = same_segment(call)
    if bits is not None:
        found["bits"] = (bits, pl.BlockSpec((None, blocks.length, 1), lambda c, b, i: (b, i, 0)))
    return found


def here(blocks: SequenceBlocks) -> pl.BlockSpec:
    return pl.BlockSpec((None, blocks.length, blocks.channels), lambda c, b, i: (b, i, c))


def before(blocks: SequenceBlocks) -> pl.BlockSpec:
    """The positions before a block, or of the first block any."""
    each = blocks.length // blocks.halo
    return pl.BlockSpec((None, blocks.halo, blocks.channels), lambda c, b, i: (b, jnp.maximum(i * each - 1, 0), c))


def after(blocks: SequenceBlocks, length: int, lanes: int | None = None) -> pl.BlockSpec:
    """The positions after a block, or of the last block any; ``lanes``: of an array with one block of so many."""
    each, last = blocks.length // blocks.halo, quotient(length - 1, blocks.halo)
    return pl.BlockSpec(
        (None, blocks.halo, lanes or blocks.channels),
        lambda c, b, i: (b, jnp.minimum((i + 1) * each, last), 0 if lanes else c),
    )


def of_sample(blocks: SequenceBlocks) -> pl.BlockSpec:
    return pl.BlockSpec((None, blocks.halo, blocks.channels), lambda c, b, i: (b, 0, c))


def grid_of(call: Call, blocks: SequenceBlocks) -> tuple[int, int, int]:
    dims = call.dims
    return pl.cdiv(dims["channels"], blocks.channels), dims["batch"], pl.cdiv(dims["length"], blocks.length)


# ------------------------------------------------------------------------------------------------------------- forward
def lay_out(ref: Refs, halo: int) -> None:
    """The inputs of a block, behind those before it, as float32 in VMEM."""
    length = ref.x.shape[0]
    early = ref.state[...].astype(jnp.float32) if "state" in ref else jnp.zeros((halo, ref.x.shape[1]), jnp.float32)
    ref.inputs[:halo, :] = jnp.where(step_along(2) == 0, early, ref.before[...].astype(jnp.float32))
    ref.inputs[halo : halo + length, :] = ref.x[...].astype(jnp.float32)


def masked(value: Any, bits: Any, lag: int) -> Any:
    """0 where the position ``lag`` before is of another segment; bits: as wide as the value, or None."""
    if bits is None or lag == 0:
        return value
    return jnp.where((bits >> lag) & 1 == 1, value, 0.0)


def convolved(ref: Refs, bits: Any, height: int, past: int, halo: int) -> Any:
    """z of the first ``height`` positions of a block."""
    z = jnp.zeros((height, ref.inputs.shape[1]), jnp.float32)
    if "bias" in ref:
        z += ref.bias[...].astype(jnp.float32)
    for j in range(past + 1):
        x = ref.inputs[pl.ds(halo - past + j, height), :]
        z += masked(x, bits, past - j) * ref.weight[j : j + 1, :].astype(jnp.float32)
    return z


def wide(bits: Any, lanes: int) -> Any:
    return jnp.broadcast_to(bits, (bits.shape[0], lanes))


def kernel(ref: Refs, *, past: int, halo: int, activation: str) -> None:
    lay_out(ref, halo)
    length, lanes = ref.x.shape
    bits = wide(ref.bits[...], lanes) if "bits" in ref else None
    z = convolved(ref, bits, length, past, halo)
    ref.y[...] = activated(z, activation).astype(ref.y.dtype)


def last_inputs(call: Call) -> jax.Array:
    """The final state."""
    x, state, past = call.arrays["x"], call.arrays["initial_state"], call.dims["past"]
    early = jnp.zeros((x.shape[0], past, x.shape[2]), x.dtype) if state is None else jnp.swapaxes(state, 1, 2)
    return of_last_segment(call, jnp.swapaxes(jnp.concatenate((early, x[:, -past:]), 1)[:, -past:], 1, 2))


@BACKEND.implements("causal_conv1d", key=key, tiling=default_tiling, supports=supports, config=SequenceConfig)
def causal_conv1d(call: Call, config: SequenceConfig) -> tuple[jax.Array | None, ...]:
    x, past, blocks = call.arrays["x"], call.dims["past"], SequenceBlocks.of(call, config)
    found = launch(
        call,
        partial(kernel, past=past, halo=blocks.halo, activation=call.options["activation"]),
        "portakern_causal_conv1d",
        grid_of(call, blocks),
        in_order=0,
        inputs=operands(call, blocks),
        outputs={"y": (jax.ShapeDtypeStruct(x.shape, x.dtype), here(blocks))},
        scratch={"inputs": (blocks.halo + blocks.length, blocks.channels)},
        vmem=blocks.resident(x.dtype.itemsize, 2, 4),
        cost=pl.CostEstimate(
            flops=int(call.flops), transcendentals=x.size, bytes_accessed=2 * x.size * x.dtype.itemsize
        ),
    )
    return found["y"], last_inputs(call) if "final_state" in call.wants else None


# ------------------------------------------------------------------------------------------------------------ gradient
def gradient_kernel(ref: Refs, *, past: int, halo: int, length: int, activation: str) -> None:
    """d_z lies behind ``halo`` zeros in VMEM, so that d_X of the positions before the first is a slice as well."""
    step, (height, lanes) = step_along(2), ref.x.shape
    lay_out(ref, halo)
    ref.inputs[halo + height :, :] = ref.after[...].astype(jnp.float32)
    bits = None
    if "bits" in ref:
        bits = wide(jnp.concatenate((ref.bits[...], ref.bits_after[...]), 0), lanes)
    d_y = jnp.concatenate((ref.d_y[...].astype(jnp.float32), ref.d_y_after[...].astype(jnp.float32)), 0)
    d_z = d_y
    if activation != "none":
        d_z = times_slope(d_y, convolved(ref, bits, height + halo, past, halo), activation)
    there = positions(d_z.shape, 0, step * height) < length
    d_z = jnp.where(there, d_z, 0.0)

    if "d_x" in ref or "d_state" in ref:
        of_inputs(ref, d_z, bits, step, past, halo, length)
    if "d_weight" in ref or "d_bias" in ref:
        add_sums(ref, d_z[:height], there[:height], None if bits is None else bits[:height], past, halo)


def of_inputs(ref: Refs, d_z: Any, bits: Any, step: Any, past: int, halo: int, length: int) -> None:
    """Write d_x, and in the first step of a sample d_state."""
    height, lanes = ref.x.shape
    ref.d_z[:halo, :] = jnp.zeros((halo, lanes), jnp.float32)
    d_x, d_state = jnp.zeros((height, lanes), jnp.float32), jnp.zeros((halo, lanes), jnp.float32)
    for j in range(past + 1):
        if j == 0 or bits is not None:
            ref.d_z[halo:, :] = masked(d_z, bits, past - j)
        weight = ref.weight[j : j + 1, :].astype(jnp.float32)
        if "d_x" in ref:
            d_x += ref.d_z[pl.ds(halo + past - j, height), :] * weight
        if "d_state" in ref:
            d_state += ref.d_z[pl.ds(past - j, halo), :] * weight
    if "d_final" in ref:
        d_x = with_final(ref, d_x, step * height, past, length)
        d_state = with_final(ref, d_state, -halo, past, length)
    if "d_x" in ref:
        ref.d_x[...] = d_x.astype(ref.d_x.dtype)
    if "d_state" in ref:

        @pl.when(step == 0)
        def write() -> None:
            ref.d_state[...] = d_state.astype(ref.d_state.dtype)


def with_final(ref: Refs, d: Any, start: Any, past: int, length: int) -> Any:
    """The gradients of positions from ``start`` on, with the cotangent of the final state at the last ones."""
    at, height = positions(d.shape, 0, start), ref.d_final.shape[0]
    for k in range(past):
        row = height - past + k
        d = jnp.where(at == length - past + k, d + ref.d_final[row : row + 1, :].astype(jnp.float32), d)
    return d


def add_sums(ref: Refs, d_z: Any, exists: Any, bits: Any, past: int, halo: int) -> None:
    """The sums of a block, added to those of the steps before."""
    height = d_z.shape[0]
    begins = (pl.program_id(1) == 0) & (pl.program_id(2) == 0)

    @pl.when(begins)
    def start() -> None:
        for name in ("d_weight", "d_bias"):
            if name in ref:
                vars(ref)[name][...] = jnp.zeros_like(vars(ref)[name])

    if "d_bias" in ref:
        ref.d_bias[...] += d_z.sum(0, keepdims=True)
    if "d_weight" in ref:
        for j in range(past + 1):
            x = masked(ref.inputs[pl.ds(halo - past + j, height), :], bits, past - j)
            # beyond the sequence lies anything, and 0 * NaN is NaN
            ref.d_weight[j : j + 1, :] += jnp.where(exists, d_z * x, 0.0).sum(0, keepdims=True)


def gradient_outputs(call: Call, blocks: SequenceBlocks) -> Blocks:
    """What the kernel writes of what the call wants: sums in float32, the state's gradient as positions."""
    x, past = call.arrays["x"], call.dims["past"]
    batch, _, channels = x.shape
    sums = {"d_weight": past + 1, "d_bias": 1}
    found: Blocks = {
        "d_x": (jax.ShapeDtypeStruct(x.shape, x.dtype), here(blocks)),
        "d_initial_state": (jax.ShapeDtypeStruct((batch, blocks.halo, channels), x.dtype), of_sample(blocks)),
    }
    for name, height in sums.items():
        form = jax.ShapeDtypeStruct((height, channels), jnp.float32)
        found[name] = (form, pl.BlockSpec((height, blocks.channels), lambda c, b, i: (0, c)))
    short = {"d_initial_state": "d_state"}
    return {short.get(name, name): of for name, of in found.items() if name in call.wants}


def supports_gradient(call: Call, config: SequenceConfig) -> str | None:
    return refused(call, config, streamed=3, kept=7)


@BACKEND.implements(
    "causal_conv1d_vjp", key=key, tiling=gradient_tiling, supports=supports_gradient, config=SequenceConfig
)
def causal_conv1d_vjp(call: Call, config: SequenceConfig) -> tuple[jax.Array | None, ...]:
    x, d_y, last = (call.arrays[name] for name in ("x", "d_y", "d_final_state"))
    past, length, blocks = call.dims["past"], call.dims["length"], SequenceBlocks.of(call, config)
    inputs = operands(call, blocks)
    inputs |= {
        "after": (x, after(blocks, length)),
        "d_y": (d_y, here(blocks)),
        "d_y_after": (d_y, after(blocks, length)),
    }
    if "bits" in inputs:
        inputs["bits_after"] = (inputs["bits"][0], after(blocks, length, 1))
    if last is not None:
        inputs["d_final"] = (as_positions(of_last_segment(call, last), blocks.halo), of_sample(blocks))
    height = blocks.halo + blocks.length + blocks.halo
    found = launch(
        call,
        partial(gradient_kernel, past=past, halo=blocks.halo, length=length, activation=call.options["activation"]),
        "portakern_causal_conv1d_vjp",
        grid_of(call, blocks),
        in_order=2,
        inputs=inputs,
        outputs=gradient_outputs(call, blocks),
        scratch={"inputs": (height, blocks.channels), "d_z": (height, blocks.channels)},
        vmem=blocks.resident(x.dtype.itemsize, 3, 7),
        cost=pl.CostEstimate(
            flops=int(call.flops), transcendentals=x.size, bytes_accessed=3 * x.size * x.dtype.itemsize
        ),
    )
    if "d_weight" in found:
        found["d_weight"] = found["d_weight"].T.astype(call.outputs["d_weight"][1])
    if "d_bias" in found:
        found["d_bias"] = found["d_bias"][0].astype(call.outputs["d_bias"][1])
    if "d_state" in found:
        found["d_initial_state"] = jnp.swapaxes(found["d_state"][:, -past:], 1, 2)
    return tuple(found.get(o.name) for o in call.spec.outputs)
