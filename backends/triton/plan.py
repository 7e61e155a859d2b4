"""Launch plans: what an implementation allocated and launched for one call, to be done again for calls of its signature
without asking it again.

An implementation only allocates and launches, and decides from a call's signature (:mod:`portakern.core.signatures`),
never from values, on which grid and with which numbers. So :func:`learn` captures one run of it, and makes a
:class:`LaunchPlan` of that. A warm call is one function, written for the plan: it asks each array where it begins,
makes the outputs, and hands every launch to the C function below Triton's launcher, addresses in place of tensors. What
a plan cannot account for, such as a copy that PyTorch makes, is left to the implementation.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from triton import knobs

from portakern.backends.triton import launcher
from portakern.backends.triton.capture import CAPTURES, Capture, Launched, capturing
from portakern.backends.triton.descriptors import bare, base_of, elsewhere, is_descriptor
from portakern.backends.triton.launch import RECORDERS, launch
from portakern.backends.triton.launcher import WATCHED, WATCHES, Handles
from portakern.core import codegen
from portakern.core.config import Config

if TYPE_CHECKING:
    from portakern.core.backend import Implementation
    from portakern.core.call import Call

__all__ = ["LaunchPlan", "learn"]

log = logging.getLogger("portakern")

Arrays = Mapping[str, Any]
Run = Callable[[Arrays], tuple[Any, ...]]
"""Arrays by name -> every output in the spec's order."""


class Part(NamedTuple):
    """A part of an input or of an allocation, or all of it as another dtype of its size: where it begins, in elements
    and in bytes from there, and its layout."""

    of: str
    offset: int
    bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Step(NamedTuple):
    """A launch of a plan.

    Attributes:
      tensors: for each of its first arguments the tensor that it is, or None, or a group of such. rest: the arguments
        after them.
      described: which of the first go as descriptors, and these, of no memory. handles: what launches it, if kept.
    """

    kernel: Any
    grid: int
    tensors: tuple[Any, ...]
    rest: tuple[Any, ...]
    constexprs: dict[str, Any]
    described: dict[int, Any]
    handles: Handles | None

    def values(self) -> list[Any]:
        """All of the kernel's parameters after the tensors, as a launcher takes them: those that it is compiled for
        too."""
        names = [p.name for p in self.kernel.params]
        own = names[len(self.tensors) :]
        given = {p.name: p.default for p in self.kernel.params if p.has_default} | dict(
            zip(own, self.rest, strict=False)
        )
        return [(given | self.constexprs)[n] for n in own]


@dataclass(eq=False)
class LaunchPlan:
    """What calls of one signature allocate and launch. Its tensors have names: an input's own, ``new0`` of the first
    allocation, ``part0`` of the first part.

    Attributes:
      call: such a call, without its arrays; device: the number of the device that holds them.
      inputs: the arrays that it reads. new: of each allocation shape, strides, dtype and device. parts: by name.
      steps: the launches. outputs: the tensor of each output, None for one that is not wanted.
      only: the placement (:meth:`placed`) that it is for, None for any: only memory at multiples of 16 bytes can be
        described. otherwise: serves calls of another one.
      cached: placement -> the function that serves such calls.
    """

    call: Call
    device: int
    inputs: tuple[str, ...]
    new: list[Any]
    parts: dict[str, Part]
    steps: list[Step]
    outputs: tuple[str | None, ...]
    only: tuple[Any, ...] | None
    otherwise: Run
    cached: dict[Any, Run] = field(default_factory=dict)

    def serve(self, arrays: Arrays) -> tuple[Any, ...]:
        """Serve a call by the function for its placement, which is written by the way."""
        key = self.placed(arrays)
        cached = self.cached.get(key)
        if cached is not None:
            return cached(arrays)
        if self.only not in (None, key):
            return self.otherwise(arrays)
        outputs, handles = self.launched(arrays)
        self.cache(key, handles)
        return outputs

    def placed(self, arrays: Arrays) -> tuple[Any, ...]:
        """What of where its arrays lie Triton specialises binaries on: whether each begins at a multiple of 16 bytes,
        and on AMD whether buffer instructions reach all of its memory, and are used."""
        found: list[Any] = [not arrays[n].data_ptr() & 15 for n in self.inputs]
        if torch.version.hip:
            found += [arrays[n].untyped_storage().size() < launcher.REACH for n in self.inputs]
            found.append(knobs.amd.use_buffer_ops)
        return tuple(found)

    def cache(self, key: tuple[Any, ...], handles: Iterable[Handles | None]) -> Run | None:
        """The function for a placement; None where not all that launches is kept: in an interpreter, or while somebody
        watches."""
        kept = [h for h in handles if h is not None]
        if not kept or len(kept) < len(self.steps):
            return None
        return self.cached.setdefault(key, written(self, key, kept))

    def run(self, arrays: Arrays) -> tuple[Any, ...]:
        """Serve a call of a right placement launch by launch, whoever watches."""
        return self.launched(arrays)[0]

    def launched(self, arrays: Arrays) -> tuple[tuple[Any, ...], list[Handles | None]]:
        """The outputs of such a call, and what launched each kernel, where that is kept."""
        tensors: dict[str | None, Any] = {None: None, **{n: arrays[n] for n in self.inputs}}
        for i, (shape, strides, dtype, device) in enumerate(self.new):
            tensors[f"new{i}"] = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        for name, part in self.parts.items():
            of = tensors[part.of].view(part.dtype)
            tensors[name] = of.as_strided(part.shape, part.strides, of.storage_offset() + part.offset)
        handles = []
        for step in self.steps:
            passed = list(_each(step.tensors, tensors.__getitem__))
            for i, descriptor in step.described.items():
                passed[i] = elsewhere(descriptor, passed[i])
            handles.append(launch(step.kernel, step.grid, self.call, *passed, *step.rest, **step.constexprs))
        return tuple(tensors[o] for o in self.outputs), handles


def written(plan: LaunchPlan, key: tuple[Any, ...], handles: Sequence[Handles]) -> Run:
    """The function that serves a plan's calls of one placement, under the name of the call. In its text stand names and
    no numbers, so that plans of one structure share what it is compiled to."""
    kernels = list(dict.fromkeys(s.kernel for s in plan.steps))
    device = plan.new[0][-1] if plan.new else None
    env: dict[str, Any] = {
        "CAPTURES": CAPTURES, "RECORDERS": RECORDERS, **WATCHED, **{f"kernel{i}": k for i, k in enumerate(kernels)},
        "amd": knobs.amd, "device": plan.device, "current_device": launcher.current_device,
        "current_stream": launcher.current_stream, "serve": plan.serve, "run": plan.run, "find": plan.cached.get,
        "deterministic": torch._C._get_deterministic_algorithms, "empty": _allocator(device),
        "quick": quick_on(device) or _allocator(device),
    }  # fmt: skip
    launches, used = [], set[str | None]()
    for i, (step, kept) in enumerate(zip(plan.steps, handles, strict=True)):
        used |= {*_leaves(step.tensors)}
        name, names = f"{step.kernel.__name__}_{i}", _each(step.tensors, lambda t: t and f"at_{t}")
        text, more = launcher.launching(name, kept, step.grid, names, step.values(), step.described)
        launches.append(f"    {text}")
        env |= more
    used |= {plan.parts[t].of for t in used if t in plan.parts}
    new = [f"new{i}" for i, _ in enumerate(plan.new)]
    lines = ["def cached(arrays):", *(f"    at_{n} = arrays[{n!r}].data_ptr()" for n in plan.inputs)]
    here, misplaced = _placement(plan.inputs, key)
    lines += [f"    if {misplaced}:", f"        return (find({here}) or serve)(arrays)"]
    watched = " or ".join([WATCHES, *(f"kernel{i}.pre_run_hooks" for i, _ in enumerate(kernels))])
    lines += [f"    if CAPTURES or RECORDERS or current_device() != device or {watched}:", "        return run(arrays)"]
    lines += ["    make = empty if deterministic() else quick"] * bool(new)
    for i, (name, (shape, strides, dtype, _)) in enumerate(zip(new, plan.new, strict=True)):
        lines.append(f"    {name} = make(shape{i}, strides{i}, dtype{i})")
        env |= {f"shape{i}": tuple(shape), f"strides{i}": tuple(strides), f"dtype{i}": dtype}
    lines += [f"    at_{n} = {n}.data_ptr()" for n in new if n in used]
    made = " | ".join(f"at_{n}" for n in new if n in used)
    lines += [f"    if ({made}) & 15:", "        return run(arrays)"] if made else []
    for i, (name, part) in enumerate(plan.parts.items()):
        lines.append(f"    at_{name} = at_{part.of} + after{i}")
        env[f"after{i}"] = part.bytes
    outputs = (f"arrays[{o!r}]" if o in plan.inputs else str(o) for o in plan.outputs)
    lines += ["    stream = current_stream(device)", *launches, f"    return ({''.join(f'{o}, ' for o in outputs)})"]
    function: Run = codegen.written(f"launch of {plan.call!r}", "\n".join(lines), env, "cached")
    return function


def _placement(names: Sequence[str], key: tuple[Any, ...]) -> tuple[str, str]:
    """The placement of arrays (:meth:`LaunchPlan.placed`), and whether it is another one than a key says."""
    here = [f"not at_{n} & 15" for n in names]
    aligned = [f"at_{n}" for n, is_aligned in zip(names, key, strict=False) if is_aligned]
    tests = [f"({' | '.join(aligned)}) & 15"] * bool(aligned)
    tests += [test for test, is_aligned in zip(here, key, strict=False) if not is_aligned]
    if len(key) > len(names):
        more = [f"arrays[{n!r}].untyped_storage().size() < {launcher.REACH}" for n in names] + ["amd.use_buffer_ops"]
        tests += [f"({test}) is not {known}" for test, known in zip(more, key[len(names) :], strict=True)]
        here += more
    return f"({', '.join(here)},)", " or ".join(tests)


def _allocator(device: torch.device | None) -> Callable[..., torch.Tensor]:
    def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return empty


@functools.cache
def quick_on(device: torch.device | None) -> Callable[..., torch.Tensor] | None:
    """What allocates on a GPU that is the current one, in half the time of ``torch.empty_strided``: PyTorch's own
    shortcut below its dispatcher, which the code of torch.compile takes. It leaves memory as it is where
    ``torch.use_deterministic_algorithms`` wants it filled. None where it is not what is expected, which the log says.
    """
    if device is None or device.type != "cuda":
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


def learn(impl: Implementation, call: Call, config: Config) -> tuple[tuple[Any, ...], Run | None]:
    """The outputs of a call, and what gives them for other calls of its signature; None where nothing shorter does."""
    # an array may be given twice: as tensors of their own, what is done with each can be told apart
    theirs = call.arrays
    call = call.replace(arrays={n: None if a is None else a.detach() for n, a in theirs.items()})
    capture = Capture()
    with capturing(capture):
        outputs = impl.run(call, config)
    plan = planned(impl, call, config, capture, outputs)
    over = {id(call.arrays[n]): theirs[n] for n in call.over}
    outputs = tuple(over.get(id(o), o) for o in outputs)
    if plan is None:
        return outputs, None
    return outputs, plan.cache(plan.placed(call.arrays), [step.handles for step in plan.steps]) or plan.serve


def planned(
    impl: Implementation, call: Call, config: Config, capture: Capture, outputs: tuple[Any, ...]
) -> LaunchPlan | None:
    """The plan of a call of which a run was captured; None where that did more than to allocate and to launch."""
    given = {n: a for n, a in call.arrays.items() if a is not None}
    made = {f"new{i}": t for i, t in enumerate(capture.made)}
    new = {n: (t.shape, t.stride(), t.dtype, t.device) for n, t in made.items()}
    over = {id(given[n]): n for n in call.over}
    slots: list[str | None] = []
    for out in outputs:  # an output may be a view of what was allocated, of another shape, or an input
        slot = None if out is None else over.get(id(out)) or _beginning(out, made)
        if slot in made:
            if slot in slots or out.numel() != made[slot].numel():
                return None
            new[slot] = (out.shape, out.stride(), out.dtype, out.device)
        elif slot is None and out is not None:
            return None
        slots.append(slot)
    parts: dict[Part, str] = {}
    steps = []
    for launched in capture.launches:
        step = _step(launched, {**given, **made}, parts)
        if step is None:
            return None
        steps.append(step)
    own = {*(t for s in steps for t in _leaves(s.tensors)), *(p.of for p in parts), *slots}
    bare_call = call.replace(arrays={})
    plan = LaunchPlan(
        bare_call, next(iter(given.values())).get_device(), tuple(n for n in given if n in own), [*new.values()],
        {name: part for part, name in parts.items()}, steps, tuple(slots), None,
        lambda arrays: impl.run(bare_call.replace(arrays=dict(arrays)), config),
    )  # fmt: skip
    if any(step.described for step in steps):
        plan.only = plan.placed(given)
    return plan


def _step(launched: Launched, known: Mapping[str, torch.Tensor], parts: dict[Part, str]) -> Step | None:
    """A launch with names in place of its tensors; None where it is not clear what some tensor is. ``parts``: those so
    far."""
    kernel, grid, args, constexprs, handles = launched
    others = (i for i, a in enumerate(args) if not (is_descriptor(a) or _tensors_alone(a)))
    count = next(others, len(args))
    if not args or args[0] is None or any(map(_holds_tensors, args[count:])):
        return None
    tensors = tuple(map(base_of, args[:count]))
    places = {id(t): _source_of(t, known) for t in _leaves(tensors) if t is not None}
    if None in places.values():
        return None

    def name(tensor: torch.Tensor | None) -> str | None:
        place = places.get(id(tensor))
        return parts.setdefault(place, f"part{len(parts)}") if isinstance(place, Part) else place

    described = {i: bare(a) for i, a in enumerate(args[:count]) if is_descriptor(a)}
    return Step(kernel, grid, _each(tensors, name), args[count:], constexprs, described, handles)


def _tensors_alone(value: Any) -> bool:
    """Whether an argument is a tensor, or None, or a group of such."""
    if isinstance(value, tuple):
        return bool(value) and all(map(_tensors_alone, value))
    return value is None or isinstance(value, torch.Tensor)


def _each(value: Any, function: Callable[[Any], Any]) -> Any:
    """``function`` each member of a group, in a group of the same kind."""
    return (
        tuple.__new__(type(value), [_each(v, function) for v in value]) if isinstance(value, tuple) else function(value)
    )


def _leaves(value: Any) -> Iterable[Any]:
    """The members of a group, and of those in it."""
    return [leaf for v in value for leaf in _leaves(v)] if isinstance(value, tuple) else [value]


def _source_of(tensor: torch.Tensor, known: Mapping[str, torch.Tensor]) -> str | Part | None:
    """What a tensor is: what begins where it does, as it is or as another dtype of its size, or a part of the one input
    or allocation that it lies in. A part that begins at another multiple of bytes than 16 is left out: it would not be
    as aligned as the whole."""
    whole = _beginning(tensor, known)
    if whole is not None and known[whole].dtype != tensor.dtype:
        same_size = known[whole].element_size() == tensor.element_size()
        return Part(whole, 0, 0, tuple(tensor.shape), tensor.stride(), tensor.dtype) if same_size else None
    if whole is not None:
        return whole
    start = tensor.data_ptr()
    found = [
        (n, start - other.data_ptr())
        for n, other in known.items()
        if other.dtype == tensor.dtype
        and other.device == tensor.device
        and 0 <= start - other.data_ptr() < _bytes(other)
    ]
    if len(found) != 1 or found[0][1] % 16:
        return None
    of, after = found[0]
    return Part(of, after // tensor.element_size(), after, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _bytes(x: torch.Tensor) -> int:
    """From a tensor's first element to its last."""
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size() if x.numel() else 0


def _beginning(tensor: torch.Tensor, known: Mapping[str, torch.Tensor]) -> str | None:
    """The one input or allocation that begins where a tensor does, since a kernel is told of a tensor where it begins
    and what it holds, and of strides in numbers. None where that is not clear."""
    for name, other in known.items():
        if other is tensor:
            return name
    start = tensor.data_ptr()
    found = [n for n, other in known.items() if other.data_ptr() == start and other.dtype == tensor.dtype]
    return found[0] if len(found) == 1 else None


def _holds_tensors(value: Any) -> bool:
    return isinstance(base_of(value), torch.Tensor) or (isinstance(value, tuple) and any(map(_holds_tensors, value)))
