"""Whether every tiling that the TPU kernels accept compiles: random calls and random tilings, with no TPU.

    python benchmarks/tpu_legal.py --target v5e --target v6e [--count 200] [--only matmul] [--seconds 3600] [--json F]
                                   [--onto F ...]

Of each op and target so many different calls are drawn, each with a tiling that ``supports`` accepts. Half of the
tilings are anywhere among those; the others are doubled, a tile after the other, until every further doubling is
refused: there an estimate of the memory that is a byte too low shows. What takes longest to compile is drawn more
seldom, but for one in twenty, which is at the limit whatever it takes. The op and target of which fewest were tried is
the next, so that a run which ends early has tried them all alike. ``--onto`` names results to go on from: a row of the
sources as they are, whose estimates are those of the calls that are drawn now, keeps what it has.

Of each kernel libtpu tells the bytes of VMEM that it takes, and takes it if and only if it may take so many. They are
kept beside those that ``supports`` found: its estimate is to be no less, and not much more. They depend neither on the
limit nor on extents, but on the chip, even where programs are equal: of 21 that were, 7 took other bytes on v7x than on
v6e, and of 19, 2 on v5p than on v5e. So no target's build is another's. What was compiled is kept in the user's cache
by the program that libtpu was given, and a later run goes on where this one ended. Every tiling that libtpu refuses is
printed with its call; exit status 1 if there is one. ``wall_seconds`` is the sum of what every program took when it was
compiled.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from portakern import results, sources
from portakern.backends.pallas.lib.mosaic_tpu.chip import estimates
from portakern.core import registry, targets, tilings
from portakern.core.backend import Family, Implementation
from portakern.core.call import Call
from portakern.core.framework import frameworks
from portakern.core.targets import Hardware
from portakern.errors import SpecError, UnsupportedError
from portakern.spec import Spec
from portakern.tools.compile import abstract, cache, pool
from portakern.tools.compile.build import Build
from portakern.tools.compile.pool import Job
from portakern.tools.tune.space import Space, space_of

BACKEND = "pallas"
ATTEMPTS = 400
LARGE = 0.5  # of what a kernel may take: beneath, an estimate that is too low does no harm
LARGEST = 0.7
TURN = 20  # tilings of an op on a target after which it may be another's turn: a process stays for one target
Noted = list[tuple[int, int]]  # of each kernel of a call, what supports found that it needs, and what it may have
Drawn = Iterator[tuple[Job, Noted]]
Place = tuple[str, str]  # op and target


@dataclass(frozen=True)
class Found:
    """A tiling that libtpu took: the bytes of VMEM of the kernel that takes most, those that ``supports`` found, and
    the largest share that a kernel takes, by libtpu and by ``supports``, of what it may."""

    takes: int
    estimate: int
    share: float
    estimated_share: float


@dataclass
class Tried:
    """What became of an op's tilings on a target. ``refused``: by libtpu, in words; ``nearest``: the largest share that
    a kernel took of what it may, of tilings that an earlier run tried, which kept no other."""

    found: list[Found] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    seconds: float = 0.0
    nearest: float = 0.0

    @classmethod
    def before(cls, row: Mapping[str, Any], noted: list[Noted]) -> Tried | None:
        """What an earlier run found of the calls of which now is noted as much, in whatever order it compiled them;
        None where those were others."""
        told = sorted(
            (tuple(map(int, pair.split("/"))) for pair in row["vmem_bytes"].split()), key=lambda pair: pair[1]
        )
        noted = sorted(noted, key=largest_of)
        if [largest_of(of) for of in noted] != [estimate for _, estimate in told]:
            return None
        found = [Found(takes, estimate, 0.0, share_of(of)) for (takes, estimate), of in zip(told, noted, strict=True)]
        return cls(found, [], row["seconds"], row["largest_share"])

    @property
    def count(self) -> int:
        return len(self.found) + len(self.refused)

    def add(self, job: Job, built: Build, noted: Noted) -> None:
        self.seconds += built.seconds
        if not built.ok:
            self.refused.append(f"{built.call} on {built.target}, {dict(job.tiling)}: {built.reason}")
            print(self.refused[-1], flush=True)
            return
        if not built.kernels:
            raise RuntimeError(f"libtpu does not tell what {built.call} on {built.target} takes of its VMEM")
        self.found.append(
            Found(
                max(k.on_chip["vmem"] for k in built.kernels),
                largest_of(noted),
                max(k.on_chip["vmem"] / k.granted["vmem"] for k in built.kernels),
                share_of(noted),
            )
        )

    def row(self, op: str, target: str) -> dict[str, Any]:
        large = [f for f in self.found if f.estimated_share >= LARGE]
        ratios = sorted(f.estimate / f.takes for f in large)
        return {
            "op": op,
            "target": target,
            "backend": BACKEND,
            "variant": family().name,
            "sources": fingerprint(op, target),
            "tilings": self.count,
            "refused": self.refused,
            "largest_share": round(max(self.nearest, *(f.share for f in self.found), 0.0), 4),
            "large_tilings": len(large),
            "smallest_ratio": round(ratios[0], 4) if ratios else None,
            "median_ratio": round(statistics.median(ratios), 4) if ratios else None,
            "seconds": round(self.seconds, 1),
            "vmem_bytes": " ".join(f"{f.takes}/{f.estimate}" for f in self.found),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", required=True, help="v4, v5e, v5p, v6e, v7x; may be repeated")
    parser.add_argument("--count", type=int, default=200, help="tilings of each op on each target")
    parser.add_argument("--only", nargs="+", default=[""], help="ops whose name holds one of these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=math.inf, help="compile nothing new after so many")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one call may take")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--onto", nargs="+", type=Path, default=[], help="results whose rows are gone on from")
    args = parser.parse_args()
    names = [n for n in registry.ops() if any(part in n for part in args.only)]
    found = tried(names, [targets.find(name) for name in args.target], args)
    rows = [one.row(*key) for key, one in sorted(found.items())]
    for row in rows:
        print(line_of(row))
    refused = sum(len(row["refused"]) for row in rows)
    total = sum(row["tilings"] for row in rows)
    print(f"{total} tilings tried, {refused} of them accepted here and refused by the compiler")
    if args.json:
        command = results.command_line("python benchmarks/tpu_legal.py", args.json)
        seconds = round(sum(row["seconds"] for row in rows), 1)
        results.write(
            args.json, results.record("tpu-legal", rows, command=command, device=results.HOST_CPU, wall_seconds=seconds)
        )
    return bool(refused)


def line_of(row: Mapping[str, Any]) -> str:
    least = (
        f", estimates from {row['smallest_ratio']:.2f} times, median {row['median_ratio']:.2f}"
        if row["smallest_ratio"]
        else ""
    )
    share, large = f"{row['largest_share']:.1%}", row["large_tilings"]
    return (
        f"{row['target']} {row['op']}: {row['tilings']} tilings, {len(row['refused'])} refused, at most {share} of "
        f"what a kernel may take; {large} large{least}; {row['seconds']:.0f} s"
    )


def largest_of(noted: Noted) -> int:
    return max(needed for needed, _ in noted)


def share_of(noted: Noted) -> float:
    return max(needed / limit for needed, limit in noted)


def fingerprint(op: str, target: str) -> str | None:
    return sources.fingerprint(op, registry.backend(BACKEND), family().name, targets.find(target).target)


def tried(names: list[str], hardware: list[Hardware], args: argparse.Namespace) -> dict[Place, Tried]:
    """Some tilings of each op on each target, and again where they are fewest, until there are enough; once the time is
    over, those that are known already, up to where none of the next is."""
    end = time.monotonic() + args.seconds
    rows = kept(args.onto)
    source: dict[Place, Drawn] = {}
    found: dict[Place, Tried] = {}
    for h, n in itertools.product(hardware, names):
        calls = itertools.islice(drawn(n, h, args.seed), args.count)
        found[n, h.name], source[n, h.name] = gone_on(rows.get((n, h.name)), calls)
    places = [*source]
    with pool.Pool(args.jobs, args.timeout, silent()) as workers:
        while source:
            at = min(source, key=lambda place: (found[place].count // TURN, places.index(place)))
            for _ in range(0, TURN, 2 * args.jobs):
                jobs = dict(itertools.islice(source[at], 2 * args.jobs))
                built = dict(compiled([*jobs], workers, time.monotonic() < end))
                for job in itertools.takewhile(built.__contains__, jobs):
                    found[at].add(job, built[job], jobs[job])
                if not jobs or len(built) < len(jobs):
                    del source[at]
                    break
    return {at: one for at, one in found.items() if one.count}


def kept(files: list[Path]) -> dict[Place, Mapping[str, Any]]:
    """The rows, of these results, of the sources as they are; where libtpu refused nothing, since it is not kept which
    of the calls that was."""
    rows = [row for file in files for row in results.read(file).rows if not row["refused"]]
    return {
        (row["op"], row["target"]): row
        for row in rows
        if row.get("sources") and row["sources"] == fingerprint(row["op"], row["target"])
    }


def gone_on(row: Mapping[str, Any] | None, calls: Drawn) -> tuple[Tried, Drawn]:
    """What an earlier run found of the first of these calls, if they are still those, and the calls to try."""
    first = [*itertools.islice(calls, row["tilings"])] if row else []
    before = Tried.before(row, [noted for _, noted in first]) if row else None
    return (before, calls) if before else (Tried(), itertools.chain(first, calls))


def silent() -> dict[str, str]:
    """The environment in which libtpu does not tell what it made, in files of many megabytes."""
    return {"LIBTPU_INIT_ARGS": family().load_compiler().FROM_HBM}


def family() -> Family:
    return next(f for f in registry.backend(BACKEND).families if "tpu" in f.platforms)


def compiled(jobs: list[Job], workers: pool.Pool, more: bool) -> Iterator[tuple[Job, Build]]:
    """The jobs with what became of them; of those whose kernels' text is as it was, as it was kept. Others are compiled
    if there is time for more."""
    names = {job: f"{cache.key(job)}-memory" for job in jobs}
    known = {job: cache.find(name) for job, name in names.items()}
    yield from ((job, built) for job, built in known.items() if built is not None)
    new = [job for job, built in known.items() if built is None]
    yield from workers.run(new, lambda job, built: cache.keep(names[job], built)) if more else ()


def drawn(name: str, hardware: Hardware, seed: int) -> Drawn:
    """Calls of an op, each with a tiling that is accepted and what was estimated of it, no two the same; an end where
    none is found any more."""
    spec, place = registry.find_spec(name), f"{name} {hardware.name} {seed}"
    usual, at_limit = random.Random(place), random.Random(f"{place} at the limit")
    seen = set[str]()
    for backend, of in [(b, f) for b, f in abstract.compilers(name, hardware) if f.interprets]:
        impl = backend.implementation(name, of)
        assert impl is not None
        framework = frameworks()[backend.framework]
        missed = 0
        while missed < ATTEMPTS:
            largest = len(seen) % TURN == 0 and missed < ATTEMPTS // 8
            rng = at_limit if largest else usual
            form, missed = form_drawn(spec, rng), missed + 1
            call = form and abstract.bind_signature(spec, form, framework, hardware.target)
            tiling = tiling_drawn(spec, impl, call, rng, largest) if call else None
            this = json.dumps([form, tiling])
            if not form or not call or tiling is None or this in seen:
                continue
            noted = noted_of(impl, call, tiling)
            if not largest or share_of(noted) >= LARGEST:
                missed = 0
                seen.add(this)
                yield Job(spec, backend, of, hardware, form, tiling, quick=True, mode="memory"), noted


def noted_of(impl: Implementation, call: Call, tiling: Mapping[str, int]) -> Noted:
    """What ``supports`` finds of a tiling, and of one that is large what the kernels find when they are traced: some
    take what is left of the VMEM to keep rows there."""
    with estimates() as noted:
        config = impl.configured(call.spec, tiling)
        impl.supports(call, config)
        if share_of(noted) >= LARGE:
            names = [n for n, a in call.arrays.items() if a is not None]

            def run(*arrays: Any) -> tuple[Any, ...]:
                of = call.replace(arrays={**call.arrays, **dict(zip(names, arrays, strict=True))})
                return tuple(o for o in impl.run(of, config) if o is not None)

            jax.eval_shape(run, *(call.arrays[n] for n in names))
    return noted


def form_drawn(spec: Spec[Any], rng: random.Random) -> dict[str, Any] | None:
    """A call: some extents of a typical one, others shorter, each optional array and option now and then; None where
    the rules of the op allow no such call."""
    forward = registry.forward_of(spec) if spec.is_vjp else None
    typical = (forward or spec).typical if not spec.typical else spec.typical
    others: dict[str, Any] = {}
    for n in spec.dims:
        usual = typical.get(n)
        if isinstance(usual, tuple):
            others[n] = tuple(extent_drawn(e, rng) for e in usual)
        elif usual is not None:
            others[n] = extent_drawn(usual, rng)
    for a in spec.arrays:
        if a.optional and rng.random() < 0.5:
            others[a.name] = rng.random() < 0.5
    for o in spec.options:
        if o.choices and not o.axis_of and rng.random() < 0.25:
            others[o.name] = rng.choice(o.choices)
    try:
        form = abstract.typical_signature(spec, rng.choice(spec.usual_dtypes), others)
        abstract.bind_signature(spec, form, frameworks()["numpy"], targets.HOST)
    except SpecError:
        return None
    return form


def extent_drawn(usual: int, rng: random.Random) -> int:
    """The usual extent, or one down to 1, each octave as likely, half of those a multiple of 64."""
    if rng.random() < 0.4:
        return usual
    extent = round(math.exp(rng.uniform(0, math.log(2 * usual))))
    return max(64, extent // 64 * 64) if extent > 64 and rng.random() < 0.5 else extent


def tiling_drawn(
    spec: Spec[Any], impl: Implementation, call: Call, rng: random.Random, largest: bool
) -> Mapping[str, int] | None:
    """A tiling that is accepted, half of the time, or with ``largest`` always, one that no doubling of a tile leaves
    so. One whose steps are longer than the default's, and take as much longer to compile, is drawn as much more seldom,
    but for the largest."""
    try:
        default = tilings.default(impl, call).tiling
    except UnsupportedError:
        return None
    space = space_of(spec, impl, [call], default)
    for _ in range(ATTEMPTS // 4):
        tiling = {n: rng.choice(values) for n, values in space.values.items()}
        if not space.legal(tiling):
            continue
        if largest:
            return grown(space, tiling, rng)
        if rng.random() < 0.5:
            tiling = grown(space, tiling, rng)
        if rng.random() * step(spec, call, tiling) < step(spec, call, default):
            return tiling
    return None


def step(spec: Spec[Any], call: Call, tiling: Mapping[str, int]) -> int:
    """About how long the code of a step is: the product of its tiles, as far as they reach."""
    extents = {n: call.dims.get(t.of or "", tiling[n]) for n, t in spec.tiling.items() if n in tiling}
    return math.prod(min(tiling[n], e if isinstance(e, int) else max(e, default=1)) for n, e in extents.items())


def grown(space: Space, tiling: dict[str, int], rng: random.Random) -> dict[str, int]:
    """The tiling with its values raised as long as it stays legal."""
    names = list(tiling)
    while names:
        name = rng.choice(names)
        above = [v for v in space.values[name] if v > tiling[name]][:1]
        if above and space.legal(tiling | {name: above[0]}):
            tiling = tiling | {name: above[0]}
        else:
            names.remove(name)
    return tiling


if __name__ == "__main__":
    sys.exit(main())
