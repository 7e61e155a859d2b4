"""The problems of KernelBench's level 1 that an op here computes, each as PyTorch computes it there.

ScalingIntelligence/KernelBench, KernelBench/level1/, at 423217d9fda91e0c2d67e4a43bf62f96f6d104f1. Not among them: those
whose inputs have a structure that the op does not know (12 diagonal, 14 and 15 triangular) and those of other ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.judges.subject import Subject

__all__ = ["PROBLEMS", "Problem", "references"]

Shapes = Mapping[str, tuple[int, ...]]


def product(a: Any, b: Any) -> Any:
    import torch

    return torch.matmul(a, b)


def batched(a: Any, b: Any) -> Any:
    import torch

    return torch.bmm(a, b) if a.dim() == b.dim() == 3 else torch.matmul(a, b)


def transposed_a(a: Any, b: Any) -> Any:
    import torch

    return torch.matmul(a.mT.contiguous().mT, b)


def transposed_b(a: Any, b: Any) -> Any:
    import torch

    return torch.matmul(a, b.mT.contiguous().mT)


def transposed_both(a: Any, b: Any) -> Any:
    import torch

    return torch.matmul(a.mT.contiguous().mT, b.mT.contiguous().mT)


def four_axes(a: Any, b: Any) -> Any:
    import torch

    return torch.einsum("...l,lk->...k", a, b) if b.dim() == 2 else torch.matmul(a, b)


def softmax(x: Any) -> Any:
    import torch

    return torch.softmax(x, dim=1 if x.dim() == 2 else -1)


def rms_norm(x: Any, *, eps: float = 1e-6) -> Any:
    """Over the second axis of four, as there."""
    import torch

    maps = x.reshape(-1, x.shape[-1])[:, :, None, None]
    return (maps / torch.sqrt(torch.mean(maps**2, dim=1, keepdim=True) + eps)).reshape(x.shape)


def layer_norm(x: Any) -> Any:
    """Over the last three axes of four, by a module as it begins."""
    import torch

    maps = x.reshape(-1, x.shape[-1], 1, 1)
    layer = torch.nn.LayerNorm(maps.shape[1:], device=x.device, dtype=x.dtype)
    with torch.no_grad():
        return layer(maps).reshape(x.shape)


def attention(q: Any, k: Any, v: Any) -> Any:
    """Heads stand before positions there."""
    import torch

    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], 2) for t in (k, v))
    heads = (t.transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2)


@dataclass(frozen=True)
class Problem:
    """A problem: its file, the op, what it computes, the shapes on which a CPU tries it, and what the function has
    built in."""

    name: str
    op: str
    fn: Callable[..., Any]
    shapes: Shapes
    options: Mapping[str, Any] = field(default_factory=dict)


def matrices(name: str, fn: Callable[..., Any], a: tuple[int, ...], b: tuple[int, ...]) -> Problem:
    return Problem(name, "matmul", fn, {"a": a, "b": b})


PROBLEMS = (
    matrices("1_Square_matrix_multiplication_", product, (32, 4096), (4096, 32)),
    matrices("2_Standard_matrix_multiplication_", product, (16, 8192), (8192, 32)),
    matrices("3_Batched_matrix_multiplication", batched, (3, 16, 1024), (3, 1024, 32)),
    matrices("4_Matrix_vector_multiplication_", product, (4, 2**18), (2**18, 1)),
    matrices("6_Matmul_with_large_K_dimension_", product, (4, 2**17), (2**17, 4)),
    matrices("7_Matmul_with_small_K_dimension_", product, (256, 64), (64, 256)),
    matrices("8_Matmul_with_irregular_shapes_", product, (33, 2949), (2949, 37)),
    matrices("9_Tall_skinny_matrix_multiplication_", product, (1024, 32), (32, 256)),
    matrices("10_3D_tensor_matrix_multiplication", product, (2, 16, 2048), (2048, 24)),
    matrices("11_4D_tensor_matrix_multiplication", four_axes, (2, 4, 16, 256), (256, 48)),
    matrices("13_Matmul_for_symmetric_matrices", product, (512, 512), (512, 512)),
    matrices("16_Matmul_with_transposed_A", transposed_a, (16, 8192), (8192, 32)),
    matrices("17_Matmul_with_transposed_B", transposed_b, (16, 8192), (8192, 32)),
    matrices("18_Matmul_with_transposed_both", transposed_both, (16, 8192), (8192, 32)),
    Problem("23_Softmax", "softmax", softmax, {"x": (2, 393216)}),
    Problem("36_RMSNorm_", "rmsnorm", rms_norm, {"x": (1024, 64)}, {"eps": 1e-5}),
    Problem("40_LayerNorm", "layernorm", layer_norm, {"x": (2, 2**18)}),
    Problem(
        "97_ScaledDotProductAttention", "attention", attention,
        {"q": (1, 32, 2, 128), "k": (1, 512, 2, 128), "v": (1, 512, 2, 128)},
    ),
)  # fmt: skip
"""Extents that no sum runs over are cut to what a CPU computes, and the sums of 4, 6, 13 and 40, and 97's head."""


def references() -> Iterator[Subject]:
    """As submissions: float32 as there, the shapes of the problem, any kind of value, contiguous."""
    for p in PROBLEMS:

        def asked(p: Problem = p) -> Mapping[str, Any]:
            return {
                "shapes": [p.shapes], "dtypes": ("float32",), "layouts": "contiguous", "empty": False, "edges": False,
                "options": dict(p.options), "max_examples": 12,
            }  # fmt: skip

        yield Subject("level 1", p.name, p.op, lambda p=p: p.fn, "torch", right=True, asked=asked)
