"""portakern's own checker, on what it draws by itself."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import portakern as pk
from benchmarks.judges.rule import Rule, Source, Verdict
from benchmarks.judges.subject import Candidate, Subject

__all__ = ["RULES"]

EXAMPLES = {"numpy": 200, "torch": 200, "jax": 30}
"""Cases by framework: JAX's functions are compiled anew for each shape."""


class Portakern(Rule):
    name, title = "portakern", "portakern"
    sources = (Source("this repository", "portakern/testing/", "this commit"),)
    rule = (
        "every element within the error that rounding can cause, derived for the op, against float64; typical errors "
        "where random rounding puts them; NaN and infinities where the formula leads them; and, where it is claimed, "
        "memory of its own, inputs left alone, the same bits for the same row"
    )
    inputs = "cases drawn from the op's signature and edges: dtypes, shapes, strides, options, kinds of value; called three times"
    gradients = True

    def own(self, op: str) -> bool:
        return True

    def judge(self, subject: Subject) -> Verdict:
        """Rejected: wrong, or not what it claims. One that claims nothing is asked for values and edges alone."""
        start = time.perf_counter()
        asked: dict[str, Any] = dict(subject.asked())
        if "backend" not in asked:
            asked |= {"fn": subject.make(), "framework": subject.framework}
        asked = {"max_examples": EXAMPLES[subject.framework], "promises": subject.claims} | asked
        with np.errstate(all="ignore"):
            report = pk.check(subject.op, seed=0, shrink=False, **asked)
        why = "; ".join(f"{f.kind}: {f.what}" for f in report.failures)
        return Verdict(not report.passed, " ".join(why.split())[:200], round(time.perf_counter() - start, 4))

    def trials(self, candidate: Candidate) -> Any:
        raise NotImplementedError("the checker is asked as its users ask it")


RULES = (Portakern(),)
