"""Preparation of the next keys during a search: their first candidates are compiled, and other processes compute
expected results. The timing process then waits for neither, except for the first key."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial

from portakern.core.targets import HOST
from portakern.tools.bench.background import Background, references
from portakern.tools.bench.suites import TimedCase
from portakern.tools.bench.verdicts import Expected
from portakern.tools.compile.build import Build
from portakern.tools.compile.pool import Pool
from portakern.tools.tune.benches import Bench, Key, Precomputed, bench_of, launches_find_it, survey
from portakern.tools.tune.isolation import Isolated
from portakern.tools.tune.tuner import Group, SearchPlan, first_tilings

__all__ = ["AHEAD", "Precompiler", "precompiling"]

AHEAD = 2
"""Keys that are compiled for while one is judged: of one alone, compilers would wait for the slowest candidate."""

SHARE = 4
"""Compilers to one process that computes what is expected."""

Built = Mapping[str, Mapping[Key, Build]]
"""By call and tiling what its compiler said."""


class Precompiler:
    """Compiles for keys that are judged later."""

    def __init__(
        self,
        plan: SearchPlan,
        pool: Pool,
        expected: Background[list[Expected]],
        isolated: Isolated,
        worker: ThreadPoolExecutor,
    ) -> None:
        self.plan, self.pool, self.expected, self.isolated, self.worker = plan, pool, expected, isolated, worker
        self.ended = threading.Event()
        self._futures: dict[str, Future[Built]] = {}

    def begin(self, group: Group) -> None:
        """Have the first candidates of a key compiled, where a launch then finds them."""
        if launches_find_it(group.on) and group.on.is_here and group.text not in self._futures:
            self._futures[group.text] = self.worker.submit(self._compiled, group)

    def bench(self, group: Group, case: TimedCase) -> Bench:
        """The bench of a call of a key, which knows what was done for it."""
        future = self._futures.get(group.text)

        def built() -> Mapping[Key, Build]:
            return future.result()[case.text] if future is not None else {}

        self.isolated.begin(case, group.on, case is group.cases[0])
        isolated = partial(self.isolated.refused, case, group.on)
        known = Precomputed(self.expected, built, isolated, partial(self.isolated.yields, case))
        return bench_of(case, group.on, self.pool, known)

    def _compiled(self, group: Group) -> Built:
        found: dict[str, dict[Key, Build]] = {a.text: {} for a in group.cases}
        with suppress(Exception):  # whatever it is, who judges the key will meet it again, and say it
            first = first_tilings(group, self.plan)
            for case in group.cases:
                for key, built in survey(case, group.on, self.pool, first):
                    found[case.text][key] = built
                    if self.ended.is_set():
                        return found
        return found


@contextmanager
def precompiling(groups: Sequence[Group], plan: SearchPlan, pool: Pool) -> Iterator[Precompiler]:
    """Work ahead for keys of one run; what is not finished at its end is left. The pool compiles; of what is expected a
    process for every :data:`SHARE` of its own computes ahead."""
    here = [g for g in groups if g.on.is_here and not g.on.interpret]
    cases = [case for g in here for case in g.cases]
    with (
        references(cases, here[0].on.target if here else HOST, len(pool.workers) // SHARE if here else 0) as known,
        closing(Isolated(pool.timeout)) as isolated,
        ThreadPoolExecutor(AHEAD) as worker,
    ):
        ahead = Precompiler(plan, pool, known, isolated, worker)
        try:
            yield ahead
        finally:
            ahead.ended.set()
            worker.shutdown(wait=False, cancel_futures=True)
