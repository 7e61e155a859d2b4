"""How lanes move: DPP controls and swizzles as tables of where each lane's value comes from."""

from __future__ import annotations

import numpy as np

from portakern.backends.triton.emulator.faults import lacking

__all__ = ["dpp", "enabled", "swizzle"]

NOWHERE = -1


def dpp(control: int, lanes: int) -> np.ndarray:
    """The lane that each lane's operand comes from under a DPP control word, -1 beyond the row or the wave."""
    lane = np.arange(lanes)
    row, place, by = lane & ~15, lane & 15, control & 15
    kind = control & 0x1F0
    if control < 0x100:  # quad_perm
        return (lane & ~3) + (control >> 2 * (lane & 3) & 3)
    if kind == 0x100 and by:  # row_shl
        return np.where(place + by <= 15, lane + by, NOWHERE)
    if kind == 0x110 and by:  # row_shr
        return np.where(place >= by, lane - by, NOWHERE)
    if kind == 0x120 and by:  # row_ror
        return row + (place - by & 15)
    if control == 0x140:  # row_mirror
        return row + 15 - place
    if control == 0x141:  # row_half_mirror
        return (lane & ~7) + 7 - (lane & 7)
    if control == 0x142 and lanes == 64:  # row_bcast:15
        return np.where(lane >= 16, row - 1, NOWHERE)
    if control == 0x143 and lanes == 64:  # row_bcast:31
        return np.where(lane >= 32, 31, NOWHERE)
    if kind == 0x150:  # row_share, on CDNA row_newbcast
        return row + by
    if kind == 0x160 and lanes == 32:  # row_xmask
        return row + (place ^ by)
    raise lacking(f"DPP control {control:#x}")


def enabled(row_mask: int, bank_mask: int, lanes: int) -> int:
    """The lanes that a DPP instruction's masks let write, as bits."""
    return sum(1 << lane for lane in range(lanes) if row_mask >> lane // 16 & 1 and bank_mask >> (lane & 15) // 4 & 1)


def swizzle(offset: int, lanes: int) -> np.ndarray:
    """The lane that ``ds_swizzle_b32`` reads."""
    lane = np.arange(lanes)
    if offset & 0x8000:
        return (lane & ~3) + (offset >> 2 * (lane & 3) & 3)
    within = lane & 31
    return (lane & ~31) + ((within & offset & 31 | offset >> 5 & 31) ^ offset >> 10 & 31)
