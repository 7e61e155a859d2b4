"""A fault of LLVM's in Triton's compiler for NVIDIA, found in the text that it makes.

LLVM pairs 32-bit numbers in 64-bit registers. Where two of a pair take different operations, it computes both of each
and keeps one: of ``tid & 31`` beside ``col << 1``, the half that nobody wants of the second is ``tid << 31``. That is
written as a wide product, ``mul.wide.u32 %rd, tid, 2^31``, which reaches into the other half: what is then taken from
there is ``tid >> 1 | col << 1``. The LLVM of Triton 3.6 does so, for one, where columns of two layouts meet one mask:
a kernel reads and writes elsewhere than it says, in silence. The interpreter runs no such code, so that the text itself
is looked at: by the compile report, by the first launch of each binary, and before another library's program has it.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["leaking_products", "refuse_leaks"]

FARTHEST = 1 << 22
"""The least factor that counts: a thread's index, which is below 1024, times less stays within its half. Smaller ones
are products that programs want."""

PRODUCT = re.compile(r"mul\.wide\.[us]32\s+(%rd\d+), (%r\d+), (\d+);")


def leaking_products(ptx: str) -> list[str]:
    """Wide products by a power of two that become the lower half of a pair and may reach into the upper one."""
    found = []
    for product in PRODUCT.finditer(ptx):
        result, number, factor = product[1], product[2], int(product[3])
        if factor < FARTHEST or factor & (factor - 1):
            continue
        pairs = re.findall(rf"or\.b64\s+(%rd\d+), (?:{result}, %rd\d+|%rd\d+, {result});", ptx)
        if any(re.search(rf"mov\.b64\s+\{{[^}}]*\}}, {p};|shr\.u64\s+%rd\d+, {p}, 32;", ptx) for p in pairs):
            found.append(f"{number} * {factor}")
    return sorted(set(found))


def refuse_leaks(name: str, compiled: Any) -> None:
    """Raise where a kernel's code is not what its source says (see above): what it wrote is not handed on.

    Raises:
      RuntimeError: it is so. No refusal: what takes a call is to be mended, and a check that meets it fails.
    """
    found = leaking_products(getattr(compiled, "asm", {}).get("ptx", ""))
    if found:
        raise RuntimeError(
            f"{name}: this Triton's compiler lets {', '.join(found)} reach into the other half of a 64-bit register, "
            "so that the kernel reads and writes elsewhere than it says; call with another variant, tiling or backend, "
            "and report the shapes, dtypes and options of the call"
        )
