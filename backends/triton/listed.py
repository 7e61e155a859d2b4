"""Which kernels a call would launch, without a launch of any."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from threading import get_ident
from typing import TYPE_CHECKING, Any

from portakern.backends.triton.tape import TAPES, Tape
from portakern.core.program import Loop

if TYPE_CHECKING:
    from portakern.core.backend import Implementation
    from portakern.core.call import Call

__all__ = ["Listed", "kernels", "qualified"]


class Listed(Tape):
    """A tape on which arrays are allocated and nothing is launched."""

    runs = False


def kernels(impl: Implementation, call: Call, tiling: Mapping[str, int]) -> tuple[str, ...]:
    """The kernels of a call in the order of their launches, each as its module in this backend and its name. Arrays
    that another library holds are outlined: of a loop over parts of them, the launches for one part are given."""
    if call.framework.name != impl.backend.framework:
        from portakern.backends.triton.staging import written

        sheet, _ = written(impl, call, tiling)
        return tuple(qualified(step[0]) for step in launches(sheet.steps))
    tape, before = Listed(), TAPES.get(get_ident())
    TAPES[get_ident()] = tape
    try:
        impl.run(call, tiling)
    finally:
        if before is None:
            del TAPES[get_ident()]
        else:
            TAPES[get_ident()] = before
    return tuple(qualified(kernel) for kernel, *_ in tape.launches)


def launches(steps: Iterable[Any]) -> list[Any]:
    """The launches among the steps of a sheet, and of its loops."""
    found: list[Any] = []
    for step in steps:
        if isinstance(step, Loop):
            found += launches(step.steps)
        elif isinstance(step, tuple):
            found.append(step)
    return found


def qualified(kernel: Any) -> str:
    """A kernel's module, without this backend's package, and its name."""
    module = str(kernel.fn.__module__)
    return f"{module.removeprefix('portakern.backends.triton.')}.{kernel.fn.__name__}"
