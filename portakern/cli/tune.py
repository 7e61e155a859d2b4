"""``portakern tune``: search for the best legal tilings, check them and write them to a table."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from portakern import results
from portakern.cli.common import JsonFile, app, check_dtypes, errors_only, json_into, progress_bar, say, show_table
from portakern.core import registry
from portakern.errors import SpecError

Ops = Annotated[list[str] | None, typer.Argument(help="Ops to tune. Default: all, or those of --suite.")]
Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--target", help="Architecture, e.g. sm_90 or v6e, present or not; may be repeated. Default: the one here."
    ),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        help="Dimensions and options that differ from the op's typical call, e.g. m=64,n=4096; may be repeated.",
    ),
]
Dtypes = Annotated[
    list[str] | None,
    typer.Option("--dtype", help="Only this dtype; may be repeated. Default: bfloat16, or the op's first."),
]
Suites = Annotated[list[str] | None, typer.Option("--suite", help="Tune the calls of this suite; may be repeated.")]
Families = Annotated[
    list[str] | None,
    typer.Option(
        "--loss",
        help="Measure the slowdown of the shipped tilings on random calls of this family, write none; may be repeated.",
    ),
]
Search = Annotated[str, typer.Option(help="auto, all, climb or optuna; auto tries all tilings of a small space.")]
Last = Annotated[bool, typer.Option(help="Compare the best few again: with more samples, or the compiler's estimates.")]
Ship = Annotated[bool, typer.Option("--ship", help="Write tilings to the checkout's tables, not to the user's cache.")]


@app.command()
def tune(
    context: typer.Context,
    ops: Ops = None,
    target: Targets = None,
    backend: Annotated[str | None, typer.Option(help="Only this backend.")] = None,
    variant: Annotated[str | None, typer.Option(help="Only this variant of a backend.")] = None,
    shape: Shapes = None,
    dtype: Dtypes = None,
    suite: Suites = None,
    loss: Families = None,
    draws: Annotated[int, typer.Option(min=1, help="With --loss: number of calls of each family.")] = 30,
    budget: Annotated[str | None, typer.Option(help="Time limit of the search: 90s, 5m, 1h. Default: none.")] = None,
    tries: Annotated[int, typer.Option(min=1, help="Most tilings to try for a call.")] = 96,
    search: Search = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random calls and tilings.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Compilations in parallel.")] = 1,
    timeout: Annotated[float, typer.Option(min=1, help="Time limit of one compilation, in seconds.")] = 120.0,
    last: Last = True,
    ship: Ship = False,
    fresh: Annotated[bool, typer.Option(help="Ignore the results of earlier runs.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Search for the fastest legal tilings: by device time, or by the compiler's estimates for an absent chip. Tilings
    with wrong results are reported and dropped. An interrupted run can resume. Exit status 1 if a result was wrong.
    """
    from portakern.tools.compile.pool import Pool
    from portakern.tools.tune.session import groups_of
    from portakern.tools.tune.session import tune as tune_groups
    from portakern.tools.tune.tuner import SearchPlan

    json_file = json_into(context, "tune", json_file)
    _check_arguments(dtype, bool(loss), bool(ops or suite or shape or ship))
    start, seconds = time.perf_counter(), _seconds(budget)
    errors_only(context)
    cases = _drawn(loss, draws, seed, dtype) if loss else _requested_cases(ops, suite, shape, dtype)
    keyless: list[str] = []
    groups = [
        g
        for t in (target or [None])  # type: ignore[list-item]
        for g in groups_of(cases, t, backend, variant, keyless.append)
    ]
    plan = SearchPlan(search, tries, max(16, jobs), seed=seed, last=last, rehearse=not loss,
                deadline=time.monotonic() + seconds)  # fmt: skip
    refused: list[tuple[Any, str]] = []
    with Pool(jobs, timeout) as pool, progress_bar() as bar:
        reporter = _Reporter(bar, len(groups), refused, json_file, start, seed)
        found, left = tune_groups(groups, plan, pool, reporter.callbacks, ship=ship, write=not loss, fresh=fresh)
    for why in dict.fromkeys(keyless):
        say(f"not searched: {why.removeprefix('tune: ')}", style="red")
    _show(found, refused, left, bool(loss), ship)
    if loss or suite:
        _show_losses([r for f in found for r in f.rows])
    if json_file and found:
        _write(json_file, found, start, seed, left)
    if not found or any(f.wrong for f in found):
        raise typer.Exit(1)


def _check_arguments(dtypes: list[str] | None, loss: bool, named: bool) -> None:
    """SpecError for wrong arguments, before the first candidate."""
    check_dtypes("tune", dtypes)
    if loss and named:
        raise SpecError(
            "tune: --loss measures random calls and writes nothing; leave out ops, --suite, --shape, --ship"
        )


def _seconds(text: str | None) -> float:
    if text is None:
        return math.inf
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if not match:
        raise SpecError(f"tune: --budget is {text!r}; expected a time, e.g. 90, 90s, 5m or 1h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def _drawn(families: Sequence[str], draws: int, seed: int, dtypes: list[str] | None) -> list[Any]:
    from portakern.tools.tune.sampled import draw

    return [a for family in families for a in draw(family, draws, seed, dtypes)]


def _requested_cases(
    ops: list[str] | None, suites: list[str] | None, shapes: list[str] | None, dtypes: list[str] | None
) -> list[Any]:
    """The calls of suites, of the ops that are named too, some of each first; else the ops' typical calls, or those in
    shapes."""
    from portakern.tools.bench.suites import cases_of, in_order, parse_shape, requested_cases

    if suites:
        if shapes:
            raise SpecError("tune: --shape and --suite exclude each other; pass one of them")
        cases = in_order([c for name in suites for c in cases_of(name, dtypes)])
        found = [c for c in cases if not ops or c.timed in ops]
        if not found:
            named = ", ".join(ops or ["any op"])
            raise SpecError(f"tune: {', '.join(suites)} has no call of {named}; name another op or suite")
        return found
    given = [parse_shape(text) for text in shapes or []] or [{}]
    specs = [registry.find_spec(name) for name in ops or registry.loadable()]
    if not ops:
        specs = [s for s in specs if s.typical or s.is_vjp]
    return [
        c
        for s in specs
        for g in given
        for c in requested_cases(s.name, g, dtypes or s.usual_dtypes[:1], gradients=False)
    ]


class _Reporter:
    """Shows the progress of a tuning, and writes the results up to now."""

    def __init__(
        self, bar: Progress, keys: int, refused: list[tuple[Any, str]], file: Path | None, start: float, seed: int
    ) -> None:
        from portakern.tools.tune.session import Callbacks

        self.bar, self.refused_so_far, self.file, self.start, self.seed = bar, refused, file, start, seed
        self.keys = keys
        self.task = bar.add_task("tuning", total=keys)
        self.found_so_far: list[Any] = []
        self.callbacks = Callbacks(self.progress, self.found, self.refused)

    def progress(self, p: Any) -> None:
        on = p.group.on
        best = ", ".join(f"{n}={v}" for n, v in p.best.items())
        text = f"{on.impl.op} for {on.target}: {p.tried} tried, best {p.ratio:.2f} of the shipped ({best})"
        self.bar.update(self.task, description=text)

    def found(self, finding: Any) -> None:
        self.bar.advance(self.task)
        self.found_so_far.append(finding)
        if self.file:  # who is ended now leaves what it did not reach
            left = self.keys - len(self.found_so_far) - len(self.refused_so_far)
            _write(self.file, self.found_so_far, self.start, self.seed, left)

    def refused(self, group: Any, why: str) -> None:
        self.bar.advance(self.task)
        self.refused_so_far.append((group, why))


def _write(file: Path, found: Sequence[Any], start: float, seed: int, left: int) -> None:
    measured = {f.group.on.chip for f in found if f.group.on.is_here and f.group.on.target.platform != "cpu"}
    device, command = ", ".join(sorted(measured)) or results.HOST_CPU, results.command_line("portakern", file)
    rows = {tuple(r[n] for n in results.BENCHMARKS["tune"].key): r for f in found for r in f.rows}
    seconds = round(time.perf_counter() - start, 1)
    results.write(
        file,
        results.record(
            "tune", [*rows.values()], command=command, device=device, wall_seconds=seconds, seed=seed, keys_left=left
        ),
    )


def _show(found: Sequence[Any], refused: Sequence[tuple[Any, str]], left: int, loss: bool, ship: bool) -> None:
    from portakern.tools.tune.session import table_of

    rows = [r for f in found for r in f.rows]
    for r in rows:
        say(f"{r['call']} for {r['target']} by {r['backend']}, variant {r['variant']}", style="bold")
        best = " ".join(f"{n}={v}" for n, v in r["best_tiling"].items())
        say(
            f"  shipped {r['default']:g}, best of {r['tried']} {r['best']:g} {r['unit']} "
            f"({100 * r['loss']:+.1f} %): {best}"
        )
    if rows:
        say(f"metric: {'; '.join(dict.fromkeys(r['metric'] for r in rows))}")
    for finding in found:
        for key, why in finding.wrong.items():
            tiles = ", ".join(f"{n}={v}" for n, v in key)
            say(f"WRONG RESULT, tiling dropped: {finding.group.on.impl.op} with {tiles}: {why}", style="red")
        for key, why in finding.fatal.items():
            tiles = ", ".join(f"{n}={v}" for n, v in key)
            say(f"NOT RUN AGAIN: {finding.group.on.impl.op} with {tiles} {why}", style="red")
    for group, why in refused:
        say(f"left out: {group.on.impl.op}: {why}", style="red")
    if not found:
        why = (
            "no call can be tuned"
            if not refused and not left
            else "every call is refused"
            if not left
            else "the time ended"
        )
        say(f"nothing was searched: {why}", style="red")
    elif not loss:
        kept = [f for f in found if f.best is not None]
        tables = dict.fromkeys(str(table_of(f.group.on, ship)) for f in kept)
        say(
            f"wrote {len(kept)} of {len(found)}"
            + (f" in {', '.join(tables)}" if tables else ": no tiling is faster than the shipped one")
        )
    if left:
        say(f"the time ended: {left} keys are left; run the same command again to continue")


def _show_losses(rows: Sequence[Any]) -> None:
    """Median and worst of each family, or suite, and target, and what tuning gains, of the calls for which anything was
    tried."""
    from portakern.tools.tune.losses import figures, searched

    def kind(row: Any) -> tuple[str, str]:
        return row["target"], row["family"]

    tried = [r for r in rows if searched(r)]
    kinds = dict.fromkeys(map(kind, tried))
    heads = ["target", "family", "calls", "tried, median", "median", "worst", "beyond 5%", "beyond 15%", "gain"]
    show_table("Loss", heads, [[*k, *figures([r for r in tried if kind(r) == k])] for k in kinds])
    if len(tried) < len(rows):
        say(f"{len(rows) - len(tried)} calls were not tuned, the time ended")
