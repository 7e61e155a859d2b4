"""Cached launchers: launching compiled kernels on PyTorch's tensors.

``kernel[grid](...)`` takes 20 to 50 us of host time to find out which binary its arguments select. Here binaries are
kept under keys that are at least as fine as Triton's own, and a later launch goes straight to its binary. Key and
launch are one straight-line function, written once for each kernel and list of argument types, as
``portakern.core.binder`` writes binders. The first launch of a key is Triton's.
"""

from __future__ import annotations

import ast
import functools
import inspect
import logging
import textwrap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

from portakern.backends.triton.cache import settle, within_cache
from portakern.backends.triton.descriptors import (
    ArrayAddress,
    base_of,
    bind_thread,
    describes,
    elsewhere,
    mend_rounding,
    raw,
)
from portakern.backends.triton.imports import check_compiled
from portakern.backends.triton.leaks import refuse_leaks
from portakern.core import codegen

__all__ = ["Handles", "current_device", "current_stream", "launching", "learn", "write_launcher"]

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


NOTHING = ("global_scratch", "profile_scratch", "launch_metadata", "launch_enter_hook", "launch_exit_hook")
"""What is None for a kernel without scratch memory that nobody watches."""

PREPARED = {*NOTHING, "active_driver", "kernel_args"}
"""What ``__call__`` may work out before it launches; ``kernel_args`` are ``args`` unless ``gsan_enabled``."""

WHOLE = ("grid", "1", "1", "stream", "function", "metadata", "None", "None", "None", "*")
"""How ``__call__`` itself is called; see :func:`_signature`."""


class _Unexpected(Exception):
    """Triton, or an argument, is not what a kept launch relies on."""


def learn(kernel: JITFunction[Any], args: tuple[Any, ...], constexprs: dict[str, Any]) -> Callable[..., Handles | None]:
    """What launches ``kernel`` on arguments of these types; it keeps the kernel alive, and with it the id."""
    check_compiled()
    try:
        launcher = write_launcher(
            kernel, [type(a) for a in args], {n: type(v) for n, v in constexprs.items()}, {}, bool(torch.version.hip)
        )
        _watched(kernel)
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
            refuse_leaks(kernel.__name__, _launched_by_triton(kernel, grid, args, constexprs))

    return launcher


def _launched_by_triton(kernel: JITFunction[Any], grid: int, args: tuple[Any, ...], constexprs: dict[str, Any]) -> Any:
    """The compiled kernel, launched by Triton, which finds it in its cache or compiles it."""
    settle(kernel)
    with within_cache():
        mend_rounding(kernel, grid, args, constexprs)
        return kernel[(grid,)](*args, **constexprs)


def _warn(why: Exception) -> None:
    if str(why) not in _warned:
        _warned.add(str(why))
        log.warning(
            "portakern: a Triton kernel is launched by Triton's own path each time, right but some 20 us slower: %s",
            why,
        )


WATCHES = (
    "_runtime.debug or _runtime.add_stages_inspection_hook or _compilation.instrumentation_mode"
    " or getattr(_runtime.launch_enter_hook, 'calls', _runtime.launch_enter_hook)"
    " or getattr(_runtime.launch_exit_hook, 'calls', _runtime.launch_exit_hook)"
)
"""Whether somebody watches launches or compiles in a special way: a profiler's hooks, debug asserts, instrumented code.
Then Triton launches. It is asked before every launch, and so stands in the text of what launches."""

WATCHED = {"_runtime": knobs.runtime, "_compilation": knobs.compilation}
"""What :data:`WATCHES` names."""

_watched = codegen.written(
    "watched", f"def watched(kernel):\n    return {WATCHES} or kernel.pre_run_hooks", WATCHED, "watched"
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
    """``launcher(grid, *args, **constexprs)`` for arguments of these types; it returns the handles that are in
    ``kept``."""

    def first(key: Any, grid: int, *args: Any, **constexprs: Any) -> Handles | None:
        compiled = _launched_by_triton(kernel, grid, args, constexprs)
        refuse_leaks(kernel.__name__, compiled)
        try:
            if not _watched(kernel):
                kept[key] = found = _handles(compiled)
                return found
        except (_Unexpected, AttributeError) as e:
            _warn(e)
        return None

    env = {
        "_first": first, "_find": kept.get, **WATCHED, "_kernel": kernel, "_widths": _widths,
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
            key.append((v.dtype, not v.data_ptr() & 15, hip and v.untyped_storage().size() < REACH))
        elif type(v) is int:
            key.append((v & 15 and (v == 1 or 2), *_widths(v)))
        else:
            key.append(type(v) if isinstance(v, (bool, float)) else v)
    return tuple(key)


REACH = 2**31
"""Bytes of a storage that AMD's buffer instructions reach."""


def _tensor_key(name: str, hip: bool) -> list[str]:
    """What Triton specialises a tensor on."""
    return [f"{name}.dtype", f"not {name}.data_ptr() & 15"] + [f"{name}.untyped_storage().size() < {REACH}"] * hip


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
    if _kept is None or {WATCHES} or _kernel.pre_run_hooks:
        return _first(_key, _grid, {", ".join(names[: len(args)])}{named})
    _run, _function, _metadata = _kept
    _run(_grid, 1, 1, _stream(_device), _function, _metadata, None, None, None, {arguments})
    return _kept
"""


def launching(
    name: str,
    handles: Handles,
    grid: int,
    addresses: Sequence[Any],
    rest: Sequence[Any],
    described: Mapping[int, Any] = MappingProxyType({}),
) -> tuple[str, dict[str, Any]]:
    """A launch without the Python around it: its text, and what that names beside ``stream`` and the addresses.

    ``CompiledKernel.run(gridX, ...)`` is a launcher of Triton's whose ``__call__`` sees to scratch memory and
    debugging, and then calls ``self.launch(...)``, which is C. For a kernel that asks for no scratch memory the first
    part does nothing and takes 1 us, and only the second is written. In which order it takes what differs from release
    to release and from vendor to vendor, so it is read off the source of the installed ``__call__``; where that is not
    understood, ``__call__`` is called. Of a tensor Triton asks its address, and then the driver whether it lies on a
    device, which the caller knows; descriptors go as the maps that are kept of them.

    Args:
      name: of the launching function. addresses: names of those of the tensors, which are the first parameters, None
        for one that is not there, or groups of such names. rest: what the other parameters are.
      described: which of the first are descriptors, and these, of no memory.
    """
    run, function, metadata = handles
    kind: type = type(run)
    form = _signature(kind)
    scratch = getattr(run, "global_scratch_size", 0) or getattr(run, "profile_scratch_size", 0)
    found: tuple[Any, Sequence[Any]] | None = None
    if form is not None and not scratch and not getattr(run, "gsan_enabled", False):
        found = raw(run, list(described.values())) if described else (run.launch, [])
    if form is None or found is None:
        form, found = WHOLE, (run, [_DescriptorsByAddress(d) for d in described.values()])
    launch, maps = found
    env: dict[str, Any] = {name: launch}

    def named(kind: str, value: Any) -> str:
        env[f"{name}_{kind}"] = value
        return f"{name}_{kind}"

    def text(address: Any) -> str:
        return f"({''.join(text(a) + ', ' for a in address)})" if isinstance(address, tuple) else str(address)

    arguments = [text(a) for a in addresses]
    for n, (i, of) in enumerate(zip(described, maps, strict=True)):
        more = [named(f"map{n}_{j}", value) for j, value in enumerate(of.rest)]
        arguments[i] = ", ".join([f"{named(f'map{n}', of)}[{arguments[i]}]", *more])
    arguments += [named(str(i), value) for i, value in enumerate(rest)]
    known = {"grid": grid, "function": function, "metadata": metadata}
    words = [
        named(word, known[word]) if word in known
        else named(word.removeprefix("self."), getattr(run, word.removeprefix("self."))) if word.startswith("self.")
        else word
        for word in form[:-1]
    ]  # fmt: skip
    words += arguments if form[-1] == "*" else [f"({''.join(a + ', ' for a in arguments)})"]
    return f"{name}({', '.join(words)})", env


class _DescriptorsByAddress:
    """Address -> the descriptor of an array that begins there, for a launcher that makes its map itself."""

    rest: tuple[Any, ...] = ()

    def __init__(self, descriptor: Any) -> None:
        self.descriptor = descriptor

    def __getitem__(self, address: int) -> Any:
        bind_thread()
        return elsewhere(self.descriptor, ArrayAddress(address))


@functools.cache
def _signature(launcher: type) -> tuple[str, ...] | None:
    """The arguments of ``launch`` in the order of a launcher class's ``__call__``: words of :func:`launching`, the
    last one "*" where the kernel's own arguments follow one by one, "()" where they come as a tuple. None where it does
    anything else than to call ``launch`` last with what is known here."""
    try:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(launcher.__call__))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    *before, last = body.body if isinstance(body, ast.FunctionDef) else [None]
    call = last.value if isinstance(last, ast.Expr) else None
    if not (isinstance(call, ast.Call) and ast.unparse(call.func) == "self.launch" and not call.keywords):
        return None
    if not all(map(_does_nothing, before)):
        return None
    names = {"gridX": "grid", "gridY": "1", "gridZ": "1", "stream": "stream", "function": "function"}
    names |= {"kernel_metadata": "metadata", **dict.fromkeys(NOTHING, "None"), "args": "()", "kernel_args": "()"}
    words: list[str] = []
    for argument in map(ast.unparse, call.args):
        if argument == "*args":  # release 3.6 hands on what follows the function
            words += ["*"] if "kernel_metadata" in _parameters(launcher) else ["metadata", "None", "None", "None", "*"]
        elif argument in names:
            words.append(names[argument])
        elif argument.startswith("self.") and argument.removeprefix("self.").isidentifier():
            words.append(argument)
        else:
            return None
    return tuple(words) if words and words[-1] in ("*", "()") and not {"*", "()"} & {*words[:-1]} else None


def _parameters(launcher: type) -> list[str]:
    return list(inspect.signature(launcher.__call__).parameters)


def _does_nothing(statement: ast.stmt | None) -> bool:
    """Whether a statement does nothing for a kernel without scratch memory and gsan: a function, a name that is
    prepared, or a choice between such statements. ``if self.gsan_enabled:`` is not entered."""
    if isinstance(statement, ast.FunctionDef):
        return True
    if isinstance(statement, ast.Assign):
        return all(isinstance(t, ast.Name) and t.id in PREPARED for t in statement.targets)
    if isinstance(statement, ast.If):
        if ast.unparse(statement.test) == "self.gsan_enabled":
            return not statement.orelse
        return all(map(_does_nothing, statement.body + statement.orelse))
    return False
