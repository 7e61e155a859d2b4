"""Hopper machine code without a GPU: XLA compiles for a chip that is only described, and Mosaic tells what it made.

What it tells lies in a folder that the process's environment names, and so is chosen before jax is imported: for each
kernel its PTX, what ptxas said of it and the shared memory that it asked for. The machine code itself is not told
without NVIDIA's disassembler, which comes with no package of jax's: matrix instructions are counted in the PTX, one for
each that the machine code has.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portakern import install
from portakern.core import targets
from portakern.core.config import Config
from portakern.core.machine_code import Compiled, Kernel, occupancy
from portakern.core.targets import Hardware

if TYPE_CHECKING:
    from portakern.core.backend import Implementation
    from portakern.core.call import Call

DUMP = "MOSAIC_GPU_DUMP_TO"
PLUGINS, PLUGIN = "jax_plugins", "jax_plugins.xla_cuda13"
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cuda-nvcc")
BARRIER_BYTES = 8
GRID = (2**31 - 1, 65535, 65535)  # the CUDA C++ programming guide's limits of a grid, by axis


def unavailable(hardware: Hardware) -> str | None:
    # the folder of plugins is looked for first: where there is none, to look for what lies in it is an error
    found = importlib.util.find_spec(PLUGINS) and importlib.util.find_spec(PLUGIN)
    if sys.platform != "linux" or not found:
        return (
            "jax's plugin for CUDA 13, which compiles for GPUs without one, is not installed; "
            "run: pip install 'jax[cuda13]'"
        )
    return None


def environment(hardware: Hardware, quick: bool) -> dict[str, str]:
    return {"JAX_PLATFORMS": "cpu", DUMP: "{scratch}/dump"}


def versions(hardware: Hardware) -> dict[str, str]:
    return {package: install.installed(package) or "none" for package in PACKAGES}


def build(impl: Implementation, call: Call, config: Config) -> Compiled:
    """Compile a call for one GPU of the target's kind."""
    hardware, folder = targets.find(call.target.arch), Path(os.environ[DUMP]) if DUMP in os.environ else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    before = _files(folder)
    compiled = lowered(impl, call, config).compile()
    told = _files(folder) - before
    code = sorted((p for p in told if p.suffix == ".ptx"), key=_number)
    kernels = [_read(path, _resources_of(path, told), hardware) for path in code]
    for path in told:  # 20 MB a kernel
        path.unlink(missing_ok=True)
    return Compiled(kernels, compiled.memory_analysis().generated_code_size_in_bytes)


def lowered(impl: Implementation, call: Call, config: Config) -> Any:
    """The program that a call makes for one GPU of the target's kind, before it is compiled."""
    import jax
    from jax.experimental import topologies

    names = [n for n, a in call.arrays.items() if a is not None]

    def program(*arrays: Any) -> tuple[Any, ...]:
        inner = call.replace(arrays={**call.arrays, **dict(zip(names, arrays, strict=True))})
        return tuple(o for o in impl.run(inner, config) if o is not None)

    hardware = targets.find(call.target.arch)
    topology = topologies.get_topology_desc(
        hardware.product, platform="cuda", topology="1x1x1", target_config=described(hardware)
    )
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    forms = [jax.ShapeDtypeStruct(call.arrays[n].shape, call.arrays[n].dtype, sharding=sharding) for n in names]
    return jax.jit(program).trace(*forms).lower()


def described(hardware: Hardware) -> str:
    """A GPU as XLA reads it (``GpuTargetConfigProto``, as text)."""
    major, minor = divmod(int(hardware.name.removeprefix("sm_")), 10)
    figures = {
        "threads_per_block_limit": hardware.program_threads,
        "threads_per_warp": hardware.lanes,
        "threads_per_core_limit": hardware.core_threads,
        "shared_memory_per_block": 48 * 1024,  # what a block has unasked, on every NVIDIA GPU
        "shared_memory_per_block_optin": hardware.on_chip["shared"],
        "shared_memory_per_core": hardware.core_memory["shared"],
        "registers_per_core_limit": hardware.core_registers,
        "registers_per_block_limit": hardware.core_registers,
        "core_count": hardware.cores,
        "fpus_per_core": 128,
        "l2_cache_size": hardware.l2,
        "memory_bandwidth": None if hardware.bandwidth is None else int(hardware.bandwidth),
        "device_memory_size": None if hardware.capacity is None else int(hardware.capacity),
        "clock_rate_ghz": 1.98,
        **{f"block_dim_limit_{axis}": most for axis, most in zip("xyz", GRID, strict=True)},
    }
    lines = [f"  {name}: {value}" for name, value in figures.items() if value is not None]
    capability = f"major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES"
    lines.append(f"  cuda_compute_capability {{ {capability} }}")
    inner = "\n".join(lines)
    return f'gpu_device_info {{\n{inner}\n}}\nplatform_name: "CUDA"\ndevice_description_str: "{hardware.product}"\n'


def _files(folder: Path | None) -> set[Path]:
    return {p for p in folder.iterdir() if p.is_file()} if folder else set()


def _number(path: Path) -> int:
    """The place of a file among those of its process: Mosaic numbers kernels as it lowers them."""
    return int(path.name.partition(".")[0].rpartition("_")[2])


def _name(path: Path) -> str:
    """The kernel that a file is of."""
    return path.name.partition(".")[0].rpartition("_")[0]


def _resources_of(code: Path, dumped: set[Path]) -> Path:
    """What was told of a kernel's resources. It is told when the kernel is lowered and its code when XLA compiles it,
    which from jax 0.12 on goes through kernels in another order: of those of one name the first is the first."""
    of_name = sorted((p for p in dumped if _name(p) == _name(code)), key=_number)
    places = [p for p in of_name if p.suffix == ".ptx"]
    return [p for p in of_name if p.name.endswith(".resources.txt")][places.index(code)]


def _read(path: Path, resources: Path, hardware: Hardware) -> Kernel:
    """What Mosaic told of one kernel."""
    ptx, log = path.read_text(), path.with_suffix(".ptxas").read_text()
    on_chip = {"shared": _shared(resources.read_text())}
    threads = [int(n) for n in re.findall(r"\.(?:max|req)ntid (\d+)", ptx)]
    registers = next(_numbers(r"Used (\d+) registers", log), None)
    return Kernel(
        _name(path),
        threads=threads[0] if threads else None,
        registers=registers,
        spills=_spills(log),
        on_chip=on_chip,
        matrix=dict(Counter(re.findall(r"\b(wgmma\.mma_async\.[\w.]+)", ptx)).most_common()),
        occupancy=occupancy(threads[0] // hardware.lanes, registers, on_chip, hardware) if threads else None,
        serialised=list(dict.fromkeys(re.findall(r"\bC75\d\d\) Potential Performance Loss: .*", log))),
        assembly=ptx,
    )


def _spills(log: str) -> int:
    """Bytes a thread that are stored because no register is left for them, in all functions of a kernel. ptxas says it
    of each beside its stack, and where it is not 0 in a warning too."""
    return sum(_numbers(r"bytes stack frame, (\d+) bytes spill stores", log))


def _shared(resources: str) -> int:
    """Bytes of shared memory that a block asks for: what the kernel names, and its barriers."""
    barriers = re.findall(r"num_barriers=(\d+)[^)]*\): (\d+)", resources)
    return sum(_numbers(r"smem_scratch_bytes=(\d+)", resources)) + BARRIER_BYTES * sum(
        int(each) * int(times) for each, times in barriers
    )


def _numbers(pattern: str, text: str) -> Iterator[int]:
    return (int(n) for n in re.findall(pattern, text))
