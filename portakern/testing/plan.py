"""The plan of a check: how many cases have each edge or none, and their dtypes, regimes and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from portakern.errors import SpecError
from portakern.spec import Edge, Spec
from portakern.testing.cases import edges as edges_of
from portakern.testing.fixed import CasePreset, fits, turns_of
from portakern.testing.sizes import KINDS, Limits
from portakern.testing.strategies import dtype_cycle, dtypes_of

__all__ = ["EDGE_EXAMPLES", "CaseGroup", "plan"]

EDGE_EXAMPLES = 5
FREE_RUN = 25  # free cases of a run: parts of a check that may go to different processes
FREE = (
    "normal", "wide", "special", "normal", "very_negative", "large_mean", "normal", "near_overflow", "integers",
    "normal", "spikes", "constant", "subnormal",
)  # fmt: skip
"""How values of free cases are drawn, one after the other; thirteen, so that every dtype and every kind of extents
meets each."""


@dataclass(frozen=True)
class CaseGroup:
    """Cases that are drawn together: those of one edge, or (None) of no edge. ``dtype_cycle``: the dtypes of successive
    cases; ``fills``: whether their arrays fill a chip."""

    edge: Edge | None
    presets: list[CasePreset]
    fills: bool = False


def plan(spec: Spec[Any], limits: Limits, max_examples: int, only: Sequence[str] | None) -> list[CaseGroup]:
    """The runs of a check. Every dtype has its share of an edge's cases and of the free ones."""
    known, dtypes = edges_of(spec), dtypes_of(spec, limits)
    for name in only or ():
        if name not in known:
            raise SpecError(f"check({spec.name!r}): edge {name!r} is unknown; expected one of {', '.join(known)}")
    corners = [e for e in known.values() if (only is None or e.name in only) and _reachable(e, spec, limits)]
    corners.sort(key=_last)  # of few cases those on edges where most mistakes show
    if only is not None and not corners:
        raise SpecError(
            f"check({spec.name!r}): the implementation takes no case of edge {' or '.join(map(repr, only))}; "
            "name other edges"
        )
    if limits.shapes:
        return _plan_of_shapes(spec, limits, max_examples, corners, only is None)
    each = max(1, min(EDGE_EXAMPLES, max_examples // (2 * len(corners))))
    if only is not None:
        each = max(1, max_examples // len(corners))
    visited = corners[: max_examples // (2 * each)] if only is None else corners
    free = max_examples - each * len(visited) if only is None else 0
    runs = [
        # both sizes of small tiles by turns, so that whoever visits twice meets both on every seed, and rows that do
        # not lie along memory, which kernels may walk in another way: of four visits each size both ways
        CaseGroup(e, [_on_edge(d, i if each > 1 else None) for i, d in enumerate(dtype_cycle(dtypes, each, turn))])
        for turn, e in enumerate(visited)
    ]
    filling = min(free, -(-max_examples // 3)) if limits.fill else 0
    for count, fills in ((filling, True), (free - filling, False)):
        order = [_free(d, i) for i, d in enumerate(dtype_cycle(dtypes, count))]
        runs += [CaseGroup(None, order[i : i + FREE_RUN], fills) for i in range(0, count, FREE_RUN)]
    return runs


def _free(dtype: str, i: int) -> CasePreset:
    """The turn of the i-th free case. Most long ones have normal values: for sums that overflow nothing is promised,
    and next to the few that are large all others vanish."""
    rounds, place = divmod(i, len(KINDS))
    kind = KINDS[place]
    nth = rounds * KINDS.count(kind) + KINDS[:place].count(kind)
    normal = kind == "long" and nth % 5 < 4
    return CasePreset(dtype, regime="normal" if normal else FREE[i % len(FREE)], kind=kind, nth=nth)


def _last(edge: Edge) -> int:
    """0, or more for an edge that few mistakes need."""
    small = any(hi <= 1 for _, hi in edge.dims.values())
    return 2 * any(hi == 0 for _, hi in edge.dims.values()) + small + bool(edge.aliased)


def _on_edge(dtype: str, visit: int | None) -> CasePreset:
    """The turn of an edge's visit, None for the only one."""
    return (
        CasePreset(dtype)
        if visit is None
        else CasePreset(dtype, times=1 + visit % 2, across=bool((visit + 1) // 2 % 2))
    )


def _plan_of_shapes(
    spec: Spec[Any], limits: Limits, max_examples: int, corners: Sequence[Edge], free: bool
) -> list[CaseGroup]:
    """The runs of a check on given shapes: a regime and an edge in turn, each alone, so that whenever it is stopped
    much was seen."""
    dtypes = dtypes_of(spec, limits)
    reach = [(e, [s for s in limits.shapes if fits(e, spec, s, limits.options)]) for e in corners]
    reach = [(e, shapes) for e, shapes in reach if shapes]
    if not free and not reach:
        raise SpecError(
            f"check({spec.name!r}): no call of these shapes has edge {' or '.join(repr(e.name) for e in corners)}; "
            "name other edges"
        )
    runs: list[CaseGroup] = []
    regimes, visits = 0, 0
    while len(runs) < max_examples:
        on_edge = bool(reach) and (not free or bool(len(runs) % 2))
        edge, shapes = reach[visits % len(reach)] if on_edge else (None, limits.shapes)
        turn = visits // len(reach) + visits if on_edge else regimes
        runs.append(CaseGroup(edge, [*turns_of(1, dtypes, shapes, edge, turn)]))
        regimes, visits = regimes + (not on_edge), visits + on_edge
    return runs


def _reachable(edge: Edge, spec: Spec[Any], limits: Limits) -> bool:
    """Whether calls within the limits can be on an edge."""
    empty = any(hi == 0 for _, hi in edge.dims.values())
    # of given shapes every edge is wanted, one whose options are the defaults too
    defaults = {o.name: o.default for o in spec.options} if limits.shapes else {}
    return (
        all(limits.takes(name) for name in edge.given)
        and all(
            limits.takes(n) or n in limits.options or (n in defaults and defaults[n] == v)
            for n, v in edge.options.items()
        )
        and all(limits.options.get(name, value) == value for name, value in edge.options.items())
        and not limits.always & {*edge.absent}
        and (limits.empty or not empty)
    )
