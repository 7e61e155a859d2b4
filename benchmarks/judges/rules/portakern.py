"""portakern's own checker, on what it draws by itself."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import portakern as pk
from benchmarks.judges.rule import Rule, Source, Verdict, arguments, normal, tasks_of
from benchmarks.judges.subject import EXPECTED, Candidate, Subject
from portakern.core import registry
from portakern.testing import Report

__all__ = ["RULES"]

EXAMPLES = {"numpy": 200, "torch": 200, "jax": 60}
"""Cases by framework: JAX's functions are compiled anew for each shape."""
ON_SHAPES = 12


def forward(subject: Subject) -> str:
    found = registry.forward_of(subject.spec) if subject.spec.is_vjp else subject.spec
    assert found is not None
    return found.name


class Portakern(Rule):
    name, title = "portakern", "portakern"
    sources = (Source("this repository", "portakern/testing/", "this commit"),)
    rule = (
        "every element within the error that rounding can cause, derived for the op, against float64; typical errors "
        "where random rounding puts them; NaN and infinities where the formula leads them; inputs left alone, results "
        "in memory of their own that later calls leave alone"
    )
    inputs = (
        "200 cases (60 for JAX) drawn from the op's signature and edges: dtypes, shapes, strides, options, kinds of "
        "value, called two times and more; then 12 on a shape like those of the harnesses"
    )
    gradients = True

    def own(self, op: str) -> bool:
        return True

    def judge(self, subject: Subject) -> Verdict:
        """Rejected: it did not pass on cases drawn from the op, or on a shape like the harnesses' own. Kernels that are
        interpreted are asked the first alone."""
        start = time.perf_counter()
        asked = {"max_examples": EXAMPLES[subject.framework], "promises": EXPECTED, **subject.asked()}
        if "backend" not in asked:
            asked |= {"fn": subject.make(), "framework": subject.framework}
        report = self.report(subject, asked)
        shapes = [] if "backend" in asked or "shapes" in asked else self.shapes(subject)
        if report.passed and shapes:
            report = self.report(subject, asked | {"max_examples": ON_SHAPES, "shapes": shapes})
        why = "; ".join(f"{f.kind}: {f.what}" for f in report.failures)
        return Verdict(not report.passed, " ".join(why.split())[:200], round(time.perf_counter() - start, 4))

    def shapes(self, subject: Subject) -> list[dict[str, tuple[int, ...]]]:
        """Those of an op that all harnesses without a task of their own are given; none for an op that is new."""
        candidate = Candidate(subject)
        tasks = tasks_of((), "float32", normal()).get(forward(subject), ())
        drawn = (arguments(task, candidate, np.random.default_rng(0)).arrays for task in tasks)
        return [{n: a.shape for n, a in arrays.items()} for arrays in drawn]

    def report(self, subject: Subject, asked: dict[str, Any]) -> Report:
        with np.errstate(all="ignore"):
            return pk.check(subject.op, seed=0, shrink=False, **asked)

    def trials(self, candidate: Candidate) -> Any:
        raise NotImplementedError("the checker is asked as its users ask it")


RULES = (Portakern(),)
