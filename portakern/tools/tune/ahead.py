"""What is done for the next keys while one is judged: their first candidates are compiled, and by other processes what
calls give is computed. So a device that times does not wait for either, except for the first key."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

from portakern.core.targets import HOST
from portakern.tools.bench.background import Background, references
from portakern.tools.bench.verdicts import Expected
from portakern.tools.compile.build import Build
from portakern.tools.compile.pool import Pool
from portakern.tools.tune.apart import Apart, calling_apart
from portakern.tools.tune.asked import Asked
from portakern.tools.tune.judges import Bench, Key, Known, bench_of, launches_find_it, survey
from portakern.tools.tune.tuner import Group, Plan, first_tilings

__all__ = ["AHEAD", "Ahead", "working_ahead"]

AHEAD = 2
"""Keys that are compiled for while one is judged: of one alone, compilers would wait for the slowest candidate."""

SHARE = 4
"""Compilers to one process that computes what is expected."""

Built = Mapping[str, Mapping[Key, Build]]
"""By call and tiling what its compiler said."""


class Ahead:
    """Compiles for keys that are judged later."""

    def __init__(
        self, plan: Plan, pool: Pool, expected: Background[list[Expected]], apart: Apart, worker: ThreadPoolExecutor
    ) -> None:
        self.plan, self.pool, self.expected, self.apart, self.worker = plan, pool, expected, apart, worker
        self.ended = threading.Event()
        self._futures: dict[str, Future[Built]] = {}

    def begin(self, group: Group) -> None:
        """Have the first candidates of a key compiled, where a launch then finds them."""
        if launches_find_it(group.place) and group.place.is_here and group.text not in self._futures:
            self._futures[group.text] = self.worker.submit(self._compiled, group)

    def bench(self, group: Group, asked: Asked) -> Bench:
        """The bench of a call of a key, which knows what was done for it."""
        future = self._futures.get(group.text)

        def built() -> Mapping[Key, Build]:
            return future.result()[asked.text] if future is not None else {}

        self.apart.begin(asked, group.place, asked is group.asked[0])
        apart = partial(self.apart.refused, asked, group.place)
        known = Known(self.expected, built, apart, partial(self.apart.yields, asked))
        return bench_of(asked, group.place, self.pool, known)

    def _compiled(self, group: Group) -> Built:
        found: dict[str, dict[Key, Build]] = {a.text: {} for a in group.asked}
        with suppress(Exception):  # whatever it is, who judges the key will meet it again, and say it
            first = first_tilings(group, self.plan)
            for asked in group.asked:
                for key, built in survey(asked, group.place, self.pool, first):
                    found[asked.text][key] = built
                    if self.ended.is_set():
                        return found
        return found


@contextmanager
def working_ahead(groups: Sequence[Group], plan: Plan, pool: Pool) -> Iterator[Ahead]:
    """Work ahead for keys of one run; what is not finished at its end is left. The pool compiles; of what is expected a
    process for every :data:`SHARE` of its own computes ahead."""
    here = [g for g in groups if g.place.is_here and not g.place.interpret]
    cases = [a.case for g in here for a in g.asked]
    with (
        references(cases, here[0].place.target if here else HOST, len(pool.workers) // SHARE if here else 0) as known,
        calling_apart(pool.timeout) as apart,
        ThreadPoolExecutor(AHEAD) as worker,
    ):
        ahead = Ahead(plan, pool, known, apart, worker)
        try:
            yield ahead
        finally:
            ahead.ended.set()
            worker.shutdown(wait=False, cancel_futures=True)
