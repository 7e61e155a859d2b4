"""What an implementation did for one call, to be done again for calls of its form, without asking again what to do.

An implementation only allocates and launches, and decides from a call's form (:mod:`portakern.core.signatures`), never
from values, on which grid and with which numbers. So :func:`learn` runs it once while a :class:`Tape` notes what it
allocates and launches, and writes that down as straight-line code. What it cannot account for, such as a gathered copy,
is left to the implementation.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from portakern.backends.triton import launcher
from portakern.backends.triton.descriptors import base_of, is_descriptor
from portakern.backends.triton.prepared import prepare
from portakern.backends.triton.tape import TAPES, Tape
from portakern.core import codegen

if TYPE_CHECKING:
    from portakern.core.backend import Implementation
    from portakern.core.call import Call

__all__ = ["learn"]

log = logging.getLogger("portakern")

Run = Callable[[Mapping[str, Any]], tuple[Any, ...]]
"""Arrays by name -> every output in the spec's order."""


def learn(impl: Implementation, call: Call, tiling: Mapping[str, int]) -> tuple[tuple[Any, ...], Run | None]:
    """The outputs of a call, and what gives them for other calls of its form; None where nothing shorter does."""
    # an array may be given twice: as tensors of their own, what is done with each can be told apart
    theirs = call.arrays
    call = call.replace(arrays={n: None if a is None else a.detach() for n, a in theirs.items()})
    tape = TAPES[get_ident()] = Tape()
    try:
        outputs = impl.run(call, tiling)
    finally:
        del TAPES[get_ident()]
    again = _written_down(call, tape, outputs)
    if again is not None and any(is_descriptor(a) for _, _, args, _ in tape.launches for a in args):
        again = _where_aligned(again, impl, call, tiling)
    over = {id(call.arrays[n]): theirs[n] for n in call.over}
    return tuple(over.get(id(o), o) for o in outputs), again


def _where_aligned(again: Run, impl: Implementation, call: Call, tiling: Mapping[str, int]) -> Run:
    """A replay for calls whose arrays begin at multiples of 16 bytes exactly where those of the first call did. Only
    such memory can be described, so that others are left to the implementation."""
    names = [n for n, a in call.arrays.items() if a is not None]
    learned = [call.arrays[n].data_ptr() & 15 > 0 for n in names]
    first = call.replace(arrays={})

    def replay(arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        if [arrays[n].data_ptr() & 15 > 0 for n in names] == learned:
            return again(arrays)
        return impl.run(first.replace(arrays=dict(arrays)), tiling)

    return replay


class _Part(NamedTuple):
    """A part of an input or of an allocation: where it begins, in elements from there, and its form."""

    of: str | int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_Place = str | int | _Part
"""Where a launch's tensor comes from: an input's name, an allocation's number, or a part of either."""


class _Shape(NamedTuple):
    """The structure of a replay, which many forms share.

    Attributes:
      arrays: names of the inputs that are read; like: for each allocation the input that it is like, or None.
      parts: what each is a part of. launches: for each launch its tensors: an input's name, an allocation's number, a
        part's name, or None. outputs: an allocation's number, or the input's name that it is written over.
    """

    arrays: tuple[str, ...]
    like: tuple[str | None, ...]
    parts: tuple[str | int, ...]
    launches: tuple[tuple[str | int | None, ...], ...]
    outputs: tuple[str | int | None, ...]


def _written_down(call: Call, tape: Tape, outputs: tuple[Any, ...]) -> Run | None:
    given = {n: a for n, a in call.arrays.items() if a is not None}
    forms = [(t.shape, t.stride(), t.dtype, t.device) for t in tape.made]
    over = {id(given[n]): n for n in call.over}
    slots: list[str | int | None] = []
    for out in outputs:  # an output may be a view of what was allocated, of another shape, or an input
        if id(out) in over:
            slots.append(over[id(out)])
            continue
        slot = None if out is None else _beginning(out, {}, tape.made)
        if out is not None and (slot is None or slot in slots or out.numel() != tape.made[int(slot)].numel()):
            return None
        if isinstance(slot, int):
            forms[slot] = (out.shape, out.stride(), out.dtype, out.device)
        slots.append(slot)
    launches, runs = [], []
    for kernel, grid, args, constexprs in tape.launches:
        others = (i for i, a in enumerate(args) if not (a is None or isinstance(base_of(a), torch.Tensor)))
        count = next(others, len(args))
        places = tuple(None if t is None else _place(base_of(t), given, tape.made) for t in args[:count])
        if not args or args[0] is None or _unplaced(args[:count], places) or any(map(_holds_tensors, args[count:])):
            return None
        launches.append(places)
        runs.append(prepare(kernel, grid, call.replace(arrays={}), args[:count], args[count:], constexprs))
    like = tuple(next((n for n, a in given.items() if _is_like(a, form)), None) for form in forms)
    found = dict.fromkeys(p for places in launches for p in places)
    parts = {p: f"part{i}" for i, p in enumerate(p for p in found if isinstance(p, _Part))}
    used = {p for p in (*found, *(p.of for p in parts), *like, *slots) if isinstance(p, str)}
    named = tuple(tuple(parts[p] if isinstance(p, _Part) else p for p in places) for places in launches)
    read = tuple(n for n in given if n in used)
    make = _writer(_Shape(read, like, tuple(p.of for p in parts), named, tuple(slots)))
    return make(forms, [p[1:] for p in parts], runs, launcher.current_device)


def _place(tensor: torch.Tensor, given: Mapping[str, torch.Tensor], made: list[torch.Tensor]) -> _Place | None:
    """Where a tensor comes from: what begins where it does, or the one input or allocation that it lies in. A part that
    begins at another multiple of bytes than 16 is left out: what lies in it would not be as aligned as the whole."""
    whole = _beginning(tensor, given, made)
    if whole is not None:
        return whole
    start = tensor.data_ptr()
    known: list[tuple[str | int, torch.Tensor]] = [*given.items(), *enumerate(made)]
    found = [
        (p, start - other.data_ptr())
        for p, other in known
        if other.dtype == tensor.dtype
        and other.device == tensor.device
        and 0 <= start - other.data_ptr() < _held(other)
    ]
    if len(found) != 1 or found[0][1] % 16:
        return None
    (of, after), size = found[0], tensor.element_size()
    return _Part(of, after // size, tuple(tensor.shape), tensor.stride())


def _held(x: torch.Tensor) -> int:
    """The bytes from a tensor's first element to its last."""
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size() if x.numel() else 0


def _beginning(tensor: torch.Tensor, given: Mapping[str, torch.Tensor], made: list[torch.Tensor]) -> str | int | None:
    """Where a tensor comes from: the one input or allocation that begins where it does, since a kernel is told of a
    tensor where it begins and what it holds, and of strides in numbers. None where that is not clear."""
    known: list[tuple[str | int, torch.Tensor]] = [*given.items(), *enumerate(made)]
    for place, other in known:
        if other is tensor:
            return place
    start = tensor.data_ptr()
    found = [p for p, other in known if other.data_ptr() == start and other.dtype == tensor.dtype]
    return found[0] if len(found) == 1 else None


def _unplaced(tensors: tuple[Any, ...], places: tuple[_Place | None, ...]) -> bool:
    return any(place is None and t is not None for t, place in zip(tensors, places, strict=True))


def _holds_tensors(value: Any) -> bool:
    return isinstance(base_of(value), torch.Tensor) or (isinstance(value, tuple) and any(map(_holds_tensors, value)))


def _is_like(x: torch.Tensor, form: tuple[Any, ...]) -> bool:
    """Whether ``empty_like`` of an input is what is to be allocated; it takes less time than spelling that out."""
    return type(x) is torch.Tensor and x.is_contiguous() and (x.shape, x.stride(), x.dtype, x.device) == form


@functools.cache
def _writer(shape: _Shape) -> Callable[..., Run]:
    """Makes replays of a structure from the forms of what they allocate, and their launches."""

    def named(place: str | int | None) -> str:
        return f"made{place}" if isinstance(place, int) else str(place)

    made = range(len(shape.like))
    outer = [f"shape{i}, strides{i}, dtype{i}, device = forms[{i}]" for i in made]
    outer += [f"shape{i} = tuple(shape{i})" for i in made]  # the shortcut takes tuples alone, and no torch.Size
    outer += [f"offset{i}, shape_of{i}, strides_of{i} = parts[{i}]" for i in range(len(shape.parts))]
    outer += [f"run{i} = runs[{i}]" for i in range(len(shape.launches))]
    outer += ["quick = quick_on(device)"] * bool(made)
    body = [f"{n} = arrays[{n!r}]" for n in shape.arrays]
    if made:
        body += ["if quick is not None and current_device() == device.index and not deterministic():"]
        body += [f"    made{i} = quick(shape{i}, strides{i}, dtype{i})" for i in made]
        body += ["else:"]
        spelled = [f"empty_strided(shape{i}, strides{i}, dtype=dtype{i}, device=device)" for i in made]
        body += [f"    made{i} = {f'empty_like({n})' if n else spelled[i]}" for i, n in enumerate(shape.like)]
    taking = {
        f"part{i}": f"part{i} = as_strided({of}, shape_of{i}, strides_of{i}, {of}.storage_offset() + offset{i})"
        for i, of in enumerate(map(named, shape.parts))
    }
    for i, places in enumerate(shape.launches):
        body += [taking.pop(p) for p in dict.fromkeys(places) if p in taking]
        body += [f"run{i}({', '.join(map(named, places))})"]
    returned = "".join(named(o) + ", " for o in shape.outputs)
    lines = [
        "def make(forms, parts, runs, current_device):",
        *(f"    {line}" for line in outer),
        "    def replay(arrays):",
    ]
    lines += [*(f"        {line}" for line in body), f"        return ({returned})", "    return replay"]
    env: dict[str, Any] = {"empty_like": torch.empty_like, "empty_strided": torch.empty_strided, "quick_on": _quick_on}
    env |= {"deterministic": torch._C._get_deterministic_algorithms, "as_strided": torch.as_strided}
    make: Callable[..., Run] = codegen.written("replay", "\n".join(lines), env, "make")
    return make


@functools.cache
def _quick_on(device: torch.device) -> Callable[..., torch.Tensor] | None:
    """What allocates on a GPU that is the current one, in half the time of ``torch.empty_strided``: PyTorch's own
    shortcut below its dispatcher, which the code of torch.compile takes. It leaves memory as it is where
    ``torch.use_deterministic_algorithms`` wants it filled. None where it is not what is expected, which the log says.
    """
    if device.type != "cuda":
        return None
    try:
        quick: Callable[..., torch.Tensor] = torch._C._dynamo.guards._empty_strided_cuda
        with torch.cuda.device(device):
            made = quick((2, 3), (1, 2), torch.bfloat16)
        if (made.shape, made.stride(), made.dtype, made.device) == ((2, 3), (1, 2), torch.bfloat16, device):
            return quick
        why = f"it gives {made.dtype} {tuple(made.shape)} on {made.device}"
    except (AttributeError, TypeError, RuntimeError) as e:
        why = str(e)
    log.warning("portakern: outputs are allocated by torch.empty_strided, right but 1 us slower: %s", why)
    return None
