"""The messages from a candidate's process, which the candidate may have written: a header in JSON of a known form. Any
other message is a ValueError."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from portakern.printable import printable
from portakern.spec.dtypes import DTYPES

__all__ = ["HEADER", "Input", "Problem", "WireOutput", "header", "outputs", "parameters", "problem", "words"]

HEADER = 1 << 20
"""Bytes of a header, at most."""

OUTPUTS, AXES, EXTENT, NAMES = 64, 64, 1 << 48, 1024
"""At most: outputs of a call, axes of an array, an extent, parameters or inputs of a candidate."""


class WireOutput(NamedTuple):
    """The header of an output. ``kind``: the name of its type if it is no array, and nothing else then; ``size``: the
    number of bytes that follow; ``shares``: inputs that share its memory; ``before``: the positions of earlier
    outputs that share its memory."""

    kind: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    contiguous: bool = True
    size: int = 0
    shares: tuple[str, ...] = ()
    before: tuple[int, ...] = ()


class Input(NamedTuple):
    """An array that a problem's ``get_inputs`` returns."""

    shape: tuple[int, ...]
    dtype: str


class Problem(NamedTuple):
    """What is read of a problem's file: its inputs, and the files beside it that it imports."""

    inputs: Sequence[Input] = ()
    beside: Sequence[str] = ()


def header(raw: bytes) -> dict[str, Any]:
    """The header of a reply."""
    try:
        told = json.loads(raw.decode("utf-8"), parse_constant=_none)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if type(told) is not dict:
        raise ValueError(f"its header is a {type(told).__name__}")
    return told


def _none(name: str) -> Any:
    raise ValueError(f"its header holds {name}")


def words(message: Mapping[str, Any], name: str, limit: int) -> str:
    """A text of a header as it may be printed, cut to so many letters."""
    return printable(_is(str, message.get(name, ""), name)[:limit])


def outputs(message: Mapping[str, Any]) -> list[WireOutput]:
    """What is told of the outputs of a call."""
    return [_output(_is(dict, o, "an output")) for o in _list(message.get("outputs"), OUTPUTS, "outputs")]


def _output(o: Mapping[str, Any]) -> WireOutput:
    if "type" in o:
        return WireOutput(kind=words(o, "type", 60) or "?")
    shape, dtype, size = _shape(o.get("shape")), words(o, "dtype", 40), _integer(o.get("bytes"), EXTENT, "bytes")
    if dtype in DTYPES and size != math.prod(shape) * DTYPES[dtype].numpy.itemsize:
        raise ValueError(f"an output of {dtype} {shape} has {size} bytes")
    shares = tuple(_is(str, n, "shares") for n in _list(o.get("shares", []), NAMES, "shares"))
    before = tuple(_integer(n, EXTENT, "before") for n in _list(o.get("before", []), NAMES, "before"))
    return WireOutput("", dtype, shape, _is(bool, o.get("contiguous"), "contiguous"), size, shares, before)


def problem(message: Mapping[str, Any]) -> Problem:
    """The inputs that a problem names, and the files beside it that it imports."""
    found = (_is(dict, i, "an input") for i in _list(message.get("inputs", []), NAMES, "inputs"))
    beside = [_is(str, b, "a file") for b in _list(message.get("beside", []), NAMES, "files beside it")]
    return Problem([Input(_shape(i.get("shape")), words(i, "dtype", 40)) for i in found], beside)


def parameters(message: Mapping[str, Any]) -> list[tuple[str, str, bool]] | None:
    """(name, kind, whether it has no default) of a candidate's parameters; None where it does not say."""
    if message.get("parameters") is None:
        return None
    found = []
    for p in _list(message["parameters"], NAMES, "parameters"):
        name, kind, lone = _list(p, 3, "a parameter")
        if not _is(str, name, "a parameter").isidentifier():
            raise ValueError(f"{printable(name)[:40]} is no parameter")
        found.append((name, _is(str, kind, "a parameter"), _is(bool, lone, "a parameter")))
    return found


def _is(kind: type, value: Any, what: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{what} is a {type(value).__name__}; expected a {kind.__name__}")
    return value


def _list(value: Any, most: int, what: str) -> list[Any]:
    if len(_is(list, value, what)) > most:
        raise ValueError(f"{what} has {len(value)} items; expected at most {most}")
    return list(value)


def _integer(value: Any, most: int, what: str) -> int:
    if not 0 <= _is(int, value, what) <= most:
        shown = printable(value)[:40] if value.bit_length() < 999 else "a longer number"
        raise ValueError(f"{what} is {shown}; expected at most {most}")
    return int(value)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(_integer(n, EXTENT, "an extent") for n in _list(value, AXES, "a shape"))
