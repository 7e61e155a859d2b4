"""A workgroup on the machine of machine.c: its memory, its waves, and what went wrong there."""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import numpy as np

from portakern.backends.triton.emulator import tree, waits
from portakern.backends.triton.emulator.code_object import CodeObject
from portakern.backends.triton.emulator.decode import Decoder
from portakern.backends.triton.emulator.faults import BY_CODE, TooManyInstructions
from portakern.backends.triton.emulator.state import (
    KINDS,
    SGPRS,
    DecodedInstruction,
    Machine,
    Wave,
    register_name,
    registers_of,
)

__all__ = ["MOST", "EmulatedKernel", "decoder"]

DONE, TRANSLATE, FAULT, LIMIT = range(4)
MOST = 40_000_000  # instructions of one program
FLUSH = {"x86_64": 0x8040, "AMD64": 0x8040, "aarch64": 1 << 24, "arm64": 1 << 24}
INLINE = (0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0)


@functools.cache
def decoder(isa: str) -> Decoder:
    """The decoder of an instruction set, which keeps what it compiled."""
    return Decoder(isa)


@functools.cache
def _library() -> ctypes.CDLL:
    library = tree.build_machine(Path(__file__).with_name("machine.c"))
    library.size_of.restype, library.size_of.argtypes = ctypes.c_uint64, [ctypes.c_int]
    for which, kind in enumerate((DecodedInstruction, Wave, Machine)):
        assert library.size_of(which) == ctypes.sizeof(kind), kind.__name__
    library.run.argtypes = [ctypes.c_void_p]
    library.begin.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p]
    return library


@functools.cache
def _constants() -> np.ndarray:
    """What scalar operands from 128 on stand for, and the machine's own registers."""
    found = np.zeros(SGPRS - 128, np.uint32)
    found[: 64 + 1] = np.arange(65)
    found[65 : 65 + 16] = (-np.arange(1, 17)).astype(np.int32).view(np.uint32)
    found[240 - 128 : 248 - 128] = np.array(INLINE, np.float32).view(np.uint32)
    found[248 - 128] = 0x3E22F983  # 1 / (2 pi)
    return found


class EmulatedKernel:
    """A kernel with the steps of its code, which are made as they are reached.

    Args:
      code: the kernel; name: for messages. isa: cdna, rdna3 or rdna4. waves: of a program. lds: its bytes.
    """

    def __init__(self, code: CodeObject, name: str, isa: str, waves: int, lds: int) -> None:
        import platform

        self.code, self.name, self.isa, self.decoder = code, name, isa, decoder(isa)
        self.names: dict[int, str] = {}
        self.steps = (DecodedInstruction * code.words)()
        self.machine = m = Machine()
        m.steps, m.base, m.count = ctypes.addressof(self.steps), code.base, code.words
        m.lanes, m.waves, m.lds_bytes, m.scratch_bytes = self.decoder.lanes, waves, lds, code.scratch
        m.m0, m.rdna4, m.races, m.limit = 124 if isa == "cdna" else 125, int(isa == "rdna4"), int(waves > 1), MOST
        m.csr = FLUSH.get(platform.machine(), 0) if code.flushes else 0
        m.most[:] = waits.MOST[isa]
        self.waves = (Wave * waves)()
        m.wave = ctypes.addressof(self.waves)
        scratch = code.scratch * self.decoder.lanes * waves
        kinds = {
            "lds": 1,
            "blank": 1,
            "from_": 1,
            "by": 1,
            "readers": 8,
            "writers": 8,
            "read": 4,
            "written": 4,
            "arrives": 4,
        }
        self.arrays = {n: np.zeros(max(lds, 1) * size, np.uint8) for n, size in kinds.items()}
        self.arrays["scratch"] = np.zeros(max(scratch, 1), np.uint8)
        for n, array in self.arrays.items():
            setattr(m, n, array.ctypes.data)

    def run(self, program: int, arguments: int, ranges: Mapping[str, tuple[int, int]]) -> None:
        """One program of the grid.

        Args:
          program: its number. arguments: the address of the kernel's. ranges: what it may touch, by name: first and
            last address but one.

        Raises:
          Fault: the machine code did what no right code does. NotEmulatedError: an instruction is not known.
        """
        m, library = self.machine, _library()
        lo = np.array([r[0] for r in ranges.values()], np.uint64)
        hi = np.array([r[1] for r in ranges.values()], np.uint64)
        m.lo, m.hi, m.ranges, m.taken = lo.ctypes.data, hi.ctypes.data, len(ranges), 0
        registers, defined = self.code.begins_with(arguments, program, self.isa)
        state = np.concatenate([np.array(registers, np.uint32), _constants()])
        known = np.array([defined & (1 << 64) - 1, defined >> 64], np.uint64)
        library.begin(ctypes.addressof(m), self.code.entry, state.ctypes.data, known.ctypes.data)
        while (why := library.run(ctypes.addressof(m))) == TRANSLATE:
            self._translate(m.pc)
        if why == LIMIT:
            raise TooManyInstructions(f"cannot: the emulator stops a program of {self.name} after {MOST} instructions")
        if why == FAULT:
            self._tell(program, ranges)

    def _translate(self, pc: int) -> None:
        at = (pc - self.code.base) // 4
        self.names[at] = self.decoder.decode(pc, self.steps[at])
        assert self.steps[at].kind != KINDS["UNKNOWN"]

    def _tell(self, program: int, ranges: Mapping[str, tuple[int, int]]) -> NoReturn:
        m = self.machine
        kind, text = BY_CODE[m.fault]
        at = (m.pc - self.code.base) // 4
        what = self.names.get(at, "no instruction")
        said = text.format(
            lane=m.lane, bytes=m.bytes, address=m.address, lds=m.lds_bytes, scratch=m.scratch_bytes, other=m.other,
            register=register_name(m.reg), read=self._blank(at), near=_nearest(m.address, ranges),
        )  # fmt: skip
        place = f"{self.name}+{m.pc - self.code.entry:#x}, program {program}, wave {m.current}"
        raise kind(f"{what} ({place}): {said}")

    def _blank(self, at: int) -> str:
        """What a step reads that nothing wrote, and where that came from."""
        if at not in self.names:
            return ""
        wave = self.waves[self.machine.current]
        read = [a & b for a, b in zip(self.steps[at].reads, wave.undefined, strict=True)]
        said = []
        for r in registers_of(read):
            since = f", which +{wave.misread[r] - self.code.entry:#x} made of {register_name(wave.root[r])}"
            said.append(register_name(r) + since * bool(wave.misread[r]))
        return "; ".join(said)

    def counted(self) -> dict[str, Counter[str]]:
        """What ran so far: instructions by name; bytes moved; passes that conflicts of LDS banks cost."""
        instructions: Counter[str] = Counter()
        conflicts = 0
        for at, name in self.names.items():
            instructions[name] += self.steps[at].executed
            conflicts += self.steps[at].conflicts
        moved = dict(zip(("loaded", "stored", "lds loaded", "lds stored"), self.machine.moved, strict=True))
        return {"instructions": instructions, "moved": Counter({**moved, "lds conflicts": conflicts})}


def _nearest(address: int, ranges: Mapping[str, tuple[int, int]]) -> str:
    """Where the address lies beside the nearest tensor."""
    distances = {n: (address - hi if address >= hi else address - lo) for n, (lo, hi) in ranges.items()}
    name = min(distances, key=lambda n: abs(distances[n]))
    by = distances[name]
    return f"; nearest: {by} bytes behind the end of {name}" if by >= 0 else f"; nearest: {-by} bytes before {name}"
