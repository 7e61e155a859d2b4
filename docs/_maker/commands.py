"""The command line's reference, as Typer documents its own commands."""

from __future__ import annotations

import typer
from typer.cli import get_docs_for_click

from portakern.cli import app


def page() -> str:
    """Every command with its arguments and options."""
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="portakern")
    return get_docs_for_click(obj=command, ctx=context, name="portakern", title="Command line")
