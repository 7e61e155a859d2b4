"""Cross entropy of the logits of a linear layer, a chunk of rows at a time.

    x = h weight^T        loss, lse = those of cross_entropy        slope = b weight
    b_j = exp(x_j - lse) (1 + 2 z lse) - (1 - e) [j = t] - e / n

hidden h: (*batch, d), weight: (n, d), labels t, loss, lse: (*batch), slope: (*batch, d). ``chunk_rows`` rows
have their logits in memory at a time, in hidden's dtype: matmul writes them, cross_entropy reads them, the gradient of
that writes b over them, and matmul meets them again. All rows of a chunk are rows of one product, and no row sees
another, so that chunks change no bit.

The floor is 2 T n d operations for the losses and as many for slopes, which matmul does at its rate, beside 3 to 5
walks over the logits, 2 T n bytes each in 16 bits: at T = 8192, d = 4096, n = 128256 on an H100 26 ms beside 3 ms.

Source: Hsu et al. 2024, "Liger Kernel", section 3.2, for chunks of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from portakern.backends.triton import BACKEND
from portakern.backends.triton.gpu import matmul as portable
from portakern.backends.triton.gpu.family import FAMILY
from portakern.backends.triton.lib.linear_cross_entropy import (
    as_product,
    default_tiling,
    in_chunks,
    key,
    supports,
)
from portakern.core.tilings import default

if TYPE_CHECKING:
    from portakern.core.call import Call


def multiply(call: Call, a: Any, b: Any, c: Any) -> None:
    """c = a b, with the tiling that matmul has for it."""
    of = as_product(call, a, b, a.shape[0], b.shape[1], a.shape[1])
    matmul = BACKEND.implementation("matmul", FAMILY)
    assert matmul is not None
    portable.matmul(of, default(matmul, of).tiling, c)


def refused(call: Call, m: int, n: int, k: int) -> str | None:
    """Why matmul does not take a product of these extents."""
    of = as_product(call, call.arrays["hidden"], call.arrays["weight"], m, n, k)
    matmul = BACKEND.implementation("matmul", FAMILY)
    assert matmul is not None
    return portable.supports(of, default(matmul, of).tiling)


@BACKEND.implements("linear_cross_entropy", key=key, tiling=default_tiling, supports=partial(supports, refused=refused))
def linear_cross_entropy(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    return in_chunks(call, tiling, multiply)
