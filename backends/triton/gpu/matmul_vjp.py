"""Gradients of the matrix product: each is one matrix product.

    d_a = d_c b^T        d_b = a^T d_c        both summed over the batch axes along which their operand was broadcast

A batch axis that is summed is one more factor of the contraction, folded in beside n (d_a) or m (d_b). The transposed
operands are strided views; only a cotangent whose summed axes lie between its rows is gathered into a copy. The tiling
is matmul's, for both products.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from portakern.backends.triton import BACKEND
from portakern.backends.triton.gpu import matmul as forward
from portakern.backends.triton.lib.matmul import product, products
from portakern.spec import Count, Tile
from portakern.specs.matmul import batch_axes, product_dtype

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call


def reach(call: Call) -> int:
    """The extent for which matmul's tiles suit the n columns of d_b and the k columns of d_a.

    It is the larger of both, and odd where either is no multiple of 8.
    """
    n, k = call.dims["n"], call.dims["k"]
    return max(n, k) | (n % 8 > 0 or k % 8 > 0)


def key(call: Call) -> dict[str, str | int]:
    """matmul's, of a product with this reach."""
    extent, kind = reach(call), products(call, product_dtype(call))
    return {"products": kind, "aligned": extent % 8 == 0, "n": extent, "k": extent}


def fit(call: Call, tiling: Mapping[str, int]) -> Mapping[str, int]:
    extent = reach(call)
    return forward.fit_to(extent, extent, tiling)


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    m, n, k, batch = (call.dims[name] for name in ("m", "n", "k", "batch"))
    dims = {"d_a": {"m": m, "n": k, "k": n}, "d_b": {"m": k, "n": n, "k": m}}
    for name in call.wants:
        kept, _ = batch_axes(call, name)
        reason = forward.supports(
            call.replace(dtype=product_dtype(call), dims=dims[name] | {"batch": tuple(batch[i] for i in kept)}), tiling
        )
        if reason:
            return f"{name}: {reason}"
    return None


@BACKEND.implements(
    "matmul_vjp",
    key=key,
    fit=fit,
    supports=supports,
    knobs={"num_warps": Tile(1, 32), "num_stages": Count(1, 8), "group": Tile(1, 64)},
)
def matmul_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    def gradient(name: str) -> torch.Tensor | None:
        if name not in call.wants:
            return None
        (c,) = forward.matmul(product(call, name), tiling)
        return c.reshape(call.outputs[name][0])

    return gradient("d_a"), gradient("d_b")
