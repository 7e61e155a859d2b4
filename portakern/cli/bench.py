"""``portakern bench``: device time beside the measured roof and every peer, and no time without a verdict."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from portakern import results
from portakern.cli.common import app, check_device, check_dtypes, err, errors_only, json_into, out, progress_bar, say
from portakern.core import registry
from portakern.errors import SpecError, UnavailableError, UnsupportedError

if TYPE_CHECKING:
    from portakern.tools.bench.plan import BenchPlan
    from portakern.tools.bench.resuming import Earlier
    from portakern.tools.bench.session import Outcome
    from portakern.tools.bench.suites import TimedCase


EveryPeer = Annotated[
    bool,
    typer.Option(
        "--every-peer",
        help="Time each peer on every call, even if it was wrong or twice as slow as the best on two calls of a suite.",
    ),
]

RowsFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="[FILE]",
        help="Also write rows to this file; calls already in it are not timed again. Without a file, or with -, print.",
    ),
]


@app.command()
def bench(
    context: typer.Context,
    ops: Annotated[list[str] | None, typer.Argument(help="Ops to time. Default: all.")] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Backend to time, with all its variants; may be repeated. Default: all that compile here."),
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option(help="Peer or backend to compare with; may be repeated. Default: all peers.")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="A typical call with these values, e.g. m=4096,is_causal=true, instead of suites; may be repeated."
        ),
    ] = None,
    suite: Annotated[list[str] | None, typer.Option(help="Time the calls of this suite only; may be repeated.")] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Only this dtype; may be repeated. Default: the dtypes of the suites.")
    ] = None,
    gradients: Annotated[bool, typer.Option(help="Also time the gradients.")] = True,
    device: Annotated[str | None, typer.Option(help="cuda, rocm, tpu or cpu. Default: the accelerator here.")] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Samples of each contender; contenders alternate.")] = 20,
    budget: Annotated[float, typer.Option(min=1, help="Seconds after which no further call is started.")] = 450.0,
    jobs: Annotated[
        int | None, typer.Option(min=0, help="Processes that compile in advance; 0: none. Default: cores minus 1.")
    ] = None,
    json_file: RowsFile = None,
    fresh: Annotated[bool, typer.Option(help="Time the calls that are already in the --json file again.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also write plots to this folder.")] = None,
    every_peer: EveryPeer = False,
) -> None:
    """Measure the device time of ops, their peers and the measured roof. Each result is checked against its error bound
    before it is timed. Exit status 1 if a result of the backend is wrong.
    """
    start = time.perf_counter()
    from portakern.tools.bench.background import set_environment

    set_environment()
    json_file = json_into(context, "bench", json_file)
    check_device("bench", device)
    _check_arguments(ops, suite, shape, dtype, plot, [*(backend or ()), *(against or ())])
    errors_only(context)
    from portakern.tools.bench.contenders import absent, against_named, by_platform
    from portakern.tools.bench.plan import BenchPlan
    from portakern.tools.bench.resuming import Earlier, read

    earlier = read(json_file, device == "cpu") if json_file and not fresh else Earlier()
    subjects = [registry.backend(b) for b in backend] if backend else _compiling_here(device)
    cases = _cases(ops, suite, shape, dtype, gradients, any_cpu=device == "cpu")
    if not cases:
        raise SpecError("bench: no call matches the given ops, dtypes and suites; change them, or pass --shape")
    found = _RowFile(json_file, start, earlier)
    named = [b for b in against_named(against) if b not in subjects]
    found.not_timed |= absent(named)
    for measured in by_platform(subjects, device):
        _measure(found.left(BenchPlan(cases, measured, named, device, rounds, budget, every_peer)), jobs, found)
    found.show(plot)
    if found.wrong():
        raise typer.Exit(1)


def _measure(plan: BenchPlan, jobs: int | None, found: _RowFile) -> None:
    """Time, while other processes compile ahead where kernels are compiled."""
    if not plan.cases:
        return
    from portakern.tools.bench.background import references, warm_up
    from portakern.tools.bench.contenders import here
    from portakern.tools.bench.session import Helped, run
    from portakern.tools.bench.trial import DeviceLost
    from portakern.tools.bench.workers import workers

    framework, device, target = here(plan.lead, plan.device)
    names = " and ".join(b.name for b in plan.subjects)
    cores = (max((os.cpu_count() or 2) - 1, 1) if jobs is None else jobs) if target.platform != "cpu" else 0
    shared = framework.instruments(device).shared
    with (
        progress_bar() as bar,
        references(plan.cases, target, (cores + 2) // 3) as expected,  # of a sum over rows each takes up to 15 GB
    ):
        task = bar.add_task("compiling the first call", total=len(plan.cases))

        def done(outcome: Outcome, case: TimedCase) -> None:
            found.take(names, outcome)
            bar.update(task, advance=1, description=f"{case.timed} {case.dtype}: {found.last()}"[:60])

        with warm_up(plan, cores if shared else 0) as warm, workers(plan, warm) as timing:
            helped = Helped(expected, warm, timing)
            found.ahead = helped.visits
            try:
                found.take(names, run(plan, done, found.start, helped))
            except DeviceLost as e:
                found.show()
                say(str(e), style="red", to=err)
                raise typer.Exit(1) from None


def _check_arguments(
    ops: list[str] | None,
    suite: list[str] | None,
    shape: list[str] | None,
    dtype: list[str] | None,
    plot: Path | None,
    backends: list[str],
) -> None:
    """SpecError for wrong arguments, before anything runs."""
    from portakern.tools.bench import suites

    for name in ops or ():
        registry.find_spec(name)
    for name in backends:
        registry.backend(name)
    for name in suite or ():
        if name not in suites.names():
            raise SpecError(f"bench: --suite is {name!r}; expected one of {', '.join(suites.names())}")
    if shape and suite:
        raise SpecError("bench: --shape and --suite exclude each other; pass one of them")
    if shape and not ops:
        raise SpecError("bench: --shape needs an op; name it: portakern bench matmul --shape m=4096,n=4096,k=4096")
    check_dtypes("bench", dtype)
    if plot and plot.exists() and not plot.is_dir():
        raise SpecError(f"bench: --plot is {plot}, a file; expected a folder")


def _compiling_here(device: str | None) -> list[Any]:
    """The backends that compile for an accelerator here; UnsupportedError lists why none does."""
    from portakern.tools.bench.contenders import ELSE, here

    found, why = [], []
    for b in registry.backends().values():
        if not b.oracle and b.auto:
            try:
                here(b, device)
                found.append(b)
            except (UnsupportedError, UnavailableError) as e:
                why.append(str(e))
    if not found:
        why = [reason.removesuffix(f"; {ELSE}") for reason in why]
        raise UnsupportedError("; ".join([*why, ELSE]))
    return found


def _cases(
    ops: list[str] | None,
    suite: list[str] | None,
    shape: list[str] | None,
    dtype: list[str] | None,
    gradients: bool,
    any_cpu: bool,
) -> list[TimedCase]:
    """The cases in the order in which they are timed. On a CPU, whose interpreters are slow, samples unless a suite is
    named; what is typical of an op that stands in no suite."""
    from portakern.tools.bench import suites

    if shape:
        given = [suites.parse_shape(text) for text in shape]
        return [
            c
            for extents in given
            for name in ops or ()
            for c in suites.requested_cases(name, extents, dtype, gradients)
        ]
    named = suite or ([suites.SAMPLES] if any_cpu else [n for n in suites.names() if n != suites.SAMPLES])
    cases = [
        c for name in named for c in suites.cases_of(name, dtype, gradients) if not ops or {c.op, c.timed} & {*ops}
    ]
    if not suite and not any_cpu:
        covered = {c.timed for c in cases if c.suite != suites.TYPICAL}
        cases = [c for c in cases if c.suite != suites.TYPICAL or c.timed not in covered]
    return suites.in_order(cases)


NOTED = 0.5
"""Seconds of a first call, compilers included, from which they are worth a word."""

DEAREST = 5
"""Calls that are named for what they cost."""

NAMES = 18
"""Columns that the name of a contender takes, with what stands before and behind it."""


class _RowFile:
    """What was found so far, in a file as it comes."""

    def __init__(self, file: Path | None, start: float, earlier: Earlier) -> None:
        self.file, self.start, self.earlier = file, start, earlier
        self.hold = set(earlier.rows)
        self.outcomes: dict[str, Any] = {}
        self.ahead: Mapping[str, float] = {}
        self.not_timed: dict[str, str] = {}

    @property
    def timed(self) -> list[dict[str, Any]]:
        """What this run found."""
        return [row for outcome in self.outcomes.values() for row in outcome.rows]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The file's: what an earlier run found of a call stays until this one has timed it, though it may not hold."""
        anew = {(r["call"], r["target"]) for r in self.timed}
        return [r for place, rows in self.earlier.rows.items() if place not in anew for r in rows] + self.timed

    @property
    def holding(self) -> list[dict[str, Any]]:
        """Of those, what holds."""
        return [r for r in self.rows if (r["call"], r["target"]) in self.hold] + self.timed

    def left(self, plan: BenchPlan) -> BenchPlan:
        """The plan without the cases whose rows an earlier run found."""
        plan, stay = self.earlier.left(plan)
        self.hold &= stay.keys()
        return plan

    def take(self, subjects: str, outcome: Any) -> None:
        self.outcomes[subjects] = outcome
        if self.file and self.timed:  # a run that timed nothing has nothing to say of when rows were found
            results.write(self.file, self.record(self.rows))

    def gone(self) -> dict[str, int]:
        """Contenders of whom an earlier run's times went with those of a call that was timed anew, without them."""
        there = {(r["call"], r["target"], r["contender"]) for r in self.timed}
        anew = {place[:2] for place in there}
        went = [r for place in anew & self.earlier.rows.keys() for r in self.earlier.rows[place]]
        return Counter(r["contender"] for r in went if (r["call"], r["target"], r["contender"]) not in there)

    def record(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        rates = {**self.earlier.rates, **{n: r for o in self.outcomes.values() for n, r in o.rates.items()}}
        left = [f"{c.timed} {c.dtype} of {c.suite}" for outcome in self.outcomes.values() for c in outcome.left_out]
        device = results.HOST_CPU if all(r["target"].startswith("cpu") for r in rows) else None
        seconds = round(self.earlier.wall_seconds + time.perf_counter() - self.start, 1)
        ahead = Counter(self.earlier.background_seconds) + Counter(self.ahead)
        return results.record(
            "bench", rows, command=results.command_line("portakern", self.file), device=device,
            wall_seconds=seconds, seconds=self.seconds(), background_seconds=_rounded(ahead),
            rates={n: round(r) for n, r in rates.items()}, not_timed=self.not_timed, left_out=left,
            call_seconds=_rounded(self.call_seconds()),
        )  # fmt: skip

    def seconds(self) -> dict[str, float]:
        """Where the seconds of the runs that made the rows went, from most to least."""
        found = Counter(self.earlier.seconds)
        for outcome in self.outcomes.values():
            found.update(outcome.spent.seconds)
        return _rounded(found)

    def call_seconds(self) -> dict[str, float]:
        """The seconds that each call cost this run."""
        return {call: s for outcome in self.outcomes.values() for call, s in outcome.call_seconds.items()}

    def last(self) -> str:
        """The subjects' last result, for the progress bar."""
        mine = [r for r in self.holding if r["subject"]]
        if not mine:
            return ""
        if mine[-1].get("interpreted"):
            return "interpreted"
        return f"{mine[-1]['ratio']:.2f} of the best peer's speed" if mine[-1].get("ratio") else mine[-1]["verdict"]

    def wrong(self) -> bool:
        return any(r["subject"] and r["verdict"] in ("wrong", "failed") for r in self.holding)

    def show(self, plots: Path | None = None) -> None:
        """Print it, and draw it into a folder where one is named."""
        if self.hold:
            say(f"{len(self.hold)} calls are already in {self.file} and were not timed again; --fresh times them again")
        if self.file and (gone := self.gone()):
            names = ", ".join(f"{name} of {n} calls" for name, n in gone.items())
            say(f"{self.file} no longer has the times of {names}: all times of a call come from one run; add --against")
        if self.file and (aged := len(self.rows) - len(self.holding)):
            say(f"{aged} rows of {self.file} are stale (their sources have changed) and were not timed again")
        calls: dict[str, list[dict[str, Any]]] = {}
        for row in self.holding:
            calls.setdefault(row["call"], []).append(row)
        for call, rows in calls.items():
            say(call, style="bold")
            for row in sorted(rows, key=lambda r: (r.get("median_us") is None, r.get("median_us") or 0.0)):
                style = "red" if row["verdict"] in ("wrong", "failed") else "bold" if row["subject"] else ""
                for line in _lines(row, out.width):
                    say(line, style=style)
        spent = ", ".join(f"{what} {s:.0f}" for what, s in self.seconds().items() if s >= NOTED)
        say(f"seconds: {spent}")
        dearest = "; ".join(f"{call} {s:.1f}" for call, s in [*_rounded(self.call_seconds()).items()][:DEAREST])
        if dearest:
            say(f"seconds of the slowest calls: {dearest}")
        for name, why in self.not_timed.items():
            say(f"{name} is not timed: {why}")
        for subjects, outcome in self.outcomes.items():
            rates = ", ".join(_rate(n, r) for n, r in outcome.rates.items())
            say(f"measured roof on the device of {subjects}: {rates}")
            for case, why in outcome.unserved:
                say(f"{case.timed} {case.dtype} of {case.suite} cannot be timed: {why}", style="red")
            if outcome.left_out:
                names = ", ".join(dict.fromkeys(f"{c.timed} of {c.suite}" for c in outcome.left_out))
                text = f"{len(outcome.left_out)} calls were not timed, the budget ended: {names}; raise --budget"
                say(text, style="yellow")
        if plots:
            from portakern.tools.bench.plots import draw_into

            for path in draw_into(plots, self.record(self.holding)):
                out.print(f"wrote {path}", markup=False, highlight=False)


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {what: round(s, 1) for what, s in sorted(seconds.items(), key=lambda x: -x[1])}


def _rate(name: str, rate: float) -> str:
    return f"{name} {rate / 1e9:,.0f} GB/s" if name == "copy" else f"{name} {rate / 1e12:,.3g} TFLOP/s"


def _lines(row: dict[str, Any], width: int) -> list[str]:
    """A contender as a line, or several where the terminal is narrow, with no figure apart from its words."""
    lines = [f"  {row['contender']:{NAMES - 3}}"]
    for part in _parts(row):
        first = len(lines[-1]) <= NAMES - 1
        if not first and len(lines[-1]) + len(part) + 3 > width:  # a comma, a space, and a comma behind it
            lines[-1] += ","
            lines.append(" " * (NAMES - 1))
            first = True
        lines[-1] += f" {part}" if first else f", {part}"
    return lines


def _parts(row: dict[str, Any]) -> list[str]:
    """What is said of a contender: one that is wrong, or took no part, has no times."""
    off = f", {row['error']:.3g} times its bound" if row.get("error") is not None else ""
    if row.get("median_us") is None:
        return [f"{row['verdict']}: {row['why']}{off}"]
    by_memory = row["limited_by"] == "copy"
    rate = f"{row['byte_rate'] / 1e9:,.0f} GB/s" if by_memory else f"{row['flop_rate'] / 1e12:,.3g} TFLOP/s"
    parts = [
        f"{row['median_us']:,.1f} us ({row['best_us']:,.1f} to {row['worst_us']:,.1f})",
        "time of the interpreter, not of a device" if row.get("interpreted") else "",
        f"host {row['host_us']:,.0f} us",
        "" if row.get("interpreted") else rate,
        f"{row['roof_share']:.0%} of the roof" if row["roof_share"] is not None and not row.get("interpreted") else "",
        f"{row['ratio']:.2f} of the best peer's speed" if row.get("ratio") is not None else "",
        f"error {row['error']:.2f} of the bound" if row["error"] is not None else "",
        f"first call {row['first_s']:.1f} s" if row["first_s"] >= NOTED else "",
        f"clock: {row['clock']}" if row["clock"] not in ("events", "queue") else "",
    ]
    return [p for p in parts if p]
