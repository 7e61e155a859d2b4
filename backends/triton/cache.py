"""Compiled kernels on disk: they lie in Triton's own cache, in the folder that the user means, and a launch that finds
all that it needs there compiles nothing."""

from __future__ import annotations

import hashlib
import importlib
import os
import subprocess
import sysconfig
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton import knobs
from triton.compiler import compiler as triton_compiler
from triton.runtime import build
from triton.runtime.jit import DependenciesFinder

__all__ = ["DriverPart", "cache_folder", "cache_key", "is_cached", "settle", "within_cache"]


def cache_folder() -> str:
    """The folder that the user means: ``TRITON_CACHE_DIR``, or Triton's default.

    torch.compile sets that variable, in the process that runs, to a folder of its own when it makes its first kernel.
    What was compiled before would not be found after that.
    """
    folder, of_inductor = knobs.cache.dir, os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    inside = of_inductor is not None and os.path.join(of_inductor, "triton") in (folder, os.path.dirname(folder))
    return str(knobs.cache.get_triton_dir("cache") if inside else folder)


@contextmanager
def within_cache(folder: str | None = None) -> Iterator[None]:
    """While inside, Triton's cache lies in a folder, by default in the one that the user means."""
    folder = folder or cache_folder()
    if knobs.cache.dir == folder:
        yield
        return
    with knobs.cache.scope():
        knobs.cache.dir = folder
        yield


def settle(kernel: Any) -> None:
    """Have Triton hash a kernel with the global constants of all functions that it calls.

    Triton (seen in 3.6 and 3.7) takes over the constants of a function before it has hashed it, and has them only if
    another kernel's hash came to that function first. So a kernel's name in the cache would depend on which kernels ran
    before in the process, and another process would compile it again.
    """
    if kernel.hash is not None:
        return
    take_over = DependenciesFinder._update_hash

    def hashed_first(finder: Any, function: Any) -> None:
        function.cache_key  # noqa: B018 (Triton keeps what it finds)
        take_over(finder, function)

    DependenciesFinder._update_hash = hashed_first
    try:
        kernel.cache_key  # noqa: B018
    finally:
        DependenciesFinder._update_hash = take_over


def cache_key(source: Any, options: dict[str, Any], target: Any) -> str:
    """The name under which the cache keeps what ``triton.compile`` makes of a source."""
    backend = triton_compiler.make_backend(target)
    parsed = backend.parse_options({**options, **source.parse_options()})
    variables = triton_compiler.get_cache_invalidating_env_vars()
    key = triton_compiler.get_cache_key(source, backend, parsed, env_vars=variables)
    return hashlib.sha256(key.encode()).hexdigest()


def is_cached(source: Any, key: str, target: Any) -> bool:
    """Whether a launch finds all that it needs: the machine code, and what calls it from Python."""
    name = f"{source.name[:150]}.json"
    group = triton_compiler.get_cache_manager(key).get_group(name)
    if not group or name not in group:
        return False
    return DriverPart(target, triton_compiler.CompiledKernel(source, group, key)).is_cached()


class _Uncompiled(Exception):
    """What Triton's driver would compile, a C source and its name, on the way out of the function that would do it."""


class DriverPart:
    """What Triton's driver for a vendor compiles with the host's C compiler when it first needs it, which takes up to a
    second: its own functions, and in releases up to 3.6 a launcher for each signature of a kernel. It lies in Triton's
    cache too.

    Attributes:
      name: of the compiled module. is_needed: whether anything is to be compiled; not without the GPU's driver, where
        nothing is launched.
    """

    def __init__(self, target: Any, compiled: Any = None) -> None:
        vendor, prefix = ("nvidia", "Cuda") if target.backend == "cuda" else ("amd", "HIP")
        self.module = importlib.import_module(f"triton.backends.{vendor}.driver")
        self.kind = getattr(self.module, f"{prefix}{'Utils' if compiled is None else 'Launcher'}")
        self.arguments = () if compiled is None else (compiled.src, compiled.metadata)
        self.is_needed = (compiled is None or hasattr(self.module, "make_launcher")) and self._has_driver()

    def _has_driver(self) -> bool:
        try:
            getattr(self.module, "library_dirs", list)()
        except (AssertionError, OSError, subprocess.SubprocessError):
            return False
        return True

    def build(self) -> None:
        """Compile it, unless it is in the cache."""
        if self.is_needed:
            self.kind(*self.arguments)

    def is_cached(self) -> bool:
        """Whether nothing is left to compile."""
        if not self.is_needed:
            return True
        source, name = self._source()
        key = hashlib.sha256((source + build.platform_key()).encode()).hexdigest()
        file = f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
        return triton_compiler.get_cache_manager(key).get_file(file) is not None

    def _source(self) -> tuple[str, str]:
        """What ``kind(...)`` has compiled, without compiling it."""

        def refuse(src: str, name: str, **others: Any) -> None:
            raise _Uncompiled(src, name)

        names = vars(self.module) | {"compile_module_from_src": refuse}
        try:
            types.FunctionType(self.kind.__init__.__code__, names)(None, *self.arguments)
        except _Uncompiled as e:
            return e.args[0], e.args[1]
        raise RuntimeError(
            f"{self.kind.__name__} of this Triton compiles nothing when it is made; expected that it does"
        )
