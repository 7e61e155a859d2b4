"""Read a case from the line that a failure printed, and report mistakes in it: people edit such lines by hand."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from typing import Any

from portakern.errors import SpecError
from portakern.spec import Spec
from portakern.spec.dtypes import DTYPES
from portakern.spec.options import shown
from portakern.testing.cases import LAYOUTS, REGIMES, Case, edges
from portakern.testing.laws import LawCase

__all__ = ["read"]


def read(spec: Spec[Any], text: str) -> Case | LawCase:
    """The case of a line of JSON.

    Raises:
      SpecError: it is no case of this op; the message names the field, what came and what was expected.
    """
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise SpecError(
            f"{spec.name}: the case {shown(text)} is not JSON: {e}; expected the JSON object that a failure printed"
        ) from None
    if not isinstance(raw, dict):
        raise SpecError(f"{spec.name}: the case is {shown(raw)}; expected the JSON object that a failure printed")
    kind = LawCase if "law" in raw else Case
    _named(spec, "the case", raw, [f.name for f in fields(kind)])
    for f in fields(kind):
        if f.name not in raw and f.default is MISSING and f.default_factory is MISSING:
            raise SpecError(f"{spec.name}: the case has no {f.name!r}; expected the line that a failure printed")
    _expect(spec, "dtype", raw["dtype"], raw["dtype"] in [*spec.dtypes], f"one of {', '.join(spec.dtypes)}")
    seed = raw.get("seed", 0)
    _expect(spec, "seed", seed, type(seed) is int and seed >= 0, "a whole number >= 0")
    if kind is LawCase:
        _expect(spec, "law", raw["law"], raw["law"] in [*spec.laws], f"one of {', '.join(spec.laws) or '(no laws)'}")
        return LawCase(**raw)
    return _case(spec, raw)


def _case(spec: Spec[Any], raw: dict[str, Any]) -> Case:
    arrays = [a.name for a in spec.arrays]
    known: dict[str, tuple[Collection[str], Collection[str] | None]] = {  # field -> its names, and their values
        "shapes": (arrays, None),
        "layouts": (arrays, LAYOUTS),
        "masks": (arrays, REGIMES),
        "dtypes": (arrays, DTYPES),
        "options": ([o.name for o in spec.options] + ["wants"] * spec.is_vjp, None),
    }
    for name, (names, values) in known.items():
        given = raw.get(name, {})
        _expect(spec, name, given, isinstance(given, dict), "an object")
        _named(spec, name, given, names)
        for key, value in given.items():
            if values is not None:
                _expect(spec, f"{name}[{key!r}]", value, value in [*values], f"one of {', '.join(values)}")
    for name, shape in raw["shapes"].items():
        right = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
        _expect(spec, f"shapes[{name!r}]", shape, right, "a list of extents")
    cuts = raw.get("parts", {})
    right = isinstance(cuts, dict) and len(cuts) <= 1
    right = right and all(isinstance(c, list) and all(type(n) is int and n >= 0 for n in c) for c in cuts.values())
    _expect(spec, "parts", cuts, right, "an object of one axis and the extents of its parts")
    tiling, wider, edge = raw.get("tiling", {}), raw.get("wider", []), raw.get("edge", "")
    right = isinstance(tiling, dict) and all(type(n) is int for n in tiling.values())
    _expect(spec, "tiling", tiling, right, "an object of whole numbers by tile")
    for name, given in (("wider", wider), ("aliased", raw.get("aliased", []))):
        right = isinstance(given, list) and all(n in arrays for n in given)
        _expect(spec, name, given, right, "a list of arrays' names")
    regime = raw.get("regime", "normal")
    _expect(spec, "regime", regime, regime in [*REGIMES], f"one of {', '.join(REGIMES)}")
    _expect(spec, "edge", edge, edge in ["", *edges(spec)], f"one of {', '.join(edges(spec))}")
    case = Case.from_json(json.dumps(raw))
    case.bound_alone(spec)  # says what is wrong with the call itself, in the op's words
    return case


def _named(spec: Spec[Any], what: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            where = what if what.startswith("the case") else f"the case's {what}"
            raise SpecError(f"{spec.name}: {where} has {name!r}; expected names among {', '.join(known)}")


def _expect(spec: Spec[Any], name: str, value: Any, right: bool, expected: str) -> None:
    if not right:
        raise SpecError(f"{spec.name}: the case's {name} is {shown(value)}; expected {expected}")
