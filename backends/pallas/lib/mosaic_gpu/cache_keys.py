"""Why a kernel that one process compiled is found in JAX's persistent compilation cache by another.

The cache's key is a hash of a program, kernels included. In jax 0.11 a kernel carries the name that it would be dumped
under, and that ends in a count of the kernels that the process has lowered: the same kernel has another key in each
place of a program's life, and is compiled anew for seconds. Here that name is the kernel's own, without the count,
unless something is dumped. From jax 0.12 on the name takes no part in the hash.
"""

from __future__ import annotations

import os
from typing import Any

import jax
from jax._src.lib import mosaic_gpu_dialect as dialect  # jax has no public name for what its kernels carry
from jaxlib.mlir import ir

__all__ = ["same_in_every_process"]

NAME = "mosaic_gpu.dump_basename"
DUMPS = "MOSAIC_GPU_DUMP_"
"""How the variables begin that ask for files of each kernel, which a count keeps apart."""


def same_in_every_process() -> None:
    """Have kernels named without a count from now on, where jax counts them."""
    told = getattr(dialect, "get_or_set_dump_options", None)
    if told is None or jax.__version_info__ >= (0, 12) or getattr(told, "counts", True) is False:
        return

    def uncounted(module: Any) -> Any:
        attributes = module.operation.attributes
        if NAME not in attributes and not any(name.startswith(DUMPS) for name in os.environ):
            with module.context:
                attributes[NAME] = ir.StringAttr.get(attributes["sym_name"].value)
        return told(module)

    uncounted.counts = False  # type: ignore[attr-defined]
    dialect.get_or_set_dump_options = uncounted
