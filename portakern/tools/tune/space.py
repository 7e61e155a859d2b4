"""The space of tilings: the spec's tiles and the implementation's launch parameters, restricted to legal values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from portakern.core.backend import Implementation
from portakern.core.call import Call
from portakern.spec import Spec

__all__ = ["ENUMERATED", "Space", "Tiling", "frozen", "space_of"]

Tiling = Mapping[str, int]

ENUMERATED = 20_000
"""Combinations of values up to which every one is looked at: a fraction of a second."""


def frozen(tiling: Tiling) -> tuple[tuple[str, int], ...]:
    """A tiling that can be a key."""
    return tuple(sorted(tiling.items()))


@dataclass(frozen=True, eq=False)
class Space:
    """The tilings that may serve some calls, which all find theirs under one key.

    Attributes:
      values: tile or knob -> the values that it may take, least first. refuses: why a tiling is not legal, or None.
    """

    values: Mapping[str, tuple[int, ...]]
    refuses: Callable[[Tiling], str | None]
    _legal: dict[Any, bool] = field(default_factory=dict, repr=False)

    def legal(self, tiling: Tiling) -> bool:
        """Whether a tiling is one of the space."""
        key = frozen(tiling)
        if key not in self._legal:
            known = tiling.keys() == self.values.keys() and all(v in self.values[n] for n, v in tiling.items())
            self._legal[key] = known and self.refuses(tiling) is None
        return self._legal[key]

    @property
    def combinations(self) -> int:
        """All combinations of values, legal or not."""
        return math.prod(map(len, self.values.values()))

    @cached_property
    def every(self) -> list[dict[str, int]] | None:
        """Every legal tiling; None where there are too many combinations to look at each."""
        if self.combinations > ENUMERATED:
            return None
        found = (dict(zip(self.values, chosen, strict=True)) for chosen in itertools.product(*self.values.values()))
        return [tiling for tiling in found if self.legal(tiling)]

    def neighbours(self, tiling: Tiling) -> Iterator[dict[str, int]]:
        """The legal tilings that have one value a step up or down, then those that have one up and another down."""
        names = [n for n in self.values if len(self.values[n]) > 1]
        steps = [{n: by} for n in names for by in (1, -1)]
        steps += [{a: 1, b: -1} for a, b in itertools.permutations(names, 2)]
        for step in steps:
            moved = self._moved(tiling, step)
            if moved is not None and self.legal(moved):
                yield moved

    def _moved(self, tiling: Tiling, step: Mapping[str, int]) -> dict[str, int] | None:
        found = dict(tiling)
        for name, by in step.items():
            values = self.values[name]
            place = values.index(tiling[name]) + by if tiling[name] in values else -1
            if not 0 <= place < len(values):
                return None
            found[name] = values[place]
        return found


def space_of(spec: Spec[Any], impl: Implementation, calls: Sequence[Call], default: Tiling) -> Space:
    """The tilings of calls that find theirs under one key.

    A tiling is legal where the implementation supports each call with it, as it stands: one that ``fit`` would change
    is another one under a longer name. Of tiles beyond an extent the first that covers it stands for all, and so does
    the default's, from which a search begins.
    """
    ranges = {**spec.tiling, **impl.knobs}
    useful = {n: _useful(ranges[n].values, [_extent(c, ranges[n].of) for c in calls]) for n in default}
    values = {n: tuple(v for v in ranges[n].values if v in useful[n] or v == default[n]) for n in default}

    def refuses(tiling: Tiling) -> str | None:
        config = impl.configured(spec, tiling)
        for call in calls:
            if impl.fit is not None and impl.fit(call, config) != config:
                return "it is fitted to the call"
            reason = impl.supports(call, config)
            if reason:
                return reason
        return None

    return Space(values, refuses)


def _extent(call: Call, dimension: str | None) -> int | None:
    """What a tile divides; None where that is no extent of its own."""
    extent = call.dims.get(dimension) if dimension else None
    return max(extent, default=1) if isinstance(extent, tuple) else extent


def _useful(values: tuple[int, ...], extents: Sequence[int | None]) -> tuple[int, ...]:
    """The values up to the first that covers the longest extent."""
    known = [e for e in extents if e is not None]
    if len(known) < len(extents) or not known:
        return values
    return tuple(v for i, v in enumerate(values) if i == 0 or values[i - 1] < max(known))
