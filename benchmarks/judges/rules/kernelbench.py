"""KernelBench: ``torch.allclose`` on fresh inputs of one shape, five times."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.judges.rule import (
    Rejected,
    Rule,
    Source,
    Task,
    allclose,
    arguments,
    constant,
    eager,
    options_of,
    tasks_of,
    uniform,
)
from benchmarks.judges.subject import Candidate, Trial

__all__ = ["RULES"]

TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-2}
TRIALS = 5
SEED = 42


def level_1(dtype: str) -> tuple[Task, ...]:
    """The problems of level 1 that ops here compute. No sum is shortened by more than is said."""
    draw = uniform()
    affine = {"weight": constant(1), "bias": constant(0)}  # as an nn.LayerNorm begins

    def matmul(own: str, a: tuple[int, ...], b: tuple[int, ...], cut: str) -> Task:
        return Task("matmul", {"a": a, "b": b}, dtype, draw, own=own, cut=cut)

    return (
        Task("softmax", {"x": (2, 393216)}, dtype, draw, own="23_Softmax", cut="4096 rows to 2"),
        Task(
            "layernorm", {"x": (2, 2**18), "weight": (2**18,), "bias": (2**18,)}, dtype, draw, affine,
            own="40_LayerNorm", cut="16 rows of 64 x 256 x 256 to 2 of 64 x 64 x 64",
        ),
        Task(
            "rmsnorm", {"x": (1024, 64)}, dtype, draw, options={"eps": 1e-5}, own="36_RMSNorm_",
            cut="112 x 512 x 512 rows to 1024",
        ),
        matmul("1_Square_matrix_multiplication_", (32, 4096), (4096, 32), "4096 x 4096 results to 32 x 32"),
        matmul("3_Batched_matrix_multiplication", (2, 16, 1024), (2, 1024, 16), "128 x 512 x 2048 to 2 x 16 x 16"),
        matmul("6_Matmul_with_large_K_dimension_", (4, 2**16), (2**16, 4), "k of 524288 to 65536, results to 4 x 4"),
        matmul("7_Matmul_with_small_K_dimension_", (128, 64), (64, 128), "32768 x 32768 results to 128 x 128"),
        matmul("8_Matmul_with_irregular_shapes_", (33, 2949), (2949, 37), "8205 x 5921 results to 33 x 37"),
        Task(
            "attention", {"q": (1, 32, 2, 128), "k": (1, 512, 2, 128), "v": (1, 512, 2, 128)}, dtype, draw,
            own="97_ScaledDotProductAttention", cut="32 x 32 heads of 512 queries to 2 of 32, head dim 1024 to 128",
        ),
    )  # fmt: skip


class KernelBench(Rule):
    title = "KernelBench"
    sources = (
        Source(
            "ScalingIntelligence/KernelBench", "src/kernelbench/eval.py", "423217d9fda91e0c2d67e4a43bf62f96f6d104f1"
        ),
        Source(
            "ScalingIntelligence/KernelBench",
            "scripts/eval_from_generations.py",
            "423217d9fda91e0c2d67e4a43bf62f96f6d104f1",
        ),
    )

    def __init__(self, dtype: str) -> None:
        self.dtype, self.tolerance = dtype, TOLERANCE[dtype]
        self.name = f"kernelbench-{dtype}"
        self.title = f"KernelBench, {dtype}"
        self.tasks = tasks_of(level_1(dtype), dtype, uniform())
        self.rule = (
            f"the shape is equal and `torch.allclose(rtol = atol = {self.tolerance:g})` against PyTorch in {dtype}, in "
            f"each of {TRIALS} trials; `allclose` wants equal dtypes, and no NaN is equal"
        )
        self.inputs = "`torch.rand`, one shape a problem, a seed a trial; the reference runs first, on the same tensors"

    def trials(self, candidate: Candidate) -> Iterator[Trial]:
        for task in self.tasks_for(candidate):
            options = options_of(task, candidate)
            for seed in np.random.default_rng(SEED).integers(2**32, size=TRIALS):
                call = arguments(task, candidate, np.random.default_rng(seed))
                given = candidate.given(call.arrays)
                expected = eager(call, options)
                got = candidate.shown(candidate(given, options))
                for want, value in zip(expected, got, strict=True):
                    if want.shape != value.shape:
                        raise Rejected(f"Output shape mismatch: expected {tuple(want.shape)}, got {value.shape}")
                    if not allclose(want, value, self.tolerance):
                        raise Rejected(f"Output mismatch in {task.own or 'a common shape'}")
                yield Trial(call.arrays, options, [v.copy() for v in got])


RULES = (KernelBench("float32"), KernelBench("bfloat16"))
