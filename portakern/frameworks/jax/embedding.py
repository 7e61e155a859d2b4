"""Machine code in JAX's programs: a :class:`portakern.core.program.Program` as operations of JAX, of which each launch
is a custom call that jaxlib brings with its plug-ins for NVIDIA and AMD GPUs.

The custom call takes, compressed, a message of protocol buffers that jaxlib calls ``TritonAnyKernelCall``
(``triton.proto`` there): the kernel's code, its grid, and of each parameter what it is. Arrays come in the order of the
parameters, operands before results. The message is written here, field by field: what jaxlib has for it comes with a
plug-in, and programs are lowered where none is installed.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
from jax import lax

from portakern.core.framework import frameworks
from portakern.core.program import (
    Code,
    Copy,
    DescribedArray,
    Launch,
    Loop,
    Program,
    ProgramArray,
    ProgramStep,
    ScalarArgument,
    Stack,
    View,
)
from portakern.errors import UnsupportedError
from portakern.spec.dtypes import numpy_dtype

__all__ = ["CUSTOM_CALL", "embed", "message", "refuses_descriptors"]

CUSTOM_CALL = "triton_kernel_call_ffi"

CARRIES_CODE = (0, 11, 1)
"""The jaxlib whose plug-ins launch the machine code that a call carries, and finish assembly for the chip at hand.
Older ones finish it for the chip that the call names, and take code for AMD GPUs from a file on the machine that runs
it. Older ones know of no tensor descriptors either, which later ones make at each launch as Triton's launcher does."""

AMD_LANES = 64
"""Threads that jaxlib counts for a wave of every AMD GPU; those of RDNA have 32."""


def embed(program: Program, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
    """The outputs of a program on JAX arrays, traced ones too."""
    held: dict[int, Any] = {i: arrays[n] for i, n in enumerate(program.inputs)}
    embed_steps(program, program.steps, held, frozenset(range(len(program.inputs))) - program.written)
    return tuple(None if o is None else apply_view(held[o[0]], o[1]) for o in program.outputs)


def embed_steps(program: Program, steps: Iterable[ProgramStep], values: dict[int, Any], fixed: frozenset[int]) -> None:
    """Make steps part of what is traced. ``values``: the arrays that are there, to which what they make is added;
    ``fixed``: those that they do not write to."""
    for step in steps:
        if isinstance(step, Copy):
            values[step.to] = apply_view(values[step.source], step.view)
        elif isinstance(step, Stack):
            values[step.to] = jnp.stack([values[i] for i in step.parts])
        elif isinstance(step, Loop):
            embed_loop(program, step, values)
        else:
            embed_launch(program, step, values, fixed)


def embed_loop(program: Program, step: Loop, values: dict[int, Any]) -> None:
    """Make a loop part of what is traced, one of XLA's, which holds what one part needs: the parts of a result go where
    it lies, and every array from before is read where it lies."""

    def once(i: Any, results: tuple[Any, ...]) -> tuple[Any, ...]:
        first = step.first + i * step.length
        inside = values | {step.start: jnp.full((1,), first, jnp.int32)}
        for array, view, part in step.reads:
            inside[part] = lax.dynamic_slice_in_dim(apply_view(values[array], view), first, step.length)
        embed_steps(program, step.steps, inside, frozenset(inside))
        parts = (inside[part] for _, part in step.writes)
        return tuple(lax.dynamic_update_slice_in_dim(y, p, first, 0) for y, p in zip(results, parts, strict=True))

    places = [(array, program.arrays[array]) for array, _ in step.writes]
    before = tuple(values[i] if i in values else jnp.zeros(p.shape, _jax_dtype(p)) for i, p in places)
    after = lax.fori_loop(0, step.times, once, before) if step.times > 1 else once(0, before)
    values.update(zip((i for i, _ in places), after, strict=True))


def _jax_dtype(array: ProgramArray) -> Any:
    """The dtype in which JAX holds an array; UnsupportedError where that is narrower than what kernels write."""
    held = frameworks()["jax"].stored_dtype(array.dtype)
    if numpy_dtype(held).itemsize != numpy_dtype(array.dtype).itemsize:
        raise UnsupportedError(
            f"the kernels fill an array of {array.dtype}, which JAX holds as {held} here: half of it would lie "
            "outside; enable jax_enable_x64, or use another backend"
        )
    return held


def refuses_descriptors() -> str | None:
    """None, or why this jaxlib launches no kernel that takes a tensor descriptor."""
    if jaxlib.version.__version_info__ >= CARRIES_CODE:
        return None
    return (
        f"its kernels take tensor descriptors, which jaxlib {jaxlib.__version__} does not make at a launch; install "
        f"jax {'.'.join(map(str, CARRIES_CODE))} or later"
    )


def check_carried(code: Code) -> None:
    """UnsupportedError where this jaxlib could not launch the kernel on the chip that it comes to."""
    if jaxlib.version.__version_info__ >= CARRIES_CODE or (code.platform == "cuda" and code.arch):
        return
    needed = ".".join(map(str, CARRIES_CODE))
    if code.platform == "cuda":
        raise UnsupportedError(
            f"nothing here says for which NVIDIA GPU {code.name} is lowered, and jaxlib {jaxlib.__version__} finishes "
            f"assembly for one that is named alone: name it, with portakern.jax.lowered_for('sm_90') around what "
            f"lowers, or install jax {needed} or later"
        )
    raise UnsupportedError(
        f"jaxlib {jaxlib.__version__} takes the machine code of {code.name} for AMD GPUs from a file; install jax "
        f"{needed} or later, whose programs carry it"
    )


def apply_view(array: Any, view: View) -> Any:
    for how, what in view:
        if how == "permute":
            array = jnp.transpose(array, what)
        elif how == "expand":
            array = jnp.broadcast_to(array, what)
        elif how == "reshape":
            array = jnp.reshape(array, what)
        elif how == "bits":
            array = lax.bitcast_convert_type(array, numpy_dtype(*what))
        else:
            array = array.astype(numpy_dtype(*what))
    return array


def embed_launch(program: Program, step: Launch, values: dict[int, Any], fixed: frozenset[int]) -> None:
    """Make a launch part of what is traced. An array that nothing holds yet is a result; one that an earlier step made
    is an operand whose memory a result takes, since a kernel may go on writing to it. So is an input that the op may
    write to, of which XLA makes a copy where somebody else reads it; of all other inputs (``fixed``) no memory is
    taken, and in a loop of nothing that was there before."""
    check_carried(step.code)
    made = [i for i in step.arrays if i not in values]
    given = [i for i in step.passed if i in values]
    if [*step.passed[len(given) :]] != made:
        raise UnsupportedError(
            f"{step.code.name} takes a new array before one that holds something, or twice; in a program of JAX's "
            "arrays that a kernel fills are its last ones"
        )
    again = [i for i in dict.fromkeys(given) if i not in fixed]
    if any(given.count(i) > 1 for i in again):
        again = [i for i in again if given.count(i) == 1]
    if not made and not again:  # XLA would leave it out
        raise UnsupportedError(
            f"{step.code.name} writes to an input that its op may not write to, or in a loop to what is there before, "
            "and to nothing else"
        )
    results = [jax.ShapeDtypeStruct(program.arrays[i].shape, _jax_dtype(program.arrays[i])) for i in (*made, *again)]
    call = jax.ffi.ffi_call(
        CUSTOM_CALL,
        results,
        vmap_method="sequential",
        input_output_aliases={given.index(i): len(made) + n for n, i in enumerate(again)},
    )
    outputs = call(*(values[i] for i in given), opaque=zlib.compress(message(step)))
    values.update(zip((*made, *again), outputs, strict=True))


# ---------------------------------------------------------------------------------------------- protocol buffers


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1  # a negative number counts as one of 64 bits
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes((*found, number))


def field(number: int, value: int | float | str | bytes, kind: str = "") -> bytes:
    """One field of a message. ``kind``: f32 or f64 of a float."""
    if kind in ("f32", "f64"):
        wire, body = (5, struct.pack("<f", value)) if kind == "f32" else (1, struct.pack("<d", value))
    elif isinstance(value, (str, bytes)):
        data = value.encode() if isinstance(value, str) else value
        wire, body = 2, varint(len(data)) + data
    else:
        wire, body = 0, varint(int(value))
    return varint(number << 3 | wire) + body


ARRAY, DESCRIBED, NUMBER = 1, 9, {"bool": 2, "i32": 3, "i64": 5, "u64": 6, "f32": 7, "f64": 8}
ALIGNED = 16  # bytes at a multiple of which every array begins; jaxlib refuses to launch on another


def message(step: Launch) -> bytes:
    """A launch as jaxlib's custom call takes it."""
    code = step.code
    parameters = b"".join(field(5, parameter(a)) for a in step.arguments)
    call = field(1, kernel(code)) + b"".join(field(2 + i, n) for i, n in enumerate((step.grid, 1, 1))) + parameters
    return field(1, call) + field(4, code.name)


def parameter(argument: int | DescribedArray | ScalarArgument) -> bytes:
    if isinstance(argument, ScalarArgument):
        return field(NUMBER[argument.kind], argument.value, argument.kind)
    if isinstance(argument, DescribedArray):
        return field(DESCRIBED, field(1, b"".join(descriptor(argument))))
    return field(ARRAY, field(2, ALIGNED))


def descriptor(array: DescribedArray) -> Iterator[bytes]:
    """The fields of NVIDIA's tensor descriptor. What lies beyond the extents is read as 0, which is where none says
    otherwise."""
    yield field(1, array.tiles.element)
    yield field(2, array.tiles.swizzle)
    for place, numbers in enumerate((array.shape, array.strides, array.tiles.block), 3):
        yield field(place, b"".join(map(varint, numbers)))


def kernel(code: Code) -> bytes:
    capability = int("".join(filter(str.isdigit, code.arch or "sm_80"))) if code.platform == "cuda" else 0
    text = code.text or code.name + str(zlib.crc32(code.binary))  # by which jaxlib tells kernels apart
    return b"".join(_kernel_fields(code, text, capability))


def _kernel_fields(code: Code, text: str, capability: int) -> Iterator[bytes]:
    yield field(1, code.name)
    yield field(2, warps(code))
    yield field(10, 1)
    yield field(3, code.shared)
    yield field(4, text)
    yield field(6, capability)
    if code.binary:
        yield field(11, field(1, code.binary) + field(2, code.name) + field(3, code.shared))


def warps(code: Code) -> int:
    """Of a program, as jaxlib counts them."""
    if code.platform == "cuda":
        return code.warps
    threads = code.warps * code.lanes
    if threads % AMD_LANES:
        raise UnsupportedError(
            f"{code.name} runs {threads} threads a program, and jaxlib launches multiples of {AMD_LANES} on AMD GPUs; "
            "name num_warps=2 or more in tiling"
        )
    return threads // AMD_LANES
