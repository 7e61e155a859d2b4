"""The report of a check."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from portakern.errors import NotEmulatedError
from portakern.testing.cases import Case
from portakern.testing.verdict import KINDS
from portakern.testing.visits import WHAT, Visits

__all__ = ["Failure", "Report"]


ENDS = {"refused": "refused", "crashed": "crashed", "hung": "hung", "memory": "ran out of memory"}
"""Kinds of failure that are no output, and the outcome of each."""

OUTCOMES = {"bounds": "wrong", **ENDS, "edges": "other edges", "promises": "broke a promise"}
"""Kind of failure -> outcome of a check, the gravest first: so failures are told."""

UNFINISHED, NOT_RUN, REFUSED, MOSTLY_REFUSED = "unfinished", "not run", "refused", "mostly refused"

LEAST, HALF = 1 / 7, 1 / 2
"""Shares of the cases that were compared and not refused: with less than LEAST no check passes, with less than HALF the
verdict says so. Every second case is of the first dtype and at most three dtypes share the others: what takes any one
of its op's dtypes alone, and of that all, is compared on about a sixth or more. The kernels here that refuse most by
what they declare, for head dimensions that are no multiple of 8, are compared on 48 %."""

MOST = sys.float_info.max


@dataclass(frozen=True)
class Failure:
    """A failing case.

    Attributes:
      op: the op's name; what: the failure in words.
      case: the case as JSON, for :func:`replay`; reproduce: a shell command or Python line that runs it again.
      kind: "bounds", "edges" (NaN and infinities give other results than the formula) or "promises" (see
        :data:`portakern.testing.verdict.KINDS`), or what ended the check (see ENDS).
      which: the broken promise (:data:`portakern.testing.verdict.PROMISES`), or for a wrong output the likely mistake
        in one word; looks: the same in words.
    """

    op: str
    what: str
    case: str
    reproduce: str
    kind: str = "bounds"
    which: str = ""
    looks: str = ""

    def __str__(self) -> str:
        about = "the promise: " if self.kind == "promises" else "looks like: "
        looks = f"\n  {about}{self.looks}" if self.looks else ""
        return f"{self.op}: {self.what}{looks}\n  reproduce: {self.reproduce}"


@dataclass
class Report:
    """The result of a check.

    Attributes:
      op, subject: the op, and its backend, device and how it ran (compiled or interpreted).
      seed: the seed of the run; examples: cases that ran and were compared; a wrong one counts once.
      failures: failing cases, shrunk, at most one of each kind, the most severe first.
      asked: the kinds that were checked; without "promises" if these were not requested.
      concessions: what was not required of the implementation, in words.
      worst: output name -> largest error / error bound, failures included; inf for an unexpected or missing NaN or
        infinity. worst_case: the case with the largest value.
      refused: reason -> number of cases refused for it. The backend declares all of them (an undeclared refusal is a
        failure).
      not_emulated: feature that the emulator lacks -> number of cases and laws that need it.
      tilings_refused: reason -> number of drawn tilings that were not legal for their case, which then ran with the
        default.
      cells: "dtype | regime | edge | tiling" -> number of compared cases.
      layouts, edges, laws: name -> number of compared cases.
      left_out: cases that were not run: the time ended or the check was interrupted. missed: edge, or else regime of
        values -> number of those cases that have it, or may have it if they were not drawn; "law " and its name ->
        instances that were not run.
      visits: subject -> the parts of the op's spec that were covered (``unvisited`` names the others).
      seconds: wall time.
    """

    op: str
    subject: str
    seed: int
    examples: int = 0
    failures: list[Failure] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    worst_case: str = ""
    refused: Counter[str] = field(default_factory=Counter)
    not_emulated: Counter[str] = field(default_factory=Counter)
    tilings_refused: Counter[str] = field(default_factory=Counter)
    cells: Counter[str] = field(default_factory=Counter)
    layouts: Counter[str] = field(default_factory=Counter)
    edges: Counter[str] = field(default_factory=Counter)
    laws: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    asked: tuple[str, ...] = KINDS
    concessions: tuple[str, ...] = ()
    left_out: int = 0
    missed: Counter[str] = field(default_factory=Counter)
    visits: dict[str, Visits] = field(default_factory=dict)

    def fail(self, failure: Failure) -> None:
        """Add a failure, sorted by severity."""
        self.failures = _by_gravity([*self.failures, failure])

    def note(self, fractions: Mapping[str, float], case: Case) -> None:
        """Add the largest error / error bound of each output of a case."""
        for name, fraction in fractions.items():
            if fraction >= max(self.worst.values(), default=0.0):
                self.worst_case = case.to_json()
            self.worst[name] = max(self.worst.get(name, 0.0), fraction)

    def refuse(self, error: Exception) -> None:
        """Count a refusal that is declared, or a case that an emulator cannot run."""
        counted = self.not_emulated if isinstance(error, NotEmulatedError) else self.refused
        counted[str(error).partition("cannot: ")[2] or str(error)] += 1

    def meet(self, what: str, name: str) -> None:
        """Record that a part of the spec was covered (:data:`portakern.testing.visits.WHAT`)."""
        self.visits.setdefault(self.subject, Visits()).meet(what, name)

    @property
    def unmet(self) -> tuple[str, ...]:
        """The regimes of values, edges and laws of the cases left out that no compared case has."""
        met = {word for cell in self.cells for word in cell.split(" | ")[1:3]}
        met |= {f"law {name}" for name in self.laws}
        return tuple(name for name in self.missed if name not in met)

    @property
    def met(self) -> Counter[str]:
        """Edge, or else regime of values, or law -> number of compared cases, with the names of ``missed``."""
        met = Counter({f"law {name}": count for name, count in self.laws.items()})
        for cell, count in self.cells.items():
            _, regime, edge, _ = cell.split(" | ")
            met[regime if edge == "-" else edge] += count
        return met

    @property
    def unvisited(self) -> dict[str, tuple[str, ...]]:
        """The edges, laws, regimes of values, dtypes, arguments, layouts, tilings and variants that no compared case
        covered, by name. The verdict does not include them."""
        seen = self.visits.values()
        left = {w: dict.fromkeys(n for v in seen for n in v.without().get(w, ())) for w in WHAT}
        ran = {n for v in seen for n in v.met.get("variants", ())}  # each is a subject of its own
        left["variants"] = dict.fromkeys(n for n in left["variants"] if n not in ran)
        return {w: tuple(names) for w, names in left.items() if names}

    @property
    def ran(self) -> int:
        """Cases and instances of laws that were compared."""
        return self.examples + sum(self.laws.values())

    @property
    def taken(self) -> float:
        """The fraction of cases that were not refused."""
        return self.ran / max(1, self.ran + sum(self.refused.values()))

    @property
    def passed(self) -> bool:
        """Whether nothing that was checked failed; ``unvisited`` and ``conceded`` name what was not checked."""
        return not self.failures and self.ran > 0 and not self.unmet and self.taken >= LEAST

    @property
    def conceded(self) -> tuple[str, ...]:
        """The concessions, and the number of refused cases if it is more than half."""
        refused = sum(self.refused.values())
        few = (f"{refused} of {self.ran + refused} cases were refused",) if self.ran and self.taken < HALF else ()
        return (*self.concessions, *few)

    @property
    def verdicts(self) -> dict[str, bool | None]:
        """Kind -> whether it holds. None: not requested, or the check ended earlier, at a wrong element."""
        broken = {f.kind for f in self.failures}
        ended = bool({"bounds", *ENDS} & broken) or (not self.passed and not broken)
        return {k: False if k in broken else None if ended or k not in self.asked else True for k in KINDS}

    @property
    def verdict(self) -> str:
        """The verdict in words: passed, and how much of the spec was not visited; or the kinds that failed and those
        that held; or why it is incomplete."""
        if self.passed:
            said = "passed" if self.asked == KINDS else f"passed: {' and '.join(self.asked)}"
            return said + (f"; not visited: {self.lacking}" if self.unvisited else "")
        if not self.failures:
            return {
                UNFINISHED: f"{UNFINISHED}: not checked were {', '.join(self.unmet)}",
                NOT_RUN: f"{NOT_RUN}: no case was started",
                MOSTLY_REFUSED: f"{MOSTLY_REFUSED}: {sum(self.refused.values())} cases, {self.ran} compared",
                REFUSED: f"{REFUSED}: every case",
            }.get(self.outcome, self.outcome)
        failed, held = ([k for k, v in self.verdicts.items() if v is value] for value in (False, True))
        failed += [OUTCOMES[f.kind] for f in self.failures if f.kind in ENDS]
        said = f"FAILED: {' and '.join(failed)}"
        return f"{said}; {' and '.join(held)} held" if held else said

    @property
    def lacking(self) -> str:
        """The numbers that were not visited, e.g. "13 of 14 edges, 1 of 3 dtypes"."""
        there = {w: len({n for v in self.visits.values() for n in v.present.get(w, ())}) for w in WHAT}
        return ", ".join(f"{len(names)} of {there[w]} {w}" for w, names in self.unvisited.items())

    @property
    def outcome(self) -> str:
        """The verdict in a few words: right (nothing that was checked failed), wrong, other edges, broke a promise,
        refused, mostly refused, crashed, hung, ran out of memory; unfinished, not run (the time ended or the check was
        interrupted); "nothing compared"."""
        for failure in self.failures:
            return OUTCOMES[failure.kind]
        if self.unmet:
            return UNFINISHED if self.ran else NOT_RUN
        if self.ran:
            return "right" if self.passed else MOSTLY_REFUSED
        return REFUSED if self.refused else "nothing compared"

    def __str__(self) -> str:
        lines = [f"{self.op} on {self.subject}: {self.verdict} ({self.ran} compared, seed {self.seed})"]
        if self.passed:  # else it ended early
            lines += [f"  not visited: {what}: {', '.join(names)}" for what, names in self.unvisited.items()]
        lines += [f"  not required: {words}" for words in self.conceded]
        return "\n".join([*lines, *map(str, self.failures)])

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        plain = {k: dict(sorted(v.items())) if isinstance(v, Counter) else v for k, v in plain.items()}
        plain["visits"] = {subject: v.to_dict() for subject, v in self.visits.items()}
        plain["worst"] = {n: min(w, MOST) for n, w in self.worst.items()}  # JSON has no infinity
        told = {"asked": list(self.asked), "concessions": list(self.concessions), "verdicts": self.verdicts}
        told |= {"outcome": self.outcome, "unmet": list(self.unmet), "told": list(self.conceded)}
        told |= {"unvisited": {w: list(names) for w, names in self.unvisited.items()}}
        return {**plain, **told, "failures": [asdict(f) for f in self.failures], "passed": self.passed}

    def merge(self, other: Report) -> Report:
        """Combine the reports of two shards of a check; seconds add up."""
        worst = {k: max(self.worst.get(k, 0.0), other.worst.get(k, 0.0)) for k in {**self.worst, **other.worst}}
        worse = max(other.worst.values(), default=0.0) > max(self.worst.values(), default=0.0)
        subject = self.subject if other.subject in self.subject else f"{self.subject}; {other.subject}"
        mine, theirs = self.visits, other.visits
        sums = (
            "examples", "refused", "not_emulated", "tilings_refused", "cells", "layouts", "edges", "laws",
            "left_out", "missed", "seconds",
        )  # fmt: skip
        return Report(
            self.op,
            subject,
            self.seed,
            worst=worst,
            worst_case=other.worst_case if worse else self.worst_case,
            failures=_by_gravity([*self.failures, *other.failures]),
            visits={s: mine.get(s, Visits()).with_(theirs.get(s, Visits())) for s in {**mine, **theirs}},
            asked=self.asked,
            concessions=tuple(dict.fromkeys((*self.concessions, *other.concessions))),
            **{name: getattr(self, name) + getattr(other, name) for name in sums},
        )

    def count(self, case: Case, tiling: str) -> None:
        self.examples += 1
        self.cells[f"{case.dtype} | {case.regime} | {case.edge or '-'} | {tiling}"] += 1
        self.layouts.update({*case.layouts.values()} or {"contiguous"})
        if case.edge:
            self.edges[case.edge] += 1
        self.visits.setdefault(self.subject, Visits()).case(case, tiling)


def _by_gravity(failures: list[Failure]) -> list[Failure]:
    """The most severe first: wrong values, then what ended a case, then edges, then promises."""
    return sorted(failures, key=lambda f: [*OUTCOMES].index(f.kind))
