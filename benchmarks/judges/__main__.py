"""How well do the rules by which people judge kernels tell right from wrong? portakern's checker and eight harnesses'
rules, over every planted fault, a corpus of cheats, and right kernels of unusual kinds.

    python -m benchmarks.judges --jobs 2 --json judges.json
    python -m benchmarks.judges --resume --json judges.json  # what the file lacks or has of others
    python -m benchmarks.judges --stale --json judges.json   # how much that is; nothing runs
    python -m benchmarks.judges --only cheats softmax --rules portakern kernelbench-float32
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # workers import tests and benchmarks from the checkout

from benchmarks.judges import corpus, rule, stale
from benchmarks.judges.rules import rules
from benchmarks.judges.subject import Subject
from benchmarks.judges.working import Task, work
from tests.mutants.pool import run

SINGLE = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
LIMIT = 300.0  # seconds a rule may take with a candidate; one that hangs is rejected
SAVED = 50  # results between two writes of the file
GONE = ("timeout", "the process died")


def table(results: Mapping[Task, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row a subject: rule -> why it rejected; whether what it let pass was to be seen; why it did not judge."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for (group, name), s in corpus.subjects().items():
        fields = {"op": s.op, "framework": s.framework, "right": s.right, "kind": s.kind}
        fields |= {"sources": stale.of_subject(s)}
        rows[group, name] = {"group": group, "name": name, **fields} | {
            k: {} for k in ("rejected", "passed", "silent", "seconds")
        }
    for task, r in results.items():
        if (task.group, task.name) in rows and "error" not in r:
            row = rows[task.group, task.name]
            said = "silent" if r["rejected"] is None else "rejected" if r["rejected"] else "passed"
            row[said][task.rule] = r["why"] if said != "passed" else r["shown"]
            row["seconds"][task.rule] = round(r["seconds"], 3)
    return [r for r in rows.values() if r["seconds"]]


def kept(file: Path) -> Iterator[tuple[Task, dict[str, Any]]]:
    """The verdicts of a run that was ended, or is old: those that are of today's sources."""
    data, known = json.loads(file.read_text(encoding="utf-8")), corpus.subjects()
    same = {name for name in rules() if data["sources"].get(name) == stale.of_rule(name)}
    for row in data["rows"]:
        subject = known.get((row["group"], row["name"]))
        if subject is None or row["sources"] != stale.of_subject(subject):
            continue
        for name, seconds in row["seconds"].items():
            if name not in same:
                continue
            rejected = None if name in row["silent"] else name in row["rejected"]
            why = {**row["silent"], **row["rejected"]}.get(name, "")
            shown = row["passed"].get(name)
            yield (
                Task(row["group"], row["name"], name),
                {"rejected": rejected, "why": why, "seconds": seconds, "shown": shown},
            )


def described() -> list[dict[str, Any]]:
    """What the rules are, for the page."""
    return [
        {
            "name": r.name, "title": r.title, "rule": r.rule, "inputs": r.inputs, "gradients": r.gradients,
            "sources": [asdict(s) for s in r.sources],
            "own": sorted(op for op in rule.COMMON if r.own(op)),
            "cut": sorted({f"{t.own}: {t.cut}" for found in getattr(r, "tasks", {}).values() for t in found if t.cut}),
        }
        for r in rules().values()
    ]  # fmt: skip


def show(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    print(f"{'':24}" + "".join(f"{g:>14}" for g in corpus.GROUPS) + f"{'seconds':>10}")
    for name in names:
        cells = []
        for group in corpus.GROUPS:
            here = [r for r in rows if r["group"] == group and name in r["seconds"] and name not in r["silent"]]
            cells.append(f"{sum(name in r['rejected'] for r in here)} of {len(here)}")
        taken = sorted(r["seconds"][name] for r in rows if name in r["seconds"] and name not in r["silent"])
        middle = f"{taken[len(taken) // 2]:10.2f}" if taken else ""
        print(f"{name:24}" + "".join(f"{c:>14}" for c in cells) + middle)
    print("rejected of those judged; the last two columns are false alarms")


def save(file: Path | None, results: Mapping[Task, Mapping[str, Any]], planned: int, seconds: float) -> None:
    if file is None:
        return
    from portakern.results import HOST_CPU, command_line, record, write

    done = sum("error" not in r for r in results.values())
    data = record(
        "judges",
        table(results),
        command=command_line("python -m benchmarks.judges", file),
        device=HOST_CPU,
        tasks=f"{done} of {planned}",
        wall_seconds=round(seconds),
        rules=described(),
        sources={name: stale.of_rule(name) for name in rules()},
    )
    write(file, data)


def tell(tasks: Sequence[Task], file: Path) -> None:
    """How many verdicts are to be given, and how long the file's run took for them; of those that it has not, as long
    as its others of their group and rule took on the average."""
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    took = {Task(r["group"], r["name"], name): s for r in rows for name, s in r["seconds"].items()}
    each: dict[tuple[str, str], list[float]] = {}
    for t, seconds in took.items():
        each.setdefault((t.group, t.rule), []).append(seconds)
    for (group, name), seconds in sorted(each.items()):
        here = [t for t in tasks if (t.group, t.rule) == (group, name)]
        if here:
            guessed = sum(took.get(t, sum(seconds) / len(seconds)) for t in here)
            print(f"{group:12}{name:24}{len(here):5} of {len(seconds):4}{guessed:8.0f} s, in that file")


def chosen(only: Sequence[str]) -> list[Subject]:
    """Subjects whose group or name holds each of these words."""
    return [s for s in corpus.subjects().values() if all(word in f"{s.group}: {s.name}" for word in only)]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.judges", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[], help="subjects whose group and name hold these words")
    parser.add_argument("--rules", nargs="+", choices=list(rules()), default=list(rules()))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resume", action="store_true", help="only what --json's file lacks, or has of other sources")
    parser.add_argument("--stale", action="store_true", help="say what --resume would do, and end")
    args = parser.parse_args()
    os.environ.update(dict.fromkeys(SINGLE, "1") | {"JAX_PLATFORMS": "cpu"})

    planned = [Task(s.group, s.name, r) for s in chosen(args.only) for r in args.rules]
    goes_on = (args.resume or args.stale) and args.json and args.json.exists()
    before: dict[Task, dict[str, Any]] = dict(kept(args.json)) if goes_on else {}
    results = {t: r for t, r in before.items() if t in set(planned)}
    already = json.loads(args.json.read_text())["wall_seconds"] if before else 0
    tasks, start, errors = [t for t in planned if t not in results], time.time(), []
    if args.stale:
        tell(tasks, args.json)
        return 0

    def done(task: Task, result: dict[str, Any]) -> None:
        error = result.get("error", "")
        if error.startswith(GONE):
            result = {"rejected": True, "why": f"hung or died: {error}", "seconds": LIMIT, "shown": None}
        elif error:
            errors.append(f"{task}: {error}")
            print(errors[-1], file=sys.stderr, flush=True)
        results[task] = result
        if len(results) % SAVED == 0:
            print(f"[{len(results)}/{len(planned)}, {time.time() - start:.0f} s] {task}", file=sys.stderr, flush=True)
            save(args.json, results, len(planned), already + time.time() - start)

    run(tasks, args.jobs, LIMIT, done, work)
    save(args.json, results, len(planned), already + time.time() - start)
    show(table(results), args.rules)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
