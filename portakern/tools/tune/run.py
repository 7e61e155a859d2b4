"""A whole tuning: every key of every op in turn, as far as the time reaches; tables and results as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from portakern.core import tilings
from portakern.core.observe import say
from portakern.errors import SpecError, UnsupportedError
from portakern.tools.compile.pool import Pool
from portakern.tools.tune import store
from portakern.tools.tune.ahead import AHEAD, working_ahead
from portakern.tools.tune.asked import Asked
from portakern.tools.tune.journal import Journal
from portakern.tools.tune.place import Place, places
from portakern.tools.tune.tuner import Finding, Group, Plan, Progress, grouped, row_of, tune_group

__all__ = ["Told", "groups_of", "table_of", "tune"]


@dataclass(frozen=True)
class Told:
    """Who is told what: ``progress`` of a key's search, ``found`` of each that has ended, ``refused`` of a key whose
    calls are refused, with the reason."""

    progress: Callable[[Progress], None]
    found: Callable[[Finding], None]
    refused: Callable[[Group, str], None]


def groups_of(
    asked: Sequence[Asked],
    target: str | None,
    backend: str | None,
    variant: str | None,
    tell: Callable[[str], None] = say,
) -> list[Group]:
    """The keys to tune, of every variant of every op, in the order in which the first call of each stands. ``tell``:
    why an implementation has none."""
    found: list[Group] = []
    known: dict[str, list[Place]] = {}
    for a in asked:
        if a.spec.name not in known:
            known[a.spec.name] = places(a.spec, target, backend, variant)
    for op, where in known.items():
        for place in where:
            try:
                found += grouped([a for a in asked if a.spec.name == op], place)
            except UnsupportedError as e:
                tell(str(e))
    order = {id(a): i for i, a in enumerate(asked)}
    return sorted(found, key=lambda group: order[id(group.asked[0])])


def tune(
    groups: Sequence[Group],
    plan: Plan,
    pool: Pool,
    told: Told,
    *,
    ship: bool = False,
    write: bool = True,
    fresh: bool = False,
) -> tuple[list[Finding], int]:
    """Tune key after key, each with its share of the time that is left.

    Args:
      pool: processes that compile.
      ship: rows go into the tables of the checkout instead of the user's cache; write: they go anywhere.
      fresh: what an earlier run found is forgotten.

    Returns:
      What was found, and how many keys are left for want of time.
    """
    found: list[Finding] = []
    journals: dict[Any, Journal] = {}
    try:
        with working_ahead(groups, plan, pool) as ahead:
            for i, group in enumerate(groups):
                if plan.over:
                    return found, len(groups) - i
                journal = _journal(journals, group, plan, fresh)
                for g in groups[i : i + 1 + AHEAD]:
                    if _journal(journals, g, plan, fresh).get("found", g.text) is None:
                        ahead.begin(g)
                share = _share(plan, len(groups) - i)
                try:
                    finding = tune_group(group, share, partial(ahead.bench, group), journal, told.progress)
                except UnsupportedError as e:
                    told.refused(group, str(e))
                    continue
                found.append(finding)
                if write and finding.best is not None:
                    _keep(finding, ship)
                told.found(finding)
    finally:
        for journal in journals.values():
            journal.close()
    return found, 0


def _share(plan: Plan, keys: int) -> Plan:
    """The plan for the first of so many keys: twice its part of the time that is left."""
    now = time.monotonic()
    return replace(plan, deadline=min(now + 2 * (plan.deadline - now) / keys, plan.deadline))


def _journal(known: dict[Any, Journal], group: Group, plan: Plan, fresh: bool) -> Journal:
    place = group.place
    about = [
        place.backend.name, place.family.name, str(place.target), place.chip, place.versions(), place.impl.op,
        plan.search, plan.tries, plan.seed, plan.last, plan.rehearse, _sources(place),
    ]  # fmt: skip
    key = repr(about)
    if key not in known:
        known[key] = Journal(about, fresh)
    return known[key]


def _sources(place: Place) -> list[str]:
    """A digest of what the results depend on: the kernel, its spec, and all that they import."""
    from portakern.tools.compile import cache

    module = place.backend.where(place.impl.op, place.family) or ""
    return [cache.digest([module, "portakern.tools.tune.static"])]


def _keep(finding: Finding, ship: bool) -> None:
    place = finding.group.place
    path = table_of(place, ship)
    package, _, _ = place.impl.fn.__module__.rpartition(".")  # of a module that lies in none the variant is ""
    store.keep(path, place.impl.op, package.rpartition(".")[2], [row_of(finding, place.chip)])


def table_of(place: Place, ship: bool) -> Path:
    """The table that a place's rows go to.

    Raises:
      SpecError: it ships with no package that can be written to.
    """
    if not ship:
        return tilings.own_table(place.backend.name, place.target)
    folder = tilings.shipped_folder(place.impl.fn.__module__.rpartition(".")[0])
    if folder is None or not folder.is_dir():
        raise SpecError(f"tune: --ship: backend {place.backend.name!r} ships no tables: it has no folder 'tuned'")
    return folder.resolve() / f"{place.target.arch or place.target.platform}.json"


def rows_of(found: Sequence[Finding]) -> Iterator[dict[str, Any]]:
    """The rows of a file of results."""
    for finding in found:
        yield from finding.rows
