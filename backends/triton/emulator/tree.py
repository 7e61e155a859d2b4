"""Where the emulator of tinygrad lies, and its functions of single instructions, compiled once and kept.

Its wheel holds the decoder and AMD's pseudocode, and not the emulator (``test/mockgpu/amd/emu.py``): a checkout of the
source tree is named by ``PORTAKERN_TINYGRAD``. It compiles each kind of instruction with clang, some tenths of a second
each; what it made is kept in the cache folder, under the contents of the tree's files that decide it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from portakern.backends.triton.emulator.faults import lacking
from portakern.errors import UnavailableError
from portakern.files import cache_folder

__all__ = ["TRIED", "VARIABLE", "Functions", "build_machine", "clang", "tree", "unavailable"]

VARIABLE = "PORTAKERN_TINYGRAD"
TRIED = "a9069c177a9da9cca18593edf55acd2e6073cca6"
EMULATOR = "test/mockgpu/amd/emu.py"
DECIDE = (
    EMULATOR,
    "test/mockgpu/amd/pcode.py",
    "tinygrad/renderer/cstyle.py",
    "tinygrad/runtime/support/compiler_cpu.py",
)
GET_IT = (
    "git clone https://github.com/tinygrad/tinygrad && "
    f"git -C tinygrad checkout {TRIED[:12]} && export {VARIABLE}=$PWD/tinygrad"
)


def unavailable() -> str | None:
    """None, or what the emulator needs and how to get it."""
    named = os.environ.get(VARIABLE, "")
    if not named:
        return f"it needs tinygrad's source tree (its wheel lacks the emulator), named by {VARIABLE}: {GET_IT}"
    if not (Path(named) / EMULATOR).is_file():
        return f"{VARIABLE} is {named!r}, where {EMULATOR} is not; expected tinygrad's source tree: {GET_IT}"
    if clang() is None:
        return "it needs clang, which is not on PATH; install it (apt install clang), or name it with CC"
    return None


@functools.cache
def clang() -> str | None:
    """The compiler: of ``CC`` if that is a clang, else the one on PATH, with or without a version behind its name."""
    named = os.environ.get("CC", "")
    if "clang" in named and shutil.which(named):
        return shutil.which(named)
    return next((p for n in ("clang", *(f"clang-{v}" for v in range(25, 10, -1))) if (p := shutil.which(n))), None)


@functools.cache
def tree() -> ModuleType:
    """tinygrad's emulator, imported from its tree.

    Raises:
      UnavailableError: there is none, or another tinygrad is loaded already.
    """
    why = unavailable()
    if why:
        raise UnavailableError(f"the profile 'emulated' cannot run here: {why}")
    root = Path(os.environ[VARIABLE]).resolve()
    loaded = sys.modules.get("tinygrad")
    if loaded is not None and Path(str(loaded.__file__)).resolve().parent.parent != root:
        raise UnavailableError(f"tinygrad is loaded from {loaded.__file__}, and {VARIABLE} names {root}")
    for name in [n for n in sys.modules if n == "test" or n.startswith("test.")]:
        del sys.modules[name]  # Python's own tests, if anybody imported them: the tree has a package of that name
    with patch.dict(os.environ, environment()), patch.object(sys, "path", [str(root), *sys.path]):
        found = importlib.import_module("test.mockgpu.amd.emu")
        importlib.import_module("tinygrad.helpers").getenv("CC", "clang")  # it asks once and remembers
        return found


def environment() -> dict[str, str]:
    """What tinygrad reads as it is imported and as it compiles."""
    return {"DEV": "CPU", "CC": str(clang()), "CACHEDB": str(folder() / "tinygrad.db"), "PROFILE": "0", "DEBUG": "0"}


def folder() -> Path:
    """Where compiled functions are kept."""
    made = cache_folder() / "emulator"
    made.mkdir(parents=True, exist_ok=True)
    return made


@functools.cache
def _version() -> str:
    root = Path(os.environ[VARIABLE])
    contents = b"".join((root / f).read_bytes() for f in DECIDE if (root / f).is_file())
    return hashlib.sha256(contents + str(clang()).encode() + _processor()).hexdigest()[:16]


def _processor() -> bytes:
    """What native code depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "").encode()
    except OSError:
        return b""


def build_machine(source: Path) -> ctypes.CDLL:
    """machine.c, compiled by clang and kept under its contents."""
    compiler = clang()
    assert compiler is not None  # `tree` was asked first
    key = hashlib.sha256(source.read_bytes() + compiler.encode() + _processor()).hexdigest()[:16]
    library = folder() / f"machine-{key}.so"
    if not library.is_file():
        with tempfile.TemporaryDirectory(dir=folder()) as scratch:
            made = Path(scratch) / library.name
            command = [
                compiler,
                "-O2",
                "-march=native",
                "-ffp-contract=off",
                "-shared",
                "-fPIC",
                str(source),
                "-o",
                str(made),
                "-lm",
            ]
            subprocess.run(command, check=True, capture_output=True)
            os.replace(made, library)
    return ctypes.CDLL(str(library))


class Functions:
    """Functions of single instructions of an instruction set: (address, the buffers that it takes)."""

    def __init__(self, isa: str) -> None:
        self.isa, self.emulator = isa, tree()
        self.kept: dict[tuple[str, int], list[tuple[int, int, int, tuple[int, ...]]]] = {}
        self.alive: list[Any] = []
        self.folder = folder() / f"{isa}-{_version()}"
        self.folder.mkdir(exist_ok=True)
        for file in sorted(self.folder.glob("*.function")):
            self._load(file.read_bytes())

    def find(self, inst: Any, raw: bytes) -> tuple[int, tuple[int, ...]]:
        """The function of an instruction, which reads its own operands where the program counter is.

        Raises:
          NotEmulatedError: tinygrad does not know it either.
        """
        size = inst.size()
        word = int.from_bytes(raw[:size], "little")
        for base, mask, address, buffers in self.kept.get((type(inst).__name__, size), ()):
            if word & mask == base:
                return address, buffers
        return self._compile(inst, raw[: size + 4], size)

    def _compile(self, inst: Any, raw: bytes, size: int) -> tuple[int, tuple[int, ...]]:
        known = len(self.emulator._canonical_runner_cache)
        try:
            with patch.dict(os.environ, environment()):
                program, _ = self.emulator._get_runner(raw, self.isa)
        except Exception as e:
            name = self.emulator._op_name(inst)
            raise lacking(f"{name} ({type(e).__name__}: {str(e)[:120]})") from e
        assert len(self.emulator._canonical_runner_cache) > known
        kind, base, mask, size, _ = self.emulator._canonical_runner_cache[-1]
        elf = program.to_elf()
        head = {
            "kind": kind.__name__,
            "size": size,
            "base": base,
            "mask": mask,
            "name": elf.name,
            "buffers": list(program.arg.globals),
        }
        text = json.dumps(head).encode() + b"\n" + elf.lib
        target = self.folder / f"{hashlib.sha256(text).hexdigest()[:24]}.function"
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as f:
            f.write(text)
        os.replace(f.name, target)
        return self._load(text)

    def _load(self, text: bytes) -> tuple[int, tuple[int, ...]]:
        line, _, code = text.partition(b"\n")
        head = json.loads(line)
        elf_type = importlib.import_module("tinygrad.device")
        device = elf_type.Device["CPU"]
        program = device.runtime(elf_type.TinyELF(code, head["name"], device.renderer.target, ()))
        self.alive.append(program)
        found = program.addr, tuple(head["buffers"])
        self.kept.setdefault((head["kind"], head["size"]), []).append((head["base"], head["mask"], *found))
        return found
