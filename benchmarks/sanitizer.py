"""The compiled kernels of every op under NVIDIA's compute-sanitizer: accesses beyond an allocation, then races in
shared memory.

Caching allocators are off, so that every array is an allocation of its own and an access beyond its end is seen. Each
op, backend and tool is a process of its own.

    python benchmarks/sanitizer.py [OPS] [--backend triton] [--max-examples 20] [--jobs 8] [--json FILE]
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
from typing import Any

import portakern as pk
from portakern import results

ALONE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
"""What has PyTorch and JAX ask the driver for each array."""

KEPT = 20
"""Lines of a tool's findings that are kept of an op."""

SUMMARY = {"memcheck": r"ERROR SUMMARY: (\d+) error", "racecheck": r"RACECHECK SUMMARY: (\d+) hazard"}


def sanitize(op: str, backend: str, tool: str, examples: int, timeout: float) -> dict[str, Any]:
    """One op of a backend under one tool.

    ``errors``: what the tool counted, and ``said``: where; ``problem``: why its count is not to be had, or what failed.
    """
    check = [sys.executable, "-m", "portakern.cli", "check", op, "--backend", backend]
    start = time.perf_counter()
    try:
        ran = subprocess.run(
            ["compute-sanitizer", "--tool", tool, *check, "--max-examples", str(examples)],
            env={**os.environ, **ALONE},
            text=True,
            capture_output=True,
            timeout=timeout,
        )
        output, problem = ran.stdout + ran.stderr, f"exit status {ran.returncode}" if ran.returncode else None
    except subprocess.TimeoutExpired as e:
        output, problem = (e.stdout or b"").decode(), f"not done after {timeout:.0f} s"
    told = re.search(SUMMARY[tool], output)
    if told is None or int(told[1]) or problem:
        print(f"---- {op}, {backend}, {tool}: {problem}\n{output[-3000:]}", flush=True)
    return {
        "op": op,
        "backend": backend,
        "tool": tool,
        "examples": examples,
        "errors": int(told[1]) if told else None,
        "problem": problem or (None if told else "no summary"),
        "said": findings(output),
        "seconds": round(time.perf_counter() - start, 1),
    }


def findings(output: str) -> list[str]:
    """The lines in which a tool says what it found, each once, without its greeting and its sum."""
    lines = (line.lstrip("= ").rstrip() for line in output.splitlines() if line.startswith("========="))
    found = dict.fromkeys(line for line in lines if line and "SUMMARY" not in line and line != "COMPUTE-SANITIZER")
    return list(found)[:KEPT]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", help="all when none is named")
    parser.add_argument("--backend", action="append", help="may be repeated (triton)")
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
            for tool in SUMMARY
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
