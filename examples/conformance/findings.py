"""What a check found out about somebody else's kernel.

A finding is a case that shows it, and the region of the contract that the rest of the check leaves out for it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import portakern as pk
from portakern import testing

__all__ = ["Finding", "apart_from", "finite", "framework_of", "overflows", "replay", "show"]


@dataclass(frozen=True)
class Finding:
    """``case`` shows it on the peer, or on ``fn``, a function over the peer's arrays.

    ``where(**arguments)`` says which calls are left out of the check because of it. An empty case: not a fault, but
    something that the kernel declares not to do.
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


def apart_from(peer: str, findings: Mapping[str, Finding]) -> Callable[..., Any]:
    """The attention of a peer, refusing the calls in which something was found.

    The checker counts them, by name, and holds the kernel to everything else.
    """
    op = pk.op("attention", backend=peer)

    def checked(
        q: Any, k: Any, v: Any, bias: Any = None, *, is_causal: bool = False, scale: float | None = None
    ) -> Any:
        for name, finding in findings.items():
            if finding.where(q=q, k=k, v=v, bias=bias, is_causal=is_causal, scale=scale):
                raise pk.UnsupportedError(name)
        return op(q, k, v, bias, is_causal=is_causal, scale=scale)

    assert op.backend is not None
    checked.refusals = [*op.backend.refusals, *map(re.escape, findings)]  # type: ignore[attr-defined]
    return checked


def framework_of(peer: str) -> str:
    """The library whose arrays a peer takes."""
    b = pk.op("attention", backend=peer).backend
    assert b is not None
    return b.framework


def replay(peer: str, finding: Finding) -> testing.Report:
    """Run a finding's case on the bare kernel."""
    if finding.fn is None:
        return testing.replay("attention", finding.case, backend=peer, device="cpu")
    return testing.replay("attention", finding.case, fn=finding.fn, framework=framework_of(peer), device="cpu")


def show(peer: str, findings: Mapping[str, Finding], dtypes: tuple[str, ...], max_examples: int) -> None:
    """Print each finding with what the suite says about its case, then the check of the rest."""
    logging.getLogger("portakern").setLevel(logging.ERROR)
    for name, finding in findings.items():
        print(f"{name}: {finding.what}")
        if finding.case:
            print(f"  {next(iter(replay(peer, finding).failures), 'NOT SEEN with these versions')}\n")
    report = pk.check(
        "attention",
        fn=apart_from(peer, findings),
        framework=framework_of(peer),
        device="cpu",
        dtypes=dtypes,
        max_examples=max_examples,
        promises=False,  # no library promised that a row has the bits alone that it has among others
    )
    verdict = "passed" if report.passed else "FAILED"
    print(f"the rest: {verdict}, {report.examples} cases compared, worst share of the bound {report.worst}")
    for refused, count in report.refused.most_common():
        print(f"  left out {count} x {refused}")
    for failure in report.failures:
        print(failure)
