"""Plans: which implementation serves a bound call, and how later calls of the same signature reuse this decision."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from portakern.core.call import Call
from portakern.core.config import NOTHING, Config
from portakern.core.dispatch import Choice, Route, pick, routes, to_framework
from portakern.core.framework import Framework, convert
from portakern.core.observe import OBSERVERS, Served, tell
from portakern.core.oracle import degenerate_outputs, rounded_oracle
from portakern.core.refusals import check_room
from portakern.core.tilings import resolve

__all__ = ["CallPlan", "call_through", "decide", "serve"]


class CallPlan:
    """The decision for one call, or for all calls of one signature: the implementation, the tiling and the target.

    Attributes:
      call: one of these calls, without its arrays. serve: a function of the arrays by name that returns all outputs in
        the spec's order.
      lasting: whether the plan holds for all calls of the signature. If not, something is decided for each call, such
        as the conversion of arrays to another framework.
    """

    __slots__ = ("_made", "_once", "call", "config", "lasting", "route", "serve")

    def __init__(self, call: Call, route: Route, config: Config, once: Once | None = None) -> None:
        self.call, self.route, self.config = call.replace(arrays={}), route, config
        self.lasting, self._once = once is None, once
        self._settle(self._first)

    def _settle(self, how: Callable[[dict[str, Any]], tuple[Any, ...]]) -> None:
        self._made = how
        self.serve: Callable[[dict[str, Any]], tuple[Any, ...]] = self._over if self.call.over else how

    def begin(self, call: Call) -> tuple[Any, ...]:
        """Serve the call for which this was decided, and tell whoever looks on."""
        seen = _kept(call) if OBSERVERS and call.over else call
        if self._once is not None:
            self.route, self.config, outputs = self._once(call)
        else:
            outputs = self.serve(call.arrays)
        if OBSERVERS:
            impl = self.route.impl
            tell(Served(seen, impl.backend.name, impl.family.name, self.route.interpret, dict(self.config), outputs))
        return outputs

    def _run(self, arrays: dict[str, Any]) -> tuple[Any, ...]:
        return self.route.run(self.call.replace(arrays=arrays), self.config)

    def _over(self, arrays: dict[str, Any]) -> tuple[Any, ...]:
        """Where arrays lie is no part of a signature, and no kernel tells their library what it wrote to."""
        check_room(self.call.replace(arrays=arrays))
        outputs = self._made(arrays)
        self.call.framework.wrote([arrays[name] for name in self.call.over])
        return outputs

    def _first(self, arrays: dict[str, Any]) -> tuple[Any, ...]:
        """Serve the first call of a signature: there may be no second one, for which to learn takes its time."""
        self._settle(self._learn if self.route.impl.family.plans and not self.route.embedded else self._run)
        return self._run(arrays)

    def _learn(self, arrays: dict[str, Any]) -> tuple[Any, ...]:
        """Serve the second call of a signature, and learn how to serve the others."""
        self._settle(self._run)  # for other threads meanwhile
        learn = self.route.impl.family.load_planner()
        assert learn is not None
        outputs, again = learn(self.route.impl, self.call.replace(arrays=arrays), self.config)
        self._settle(again or self._run)
        found: tuple[Any, ...] = outputs
        return found


Once = Callable[[Call], tuple[Route, Config, tuple[Any, ...]]]
"""Serves one call: by whom, with which tiling, and its outputs."""


def call_through(call: Call, choice: Choice) -> tuple[tuple[Any, ...], Any]:
    """Every output of a bound call in the spec's order, None for an unwanted one: run, or seen by whoever watches or
    traces the caller's arrays. And the plan to keep for calls of its signature, or None.
    """
    watched = call.framework.check(call)
    if call.over:
        check_room(call, watched)
    if watched:
        return call.framework.differentiate(call, choice)
    plan = decide(call, choice)
    if plan is None:
        return call.framework.trace(call, choice), None
    return plan.begin(call), plan if plan.lasting else None


def decide(call: Call, choice: Choice) -> CallPlan | None:
    """Who serves a checked call, and how; None while its arrays have no device."""
    candidates = routes(call, choice)
    if candidates is None:
        return None
    route = candidates[0]  # all are of one backend, and run on one target
    call.target, call.interpret = route.target, route.interpret
    if call.degenerate:
        return CallPlan(
            call, route, NOTHING, lambda call: (route, NOTHING, _written_over(call, degenerate_outputs(call)))
        )
    if route.impl.backend.oracle:
        config = resolve(route.impl, call, choice.tiling).tiling
        return CallPlan(call, route, config, functools.partial(_by_oracle, route, config))
    if route.framework is not call.framework:
        return CallPlan(call, route, NOTHING, functools.partial(_crossing, candidates, choice.tiling))
    return CallPlan(call, *pick(candidates, call, choice.tiling))


def serve(call: Call, choice: Choice) -> tuple[Any, ...]:
    """Run a checked call whose arrays are here: every output in the spec's order, None for an unwanted one."""
    plan = decide(call, choice)
    assert plan is not None
    return plan.begin(call)


def _by_oracle(route: Route, config: Config, call: Call) -> Any:
    outputs = _outputs_back(call, route.framework, rounded_oracle(call), copy=False)
    return route, config, _written_over(call, outputs)


def _crossing(candidates: tuple[Route, ...], user: Mapping[str, int], call: Call) -> Any:
    """Serve a call in another framework than that of its arrays."""
    framework = candidates[0].framework
    with framework.outside():
        inner = to_framework(call, framework).replace(over=())
        route, config = pick(candidates, inner, user)
        outputs = route.run(inner if route.impl.is_own else _guarded(inner, call), config)
        # no immutable array may share memory that a kernel keeps (a workspace) or that somebody may write to
        outputs = _outputs_back(call, framework, outputs, copy=call.framework.immutable or framework.immutable)
    return route, config, _written_over(call, outputs)


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
