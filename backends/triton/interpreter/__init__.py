"""Runs ``@triton.jit`` kernels on CPU tensors, call by call, beside compiled launches in the same process.

Triton's own interpreter is chosen by an environment variable when a kernel is decorated, and works by replacing the
functions of ``triton.language`` for the whole process, which breaks a compile on another thread. Here nothing global
changes: a kernel's source is executed once more over its own namespace, in which ``tl`` is a stand-in whose functions
take and give :class:`values.InterpretedTensor`. So there is nothing to restore, nothing to lock, and threads may
interpret and compile at the same time.

As in a compiled kernel, assigning a Python number makes it a typed scalar, a loop index is a typed scalar, and integer
arguments are int32 or, when they do not fit, int64; tuples and named tuples of arguments stay such. Unlike one, float
arguments stay Python floats, so that float64 kernels keep them whole.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, mangle_type

from portakern.backends.triton.descriptors import base_of, is_descriptor
from portakern.backends.triton.interpreter.described import Described
from portakern.backends.triton.interpreter.functions import OVERRIDES, SHORTCUTS
from portakern.backends.triton.interpreter.values import PROGRAM, SEMANTIC, InterpretedTensor, bound, pointer, scalar
from portakern.core import codegen

__all__ = ["run"]


def run(kernel: JITFunction[Any], grid: int, *args: Any, **kwargs: Any) -> None:
    """Launch ``kernel`` over a 1-D grid on CPU tensors; keywords that are no parameter of it (``num_warps``) are
    ignored."""
    names = kernel.arg_names
    given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
    constexprs = {p.name for p in kernel.params if p.is_constexpr}
    values = {k: _translated(v) if k in constexprs else _argument(v) for k, v in given.items()}
    body = _interpreted(kernel).body
    spans = tuple(
        (s.data_ptr(), s.data_ptr() + s.nbytes())
        for s in (v.untyped_storage() for v in map(base_of, _leaves(given.values())) if isinstance(v, torch.Tensor))
    )
    outer = PROGRAM.index, PROGRAM.grid, PROGRAM.spans
    PROGRAM.grid, PROGRAM.spans = grid, spans
    try:
        with np.errstate(all="ignore"):
            for index in range(grid):
                PROGRAM.index = index
                body(**values)
    finally:
        PROGRAM.index, PROGRAM.grid, PROGRAM.spans = outer


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """``values``, and in place of tuples what they hold."""
    for v in values:
        if isinstance(v, tuple):
            yield from _leaves(v)
        else:
            yield v


def _argument(value: Any) -> Any:
    if isinstance(value, tuple):
        members = map(_argument, value)
        return type(value)(*members) if hasattr(value, "_fields") else tuple(members)
    if isinstance(value, torch.Tensor):
        return pointer(value.data_ptr(), _pointer_type(value.dtype))
    if is_descriptor(value):
        return Described(value, _pointer_type(value.base.dtype).element_ty)
    if isinstance(value, (bool, int)):
        return scalar(value)
    return value


@functools.cache
def _pointer_type(dtype: torch.dtype) -> tl.dtype:
    return tl.str_to_ty(mangle_type(torch.empty(0, dtype=dtype)), None)


class _Interpreted:
    """A ``@triton.jit`` function as interpreted code calls it, also one of Triton's own that was made while
    TRITON_INTERPRET was set, which Triton would interpret in a way of its own."""

    def __init__(self, jit: JITFunction[Any] | InterpretedFunction[Any]) -> None:
        self.jit = jit
        self.shortcut = SHORTCUTS.get(id(jit))

    @functools.cached_property
    def body(self) -> Callable[..., Any]:
        return _rewritten(self.jit.fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = None if self.shortcut is None else self.shortcut(*args, **kwargs)
        return self.body(*args, **kwargs) if found is None else found


_known: dict[int, _Interpreted] = {}  # by id: hashing a JITFunction hashes all its source


def _interpreted(jit: JITFunction[Any] | InterpretedFunction[Any]) -> _Interpreted:
    found = _known.get(id(jit))
    if found is None:
        found = _known[id(jit)] = _Interpreted(jit)
    return found


class _Namespace:
    """A module of triton.language as interpreted code sees it; attributes are translated on first use."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = _translated(getattr(self._module, name))
        setattr(self, name, value)
        return value


@functools.cache
def _namespace(module: types.ModuleType) -> _Namespace:
    return _Namespace(module)


def _translated(value: Any) -> Any:
    """What ``value``, found in a kernel's globals or given as a constexpr, is in interpreted code."""
    if id(value) in OVERRIDES:
        return OVERRIDES[id(value)]
    if isinstance(value, (JITFunction, InterpretedFunction)):
        return _interpreted(value)
    if isinstance(value, types.ModuleType):
        return _namespace(value) if value.__name__.startswith("triton.language") else value
    if isinstance(value, tl.constexpr):
        return value.value
    return bound(value) if callable(value) and tl.core.is_builtin(value) else value


def _method(function: Any) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: function(self, *args, **kwargs)


for _name, _member in list(vars(tl.tensor).items()):  # x.sum(0) and the like
    _function = getattr(tl, _name, None)
    if isinstance(_member, (JITFunction, InterpretedFunction)):
        setattr(InterpretedTensor, _name, _method(_translated(_member)))
    elif tl.core.is_builtin(_member) and id(_function) in OVERRIDES:
        setattr(InterpretedTensor, _name, _method(OVERRIDES[id(_function)]))


def _assigned(value: Any) -> Any:
    """A value as it is after an assignment in a kernel: numbers become typed scalars."""
    return value if value.__class__ is InterpretedTensor else SEMANTIC.to_tensor(value, False)


def _logical(conjunction: bool, *operands: Callable[[], Any]) -> Any:
    """``and`` or ``or`` as a kernel means them: a Python value may decide before the rest is looked at, tensors are
    all looked at and joined, element by element. Combiners of scans and reductions see blocks here where a compiled
    one sees scalars."""
    join = SEMANTIC.logical_and if conjunction else SEMANTIC.logical_or
    value, joined = None, None
    for operand in operands:
        value = operand()
        if not isinstance(value, InterpretedTensor):
            if bool(value) != conjunction:
                return value
        else:
            joined = value if joined is None else join(joined, value)
    return value if joined is None else joined


def _negated(value: Any) -> Any:
    return SEMANTIC.not_(value) if isinstance(value, InterpretedTensor) else not value


class _Rewriter(ast.NodeTransformer):
    """Wraps what is assigned in ``_assigned``, has ``and``, ``or`` and ``not`` work on blocks, and drops annotations,
    which name things of no use here."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        operands = [ast.Lambda(nothing, value) for value in node.values]
        conjunction = ast.Constant(isinstance(node.op, ast.And))
        return ast.Call(ast.Name("_logical", ast.Load()), [conjunction, *operands], [])

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Not):
            return node
        return ast.Call(ast.Name("_negated", ast.Load()), [node.operand], [])

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        node.value = ast.Call(ast.Name("_assigned", ast.Load()), [node.value], [])
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        return ast.Assign([node.target], node.value) if node.value else ast.Pass()  # constexpr: stays a Python value

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.decorator_list, node.returns = [], None
        for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            a.annotation = None
        return node


def _rewritten(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` compiled again over translated globals, with the lines of its source for tracebacks."""
    lines, first = inspect.getsourcelines(fn)
    tree = _Rewriter().visit(ast.parse(textwrap.dedent("".join(lines))))
    ast.increment_lineno(tree, first - 1)
    code = compile(ast.fix_missing_locations(tree), inspect.getsourcefile(fn) or "<kernel>", "exec")
    used = _names(code)
    scope = {name: _translated(value) for name, value in fn.__globals__.items() if name in used}
    scope |= {"range": OVERRIDES[id(range)], "_assigned": _assigned, "_logical": _logical, "_negated": _negated}
    found: Callable[..., Any] = codegen.executed(code, scope, fn.__name__)
    return found


def _names(code: types.CodeType) -> set[str]:
    return {*code.co_names}.union(*(_names(c) for c in code.co_consts if isinstance(c, types.CodeType)))
