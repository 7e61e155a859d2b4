"""BackendBench: ``assert_close`` on PyTorch's own sample inputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.judges.rule import (
    Given,
    NotJudged,
    Rejected,
    Rule,
    Source,
    Task,
    arguments,
    eager,
    options_of,
    tasks_of,
    tensor,
    uniform,
)
from benchmarks.judges.subject import Candidate, Trial
from portakern.core.framework import frameworks

__all__ = ["RULES"]

DTYPE, TOLERANCE = "bfloat16", 1e-2
COMMIT = "66e0dbc05a683e537830c246ea83255ff227676f"
Sample = tuple[dict[str, np.ndarray], dict[str, Any]]


def shown(t: Any) -> np.ndarray:
    return frameworks()["torch"].to_numpy(t.detach()).copy()


def rows(t: Any, normalized: Any) -> np.ndarray:
    """A tensor normalised over several axes as rows of one."""
    return shown(t.reshape(*t.shape[: t.dim() - len(normalized)], math.prod(normalized)))


def flat(t: Any) -> np.ndarray | None:
    return None if t is None else shown(t.reshape(-1))


def present(arrays: Mapping[str, np.ndarray | None]) -> dict[str, np.ndarray]:
    return {n: a for n, a in arrays.items() if a is not None}


def softmax(s: Any) -> Sample | None:
    return ({"x": shown(s.input)}, {"axis": s.args[0]}) if s.input.dim() and "dtype" not in s.kwargs else None


def logsumexp(s: Any) -> Sample | None:
    axes, keep = s.args[0], s.args[1] if len(s.args) > 1 else s.kwargs.get("keepdim", False)
    return ({"x": shown(s.input)}, {"axis": axes[0]}) if len(axes) == 1 and not keep and s.input.dim() else None


def norm(s: Any, names: tuple[str, ...]) -> Sample | None:
    shape, *affine = s.args
    options = {k: v for k, v in s.kwargs.items() if k == "eps"}
    if options.get("eps", 1) < 0:
        return None
    given = dict(zip(names, map(flat, affine), strict=False))
    return present({"x": rows(s.input, shape), **given}), options


def matmul(s: Any) -> Sample | None:
    (b,) = s.args
    return ({"a": shown(s.input), "b": shown(b)}, {}) if min(s.input.dim(), b.dim()) >= 2 else None


def attention(s: Any) -> Sample | None:
    k, v = s.args
    plain = not s.kwargs.get("is_causal") and not s.kwargs.get("dropout_p") and len(s.kwargs.keys()) <= 2
    if not plain or s.input.dim() != 4:
        return None
    return {n: shown(t.transpose(1, 2)) for n, t in (("q", s.input), ("k", k), ("v", v))}, {}


TAKEN = {
    "softmax": softmax,
    "logsumexp": logsumexp,
    "nn.functional.layer_norm": functools.partial(norm, names=("weight", "bias")),
    "nn.functional.rms_norm": functools.partial(norm, names=("weight",)),
    "matmul": matmul,
    "mm": matmul,
    "bmm": matmul,
    "nn.functional.scaled_dot_product_attention": attention,
}
"""Name in PyTorch's table of ops -> a sample as a call of the op here; None where that does not take it."""
OPS = {
    "nn.functional.layer_norm": "layernorm",
    "nn.functional.rms_norm": "rmsnorm",
    "mm": "matmul",
    "bmm": "matmul",
    "nn.functional.scaled_dot_product_attention": "attention",
}


@functools.cache
def samples() -> Mapping[str, list[Sample]]:
    """Op -> the calls of PyTorch's table that it takes, as the installed PyTorch has them."""
    import torch
    from torch.testing._internal.common_methods_invocations import op_db

    frameworks()["torch"].load()
    torch.manual_seed(0)
    found: dict[str, list[Sample]] = {}
    for info in op_db:
        if info.name in TAKEN and info.variant_test_name in ("", "triton_optimized"):
            calls = map(TAKEN[info.name], info.sample_inputs("cpu", getattr(torch, DTYPE)))
            found.setdefault(OPS.get(info.name, info.name), []).extend(c for c in calls if c is not None)
    return found


def plain(candidate: Candidate, arrays: Mapping[str, np.ndarray]) -> Given:
    taken = candidate.taken(arrays)
    return Given(candidate.spec, taken, taken)


class BackendBench(Rule):
    name = "backendbench"
    title = "BackendBench"
    sources = (
        Source("meta-pytorch/BackendBench", "BackendBench/eval.py", COMMIT),
        Source("meta-pytorch/BackendBench", "BackendBench/suite/opinfo.py", COMMIT),
    )
    rule = (
        "`torch.testing.assert_close(rtol = atol = 1e-2, equal_nan=True)` against PyTorch in bfloat16, which looks at "
        "shape and dtype as well; every test has to pass (the harness reports the share)"
    )
    inputs = (
        "the samples of PyTorch's own `op_db` (suite `opinfo`) that the op takes, those of the installed PyTorch; the "
        "reference runs first, on the same tensors"
    )

    def __init__(self) -> None:
        own = [Task(op, {}, DTYPE, uniform(), own="op_db") for op in {*TAKEN, *OPS.values()} - {*OPS}]
        self.tasks = tasks_of(own, DTYPE, uniform())

    def calls(self, candidate: Candidate) -> Iterator[tuple[Given, dict[str, Any]]]:
        if candidate.spec.is_vjp:
            raise NotJudged("the samples have no gradients")
        taken = samples().get(candidate.subject.op, ())
        asked_empty = candidate.subject.asked().get("empty", True)
        for arrays, options in taken:
            if not asked_empty and not all(array.size for array in arrays.values()):
                continue  # its author said that no extent is 0
            known = candidate.known
            if known is None or options.keys() <= known:  # a function without an axis has the last one
                yield plain(candidate, arrays), options
            elif options.get("axis") in (-1, arrays.get("x", np.zeros(())).ndim - 1):
                yield plain(candidate, arrays), {}
        if not taken:
            for task in self.tasks_for(candidate):
                yield arguments(task, candidate, np.random.default_rng(0)), options_of(task, candidate)

    def trials(self, candidate: Candidate) -> Iterator[Trial]:
        import torch

        for call, options in self.calls(candidate):
            given = candidate.given(call.arrays)
            expected = eager(call, options)
            got = candidate.shown(candidate(given, options))
            for want, value in zip(expected, got, strict=True):
                try:
                    torch.testing.assert_close(want, tensor(value), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
                except AssertionError as e:
                    shape = next(iter(call.arrays.values())).shape
                    raise Rejected(f"{str(e).splitlines()[0]} (shape {shape})") from None
            yield Trial(call.arrays, options, [v.copy() for v in got])


RULES = (BackendBench(),)
