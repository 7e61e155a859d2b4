"""What the specs of ops along rows share."""

from __future__ import annotations

from math import inf

import numpy as np


def plant(rng: np.random.Generator, rows: np.ndarray, value: float) -> None:
    """Plant a value at one place of the last axis, in some rows."""
    rows[rng.random(rows.shape[:-1]) < 0.5, rng.integers(rows.shape[-1])] = value


def silence_all_but_one(rng: np.random.Generator, cotangents: np.ndarray) -> None:
    """Zeros in all rows but one: the first, the middle or the last."""
    rows = cotangents.reshape(-1, cotangents.shape[-1])
    rows[np.arange(len(rows)) != rng.choice([0, len(rows) // 2, len(rows) - 1])] = 0


def share_of_root(size: np.ndarray, moved: np.ndarray, v: np.ndarray) -> np.ndarray:
    """By which share of itself v^-1/2 moves where v is size^2 and a constant, and size moves by so much."""
    low = v - np.square(size) + np.square(np.maximum(size - moved, 0.0))
    return np.where(low > 0, np.sqrt(v / low) - 1, inf)


def mean_variance(values: np.ndarray, axis: int, longest: float, k2: float) -> np.ndarray:
    """k^2 [(c / 3 + 1) mean^2 + (c / 6 + log2 N + 1) S^2 / N], the variance of the error of a mean of N terms.

    Every rounding has an RMS of k = KAPPA u of its result, k2 is k^2. c of the terms, ``longest``, are added one after
    another; S^2 is the terms' mean square. The i-th of these additions rounds a partial sum of i/c of the whole, and a
    bridge of the terms' deviations; every level of a tree above rounds the root of the sum of squares; then each term
    itself is rounded.
    """
    count = values.shape[axis]
    squares, mean = np.square(values).sum(axis, keepdims=True) / count, values.sum(axis, keepdims=True) / count
    return k2 * ((longest / 3 + 1) * mean**2 + (longest / 6 + np.log2(count) + 1) * squares / count)


def numbers_of_few_digits(rows: np.ndarray, rng: np.random.Generator) -> None:
    """Each row one number, 1 to 255 times a power of two, of which float16 holds each, and float32 all multiples up to
    2^16. Every other is 255, which a relative error of half a unit roundoff makes another number."""
    size = (*rows.shape[:-1], 1)
    few = np.where(rng.random(size) < 0.5, 255, rng.integers(1, 256, size))
    rows[...] = few * 2.0 ** rng.integers(-4, 9, size) * rng.choice([-1, 1], size)
