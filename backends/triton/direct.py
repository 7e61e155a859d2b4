"""Triton's launcher without the Python around it.

``CompiledKernel.run(gridX, ...)`` is a launcher of Triton's whose ``__call__`` sees to scratch memory and debugging,
and then calls ``self.launch(...)``, which is C. For a kernel that asks for no scratch memory the first part does
nothing and takes 1 us. :func:`direct` makes the second call alone. In which order ``launch`` takes what differs from
release to release and from vendor to vendor, so it is read off the source of the installed ``__call__``; where that is
not understood, ``__call__`` is called.

Tensors go as addresses: of a tensor Triton asks the same address, and then the driver whether it lies on a device,
which the caller knows. Descriptors go as the maps that are kept of them.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from portakern.backends.triton.descriptors import At, bind_thread, elsewhere, raw
from portakern.core import codegen

__all__ = ["Go", "direct"]

Go = Callable[..., None]
"""Takes a stream and the address of each tensor, or None for one that is not there, and launches."""

NOTHING = ("global_scratch", "profile_scratch", "launch_metadata", "launch_enter_hook", "launch_exit_hook")
"""What is None for a kernel without scratch memory that nobody watches."""

PREPARED = {*NOTHING, "active_driver", "kernel_args"}
"""What ``__call__`` may work out before it launches; ``kernel_args`` are ``args`` unless ``gsan_enabled``."""

WHOLE = ("grid", "1", "1", "stream", "function", "metadata", "None", "None", "None", "*")
"""How ``__call__`` itself is called; see :func:`_form`."""


def direct(
    run: Any,
    grid: int,
    function: Any,
    metadata: Any,
    tensors: int,
    rest: Sequence[Any],
    described: Mapping[int, Any] = MappingProxyType({}),
) -> Go:
    """A function that launches ``function`` as ``run`` would, on other streams and tensors.

    Args:
      run: the launcher of a compiled kernel. grid: how many programs.
      function, metadata: handle and ``packed_metadata`` of the compiled kernel.
      tensors: how many parameters are tensors, the first ones. rest: what the others are.
      described: which of the first are descriptors, and these, of no memory.
    """
    launcher: type = type(run)
    form = _form(launcher)
    scratch = getattr(run, "global_scratch_size", 0) or getattr(run, "profile_scratch_size", 0)
    found: tuple[Any, Sequence[Any]] | None = None
    if form is not None and not scratch and not getattr(run, "gsan_enabled", False):
        found = raw(run, list(described.values())) if described else (run.launch, [])
    if form is None or found is None:
        form, found = WHOLE, (run, [_At(d) for d in described.values()])
    launch, maps = found
    own = [getattr(run, word.removeprefix("self.")) for word in form if word.startswith("self.")]
    after = tuple((i, len(m.rest)) for i, m in zip(described, maps, strict=True))
    made: Go = _writer(form, tensors, len(rest), after)(launch, grid, function, metadata, own, rest, maps)
    return made


class _At:
    """Address -> the descriptor of an array that begins there, for a launcher that makes its map itself."""

    rest: tuple[Any, ...] = ()

    def __init__(self, descriptor: Any) -> None:
        self.descriptor = descriptor

    def __getitem__(self, address: int) -> Any:
        bind_thread()
        return elsewhere(self.descriptor, At(address))


@functools.cache
def _writer(
    form: tuple[str, ...], tensors: int, others: int, described: tuple[tuple[int, int], ...]
) -> Callable[..., Go]:
    """Makes launching functions of a form. All is spelled out: a call with a star takes longer. ``described``: which
    addresses go as maps, and how many numbers follow each."""
    addresses = [f"t{i}" for i in range(tensors)]
    numbers = [f"r{i}" for i in range(others)]
    after = {i: [f"m{i}_{j}" for j in range(count)] for i, count in described}
    arguments = [a for i, t in enumerate(addresses) for a in ([f"m{i}[{t}]", *after[i]] if i in after else [t])]
    arguments += numbers
    own = [f"own{i}" for i in range(sum(word.startswith("self.") for word in form))]
    given = iter(own)
    words = [next(given) if word.startswith("self.") else word for word in form[:-1]]
    words += arguments if form[-1] == "*" else [f"({''.join(a + ', ' for a in arguments)})"]
    lines = ["def make(launch, grid, function, metadata, own, rest, maps):"]
    lines += [f"    [{', '.join(own)}] = own"] * bool(own)
    lines += [f"    [{', '.join(numbers)}] = rest"] * bool(others)
    lines += [f"    [{', '.join(f'm{i}' for i in after)}] = maps"] * bool(after)
    lines += [f"    [{', '.join(names)}] = m{i}.rest" for i, names in after.items() if names]
    lines += [
        f"    def go({', '.join(['stream', *addresses])}):",
        f"        launch({', '.join(words)})",
        "    return go",
    ]
    made: Callable[..., Go] = codegen.written("launch", "\n".join(lines), {}, "make")
    return made


@functools.cache
def _form(launcher: type) -> tuple[str, ...] | None:
    """The arguments of ``launch`` in the order of a launcher class's ``__call__``: words of :func:`_writer`, the last
    one "*" where the kernel's own arguments follow one by one, "()" where they come as a tuple. None where it does
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
