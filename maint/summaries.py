"""Summaries for README.md and PORTING.md: two figures, the chips, and the cost of each port."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from maint import lines
from maint.checked import caught
from maint.coverage import MACHINES, Ran, ran
from maint.markdown import NONE, table
from maint.measurements import AGED, STALE, Row, StoredResults, changed
from portakern.core import registry, targets
from portakern.core.backend import Family
from portakern.core.machine_code import Kernel

__all__ = ["chips", "headline", "porting"]

UNKNOWN = "not measured"


def headline(kept: StoredResults) -> str:
    """The two strongest figures, each with what it was measured on."""
    told = [f"* **{title}** {text}" for title, text in (_step(kept), _missed(kept)) if text]
    return "\n".join(told) or "Nothing was measured yet."


def _step(kept: StoredResults) -> tuple[str, str]:
    """A model's step by PyTorch, by Liger and by portakern."""
    title, rows = "A model's step.", kept.rows("model-step")
    by = {r["contender"]: (r, run) for r, run in rows if r["stage"] == "eager" and r.get("ms")}
    if not {"portakern", "torch", "liger"} <= by.keys():
        return title, ""
    ours, run = by["portakern"]
    theirs, liger = by["torch"][0], by["liger"][0]
    return title, (
        f"On one {run.device}, `portakern.torch.apply(model)` takes the forward and backward pass of a Llama in "
        f"bfloat16 ({run.extra['sizes']['model']}) from {_cost(theirs)} to {_cost(ours)}. Liger's patch takes "
        f"{_cost(liger)}. portakern's gradients differ from PyTorch's by {ours['gradients_apart']:.3f} of their norm, "
        f"Liger's by {liger['gradients_apart']:.3f}."
    )


def _cost(row: Row) -> str:
    return f"{row['ms']:.0f} ms and {row['peak_gib']:.1f} GiB"


def _missed(kept: StoredResults) -> tuple[str, str]:
    """Planted faults that a flat tolerance misses."""
    title, rows = "Errors that a tolerance misses.", kept.rows("mutants")
    errors = [row["max_error"] for row, _ in rows if row.get("max_error") is not None]
    if not errors:
        return title, ""
    small, seeds = sum(e < 1e-2 for e in errors), max(len(row["seeds"]) for row, _ in rows)
    everywhere = sum(caught(row) for row, _ in rows)
    return title, (
        f"{len(rows)} mistakes were planted in the kernels, one at a time. `assert_allclose(rtol=1e-2, atol=1e-2)` "
        f"misses {small} of them ({small / len(errors):.0%}) on ordinary inputs. `portakern check` finds "
        f"{'all of them' if everywhere == len(rows) else everywhere} on each of {seeds} seeds. Hardware: a CPU, with "
        "Triton's and Pallas's interpreters."
    )


# ---------------------------------------------------------------------------------------------------------------- chips
def chips(kept: StoredResults) -> str:
    """On which chips kernels ran, for which they only compile, and what of them is known otherwise."""
    timed = [(row["backend"], row["op"], run.device) for row, run in kept.rows("bench") if row["subject"]]
    checked = [(r.backend, r.op, r.device) for r in ran(kept) if r.how == "compiled" and not r.profile and r.passed]
    built = {row["target"] for row, _ in kept.rows("compile-matrix")}
    lines = []
    for backend in sorted({b for b, _, _ in checked}):
        devices = sorted({d for b, _, d in [*timed, *checked] if b == backend})
        lines.append(
            f"* {' and '.join(devices)}: {backend.capitalize()}, {_named({o for b, o, _ in checked if b == backend})}."
        )
    text = ["**Run, checked and timed:**", "\n".join(lines)] if lines else []
    here = {r.target.arch for r in ran(kept) if r.how == "compiled"}
    lines = []
    for platform, machines in MACHINES.items():
        names = [h.product for t, h in targets.HARDWARE.items() if t in built - here and h.platform == platform]
        lines += [f"* {machines}: {', '.join(names)}."] if names else []
    text += ["**Compiled for, and never run on:**", "\n".join(lines)] if lines else []
    return "\n\n".join(text) or "Nothing was run or compiled yet."


def _named(ops: Collection[str]) -> str:
    """How many ops, and whether their gradients are among them."""
    gradients = {op for op in ops if registry.forward_of(registry.find_spec(op))}
    forward = len(ops) - len(gradients)
    return f"{forward} ops" + (
        " and their gradients" if len(gradients) == forward else f" and {len(gradients)} gradients" if gradients else ""
    )


# -------------------------------------------------------------------------------------------------------------- porting
@dataclass(frozen=True)
class Port:
    """The kernels of a backend for a kind of machine, or for some architectures of it.

    Attributes:
      families: those that hold the kernels; new: those that no port before this one has.
      only: whether the backend has no other kernels for that machine. last: the backend's last family, of which a
        check is that names no variant.
    """

    name: str
    backend: str
    platform: str
    families: tuple[Family, ...]
    new: tuple[Family, ...]
    only: bool
    last: str

    @property
    def widest(self) -> bool:
        """Whether they are for all architectures of the machine."""
        return not any(f.targets for f in self.families)

    def compiled(self, row: Row) -> bool:
        """Whether a row of what was compiled, run or timed for a chip is of these kernels."""
        platform = chip.platform if (chip := targets.HARDWARE.get(row["target"])) else row["target"].partition(" ")[0]
        variant = row.get("variant")
        ours = variant in {f.name for f in self.families} if variant else self.widest or self.only
        return row["backend"] == self.backend and platform == self.platform and ours

    def checked(self, r: Ran) -> bool:
        """Whether a check is of these kernels, wherever it ran."""
        return r.backend == self.backend and (r.variant or self.last) in {f.name for f in self.families}


def _ports() -> list[Port]:
    """The portable kernels of each kind of machine, then those for some architectures."""
    found: list[Port] = []
    seen: set[str | None] = set()
    for narrow in (False, True):
        for platform in MACHINES:
            for b in registry.backends().values():
                here = [f for f in b.declared if b.auto and f.compiler and platform in f.platforms]
                families = tuple(f for f in here if bool(f.targets) == narrow)
                if families:
                    new = tuple(f for f in families if f.package not in seen)
                    seen |= {f.package for f in families}
                    chips = ", ".join(sorted({t for f in families for t in f.targets}))
                    name, only = f"{b.name.capitalize()}, {chips or MACHINES[platform]}", len(families) == len(here)
                    found.append(Port(name, b.name, platform, families, new, only, b.declared[-1].name))
    return found


def porting(kept: StoredResults) -> str:
    """What each port cost and what is known of it: a column a port, a line a question."""
    ports, written = _ports(), lines.written(kept)
    body: dict[str, list[str]] = {}
    for port in ports:
        for question, answer in _answers(kept, port, written).items():
            body.setdefault(question, []).append(answer)
    rows = [[question, *answers] for question, answers in body.items()]
    shown = table(["port", *(p.name for p in ports)], rows, words=len(ports) + 1)
    notes = [*([AGED] if STALE in shown else []), _notes(kept)]
    return "\n\n".join([shown, textwrap.fill(" ".join(notes), 118)])


def _answers(kept: StoredResults, port: Port, written: dict[str, dict[str, tuple[int, int]]]) -> dict[str, str]:
    packages = {str(f.package).rpartition("backends.")[2] for f in port.new}
    packages |= {f"{port.backend}.lib"} if port.widest and port.new else set()
    counted = [found for there in written.values() for p, found in there.items() if p in packages]
    total, own = sum(n for n, _ in counted), sum(alone for _, alone in counted)
    built = [row for row, _ in kept.rows("compile-matrix") if port.compiled(row)]
    spilling = sum(any(k.get("spills") for k in row["kernels"]) for row in built)
    mine = [r for r in ran(kept) if port.checked(r)]
    return {
        "lines of code in the ops' files": f"{total:,}" if total else "0: the same files",
        "of these in no other backend's file of the op": f"{own / total:.0%}" if total else NONE,
        "typical calls that compile": f"{sum(r['ok'] for r in built)} of {len(built)}" if built else UNKNOWN,
        "of these with spilled registers": f"{spilling}" if built else UNKNOWN,
        "cases checked": _checked(mine, port.platform),
        "processor time to check an op": _check_seconds(mine),
        "speed": _speed(kept, port),
    }


def _checked(mine: Sequence[Ran], platform: str) -> str:
    """Cases by what ran them: hardware, an emulator of it, an interpreter."""
    found = {"on hardware": 0, "emulated": 0, "interpreted": 0}
    for r in mine:
        if r.how == "compiled" and r.target.platform == platform:
            found["on hardware"] += r.cases
        elif r.how == "emulated" and r.target.platform == platform:
            found["emulated"] += r.cases
        elif r.how == "interpreted":
            found["interpreted"] += r.cases
    return ", ".join(f"{n:,} {how}" for how, n in found.items() if n) or UNKNOWN


def _check_seconds(mine: Sequence[Ran]) -> str:
    seconds = [r.seconds for r in mine if r.seconds and r.how == "interpreted"]
    return f"{statistics.median(seconds):.0f} s ({min(seconds):.0f} to {max(seconds):.0f})" if seconds else UNKNOWN


def _speed(kept: StoredResults, port: Port) -> str:
    """Beside the best peer where hardware ran it, beside the best other program by static cycles where none did."""
    found: dict[str, dict[tuple[str, str], float]] = {}
    aged: set[str] = set()
    for row, run in kept.rows("bench"):
        if row["subject"] and row.get("ratio") and port.compiled(row):
            calls, call = found.setdefault(run.device, {}), (row["op"], row["call"])
            calls[call] = max(row["ratio"], calls.get(call, 0.0))
            aged |= {run.device} if changed(row, kept.root) else set()
    if found:
        each = (
            f"{device.removeprefix('NVIDIA ')}: {_spread([*calls.values()])}{STALE * (device in aged)}"
            for device, calls in sorted(found.items())
        )
        return "; ".join(each)
    static = [1 / max(over) for over in _static(kept, port)]
    return f"not measured; by static cycles {_spread(static)}" if static else UNKNOWN


def _static(kept: StoredResults, port: Port) -> list[list[float]]:
    """Of each case of a platform its cycles over those of every other program."""
    return [
        over
        for row, _ in kept.rows("tpu-cycles")
        if port.platform == targets.HARDWARE[row["target"]].platform
        and (over := [v for n, v in row.items() if n.startswith("over_") and v])
    ]


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _notes(kept: StoredResults) -> str:
    """What the table's figures are, and how far two static counts of one kernel are apart."""
    kernels = [
        Kernel("", **{n: v for n, v in k.items() if v is not None})
        for row, _ in kept.rows("compile-matrix")
        for k in row["kernels"]
    ]
    apart = sorted(k.cycles / k.issued for k in kernels if k.cycles and k.issued)
    said = (
        "Lines: lines of code. Processor time: up to 200 interpreted cases, the median of the ops and the extremes. "
        "Speed: the best peer's time divided by portakern's, the median of the calls and the extremes; above 1 is "
        "faster. By static cycles: the same relative to XLA's and JAX's own programs. No chip has confirmed a static "
        "count."
    )
    if apart:
        few = len(apart) // 20
        said += (
            " libtpu's estimate divided by the issue cycles of a kernel is "
            f"{statistics.median(apart):.2f} ({apart[few]:.2f} to {apart[-1 - few]:.2f} for 90% of the kernels): "
            "ratios have the same uncertainty."
        )
    return said
