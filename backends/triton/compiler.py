"""Machine code without a GPU: what a call would launch, compiled by Triton for NVIDIA and AMD, and read back.

The op's Python runs on tensors without memory, and its launches are recorded instead of made (``launch.recording``).
Triton specialises them as a launch would, and its wheel holds both vendors' assemblers and NVIDIA's disassembler.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from portakern import install
from portakern.backends.triton import BACKEND
from portakern.backends.triton.imports import check_compiled
from portakern.backends.triton.leaks import leaking_products
from portakern.core import targets
from portakern.core.config import Config
from portakern.core.machine_code import Compiled, Kernel, PlannedKernel, occupancy
from portakern.core.targets import Hardware

if TYPE_CHECKING:
    from portakern.core.backend import Implementation
    from portakern.core.call import Call

LAUNCHES_FIND_IT = True
"""What :func:`survey` compiles lies in Triton's own cache, under the key of a launch."""

USERS_CACHE = "PORTAKERN_TRITON_CACHE"

DRIVER = "driver"
"""Stands among planned kernels for what Triton's driver compiles for itself."""


def unavailable(hardware: Hardware) -> str | None:
    return BACKEND.unavailable()


def environment(hardware: Hardware, quick: bool) -> dict[str, str]:
    from portakern.backends.triton.cache import cache_folder

    return {"TRITON_CACHE_DIR": "{scratch}/triton", "TRITON_INTERPRET": "0", USERS_CACHE: cache_folder()}


def versions(hardware: Hardware) -> dict[str, str]:
    return {package: install.installed(package) or "none" for package in ("torch", "triton")}


def build(impl: Implementation, call: Call, config: Config) -> Compiled:
    """Compile every launch of a call for ``call.target``; equal launches once."""
    return _build(impl, call, config, _compile)


def survey(impl: Implementation, call: Call, config: Config) -> Compiled:
    """The same through the user's own cache of Triton's, where a launch finds what is compiled here, and this what was
    compiled before. The report lacks what only the assembler says as it works."""
    from portakern.backends.triton.cache import within_cache

    with within_cache(os.environ.get(USERS_CACHE)):
        return _build(impl, call, config, _compile_as_launched)


def planned(impl: Implementation, call: Call, config: Config) -> list[PlannedKernel]:
    """The kernels that a call launches, each once, and which of them a launch would find in the user's cache."""
    from portakern.backends.triton.cache import DriverPart, cache_key, is_cached, within_cache
    from portakern.backends.triton.pickled import packed

    hardware = targets.find(call.target.arch)
    target = gpu_target(hardware)
    with within_cache():
        found = [PlannedKernel(DRIVER, "", DriverPart(target).is_cached(), DRIVER)]
        for (source, options), *_ in _sources(impl, call, config, hardware):
            key = cache_key(source, options, target)
            found.append(PlannedKernel(key, source.name, is_cached(source, key, target), packed(source, options)))
    return found


def make(source: str, hardware: Hardware) -> None:
    """Compile a planned kernel into the user's cache, with all else that a launch of it would compile."""
    import triton

    from portakern.backends.triton.cache import DriverPart, settle, within_cache
    from portakern.backends.triton.pickled import unpacked

    target = gpu_target(hardware)
    with within_cache(os.environ.get(USERS_CACHE)):
        if source == DRIVER:
            DriverPart(target).build()
            return
        kernel, options = unpacked(source)
        settle(kernel.fn)
        DriverPart(target, triton.compile(kernel, target=target, options=options)).build()


def _build(impl: Implementation, call: Call, config: Config, compile_one: Callable[..., Kernel]) -> Compiled:
    hardware = targets.find(call.target.arch)
    kernels = []
    for same in _sources(impl, call, config, hardware):
        source, options = same[0]
        kernel = compile_one(source, options, hardware)
        kernel.launches = len(same)
        kernels.append(kernel)
    return Compiled(kernels)


def _sources(
    impl: Implementation, call: Call, config: Config, hardware: Hardware
) -> list[list[tuple[Any, dict[str, Any]]]]:
    """The kernels that a call launches as Triton specialises them, with their options: those of equal launches beside
    each other."""
    from portakern.backends.triton.cache import settle
    from portakern.backends.triton.launch import recording

    check_compiled()
    launches: list[tuple[Any, int, tuple[Any, ...], dict[str, Any]]] = []
    with recording(lambda *launch: launches.append(launch)):
        impl.run(call, config)
    sources: dict[str, list[Any]] = {}
    for kernel, _, args, constexprs in launches:
        settle(kernel)
        source, options = specialised(kernel, args, constexprs, hardware)
        sources.setdefault(f"{source.hash()} {sorted((k, str(v)) for k, v in options.items())}", []).append(
            (source, options)
        )
    return [*sources.values()]


def gpu_target(hardware: Hardware) -> Any:
    from triton.backends.compiler import GPUTarget

    return (
        GPUTarget("cuda", int(hardware.name[3:]), hardware.lanes)
        if hardware.platform == "cuda"
        else GPUTarget("hip", hardware.name, hardware.lanes)
    )


def specialised(
    kernel: Any, args: tuple[Any, ...], constexprs: dict[str, Any], hardware: Hardware
) -> tuple[Any, dict[str, Any]]:
    """The kernel as Triton's own launch would compile it for these arguments, and the compiler's options."""
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(gpu_target(hardware))
    given = {"debug": False, **constexprs}
    bound, specialization, extra = create_function_from_signature(kernel.signature, kernel.params, backend)(
        *args, **given
    )
    options, signature, values, attributes = kernel._pack_args(backend, given, bound, specialization, extra)
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
    return ASTSource(kernel, signature, values, attributes), dict(options.__dict__)


def _compile(source: Any, options: dict[str, Any], hardware: Hardware) -> Kernel:
    import triton
    from triton import knobs

    printed = io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(printed):
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=gpu_target(hardware), options=options)
    read = _read_nvidia if hardware.platform == "cuda" else _read_amd
    kernel = read(compiled, printed.getvalue(), hardware)
    kernel.code_bytes = _text_bytes(compiled.kernel)
    return kernel


def _compile_as_launched(source: Any, options: dict[str, Any], hardware: Hardware) -> Kernel:
    """One kernel, from Triton's cache where it is there, with the little that its metadata say."""
    import triton

    compiled = triton.compile(source, target=gpu_target(hardware), options=options)
    if hardware.platform != "cuda":
        return _read_amd(compiled, "", hardware)
    meta = compiled.metadata
    leaking = leaking_products(compiled.asm["ptx"])
    return Kernel(meta.name, threads=meta.num_warps * hardware.lanes, on_chip={"shared": meta.shared}, leaking=leaking)


def _read_nvidia(compiled: Any, log: str, hardware: Hardware) -> Kernel:
    """``log``: what ptxas said of registers and spills."""
    meta, sass = compiled.metadata, _disassembled(compiled.asm["cubin"])
    registers = int(_found(r"Used (\d+) registers", log) or 0) or None
    spills = int(_found(r"(\d+) bytes spill stores", log) or 0)
    on_chip = {"shared": meta.shared}
    if "tmem" in hardware.on_chip:
        on_chip["tmem"] = (getattr(meta, "tmem_size", 0) or 0) * 128 * 4  # columns of 128 lanes
    matrix = Counter(re.findall(r"\b((?:UTC)?[HIQOD]G?MMA\b[\w.]*)", sass))
    threads = meta.num_warps * hardware.lanes
    return Kernel(
        meta.name,
        threads=threads,
        registers=registers,
        spills=spills,
        on_chip=on_chip,
        matrix=dict(matrix.most_common()),
        occupancy=occupancy(meta.num_warps, registers, on_chip, hardware),
        undefined=undefined_registers(sass),
        leaking=leaking_products(compiled.asm["ptx"]),
        serialised=serialised_products(log),
        assembly=sass,
    )


def serialised_products(log: str) -> list[str]:
    """Why ptxas runs asynchronous matrix instructions one at a time, where it does: its messages C7501 to C7599. They
    are no errors, and Triton shows them to nobody."""
    found = re.findall(r"\((C75\d\d)\) (?:Potential Performance Loss: )?(.*)", log)
    return list(dict.fromkeys(f"{code}: {text.strip()}" for code, text in found))


def undefined_registers(sass: str) -> list[str]:
    """Uniform registers that some instruction computes with and none before it, as the code stands, writes.

    Copies do not count, since spills copy halves of pairs that are not in use, nor matrix instructions:
    ``gdesc[UR32]`` names the first of four registers, and reads two where one operand lies in registers.

    They hold addresses, of the matrix unit's operands among others, and no right code has any: ptxas 12.8 loses the
    base of such an address in kernels for sm_90 (see ``attention.head_tiles``), whose results are then wrong, or reads
    leave shared memory. Nothing but the machine code shows it.
    """
    written, found = {"URZ"}, set()
    for instruction in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+ )?([A-Z][^;]*);", sass):
        operation, _, operands = instruction.partition(" ")
        if "SETP" not in operation:  # others may write predicates before their register
            operands = re.sub(r"^\s*(?:U?P(?:\d|T)\s*,\s*)+", "", operands)
        first, _, others = operands.partition(",")
        target = re.fullmatch(r"\s*UR(\d+)\s*", first)
        if not re.match(r"U?MOV|R2UR|IMAD\.(U32|MOV)|HGMMA|UTC", operation):
            found |= set(re.findall(r"\bUR\d+\b", others if target else operands)) - written
        if target:
            size = 4 if ".128" in operation else 2 if re.search(r"\.[SU]?(64(?!\.HI)|WIDE)", operation) else 1
            written |= {f"UR{int(target[1]) + i}" for i in range(size)}
    return sorted(found, key=lambda r: int(r[2:]))


def _read_amd(compiled: Any, log: str, hardware: Hardware) -> Kernel:
    meta, text = compiled.metadata, compiled.asm["amdgcn"]

    def number(field: str) -> int:
        return int(_found(rf"\.{field}:\s+(\d+)", text) or 0)

    registers = number("vgpr_count")  # on CDNA it counts accumulators too
    waves = int(_found(r"; Occupancy:\s+(\d+)", text) or 0)  # of a SIMD, as registers allow
    lds = (hardware.core_memory["lds"] or 0) * (1 if hardware.lanes == 64 else 2)  # RDNA: two units share it
    simds = (hardware.simds or 1) * (1 if hardware.lanes == 64 else 2)
    by_registers = waves * simds // meta.num_warps
    programs = min(by_registers, lds // meta.shared) if meta.shared else by_registers
    most = (hardware.core_threads or 0) // hardware.lanes * (simds // (hardware.simds or 1))
    matrix = Counter(re.findall(r"\b(v_(?:mfma|smfmac|wmma|swmmac)_\w+)", text))
    return Kernel(
        meta.name,
        threads=meta.num_warps * hardware.lanes,
        registers=registers,
        spills=4 * number("vgpr_spill_count"),
        on_chip={"lds": meta.shared},
        occupancy=round(programs * meta.num_warps / most, 4),
        matrix=dict(matrix.most_common()),
        assembly=text,
    )


def _found(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None


def _disassembled(cubin: bytes) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout


def _text_bytes(elf: bytes) -> int:
    """Bytes of a 64-bit ELF's executable sections: both vendors' binaries are ELF."""
    start, size, count = struct.unpack_from("<Q", elf, 0x28)[0], *struct.unpack_from("<HH", elf, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", elf, start + i * size) for i in range(count)]
    return sum(length for _, _, flags, _, _, length in sections if flags & 0x4)
