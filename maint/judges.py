"""Tables of the rules that judge kernels, from stored runs of ``python -m benchmarks.judges`` and
``benchmarks.kernelbench``."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from maint.markdown import NONE, fold, table
from maint.measurements import Row, StoredResults, set_of, source

__all__ = ["judges", "references"]

GROUPS = {
    "cheats": "cheats",
    "functions": "faults in functions",
    "kernels": "faults in kernels",
    "simulated": "faults in simulated kernels",
}
"""What is wrong: group -> the head of its column."""
NOTHING = "Not run yet: `python -m benchmarks.judges --json FILE`, and `portakern report --add FILE`."


def judges(kept: StoredResults) -> str:
    """What each rule caught and whom it accused; the cheats by kind; the false alarms; and what the rules are."""
    found = kept.rows("judges")
    if not found:
        return NOTHING
    (run, *_), rows = set_of(r for _, r in found), [row for row, _ in found]
    rules: Sequence[Row] = run.extra["rules"]
    done, _, planned = str(run.extra["tasks"]).partition(" of ")
    text = [_main(rows, rules), _explained(rows)]
    if done != planned:
        text.append(f"An unfinished run: {done} of {planned} verdicts.")
    text += [
        fold("Cheats by kind: how many a rule accepts", _kinds(rows, rules)),
        fold("False alarms", _alarms(rows, rules)),
        fold("The rules, and where they are published", "\n".join(f"* {_rule(rule)}" for rule in rules)),
        source([run]),
    ]
    return "\n\n".join(text)


def references(kept: StoredResults) -> str:
    """The verdict on each of KernelBench's references, a column a run; and the problems that no op computes."""
    found = kept.rows("kernelbench")
    if not found:
        return "Not run yet: `python -m benchmarks.kernelbench FOLDER --json FILE`, and `portakern report --add FILE`."
    by_problem: dict[str, dict[tuple[str, bool], Row]] = {}
    for row, run in found:
        by_problem.setdefault(row["problem"], {})[run.device, row["full_shapes"]] = row
    runs = dict.fromkeys(kind for rows in by_problem.values() for kind in rows)
    heads = [f"{device}{', published shapes' if whole else ''}" for device, whole in runs]
    lines = [
        [problem, f"`{next(iter(rows.values()))['op']}`", *(_verdict(rows.get(kind)) for kind in runs)]
        for problem, rows in sorted(by_problem.items(), key=lambda item: int(item[0].partition("_")[0]))
    ]
    out: dict[str, str] = {}
    for run in set_of(r for _, r in found):
        out |= run.extra["left_out"]
    near = "\n".join(f"* {problem}: {what}." for problem, what in out.items() if what)
    rest = ", ".join(problem.partition("_")[0] for problem, what in out.items() if not what)
    return "\n\n".join(
        [
            table(["problem", "op", *heads], lines, words=2),
            "Seconds are the wall time of the command, with other work on the machine. Cases are those that ran within "
            "its time limit. Rows with fewer cases than there are regimes of values and edges are older than the "
            "verdict *unfinished*: the cases that ran are right.",
            fold("Problems that no op here computes", f"Close to an op:\n\n{near}\n\nOthers: {rest}."),
            source(set_of(r for _, r in found)),
        ]
    )


def _verdict(row: Row | None) -> str:
    return f"{row['verdict']}, {row['seconds']:.1f} s, {row['cases']} case{'s' * (row['cases'] != 1)}" if row else NONE


def _judged(rows: Iterable[Row], rule: str) -> list[Row]:
    return [r for r in rows if rule in r["seconds"] and r["verdicts"].get(rule) != "silent"]


def _rejects(rule: str, row: Row) -> bool:
    return bool(row["verdicts"].get(rule) == "rejected")


def _passes(rule: str, row: Row) -> bool:
    return row["verdicts"].get(rule) in ("seen", "unseen")


def _share(rows: Iterable[Row], rule: str) -> str:
    here = _judged(rows, rule)
    return f"{sum(_rejects(rule, r) for r in here)} of {len(here)}" if here else NONE


def _main(rows: Sequence[Row], rules: Sequence[Row]) -> str:
    wrong = [r for r in rows if not r["right"]]
    lines = []
    for name, title in ((rule["name"], rule["title"]) for rule in rules):
        seen = [r for r in wrong if r["verdicts"].get(name) == "seen"]
        missed = [r for r in wrong if _passes(name, r)]
        taken = [r["seconds"][name] for r in _judged(rows, name)]
        caught = (_share((r for r in wrong if r["group"] == g), name) for g in GROUPS)
        visible = f"{len(seen)} of {len(missed)}" if name != rules[0]["name"] else NONE
        alarms = _share((r for r in rows if r["right"]), name)
        lines.append([title, *caught, visible, alarms, f"{statistics.median(taken):.2f}" if taken else NONE])
    heads = ["rule", *(f"caught: {words}" for words in GROUPS.values())]
    return table([*heads, "visible among the missed", "false alarms", "seconds, median"], lines)


def _explained(rows: Sequence[Row]) -> str:
    right = sum(r["right"] for r in rows)
    return (
        f"{len(rows) - right} wrong functions and kernels, {right} right ones. *Caught*: among those that the rule "
        "judges; a rule does not judge what its harness skips, or what it has no samples for. *Visible among the "
        "missed*: wrong functions that the rule accepts although a value that it compares is beyond the error of "
        "rounding: the comparison misses them, not the inputs. *False alarms*: right functions that it rejects."
    )


def _kinds(rows: Sequence[Row], rules: Sequence[Row]) -> str:
    kinds = dict.fromkeys(r["kind"] for r in rows if r["kind"])

    def passing(kind: str, rule: str) -> str:
        here = _judged((r for r in rows if r["kind"] == kind), rule)
        return f"{sum(_passes(rule, r) for r in here)} of {len(here)}" if here else NONE

    lines = [[kind, *(passing(kind, rule["name"]) for rule in rules)] for kind in kinds]
    return table(["passing", *(rule["title"] for rule in rules)], lines)


def _alarms(rows: Sequence[Row], rules: Sequence[Row]) -> str:
    titles = {rule["name"]: rule["title"] for rule in rules}
    lines = [
        [r["name"], ", ".join(by)] for r in rows if r["right"] and (by := [titles[n] for n in titles if _rejects(n, r)])
    ]
    return table(["right, and rejected", "by"], lines, words=2) if lines else "None."


def _rule(rule: Row) -> str:
    by_commit: dict[tuple[str, str], list[str]] = {}
    for s in rule["sources"]:
        by_commit.setdefault((s["repository"], s["at"]), []).append(s["path"])
    where = "; ".join(f"{repository}, {', '.join(paths)}, {at[:12]}" for (repository, at), paths in by_commit.items())
    own = ", ".join(f"`{op}`" for op in rule["own"])
    said = rule["rule"][:1].upper() + rule["rule"][1:]
    cut = f" Cut to a CPU's size: {'; '.join(rule['cut'])}." if rule["cut"] else ""
    return (
        f"**{rule['title']}** ({where}). {said}. Inputs: {rule['inputs']}. Tasks of its own for "
        f"{own or 'no op here'}.{cut}"
    )
