"""FlashInfer-Bench: an element is wrong where its absolute *and* its relative error are too large."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.judges.rule import Rejected, Rule, Source, Task, arguments, eager, normal, options_of, tasks_of
from benchmarks.judges.subject import Candidate, Trial
from portakern.core.framework import frameworks

__all__ = ["RULES"]

COMMIT = "40e6ca7844b514eb4b1c7edba6d6a7377df57870"
TOLERANCE, TRIALS = 1e-2, 3
OWN = (
    Task(
        "rmsnorm", {"x": (8, 4096), "weight": (4096,)}, "bfloat16", normal(), own="rmsnorm_h4096",
        cut="a batch of 8, as a workload has",
    ),
    Task(
        "matmul", {"a": (16, 4096), "b": (4096, 64)}, "float16", normal(), own="gemm_n4096_k4096",
        cut="4096 columns to 64",
    ),
    Task(
        "attention", {"q": (1, 16, 8, 128), "k": (1, 256, 2, 128), "v": (1, 256, 2, 128)}, "bfloat16", normal(),
        options={"is_causal": True}, own="gqa_ragged", cut="one sequence, 32 heads to 8",
    ),
)  # fmt: skip


class FlashInferBench(Rule):
    name = "flashinfer-bench"
    title = "FlashInfer-Bench"
    sources = (
        Source("flashinfer-ai/flashinfer-bench", "flashinfer_bench/bench/evaluators/default.py", COMMIT),
        Source("flashinfer-ai/flashinfer-bench", "flashinfer_bench/bench/utils.py", COMMIT),
        Source("flashinfer-ai/flashinfer-bench", "flashinfer_bench/bench/config.py", COMMIT),
    )
    rule = (
        "equal shape and dtype, no NaN and no infinity, and no element whose absolute error exceeds 1e-2 *and* whose "
        "relative error exceeds 1e-2 (for mixtures of experts 5 % of them may)"
    )
    inputs = "`torch.randn`, 3 trials of one workload, whose inputs and references are all made beforehand"

    def __init__(self) -> None:
        self.tasks = tasks_of(OWN, "bfloat16", normal())

    def trials(self, candidate: Candidate) -> Iterator[Trial]:
        wing = frameworks()["torch"]
        for task in self.tasks_for(candidate):
            options = options_of(task, candidate)
            rng = np.random.default_rng(0)
            drawn = [arguments(task, candidate, rng) for _ in range(TRIALS)]
            given = [candidate.given(call.arrays) for call in drawn]
            expected = [eager(call, options) for call in drawn]
            for call, inputs, wanted in zip(drawn, given, expected, strict=True):
                got = candidate.shown(candidate(inputs, options))
                for want, value in zip(map(wing.to_numpy, wanted), got, strict=True):
                    if want.shape != value.shape:
                        raise Rejected(f"INCORRECT_SHAPE {value.shape}")
                    if want.dtype != value.dtype:
                        raise Rejected(f"INCORRECT_DTYPE {value.dtype}")
                    x, y = value.astype(np.float32), want.astype(np.float32)
                    if not np.isfinite(x).all():
                        raise Rejected("INCORRECT_NUMERICAL: not finite")
                    error = np.abs(x - y)
                    if ((error > TOLERANCE) & (error / (np.abs(y) + 1e-8) > TOLERANCE)).any():
                        raise Rejected("INCORRECT_NUMERICAL")
                yield Trial(call.arrays, options, [v.copy() for v in got])


RULES = (FlashInferBench(),)
