"""Gradients of the matrix product: each is one matrix product, which takes the tiles that suit it.

    d_a = d_c b^T        d_b = a^T d_c        both summed over the batch axes along which their operand was broadcast

Transposed operands are strided views, which are described as they lie in memory. Summed axes are folded into the
contraction, as they are in the portable variant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from portakern.backends.triton import BACKEND
from portakern.backends.triton.hopper import matmul as forward
from portakern.backends.triton.hopper.family import FAMILY
from portakern.backends.triton.lib.matmul import product, products
from portakern.core.tilings import default
from portakern.specs.matmul import product_dtype

if TYPE_CHECKING:
    from portakern.core.call import Call


def bare_products(call: Call) -> dict[str, Call]:
    """The matmul that gives each gradient that is wanted, on arrays without memory."""

    def bare(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    arrays = {n: None if x is None else bare(x) for n, x in call.arrays.items()}
    return {name: product(call.replace(arrays=arrays), name) for name in call.wants}


def key(call: Call) -> dict[str, str | int]:
    """matmul's, of the first gradient that is wanted; see :func:`own_tiling`."""
    if call.interpret or not call.wants:
        return {"products": products(call, product_dtype(call)), "tile": "any", "rounds": 1, "k": 1}
    return forward.key(next(iter(bare_products(call).values())))


def own_tiling(call: Call, of: Call, tiling: Mapping[str, int]) -> Mapping[str, int]:
    """The tiling of a gradient's product: matmul's own for it, unless somebody named or found another for the call,
    which is then for both; warps have roles in the products that have a use for them."""
    gradients, matmul = (BACKEND.implementation(op, FAMILY) for op in ("matmul_vjp", "matmul"))
    assert gradients is not None and matmul is not None
    if dict(default(gradients, call).tiling) != dict(tiling):
        return forward.without_idle_roles(of, tiling)
    return default(matmul, of).tiling


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    if call.interpret and forward.warp_specialized(call, tiling):
        return forward.refuse_roles(call, tiling)
    for name, of in bare_products(call).items():
        reason = forward.supports(of, own_tiling(call, of, tiling))
        if reason:
            return f"{name}: {reason}"
    return None


@BACKEND.implements("matmul_vjp", key=key, supports=supports, knobs=forward.KNOBS, same_bits=True)
def matmul_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    def gradient(name: str) -> torch.Tensor | None:
        if name not in call.wants:
            return None
        of = product(call, name)
        (c,) = forward.matmul(of, own_tiling(call, of, tiling))
        return c.reshape(call.outputs[name][0])

    return gradient("d_a"), gradient("d_b")
