"""The facts about each kernel of a call, with the source of each, and the limit of the kernel that follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from portakern.core.machine_code import Kernel, residents
from portakern.core.targets import Hardware
from portakern.tools.bench.roof import Ceiling
from portakern.tools.profile.counters import COUNTED, STALLS, Counted

__all__ = ["COMPILER", "NCU", "NEAR", "ROOF", "SPEC", "TIMES", "Fact", "Profiled", "kernels_of", "whole_of"]

SPEC, ROOF, TIMES, NCU, COMPILER = "spec", "measured roof", "profiler", "Nsight Compute", "compiler"
"""Where facts come from: the op's declaration; a copy and products, timed here; the library's profiler; counters; the
machine code."""

NEAR = 0.6
"""The share of a limit from which on it is what bounds a kernel, as Nsight Compute's own rules have it; below it warps
wait for something else."""

ALONE = 0.9
"""The share of a call's time from which on a kernel stands for the whole call."""

SHOWN_STALLS = 3


class Fact(NamedTuple):
    """A value with its unit and its source."""

    name: str
    value: float | str
    unit: str
    source: str


@dataclass
class Profiled:
    """A kernel: its ``launches`` in one call, the limit that ``bound`` it, in words, and the facts behind that."""

    name: str
    launches: int
    bound: str = ""
    facts: list[Fact] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As a row of results."""
        facts = [fact._asdict() for fact in self.facts]
        return {"kernel": self.name, "launches": self.launches, "limited_by": self.bound, "facts": facts}


def kernels_of(
    built: Sequence[Kernel],
    samples: Sequence[Sequence[tuple[str, float]]],
    counted: Sequence[Counted],
    ceiling: Ceiling | None,
    hardware: Hardware | None,
) -> list[Profiled]:
    """Every kernel of a call.

    Args:
      built: the compiler's report; empty where nothing compiled ahead of time.
      samples: name and microseconds of each launch, of several calls; empty where nothing ran.
      counted: the counters; empty where none were read.
      ceiling: the least time of the whole call under the measured roof. hardware: the chip's limits.
    """
    times = _times(samples)
    names = list(times) or [c.kernel for c in counted] or list(dict.fromkeys(k.name for k in built))
    whole = whole_of(samples)
    found = []
    for name in names:
        forms = [k for k in built if _same(k.name, name)]  # a kernel may be compiled in several
        counters = next((c for c in counted if _same(c.kernel, name)), None)
        launches, us = times.get(name, (0, None))
        known = launches or (counters.launches if counters else sum(k.launches for k in forms))
        code = dict.fromkeys(fact for k in forms for fact in _compiled(k, hardware))
        bound = _bound(counters, forms, us, whole, ceiling)
        found.append(Profiled(name, known, bound, [*_timed(us, whole), *_counted(counters), *code]))
    return found


def whole_of(samples: Sequence[Sequence[tuple[str, float]]]) -> float:
    """The median over the calls of what their kernels take together, in microseconds; 0 of no calls."""
    return float(median(sum(us for _, us in sample) for sample in samples)) if samples else 0.0


def _times(samples: Sequence[Sequence[tuple[str, float]]]) -> dict[str, tuple[int, float]]:
    """Kernel -> launches of a call, and the median over the calls of what they take together."""
    names = dict.fromkeys(name for sample in samples for name, _ in sample)
    each = {name: [[us for n, us in sample if n == name] for sample in samples] for name in names}
    return {n: (max(map(len, found)), float(median(map(sum, found)))) for n, found in each.items()}


def _same(a: str, b: str) -> bool:
    """Whether two sources mean one kernel: a profiler may show its parameters, or a name that a library has put
    something before and behind."""
    a, b = (name.partition("(")[0].strip() for name in (a, b))
    return a == b or a in b.replace("<", " ").split() or b in a.replace("<", " ").split()


def _timed(us: float | None, total: float) -> list[Fact]:
    if us is None:
        return []
    return [
        Fact("time", us, "us", TIMES),
        Fact("share of the call's time", 100 * us / total if total else 0, "%", TIMES),
    ]


def _counted(counters: Counted | None) -> list[Fact]:
    """The counters, of stalls the longest."""
    if counters is None:
        return []
    values = counters.values
    longest = sorted((n for n in STALLS if n in values), key=lambda n: -values[n])[:SHOWN_STALLS]
    shown = [n for n in COUNTED if n in values and (n not in STALLS or n in longest)]
    facts = [Fact(COUNTED[n].name, values[n], COUNTED[n].unit, NCU) for n in shown]
    if {"time", "read", "written"} <= values.keys() and values["time"]:
        rate = (values["read"] + values["written"]) / values["time"] * 1e-3
        facts.append(Fact("bytes a second", rate, "GB/s", NCU))
    return facts


def _compiled(kernel: Kernel, hardware: Hardware | None) -> list[Fact]:
    """What the machine code takes of a core, and what keeps more programs from it."""
    facts = [
        Fact(name, value, unit, COMPILER)
        for name, value, unit in (
            ("threads of a program", kernel.threads, ""), ("registers a thread", kernel.registers, ""),
            ("spilled a thread", kernel.spills, "bytes"), ("machine code", kernel.code_bytes, "bytes"),
        )
        if value is not None
    ]  # fmt: skip
    facts += [Fact(f"{memory} memory of a program", used, "bytes", COMPILER) for memory, used in kernel.on_chip.items()]
    if kernel.occupancy is not None:
        facts.append(Fact("occupancy that fits", 100 * kernel.occupancy, "%", COMPILER))
        facts += _narrowest(kernel, hardware)
    matrix = ", ".join(f"{n} x{count}" for n, count in kernel.matrix.items()) or "none"
    facts.append(Fact("matrix instructions in the code", matrix, "", COMPILER))
    return facts + [Fact("matrix instructions wait for each other", why, "", COMPILER) for why in kernel.serialised]


def _narrowest(kernel: Kernel, hardware: Hardware | None) -> list[Fact]:
    if hardware is None or not kernel.threads:
        return []
    beside = residents(kernel.threads // hardware.lanes, kernel.registers, kernel.on_chip, hardware)
    if not beside:
        return []
    least = min(beside, key=lambda n: beside[n])
    text = f"{least}: {beside[least]} program{'s' * (beside[least] != 1)} of a core"
    return [Fact("occupancy is limited by", text, "", COMPILER)]


def _bound(
    counters: Counted | None, kernels: Sequence[Kernel], us: float | None, total: float, ceiling: Ceiling | None
) -> str:
    """What a kernel waits for, in words: by its counters; else, if it is nearly all of the call, by the roof."""
    hints = [f"{k.spills} bytes a thread are spilled" for k in kernels if k.spills]
    hints += ["its matrix instructions wait for each other" for k in kernels if k.serialised]
    return "; ".join([_by_counters(counters) or _by_roof(us, total, ceiling), *dict.fromkeys(hints)])


def _by_counters(counters: Counted | None) -> str | None:
    limit = counters.limit if counters else None
    if counters is None or limit is None:
        return None
    name, percent = limit
    if percent >= 100 * NEAR:
        return f"{COUNTED[name].name}, {percent:.0f} % of the peak"
    stall = f": warps wait most for {counters.stall}" if counters.stall else ""
    return f"latency{stall}; the nearest limit is {COUNTED[name].name}, {percent:.0f} % of the peak"


def _by_roof(us: float | None, total: float, ceiling: Ceiling | None) -> str:
    if not us or ceiling is None:
        return "not known: nothing was run" if not us else "not known: no roof was measured"
    if us < ALONE * total:
        return "not known without counters: the measured roof is that of the full call"
    share, what = ceiling.us / us, ceiling.what
    if share >= NEAR:
        return f"{what}, {share:.0%} of the measured roof"
    return f"neither memory nor products, {share:.0%} of the measured roof ({what}); counters would show the limit"
