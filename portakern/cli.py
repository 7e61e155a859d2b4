"""The command line: ``portakern demo | ops | backends | show | check | compile | report | doctor``."""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from portakern import __version__, inventory, results
from portakern.core import registry
from portakern.errors import SpecError, UnavailableError, UnsupportedError
from portakern.files import cache_folder
from portakern.spec.dtypes import DTYPES

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
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # a command that is ended ends the processes that it started
    try:
        app()
    except (SpecError, UnsupportedError, UnavailableError, results.ResultError) as e:
        err.print(f"{type(e).__name__}: {e}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)


def _errors_only(until: typer.Context) -> None:
    """Until a command ends, portakern logs errors alone; a program that runs the command within it keeps its level."""
    log = logging.getLogger("portakern")
    until.call_on_close(functools.partial(log.setLevel, log.level))
    log.setLevel(logging.ERROR)


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2))


def _table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    table = Table(title=title, title_justify="left", header_style="bold")
    for c in columns:
        table.add_column(c, overflow="fold")
    for row in rows:
        table.add_row(*row)
    out.print(table)


@app.command()
def ops(as_json: Json = False) -> None:
    """List the ops and which backends implement each."""
    rows = inventory.ops()
    if as_json:
        return _print_json(rows)
    _table(
        "Ops",
        ["op", "arguments", "outputs", "backends"],
        [[r["op"], r["arguments"], r["outputs"], ", ".join(r["backends"])] for r in rows],
    )


@app.command()
def backends(as_json: Json = False) -> None:
    """List the backends, where each runs, and what it lacks here; then the peers, which run when they are named."""
    rows, peers = inventory.backends(), inventory.peers()
    if as_json:
        return _print_json(rows + peers)
    columns = ["backend", "arrays", "compiles for", "interpreter", "here"]
    for title, listed in {"Backends": rows, "Peers: they serve nothing unless they are named": peers}.items():
        _table(
            title,
            columns,
            [
                [
                    r["backend"],
                    r["framework"],
                    ", ".join(r["compiles"]),
                    "on cpu" if r["interprets"] else "-",
                    r["here"],
                ]
                for r in listed
            ],
        )


@app.command()
def show(op: Annotated[str, typer.Argument(help="An op's name.")], as_json: Json = False) -> None:
    """Show an op's declaration: arguments, options, outputs, tiles, edge values, implementations."""
    info = inventory.show(op)
    if as_json:
        return _print_json(info)
    out.print(info["op"], style="bold")
    out.print(info["doc"] + "\n", markup=False, highlight=False, soft_wrap=True)
    _table(
        "Arrays",
        ["name", "shape", "dtypes", "optional"],
        [[a["name"], a["shape"], ", ".join(a["dtypes"]), "yes" if a["optional"] else ""] for a in info["arrays"]],
    )
    _table(
        "Options",
        ["name", "default", "expected"],
        [[o["name"], repr(o["default"]), o["expected"]] for o in info["options"]],
    )
    _table(
        "Outputs",
        ["name", "shape", "dtype", "given", "memory"],
        [[o["name"], o["shape"], o["dtype"], o["given"], o["memory"]] for o in info["outputs"]],
    )
    if info["drops"]:
        _table("Dimensions", ["name", "is"], [[f"*{n}", what] for n, what in info["drops"].items()])
    for rule in info["values"]:
        out.print(f"Values: {rule}", markup=False, highlight=False, soft_wrap=True)
    _table("Tiles", ["name", "powers of two"], [[n, f"{lo} to {hi}"] for n, (lo, hi) in info["tiling"].items()])
    for title, rows in {"Implementations": info["implementations"], "Peers": info["peers"]}.items():
        _table(title, ["backend", "module", "lines"], [[i["backend"], i["module"], str(i["lines"])] for i in rows])


@app.command()
def check(
    context: typer.Context,
    ops: Annotated[list[str] | None, typer.Argument(help="Ops to check; all when none is named.")] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Backend or peer to check; may be repeated; all backends that run here when none is named."),
    ] = None,
    variant: Annotated[
        str | None, typer.Option(help="Only this variant of the backend; each that runs there when not named.")
    ] = None,
    max_examples: Annotated[int, typer.Option(min=1, help="Cases an op and variant.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Which cases.")] = 0,
    device: Annotated[
        str | None, typer.Option(help="cpu (interpreters), cuda, rocm or tpu; the best here when not named.")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Only this dtype; may be repeated.")] = None,
    edge: Annotated[list[str] | None, typer.Option(help="Visit this edge and no other case; may be repeated.")] = None,
    profile: Annotated[
        str | None, typer.Option(help="A profile that the backend declares, such as a stricter interpreter.")
    ] = None,
    promises: Annotated[
        bool,
        typer.Option(help="Hold to what is promised beyond the bounds: bits that stay the same, memory of its own."),
    ] = True,
    jobs: Annotated[int, typer.Option(min=1, help="Processes to share the work.")] = 1,
    case: Annotated[str | None, typer.Option(help="Run one case again, as a failure printed it.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the reports to this file.")] = None,
) -> None:
    """Check implementations against the float64 oracle; exit status 1 if any leaves its error bound."""
    # else Hypothesis keeps a folder of its own in the user's
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(cache_folder() / "hypothesis"))
    from portakern import testing

    start = time.perf_counter()
    chosen = ops or list(registry.loadable())
    named = backend or [r["backend"] for r in inventory.backends() if r["available"]]
    _check_asked(chosen, named, dtype, json_file)
    _errors_only(context)  # that interpreters are slow is said by the table
    if case is not None:
        if len(chosen) != 1 or len(named) != 1:
            raise SpecError("check --case: name one op and one --backend")
        again = functools.partial(testing.replay, variant=variant, device=device, profile=profile, promises=promises)
        reports = [again(chosen[0], case, backend=named[0])]
    else:
        subjects = _subjects(chosen, named, variant, device, every=not (ops and backend))
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=err, transient=True) as bar:
            tasks = {s: bar.add_task("{} on {}, {}".format(*s), total=max_examples) for s in subjects}
            reports = testing.check_all(subjects, jobs, lambda s, cases: bar.advance(tasks[s], cases),
                                        device=device, dtypes=dtype, only=edge, profile=profile, promises=promises,
                                        max_examples=max_examples, seed=seed)  # fmt: skip
    _show_reports(reports)
    if json_file:
        _write_reports(json_file, reports, round(time.perf_counter() - start, 1))
    if not all(r.passed for r in reports):
        raise typer.Exit(1)


def _check_asked(ops: list[str], backends: list[str], dtypes: list[str] | None, json_file: Path | None) -> None:
    """What is wrong with a check that was asked for, before the first case."""
    for name in ops:
        registry.find_spec(name)
    for b in backends:
        registry.backend(b).check_available()
    _check_dtypes("check", dtypes)
    if json_file:
        _check_writable(json_file)


def _check_dtypes(command: str, names: list[str] | None) -> None:
    for name in names or ():
        if name not in DTYPES:
            raise SpecError(f"{command}: --dtype is {name!r}; expected one of {', '.join(DTYPES)}")


def _check_writable(file: Path) -> None:
    """SpecError where a file cannot be written, before the work that goes into it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as e:
        raise SpecError(f"check: --json is {file}, which cannot be written: {e.strerror or e}") from None


def _write_reports(file: Path, reports: list[Any], seconds: float) -> None:
    ran_on = results.HOST_CPU if all(" on cpu " in r.subject for r in reports) else None
    rows, command = [r.to_dict() for r in reports], results.command_line("portakern", file)
    results.write(file, results.record("conformance", rows, command=command, device=ran_on, wall_seconds=seconds))


def _subjects(
    ops: list[str], backends: list[str], variant: str | None, device: str | None, every: bool
) -> list[tuple[str, str, str | None]]:
    """(op, backend, variant) of all that is to be checked.

    ``every``: not every backend has every op, and one that lacks it is left out; a pair that is named must be there.
    So is a backend of somebody else's that cannot be asked, aloud.
    """
    from portakern import testing

    found: list[tuple[str, str, str | None]] = []
    for op, b in [(op, b) for b in backends for op in ops if not every or any(registry.backend(b).having(op))]:
        of = registry.backend(b)
        try:
            names = [variant] if variant else testing.backend_variants(registry.find_spec(op), b, device)
            for family in of.having(op) if not of.auto else ():
                of.implementation(op, family)
        except Exception as e:  # somebody's module that cannot be imported, say
            if not every or of.auto:
                raise
            err.print(f"{op} on {b} left out: {type(e).__name__}: {e}", style="red", markup=False, highlight=False)
            continue
        found += [(op, b, v) for v in names]
    return found


def _show_reports(reports: list[Any]) -> None:
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
    _table(
        "Conformance (worst: share of the permitted error)",
        ["op", "on", "verdict", "cases", "refused", "worst", "s"],
        rows,
    )
    for r in reports:
        for reason, count in r.refused.most_common():
            out.print(f"refused {count} x {r.op} on {r.subject}: {reason}", markup=False, highlight=False)
        if r.concessions:
            out.print(f"conceded to {r.subject}: {'; '.join(r.concessions)}", markup=False, highlight=False)
        for f in r.failures:
            out.print(str(f), style="red", markup=False, highlight=False, soft_wrap=True)
        if not r.examples and not r.failures and not r.laws:
            out.print(f"{r.op} on {r.subject}: no case was compared", style="red", markup=False)


@app.command("compile")
def compile_(
    ops: Annotated[list[str] | None, typer.Argument(help="Ops to compile; all when none is named.")] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="Architecture, such as sm_90, gfx942 or v6e; may be repeated.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every architecture that portakern knows.")] = False,
    dtype: Annotated[
        list[str] | None, typer.Option(help="May be repeated; bfloat16 and float32 when none is named.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Only this backend.")] = None,
    variant: Annotated[str | None, typer.Option(help="Only this variant of a backend.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Compilers at a time.")] = 1,
    quick: Annotated[bool, typer.Option(help="Nothing that takes longer than compiling: no cycle estimates.")] = False,
    fresh: Annotated[bool, typer.Option(help="Compile again what is in the cache.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one compilation may take.")] = 900.0,
    as_json: Json = False,
) -> None:
    """Compile ops, forward and backward, for hardware that need not be here, and say what each kernel takes of it; exit
    status 1 if any cannot be.
    """
    from portakern.compiling import matrix as compiling
    from portakern.core import targets

    names = list(targets.HARDWARE) if every else target or []
    if every == bool(target):
        raise SpecError(
            f"compile: name one or more --target, or --all, and not both; targets: {', '.join(targets.HARDWARE)}"
        )
    _check_dtypes("compile", dtype)
    for op in ops or ():
        registry.find_spec(op)
    if variant and backend:
        registry.backend(backend).check_variant(variant)
    start = time.perf_counter()
    found = compiling.jobs_for(
        ops or list(registry.loadable()), names, dtype or ["bfloat16", "float32"], backend, quick, variant
    )
    if not found:
        raise UnsupportedError(f"compile: no backend compiles {', '.join(ops or ['any op'])} for {', '.join(names)}")
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err,
        transient=True,
    ) as bar:
        task = bar.add_task("compiling", total=len(found))

        def done(built: compiling.Build) -> None:
            bar.update(task, advance=1, description=f"{built.op} for {built.target}")

        built = compiling.compile_all(found, jobs, fresh=fresh, timeout=timeout, done=done)
    if as_json:
        _print_json(compiling.record(built, results.command_line("portakern"), time.perf_counter() - start))
    else:
        _show_builds(built)
    if not all(b.ok for b in built):
        raise typer.Exit(1)


KERNEL_COLUMNS = {  # column -> how a line says it
    "registers": "{} registers",
    "spills": "{} spills",
    "on chip, KiB": "on chip {} KiB",
    "occupancy": "occupancy {}",
    "matrix instructions": "matrix instructions {}",
    "code, KiB": "code {} KiB",
    "cycles": "{} cycles",
}


def _show_builds(built: list[Any]) -> None:
    """A table where it fits, else a line for each call and each of its kernels: thirteen columns of folded words cannot
    be read."""
    table = Table(title="Machine code", title_justify="left", header_style="bold")
    for column in ("target", "op", "dtype", "verdict", "kernel", *KERNEL_COLUMNS, "s"):
        table.add_column(column, no_wrap=True)
    for b in built:
        for i, k in enumerate(b.kernels or [None]):
            first = [b.target, b.op, b.dtype, _verdict(b)] if i == 0 else ["", "", "", ""]
            cells = ["-"] * (1 + len(KERNEL_COLUMNS)) if k is None else _kernel_cells(k)
            table.add_row(*first, *cells, str(round(b.seconds, 1)) if i == 0 else "")
    if Measurement.get(out, out.options.update(max_width=10_000), table).minimum <= out.width:
        out.print(table)
    else:
        for b in built:
            _show_build(b)
    for b in built:
        if not b.ok:
            out.print(
                f"{b.op} {b.dtype} for {b.target}: {b.reason}",
                style="red",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    out.print(f"{sum(b.ok for b in built)} of {len(built)} compile and fit")


def _verdict(b: Any) -> str:
    return "ok" if b.ok else "FAILED"


def _show_build(b: Any) -> None:
    style = "bold" if b.ok else "bold red"
    out.print(f"{b.op} {b.dtype} for {b.target}: {_verdict(b)}, {b.seconds:.1f} s", style=style, highlight=False)
    for k in b.kernels:
        name, *cells = _kernel_cells(k)
        said = [say.format(cell) for say, cell in zip(KERNEL_COLUMNS.values(), cells, strict=True) if cell != "-"]
        for line in textwrap.wrap(f"{name}: {'; '.join(said)}", max(out.width, 40) - 2, subsequent_indent="  "):
            out.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def _kernel_cells(k: Any) -> list[str]:
    def shown(value: Any) -> str:
        return "-" if value is None else str(value)

    memory = ", ".join(f"{name} {used / 1024:.1f}" for name, used in k.on_chip.items() if used)
    matrix = max(k.matrix, key=k.matrix.get) + f" x{sum(k.matrix.values())}" if k.matrix else "none"
    code = None if k.code_bytes is None else f"{k.code_bytes / 1024:.1f}"
    return [
        k.name + (f" x{k.launches}" if k.launches > 1 else ""),
        shown(k.registers),
        shown(k.spills),
        memory or "-",
        "-" if k.occupancy is None else f"{k.occupancy:.0%}",
        matrix,
        shown(code),
        shown(k.cycles),
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
    root: Annotated[
        Path | None, typer.Option(help="The checkout; the one that portakern runs from when not given.")
    ] = None,
) -> None:
    """Make the tables of PORTING.md and README.md, the plots of docs/plots and the stub that editors read."""
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


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what is installed, which devices there are, what each backend can do here, and what to install next."""
    info = inventory.doctor()
    if as_json:
        return _print_json(info)
    _table("Installed", ["package", "version"], [[k, v or "-"] for k, v in info["environment"].items()])
    _table("Devices", ["framework", "device"], [[d["framework"], d["device"]] for d in info["devices"]])
    _table("Backends", ["backend", "here", "next"], [[b["backend"], b["here"], b["next"]] for b in info["backends"]])


@app.command()
def demo(
    context: typer.Context,
    backend: Annotated[
        list[str] | None, typer.Option(help="Backend to run; may be repeated; all that run here when none is named.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Embed sentences with all-MiniLM-L6-v2, every kernel through portakern, on every backend that runs here."""
    from portakern.examples.minilm import demo as minilm

    _errors_only(context)
    with Progress(TextColumn("{task.description}"), TimeElapsedColumn(), console=err, transient=True) as bar:
        task = bar.add_task("loading the model", total=None)
        result = minilm.run(backend or None, progress=lambda text: bar.update(task, description=text))
    if as_json:
        _print_json(result.to_dict())
    else:
        minilm.render(result, out)
    if not result.passed:
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
