"""A stand-in for the plug-in that launches the custom calls of JAX's programs, on a machine without a GPU: it reads
what a call carries, field by field, and runs the kernel in Triton's interpreter."""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from triton._utils import canonicalize_dtype
from triton.tools.tensor_descriptor import TensorDescriptor

from portakern.backends.triton import interpreter, lowering
from portakern.core import registry, targets
from portakern.core.framework import frameworks
from portakern.core.program import Code, TileFormat
from portakern.core.targets import Target
from portakern.frameworks.jax import embedding
from portakern.spec.dtypes import DTYPES

FORMATS = {"f32": "<f", "f64": "<d"}
NUMBERS = {canonicalize_dtype(name): getattr(torch, name) for name in DTYPES}
"""Triton's name of a dtype -> PyTorch's."""


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a message of protocol buffers: integers, and bytes for all else."""
    at = 0

    def varint() -> int:
        nonlocal at
        found = shift = 0
        while True:
            byte = data[at]
            at += 1
            found |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return found

    while at < len(data):
        place, wire = divmod(varint(), 8)
        if wire == 0:
            yield place, varint()
            continue
        size = varint() if wire == 2 else {1: 8, 5: 4}[wire]
        yield place, data[at : at + size]
        at += size


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def numbers(data: bytes) -> tuple[int, ...]:
    """The integers of a repeated field."""
    ends = [i + 1 for i, byte in enumerate(data) if byte < 128]
    parts = [data[i:j] for i, j in zip([0, *ends], ends, strict=False)]
    return tuple(sum((byte & 127) << 7 * i for i, byte in enumerate(part)) for part in parts)


def described(data: bytes) -> dict[str, Any]:
    """What says of an array how NVIDIA's copy engine takes it."""
    found = dict(fields(dict(fields(data))[1]))
    return {
        "element": found[1], "swizzle": found.get(2, 0), "shape": numbers(found[3]), "strides": numbers(found[4]),
        "block": numbers(found[5]), "beyond": found.get(6, 0),
    }  # fmt: skip


READ = {
    1: lambda v: ("array", dict(fields(v))),
    2: lambda v: ("bool", bool(v)),
    3: lambda v: ("i32", signed(v, 32)),
    5: lambda v: ("i64", signed(v, 64)),
    6: lambda v: ("u64", v),
    7: lambda v: ("f32", struct.unpack("<f", v)[0]),
    8: lambda v: ("f64", struct.unpack("<d", v)[0]),
    9: lambda v: ("described", described(v)),
}


def decode(opaque: bytes) -> SimpleNamespace:
    """What a custom call carries."""
    whole = dict(fields(zlib.decompress(opaque)))
    call = list(fields(whole[1]))
    kernel = dict(fields(dict(call)[1]))
    image = dict(fields(kernel[11])) if 11 in kernel else None
    grid = tuple(v for place, v in call if place in (2, 3, 4))
    parameters = [READ[n](v) for place, p in call if place == 5 for n, v in fields(p)]
    return SimpleNamespace(
        name=kernel[1].decode(), user_name=whole[4].decode(), warps=kernel[2], ctas=kernel[10], shared=kernel[3],
        text=kernel[4].decode(), capability=kernel[6], image=image, grid=grid, parameters=parameters,
    )  # fmt: skip


class Plugin:
    """What runs custom calls. ``calls``: those that it ran, decoded, in order."""

    def __init__(self) -> None:
        self.sources: dict[str, Any] = {}
        self.calls: list[SimpleNamespace] = []

    def compiled(self, source: Any, options: dict[str, Any], target: Target, descriptors: Sequence[Any]) -> Code:
        """The kernel without code: compiling takes most of a second, and nothing here executes it."""
        text = f"{source.fn.__name__} {source.hash()} {sorted((n, str(v)) for n, v in options.items())}"
        self.sources[text] = source
        hardware = targets.find(target.arch)
        tiles = tuple(TileFormat(0, 0, tuple(d.block_shape)) for d in descriptors)
        return Code(source.fn.__name__, target.platform, target.arch, text, b"code", options["num_warps"],
                    hardware.lanes, 1024, tiles)  # fmt: skip

    def ffi_call(self, name: str, results: Any, *, vmap_method: str, input_output_aliases: dict[int, int]) -> Any:
        assert name == embedding.CUSTOM_CALL

        def call(*operands: Any, opaque: bytes) -> Any:
            def on_host(*values: Any) -> list[np.ndarray]:
                return self.launch(decode(opaque), values, results, input_output_aliases)

            return jax.pure_callback(on_host, results, *operands, vmap_method=vmap_method)

        return call

    def launch(self, call: SimpleNamespace, values: Any, results: Any, aliases: dict[int, int]) -> list[np.ndarray]:
        """As jaxlib launches: every parameter that is an array takes the next of operands and results."""
        self.calls.append(call)
        operands = [np.array(v) for v in values]  # a copy is what XLA makes where memory is not to be written to
        made = [_garbage(r) for i, r in enumerate(results) if i not in aliases.values()]
        given = iter([*operands, *made])
        torch = frameworks()["torch"]
        passed = (_passed(kind, value, lambda: torch.from_numpy(next(given), None)) for kind, value in call.parameters)
        source = self.sources[call.text]
        arguments = [
            _argument((i,), declared, source.constants, passed) for i, declared in enumerate(source.signature.values())
        ]
        before = [o.copy() for o in operands]
        interpreter.run(source.fn, call.grid[0], *arguments)
        assert next(passed, None) is None and next(given, None) is None, "every parameter was taken"
        for i, (old, new) in enumerate(zip(before, operands, strict=True)):
            assert i in aliases or old.tobytes() == new.tobytes(), f"{call.name} wrote to operand {i}"
        back = {result: operands[i] for i, result in aliases.items()}
        fresh = iter(made)
        return [back[i] if i in back else next(fresh) for i in range(len(results))]


def _garbage(result: Any) -> np.ndarray:
    """An array as an allocator may hand it out."""
    size = int(np.prod(result.shape)) * result.dtype.itemsize
    return np.full(size, 0xFF if result.dtype != bool else 1, np.uint8).view(result.dtype).reshape(result.shape)


def _passed(kind: str, value: Any, array: Callable[[], Any]) -> Any:
    if kind == "described":
        return TensorDescriptor(array(), [*value["shape"]], [*value["strides"]], [*value["block"]])
    return array() if kind == "array" else value


def _argument(path: tuple[int, ...], declared: Any, constants: Any, passed: Iterator[Any]) -> Any:
    if path in constants:
        return constants[path]
    if isinstance(declared, tuple):
        members = [_argument((*path, i), kind, constants, passed) for i, kind in enumerate(declared)]
        return type(declared)(*members) if hasattr(declared, "_fields") else tuple(members)
    if declared == "constexpr":
        return None
    found = next(passed)
    if isinstance(found, torch.Tensor):  # code takes an address and knows which numbers lie there
        kind = declared.removeprefix("*").removeprefix("k")
        return found if canonicalize_dtype(found.dtype) == kind else found.view(NUMBERS[kind])
    if isinstance(found, TensorDescriptor):
        assert [next(passed) for _ in range(2 * len(found.shape))] == [*found.shape, *found.strides]
    return found


@contextlib.contextmanager
def plugged_in(arch: str = "sm_80") -> Iterator[Plugin]:
    """While inside, the host stands in for a GPU whose custom calls run in the interpreter: one whose kernels do so."""
    plugin, triton, target = Plugin(), registry.backend("triton"), targets.find(arch).target
    with pytest.MonkeyPatch.context() as patched, triton._stands_for(target, contextlib.nullcontext):
        patched.setattr(lowering, "compiled", plugin.compiled)
        patched.setattr(embedding.jax.ffi, "ffi_call", plugin.ffi_call)
        patched.setattr(embedding, "CARRIES_CODE", (0,))  # the stand-in runs what it is given, whatever jaxlib is here
        jax.clear_caches()
        try:
            yield plugin
        finally:
            jax.clear_caches()  # no other test calls this one's plug-in
