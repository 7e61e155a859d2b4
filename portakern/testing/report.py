"""The report of a check: what was compared, what failed, and what was not checked."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from portakern.errors import NotEmulatedError
from portakern.testing.cases import Case
from portakern.testing.coverage import PARTS, Coverage
from portakern.testing.verdict import KINDS

__all__ = ["Failure", "Report"]


ENDS = {"refused": "refused", "crashed": "crashed", "hung": "hung", "memory": "ran out of memory"}
"""Kinds of failure that are no output, and the outcome of each."""

OUTCOMES = {"bounds": "wrong", **ENDS, "edges": "other edges", "promises": "broke a promise"}
"""Kind of failure -> outcome of a check, the most severe first. Reports list failures in this order."""

UNFINISHED, NOT_RUN, REFUSED, MOSTLY_REFUSED = "unfinished", "not run", "refused", "mostly refused"

LEAST, HALF = 1 / 7, 1 / 2
"""Limits of the acceptance rate. Below LEAST no check passes; below HALF the report says how many cases were refused.
Half of the cases have the op's first dtype, and at most three other dtypes share the other half: a kernel that accepts
a single dtype is compared on at least a sixth of the cases. Of the kernels here, those that refuse the most (head
dimensions that are no multiple of 8) are compared on 48 %."""

MOST = sys.float_info.max


@dataclass(frozen=True)
class Failure:
    """A failing case.

    Attributes:
      op: the op's name; what: the failure in words.
      case: the case as JSON, for :func:`replay`; reproduce: a shell command or Python line that runs it again.
      kind: "bounds", "edges" (NaN and infinities give other results than the formula) or "promises" (see
        :data:`portakern.testing.verdict.KINDS`), or what ended the check (see ENDS).
      cause: the broken promise (:data:`portakern.testing.verdict.PROMISES`), or for a wrong output the likely mistake
        in one word; explanation: the same in words.
    """

    op: str
    what: str
    case: str
    reproduce: str
    kind: str = "bounds"
    cause: str = ""
    explanation: str = ""

    def __str__(self) -> str:
        about = "the promise: " if self.kind == "promises" else "looks like: "
        looks = f"\n  {about}{self.explanation}" if self.explanation else ""
        return f"{self.op}: {self.what}{looks}\n  reproduce: {self.reproduce}"


@dataclass
class Report:
    """The result of a check.

    Attributes:
      op, subject: the op, and its backend, device and how it ran (compiled or interpreted).
      seed: the seed of the run; examples: cases that ran and were compared; a wrong one counts once.
      failures: failing cases, shrunk, at most one of each kind, the most severe first.
      checked: the kinds that were checked; without "promises" if these were not requested.
      not_required: what was not required of the implementation, in words.
      worst: output name -> largest error / error bound, failures included; inf for an unexpected or missing NaN or
        infinity. worst_case: the case with the largest value.
      refused: reason -> number of cases refused for it. The backend declares all of them (an undeclared refusal is a
        failure).
      not_emulated: feature that the emulator lacks -> number of cases and laws that need it.
      tilings_refused: reason -> number of drawn tilings that were not legal for their case, which then ran with the
        default.
      combinations: "dtype | regime | edge | tiling" -> number of compared cases.
      layouts, edges, laws: name -> number of compared cases.
      parts: of a check in parts, along which dimension compared cases were cut, and what was compared -> their number,
        and that of cases that no rule allows to be cut.
      left_out: cases that were not run: the time ended or the check was interrupted. left_out_by_name: edge, or else
        regime of values -> number of those cases that have it, or may have it if they were not drawn; "law " and its
        name -> instances that were not run.
      coverage: subject -> the parts of the op's spec that compared cases covered (``not_covered`` names the others).
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
    combinations: Counter[str] = field(default_factory=Counter)
    layouts: Counter[str] = field(default_factory=Counter)
    edges: Counter[str] = field(default_factory=Counter)
    laws: Counter[str] = field(default_factory=Counter)
    parts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    checked: tuple[str, ...] = KINDS
    not_required: tuple[str, ...] = ()
    left_out: int = 0
    left_out_by_name: Counter[str] = field(default_factory=Counter)
    coverage: dict[str, Coverage] = field(default_factory=dict)

    def add_failure(self, failure: Failure) -> None:
        """Add a failure, sorted by severity."""
        self.failures = _by_gravity([*self.failures, failure])

    def add_errors(self, fractions: Mapping[str, float], case: Case) -> None:
        """Add the largest error / error bound of each output of a case."""
        for name, fraction in fractions.items():
            if fraction >= max(self.worst.values(), default=0.0):
                self.worst_case = case.to_json()
            self.worst[name] = max(self.worst.get(name, 0.0), fraction)

    def add_refusal(self, error: Exception) -> None:
        """Count a refusal that is declared, or a case that an emulator cannot run."""
        counted = self.not_emulated if isinstance(error, NotEmulatedError) else self.refused
        counted[str(error).partition("cannot: ")[2] or str(error)] += 1

    def cover(self, what: str, name: str) -> None:
        """Record that a part of the spec was covered (:data:`portakern.testing.coverage.PARTS`)."""
        self.coverage.setdefault(self.subject, Coverage()).cover(what, name)

    @property
    def not_reached(self) -> tuple[str, ...]:
        """The regimes of values, edges and laws of the cases left out that no compared case has."""
        compared = {word for combination in self.combinations for word in combination.split(" | ")[1:3]}
        compared |= {f"law {name}" for name in self.laws}
        return tuple(name for name in self.left_out_by_name if name not in compared)

    @property
    def reached(self) -> Counter[str]:
        """Edge, or else regime of values, or law -> number of compared cases; names as in ``left_out_by_name``."""
        found = Counter({f"law {name}": count for name, count in self.laws.items()})
        for combination, count in self.combinations.items():
            _, regime, edge, _ = combination.split(" | ")
            found[regime if edge == "-" else edge] += count
        return found

    @property
    def not_covered(self) -> dict[str, tuple[str, ...]]:
        """The edges, laws, regimes of values, dtypes, arguments, layouts, tilings and variants that no compared case
        covered, by name. The verdict does not include them."""
        seen = self.coverage.values()
        left = {w: dict.fromkeys(n for v in seen for n in v.missing().get(w, ())) for w in PARTS}
        compared = {n for v in seen for n in v.covered.get("variants", ())}  # each is a subject of its own
        left["variants"] = dict.fromkeys(n for n in left["variants"] if n not in compared)
        return {w: tuple(names) for w, names in left.items() if names}

    @property
    def compared(self) -> int:
        """Cases and instances of laws that were compared."""
        return self.examples + sum(self.laws.values())

    @property
    def acceptance_rate(self) -> float:
        """The fraction of cases that were not refused."""
        return self.compared / max(1, self.compared + sum(self.refused.values()))

    @property
    def passed(self) -> bool:
        """Whether nothing that was checked failed; ``not_covered`` and ``caveats`` name what was not checked."""
        return not self.failures and self.compared > 0 and not self.not_reached and self.acceptance_rate >= LEAST

    @property
    def caveats(self) -> tuple[str, ...]:
        """What limits the verdict, in words: each part of the contract that was not required, and the number of refused
        cases if it is more than half."""
        refused = sum(self.refused.values())
        few = self.compared and self.acceptance_rate < HALF
        counts = [f"{refused} of {self.compared + refused} cases were refused"] if few else []
        return (*(f"not required: {words}" for words in self.not_required), *counts)

    @property
    def verdicts(self) -> dict[str, bool | None]:
        """Kind -> whether it holds. None: not requested, or the check ended earlier, at a wrong element."""
        broken = {f.kind for f in self.failures}
        ended = bool({"bounds", *ENDS} & broken) or (not self.passed and not broken)
        return {k: False if k in broken else None if ended or k not in self.checked else True for k in KINDS}

    @property
    def verdict(self) -> str:
        """The verdict in words: passed, and how much of the spec was not covered; or the kinds that failed and those
        that held; or why it is incomplete."""
        if self.passed:
            text = "passed" if self.checked == KINDS else f"passed: {' and '.join(self.checked)}"
            return text + (f"; not covered: {self._counts_not_covered}" if self.not_covered else "")
        if not self.failures:
            return {
                UNFINISHED: f"{UNFINISHED}: not reached: {', '.join(self.not_reached)}",
                NOT_RUN: f"{NOT_RUN}: no case was started",
                MOSTLY_REFUSED: f"{MOSTLY_REFUSED}: {sum(self.refused.values())} cases, {self.compared} compared",
                REFUSED: f"{REFUSED}: every case",
            }.get(self.outcome, self.outcome)
        failed, held = ([k for k, v in self.verdicts.items() if v is value] for value in (False, True))
        failed += [OUTCOMES[f.kind] for f in self.failures if f.kind in ENDS]
        text = f"FAILED: {' and '.join(failed)}"
        return f"{text}; {' and '.join(held)} held" if held else text

    @property
    def _counts_not_covered(self) -> str:
        """The numbers that were not covered, e.g. "13 of 14 edges, 1 of 3 dtypes"."""
        declared = {w: len({n for v in self.coverage.values() for n in v.declared.get(w, ())}) for w in PARTS}
        return ", ".join(f"{len(names)} of {declared[w]} {w}" for w, names in self.not_covered.items())

    @property
    def outcome(self) -> str:
        """The verdict in a few words: right (nothing that was checked failed), wrong, other edges, broke a promise,
        refused, mostly refused, crashed, hung, ran out of memory; unfinished, not run (the time ended or the check was
        interrupted); "nothing compared"."""
        for failure in self.failures:
            return OUTCOMES[failure.kind]
        if self.not_reached:
            return UNFINISHED if self.compared else NOT_RUN
        if self.compared:
            return "right" if self.passed else MOSTLY_REFUSED
        return REFUSED if self.refused else "nothing compared"

    def __str__(self) -> str:
        lines = [f"{self.op} on {self.subject}: {self.verdict} ({self.compared} compared, seed {self.seed})"]
        if self.passed:  # else it ended early
            lines += [f"  not covered: {what}: {', '.join(names)}" for what, names in self.not_covered.items()]
        lines += [f"  {caveat}" for caveat in self.caveats]
        return "\n".join([*lines, *map(str, self.failures)])

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        plain = {k: dict(sorted(v.items())) if isinstance(v, Counter) else v for k, v in plain.items()}
        plain["coverage"] = {subject: v.to_dict() for subject, v in self.coverage.items()}
        plain["worst"] = {n: min(w, MOST) for n, w in self.worst.items()}  # JSON has no infinity
        derived = {"verdicts": self.verdicts, "outcome": self.outcome, "passed": self.passed}
        derived |= {"not_covered": {what: list(names) for what, names in self.not_covered.items()}}
        lists = {n: list(getattr(self, n)) for n in ("checked", "not_required", "not_reached", "caveats")}
        return {**plain, **derived, **lists, "failures": [asdict(f) for f in self.failures]}

    def merge(self, other: Report) -> Report:
        """Combine the reports of two shards of a check; seconds add up."""
        worst = {k: max(self.worst.get(k, 0.0), other.worst.get(k, 0.0)) for k in {**self.worst, **other.worst}}
        worse = max(other.worst.values(), default=0.0) > max(self.worst.values(), default=0.0)
        subject = self.subject if other.subject in self.subject else f"{self.subject}; {other.subject}"
        first, second = self.coverage, other.coverage
        sums = (
            "examples", "refused", "not_emulated", "tilings_refused", "combinations", "layouts", "edges", "laws",
            "parts", "left_out", "left_out_by_name", "seconds",
        )  # fmt: skip
        return Report(
            self.op,
            subject,
            self.seed,
            worst=worst,
            worst_case=other.worst_case if worse else self.worst_case,
            failures=_by_gravity([*self.failures, *other.failures]),
            coverage={s: first.get(s, Coverage()).merged(second.get(s, Coverage())) for s in {**first, **second}},
            checked=self.checked,
            not_required=tuple(dict.fromkeys((*self.not_required, *other.not_required))),
            **{name: getattr(self, name) + getattr(other, name) for name in sums},
        )

    def add_case(self, case: Case, tiling: str) -> None:
        self.examples += 1
        self.combinations[f"{case.dtype} | {case.regime} | {case.edge or '-'} | {tiling}"] += 1
        self.layouts.update({*case.layouts.values()} or {"contiguous"})
        if case.edge:
            self.edges[case.edge] += 1
        self.coverage.setdefault(self.subject, Coverage()).add_case(case, tiling)


def _by_gravity(failures: list[Failure]) -> list[Failure]:
    """The most severe first: wrong values, then what ended a case, then edges, then promises."""
    return sorted(failures, key=lambda f: [*OUTCOMES].index(f.kind))
