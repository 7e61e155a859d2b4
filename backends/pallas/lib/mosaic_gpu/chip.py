"""What the kernels need to know of a Hopper GPU: its warpgroups, its shared memory and copy engine, what it refuses.

The copy engine moves whole pieces of 16 bytes between device memory and shared memory, from an address that is a
multiple of 16: rows of another length are padded by XLA before a kernel sees them (:func:`padded_rows`), and what is
padded is said by ``explain()``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from portakern.backends.pallas.lib import blocks
from portakern.backends.pallas.lib.blocks import Refs
from portakern.backends.pallas.lib.mosaic_gpu.cache_keys import same_in_every_process
from portakern.core import targets
from portakern.core.call import Call
from portakern.core.observe import say

same_in_every_process()

HOPPER = targets.find("sm_90")
SHARED_BYTES = HOPPER.on_chip["shared"] or 0
LANES, WARPS = HOPPER.lanes, 4
"""Threads of a warp, and warps of a warpgroup."""

BULK_BYTES = 16
"""What the copy engine moves at least, and to what its addresses are aligned."""

BARRIER_BYTES, REDUCTION_BYTES = 384, 2048
"""Shared memory that a kernel does not name: barriers, 48 of 8 bytes at most (attention in 8 stages has 41), and room
to reduce across warps."""

ALIGNED = 1024
"""Bytes: Mosaic begins each buffer in shared memory at a multiple."""

BARRIERS = 32
"""Barriers that Mosaic makes at most in a group."""

LACKS = {"float64": "Pallas on GPUs has no float64 here: convert to float32, or use the reference backend"}
INTERPRETER = plgpu.InterpretGPUParams()

SWIZZLED_BYTES = 128
"""Bytes of a row of a buffer that tensor cores read, at most: its 16-byte pieces lie swizzled, so that eight rows at a
time are read without conflicts. Rows of 32 and 64 bytes are swizzled too."""


class Scratch:
    """``scratch`` for :func:`launch` of which ``ref`` has views."""

    def allocated(self, interpret: bool) -> Any:
        """A tree of what Pallas allocates."""
        raise NotImplementedError

    def views(self, refs: Any, interpret: bool) -> Any:
        """What ``ref`` has of that."""
        raise NotImplementedError


class BufferViews(NamedTuple):
    """A buffer of rows of up to 128 bytes in shared memory as two that look at it see it.

    The copy engine sees rows, of which any number may lie beyond the end of an array; tensor cores and registers see
    tiles of eight rows. Both are the same bytes.
    """

    copied: Any
    tiled: Any


@dataclass(frozen=True)
class Swizzled(Scratch):
    """``scratch`` for :func:`launch`: such a buffer, (*buffers, rows, elements). ``ref`` has its `BufferViews`."""

    shape: tuple[int, ...]
    dtype: Any

    def allocated(self, interpret: bool) -> Any:
        """The interpreter knows no bytes: the views of rows and of tiles are one."""
        tiled = tiled_buffer(self.shape, self.dtype)
        if interpret:
            return tiled
        return plgpu.RefUnion(plgpu.SMEM(self.shape, self.dtype, transforms=tiled.transforms[1:]), tiled)

    def views(self, refs: Any, interpret: bool) -> BufferViews:
        return BufferViews(refs, refs) if interpret else BufferViews(*refs)


def tiled_buffer(shape: tuple[int, ...], dtype: Any) -> Any:
    """``scratch`` for :func:`launch`: a buffer of tiles of eight rows by 128 bytes, or by a row if that is shorter, as
    tensor cores read them."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzled = min(shape[-1] * itemsize, SWIZZLED_BYTES)
    transforms = (plgpu.TilingTransform((8, swizzled // itemsize)), plgpu.SwizzleTransform(swizzled))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def dtype_refused(call: Call, *more: str | None) -> str | None:
    """Why the kernels cannot compute in the call's dtype, or in one of these, or None."""
    return blocks.first_lacking(LACKS, call.dtype, *more)


def products_refused(call: Call) -> str | None:
    """Why tensor cores cannot multiply operands of the call's dtype, or None."""
    if call.dtype != "float32":
        return None
    return (
        "its tensor cores take no float32 operands whole, and products of their parts are not written yet: convert to "
        "bfloat16, or use the reference backend"
    )


def aligned(*buffers: int) -> int:
    """Bytes of shared memory that buffers of so many bytes take."""
    return sum(blocks.padded(buffer, ALIGNED) for buffer in buffers)


def over_shared(needed: int, names: str, across_warps: bool = True) -> str | None:
    """Why buffers of so many bytes (:func:`aligned`) do not fit into the shared memory of a block, or None.
    ``names``: the tiles that would have to be smaller. ``across_warps``: as of :func:`launch`."""
    needed += BARRIER_BYTES + REDUCTION_BYTES * across_warps
    if needed <= SHARED_BYTES:
        return None
    return (
        f"this tiling needs {needed / 1024:.0f} KiB of shared memory and a block of {HOPPER.name} "
        f"has {SHARED_BYTES // 1024}: choose smaller {names}"
    )


def whole_pieces(extent: int, dtype: Any) -> int:
    """An extent as the copy engine can move it: rounded up to a multiple of 16 bytes."""
    return blocks.padded(extent, BULK_BYTES // jnp.dtype(dtype).itemsize)


def padded_rows(x: jax.Array, length: int | None = None) -> jax.Array:
    """x with its last axis as long as the copy engine needs it, or of this length: x itself where it is so already."""
    length = whole_pieces(x.shape[-1], x.dtype) if length is None else length
    lacking = length - x.shape[-1]
    return jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, lacking)]) if lacking else x


def store(ref: Any, value: Any) -> None:
    """Write an array to a place in device memory, few bytes a thread at a time or many: from jax 0.12 on the compiler
    refuses the few unless it is told that they are meant."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


class InterpretedAccumulator:
    """What a register holds in an interpreted call: Pallas's interpreter knows accumulators neither with a value to
    begin with nor with an operand in registers."""

    def __init__(self, value: Any, waiting: list[Callable[[], None]]) -> None:
        self.value, self.waiting = value, waiting

    def __getitem__(self, where: Any) -> Any:
        return self.value

    def __setitem__(self, where: Any, value: Any) -> None:
        self.value = value

    def add_product(self, a: Any, b: Any, transposed: bool) -> None:
        """What tensor cores do until someone waits for it: operands in shared memory are read that late."""

        def later() -> None:
            left, right = (x[...].astype(jnp.float32) for x in (a, b))
            plgpu.commit_smem()  # tensor cores read as the copy engine writes, and what they read may be overwritten
            self.value += jnp.dot(left, right.T if transposed else right, precision=lax.Precision.HIGHEST)

        self.waiting.append(later)


def in_registers(
    interpret: bool, work: Callable[[Any, Any], None], accumulators: tuple[Any, ...], others: tuple[Any, ...] = ()
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Run ``work(accumulators, others)`` on references to arrays in registers, and return what these hold when all
    products that it issued are done."""
    if interpret:
        waiting: list[Callable[[], None]] = []
        held = tuple(
            tuple(InterpretedAccumulator(value, waiting) for value in values) for values in (accumulators, others)
        )
        work(*held)
        _finish(waiting, 0)
        return tuple(h.value for h in held[0]), tuple(h.value for h in held[1])
    begun = tuple(plgpu.ACC.init(value) for value in accumulators)
    return pl.run_state(lambda refs: work(*refs))((begun, others))


def issue_product(acc: Any, a: Any, b: Any, transposed: bool = False) -> None:
    """Start acc += a b, or a b^T, on the tensor cores. a: in registers or in shared memory; b: in shared memory."""
    if isinstance(acc, InterpretedAccumulator):
        acc.add_product(a, b, transposed)
    else:
        plgpu.wgmma(acc, a, b.T if transposed else b)


def finished(acc: Any, later: int) -> Any:
    """What an accumulator holds when all but the ``later`` products issued last are done."""
    if not isinstance(acc, InterpretedAccumulator):
        return plgpu.wgmma_accumulator_load(acc, wait_n=later)
    _finish(acc.waiting, later)
    return acc.value


def _finish(waiting: list[Callable[[], None]], later: int) -> None:
    while len(waiting) > later:
        waiting.pop(0)()


def in_slots(count: int, slots: int) -> Iterator[tuple[int, int]]:
    """For each of the ``count`` copies that a tile sends out of ``slots`` buffers in turns: its buffer, and how many
    copies may still be on their way when it is filled. A block's next tile begins with the first buffer again, which
    the one before may have used last."""
    return ((i % slots, min(slots - 1, i + (count - 1 - i) % slots)) for i in range(count))


def _host_threads() -> int:
    """Threads that XLA has for programs of the host."""
    return int(os.environ.get("NPROC") or os.cpu_count() or 1)


def _warn_of_threads(warpgroups: int) -> None:
    if warpgroups > _host_threads():
        say(
            f"portakern: each of {warpgroups} warpgroups takes a thread of XLA's on the host, which has "
            f"{_host_threads()}: those that wait may keep the others from running, for ever. Start Python with "
            "NPROC=8 in its environment"
        )


def launch(
    call: Call,
    kernel: Callable[[Refs], None],
    name: str,
    grid: tuple[int, ...],
    *,
    inputs: Mapping[str, jax.Array],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    scratch: Mapping[str, Any],
    cluster: Mapping[str, int] | None = None,
    warpgroups: int = 1,
    approximate: bool = False,
    across_warps: bool = True,
) -> dict[str, jax.Array]:
    """Run ``kernel(ref)`` in every block of a grid, and return what it wrote by name.

    ``ref`` holds the operands, whole and in device memory, and ``scratch``: buffers in shared memory, and barriers, in
    the order in which they lie there. ``lax.axis_index("block")`` says which block it is. ``cluster`` names the axes of
    the blocks of one cluster, which see each other's shared memory, with their extents. Of several warpgroups each runs
    the kernel, and ``lax.axis_index("warpgroup")`` says which one it is. ``approximate``: exponentials and logarithms
    are the chip's own instructions, within a few units in the last place, where subnormal numbers are 0.
    ``across_warps``: something is reduced across warps, for which there has to be room in shared memory. Interpreted
    calls run in Pallas's interpreter for GPUs; inside ``plgpu.force_gpu_interpret_mode`` the parameters chosen there
    win.
    """
    names = (*inputs, *outputs)
    places = {f"scratch{i:02}": buffer for i, buffer in enumerate(scratch)}  # JAX sorts them by name
    if call.interpret:
        _warn_of_threads(warpgroups)

    def on_named_refs(*refs: Any, **placed: Any) -> None:
        scoped = {places[place]: buffer for place, buffer in placed.items()}
        viewed = {name: form for name, form in scratch.items() if isinstance(form, Scratch)}
        scoped |= {name: form.views(scoped[name], call.interpret) for name, form in viewed.items()}
        kernel(Refs(**dict(zip(names, refs, strict=True)), **scoped))

    threads: dict[str, Any] = {"num_threads": warpgroups, "thread_name": "warpgroup"} if warpgroups > 1 else {}
    if cluster:
        threads |= {"cluster": (*cluster.values(),), "cluster_names": (*cluster,)}
    results = plgpu.kernel(
        on_named_refs,
        out_type=[*outputs.values()],
        scratch_types={
            place: form.allocated(call.interpret) if isinstance(form, Scratch) else form
            for place, form in zip(places, scratch.values(), strict=True)
        },
        grid=grid,
        grid_names=("block",),
        kernel_name=name,
        interpret=INTERPRETER if call.interpret else None,
        compiler_params=plgpu.CompilerParams(
            approx_math=approximate, reduction_scratch_bytes=REDUCTION_BYTES * across_warps
        ),
        **threads,
    )(*inputs.values())
    return dict(zip(outputs, results, strict=True))
