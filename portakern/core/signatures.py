"""The signature of a call: every argument that decides how the call is served, which is all but the values of arrays.

Calls of one signature are bound, dispatched and tiled alike. The first of them does this work, and the result is kept
(:class:`portakern.core.plan.CallPlan`). Reading a signature must cost less than the work that it saves: :func:`reader`
writes a straight-line function for each op and framework, as :mod:`portakern.core.binder` does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from math import copysign
from typing import Any

from portakern.core import codegen
from portakern.core.framework import BY_TYPE, frameworks
from portakern.core.observe import OBSERVERS
from portakern.spec import ArrayArg, Spec

__all__ = ["ALIKE", "Signature", "matcher", "option_key", "reader"]

Signature = tuple[Any, ...]

ALIKE = 4
"""How many calls of a kind are told apart (:func:`matcher`) before their signatures are."""

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
    keywords, parameters, defaults = _parameters(spec)
    plain = "({0}.__class__, {0}) if {0}.__class__ in _PLAIN else _option_key({0})"
    options = [f"{n} if {n} is _DEFAULT_{n} else {plain.format(n)}" for n in keywords]
    arrays = ", ".join(f"{a.name!r}: {a.name}" for a in spec.arrays)
    env: dict[str, Any] = {"_BY_TYPE": BY_TYPE, "_PLAIN": PLAIN, "_option_key": option_key, **defaults}
    lines = [f"def read({parameters}):", f"    _framework = _BY_TYPE.get({spec.lead.name}.__class__)"]
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


def matcher(
    spec: Spec[Any], arrays: Mapping[str, Any], options: Mapping[str, Any]
) -> Callable[..., dict[str, Any] | None] | None:
    """A function that takes an op's arguments and gives the arrays by name where these have the signature of a call,
    which has been read and has a plan; else None, and it may raise what :func:`reader`'s does. It compares where that
    writes down, in a third of the time. None where the framework of the arrays has no quick comparison.

    Args:
      arrays: of the call. options: those that it names.
    """
    given = {n: a for n, a in arrays.items() if a is not None}
    compared = BY_TYPE[given[spec.lead.name].__class__].comparison(given)
    if compared is None:
        return None
    keywords, parameters, defaults = _parameters(spec)
    text, env = compared
    env = {**env, **defaults, "_OBSERVERS": OBSERVERS, "_option_key": option_key}
    tests = [f"{n} is {'not ' * (n in given)}None" for n in (a.name for a in spec.arrays if a.optional)]
    for n in keywords:
        if n not in options:
            tests.append(f"{n} is _DEFAULT_{n}")
        else:
            env |= {f"_GIVEN_{n}": options[n], f"_KEY_{n}": option_key(options[n])}
            tests.append(f"({n} is _GIVEN_{n} or _option_key({n}) == _KEY_{n})")
    there = ", ".join(f"{a.name!r}: {a.name}" for a in spec.arrays)
    lines = [f"def match({parameters}):", f"    if {' and '.join([*tests, 'not _OBSERVERS', text])}:"]
    source = "\n".join([*lines, f"        return {{{there}}}", "    return None"])
    match: Callable[..., dict[str, Any] | None] = codegen.written(f"match of {spec.name}", source, env, "match")
    return match


def _parameters(spec: Spec[Any]) -> tuple[list[str], str, dict[str, Any]]:
    """The names of an op's options, the text of all its parameters, and the defaults that this names."""
    keywords = [o.name for o in spec.options] + ["wants"] * spec.is_vjp + ["overwrite"] * bool(spec.aliases)
    parameters = [a.name + ("=None" if a.optional else "") for a in spec.arrays]
    parameters += ["*"] * bool(keywords) + [f"{n}=_DEFAULT_{n}" for n in keywords]
    defaults: dict[str, Any] = {"_DEFAULT_wants": None, "_DEFAULT_overwrite": None}
    return keywords, ", ".join(parameters), defaults | {f"_DEFAULT_{o.name}": o.default for o in spec.options}


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
