"""``portakern compile``: machine code for a chip, without the chip."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.measure import Measurement
from rich.table import Table

from portakern import results
from portakern.cli.common import (
    JsonFile,
    app,
    check_dtypes,
    err,
    may_write,
    out,
    print_indented,
    print_json,
    progress_bar,
    say,
)
from portakern.core import registry, targets
from portakern.errors import SpecError, UnsupportedError
from portakern.tools.compile.build import CYCLES


@app.command("compile")
def compile_(
    ops: Annotated[list[str] | None, typer.Argument(help="Ops to compile. Default: all.")] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="Architecture, such as sm_90, gfx942 or v6e; may be repeated.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Compile for every architecture that portakern knows.")] = False,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Only this dtype; may be repeated. Default: bfloat16 and float32.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Only this backend.")] = None,
    variant: Annotated[str | None, typer.Option(help="Only this variant of a backend.")] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            help="Dimensions and options that differ from the op's typical call, e.g. m=64,n=4096; may be repeated.",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Compilations in parallel.")] = 1,
    quick: Annotated[bool, typer.Option(help="Compile only; do not estimate cycles.")] = False,
    fresh: Annotated[bool, typer.Option(help="Ignore the cache and compile again.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Time limit of one compilation, in seconds.")] = 900.0,
    json_file: JsonFile = None,
) -> None:
    """Compile ops for a chip, without the chip: forward, forward for training, and gradients.

    Prints each kernel's registers, on-chip memory and instructions, and cycles on TPUs. Exit status 1 if one fails.
    """
    from portakern.tools.bench.suites import parse_shape
    from portakern.tools.compile import abstract
    from portakern.tools.compile import matrix as compiling

    names = list(targets.HARDWARE) if every else target or []
    _check_arguments(ops, target, every, dtype, backend, variant, shape)
    may_write("compile", json_file)
    start = time.perf_counter()
    found = compiling.jobs_for(
        ops or list(registry.loadable()), names, dtype or None, backend, quick, variant,
        [parse_shape(text) for text in shape or []], _tell_refusal,
    )  # fmt: skip
    later = abstract.uncompiled(map(targets.find, names), registry.backend(backend) if backend else None)
    if not found:
        what = f"no backend compiles {', '.join(ops or ['any op'])} for {', '.join(names)}"
        raise UnsupportedError(f"compile: {'; '.join((what, *later))}")
    for why in later if variant is None else ():
        say(f"not compiled: {why}", to=err)
    with progress_bar() as bar:
        task = bar.add_task("compiling", total=len(found))

        def done(built: compiling.Build) -> None:
            bar.update(task, advance=1, description=f"{built.op} for {built.target}")

        built = compiling.compile_all(found, jobs, fresh=fresh, timeout=timeout, done=done)
    record = compiling.record(built, results.command_line("portakern", json_file), time.perf_counter() - start)
    if not print_json("compile", json_file, record):
        _show_builds(built)
    if not all(b.ok for b in built):
        raise typer.Exit(1)


def _tell_refusal(job: Any, why: str) -> None:
    """What is not compiled, since another variant takes it."""
    text = f"not compiled: {job.spec.name} by {job.backend.name}/{job.family.name} for {job.hardware.name}: {why}"
    say(text, to=err)


def _check_arguments(
    ops: list[str] | None,
    target: list[str] | None,
    every: bool,
    dtype: list[str] | None,
    backend: str | None,
    variant: str | None,
    shape: list[str] | None,
) -> None:
    """SpecError for wrong arguments, before anything is compiled."""
    if every == bool(target):
        raise SpecError(
            f"compile: pass --target (may be repeated) or --all, not both; targets: {', '.join(targets.HARDWARE)}"
        )
    check_dtypes("compile", dtype)
    if shape and not ops:
        raise SpecError("compile: --shape needs an op; name it: portakern compile softmax --shape m=64,n=4096")
    for op in ops or ():
        registry.find_spec(op)
    if variant and backend:
        registry.backend(backend).check_variant(variant)


KERNEL_COLUMNS = {  # column -> the same in a line of text
    "registers": "{} registers",
    "spills": "{} spills",
    "on-chip, KiB": "on-chip memory {} KiB",
    "occupancy": "occupancy {}",
    "matrix instructions": "matrix instructions {}",
    "code, KiB": "code {} KiB",
    "cycles": "about {} cycles",
    "issue cycles": "issue cycles {}",
    "memory cycles": "memory cycles {}",
}


def _show_builds(built: list[Any]) -> None:
    """A table where it fits, else a line for each call and each of its kernels: thirteen columns of folded words cannot
    be read."""
    table = Table(title="Machine code", title_justify="left", header_style="bold")
    for column in ("target", "op", "dtype", "verdict", "kernel", *KERNEL_COLUMNS, "seconds"):
        table.add_column(column, no_wrap=True)
    for b in built:
        for i, k in enumerate(b.kernels or [None]):
            hardware = targets.find(b.target)
            first = [b.target, _named(b), b.dtype, _verdict(b)] if i == 0 else ["", "", "", ""]
            cells = ["-"] * (1 + len(KERNEL_COLUMNS)) if k is None else _kernel_cells(k, hardware)
            table.add_row(*first, *cells, str(round(b.seconds, 1)) if i == 0 else "")
    if Measurement.get(out, out.options.update(max_width=10_000), table).minimum <= out.width:
        out.print(table)
    else:
        for b in built:
            _show_build(b)
    for b in built:
        if b.least:
            text = f"{b.call or b.op} for {b.target}: {b.least:.0f} cycles, estimated, not measured"
            say(text)
    if any(b.least for b in built):
        print_indented(f"cycles: {CYCLES}")
    for b in built:
        if not b.ok:
            say(f"{_named(b)} {b.dtype} for {b.target}: {b.reason}", style="red")
    out.print(f"{sum(b.ok for b in built)} of {len(built)} compile and fit")


def _verdict(b: Any) -> str:
    return "ok" if b.ok else "FAILED"


def _named(b: Any) -> str:
    """The op, and whether the call gives what only gradients read, beside what it gives anybody."""
    return f"{b.op} (training)" if b.direction == "training" else str(b.op)


def _show_build(b: Any) -> None:
    style = "bold" if b.ok else "bold red"
    out.print(f"{_named(b)} {b.dtype} for {b.target}: {_verdict(b)}, {b.seconds:.1f} s", style=style, highlight=False)
    for k in b.kernels:
        name, *cells = _kernel_cells(k, targets.find(b.target))
        parts = [say.format(cell) for say, cell in zip(KERNEL_COLUMNS.values(), cells, strict=True) if cell != "-"]
        print_indented(f"{name}: {'; '.join(parts)}")


def _kernel_cells(k: Any, hardware: targets.Hardware) -> list[str]:
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
        shown(k.issued),
        shown(None if (memory_cycles := k.memory(hardware)) is None else round(memory_cycles)),
    ]
