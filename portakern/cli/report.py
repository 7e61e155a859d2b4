"""``portakern report``: tables, plots and the stub, made from results and source."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from portakern.cli.common import app, out
from portakern.errors import SpecError


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
    root: Annotated[
        Path | None, typer.Option(help="The checkout; the one that portakern runs from when not given.")
    ] = None,
) -> None:
    """Make the tables of PORTING.md, RESULTS.md and README.md, the plots of docs/plots and the stub of editors."""
    from portakern.reporting import checkout

    if check and add:
        raise SpecError("report: --check writes nothing, and --add does; give one of them")
    where = checkout.checkout(root)
    if add:
        out.print(checkout.add(where, add, replace), markup=False, highlight=False, soft_wrap=True)
    if check:
        for s in (found := checkout.stale(where)):
            out.print(
                f"{s.path.relative_to(where)}: {s.what}; run: {checkout.COMMAND}",
                style="red",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
        if found:
            raise typer.Exit(1)
        out.print("every table, plot and stub is up to date", highlight=False)
        return
    changed = checkout.update(where)
    for path in changed:
        out.print(
            f"wrote {path.relative_to(where)}" if path.exists() else f"removed {path.relative_to(where)}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if not changed:
        out.print("every table and plot is up to date", highlight=False)
