"""Does ``pk.check`` find the faults planted in the shipped kernels, and do the kernels themselves pass?

    python -m tests.mutants --jobs 16 --json mutants.json
    python -m tests.mutants --device cuda --jobs 4            # the Triton faults, compiled
    python -m tests.mutants --seeds 0 --only softmax --flat-seeds

Each fault meets each seed in a worker process of its own fate: one that hangs or dies is replaced, and its task counts
as an error. The shipped kernels pass the same seeds, and on the calls of ``--flat-seeds`` every fault is held to
``assert_allclose(rtol=atol=1e-2)`` too, until that sees it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .faults import FAULTS, Fault
from .pool import Task, run

SINGLE = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def plan(
    faults: Sequence[Fault], seeds: Sequence[int], flat_seeds: Sequence[int], device: str, examples: int
) -> list[Task]:
    """The longest first: the shipped kernels, then each fault. A kernel's task holds the first of its faults."""
    kernels = {(f.op, f.home): f for f in reversed(faults)}
    order = sorted(kernels, key=lambda k: (not k[1].startswith("pallas"), "attention" not in k[0], len(k[0])))
    alone = [
        Task(kind, f, s, device, examples)
        for kind, on in (("catch", seeds), ("flat", flat_seeds))
        for s in on
        for f in faults
    ]
    return [
        *(Task("right", kernels[k], s, device, examples) for k in order for s in seeds),
        *alone,
        *(Task("error", f, 0, device, 0) for f in faults),
    ]


def rows(
    faults: Sequence[Fault], results: dict[Task, dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """One row a fault, one a kernel and seed."""
    kernels = [
        {"backend": t.fault.home, "op": t.fault.op, "seed": t.seed, **r}
        for t, r in results.items()
        if t.kind == "right"
    ]
    table = {
        f: {
            "name": f.name,
            "backend": f.home,
            "op": f.op,
            "what": f.what,
            "small": f.small,
            "seeds": {},
            "flat_tolerance": {},
        }
        for f in faults
    }
    for t, r in results.items():
        if t.kind == "error":
            table[t.fault] |= r
        elif t.kind in ("catch", "flat"):
            table[t.fault]["seeds" if t.kind == "catch" else "flat_tolerance"][str(t.seed)] = r
    return list(table.values()), kernels


def show(table: Sequence[dict[str, Any]], kernels: Sequence[dict[str, Any]]) -> None:
    print(f"\n{'fault':44} {'max error':>9}  caught  examples (median, most)   flat 1e-2 sees it")
    for row in table:
        seeds = list(row["seeds"].values())
        caught = [s["examples"] for s in seeds if s.get("caught")]
        flat = [r["sees_at"] for r in row["flat_tolerance"].values() if "sees_at" in r]
        counts = f"{statistics.median(caught):6.0f} {max(caught):6}" if caught else " " * 13
        mark = (
            ""
            if len(caught) == len(seeds)
            else "   <-- " + "; ".join(sorted({s.get("error", "passed") for s in seeds if not s.get("caught")}))
        )
        sees = f"{sum(x is not None for x in flat)}/{len(flat)}" if flat else ""
        print(
            f"{row['name']:44} {row.get('max_error', float('nan')):9.2g}   {len(caught)}/{len(seeds)}   "
            f"{counts}              {sees:>5}{mark}"
        )
    summary = summarise(table, kernels)
    print("\n" + "\n".join(f"{k.replace('_', ' ')}: {v}" for k, v in summary.items()))


def summarise(table: Sequence[dict[str, Any]], kernels: Sequence[dict[str, Any]]) -> dict[str, Any]:
    full = [r for r in table if r["seeds"] and all(s.get("caught") for s in r["seeds"].values())]
    pairs = [r["sees_at"] for row in table for r in row["flat_tolerance"].values() if "sees_at" in r]
    calls = sum(k.get("calls", 0) for k in kernels)
    return {
        "faults": len(table),
        "small": sum(r.get("max_error", 1) < 1e-2 for r in table),
        "caught_on_every_seed": len(full),
        "small_caught_on_every_seed": sum(r.get("max_error", 1) < 1e-2 for r in full),
        "not_caught_on_every_seed": [r["name"] for r in table if r not in full],
        "kernels_and_seeds_that_failed": [
            f"{k['backend']} {k['op']} seed {k['seed']}: {k.get('error') or k.get('what')}"
            for k in kernels
            if k.get("failed", True)
        ],
        "slips_through_flat_1e-2": f"{sum(p is None for p in pairs)} of {len(pairs)} (fault, seed) pairs"
        if pairs
        else "not run",
        "flat_1e-2_false_alarms": (
            f"{sum(k.get('false_alarms', 0) for k in kernels)} of {calls} calls of the shipped kernels"
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", nargs="+", default=[""], help="faults whose name holds one of these")
    flat = "seeds of the comparison with a flat tolerance; none leaves it out"
    parser.add_argument("--flat-seeds", type=int, nargs="*", default=[0], help=flat)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds a task may take")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="do only what the file of --json does not hold yet; only if neither kernels nor checks have changed",
    )
    args = parser.parse_args()
    os.environ.update(
        dict.fromkeys(SINGLE, "1") | {"JAX_PLATFORMS": "cpu"}
    )  # one thread a worker; JAX's share here is the interpreter

    faults = [f for f in FAULTS if f.case is None and any(part in f.name for part in args.only)]
    faults = [f for f in faults if args.device == "cpu" or f.gpu]
    for why, count in Counter(f"{f.home} needs {f.lacks()}" for f in faults if f.lacks()).items():
        print(f"{count} faults left out: {why}", file=sys.stderr)
    faults = [f for f in faults if not f.lacks()]
    tasks = plan(faults, args.seeds, args.flat_seeds, args.device, args.examples)
    results = kept(args.json, tasks) if args.resume else {}
    planned, start = len(tasks), time.time()
    tasks = [t for t in tasks if t not in results]

    def done(task: Task, result: dict[str, Any]) -> None:
        results[task] = result
        said = result.get("error") or (
            f"max error {result['max_error']:.2g}"
            if "max_error" in result
            else "caught"
            if result.get("caught")
            else f"a flat tolerance sees it at {result['sees_at']}"
            if "sees_at" in result
            else "FAILED"
            if result["failed"]
            else "passed"
        )
        print(
            f"[{len(results)}/{planned}, {time.time() - start:.0f} s] {task}: {said} {result.get('examples', '')}",
            file=sys.stderr,
            flush=True,
        )
        save(args, faults, results, planned, start)

    run(tasks, args.jobs, args.timeout, done)
    table, kernels = rows(faults, results)
    show(table, kernels)
    summary = summarise(table, kernels)
    return 1 if summary["not_caught_on_every_seed"] or summary["kernels_and_seeds_that_failed"] else 0


def kept(file: Path, tasks: Sequence[Task]) -> dict[Task, dict[str, Any]]:
    """The results of a run that was ended, but for its errors."""
    data = json.loads(file.read_text())
    found: dict[Any, dict[str, Any]] = {("kernel", k["backend"], k["op"], k["seed"]): k for k in data["kernels"]}
    for row in data["rows"]:
        if "max_error" in row:
            found["error", row["name"], 0] = {"max_error": row["max_error"]}
        for kind, runs in (("catch", row["seeds"]), ("flat", row["flat_tolerance"])):
            found |= {(kind, row["name"], int(seed)): r for seed, r in runs.items()}
    keys = {
        t: ("kernel", t.fault.home, t.fault.op, t.seed) if t.kind == "right" else (t.kind, t.fault.name, t.seed)
        for t in tasks
    }
    return {t: found[key] for t, key in keys.items() if key in found and "error" not in found[key]}


def save(
    args: argparse.Namespace, faults: Sequence[Fault], done: dict[Task, dict[str, Any]], planned: int, start: float
) -> None:
    if not args.json:
        return
    from portakern.results import HOST_CPU, command_line, record, write

    table, kernels = rows(faults, done)
    data = record(
        "mutants",
        table,
        command=command_line("python -m tests.mutants", args.json),
        device=HOST_CPU if args.device == "cpu" else None,
        tasks=f"{len(done)} of {planned}",
        wall_seconds=round(time.time() - start),
        summary=summarise(table, kernels),
        kernels=kernels,
    )
    write(args.json, data)


if __name__ == "__main__":
    sys.exit(main())
