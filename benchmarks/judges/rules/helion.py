"""Helion: what its examples are held to, and what its autotuner holds a candidate to."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.judges.rule import Rejected, Rule, Source, Task, arguments, eager, normal, options_of, tasks_of, tensor
from benchmarks.judges.subject import Candidate, Trial

__all__ = ["RULES"]

COMMIT = "ef091f416a50c443b38e4c8bff2980777f5ff225"
HALF = "bfloat16"


def norm(op: str, n: int, names: tuple[str, ...], own: str, cut: str, shifted: bool = False) -> Task:
    shapes = {"x": (8, n)} | dict.fromkeys(names, (n,))
    special = {"x": normal(0.5, -2.3)} if shifted else {}
    return Task(op, shapes, HALF, normal(), special, {"eps": 1e-4 if shifted else 1e-5}, own=own, cut=cut)


OWN = (
    Task("softmax", {"x": (16, 2560)}, HALF, normal(), own="softmax", cut="4096 rows to 16"),
    norm("layernorm", 10240, ("weight", "bias"), "layer_norm", "4096 rows to 8", shifted=True),
    norm("layernorm", 10240, ("weight",), "layer_norm without bias", "4096 rows to 8", shifted=True),
    norm("rmsnorm", 4096, ("weight",), "rms_norm", "2048 rows to 8"),
    norm("rmsnorm", 8192, ("weight",), "rms_norm", "2048 rows to 8"),
    Task(
        "matmul", {"a": (64, 1024), "b": (1024, 64)}, HALF, normal(), own="matmul", cut="1024 x 1024 results to 64 x 64"
    ),
    Task(
        "attention", {"q": (1, 32, 2, 64), "k": (1, 1024, 2, 64), "v": (1, 1024, 2, 64)}, HALF, normal(),
        own="attention", cut="2 x 32 heads of 1024 queries to 2 of 32",
    ),
    Task("swiglu", {"gate": (8, 4096), "up": (8, 4096)}, HALF, normal(), own="swiglu", cut="4 x 8192 rows to 8"),
)  # fmt: skip
TIGHTER = ("layernorm", "rmsnorm")
"""Ops whose examples set atol to 1e-2; the others have the default of 1e-1."""


class Helion(Rule):
    gradients = True

    def __init__(self) -> None:
        self.tasks = tasks_of(OWN, HALF, normal())

    def tolerances(self, task: Task, expected: object) -> tuple[float, float]:
        raise NotImplementedError

    def trials(self, candidate: Candidate) -> Iterator[Trial]:
        import torch

        for task in self.tasks_for(candidate):
            options = options_of(task, candidate)
            call = arguments(task, candidate, np.random.default_rng(0))
            expected = eager(call, options)
            got = candidate.shown(candidate(candidate.given(call.arrays), options))
            for want, value in zip(expected, got, strict=True):
                rtol, atol = self.tolerances(task, want)
                try:
                    torch.testing.assert_close(*self.as_compared(tensor(value), want), rtol=rtol, atol=atol)
                except AssertionError as e:
                    raise Rejected(f"{str(e).splitlines()[0]} ({task.own or 'a common shape'})") from None
            yield Trial(call.arrays, options, [v.copy() for v in got])

    def as_compared(self, got: object, want: object) -> tuple[object, object]:
        return got, want


class Examples(Helion):
    name, title = "helion-examples", "Helion, examples"
    sources = (
        Source("pytorch/helion", "helion/_testing.py (run_example)", COMMIT),
        Source("pytorch/helion", "examples/", COMMIT),
    )
    rule = (
        "`torch.testing.assert_close` of both in float32 against PyTorch in bfloat16: rtol 1e-2, atol 1e-1 unless an "
        "example says 1e-2 (the norms do); one call; no NaN is equal, the dtype is not looked at"
    )
    inputs = "`torch.randn`, the shapes of an example's `main`, on copies of the reference's inputs"

    def tolerances(self, task: Task, expected: object) -> tuple[float, float]:
        return 1e-2, 1e-2 if task.op in TIGHTER else 1e-1

    def as_compared(self, got: object, want: object) -> tuple[object, object]:
        import torch

        assert isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor)
        return got.float(), want.float()


class Autotuner(Helion):
    name, title = "helion-autotuner", "Helion, autotuner"
    sources = (
        Source("pytorch/helion", "helion/autotuner/benchmark_provider.py", COMMIT),
        Source("pytorch/helion", "helion/autotuner/accuracy.py", COMMIT),
        Source("pytorch/helion", "pull request 3522, as its description tells it", "2026-09-01"),
    )
    rule = (
        "`torch.testing.assert_close` against the kernel's own default configuration (here PyTorch in bfloat16): rtol "
        "1e-2, atol 1e-2 max(1, RMS of the reference); one call; dtype and shape are looked at, no NaN is equal"
    )
    inputs = "the arrays that the user tunes for; here those of the examples"
    gradients = False

    def tolerances(self, task: Task, expected: object) -> tuple[float, float]:
        import torch

        assert isinstance(expected, torch.Tensor)
        rms = float(expected.double().square().mean().sqrt()) if expected.numel() else 0.0
        return 1e-2, 1e-2 * max(1.0, rms)


RULES = (Examples(), Autotuner())
