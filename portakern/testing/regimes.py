"""Regimes: how the values of a float array are drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["EACH_ALONE", "MASK_REGIMES", "REGIMES", "VALUE_REGIMES"]

Shape = tuple[int, ...]


def _finfo(dtype: np.dtype[Any]) -> Any:
    return ml_dtypes.finfo(dtype)


def _normal(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    return rng.standard_normal(shape)


def _integers(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    return rng.integers(-4, 5, shape).astype(float)


def _spikes(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    """Zeros but for ones at the ends, at powers of two and beside them: where tiles begin and end."""
    values = np.zeros(shape)
    if shape and values.size:
        n = shape[-1]
        edges = [i for i in {0, n - 1, *(p + s for p in (16, 32, 64, 128, 256) for s in (-1, 0))} if 0 <= i < n]
        columns = rng.choice(edges, shape[:-1])
        np.put_along_axis(values, np.expand_dims(columns, -1), 1.0, -1)
    return values


def _wide(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    exponent = 6 if float(_finfo(dtype).max) < 1e5 else 12
    return rng.standard_normal(shape) * np.exp2(rng.uniform(-exponent, exponent, shape))


def _near_overflow(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    return rng.uniform(-1, 1, shape) * float(_finfo(dtype).max)


def _large_mean(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    return (40000.0 if float(_finfo(dtype).max) > 4e4 else 256.0) + rng.integers(0, 4, shape)


def _constant(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    return np.broadcast_to(rng.standard_normal(shape[:-1] + (1,) if shape else ()), shape)


def _very_negative(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    largest = float(_finfo(dtype).max)
    low = -1e5 if largest > 1e5 else -6e4 if largest > 5e4 else -0.9 * largest
    return low + rng.standard_normal(shape)


def _subnormal(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    return rng.standard_normal(shape) * float(_finfo(dtype).smallest_normal) / 4


def _special(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    """Normal values with a few NaN, inf and -inf planted."""
    values = rng.standard_normal(shape)
    flat = values.reshape(-1)
    for _ in range(int(rng.integers(1, 4)) if flat.size else 0):
        flat[rng.integers(flat.size)] = rng.choice([np.nan, np.inf, -np.inf])
    return values


def _mask(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    """An additive mask: 0 or -inf, with whole rows of -inf."""
    values = np.where(rng.random(shape) < 0.5, 0.0, -np.inf)
    return _some_rows(rng, values, -np.inf)


def _mask_finfo_min(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    """The other habit: the dtype's most negative finite number, with whole rows of it."""
    low = float(_finfo(dtype).min)
    values = np.where(rng.random(shape) < 0.5, 0.0, low)
    return _some_rows(rng, values, low)


def _some_rows(rng: np.random.Generator, values: np.ndarray, value: float) -> np.ndarray:
    if values.ndim:
        values[rng.random(values.shape[:-1]) < 0.3] = value
    return values


REGIMES: dict[str, Callable[[np.random.Generator, Shape, np.dtype[Any]], np.ndarray]] = {
    "normal": _normal,
    "integers": _integers,
    "spikes": _spikes,
    "wide": _wide,
    "constant": _constant,
    "large_mean": _large_mean,
    "very_negative": _very_negative,
    "near_overflow": _near_overflow,
    "subnormal": _subnormal,
    "special": _special,
    "mask": _mask,
    "mask_finfo_min": _mask_finfo_min,
}
"""How float values are drawn; each gives float64 that is then rounded to the array's dtype."""

MASK_REGIMES = ("normal", "mask", "mask_finfo_min", "very_negative")
EACH_ALONE = ("normal", "integers", "wide", "near_overflow", "large_mean", "very_negative", "subnormal", "special")
"""Regimes in which every element is drawn by itself, wherever it lies."""

VALUE_REGIMES = tuple(r for r in REGIMES if not r.startswith("mask"))
