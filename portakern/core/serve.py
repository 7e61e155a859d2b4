"""Run a bound call on the implementation that its arrays, or its caller, chose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from portakern.core.call import Call
from portakern.core.framework import Framework, convert
from portakern.core.observe import OBSERVERS, Served, tell
from portakern.core.oracle import degenerate_outputs, rounded_oracle
from portakern.core.refusals import check_room
from portakern.core.route import Choice, Route, pick, routes, to_framework
from portakern.core.tilings import resolve

__all__ = ["Plan", "call_through", "plan", "serve"]


class Plan:
    """What was decided for calls of one form: who serves them, with which tiling, on which target.

    Attributes:
      call: such a call, without its arrays. serve: takes the arrays by name, gives every output in the spec's order.
    """

    __slots__ = ("_made", "call", "route", "serve", "tiling")

    def __init__(self, call: Call, route: Route, tiling: Mapping[str, int]) -> None:
        self.call, self.route, self.tiling = call.replace(arrays={}), route, tiling
        self._settle(self._learn if route.impl.family.replays and not route.embedded else self._run)

    def _settle(self, how: Callable[[dict[str, Any]], tuple[Any, ...]]) -> None:
        self._made = how
        self.serve: Callable[[dict[str, Any]], tuple[Any, ...]] = self._over if self.call.over else how

    def _run(self, arrays: dict[str, Any]) -> tuple[Any, ...]:
        return self.route.run(self.call.replace(arrays=arrays), self.tiling)

    def _over(self, arrays: dict[str, Any]) -> tuple[Any, ...]:
        """Where arrays lie is no part of a form, and no kernel tells their library what it wrote to."""
        check_room(self.call.replace(arrays=arrays))
        outputs = self._made(arrays)
        self.call.framework.wrote([arrays[name] for name in self.call.over])
        return outputs

    def _learn(self, arrays: dict[str, Any]) -> tuple[Any, ...]:
        """Serve the second call of a form, and learn how to serve the others."""
        self._settle(self._run)  # for other threads meanwhile
        learn = self.route.impl.family.load_replays()
        assert learn is not None
        outputs, again = learn(self.route.impl, self.call.replace(arrays=arrays), self.tiling)
        self._settle(again or self._run)
        found: tuple[Any, ...] = outputs
        return found


def plan(call: Call, choice: Choice) -> Plan | None:
    """What :func:`serve` decided for a call that it has served, to keep for calls of its form; None where something is
    left to decide each time: how arrays cross to another framework."""
    candidates = routes(call, choice)
    if candidates is None:
        return None
    route = candidates[0]
    if call.degenerate or route.impl.backend.oracle or route.framework is not call.framework:
        return None
    call.target, call.interpret = route.target, route.interpret
    return Plan(call, *pick(candidates, call, choice.tiling))


def call_through(call: Call, choice: Choice) -> tuple[Any, ...]:
    """Every output of a bound call in the spec's order, None for an unwanted one: run, or seen by whoever watches or
    traces the caller's arrays.
    """
    watched = call.framework.check(call)
    if call.over:
        check_room(call, watched)
    candidates = routes(call, choice)
    if candidates is None:
        return call.framework.trace(call, choice)
    if watched:
        return call.framework.differentiate(call, choice)
    return serve(call, candidates, choice.tiling)


def serve(call: Call, candidates: tuple[Route, ...], user: Mapping[str, int]) -> tuple[Any, ...]:
    """Run a checked call: every output in the spec's order, None for an unwanted one.

    ``user``: tiles that the caller named.
    """
    route = candidates[0]  # all are of one backend, and run on one target
    framework = route.framework
    call.target, call.interpret = route.target, route.interpret
    tiling: Mapping[str, int] = {}
    seen = _kept(call) if OBSERVERS and call.over else call
    if call.degenerate:
        outputs = _written_over(call, degenerate_outputs(call))
    elif route.impl.backend.oracle:
        tiling = resolve(route.impl, call, user).tiling
        outputs = _written_over(call, _outputs_back(call, framework, rounded_oracle(call), copy=False))
    elif framework is call.framework:
        route, tiling = pick(candidates, call, user)
        outputs = route.run(call, tiling)
        if call.over:
            framework.wrote([call.arrays[name] for name in call.over])
    else:
        with framework.outside():
            inner = to_framework(call, framework).replace(over=())
            route, tiling = pick(candidates, inner, user)
            outputs = route.run(inner if route.impl.ours else _guarded(inner, call), tiling)
            # no immutable array may share memory that a kernel keeps (a workspace) or that somebody may write to
            outputs = _outputs_back(call, framework, outputs, copy=call.framework.immutable or framework.immutable)
        outputs = _written_over(call, outputs)
    if OBSERVERS:
        impl = route.impl
        tell(Served(seen, impl.backend.name, impl.family.name, route.interpret, dict(tiling), outputs))
    return outputs


def _kept(call: Call) -> Call:
    """The call as it was before results were written over its inputs, for who looks on."""
    arrays = call.arrays | {name: call.framework.copy(call.arrays[name]) for name in call.over}
    return call.replace(arrays=arrays, over=())


def _written_over(call: Call, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Outputs that were made elsewhere, those in their place that lie over an input."""
    if not call.over:
        return outputs
    found = []
    for o, out in zip(call.spec.outputs, outputs, strict=True):
        given = call.overwritten(o.name)
        if given is not None:
            call.framework.write(given, out)
        found.append(out if given is None else given)
    return tuple(found)


def _guarded(inner: Call, caller: Call) -> Call:
    """The call with copies of what its caller's library would not let anybody write to, where the implementation's
    library cannot tell: memory that is read-only, mapped from a file, or a constant of JAX's must not change, nor
    fault, whatever somebody's kernel does."""
    arrays = dict(inner.arrays)
    for name, given in caller.arrays.items():
        kept = given is not None and not caller.framework.may_write(given, ())
        if kept and inner.framework.may_write(arrays[name], ()):
            arrays[name] = inner.framework.copy(arrays[name])
    return inner.replace(arrays=arrays)


def _outputs_back(call: Call, framework: Framework, outputs: tuple[Any, ...], copy: bool) -> tuple[Any, ...]:
    """Outputs as the caller's arrays."""
    copy = copy or call.framework.resizes
    return tuple(None if o is None else convert(o, framework, call.framework, call.device, copy) for o in outputs)
