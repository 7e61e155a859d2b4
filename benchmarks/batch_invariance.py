"""Whether a row, a sequence or a token has the same bits alone as among others: portakern's backends beside its peers.

Each drawn call has several requests, of a number that is drawn too, and values as the checker draws them: sequences of
other lengths beside chunks of prompts. One request is drawn of them, and called alone. What a request is, the op's spec
says (``apart``), or its record. A row of the results says of an op and a contender how many of its calls gave the same
bits, and the largest difference among all of them.

The contenders of an op run in a process of its own. One that ends it, or takes longer than ``--timeout`` for a call, is
left out, and another process goes on without it.

    python -m benchmarks.batch_invariance [OPS] [--calls 32] [--jobs 4] [--json FILE]
    python -m benchmarks.batch_invariance softmax --device cpu --backend triton --small --calls 4
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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from portakern import processes, results, sources
from portakern.core import registry
from portakern.core.backend import Backend
from portakern.errors import UnavailableError, UnsupportedError
from portakern.spec import Spec
from portakern.testing.layouts import other_bits
from portakern.testing.sampled import apart, part_call, taken, with_what_follows
from portakern.tools.bench.contenders import CallNotTaken, Contender, contenders, here, ready
from portakern.tools.bench.inputs import Inputs, make
from portakern.tools.bench.suites import TimedCase, each, shaped
from portakern.tools.compile.worker import reason
from tests.ops import record

Arrays = list[np.ndarray]
AMONG = (2, 5, 16, 37, 128, 1000)
"""Of how many requests calls are: few numbers, since libraries compile for each."""

LEAST = 8
"""The most requests, of an op whose typical call has fewer."""

STEP = 0.2


# ----------------------------------------------------------------------------------------------------------- a request
class RequestAxis(NamedTuple):
    """Of which dimension one index is a request, and which of its axes where it is a run of them."""

    dimension: str
    axis: int


def request_axis(spec: Spec[Any]) -> RequestAxis | None:
    """The dimension that offsets number, or else the first axis of the first argument, if results lie side by side
    along it; what the op's record says; None of an op that has no such dimension."""
    options = {o.name: o.default for o in spec.options}
    names = apart(spec, options, [o.name for o in spec.outputs if not o.saved])
    numbered = [f for a in spec.arrays for d in a.dims if d.plus for f in d.factors]
    if spec.rewriter and (found := [n for n in names if n in numbered]):
        return RequestAxis(found[0], 0)
    runs = shaped(spec, {}).dims
    first = next(d for d in spec.arrays[0].dims if not d.variadic or runs.get(d.factors[0], ()))
    if first.factors[0] in names:
        return RequestAxis(first.factors[0], 0)
    said = record(spec.name).alone
    return RequestAxis(said.dimension, 0) if said else None


def drawn_case(spec: Spec[Any], dtype: str, rng: np.random.Generator, small: bool) -> TimedCase:
    """The op's typical call, or one of its record's small extents, of a drawn number of requests."""
    case = shaped(spec, {})
    if small:
        few = record(spec.name).extents
        runs = {d.factors[0] for a in spec.arrays for d in a.dims if d.variadic}
        dims = {n: ((2, few[n]) if n in runs else few[n]) if n in few else () for n in spec.dims}
        case = replace(case, dims=dims, options={n: v for n, v in case.options.items() if n not in dims})
    axis = request_axis(spec)
    assert axis is not None
    extent = case.dims[axis.dimension]
    most = max(extent[axis.axis] if isinstance(extent, tuple) else extent, LEAST)
    number = int(rng.choice([n for n in (*AMONG, most) if n <= most]))
    among = (*extent[: axis.axis], number, *extent[axis.axis + 1 :]) if isinstance(extent, tuple) else number
    (found,) = each(replace(case, dims={**case.dims, axis.dimension: among}), [dtype], False)
    return found


class DrawnPair(NamedTuple):
    """A call of several requests, the call of one of them, and where its results are in those of the first: dimension
    -> indices."""

    among: Inputs
    alone: Inputs
    chosen: Mapping[str, Any]

    def shares(self, outputs: Arrays) -> Arrays:
        """The request's share of the results of the first call."""
        call = self.among.call
        dims = {o.name: o.dims for o in call.spec.outputs}
        return [taken(x, dims[n], call, self.chosen) for n, x in zip(call.wants, outputs, strict=True)]


def drawn_pair(case: TimedCase, lead: Backend, device: str | None, seed: int) -> DrawnPair:
    """One request of a call, drawn among those that have results."""
    framework, place, _ = here(lead, device)
    inputs, axis, spec = make(case, framework, place, seed, measured=False), request_axis(case.forward), case.forward
    assert axis is not None
    call, said, rng = inputs.counted(inputs.call), record(case.op).alone, np.random.default_rng([seed, 3])
    extent = call.dims[axis.dimension]
    extents = extent if isinstance(extent, tuple) else (extent,)
    for request in rng.permutation(extents[axis.axis]):
        whole = [np.arange(e) for e in extents]
        whole[axis.axis] = np.array([request])
        if said is not None:
            values = said.arrays({n: b.view() for n, b in inputs.buffers.items()}, int(request))
            return DrawnPair(inputs, inputs.of_others(values), {axis.dimension: whole})
        chosen = with_what_follows(call, {axis.dimension: whole})
        part = part_call(call, inputs.buffers, chosen, inputs.options)
        if all(np.prod(shape) for shape, _ in part.outputs.values()):
            given = {n: a for n, a in part.arrays.items() if a is not None}
            return DrawnPair(inputs, inputs.of_others(given), chosen)
    raise UnsupportedError(f"{spec.name}: no request of this call has results")


# --------------------------------------------------------------------------------------------------------- a contender
def taking_part(op: str, asked: argparse.Namespace) -> list[Contender]:
    """Each backend as a user calls it, who names no variant, and the peers' variants."""
    spec, subjects = registry.find_spec(op), subjects_of(op, asked)
    peers = [b for b in registry.peers().values() if not asked.against or b.name in asked.against]
    found = contenders(spec, subjects, peers, here(subjects[0], asked.device)[2])
    automatic = {c.backend.name: replace(c, variant=None) for c in found if c.subject}
    return [*automatic.values(), *(c for c in found if not c.subject)]


def subjects_of(op: str, asked: argparse.Namespace) -> list[Backend]:
    """The backends that were named, or that compile here, and have the op."""
    named = [registry.backend(b) for b in asked.backend or ()]
    found = []
    for b in named or [b for b in registry.backends().values() if b.auto and not b.oracle]:
        with suppress(UnsupportedError, UnavailableError):
            target = here(b, asked.device)[2]
            families = [f for f, _ in b.families_for(target)]
            found += [b] if any(f in families for f in b.families_with(op)) else []
    return found


def outputs_of(contender: Contender, inputs: Inputs) -> Arrays:
    """What a contender gives of a call; CallNotTaken where it does not take it."""
    entry = ready(contender, inputs)
    outputs = tuple(entry.run())
    entry.instruments.wait(outputs)
    return [np.array(entry.framework.to_numpy(o)) for o in outputs]


def difference(alone: Arrays, among: Arrays) -> tuple[bool, float]:
    """Whether all bits are the same, and the largest difference of two numbers; where one alone is NaN, infinity."""
    same, largest = True, 0.0
    for x, y in zip(alone, among, strict=True):
        other = other_bits(x, y)
        same = same and not other.any()
        with np.errstate(invalid="ignore"):
            apart_by = np.abs(x[other].astype(np.float64) - y[other].astype(np.float64))
        largest = max(largest, float(np.nan_to_num(apart_by, nan=np.inf).max(initial=0.0)))
    return same, largest


def tried(contender: Contender, pair: DrawnPair) -> dict[str, Any]:
    """What became of one call: ``same`` and ``largest``, or why it was not compared."""
    try:
        alone = outputs_of(contender, pair.alone)
        same, largest = difference(alone, pair.shares(outputs_of(contender, pair.among)))
        return {"same": bool(same), "largest": largest}
    except CallNotTaken as e:
        return {"refused": str(e)}
    except Exception as e:
        return {"failed": reason(e)}


def work(op: str, asked: argparse.Namespace) -> None:
    """In a process of its own: an event for each contender that takes part, then for each call that begins and ends,
    as lines of the file ``--events``."""
    with Path(asked.events).open("a", encoding="utf-8") as file:

        def tell(**event: Any) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()

        subjects = subjects_of(op, asked)
        if not subjects:
            return
        among = [c for c in taking_part(op, asked) if c.name not in asked.without]
        spec, target = registry.find_spec(op), here(subjects[0], asked.device)[2]
        dtype = asked.dtype if asked.dtype in spec.dtypes else spec.usual_dtypes[0]
        for c in among:
            known = {"backend": c.backend.name, "variant": c.variant, "target": str(target)}
            hash_of = sources.fingerprint(op, c.backend, c.variant, target)
            tell(name=c.name, dtype=dtype, subject=c.subject, commit=sources.commit(), sources=hash_of, **known)
        until = time.monotonic() + asked.seconds
        for call in range(asked.first, asked.calls):
            if time.monotonic() > until:
                return
            case = drawn_case(spec, dtype, np.random.default_rng([call, 4]), asked.small)
            pair = drawn_pair(case, subjects[0], asked.device, call)
            for c in among:
                tell(begins=c.name, call=call)
                tell(ends=c.name, call=call, **tried(c, pair))


# ------------------------------------------------------------------------------------------------------ its own process
@dataclass
class Part:
    """One op: its contenders, in processes one after the other, each without those that ended the ones before."""

    op: str
    asked: argparse.Namespace

    def rows(self) -> list[dict[str, Any]]:
        lost: dict[str, str] = {}
        events: list[dict[str, Any]] = []
        first = 0
        with tempfile.TemporaryDirectory() as folder:
            while True:
                file = Path(folder, f"{len(lost)}.jsonl")
                why = self.process(file, first, lost)
                mine = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
                events += mine
                last = mine[-1] if mine else {}
                if why is None or "begins" not in last:
                    break
                lost[last["begins"]], first = why, last["call"]
        if why:  # nobody was called when it ended
            print(f"{self.op}: {why}", flush=True)
        return list(self.summed(events, lost))

    def process(self, file: Path, first: int, lost: Mapping[str, str]) -> str | None:
        """Let a process write its events to a file; why it did not end by itself, or not well."""
        environment = {**os.environ, **processes.unsaid(processes.SHARING)}
        arguments = [*self.asked.passed, "--events", str(file), "--first", str(first)]
        command = [sys.executable, "-m", "benchmarks.batch_invariance", self.op, *arguments, "--without", *lost]
        with (file.with_suffix(".said")).open("w") as said:
            process = subprocess.Popen(
                command, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
            )
            size, since = 0, time.monotonic()
            while process.poll() is None:
                grown = file.stat().st_size if file.exists() else 0
                size, since = (grown, time.monotonic()) if grown != size else (size, since)
                if time.monotonic() - since > self.asked.timeout:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    return f"not done after {self.asked.timeout:g} s"
                time.sleep(STEP)
        if process.returncode == 0:
            return None
        text = file.with_suffix(".said").read_text(errors="replace").strip().splitlines()
        return f"its process ended with {process.returncode}: {text[-1][:200] if text else 'it said nothing'}"

    def summed(self, events: Sequence[Mapping[str, Any]], lost: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """A row for each contender."""
        entries = {e["name"]: e for e in events if "name" in e}
        for name, entry in entries.items():
            ended = {e["call"]: e for e in events if e.get("ends") == name}.values()
            compared = [e for e in ended if "same" in e]
            others = [e[kind] for e in ended for kind in ("failed", "refused") if kind in e]
            known = {n: entry[n] for n in ("dtype", "subject", "backend", "variant", "target", "commit", "sources")}
            yield {
                "op": self.op, "contender": name, **known, "calls": len(compared),
                "same": sum(e["same"] for e in compared), "largest": max((e["largest"] for e in compared), default=0.0),
                "refused": sum("refused" in e for e in ended), "failed": sum("failed" in e for e in ended),
                "why": lost.get(name) or (others[0][:300] if others else None),
            }  # fmt: skip


def ops() -> list[str]:
    """The ops that have requests."""
    specs = map(registry.find_spec, registry.loadable())
    return [s.name for s in specs if not s.is_vjp and request_axis(s) is not None]


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.batch_invariance", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    found.add_argument("ops", nargs="*", help="all that have requests when none is named")
    found.add_argument("--backend", action="append", help="may be repeated (those that compile here)")
    found.add_argument("--against", action="append", help="a peer; may be repeated (all)")
    found.add_argument("--device", help="cpu: interpreters (the accelerator)")
    found.add_argument("--dtype", default="bfloat16", help="of ops that have it; of others their first")
    found.add_argument("--calls", type=int, default=32, help="of an op")
    found.add_argument("--small", action="store_true", help="small extents")
    found.add_argument("--seconds", type=float, default=120.0, help="after which no further call of an op begins")
    found.add_argument(
        "--timeout", type=float, default=90.0, help="seconds that one call, or a process's start, may take"
    )
    found.add_argument("--jobs", type=int, default=4, help="ops at a time")
    found.add_argument("--json", type=Path)
    found.add_argument("--events", help=argparse.SUPPRESS)
    found.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    found.add_argument("--without", nargs="*", default=(), help=argparse.SUPPRESS)
    return found


def run(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of each op, as they come."""
    with ThreadPoolExecutor(asked.jobs) as pool:
        for rows in pool.map(lambda op: Part(op, asked).rows(), asked.ops or ops()):
            for row in rows:
                told = f"{row['same']:4} of {row['calls']:3} the same bits, largest difference {row['largest']:.3g}"
                print(f"{row['op']:22}{row['contender']:22}{told}  {row['why'] or ''}", flush=True)
                yield row


def options_of(asked: argparse.Namespace) -> list[str]:
    """What the processes of the parts are told too."""
    found = [w for name in ("backend", "against") for value in getattr(asked, name) or () for w in (f"--{name}", value)]
    found += ["--device", asked.device] if asked.device else []
    found += ["--small"] if asked.small else []
    return [*found, *(w for n in ("dtype", "calls", "seconds") for w in (f"--{n}", str(getattr(asked, n))))]


def main() -> int:
    asked = parser().parse_args()
    if asked.events:
        work(asked.ops[0], asked)
        return 0
    asked.passed = options_of(asked)
    start, rows = time.perf_counter(), []
    command = results.command_line("python -m benchmarks.batch_invariance", asked.json)
    device = results.HOST_CPU if asked.device == "cpu" else None
    for row in run(asked):
        rows.append(row)
        if asked.json:
            seconds = round(time.perf_counter() - start, 1)
            kept = results.record("batch-invariance", rows, command=command, device=device, wall_seconds=seconds)
            results.write(asked.json, kept)
    return int(not rows or any(r["same"] < r["calls"] or r["failed"] for r in rows if r["subject"]))


if __name__ == "__main__":
    sys.exit(main())
