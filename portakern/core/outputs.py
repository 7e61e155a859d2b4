"""Check the outputs of an implementation against its spec: a kernel of another package may return anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from portakern.core.framework import DTYPE_NAME

if TYPE_CHECKING:
    from portakern.core.backend import Implementation
    from portakern.core.call import Call

__all__ = ["counted", "exact", "look", "signature_of", "wanted"]


def counted(impl: Implementation, call: Call, outputs: Any) -> tuple[Any, ...]:
    """The outputs, one for each that the spec has; TypeError unless there is a tuple with a place for every one that
    callers are shown: a bare array would be taken apart along its first axis. What an implementation lacks of those
    that are saved for gradients is zeros, where it is wanted."""
    spec = call.spec
    if isinstance(outputs, tuple) and len(spec.shown) <= len(outputs) < len(spec.outputs):
        lacks = [o.name for o in spec.outputs[len(outputs) :]]
        forms, device = call.outputs, call.device
        return *outputs, *(call.framework.full(*forms[n], 0.0, device) if n in call.wants else None for n in lacks)
    if not isinstance(outputs, tuple) or len(outputs) != len(spec.outputs):
        got = f"{len(outputs)} outputs" if isinstance(outputs, tuple) else f"a {type(outputs).__name__}"
        names = ", ".join(o.name for o in spec.shown)
        raise TypeError(f"{_who(impl)} returned {got}; expected a tuple with every output of the spec: ({names},)")
    return outputs


def wanted(call: Call, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The outputs that a call wants, None for the others: a kernel may give what it made anyway, such as an lse."""
    if len(call.wants) == len(outputs):
        return outputs
    return tuple(out if o.name in call.wants else None for o, out in zip(call.spec.outputs, outputs, strict=True))


def signature_of(call: Call) -> tuple[Any, ...]:
    """What :func:`look` depends on, in something hashable."""
    strides = call.framework.strides
    arrays = (None if a is None else (a.dtype, a.shape, *(strides(a) or ())) for a in call.arrays.values())
    return call.wants, call.over, call.device, *call.options.values(), *arrays


def look(impl: Implementation, call: Call, outputs: tuple[Any, ...]) -> None:
    """TypeError unless every wanted output is an array of the declared shape and dtype, in memory of its own beside the
    call's or the array itself that it is to be written over.

    It reads no values, and depends on the call's form alone: shapes, strides, dtypes, options and what is wanted. In a
    call that is traced, or in a library whose arrays never change, memory says nothing and is not looked at.
    """
    found: dict[str, Any] = {}
    for (name, (shape, dtype)), out in zip(call.outputs.items(), outputs, strict=True):
        if name not in call.wants:
            continue
        wrong = _layout_fault(call, out, shape, dtype) or (_memory(call, name, out, found) if call.concrete else None)
        if wrong:
            came, expected = wrong
            raise TypeError(f"{_who(impl)} returned {name} {came}; expected {expected} ({call!r})")
        found[name] = out


def exact(impl: Implementation, call: Call, outputs: tuple[Any, ...]) -> None:
    """:func:`look` for the oracle's outputs, which are unrounded: numbers of the declared shape."""
    for (name, (shape, _)), out in zip(call.outputs.items(), outputs, strict=True):
        if name in call.wants:
            got = np.asarray(out)
            if out is None or got.dtype.kind not in "fiub" or got.shape != shape:
                came = f"as {out}" if out is None else f"as {got.dtype} of shape {got.shape}"
                raise TypeError(
                    f"{_who(impl)} returned {name} {came}; expected unrounded numbers of shape {shape} ({call!r})"
                )


def _who(impl: Implementation) -> str:
    return f"{impl.op} on backend {impl.backend.name!r}"


Wrong = tuple[str, str]
"""What came, and what was expected."""


def _layout_fault(call: Call, out: Any, shape: tuple[int, ...], dtype: str) -> Wrong | None:
    """What is wrong with an output by itself."""
    framework = call.framework
    if out is None:
        return "as None", f"an array of shape {shape} and dtype {dtype}"
    if not framework.owns(out):
        return f"as a {type(out).__name__}", f"a {framework.title} array"
    if tuple(out.shape) != shape:
        return f"of shape {tuple(out.shape)}", f"shape {shape}"
    got = DTYPE_NAME.get(out.dtype, str(out.dtype))
    if got != dtype and got != framework.stored_dtype(dtype):
        return f"of dtype {got}", f"dtype {dtype}: round the result once, at the end"
    if call.concrete and framework.device(out) != call.device:
        return f"on {framework.device(out)}", f"an array on {call.device}, where the call's are"
    return None


def _memory(call: Call, name: str, out: Any, before: dict[str, Any]) -> Wrong | None:
    """What is wrong with where an output lies, beside the call's arrays and the outputs ``before`` it."""
    framework = call.framework
    if framework.immutable:
        return None
    given = call.overwritten(name)
    if given is not None:
        return None if out is given else ("in other memory", f"{call.spec.aliases[name]} itself, written over")
    others = {f"the call's {n}": a for n, a in call.arrays.items() if a is not None}
    others |= {f"the output {n}": a for n, a in before.items() if a is not None}
    if not framework.contiguous(out):
        return "with gaps or in another order of axes", "a contiguous array, in row-major order"
    for what, other in others.items():
        if not framework.may_write(out, [other]):
            if framework.may_write(out, []):
                return f"in memory that it shares with {what}", "memory of its own: return a copy"
            return "in memory that nobody may write to", "memory of its own: return a copy"
    return None
