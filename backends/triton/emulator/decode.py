"""One instruction: which of machine.c's steps it is, what it reads and writes, and what counts it."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from portakern.backends.triton.emulator import lanes as moves
from portakern.backends.triton.emulator import matrices, waits
from portakern.backends.triton.emulator.accesses import BUFFER, GLOBAL, LDS, SCRATCH, access
from portakern.backends.triton.emulator.faults import lacking
from portakern.backends.triton.emulator.state import AGPR, KINDS, NONE, VGPR, DecodedInstruction, put_bits
from portakern.backends.triton.emulator.tree import Functions

__all__ = ["Decoder"]

VECTOR, LITERAL, SCALARS = 256, 255, 128
LONGEST = 20  # bytes of an instruction, and a word more
VCC, EXEC = 106, 126
NULL = 124  # from here on a scalar address is none
VBUFFER, MUBUF = 0b110001, 0b111000
PACKED = 0b110100111
RENUMBERED = {0x66: 0x60, 0x67: 0x61}  # gfx90a's v_mfma_f32_32x32x8_bf16_1k, 16x16x16_bf16_1k -> as CDNA 3 has them
FIRST_HIGH_HALF = 128  # of a 16-bit operand's register number in a short encoding

IDLE = (
    "S_NOP", "S_CLAUSE", "S_DELAY_ALU", "S_SETPRIO", "S_SLEEP", "S_WAITCNT_DEPCTR", "S_WAIT_ALU", "S_ICACHE_INV",
    "S_SENDMSG",
    "S_SET_INST_PREFETCH_DISTANCE", "S_BARRIER_SIGNAL", "S_WAITCNT_EXPCNT", "S_WAIT_EXPCNT", "S_CODE_END",
)  # fmt: skip
ACCUMULATE = ("FMAC", "DOT2ACC", "_DOT2C", "_DOT4C")  # what adds to its result
# integers of 64 bits whose low half depends on low halves alone, and those of which the high half is the same
LOW_HALF = re.compile(
    r"_(MOV|AND|OR|XOR|NOT|ANDN2|ORN2|AND_NOT1|OR_NOT1|CSELECT|CMOV|MAD|MAD_CO|LSHL|LSHLREV|LSHL_ADD|ADD|ADD_NC|MUL)"
    r"_[BUI]64"
)
BITWISE = re.compile(r"_(MOV|AND|OR|XOR|NOT|ANDN2|ORN2|AND_NOT1|OR_NOT1|CSELECT|CMOV)_[BUI]64")
CACHES = ("_INV", "_WB", "_WBINV", "WBL2", "DCACHE_WB")  # ends of names: what is only told to caches
REFUSED = (
    "ATOMIC",
    "FORMAT",
    "ADDTID",
    "S_GETREG",
    "S_SETREG",
    "S_DENORM_MODE",
    "S_ROUND_MODE",
    "S_TRAP",
    "PERMLANE64",
)


class Decoder:
    """Steps of an instruction set."""

    def __init__(self, isa: str) -> None:
        self.isa, self.lanes = isa, 64 if isa == "cdna" else 32
        self.functions = Functions(isa)
        self.emulator = self.functions.emulator
        self.counter = waits.COUNTERS[isa]
        self.known: dict[bytes, tuple[bytes, str]] = {}  # by its words: a step does not depend on where it stands
        self.alive: list[Any] = []  # tables and rewritten instructions that steps point to

    def decode(self, pc: int, step: DecodedInstruction) -> str:
        """Make a step of the instruction at an address; its name.

        Raises:
          NotEmulatedError: nobody knows what it does.
        """
        raw = ctypes.string_at(pc, LONGEST)
        for size in range(4, LONGEST, 4):
            if known := self.known.get(raw[:size]):
                ctypes.memmove(ctypes.addressof(step), known[0], ctypes.sizeof(DecodedInstruction))
                return known[1]
        name = self._make(raw, step)
        self.known[raw[: step.size]] = bytes(step), name
        return name

    def _make(self, raw: bytes, step: DecodedInstruction) -> str:
        inst = self._instruction(raw)
        name = str(self.emulator._op_name(inst))
        step.size, step.counter, step.at, step.verdict = inst.size(), NONE, 0, NONE
        found = operands(inst, name)
        put_bits(step.reads, _all(o for o in found if not o.is_result))
        put_bits(step.writes, _all(o for o in found if o.is_result))
        for i, (reads, writes) in enumerate(halves(inst, name, found)):
            step.dual = 1
            put_bits(step.half_reads[i], reads)
            put_bits(step.half_writes[i], writes)
        if name.startswith("V_CMP_"):
            step.verdict = next((o.registers[0] for o in found if o.is_result), VCC)
        kind = next((k for k in self.steps(inst, name) if k), None)
        if kind is not None:
            kind(inst, name, raw, step)
            return name
        self._jit(inst, raw, step)
        return name

    def _instruction(self, raw: bytes) -> Any:
        (word,) = struct.unpack_from("<I", raw)
        if self.isa == "cdna" and word >> 23 == PACKED and (op := RENUMBERED.get(word >> 16 & 127)):
            raw = struct.pack("<I", word & ~(127 << 16) | op << 16) + raw[4:]
        kinds = {VBUFFER: self.emulator.ir4.VBUFFER} if self.isa == "rdna4" else {MUBUF: self.emulator.ir3.MUBUF}
        own = kinds.get(word >> 26) if self.isa != "cdna" else None
        try:
            return own.from_bytes(raw) if own else self.emulator.decode_inst(raw, self.isa)
        except ValueError as e:
            raise lacking(f"the instruction {word:#010x}: {e}") from e

    def steps(self, inst: Any, name: str) -> Iterable[Callable[..., None] | None]:
        """Who makes the step, the first that is not None."""
        form = type(inst).__name__
        if any(part in name for part in REFUSED) or "DPP8" in form:
            raise lacking(name + " DPP8" * ("DPP8" in form))
        yield _nothing if name.startswith(IDLE) or name.endswith(CACHES) else None
        yield _simple("END") if name == "S_ENDPGM" else None
        yield _simple("BARRIER") if name in ("S_BARRIER", "S_BARRIER_WAIT") else None
        yield self._program_counter if name in ("S_GETPC_B64", "S_SETPC_B64") else None
        yield self._wait if name.startswith("S_WAIT") else None
        yield self._scalar_load if form == "SMEM" else None
        yield self._lane_of_lds if form == "DS" and ("PERMUTE" in name or "SWIZZLE" in name) else None
        yield self._transpose if name == "DS_READ_B64_TR_B16" else None
        yield self._access if name.startswith(("BUFFER_", "GLOBAL_", "FLAT_", "SCRATCH_", "DS_")) else None
        yield self._dpp if "DPP16" in form else None
        yield self._permlane16 if name.startswith(("V_PERMLANE16_B32", "V_PERMLANEX16_B32")) else None
        yield self._swap if name.startswith(("V_PERMLANE32_SWAP", "V_PERMLANE16_SWAP")) else None
        yield self._div_scale if name.startswith("V_DIV_SCALE") else None
        yield self._matrix if name.startswith(("V_WMMA", "V_MFMA", "V_SWMMAC", "V_SMFMAC")) else None
        yield self._long_form if self.isa == "cdna" and form in ("VOP1", "VOP2") and _above(inst) else None

    # ------------------------------------------------------------------------------------------------- what it becomes

    def _jit(self, inst: Any, raw: bytes, step: DecodedInstruction) -> None:
        address, buffers = self.functions.find(inst, raw)
        step.kind, step.code = KINDS["JITTED"], address
        for i, b in enumerate((*buffers, *[0] * 6)[:6]):
            step.buffer[i] = b

    def _elsewhere(self, words: bytes, step: DecodedInstruction) -> None:
        """The function of a rewritten instruction, which finds its words where they are kept."""
        kept = ctypes.create_string_buffer(words + b"\0" * 24)
        self.alive.append(kept)
        self._jit(self.emulator.decode_inst(kept.raw, self.isa), kept.raw, step)
        step.at = ctypes.addressof(kept)

    def _table(self, values: np.ndarray, step: DecodedInstruction) -> None:
        kept = np.ascontiguousarray(values, np.int32)
        self.alive.append(kept)
        step.table = kept.ctypes.data

    def _wait(self, inst: Any, name: str, raw: bytes, step: DecodedInstruction) -> None:
        found = waits.limits(self.isa, name, struct.unpack_from("<I", raw)[0] & 0xFFFF)
        if found is None:
            raise lacking(name)
        step.kind = KINDS["WAIT"]
        step.limits[:] = found
        for bits in (step.reads, step.writes):
            put_bits(bits, ())

    def _program_counter(self, inst: Any, name: str, raw: bytes, step: DecodedInstruction) -> None:
        """Jumps further than a branch's 16 bits reach."""
        step.kind = KINDS["GET_PC" if "GET" in name else "SET_PC"]
        step.sdst, step.source = bits_of(inst, "sdst"), bits_of(inst, "ssrc0")
        put_bits(step.reads, [step.source, step.source + 1] if "SET" in name else ())
        put_bits(step.writes, [step.sdst, step.sdst + 1] if "GET" in name else ())

    def _scalar_load(self, inst: Any, name: str, raw: bytes, step: DecodedInstruction) -> None:
        what = access(name)
        if what.store or what.bytes < 4:
            raise lacking(name)
        soffset = bits_of(inst, "soffset")
        offset = signed(inst, "offset", "ioffset")
        if self.isa == "cdna":
            by_register = not bits_of(inst, "imm") and not bits_of(inst, "soffset_en")
            soffset = (offset & 127) if by_register else soffset if bits_of(inst, "soffset_en") else NONE
            offset = offset if bits_of(inst, "imm") else 0
        elif soffset >= NULL:
            soffset = NONE
        step.kind, step.counter, step.space, step.bytes = (
            KINDS["SCALAR_LOAD"],
            self.counter.smem,
            what.space,
            what.bytes,
        )
        step.saddr, step.data, step.soffset, step.offset = (
            2 * bits_of(inst, "sbase"),
            bits_of(inst, "sdata"),
            soffset,
            offset,
        )
        base = range(step.saddr, step.saddr + (4 if what.space == BUFFER else 2))
        addresses = [*base, *[soffset] * (soffset != NONE)]
        put_bits(step.reads, addresses)
        put_bits(step.address, addresses)
        put_bits(step.writes, range(step.data, step.data + what.bytes // 4))

    def _access(self, inst: Any, name: str, raw: bytes, step: DecodedInstruction) -> None:
        what = access(name)
        to_lds = what.to_lds or bool(bits_of(inst, "lds"))
        step.kind, step.space, step.store, step.bytes = KINDS["ACCESS"], what.space, what.store, what.bytes
        step.sign, step.half, step.pairs, step.to_lds = what.signed, what.half, 1 + what.two, to_lds
        # with SRAM-ECC, as CDNA has it, a load of 16 bits writes the whole register
        step.moved = 0 if self.isa == "cdna" else what.half
        step.file = bits_of(inst, "acc")
        step.counter = self.counter.ds if what.space == LDS else self.counter.store if what.store else self.counter.vm
        step.vaddr, step.saddr, step.srsrc, step.soffset = bits_of(inst, "vaddr", "addr"), NONE, NONE, NONE
        step.offset = signed(inst, "offset", "ioffset") if what.space != LDS else 0
        source = bits_of(inst, "vdata", "data0", "data", "vsrc")
        step.data = source if what.store else bits_of(inst, "vdata", "vdst")
        addresses = {LDS: self._lds, BUFFER: self._buffer, SCRATCH: self._scratch, GLOBAL: self._global}[what.space](
            inst, name, step
        )
        count = max(1, what.bytes // 4)
        first = AGPR if step.file else VGPR
        data = [*range(first + step.data, first + step.data + count)]
        if what.two:
            other = step.data2 if what.store else step.data + count
            data += range(first + other, first + other + count)
        put_bits(step.address, addresses)
        put_bits(step.reads, [*addresses, *(data if what.store else ())])
        put_bits(step.writes, () if what.store or to_lds else data)
        if what.store and what.bytes <= 2:  # of one half of a register
            put_bits(step.spared[0 if what.half == 2 else 1], [r for r in data if r not in addresses])

    def _lds(self, inst: Any, name: str, step: DecodedInstruction) -> list[int]:
        what = access(name)
        low, high = bits_of(inst, "offset0"), bits_of(inst, "offset1")
        unit = what.bytes * what.unit
        step.offset, step.offset2 = (low * unit, high * unit) if what.two else (low | high << 8, 0)
        step.data2 = bits_of(inst, "data1")
        return [VGPR + step.vaddr]

    def _buffer(self, inst: Any, name: str, step: DecodedInstruction) -> list[int]:
        if bits_of(inst, "idxen") or bits_of(inst, "tfe"):
            raise lacking(f"{name} with an index")
        rdna4 = self.isa == "rdna4"
        step.srsrc = bits_of(inst, "rsrc") if rdna4 else 4 * bits_of(inst, "srsrc")
        soffset = bits_of(inst, "soffset")
        step.soffset = NONE if soffset == NULL and self.isa != "cdna" else soffset
        step.offset = signed(inst, "ioffset") if rdna4 else bits_of(inst, "offset")
        step.offen = bits_of(inst, "offen")
        vector = [VGPR + step.vaddr] if step.offen else []
        return [*range(step.srsrc, step.srsrc + 3), *[soffset] * (step.soffset != NONE and soffset < NULL), *vector]

    def _scratch(self, inst: Any, name: str, step: DecodedInstruction) -> list[int]:
        scalar, step.offen = bits_of(inst, "saddr"), bits_of(inst, "sve")
        step.saddr = scalar if scalar < NULL else NONE
        return [*[scalar] * (scalar < NULL), *[VGPR + step.vaddr] * bool(step.offen)]

    def _global(self, inst: Any, name: str, step: DecodedInstruction) -> list[int]:
        scalar = bits_of(inst, "saddr")
        if scalar < NULL and not name.startswith("FLAT"):
            step.saddr = scalar
            return [scalar, scalar + 1, VGPR + step.vaddr]
        return [VGPR + step.vaddr, VGPR + step.vaddr + 1]

    def _transpose(self, inst: Any, name: str, raw: bytes, step: DecodedInstruction) -> None:
        step.kind, step.counter, step.file = KINDS["TRANSPOSE"], self.counter.ds, bits_of(inst, "acc")
        step.vaddr, step.data = bits_of(inst, "addr"), bits_of(inst, "vdst")
        step.offset = bits_of(inst, "offset0") | bits_of(inst, "offset1") << 8
        first = (AGPR if step.file else VGPR) + step.data
        put_bits(step.reads, [VGPR + step.vaddr])
        put_bits(step.address, [VGPR + step.vaddr])
        put_bits(step.writes, [first, first + 1])

    def _lane_of_lds(self, inst: Any, name: str, raw: bytes, step: DecodedInstruction) -> None:
        offset = bits_of(inst, "offset0") | bits_of(inst, "offset1") << 8
        step.counter = self.counter.ds
        step.data, step.offset, addr = bits_of(inst, "vdst"), offset, bits_of(inst, "addr")
        put_bits(step.writes, [VGPR + step.data])
        if "SWIZZLE" in name:
            self._move(addr, step.data, moves.swizzle(offset, self.lanes), step)
            return
        step.kind, step.store = KINDS["BPERMUTE"], name == "DS_PERMUTE_B32"
        step.vaddr, step.source = addr, bits_of(inst, "data0")
        put_bits(step.reads, [VGPR + step.vaddr, VGPR + step.source])

    def _move(self, source: int, target: int, table: np.ndarray, step: DecodedInstruction) -> None:
        """A plain move of what other lanes hold."""
        temporary = free(source, target)
        word = 0x7E000000 | target << 17 | 1 << 9 | VECTOR + temporary  # v_mov_b32
        counter = step.counter
        self._elsewhere(struct.pack("<I", word), step)
        step.kind, step.counter, step.temporary, step.source = KINDS["SHUFFLE"], counter, temporary, source
        step.bound, step.fetch, step.enabled = 1, 0, (1 << self.lanes) - 1
        put_bits(step.reads, [VGPR + source])
        self._table(table, step)

    def _dpp(self, inst: Any, name: str, raw: bytes, step: DecodedInstruction) -> None:
        """The lanes move first; then the plain instruction takes what came from a register that it does not use."""
        if any(bits_of(inst, f) for f in ("src0_neg", "src0_abs", "src1_neg", "src1_abs")):
            raise lacking(f"{name} DPP with source modifiers")
        used = [r - VGPR for r in _all(operands(inst, name)) if VGPR <= r < AGPR]
        temporary = free(*used)
        field = type(inst).src0
        word = inst._raw & ~(0x1FF << field.lo) | VECTOR + temporary << field.lo
        words = (word & (1 << (64 if "VOP3" in type(inst).__name__ else 32)) - 1).to_bytes(8, "little")
        self._elsewhere(words, step)
        step.kind, step.temporary, step.source = KINDS["SHUFFLE"], temporary, bits_of(inst, "vsrc0")
        step.bound, step.fetch = bits_of(inst, "bc"), bits_of(inst, "fi")
        step.enabled = moves.enabled(bits_of(inst, "row_mask"), bits_of(inst, "bank_mask"), self.lanes)
        self._table(moves.dpp(bits_of(inst, "dpp"), self.lanes), step)

    def _permlane16(self, inst: Any, name: str, raw: bytes, step: DecodedInstruction) -> None:
        selects = bits_of(inst, "src1"), bits_of(inst, "src2")
        if any(s >= VECTOR for s in selects) or bits_of(inst, "src0") < VECTOR:
            raise lacking(f"{name} with vector selects")
        step.kind, step.source, step.data = KINDS["PERMLANE16"], bits_of(inst, "src0") - VECTOR, bits_of(inst, "vdst")
        step.offset, step.literal = 16 * ("X16" in name), struct.unpack_from("<I", raw, 8)[0]
        step.select[:] = [NONE if s == LITERAL else s for s in selects]
        step.fetch, step.bound = bits_of(inst, "opsel") & 1, bits_of(inst, "opsel") >> 1 & 1

    def _swap(self, inst: Any, name: str, raw: bytes, step: DecodedInstruction) -> None:
        step.kind, step.offset = KINDS["SWAP"], 32 if "PERMLANE32" in name else 16
        step.data, step.source = bits_of(inst, "vdst"), bits_of(inst, "src0") & 255
        both = [VGPR + step.data, VGPR + step.source]
        put_bits(step.reads, both)
        put_bits(step.writes, both)

    def _div_scale(self, inst: Any, name: str, raw: bytes, step: DecodedInstruction) -> None:
        if not name.startswith("V_DIV_SCALE_F32") or bits_of(inst, "neg") or bits_of(inst, "omod"):
            raise lacking(f"{name} with modifiers" if "F32" in name else name)
        step.kind, step.data, step.literal = (
            KINDS["DIV_SCALE"],
            bits_of(inst, "vdst"),
            struct.unpack_from("<I", raw, 8)[0],
        )
        step.source, step.source2, step.source3 = (bits_of(inst, f) for f in ("src0", "src1", "src2"))
        flags = bits_of(inst, "sdst")
        step.sdst = NONE if flags == NULL and self.isa != "cdna" else flags

    def _matrix(self, inst: Any, name: str, raw: bytes, step: DecodedInstruction) -> None:
        name = name.removesuffix("_E64")
        found = matrices.layout(name, self.isa)
        mfma = self.isa == "cdna"
        plain = (
            ("cbsz", "abid", "blgp") if mfma and hasattr(type(inst), "cbsz") else ("neg", "neg_hi") if not mfma else ()
        )
        if any(bits_of(inst, f) for f in plain):
            raise lacking(f"{name} with modifiers")
        (low, high) = struct.unpack_from("<II", raw)
        accumulators = high >> 27 & 3 if mfma else 0
        step.kind, step.data, step.file = KINDS["MATRIX"], low & 255, low >> 15 & 1 if mfma else 0
        step.a, step.b, step.c = (high & 511) - VECTOR, (high >> 9 & 511) - VECTOR, high >> 18 & 511
        step.a_file, step.b_file = accumulators & 1, accumulators >> 1
        step.m, step.n, step.k, step.type, step.twin = found.m, found.n, found.k, found.type, found.twin
        self._table(found.table, step)
        files = [AGPR if f else VGPR for f in (step.a_file, step.b_file, step.file)]
        read = [files[i] + at + r for i, at in enumerate((step.a, step.b)) for r in range(found.registers)]
        own = range(found.outputs)
        put_bits(step.reads, read + [files[2] + step.c - VECTOR + r for r in own if step.c >= VECTOR])
        put_bits(step.writes, [files[2] + step.data + r for r in own])

    def _long_form(self, inst: Any, name: str, raw: bytes, step: DecodedInstruction) -> None:
        """On CDNA an 8-bit register number is one. tinygrad reads 16-bit operands from v128 on as high halves, as RDNA
        has them; in its long form the instruction is right."""
        (word,) = struct.unpack_from("<I", raw)
        source = word & 511
        if source == LITERAL:
            raise lacking(f"{name} of v128 and up with a literal")
        one = type(inst).__name__ == "VOP1"
        op = 0x140 + (word >> 9 & 255) if one else 0x100 + (word >> 25 & 63)
        second = 0 if one else VECTOR + (word >> 9 & 255)
        self._elsewhere(struct.pack("<II", 0b110100 << 26 | op << 16 | word >> 17 & 255, source | second << 9), step)


def _nothing(inst: Any, name: str, raw: bytes, step: DecodedInstruction) -> None:
    step.kind = KINDS["SKIP"]
    for bits in (step.reads, step.writes):
        put_bits(bits, ())


def _simple(kind: str) -> Callable[..., None]:
    def make(inst: Any, name: str, raw: bytes, step: DecodedInstruction) -> None:
        _nothing(inst, name, raw, step)
        step.kind = KINDS[kind]

    return make


def bits_of(inst: Any, *names: str) -> int:
    """The bits of the first of these fields that an instruction has, 0 where it has none."""
    for name in names:
        field = getattr(type(inst), name, None)
        if field is not None:
            return inst._raw >> field.lo & ((1 << field.hi - field.lo + 1) - 1)
    return 0


def signed(inst: Any, *names: str) -> int:
    """The same, as a number that may be negative."""
    field = next(f for n in names if (f := getattr(type(inst), n, None)) is not None)
    width, value = field.hi - field.lo + 1, bits_of(inst, *names)
    return value - (1 << width) if value >> width - 1 else value


def free(*used: int) -> int:
    """A vector register among the first half that is none of these."""
    return next(r for r in range(FIRST_HIGH_HALF - 1, -1, -1) if r not in used)


def _above(inst: Any) -> bool:
    """Whether a 16-bit operand has a register number that tinygrad takes for a high half."""
    bits, word = inst.canonical_op_bits, inst._raw
    second = type(inst).__name__ == "VOP2" and bits.get("s1") == 16 and word >> 9 & 255 >= FIRST_HIGH_HALF
    first = bits.get("s0") == 16 and word & 511 >= VECTOR + FIRST_HIGH_HALF
    return first or second or (bits.get("d") == 16 and word >> 17 & 255 >= FIRST_HIGH_HALF)


class InstructionOperand(NamedTuple):
    """Registers that a field of an instruction names."""

    field: str
    registers: Sequence[int]
    is_result: bool


def operands(inst: Any, name: str) -> list[InstructionOperand]:
    """The registers that an arithmetic instruction names."""
    found = []
    sources = inst.num_srcs() if hasattr(inst, "op") else 3
    for field, of in inst._fields:
        if not hasattr(of, "_valid_range") and field != "vdsty":
            continue
        if field in ("src2", "src1") and sources <= int(field[3]):
            continue
        if field in ("vsrcx1", "vsrcy1") and "MOV" in getattr(inst, f"op{field[4]}").name:
            continue
        reg = getattr(inst, field)
        is_result = field in ("vdst", "sdst", "vdstx", "vdsty", "sdata")
        first = reg.offset
        if is_result and "LANE" in name and "READ" in name:  # a scalar, in a field of vectors
            first -= VECTOR * (first >= VECTOR)
        if first >= VECTOR + FIRST_HIGH_HALF and _holds_halves(inst, field):
            first -= FIRST_HIGH_HALF
        registers = _numbers(first, reg.sz, name, is_result)
        found.append(InstructionOperand(field, registers, is_result))
        owner = getattr(inst, f"op{field[-1]}").name if field in ("vdstx", "vdsty") else name
        if is_result and any(part in owner for part in ACCUMULATE):
            found.append(InstructionOperand(field, registers, False))
    return found


def _holds_halves(inst: Any, field: str) -> bool:
    """Whether a number from 128 on in a field means the high half of a register: RDNA's short 16-bit encodings."""
    if "cdna" in type(inst).__module__ or not type(inst).__name__.startswith(("VOP1", "VOP2", "VOPC")):
        return False
    of = {"src0": "s0", "vsrc0": "s0", "vsrc1": "s1", "vdst": "d"}.get(field, "")
    return bool(inst.canonical_op_bits.get(of) == 16)


def halves(inst: Any, name: str, found: list[InstructionOperand]) -> list[tuple[list[int], list[int]]]:
    """(sources, results) of parts of an instruction that are undefined each by itself; none where it is one part."""
    sources = [o for o in found if not o.is_result]
    results = [o for o in found if o.is_result]
    wide = bool(results) and len(results[0].registers) == 2
    if "VOPD" in type(inst).__name__:
        return [
            (_all(o for o in sources if h in o.field[3:]), _all(o for o in results if h in o.field[3:])) for h in "xy"
        ]
    if name.startswith("V_WRITELANE"):  # one undefined lane does not make the others so: scalars are spilled to lanes
        return [([], _all(results)), ([], [])]
    if name.startswith(("S_ANDN2_", "S_AND_NOT1_")) and len(sources) == 2 and EXEC in sources[1].registers:
        return [
            ([], _all(results)),
            ([], []),
        ]  # a mask that grows in a loop begins as anything: no active lane keeps it
    if name.startswith("V_PK_") and wide:
        low, high = bits_of(inst, "opsel"), bits_of(inst, "opsel_hi") | bits_of(inst, "opsel_hi2") << 2
        if "MOV" in name:  # the low half of the result comes from the first source, the high one from the second
            taken = [[o.registers[low >> i & 1]] if len(o.registers) == 2 else [] for i, o in enumerate(sources)]
        else:
            taken = [
                [o.registers[select >> int(o.field[3]) & 1] for o in sources if len(o.registers) == 2]
                for select in (low, high)
            ]
        return [(taken[0], [results[0].registers[0]]), (taken[1], [results[0].registers[1]])]
    if wide and LOW_HALF.search(name) and len(results) == 1 + (name.startswith("V_MAD")):
        lows = [r for o in sources for r in o.registers[:1]]
        highs = [r for o in sources for r in o.registers[1:]] if BITWISE.search(name) else _all(sources)
        return [(lows, [results[0].registers[0]]), (highs, [results[0].registers[1], *_all(results[1:])])]
    return []


def _all(found: Iterable[InstructionOperand]) -> list[int]:
    return [r for o in found for r in o.registers]


def _numbers(first: int, count: int, name: str, result: bool) -> Sequence[int]:
    if VECTOR <= first < 2 * VECTOR:
        accumulator = name.startswith("V_ACCVGPR_") and ("MOV" in name or result == ("WRITE" in name))
        start = (AGPR if accumulator else VGPR) + first - VECTOR
        return range(start, start + count)
    return range(first, first + count) if first + count <= SCALARS else range(0)
