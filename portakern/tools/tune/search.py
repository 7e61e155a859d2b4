"""The order in which tilings are tried: all of them if they are few, otherwise by a search algorithm.

A search proposes tilings that were not tried yet (``ask``; none at its end), and gets their scores (``tell``): smaller
is better, None for a tiling that is refused or wrong.
"""

from __future__ import annotations

import importlib.util
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

from portakern import install
from portakern.errors import SpecError, UnavailableError
from portakern.tools.tune.space import Space, Tiling, frozen

__all__ = ["KINDS", "SMALL", "Climb", "ExhaustiveSearch", "OptunaSearch", "Search", "search"]

SMALL = 160
"""Legal tilings up to which all are tried."""

KINDS = ("auto", "all", "climb", "optuna")


def search(kind: str, space: Space, seeds: Iterable[Tiling], seed: int = 0) -> Search:
    """A search of a space that begins with ``seeds``.

    Args:
      kind: "auto" takes all of a small space and Optuna for a large one; "all"; "climb" goes from neighbour to better
        neighbour; "optuna".

    Raises:
      UnavailableError: Optuna is needed and is not installed. SpecError: an unknown kind, or "all" of too many.
    """
    if kind not in KINDS:
        raise SpecError(f"tune: search is {kind!r}; expected one of {', '.join(KINDS)}")
    begin = [dict(s) for s in seeds if space.legal(s)]
    every = space.every
    if kind == "all" and every is None:
        raise SpecError(
            f"tune: {space.combinations} combinations are too many for --search all; pass --search optuna or climb"
        )
    if every is not None and (kind == "all" or (kind == "auto" and len(every) <= SMALL)):
        return ExhaustiveSearch(every, begin)
    return Climb(space, begin, seed) if kind == "climb" else OptunaSearch(space, begin, seed)


class ExhaustiveSearch:
    """Every tiling, the seeds first."""

    def __init__(self, every: Sequence[Tiling], seeds: Sequence[Tiling]) -> None:
        self.left = list({frozen(t): dict(t) for t in (*seeds, *every)}.values())

    def ask(self, count: int) -> list[dict[str, int]]:
        found, self.left = self.left[:count], self.left[count:]
        return found

    def tell(self, scores: Sequence[tuple[Tiling, float | None]]) -> None:
        pass


class Climb:
    """Hill climbing: the neighbours of the best tiling, until none is better; then those of the next best, in the order
    of scores. The neighbours of the first seed, the shipped tiling, are proposed before any score is known."""

    STARTS = 3

    def __init__(self, space: Space, seeds: Sequence[Tiling], seed: int) -> None:
        self.space, self.waiting, self.climbed = space, [dict(s) for s in seeds], 0
        self.seen: set[Any] = set()
        self.scores: dict[Any, float] = {}
        self.rng = random.Random(seed)
        if not self.waiting:
            self.waiting = _drawn(space, self.rng, 8)
        self.waiting += [t for first in self.waiting[:1] for t in space.neighbours(first)]

    def ask(self, count: int) -> list[dict[str, int]]:
        found: list[dict[str, int]] = []
        while len(found) < count:
            if not self.waiting and not (found or self._climb()):
                break
            if not self.waiting:
                break
            tiling = self.waiting.pop(0)
            if frozen(tiling) not in self.seen:
                self.seen.add(frozen(tiling))
                found.append(tiling)
        return found

    def _climb(self) -> bool:
        """Whether there are new neighbours, of one of the best few."""
        for key, _ in sorted(self.scores.items(), key=lambda item: item[1])[: self.STARTS]:
            self.waiting = [t for t in self.space.neighbours(dict(key)) if frozen(t) not in self.seen]
            if self.waiting:
                return True
        return False

    def tell(self, scores: Sequence[tuple[Tiling, float | None]]) -> None:
        self.scores |= {frozen(t): s for t, s in scores if s is not None}


def _drawn(space: Space, rng: random.Random, count: int) -> list[dict[str, int]]:
    """Legal tilings at random; fewer where few are legal."""
    found: dict[Any, dict[str, int]] = {}
    for _ in range(2000):
        tiling = {n: rng.choice(v) for n, v in space.values.items()}
        if space.legal(tiling):
            found[frozen(tiling)] = tiling
        if len(found) == count:
            break
    return list(found.values())


class OptunaSearch:
    """Optuna's tree-structured Parzen estimator (Bergstra et al. 2011), over the indices of values in their ranges."""

    ATTEMPTS = 400
    """Proposals in a row that are illegal or were tried, after which the search has ended."""

    def __init__(self, space: Space, seeds: Sequence[Tiling], seed: int) -> None:
        if importlib.util.find_spec("optuna") is None:
            raise UnavailableError(
                f"{space.combinations} combinations of tiles are too many to try all, and optuna is not installed; "
                f"{install.command('tune')}, or pass --search climb (hill climbing, without optuna)"
            )
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.space, self.states = space, optuna.trial.TrialState
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=max(8, len(seeds)), constant_liar=True)
        self.study = optuna.create_study(sampler=sampler)
        self.trials: dict[Any, Any] = {}
        for tiling in seeds:
            self.study.enqueue_trial({n: self.space.values[n].index(v) for n, v in tiling.items()})

    def ask(self, count: int) -> list[dict[str, int]]:
        found: list[dict[str, int]] = []
        attempts = 0
        while len(found) < count and attempts < self.ATTEMPTS:
            trial = self.study.ask()
            tiling = {n: v[trial.suggest_int(n, 0, len(v) - 1)] for n, v in self.space.values.items()}
            if frozen(tiling) in self.trials or not self.space.legal(tiling):
                self.study.tell(trial, state=self.states.FAIL)
                attempts += 1
                continue
            attempts = 0
            self.trials[frozen(tiling)] = trial
            found.append(tiling)
        return found

    def tell(self, scores: Sequence[tuple[Tiling, float | None]]) -> None:
        for tiling, score in scores:
            trial = self.trials.get(frozen(tiling))
            if trial is None:
                continue
            if score is None or not math.isfinite(score):
                self.study.tell(trial, state=self.states.FAIL)
            else:
                self.study.tell(trial, math.log(score))  # half the time is as good a step from any time


Search = ExhaustiveSearch | Climb | OptunaSearch
