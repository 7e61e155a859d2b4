"""Conformance as pytest tests, one for each case."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from portakern.core.backend import Backend
from portakern.defaults import EXAMPLES
from portakern.errors import SpecError
from portakern.spec import Spec
from portakern.testing.cases import Case
from portakern.testing.check_options import CheckOptions
from portakern.testing.laws import LawCase
from portakern.testing.runner import cases_of, replay_subject, subject_of
from portakern.testing.subject import Subject

__all__ = ["Conformance", "conformance"]

WHAT = ("backend", "variant", "fn", "framework", "device", "profile", "target")
"""Arguments of :func:`portakern.check` that say what is checked; the others say on which cases."""

OF_A_REPORT = {"max_examples", "seed", "seconds", "shrink", "shard", "progress", "until"}
"""Options of a check that a test has in its own words, or that shape a report."""


@dataclass
class Conformance:
    """A kernel and the op that it is checked against; ``how``: other arguments of :func:`portakern.check`."""

    op: str | Spec[Any]
    how: Mapping[str, Any]
    examples: int | None = None
    seed: int | None = None

    @functools.cached_property
    def subject(self) -> Subject:
        return subject_of(self.op, **{n: v for n, v in self.how.items() if n in WHAT})

    def cases(self, examples: int | None, seeds: Sequence[int] | None) -> list[tuple[str, Case | LawCase]]:
        """(id, case); equal examples and seeds give equal cases."""
        count = self.examples or examples or EXAMPLES
        found = []
        for seed in [self.seed] if self.seed is not None else seeds or [0]:
            how = {n: v for n, v in self.how.items() if n not in WHAT}
            for i, case in enumerate(cases_of(self.subject, CheckOptions(max_examples=count, seed=seed, **how))):
                about = case.law if isinstance(case, LawCase) else case.edge or case.regime
                found.append((f"{seed}-{i:03}-{case.dtype}-{about}", case))
        return found

    def hold(self, case: Case | LawCase) -> None:
        """Run a case; fail the test if the case fails."""
        import pytest

        options = {n: v for n, v in self.how.items() if n in ("edges", "promises")}
        report = replay_subject(self.subject, case, **options)
        for failure in report.failures:
            pytest.fail(f"{report.outcome}: {failure}", pytrace=False)
        for reason in (*report.refused, *report.not_emulated):
            pytest.skip(f"refused: {reason}")
        if not report.examples and not report.laws:
            pytest.skip("the kernel lacks an argument that this law needs")


def conformance(
    op: str | Spec[Any],
    fn: Callable[..., Any] | None = None,
    *,
    backend: str | Backend | None = None,
    examples: int | None = None,
    seed: int | None = None,
    **how: Any,
) -> Callable[..., None]:
    """Make a pytest test that checks a kernel against an op's spec, one test per case:

    >>> test_mine = portakern.testing.conformance("softmax", my_softmax, framework="torch", dtypes=["float32"])

    ``pytest --portakern-examples 200 --portakern-seed 7`` sets both for tests that do not. A test id, such as
    ``test_mine[0-017-float32-near_overflow]``, runs one case, with the same examples and seed.

    Args:
      op, fn, backend: as in :func:`portakern.check`.
      examples: number of cases; None: the command line's, else the default of ``check``. seed: seed of the cases.
      how: other arguments of :func:`portakern.check`, except those of the report.

    Raises:
      SpecError: an argument that ``check`` does not have, or that does not apply here.
    """
    known = {*WHAT, *(f.name for f in fields(CheckOptions))} - OF_A_REPORT
    for name in how:
        if name not in known:
            raise SpecError(f"conformance({op!r}): {name!r} is none of {', '.join(sorted(known))}")
    what = {"fn": fn, "backend": backend}
    made = Conformance(op, {**how, **{n: v for n, v in what.items() if v is not None}}, examples, seed)

    def test(portakern_case: Any) -> None:
        made.hold(portakern_case)

    test.__doc__ = f"{op} conforms"
    test.portakern_conformance = made  # type: ignore[attr-defined]
    return test
