"""Targets, and the hardware that kernels are compiled for: the limits of a program, the rates of a chip, and the source
of each figure.

Tilings, the compile matrix and rooflines read these figures from this table alone. Limits belong to an architecture;
rates, bandwidth and capacity belong to ``product``, one chip of the architecture. A figure that no document of the
maker gives is None, with a note.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from portakern.errors import SpecError

__all__ = ["HARDWARE", "HOST", "Hardware", "Target", "family", "find", "least"]


class Target(NamedTuple):
    """What runs a kernel. ``platform`` is cpu, cuda, rocm or tpu (``traced`` until a platform is chosen); ``arch`` is
    sm_90, gfx942, v5e and the like, or empty."""

    platform: str
    arch: str = ""

    def __str__(self) -> str:
        return f"{self.platform} {self.arch}".strip()


HOST = Target("cpu")

KIB, MIB, GB, TERA = 2**10, 2**20, 10**9, 10**12


@dataclass(frozen=True)
class Hardware:
    """One architecture, and one product of it.

    Attributes:
      name, platform: as in :class:`Target`. product: the chip whose rates these are.
      lanes: threads of a warp or wave; on a TPU the elements of a row of a vector register. sublanes: rows of a TPU's
        vector register.
      program_threads: the most threads of one program (block, workgroup). core_threads: the most threads that reside
        on one core (SM, CU).
      thread_registers: 32-bit registers that one thread may have. core_registers: those that all threads of a core
        share.
      core_programs: the most programs that reside on one core. simds: schedulers among which a core's waves are
        divided.
      on_chip: memory -> bytes that one program may use. core_memory: memory -> bytes that a core has for all its
        programs.
      scoped: memory -> bytes that the compiler grants a kernel that asks for no more.
      cores: SMs, CUs or TensorCores of the product.
      l2: bytes of the last cache before device memory. capacity: bytes of device memory.
      bandwidth: bytes a second between chip and device memory. clock: cycles a second at the peak rate.
      flops: dtype -> dense operations a second at the best rate of the chip: the matrix unit's, if it takes the dtype.
      matrix: names of the matrix unit's instructions. matrix_dtypes: the operands that they take.
      sources: figure -> the document that states it. notes: what a reader of a figure must know, and why a figure is
        None.
    """

    name: str
    platform: str
    product: str
    lanes: int
    on_chip: Mapping[str, int | None]
    core_memory: Mapping[str, int | None]
    matrix: str
    matrix_dtypes: tuple[str, ...]
    flops: Mapping[str, float | None]
    bandwidth: float | None
    capacity: float | None
    cores: int | None
    sources: Mapping[str, str]
    sublanes: int | None = None
    program_threads: int | None = None
    core_threads: int | None = None
    thread_registers: int | None = None
    core_registers: int | None = None
    core_programs: int | None = None
    simds: int | None = None
    l2: int | None = None
    clock: float | None = None
    scoped: Mapping[str, int | None] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def target(self) -> Target:
        return Target(self.platform, self.name)

    @property
    def figures(self) -> dict[str, float | int | tuple[str, ...] | None]:
        """Every figure under the name that :attr:`sources` and :attr:`notes` use."""
        flat = {n: getattr(self, n) for n in _PLAIN}
        for group in ("on_chip", "core_memory", "scoped", "flops"):
            flat.update({f"{group} {n}": v for n, v in getattr(self, group).items()})
        return flat


_PLAIN = ("lanes", "sublanes", "program_threads", "core_threads", "thread_registers", "core_registers", "core_programs",
          "simds", "cores", "l2", "capacity", "bandwidth", "clock",
          "matrix_dtypes")  # fmt: skip

# fmt: off
# --------------------------------------------------------------------------------------------------------------- NVIDIA
CUDA = (
    "NVIDIA, CUDA C++ Programming Guide, Compute Capabilities: Technical Specifications, "
    "https://docs.nvidia.com/cuda/cuda-c-programming-guide/"
)
PTX = (
    "NVIDIA, PTX ISA, warp-level and asynchronous matrix instructions, "
    "https://docs.nvidia.com/cuda/parallel-thread-execution/"
)

_GPU_NOTES = {
    "sublanes": "a GPU's vector registers have one row",
    "clock": "nothing counts a GPU's cycles here: it changes with load and heat",
}
_HALF = ("float16", "bfloat16", "tf32")
_FP8 = ("float8_e4m3fn", "float8_e5m2")


class _Sm(NamedTuple):
    """A streaming multiprocessor: KiB of shared memory, warps and blocks that are resident at once, KiB of tensor
    memory."""

    shared: int
    warps: int
    blocks: int
    tmem: int | None = None


def _nvidia(name: str, product: str, rates: str, *, sm: _Sm, sms: int | None, matrix: str,
            takes: tuple[str, ...], peak: Mapping[str, float], bandwidth: float, capacity: float,
            l2: int | None = None, notes: Mapping[str, str] = MappingProxyType({})) -> Hardware:
    """``sms``: SMs of the product; ``rates``: the document of the product's figures, operations in tera a second;
    ``bandwidth``, ``capacity`` in GB, ``l2`` in MiB.
    """
    on_chip: dict[str, int | None] = {"shared": (sm.shared - 1) * KIB}  # the system keeps 1 KiB of each block
    core_memory: dict[str, int | None] = {"shared": sm.shared * KIB}
    if sm.tmem:
        on_chip["tmem"] = core_memory["tmem"] = sm.tmem * KIB
    limits = ("lanes", "program_threads", "core_threads", "thread_registers", "core_registers", "core_programs",
        "simds", "on_chip shared", "core_memory shared")
    sources = dict.fromkeys(limits, CUDA) | dict.fromkeys(("matrix_dtypes", "on_chip tmem", "core_memory tmem"), PTX)
    sources |= dict.fromkeys(("cores", "l2", "capacity", "bandwidth", *(f"flops {d}" for d in peak)), rates)
    return Hardware(
        name, "cuda", product, lanes=32, program_threads=1024, core_threads=sm.warps * 32, thread_registers=255,
        core_registers=65536, core_programs=sm.blocks, simds=4,
        on_chip=on_chip, core_memory=core_memory, matrix=matrix, matrix_dtypes=takes,
        flops={d: r * TERA for d, r in peak.items()},
        bandwidth=bandwidth * GB, capacity=capacity * GB, cores=sms, l2=None if l2 is None else l2 * MIB,
        sources=sources, notes=_GPU_NOTES | dict(notes),
    )


_NO_L2 = {"l2": "not in the product's data sheet"}
_NVIDIA = (
    _nvidia("sm_80", "A100 SXM4 80 GB", "NVIDIA, A100 Tensor Core GPU data sheet and architecture white paper",
            sm=_Sm(164, 64, 32), sms=108,
            matrix="mma.sync (HMMA)", takes=(*_HALF, "float64", "int8"), l2=40, bandwidth=2039, capacity=80,
            peak={"float32": 19.5, "float64": 19.5, "tf32": 156, "float16": 312, "bfloat16": 312, "int8": 624}),
    _nvidia("sm_86", "A10", "NVIDIA, A10 Tensor Core GPU data sheet", sm=_Sm(100, 48, 16), sms=72,
            matrix="mma.sync (HMMA)", takes=(*_HALF, "int8"), bandwidth=600, capacity=24, notes=_NO_L2,
            peak={"float32": 31.2, "tf32": 62.5, "float16": 125, "bfloat16": 125, "int8": 250}),
    _nvidia("sm_89", "L40S", "NVIDIA, L40S data sheet", sm=_Sm(100, 48, 24), sms=142,
            matrix="mma.sync (HMMA)", takes=(*_HALF, *_FP8, "int8"), bandwidth=864, capacity=48, notes=_NO_L2,
            peak={"float32": 91.6, "tf32": 183, "float16": 362.05, "bfloat16": 362.05, "float8_e4m3fn": 733,
                  "int8": 733}),
    _nvidia("sm_90", "H100 SXM5 80 GB",
            "NVIDIA, H100 Tensor Core GPU architecture white paper (rates without sparsity)",
            sm=_Sm(228, 64, 32), sms=132,
            matrix="wgmma (HGMMA)", takes=(*_HALF, *_FP8, "int8"), l2=50, bandwidth=3350, capacity=80,
            peak={"float32": 66.9, "float64": 66.9, "tf32": 494.7, "float16": 989.4, "bfloat16": 989.4,
            "float8_e4m3fn": 1978.9, "int8": 1978.9}),
    _nvidia("sm_100", "B200", "NVIDIA, HGX B200 data sheet (an eighth of the board, without sparsity)",
            sm=_Sm(228, 64, 32, tmem=256), sms=None,
            matrix="tcgen05.mma (UTCHMMA)", takes=(*_HALF, *_FP8, "int8"), bandwidth=8000, capacity=180,
            peak={"float32": 75, "tf32": 1125, "float16": 2250, "bfloat16": 2250, "float8_e4m3fn": 4500},
            notes=_NO_L2 | {"cores": "not in the board's data sheet",
            "flops float8_e4m3fn": "tcgen05 takes 6- and 4-bit operands too, at higher rates"}),
    _nvidia("sm_120", "GeForce RTX 5090",
            "NVIDIA, RTX Blackwell GPU Architecture white paper, appendix A (float32 accumulation, without sparsity)",
            sm=_Sm(100, 48, 24), sms=170, matrix="mma.sync (HMMA)", takes=(*_HALF, *_FP8, "int8"), l2=96,
            bandwidth=1792, capacity=32,
            peak={"float32": 104.8, "tf32": 104.8, "float16": 209.5, "bfloat16": 209.5, "float8_e4m3fn": 419}),
)

# ------------------------------------------------------------------------------------------------------------------ AMD
ROCM = (
    "AMD, ROCm documentation, GPU hardware specifications, https://rocm.docs.amd.com/en/latest/reference/gpu-specs.html"
)
LLVM = "LLVM, User Guide for AMDGPU Backend, https://llvm.org/docs/AMDGPUUsage.html"
ISA = (
    "AMD, instruction set architecture reference guide of the generation (CDNA 2, CDNA 3, CDNA 4, RDNA 3, RDNA 4), "
    "https://gpuopen.com/amd-isa-documentation/"
)


def _amd(name: str, product: str, rates: str, *, lds: int, cus: int, l2: int, takes: tuple[str, ...],
         peak: Mapping[str, float], bandwidth: float, capacity: float,
         notes: Mapping[str, str] = MappingProxyType({})) -> Hardware:
    """``lds``: KiB that a workgroup may have. A CDNA unit has four SIMDs of waves of 64; two RDNA units share LDS, and
    each has two SIMDs of waves of 32.
    """
    cdna = name.startswith("gfx9")
    lanes, waves, registers = (64, 8, 512) if cdna else (32, 16, 256)
    simds = 4 if cdna else 2
    sources = dict.fromkeys(("lanes", "cores", "l2", "on_chip lds", "core_memory lds", "core_registers", "capacity"),
        ROCM)
    sources |= dict.fromkeys(("program_threads", "core_threads", "thread_registers", "simds"),
    LLVM) | {"matrix_dtypes": ISA}
    sources |= dict.fromkeys(("bandwidth", *(f"flops {d}" for d in peak)), rates)
    return Hardware(
        name, "rocm", product, lanes=lanes, program_threads=1024, core_threads=simds * waves * lanes,
        thread_registers=registers,
        core_registers=simds * lanes * (512 if cdna else 1536), simds=simds,
        on_chip={"lds": lds * KIB}, core_memory={"lds": lds * KIB}, matrix="v_mfma" if cdna else "v_wmma",
        matrix_dtypes=takes,
        flops={d: r * TERA for d, r in peak.items()}, bandwidth=bandwidth * GB, capacity=capacity * GB, cores=cus,
        l2=l2 * MIB, sources=sources,
        notes=_AMD_NOTES | ({} if cdna else _RDNA_NOTES) | dict(notes),
    )


_AMD_NOTES = _GPU_NOTES | {"core_programs": "no limit of its own that binds before waves, registers or LDS"}
_RDNA_NOTES = {"core_memory lds": "half of the 128 KiB that a workgroup processor's two compute units share"}
_AMD = (
    _amd("gfx90a", "one die of MI250X", "AMD, Instinct MI250X data sheet, halved: each of its two dies is a device",
         lds=64, cus=110, l2=8,
         takes=("float16", "bfloat16", "float32", "float64", "int8"), bandwidth=1638.4, capacity=64,
         peak={"float32": 47.85, "float64": 47.85, "float16": 191.5, "bfloat16": 191.5, "int8": 191.5}),
    _amd("gfx942", "MI300X", "AMD, Instinct MI300X data sheet", lds=64, cus=304, l2=32,
         takes=("float16", "bfloat16", "tf32", "float32", "float64", "float8_e4m3fnuz", "float8_e5m2fnuz", "int8"),
         bandwidth=5300, capacity=192,
         peak={"float32": 163.4, "float64": 163.4, "tf32": 653.7, "float16": 1307.4, "bfloat16": 1307.4,
         "float8_e4m3fnuz": 2614.9, "int8": 2614.9}),
    _amd("gfx950", "MI355X", "AMD, Instinct MI355X data sheet", lds=160, cus=256, l2=32,
         takes=("float16", "bfloat16", "float32", "float64", *_FP8, "int8"), bandwidth=8000, capacity=288,
         peak={"float32": 157.3, "float16": 2516.6, "bfloat16": 2516.6, "float8_e4m3fn": 5033.2},
         notes={"matrix_dtypes": "6- and 4-bit operands too; CDNA 3's tf32 is gone"}),
    _amd("gfx1100", "Radeon RX 7900 XTX", "AMD, Radeon RX 7900 XTX product page", lds=64, cus=96, l2=6,
         takes=("float16", "bfloat16", "int8"), bandwidth=960, capacity=24,
         peak={"float32": 61.4, "float16": 122.8, "bfloat16": 122.8},
         notes={"flops float32": "counts two instructions issued at once"}),
    _amd("gfx1201", "Radeon RX 9070 XT",
         "AMD, Radeon RX 9070 XT product page; bfloat16 as float16 in: Using the Matrix Cores of AMD RDNA 4, "
         "https://gpuopen.com/learn/",
         lds=64, cus=64, l2=8, takes=("float16", "bfloat16", *_FP8, "int8"), bandwidth=640, capacity=16,
         peak={"float32": 48.7, "float16": 195, "bfloat16": 195, "float8_e4m3fn": 389, "int8": 389},
         notes={"flops float32": "counts two instructions issued at once"}),
)

# --------------------------------------------------------------------------------------------------------------- Google
JAX = "Google, JAX, TpuInfo in jax/_src/pallas/mosaic/tpu_info.py, https://github.com/jax-ml/jax"
LIBTPU = "libtpu 0.0.42.1: the limit that its refusal of a kernel over it states"
_CLOUD = "Google Cloud, TPU documentation, https://cloud.google.com/tpu/docs/"


def _tpu(name: str, page: str, *, vmem: int, scoped: int, cores: int, takes: tuple[str, ...],
         peak: Mapping[str, float | None], bandwidth: float,
         capacity: float, macs: int | None) -> Hardware:
    """``vmem``: MiB of a TensorCore; ``scoped``: MiB that a kernel gets unasked; rates, bandwidth (GB/s) and capacity
    (GiB) of a chip; ``macs``: multiplications of bfloat16 numbers that it makes in a cycle.
    """
    sources = dict.fromkeys(("lanes", "sublanes", "on_chip vmem", "on_chip smem", "core_memory vmem",
        "core_memory smem", "cores", "matrix_dtypes"), JAX)
    sources |= {"scoped vmem": LIBTPU} | dict.fromkeys(("capacity", "bandwidth", *(f"flops {d}" for d in peak)),
    _CLOUD + page)
    notes = {"flops float32": "not published: float32 products are several bfloat16 passes"}
    notes |= dict.fromkeys(("program_threads", "core_threads", "thread_registers", "core_registers", "core_programs",
    "simds"), "a TPU core runs one program")
    memory: dict[str, int | None] = {"vmem": vmem * MIB, "smem": MIB}
    clock = (peak["bfloat16"] or 0) * TERA / (2 * macs) if macs else None
    sources |= {"clock": "its peak rate over what its matrix units, 128 x 128 (v6e 256 x 256), do in a cycle"}
    notes |= {} if macs else {"clock": "how many matrix units it has is in no document"}
    return Hardware(
        name, "tpu", f"TPU {name}", lanes=128, sublanes=8, on_chip=memory, core_memory=memory,
        scoped={"vmem": scoped * MIB},
        matrix="MXU", matrix_dtypes=takes, flops={d: None if r is None else r * TERA for d, r in peak.items()},
        bandwidth=bandwidth * GB, capacity=capacity * 2**30, cores=cores, clock=clock, sources=sources,
        notes=notes | {"l2": "a TPU has none"},
    )


_MXU5 = ("float32", "bfloat16", "float8_e5m2", "float8_e4m3b11fnuz", "int8", "int4")
_TPU = (
    _tpu("v4", "v4", vmem=16, scoped=16, cores=2, takes=("float32", "bfloat16"),
        peak={"float32": None, "bfloat16": 275}, bandwidth=1200, capacity=32, macs=8 * 128**2),
    _tpu("v5e", "v5e", vmem=128, scoped=16, cores=1, takes=_MXU5, peak={"float32": None, "bfloat16": 197, "int8": 393},
        bandwidth=819, capacity=16, macs=4 * 128**2),
    _tpu("v5p", "v5p", vmem=64, scoped=16, cores=2, takes=_MXU5, peak={"float32": None, "bfloat16": 459},
        bandwidth=2765, capacity=95, macs=8 * 128**2),
    _tpu("v6e", "v6e", vmem=128, scoped=32, cores=1, takes=_MXU5, peak={"float32": None, "bfloat16": 918, "int8": 1836},
        bandwidth=1638, capacity=32, macs=4 * 256**2),
    _tpu("v7x", "tpu7x", vmem=64, scoped=32, cores=2, takes=("float32", "bfloat16", *_FP8),
         peak={"float32": None, "bfloat16": 2307, "float8_e4m3fn": 4614},
         bandwidth=7380, capacity=192, macs=None),
)

# fmt: on
HARDWARE: Mapping[str, Hardware] = MappingProxyType({h.name: h for h in (*_NVIDIA, *_AMD, *_TPU)})
"""Every known architecture by name, NVIDIA's, then AMD's, then Google's, oldest first."""

# Names under which frameworks know a chip of the table, and chips with the limits of one of the table (same source as
# its).
_SAME = {
    "sm_87": "sm_80",
    "sm_103": "sm_100",
    "sm_121": "sm_120",
    "gfx1101": "gfx1100",
    "gfx1102": "gfx1100",
    "gfx1200": "gfx1201",
    "v5": "v5p",
    "7x": "v7x",
}


def find(name: str) -> Hardware:
    """An architecture by name; SpecError lists the known ones."""
    found = HARDWARE.get(_SAME.get(name, name))
    if found is None:
        raise SpecError(f"target {name!r} is unknown; expected one of {', '.join(HARDWARE)}")
    return found


@functools.cache
def family(arch: str) -> Hardware:
    """The architecture of the table whose limits hold for ``arch``: itself, one that equals it, or for a name that the
    table lacks the one of its kind with the least on-chip memory. No name at all counts as an NVIDIA one."""
    known = HARDWARE.get(_SAME.get(arch, arch))
    if known is not None:
        return known
    prefix = (
        "gfx9"
        if arch.startswith("gfx9")
        else "gfx1"
        if arch.startswith("gfx")
        else "v"
        if arch.startswith("v")
        else "sm_"
    )
    return min(
        (h for n, h in HARDWARE.items() if n.startswith(prefix)), key=lambda h: max(b or 0 for b in h.on_chip.values())
    )


def least(platform: str, memory: str) -> int:
    """Bytes of a memory that a program gets on every chip of a platform, unasked."""
    sizes = [h.scoped.get(memory, h.on_chip.get(memory)) for h in HARDWARE.values() if h.platform == platform]
    return min(s for s in sizes if s is not None)
