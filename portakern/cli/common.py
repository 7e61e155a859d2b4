"""Helpers that the commands share: the app, printing, and checks of common options."""

from __future__ import annotations

import functools
import json
import logging
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from portakern import __version__, results, signals
from portakern.core import ending, registry, targets
from portakern.errors import SpecError, UnavailableError, UnsupportedError
from portakern.files import write_atomically
from portakern.printable import printable
from portakern.spec.dtypes import DTYPES

__all__ = [
    "JsonFile",
    "app",
    "check_device",
    "check_dtypes",
    "check_writable",
    "err",
    "errors_only",
    "json_into",
    "main",
    "may_write",
    "out",
    "print_indented",
    "print_json",
    "progress_bar",
    "say",
    "show_table",
]


class _Command(TyperCommand):
    """A command that permits --json without a value, which prints the JSON."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        return super().parse_args(
            ctx,
            [
                f"--json={PRINTED}" if i < end and a == "--json" and _lone(args[i + 1 :]) else a
                for i, a in enumerate(args)
            ],
        )


def _lone(behind: list[str]) -> bool:
    """Whether no file stands behind --json: nothing does, or another option, or the name of an op."""
    return not behind or (behind[0].startswith("-") and behind[0] != PRINTED) or behind[0] in registry.ops()


class _App(typer.Typer):
    def command(self, name: str | None = None, **how: Any) -> Any:
        return super().command(name, cls=_Command, **how)


app = _App(
    no_args_is_help=True,
    add_completion=False,
    help="GPU and TPU kernels in Triton and Pallas, each checked against an error bound derived from rounding.",
)
out = Console()
err = Console(stderr=True)


def _show_version(requested: bool) -> None:
    if requested:
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


JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="[FILE]", help="Also write JSON to this file. Without a file, or with -, print it."),
]
PRINTED = "-"
"""What stands for standard output where a file is expected."""


def main() -> None:
    """Console entry point: the project's own errors are printed without a traceback, exit status 2."""
    logging.basicConfig(format="%(message)s")
    signals.listen()
    try:
        app()
    except tuple(signals.ENDS.values()) as e:
        sys.exit(signals.status(e))
    except (SpecError, UnsupportedError, UnavailableError, results.ResultError) as e:
        text = printable(f"{type(e).__name__}: {e}", lines=True)  # it may quote an untrusted file
        err.print(text, style="red", markup=False, highlight=False, emoji=False, soft_wrap=True)
        sys.exit(2)
    finally:
        ending.acknowledge()


def errors_only(until: typer.Context) -> None:
    """Until a command ends, portakern logs errors alone; a program that runs the command within it keeps its level."""
    log = logging.getLogger("portakern")
    until.call_on_close(functools.partial(log.setLevel, log.level))
    log.setLevel(logging.ERROR)


def json_into(context: typer.Context, command: str, file: Path | None) -> Path | None:
    """The file that a command writes its JSON to, asked before it begins; of one that is to be printed one that is
    shown as the command ends, which until then prints to standard error whatever else it says.

    Raises:
      SpecError: it cannot be written.
    """
    if file is None:
        return None
    if str(file) != PRINTED:
        check_writable(command, file)
        return file
    folder = tempfile.TemporaryDirectory()
    made = Path(folder.name) / "found.json"

    def shown() -> None:
        out.stderr = False
        if made.exists():
            print(made.read_text(encoding="utf-8").rstrip("\n"))
        folder.cleanup()

    out.stderr = True
    context.call_on_close(shown)
    return made


def may_write(command: str, file: Path | None) -> None:
    """SpecError where the file of --json cannot be written, before the work that goes into it."""
    if file is not None and str(file) != PRINTED:
        check_writable(command, file)


def print_json(command: str, file: Path | None, data: Any) -> bool:
    """Print data, or write them to a file; whether nothing else is to be printed."""
    if file is None:
        return False
    text = json.dumps(data, indent=2) + "\n"
    if str(file) == PRINTED:
        print(text, end="")
        return True
    check_writable(command, file)
    write_atomically(file, text)
    return False


def say(text: str, style: str | None = None, to: Console = out) -> None:
    """A line that is not folded, and in which nothing is obeyed."""
    to.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def progress_bar() -> Progress:
    """How far a command is, on standard error while it runs."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=err, transient=True)


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


def _widths(rows: list[list[str]], width: int) -> list[int] | None:
    """The width of each column of a table within ``width``, none less than its longest word (rich shares out the room
    without regard to words); None where they do not fit."""
    columns = list(zip(*rows, strict=True))
    least = [max((cell_len(word) for cell in column for word in cell.split()), default=1) for column in columns]
    whole = [max(cell_len(cell) for cell in column) for column in columns]
    spare = width - sum(least) - (3 * len(columns) + 1)  # a line and a blank on both sides of each column, and a line
    if spare < 0:
        return None
    wanted = sum(whole) - sum(least)
    share = min(spare / wanted, 1.0) if wanted else 0.0
    return [lo + int(share * (hi - lo)) for lo, hi in zip(least, whole, strict=True)]


def print_indented(text: str) -> None:
    """A text under a heading, broken between words at this terminal's width, of which 40 columns are taken for
    granted. It may quote untrusted code: nothing in it is obeyed, and no line begins within a word."""
    width = max(out.width, 40) - 2
    for line in textwrap.wrap(
        printable(text), width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    ):
        out.print(f"  {line}", markup=False, highlight=False, emoji=False, soft_wrap=True)


DEVICES = ("cpu", *dict.fromkeys(h.platform for h in targets.HARDWARE.values()))
MEANT = {"gpu": ("cuda", "rocm"), "nvidia": ("cuda",), "amd": ("rocm",), "hip": ("rocm",)}


def check_device(command: str, name: str | None) -> None:
    """SpecError for a device that is none, whichever backend is asked."""
    known = dict.fromkeys((*DEVICES, *(p for b in registry.backends().values() for p in b.compiled_platforms())))
    if name is not None and name not in known:
        meant = f"; did you mean {' or '.join(MEANT[name])}?" if name in MEANT else ""
        raise SpecError(f"{command}: --device is {name!r}; expected one of {', '.join(known)}{meant}")


def check_dtypes(command: str, names: list[str] | None) -> None:
    """SpecError for a dtype that nothing has."""
    for name in names or ():
        if name not in DTYPES:
            raise SpecError(f"{command}: --dtype is {name!r}; expected one of {', '.join(DTYPES)}")


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
