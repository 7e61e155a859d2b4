"""The Triton kernels' AMD machine code, executed in the emulator: every op on every architecture, part by part.

What `portakern check OP --backend triton --profile emulated --target ARCH` draws, in parts that are kept, so that a run
goes on where another stopped, and that are taken in turn, so that one that is stopped has come as far everywhere.

    python benchmarks/emulated.py [OP ...] [--targets gfx1100 gfx942 gfx950] [--examples 100] [--parts 4]
                                  [--keep FOLDER] [--share I/N] [--json FILE] [--collect]

Needs PORTAKERN_TINYGRAD (a checkout of tinygrad's source tree) and clang, and no GPU. `--share 0/2` and `--share 1/2`
are two processes' halves of one run; --json writes what is kept so far, of however many parts, with --collect at once.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from portakern import results, sources, testing
from portakern.core import registry
from portakern.files import cache_folder, write_atomically
from portakern.testing.coverage import Coverage
from portakern.testing.report import Failure, Report
from portakern.testing.subject import backend_subject

TARGETS = ("gfx1100", "gfx942", "gfx950")
PROFILE = "emulated"


def main() -> None:
    asked = _arguments()
    items = [(op, target) for op in asked.ops for target in asked.targets]
    todo = [(part, op, target) for part in range(asked.parts) for op, target in items]
    mine, of = map(int, asked.share.split("/"))
    for number, (part, op, target) in enumerate(todo):
        file = _part_path(asked, op, target, part)
        if number % of == mine and not file.exists() and not asked.collect:
            report = testing.check(op, backend="triton", profile=PROFILE, target=target, max_examples=asked.examples,
                                   seed=asked.seed, shrink=False, shard=(part, asked.parts))  # fmt: skip
            write_atomically(file, json.dumps(report.to_dict()))
            done = f"{report.verdict}, {report.examples} cases, {report.seconds:.0f} s"
            print(f"{op} {target} {part + 1}/{asked.parts}: {done}", flush=True)
    if asked.json:
        _write(asked, items)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", default=_every_op())
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=cache_folder() / "emulator" / "parts")
    parser.add_argument("--share", default="0/1")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--collect", action="store_true", help="run nothing: write what is kept")
    return parser.parse_args()


def _every_op() -> list[str]:
    return [op for op in registry.ops() if any(registry.backend("triton").families_with(op))]


def _part_path(arguments: argparse.Namespace, op: str, target: str, part: int) -> Path:
    """Where a part is kept, under the sources that it was run of: others' parts are never taken for theirs."""
    of = f"{arguments.examples}-{arguments.seed}-{part}of{arguments.parts}"
    return Path(arguments.keep) / f"{op}-{target}-{of}-{_sources(op, target)}.json"


@functools.cache
def _sources(op: str, target: str) -> str | None:
    where = backend_subject(registry.find_spec(op), "triton", None, None, PROFILE, target).target
    return sources.fingerprint(op, registry.backend("triton"), None, where)


def _write(arguments: argparse.Namespace, items: list[tuple[str, str]]) -> None:
    """What is kept, as results of a check."""
    rows = list(_rows(arguments, items))
    ops = [] if arguments.ops == _every_op() else arguments.ops
    these = [] if tuple(arguments.targets) == TARGETS else ["--targets", *arguments.targets]
    size = ["--examples", str(arguments.examples), "--seed", str(arguments.seed), "--json", arguments.json.name]
    command = " ".join(["python benchmarks/emulated.py", *ops, *these, *size])
    seconds = round(sum(r["seconds"] for r in rows), 1)
    results.write(
        arguments.json,
        results.record("conformance", rows, command=command, device=results.EMULATED, wall_seconds=seconds),
    )


def _rows(arguments: argparse.Namespace, items: list[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    for op, target in items:
        kept = [_part_path(arguments, op, target, part) for part in range(arguments.parts)]
        reports = [_report(json.loads(f.read_text())) for f in kept if f.exists()]
        if reports:
            subject = backend_subject(registry.find_spec(op), "triton", None, None, PROFILE, target)
            found = functools.reduce(Report.merge, reports).to_dict()
            found |= {"backend": "triton", "variant": None, "target": str(subject.target), "commit": sources.commit()}
            yield found | {"sources": _sources(op, target)}


def _report(plain: dict[str, Any]) -> Report:
    """A report of what `to_dict` made of it."""
    counters = {f.name for f in fields(Report) if "Counter" in str(f.type)}
    known = {f.name: plain[f.name] for f in fields(Report)}
    known |= {n: Counter(known[n]) for n in counters} | {"failures": [Failure(**f) for f in plain["failures"]]}
    known["coverage"] = {subject: Coverage.from_dict(v) for subject, v in plain["coverage"].items()}
    return Report(**{**known, "checked": tuple(known["checked"]), "not_required": tuple(known["not_required"])})


if __name__ == "__main__":
    main()
