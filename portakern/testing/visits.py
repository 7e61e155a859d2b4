"""What of an op's contract a check has met, and what it has not: a verdict says nothing of the latter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from portakern.spec import Spec
from portakern.spec.options import Option
from portakern.testing.cases import Case
from portakern.testing.cases import edges as edges_of
from portakern.testing.regimes import VALUE_REGIMES

__all__ = ["WHAT", "Visits", "contract"]

WHAT = ("edges", "laws", "regimes", "dtypes", "arguments", "layouts", "tilings", "variants")
"""What an op's contract is made of: named corners, properties between calls, distributions of values, the op's dtypes,
optional arrays and options that are not at their default, ways to lie in memory, tilings, and a backend's variants."""

DEFAULT, OTHERS = "default", "others than the default"


@dataclass
class Visits:
    """Of one subject: ``there``, what its contract has of each of WHAT; ``met``, what some compared case had of it."""

    present: dict[str, tuple[str, ...]] = field(default_factory=dict)
    met: dict[str, set[str]] = field(default_factory=dict)

    def meet(self, what: str, *names: str) -> None:
        """Some compared case had these."""
        self.met.setdefault(what, set()).update(names)

    def case(self, case: Case, tiling: str) -> None:
        """A case was compared. ``tiling``: in words, "default" for that."""
        self.meet("edges", *([case.edge] if case.edge else []))
        self.meet("regimes", case.regime)
        self.meet("dtypes", case.dtype)
        self.meet("arguments", *case.shapes, *case.options, *(f"{n}={v!r}" for n, v in case.options.items()))
        self.meet("layouts", *([*case.layouts.values()] or ["contiguous"]))
        self.meet("tilings", DEFAULT if tiling == DEFAULT else OTHERS)

    def to_dict(self) -> dict[str, dict[str, list[str]]]:
        """As plain data for JSON."""
        return {
            "there": {w: [*names] for w, names in self.present.items()},
            "met": {w: sorted(names) for w, names in self.met.items()},
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Mapping[str, Sequence[str]]]) -> Visits:
        """What :meth:`to_dict` gave."""
        there = {w: tuple(names) for w, names in plain["there"].items()}
        return cls(there, {w: {*names} for w, names in plain["met"].items()})

    def without(self) -> dict[str, tuple[str, ...]]:
        """What no compared case had, by kind; kinds of which nothing is missing are left out."""
        left = {w: tuple(n for n in self.present.get(w, ()) if n not in self.met.get(w, ())) for w in WHAT}
        return {w: names for w, names in left.items() if names}

    def with_(self, other: Visits) -> Visits:
        """Both parts of a check of one subject."""
        met = {w: self.met.get(w, set()) | other.met.get(w, set()) for w in (*self.met, *other.met)}
        return Visits({**self.present, **other.present}, met)


def contract(
    spec: Spec[Any],
    takes: Callable[[str], bool],
    lawful: bool,
    empty: bool,
    layouts: Sequence[str],
    tiles: bool,
    variants: tuple[str, ...],
) -> dict[str, tuple[str, ...]]:
    """What there is to meet of an op.

    Args:
      takes: whether what is checked takes an argument; what it lacks is told as a concession, and so are edges on that.
      lawful: whether it is held to laws; empty: whether an extent may be 0; layouts: how arrays may lie; tiles: whether
        it has tilings; variants: those of its backend that have the op.
    """
    edges = [
        e.name
        for e in edges_of(spec).values()
        if all(map(takes, (*e.given, *e.options))) and (empty or all(hi for _, hi in e.dims.values()))
    ]
    arrays = [a.name for a in spec.arrays if a.optional and takes(a.name)]
    options = [name for o in spec.options if takes(o.name) for name in _settings(o)]
    return {
        "edges": tuple(edges),
        "laws": tuple(spec.laws) if lawful else (),
        "regimes": tuple(VALUE_REGIMES),
        "dtypes": tuple(spec.dtypes),
        "arguments": (*arrays, *options),
        "layouts": tuple(layouts),
        "tilings": (DEFAULT, OTHERS) if tiles else (),
        "variants": variants,
    }


def _settings(o: Option) -> Iterator[str]:
    """What an option can be beside its default: each of a few words or a dtype, or any other number."""
    if o.kind in ("choice", "dtype"):
        yield from (f"{o.name}={v!r}" for v in o.choices if v != o.default)
    else:
        yield o.name
