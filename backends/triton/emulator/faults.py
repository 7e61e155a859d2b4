"""What no right machine code does, by name, and what this emulator does not know."""

from __future__ import annotations

from portakern.errors import NotEmulatedError

__all__ = [
    "BY_CODE", "CompilerCrash", "EarlyRead", "Fault", "IllegalInstruction", "LdsRace", "OutsideMemory",
    "TooManyInstructions", "UninitialisedRegister", "lacking",
]  # fmt: skip


class Fault(RuntimeError):
    """Machine code did what no right code does."""


class OutsideMemory(Fault):
    """An access beyond the launch's tensors, LDS or scratch memory."""


class LdsRace(Fault):
    """Two waves touched a byte of LDS with no barrier between, and one of them changed it."""


class UninitialisedRegister(Fault):
    """What nothing wrote made an address, or was stored."""


class EarlyRead(Fault):
    """A register or a byte of LDS was used before a wait said that it is there."""


class IllegalInstruction(Fault):
    """An instruction that is undefined as it was executed."""


class CompilerCrash(NotEmulatedError):
    """The compiler ended its process, so that there is nothing to run. A launch on hardware would end the caller's."""


class TooManyInstructions(NotEmulatedError):
    """A launch of more instructions than the emulator takes on."""


def lacking(what: str) -> NotEmulatedError:
    """The refusal of an instruction that is emulated nowhere."""
    return NotEmulatedError(f"cannot: the emulator lacks {what}")


# machine.c's numbers: the exception and what happened, of {lane}, {address}, {bytes}, {other}, {register}, {near}
BY_CODE: dict[int, tuple[type[Fault], str]] = {
    1: (OutsideMemory, "lane {lane} reaches {bytes} bytes at {address:#x}, outside every tensor of the launch{near}"),
    2: (OutsideMemory, "lane {lane} reaches {bytes} bytes of LDS at {address}, beyond the {lds} that it has"),
    3: (OutsideMemory, "lane {lane} reaches {bytes} bytes of scratch memory at {address}, beyond the {scratch} it has"),
    4: (IllegalInstruction, "lane {lane} accesses {bytes} bytes of LDS at {address}, which is not aligned"),
    5: (LdsRace, "byte {address} of LDS, which wave {other} touched after the same barrier"),
    6: (UninitialisedRegister, "the address comes from what nothing wrote: {read}"),
    7: (UninitialisedRegister, "what is stored comes from what nothing wrote: {read}"),
    8: (EarlyRead, "{register} is used, and no wait since it was asked for says that it is there"),
    9: (EarlyRead, "byte {address} of LDS is read, and wave {other} did not wait for it to be there"),
    10: (IllegalInstruction, "lanes are inactive that it needs"),
    11: (IllegalInstruction, "lanes 16 to 31 do not repeat the operands of lanes 0 to 15"),
    12: (OutsideMemory, "the program counter is at {address:#x}, outside the kernel"),
}
