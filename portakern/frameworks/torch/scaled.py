"""The drop-in twins of PyTorch's ``scaled_mm`` and ``scaled_grouped_mm`` on the scaled_matmul and scaled_grouped_matmul
ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from portakern.errors import SpecError, UnsupportedError
from portakern.frameworks.torch.functions import kept_op

__all__ = ["scaled_grouped_mm", "scaled_mm"]

BLOCK = 128
PADDED = 4
"""Blocks of 128 x 128 come from PyTorch's callers with so many, or a multiple, along k: what is behind is not read."""

ROWS = {"TensorWise": None, "RowWise": 1, "BlockWise1x128": 1, "BlockWise128x128": BLOCK}
"""PyTorch's recipe -> rows of mat_a, or columns of mat_b, that share a scale; None: all do."""

ELSEWHERE = {
    "BlockWise1x32": 'call portakern.op("{op}") with k_width=32, and float32 scales whose blocks of k are k / 32',
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
                f"scaled_mm: {name} has shape {tuple(x.shape)}; expected 2 axes, mat_a (m, k) and mat_b (k, n)"
            )
    taken = _Taken("scaled_mm", "scaled_matmul")
    taken.check(output_dtype, contraction_dim, swizzle_a=swizzle_a, swizzle_b=swizzle_b)
    recipe_a, recipe_b = taken.recipe("scale_recipe_a", scale_recipe_a), taken.recipe("scale_recipe_b", scale_recipe_b)
    of_a = taken.scale("scale_a", scale_a, recipe_a, mat_a.shape, 1)
    of_b = taken.scale("scale_b", scale_b, recipe_b, mat_b.shape, 0)
    try:
        c: Tensor = kept_op("scaled_matmul", backend)(
            mat_a, mat_b, of_a, of_b, None if bias is None else bias.float(), m_width=ROWS[recipe_a] or 1,
            n_width=ROWS[recipe_b] or 1, k_width=BLOCK, precision="fast" if use_fast_accum else "promoted",
            out_dtype=output_dtype,
        )  # fmt: skip
    except SpecError as e:
        raise SpecError(f"scaled_mm: {e} (a is mat_a, b is mat_b, out_dtype is output_dtype)") from e
    return c


def scaled_grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor | list[Tensor],
    scale_recipe_a: Any,
    scale_b: Tensor | list[Tensor],
    scale_recipe_b: Any,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    bias: Tensor | None = None,
    offs: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.bfloat16,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
    *,
    backend: str | None = None,
) -> Tensor:
    """``torch.nn.functional.scaled_grouped_mm`` on the scaled_grouped_matmul op.

    A row has the same bits in any company. PyTorch's own runs on GPUs alone, and takes RowWise and BlockWise1x32.

    Args:
      mat_a: (rows, k); mat_b: (groups, k, n), float8_e4m3fn or float8_e5m2 in any mix, or both int8. Weights
        (groups, n, k) come as weight.mT.
      scale_a: float32, or a list of one. By the recipe: one number in any shape; (rows,) or (rows, 1); (rows, k / 128),
        rounded up. scale_b: one number, or (groups,); (groups, n); (groups, k / 128, n);
        (groups, k / 128, n / 128), rounded up, with k's axis filled up to a multiple of 4 or not.
      scale_recipe_a: ``torch.nn.functional.ScalingType`` TensorWise, RowWise or BlockWise1x128; scale_recipe_b: those
        or BlockWise128x128, in any mix. A name, or a list of one, too.
      swizzle_a, swizzle_b: None or ``SwizzleType.NO_SWIZZLE``.
      bias: (groups, n), of 16 or 32 bits, which is added in float32; PyTorch's releases up to 2.13 take none.
      offs: (groups,), int32 or int64: the row before which each group ends. Ends rise, and may repeat.
      output_dtype: bfloat16, float16 or float32.
      contraction_dim: () or (1, 0).
      use_fast_accum: sums of any number of products, not of 128, may keep 13 bits behind the point ("fast" of the op).
      backend: the backend that must run it; None: chosen from the arrays.

    Returns:
      (rows, n), output_dtype. Rows from the last end on are zeros, which PyTorch leaves as memory was. No gradient, as
      in PyTorch.

    Raises:
      SpecError: shapes or dtypes that do not agree with the recipes. UnsupportedError: other ranks of mat_a and mat_b,
        BlockWise1x32 and BlockWise1x16, BlockWise128x128 of mat_a, swizzled scales, several scales of one operand,
        another contraction_dim, output_dtype=None.
    """
    taken, shapes = _Taken("scaled_grouped_mm", "scaled_grouped_matmul"), (tuple(mat_a.shape), tuple(mat_b.shape))
    if (mat_a.dim(), mat_b.dim()) != (2, 3):
        raise UnsupportedError(
            f"scaled_grouped_mm: mat_a and mat_b have shapes {shapes[0]} and {shapes[1]}; expected (rows, k) and "
            "(groups, k, n): groups of columns are those of rows of the transposed matrices, and each of a batch is a "
            "scaled_mm"
        )
    if offs is None:
        raise SpecError(
            "scaled_grouped_mm: offs is None; expected where each group ends: pass the cumulative sums of the groups' "
            "sizes, int32"
        )
    taken.check(output_dtype, contraction_dim, swizzle_a=swizzle_a, swizzle_b=swizzle_b)
    recipe_a, recipe_b = taken.recipe("scale_recipe_a", scale_recipe_a), taken.recipe("scale_recipe_b", scale_recipe_b)
    if recipe_a == "BlockWise128x128":
        raise UnsupportedError(
            "scaled_grouped_mm: scale_recipe_a is BlockWise128x128, whose blocks of rows would lie in several groups; "
            "expected TensorWise, RowWise or BlockWise1x128: repeat the scales for each row"
        )
    of_a = taken.one("scale_a", scale_a)
    if recipe_a == "RowWise" and isinstance(of_a, Tensor) and of_a.dim() == 1:
        of_a = of_a[:, None]
    of_a = taken.scale("scale_a", of_a, recipe_a, mat_a.shape, 1)
    of_b = taken.scales_of_groups(scale_b, recipe_b, mat_b.shape)
    try:
        c: Tensor = kept_op("scaled_grouped_matmul", backend)(
            mat_a, mat_b, offs, of_a, of_b, None if bias is None else bias.float(), n_width=ROWS[recipe_b] or 1,
            k_width=BLOCK, precision="fast" if use_fast_accum else "promoted", out_dtype=output_dtype,
        )  # fmt: skip
    except SpecError as e:
        named = "a is mat_a, b is mat_b, group_ends is offs, out_dtype is output_dtype"
        raise SpecError(f"scaled_grouped_mm: {e} ({named})") from e
    return c


class _Taken(NamedTuple):
    """What a function of PyTorch's takes of its arguments: its name, and the op's."""

    name: str
    op: str

    def check(self, output_dtype: torch.dtype | None, contraction_dim: Sequence[int], **swizzles: Any) -> None:
        """Refuse options that no kernel here has."""
        if output_dtype is None:
            raise UnsupportedError(
                f"{self.name}: output_dtype is None, which is mat_a's in PyTorch; expected bfloat16, float16 or "
                "float32: name it"
            )
        if tuple(d % 2 for d in contraction_dim) not in ((), (1, 0)):
            raise UnsupportedError(
                f"{self.name}: contraction_dim is {contraction_dim!r}; expected () or (1, 0): transpose operands"
            )
        for name, swizzle in swizzles.items():
            each = swizzle if isinstance(swizzle, list) else [swizzle]
            if any(s is not None and s.name != "NO_SWIZZLE" for s in each):
                raise UnsupportedError(
                    f"{self.name}: {name} is {swizzle!r}; expected None: no kernel reads swizzled scales"
                )

    def one(self, name: str, value: Any) -> Any:
        """The one member of a list, or what is no list."""
        if not isinstance(value, list):
            return value
        if len(value) != 1:
            raise UnsupportedError(
                f"{self.name}: {name} is a list of {len(value)}; expected one, since an operand has one scale"
            )
        return value[0]

    def recipe(self, name: str, value: Any) -> str:
        """The name of a recipe that kernels here have."""
        recipe = str(getattr(self.one(name, value), "name", value))
        if recipe in ELSEWHERE:
            instead = ELSEWHERE[recipe].format(op=self.op)
            raise UnsupportedError(f"{self.name}: {name} is {recipe}; expected one of {', '.join(ROWS)}; {instead}")
        if recipe not in ROWS:
            raise SpecError(
                f"{self.name}: {name} is {value!r}; expected one of torch.nn.functional.ScalingType: {', '.join(ROWS)}"
            )
        return recipe

    def floats(self, name: str, value: Any) -> Tensor:
        """A scale in float32."""
        scale = self.one(name, value)
        if not isinstance(scale, Tensor) or scale.dtype != torch.float32:
            what = scale.dtype if isinstance(scale, Tensor) else type(scale).__name__
            raise SpecError(
                f"{self.name}: {name} is {what}; expected a tensor of float32, which holds other scales: cast it"
            )
        return scale

    def scale(self, name: str, value: Any, recipe: str, shape: torch.Size, along: int) -> Tensor:
        """A scale as the op takes it: of an operand of this shape whose axis ``along`` is k."""
        scale, rows = self.floats(name, value), ROWS[recipe]
        if rows is None:
            if scale.numel() != 1:
                raise SpecError(f"{self.name}: {name} has shape {tuple(scale.shape)}; expected one number for {recipe}")
            return scale.reshape(1, 1)
        blocks = 1 if recipe == "RowWise" else -(-shape[along] // BLOCK)
        more = -(-blocks // PADDED) * PADDED if recipe == "BlockWise128x128" else blocks
        expected = [-(-extent // rows) for extent in shape]
        expected[along] = blocks
        padded = list(expected)
        padded[along] = more
        return self.cut(name, scale, recipe, (expected, padded), shape).narrow(along, 0, blocks)

    def cut(
        self, name: str, scale: Tensor, recipe: str, shapes: tuple[list[int], list[int]], operand: torch.Size
    ) -> Tensor:
        """A scale that has one of two shapes."""
        expected, padded = shapes
        if list(scale.shape) not in shapes:
            raise SpecError(
                f"{self.name}: {name} has shape {tuple(scale.shape)}; expected {tuple(expected)} for {recipe} of an "
                f"operand {tuple(operand)}" + (f", or {tuple(padded)}" if padded != expected else "")
            )
        return scale

    def scales_of_groups(self, value: Any, recipe: str, shape: torch.Size) -> Tensor:
        """Those of matrices (groups, k, n), as the op takes them."""
        scale, (groups, k, n), rows = self.floats("scale_b", value), shape, ROWS[recipe]
        if rows is None:
            each = [groups] if scale.numel() != 1 else list(scale.shape)
            return self.cut("scale_b", scale, recipe, (each, each), shape).reshape(-1, 1, 1)
        if recipe == "RowWise":
            return self.cut("scale_b", scale, recipe, ([groups, n], [groups, 1, n]), shape).reshape(groups, 1, n)
        blocks = -(-k // BLOCK)
        more = -(-blocks // PADDED) * PADDED if recipe == "BlockWise128x128" else blocks
        expected, padded = ([groups, along, -(-n // rows)] for along in (blocks, more))
        return self.cut("scale_b", scale, recipe, (expected, padded), shape).narrow(1, 0, blocks)
