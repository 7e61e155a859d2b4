"""Kernels as a part of another library's programs: what a call would launch, compiled by Triton for the call's target
and written down (:class:`portakern.core.program.Program`). No PyTorch is needed, and nothing is launched here.

The library is told where its arrays' memory goes, and how tensor descriptors of it are made, where it makes any. What a
launcher of Triton's does besides cannot be had: kernels that run a grid in step, or ask for memory of their own. A
kernel that may be launched beside the end of the one before is launched behind it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from portakern.backends.triton.capture import Capture, Launched, capturing
from portakern.backends.triton.compiler import gpu_target, specialised
from portakern.backends.triton.descriptors import formats, is_descriptor
from portakern.backends.triton.leaks import refuse_leaks
from portakern.backends.triton.trace import AbstractArray, Trace, abstracted, numbers
from portakern.core import targets
from portakern.core.config import Config
from portakern.core.program import Code, Copy, DescribedArray, Launch, Loop, Program, ScalarArgument, Stack
from portakern.core.targets import Hardware, Target
from portakern.errors import UnsupportedError

if TYPE_CHECKING:
    from portakern.core.backend import Implementation
    from portakern.core.call import Call

__all__ = ["kernels", "stage"]

Embed = Callable[[Program, Mapping[str, Any]], tuple[Any, ...]]

PORTABLE = targets.find("sm_80")
"""What kernels are compiled for where nobody says for which NVIDIA GPU: as PTX, which every later one finishes."""

KINDS = {"i1": "bool", "u1": "bool", "i32": "i32", "i64": "i64", "u64": "u64", "fp32": "f32", "fp64": "f64"}


LOOPED = "its kernels take tensor descriptors of parts of arrays in a loop, with which results were wrong on a GPU"
"""Seen with jaxlib 0.11.2 on an H200: the gradient of a weight whose rows a loop of XLA's goes through. Single launches
of the same kernels, and loops of kernels that take pointers, give the bits that PyTorch's arrays get."""


def stage(impl: Implementation, embed: Embed) -> Implementation:
    """The implementation for arrays of a library that makes programs part of its own: ``embed(program, arrays)``."""

    @functools.wraps(impl.fn)
    def fn(call: Call, config: Config) -> tuple[Any, ...]:
        return embed(program(impl, call, config), call.arrays)

    def copies(call: Call, config: Config) -> str | None:
        trace, _ = written(impl, call, config)
        places = [trace.places[s.to] for s in flat(trace.steps) if isinstance(s, Copy)]
        what = [f"{place.dtype} {place.shape}" for place in places]
        return f"gathered or cast before a kernel reads it: {', '.join(what)}" if what else None

    def supports(call: Call, config: Config) -> str | None:
        return unsupported(call.target) or on_abstract(impl.supports)(call, config) or not_passed(impl, call, config)

    return replace(
        impl,
        fn=fn,
        tiling=on_abstract(impl.tiling),
        supports=supports,
        key=on_abstract(impl.key),
        fit=on_abstract(impl.fit),
        delegate=on_abstract(impl.delegate),
        copies=copies,
    )


def on_abstract(function: Any) -> Any:
    """The function, if there is one, of a call with abstract arrays in place of its own."""
    if function is None:
        return None

    def replaced(call: Call, *arguments: Any) -> Any:
        trace = Trace()
        with capturing(trace):
            return function(abstracted(call, trace), *arguments)

    return replaced


def unsupported(target: Target) -> str | None:
    """Why nothing can be compiled for a target."""
    if target.platform == "rocm" and not target.arch:
        return "machine code for AMD GPUs is of one architecture, and nothing here says for which this is lowered"
    return None


def not_passed(impl: Implementation, call: Call, config: Config) -> str | None:
    """Why a library's programs do not pass the call's kernels what they take: tensor descriptors, where it makes none,
    or one new array twice."""
    if impl.delegate is not None and on_abstract(impl.delegate)(call, config) is not None:
        return None  # its kernels are another variant's
    trace, _ = written(impl, call, config)
    why, held = call.framework.refuses_descriptors(), set(range(len(given(call))))
    looped = {id(step) for loop in flat(trace.steps) if isinstance(loop, Loop) for step in loop.steps}
    for step in flat(trace.steps):
        if isinstance(step, (Copy, Stack)):
            held.add(step.to)
        elif isinstance(step, Loop):
            held |= {step.start, *(part for *_, part in step.reads)}
        else:
            if (why or id(step) in looped) and any(map(is_descriptor, step.args)):
                return why or LOOPED
            passed = Counter(numbers(step.args))
            if any(n > 1 and number not in held for number, n in passed.items()):
                return (
                    f"{step.kernel.__name__} is told twice of an array that it fills, and kernels in another library's "
                    "programs are told once"
                )
            held |= {*passed}
    return None


def given(call: Call) -> list[str]:
    """The arrays that a call has."""
    return [n for n, a in call.arrays.items() if a is not None]


def written(impl: Implementation, call: Call, config: Config) -> tuple[Trace, tuple[Any, ...]]:
    """What an implementation does for a call, and its outputs."""
    trace = Trace()
    inner = abstracted(call, trace)
    with capturing(trace):
        return trace, impl.run(inner, config)


def program(impl: Implementation, call: Call, config: Config) -> Program:
    """A call, written down and compiled."""
    trace, outputs = written(impl, call, config)
    names = tuple(given(call))
    return Program(
        names,
        tuple(trace.places),
        finished(call.target, trace.steps),
        tuple(None if o is None else (o.number, o.seen) for o in outputs),
        frozenset(names.index(n) for n in call.over),
    )


def flat(steps: Iterable[Any]) -> Iterator[Any]:
    """A trace's steps, and after each loop its own."""
    for step in steps:
        yield step
        if isinstance(step, Loop):
            yield from flat(step.steps)


def finished(target: Target, steps: Iterable[Any]) -> tuple[Any, ...]:
    """A trace's steps with their kernels compiled."""

    def one(step: Any) -> Any:
        if isinstance(step, Loop):
            return replace(step, steps=finished(target, step.steps))
        return step if isinstance(step, (Copy, Stack)) else launched(target, *step[:4])

    return tuple(map(one, steps))


def launched(target: Target, kernel: Any, grid: int, args: tuple[Any, ...], constexprs: dict[str, Any]) -> Launch:
    """One launch, its kernel compiled."""
    hardware = targets.find(target.arch) if target.arch else PORTABLE
    source, options = specialised_for(kernel, args, constexprs, hardware)
    values = dict(zip((p.name for p in kernel.params), args, strict=False))
    passed = [leaf for name, declared in source.signature.items() for leaf in leaves(declared, values.get(name))]
    code = compiled(source, options, target, [value for _, value in passed if is_descriptor(value)])
    tiles = iter(code.tiles)
    found: list[int | DescribedArray | ScalarArgument] = []
    for kind, value in passed:
        if is_descriptor(value):
            found.append(DescribedArray(value.base.number, tuple(value.shape), tuple(value.strides), next(tiles)))
            found += [ScalarArgument("i32", n) for n in value.shape] + [ScalarArgument("i64", n) for n in value.strides]
        else:
            found.append(argument(kernel, kind, value))
    return Launch(code, grid, tuple(found))


def specialised_for(
    kernel: Any, args: tuple[Any, ...], constexprs: dict[str, Any], hardware: Hardware
) -> tuple[Any, dict[str, Any]]:
    """The kernel as a launch on tensors would compile it. Triton asks PyTorch how large memory is for AMD's buffer
    instructions, which reach 2 GiB; here each array says so."""
    from triton import knobs

    if hardware.platform == "cuda":
        return specialised(kernel, args, constexprs, hardware)
    buffers = knobs.amd.use_buffer_ops
    with knobs.amd.scope():
        knobs.amd.use_buffer_ops = False
        source, options = specialised(kernel, args, constexprs, hardware)
    for place, array in arrays(args):
        if buffers and array.ptr_range() < 2**31:
            source.attrs[place] = [*source.attrs.get(place, []), ["tt.pointer_range", 32]]
    return source, options


def arrays(args: tuple[Any, ...]) -> Iterator[tuple[tuple[int, ...], AbstractArray]]:
    """The arrays among arguments and in their groups, and where each stands."""
    for i, value in enumerate(args):
        if isinstance(value, AbstractArray):
            yield (i,), value
        elif isinstance(value, tuple):
            yield from (((i, *place), array) for place, array in arrays(value))


def leaves(declared: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """(type, value) of what is passed of an argument: the members of tuples, without what is compiled in."""
    if isinstance(declared, tuple):
        for kind, member in zip(declared, value, strict=True):
            yield from leaves(kind, member)
    elif declared != "constexpr":
        yield declared, value


def argument(kernel: Any, kind: str, value: Any) -> int | ScalarArgument:
    if isinstance(value, AbstractArray):
        return value.number
    if kind not in KINDS:
        raise UnsupportedError(
            f"{kernel.__name__} takes a {kind}, which a launcher makes on the host at each launch, and no machine code "
            "in another library's program is passed"
        )
    return ScalarArgument(KINDS[kind], value)


def compiled(source: Any, options: dict[str, Any], target: Target, described: Sequence[Any] = ()) -> Code:
    """The kernel's machine code, from Triton's cache where it is there. described: the descriptors that it takes."""
    import triton

    hardware = targets.find(target.arch) if target.arch else PORTABLE
    made = triton.compile(source, target=gpu_target(hardware), options=options)
    meta = made.metadata
    refuse_leaks(meta.name, made)
    if meta.num_ctas > 1 or getattr(meta, "launch_cooperative_grid", False):
        raise UnsupportedError(f"{meta.name} runs programs in step, which needs a launcher of Triton's")
    if getattr(meta, "global_scratch_size", 0) or getattr(meta, "profile_scratch_size", 0):
        raise UnsupportedError(f"{meta.name} asks for device memory of its own, which a launcher of Triton's allocates")
    cuda = hardware.platform == "cuda"
    return Code(
        name=meta.name,
        platform=hardware.platform,
        arch=target.arch and hardware.name,
        text=made.asm["ptx"] if cuda else "",
        binary=b"" if not target.arch else made.asm["cubin" if cuda else "hsaco"],
        warps=meta.num_warps,
        lanes=hardware.lanes,
        shared=meta.shared,
        tiles=formats(made, described),
    )


class Listed(Capture):
    """A capture in which arrays are allocated and nothing is launched."""

    runs = False


def kernels(impl: Implementation, call: Call, config: Config) -> tuple[str, ...]:
    """The kernels of a call in the order of their launches, each as its module in this backend and its name. Arrays
    that another library holds are abstract: of a loop over parts of them, the launches for one part are given."""
    if call.framework.name != impl.backend.framework:
        trace, _ = written(impl, call, config)
        return tuple(qualified(step.kernel) for step in flat(trace.steps) if isinstance(step, Launched))
    capture = Listed()
    with capturing(capture):
        impl.run(call, config)
    return tuple(qualified(launch.kernel) for launch in capture.launches)


def qualified(kernel: Any) -> str:
    """A kernel's module, without this backend's package, and its name."""
    module = str(kernel.fn.__module__)
    return f"{module.removeprefix('portakern.backends.triton.')}.{kernel.fn.__name__}"
