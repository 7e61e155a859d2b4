"""Whether every tiling that the TPU kernels accept compiles: random calls and random tilings, with no TPU.

    python benchmarks/tpu_legal.py --target v5e --target v6e [--count 200] [--only matmul] [--seconds 3600]

Of each op and target so many calls are drawn, each with a tiling that ``supports`` accepts. Half of the tilings are
anywhere among those; the others are doubled, a tile after the other, until every further doubling is refused: there an
estimate of the memory that is a byte too low shows. What takes longest to compile is drawn more seldom. Ops and targets
take turns, so that a run which ends early has tried them all alike. libtpu is asked for nothing but the code, not to
tell of it: a build takes half the time. What was compiled is kept in the user's cache, and a later run goes on where
this one ended. Every tiling that libtpu refuses is printed with its call; exit status 1 if there is one.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from portakern.compiling import cache, forms, pool
from portakern.compiling.build import Build
from portakern.compiling.pool import Job
from portakern.core import registry, targets, tilings
from portakern.core.backend import Implementation
from portakern.core.call import Call
from portakern.core.framework import frameworks
from portakern.core.targets import Hardware
from portakern.errors import SpecError, UnsupportedError
from portakern.spec import Spec
from portakern.tuning.space import Space, space_of

DTYPES = ("bfloat16", "float32")
ATTEMPTS = 400


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", required=True, help="v4, v5e, v5p, v6e, v7x; may be repeated")
    parser.add_argument("--count", type=int, default=200, help="tilings of each op on each target")
    parser.add_argument("--only", nargs="+", default=[""], help="ops whose name holds one of these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing new after so many")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one call may take")
    args = parser.parse_args()
    names = [n for n in registry.ops() if any(part in n for part in args.only)]
    hardware = [targets.find(name) for name in args.target]
    rounds = itertools.zip_longest(*(some_of(n, h, args) for n in names for h in hardware))
    tried, refused, end = Counter[tuple[str, str]](), list[str](), time.monotonic() + args.seconds
    with pool.Pool(args.jobs, args.timeout, silent()) as workers:
        for jobs in rounds:
            for job, built in compiled([job for job in jobs if job is not None], workers, end):
                tried[job.spec.name, job.hardware.name] += 1
                if not built.ok:
                    refused.append(f"{built.call} on {built.target}, {dict(job.tiling)}: {built.reason}")
                    print(refused[-1], flush=True)
            if time.monotonic() > end:
                break
    for (name, target), count in sorted(tried.items()):
        print(f"{target} {name}: {count} tilings")
    print(f"{tried.total()} tilings tried, {len(refused)} of them accepted here and refused by the compiler")
    return bool(refused)


def silent() -> dict[str, str]:
    """The environment in which libtpu does not tell what it made, in files of many megabytes."""
    family = next(f for f in registry.backend("pallas").families if "tpu" in f.platforms)
    return {"LIBTPU_INIT_ARGS": family.load_compiler().FROM_HBM}


def compiled(jobs: list[Job], workers: pool.Pool, end: float) -> Iterator[tuple[Job, Build]]:
    """The jobs with what became of them, kept or new; none is begun after the end."""
    names = {id(job): f"{cache.key(job)}-silent" for job in jobs}
    known = [(job, cache.find(names[id(job)])) for job in jobs]
    yield from ((job, built) for job, built in known if built is not None)
    # a process that stays for one target need not be started anew for every second job
    for job in sorted((job for job, built in known if built is None), key=lambda j: j.hardware.name):
        if time.monotonic() > end:
            return
        for _, built in workers.run([job]):
            cache.keep(names[id(job)], built)
            yield job, built


def some_of(name: str, hardware: Hardware, args: argparse.Namespace) -> Iterator[Job]:
    """So many jobs of an op for a target."""
    return itertools.islice(drawn(name, hardware, args.seed), args.count)


def drawn(name: str, hardware: Hardware, seed: int) -> Iterator[Job]:
    """Calls of an op, each with a tiling that is accepted; an end where none is found any more."""
    spec, rng = registry.find_spec(name), random.Random(f"{name} {hardware.name} {seed}")
    found = [(b, f) for b, f in forms.compilers(name, hardware) if f.interprets]
    for backend, family in found:
        impl = backend.implementation(name, family)
        assert impl is not None
        framework = frameworks()[backend.framework]
        missed = 0
        while missed < ATTEMPTS:
            form = form_drawn(spec, rng)
            call = form and forms.bound_form(spec, form, framework, hardware.target)
            tiling = call and tiling_drawn(spec, impl, call, rng)
            missed = 0 if tiling else missed + 1
            if form and tiling:
                yield Job(spec, backend, family, hardware, form, tiling, quick=True)


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
        form = forms.typical_form(spec, rng.choice([d for d in DTYPES if d in spec.dtypes]), others)
        forms.bound_form(spec, form, frameworks()["numpy"], targets.HOST)
    except SpecError:
        return None
    return form


def extent_drawn(usual: int, rng: random.Random) -> int:
    """The usual extent, or one down to 1, each octave as likely, half of those a multiple of 64."""
    if rng.random() < 0.4:
        return usual
    extent = round(math.exp(rng.uniform(0, math.log(2 * usual))))
    return max(64, extent // 64 * 64) if extent > 64 and rng.random() < 0.5 else extent


def tiling_drawn(spec: Spec[Any], impl: Implementation, call: Call, rng: random.Random) -> Mapping[str, int] | None:
    """A tiling that is accepted, half of the time one that no doubling of a tile leaves so. One whose steps are longer
    than the default's, and take as much longer to compile, is drawn as much more seldom."""
    try:
        default = tilings.default(impl, call).tiling
    except UnsupportedError:
        return None
    space = space_of(spec, impl, [call], default)
    for _ in range(ATTEMPTS // 4):
        tiling = {n: rng.choice(values) for n, values in space.values.items()}
        if not space.legal(tiling):
            continue
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
