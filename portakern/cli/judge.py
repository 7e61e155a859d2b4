"""``portakern judge``: check an untrusted kernel, from a person or a program, in a separate process."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from portakern.cli.common import (
    JsonFile,
    app,
    check_device,
    check_dtypes,
    errors_only,
    json_into,
    out,
    print_indented,
)
from portakern.core import registry
from portakern.defaults import EXAMPLES
from portakern.errors import SpecError
from portakern.files import write_atomically
from portakern.printable import printable

Candidate = Annotated[
    str, typer.Argument(help="FILE or FILE:NAME. NAME: a function, a torch.nn.Module, or ns::op of a compiled library.")
]
Op = Annotated[
    str | None,
    typer.Option(
        "--op", help="The op that the kernel should compute (see portakern ops). Default: the op of a known problem."
    ),
]
Map = Annotated[
    str | None,
    typer.Option(
        "--map", help="How the op's arguments map to the kernel's, e.g. x=0,axis=1, y=out, a=0.mT, weight=@norm.weight."
    ),
]
Problem = Annotated[
    Path | None,
    typer.Option(help="A separate file that defines get_inputs; get_inputs in the kernel's file is ignored."),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(help="Shapes of every call, e.g. x=64x39321 or a=64x32,b=32x8; may be repeated. Default: any."),
]
Dtype = Annotated[list[str] | None, typer.Option(help="Only this dtype; may be repeated.")]
Layout = Annotated[
    list[str] | None,
    typer.Option(help="Memory layouts of arrays; may be repeated. Default: contiguous and shifted."),
]
Promise = Annotated[
    list[str] | None,
    typer.Option(help="Check this promise; may be repeated. Default: inputs, outside, own_memory, kept."),
]
Framework = Annotated[str | None, typer.Option(help="numpy, torch or jax. Default: the one that the file imports.")]
Without = Annotated[
    list[str] | None,
    typer.Option(help="Omit this protection, if the device does not work with it; may be repeated."),
]
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""What glibc's malloc.h calls the least memory that is given back (-1: none is), and how many blocks are mapped."""


@app.command()
def judge(
    context: typer.Context,
    candidate: Candidate,
    op: Op = None,
    map: Map = None,
    problem: Problem = None,
    shapes: Shapes = None,
    full_shapes: Annotated[bool, typer.Option(help="Run large shapes in full, not reduced to quick calls.")] = False,
    dtype: Dtype = None,
    layout: Layout = None,
    promise: Promise = None,
    edges: Annotated[bool, typer.Option(help="Also check NaN and infinities.")] = True,
    framework: Framework = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, rocm or tpu.")] = "cpu",
    max_examples: Annotated[int, typer.Option(min=1, help="Number of cases.")] = EXAMPLES,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the cases. Default: random.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds after which no further case is started.")] = 15.0,
    call_seconds: Annotated[
        float, typer.Option(min=0.1, help="Time limit of one call, in seconds; a longer call counts as hung.")
    ] = 30.0,
    memory: Annotated[float, typer.Option(min=0.1, help="Memory limit of the kernel's process, in GiB.")] = 8.0,
    without: Without = None,
    case: Annotated[str | None, typer.Option(help="Run one case again: the JSON text that a failure printed.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Check an untrusted kernel in a separate process. Exit status 0 if it is right, else 1."""
    from portakern.tools.judge.judgement import judge as judge_file
    from portakern.tools.judge.process import ProcessLimits

    if op is not None:
        registry.find_spec(op)
    check_dtypes("judge", dtype)
    check_device("judge", device)
    json_file = json_into(context, "judge", json_file)
    errors_only(context)
    _keep_memory()
    file, name = split_candidate(candidate)
    named: dict[str, Any] = {"layouts": layout, "promises": promise}
    judged = judge_file(
        file, op, name=name, map=map, problem=problem, framework=framework, device=device,
        shapes=[_extents(s) for s in shapes] if shapes else None, full_shapes=full_shapes, dtypes=dtype, edges=edges,
        max_examples=max_examples, seed=seed, seconds=seconds, case=case,
        process_limits=ProcessLimits(seconds=call_seconds, memory=_bytes(memory), without=without or ()),
        **{n: v for n, v in named.items() if v},
    )  # fmt: skip
    show(judged)
    if json_file:
        write_atomically(json_file, json.dumps(judged.to_dict(), indent=1) + "\n")
    if not judged.report.passed:
        raise typer.Exit(1)


def _keep_memory() -> None:
    """Have glibc hand freed memory out again: otherwise each array of megabytes is mapped anew, which for the oracle of
    a long row takes as much time as the row itself."""
    if hasattr(ctypes.CDLL(None), "mallopt"):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def _bytes(gib: float) -> int:
    from portakern.tools.judge.process import within

    within("--memory, GiB", gib, 0.1, 2**20)
    return int(gib * 2**30)


def split_candidate(candidate: str) -> tuple[str, str | None]:
    """FILE, FILE:NAME or FILE:ns::op."""
    head, sign, name = candidate.partition(":")
    if not sign or Path(candidate).is_file():
        return candidate, None
    return head, name or None


def _extents(text: str) -> dict[str, tuple[int, ...]]:
    from portakern.tools.bench.suites import parse_shape

    found = {}
    for name, value in parse_shape(text, "judge: --shapes", "x=64x39321 or a=64x32,b=32x8").items():
        shape = value if isinstance(value, tuple) else (value,)
        if not all(type(n) is int for n in shape):
            raise SpecError(f"judge: --shapes gives {name} {value!r}; expected extents, as in x=64x39321")
        found[name] = shape
    return found


NAMED = 8
"""Files beside a candidate whose names are printed."""


def show(judged: Any) -> None:
    """What came out, for people. Names and words may be the candidate's: nothing is printed that a terminal obeys."""
    r = judged.report
    style = "green" if r.passed else "red"
    _say(f"{r.outcome}: {Path(judged.file).name}:{judged.name} as {r.op} on {judged.device}", style)
    worst = ", ".join(f"{n} {w:.2f}" for n, w in r.worst.items())
    print_indented(f"{r.examples} cases of seed {r.seed} in {judged.seconds:.1f} s"
                   + (f"; largest error / error bound: {worst}" if worst else "")
                   + (f"; {r.left_out} more were not run: the time ended" if r.left_out else ""))  # fmt: skip
    for reason, count in r.refused.most_common():
        print_indented(f"refused {count} cases: {reason}")
    for what, names in r.not_covered.items() if r.passed else ():
        print_indented(f"not covered: {what}: {', '.join(names)}")
    if r.not_reached:
        print_indented(f"not reached in time: {', '.join(r.not_reached)}; raise --seconds")
    for f in r.failures:
        _say(str(f), "red")
    print_indented(_hashed(judged.hashes))
    if judged.problem:
        print_indented(f"inputs: those of {Path(judged.problem).name}")
    for caveat in r.caveats:
        print_indented(caveat)
    from portakern.tools.judge.sandbox import PROTECTIONS

    for name in [p for p in PROTECTIONS if p not in judged.protections]:
        print_indented(f"protection missing: {PROTECTIONS[name]}")
    if judged.printed and not r.passed:
        _say(f"  output of the kernel's process: {judged.printed}")


def _say(text: str, style: str = "") -> None:
    out.print(printable(text, lines=True), style=style, markup=False, highlight=False, emoji=False, soft_wrap=True)


def _hashed(hashes: Any) -> str:
    """The files that a verdict is of."""
    (first, digest), *others = hashes.files.items()
    text = f"judged: {first}, SHA-256 {digest[:16]}"
    if others:
        named = ", ".join(name for name, _ in others[:NAMED])
        more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
        text += f"; with the other files of its folder, {hashes.all[:16]}: {named}{more}"
    if hashes.unhashed:
        count = "too many to count" if hashes.unhashed < 0 else str(hashes.unhashed)
        text += f"; files of its folder that were not hashed: {count}"
    return text
