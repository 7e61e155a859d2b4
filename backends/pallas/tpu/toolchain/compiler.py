"""TPU machine code without a TPU: libtpu compiles for a topology that is only described.

It tells what it made when asked to dump it. The environment of the process decides what it tells, so it is chosen
before jax is imported. Per kernel: the memory it allocates, the VLIW bundles, and what each bundle keeps busy. An
estimate of the whole run's cycles, for which libtpu follows the grid, is made by another process: it may end that
process, or never come to an end on one of XLA's own copies and take all memory on the way.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portakern import install
from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.tpu.family import FAMILY
from portakern.core import targets
from portakern.core.config import NOTHING, Config
from portakern.core.machine_code import Compiled, Kernel
from portakern.core.targets import Hardware, Target
from portakern.errors import UnsupportedError
from portakern.tools.compile import cache
from portakern.tools.compile.abstract import signature_of

if TYPE_CHECKING:
    from portakern.backends.pallas.tpu.toolchain.static import GridWalk, Region
    from portakern.core.backend import Implementation
    from portakern.core.call import Call

TOPOLOGY = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"}
TOGETHER = {"v4": 2, "v5p": 2}  # cores that JAX shows as one device, and that share a launch
NO_ESTIMATE = ("v4",)  # libtpu has no model of its DMA latency
ESTIMATE_SECONDS, ESTIMATE_BYTES = 60.0, 4 * 2**30  # what the other process may take
DUMP, WANT_ESTIMATE = "PORTAKERN_TPU_DUMP", "PORTAKERN_TPU_ESTIMATE"
TELL = "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=original|final_bundles|final_hlo-static"
# Whatever fits is kept in VMEM from one operation of a program to the next, and a kernel then needs no windows for it:
# here every kernel must bring its own.
FROM_HBM = (
    "--xla_vf_vmem_memory_space_assignment=false --xla_gf_vmem_memory_space_assignment=false "
    "--xla_tpu_cmem_memory_space_assignment=false"
)


def unavailable(hardware: Hardware) -> str | None:
    if importlib.util.find_spec("libtpu") is None:
        return f"libtpu, which compiles for TPUs without one, is not installed; {install.command('tpu')}"
    return None


def environment(hardware: Hardware, quick: bool) -> dict[str, str]:
    return {
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": "{scratch}",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_ID": "0",
        "TPU_SKIP_MDS_QUERY": "1",
        "LIBTPU_INIT_ARGS": f"{FROM_HBM} --xla_jf_dump_to={{scratch}}/dump {TELL}",
        DUMP: "{scratch}/dump",
        WANT_ESTIMATE: "" if quick or hardware.name in NO_ESTIMATE else "1",
    }


def versions(hardware: Hardware) -> dict[str, str]:
    return {package: install.installed(package) or "none" for package in ("jax", "jaxlib", "libtpu")}


def build(impl: Implementation, call: Call, config: Config) -> Compiled:
    """Compile a call for one core of the target's chip."""
    compiled, walks, codes = _build(traced(impl, call, config), call.target, call, config)
    return Compiled(_counted(compiled.kernels, walks, codes, call.target), compiled.code_bytes)


def kernels_of(program: Any, target: Target) -> list[Kernel]:
    """The kernels of any traced program, whoever wrote them, with what a run of theirs issues and moves."""
    compiled, walks, codes = _build(program, target)
    if {w.name for w in walks} != {k.name for k in compiled.kernels} and len(walks) == len(compiled.kernels):
        # in order: the program may know a kernel by another name
        walks = [w._replace(name=k.name) for w, k in zip(walks, compiled.kernels, strict=True)]
    return _counted(compiled.kernels, walks, codes, target)


def survey(impl: Implementation, call: Call, config: Config) -> Compiled:
    """As :func:`build`, without the machine code's text, and what that says is taken from an earlier call of this
    process whose kernels are the same but for the extents of arrays and grid: to rank calls, and for nothing else."""
    from portakern.backends.pallas.tpu.toolchain.static import walks_of

    program = traced(impl, call, config)
    walks = walks_of(program.jaxpr.jaxpr, cores=TOGETHER.get(call.target.arch, 1))
    key = (call.target, *(w.program for w in walks))
    if key not in _SURVEYED or os.environ.get(WANT_ESTIMATE):
        compiled, walks, codes = _build(program, call.target, call, config)
        _SURVEYED[key] = Compiled([replace(k, assembly="") for k in compiled.kernels], compiled.code_bytes), codes
    kept, codes = _SURVEYED[key]
    return Compiled(_counted([replace(k) for k in kept.kernels], walks, codes, call.target), kept.code_bytes)


_SURVEYED: dict[Any, tuple[Compiled, list[Region | None]]] = {}


def memory(impl: Implementation, call: Call, config: Config) -> Compiled:
    """As :func:`build`, of each kernel the VMEM that it takes and may take, to the byte, and nothing else. It is kept
    under the name of the program that libtpu is given: an edit that leaves the program as it was asks libtpu nothing.

    Raises:
      UnsupportedError: a kernel takes more than it may; libtpu says of how much no more than hundredths of a MiB.
    """
    lowered = traced(impl, call, config).lower()
    program = re.sub(r"\\22debug_locations\\22: \\22[^\\]*\\22", "", lowered.as_text())
    hardware = targets.find(call.target.arch)
    asked = json.dumps([hardware.name, versions(hardware), os.environ.get("LIBTPU_INIT_ARGS"), program])
    name = f"memory-{hashlib.sha256(asked.encode()).hexdigest()[:32]}"
    found = cache.find_data(name)
    if not found:
        found = scoped_memory(_or_refused(lowered).as_text(), hardware)
        cache.keep_data(name, found)
    return Compiled([Kernel(k, on_chip={"vmem": takes}, granted={"vmem": may_take}) for k, takes, may_take in found])


def _or_refused(lowered: Any) -> Any:
    """The program, compiled; what libtpu says of a kernel that takes too much, as a refusal."""
    from jax.errors import JaxRuntimeError

    try:
        return lowered.compile()
    except JaxRuntimeError as e:
        said = re.search(r"allocating on stack for %([\w.-]+).*?size (\S+) and limit (\S+) ", str(e), re.DOTALL)
        if said is None:
            raise
        raise UnsupportedError(f"{said[1]} takes {said[2]} bytes of VMEM, and may take {said[3]}") from e


def scoped_memory(text: str, hardware: Hardware) -> list[tuple[str, int, int]]:
    """(kernel, the bytes of VMEM that it takes, those that it may take) of a compiled program's text. What the compiler
    keeps there for want of registers is counted: a kernel compiles if and only if the one is no more than the other."""
    granted, found = hardware.scoped["vmem"] or 0, []
    for call in re.finditer(r"%([\w.-]+) = [^\n]*?\"tpu_custom_call\"[^\n]*?backend_config=", text):
        told, _ = json.JSONDecoder().raw_decode(text, call.end())
        takes, may_take = (
            [int(part["size"]) for part in told.get(key, ()) if part["memory_space"] == VMEM]
            for key in ("used_scoped_memory_configs", "scoped_memory_configs")
        )
        if takes:
            found.append((call[1], sum(takes), sum(may_take) or granted))
    return found


VMEM = "1"  # as XLA numbers memories


def _build(
    program: Any, target: Target, call: Call | None = None, config: Config = NOTHING
) -> tuple[Compiled, list[GridWalk], list[Region | None]]:
    """What libtpu made, how its kernels walk their grids, and of each the regions of its code, where that was told."""
    from portakern.backends.pallas.tpu.toolchain.static import regions, walks_of

    dump = Path(os.environ[DUMP]) if DUMP in os.environ else None
    before = _files(dump)
    compiled = program.lower().compile()
    told = _files(dump) - before
    text = compiled.as_text()
    made = re.findall(r"%([\w.-]+) = .*custom_call_target=\"tpu_custom_call\"", text)
    cycles = _estimate(call, config, made) if call and os.environ.get(WANT_ESTIMATE) else {}
    read = {name: _read(name, told, cycles.get(name)) for name in made}
    for name, takes, may_take in scoped_memory(text, targets.find(target.arch)):
        read[name].on_chip["vmem"], read[name].granted["vmem"] = takes, may_take
    kernels = _merged([*read.values()])
    for path in told:  # a process that compiles a thousand calls would fill the disk
        path.unlink(missing_ok=True)
    codes = [regions(k.assembly) if k.assembly else None for k in kernels]
    size = compiled.memory_analysis().generated_code_size_in_bytes
    walks = walks_of(program.jaxpr.jaxpr, program.jaxpr.consts, TOGETHER.get(target.arch, 1))
    return Compiled(kernels, size), walks, codes


def traced(impl: Implementation, call: Call, config: Config) -> Any:
    """The program of a call, traced for the first chip of a topology that is only described."""
    import jax
    from jax.experimental import topologies

    names = [n for n, a in call.arrays.items() if a is not None]

    def program(*arrays: Any) -> tuple[Any, ...]:
        inner = call.replace(arrays={**call.arrays, **dict(zip(names, arrays, strict=True))})
        return tuple(o for o in impl.run(inner, config) if o is not None)

    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY[call.target.arch])
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    forms = [jax.ShapeDtypeStruct(call.arrays[n].shape, call.arrays[n].dtype, sharding=sharding) for n in names]
    return jax.jit(program).trace(*forms)


def _counted(kernels: list[Kernel], walks: list[GridWalk], codes: list[Region | None], target: Target) -> list[Kernel]:
    """The kernels, with what a run issues and moves; of one that serves several launches, in all of them."""
    from portakern.backends.pallas.tpu.toolchain.static import cycles

    hardware = targets.find(target.arch)
    a_cycle = (hardware.clock or math.inf) * (hardware.cores or 1)  # a share of a kernel runs on one core
    rates = (hardware.flops["bfloat16"] or 0.0) / a_cycle or math.inf, (hardware.bandwidth or 0.0) / a_cycle or math.inf
    names = [k.name for k in kernels]
    for i, (kernel, code) in enumerate(zip(kernels, codes, strict=True)):
        mine = [w for w in walks if w.name == kernel.name]
        if names.count(kernel.name) > 1:
            place = names[:i].count(kernel.name)
            mine = mine[place : place + 1]
        if mine and code is not None:
            kernel.issued = sum(max(cycles(one, code, *rates) for one in (walk, *walk.beside)) for walk in mine)
            kernel.moved = sum(one.moved for walk in mine for one in (walk, *walk.beside))
            kernel.cores = min(1 + len(walk.beside) for walk in mine)
            kernel.assumed = WIDEST if any(walk.widest for walk in mine) else ""
    return kernels


WIDEST = "segments are data, and every query is taken to visit all keys"


def _files(folder: Path | None) -> set[Path]:
    return {p for p in folder.rglob("*") if p.is_file()} if folder else set()


def _read(name: str, dumped: set[Path], cycles: int | None) -> Kernel:
    """What libtpu told of one kernel; bare where it was not asked to."""

    def text(label: str) -> str:
        found = [p for p in dumped if re.fullmatch(rf"\d+-{re.escape(name)}-\d+-{label}\.txt", p.name)]
        return found[0].read_text(errors="replace") if found else ""

    allocations = re.findall(r"#allocation\d+ \[[^\n]*?space=(vmem|smem), size = (0x[0-9a-f]+)", text("original"))
    bundles, busy = text("final_bundles"), _busy(text("final_hlo-static-per-bundle-utilization"))
    on_chip = (
        {memory: sum(int(size, 16) for space, size in allocations if space == memory) for memory in ("vmem", "smem")}
        if allocations
        else {}
    )
    # of a product's suffixes the dtype alone: not the mask, nor which of the core's MXUs it is
    products = re.findall(r"\b(vmatmul|vmatpush)\d?((?:\.\w+)+)", bundles)
    matrix = Counter(
        verb + next((f".{s}" for s in suffixes.split(".") if re.fullmatch(r"(bf|[fsu])\d+\w*", s)), "")
        for verb, suffixes in products
    )
    return Kernel(
        name.partition(".")[0],
        on_chip=on_chip,
        spills=busy.get("VSTORE:SPILL"),
        matrix=dict(matrix.most_common()),
        cycles=cycles,
        assembly=bundles,
    )


def _merged(kernels: list[Kernel]) -> list[Kernel]:
    """Of equal kernels libtpu compiles one: the others, of which it tells nothing, count as launches of that one."""
    told = {k.name: k for k in kernels if k.assembly}
    for k in kernels:
        if not k.assembly and k.name in told:
            same = told[k.name]
            same.launches, same.cycles = same.launches + 1, same.cycles or k.cycles
    return [k for k in kernels if k.assembly or k.name not in told]


def _busy(table: str) -> dict[str, int]:
    """Unit -> how many of its slots the kernel's bundles fill."""
    lines = table.splitlines()
    if len(lines) < 5:
        return {}
    units = [u.strip() for u in lines[1].split(",")]
    rows = [list(map(int, line.split())) for line in lines[4:] if line.strip()]
    return dict(zip(units, map(sum, zip(*rows, strict=True)), strict=False))


def _estimate(call: Call, config: Config, names: list[str]) -> dict[str, int]:
    """Kernel -> cycles of a whole run, where another process came to an estimate before it died or had taken enough."""
    with tempfile.TemporaryDirectory() as folder:
        told = partial(_told_cycles, Path(folder), names)
        variables = {
            WANT_ESTIMATE: "",
            "LIBTPU_INIT_ARGS": f"{FROM_HBM} --xla_jf_dump_static_llo_profile_to={folder}",
            "PORTAKERN_LOG": os.devnull,
        }
        command = [sys.executable, "-m", "portakern.tools.compile.worker", BACKEND.name, call.target.arch]
        quiet = subprocess.DEVNULL
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, text=True, env=os.environ | variables
        ) as process:
            assert process.stdin is not None
            process.stdin.write(
                json.dumps(
                    {
                        "op": call.spec.name,
                        "variant": FAMILY.name,
                        "tiling": dict(config),
                        "form": signature_of(call),
                        "assembly": False,
                    }
                )
                + "\n"
            )
            process.stdin.close()
            end = time.monotonic() + ESTIMATE_SECONDS
            while (
                process.poll() is None
                and time.monotonic() < end
                and _resident(process.pid) < ESTIMATE_BYTES
                and len(told()) < len(names)
            ):
                time.sleep(0.2)
            process.kill()
        return told()


def _told_cycles(folder: Path, names: list[str]) -> dict[str, int]:
    """Kernel -> cycles, of the profiles that are there: some versions of libtpu put the chip between the kernel's name
    and the rest. One of 0 is what it writes of a kernel that it cannot follow."""
    found: dict[str, int] = {}
    for name in names:
        for path in folder.glob(f"{name}_*static_llo_profile.textproto"):
            cycles = sum(map(int, re.findall(r"estimated_cycles: (\d+)\n", path.read_text())))
            found |= {name: cycles} if cycles else {}
    return found


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
