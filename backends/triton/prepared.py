"""Launches that are made again and again, on other tensors alone, prepared once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

from portakern.backends.triton import launcher
from portakern.backends.triton.descriptors import bare, base_of, elsewhere, is_descriptor
from portakern.backends.triton.direct import direct
from portakern.backends.triton.launch import RECORDERS, launch
from portakern.backends.triton.tape import TAPES
from portakern.core import codegen

if TYPE_CHECKING:
    from portakern.core.call import Call

__all__ = ["prepare"]


def prepare(
    kernel: JITFunction[Any],
    grid: int,
    call: Call,
    tensors: tuple[Any, ...],
    numbers: tuple[Any, ...],
    constexprs: dict[str, Any],
) -> Callable[..., None]:
    """``launch`` of a kernel whose parameters are tensors (or None, or descriptors), then numbers or tuples of them,
    then constexprs, as a function to keep, of tensors of the same dtypes on the same device.

    It asks of them only where they begin: half a microsecond of host time where ``launch`` takes 4. A tensor that is
    described must begin at a multiple of 16 bytes. ``call``: without arrays, which nobody reads.
    """
    names = [p.name for p in kernel.params]
    values = (
        {p.name: p.default for p in kernel.params if p.has_default}
        | dict(zip(names[len(tensors) :], numbers, strict=False))
        | constexprs
    )
    rest = [values[n] for n in names[len(tensors) :]]
    first = base_of(tensors[0])
    assert first is not None
    described = {i: bare(t) for i, t in enumerate(tensors) if is_descriptor(t)}
    if call.interpret:

        def interpreted(*these: torch.Tensor | None) -> None:
            passed = (elsewhere(described[i], t) if i in described else t for i, t in enumerate(these))
            launch(kernel, grid, call, *passed, *numbers, **constexprs)

        return interpreted
    make = _preparer(tuple(t is not None for t in tensors), (*described,), bool(torch.version.hip))
    prepared: Callable[..., None] = make(
        kernel, grid, call, numbers, constexprs, rest, first.get_device(), described,
        launcher.current_device, launcher.current_stream,
    )  # fmt: skip
    return prepared


KNOWN = {"TAPES": TAPES, "RECORDERS": RECORDERS, "knobs": knobs, "launch": launch, "watched": launcher.watched,
         "direct": direct, "elsewhere": elsewhere}  # fmt: skip
"""What the text of a prepared launch names."""


@functools.cache
def _preparer(there: tuple[bool, ...], described: tuple[int, ...], hip: bool) -> Callable[..., Callable[..., None]]:
    """Makes prepared launches on these tensors, None where one is not there; straight-line code, as each is on every
    call's path. Where all begin at multiples of 16 bytes, as allocators give them, there is no key to look up.
    ``described``: which of them go as descriptors."""
    names = [f"t{i}" for i in range(len(there))]
    tensors = [n for n, is_there in zip(names, there, strict=True) if is_there]
    bases = ", ".join(names)
    passed = ", ".join(f"elsewhere(described[{i}], {n})" if i in described else n for i, n in enumerate(names))
    at = {n: f"at_{n}" for n in tensors}
    key = [f"{at[n]} & 15" for n in tensors] + [launcher.small(n) for n in tensors] * hip
    key += ["knobs.amd.use_buffer_ops"] * hip
    plain = "False" if hip else f"not ({' | '.join(at.values())}) & 15"
    text = f"""
def make(kernel, grid, call, numbers, constexprs, rest, device, described, current_device, current_stream):
    kept = {{}}
    find = kept.get
    def prepared({bases}):
        if TAPES or RECORDERS or current_device() != device:
            launch(kernel, grid, call, {passed}, *numbers, **constexprs)
            return
        {"; ".join(f"{address} = {n}.data_ptr()" for n, address in at.items())}
        key = None if {plain} else ({", ".join(key)},)
        go = find(key)
        if go is None or watched(kernel):
            handles = launch(kernel, grid, call, {passed}, *numbers, **constexprs)
            if handles is not None:
                run, function, metadata = handles
                kept[key] = direct(run, grid, function, metadata, {len(names)}, rest, described)
            return
        go(current_stream(device), {", ".join(at.get(n, "None") for n in names)})
    return prepared
"""
    title = f"prepared launch on {len(there)} tensors"
    made: Callable[..., Callable[..., None]] = codegen.written(title, text, KNOWN, "make")
    return made
