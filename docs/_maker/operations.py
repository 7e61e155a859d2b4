"""A page an op, made of what is declared: mathematics, arguments, bounds, edges, laws, who implements it, and what
was measured.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from maint.markdown import table
from maint.measurements import StoredResults
from maint.report import TABLES
from portakern import inventory, sources
from portakern.core import registry
from portakern.spec import Spec
from portakern.spec.signature import signature

FOLDER = "reference/ops"
NOMINAL = "the root"
"""Stands for the file from which the links of these pages start."""

TITLES: Mapping[str, tuple[str, str] | None] = {
    "errors": ("Errors", "conformance"),
    "emulated": ("AMD machine code in an emulator", "conformance"),
    "faults": ("Planted faults", "mutants"),
    "machine_faults": ("Faults in machine code", "machine_faults"),
    "speed": ("Speed", "bench"),
    "matrix": ("Where it compiles", "compile-matrix"),
    "resources": ("What it takes of each target", "compile-matrix"),
    "tilings": ("Default tilings", "compile-matrix"),
    "cycles": ("Cycles on TPUs", "compile-matrix"),
    "beside": ("Cycles on TPUs beside other kernels", "tpu-cycles"),
    "legal": ("Tilings that TPU compilers took", "tpu-legal"),
    "judges": None,
    "kernelbench": None,
    "headline": None,
    "chips": None,
    "porting": None,
    "reach": None,
    "ports": None,
    "speeds": None,
    "losses": None,
    "tuned": None,
    "roofs": None,
    "steps": None,
    "launch": None,
    "found": None,
    "soundness": None,
    "lines": None,
}
"""Table of the porting report -> its title here and the benchmark whose rows it shows; None: it tells of no single op.
A table that is missing here fails the build."""


def navigation() -> Iterator[dict[str, str]]:
    """Where the pages stand among the others."""
    yield {"All ops": f"{FOLDER}/index.md"}
    yield from ({name: f"{FOLDER}/{name}.md"} for name in registry.ops())


@functools.cache
@sources.unchanging()
def tables(root: Path) -> dict[str, str]:
    """Every table of a checkout, by its name."""
    kept = StoredResults.load(root)
    return {name: make(kept) for name, make in TABLES.items()}


@sources.unchanging()
def pages(root: Path) -> dict[str, str]:
    """Every op's page, and the list of them."""
    kept = StoredResults.load(root)
    made = {f"{FOLDER}/{name}.md": _page(registry.find_spec(name), kept) for name in registry.ops()}
    rows = [
        [f"[`{r['op']}`](docs/{FOLDER}/{r['op']}.md)", _first(registry.find_spec(r["op"]).doc),
         ", ".join(r["backends"]), ", ".join(r["peers"])]
        for r in inventory.ops()
    ]  # fmt: skip
    return made | {
        f"{FOLDER}/index.md": "# Ops\n\n" + table(["op", "what it computes", "backends", "peers"], rows, words=4)
    }


def _page(s: Spec[Any], kept: StoredResults) -> str:
    shown = inventory.show(s.name)
    parts = [
        f"# {s.name}",
        f"```python\n{s.name}{_call(s)}\n```",
        prose(s.doc),
        _arguments(shown),
        _bounds(s),
        _named(
            "Edges",
            "Corners that the checker visits beside the cases that it draws.",
            {n: e.doc for n, e in s.edges.items()},
        ),
        _named(
            "Laws", "What holds between calls, to the bit.", {n: inspect.getdoc(law) or "" for n, law in s.laws.items()}
        ),
        _implementations(shown),
        *_figures(s, kept),
    ]
    return "\n\n".join(p for p in parts if p) + "\n"


def _call(s: Spec[Any]) -> str:
    """The signature, without the types: they have a table. A parameter a line where one line does not hold them."""
    names, keywords = [], False
    for p in signature(s).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not keywords:
            names.append("*")
            keywords = True
        names.append(p.name if p.default is p.empty else f"{p.name}={p.default!r}")
    short = f"({', '.join(names)})"
    return short if len(short) < 40 else "(\n" + "".join(f"    {name},\n" for name in names) + ")"


def prose(text: str) -> str:
    """A docstring as Markdown: its sections as headings, its arguments as a list, its formulas as they stand."""
    found, listing = [], False
    for line in text.splitlines():
        section = re.fullmatch(r"(Args|Returns|Raises|Attributes):", line)
        if section:
            listing = True
            found += ["", f"**{'Arguments' if section[1] == 'Args' else section[1]}**", ""]
        elif listing and line.startswith("  "):
            item = re.match(r"  (\w[\w, ]*): ?(.*)", line)
            found.append(f"* `{item[1]}`: {escaped(item[2])}" if item else f"  {escaped(line.strip())}")
        else:
            listing = listing and not line
            found.append(line if line.startswith("    ") else escaped(line))
    return "\n".join(found)


def escaped(line: str) -> str:
    """A line of prose in which a star is a star, as in ``*batch``, and a role names what it names."""
    line = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", line).replace("``", "`")
    pieces = re.split(r"(`[^`]*`)", line)
    return "".join(p if p.startswith("`") else re.sub(r"([*<])", r"\\\1", p) for p in pieces)


def _first(text: str) -> str:
    """The first sentence of a docstring."""
    return escaped(re.split(r"(?<=\.)\s", text.replace("\n", " "), maxsplit=1)[0])


def _arguments(shown: dict[str, Any]) -> str:
    arrays = [
        [f"`{a['name']}`" + (", optional" if a["optional"] else ""), f"`({a['shape']})`", ", ".join(a["dtypes"])]
        for a in shown["arrays"]
    ]
    outputs = [[f"`{o['name']}`", f"`({o['shape']})`", o["dtype"], o["given"], o["memory"]] for o in shown["outputs"]]
    options = [[f"`{o['name']}`", f"`{o['default']!r}`", o["expected"]] for o in shown["options"]]
    tiles = [[f"`{n}`", f"{lo} to {hi}"] for n, (lo, hi) in shown["tiling"].items()]
    parts = ["## Arrays and options", table(["array", "shape", "dtypes"], arrays, words=3)]
    if options:
        parts.append(table(["option", "default", "expected"], options, words=3))
    parts += ["## Results", table(["output", "shape", "dtype", "given", "memory"], outputs, words=5)]
    if shown["empty"]:
        rows = [
            [f"`{d}` = 0", ", ".join(f"{o} = {v}" for o, v in values.items())] for d, values in shown["empty"].items()
        ]
        parts.append(table(["a reduced extent of 0", "gives"], rows, words=2))
    taken: dict[tuple[str, str, str], list[str]] = {}
    for r in shown["tilings"]:
        key = f"`{r['name']}`", r["values"], r["meaning"]
        taken.setdefault(key, []).append(f"{r['backend']} {r['variant']}")
    knobs = [[name, values, meaning, ", ".join(of)] for (name, values, meaning), of in taken.items()]
    parts += ["## Tiles", table(["tile", "powers of two"], tiles, words=2)]
    return "\n\n".join([*parts, table(["taken by kernels", "values", "meaning", "variants"], knobs, words=4)])


def _bounds(s: Spec[Any]) -> str:
    """What the functions that compute bound and typical error say of themselves."""
    said = (("Error bound", s.bound), ("Typical error", s.spread), ("Exact elements", s.forced))
    return "\n\n".join(f"## {title}\n\n{prose(inspect.getdoc(fn) or '')}" for title, fn in said if fn is not None)


def _named(title: str, what: str, said: dict[str, str]) -> str:
    rows = [[f"`{name}`", escaped(text.replace("\n", " "))] for name, text in said.items()]
    return f"## {title}\n\n{what}\n\n{table(['name', 'what it says'], rows, words=2)}" if rows else ""


def _implementations(shown: dict[str, Any]) -> str:
    rows = [
        [f"`{i['backend']}`", i["variant"], _module(i["module"]), str(i["lines"]) if i["lines"] else "", kind]
        for kind, group in (("portakern's", "implementations"), ("a peer", "peers"))
        for i in shown[group]
    ]
    return "## Implementations\n\n" + table(["backend", "variant", "module", "lines", "whose"], rows, words=5)


def _module(name: str) -> str:
    """A module of the repository as a link to its text."""
    path = name.removeprefix("portakern.").replace(".", "/")
    root = Path(__file__).resolve().parents[2]
    file = next((f for f in (f"{path}.py", f"{path}/__init__.py") if (root / f).is_file()), None)
    return f"[{name}]({file})" if file else f"`{name}`"


def _figures(s: Spec[Any], kept: StoredResults) -> Iterator[str]:
    """The tables of those runs that have rows of this op."""
    mine = [
        dataclasses.replace(r, rows=rows, extra={n: _of_op(v, s.name) for n, v in r.extra.items()})
        for r in kept.results
        if (rows := _of_op(r.rows, s.name))
    ]
    untold = TABLES.keys() - TITLES.keys()
    if untold:
        raise LookupError(f"{Path(__file__).name}: TITLES lacks the tables {', '.join(sorted(untold))}")
    there = {r.benchmark for r in mine}
    titled = [(title, TABLES[name]) for name, title in TITLES.items() if title and name in TABLES]
    found = [(title, make) for (title, benchmark), make in titled if benchmark in there]
    if found:
        yield "## Figures"
    of_op = StoredResults(kept.root, tuple(mine))
    yield from (f"### {title}\n\n{make(of_op)}" for title, make in found)


def _of_op(told: Any, op: str) -> Any:
    """Of a list that tells of ops, what it tells of one; anything else as it is."""
    listed = isinstance(told, list) and all(isinstance(one, dict) and "op" in one for one in told)
    return [one for one in told if one["op"] == op] if listed else told
