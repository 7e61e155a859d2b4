"""Coverage of an op's contract: which parts of its spec the compared cases covered. A verdict holds for these alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from portakern.spec import Spec
from portakern.spec.options import Option
from portakern.testing.cases import Case
from portakern.testing.cases import edges as edges_of
from portakern.testing.regimes import VALUE_REGIMES

__all__ = ["PARTS", "Coverage", "contract"]

PARTS = ("edges", "laws", "regimes", "dtypes", "arguments", "layouts", "tilings", "variants")
"""The parts of a contract: edges, laws between calls, regimes of values, the op's dtypes, optional arrays and options
that are not at their default, memory layouts, tilings, and a backend's variants."""

DEFAULT, OTHERS = "default", "others than the default"


@dataclass
class Coverage:
    """The coverage of one subject. ``declared``: part of the contract (see PARTS) -> the names that the subject has;
    ``covered``: part -> the names that some compared case had."""

    declared: dict[str, tuple[str, ...]] = field(default_factory=dict)
    covered: dict[str, set[str]] = field(default_factory=dict)

    def cover(self, what: str, *names: str) -> None:
        """Some compared case had these."""
        self.covered.setdefault(what, set()).update(names)

    def add_case(self, case: Case, tiling: str) -> None:
        """A case was compared. ``tiling``: in words, "default" for that."""
        self.cover("edges", *([case.edge] if case.edge else []))
        self.cover("regimes", case.regime)
        self.cover("dtypes", case.dtype)
        self.cover("arguments", *case.shapes, *case.options, *(f"{n}={v!r}" for n, v in case.options.items()))
        self.cover("layouts", *([*case.layouts.values()] or ["contiguous"]))
        self.cover("tilings", DEFAULT if tiling == DEFAULT else OTHERS)

    def to_dict(self) -> dict[str, dict[str, list[str]]]:
        """As plain data for JSON."""
        return {
            "declared": {w: [*names] for w, names in self.declared.items()},
            "covered": {w: sorted(names) for w, names in self.covered.items()},
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Mapping[str, Sequence[str]]]) -> Coverage:
        """What :meth:`to_dict` gave."""
        declared = {w: tuple(names) for w, names in plain["declared"].items()}
        return cls(declared, {w: {*names} for w, names in plain["covered"].items()})

    def missing(self) -> dict[str, tuple[str, ...]]:
        """Part of the contract -> the names that no compared case had; parts that miss none are left out."""
        left = {w: tuple(n for n in self.declared.get(w, ()) if n not in self.covered.get(w, ())) for w in PARTS}
        return {w: names for w, names in left.items() if names}

    def merged(self, other: Coverage) -> Coverage:
        """The coverage of both parts of a check of one subject."""
        covered = {w: self.covered.get(w, set()) | other.covered.get(w, set()) for w in (*self.covered, *other.covered)}
        return Coverage({**self.declared, **other.declared}, covered)


def contract(
    spec: Spec[Any],
    takes: Callable[[str], bool],
    lawful: bool,
    empty: bool,
    layouts: Sequence[str],
    tiles: bool,
    variants: tuple[str, ...],
) -> dict[str, tuple[str, ...]]:
    """Part of the contract -> the names that a check of an op can cover.

    Args:
      takes: whether the subject accepts an argument. Arguments that it lacks, and their edges, are reported as not
        required.
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
