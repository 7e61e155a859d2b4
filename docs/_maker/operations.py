"""A page an op: first a call, the error and the speed (:mod:`opening`), then arguments, and folded what is declared and
measured: tiles, bounds, edges, laws, implementations, tables.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import explorer
import opening

from maint.markdown import fold, table
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
    "invariances": ("Who keeps which bits", "invariance"),
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


class Made(NamedTuple):
    """What the site shows of a checkout: pages by file, plots (SVG) and rows (JSON) by file, tables of the report by
    name."""

    pages: dict[str, str]
    data: dict[str, str]
    tables: dict[str, str]


@functools.cache
@sources.unchanging()
def made(root: Path) -> Made:
    """Every op's page and the list of them, every op's plot, and the report's tables."""
    kept = StoredResults.load(root)
    specs = [registry.find_spec(name) for name in registry.ops()]
    pages, plots = {}, {}
    for s in specs:
        timed = opening.timed(s, kept)
        plot = opening.plotted(s, timed)
        if plot is not None:
            plots[f"{FOLDER}/{s.name}.svg"] = opening.drawn(plot)
        pages[f"{FOLDER}/{s.name}.md"] = _page(
            s, kept, opening.speed(s, kept, timed, f"{s.name}.svg" if plot else None)
        )
    rows = [
        [f"[`{r['op']}`](docs/{FOLDER}/{r['op']}.md)", _first(registry.find_spec(r["op"]).doc),
         ", ".join(r["backends"]), ", ".join(r["peers"])]
        for r in inventory.ops()
    ]  # fmt: skip
    index = "# Ops\n\n" + table(["op", "what it computes", "backends", "peers"], rows, words=4)
    tables = {name: make(kept) for name, make in TABLES.items()}
    return Made(pages | {f"{FOLDER}/index.md": index}, plots | {explorer.FILE: explorer.rows(kept)}, tables)


def _page(s: Spec[Any], kept: StoredResults, speed: str) -> str:
    shown = inventory.show(s.name)
    first, _, rest = s.doc.partition("\n\n")
    parts = [
        f"# {s.name}",
        prose(first),
        opening.example(s),
        opening.promise(s, kept),
        speed,
        f"## Arguments\n\n```python\n{s.name}{_call(s)}\n```",
        prose(rest),
        fold("Shapes, dtypes, defaults", _arguments(shown)),
        _tiles(shown),
        _bounds(s),
        _named(
            "Edges",
            "Special cases that the checker adds to those it draws",
            {n: e.doc for n, e in s.edges.items()},
        ),
        _named(
            "Laws", "What holds between calls, to the bit", {n: inspect.getdoc(law) or "" for n, law in s.laws.items()}
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
    outputs = [
        [f"`{o['name']}`", f"`({o['shape']})`", o["dtype"], o["returned"], o["memory"]] for o in shown["outputs"]
    ]
    options = [[f"`{o['name']}`", f"`{o['default']!r}`", o["expected"]] for o in shown["options"]]
    parts = [table(["array", "shape", "dtypes"], arrays, words=3)]
    if options:
        parts.append(table(["option", "default", "expected"], options, words=3))
    parts.append(table(["output", "shape", "dtype", "returned", "memory"], outputs, words=5))
    if shown["empty"]:
        rows = [
            [f"`{d}` = 0", ", ".join(f"{o} = {v}" for o, v in values.items())] for d, values in shown["empty"].items()
        ]
        parts.append(table(["a reduced extent of 0", "gives"], rows, words=2))
    return "\n\n".join(parts)


def _tiles(shown: dict[str, Any]) -> str:
    """The knobs of the variants, and the values that each takes."""
    tiles = [[f"`{n}`", f"{lo} to {hi}"] for n, (lo, hi) in shown["tiling"].items()]
    taken: dict[tuple[str, str, str], list[str]] = {}
    for r in shown["tilings"]:
        key = f"`{r['name']}`", r["values"], r["meaning"]
        taken.setdefault(key, []).append(f"{r['backend']} {r['variant']}")
    knobs = [[name, values, meaning, ", ".join(of)] for (name, values, meaning), of in taken.items()]
    both = [
        table(["tile", "powers of two"], tiles, words=2),
        table(["taken by kernels", "values", "meaning", "variants"], knobs, words=4),
    ]
    return _folded("Tiles", "What the argument tiling takes, and the kernels that read it", "\n\n".join(both))


def _folded(title: str, summary: str, text: str) -> str:
    """A section whose text a reader opens: its heading stays in the table of contents."""
    return f"## {title}\n\n{fold(summary, text)}"


def _bounds(s: Spec[Any]) -> str:
    """What the functions that compute bound and typical error say of themselves."""
    said = (
        ("Error bound", "The largest error that rounding permits", s.bound),
        ("Typical error", "The error to expect, which finds kernels that err too often", s.spread),
        ("Exact elements", "Elements that no rounding may change", s.forced),
    )
    return "\n\n".join(
        _folded(title, what, prose(inspect.getdoc(fn) or "")) for title, what, fn in said if fn is not None
    )


def _named(title: str, what: str, said: dict[str, str]) -> str:
    rows = [[f"`{name}`", escaped(text.replace("\n", " "))] for name, text in said.items()]
    return _folded(title, f"{what} ({len(rows)})", table(["name", "what it says"], rows, words=2)) if rows else ""


def _implementations(shown: dict[str, Any]) -> str:
    rows = [
        [f"`{i['backend']}`", i["variant"], _module(i["module"]), str(i["lines"]) if i["lines"] else "", kind]
        for kind, group in (("portakern's", "implementations"), ("a peer", "peers"))
        for i in shown[group]
    ]
    ours = len(shown["implementations"])
    what = f"{ours} of portakern, {len(rows) - ours} peers"
    return _folded("Implementations", what, table(["backend", "variant", "module", "lines", "whose"], rows, words=5))


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
        yield "## Measurements"
    of_op = StoredResults(kept.root, tuple(mine))
    yield from (fold(title, make(of_op)) for title, make in found)


def _of_op(told: Any, op: str) -> Any:
    """Of a list that tells of ops, what it tells of one; anything else as it is."""
    listed = isinstance(told, list) and all(isinstance(one, dict) and "op" in one for one in told)
    return [one for one in told if one["op"] == op] if listed else told
