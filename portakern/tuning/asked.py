"""The calls that are tuned for, as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from portakern.compiling.forms import Form, typical_form
from portakern.core import registry
from portakern.errors import SpecError
from portakern.spec import Spec

__all__ = ["Asked", "asked", "parse_shape"]


@dataclass(frozen=True, eq=False)
class Asked:
    """A call to tune for. ``family``: the suite that it is of, or the op's name; ``dtype``: the op's."""

    spec: Spec[Any]
    form: Form
    dtype: str
    family: str

    @property
    def text(self) -> str:
        """The same for the same call, in any process."""
        return json.dumps([self.spec.name, self.form], sort_keys=True)


def asked(spec: Spec[Any], dtype: str, given: Mapping[str, Any], family: str = "") -> Asked:
    """The op's typical call in a dtype, with dimensions, options and optional arrays ``given`` otherwise."""
    return Asked(spec, typical_form(spec, dtype, given), dtype, family or spec.name)


def parse_shape(command: str, text: str) -> dict[str, Any]:
    """``m=64,batch=2x3,is_causal=true`` as values by name.

    Raises:
      SpecError: it is not of that form.
    """
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not (equals and name.isidentifier() and value):
            raise SpecError(f"{command}: --shape is {text!r}; expected name=value,..., such as m=64,batch=2x3")
        found[name] = _value(command, name, value)
    return found


def _value(command: str, name: str, text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return tuple(map(int, text.split("x"))) if "x" in text else int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def forward_first(found: Sequence[Asked]) -> list[Asked]:
    """The calls by op, those of a forward op before those of its gradient, which is what a table's reader expects."""
    order = {name: i for i, name in enumerate(registry.loadable())}
    return sorted(found, key=lambda a: (order.get(a.spec.name, len(order)), a.dtype))
