"""A tuning run: all keys of all ops in turn until the time limit; tables and results are written after each key."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from portakern.core import tilings
from portakern.core.observe import say
from portakern.errors import SpecError, UnsupportedError
from portakern.tools.bench.suites import TimedCase
from portakern.tools.compile.pool import Pool
from portakern.tools.tune import store
from portakern.tools.tune.journal import Journal
from portakern.tools.tune.precompile import AHEAD, precompiling
from portakern.tools.tune.target import TuneTarget, tune_targets
from portakern.tools.tune.tuner import Finding, Group, Progress, SearchPlan, grouped, row_of, tune_group

__all__ = ["Callbacks", "groups_of", "table_of", "tune"]


@dataclass(frozen=True)
class Callbacks:
    """The callbacks of a run: ``progress`` during the search of a key, ``found`` after it, ``refused`` with the reason
    if the calls of a key are refused."""

    progress: Callable[[Progress], None]
    found: Callable[[Finding], None]
    refused: Callable[[Group, str], None]


def groups_of(
    cases: Sequence[TimedCase],
    target: str | None,
    backend: str | None,
    variant: str | None,
    tell: Callable[[str], None] = say,
) -> list[Group]:
    """The keys to tune, of every variant of every op, in the order in which the first call of each stands. ``tell``:
    why an implementation has none."""
    found: list[Group] = []
    known: dict[str, list[TuneTarget]] = {}
    for case in cases:
        if case.timed not in known:
            known[case.timed] = tune_targets(case.spec, target, backend, variant)
    for op, where in known.items():
        for on in where:
            try:
                found += grouped([case for case in cases if case.timed == op], on)
            except UnsupportedError as e:
                tell(str(e))
    order = {id(case): i for i, case in enumerate(cases)}
    return sorted(found, key=lambda group: order[id(group.cases[0])])


def tune(
    groups: Sequence[Group],
    plan: SearchPlan,
    pool: Pool,
    callbacks: Callbacks,
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
        with precompiling(groups, plan, pool) as ahead:
            for i, group in enumerate(groups):
                if plan.over:
                    return found, len(groups) - i
                journal = _journal(journals, group, plan, fresh)
                for g in groups[i : i + 1 + AHEAD]:
                    if _journal(journals, g, plan, fresh).get("found", g.text) is None:
                        ahead.begin(g)
                share = _share(plan, len(groups) - i)
                try:
                    finding = tune_group(group, share, partial(ahead.bench, group), journal, callbacks.progress)
                except UnsupportedError as e:
                    callbacks.refused(group, str(e))
                    continue
                found.append(finding)
                if write and finding.best is not None:
                    _keep(finding, ship)
                callbacks.found(finding)
    finally:
        for journal in journals.values():
            journal.close()
    return found, 0


def _share(plan: SearchPlan, keys: int) -> SearchPlan:
    """The plan for the first of so many keys: twice its part of the time that is left."""
    now = time.monotonic()
    return replace(plan, deadline=min(now + 2 * (plan.deadline - now) / keys, plan.deadline))


def _journal(known: dict[Any, Journal], group: Group, plan: SearchPlan, fresh: bool) -> Journal:
    on = group.on
    about = [
        on.backend.name, on.family.name, str(on.target), on.chip, on.versions(), on.impl.op,
        plan.search, plan.tries, plan.seed, plan.last, plan.rehearse, _sources(on),
    ]  # fmt: skip
    key = repr(about)
    if key not in known:
        known[key] = Journal(about, fresh)
    return known[key]


def _sources(on: TuneTarget) -> list[str]:
    """A digest of what the results depend on: the kernel, its spec, and all that they import."""
    from portakern.tools.compile import cache

    module = on.backend.module_of(on.impl.op, on.family) or ""
    return [cache.digest([module, "portakern.tools.tune.static"])]


def _keep(finding: Finding, ship: bool) -> None:
    on = finding.group.on
    path = table_of(on, ship)
    package, _, _ = on.impl.fn.__module__.rpartition(".")  # of a module that lies in none the variant is ""
    store.keep(path, on.impl.op, package.rpartition(".")[2], [row_of(finding, on.chip)])


def table_of(on: TuneTarget, ship: bool) -> Path:
    """The table that its rows go to.

    Raises:
      SpecError: it ships with no package that can be written to.
    """
    if not ship:
        return tilings.own_table(on.backend.name, on.target)
    folder = tilings.shipped_folder(on.impl.fn.__module__.rpartition(".")[0])
    if folder is None or not folder.is_dir():
        raise SpecError(f"tune: --ship: backend {on.backend.name!r} ships no tables: it has no folder 'tuned'")
    return folder.resolve() / f"{on.target.arch or on.target.platform}.json"
