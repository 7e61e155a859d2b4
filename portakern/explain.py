"""Say in words what dispatch would do with a call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portakern import dispatch, registry
from portakern.core import tilings
from portakern.errors import UnavailableError, UnsupportedError

if TYPE_CHECKING:
    from portakern.call import Call

__all__ = ["explain"]


def explain(op: dispatch.Op, call: Call) -> str:
    """A few lines: the call, who serves it and how, the tiling and its source, and why the other backends do not."""
    target = call.framework.target(call.device)
    lines = [repr(call), f"  arrays: {call.framework.name} on {target}"]
    if target.platform == "traced":
        return "\n".join([*lines, "  chosen when JAX lowers the traced function for a platform"])
    chosen = None
    try:
        chosen = op.backend or dispatch.choose(call.spec, call.framework, target)
        lines += _plan(op, call, dispatch.find_route(chosen, call, target))
    except (UnsupportedError, UnavailableError) as e:
        lines.append(f"  refused: {e}")
    for b in registry.backends().values():
        if b is not chosen:
            reason = dispatch.why_not(b, call.spec, target)
            lines.append(
                f"  not {b.name}: {reason or ('another backend was named' if op.backend else 'serves these arrays only when named')}"
            )
    return "\n".join(lines)


def _plan(op: dispatch.Op, call: Call, route: dispatch.Route) -> list[str]:
    name = route.impl.backend.name
    how = (
        "float64 oracle on the host"
        if route.impl.backend.oracle
        else "interpreter"
        if route.interpret
        else f"compiled for {route.target}"
    )
    lines = [
        f"  backend: {name} ({'named' if op.backend else 'chosen from the arrays'}), {how}",
        f"  implementation: {route.impl.fn.__module__}",
    ]
    if call.degenerate:
        return [*lines, "  plan: no kernel: an extent is 0"]
    if route.framework is not call.framework:
        lines.append(f"  crossing: {call.framework.name} -> {route.framework.name} and back")
    if not route.impl.backend.oracle:
        inner = call.replace(target=route.target, interpret=route.interpret)
        if route.framework is not call.framework:
            inner = dispatch.to_framework(inner, route.framework)
        resolved = tilings.resolve(route.impl, inner, op.user_tiling)
        parts = (f"{name}={resolved.tiling[name]} ({source})" for name, source in resolved.sources.items())
        lines.append(f"  tiling: {', '.join(parts) or 'none'}")
    return lines
