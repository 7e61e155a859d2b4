"""Random calls, for which nobody tuned: shapes drawn from families, which are data (``families.json``).

A family lists ops, each with ranges of its dimensions and options: ``[low, high]`` is a whole number drawn so that each
octave is as likely, half of the time rounded to a multiple of 64; ``{"of": [...]}`` is one of the values; the name of a
dimension is that dimension's value; a list of such in ``{"run": [...]}`` gives a run of axes. A draw whose arrays hold
more than ``most_elements`` elements or that takes more than ``most_flops`` operations is drawn again.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from portakern.core import registry
from portakern.core.framework import host_framework
from portakern.core.targets import HOST
from portakern.errors import SpecError
from portakern.tools.bench.suites import TimedCase
from portakern.tools.compile.abstract import bind_signature

__all__ = ["draw", "families"]

FILE = Path(__file__).with_name("families.json")
GRAIN = 64
ATTEMPTS = 10_000


@cache
def families() -> Mapping[str, Any]:
    """Family -> what its calls are drawn from."""
    found: Mapping[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def draw(family: str, count: int, seed: int, dtypes: Sequence[str] | None = None) -> list[TimedCase]:
    """So many calls of a family, the same for the same seed; ``dtypes`` None: the first of each op's usual ones.

    Raises:
      SpecError: there is no such family.
    """
    if family not in families():
        raise SpecError(f"tune: family {family!r} is unknown; expected one of {', '.join(families())}")
    rule = families()[family]
    rng = random.Random(f"{family} {seed}")
    found: list[TimedCase] = []
    for _ in range(ATTEMPTS):
        entry = rule["ops"][len(found) % len(rule["ops"])]
        values = _values(entry.get("dims", {}), rng)
        options = _values(entry.get("options", {}), rng)
        op = entry["op"]
        spec = registry.find_spec(op)
        own = spec.usual_dtypes[:1] if dtypes is None else [d for d in dtypes if d in spec.dtypes]
        if not own:
            raise SpecError(f"tune: {op} has none of the dtypes {', '.join(dtypes or ())}")
        case = TimedCase(
            family, op, own[len(found) % len(own)], values, options, tuple(entry.get("given", ())),
            gradient=bool(entry.get("gradient")),
        )  # fmt: skip
        if _fits(case, rule):
            found.append(case)
        if len(found) == count:
            return found
    raise SpecError(f"tune: family {family!r} gives no {count} calls within its own limits; widen them in {FILE.name}")


def _fits(case: TimedCase, rule: Mapping[str, Any]) -> bool:
    call = bind_signature(case.spec, case.signature, host_framework(), HOST)
    shapes = [shape for shape, _, _ in case.signature["arrays"].values()] + [s for s, _ in call.outputs.values()]
    elements = max(math.prod(s) for s in shapes)
    return elements <= rule["most_elements"] and call.flops <= rule["most_flops"]


def _values(rules: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, rule in rules.items():
        found[name] = _value(rule, found, rng)
    return found


def _value(rule: Any, known: Mapping[str, Any], rng: random.Random) -> Any:
    if isinstance(rule, str):
        return known[rule]
    if isinstance(rule, Mapping) and "of" in rule:
        return rng.choice(rule["of"])
    if isinstance(rule, Mapping):
        return tuple(_value(r, known, rng) for r in rule["run"])
    low, high = rule
    value = round(math.exp(rng.uniform(math.log(low), math.log(high))))
    rounded = max(GRAIN, value // GRAIN * GRAIN)
    return rounded if rng.random() < 0.5 and low <= rounded <= high else value
