"""The mapping of an op's arguments to a candidate's: ``x=0,axis=1,weight=@norm.weight,y=out.movedim(1,-1)``.

* ``x=0`` or ``x=input``: the array x is the candidate's first argument, or the one of that name. Of an output:
  ``y=1`` or ``y=out``: the candidate writes it there, to an array that it is handed.
* ``weight=@norm.weight``: the array is written to that parameter of a module before each call.
* ``axis=1``: the option axis is 1 in every call, and built into the candidate; ``eps=@eps`` hands it over by that name.
* ``a=0.mT``, ``x=0.movedim(1,-1)``, ``x=0.flatten(1)``: the op's array is this view of the candidate's.
  ``y=.flatten(1)``, of an output that the candidate returns, likewise.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from portakern.errors import SpecError

__all__ = ["CandidateView", "Slot", "parse"]

VIEW = re.compile(r"\.(?P<name>mT|movedim|flatten)(?:\((?P<args>[-\d, ]*)\))?$")
ITEM = re.compile(r"\s*(?P<name>\w+)\s*=\s*(?P<value>(?:[^,()]|\([^()]*\))*)\s*(?:,|$)")


@dataclass(frozen=True)
class CandidateView:
    """An op's array as a view of the candidate's: with its last two axes transposed, one axis moved, or its last axes
    flattened."""

    name: str = ""
    args: tuple[int, ...] = ()

    def of_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The op's shape of a candidate's."""
        return self.to_op(np.broadcast_to(np.zeros((), np.int8), tuple(shape))).shape if self.name != "flatten" else (
            *shape[: self.args[0] % max(len(shape), 1)], math.prod(shape[self.args[0] % max(len(shape), 1) :])
        )  # fmt: skip

    def to_op(self, candidate_array: np.ndarray) -> np.ndarray:
        """The op's array of the candidate's."""
        if self.name == "mT":
            return np.swapaxes(candidate_array, -1, -2)
        if self.name == "movedim":
            return np.moveaxis(candidate_array, *self.args)
        if self.name == "flatten":
            return candidate_array.reshape(self.of_shape(candidate_array.shape))
        return candidate_array

    def back(self, array: np.ndarray, shape: Sequence[int] | None) -> np.ndarray:
        """The candidate's array of the op's; ``shape``: the candidate's, where axes were flattened."""
        if self.name == "mT":
            return np.swapaxes(array, -1, -2)
        if self.name == "movedim":
            return np.moveaxis(array, self.args[1], self.args[0])
        if self.name == "flatten" and shape is not None:
            return array.reshape((*array.shape[:-1], *shape[self.args[0] % len(shape) :]))
        return array


@dataclass(frozen=True)
class Slot:
    """Where an argument goes: ``position`` or ``keyword`` of the candidate's call, or ``parameter`` of its module. An
    output with none of them is returned."""

    position: int | None = None
    keyword: str | None = None
    parameter: str | None = None
    views: CandidateView = field(default_factory=CandidateView)


def parse(
    text: str, arrays: Sequence[str], outputs: Sequence[str], options: Sequence[str]
) -> tuple[Mapping[str, Slot], Mapping[str, Any]]:
    """(name -> its place, of arrays, outputs and options that are handed over; option -> its value in every call).

    Raises:
      SpecError: what is no such mapping, in words.
    """
    places: dict[str, Slot] = {}
    fixed: dict[str, Any] = {}
    at = 0
    while at < len(text):
        item = ITEM.match(text, at)
        if item is None or not item["value"].strip():
            raise SpecError(f"judge: --map is {text!r}; expected name=place, separated by commas, as in x=0,axis=1")
        at, name, value = item.end(), item["name"], item["value"].strip()
        if name in options:
            if value.startswith("@"):
                places[name] = Slot(keyword=value[1:])
            else:
                fixed[name] = _literal(name, value)
        elif name in arrays or name in outputs:
            places[name] = _slot(name, value, returned=name in outputs)
        else:
            raise SpecError(f"judge: --map names {name!r}; expected some of {', '.join((*arrays, *outputs, *options))}")
    return places, fixed


def _slot(name: str, value: str, returned: bool) -> Slot:
    views, found = CandidateView(), VIEW.search(value)
    if found:
        value = value[: found.start()]
        args = tuple(int(n) for n in (found["args"] or "").split(",") if n.strip())
        views = CandidateView(found["name"], args)
        if len(args) != {"mT": 0, "movedim": 2, "flatten": 1}[found["name"]]:
            raise SpecError(f"judge: --map {name}: expected .mT, .movedim(from,to) or .flatten(first)")
    if re.fullmatch(r"\d+", value):
        return Slot(position=int(value), views=views)
    if re.fullmatch(r"@[\w.]+", value):
        return Slot(parameter=value[1:], views=views)
    if re.fullmatch(r"\w+", value):
        return Slot(keyword=value, views=views)
    if value == "" and returned:
        return Slot(views=views)
    raise SpecError(f"judge: --map {name}={value!r}; expected a position, a name, or @parameter")


def _literal(name: str, value: str) -> Any:
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value  # an option of words
