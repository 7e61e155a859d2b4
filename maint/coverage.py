"""Which ops were compiled, interpreted, simulated, run and timed on each backend, counted from the stored results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from maint import lines
from maint.markdown import link, table
from maint.measurements import AGED, STALE, Row, StoredResults, changed
from portakern.core import registry, targets
from portakern.core.backend import Backend
from portakern.core.targets import Target
from portakern.results import Result

__all__ = ["Ran", "ran", "reach"]

MACHINES = {"cuda": "NVIDIA GPUs", "rocm": "AMD GPUs", "tpu": "TPUs", "cpu": "CPUs"}
SUBJECT = re.compile(
    r"(?P<backend>\S+) on (?P<target>[^(]+) \((?P<how>\w+)\)"
    r"(?:, variant (?P<variant>\w+))?(?:, profile (?P<profile>[\w-]+))?"
)
"""How :class:`portakern.testing.subject.Subject` calls what it checks."""
COLUMNS = ("machines", "kernels", "compiled", "interpreted", "simulated", "emulated", "run there", "timed there")
NO = "not measured"
NOTES = (
    f"Counted from {link('benchmarks/results')}, gradients included. Compiled: typical calls, ahead of time. "
    "Simulated: in a stricter interpreter. Emulated: machine code, [not on "
    "hardware](docs/how-to/amd-and-intel.md#without-the-hardware). Every element of every drawn case was compared with "
    f"the oracle, under a derived error bound. {NO.capitalize()}: no stored result covers it."
)


@dataclass(frozen=True)
class Ran:
    """A stored check: backend and target, how it ran, the op and the number of its cases. ``aged``: its sources have
    changed since; ``seconds``: processor time."""

    backend: str
    target: Target
    how: str
    variant: str | None
    profile: str | None
    op: str
    cases: int
    passed: bool
    device: str
    aged: bool
    seconds: float | None = None


def ran(kept: StoredResults) -> Iterator[Ran]:
    """Every kept check of a backend's op. A bare function that was checked is nobody's port, and left out."""
    for row, result in kept.rows("conformance"):
        said = SUBJECT.fullmatch(row["subject"])
        if said:
            platform, _, arch = said["target"].partition(" ")
            yield Ran(
                said["backend"], Target(platform, arch), said["how"], said["variant"], said["profile"],
                row["op"], row["examples"], row["passed"], result.device, changed(row, kept.root),
                row.get("seconds"),
            )  # fmt: skip


def reach(kept: StoredResults) -> str:
    """A line for each kind of machine and backend with kernels for it."""
    ops, found = len(lines.ops(kept.root)), list(ran(kept))
    built = [row for row, _ in kept.rows("compile-matrix")]
    timed = [(row, r) for row, r in kept.rows("bench") if row["subject"] and row.get("median_us")]
    known = {p: {t for t, h in targets.HARDWARE.items() if h.platform == p} for p in MACHINES}
    body = []
    for platform, machines in MACHINES.items():
        for b in registry.backends().values():
            written_for = {p for f in b.declared for p in f.platforms if f.compiler}  # whether or not they are here
            if not b.auto or b.oracle or platform not in written_for:
                continue
            of_b = [x for x in timed if x[0]["backend"] == b.name]
            off = [r for r in found if r.backend == b.name and _meant_for(r, b, platform)]
            there = [r for r in found if r.backend == b.name and r.target.platform == platform]
            here = [r for r in there if r.how == "compiled"]
            body.append(
                [
                    machines,
                    b.name,
                    _compiled([r for r in built if r["backend"] == b.name and r["target"] in known[platform]], ops),
                    _checked([r for r in off if r.how == "interpreted" and not r.profile], ops),
                    _checked([r for r in [*off, *here] if r.profile], ops),
                    _checked([r for r in there if r.how == "emulated"], ops),
                    _checked([r for r in here if not r.profile], ops),
                    _timed([x for x in of_b if str(x[0].get("target")).startswith(platform)], ops, kept.root),
                ]
            )
    shown = table(COLUMNS, body, words=len(COLUMNS))
    devices = sorted({r.device for r in found if r.how == "compiled" and not r.profile} | {r.device for _, r in timed})
    where = f"Run and timed on: {', '.join(devices)}. " if devices else ""
    return "\n\n".join([shown, *([AGED] if STALE in shown else []), where + NOTES])


def _meant_for(r: Ran, b: Backend, platform: str) -> bool:
    """Whether what ran on a CPU are the kernels that a platform gets compiled. Checks of before there were variants
    were of the last family, the one for all architectures."""
    own = [f for f in b.declared if (r.variant or b.declared[-1].name) == f.name and f.interprets]
    return r.target.platform == "cpu" and any(platform in f.platforms for f in own)


def _share(names: Iterable[str], ops: int) -> str:
    found = len(set(names))
    return f"all {ops} ops" if found == ops else f"{found} of {ops} ops"


def _compiled(rows: list[Row], ops: int) -> str:
    """The ops that compile and fit on every architecture that was tried, and how many these are."""
    if not rows:
        return NO
    wrong = {r["op"] for r in rows if not r["ok"]}
    tried = len({r["target"] for r in rows})
    return f"{_share({r['op'] for r in rows} - wrong, ops)}, {tried} architecture{'' if tried == 1 else 's'}"


def _checked(found: list[Ran], ops: int) -> str:
    """The ops that passed, and how many cases these are: an op of few is not lost in the others' sum."""
    if not found:
        return NO
    failed = sorted({r.op for r in found if not r.passed})
    cases = Counter[str]()
    for r in found:
        cases[r.op] += r.cases
    least, most = min(cases.values()), max(cases.values())
    each = f"{most}" if least == most else f"{least} to {most}"
    said = [_share({*cases} - {*failed}, ops), f"{cases.total():,} cases, {each} an op"]
    said += [f"**failed**: {', '.join(failed)}"] if failed else []
    return ", ".join(said) + (STALE if any(r.aged for r in found) else "")


def _timed(rows: list[tuple[Row, Result]], ops: int, root: Path) -> str:
    if not rows:
        return NO
    mark = STALE if any(changed(row, root) for row, _ in rows) else ""
    return f"{_share((row['op'] for row, _ in rows), ops)}{mark}"
