"""What a compiled kernel asks for: an ELF file with code, and a descriptor of the registers that it begins with.

LLVM, User Guide for AMDGPU Backend: Code Object, Kernel Descriptor, Initial Kernel Execution State.
"""

from __future__ import annotations

import ctypes
import re
import struct
from dataclasses import dataclass, field
from typing import Any

from portakern.backends.triton.emulator.faults import lacking

__all__ = ["CodeObject", "read"]

LOADED, SYMBOLS = 1, (2, 11)  # of program headers; of section headers
KERNARG = 3
# what the descriptor's properties put into user registers, in order: bit -> registers
USER = ((0, 4), (1, 2), (2, 2), (KERNARG, 2), (4, 2), (5, 2), (6, 1))
# what a launch adds to the arguments, where every grid has one dimension, and full workgroups
HIDDEN = {
    "hidden_block_count_y": 1, "hidden_block_count_z": 1, "hidden_group_size_y": 1, "hidden_group_size_z": 1,
    "hidden_remainder_x": 0, "hidden_remainder_y": 0, "hidden_remainder_z": 0, "hidden_grid_dims": 1,
    "hidden_global_offset_x": 0, "hidden_global_offset_y": 0, "hidden_global_offset_z": 0,
}  # fmt: skip


@dataclass
class CodeObject:
    """A kernel in memory.

    Attributes:
      base, words: where its code lies, and how long it is; entry: where it begins.
      scratch, arguments: bytes of a lane's scratch memory, and of the arguments; flushes: denormal float32 are zero.
      user: bits of what lies in the first scalar registers; groups: which of a program's numbers follow them.
      places: (offset, bytes) of each argument. hidden: of those that the launch adds, by LLVM's name of its kind.
    """

    base: int
    words: int
    entry: int
    scratch: int
    arguments: int
    flushes: bool
    user: int
    user_registers: int
    groups: int
    argument_layout: list[tuple[int, int]]
    hidden: dict[str, tuple[int, int]]
    memory: Any = field(repr=False)

    def word(self, at: int, value: int | None = None) -> int:
        """The word of code at a byte offset; with ``value`` it is replaced first."""
        place = ctypes.c_uint32.from_address(self.base + at)
        if value is not None:
            place.value = value
        return place.value

    def hidden_arguments(self, programs: int, threads: int, lds: int) -> list[tuple[int, bytes]]:
        """(offset, contents) of what a launch adds to a kernel's own arguments.

        Args:
          programs: how many it has, of so many threads each. lds: bytes that it gives to each.

        Raises:
          NotEmulatedError: the kernel asks for another than those of the grid's shape and of LDS.
        """
        known = HIDDEN | {
            "hidden_block_count_x": programs,
            "hidden_group_size_x": threads,
            "hidden_dynamic_lds_size": lds,
        }
        for kind in self.hidden:
            if kind not in known:
                raise lacking(f"the argument {kind}")
        return [(offset, known[kind].to_bytes(size, "little")) for kind, (offset, size) in self.hidden.items()]

    def begins_with(self, arguments: int, program: int, isa: str) -> tuple[list[int], int]:
        """Scalar registers 0 to 127 as a program finds them, and which of them are defined, as bits."""
        registers = [0x7FC1A5A5] * 128
        at, defined = 0, 0
        for bit, count in USER:
            if self.user >> bit & 1:
                values = [arguments & 0xFFFFFFFF, arguments >> 32] if bit == KERNARG else [0] * count
                registers[at : at + count] = values
                at += count
        at = self.user_registers
        defined = (1 << at) - 1
        for dimension, number in enumerate((program, 0, 0)):
            if self.groups >> dimension & 1 and isa != "rdna4":
                registers[at] = number
                defined |= 1 << at
                at += 1
        if isa == "rdna4":  # trap temporaries 9 and 7 hold x, and y with z
            registers[108 + 9], registers[108 + 7] = program, 0
        special = range(102, 128)  # vcc, m0, exec, null, trap temporaries: no compiler counts on what they hold
        return registers, defined | sum(1 << r for r in special)


def read(binary: bytes, name: str, assembly: str) -> CodeObject:
    """The kernel ``name`` of a code object, loaded. ``assembly``: the text it was made of, whose metadata say where
    each argument lies."""
    programs, sections = struct.unpack_from("<QQ", binary, 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<4H", binary, 54)
    headers = [struct.unpack_from("<IIQQQQQQ", binary, programs + i * program_size) for i in range(program_count)]
    loaded = [h for h in headers if h[0] == LOADED]
    length = max(h[3] + h[6] for h in loaded)
    memory = ctypes.create_string_buffer(length + 2 * 4096)
    base = (ctypes.addressof(memory) + 4095) & ~4095
    for _, _, offset, address, _, size, _, _ in loaded:
        ctypes.memmove(base + address, binary[offset : offset + size], size)
    table = [struct.unpack_from("<IIQQQQIIQQ", binary, sections + i * section_size) for i in range(section_count)]
    address = _symbol(binary, table, f"{name}.kd")
    descriptor = ctypes.string_at(base + address, 64)
    scratch, arguments = struct.unpack_from("<II", descriptor, 4)
    (entry,) = struct.unpack_from("<q", descriptor, 16)
    mode, registers = struct.unpack_from("<II", descriptor, 48)
    (user,) = struct.unpack_from("<H", descriptor, 56)
    places = _argument_layout(assembly)
    return CodeObject(
        base, length // 4, base + address + entry, scratch, max(arguments, 256), not mode >> 16 & 3,
        user, registers >> 1 & 31, registers >> 7 & 7,
        [(offset, size) for offset, size, kind in places if not kind.startswith("hidden")],
        {kind: (offset, size) for offset, size, kind in places if kind.startswith("hidden")}, memory,
    )  # fmt: skip


def _symbol(binary: bytes, sections: list[tuple[int, ...]], wanted: str) -> int:
    """The address of a symbol."""
    for section in sections:
        if section[1] not in SYMBOLS:
            continue
        names = sections[section[6]][4]
        for i in range(section[5] // 24):
            at, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", binary, section[4] + 24 * i)
            if binary[names + at : binary.index(b"\0", names + at)].decode() == wanted:
                return int(value)
    raise KeyError(wanted)


def _argument_layout(assembly: str) -> list[tuple[int, int, str]]:
    """(offset, bytes, kind) of each argument."""
    metadata = assembly[assembly.index(".amdgpu_metadata") :]
    found = re.findall(r"\.offset:\s+(\d+)\s+\.size:\s+(\d+)\s+\.value_kind:\s+(\S+)", metadata)
    return [(int(offset), int(size), kind) for offset, size, kind in found]
