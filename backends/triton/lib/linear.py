"""What follows the product of a linear layer."""

from __future__ import annotations

import triton
import triton.language as tl

from portakern.backends.triton.lib.activations import activated


@triton.jit
def finish(z, bias, bias_n, residual_at, y, pre, col, col_ok, at, ok, activation: tl.constexpr,
           acc_dtype: tl.constexpr):  # fmt: skip
    """What follows a tile z of the product: bias, activation, residual. at: where its elements stand in y and pre.
    bias, residual_at and pre may be None."""
    if bias is not None:
        z += tl.load(bias + col * bias_n, mask=col_ok, other=0.0).to(acc_dtype)[None, :]
    if pre is not None:
        tl.store(pre + at, z.to(pre.dtype.element_ty), mask=ok)
    f = activated(z, activation, y.dtype.element_ty.primitive_bitwidth == 16)
    if residual_at is not None:
        f += tl.load(residual_at, mask=ok, other=0.0).to(acc_dtype)
    tl.store(y + at, f.to(y.dtype.element_ty), mask=ok)
