"""The compiled kernels: a shared library for each module of Mojo, made at its first use and kept in portakern's cache.

``python -m portakern.backends.mojo.library`` makes all of them, as for an image of a container.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

from portakern.errors import UnavailableError
from portakern.files import cache_folder
from portakern.install import installed
from portakern.progress import Line

__all__ = ["function", "make"]

HERE = Path(__file__).resolve().parent
COMPILER = "mojo-compiler"
FLAGS = ("--emit", "shared-lib", "--fp-mode", "contract=off")
"""Without contraction a sum and a product round as they are written, in loops and at their ends alike."""


@functools.cache
def function(module: str, name: str) -> ctypes._NamedFuncPointer:
    """A function of a module's library, which is compiled if need be.

    Raises:
      UnavailableError: it cannot be compiled, or loaded, here.
    """
    path = _path(module)
    if not path.exists():
        make([module])
    try:
        found: ctypes._NamedFuncPointer = getattr(ctypes.CDLL(str(path)), name)
    except OSError as e:
        raise UnavailableError(f"backend 'mojo' cannot run here: {path} cannot be loaded ({e}); delete it") from e
    found.restype = ctypes.c_int64
    return found


def make(modules: Sequence[str]) -> None:
    """Compile those of the modules whose libraries are missing, in parallel; other processes wait meanwhile.

    Raises:
      UnavailableError: the compiler is missing or fails.
    """
    import fcntl  # here: Windows has none, nor a compiler

    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed, or the process ends
        missing = [m for m in modules if not _path(m).exists()]
        with (
            ThreadPoolExecutor(max(min(len(missing), os.cpu_count() or 1), 1)) as pool,
            Line("compiling Mojo kernels", len(missing), "modules") as line,
        ):
            left = {pool.submit(_compile, module) for module in missing}
            while left:
                done, left = wait(left, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                line(len(missing) - len(left))


def _compile(module: str) -> None:
    """One module, whose library appears whole or not at all."""
    path = _path(module)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    os.close(handle)
    source = HERE / "cpu" / f"{module}.mojo"
    command = [sys.executable, "-c", "from mojo._entrypoints import exec_mojo; exec_mojo()"]
    command += ["build", *FLAGS, "-I", str(HERE), str(source), "-o", temporary]
    began = time.monotonic()
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=path.parent)
        if ran.returncode:
            raise UnavailableError(
                f"backend 'mojo' cannot run here: {COMPILER} {_version()} cannot compile {source}, after "
                f"{time.monotonic() - began:.0f} s:\n{ran.stderr.strip()[-2000:]}"
            )
        os.chmod(temporary, 0o755)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


@functools.cache
def _path(module: str) -> Path:
    """Where a module's library lies: its name has a digest of all that decides its code."""
    sources = [HERE / "cpu" / f"{module}.mojo", *sorted((HERE / "lib").glob("*.mojo"))]
    said = [_version(), _processor(), *FLAGS, *(p.read_text(encoding="utf-8") for p in sources)]
    return _folder() / f"{module}-{hashlib.sha256(chr(0).join(said).encode()).hexdigest()[:16]}.so"


def _folder() -> Path:
    return cache_folder() / "mojo"


def _version() -> str:
    return installed(COMPILER) or "none"


def _processor() -> str:
    """What the compiler compiles for: the processor, and what of it the system lets programs use."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text(encoding="utf-8").splitlines() if known.exists() else []
    named = {line for line in lines if line.startswith(("model name", "flags", "CPU part", "Features"))}
    return "\n".join((platform.machine(), platform.processor(), *sorted(named)))


if __name__ == "__main__":
    make(sorted(p.stem for p in (HERE / "cpu").glob("*.mojo")))
