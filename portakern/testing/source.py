"""The source of random choices for cases: one generator for each case, which gives the same case for a seed in every
process.

Every choice is a number below a limit, with 0 as the simplest, and choices are recorded. A failing case shrinks by
replaying its choices with some of them made smaller (as in MacIver's minithesis).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

__all__ = ["Rejected", "Source", "shrunk"]

T = TypeVar("T")
F = TypeVar("F")

TRIES = 250
"""Cases that shrinking runs, at most."""


class Rejected(Exception):
    """The choices made up to now cannot give a valid case."""


class Source:
    """A sequence of choices: random ones from ``seed``, or given ones followed by zeros.

    Attributes:
      seed: the seed of the choices that are not given; choices: the choices that were made.
      seed_of_values: the seed of the arrays' values, which does not shrink.
    """

    def __init__(self, seed: int, given: Sequence[int] | None = None) -> None:
        self.seed = seed
        self.begin(given)

    def begin(self, given: Sequence[int] | None = None) -> None:
        """Choose anew, from the start."""
        self._random = random.Random(self.seed)  # its random() gives the same numbers in every version of Python
        self.seed_of_values = self._number(2**31)
        self._given = None if given is None else iter(given)
        self.choices: list[int] = []

    def _number(self, count: int) -> int:
        return int(self._random.random() * count)

    def below(self, count: int) -> int:
        """A number from 0 on, less than ``count``; of one there is no choice."""
        if count <= 1:
            return 0
        found = self._number(count) if self._given is None else min(next(self._given, 0), count - 1)
        self.choices.append(found)
        return found

    def integer(self, lo: int, hi: int) -> int:
        """From lo to hi, both included."""
        return lo + self.below(hi - lo + 1)

    def yes(self, one_in: int = 2) -> bool:
        """Yes once in so many times."""
        return self.below(one_in) == one_in - 1

    def pick(self, among: Sequence[T]) -> T:
        """One of these; the first is the simplest."""
        return among[self.below(len(among))]

    def some(self, among: Sequence[T]) -> list[T]:
        """One of these at least, in their order."""
        return [x for x in among if self.yes()] or [self.pick(among)]

    def order(self, among: Sequence[T]) -> list[T]:
        """All of these in any order."""
        left = [*among]
        return [left.pop(self.below(len(left))) for _ in range(len(left))]


def shrunk(choices: Sequence[int], fails: Callable[[Sequence[int]], F | None]) -> F | None:
    """What the least choices give that still fail; None where none less than these do.

    ``fails``: what draws and tries a case: what it says of it, None where the case does not fail or is none.
    """
    best, found = list(choices), None
    seen, improved = {tuple(choices)}, True
    while improved and len(seen) <= TRIES:
        improved = False
        for change in _changes(len(best)):
            less = change(best)
            if less is None or tuple(less) in seen or len(seen) > TRIES:
                continue
            seen.add(tuple(less))
            what = fails(less)
            if what is not None:
                best, found, improved = less, what, True
    return found


Change = Callable[[list[int]], "list[int] | None"]
"""What makes choices less; None where it does not apply."""


def _changes(size: int) -> Iterator[Change]:
    """Zeros in the place of some, none in the place of some, and one that is a part of itself, the largest first."""
    for width in dict.fromkeys((size // 2, size // 4, 8, 4, 2, 1)):
        for i in range(0, size if width else 0, max(width, 1)):
            yield functools.partial(_zeroed, i, width)
    for width in (2, 1):
        for i in reversed(range(size)):
            yield functools.partial(_without, i, width)
    for i in range(size):
        for eighths in (4, 6, 7):
            yield functools.partial(_lessened, i, eighths)


def _zeroed(i: int, width: int, now: list[int]) -> list[int] | None:
    some = now[i : i + width]
    return [*now[:i], *[0] * len(some), *now[i + width :]] if any(some) else None


def _without(i: int, width: int, now: list[int]) -> list[int] | None:
    return [*now[:i], *now[i + width :]] if i + width <= len(now) else None


def _lessened(i: int, eighths: int, now: list[int]) -> list[int] | None:
    if i >= len(now) or now[i] < 2:
        return None
    return [*now[:i], min(now[i] * eighths // 8, now[i] - 1), *now[i + 1 :]]
