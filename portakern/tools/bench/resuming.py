"""The results of an earlier run that still hold: several runs can complete a table that is too large for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from portakern import inventory, results, sources
from portakern.core import registry
from portakern.core.framework import host_framework
from portakern.errors import SpecError
from portakern.tools.bench.contenders import contenders, here
from portakern.tools.bench.plan import BenchPlan
from portakern.tools.bench.rows import FAR_BEHIND, Row, describe
from portakern.tools.bench.suites import TimedCase
from portakern.tools.compile.abstract import bind_signature

__all__ = ["Earlier", "read"]

CallKey = tuple[str, str]
"""A call and a target, in words."""


@dataclass(frozen=True)
class Earlier:
    """Rows by call and target, and the other data of the file from the runs that made it."""

    rows: Mapping[CallKey, list[Row]] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    background_seconds: Mapping[str, float] = field(default_factory=dict)
    wall_seconds: float = 0.0

    def left(self, plan: BenchPlan) -> tuple[BenchPlan, dict[CallKey, list[Row]]]:
        """The plan without the cases whose rows still hold, and the rows that stay: theirs, and those of calls that the
        plan does not have."""
        stay, left = dict(self.rows), []
        for case in plan.cases if self.rows else ():
            place = self._key(plan, case)
            if not self._holds(plan, case, stay.get(place, ())):
                left.append(case)
                stay.pop(place, None)
        return (replace(plan, cases=left), stay) if self.rows else (plan, stay)

    def _key(self, plan: BenchPlan, case: TimedCase) -> CallKey:
        spec, (_, _, target) = registry.find_spec(case.timed), here(plan.lead, plan.device)
        return describe(case, bind_signature(spec, case.signature, host_framework(), target)), str(target)

    def _holds(self, plan: BenchPlan, case: TimedCase, rows: Sequence[Row]) -> bool:
        """Whether nothing in a case's rows is other than in those that would be found now: whoever takes part now did,
        with as many samples and as a subject or not, and of nobody have the sources changed. Who was far behind stays
        so, unless every peer is asked for."""
        spec, (_, _, target) = registry.find_spec(case.timed), here(plan.lead, plan.device)
        known = {r["contender"]: r for r in rows}
        for c in contenders(spec, plan.subjects, plan.against, target):
            row = known.get(c.name, {})
            now = c.subject, sources.fingerprint(spec.name, c.backend, c.variant, target)
            if now != (row.get("subject"), row.get("sources")):
                return False
            if row.get("rounds") is not None and row["rounds"] < plan.rounds_of(case):
                return False
            if row["verdict"] == FAR_BEHIND and plan.every_peer:
                return False
        return bool(known)


def read(file: Path, on_cpu: bool) -> Earlier:
    """What a file holds; nothing where there is none.

    Raises:
      SpecError: it holds something else than a run of this benchmark on this device with the same libraries.
    """
    if not file.exists():
        return Earlier()
    try:
        found = results.read(file)
    except results.ResultError as e:
        raise SpecError(f"bench: --json names a file that cannot be continued: {e}; {INSTEAD}") from e
    device = results.HOST_CPU if on_cpu else inventory.device_name()
    versions = inventory.environment()
    others = [f"{n} {found.environment.get(n)}" for n, v in versions.items() if found.environment.get(n) != v]
    if (found.benchmark, found.device) != ("bench", device) or others:
        what = f"{found.benchmark} on {found.device}" + (f" with {', '.join(others)}" if others else "")
        raise SpecError(f"bench: {file} holds results of {what}, which this run on {device} cannot continue; {INSTEAD}")
    rows: dict[CallKey, list[Row]] = {}
    for row in found.rows:
        rows.setdefault((row["call"], row["target"]), []).append(dict(row))
    kept = {n: found.extra.get(n) or {} for n in ("rates", "seconds", "background_seconds")}
    return Earlier(rows, **kept, wall_seconds=found.extra["wall_seconds"])


INSTEAD = "name another file, or pass --fresh to overwrite this one"
