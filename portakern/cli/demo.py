"""``portakern demo``: a model whose every kernel is portakern's."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from portakern.cli.common import JsonFile, app, err, errors_only, may_write, out, print_json


@app.command()
def demo(
    context: typer.Context,
    backend: Annotated[
        list[str] | None, typer.Option(help="Backend to run; may be repeated. Default: all that run here.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Embed sentences with the model all-MiniLM-L6-v2; every kernel is one of portakern's."""
    from portakern.examples.minilm import demo as minilm

    errors_only(context)
    may_write("demo", json_file)
    with Progress(TextColumn("{task.description}"), TimeElapsedColumn(), console=err, transient=True) as bar:
        task = bar.add_task("loading the model", total=None)
        result = minilm.run(backend or None, progress=lambda text: bar.update(task, description=text))
    if not print_json("demo", json_file, result.to_dict()):
        minilm.render(result, out)
    if not result.passed:
        raise typer.Exit(1)
