"""Machine code as a backend's compiler reports it: the registers and memory of each kernel, and whether it fits the
chip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from portakern.core.targets import Hardware

__all__ = ["FOLLOWED", "Compiled", "Kernel", "PlannedKernel", "occupancy", "residents"]

# NVIDIA gives a warp registers by so many (CUDA occupancy calculator); a block also pays 1 KiB of shared memory.
REGISTERS_ALLOCATED = 256

FOLLOWED = 0.7
"""Share of the cycles that a program issues, by its code and its grid, below which a compiler's estimate is not
believed: branches on what it cannot follow count as not taken there. Nor is one believed beside which nothing is
counted."""


class PlannedKernel(NamedTuple):
    """A kernel that a call will launch.

    Attributes:
      key: equal for launches of the same machine code. name: of the kernel; "" for what all of them need beside it.
      is_cached: whether a launch compiles nothing. source: what another process compiles it from.
    """

    key: str
    name: str
    is_cached: bool
    source: str


@dataclass
class Kernel:
    """One kernel in machine code.

    Attributes:
      name: of the kernel. launches: how many launches of the call run this kernel.
      threads: of one program. registers: 32-bit registers of a thread.
      spills: what did not fit in registers. On a GPU: bytes that a thread stores, each counted once as the assembler
        does, without loads. On a TPU: stores of vector registers in the code.
      on_chip: memory (as named in :mod:`portakern.core.targets`) -> bytes that one program takes.
      granted: memory -> bytes that the program may take, where this is less than the chip has.
      occupancy: the share of a core's resident threads that fit beside each other.
      matrix: matrix instruction -> its number of occurrences in the machine code.
      code_bytes: of the machine code. cycles: the compiler's own static estimate of one launch.
      issued: cycles in which instructions are issued, over all launches, of a machine that issues them in the order of
        its code; without stalls, on the core that takes longest.
      moved: bytes between device memory and the chip, over all launches. cores: of the chip that share a launch.
      assumed: what ``issued`` and ``moved`` take for granted where data decides, in words.
      undefined: registers that the machine code reads before anything wrote them, a fault of the assembler.
      leaking: instructions whose result reaches into the other half of a register, a fault of the compiler.
      serialised: why the assembler runs matrix instructions one after another that the code would overlap, in its own
        words. Results are right, at a fraction of the rate.
      assembly: the machine code as text.
    """

    name: str
    launches: int = 1
    threads: int | None = None
    registers: int | None = None
    spills: int | None = None
    on_chip: dict[str, int] = field(default_factory=dict)
    occupancy: float | None = None
    matrix: dict[str, int] = field(default_factory=dict)
    code_bytes: int | None = None
    cycles: int | None = None
    issued: int | None = None
    moved: int | None = None
    cores: int = 1
    assumed: str = ""
    undefined: list[str] = field(default_factory=list)
    leaking: list[str] = field(default_factory=list)
    serialised: list[str] = field(default_factory=list)
    assembly: str = ""
    granted: dict[str, int] = field(default_factory=dict)

    @property
    def program(self) -> int | None:
        """Cycles that its program takes in a whole run, all launches: the compiler's estimate, and what it issues where
        there is none or where that is so much more that the estimate must have missed branches; None where nothing
        counts what it issues."""
        estimated = self.launches * (self.cycles or 0)
        return estimated if self.issued and estimated >= FOLLOWED * self.issued else self.issued

    def memory(self, hardware: Hardware) -> float | None:
        """Cycles that the bytes it moves take those of the chip's cores that run it, at the bandwidth of its data
        sheet, of which each has its part."""
        if self.moved is None or not hardware.bandwidth or not hardware.clock:
            return None
        return self.moved / (hardware.bandwidth / hardware.clock / (hardware.cores or 1) * self.cores)

    def least(self, hardware: Hardware) -> float | None:
        """The larger of both: cycles of a run that nothing was run for."""
        return None if self.program is None else max(self.program, self.memory(hardware) or 0.0)

    def over(self, hardware: Hardware) -> str | None:
        """What of the chip this kernel takes too much of, or what its machine code reads and never wrote, in words;
        None where it is sound. Compilers let such kernels pass, and launches fail or give wrong results."""
        if self.undefined:
            return (
                f"the assembler's code for {self.name} reads {', '.join(self.undefined)}, which nothing before "
                "writes: its results would be wrong"
            )
        if self.leaking:
            return (
                f"the compiler's code for {self.name} lets {', '.join(self.leaking)} reach into the other half of a "
                "64-bit register: it would read and write elsewhere than it says"
            )
        for memory, used in self.on_chip.items():
            limit = hardware.on_chip.get(memory)
            if limit is not None and used > limit:
                return f"{self.name} takes {used} bytes of {memory}, and {hardware.name} has {limit}"
        for what, taken, most in (
            ("threads", self.threads, hardware.program_threads),
            ("registers a thread", self.registers, hardware.thread_registers),
        ):
            if taken is not None and most is not None and taken > most:
                return f"{self.name} takes {taken} {what}, and {hardware.name} has {most}"
        return None


@dataclass
class Compiled:
    """What a backend's compiler returns for one call. ``code_bytes``: of everything, where kernels do not say it
    each.
    """

    kernels: list[Kernel]
    code_bytes: int | None = None


def residents(warps: int, registers: int | None, on_chip: Mapping[str, int], hardware: Hardware) -> dict[str, int]:
    """How many programs of a kernel, with so many warps and registers a thread, lie beside each other on an NVIDIA core
    by each thing that they share: the least of these do. Empty where that is not known, and of other makers' cores,
    which share out registers otherwise."""
    if registers is None or hardware.core_threads is None or hardware.core_registers is None:
        return {}
    if hardware.platform != "cuda":
        return {}
    a_warp = -(-registers * hardware.lanes // REGISTERS_ALLOCATED) * REGISTERS_ALLOCATED
    most = hardware.core_threads // hardware.lanes
    found = {
        "threads": most // warps,
        "registers": hardware.core_registers // a_warp // warps,
        "programs": hardware.core_programs or most,
    }
    for memory, used in on_chip.items():
        taken = used + 1024 * (memory == "shared")
        if taken:
            found[memory] = (hardware.core_memory[memory] or 0) // taken
    return found


def occupancy(warps: int, registers: int | None, on_chip: Mapping[str, int], hardware: Hardware) -> float | None:
    """The share of an NVIDIA core's resident threads that fit beside each other (:func:`residents`); None where that
    is not known."""
    programs = residents(warps, registers, on_chip, hardware)
    if not programs or hardware.core_threads is None:
        return None
    return round(min(programs.values()) * warps / (hardware.core_threads // hardware.lanes), 4)
