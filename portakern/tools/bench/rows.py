"""Rows of results: one contender on one call."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from typing import Any

from portakern import sources
from portakern.core.call import Call
from portakern.core.targets import Target
from portakern.spec.dtypes import DTYPES
from portakern.tools.bench.contenders import Contender
from portakern.tools.bench.roof import ceiling, floor, moved
from portakern.tools.bench.suites import TimedCase
from portakern.tools.bench.timing import Times
from portakern.tools.bench.verdicts import Verdict

__all__ = [
    "FAILED",
    "FAR_BEHIND",
    "REFUSED",
    "RIGHT",
    "WRONG",
    "describe",
    "held_against",
    "impossible",
    "settled",
    "started",
    "timed",
]  # fmt: skip

RIGHT, WRONG, REFUSED, FAILED, FAR_BEHIND = "right", "wrong", "refused", "failed", "far behind"
Row = dict[str, Any]


def describe(case: TimedCase, call: Call) -> str:
    """A call in words, with what its dimensions do not say: optional arrays, layouts, arrays of another dtype."""
    there = {a.name: a for a in call.spec.arrays if call.arrays[a.name] is not None}
    beside = [f"with {n}" for n in case.given if n in there and n not in {*case.runs, *case.values}]
    beside += [f"{n} {layout}" for n, layout in case.layouts.items() if n in there]
    beside += [f"{n} in runs of {length}" for n, length in case.runs.items() if n in there]
    beside += [f"{n} = {value}" for n, value in case.values.items() if n in there]
    others = {n: call.dtype_of(n) for n, a in there.items() if not a.statistic}
    beside += [f"{n} {dtype}" for n, dtype in others.items() if DTYPES[dtype].floating and dtype != call.dtype]
    return "; ".join([repr(call), *beside])


def started(case: TimedCase, call: Call, contender: Contender, target: Target) -> Row:
    """What is known before anything ran."""
    backend, variant = contender.backend, contender.variant
    return {
        "suite": case.suite, "op": call.spec.name, "dtype": case.dtype, "call": describe(case, call),
        "dims": {n: list(e) if isinstance(e, tuple) else e for n, e in call.dims.items()},
        "contender": contender.name, "backend": backend.name, "variant": variant, "subject": contender.subject,
        "target": str(target), "bytes": moved(call), "flops": round(call.flops),
        "date": datetime.date.today().isoformat(), "commit": sources.commit(),
        "sources": sources.fingerprint(call.spec.name, backend, variant, target),
    }  # fmt: skip


def settled(row: Row, kind: str, why: str | None = None) -> Row:
    """The row of a contender that has no time."""
    return {**row, "verdict": kind, "why": why}


def judged(row: Row, verdict: Verdict, tiling: Mapping[str, int], seconds: float) -> Row:
    """The row with what became of its result, after so many seconds of a first call; an error that is no number stands
    as null."""
    worst = max(verdict.errors.values(), default=0.0)
    errors = {n: round(e, 6) if math.isfinite(e) else None for n, e in verdict.errors.items()}
    return {
        **row,
        "verdict": RIGHT if verdict.right else WRONG,
        "why": verdict.why or None,
        "error": round(worst, 6) if math.isfinite(worst) and verdict.errors else None,
        "errors": errors,
        "tiling": dict(tiling),
        "first_s": round(seconds, 3),
    }


def impossible(call: Call, times: Times, rates: Mapping[str, float], beyond: float) -> str | None:
    """Why a time is not believed: the call would have been faster than the device can be; None where it is."""
    least = floor(call, rates)
    if not least or times.median_us * beyond >= least:
        return None
    return (
        f"{times.median_us:.3g} us is {least / max(times.median_us, 1e-9):,.1f} times as fast as the measured roof "
        f"permits ({least:.3g} us; at most {beyond:g} times is possible): the work is not done while it is timed"
    )


def timed(row: Row, times: Times, call: Call, rates: Mapping[str, float], peak_bytes: int | None) -> Row:
    """The row of a contender whose result is right."""
    roof = ceiling(call, rates)
    us = times.median_us
    return {
        **row,
        "median_us": round(us, 3), "best_us": round(times.best_us, 3), "worst_us": round(times.worst_us, 3),
        "host_us": round(times.host_us, 2), "rounds": times.rounds, "clock": times.clock,
        "flop_rate": round(1e6 * row["flops"] / us) if us else None,
        "byte_rate": round(1e6 * row["bytes"] / us) if us else None,
        "roof_us": round(roof.us, 3) if roof else None, "limited_by": roof.limit if roof else None,
        "roof_share": round(roof.us / us, 4) if roof and us else None,
        "peak_bytes": peak_bytes, **({"interpreted": True} if call.interpret else {}),
    }  # fmt: skip


def held_against(rows: list[Row]) -> list[Row]:
    """The rows of one call, with the best peer's time over each: above 1 is faster than all of them. Only what is right
    has a time, so that nothing else is a peer, or has a ratio; an interpreter's is none to hold against anything."""
    peers = [r for r in rows if not r["subject"] and r.get("median_us") and not r.get("interpreted")]
    if not peers:
        return rows
    best = min(peers, key=lambda r: r["median_us"])
    return [
        {**r, "best_peer": best["contender"], "ratio": round(best["median_us"] / r["median_us"], 4)}
        if r.get("median_us") and not r.get("interpreted")
        else r
        for r in rows
    ]
