"""The process that compiles: ``python -m portakern.compiling.worker BACKEND TARGET``, one job a line on stdin, one answer a line on stdout.

Compilers print where they like and end the process when they fail, so both streams of this process go to a log, whose end explains a death.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from portakern import registry, targets
from portakern.compiling.calls import abstract_call, direction
from portakern.compiling.report import Build
from portakern.dispatch import Op, op
from portakern.errors import SpecError, UnavailableError, UnsupportedError
from portakern.registry import Backend
from portakern.targets import Hardware

__all__ = ["build", "main"]

LONGEST = 300


def build(this: Op, b: Backend, hardware: Hardware, form: dict[str, Any]) -> Build:
    """Compile one call here, in this process."""
    first = next(dtype for _, dtype, _ in form["arrays"].values())
    result = Build(this.spec.name, direction(this.spec), first, hardware.name, b.name)
    start = time.perf_counter()
    try:
        compiler = b.load_compiler()
        missing = compiler.unavailable(hardware)
        if missing:
            raise UnavailableError(missing)
        impl, call, tiling = abstract_call(this, b, form, hardware)
        result.call, result.tiling = repr(call), dict(tiling)
        result.judge(compiler.build(impl, call, tiling), hardware)
    except UnavailableError as e:
        result.reason, result.final = one_line(str(e)), False
    except (SpecError, UnsupportedError) as e:
        result.reason = one_line(str(e))
    except Exception as e:
        result.reason = one_line(f"{type(e).__name__}: {e}")
    result.seconds = round(time.perf_counter() - start, 2)
    return result


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
        this = op(job["op"], backend=b, tiling=job["tiling"])
        answers.write(json.dumps(build(this, b, hardware, job["form"]).to_dict(assembly=job["assembly"])) + "\n")


if __name__ == "__main__":
    main()
