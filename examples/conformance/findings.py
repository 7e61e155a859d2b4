"""What a check found out about somebody else's kernel.

A finding is a case that shows it, and the region of the contract that the rest of the check leaves out for it.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import portakern as pk
from portakern import testing

__all__ = ["Finding", "apart_from", "finite", "overflows", "replay", "show"]


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    ``case`` shows it on the bare adapter (or on ``fn``); ``where(**arguments)`` says which calls are left out of the
    check because of it. An empty case: not a fault, but something that the kernel declares not to do.
    """

    what: str
    case: str = ""
    where: Callable[..., bool] = lambda **arguments: False
    fn: Callable[..., Any] | None = None


def finite(*arrays: Any) -> bool:
    """Whether arrays of torch or JAX hold no NaN and no infinity."""
    return all(bool((abs(a) < float("inf")).all()) for a in arrays)


def overflows(q: Any, k: Any, scale: float | None, limit: float = 2.0**127) -> bool:
    """Whether a score may pass ``limit``: by default the range of float32, beyond which no kernel promises anything."""
    if 0 in (*q.shape, *k.shape):
        return False
    return float(abs(q).max()) * float(abs(k).max()) * q.shape[3] * max(1.0, abs(scale or 1.0)) >= limit


def apart_from(fn: Callable[..., Any], findings: Mapping[str, Finding]) -> Callable[..., Any]:
    """``fn``, refusing the calls in which something was found.

    The checker counts them, by name, and holds the kernel to everything else.
    """

    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(fn).bind(*args, **kwargs)
        given.apply_defaults()
        for name, finding in findings.items():
            if finding.where(**given.arguments):
                raise pk.UnsupportedError(name)
        return fn(*args, **kwargs)

    checked.refusals = [re.escape(name) for name in findings]  # type: ignore[attr-defined]
    return checked


def replay(fn: Callable[..., Any], finding: Finding, framework: str) -> testing.Report:
    """Run a finding's case on the bare kernel."""
    return testing.replay("attention", finding.case, fn=finding.fn or fn, framework=framework, device="cpu")


def show(
    fn: Callable[..., Any], findings: Mapping[str, Finding], framework: str, dtypes: tuple[str, ...], max_examples: int
) -> None:
    """Print each finding with what the suite says about its case, then the check of the rest."""
    logging.getLogger("portakern").setLevel(logging.ERROR)
    for name, finding in findings.items():
        print(f"{name}: {finding.what}")
        if finding.case:
            print(f"  {next(iter(replay(fn, finding, framework).failures), 'NOT SEEN with these versions')}\n")
    report = pk.check(
        "attention",
        fn=apart_from(fn, findings),
        framework=framework,
        device="cpu",
        dtypes=dtypes,
        max_examples=max_examples,
    )
    print(
        f"the rest: {'passed' if report.passed else 'FAILED'}, {report.examples} cases compared, "
        f"worst share of the bound {report.worst}"
    )
    for refused, count in report.refused.most_common():
        print(f"  left out {count} x {refused}")
    for failure in report.failures:
        print(failure)
