"""The process that compiles: ``python -m portakern.tools.compile.worker BACKEND TARGET``, one job a line on stdin, one
answer a line on stdout.

Compilers print to any stream, and may end the process. Both streams of this process therefore go to a log, whose last
lines explain the end of the process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from portakern.core import registry, targets
from portakern.core.backend import Backend, Family
from portakern.core.dispatch import Choice
from portakern.core.targets import Hardware
from portakern.errors import SpecError, UnavailableError, UnsupportedError
from portakern.spec import Spec
from portakern.tools.compile.abstract import abstract_call, direction
from portakern.tools.compile.build import Build

__all__ = ["build", "main", "make"]

LONGEST = 300


def build(
    spec: Spec[Any],
    b: Backend,
    family: Family,
    hardware: Hardware,
    signature: dict[str, Any],
    tiling: Mapping[str, int],
    mode: str = "build",
) -> Build:
    """Compile one call here, in this process, under the tiles that the user named. ``mode``: the compiler's function
    that is asked, ``build`` where it has no such one."""
    first = next(dtype for _, dtype, _ in signature["arrays"].values())
    result = Build(spec.name, direction(spec, signature), first, hardware.name, b.name, variant=family.name)
    start = time.perf_counter()
    try:
        compiler = family.load_compiler()
        missing = compiler.unavailable(hardware)
        if missing:
            raise UnavailableError(missing)
        impl = b.implementation(spec.name, family)
        if impl is None:
            raise SpecError(f"backend {b.name!r} has no {spec.name} in its variant {family.name!r}")
        call, used = abstract_call(spec, impl, signature, hardware, tiling)
        impl, used = impl.resolve(call, used)
        result.call, result.tiling, result.variant = repr(call), dict(used), impl.family.name
        compiler = impl.family.load_compiler()
        compile_call = getattr(compiler, mode, compiler.build)
        result.judge(compile_call(impl, call, used), hardware)
    except UnavailableError as e:
        result.reason, result.final = one_line(str(e)), False
    except (SpecError, UnsupportedError) as e:
        result.reason = one_line(str(e))
    except Exception as e:
        result.reason = reason(e)
    result.seconds = round(time.perf_counter() - start, 2)
    return result


def make(b: Backend, family: Family, hardware: Hardware, op: str, source: str) -> Build:
    """Compile one planned kernel of an op's call to where launches find it
    (:class:`portakern.core.machine_code.PlannedKernel`)."""
    result = Build(op, "", "", hardware.name, b.name, variant=family.name)
    start = time.perf_counter()
    try:
        compiler: Any = family.load_compiler()
        compiler.make(source, hardware)
        result.ok = True
    except Exception as e:
        result.reason = reason(e)
    result.seconds = round(time.perf_counter() - start, 2)
    return result


def reason(e: BaseException) -> str:
    """What went wrong, in a line. A compiler that shows where it was when something else went wrong is followed to
    that: Triton's own error says ``at 30:8``, and no more, of what a function that was called there could not do."""
    cause = e
    while cause.__cause__ is not None:
        cause = cause.__cause__
    first, last = (one_line(f"{type(x).__name__}: {x}") for x in (e, cause))
    return first if cause is e or last in first else one_line(f"{first.rstrip(':')}: {last}")


def one_line(text: str) -> str:
    """The first line that says something, and the last one where that alone is an error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "it gave no reason"
    telling = [line for line in lines if "error" in line.lower() or "exceed" in line.lower()]
    chosen = lines[0] if len(lines) == 1 or not telling or telling[0] == lines[0] else f"{lines[0]} {telling[-1]}"
    return chosen if len(chosen) <= LONGEST else chosen[: LONGEST - 3] + "..."


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    log = os.open(os.environ["PORTAKERN_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    b, hardware = registry.backend(sys.argv[1]), targets.find(sys.argv[2])
    for line in sys.stdin:
        job = json.loads(line)
        family = next(f for f in b.families if f.name == job["variant"])
        if job.get("kernel"):
            built = make(b, family, hardware, job["op"], job["kernel"])
        else:
            spec = registry.find_spec(job["op"])
            tiling = Choice.from_names(spec, b, job["variant"], job["tiling"]).tiling
            built = build(spec, b, family, hardware, job["form"], tiling, job.get("way", "build"))
        answers.write(json.dumps(built.to_dict(assembly=job["assembly"])) + "\n")


if __name__ == "__main__":
    main()
