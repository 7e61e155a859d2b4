"""Launching compiled kernels on PyTorch's tensors.

``kernel[grid](...)`` takes 20 to 50 us of host time to find out which binary its arguments select. Here binaries are
kept under keys that are at least as fine as Triton's own, and a later launch goes straight to its binary. Key and
launch are one straight-line function, written once for each kernel and list of argument types, as
``portakern.core.binder`` writes binders. The first launch of a key is Triton's.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

from portakern.backends.triton.descriptors import base_of, bind_thread, describes, mend_rounding
from portakern.backends.triton.imports import check_compiled
from portakern.backends.triton.leaks import leaking_products
from portakern.core import codegen

__all__ = ["Handles", "current_device", "current_stream", "learn", "refuse_leaks", "small", "watched", "write_launcher"]

log = logging.getLogger("portakern")

# How Triton's launchers are called: release 3.6 passes what follows the function through *args, later ones name it.
_GRID, _REST = (
    ["gridX", "gridY", "gridZ", "stream", "function"],
    ["kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"],
)

current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
_warned: set[str] = set()


Handles = tuple[Any, Any, Any]
"""A compiled kernel, ready: its launcher, its function, its metadata."""


class _Unexpected(Exception):
    """Triton, or an argument, is not what a kept launch relies on."""


def learn(kernel: JITFunction[Any], args: tuple[Any, ...], constexprs: dict[str, Any]) -> Callable[..., Handles | None]:
    """What launches ``kernel`` on arguments of these types; it keeps the kernel alive, and with it the id."""
    check_compiled()
    try:
        launcher = write_launcher(
            kernel, [type(a) for a in args], {n: type(v) for n, v in constexprs.items()}, {}, bool(torch.version.hip)
        )
        watched(kernel)
    except (_Unexpected, AttributeError) as e:
        _warn(e)
        launcher = _by_triton(kernel)
    return launcher


def _by_triton(kernel: JITFunction[Any]) -> Callable[..., None]:
    def launcher(grid: int, *args: Any, **constexprs: Any) -> None:
        # Triton launches on the current device, whichever the arrays are on
        with torch.cuda.device(base_of(args[0]).device):
            if any(describes(type(a)) for a in args):
                bind_thread()
            mend_rounding(kernel, grid, args, constexprs)
            refuse_leaks(kernel.__name__, kernel[(grid,)](*args, **constexprs))

    return launcher


def refuse_leaks(name: str, compiled: Any) -> None:
    """Raise where a kernel's code is not what its source says (:mod:`.leaks`): what it wrote is not handed on.

    Raises:
      RuntimeError: it is so. No refusal: what takes a call is to be mended, and a check that meets it fails.
    """
    found = leaking_products(getattr(compiled, "asm", {}).get("ptx", ""))
    if found:
        raise RuntimeError(
            f"{name}: this Triton's compiler lets {', '.join(found)} reach into the other half of a 64-bit register, "
            "so that the kernel reads and writes elsewhere than it says; call with another variant, tiling or backend, "
            "and report the shapes, dtypes and options of the call"
        )


def _warn(why: Exception) -> None:
    if str(why) not in _warned:
        _warned.add(str(why))
        log.warning(
            "portakern: a Triton kernel is launched by Triton's own path each time, right but some 20 us slower: %s",
            why,
        )


def watched(kernel: JITFunction[Any]) -> bool:
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
        refuse_leaks(kernel.__name__, compiled)
        try:
            if not watched(kernel):
                kept[key] = _handles(compiled)
        except (_Unexpected, AttributeError) as e:
            _warn(e)

    env = {
        "_first": first, "_find": kept.get, "_watched": watched, "_kernel": kernel, "_widths": _widths,
        "_inside": _inside, "_on": torch.cuda.device, "_current": current_device, "_stream": current_stream,
        "_knobs": knobs, "_bind_thread": bind_thread,
        **{f"_{p.name}": p.default for p in kernel.params if p.has_default},
    }  # fmt: skip
    title, source = f"launcher of {kernel.__name__}", _source(kernel, args, constexprs, hip)
    written: Callable[..., Handles | None] = codegen.written(title, source, env, "_launcher")
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
    return [f"{name}.dtype", f"not {name}.data_ptr() & 15"] + [small(name)] * hip


def small(name: str) -> str:
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
    {"_bind_thread()" if described else "pass"}
    _key = ({", ".join(key)})
    _kept = _find(_key)
    if _kept is None or _watched(_kernel):
        return _first(_key, _grid, {", ".join(names[: len(args)])}{named})
    _run, _function, _metadata = _kept
    _run(_grid, 1, 1, _stream(_device), _function, _metadata, None, None, None, {arguments})
    return _kept
"""
