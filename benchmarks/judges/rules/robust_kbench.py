"""robust-kbench: ``torch.allclose`` at 1e-5, the candidate called before and after the reference; a filter of tasks."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from benchmarks.judges.rule import (
    Given,
    NotJudged,
    Rejected,
    Rule,
    Source,
    Task,
    allclose,
    arguments,
    eager,
    normal,
    options_of,
    tasks_of,
)
from benchmarks.judges.subject import Candidate, Trial
from portakern.core import registry

__all__ = ["RULES"]

COMMIT = "078f5bab29934a822268d59a4e707d449abf9b4e"
TOLERANCE, TRIALS, LEAST, SEEDS = 1e-5, 5, 0.01, 10


def rows(n: int, own: str, cut: str) -> Task:
    return Task(
        "layernorm", {"x": (2, n), "weight": (n,), "bias": (n,)}, "float32", normal(), own=own, cut=cut
    )  # fmt: skip


OWN = (
    Task("softmax", {"x": (16, 16384)}, "float32", normal(), own="level_1/task_23"),
    rows(2**16, "layernorm", "batches of 1 and 8 to 2"),
    rows(2**18, "layernorm", "batches of 1 and 8 to 2, 64 x 256 x 256 to 64 x 64 x 64"),
    Task(
        "rmsnorm", {"x": (8, 4096), "weight": (4096,)}, "float32", normal(), {"weight": normal(0.1, 1)},
        {"eps": 1e-8}, own="llama_rmsnorm", cut="16 x 1024 rows to 8",
    ),
    Task(
        "matmul", {"a": (64, 2048), "b": (2048, 64)}, "float32", normal(), own="level_1/task_1",
        cut="2048 x 2048 results to 64 x 64",
    ),
)  # fmt: skip


class RobustKBench(Rule):
    name = "robust-kbench"
    title = "robust-kbench"
    sources = (
        Source("SakanaAI/robust-kbench", "robust_kbench/sandbox/correct_forward_fn.py", COMMIT),
        Source("SakanaAI/robust-kbench", "robust_kbench/sandbox/correct_backward_fn.py", COMMIT),
        Source("SakanaAI/robust-kbench", "robust_kbench/filter/forward.py", COMMIT),
    )
    rule = (
        "`torch.allclose(rtol = atol = 1e-5)` against PyTorch in float32, of the results of two calls, one before and "
        "one after the reference's, both compared at the end; 5 trials. A task whose reference lies within 0.01 of 0, "
        "or varies by less than 0.01 over 10 seeds or along an axis, is dropped"
    )
    inputs = "`torch.randn`, several settings a task, all three calls on the same tensors"
    gradients = True

    def __init__(self) -> None:
        self.tasks = tasks_of(OWN, "float32", normal())

    def trials(self, candidate: Candidate) -> Iterator[Trial]:
        posed = self.tasks_for(candidate)
        tasks = [t for t in posed if t in kept(t.op) or (t not in self.tasks[t.op] and not dropped(t))]
        if not tasks:
            raise NotJudged("its filter drops the task")
        for task in tasks:
            options = options_of(task, candidate)
            for seed in np.random.default_rng(42).integers(2**32, size=TRIALS):
                call = arguments(task, candidate, np.random.default_rng(seed))
                given = candidate.given(call.arrays)
                first = candidate(given, options)
                # the reference reads the tensors as the candidate left them
                left = {n: candidate.framework.to_numpy(a) for n, a in given.items()}
                expected = eager(call if candidate.spec.is_vjp else Given(candidate.spec, left, left), options)
                second = candidate(given, options) if not candidate.spec.is_vjp else first
                for outputs in (first, second):
                    for want, value in zip(expected, candidate.shown(outputs), strict=True):
                        if not allclose(want, value, TOLERANCE):
                            raise Rejected(f"not close in {task.own or 'a common shape'}")
                yield Trial(call.arrays, options, [v.copy() for v in candidate.shown(second)])


def reference(task: Task, rng: np.random.Generator) -> np.ndarray:
    spec, arrays = registry.find_spec(task.op), task.arrays(rng)
    return np.asarray(eager(Given(spec, arrays, arrays), task.options)[0].numpy())


@functools.cache
def kept(op: str) -> tuple[Task, ...]:
    """The tasks of a forward op that the filter leaves."""
    return tuple(t for t in RULES[0].tasks[op] if not dropped(t))


def dropped(task: Task) -> bool:
    """Whether the filter drops a task: all outputs near 0, or too little variation between seeds or along an axis."""
    outputs = np.stack([reference(task, np.random.default_rng(seed)) for seed in range(SEEDS)])
    still = [bool((outputs.std(axis, ddof=1) < LEAST).all()) for axis in range(outputs.ndim)]
    return bool((np.abs(outputs) < LEAST).all()) or any(still)


RULES = (RobustKBench(),)
