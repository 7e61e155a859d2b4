"""The signature of a call: every argument that decides how the call is served, which is all but the values of arrays.

Calls of one signature are bound, dispatched and tiled alike. The first of them does this work, and the result is kept
(:class:`portakern.core.plan.CallPlan`). Reading a signature must cost less than the work that it saves: :func:`reader`
writes a straight-line function for each op and framework, as :mod:`portakern.core.binder` does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import copysign
from typing import Any

from portakern.core import codegen
from portakern.core.framework import BY_TYPE, frameworks
from portakern.spec import ArrayArg, Spec

__all__ = ["Signature", "option_key", "reader"]

Signature = tuple[Any, ...]

PLAIN = frozenset({bool, int, str, type(None)})
"""Kinds of values that are told apart by their kind and by what they equal."""


@functools.cache
def reader(spec: Spec[Any]) -> Callable[..., tuple[Signature | None, dict[str, Any]]]:
    """A function that takes an op's arguments and gives their signature, and the arrays by name. Last in a signature is
    which arrays want a gradient, False where none gets one. It is None where arrays are of a framework whose calls have
    none, one of them is not in its memory as it is, or somebody steps in.

    It raises what any expression on wrong arguments may: TypeError, AttributeError, RuntimeError.
    """
    if not spec.arrays:
        return lambda *args, **kwargs: (None, {})
    keywords = [o.name for o in spec.options] + ["wants"] * spec.is_vjp + ["overwrite"] * bool(spec.aliases)
    parameters = [a.name + ("=None" if a.optional else "") for a in spec.arrays]
    parameters += ["*"] * bool(keywords) + [f"{n}=_DEFAULT_{n}" for n in keywords]
    plain = "({0}.__class__, {0}) if {0}.__class__ in _PLAIN else _option_key({0})"
    options = [f"{n} if {n} is _DEFAULT_{n} else {plain.format(n)}" for n in keywords]
    arrays = ", ".join(f"{a.name!r}: {a.name}" for a in spec.arrays)
    env: dict[str, Any] = {"_BY_TYPE": BY_TYPE, "_PLAIN": PLAIN, "_option_key": option_key}
    env |= {"_DEFAULT_wants": None, "_DEFAULT_overwrite": None}
    env |= {f"_DEFAULT_{o.name}": o.default for o in spec.options}
    lines = [f"def read({', '.join(parameters)}):", f"    _framework = _BY_TYPE.get({spec.lead.name}.__class__)"]
    for f in frameworks().values():
        if not f.signature:
            continue
        env |= {f"_{f.name}": f, f"_{f.name}_undisturbed": f.undisturbed, f"_{f.name}_watching": f.watching}
        parts = [_argument_text(a, f.signature, "None if {0} is None else ({1})") for a in spec.arrays]
        flags = ", ".join(_argument_text(a, f.watched, "{0} is not None and {1}") for a in spec.arrays)
        watched = " or ".join(_argument_text(a, f.watched, "{0} is not None and {1}") for a in spec.arrays)
        there = "".join(
            f" and ({_argument_text(a, f.there, '{0} is None or {1}', f'_{f.name}')})" for a in spec.arrays if f.there
        )
        lines += [
            f"    if _framework is _{f.name} and _{f.name}_undisturbed({spec.autocast is not None}){there}:",
            f"        _seen = ({watched}) and _{f.name}_watching() and ({flags},)",
            f"        return ({', '.join([*parts, *options])}, _seen), {{{arrays}}}",
        ]
    text = "\n".join([*lines, "    return None, {}"])
    read: Callable[..., tuple[Signature | None, dict[str, Any]]] = codegen.written(
        f"signature of {spec.name}", text, env, "read"
    )
    return read


def _argument_text(a: ArrayArg, what: str, optional: str, framework: str = "") -> str:
    text = what.format(x=a.name, framework=framework)
    return optional.format(a.name, text) if a.optional else text


def option_key(value: Any) -> Signature:
    """What tells an option's value from every other: 1, 1.0 and True are equal and hash alike, and so are the zeros.

    Raises:
      TypeError: it is of a kind that only the binder knows.
    """
    kind = value.__class__
    if kind is float:
        return kind, value, copysign(1.0, value)
    if kind in PLAIN:
        return kind, value
    if kind is tuple:
        return kind, *map(option_key, value)
    raise TypeError(f"{kind} has no form")
