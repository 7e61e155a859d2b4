"""``portakern invariance``: which bits of an implementation depend on what they should not."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from portakern import inventory, results, sources
from portakern.cli.common import (
    JsonFile,
    app,
    check_device,
    check_dtypes,
    errors_only,
    json_into,
    print_indented,
    say,
    show_table,
)
from portakern.core import registry
from portakern.errors import SpecError, UnsupportedError
from portakern.printable import printable

Row = dict[str, Any]
CASES = 24


@app.command()
def invariance(
    context: typer.Context,
    what: Annotated[str, typer.Argument(metavar="OP|FILE", help="An op, or FILE or FILE:NAME as portakern judge has.")],
    op: Annotated[str | None, typer.Option("--op", help="The op that the kernel of a FILE should compute.")] = None,
    map: Annotated[str | None, typer.Option("--map", help="Of a FILE, as for portakern judge.")] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="Backend or peer; may be repeated. Default: all backends that run here.")
    ] = None,
    variant: Annotated[str | None, typer.Option(help="Only this variant. Default: each that runs here.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu (interpreters), cuda, rocm or tpu.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Only this dtype; may be repeated.")] = None,
    property: Annotated[
        list[str] | None,
        typer.Option(help="repeat, batch, packing, padding, split, layout or law; may be repeated. Default: all."),
    ] = None,
    cases: Annotated[int, typer.Option(min=1, help="Drawn calls of each backend.")] = CASES,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the calls.")] = 0,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="Seconds of a backend, then no call begins.")] = None,
    case: Annotated[str | None, typer.Option(help="Try one case again: the JSON text that was printed.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Find bits that depend on the batch, padding, packing, a cut, the memory layout, or the time. Exit status 1 where
    any do."""
    json_file = json_into(context, "invariance", json_file)
    check_dtypes("invariance", dtype)
    check_device("invariance", device)
    errors_only(context)
    start = time.perf_counter()
    given = {"properties": property, "dtypes": dtype, "cases": cases, "seed": seed, "seconds": seconds, "case": case}
    if what in registry.ops():
        found = list(_of_backends(what, backend, variant, device, given))
    elif backend or variant:
        raise SpecError(f"invariance: {what!r} is no op, and a FILE has no --backend and no --variant; leave them out")
    else:
        found = [_of_file(what, op, map, device or "cpu", given)]
    _show(found, what)
    if json_file:
        rows = [{**r.to_dict(), **about} for report, about in found for r in report.rows]
        on_host = all(" on cpu" in about["subject"] for _, about in found)
        kept = results.record(
            "invariance", rows, command=results.command_line("portakern", json_file),
            device=results.HOST_CPU if on_host else None, wall_seconds=round(time.perf_counter() - start, 1),
        )  # fmt: skip
        results.write(json_file, kept)
    if not all(report.passed for report, _ in found):
        raise typer.Exit(1)


def _of_backends(
    op: str, backends: list[str] | None, variant: str | None, device: str | None, given: Row
) -> Iterator[tuple[Any, Row]]:
    """A report for each backend and variant, and what a row says of it."""
    from portakern.testing.invariances import invariance_of
    from portakern.testing.subject import backend_subject, backend_variants

    spec = registry.find_spec(op)
    named = backends or [r["backend"] for r in inventory.backends() if r["available"]]
    for name in named:
        b = registry.backend(name)
        try:
            variants = (variant,) if variant else backend_variants(spec, b, device)
        except UnsupportedError:
            if backends:
                raise
            continue
        for v in variants:
            subject = backend_subject(spec, b, v, device, None)
            known = {"backend": b.name, "variant": v, "target": str(subject.target), "commit": sources.commit()}
            known["sources"] = sources.fingerprint(op, b, v, subject.target)
            yield invariance_of(subject, **given), {"op": op, "subject": subject.name, "peer": b.peer, **known}


def _of_file(candidate: str, op: str | None, map: str | None, device: str, given: Row) -> tuple[Any, Row]:
    """The report on a file's kernel, in a process of its own."""
    from portakern.cli.judge import split_candidate
    from portakern.testing.invariances import invariance_of
    from portakern.tools.judge.judgement import candidate_subject

    file, name = split_candidate(candidate)
    if not Path(file).is_file():
        raise SpecError(f"invariance: {candidate!r} is neither an op (see portakern ops) nor a file")
    with candidate_subject(file, op, name=name, map=map, device=device) as (subject, fixed):
        report = invariance_of(subject, **given, options=fixed)
    return report, {"op": report.op, "subject": report.subject, "peer": True}


def _show(found: list[tuple[Any, Row]], what: str) -> None:
    """A table of the properties, and the smallest case of each that is broken."""
    from portakern.testing.invariances import PROPERTIES

    lines = []
    for report, _ in found:
        for r in report.rows:
            count = f"{r.same} of {r.cases}" if r.cases else "not compared"
            count += f", {r.failed} failed" if r.failed else ""
            lines.append([printable(report.subject), r.name, r.along, count, str(r.refused)])
    show_table(f"Invariance of {what}: calls with the same bits", ["of", "property", "along", "same", "refused"], lines)
    for report, about in found:
        for name, why in report.unordered.items():
            print_indented(f"{report.subject}: {name} was not compared: {why}")
        if report.left_out:
            print_indented(f"{report.subject}: {report.left_out} calls were not run: the time ended; raise --seconds")
        for r in report.rows:
            if r.broken:
                say(f"broken: {report.subject}: {PROPERTIES[r.name].words}", "red")
                print_indented(f"{r.name} {r.along}: {r.difference}" + (f"; shapes: {r.shapes}" if r.shapes else ""))
                say(f"  {_command(what, about, r)}")


def _command(what: str, about: Row, row: Any) -> str:
    """The command that tries the smallest case again."""
    words = [what] + [w for n in ("backend", "variant") if about.get(n) for w in (f"--{n}", about[n])]
    words += ["--op", about["op"]] if what != about["op"] else []
    return f"portakern invariance {shlex.join([*words, '--property', row.name, '--case', row.case])}"
