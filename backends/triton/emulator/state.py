"""The structures of machine.c, as ctypes sees them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any

__all__ = [
    "AGPR",
    "KINDS",
    "NONE",
    "REGISTERS",
    "VGPR",
    "DecodedInstruction",
    "Machine",
    "Wave",
    "put_bits",
    "register_name",
    "registers_of",
]

WORDS, REGISTERS, VGPR, AGPR, COUNTERS, LANES, SGPRS = 10, 640, 128, 384, 4, 64, 260
NONE = -1
KINDS = {
    name: number
    for number, name in enumerate(
        ("UNKNOWN", "JITTED", "SKIP", "BARRIER", "END", "WAIT", "ACCESS", "SCALAR_LOAD", "SHUFFLE", "BPERMUTE",
         "PERMLANE16", "SWAP", "MATRIX", "DIV_SCALE", "TRANSPOSE", "GET_PC", "SET_PC")
    )
}  # fmt: skip

_Set = c_uint64 * WORDS


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class DecodedInstruction(ctypes.Structure):
    """An instruction."""

    _fields_ = (
        *_fields(c_int32, "kind size"), *_fields(_Set, "reads writes address"), ("code", c_void_p), ("at", c_uint64),
        ("buffer", c_int32 * 6), ("counter", c_int32), ("limits", c_int32 * 4),
        *_fields(c_int32, "space store bytes sign half file pairs to_lds offen"),
        *_fields(c_int32, "data data2 vaddr saddr srsrc soffset"), *_fields(c_int64, "offset offset2"),
        ("table", c_void_p), ("enabled", c_uint64), *_fields(c_int32, "bound fetch temporary source"),
        *_fields(c_int32, "m n k type a b c a_file b_file twin"), ("select", c_int32 * 2), ("literal", c_uint32),
        *_fields(c_int32, "source2 source3 sdst"), *_fields(c_uint64, "executed conflicts"), ("dual", c_int32),
        *_fields(_Set * 2, "half_reads half_writes spared"), *_fields(c_int32, "moved verdict"), ("falses", c_uint64),
    )  # fmt: skip


class Wave(ctypes.Structure):
    """The registers of a wave, and what is known of them."""

    _fields_ = (
        ("s", c_uint32 * SGPRS), ("v", c_uint32 * (256 * LANES)), ("a", c_uint32 * (256 * LANES)),
        ("undefined", _Set), ("flying", _Set * 2), ("when", c_uint32 * REGISTERS * 2),
        *_fields(c_uint32 * COUNTERS, "issued done at_barrier"),
        ("which", c_uint8 * REGISTERS * 2), *_fields(c_int32, "index epoch finished"),
        ("root", c_uint16 * REGISTERS), ("misread", c_uint64 * REGISTERS),
    )  # fmt: skip


class Machine(ctypes.Structure):
    """A compute unit and the program that it runs."""

    _fields_ = (
        ("steps", c_void_p), *_fields(c_uint64, "base count"),
        *_fields(c_int32, "lanes waves lds_bytes scratch_bytes ranges m0 rdna4"), ("csr", c_uint32),
        *_fields(c_void_p, "wave lds scratch lo hi readers writers read written blank arrives from_ by"),
        *_fields(c_int32, "current races"), ("most", c_int32 * COUNTERS), *_fields(c_uint64, "taken limit"),
        *_fields(c_int32, "fault lane bytes reg other"),
        *_fields(c_uint64, "pc address"), ("moved", c_uint64 * 4),
    )  # fmt: skip


def put_bits(words: Any, registers: Iterable[int]) -> None:
    """A set of registers as machine.c has it."""
    bits = 0
    for r in registers:
        bits |= 1 << r
    for i in range(WORDS):
        words[i] = bits >> 64 * i & (1 << 64) - 1


def registers_of(words: Any) -> list[int]:
    """The registers of a set."""
    bits = sum(int(words[i]) << 64 * i for i in range(WORDS))
    return [r for r in range(REGISTERS) if bits >> r & 1]


def register_name(r: int) -> str:
    """A register as assemblers call it."""
    if r >= REGISTERS:
        return "LDS"
    return f"s{r}" if r < VGPR else f"v{r - VGPR}" if r < AGPR else f"a{r - AGPR}"
