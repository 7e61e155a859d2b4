"""``portakern report``: compare two runs, and in a checkout update its tables, plots and stub with ``maint``, which is
not in the wheel."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from portakern import sources
from portakern.cli.common import app, out, show_table
from portakern.errors import SpecError, UnavailableError

TwoRuns = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        metavar="FIRST SECOND",
        help="Write nothing: compare two files of portakern bench from one kind of device. Exit status 1 if a "
        "verdict differs, or a ratio of portakern differs by more than 5 %.",
    ),
]


@app.command()
def report(
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Write nothing; exit status 1 if a table, plot or stub is stale or was changed by hand."
        ),
    ] = False,
    add: Annotated[Path | None, typer.Option(help="A file of results from another machine, to add first.")] = None,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", help="With --add: replace a file even if the new one is not newer, or lacks some of its rows."
        ),
    ] = False,
    compare: TwoRuns = None,
    root: Annotated[Path | None, typer.Option(help="The checkout. Default: the one that portakern runs from.")] = None,
) -> None:
    """Generate the tables of PORTING.md and README.md, the plots of docs/plots and the type stub."""
    if compare and (check or add or replace):
        raise SpecError("report: --compare works alone; leave out --check, --add, --replace")
    if compare:
        _compare(*compare)
        return
    if check and add:
        raise SpecError("report: --check and --add exclude each other; pass one of them")
    made = _maint()
    where = made.checkout(root)
    if add:
        out.print(made.add(where, add, replace), markup=False, highlight=False, soft_wrap=True)
    if check:
        for s in (found := made.stale(where)):
            out.print(
                f"{s.path.relative_to(where)}: {s.what}; run: {made.COMMAND}",
                style="red",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
        if found:
            raise typer.Exit(1)
        out.print("every table, plot and stub is up to date", highlight=False)
        return
    changed = made.update(where)
    for path in changed:
        out.print(
            f"wrote {path.relative_to(where)}" if path.exists() else f"removed {path.relative_to(where)}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if not changed:
        out.print("every table and plot is up to date", highlight=False)


def _maint() -> Any:
    """What makes the report: a package of the checkout that portakern runs from."""
    here = sources.root()
    if not (here / "maint" / "report.py").is_file():
        raise UnavailableError(
            f"portakern report needs a checkout of portakern, and {here} has no maint/report.py; run it in a checkout "
            "(report --compare FIRST SECOND needs none)"
        )
    if str(here) not in sys.path:
        sys.path.append(str(here))
    return importlib.import_module("maint.report")


def _compare(first: Path, second: Path) -> None:
    """Say how far two runs agree."""
    from portakern.tools.bench.agreement import HEADS, WITHIN, agreement

    def say(text: str, style: str | None = None) -> None:
        out.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    found = agreement(first, second)
    show_table(f"Two runs: how many differ by at most {WITHIN:.0%}, and by how much", HEADS, found.table())
    for pair in found.beyond:
        say(f"{pair.ratio:+.1%} {pair}", "red")
    for a, b in found.turned:
        say(f"{a['verdict']}, then {b['verdict']}: {a['contender']} on {a['call']}", "red")
    if found.alone:
        say(f"{found.alone} times are in one run only")
    if found.changed:
        say(f"{found.changed} times were left out: their sources changed between the runs")
    if found.kept:
        say(f"{found.kept} times were left out: the second file copies them from the first")
    if not found.own:
        raise SpecError(f"report: {first} and {second} share no ratio that both measured with the same sources")
    said = f"{len(found.own) - len(found.beyond)} of {len(found.own)} ratios of portakern are within {WITHIN:.0%}"
    say(said, "red" if found.beyond else "green")
    if found.beyond or found.turned:
        raise typer.Exit(1)
