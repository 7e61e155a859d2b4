"""Tune the calls of one key together, since one row of the table serves them all.

The score of a tiling is the geometric mean, over the calls of its key, of its time divided by that of the shipped
tiling. Screening takes few samples of each batch of the search; the best few and the shipped tiling are then measured
again, with many. The shipped tiling stays unless another is better by more than :data:`LEAST`.
"""

from __future__ import annotations

import datetime
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from portakern.core import tilings
from portakern.core.call import Call
from portakern.core.tilings import Row
from portakern.errors import SpecError, UnsupportedError
from portakern.tools.bench.suites import TimedCase
from portakern.tools.compile.abstract import bind_signature
from portakern.tools.tune import store
from portakern.tools.tune.benches import Bench
from portakern.tools.tune.journal import Journal
from portakern.tools.tune.search import Search, search
from portakern.tools.tune.space import Space, Tiling, frozen, space_of
from portakern.tools.tune.target import TuneTarget

__all__ = ["Finding", "Group", "Progress", "SearchPlan", "first_tilings", "grouped", "row_of", "tune_group"]

Key = tuple[tuple[str, int], ...]

LEAST = 0.01
"""Share of the shipped choice's time that another must save: less is noise, or a model's arithmetic."""

LAST = 4
"""Candidates that are judged again with many samples."""

TOLD = 24
"""Candidates of a call whose worth is kept in results."""


@dataclass(frozen=True)
class SearchPlan:
    """The options of a search.

    Attributes:
      search: a kind of :mod:`portakern.tools.tune.search`. tries: most candidates of a key. batch: of one round.
      seed: of what is drawn. last: whether the best few are judged again, with more samples
        or better estimates. rehearse: whether what was not run is run in an interpreter before it is kept.
      deadline: when to stop, by ``time.monotonic``; inf for never.
    """

    search: str = "auto"
    tries: int = 96
    batch: int = 16
    seed: int = 0
    last: bool = True
    rehearse: bool = True
    deadline: float = math.inf

    @property
    def over(self) -> bool:
        return time.monotonic() > self.deadline


class Group(NamedTuple):
    """The calls of one key."""

    on: TuneTarget
    key: Mapping[str, Any]
    cases: tuple[TimedCase, ...]

    @property
    def text(self) -> str:
        """The same in any process."""
        return "\n".join(a.text for a in self.cases)


@dataclass
class Finding:
    """The result of a search for one key.

    Attributes:
      rows: one for each call, as results keep them. best: the tiling to keep, None where the shipped one stays.
      refused: tiling -> why it does not count. tried: candidates that were judged.
    """

    group: Group
    rows: list[dict[str, Any]]
    best: dict[str, int] | None
    refused: dict[Key, str]
    tried: int

    @property
    def wrong(self) -> dict[Key, str]:
        """Those that run and give wrong results, which somebody should hear of."""
        return {key: why for key, why in self.refused.items() if why.startswith("wrong:")}

    @property
    def fatal(self) -> dict[Key, str]:
        """Those that would have ended the run: they never end, or end or spoil the process that calls them."""
        return {
            key: why
            for key, why in self.refused.items()
            if why.startswith(("hung:", "died:", "left the device unusable"))
        }


class Progress(NamedTuple):
    """The progress of a search: the number of candidates tried, and the best ratio to the shipped tiling."""

    group: Group
    tried: int
    best: Tiling
    ratio: float


def grouped(cases: Sequence[TimedCase], on: TuneTarget) -> list[Group]:
    """Calls by key, in the order in which the keys came.

    Raises:
      UnsupportedError: the implementation declares no key, so that it has no table.
    """
    found: dict[Any, tuple[Mapping[str, Any], list[TimedCase]]] = {}
    for a in cases:
        key = _key(a, on)
        found.setdefault((a.spec.name, repr(dict(key))), (key, []))[1].append(a)
    return [Group(on, key, tuple(calls)) for key, calls in found.values()]


def _key(case: TimedCase, on: TuneTarget) -> Mapping[str, Any]:
    if on.impl.key is None:
        raise UnsupportedError(
            f"tune: {on.impl.op} on {on.backend.name} declares no key, so that no table could hold its tilings: "
            "give it key= in implements()"
        )
    return dict(on.impl.key(_form_call(case, on)))


def _form_call(case: TimedCase, on: TuneTarget) -> Call:
    """The call on arrays of one element, stretched: its form, for keys and for what is shipped."""
    return bind_signature(case.spec, case.signature, on.framework, on.target, on.interpret)


class _Opening(NamedTuple):
    """The start of a search: the shipped tiling of each call, the legal tilings, and the search algorithm."""

    shipped: list[dict[str, int]]
    space: Space
    hunt: Search


def _opening(group: Group, plan: SearchPlan, calls: Sequence[Call]) -> _Opening:
    """The beginning of a search; ``calls``: the group's, with or without their arrays."""
    impl = group.on.impl
    shipped = [dict(tilings.shipped(impl, c)) for c in calls]
    space = space_of(group.cases[0].spec, impl, calls, shipped[0])
    return _Opening(shipped, space, search(plan.search, space, _seeds(group, shipped[0], space), plan.seed))


def first_tilings(group: Group, plan: SearchPlan) -> list[Tiling]:
    """What the search of a key will have compiled first."""
    begun = _opening(group, plan, [_form_call(a, group.on) for a in group.cases])
    first = begun.hunt.ask(min(plan.batch, plan.tries))
    return [dict(key) for key in dict.fromkeys(map(frozen, (*begun.shipped, *first)))]


def _seeds(group: Group, shipped: Tiling, space: Space) -> Iterator[Tiling]:
    """Where to begin: what is shipped, and what any table has for this op."""
    impl, names = group.on.impl, set(space.values)
    yield shipped
    for path in tilings.files(impl.fn.__module__.rpartition(".")[0], impl.backend.name):
        try:
            found = tilings.rows(impl, path.stem)
        except SpecError:
            continue
        for row in found:
            yield {**shipped, **{n: v for n, v in row.tiling.items() if n in names}}


def tune_group(
    group: Group,
    plan: SearchPlan,
    benches: Callable[[TimedCase], Bench],
    journal: Journal,
    tell: Callable[[Progress], None],
) -> Finding:
    """Search the tilings of a key. What an earlier run found, or was killed by, is taken from the journal.

    ``benches``: makes the bench of a call, which is done if the journal does not know what was found.

    Raises:
      UnsupportedError: every call of the key is refused under its own default.
    """
    kept = journal.get("found", group.text)
    if kept is not None:
        return Finding(group, kept["rows"], kept["best"], {}, kept["tried"])
    trial = _KeySearch(group, plan, [benches(a) for a in group.cases], journal)
    done = trial.search(tell)
    finding = trial.finish()
    if done:
        journal.note("found", group.text, {"rows": finding.rows, "best": finding.best, "tried": finding.tried})
    return finding


class _KeySearch:
    """The search of one key."""

    def __init__(self, group: Group, plan: SearchPlan, benches: list[Bench], journal: Journal) -> None:
        self.group, self.plan, self.benches, self.journal = group, plan, benches, journal
        self.shipped, self.space, self.hunt = _opening(group, plan, [b.call for b in benches])
        self.ratios: dict[Key, float] = {}
        self.each: dict[Key, list[float]] = {}
        self.refused: dict[Key, str] = {}
        self.final: list[dict[Key, float]] = []
        self.ended = False

    def search(self, tell: Callable[[Progress], None]) -> bool:
        """Try candidates until the search, the tries or the time end; whether it was not the time. One batch is tried
        in any case: of a call whose share of the time is too little, more is known then than that nothing was tried."""
        plan, hunt, begun = self.plan, self.hunt, False
        self._try_shipped()
        while (seen := len(self.ratios) + len(self.refused)) < plan.tries:
            if begun and plan.over:
                return False
            begun, room = True, plan.tries - seen
            batch = hunt.ask(min(plan.batch, room))
            if not batch:
                break
            self._judge(batch)
            hunt.tell([(t, self.ratios.get(frozen(t))) for t in batch])
            best = min(self.ratios, key=lambda k: self.ratios[k])
            tell(Progress(self.group, len(self.ratios), dict(best), self.ratios[best]))
        self.ended = True
        return True

    def _try_shipped(self) -> None:
        """What is shipped must count: everything is measured against it."""
        for bench, tiling in zip(self.benches, self.shipped, strict=True):
            why = bench.refused([tiling]).get(frozen(tiling))
            if why:
                raise UnsupportedError(f"tune: {bench.call!r}: the shipped tiling {tiling} cannot be measured: {why}")
        for tiling in self.shipped:
            self.ratios[frozen(tiling)] = 1.0

    def _judge(self, batch: Sequence[Tiling]) -> None:
        """Screen a batch: what an earlier run found of a candidate holds, and one that ended it is not tried again.
        Where several were timed by turns when it ended, each is judged by itself, so that the next end tells which it
        was."""
        left = [t for t in batch if frozen(t) not in self.ratios and not self._recalled(t)]
        suspected = [t for t in left if self.journal.fatal(self._name(t))]
        self._screen([t for t in left if t not in suspected])
        for tiling in suspected:
            self._screen([tiling])

    def _screen(self, left: Sequence[Tiling]) -> None:
        """Check candidates one by one, and time those that count by turns."""
        each: dict[Key, list[float]] = {frozen(t): [] for t in left}
        for bench, shipped in zip(self.benches, self.shipped, strict=True):
            bench.build(left)
            for tiling in left:
                self._check(bench, tiling)
            left = [t for t in left if frozen(t) not in self.refused]
            with self._trying(left):
                scores = bench.scores([shipped, *left], 0) if left else {}
            for tiling in left:
                each[frozen(tiling)].append(scores[frozen(tiling)] / scores[frozen(shipped)])
        for tiling in left:
            self._take(frozen(tiling), each[frozen(tiling)])
            self._note(tiling)

    def _check(self, bench: Bench, tiling: Tiling) -> None:
        """Ask a bench whether a candidate counts; that it does not is kept at once: it may have taken many seconds."""
        with self._trying([tiling]):
            self.refused |= bench.refused([tiling])
        if frozen(tiling) in self.refused:
            self._note(tiling)

    def _note(self, tiling: Tiling) -> None:
        """Keep what was found of a candidate."""
        found = {"ratios": self.each.get(frozen(tiling)), "refused": self.refused.get(frozen(tiling))}
        self.journal.note("judged", self._name(tiling), found)

    @contextmanager
    def _trying(self, tilings: Sequence[Tiling]) -> Iterator[None]:
        """While inside, the journal says that candidates are tried on a device. It goes on to say so where an error
        ends the run, which the next run would meet again; where somebody ends it, they are not why."""
        names = [self._name(t) for t in tilings] if self.group.on.is_here else []
        for name in names:
            self.journal.begin(name, len(names))
        failed = False
        try:
            yield
        except Exception:
            failed = True
            raise
        finally:
            for name in names if not failed else ():
                self.journal.end(name)

    def _take(self, key: Key, each: Sequence[float]) -> None:
        """Take in what a candidate is worth on each call, over what is shipped."""
        self.each[key] = [*each]
        self.ratios[key] = statistics.geometric_mean(each)

    def _recalled(self, tiling: Tiling) -> bool:
        """Whether the journal says what a candidate is worth, which is then taken in."""
        known, key = self.journal.get("judged", self._name(tiling)), frozen(tiling)
        if known is not None and known["refused"] is not None:
            self.refused[key] = known["refused"]
        elif known is not None:
            self._take(key, known["ratios"])
        elif self.journal.fatal(self._name(tiling)) == 1:
            self.refused[key] = "an earlier run ended while it was tried"
        return key in self.ratios or key in self.refused

    def _name(self, tiling: Tiling) -> str:
        return f"{self.group.text}\n{frozen(tiling)}"

    def finish(self) -> Finding:
        """Judge the best few again, beside what is shipped, and choose. Each call also has its own best few judged: no
        row can serve it alone, but they say what it loses."""
        last = self._best(self.ratios, LAST)
        own = [
            self._best({key: each[i] for key, each in self.each.items()}, LAST // 2) for i in range(len(self.benches))
        ]
        for bench in self.benches:  # an earlier run may have judged them
            self.refused |= bench.refused([*last, *(t for mine in own for t in mine)])
        last = [t for t in last if frozen(t) not in self.refused]
        ratios: dict[Key, list[float]] = {frozen(t): [] for t in last}
        for bench, shipped, mine in zip(self.benches, self.shipped, own, strict=True):
            among = {frozen(t): t for t in (shipped, *last, *mine) if frozen(t) not in self.refused}
            scores = bench.scores([*among.values()], 1 if self.plan.last else 0)
            self.final.append(scores)
            for key, found in ratios.items():
                found.append(scores[key] / scores[frozen(shipped)])
        keep = self._kept({key: statistics.geometric_mean(found) for key, found in ratios.items()})
        rows = [self._row(i, keep) for i in range(len(self.benches))]
        return Finding(self.group, rows, keep, self.refused, len(self.ratios))

    def _best(self, worth: Mapping[Key, float], count: int) -> list[dict[str, int]]:
        """The best few candidates, none of which is what is shipped."""
        among = [key for key in self.each if key not in map(frozen, self.shipped)]
        return [dict(key) for key in sorted(among, key=lambda key: worth[key])[:count]]

    def _kept(self, mean: dict[Key, float]) -> dict[str, int] | None:
        """The best that gives right results; None where what is shipped is hardly worse."""
        for key in sorted(mean, key=lambda k: mean[k]):
            if mean[key] >= 1 - LEAST:
                break
            why = self.benches[0].rehearsed(dict(key)) if self.plan.rehearse else None
            if why is None:
                return dict(key)
            self.refused[key] = why
            for scores in self.final:
                scores.pop(key, None)
        return None

    def _row(self, i: int, keep: Tiling | None) -> dict[str, Any]:
        """A call's row: what is shipped against the best that was found for this very call."""
        bench, case, shipped, scores = self.benches[i], self.group.cases[i], self.shipped[i], self.final[i]
        best = min(scores, key=lambda k: scores[k])
        default, least = scores[frozen(shipped)], scores[best]
        on = self.group.on
        return {
            "op": case.spec.name, "family": case.suite, "dtype": case.dtype, "call": repr(bench.call),
            "target": str(on.target.arch or on.target.platform), "backend": on.backend.name,
            "variant": on.family.name, "metric": bench.metric, "unit": bench.unit,
            "default": _rounded(default), "best": _rounded(least),
            "default_tiling": dict(shipped), "best_tiling": dict(best),
            "kept_tiling": dict(keep) if keep else dict(shipped), "loss": round(default / least - 1, 4),
            "tried": len(self.ratios), "refused": len(self.refused), "exhausted": self.ended,
            "wrong": sum(why.startswith("wrong:") for why in self.refused.values()),
            "comparisons": self._judged(i, shipped),
        }  # fmt: skip

    def _judged(self, i: int, shipped: Tiling) -> list[dict[str, Any]]:
        """Of a call the best candidates, by what they change of what is shipped, each with its score over that of what
        is shipped, from the screening: what another default would be worth."""
        best = sorted(self.each.items(), key=lambda found: found[1][i])[:TOLD]
        return [
            {"changes": {n: v for n, v in key if v != shipped[n]}, "ratio": round(each[i], 4)} for key, each in best
        ]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def row_of(finding: Finding, device: str) -> Row:
    """The table's row of a finding whose best is to be kept."""
    assert finding.best is not None
    on, first = finding.group.on, finding.rows[0]
    before, after = math.prod(r["default"] for r in finding.rows), 1.0
    for row in finding.rows:
        after *= row["best"]
    gain = (before / after) ** (1 / len(finding.rows))
    how = f"measured on {device}" if on.is_here else f"{first['metric']}, not run"
    calls = f"{len(finding.rows)} calls" if len(finding.rows) > 1 else first["call"]
    source = f"{how}: {first['best']:g} {first['unit']}, before {first['default']:g}, {gain:.2f} times as good; {calls}"
    made = {"versions": on.versions(), "date": datetime.date.today().isoformat()}
    made |= {"device": device} if on.is_here else {}
    key = dict(finding.group.key)
    return Row(store.name_of(key), key, finding.best, source, "", made)
