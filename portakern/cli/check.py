"""``portakern check``: compare implementations with the float64 oracle."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from portakern import inventory, results, sources
from portakern.cli.common import (
    JsonFile,
    app,
    check_device,
    check_dtypes,
    err,
    errors_only,
    json_into,
    out,
    show_table,
)
from portakern.core import ending, registry
from portakern.defaults import EXAMPLES
from portakern.errors import SpecError, UnsupportedError

Where = tuple[str | None, str | None, str | None]
"""A platform, a profile, and the architecture that it stands in for."""

Budget = Annotated[
    float | None,
    typer.Option(min=1, help="Seconds after which no further case or law is started. Default: no limit."),
]


@app.command()
def check(
    context: typer.Context,
    ops: Annotated[list[str] | None, typer.Argument(help="Ops to check. Default: all.")] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Backend or peer to check; may be repeated. Default: all backends that run here."),
    ] = None,
    variant: Annotated[
        str | None, typer.Option(help="Only this variant of the backend. Default: each that runs on the device.")
    ] = None,
    max_examples: Annotated[int, typer.Option(min=1, help="Cases for each op and variant.")] = EXAMPLES,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the cases.")] = 0,
    device: Annotated[
        str | None, typer.Option(help="cpu (interpreters), cuda, rocm or tpu. Default: the accelerator here, else cpu.")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Only this dtype; may be repeated.")] = None,
    edge: Annotated[list[str] | None, typer.Option(help="Run only cases of this edge; may be repeated.")] = None,
    profile: Annotated[str | None, typer.Option(help="A profile of the backend, e.g. a stricter interpreter.")] = None,
    target: Annotated[
        str | None, typer.Option(help="The chip that the profile emulates, e.g. gfx942 with --profile emulated.")
    ] = None,
    promises: Annotated[
        bool,
        typer.Option(help="Also check promises: repeated calls give the same bits, results have their own memory."),
    ] = True,
    parts: Annotated[
        int | None,
        typer.Option(min=2, help="Cut each call into this many parts at most, and put their results together."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Number of worker processes.")] = 1,
    budget: Budget = None,
    case: Annotated[str | None, typer.Option(help="Run one case again: the JSON text that a failure printed.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Check implementations against the float64 oracle. Exit status 1 if one exceeds its error bound."""
    from portakern import testing

    start = time.perf_counter()
    chosen = ops or list(registry.loadable())
    json_file = json_into(context, "check", json_file)
    check_device("check", device)
    named = backend or _having(profile, [r["backend"] for r in inventory.backends() if r["available"]])
    _check_arguments(chosen, named, dtype)
    errors_only(context)  # that interpreters are slow is said by the table
    how: dict[str, Any] = {"device": device, "profile": profile, "target": target, "promises": promises}
    ended = None
    if case is not None:
        if len(chosen) != 1 or len(named) != 1:
            raise SpecError("check --case: name one op and one --backend")
        subjects = [(chosen[0], named[0], variant)]
        reports = [testing.replay(chosen[0], case, backend=named[0], variant=variant, **how)]
    else:
        subjects = _subjects(chosen, named, variant, (device, profile, target), every=not (ops and backend))
        _tell_later(named, variant)
        of = {**how, "parts": parts, "dtypes": dtype, "only_edges": edge, "max_examples": max_examples, "seed": seed}
        reports, ended = _checked(subjects, jobs, budget, of)
    _show_reports(reports, ended)
    if json_file:
        _write(json_file, reports, subjects, (device, profile, target), round(time.perf_counter() - start, 1))
    if ended is not None or not all(r.passed for r in reports):
        raise ended or typer.Exit(1)


def _checked(
    subjects: list[tuple[str, str, str | None]], jobs: int, budget: float | None, options: dict[str, Any]
) -> tuple[list[Any], BaseException | None]:
    """The subjects' reports, and what ended the checks before they had: what they found until then cost time, and is
    shown and written. A bar each shows how many of its cases were run; where standard error is no terminal, as in a
    notebook, a line does now and then."""
    from portakern import testing
    from portakern.testing.progress import Tally

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        tasks = {s: bar.add_task("{} on {}, {}".format(*s), total=options["max_examples"]) for s in subjects}
        tally = Tally(len(subjects), options["max_examples"])

        def advance(subject: tuple[str, str, str | None], cases: int) -> None:
            bar.advance(tasks[subject], cases)
            line = tally.take(subject, cases)
            if line and not err.is_terminal:
                err.print(line, markup=False, highlight=False, soft_wrap=True)

        try:
            return testing.check_all(subjects, jobs, advance, budget, **options), None
        except testing.Interrupted as e:
            ending.acknowledge()  # what was found is shown and written first
            return e.reports, e.by


def _having(profile: str | None, backends: list[str]) -> list[str]:
    """Those of the backends that have a profile; all of them where none is named.

    Raises:
      SpecError: none has it.
    """
    if profile is None:
        return backends
    known = {b: registry.backend(b).profile_names() for b in backends}
    having = [b for b, names in known.items() if profile in names]
    if not having:
        there = "; ".join(f"{b}: {', '.join(names)}" for b, names in known.items() if names)
        raise SpecError(
            f"check: --profile is {profile!r}, which no backend declares here; expected one of {there or 'none'}"
        )
    return having


def _check_arguments(ops: list[str], backends: list[str], dtypes: list[str] | None) -> None:
    """SpecError for wrong arguments, before the first case."""
    for name in ops:
        registry.find_spec(name)
    for b in backends:
        registry.backend(b).check_available()
    check_dtypes("check", dtypes)


def _measured(op: str, backend: str, variant: str | None, where: Where) -> dict[str, Any]:
    """What a report is of: the sources that decide it, and the commit."""
    from portakern.testing.subject import backend_subject

    b = registry.backend(backend)
    target = backend_subject(registry.find_spec(op), b, variant, *where).target
    found = {"backend": backend, "variant": variant, "target": str(target), "commit": sources.commit()}
    return found | {"sources": sources.fingerprint(op, b, variant, target)}


def _write(
    file: Path, reports: list[Any], subjects: list[tuple[str, str, str | None]], where: Where, seconds: float
) -> None:
    rows = [r.to_dict() | _measured(*s, where) for r, s in zip(reports, subjects, strict=True)]
    emulated = [" (emulated)" in r["subject"] for r in rows]
    on_host = all(" on cpu " in r["subject"] for r in rows)
    ran_on = results.EMULATED if all(emulated) else results.HOST_CPU if on_host else None
    command = results.command_line("portakern", file)
    results.write(file, results.record("conformance", rows, command=command, device=ran_on, wall_seconds=seconds))


def _subjects(
    ops: list[str], backends: list[str], variant: str | None, where: Where, every: bool
) -> list[tuple[str, str, str | None]]:
    """(op, backend, variant) of all that is to be checked.

    ``every``: not every backend has every op, nor on every device, and one that lacks it is left out; a pair that is
    named must be there. A backend of another package that cannot be imported is left out with a message.

    Raises:
      UnsupportedError: nothing is left.
    """
    from portakern import testing

    found: list[tuple[str, str, str | None]] = []
    lacking: list[UnsupportedError] = []
    for op, b in [(op, b) for b in backends for op in ops if not every or any(registry.backend(b).families_with(op))]:
        of = registry.backend(b)
        try:
            names = [variant] if variant else testing.backend_variants(registry.find_spec(op), b, *where)
            for family in of.families_with(op) if not of.own else ():
                of.implementation(op, family)
        except UnsupportedError as e:
            if not every:
                raise
            lacking.append(e)
            continue
        except Exception as e:  # somebody's module that cannot be imported, say
            if not every or of.own:
                raise
            err.print(f"not checked: {op} on {b}: {type(e).__name__}: {e}", style="red", markup=False, highlight=False)
            continue
        found += [(op, b, v) for v in names]
    for why in lacking:
        err.print(f"not checked: {why}", markup=False, highlight=False, soft_wrap=True)
    if lacking and not found:
        raise lacking[0]
    return found


def _tell_later(backends: list[str], variant: str | None) -> None:
    """What is not checked, since something must be installed first."""
    for b in backends if variant is None else ():
        for why in registry.backend(b).missing_kernels():
            err.print(f"not checked: backend {b!r}: {why}", markup=False, highlight=False, soft_wrap=True)


def _show_reports(reports: list[Any], ended: BaseException | None) -> None:
    rows = []
    for r in reports:
        worst = ", ".join(f"{name} {fraction:.2f}" for name, fraction in r.worst.items()) or "-"
        rows.append(
            [
                r.op,
                r.subject,
                r.verdict,
                str(r.examples),
                str(sum(r.refused.values())),
                worst,
                f"{r.seconds:.1f}",
            ]
        )
    show_table(
        "Conformance (worst: largest error / error bound)",
        ["op", "backend", "verdict", "cases", "refused", "worst", "seconds"],
        rows,
    )
    for r in reports:
        for what, count in r.parts.most_common():
            out.print(f"parts of {r.op} on {r.subject}: {count} cases {what}", markup=False, highlight=False)
        for lacking, count in r.not_emulated.most_common():
            out.print(f"not emulated: {count} cases of {r.op} on {r.subject}: {lacking}", markup=False, highlight=False)
        for reason, count in r.refused.most_common():
            out.print(f"refused: {count} cases of {r.op} on {r.subject}: {reason}", markup=False, highlight=False)
        if r.left_out:
            why = "the budget ended" if ended is None else "the check was interrupted"
            text = f"{r.left_out} cases of {r.op} on {r.subject} were not run: {why}"
            text += "" if ended is not None else "; raise --budget"
            out.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
        for caveat in r.caveats:
            out.print(f"{r.op} on {r.subject}: {caveat}", markup=False, highlight=False)
        for what, names in _not_covered(r, reports).items():
            text = f"not covered on {r.subject}: {what} of {r.op}: {', '.join(names)}"
            out.print(text, markup=False, highlight=False)
        for f in r.failures:
            out.print(str(f), style="red", markup=False, highlight=False, soft_wrap=True)
        if not r.compared and not r.failures and not r.left_out:
            out.print(f"{r.op} on {r.subject}: no case was compared", style="red", markup=False)


def _not_covered(r: Any, reports: list[Any]) -> dict[str, tuple[str, ...]]:
    """What a check that passed has not covered; variants of a backend are rows of their own."""
    ran = {
        n
        for other in reports
        if other.op == r.op
        for v in other.coverage.values()
        for n in v.covered.get("variants", ())
    }
    left = {
        what: tuple(n for n in names if what != "variants" or n not in ran) for what, names in r.not_covered.items()
    }
    return {what: names for what, names in left.items() if names and r.passed}
