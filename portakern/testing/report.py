"""What a check found."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from portakern.errors import NotEmulatedError
from portakern.testing.cases import Case
from portakern.testing.verdict import KINDS

__all__ = ["Failure", "Report"]


ENDS = {"refused": "refused", "crashed": "crashed", "hung": "hung", "memory": "ran out of memory"}
"""Kinds of failure that are no output, and the outcome of each."""

OUTCOMES = {**ENDS, "bounds": "wrong", "promises": "broke a promise", "edges": "other edges"}
"""Kind of failure -> outcome of a check, the gravest last of what comes before an output."""

UNFINISHED = "unfinished"


@dataclass(frozen=True)
class Failure:
    """A case that broke the contract. ``reproduce`` is a line for a shell or for Python (see :class:`Subject`);
    ``case`` the same for :func:`replay`. ``kind`` says what is broken: "bounds", "edges" (NaN and infinities lead
    elsewhere than in the formula) or "promises" (see :data:`portakern.testing.verdict.KINDS`), or what ended the
    check: see ENDS. ``which``: of a promise, which one (:data:`portakern.testing.verdict.PROMISES`); of a wrong output,
    the mistake that it looks like in one word; ``looks``: that in words."""

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
    """What a check found.

    Attributes:
      op, subject: what was checked, on what (backend, device, compiled or interpreted).
      seed: the seed of the run; examples: cases that ran and were compared.
      failures: broken cases, shrunk by Hypothesis, at most one of a kind; empty when all passed.
      asked: what was held to: "promises" is missing where nobody asked for them.
      concessions: what was not asked of a function because it cannot be given it, in words.
      worst: output name -> largest error as a fraction of what is permitted.
      worst_case: the case that reached it.
      refused: reason -> number of cases refused with it, all of them declared by the backend (an undeclared refusal is
        a failure).
      not_emulated: what stands in for the hardware lacks -> number of cases and laws that it ended.
      tilings_refused: reason -> number of drawn tilings that were not legal for their case, which then ran with the
        default.
      cells: "dtype | regime | edge | tiling" -> number of compared cases.
      layouts, edges, laws: name -> number of compared cases.
      left_out: cases that were not run because the time was up or the check was interrupted; missed: edge or else
        regime of values -> how many of those were of it, or might have been where they had not been drawn; "law " and
        its name -> instances that were not asked.
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

    def refuse(self, error: Exception) -> None:
        """Count a refusal that is declared, or a case that an emulator cannot run."""
        counted = self.not_emulated if isinstance(error, NotEmulatedError) else self.refused
        counted[str(error).partition("cannot: ")[2] or str(error)] += 1

    def leave_out(self, case: Case) -> None:
        """Count a case that the time was up for."""
        self.left_out += 1
        self.missed[case.edge or case.regime] += 1

    @property
    def unmet(self) -> tuple[str, ...]:
        """The regimes of values, the edges and the laws of what was left out, of which nothing was compared."""
        met = {word for cell in self.cells for word in cell.split(" | ")[1:3]}
        met |= {f"law {name}" for name in self.laws}
        return tuple(name for name in self.missed if name not in met)

    @property
    def met(self) -> Counter[str]:
        """Edge or else regime of values, and law -> how many were compared, named as those that were missed."""
        met = Counter({f"law {name}": count for name, count in self.laws.items()})
        for cell, count in self.cells.items():
            _, regime, edge, _ = cell.split(" | ")
            met[regime if edge == "-" else edge] += count
        return met

    @property
    def passed(self) -> bool:
        return not self.failures and self.examples + sum(self.laws.values()) > 0 and not self.unmet

    @property
    def verdicts(self) -> dict[str, bool | None]:
        """Kind -> whether it held. None: nobody asked, or the check ended before it could tell: at a wrong element."""
        broken = {f.kind for f in self.failures}
        ended = bool({"bounds", *ENDS} & broken) or (not self.passed and not broken)
        return {k: False if k in broken else None if ended or k not in self.asked else True for k in KINDS}

    @property
    def verdict(self) -> str:
        """The verdicts in words: passed, or which of them failed and which held."""
        if self.passed:
            return "passed" if self.asked == KINDS else f"passed: {' and '.join(self.asked)}"
        if self.outcome == UNFINISHED:
            return f"{UNFINISHED}: not met were {', '.join(self.unmet)}"
        failed, held = ([k for k, v in self.verdicts.items() if v is value] for value in (False, True))
        failed += [OUTCOMES[f.kind] for f in self.failures if f.kind in ENDS]
        said = f"FAILED: {' and '.join(failed)}" if failed else "FAILED"
        return f"{said}; {' and '.join(held)} held" if failed and held else said

    @property
    def outcome(self) -> str:
        """The verdict in one of a few words: right, wrong, other edges, broke a promise, refused, crashed, hung, ran
        out of memory; "nothing compared" where no case was."""
        kinds = {f.kind for f in self.failures}
        for kind in (*ENDS, "bounds", "promises", "edges"):
            if kind in kinds:
                return OUTCOMES[kind]
        if self.examples and self.unmet:
            return UNFINISHED
        return "right" if self.passed else "refused" if self.refused else "nothing compared"

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}  # asdict() counts a Counter's pairs
        plain = {k: dict(sorted(v.items())) if isinstance(v, Counter) else v for k, v in plain.items()}
        told = {"asked": list(self.asked), "concessions": list(self.concessions), "verdicts": self.verdicts}
        told |= {"outcome": self.outcome, "unmet": list(self.unmet)}
        return {**plain, **told, "failures": [asdict(f) for f in self.failures], "passed": self.passed}

    def merge(self, other: Report) -> Report:
        """This report and that of another shard of the same check, as one; seconds add up."""
        worst = {k: max(self.worst.get(k, 0.0), other.worst.get(k, 0.0)) for k in {**self.worst, **other.worst}}
        worse = max(other.worst.values(), default=0.0) > max(self.worst.values(), default=0.0)
        subject = self.subject if other.subject in self.subject else f"{self.subject}; {other.subject}"
        sums = (
            "examples", "failures", "refused", "not_emulated", "tilings_refused", "cells", "layouts", "edges", "laws",
            "left_out", "missed", "seconds",
        )  # fmt: skip
        return Report(
            self.op,
            subject,
            self.seed,
            worst=worst,
            worst_case=other.worst_case if worse else self.worst_case,
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
