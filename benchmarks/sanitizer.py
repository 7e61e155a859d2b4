"""The compiled kernels of every op under sanitizers: NVIDIA's for accesses beyond an allocation (memcheck) and races in
shared memory (racecheck), then Triton's own (consan).

Caching allocators are off, so that every array is an allocation of its own and an access beyond its end is seen. Each
op, backend and tool is a process of its own. Racecheck knows what threads read and write themselves; copies by tensor
descriptors and wgmma's reads of shared memory it does not see. Consan does, in Triton's kernels: it compiles each with
assertions of who may touch which buffer, and ends the process at the first that fails.

    python benchmarks/sanitizer.py [OPS] [--backend triton] [--tool consan] [--max-examples 20] [--jobs 8] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import portakern as pk
from portakern import results

ALONE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
"""What has PyTorch and JAX ask the driver for each array."""

KEPT = 20
"""Lines of a tool's findings that are kept of an op."""

WITH_MEMORY = """
import torch, triton
triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
from portakern.cli import main
main()
"""
"""The command line where kernels find memory for what consan keeps of their buffers."""


class Tool(NamedTuple):
    """How the command line is run under a tool, and what counts errors: a sum that it says, or else each message."""

    command: tuple[str, ...]
    errors: str
    summed: bool = True
    environment: tuple[tuple[str, str], ...] = ()
    backend: str | None = None  # the only one whose kernels it knows


def _nvidia(tool: str, errors: str) -> Tool:
    return Tool(("compute-sanitizer", "--tool", tool, sys.executable, "-m", "portakern.cli"), errors)


TOOLS = {
    "memcheck": _nvidia("memcheck", r"ERROR SUMMARY: (\d+) error"),
    "racecheck": _nvidia("racecheck", r"RACECHECK SUMMARY: (\d+) hazard"),
    "consan": Tool(
        (sys.executable, "-c", WITH_MEMORY),
        r"Assertion `(.+?)` failed",
        summed=False,
        environment=(("TRITON_INSTRUMENTATION_MODE", "consan"), ("CUDA_LAUNCH_BLOCKING", "1")),
        backend="triton",
    ),
}


def sanitize(op: str, backend: str, tool: str, examples: int, timeout: float) -> dict[str, Any]:
    """One op of a backend under one tool.

    ``errors``: what the tool counted, and ``said``: where; ``problem``: why its count is not to be had, or what failed.
    """
    check = (*TOOLS[tool].command, "check", op, "--backend", backend, "--max-examples", str(examples))
    start = time.perf_counter()
    try:
        ran = subprocess.run(
            check,
            env={**os.environ, **ALONE, **dict(TOOLS[tool].environment)},
            text=True,
            capture_output=True,
            timeout=timeout,
        )
        output, problem = ran.stdout + ran.stderr, f"exit status {ran.returncode}" if ran.returncode else None
    except subprocess.TimeoutExpired as e:
        output, problem = (e.stdout or b"").decode(), f"not done after {timeout:.0f} s"
    errors = counted(tool, output)
    if errors or errors is None or problem:
        print(f"---- {op}, {backend}, {tool}: {problem}\n{output[-3000:]}", flush=True)
    return {
        "op": op,
        "backend": backend,
        "tool": tool,
        "examples": examples,
        "errors": errors,
        "problem": problem or ("no summary" if errors is None else None),
        "said": findings(tool, output),
        "seconds": round(time.perf_counter() - start, 1),
    }


def counted(tool: str, output: str) -> int | None:
    """How many errors a tool found, or None where it did not come to say so."""
    found = re.findall(TOOLS[tool].errors, output)
    return (int(found[-1]) if found else None) if TOOLS[tool].summed else len(set(found))


def findings(tool: str, output: str) -> list[str]:
    """The lines in which a tool says what it found, each once, without its greeting and its sum."""
    if not TOOLS[tool].summed:
        return list(dict.fromkeys(re.findall(TOOLS[tool].errors, output)))[:KEPT]
    lines = (line.lstrip("= ").rstrip() for line in output.splitlines() if line.startswith("========="))
    found = dict.fromkeys(line for line in lines if line and "SUMMARY" not in line and line != "COMPUTE-SANITIZER")
    return list(found)[:KEPT]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", help="all when none is named")
    parser.add_argument("--backend", action="append", help="may be repeated (triton)")
    parser.add_argument("--tool", action="append", choices=[*TOOLS], help="may be repeated (all)")
    parser.add_argument("--max-examples", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=900, help="seconds that one op and tool may take")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with ThreadPoolExecutor(args.jobs) as pool:
        tasks = [
            pool.submit(sanitize, op, backend, tool, args.max_examples, args.timeout)
            for op in args.ops or pk.ops()
            for backend in args.backend or ["triton"]
            for tool in args.tool or TOOLS
            if TOOLS[tool].backend in (None, backend)
        ]
        rows = [t.result() for t in tasks]
    for r in rows:
        print(
            f"{r['op']:16} {r['backend']:8} {r['tool']:10} {r['errors']} errors, {r['examples']} cases, {r['seconds']} "
            f"s{', ' + r['problem'] if r['problem'] else ''}"
        )
    if args.json:
        results.write(
            args.json,
            results.record(
                "sanitizer", rows, command=results.command_line("python benchmarks/sanitizer.py", args.json)
            ),
        )
    if any(r["errors"] or r["problem"] for r in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
