"""Launches that run in the emulator: the profile ``emulated`` of ``portakern check``."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import os
import struct
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton

from portakern.backends.triton import compiler, launch
from portakern.backends.triton.emulator import code_object, tree
from portakern.backends.triton.emulator.faults import CompilerCrash
from portakern.backends.triton.emulator.machine import EmulatedKernel
from portakern.core import targets
from portakern.core.cache import BoundedCache
from portakern.core.targets import Hardware

__all__ = ["ISA", "compiled", "counted", "emulated", "forget", "planted"]

ISA = {"gfx90a": "cdna", "gfx942": "cdna", "gfx950": "cdna", "gfx1100": "rdna3", "gfx1201": "rdna4"}
PACKED = {"fp64": "<d", "i64": "<q", "u64": "<Q", "i32": "<i", "u32": "<I", "i16": "<h", "u16": "<H", "i8": "<b",
          "u8": "<B", "i1": "<b", "u1": "<B"}  # fmt: skip
KERNARG_ALIGNMENT = 64

Value = tuple[str, str, Any]
"""An argument of a launch: its name, Triton's type, and what is passed."""

_programs: BoundedCache[tuple[str, ...], EmulatedKernel] = BoundedCache(48)
_plant: Callable[[EmulatedKernel, list[Value]], list[Value] | None] | None = None
_one_at_a_time = threading.RLock()  # machine.c keeps what it works on to itself


@contextmanager
def emulated(target: targets.Target) -> Iterator[None]:
    """Within this context launches run in the emulator, as ``target`` would run them.

    Raises:
      UnavailableError: tinygrad's tree, or clang, is not there.
    """
    tree.tree()
    hardware = targets.find(target.arch)

    def run(kernel: Any, grid: int, args: tuple[Any, ...], constexprs: dict[str, Any]) -> None:
        with _one_at_a_time:
            _run(kernel, grid, args, constexprs, hardware)

    with launch.recording(run):
        yield


def compiled(
    kernel: Any, args: tuple[Any, ...], constexprs: dict[str, Any], hardware: Hardware
) -> tuple[Any, Any, str]:
    """What a launch would run there: the source that Triton specialised, what it compiled, and the key of both."""
    source, options = compiler.specialised(kernel, args, constexprs, hardware)
    key = f"{hardware.name} {source.hash()} {sorted((k, str(v)) for k, v in options.items())}"
    compile_it = functools.partial(triton.compile, source, target=compiler.gpu_target(hardware), options=options)
    if key not in _survived:
        _try_apart(compile_it, kernel.__name__)
        _survived.add(key)
    return source, compile_it(), key


_survived: set[str] = set()


def _try_apart(compile_it: Callable[[], Any], name: str) -> None:
    """Compile in a process of its own, which leaves what it made in Triton's cache: assertions of LLVM's end it.

    Raises:
      CompilerCrash: it ended before its time.
    """
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            faulthandler.disable()  # it would tell of the end in this process's name
            os.dup2(said.fileno(), 2)
            with contextlib.suppress(BaseException):  # what it raises, it raises again outside
                compile_it()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            said.seek(0)
            last = said.read().decode(errors="replace").strip().splitlines()[-1:] or ["no word"]
            raise CompilerCrash(
                f"cannot: Triton's compiler ended with signal {status & 127} on {name}: {last[0][-120:]}"
            )


@contextmanager
def planted(plant: Callable[[EmulatedKernel, list[Value]], list[Value] | None]) -> Iterator[None]:
    """Within this context ``plant(program, values)`` is called before a launch runs, on code of its own: it may change
    the code, and give other arguments."""
    global _plant
    before, _plant = _plant, plant
    try:
        yield
    finally:
        _plant = before


def forget() -> None:
    """Count from here on."""
    _programs.clear()


def counted() -> dict[str, Counter[str]]:
    """What the kernels that are kept ran: see :meth:`EmulatedKernel.counted`."""
    total: dict[str, Counter[str]] = {"instructions": Counter(), "moved": Counter()}
    for program in _programs.values():
        for name, counts in program.counted().items():
            total[name] += counts
    return total


def _run(kernel: Any, grid: int, args: tuple[Any, ...], constexprs: dict[str, Any], hardware: Hardware) -> None:
    source, binary, key = compiled(kernel, args, constexprs, hardware)
    meta, isa = binary.metadata, ISA[hardware.name]
    program = _programs.get((key,)) if _plant is None else None
    if program is None:
        code = code_object.read(binary.asm["hsaco"], meta.name, binary.asm["amdgcn"])
        program = EmulatedKernel(code, meta.name, isa, meta.num_warps, max(meta.shared, 0))
        if _plant is None:
            _programs.keep((key,), program)
    values = _values(kernel, args, constexprs, source)
    if _plant is not None:
        values = _plant(program, values) or values
    memory = ctypes.create_string_buffer(program.code.arguments + 2 * KERNARG_ALIGNMENT)
    begin = -(-ctypes.addressof(memory) // KERNARG_ALIGNMENT) * KERNARG_ALIGNMENT
    ranges = {"the arguments": (begin, begin + program.code.arguments)}
    if len(values) > len(program.code.argument_layout):
        raise RuntimeError(
            f"{meta.name} has {len(program.code.argument_layout)} arguments; expected {len(values)}: a new Triton?"
        )
    for (offset, size), (name, kind, value) in zip(program.code.argument_layout, values, strict=False):
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            ranges[name] = (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
            data = struct.pack("<Q", value.data_ptr())
        else:
            data = _packed(kind, value)
        assert len(data) <= size, (name, kind, size)
        ctypes.memmove(begin + offset, data, len(data))
    threads, lds = meta.num_warps * program.decoder.lanes, max(meta.shared, 0)
    for offset, data in program.code.hidden_arguments(grid, threads, lds):
        ctypes.memmove(begin + offset, data, len(data))
    for number in range(grid):
        program.run(number, begin, ranges)


def _packed(kind: str, value: Any) -> bytes:
    """A number as Triton's launchers pass it: what no float32 holds is infinite."""
    if kind == "fp32":
        with np.errstate(over="ignore"):
            return np.float32(value).tobytes()
    return struct.pack(PACKED[kind], value)


def _values(kernel: Any, args: tuple[Any, ...], constexprs: dict[str, Any], source: Any) -> list[Value]:
    """(name, Triton's type, value) of each argument that the machine code takes, in order."""
    names = [p.name for p in kernel.params]
    given = {p.name: p.default for p in kernel.params if p.has_default}
    given |= dict(zip(names, args, strict=False)) | constexprs
    found: list[Value] = []
    for name in names:
        _flatten(name, source.signature.get(name, "constexpr"), given.get(name), found)
    return found


def _flatten(name: str, kind: Any, value: Any, found: list[Value]) -> None:
    if isinstance(kind, Sequence) and not isinstance(kind, str):
        for i, (k, v) in enumerate(zip(kind, value, strict=True)):
            _flatten(f"{name}[{i}]", k, v, found)
    elif kind != "constexpr":
        found.append((name, kind, value))
