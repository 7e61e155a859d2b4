"""Static cycles of the TPU kernels beside XLA's for the same maths and JAX's own attention kernels, with no TPU.

A kernel's figure is the larger of what its program takes and of what memory takes for the bytes that it moves
(`Kernel.least`). What XLA does around kernels, such as copies, is added, as libtpu estimates it. Nothing is run. XLA's
program is compiled with operands that come from device memory, and of products also with operands wherever libtpu likes
them; the lower counts. JAX's flash and splash attention are compiled with each of a few sets of blocks, and the best
counts; since libtpu does not follow splash's map of blocks, kernels are compared with theirs by the bundles that they
issue. Where two cores share a launch, as on v4 and v5p, the one counts that takes longer.

    python benchmarks/tpu_cycles.py --target v5e --target v5p --target v6e [--only matmul] [--json FILE]

Programs are compiled in processes of their own, since libtpu's estimates may end them, or never end. What was compiled
before is kept in the user's cache, so that a run which was cut off goes on, and one after a change compiles what
changed. ``wall_seconds`` is the sum of what every program took when it was compiled.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import math
import os
import re
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import tpu_programs
from tpu_programs import BLOCKS, CASES, LIKED, PEERS, Program

from portakern import results
from portakern.core import registry, targets
from portakern.core.backend import Backend, Family, Implementation
from portakern.core.call import Call
from portakern.files import cache_folder, write_atomically
from portakern.tools.bench import suites
from portakern.tools.compile import abstract, cache

OURS: Program = ("portakern", ())
TIMEOUT = 240.0
Found = dict[str, Any]
"""What is known of a program: ``issued`` and ``least`` cycles, those ``around`` its kernels, bytes ``moved``, and
``seconds``; or ``why`` there is nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", help="v4, v5e, v5p, v6e, v7x; may be repeated")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name holds one of these")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument(
        "--kept", action="store_true", help="compile nothing, and leave out cases of which not every program is known"
    )
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds that one program may take")
    parser.add_argument("--serve", nargs=2, metavar=("TARGET", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(*args.serve)
        return
    if not args.target:
        parser.error("name a chip: --target v5e")
    names = [name for name in CASES if any(part in name for part in args.only)]
    asked = [
        Asking(target, name, who, blocks)
        for target in args.target
        for name in names
        for who, blocks in [OURS, *others(name)]
    ]
    found = compiled(asked, 0 if args.kept else args.jobs, args.timeout)
    known = [(p.target, p.case) for p in asked if p in found]
    whole = {at for at in known if known.count(at) == 1 + len(others(at[1]))}
    rows = [row_of(target, name, found) for target in args.target for name in names if (target, name) in whole]
    for row in rows:
        print(line_of(row))
    seconds = round(sum(f["seconds"] for f in found.values()), 1)
    print(f"{len(rows)} calls, {len(found)} of {len(asked)} programs, which took {seconds:.0f} s to compile")
    if args.json:
        command = results.command_line("python benchmarks/tpu_cycles.py", args.json)
        kept = results.record("tpu-cycles", rows, command=command, device=results.HOST_CPU, wall_seconds=seconds)
        results.write(args.json, kept)


def others(case: str) -> list[Program]:
    """What stands beside the kernels of a case: of attention JAX's kernels (XLA's program writes all scores, and takes
    several times as long), of the rest XLA's program. What memory bounds comes from there: its operands lie nowhere
    else."""
    op, _, dims = CASES[case]
    if not op.startswith("attention") or "q_len=1," in dims:
        return [(where, ()) for where in (LIKED if op.startswith("matmul") else LIKED[:1])]
    flash = op == "attention" and "window" not in dims
    return [(who, blocks) for who in PEERS if who == "splash" or flash for blocks in BLOCKS[who]]


@dataclass(frozen=True)
class Asking:
    """One program to compile for one target."""

    target: str
    case: str
    who: str
    blocks: tuple[int, ...]

    @property
    def place(self) -> tuple[str, bool, bool]:
        """What a process that compiles it must have been started for: the target, whether operands may lie anywhere,
        and whether libtpu estimates, which takes several times as long and which kernels of attention, compared with
        others by what they issue, need not."""
        of_attention = CASES[self.case][0].startswith("attention")
        return self.target, self.who == "anywhere", self.who in LIKED or not of_attention or self.gradient_of_peer

    @property
    def gradient_of_peer(self) -> bool:
        """Whether XLA's sums around the kernel are part of it."""
        return self.who in PEERS and CASES[self.case][0].endswith("_vjp")

    @property
    def file(self) -> Path:
        """Where the result is kept: named after the program, the compiler and how its answer is read, and of a program
        of this package after its tiling and its kernels' text as well. What else the package holds may change."""
        backend, family = pallas()
        hardware, compiler = targets.find(self.target), family.load_compiler()
        readers = [family.compiler or "", "portakern.core.machine_code"]
        what = [
            self.target, self.case, CASES[self.case], self.who, self.blocks, compiler.versions(hardware),
            repr(hardware), cache.digest(readers, within=[readers[0].rpartition(".")[0]]),
            *map(inspect.getsource, (measured, estimates)),
        ]  # fmt: skip
        if self.who != "portakern":
            what.append([inspect.getsource(part) for part in vars(tpu_programs).values() if inspect.isfunction(part)])
        else:
            module = backend.module_of(CASES[self.case][0], family) or ""
            what += [cache.digest([module], within=[family.package.rpartition(".")[0]]), dict(self.bound[2])]
        name = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]
        return cache_folder() / "tpu-cycles" / f"{name}.json"

    @property
    def bound(self) -> tuple[Implementation, Call, Mapping[str, int]]:
        """What serves the case, its call on arrays without memory, and its tiling."""
        (op, dtype, dims), (backend, family) = CASES[self.case], pallas()
        spec, impl = registry.find_spec(op), backend.implementation(op, family)
        assert impl is not None
        (case,) = suites.requested_cases(op, suites.parse_shape(dims), [dtype], gradients=False)
        return impl, *abstract.abstract_call(spec, impl, case.signature, targets.find(self.target), {})


def pallas() -> tuple[Backend, Family]:
    """The backend, and its family for TPUs."""
    b = registry.backend("pallas")
    return b, next(f for f in b.families if "tpu" in f.platforms)


# ------------------------------------------------------------------------------------------------------------ compiling


def compiled(requests: list[Asking], jobs: int, timeout: float) -> dict[Asking, Found]:
    """What is known of each program, from the cache or from processes that stay for programs of one place."""
    found: dict[Asking, Found] = {}
    files = {p: p.file for p in requests}
    left: SimpleQueue[Asking] = SimpleQueue()
    for program in sorted(requests, key=lambda p: p.attribute):
        known = json.loads(files[program].read_text(encoding="utf-8")) if files[program].is_file() else {}
        if known and known.get("gave_up", timeout) >= timeout:
            found[program] = known
        else:
            left.put(program)
    print(f"{len(found)} of {len(requests)} programs are known", file=sys.stderr)

    def work(_: int) -> None:
        worker: Worker | None = None
        while True:
            try:
                program = left.get_nowait()
            except Empty:
                break
            if worker is None or worker.place != program.place or not worker.alive:
                if worker is not None:
                    worker.close()
                worker = Worker(program.place)
            found[program] = worker.ask(program, timeout)
            write_atomically(files[program], json.dumps(found[program]))
            print(f"{left.qsize()} left; {program}: {found[program]}", file=sys.stderr, flush=True)
        if worker is not None:
            worker.close()

    with ThreadPoolExecutor(max(jobs, 1)) as executor:
        list(executor.map(work, range(jobs)))
    return found


@dataclass
class Worker:
    """A process that compiles programs of one place, with libtpu's estimates; a program that ends it is compiled again
    without them."""

    place: tuple[str, bool, bool]
    scratch: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="portakern-cycles-")))

    def __post_init__(self) -> None:
        target, anywhere, estimates = self.allocate
        compiler = pallas()[1].load_compiler()
        variables = compiler.environment(targets.find(target), quick=True)
        variables = {n: v.replace("{scratch}", str(self.scratch)) for n, v in variables.items()}
        if anywhere:
            variables["LIBTPU_INIT_ARGS"] = variables["LIBTPU_INIT_ARGS"].replace(compiler.FROM_HBM, "")
        if estimates and target not in compiler.NO_ESTIMATE:
            variables["LIBTPU_INIT_ARGS"] += f" --xla_jf_dump_static_llo_profile_to={self.scratch}"
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", target, str(self.scratch)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | variables,
        )  # fmt: skip

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, program: Asking, timeout: float) -> Found:
        start = time.perf_counter()
        answer = self._answer(json.dumps([program.case, program.who, program.blocks]), timeout)
        if "died" in answer and self.allocate[2] and program.who not in LIKED:
            bare = Worker((*self.allocate[:2], False))
            answer = bare._answer(json.dumps([program.case, program.who, program.blocks]), timeout)
            bare.close()
        spent = {"seconds": round(time.perf_counter() - start, 1)}
        return answer | spent | ({"gave_up": timeout} if "died" in answer else {})

    def _answer(self, request: str, timeout: float) -> Found:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(request + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return {"died": True, "why": "the compiler's process ended"}
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            came = selector.select(timeout)
        line = self.process.stdout.readline() if came else ""
        if line.endswith("\n"):
            return json.loads(line)
        self.process.kill()
        return {"died": True, "why": "the compiler's process ended" if came else f"no answer in {timeout:.0f} s"}

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        shutil.rmtree(self.scratch, ignore_errors=True)


def serve(target: str, folder: str) -> None:
    """Compile the programs that come, a line each."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for line in sys.stdin:
        case, who, blocks = json.loads(line)
        try:
            found = measured(target, case, who, tuple(blocks), Path(folder))
        except Exception as e:  # a peer that refuses the call, a compiler that refuses the program
            found = {"why": f"{type(e).__name__}: {e}"[:300]}
        answers.write(json.dumps(found) + "\n")


def measured(target: str, case: str, who: str, blocks: tuple[int, ...], folder: Path) -> Found:
    """Compile one program here."""
    hardware, compiler = targets.find(target), pallas()[1].load_compiler()
    impl, call, tiling = Asking(target, case, who, blocks).bound
    if who in LIKED:
        cost = tpu_programs.xla(call).lower().compile().cost_analysis()
        estimated = sum(estimates(folder).values())
        for path in (folder / "dump").glob("*.txt"):
            path.unlink()
        cores = (hardware.cores or 1) / compiler.TOGETHER.get(target, 1)
        a_cycle = (hardware.bandwidth or math.nan) / (hardware.clock or math.nan) / cores
        memory = cost["bytes accessed"] / a_cycle
        return {"least": round(max(estimated, memory)) if estimated else None, "moved": round(cost["bytes accessed"])}
    traced = compiler.traced(impl, call, tiling) if who == "portakern" else PEERS[who](call, blocks)
    kernels = compiler.kernels_of(traced, call.target)
    if call.spec.is_vjp:  # a peer's forward pass comes along
        kernels = [k for k in kernels if "_fwd" not in k.name]
    around = 0
    for name, cycles in estimates(folder).items():
        mine = [k for k in kernels if name.startswith(k.name)]
        if mine and len(mine) == 1:
            mine[0].cycles = (mine[0].cycles or 0) + cycles
        elif not mine and "_fwd" not in name:
            around += cycles
    least = [k.least(hardware) for k in kernels]
    issued = [max(k.issued or math.nan, k.memory(hardware) or 0.0) for k in kernels]
    return {
        "tiling": dict(tiling) if who == "portakern" else {"blocks": list(blocks)},
        "issued": None if any(map(math.isnan, issued)) else round(sum(issued)),
        "least": None if None in least else round(sum(f or 0.0 for f in least)),
        "around": around, "moved": sum(k.moved or 0 for k in kernels), "spills": sum(k.spills or 0 for k in kernels),
    }  # fmt: skip


def estimates(folder: Path) -> dict[str, int]:
    """libtpu's, by operation of the program that was compiled last."""
    found: dict[str, int] = {}
    for path in folder.glob("*static_llo_profile.textproto"):
        cycles = sum(map(int, re.findall(r"estimated_cycles: (\d+)\n", path.read_text())))
        found[path.name] = cycles
        path.unlink()
    return found


# --------------------------------------------------------------------------------------------------------------- table


def row_of(target: str, case: str, found: Mapping[Asking, Found]) -> dict[str, Any]:
    """A case: its kernels, and what others make of the same maths, at their best."""
    op, dtype, _ = CASES[case]
    ours = found[Asking(target, case, *OURS)]
    row: dict[str, Any] = {"case": case, "op": op, "dtype": dtype, "target": target, "portakern": ours}
    for other, figure in (("xla", "least"), *((who, "issued") for who in PEERS)):
        theirs = [
            found[Asking(target, case, who, blocks)]
            for who, blocks in others(case)
            if who == other or (other == "xla" and who in LIKED)
        ]
        best = min(theirs, key=lambda f: total(f, figure) or math.inf, default={})
        mine, peer = total(ours, figure), total(best, figure)
        row |= {other: best, f"over_{other}": round(mine / peer, 3) if mine and peer else None}
    return row


def total(found: Found, figure: str) -> float | None:
    """A program's cycles, those around its kernels with them."""
    cycles = found.get(figure)
    return None if cycles is None else cycles + found.get("around", 0)


def line_of(row: Mapping[str, Any]) -> str:
    def shown(name: str) -> str:
        found, ratio = row[name], row.get(f"over_{name}")
        parts = "/".join("-" if found.get(n) is None else f"{found[n]}" for n in ("issued", "least", "around"))
        return f"{name} {parts}" + (f" = {ratio:.2f}" if ratio else f" ({found['why']})" if "why" in found else "")

    return f"{row['target']} {row['case']}: " + ", ".join(shown(n) for n in ("portakern", "xla", *PEERS) if row[n])


if __name__ == "__main__":
    main()
