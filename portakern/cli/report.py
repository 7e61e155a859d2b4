"""``portakern report``: whether two runs agree; and in a checkout, tables, plots and the stub, made from results and
source by ``maint``, which the wheel does not hold."""

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
        help="Write nothing: compare two files of portakern bench from one kind of device; exit status "
        "1 where a ratio of ours differs by more than 5 %, or a verdict.",
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
    add: Annotated[
        Path | None, typer.Option(help="A file of results of a run made elsewhere, to take in first.")
    ] = None,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", help="With --add: take it even if it is not newer, or lacks rows of the one that it replaces."
        ),
    ] = False,
    compare: TwoRuns = None,
    root: Annotated[
        Path | None, typer.Option(help="The checkout; the one that portakern runs from when not given.")
    ] = None,
) -> None:
    """Make the tables of PORTING.md and README.md, the plots of docs/plots and the stub of editors."""
    if compare and (check or add or replace):
        raise SpecError("report: --compare writes nothing, and looks at no table; leave out --check, --add, --replace")
    if compare:
        _compare(*compare)
        return
    if check and add:
        raise SpecError("report: --check writes nothing, and --add does; give one of them")
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
            f"portakern report works on a checkout of portakern, and {here} has no maint/report.py; run it in a "
            "checkout (report --compare FIRST SECOND needs none)"
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
        say(f"{found.alone} times are in one run alone")
    if found.changed:
        say(f"{found.changed} times are of other sources in the second run, and were left out")
    if found.kept:
        say(f"{found.kept} times are the first run's own, which the second took over, and were left out")
    if not found.own:
        raise SpecError(f"report: {first} and {second} have no ratio in common that both measured of the same sources")
    said = f"{len(found.own) - len(found.beyond)} of {len(found.own)} ratios of ours are within {WITHIN:.0%}"
    say(said, "red" if found.beyond else "green")
    if found.beyond or found.turned:
        raise typer.Exit(1)
