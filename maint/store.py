"""The stored results of a checkout: the rows and fields of each run that a published table, plot or page shows.

``benchmarks/results/<benchmark>.jsonl`` holds the runs of a benchmark, one after another: a line with the run's header
and its columns (:class:`Column`), then a line for each row. ``"="`` repeats the text of the row above, and
``"=12 and"`` its first 12 characters, followed by "and"; null or a shorter row means an absent value. Most
fractions have five digits. Other data of a run, such as the texts of failures, remain in the file that the run wrote.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from portakern.files import write_atomically
from portakern.results import BENCHMARKS, Result, ResultError

__all__ = ["FOLDER", "Row", "newest", "read", "shown", "write"]

FOLDER = "benchmarks/results"
Row = Mapping[str, Any]
SAME = "="
HEAD = ("name", "benchmark", "command", "date", "device", "environment", "commit")


class Column(NamedTuple):
    """A column's name; ``inner``: the names of what its objects hold; ``many``: whether it has lists of objects."""

    name: str
    inner: list[str] | None = None
    many: bool = False


@dataclass(frozen=True)
class Shown:
    """The fields of a benchmark that are stored.

    Attributes:
      row: fields of a row, beside its key. extra: of a run. short: field -> what makes its value shorter.
      made: what a row becomes before; None: it is not kept.
      digits: of fractions in rows; 17 hold every float, where differences count.
    """

    row: str = ""
    extra: str = ""
    short: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    made: Callable[[Row], Row | None] = lambda row: row
    digits: int = 5

    def columns(self, benchmark: str) -> list[str]:
        """What a row holds: its key, its op if it has one, and the rest."""
        form = BENCHMARKS[benchmark]
        return list(dict.fromkeys([*form.key, *(n for n in ("op",) if n in form.row), *self.row.split()]))


def _combinations(combinations: Mapping[str, int]) -> dict[str, int]:
    """Cases by dtype, and whether in the default tiling."""
    found = Counter[str]()
    for combination, count in combinations.items():
        dtype, *_, tiling = combination.split(" | ")
        found[f"{dtype} | {'default' if tiling == 'default' else 'drawn'}"] += count
    return dict(found)


def _compiled(row: Row) -> Row | None:
    """Of a forward call the one that nobody differentiates."""
    return None if row.get("direction") == "training" else row


def _bench(row: Row) -> Row:
    """Of peers only how they did."""
    return row if row["subject"] else {n: v for n, v in row.items() if n not in OURS.split()}


def _without_peers_sources(row: Row) -> Row:
    """Of peers only what was found."""
    return {n: v for n, v in row.items() if n not in SOURCE.split()} if row["peer"] else row


def _judged(row: Row) -> Row:
    """What each rule said: rejected, passed what was to be seen, passed the rest, or nothing."""
    said = dict.fromkeys(row["rejected"], "rejected") | {n: "seen" if v else "unseen" for n, v in row["passed"].items()}
    said |= dict.fromkeys(row["silent"], "silent")
    return {**row, "verdicts": dict(sorted(said.items())), "seconds": dict(sorted(row["seconds"].items()))}


def _mutant(row: Row) -> Row:
    """What a fault is, where a seed missed it."""
    caught = bool(row["seeds"]) and all(s.get("caught") for s in row["seeds"].values())
    return {**row, "what": None} if caught else row


def _only(*names: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    return lambda told: {n: told[n] for n in names if told.get(n) is not None}


def _kernel(kernel: Mapping[str, Any]) -> dict[str, Any]:
    """A kernel without what is so of most: one core, and matrix instructions that do not wait."""
    return {n: v for n, v in _only(*KERNEL)(kernel).items() if (n, v) not in (("cores", 1), ("serialised", []))}


def _each(short: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda told: [short(t) for t in told] if isinstance(told, list) else {n: short(t) for n, t in told.items()}


KERNEL = (
    "launches", "registers", "spills", "on_chip", "occupancy", "matrix", "cycles", "issued", "moved", "cores",
    "serialised",
)  # fmt: skip
OURS = "best_us worst_us host_us flop_rate byte_rate limited_by roof_share best_peer ratio"
SOURCE = "backend variant target sources"
SHOWN: Mapping[str, Shown] = {
    "bench": Shown(f"subject verdict median_us {SOURCE} date error {OURS}", "not_timed left_out", made=_bench),
    "compile-matrix": Shown("ok reason tiling kernels", "limits", {"kernels": _each(_kernel)}, _compiled),
    "conformance": Shown(
        f"{SOURCE} commit examples worst passed laws combinations not_emulated seconds",
        short={"combinations": _combinations, "laws": lambda laws: {"all": sum(laws.values())}},
    ),
    "judges": Shown("right kind verdicts seconds", "rules tasks", made=_judged),
    "kernelbench": Shown("commit verdict seconds cases full_shapes", "left_out"),
    "mutants": Shown(
        "backend seeds flat_tolerance max_error small what",
        "tasks kernels",
        {
            "seeds": _each(_only("caught", "examples")),
            "flat_tolerance": _each(lambda f: f),
            "kernels": _each(_only("backend", "op", "seed", "calls", "false_alarms", "failed", "error", "what")),
        },
        _mutant,
    ),
    "machine_faults": Shown("target caught detected_by kind"),
    "tune": Shown("family default best loss tried refused exhausted", "keys_left"),
    "tpu-legal": Shown(
        "backend variant sources tilings refused largest_share large_tilings smallest_ratio median_ratio seconds"
    ),
    "tpu-cycles": Shown(
        "portakern over_xla over_flash over_splash", "wall_seconds", {"portakern": _only("least", "around")}
    ),
    "model-step": Shown("peak_gib ms best_ms worst_ms kernels gradients_apart errors why", "sizes"),
    "invariance": Shown(f"peer cases same failed largest {SOURCE}", made=_without_peers_sources),
    "sanitizer": Shown("variant examples errors problem"),
    "launch": Shown("median_us", "graphs"),
    "fuzz": Shown("calls", "calls worst slowest_seconds broken"),
    "character_model": Shown("final", "steps mean standard_error difference in_standard_errors", digits=17),
    "train": Shown("compiled step_ms memory_gib final", "size steps"),
    "serve": Shown("steps seconds drawn read drawn_a_second agree", "size"),
}
"""A benchmark whose runs nothing shows has no entry, and is refused."""


def shown(run: Result) -> Result:
    """A run without what nothing shows."""
    kept = SHOWN.get(run.benchmark)
    if kept is None:
        raise ResultError(f"{run.file}: no table shows results of {run.benchmark}; expected one of {', '.join(SHOWN)}")
    names = kept.columns(run.benchmark)
    rows = [
        {
            n: _few_digits(kept.short[n](row[n]) if n in kept.short else row[n], kept.digits)
            for n in names
            if row.get(n) is not None
        }
        for row in filter(None, map(kept.made, run.rows))
    ]
    extra = {
        n: kept.short[n](run.extra[n]) if n in kept.short else run.extra[n]
        for n in kept.extra.split()
        if n in run.extra
    }
    return replace(run, rows=rows, extra=extra)


def _few_digits(value: Any, digits: int) -> Any:
    """A value whose fractions have so many significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {name: _few_digits(v, digits) for name, v in value.items()}
    return [_few_digits(v, digits) for v in value] if isinstance(value, list) else value


def newest(runs: Iterable[Result]) -> dict[tuple[Any, ...], tuple[Row, Result]]:
    """What was measured -> its row and run: of what several runs on one device measured, the newest, but where an
    earlier one tried more cases of the same sources. A row that an earlier run left in a file has its own date."""
    found: dict[tuple[Any, ...], tuple[Row, Result]] = {}
    rows = [(row, r) for r in runs for row in r.rows]
    for row, r in sorted(rows, key=lambda x: (x[0].get("date") or x[1].date, x[1].name)):
        key = (r.benchmark, r.device, *r.key(row))
        if key not in found or not _stands(found[key][0], row):
            found[key] = row, r
    return found


def _stands(before: Row, row: Row) -> bool:
    """Whether an earlier row still says more than a later one, of as many drawn cases as its ``examples``: both are of
    the same sources, and the later one found nothing in fewer cases."""
    same = before.get("sources") is not None and before["sources"] == row.get("sources")
    return same and bool(row.get("passed")) and row.get("examples", 0) < before.get("examples", 0)


# -------------------------------------------------------------------------------------------------------------- files
def read(folder: Path) -> list[Result]:
    """The runs of a folder, by their names."""
    return sorted((run for file in folder.glob("*.jsonl") for run in _runs(file)), key=lambda run: run.name)


def _runs(file: Path) -> list[Result]:
    found: list[Result] = []
    rows: list[list[Row]] = []
    columns: list[Column] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            told = json.loads(line)
            if isinstance(told, dict):
                columns = [Column(*c) for c in told.pop("columns")]
                head = {n: told.pop(n, None) for n in HEAD}
                rows.append([])
                found.append(Result(file=file, rows=rows[-1], extra=told, **head))
            else:
                rows[-1].append(_decoded(columns, told, rows[-1][-1] if rows[-1] else {}))
        except (ValueError, KeyError, TypeError, IndexError) as e:
            raise ResultError(f"{file}, line {number}: is not a line of stored results: {e}") from e
    return found


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _column(name: str, rows: list[Row]) -> Column:
    """How the values of a column are written: as they are, or objects as their values in one order, if shorter."""
    values = [row[name] for row in rows if name in row]
    many = isinstance(values[0], list)
    inner = [v for value in values for v in (value if many else [value])]
    if not all(isinstance(v, dict) for v in inner):
        return Column(name)
    ordered = Column(name, list(dict.fromkeys(n for v in inner for n in v)), many)
    if any([n for n in ordered.inner or () if n in v] != [*v] for v in inner):  # the order in which they stand is shown
        return Column(name)
    return min(Column(name), ordered, key=lambda c: sum(len(_text(_encoded([c], {name: v}, {}))) for v in values))


def _encoded(columns: list[Column], row: Row, above: Row) -> list[Any]:
    found: list[Any] = []
    for name, inner, many in columns:
        value = row.get(name)
        if isinstance(value, str):
            value = _after(above.get(name), value)
        elif value is not None and inner is not None:
            value = [_trimmed([v.get(n) for n in inner]) for v in (value if many else [value])]
            value = value if many else value[0]
        found.append(value)
    return _trimmed(found)


def _after(above: Any, text: str) -> str:
    """A text by what it has in common with the one above, where that is shorter (see :func:`_decoded_text`)."""
    above = above if isinstance(above, str) else ""
    common = next((n for n, (a, b) in enumerate(zip(above, text, strict=False)) if a != b), min(len(above), len(text)))
    if text and text == above:
        return SAME
    coded = f"{SAME}{common} {text[common:]}"
    return coded if len(coded) < len(text) or text.startswith(SAME) else text


def _decoded_text(above: Any, coded: str) -> str:
    if not coded.startswith(SAME):
        return coded
    if coded == SAME:
        return str(above)
    common, rest = coded.removeprefix(SAME).split(" ", 1)
    return str(above or "")[: int(common)] + rest


def _trimmed(values: list[Any]) -> list[Any]:
    while values and values[-1] is None:
        values.pop()
    return values


def _decoded(columns: list[Column], values: list[Any], above: Row) -> Row:
    found: dict[str, Any] = {}
    for (name, inner, many), value in zip_longest(columns, values):
        if isinstance(value, str):
            found[name] = _decoded_text(above.get(name), value)
        elif value is None or inner is None:
            found[name] = value
        else:
            told = [
                {n: v for n, v in zip(inner, o, strict=False) if v is not None} for o in (value if many else [value])
            ]
            found[name] = told if many else told[0]
    return found


def write(folder: Path, benchmark: str, runs: Iterable[Result]) -> None:
    """Write the runs of a benchmark, which are as :func:`shown`, without rows in whose place a newer one stands, and
    without runs that have no others."""
    runs = sorted(runs, key=lambda r: r.name)
    stands = {id(row) for row, _ in newest(runs).values()}
    lines = []
    for run in runs:
        rows = [row for row in run.rows if id(row) in stands]
        columns = [_column(n, rows) for n in SHOWN[benchmark].columns(benchmark) if any(n in row for row in rows)]
        head = {n: getattr(run, n) for n in HEAD}
        lines += (
            [_text({**head, **run.extra, "columns": [_trimmed([c.name, c.inner, c.many or None]) for c in columns]})]
            if rows
            else []
        )
        lines += [_text(_encoded(columns, row, above)) for row, above in zip(rows, [{}, *rows], strict=False)]
    write_atomically(folder / f"{benchmark}.jsonl", "".join(f"{line}\n" for line in lines))
