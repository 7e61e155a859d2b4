"""Instructions that access memory, read off their names.

``BUFFER_LOAD_D16_HI_U8``, ``DS_READ2ST64_B64``, ``GLOBAL_STORE_DWORDX4``, ``S_BUFFER_LOAD_B128``: the memory, the
direction, how often, and what each lane moves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from portakern.backends.triton.emulator.faults import lacking

__all__ = ["BUFFER", "GLOBAL", "LDS", "SCRATCH", "Access", "access"]

GLOBAL, BUFFER, SCRATCH, LDS = range(4)
SPACES = {"BUFFER": BUFFER, "GLOBAL": GLOBAL, "FLAT": GLOBAL, "SCRATCH": SCRATCH, "DS": LDS, "S": GLOBAL}

# word of a name -> bytes, signed
MOVES = {
    "U8": (1, False), "I8": (1, True), "B8": (1, False), "UBYTE": (1, False), "SBYTE": (1, True), "BYTE": (1, False),
    "U16": (2, False), "I16": (2, True), "B16": (2, False), "USHORT": (2, False), "SSHORT": (2, True),
    "SHORT": (2, False),
    "B32": (4, False), "DWORD": (4, False), "B64": (8, False), "DWORDX2": (8, False), "B96": (12, False),
    "DWORDX3": (12, False), "B128": (16, False), "DWORDX4": (16, False), "B256": (32, False), "DWORDX8": (32, False),
    "B512": (64, False), "DWORDX16": (64, False),
}  # fmt: skip
_NAME = re.compile(
    r"(S_BUFFER|S|BUFFER|GLOBAL|FLAT|SCRATCH|DS)_(LOAD|STORE|READ|WRITE)"
    r"(2?)(ST64)?(_2ADDR)?(_STRIDE64)?(_LDS)?_((?:[A-Z]+\d*_?)+)"
)
WORDS = {"D16", "HI", *MOVES}


@dataclass(frozen=True)
class Access:
    """What a name says.

    Attributes:
      space: the memory; store: the direction; bytes, signed: what a lane moves at a place.
      half: 1 or 2 where it is the low or the high half of a register, else 0.
      two: there are two places; unit: of their offsets, in elements of what is moved. to_lds: what is loaded goes
        there.
    """

    space: int
    store: bool
    bytes: int
    signed: bool
    half: int
    two: bool
    unit: int
    to_lds: bool


def access(name: str) -> Access:
    """What an instruction of this name moves; NotEmulatedError where it is none of these."""
    m = _NAME.fullmatch(name)
    words = m[8].split("_") if m else []
    moved = [w for w in words if w in MOVES]
    if m is None or len(moved) != 1 or not WORDS.issuperset(words):
        raise lacking(name)
    size, signed = MOVES[moved[0]]
    store = m[2] in ("STORE", "WRITE")
    half = (2 if "HI" in words else 1) if "D16" in words else 0
    far = bool(m[4] or m[6])
    return Access(
        BUFFER if m[1] == "S_BUFFER" else SPACES[m[1]], store, size, signed, half,
        bool(m[3] or m[5]), 64 if far else 1, bool(m[7]),
    )  # fmt: skip
