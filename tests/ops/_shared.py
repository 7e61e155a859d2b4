"""What the records share: random values, the roundings of an accumulator, and how arrays of a gradient come from a
forward call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from portakern.api import op
from portakern.core.oracle import oracle
from portakern.spec.dtypes import numpy_dtype
from portakern.testing.cases import REGIMES

F32 = np.float32
BF16 = numpy_dtype("bfloat16")
HALVES = ("float16", "bfloat16")
CHECKED = (
    "normal",
    "wide",
    "integers",
    "spikes",
    "constant",
    "large_mean",
    "subnormal",
    "near_overflow",
    "very_negative",
)
"""Regimes of the checker that leave every element a number."""
SWEPT = ("normal", "wide", "spread", "large mean", "constant", "subnormal", "rising")
"""Regimes of :func:`sweep`."""


# --------------------------------------------------------------------------------------------------------------- values
def draw(rng: np.random.Generator, shape: Any, dtype: str, regime: str = "normal") -> np.ndarray:
    """Values as the checker draws them."""
    return np.array(REGIMES[regime](rng, shape, numpy_dtype(dtype))).astype(numpy_dtype(dtype))


def sweep(rng: np.random.Generator, shape: Any, dtype: str, regime: str = "normal") -> np.ndarray:
    """Values that lead a sum through what is hard for it: far apart, far from 0, the largest last."""
    x = rng.standard_normal(shape)
    if regime == "wide":
        x = x * 2.0 ** rng.integers(-12, 4, shape)
    elif regime == "spread":  # logits far apart
        x = x * 20
    elif regime == "large mean":
        x = 0.02 * x + (200 if dtype == "float32" else 3)
    elif regime == "constant":
        x = np.full(shape, 1.1)
    elif regime == "subnormal":
        x = x * (2.0**-18 if dtype == "float16" else 2.0**-128)
    elif regime == "rising":
        x = np.broadcast_to(np.linspace(0, 3, shape[-1]), shape) + 0 * x
    return x.astype(np.float64 if dtype == "float64" else F32).astype(numpy_dtype(dtype))


def positive(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.abs(draw(rng, shape, "float32"))


def whole(rng: np.random.Generator, shape: Any, dtype: str, top: int) -> np.ndarray:
    """Integers up to ``top`` of both signs."""
    return rng.integers(-top, top + 1, shape).astype(numpy_dtype(dtype))


def pick(rng: np.random.Generator, choices: Sequence[Any]) -> Any:
    return choices[rng.integers(len(choices))]


def normal64(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def with_specials(rng: np.random.Generator, arrays: Sequence[Any]) -> list[Any]:
    """Copies, half of those that can hold a NaN or an infinity with one somewhere."""
    arrays = [a if a is None else a.copy() for a in arrays]
    for a in arrays:
        if a is not None and a.dtype.kind not in "iub" and rng.random() < 0.5:
            a[tuple(rng.integers(extent) for extent in a.shape)] = rng.choice([np.nan, np.inf, -np.inf])
    return arrays


# ------------------------------------------------------------------------------------------- what an accumulator may do
def accumulator(*arrays: Any) -> type[np.floating[Any]]:
    """The type in which kernels compute: float64 for float64, else float32."""
    return np.float64 if any(a is not None and a.dtype == np.float64 for a in arrays) else np.float32


def flush(x: Any, on: bool) -> Any:
    """Subnormal numbers as 0, as hardware may make them."""
    return np.where(np.abs(x) < np.finfo(x.dtype).tiny, x.dtype.type(0), x) if on else x


def truncate(x: np.ndarray, dtype: str) -> np.ndarray:
    """x in a 16-bit dtype, cut towards 0 where it should be rounded."""
    near = x.astype(numpy_dtype(dtype))
    return (near.view(np.uint16) - (np.abs(near.astype(x.dtype)) > np.abs(x))).view(near.dtype)


def cut(x: np.ndarray, precision: str) -> np.ndarray:
    """Operands as a tf32 matrix unit reads them: 10 bits behind the point."""
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(F32) if precision == "tf32" else x


def through(x: Any, low: Any) -> Any:
    """x kept in a narrower dtype for a moment."""
    return x if low is None else x.astype(low).astype(x.dtype)


def in_blocks(values: np.ndarray, block: int, axis: int = -1) -> np.ndarray:
    """A sum, block after block."""
    parts = [
        values.take(range(j, min(j + block, values.shape[axis])), axis).sum(axis, keepdims=True)
        for j in range(0, values.shape[axis], block)
    ]
    total = np.zeros_like(parts[0])
    for part in parts:
        total = total + part
    return total


def over_rows(values: np.ndarray, group: int, skip_rows: int) -> np.ndarray:
    """A sum over rows as two kernels take it: one for groups of rows, one for what the groups gave."""
    groups = range(0, len(values) - skip_rows, group)
    partial = np.concatenate([in_blocks(values[i : i + group], 1, 0) for i in groups] or [values[:1] * 0])
    return in_blocks(partial, 1, 0)[0]


def rounded_tanh(x: np.ndarray) -> np.ndarray:
    """A tanh good to 11 bits, as the hardware's is."""
    return np.tanh(x).astype(np.float16).astype(np.float32)


# ---------------------------------------------------------------------------------------------------------------- calls
def in_order(name: str, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
    """Arrays by name as a tuple in the order of the spec."""
    return tuple(arrays.get(a.name) for a in op(name).spec.arrays)


def outputs_of(name: str, *arrays: Any, **options: Any) -> tuple[Any, ...]:
    """What the oracle gives of the outputs that callers are shown, in their dtypes."""
    call = op(name).bind(*arrays, **options)
    found = zip(oracle(call), call.outputs.values(), strict=True)
    shown = list(found)[: len(call.spec.shown)]
    return tuple(None if y is None else np.asarray(y).astype(numpy_dtype(dtype)) for y, (_, dtype) in shown)


def results(found: Any) -> tuple[Any, ...]:
    """What an op, or the same in plain operations of a library, returned: one array or several, without what is not
    there.
    """
    return tuple(y for y in found if y is not None) if isinstance(found, tuple) else (found,)


def zeros(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.zeros(shape, dtype)


# ------------------------------------------------------------------------------------------------ ops of rows, on a GPU
def long_rows(name: str, affine: Callable[[Any, int], tuple[Any, ...]] = lambda gpu, n: ()) -> Callable[[Any], Any]:
    """Rows past 2^31 elements of a forward op; ``affine`` gives what follows x."""

    def past_2_31(gpu: Any) -> Any:
        rows, n = gpu.big // 256 + 16, 256
        x = gpu.torch.randn(rows, n, dtype=gpu.torch.bfloat16, device=gpu.device)
        assert x.numel() > gpu.big
        picked, rest = gpu.rows_to_sample(rows, n), affine(gpu, n)
        yield gpu.op(name)(x, *rest)[picked], (x[picked], *rest), {}

    return past_2_31


def long_rows_of_gradients(
    name: str, first: Callable[[Any, Any], Any] = lambda gpu, x: x, weighs: bool = True
) -> Callable[[Any], Any]:
    """The same of a gradient; ``first`` makes what the forward call saved out of random rows."""

    def past_2_31(gpu: Any) -> Any:
        rows, n = gpu.big // 256 + 16, 256
        picked = gpu.rows_to_sample(rows, n)
        x = first(gpu, gpu.torch.randn(rows, n, dtype=gpu.torch.bfloat16, device=gpu.device))
        d_y, rest = gpu.sampled(x, picked), (gpu.normal(n, dtype=gpu.torch.bfloat16),) if weighs else ()
        d_x, *sums = outputs if isinstance(outputs := gpu.op(name)(x, d_y, *rest), tuple) else (outputs,)
        assert d_x.numel() > gpu.big
        yield (d_x[picked], *(s for s in sums if s is not None)), (x[picked], d_y[picked], *rest), {}

    return past_2_31
