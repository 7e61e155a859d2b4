"""JAXBench: ``numpy.allclose`` at 1e-2 in float32, once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.judges.rule import Rejected, Rule, Source, Task, arguments, eager, normal, options_of, tasks_of
from benchmarks.judges.subject import Candidate, Trial
from portakern.core.framework import frameworks
from tests.ops import record

__all__ = ["RULES"]

COMMIT = "c4f3b17ba3e034d7f148f47c3e6cbe3905f5e386"
TOLERANCE = 1e-2
OWN = (
    Task(
        "rmsnorm", {"x": (16, 8192), "weight": (8192,)}, "bfloat16", normal(), {"weight": normal(0.1, 1)},
        {"eps": 1e-5}, own="12p_RMSNorm", cut="8 x 4096 rows to 16",
    ),
    Task(
        "matmul", {"a": (8, 8192), "b": (8192, 64)}, "bfloat16", normal(), {"b": normal(0.02)}, own="8p_GEMM",
        cut="8192 x 28672 results to 8 x 64",
    ),
    Task(
        "attention", {"q": (1, 128, 2, 128), "k": (1, 128, 2, 128), "v": (1, 128, 2, 128)}, "bfloat16", normal(),
        options={"is_causal": True}, own="1p_Flash_Attention", cut="4 x 64 heads of 4096 to 2 of 128",
    ),
    Task(
        "attention", {"q": (1, 64, 8, 128), "k": (1, 64, 2, 128), "v": (1, 64, 2, 128)}, "bfloat16", normal(),
        options={"is_causal": True}, own="2p_GQA_Attention", cut="128 heads to 8, 4096 to 64",
    ),
)  # fmt: skip


class JaxBench(Rule):
    name = "jaxbench"
    title = "JAXBench"
    sources = (
        Source("AI-Hypercomputer/accelerator-agents", "JAXBench/harness/correctness.py", COMMIT),
        Source("AI-Hypercomputer/accelerator-agents", "JAXBench/harness/evaluator.py", COMMIT),
    )
    rule = (
        "equal shape and `numpy.allclose(rtol = atol = 1e-2)` of both in float32 against JAX in bfloat16, on one call; "
        "no NaN is equal, the dtype is not looked at"
    )
    inputs = "`jax.random.normal` of one key, one shape a workload; the reference runs first; without `jit` here"

    def __init__(self) -> None:
        self.tasks = tasks_of(OWN, "bfloat16", normal())

    def trials(self, candidate: Candidate) -> Iterator[Trial]:
        wing = frameworks()["jax"]
        wing.load()
        for task in self.tasks_for(candidate):
            options = options_of(task, candidate)
            call = arguments(task, candidate, np.random.default_rng(42))
            arrays, given = call.arrays, candidate.given(call.arrays)
            if candidate.spec.is_vjp:
                expected = [frameworks()["torch"].to_numpy(t) for t in eager(call, options)]
            else:
                inputs = [
                    wing.from_numpy(arrays[a.name], None) if a.name in arrays else None for a in candidate.spec.arrays
                ]
                while inputs and inputs[-1] is None:
                    inputs.pop()
                result = record(task.op).in_jax(*inputs, **options)
                results = result if isinstance(result, tuple) else (result,)
                expected = [wing.to_numpy(y) for y in results if y is not None]
            got = candidate.shown(candidate(given, options))
            if len(got) != len(expected):
                raise Rejected(f"output count mismatch: {len(expected)} vs {len(got)}")
            for want, value in zip(expected, got, strict=True):
                x, y = want.astype(np.float32), value.astype(np.float32)
                if x.shape != y.shape:
                    raise Rejected(f"shape mismatch: {x.shape} vs {y.shape}")
                if not np.allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE):
                    raise Rejected(f"values differ in {task.own or 'a common shape'}")
            yield Trial(arrays, options, [v.copy() for v in got])


RULES = (JaxBench(),)
