"""Files of results: one JSON file for each run, with a common header.

    {"schema": 1, "benchmark": "...", "command": "...", "date": "YYYY-MM-DD", "device": "...", "environment": {...},
    "commit": "...", "rows": [{...}, ...], ...}

The other keys and the fields of a row depend on the benchmark (:data:`BENCHMARKS`). A checkout stores the part that it
shows (``maint/store.py``).
"""

from __future__ import annotations

import datetime
import json
import logging
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from portakern import inventory, sources
from portakern.files import write_atomically

__all__ = [
    "BENCHMARKS",
    "EMULATED",
    "HOST_CPU",
    "SCHEMA",
    "Benchmark",
    "Result",
    "ResultError",
    "command_line",
    "read",
    "record",
    "write",
]

SCHEMA = 1
HOST_CPU = inventory.HOST_CPU
EMULATED = "emulated on the host"
"""The device of what ran in an emulator, for hardware that was not there."""

log = logging.getLogger("portakern")


class ResultError(ValueError):
    """A file of results that is not valid; the message names the file, the key, its value and what was expected."""


def _is_date(value: Any) -> bool:
    try:
        return isinstance(value, str) and datetime.date.fromisoformat(value).isoformat() == value
    except ValueError:
        return False


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "text": (lambda v: isinstance(v, str) and v != "", "a text that is not empty"),
    "string": (lambda v: isinstance(v, str), "a text"),
    "date": (_is_date, "a date like 2026-11-30"),
    "number": (_number, "a number"),
    "count": (lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0, "a whole number from 0 up"),
    "integer": (lambda v: isinstance(v, int) and not isinstance(v, bool), "a whole number"),
    "flag": (lambda v: isinstance(v, bool), "true or false"),
    "object": (lambda v: isinstance(v, dict), "an object"),
    "list": (lambda v: isinstance(v, list), "a list"),
    "numbers": (lambda v: isinstance(v, dict) and all(map(_number, v.values())), "an object of numbers"),
    "integers": (
        lambda v: isinstance(v, dict) and all(isinstance(x, int) for x in v.values()),
        "an object of whole numbers",
    ),
    "any": (lambda v: True, "anything"),
}
"""What a value may be, under the names that :class:`Benchmark` uses; with a ? behind, it may be null or absent too."""

HEADER = {
    "schema": "integer",
    "benchmark": "text",
    "command": "text",
    "date": "date",
    "device": "text",
    "environment": "object",
    "commit": "text?",
    "rows": "list",
}


@dataclass(frozen=True)
class Benchmark:
    """The fields of one benchmark's files.

    Attributes:
      key: the fields of a row that say what it measured; no two rows of a file share them.
      row: field of a row -> its kind. extra: key of the file beside the header -> its kind.
      nested: field of a row that is a list of objects -> the kinds of theirs.
    """

    key: tuple[str, ...]
    row: Mapping[str, str]
    extra: Mapping[str, str] = field(default_factory=dict)
    nested: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


_KERNEL = {
    "name": "text", "launches": "count", "threads": "count?", "registers": "count?", "spills": "count?",
    "on_chip": "integers", "granted": "integers?", "occupancy": "number?",
    "matrix": "integers", "code_bytes": "count?", "cycles": "count?", "issued": "count?", "moved": "count?",
    "cores": "count?", "assumed": "string?", "undefined": "list", "leaking": "list?", "serialised": "list?",
}  # fmt: skip
_FACT = {"name": "text", "value": "any", "unit": "string", "source": "text"}
_COUNTS = dict.fromkeys(("refused", "tilings_refused", "combinations", "layouts", "edges", "laws"), "integers")
_SOURCES = {"backend": "text?", "variant": "text?", "target": "text?", "commit": "text?", "sources": "text?"}
_MEDIAN = {"median_us": "number", "best_us": "number", "worst_us": "number"}

BENCHMARKS: Mapping[str, Benchmark] = {
    "conformance": Benchmark(
        ("op", "subject"),
        {"op": "text", "subject": "text", "seed": "integer", "examples": "count", "failures": "list",
         "worst": "numbers", "worst_case": "string", **_COUNTS,
         "seconds": "number", "passed": "flag", "checked": "list?", "not_required": "list?", "verdicts": "object?",
         "not_emulated": "integers?", "parts": "integers?", "outcome": "text?", "left_out": "count?",
         "left_out_by_name": "integers?",
         "not_reached": "list?", "not_covered": "object?", "coverage": "object?", "caveats": "list?",
         **_SOURCES},
        {"wall_seconds": "number"},
    ),
    "compile-matrix": Benchmark(
        ("op", "dtype", "target", "backend", "variant"),
        {"op": "text", "direction": "text", "dtype": "text", "target": "text", "backend": "text", "variant": "text?",
         "call": "string", "tiling": "integers", "ok": "flag",
         "reason": "text?", "final": "flag", "kernels": "list", "code_bytes": "count?", "seconds": "number"},
        {"wall_seconds": "number", "ok": "count", "of": "count", "limits": "object"},
        {"kernels": _KERNEL},
    ),
    "tune": Benchmark(
        ("op", "dtype", "call", "target", "backend", "variant"),
        {"op": "text", "family": "text", "dtype": "text", "call": "text", "target": "text", "backend": "text",
         "variant": "text", "metric": "text", "unit": "text", "default": "number", "best": "number",
         "default_tiling": "integers", "best_tiling": "integers", "kept_tiling": "integers", "loss": "number",
         "tried": "count", "refused": "count", "wrong": "count", "exhausted": "flag?", "comparisons": "list?"},
        {"wall_seconds": "number?", "seed": "integer?", "keys_left": "count?"},
    ),
    "bench": Benchmark(
        ("op", "dtype", "call", "contender"),
        {"suite": "text", "op": "text", "dtype": "text", "call": "text", "dims": "object", "contender": "text",
         "subject": "flag", "bytes": "count", "flops": "count", "verdict": "text", "why": "text?", "error": "number?",
         "errors": "object?", "tiling": "integers?", "first_s": "number?", **dict.fromkeys(_MEDIAN, "number?"),
         "host_us": "number?",
         "rounds": "count?", "clock": "text?", "flop_rate": "count?", "byte_rate": "count?", "roof_us": "number?",
         "limited_by": "text?", "roof_share": "number?", "best_peer": "text?", "ratio": "number?",
         "peak_bytes": "integer?",
         "date": "text?", "interpreted": "flag?", **_SOURCES},
        {"wall_seconds": "number", "seconds": "numbers?", "background_seconds": "numbers?", "call_seconds": "numbers?",
         "rates": "numbers",
         "not_timed": "object", "left_out": "list"},
    ),
    "launch": Benchmark(("op", "interface"), {"op": "text", "interface": "text", **_MEDIAN}, {"graphs": "list"}),
    "profile": Benchmark(
        ("op", "dtype", "call", "backend", "variant", "kernel"),
        {"op": "text", "dtype": "text", "call": "text", "kernel": "text", "launches": "count", "limited_by": "text",
         "facts": "list", "call_facts": "list", "missing": "object", **_SOURCES},
        nested={"facts": _FACT, "call_facts": _FACT},
    ),
    "binding": Benchmark(("framework",), {"framework": "text", "calls": "count", **_MEDIAN, "grown_bytes": "integer"}),
    "fuzz": Benchmark(
        ("verdict",),
        {"verdict": "text", "calls": "count"},
        {"calls": "count", "seed": "integer", "seconds": "number", "worst": "number", "slowest_seconds": "number",
        "broken": "list"},
    ),
    "mutants": Benchmark(
        ("name",),
        {"name": "text", "backend": "text", "op": "text", "what": "text", "small": "flag", "max_error": "number?",
        "error": "text?", "seeds": "object", "flat_tolerance": "object"},
        {"tasks": "text", "wall_seconds": "number", "summary": "object", "kernels": "list"},
    ),
    "judges": Benchmark(
        ("group", "name"),
        {"group": "text", "name": "text", "op": "text", "framework": "text", "right": "flag", "kind": "string",
         "rejected": "object", "passed": "object", "silent": "object", "seconds": "numbers", "sources": "text"},
        {"tasks": "text", "wall_seconds": "number", "rules": "list", "sources": "object"},
    ),
    "kernelbench": Benchmark(
        ("problem", "full_shapes"),
        {"problem": "text", "op": "text", "verdict": "text", "seconds": "number", "load_seconds": "number",
         "cases": "count", "left_out": "count", "worst": "numbers", "full_shapes": "flag", "not_required": "list",
         "why": "string", "commit": "text?"},
        {"repository": "text", "repository_commit": "string", "left_out": "object", "wall_seconds": "number"},
    ),
    "machine_faults": Benchmark(
        ("name",),
        {"name": "text", "op": "text", "target": "text", "kind": "text", "what": "text", "caught": "flag",
         "detected_by": "string"},
        {"wall_seconds": "number"},
    ),
    "invariance": Benchmark(
        ("op", "subject", "name", "along"),
        {"op": "text", "subject": "text", "peer": "flag", "name": "text", "along": "string",
         **dict.fromkeys(("cases", "same", "refused", "failed"), "count"), "largest": "number", "difference": "text?",
         "case": "text?", "shapes": "string?", "why": "text?", **_SOURCES},
        {"wall_seconds": "number"},
    ),
    "sanitizer": Benchmark(
        ("op", "backend", "variant", "tool"),
        {"op": "text", "backend": "text", "variant": "text?", "tool": "text", "examples": "count", "errors": "count?",
         "problem": "text?", "findings": "list?", "seconds": "number"},
    ),
    "character_model": Benchmark(
        ("ops", "seed"),
        {"ops": "text", "seed": "integer", "final": "number", "losses": "list"},
        {"steps": "count", "mean": "numbers", "standard_error": "number", "difference": "number",
        "in_standard_errors": "number"},
    ),
    "train": Benchmark(
        ("ops", "seed", "compiled"),
        {"ops": "text", "seed": "integer", "compiled": "flag", "step_ms": "number", "memory_gib": "number?",
         "final": "number", "losses": "list", "served": "list"},
        {"size": "text", "steps": "count"},
    ),
    "serve": Benchmark(
        ("ops", "graphs"),
        {"ops": "text", "graphs": "flag", **dict.fromkeys(("steps", "drawn", "read", "agree"), "count"),
         "seconds": "number", "drawn_a_second": "number"},
        {"size": "text"},
    ),
    "model-step": Benchmark(
        ("stage", "contender"),
        {"stage": "text", "contender": "text", **dict.fromkeys(("ms", "best_ms", "worst_ms", "peak_gib"), "number?"),
         "rounds": "count?", "first_s": "number?", "loss": "number?", "grad_norm": "number?",
         "gradients_apart": "number?", "errors": "numbers?", "served": "list?", "kernels": "numbers?", "why": "text?"},
        {"sizes": "object", "wall_seconds": "number"},
    ),
    "tpu-cycles": Benchmark(
        ("case", "target"),
        {"case": "text", "op": "text", "dtype": "text", "target": "text", "portakern": "object", "xla": "object",
         "flash": "object", "splash": "object", "over_xla": "number?", "over_flash": "number?",
         "over_splash": "number?"},
        {"wall_seconds": "number"},
    ),
    "tpu-legal": Benchmark(
        ("op", "target"),
        {"op": "text", **_SOURCES, "target": "text", "tilings": "count", "refused": "list", "largest_share": "number",
         "large_tilings": "count", "smallest_ratio": "number?", "median_ratio": "number?", "seconds": "number",
         "vmem_bytes": "string"},
        {"wall_seconds": "number"},
    ),
}  # fmt: skip
"""Every benchmark whose results are kept."""


@dataclass(frozen=True)
class Result:
    """One run, read and validated.

    Attributes:
      file: where it lies; in a checkout other runs lie there too. name: of the file that the run wrote.
      extra: what its benchmark keeps beside rows.
      commit: the checkout's that was run, with a + where files differed from it; None: nobody wrote it down.
    """

    file: Path
    benchmark: str
    command: str
    date: str
    device: str
    environment: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    extra: Mapping[str, Any]
    commit: str | None = None
    name: str = ""

    def key(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        """What a row measured."""
        return tuple(row.get(n) for n in BENCHMARKS[self.benchmark].key)

    @property
    def keys(self) -> set[tuple[Any, ...]]:
        return {self.key(row) for row in self.rows}


def command_line(program: str, file: Path | None = None) -> str:
    """``program`` with this process's arguments; of the file that the result goes to, and of what lies at an absolute
    path, the name alone: other machines have other folders."""
    arguments = [
        Path(a).name if Path(a).is_absolute() or (file is not None and a == str(file)) else a for a in sys.argv[1:]
    ]
    return f"{program} {shlex.join(arguments)}".strip()


def record(
    benchmark: str, rows: Sequence[Mapping[str, Any]], *, command: str, device: str | None = None, **extra: Any
) -> dict[str, Any]:
    """A run of today as a file keeps it. ``device``: the name of what was measured; this machine's best if not
    given.
    """
    return {
        "schema": SCHEMA,
        "benchmark": benchmark,
        "command": command,
        "date": datetime.date.today().isoformat(),
        "device": device or inventory.device_name(),
        "environment": inventory.environment(),
        "commit": sources.commit(),
        **extra,
        "rows": list(rows),
    }


def write(path: Path, data: Mapping[str, Any]) -> None:
    """Write a record. One that :func:`read` will refuse is written all the same, with a warning: the run it came from
    may have been long.
    """
    write_atomically(path, json.dumps(data, indent=1) + "\n")
    found = next(problems(json.loads(path.read_text(encoding="utf-8"))), None)
    if found:
        log.warning("%s was written, and `portakern report` will refuse it: %s", path, found)


def read(path: Path) -> Result:
    """One file of results; ResultError says what is wrong with it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ResultError(f"{path}: cannot be read: {e.strerror or e}") from e
    except ValueError as e:
        raise ResultError(f"{path}: is not JSON: {e}") from e
    found = next(problems(data), None)
    if found:
        raise ResultError(f"{path}: {found}")
    extra = {n: v for n, v in data.items() if n not in HEADER}
    return Result(
        path, data["benchmark"], data["command"], data["date"], data["device"], data["environment"], data["rows"],
        extra, data.get("commit"), path.name,
    )  # fmt: skip


def problems(data: Any) -> Iterator[str]:
    """What is wrong with the content of a file, in words, worst first."""
    if not isinstance(data, dict):
        yield f"holds {_shown(data)}; expected an object with {', '.join(n for n, k in HEADER.items() if k[-1] != '?')}"
        return
    if data.get("schema") != SCHEMA:
        what = f"is {_shown(data['schema'])}" if "schema" in data else "is missing"
        yield (
            f"'schema' {what}; expected {SCHEMA}: results are written by portakern.results.record(...), in this form "
            "since then"
        )
        return
    yield from _faults({n: data[n] for n in HEADER if n in data}, HEADER, "")
    name = data.get("benchmark")
    form = BENCHMARKS.get(name) if isinstance(name, str) else None
    if form is None:
        yield f"'benchmark' is {_shown(name)}; expected one of {', '.join(BENCHMARKS)}"
        return
    yield from _faults({n: v for n, v in data.items() if n not in HEADER}, form.extra, "")
    rows = data.get("rows")
    yield from _row_faults(rows if isinstance(rows, list) else [], form)


def _row_faults(rows: list[Any], benchmark: Benchmark) -> Iterator[str]:
    if not rows:
        yield "'rows' is empty; expected a row for each thing measured"
    seen: dict[str, int] = {}
    for i, row in enumerate(rows):
        place = f"rows[{i}]"
        if not isinstance(row, dict):
            yield f"'{place}' is {_shown(row)}; expected an object"
            continue
        yield from _faults(row, benchmark.row, place + ".")
        for name, kinds in benchmark.nested.items():
            for j, inner in enumerate(row[name] if isinstance(row.get(name), list) else ()):
                yield from (
                    _faults(inner, kinds, f"{place}.{name}[{j}].")
                    if isinstance(inner, dict)
                    else [f"'{place}.{name}[{j}]' is no object"]
                )
        key = json.dumps([row.get(n) for n in benchmark.key])
        if key in seen:
            yield (
                f"'{place}' measures what rows[{seen[key]}] does: "
                f"{', '.join(f'{n} {row.get(n)!r}' for n in benchmark.key)}; expected one row for each"
            )
        seen.setdefault(key, i)


def _faults(values: Mapping[str, Any], kinds: Mapping[str, str], path: str) -> Iterator[str]:
    for name, kind in kinds.items():
        holds, words = KINDS[kind.rstrip("?")]
        if name not in values and not kind.endswith("?"):
            yield f"'{path}{name}' is missing; expected {words}"
        elif values.get(name) is None and kind.endswith("?"):
            continue
        elif not holds(values[name]):
            yield f"'{path}{name}' is {_shown(values[name])}; expected {words}"
    unknown = [n for n in values if n not in kinds]
    if unknown:
        yield f"'{path}{unknown[0]}' is unknown; expected {', '.join(kinds) or 'nothing else'}"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
