"""The references of KernelBench's level 1 under ``portakern judge``: each as it is published, on its own shapes.

    git clone https://github.com/ScalingIntelligence/KernelBench
    python -m benchmarks.kernelbench KernelBench/KernelBench/level1 --jobs 2 --json kernelbench.json
    python -m benchmarks.kernelbench KernelBench/KernelBench/level1 --device cuda --full-shapes --jobs 4 --budget 100

Of a FILE that is there the rows of other problems are kept, if its device and checkout are the same.

A reference is a right kernel: any other verdict is a false alarm, or says what the judge cannot carry out. Its seconds
are those of the command, from its start to its verdict. What no op here computes is listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from portakern.tools import judge

__all__ = ["NEAR", "judged", "known", "left_out"]

REPOSITORY = "ScalingIntelligence/KernelBench, KernelBench/level1/"
OF_PROBLEM = ("the full shapes", "memory layouts", "shifted arrays")
"""Beginnings of what a row keeps of the report's ``not_required``: that which depends on the problem."""

NEAR = {
    "5_Matrix_scalar_multiplication": "a matrix times a number",
    "12_Matmul_with_diagonal_matrices_": "a product whose first factor is a diagonal, given as a vector",
    "13_Matmul_for_symmetric_matrices": "a product that may use that its factors are symmetric; matmul's are not",
    "14_Matmul_for_upper_triangular_matrices": "a product of triangular matrices; matmul's are whole",
    "15_Matmul_for_lower_triangular_matrices": "a product of triangular matrices; matmul's are whole",
    "24_LogSoftmax": "x - logsumexp(x); logsumexp gives one number a row",
    "25_Swish": "swiglu without its second factor",
    "33_BatchNorm": "statistics over rows, with running ones",
    "35_GroupNorm_": "layernorm over groups of channels, which no view of --map makes",
    "39_L2Norm_": "rmsnorm without the mean",
    "95_CrossEntropyLoss": "the mean of the rows' losses; cross_entropy gives each",
}
"""Problems next to an op: what they are instead."""


def known() -> dict[str, Any]:
    """The problems that ``portakern judge`` knows by their file's name, in their order."""
    table = tomllib.loads((Path(judge.__file__).parent / "problems.toml").read_text())
    return dict(sorted(table.items(), key=lambda item: number(item[0])))


def number(stem: str) -> int:
    return int(stem.partition("_")[0])


def left_out(folder: Path) -> dict[str, str]:
    """The problems of a folder that no op computes, and what they are, where an op is near."""
    stems = sorted((f.stem for f in folder.glob("[0-9]*_*.py")), key=number)
    return {s: NEAR.get(s, "") for s in stems if s not in known()}


def judged(
    file: Path, device: str, full_shapes: bool, seconds: float, limit: float, more: Sequence[str] = ()
) -> dict[str, Any]:
    """One row: what the command, with ``more`` words, said of a reference in at most ``limit`` seconds."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "judged.json")
        command = [
            sys.executable, "-m", "portakern", "judge", str(file), "--problem", str(file), "--device", device,
            "--seconds", f"{seconds:g}",
            "--memory", "48", "--call-seconds", "60", "--json", str(told), *(["--full-shapes"] if full_shapes else []),
            *more,
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
            said = (done.stderr or done.stdout)[-500:]
        except subprocess.TimeoutExpired:
            said = f"no verdict within {limit:.0f} s"
        found = json.loads(told.read_text()) if told.is_file() else {}
    return {
        "problem": file.stem, "op": known()[file.stem]["op"], "verdict": found.get("outcome", "none"),
        "seconds": round(time.perf_counter() - start, 1), "load_seconds": found.get("load_seconds", 0.0),
        "cases": found.get("examples", 0), "left_out": found.get("left_out", 0), "worst": found.get("worst", {}),
        "full_shapes": full_shapes,
        "not_required": [w for w in found.get("not_required", ()) if w.startswith(OF_PROBLEM)],
        "why": "; ".join(f["what"] for f in found.get("failures", ()))[:500] if found else said,
    }  # fmt: skip


def run(files: Sequence[Path], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each file that was judged before the budget was spent, as they come."""
    until = time.monotonic() + (args.budget or 1e9)
    more = [w for name in ("without", "layout") for value in getattr(args, name) for w in (f"--{name}", value)]

    def one(file: Path) -> dict[str, Any] | None:
        left = until - time.monotonic()
        return judged(file, args.device, args.full_shapes, args.seconds, min(left, 300.0), more) if left > 5 else None

    with ThreadPoolExecutor(args.jobs) as pool:
        for row in pool.map(one, files):
            if row:
                told = f"{row['verdict']:12}{row['seconds']:7.1f} s {row['cases']:4} cases {row['why']}"
                print(f"{row['problem']:45}{told}", flush=True)
                yield row


def device_name(device: str) -> str:
    from portakern import inventory
    from portakern.results import HOST_CPU

    return HOST_CPU if device == "cpu" else inventory.device_name()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernelbench", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("folder", type=Path, help="KernelBench/level1 of a checkout of KernelBench")
    parser.add_argument("--only", nargs="+", type=int, default=[], help="numbers of problems")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--full-shapes", action="store_true", help="do not reduce the published shapes")
    parser.add_argument("--seconds", type=float, default=15.0, help="after which no further case of a problem begins")
    parser.add_argument("--without", nargs="+", default=[], help="protections to omit, as for portakern judge")
    parser.add_argument("--layout", nargs="+", default=[], help="memory layouts of arrays, as for portakern judge")
    parser.add_argument("--budget", type=float, help="seconds in all, after which what is left is not judged")
    parser.add_argument("--at", default="", help="the commit of the checkout, for the results")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    order = [n for n in known() if not args.only or number(n) in args.only]
    if args.only:
        order.sort(key=lambda n: args.only.index(number(n)))
    files = [args.folder / f"{n}.py" for n in order]
    missing = [f.name for f in files if not f.is_file()]
    if missing or not files:
        parser.error(f"{args.folder} has no {', '.join(missing) or 'such problem'}; expected KernelBench's level1")
    start = time.perf_counter()
    rows = list(run(files, args))
    if args.json:
        save(args, rows, time.perf_counter() - start)
    return 0 if all(r["verdict"] == "right" for r in rows) and len(rows) == len(files) else 1


def save(args: argparse.Namespace, rows: Sequence[Mapping[str, Any]], seconds: float) -> None:
    from portakern.results import command_line, record, write

    data = record(
        "kernelbench", rows, command=command_line("python -m benchmarks.kernelbench", args.json),
        device=device_name(args.device), repository=REPOSITORY, repository_commit=args.at,
        left_out=left_out(args.folder), wall_seconds=round(seconds),
    )  # fmt: skip
    write(args.json, beside_earlier(data, args.json))


def beside_earlier(data: dict[str, Any], file: Path) -> dict[str, Any]:
    """A run with the rows of problems that it did not judge, where the file has a run of the same device and checkout:
    each row names its commit then."""
    from portakern.results import read

    data = data | {"commit": None, "rows": [{**r, "commit": data["commit"]} for r in data["rows"]]}
    if not file.is_file():
        return data
    before = read(file)
    if (before.device, before.extra["repository_commit"]) != (data["device"], data["repository_commit"]):
        return data
    now = {(r["problem"], r["full_shapes"]) for r in data["rows"]}
    kept = [
        {**r, "commit": r.get("commit") or before.commit}
        for r in before.rows
        if (r["problem"], r["full_shapes"]) not in now
    ]
    rows = sorted([*kept, *data["rows"]], key=lambda r: (number(r["problem"]), r["full_shapes"]))
    wall = data["wall_seconds"] + (before.extra["wall_seconds"] if kept else 0)
    return data | {"rows": rows, "wall_seconds": wall}


if __name__ == "__main__":
    sys.exit(main())
