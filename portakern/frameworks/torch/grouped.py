"""The drop-in twin of PyTorch's ``grouped_mm``, on the grouped_matmul op, and on matmul where groups are a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from portakern.errors import SpecError, UnsupportedError
from portakern.frameworks.torch.functions import kept_op

__all__ = ["grouped_mm"]

NAME = "grouped_mm"
FORMS = {
    (2, 3): "a is mat_a, b is mat_b and group_ends is offs",
    (3, 2): "a is mat_b.mT, b is mat_a.mT and group_ends is offs",
    (3, 3): "a is mat_a and b is mat_b",
}
"""Ranks of mat_a and mat_b, and what the op calls the arguments."""


def grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """``torch.nn.functional.grouped_mm`` on the grouped_matmul op.

    | mat_a | mat_b | offs | result |
    |---|---|---|---|
    | (rows, k) | (groups, k, n) | ends of groups of rows | (rows, n) |
    | (groups, m, k) | (k, columns) | ends of groups of columns | (m, columns) |
    | (groups, m, k) | (groups, k, n) | None | (groups, m, n), by the matmul op |

    Both have gradients. Of two matrices, PyTorch's form of a weight's gradient, the first form's backward pass makes
    that product, and a call of its own is refused.

    Args:
      mat_a, mat_b: as in the table, of one float dtype and of any strides: PyTorch wants 16 bytes between rows.
      offs: (groups,), int32 or int64: the row, or column, before which each group ends. Ends rise, and may repeat.
      bias: None, as in PyTorch's releases up to 2.13, which have none.
      out_dtype: the result's dtype, to which sums are rounded once; None: that of mat_a. PyTorch refuses others.
      backend: the backend that must run it; None: chosen from the arrays.

    Returns:
      as in the table. Rows or columns from the last end on are zeros, which PyTorch leaves as memory was.

    Raises:
      SpecError: shapes or dtypes that do not agree, offs that is missing or has no use. UnsupportedError: bias, and
        two matrices.
    """
    ranks = mat_a.dim(), mat_b.dim()
    _check(mat_a, mat_b, offs, bias)
    try:
        if ranks == (3, 3):
            return kept_op("matmul", backend)(mat_a, mat_b, out_dtype=out_dtype)
        product = kept_op("grouped_matmul", backend)
        if ranks == (2, 3):
            return product(mat_a, mat_b, offs, out_dtype=out_dtype)
        return product(mat_b.mT, mat_a.mT, offs, out_dtype=out_dtype).mT
    except SpecError as e:
        raise SpecError(f"{NAME}: {e} ({FORMS[ranks]})") from e


def _check(mat_a: Tensor, mat_b: Tensor, offs: Tensor | None, bias: Tensor | None) -> None:
    """Refuse what is none of the forms that are served, and what an op's message would not name."""
    ranks, shapes = (mat_a.dim(), mat_b.dim()), f"{tuple(mat_a.shape)} and {tuple(mat_b.shape)}"
    if bias is not None:
        raise UnsupportedError(
            f"{NAME}: bias is given, of shape {tuple(bias.shape)}; it is not served, as in PyTorch: add the bias of "
            "each row's group to the result"
        )
    if ranks == (2, 2):
        raise UnsupportedError(
            f"{NAME}: mat_a and mat_b are two matrices, {shapes}: the gradient of a weight (groups, k, n), which is "
            "not served alone; the backward pass of (rows, k) and (groups, k, n) makes it, and so does "
            'portakern.op("grouped_matmul_vjp")'
        )
    if ranks not in FORMS:
        raise SpecError(
            f"{NAME}: mat_a and mat_b have shapes {shapes}; expected (rows, k) and (groups, k, n), (groups, m, k) and "
            "(k, columns), or (groups, m, k) and (groups, k, n)"
        )
    if ranks != (3, 3) and offs is None:
        raise SpecError(
            f"{NAME}: offs is None beside a matrix; expected where each group ends: pass the cumulative sums of the "
            "groups' sizes, int32"
        )
    if ranks == (3, 3) and offs is not None:
        raise SpecError(
            f"{NAME}: offs is given beside mat_a and mat_b of 3 axes, {shapes}, whose first axis says the group; "
            "expected None: leave it out"
        )
    if ranks == (3, 3) and mat_a.shape[0] != mat_b.shape[0]:
        raise SpecError(f"{NAME}: mat_a and mat_b have shapes {shapes}; expected as many groups of both")
