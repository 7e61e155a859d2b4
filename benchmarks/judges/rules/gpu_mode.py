"""GPU MODE's reference-kernels: the helper ``verbose_allclose`` with tolerances a task."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.judges.rule import (
    Rejected,
    Rule,
    Source,
    Task,
    arguments,
    eager,
    normal,
    options_of,
    tasks_of,
    tensor,
    uniform,
)
from benchmarks.judges.subject import Candidate, Trial

__all__ = ["RULES"]

COMMIT = "f83cb92a534cc67fa98d7e9813e7f8238abdb4e0"
RECHECKS = 3  # a ranked run times a kernel at least so often, with a seed and a check each
TESTS = {
    53124: (64, 64, 64), 3321: (128, 128, 128), 1200: (256, 256, 256), 32523: (32, 512, 32), 4327: (64, 1024, 64),
}  # fmt: skip


def cauchy(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return 2 * rng.standard_cauchy(shape)


def norms(n: int, rows: int, heavy: bool = False) -> Task:
    """The rows that trimul's first step normalises."""
    shapes = {"x": (rows, n), "weight": (n,), "bias": (n,)}
    special = {"x": cauchy} if heavy else {}
    return Task("layernorm", shapes, "float32", normal(), special, own="trimul", cut="its normalisation alone")


OWN = (
    *(Task("matmul", {"a": (m, k), "b": (k, n)}, "float16", uniform(), own="matmul_py") for m, n, k in TESTS.values()),
    *(norms(n, 64) for n in (128, 256, 384, 768)),
    norms(128, 64, heavy=True),
    Task("softmax", {"x": (4, 32000)}, "bfloat16", normal(), own="cross_entropy_py", cut="4096 rows to 4, its softmax"),
    Task(
        "logsumexp", {"x": (4, 32000)}, "bfloat16", normal(), own="cross_entropy_py",
        cut="4096 rows to 4, its logsumexp",
    ),
    Task(
        "attention", {"q": (1, 1, 16, 128), "k": (1, 512, 16, 128), "v": (1, 512, 16, 128)}, "bfloat16", normal(),
        own="mla-decode", cut="its attention alone: 128 heads to 16, 6144 keys to 512",
    ),
    Task("swiglu", {"gate": (8, 2048), "up": (8, 2048)}, "float16", normal(), own="moe", cut="its activation alone"),
)  # fmt: skip


@dataclass(frozen=True)
class Tolerance:
    rtol: float
    atol: float


TOLERANCES = {
    "matmul": Tolerance(1e-5, 1e-8),
    "layernorm": Tolerance(2e-2, 2e-2),
    "softmax": Tolerance(1e-2, 1e-3),
    "logsumexp": Tolerance(1e-2, 1e-3),
    "attention": Tolerance(2e-2, 8e-3),
    "swiglu": Tolerance(1e-2, 1e-2),
    "rmsnorm": Tolerance(2e-2, 2e-2),
}
"""Of the tasks that have these ops, which are the tolerances of whole layers; rmsnorm has that of layernorm."""


class GpuMode(Rule):
    name = "gpu-mode"
    title = "GPU MODE (reference-kernels)"
    sources = tuple(
        Source("gpu-mode/reference-kernels", f"problems/{path}", COMMIT)
        for path in (
            "pmpp_v2/utils.py", "pmpp_v2/eval.py", "pmpp_v2/matmul_py/task.yml", "bioml/trimul/reference.py",
            "princeton/cross_entropy_py/reference.py", "amd/mla-decode/reference.py", "amd/moe/reference.py",
        )
    )  # fmt: skip
    rule = (
        "equal shape, |error| <= atol + rtol |reference|, NaN and infinities where the reference has them; rtol and "
        "atol are the task's: matmul 1e-5 and 1e-8 in float16, layers 1e-2 to 2e-2 and 1e-3 to 2e-2; the dtype is not "
        "looked at"
    )
    inputs = (
        "the task's tests, on copies of the inputs (the reference runs afterwards on the originals), then calls with a "
        "new seed each, as in a ranked run"
    )

    def __init__(self) -> None:
        self.tasks = tasks_of(OWN, "float32", normal())

    def trials(self, candidate: Candidate) -> Iterator[Trial]:
        tasks = self.tasks_for(candidate)
        for number, task in enumerate((*tasks, *tasks[:1] * RECHECKS)):
            tolerance, options = TOLERANCES[task.op], options_of(task, candidate)
            call = arguments(task, candidate, np.random.default_rng(1200 + 13 * number))
            got = candidate.shown(candidate(candidate.given(call.arrays), options))
            for want, value in zip(eager(call, options), got, strict=True):
                why = mismatch(tensor(value), want, tolerance)
                if why:
                    raise Rejected(f"{why} in {task.own or 'a common shape'} {next(iter(task.shapes.values()))}")
            yield Trial(call.arrays, options, [v.copy() for v in got])


def mismatch(received: object, expected: object, tolerance: Tolerance) -> str:
    """What the helper would report; empty where it has nothing to say."""
    import torch

    assert isinstance(received, torch.Tensor) and isinstance(expected, torch.Tensor)
    if received.shape != expected.shape:
        return "SIZE MISMATCH"
    far = (received - expected).abs() > tolerance.atol + tolerance.rtol * expected.abs()
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        far |= kind(received) ^ kind(expected)
    return f"{int(far.sum())} mismatched elements" if far.any() else ""


RULES = (GpuMode(),)
