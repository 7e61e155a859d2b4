"""gpuemu: shapes that fit an operator, a float64 oracle, an absolute tolerance for each op and dtype."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping

import numpy as np

from benchmarks.judges.corpus.planted import simulated
from benchmarks.judges.rule import Rejected, Rule, Source, Task, arguments, options_of, tasks_of, uniform
from benchmarks.judges.subject import Candidate, Trial
from portakern.core import registry
from portakern.core.binder import bind
from portakern.core.oracle import oracle

__all__ = ["RULES"]

REPOSITORY, COMMIT = "Skelf-Research/gpuemu", "162f5dfdc2b6a926630e16e78f7c21fbde384f3e"
PAPER, PAPER_COMMIT = "sarkar-dipankar/gpuemu-arxiv-paper", "449b049c75e501aba1537c66249817f7910ad74f"
ITERATIONS = 30  # an op and dtype
DTYPES = ("float32", "float16")
SHIPPED = {"float32": 1e-5, "float16": 1e-3}
PERCENTILE, SAFETY = 95, 1.5
MOST = 2**18  # elements of an array, and products of an attention: what a CPU and an interpreter do in a moment

CUBE = {"B": (1, 2, 8, 33), "S": (1, 7, 128, 513), "H": (1, 3, 256, 1025)}
SCHEMAS: Mapping[str, tuple[Mapping[str, tuple[int, ...]], Mapping[str, str]]] = {
    "matmul": (
        {"M": (1, 2, 7, 31, 128, 257), "K": (1, 3, 16, 127, 256), "N": (1, 2, 15, 64, 255)},
        {"a": "MK", "b": "KN"},
    ),
    "attention": (
        {"B": (1, 2, 5), "H": (1, 3, 8), "S": (1, 2, 17, 128, 257), "D": (8, 16, 64, 65)},
        dict.fromkeys("qkv", "BSHD"),
    ),
    "softmax": (CUBE, {"x": "BSH"}),
    "logsumexp": (CUBE, {"x": "BSH"}),
    "rmsnorm": (CUBE, {"x": "BSH", "weight": "H"}),
    "layernorm": (CUBE, {"x": "BSH", "weight": "H", "bias": "H"}),
    "swiglu": (CUBE, {"gate": "BSH", "up": "BSH"}),
}
"""Op -> (symbolic extent -> what it may be, argument -> its extents), as the fuzzer's built-in schemas have them; ops
of rows have that of a single tensor."""


def drawn(op: str, dtype: str) -> Iterator[Task]:
    """The fuzzer's cases."""
    extents, arrays = SCHEMAS[op]
    rng, found = np.random.default_rng([2024, *op.encode()]), 0
    while found < ITERATIONS:
        at = {n: int(rng.choice(values)) for n, values in extents.items()}
        shapes = {n: tuple(at[d] for d in dims) for n, dims in arrays.items()}
        pairs = math.prod(at.values()) * at["S"] if op == "attention" else 0
        if max(*map(math.prod, shapes.values()), pairs // 8) <= MOST:
            found += 1
            yield Task(op, shapes, dtype, uniform(-10, 10), own="op_schema", cut="cases over 2^18 elements left out")


@functools.cache
def calibrated(op: str, dtype: str) -> float:
    """1.5 times the 95th percentile of a right kernel's largest error over the cases: the kernel is one that adds up
    tile after tile in float32, as a compiled one does."""
    control = Candidate(simulated(op, {}, "control", right=True))
    errors = [float(np.nanmax(e, initial=0)) for _, e in largest(control, op, dtype)]
    return float(np.percentile(errors, PERCENTILE)) * SAFETY


def largest(candidate: Candidate, op: str, dtype: str) -> Iterator[tuple[Trial, np.ndarray]]:
    """Each case, and the errors of what came back against float64 rounded to the dtype."""
    forward = registry.forward_of(candidate.spec)
    for number, task in enumerate(drawn(forward.name if forward else op, dtype)):
        options = options_of(task, candidate)
        arrays = arguments(task, candidate, np.random.default_rng(number)).arrays
        call = bind(candidate.spec, **arrays, **options)
        exact = [y for y in oracle(call) if y is not None]
        got = candidate.shown(candidate(candidate.given(arrays), options))
        errors = []
        for name, want, value in zip(call.wants, exact, got, strict=True):
            shape, kind = call.outputs[name]
            if value.shape != shape:
                raise Rejected(f"shape mismatch: {value.shape} vs {shape}")
            if value.dtype.name != kind:
                raise Rejected(f"dtype mismatch: {value.dtype.name} vs {kind}")
            if not np.isfinite(value.astype(np.float32)).all():
                raise Rejected("the output holds NaN or Inf")
            with np.errstate(over="ignore"):
                errors.append(np.abs(value.astype(np.float64) - want.astype(value.dtype).astype(np.float64)).ravel())
        yield Trial(arrays, options, [v.copy() for v in got]), np.concatenate(errors)


class Gpuemu(Rule):
    inputs = (
        "30 cases in float32 and 30 in float16 from U(-10, 10), extents from the built-in schemas (1, primes, powers "
        "of two and one more), contiguous"
    )

    def __init__(self) -> None:
        own = [Task(op, {}, dtype, uniform(), own="op_schema") for op in SCHEMAS for dtype in DTYPES]
        self.tasks = tasks_of(own, "float32", uniform())

    def tolerance(self, op: str, dtype: str) -> float:
        raise NotImplementedError

    def trials(self, candidate: Candidate) -> Iterator[Trial]:
        op = candidate.subject.op
        self.tasks_for(candidate)
        for dtype in DTYPES:
            tolerance = self.tolerance(op, dtype)
            for trial, errors in largest(candidate, op, dtype):
                if (errors > tolerance).any():
                    raise Rejected(f"Tolerance exceeded in {dtype}: diff={errors.max():.2e} > tol={tolerance:.2e}")
                yield trial


class Shipped(Gpuemu):
    name, title = "gpuemu-default", "gpuemu, its defaults"
    sources = (
        Source(REPOSITORY, "crates/gpuemu-daemon/src/validator.rs", COMMIT),
        Source(REPOSITORY, "crates/gpuemu-common/src/config.rs", COMMIT),
        Source(REPOSITORY, "crates/gpuemu-common/src/types.rs (OpSchema)", COMMIT),
    )
    rule = (
        "equal shape and dtype, no NaN and no infinity, and |error| <= 1e-5 (float32) or 1e-3 (float16) against "
        "float64 rounded to the dtype, whatever the size of the result"
    )

    def tolerance(self, op: str, dtype: str) -> float:
        return SHIPPED[dtype]


class Calibrated(Gpuemu):
    name, title = "gpuemu-calibrated", "gpuemu, calibrated"
    sources = (*Shipped.sources, Source(PAPER, "p2/paper.tex", PAPER_COMMIT))
    rule = (
        "the same with a tolerance for each op and dtype: 1.5 times the 95th percentile of a right kernel's largest "
        "error over such cases"
    )

    def tolerance(self, op: str, dtype: str) -> float:
        return calibrated(op, dtype)


RULES = (Shipped(), Calibrated())
