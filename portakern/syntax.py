"""The syntax of a module for hashing, statement by statement, without the names that its authors could choose freely.

Comments, docstrings, layout, imports and the paths of modules are left out. A local variable or parameter is a number,
in the order in which a statement mentions them; what another statement of portakern defines is a :class:`Ref`, an
argument that is passed by name to a function of portakern a :class:`Keyword`. Everything else keeps its name: what
other libraries define, attributes and methods, strings, and the parameters of a function that a function of
portakern decorates, as ``spec`` does.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

__all__ = ["Keyword", "Module", "Ref", "Statement", "read"]

HERE = ("portakern", "benchmarks", "maint", "tests")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)
QUIET = (ast.Import, ast.ImportFrom, ast.Raise)
LEFT_OUT = (ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.expr_context)


class Ref(NamedTuple):
    """A reference to a definition in a module of portakern: module and name, with attributes, joined by dots."""

    path: str


class Keyword(NamedTuple):
    """The name of an argument, and the functions one of which may have the parameter."""

    name: str
    functions: tuple[str, ...]


class Statement(NamedTuple):
    """A statement at the top of a module.

    Attributes:
      binds: the names that it defines. params: those of its parameters, of a function. calls: the texts that decorators
        are called with first. adds_to: what it registers with or changes: as a Ref has it, or its module.
    """

    tokens: tuple[str | Ref | Keyword, ...]
    binds: tuple[str, ...]
    params: tuple[str, ...]
    calls: tuple[str, ...]
    adds_to: tuple[str, ...]


class Module(NamedTuple):
    """``names``: name -> the numbers of the statements that define it. ``imported``: name -> the path that it was
    imported from."""

    statements: tuple[Statement, ...]
    names: Mapping[str, tuple[int, ...]]
    imported: Mapping[str, str]


@functools.lru_cache(1024)  # by the text, as files of one name change, and those of another checkout are the same
def read(name: str, text: str) -> Module:
    """A module of that name and text."""
    tree = ast.parse(text)
    imported = dict(pair for node in _inside(tree.body) for pair in _imports(node))
    body = [s for s in tree.body if not isinstance(s, ast.Import | ast.ImportFrom) and not _is_text(s)]
    names: dict[str, tuple[int, ...]] = {}
    for i, s in enumerate(body):
        for n in _bound([s]):
            names[n] = (*names.get(n, ()), i)
    outer = {n: Ref(f"{name}.{n}") for n in names} | {n: _outer(path) for n, path in imported.items()}
    return Module(tuple(_Reader(name, outer).statement(s) for s in body), names, imported)


def _outer(path: str) -> str | Ref:
    return Ref(path) if path.partition(".")[0] in HERE else path


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(name, what it stands for) of an import."""
    if isinstance(node, ast.Import):
        for a in node.names:
            yield (a.asname, a.name) if a.asname else (a.name.partition(".")[0],) * 2
    elif isinstance(node, ast.ImportFrom):
        for a in node.names:
            yield a.asname or a.name, f"{node.module}.{a.name}"


def _inside(body: list[ast.stmt] | list[ast.expr]) -> Iterator[ast.AST]:
    """Nodes of one scope: functions and classes in it, and not what is in them."""
    queue: list[ast.AST] = list(body)
    while queue:
        node = queue.pop(0)
        yield node
        if not isinstance(node, (*FUNCTIONS, *COMPREHENSIONS, ast.ClassDef)):
            queue = [*ast.iter_child_nodes(node), *queue]


def _bound(body: list[ast.stmt] | list[ast.expr]) -> list[str]:
    """Names that statements bind, in their order; those of imports are not among them."""
    found: dict[str, None] = {}
    shared = {n for node in _inside(body) if isinstance(node, ast.Global | ast.Nonlocal) for n in node.names}
    for node in _inside(body):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            found[node.id] = None
        elif isinstance(node, NAMED):
            found |= {node.name: None} if node.name else {}
    return [n for n in found if n not in shared]


class _Reader:
    """Converts one statement to tokens. A scope maps a name to its number (None: not mentioned yet), to itself if it
    stays, or to what it stands for."""

    def __init__(self, name: str, outer: Mapping[str, str | Ref]) -> None:
        self.name, self.outer = name, outer
        self.scopes: list[tuple[dict[str, int | str | Ref | None], bool]] = []  # with whether it is a class's
        self.tokens: list[str | Ref | Keyword] = []
        self.count = 0

    def statement(self, node: ast.stmt) -> Statement:
        self.node(node)
        binds = tuple(_bound([node]))
        decorators = node.decorator_list if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        firsts = [d.args[0] for d in decorators if isinstance(d, ast.Call) and d.args]
        calls = tuple(a.value for a in firsts if isinstance(a, ast.Constant) and isinstance(a.value, str))
        params = tuple(a.arg for a in _parameters(node.args)) if isinstance(node, ast.FunctionDef) else ()
        return Statement(tuple(self.tokens), binds, params, calls, tuple(self.adds_to(node, decorators)))

    def adds_to(self, node: ast.stmt, decorators: list[ast.expr]) -> Iterator[str]:
        """Where other statements of a module find what this one does: in an object whose method decorates it or is
        called, in what a function is given that is called and no more, or in the whole module."""
        owners = [d.func if isinstance(d, ast.Call) else d for d in decorators]
        if isinstance(node, ast.Expr):
            owners = [n.func for n in ast.walk(node) if isinstance(n, ast.Call)]
        refs = [self.path(d.value) for d in owners if isinstance(d, ast.Attribute)]
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not refs:
            refs = [r for a in node.value.args if isinstance(r := self.path(a), Ref)]
        yield from (r.path for r in refs if isinstance(r, Ref))
        targets = node.targets if isinstance(node, ast.Assign) else [node]
        plain = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AnnAssign) or all(
            isinstance(t, ast.Name | ast.Tuple) for t in targets
        )
        silent = isinstance(node, ast.If) and all(isinstance(n, QUIET) for n in node.body)
        if not plain and not silent and not (isinstance(node, ast.Expr) and refs):
            yield self.name

    # ------------------------------------------------------------------------------------------------------- names
    def found(self, name: str) -> int | str | Ref | None:
        """What a name is: a number, a Ref, or a text; it has a number once it was mentioned."""
        for i, (scope, of_class) in enumerate(reversed(self.scopes)):
            if name in scope and not (of_class and i):
                if scope[name] is None:
                    scope[name], self.count = self.count, self.count + 1
                return scope[name]
        return self.outer.get(name, name)

    def path(self, node: ast.AST) -> str | Ref | None:
        """What a name, or an attribute of something imported, stands for; None of anything else."""
        if isinstance(node, ast.Name):
            found = self.found(node.id)
            return found if isinstance(found, str | Ref) else None
        if isinstance(node, ast.Attribute):
            of = self.path(node.value)
            return Ref(f"{of.path}.{node.attr}") if isinstance(of, Ref) else f"{of}.{node.attr}" if of else None
        return None

    def put(self, found: int | str | Ref | None) -> None:
        self.tokens.append(found if isinstance(found, str | Ref) else f"#{found}")

    # ------------------------------------------------------------------------------------------------------- nodes
    def node(self, node: ast.AST) -> None:
        if isinstance(node, LEFT_OUT) or _is_text(node):
            return
        self.tokens.append(f"({type(node).__name__}")
        if isinstance(node, ast.Name | ast.Attribute) and (path := self.path(node)):
            self.put(path)
        elif isinstance(node, ast.Name):
            self.put(self.found(node.id))
        elif isinstance(node, ast.Constant):
            self.tokens.append(f"{type(node.value).__name__} {node.value!r}")
        elif isinstance(node, FUNCTIONS):
            self.function(node)
        elif isinstance(node, COMPREHENSIONS):
            self.comprehension(node)
        elif isinstance(node, ast.ClassDef):
            self.klass(node)
        elif isinstance(node, ast.Call):
            self.call(node)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            self.fields(node, {"name": self.found(node.name) if node.name else "-"})
        else:
            self.fields(node, {})
        self.tokens.append(")")

    def fields(self, node: ast.AST, given: Mapping[str, int | str | Ref | None]) -> None:
        for name, value in ast.iter_fields(node):
            if name in given:
                self.put(given[name])
            elif isinstance(value, list):
                self.tokens.append("[")
                for v in value:
                    self.node(v) if isinstance(v, ast.AST) else self.tokens.append(str(v))
                self.tokens.append("]")
            elif isinstance(value, ast.AST):
                self.node(value)
            else:
                self.tokens.append(str(value))

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
        body: list[ast.stmt] | list[ast.expr] = [node.body] if isinstance(node, ast.Lambda) else node.body
        if not isinstance(node, ast.Lambda) and self.scopes:
            self.put(self.found(node.name))
        for d in decorators:
            self.node(d)
        readers = [d.func if isinstance(d, ast.Call) else d for d in decorators]
        of_ours = any(isinstance(d, ast.Name) and isinstance(self.path(d), Ref) for d in readers)  # as spec does
        args = _parameters(node.args)
        for a in args:  # what the outside decides of them
            self.tokens.append(a.arg if of_ours else ",")
            if a.annotation:
                self.node(a.annotation)
        self.tokens += [str(len(node.args.posonlyargs)), str(len(node.args.args)), str(bool(node.args.vararg))]
        for default in (*node.args.defaults, *node.args.kw_defaults):
            self.node(default) if default else self.tokens.append("-")
        if not isinstance(node, ast.Lambda) and node.returns:
            self.node(node.returns)
        imports = {n: _outer(p) for inner in _inside(body) for n, p in _imports(inner)}
        self.scopes.append(({**dict.fromkeys([*(a.arg for a in args), *_bound(body)]), **imports}, False))
        for a in args:
            self.put(self.found(a.arg))
        for inner in body:
            self.node(inner)
        self.scopes.pop()

    def comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        self.scopes.append((dict.fromkeys(n for g in node.generators for n in _bound([g.target])), False))
        self.fields(node, {})
        self.scopes.pop()

    def klass(self, node: ast.ClassDef) -> None:
        if self.scopes:
            self.put(self.found(node.name))
        for outside in (*node.decorator_list, *node.bases, *node.keywords):
            self.node(outside)
        self.scopes.append(({n: n for n in _bound(node.body)}, True))
        for inner in node.body:
            self.node(inner)
        self.scopes.pop()

    def call(self, node: ast.Call) -> None:
        """A call, which may pass on to a function that it names what it gives by name."""
        self.node(node.func)
        func = node.func.value if isinstance(node.func, ast.Subscript) else node.func
        among = [self.path(n) for n in (func, *node.args)]
        for a in node.args:
            self.node(a)
        for k in node.keywords:
            paths = tuple(r.path for r in among if isinstance(r, Ref))
            self.tokens.append(Keyword(k.arg, paths) if k.arg else "**")
            self.node(k.value)


def _parameters(args: ast.arguments) -> list[ast.arg]:
    found = [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]
    return [a for a in found if a is not None]
