"""The compiled kernels of every op under sanitizers: NVIDIA's for accesses beyond an allocation (memcheck) and races in
shared memory (racecheck), then Triton's own (consan).

Caching allocators are off, so that every array is an allocation of its own and an access beyond its end is seen. Each
op, backend and tool is a process of its own. Racecheck knows what threads read and write themselves; copies by tensor
descriptors and wgmma's reads of shared memory it does not see. Consan does, in Triton's kernels: it compiles each with
assertions of who may touch which buffer, and ends the process at the first that fails.

    python benchmarks/sanitizer.py [OPS] [--backend triton] [--variant hopper] [--tool consan] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import portakern as pk
from portakern import results

ALONE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
"""What has PyTorch and JAX ask the driver for each array."""

KEPT = 20
"""Lines of a tool's findings that are kept of an op."""

WITH_MEMORY = """
import atexit, torch, triton
given = []
def allocate(size, alignment, stream):
    given.append(size)
    return torch.empty(size, dtype=torch.int8, device="cuda")
atexit.register(lambda: print("CONSAN SUMMARY:", len(given), "launches", flush=True))
triton.set_allocator(allocate)
from portakern.cli import main
main()
"""
"""The command line where kernels find memory for what consan keeps of their buffers; how often any did is said last."""


class Tool(NamedTuple):
    """How the command line is run under a tool, and how it is understood.

    ``summary``: a number that each process says at its end; of errors, or where ``errors`` says how each of these is
    told, of launches that were watched. What ``errors`` finds is kept, so that folders are left out of it. ``backend``:
    the only one whose kernels it knows.
    """

    command: tuple[str, ...]
    summary: str
    errors: str | None = None
    environment: tuple[tuple[str, str], ...] = ()
    backend: str | None = None


def _nvidia(tool: str, summary: str) -> Tool:
    return Tool(("compute-sanitizer", "--tool", tool, sys.executable, "-m", "portakern.cli"), summary)


TOOLS = {
    "memcheck": _nvidia("memcheck", r"ERROR SUMMARY: (\d+) error"),
    "racecheck": _nvidia("racecheck", r"RACECHECK SUMMARY: (\d+) hazard"),
    "consan": Tool(
        (sys.executable, "-c", WITH_MEMORY),
        r"CONSAN SUMMARY: (\d+) launches",
        errors=r"(?m)^(?:.*/)?(.*?): block: .*Assertion `(.+?)` failed",
        environment=(("TRITON_INSTRUMENTATION_MODE", "consan"), ("CUDA_LAUNCH_BLOCKING", "1")),
        backend="triton",
    ),
}


def sanitize(op: str, backend: str, variant: str | None, tool: str, examples: int, timeout: float) -> dict[str, Any]:
    """One op of a backend, or of its variant alone, under one tool.

    ``errors``: what the tool counted, and ``findings``: where; ``problem``: why its count is not to be had, or what
    failed.
    """
    check = (*TOOLS[tool].command, "check", op, "--backend", backend, "--max-examples", str(examples))
    check += ("--variant", variant) if variant else ()
    start = time.perf_counter()
    output, problem = _run(check, {**os.environ, **ALONE, **dict(TOOLS[tool].environment)}, timeout)
    errors, lacking = counted(tool, output)
    if errors or lacking or problem:
        print(f"---- {op}, {backend}, {tool}: {problem or lacking}\n{output[-3000:]}", flush=True)
    return {
        "op": op,
        "backend": backend,
        "variant": variant,
        "tool": tool,
        "examples": examples,
        "errors": errors,
        "problem": problem or lacking,
        "findings": findings(tool, output),
        "seconds": round(time.perf_counter() - start, 1),
    }


def _run(command: Sequence[str], environment: Mapping[str, str], timeout: float) -> tuple[str, str | None]:
    """What a command said, and what kept it from ending well. What it started ends with it."""
    try:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            encoding="utf-8", errors="replace",
        )  # fmt: skip
    except OSError as e:
        return "", f"{command[0]} cannot be run: {e.strerror}"
    try:
        output, _ = process.communicate(timeout=timeout)
        return output, f"exit status {process.returncode}" if process.returncode else None
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0], f"not done after {timeout:.0f} s"


def counted(tool: str, output: str) -> tuple[int | None, str | None]:
    """How many errors a tool found, None where it did not come to say so; and why its count says nothing, if so."""
    said = TOOLS[tool]
    sums = [int(n) for n in re.findall(said.summary, output)]
    if said.errors is None:
        return (sum(sums), None) if sums else (None, "no summary")
    if found := len(set(re.findall(said.errors, output))):
        return found, None
    return (0, None) if sum(sums) else (None, "no kernel was watched")


def findings(tool: str, output: str) -> list[str]:
    """The lines in which a tool says what it found, each once, without its greeting and its sum."""
    if errors := TOOLS[tool].errors:
        return list(dict.fromkeys(": ".join(found) for found in re.findall(errors, output)))[:KEPT]
    lines = (line.lstrip("= ").rstrip() for line in output.splitlines() if line.startswith("========="))
    lines = (line for line in lines if line and not line.startswith(("Host Frame", "Saved host backtrace")))
    found = dict.fromkeys(line for line in lines if "SUMMARY" not in line and line != "COMPUTE-SANITIZER")
    return list(found)[:KEPT]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", help="all when none is named")
    parser.add_argument("--backend", action="append", help="may be repeated (triton)")
    parser.add_argument("--variant", help="only this variant of the backend (each that runs here)")
    parser.add_argument("--tool", action="append", choices=[*TOOLS], help="may be repeated (all)")
    parser.add_argument("--max-examples", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=900, help="seconds that one op and tool may take")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    backends, tools = args.backend or ["triton"], args.tool or [*TOOLS]
    asked = [(b, t) for b in backends for t in tools if TOOLS[t].backend in (None, b)]
    if not asked:
        parser.error(f"--tool {' '.join(tools)} knows no kernels of --backend {' '.join(backends)}")
    command = results.command_line("python benchmarks/sanitizer.py", args.json)
    with ThreadPoolExecutor(args.jobs) as pool:
        tasks = [
            pool.submit(sanitize, op, backend, args.variant, tool, args.max_examples, args.timeout)
            for op in args.ops or pk.ops()
            for backend, tool in asked
        ]
        for task in as_completed(tasks):
            r = task.result()
            print(
                f"{r['op']:16} {r['backend']:8} {r['tool']:10} {r['errors']} errors, {r['examples']} cases, "
                f"{r['seconds']} s{', ' + r['problem'] if r['problem'] else ''}",
                flush=True,
            )
            rows = [t.result() for t in tasks if t.done()]  # in the order in which they were asked for
            if args.json:  # as they come: what ends the run early takes none of them away
                results.write(args.json, results.record("sanitizer", rows, command=command))
    if any(r["errors"] or r["problem"] for r in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
