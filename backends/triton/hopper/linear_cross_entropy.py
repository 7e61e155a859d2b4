"""Cross entropy of the logits of a linear layer, by the products of this folder.

As the portable variant, but that a sum over the classes is always one chain, by warps that have roles: matmul splits a
sum that long, of few columns, for calls of few rows, and keeps to the parts for those of many (``chunk_of``). Here
there are many, and how they are cut must not show. Where warps cannot have roles, a sum goes as matmul has it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import HopperProductConfig, LogitGradientsConfig, LogitsConfig
from portakern.backends.triton.hopper import _tiles
from portakern.backends.triton.hopper import matmul as forward
from portakern.backends.triton.hopper.family import FAMILY
from portakern.backends.triton.lib import linear_cross_entropy as shared
from portakern.core.framework import DTYPE_NAME
from portakern.core.tilings import default

if TYPE_CHECKING:
    from portakern.core.call import Call

MANY_ROWS, WHOLE = 1024, 8192
"""Of the product whose tiling a long sum takes: as many rows as give it tiles enough, and a sum that is not split."""


def tiling_of(call: Call) -> tuple[Call, HopperProductConfig]:
    """A product as its tiling is looked up, and that: matmul's own, or that of many rows where the sum is long."""
    matmul = BACKEND.implementation("matmul", FAMILY)
    assert matmul is not None
    m, n, k = (call.dims[name] for name in "mnk")
    if not call.interpret and _tiles.chunk_of(n, k) < k:
        whole = call.replace(dims={**call.dims, "m": max(m, MANY_ROWS), "k": WHOLE})
        config = default(matmul, whole).tiling
        if _tiles.on_matrix_unit(whole) and _tiles.warp_specialized(whole, config):
            return whole, config
    return call, default(matmul, call).tiling


def multiply(call: Call, a: Any, b: Any, c: Any) -> None:
    """c = a b."""
    of = shared.as_product(call, a, b, a.shape[0], b.shape[1], a.shape[1], DTYPE_NAME[c.dtype])
    forward.matmul(of, tiling_of(of)[1], c)


def refused(call: Call, m: int, n: int, k: int, stored: str | None = None) -> str | None:
    """Why matmul does not take a product of these extents, stored in this dtype or in the call's."""
    return _tiles.supports(
        *tiling_of(shared.as_product(call, call.arrays["hidden"], call.arrays["weight"], m, n, k, stored))
    )


supports = partial(shared.supports, refused=refused)


@BACKEND.implements(
    "linear_cross_entropy", key=shared.key, tiling=shared.default_tiling, supports=supports, config=LogitsConfig
)
def linear_cross_entropy(call: Call, config: LogitsConfig) -> tuple[Any, ...]:
    return shared.in_chunks(call, config, multiply)


@BACKEND.implements(
    "linear_cross_entropy_vjp",
    key=shared.key,
    tiling=shared.gradient_tiling,
    supports=partial(shared.supports_gradient, refused=refused),
    overwrites=True,
    config=LogitGradientsConfig,
)
def linear_cross_entropy_vjp(call: Call, config: LogitGradientsConfig) -> tuple[Any, ...]:
    return shared.gradients_in_chunks(call, config, multiply)
