"""``portakern profile``: what limits each kernel of a call, every fact with its source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from portakern import results
from portakern.cli.common import JsonFile, app, check_dtypes, errors_only, json_into, print_indented, say, show_table
from portakern.core import registry
from portakern.errors import UnavailableError, UnsupportedError

if TYPE_CHECKING:
    from portakern.tools.profile.facts import Fact
    from portakern.tools.profile.session import CallProfile


@app.command()
def profile(
    context: typer.Context,
    op: Annotated[str, typer.Argument(help="Op to profile.")],
    shape: Annotated[
        str, typer.Option(help="Dimensions and options that differ from the op's typical call, e.g. m=4096.")
    ] = "",
    dtype: Annotated[str | None, typer.Option(help="Dtype of the call. Default: bfloat16, or the op's first.")] = None,
    backend: Annotated[
        str | None, typer.Option(help="Backend of the call. Default: the first that compiles here.")
    ] = None,
    variant: Annotated[str | None, typer.Option(help="Variant of the backend.")] = None,
    target: Annotated[str | None, typer.Option(help="Only compile, for this chip, e.g. sm_90; nothing runs.")] = None,
    counters: Annotated[bool, typer.Option(help="Also read the GPU's counters with Nsight Compute.")] = True,
    json_file: JsonFile = None,
) -> None:
    """Show what limits each kernel of a call: device counters if readable, times, bytes and operations compared with
    the measured roof, and the registers and memory of the machine code.
    """
    from portakern.tools.bench.background import set_environment
    from portakern.tools.bench.suites import parse_shape

    dtype = dtype or registry.find_spec(op).usual_dtypes[0]
    check_dtypes("profile", [dtype])
    if variant and backend:
        registry.backend(backend).check_variant(variant)
    json_file = json_into(context, "profile", json_file)
    errors_only(context)
    set_environment()
    from portakern.tools.profile import session
    from portakern.tools.profile.subject import ProfileRequest

    request = ProfileRequest(op, dtype, parse_shape(shape) if shape else {}, backend, variant)
    if target:
        found = session.ahead(request, target)
    else:
        try:
            found = session.here(request, counters)
        except (UnsupportedError, UnavailableError) as e:
            raise type(e)(f"{e}; pass --target, e.g. --target sm_90, to profile the machine code alone") from e
    if json_file:
        device = results.HOST_CPU if target else None
        command = results.command_line("portakern", json_file)
        results.write(json_file, results.record("profile", found.rows(), command=command, device=device))
    _show(found)


def _show(found: CallProfile) -> None:
    who = f"{found.backend}, variant {found.variant}" if found.variant else found.backend
    say(f"{found.call} on {found.target.arch} by {who}", style="bold")
    show_table("Call", ["quantity", "value", "source"], _cells(found.facts))
    for kernel in found.kernels:
        times = f" x{kernel.launches}" if kernel.launches > 1 else ""
        show_table(f"{kernel.name}{times}", ["quantity", "value", "source"], _cells(kernel.facts))
        print_indented(f"limited by: {kernel.bound}")
    for why in dict.fromkeys(found.missing.values()):
        sources = ", ".join(source for source, reason in found.missing.items() if reason == why)
        print_indented(f"missing: {sources}; {why}")


def _cells(facts: list[Fact]) -> list[list[str]]:
    return [[fact.name, f"{_number(fact.value)} {fact.unit}".strip(), fact.source] for fact in facts]


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:,.3g}"
