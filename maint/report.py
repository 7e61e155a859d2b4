"""Update the tables, plots and stub of a checkout, report those that are stale, and add runs from other machines."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import portakern
from maint import checked, compiled, coverage, judges, lines, markdown, plots, store, stub, summaries, timed
from maint.measurements import FOLDER, StoredResults
from portakern import install, results, sources
from portakern.files import write_atomically
from portakern.results import Result, ResultError
from portakern.tools.bench import plots as bench_plots

__all__ = ["COMMAND", "PAGES", "PLOTS", "TABLES", "StaleText", "add", "checkout", "stale", "update"]

COMMAND = "portakern report"
PAGES = ("PORTING.md", "README.md")
PLOTS = "docs/plots"
TABLES: Mapping[str, Callable[[StoredResults], str]] = {
    "headline": summaries.headline,
    "chips": summaries.chips,
    "porting": summaries.porting,
    "reach": coverage.reach,
    "ports": lines.ports,
    "speeds": timed.speeds,
    "losses": timed.losses,
    "matrix": compiled.matrix,
    "resources": compiled.resources,
    "tilings": compiled.tilings,
    "cycles": compiled.cycles,
    "beside": compiled.beside,
    "legal": compiled.legal,
    "errors": checked.errors,
    "roofs": compiled.roofs,
    "speed": timed.speed,
    "steps": timed.steps,
    "launch": timed.launch,
    "tuned": timed.tuned,
    "emulated": checked.emulated,
    "faults": checked.faults,
    "judges": judges.judges,
    "kernelbench": judges.references,
    "machine_faults": checked.machine_faults,
    "found": checked.found,
    "soundness": checked.soundness,
    "invariances": checked.invariances,
    "lines": lines.lines,
}
"""What may stand between marks, by name."""

SEAL = re.compile(r"<!-- portakern report: shows ([0-9a-f]{16}), is ([0-9a-f]{16}) -->\n")


@dataclass(frozen=True)
class StaleText:
    """A table, plot or stub that does not match the results and the source: its file, and the difference in words."""

    path: Path
    what: str


def checkout(root: Path | None = None) -> Path:
    """The checkout that portakern runs from, or the one given; ResultError elsewhere."""
    found = (root or Path(portakern.__file__).resolve().parents[1]).resolve()
    missing = [name for name in (PAGES[0], FOLDER) if not (found / name).exists()]
    if missing:
        raise ResultError(
            f"{COMMAND} works on a checkout of portakern, and {found} has no {missing[0]}; {install.command()}"
        )
    return found


def _pages(root: Path) -> Iterator[tuple[Path, str, dict[str, str]]]:
    """(page, its text, what stands between its marks) of every page with marks."""
    for name in PAGES:
        page = root / name
        if not page.is_file():
            continue
        text = page.read_text(encoding="utf-8")
        there = markdown.pieces(text, page)
        unknown = [n for n in there if n not in TABLES]
        if unknown:
            raise ResultError(f"{name}: there is no table {unknown[0]!r}; expected one of {', '.join(TABLES)}")
        if there:
            yield page, text, there


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _shows(data: Mapping[str, Any]) -> str:
    """Of what a plot shows and of the code that draws it; not of its bytes, which may change with the plotting
    library.
    """
    drawn_by = sources.trees(Path(str(m.__file__)) for m in (plots, bench_plots))
    return _digest(json.dumps(data, sort_keys=True) + drawn_by)


def _sealed(data: Mapping[str, Any]) -> str:
    """The SVG with a line that says what it shows and that nobody changed it since."""
    svg = plots.drawn(data)
    head, rest = svg.split("\n", 1)
    return f"{head}\n<!-- portakern report: shows {_shows(data)}, is {_digest(svg)} -->\n{rest}"


def _fault(path: Path, data: Mapping[str, Any]) -> str | None:
    """What is wrong with the file of a plot."""
    if not path.is_file():
        return "is missing"
    text = path.read_text(encoding="utf-8")
    seal = SEAL.search(text)
    if seal is None:
        return "was not made by portakern report"
    if seal[2] != _digest(SEAL.sub("", text, count=1)):
        return "was changed by hand"
    return None if seal[1] == _shows(data) else "is stale"


def _faults(root: Path) -> Iterator[tuple[StaleText, Callable[[], str] | None]]:
    """What is wrong, and what gives the file as it should be; None: there should be no such file."""
    path, kept = root / stub.FILE, StoredResults.load(root)
    if not path.is_file() or path.read_text(encoding="utf-8") != stub.stub():
        yield StaleText(path, "is not what the specs say, or was changed by hand"), stub.stub
    for page, text, there in _pages(root):
        wanted = {name: TABLES[name](kept) + "\n" for name in there}
        for name in (n for n in there if there[n] != wanted[n]):
            made = functools.partial(markdown.replace, text, wanted, page)
            yield StaleText(page, f"table {name!r} is stale or was changed by hand"), made
    folder, figures = root / PLOTS, plots.plots(kept)
    for name, data in figures.items():
        if fault := _fault(folder / name, data):
            yield StaleText(folder / name, fault), functools.partial(_sealed, data)
    for path in sorted(folder.glob("*.svg")):
        if path.name not in figures and SEAL.search(path.read_text(encoding="utf-8")):
            yield StaleText(path, "shows what is no longer among the results"), None


@sources.unchanging()
def stale(root: Path) -> list[StaleText]:
    """All that the results and the source would have otherwise. Nothing is written, and nothing drawn."""
    return [fault for fault, _ in _faults(root)]


@sources.unchanging()
def update(root: Path) -> list[Path]:
    """Make anew what is not up to date; the files that changed. What is drawn is drawn before anything is written."""
    new = {fault.path: make and make() for fault, make in _faults(root)}
    for path, content in new.items():
        if content is None:
            path.unlink()
        else:
            write_atomically(path, content)
    return list(new)


def add(root: Path, file: Path, replace: bool = False) -> str:
    """Take what is shown of a run made elsewhere into the results; what was done, in words. ResultError where the run
    is not fit for it, and then nothing has changed.
    """
    new = results.read(file)
    there = [r for r in store.read(root / FOLDER) if r.benchmark == new.benchmark]
    same = [r for r in there if r.device == new.device and r.keys & new.keys]
    if len(same) > 1:
        names = " and ".join(r.name for r in same)
        raise ResultError(
            f"{file}: {names} of {FOLDER} hold what it measured on {new.device}; delete all but one of them first"
        )
    if same:
        name, said = same[0].name, _replacing(same[0], new, replace)
    else:
        name = re.sub(r"[^a-z0-9]+", "-", file.stem.lower()).strip("-") + ".json"
        said = f"{name} is new: {new.benchmark} on {new.device}, {_rows(new)}"
        for other in there:
            if other.name == name:
                raise ResultError(
                    f"{file}: {FOLDER} has another run of that name: {other.benchmark} on {other.device}; give the "
                    "file another name"
                )
    kept = [*(r for r in there if r.name != name), store.shown(dataclasses.replace(new, name=name))]
    store.write(root / FOLDER, new.benchmark, kept)
    return said


def _rows(run: Result) -> str:
    return f"{len(run.rows)} row{'' if len(run.rows) == 1 else 's'}"


def _replacing(old: Result, new: Result, forced: bool) -> str:
    """What replacing a result does, in words; ResultError where it must not be."""
    where = f"{old.name} of {FOLDER}"
    lost = old.keys - new.keys
    if not forced and new.date <= old.date:
        raise ResultError(
            f"{new.file}: its date is {new.date}, and {where} holds {new.benchmark} on {new.device} of {old.date}; "
            "expected a later one (--replace takes it all the same)"
        )
    if not forced and lost:
        first = ", ".join(str(part) for part in min(lost, key=str) if part is not None)
        raise ResultError(
            f"{new.file}: it lacks {len(lost)} of the {len(old.rows)} rows of {where}, such as {first}; expected the "
            "whole run (--replace loses them)"
        )
    gone = f", {len(lost)} of which it does not have" if lost else ""
    return (
        f"{old.name} is replaced: {new.benchmark} on {new.device} of {old.date}, {_rows(old)}{gone}, by that of "
        f"{new.date}, {_rows(new)}"
    )
