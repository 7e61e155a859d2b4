"""The drop-in twin of PyTorch's ``scaled_mm`` on the scaled_matmul op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from portakern.errors import SpecError, UnsupportedError
from portakern.frameworks.torch.functions import kept_op

__all__ = ["scaled_mm"]

NAME = "scaled_mm"
BLOCK = 128
PADDED = 4
"""Blocks of 128 x 128 come from PyTorch's callers with so many, or a multiple, along k: what is behind is not read."""

ROWS = {"TensorWise": None, "RowWise": 1, "BlockWise1x128": 1, "BlockWise128x128": BLOCK}
"""PyTorch's recipe -> rows of mat_a, or columns of mat_b, that share a scale; None: all do."""

ELSEWHERE = {
    "BlockWise1x32": 'call portakern.op("scaled_matmul") with k_width=32, and float32 scales (m, k / 32), (k / 32, n)',
    "BlockWise1x16": "no kernel here multiplies 4-bit numbers",
}


def scaled_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor | list[Tensor],
    scale_recipe_a: Any,
    scale_b: Tensor | list[Tensor],
    scale_recipe_b: Any,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.bfloat16,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
    *,
    backend: str | None = None,
) -> Tensor:
    """``torch.nn.functional.scaled_mm`` on the scaled_matmul op.

    A row has the same bits in any company. PyTorch's own runs on GPUs alone, and takes some pairs of recipes.

    Args:
      mat_a: (m, k); mat_b: (k, n), float8_e4m3fn or float8_e5m2 in any mix, or both int8. Weights (n, k) come as
        weight.T.
      scale_a, scale_b: float32, or a list of one. By the recipe: one number in any shape; (m, 1) and (1, n);
        (m, k / 128) and (k / 128, n); (m / 128, k / 128) and (k / 128, n / 128), rounded up, the last ones with k's
        axis filled up to a multiple of 4 or not.
      scale_recipe_a, scale_recipe_b: ``torch.nn.functional.ScalingType`` TensorWise, RowWise, BlockWise1x128 or
        BlockWise128x128, its name, or a list of one; the two in any mix.
      swizzle_a, swizzle_b: None or ``SwizzleType.NO_SWIZZLE``.
      bias: (n,), of 16 or 32 bits, which is added in float32.
      output_dtype: bfloat16, float16 or float32.
      contraction_dim: () or (1, 0).
      use_fast_accum: sums of any number of products, not of 128, may keep 13 bits behind the point ("fast" of the op).
      backend: the backend that must run it; None: chosen from the arrays.

    Returns:
      (m, n), output_dtype. No gradient, as in PyTorch.

    Raises:
      SpecError: shapes or dtypes that do not agree with the recipes. UnsupportedError: BlockWise1x32 and BlockWise1x16,
        swizzled scales, several scales of one operand, another contraction_dim, output_dtype=None.
    """
    for name, x in (("mat_a", mat_a), ("mat_b", mat_b)):
        if x.dim() != 2:
            raise SpecError(
                f"{NAME}: {name} has shape {tuple(x.shape)}; expected 2 axes, mat_a (m, k) and mat_b (k, n)"
            )
    if output_dtype is None:
        raise UnsupportedError(
            f"{NAME}: output_dtype is None, which is mat_a's in PyTorch; expected bfloat16, float16 or float32: name it"
        )
    if tuple(d % 2 for d in contraction_dim) not in ((), (1, 0)):
        raise UnsupportedError(
            f"{NAME}: contraction_dim is {contraction_dim!r}; expected () or (1, 0): transpose operands"
        )
    for name, swizzle in (("swizzle_a", swizzle_a), ("swizzle_b", swizzle_b)):
        if any(s is not None and s.name != "NO_SWIZZLE" for s in (swizzle if isinstance(swizzle, list) else [swizzle])):
            raise UnsupportedError(f"{NAME}: {name} is {swizzle!r}; expected None: no kernel reads swizzled scales")
    recipe_a, recipe_b = _recipe("scale_recipe_a", scale_recipe_a), _recipe("scale_recipe_b", scale_recipe_b)
    of_a = _scale("scale_a", scale_a, recipe_a, mat_a.shape, 1)
    of_b = _scale("scale_b", scale_b, recipe_b, mat_b.shape, 0)
    try:
        c: Tensor = kept_op("scaled_matmul", backend)(
            mat_a, mat_b, of_a, of_b, None if bias is None else bias.float(), m_width=ROWS[recipe_a] or 1,
            n_width=ROWS[recipe_b] or 1, k_width=BLOCK, precision="fast" if use_fast_accum else "promoted",
            out_dtype=output_dtype,
        )  # fmt: skip
    except SpecError as e:
        raise SpecError(f"{NAME}: {e} (a is mat_a, b is mat_b, out_dtype is output_dtype)") from e
    return c


def _one(name: str, value: Any) -> Any:
    """The one member of a list, or what is no list."""
    if not isinstance(value, list):
        return value
    if len(value) != 1:
        raise UnsupportedError(
            f"{NAME}: {name} is a list of {len(value)}; expected one, since an operand has one scale"
        )
    return value[0]


def _recipe(name: str, value: Any) -> str:
    """The name of a recipe that kernels here have."""
    recipe = str(getattr(_one(name, value), "name", value))
    if recipe in ELSEWHERE:
        raise UnsupportedError(f"{NAME}: {name} is {recipe}; expected one of {', '.join(ROWS)}; {ELSEWHERE[recipe]}")
    if recipe not in ROWS:
        raise SpecError(
            f"{NAME}: {name} is {value!r}; expected one of torch.nn.functional.ScalingType: {', '.join(ROWS)}"
        )
    return recipe


def _scale(name: str, value: Any, recipe: str, shape: torch.Size, along: int) -> Tensor:
    """A scale as the op takes it: of an operand of this shape whose axis ``along`` is k."""
    scale, rows = _one(name, value), ROWS[recipe]
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32:
        what = scale.dtype if isinstance(scale, Tensor) else type(scale).__name__
        raise SpecError(f"{NAME}: {name} is {what}; expected a tensor of float32, which holds other scales: cast it")
    if rows is None:
        if scale.numel() != 1:
            raise SpecError(f"{NAME}: {name} has shape {tuple(scale.shape)}; expected one number for {recipe}")
        return scale.reshape(1, 1)
    blocks = 1 if recipe == "RowWise" else -(-shape[along] // BLOCK)
    more = -(-blocks // PADDED) * PADDED if recipe == "BlockWise128x128" else blocks
    expected = [-(-shape[1 - along] // rows)] * 2
    expected[along] = blocks
    padded = list(expected)
    padded[along] = more
    if list(scale.shape) not in (expected, padded):
        raise SpecError(
            f"{NAME}: {name} has shape {tuple(scale.shape)}; expected {tuple(expected)} for {recipe} of an operand "
            f"{tuple(shape)}" + (f", or {tuple(padded)}" if padded != expected else "")
        )
    return scale.narrow(along, 0, blocks)
