"""What counts transfers that are under way, and what waits for them.

An instruction set has counters for what is loaded from memory (VM), what LDS does (DS), what is stored (STORE), and
what is loaded into scalar registers (SMEM). Transfers of one counter arrive in order, scalar loads in any. RDNA 4 has
an instruction for each; before it one word holds several, and a field full of ones waits for nothing.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["COUNTERS", "MOST", "WaitCounter", "limits"]


class WaitCounter(NamedTuple):
    """Numbers of counters in machine.c."""

    vm: int = 0
    ds: int = 1
    store: int = 2
    smem: int = 3


VM, DS, STORE, SMEM = WaitCounter()

# CDNA counts what is stored with what is loaded.
COUNTERS = {"cdna": WaitCounter(store=VM), "rdna3": WaitCounter(), "rdna4": WaitCounter()}

# How many transfers a counter counts: with as many under way the next one is not sent before the oldest is there, which
# compilers rely on. Of scalar loads nobody knows which is the oldest.
MOST = {"cdna": (63, 15, 63, 0), "rdna3": (63, 63, 63, 0), "rdna4": (63, 63, 63, 0)}

# isa -> instruction -> the fields of its word: which counters, and the bits of it that hold how many may be under way
_Field = tuple[tuple[int, ...], tuple[tuple[int, int], ...]]
_WAITS: dict[str, dict[str, tuple[_Field, ...]]] = {
    "cdna": {"S_WAITCNT": (((VM,), ((0, 4), (14, 2))), ((DS, SMEM), ((8, 4),)))},
    "rdna3": {
        "S_WAITCNT": (((VM,), ((10, 6),)), ((DS, SMEM), ((4, 6),))),
        "S_WAITCNT_VSCNT": (((STORE,), ((0, 6),)),),
        "S_WAITCNT_VMCNT": (((VM,), ((0, 6),)),),
        "S_WAITCNT_LGKMCNT": (((DS, SMEM), ((0, 6),)),),
    },
    "rdna4": {
        "S_WAIT_LOADCNT": (((VM,), ((0, 6),)),),
        "S_WAIT_STORECNT": (((STORE,), ((0, 6),)),),
        "S_WAIT_DSCNT": (((DS,), ((0, 6),)),),
        "S_WAIT_KMCNT": (((SMEM,), ((0, 5),)),),
        "S_WAIT_LOADCNT_DSCNT": (((VM,), ((8, 6),)), ((DS,), ((0, 6),))),
        "S_WAIT_STORECNT_DSCNT": (((STORE,), ((8, 6),)), ((DS,), ((0, 6),))),
    },
}


def limits(isa: str, name: str, word: int) -> list[int] | None:
    """By counter, how many transfers may be under way after a wait, -1 for any number; None where it is no wait."""
    if name == "S_WAIT_IDLE":
        return [0] * len(WaitCounter())
    fields = _WAITS[isa].get(name)
    if fields is None:
        return None
    found = [-1] * len(WaitCounter())
    for counters, parts in fields:
        value = shift = 0
        for low, bits in parts:
            value |= (word >> low & ((1 << bits) - 1)) << shift
            shift += bits
        for c in counters:
            found[c] = -1 if value == (1 << shift) - 1 else value
    return found
