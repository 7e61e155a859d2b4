"""Which backends and peers keep their bits whatever the batch, padding, packing, cuts and layouts: ``portakern
invariance`` of each op and backend, in a process of its own. One that ends its process, or takes longer than
``--timeout``, loses its own rows alone.

    python -m benchmarks.batch_invariance [OPS] [--cases 24] [--jobs 4] [--json FILE]
    python -m benchmarks.batch_invariance softmax --device cpu --backend triton --against torch --cases 4
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from portakern import processes, results
from portakern.core import registry

Row = dict[str, Any]
REFUSED = 2
"""The exit status of a command that says what it cannot do."""


class Contender(NamedTuple):
    """An op on a backend or a peer."""

    op: str
    backend: str
    peer: bool


def contenders(options: argparse.Namespace) -> list[Contender]:
    """Everybody who has the ops."""
    own = options.backend or [n for n, b in registry.backends().items() if b.auto and not b.oracle]
    peers = options.against or [*registry.peers()]
    named = [(n, False) for n in own] + [(n, True) for n in peers]
    ops = options.ops or registry.loadable()
    return [Contender(op, n, peer) for op in ops for n, peer in named if any(registry.backend(n).families_with(op))]


def rows_of(contender: Contender, options: argparse.Namespace) -> list[Row]:
    """The rows of one command; of one that ended otherwise a row that says how."""
    environment = {**os.environ, **processes.unsaid(processes.SHARING)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        words = [contender.op, "--backend", contender.backend, "--json", str(file), "--cases", str(options.cases)]
        words += ["--seconds", str(options.seconds), *(w for p in options.property or () for w in ("--property", p))]
        words += ["--device", options.device] if options.device else []
        process = subprocess.Popen(
            [sys.executable, "-m", "portakern", "invariance", *words],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            text, _ = process.communicate(timeout=options.timeout)
            why = f"its process ended with {process.returncode}: {text.strip()[-200:] or 'it printed nothing'}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            why = f"not done after {options.timeout:g} s"
        if file.exists():
            return list(json.loads(file.read_text())["rows"])
        if process.returncode == REFUSED:
            print(f"{contender.op:22}{contender.backend:12}not compared: {why}", flush=True)
            return []
    counts = dict.fromkeys(("cases", "same", "refused"), 0)
    return [
        {"op": contender.op, "subject": contender.backend, "peer": contender.peer, "backend": contender.backend,
         "name": "repeat", "along": "", **counts, "failed": 1, "largest": 0.0, "why": why},
    ]  # fmt: skip


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.batch_invariance", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    found.add_argument("ops", nargs="*", help="all when none is named")
    found.add_argument("--backend", action="append", help="may be repeated (portakern's own)")
    found.add_argument("--against", action="append", help="a peer; may be repeated (all)")
    found.add_argument("--device", help="cpu: interpreters (the accelerator)")
    found.add_argument("--property", action="append", help="of portakern invariance; may be repeated (all)")
    found.add_argument("--cases", type=int, default=24, help="of an op and backend")
    found.add_argument("--seconds", type=float, default=120.0, help="after which no further case begins")
    found.add_argument("--timeout", type=float, default=600.0, help="seconds that one command may take")
    found.add_argument("--jobs", type=int, default=4, help="commands at a time")
    found.add_argument("--json", type=Path)
    return found


def found_rows(options: argparse.Namespace) -> Iterator[Sequence[Row]]:
    """The rows of each op and backend, as they come."""
    every = contenders(options)
    with ThreadPoolExecutor(options.jobs) as pool:
        for contender, rows in zip(every, pool.map(lambda c: rows_of(c, options), every), strict=True):
            broken = [f"{r['name']} {r['along']}".strip() for r in rows if r["failed"] or r["same"] < r["cases"]]
            told = f"broken: {', '.join(broken)}" if broken else "all the same bits" if rows else ""
            print(f"{contender.op:22}{contender.backend:12}{told}", flush=True)
            yield rows


def main() -> int:
    options = parser().parse_args()
    start, rows = time.perf_counter(), list[Row]()
    command = results.command_line("python -m benchmarks.batch_invariance", options.json)
    device = results.HOST_CPU if options.device == "cpu" else None
    for found in found_rows(options):
        rows += found
        if options.json:
            seconds = round(time.perf_counter() - start, 1)
            results.write(
                options.json, results.record("invariance", rows, command=command, device=device, wall_seconds=seconds)
            )
    return int(not rows or any(r["failed"] or r["same"] < r["cases"] for r in rows if not r["peer"]))


if __name__ == "__main__":
    sys.exit(main())
