"""One way to launch: the compiler on a GPU, the interpreter on the CPU, chosen by the call.

``kernel[grid](...)`` takes 20 to 50 us of host time to find out which binary its arguments select. Here binaries are
kept under keys that are at least as fine as Triton's own, and a later launch goes straight to its binary. Key and
launch are one straight-line function, written once for each kernel and list of argument types, as
``portakern.core.binder`` writes binders. The first launch of a key is Triton's. What a caller launches again and again
with other tensors alone it prepares once.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl
from triton import knobs
from triton.runtime.jit import JITFunction

from portakern.backends.triton import interpreter
from portakern.backends.triton.descriptors import (
    bare,
    base_of,
    describes,
    elsewhere,
    is_descriptor,
    mend_rounding,
)
from portakern.backends.triton.direct import direct
from portakern.backends.triton.tape import TAPES, note_launch
from portakern.core import targets

if TYPE_CHECKING:
    from portakern.core.call import Call

__all__ = [
    "MAX_GRID", "accumulator", "cdiv", "compiler_options", "dot_precision", "lanes", "launch", "prepare", "recording",
    "refuse_common", "shared_limit", "tmem_columns", "torch_dtype", "write_launcher",
]  # fmt: skip

log = logging.getLogger("portakern")

MAX_GRID = 2**31 - 1  # of a grid's first dimension, on NVIDIA and AMD; the others end at 65535, so no kernel uses them

# How Triton's launchers are called: release 3.6 passes what follows the function through *args, later ones name it.
_GRID, _REST = (
    ["gridX", "gridY", "gridZ", "stream", "function"],
    ["kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"],
)

_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_current_stream = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
_launchers: dict[tuple[Any, ...], Callable[..., Handles | None]] = {}
_warned: set[str] = set()
_recorder: Callable[..., None] | None = None


Handles = tuple[Any, Any, Any]
"""A compiled kernel, ready: its launcher, its function, its metadata."""


class _Unexpected(Exception):
    """Triton, or an argument, is not what a kept launch relies on."""


def launch(kernel: JITFunction[Any], grid: int, call: Call, *args: Any, **constexprs: Any) -> Handles | None:
    """Run ``kernel`` over ``grid`` programs on the device of the call's arrays. ``constexprs``: the kernel's, and
    Triton's own such as ``num_warps``.

    Returns: what was launched, where it is kept.
    """
    if TAPES:
        note_launch(kernel, grid, args, constexprs)
    if call.interpret:
        interpreter.run(kernel, grid, *args, **constexprs)
        return None
    if _recorder is not None:
        _recorder(kernel, grid, args, constexprs)
        return None
    types = (id(kernel), *constexprs, *map(type, args), *map(type, constexprs.values()))
    return (_launchers.get(types) or _learn(types, kernel, args, constexprs))(grid, *args, **constexprs)


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
        kernel, grid, call, numbers, constexprs, rest, first.get_device(), direct, described
    )
    return prepared


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
    key = [f"{at[n]} & 15" for n in tensors] + [_small(n) for n in tensors] * hip
    key += ["knobs.amd.use_buffer_ops"] * hip
    plain = "False" if hip else f"not ({' | '.join(at.values())}) & 15"
    text = f"""
def make(kernel, grid, call, numbers, constexprs, rest, device, direct, described):
    kept = {{}}
    find = kept.get
    def prepared({bases}):
        if TAPES or _recorder is not None or _current_device() != device:
            launch(kernel, grid, call, {passed}, *numbers, **constexprs)
            return
        {"; ".join(f"{address} = {n}.data_ptr()" for n, address in at.items())}
        key = None if {plain} else ({", ".join(key)},)
        go = find(key)
        if go is None or _watched(kernel):
            handles = launch(kernel, grid, call, {passed}, *numbers, **constexprs)
            if handles is not None:
                run, function, metadata = handles
                kept[key] = direct(run, grid, function, metadata, {len(names)}, rest, described)
            return
        go(_current_stream(device), {", ".join(at.get(n, "None") for n in names)})
    return prepared
"""
    written: dict[str, Any] = {}
    exec(compile(text, f"<prepared launch on {len(there)} tensors>", "exec"), globals(), written)
    made: Callable[..., Callable[..., None]] = written["make"]
    return made


@contextmanager
def recording(recorder: Callable[[JITFunction[Any], int, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """While inside, ``recorder(kernel, grid, args, constexprs)`` is told of compiled launches, and none takes place:
    for a process that only compiles, and for one that runs them otherwise."""
    global _recorder
    before, _recorder = _recorder, recorder
    try:
        yield
    finally:
        _recorder = before


def _learn(
    types: tuple[Any, ...], kernel: JITFunction[Any], args: tuple[Any, ...], constexprs: dict[str, Any]
) -> Callable[..., Handles | None]:
    """What launches ``kernel`` on arguments of these types; it keeps the kernel alive, and with it the id."""
    try:
        launcher = write_launcher(
            kernel, [type(a) for a in args], {n: type(v) for n, v in constexprs.items()}, {}, bool(torch.version.hip)
        )
        _watched(kernel)
    except (_Unexpected, AttributeError) as e:
        _warn(e)
        launcher = _by_triton(kernel)
    return _launchers.setdefault(types, launcher)


def _by_triton(kernel: JITFunction[Any]) -> Callable[..., None]:
    def launcher(grid: int, *args: Any, **constexprs: Any) -> None:
        # Triton launches on the current device, whichever the arrays are on
        with torch.cuda.device(base_of(args[0]).device):
            mend_rounding(kernel, grid, args, constexprs)
            kernel[(grid,)](*args, **constexprs)

    return launcher


def _warn(why: Exception) -> None:
    if str(why) not in _warned:
        _warned.add(str(why))
        log.warning(
            "portakern: a Triton kernel is launched by Triton's own path each time, right but some 20 us slower: %s",
            why,
        )


def _watched(kernel: JITFunction[Any]) -> bool:
    """Whether somebody watches launches or compiles in a special way: a profiler's hooks, debug asserts, instrumented
    code. Then Triton launches."""
    r = knobs.runtime
    return bool(
        r.debug
        or r.add_stages_inspection_hook
        or knobs.compilation.instrumentation_mode
        or kernel.pre_run_hooks
        or getattr(r.launch_enter_hook, "calls", r.launch_enter_hook)
        or getattr(r.launch_exit_hook, "calls", r.launch_exit_hook)
    )


def _handles(compiled: Any) -> Handles:
    """What a later launch needs of a compiled kernel that has run."""
    found = compiled.run, compiled.function, compiled.packed_metadata
    parameters = list(inspect.signature(found[0]).parameters)
    if parameters not in ([*_GRID, "args"], [*_GRID, *_REST, "args"]):
        raise _Unexpected(f"this Triton's launchers take ({', '.join(parameters)}), which is new")
    return found


def write_launcher(
    kernel: JITFunction[Any],
    args: list[type],
    constexprs: dict[str, type],
    kept: MutableMapping[Any, Handles],
    hip: bool,
) -> Callable[..., Handles | None]:
    """``launcher(grid, *args, **constexprs)`` for arguments of these types; it returns the handles that it found in
    ``kept``."""

    def first(key: Any, grid: int, *args: Any, **constexprs: Any) -> None:
        mend_rounding(kernel, grid, args, constexprs)
        compiled = kernel[(grid,)](*args, **constexprs)
        try:
            if not _watched(kernel):
                kept[key] = _handles(compiled)
        except (_Unexpected, AttributeError) as e:
            _warn(e)

    env = {
        "_first": first, "_find": kept.get, "_watched": _watched, "_kernel": kernel, "_widths": _widths,
        "_inside": _inside, "_on": torch.cuda.device, "_current": _current_device, "_stream": _current_stream,
        "_knobs": knobs, **{f"_{p.name}": p.default for p in kernel.params if p.has_default},
    }  # fmt: skip
    exec(compile(_source(kernel, args, constexprs, hip), f"<launcher of {kernel.__name__}>", "exec"), env)
    written: Callable[..., Handles | None] = env["_launcher"]
    return written


def _widths(*numbers: int) -> tuple[int, ...]:
    """How wide an integer each number needs: Triton passes it as int32, int64 or uint64."""
    return tuple(0 if -(2**31) <= n < 2**31 else 1 if n < 2**63 else 2 for n in numbers)


def _inside(values: tuple[Any, ...], hip: bool) -> tuple[Any, ...]:
    """What Triton specialises a tuple on: its type, which names the members, and of each member what it would
    outside."""
    key: list[Any] = [type(values)]
    for v in values:
        if isinstance(v, tuple):
            key.append(_inside(v, hip))
        elif isinstance(v, torch.Tensor):
            key.append((v.dtype, not v.data_ptr() & 15, hip and v.untyped_storage().size() < 2147483648))
        elif type(v) is int:
            key.append((v & 15 and (v == 1 or 2), *_widths(v)))
        else:
            key.append(type(v) if isinstance(v, (bool, float)) else v)
    return tuple(key)


def _tensor_key(name: str, hip: bool) -> list[str]:
    """What Triton specialises a tensor on."""
    return [f"{name}.dtype", f"not {name}.data_ptr() & 15"] + [_small(name)] * hip


def _small(name: str) -> str:
    """Whether AMD's buffer instructions reach all of a tensor's memory."""
    return f"{name}.untyped_storage().size() < 2147483648"


def _source(kernel: JITFunction[Any], args: list[type], constexprs: dict[str, type], hip: bool) -> str:
    """The launcher's text. Its key has all that Triton specialises on beyond the types: see
    ``get_tensor_specialization`` and ``get_int_specialization`` there."""
    names = [p.name for p in kernel.params]
    types = dict(zip(names, args, strict=False)) | constexprs
    by_value = {p.name for p in kernel.params if p.is_constexpr} | (types.keys() - set(names))
    tensors = [n for n, t in types.items() if n not in by_value and issubclass(t, torch.Tensor)]
    described = [n for n, t in types.items() if n not in by_value and describes(t)]
    numbers = [n for n, t in types.items() if n not in by_value and t is int]
    tuples = [n for n, t in types.items() if n not in by_value and issubclass(t, tuple)]
    odd = [
        f"{n}: {t.__name__}"
        for n, t in types.items()
        if n not in (*tensors, *described, *numbers, *tuples, *by_value) and t not in (bool, float, type(None))
    ]
    odd += [f"{p.name} (none)" for p in kernel.params if p.name not in types and not p.has_default]
    odd += [str(p) for n, p in kernel.signature.parameters.items() if n.startswith("_") or p.kind is p.VAR_POSITIONAL]
    if odd or not (tensors or described) or len(args) > len(names):
        raise _Unexpected(
            f"{kernel.__name__} on {len(args)} arguments, {len(tensors)} of them tensors; {', '.join(odd)}"
        )

    key = ["_device"]
    for n in tensors:
        key += _tensor_key(n, hip)
    for n in described:
        key += [f"{n}.base.dtype", f"tuple({n}.block_shape)", f"getattr({n}, 'layout', None)"]
    key += [f"{n} & 15 and ({n} == 1 or 2)" for n in numbers]
    if numbers:
        key += [f"0 if 0 <= ({' | '.join(numbers)}) < 2147483648 else _widths({', '.join(numbers)})"]
    key += [f"_inside({n}, {hip})" for n in tuples]
    key += ["_knobs.amd.use_buffer_ops"] * hip + [n for n in types if n in by_value]
    passed, named = ", ".join(types), "".join(f", {n}={n}" for n in constexprs)
    arguments = ", ".join(n if n in types else f"_{n}" for n in names)
    return f"""
def _launcher(_grid, {passed}):
    _device = {tensors[0] if tensors else described[0] + ".base"}.get_device()
    if _current() != _device:
        with _on(_device):
            return _launcher(_grid, {passed})
    _key = ({", ".join(key)})
    _kept = _find(_key)
    if _kept is None or _watched(_kernel):
        return _first(_key, _grid, {", ".join(names[: len(args)])}{named})
    _run, _function, _metadata = _kept
    _run(_grid, 1, 1, _stream(_device), _function, _metadata, None, None, None, {arguments})
    return _kept
"""


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def accumulator(dtype: str) -> tl.dtype:
    """What sums of ``dtype`` are kept in."""
    return tl.float64 if dtype == "float64" else tl.float32


def dot_precision(call: Call) -> str:
    """``input_precision`` of this call's dots: tf32 only where float32 operands ask for it and the hardware has it."""
    asked = call.dtype == "float32" and call.options["precision"] == "tf32"
    return "tf32" if asked and "tf32" in targets.family(call.target.arch).matrix_dtypes else "ieee"


def shared_limit(arch: str) -> int:
    """Bytes of shared memory (LDS) that one program may use."""
    memory = targets.family(arch).on_chip
    return memory["lds" if "lds" in memory else "shared"] or 0


def tmem_columns(arch: str) -> int:
    """Columns of the tensor memory in which Blackwell's matrix unit accumulates, 128 lanes of 32 bits each; 0 without
    it."""
    return (targets.family(arch).on_chip.get("tmem") or 0) // 512


def compiler_options(tiling: Mapping[str, int]) -> dict[str, int]:
    """What a tiling says to Triton's compiler. ``matrix_instr_nonkdim``, rows and columns of one matrix instruction,
    stands in tilings for CDNA alone: NVIDIA's launch refuses the word."""
    return {n: tiling[n] for n in ("num_warps", "num_stages", "matrix_instr_nonkdim") if n in tiling}


def lanes(arch: str) -> int:
    """Threads of a warp or wave."""
    return targets.family(arch).lanes


def refuse_common(call: Call, num_warps: int, programs: int, *tiles: tuple[str, int]) -> str | None:
    """What no Triton kernel can do, in a user's words. ``tiles``: what a program keeps at a time, and of how many
    32-bit numbers."""
    if programs > MAX_GRID:
        return f"{programs} tiles are more than a grid holds (2^31 - 1); use a larger tiling"
    if call.interpret:
        return None
    if call.dtype == "float64":
        return "float64 is not compiled for GPUs (it runs in the interpreter on CPU arrays only); use float32"
    hardware = targets.family(call.target.arch)
    threads, most = num_warps * hardware.lanes, hardware.program_threads or 0
    if threads > most:
        return f"num_warps = {num_warps} is {threads} threads a program on {call.target.arch}, more than {most}"
    held = min(threads * (hardware.thread_registers or 0), hardware.core_registers or 0)
    for name, values in tiles:
        # Operands of dots lie in registers too where no matrix unit takes them, about as many again. Spills of tens of
        # kilobytes a thread take minutes to compile.
        needed = values if call.dtype in hardware.matrix_dtypes or dot_precision(call) == "tf32" else 2 * values
        if needed > held:
            return (
                f"{name} needs about {needed} registers and {num_warps} warps of {call.target.arch} have {held}; "
                "use a smaller tile or more warps"
            )
    return None
