"""Cross entropy of the logits of a linear layer, rows at a time, and its gradients, classes at a time.

    x = h weight^T        loss, lse = those of cross_entropy        slope = b weight
    b_j = exp(x_j - lse) (1 + 2 z lse) - (1 - e) [j = t] - e / n

hidden h: (*batch, d), weight: (n, d), labels t, loss, lse: (*batch), slope: (*batch, d). ``chunk_rows`` rows
have their logits in memory at a time, in hidden's dtype: matmul writes them, cross_entropy reads them, the gradient of
that writes b over them, and matmul meets them again. All rows of a chunk are rows of one product, and no row sees
another, so that chunks change no bit.

    d_hidden = d_loss slope        d_weight_j = sum over rows of d_loss b_j h

d_loss: (*batch) -> d_hidden: (*batch, d), d_weight: (n, d). The logits of all rows for ``chunk_n`` classes are in
memory at a time: matmul writes them, the gradient of cross_entropy writes d_loss b over them, and matmul takes the sum
over all rows, so that it is rounded once.

The floor is 2 T n d operations for the losses, as many for slopes and 4 T n d for d_weight, which matmul does at its
rate, beside 3 to 5 walks over the logits, of the gradients 4, of 2 T n bytes each in 16 bits: at T = 8192, d = 4096,
n = 128256 on an H100 26 ms beside 3 ms, and as much again for the gradients.

Sources: Hsu et al. 2024, "Liger Kernel", section 3.2, for chunks of rows; Wijmans et al. 2024, "Cut your losses in
large-vocabulary language models", section 4, for logits taken again.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import LogitGradientsConfig, LogitsConfig
from portakern.backends.triton.gpu import matmul as portable
from portakern.backends.triton.gpu.family import FAMILY
from portakern.backends.triton.lib.linear_cross_entropy import (
    as_product,
    default_tiling,
    gradient_tiling,
    gradients_in_chunks,
    in_chunks,
    key,
    supports,
    supports_gradient,
)
from portakern.core.framework import DTYPE_NAME
from portakern.core.tilings import default

if TYPE_CHECKING:
    from portakern.core.call import Call


def multiply(call: Call, a: Any, b: Any, c: Any) -> None:
    """c = a b, with the tiling that matmul has for it."""
    of = as_product(call, a, b, a.shape[0], b.shape[1], a.shape[1], DTYPE_NAME[c.dtype])
    matmul = BACKEND.implementation("matmul", FAMILY)
    assert matmul is not None
    portable.matmul(of, default(matmul, of).tiling, c)


def refused(call: Call, m: int, n: int, k: int, stored: str | None = None) -> str | None:
    """Why matmul does not take a product of these extents, stored in this dtype or in the call's."""
    of = as_product(call, call.arrays["hidden"], call.arrays["weight"], m, n, k, stored)
    matmul = BACKEND.implementation("matmul", FAMILY)
    assert matmul is not None
    return portable.supports(of, default(matmul, of).tiling)


@BACKEND.implements(
    "linear_cross_entropy",
    key=key,
    tiling=default_tiling,
    supports=partial(supports, refused=refused),
    config=LogitsConfig,
)
def linear_cross_entropy(call: Call, config: LogitsConfig) -> tuple[Any, ...]:
    return in_chunks(call, config, multiply)


@BACKEND.implements(
    "linear_cross_entropy_vjp",
    key=key,
    tiling=gradient_tiling,
    supports=partial(supports_gradient, refused=refused),
    overwrites=True,
    config=LogitGradientsConfig,
)
def linear_cross_entropy_vjp(call: Call, config: LogitGradientsConfig) -> tuple[Any, ...]:
    return gradients_in_chunks(call, config, multiply)
