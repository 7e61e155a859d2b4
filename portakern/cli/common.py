"""What the commands share: the app that they register with, how they print, and what they ask before they begin."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from portakern import __version__, results, signals
from portakern.core import ending
from portakern.errors import SpecError, UnavailableError, UnsupportedError
from portakern.files import cache_folder
from portakern.printable import printable
from portakern.spec.dtypes import DTYPES

__all__ = [
    "Json",
    "app",
    "check_dtypes",
    "check_writable",
    "err",
    "errors_only",
    "hypothesis_into_cache",
    "main",
    "out",
    "print_indented",
    "print_json",
    "show_table",
]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Declare a kernel once, run it on any accelerator, prove that every implementation agrees.",
)
out = Console()
err = Console(stderr=True)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"portakern {__version__}")
        raise typer.Exit


@app.callback()
def _portakern(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What is asked of the command itself. A command may change the log's level: whoever runs it within a program
    keeps theirs."""
    log = logging.getLogger("portakern")
    context.call_on_close(functools.partial(log.setLevel, log.level))


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def main() -> None:
    """Console entry point: the project's own errors are printed without a traceback, exit status 2."""
    logging.basicConfig(format="%(message)s")
    signals.listen()
    try:
        app()
    except tuple(signals.ENDS.values()) as e:
        sys.exit(signals.status(e))
    except (SpecError, UnsupportedError, UnavailableError, results.ResultError) as e:
        text = printable(f"{type(e).__name__}: {e}", lines=True)  # it may quote a file that nobody has read
        err.print(text, style="red", markup=False, highlight=False, emoji=False, soft_wrap=True)
        sys.exit(2)
    finally:
        ending.heard()


def errors_only(until: typer.Context) -> None:
    """Until a command ends, portakern logs errors alone; a program that runs the command within it keeps its level."""
    log = logging.getLogger("portakern")
    until.call_on_close(functools.partial(log.setLevel, log.level))
    log.setLevel(logging.ERROR)


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2))


def show_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table where it fits with no word broken, else a line for each row and one for each of its cells."""
    if not rows:
        out.print(f"{title}: none", style="italic")
        return
    widths = _widths([columns, *rows], out.width)
    if widths:
        table = Table(title=title, title_justify="left", header_style="bold")
        for c, width in zip(columns, widths, strict=True):
            table.add_column(c, overflow="fold", width=width)
        for row in rows:
            table.add_row(*map(Text, row))  # no markup: the extras of a package stand in brackets too
        out.print(table)
        return
    out.print(title, style="italic")
    for row in rows:
        out.print(f"{columns[0]} {row[0]}", style="bold", markup=False, highlight=False, soft_wrap=True)
        for name, cell in zip(columns[1:], row[1:], strict=True):
            print_indented(f"{name}: {cell}")


def _widths(rows: list[list[str]], room: int) -> list[int] | None:
    """The width of each column of a table within ``room``, none less than its longest word (rich shares out the room
    without regard to words); None where they do not fit."""
    columns = list(zip(*rows, strict=True))
    least = [max((cell_len(word) for cell in column for word in cell.split()), default=1) for column in columns]
    whole = [max(cell_len(cell) for cell in column) for column in columns]
    spare = room - sum(least) - (3 * len(columns) + 1)  # a line and a blank on both sides of each column, and a line
    if spare < 0:
        return None
    wanted = sum(whole) - sum(least)
    share = min(spare / wanted, 1.0) if wanted else 0.0
    return [lo + int(share * (hi - lo)) for lo, hi in zip(least, whole, strict=True)]


def print_indented(text: str) -> None:
    """A text under a heading, broken between words at this terminal's width, of which 40 columns are taken for
    granted. It may quote what nobody has read: nothing in it is obeyed, and no line begins within a word."""
    width = max(out.width, 40) - 2
    for line in textwrap.wrap(
        printable(text), width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    ):
        out.print(f"  {line}", markup=False, highlight=False, emoji=False, soft_wrap=True)


def check_dtypes(command: str, names: list[str] | None) -> None:
    """SpecError for a dtype that nothing has."""
    for name in names or ():
        if name not in DTYPES:
            raise SpecError(f"{command}: --dtype is {name!r}; expected one of {', '.join(DTYPES)}")


def hypothesis_into_cache() -> None:
    """Have Hypothesis keep its files in the cache; it would make a folder of its own where the user is."""
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(cache_folder() / "hypothesis"))


def check_writable(command: str, file: Path) -> None:
    """SpecError where a file cannot be written, before the work that goes into it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as e:
        raise SpecError(f"{command}: --json is {file}, which cannot be written: {e.strerror or e}") from None
