"""Which kernels a call would launch, without a launch of any: those of the program that JAX traces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax

from portakern.core.config import Config

if TYPE_CHECKING:
    from portakern.core.backend import Implementation
    from portakern.core.call import Call

__all__ = ["kernels"]

KERNELS = ("pallas_call", "mpmd_map")
"""What JAX calls a kernel for a TPU, and one for a GPU."""


def kernels(impl: Implementation, call: Call, config: Config) -> tuple[str, ...]:
    """The names of a call's kernels, as profiles show them, in the order of the program."""
    given = {name: array for name, array in call.arrays.items() if array is not None}

    def outputs(arrays: dict[str, Any]) -> list[Any]:
        inner = call.replace(arrays={**call.arrays, **arrays}, concrete=False)
        return [o for o in impl.run(inner, config) if o is not None]

    return tuple(_named(jax.make_jaxpr(outputs)(given).jaxpr))


def _named(jaxpr: Any) -> Iterator[str]:
    """The names of the kernels in a program and those within it, but for what lies in a kernel."""
    for step in jaxpr.eqns:
        if step.primitive.name in KERNELS:
            yield str(step.params["name"] if "name" in step.params else step.params["name_and_src_info"].name)
            continue
        for value in step.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _named(inner)
