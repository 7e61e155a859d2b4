"""How a kernel makes weights of scores with one fused operation and one exponential.

Source: Dao 2023 (FlashAttention-2) scales a score and its row's maximum apart, so that the compiler fuses the product
with the difference. What the product of the maximum rounds away, and where that is too much, is added here.
"""

from __future__ import annotations

from math import ceil, e, floor, isfinite, log2
from typing import NamedTuple

import numpy as np


class Exponents(NamedTuple):
    """Numbers by which a weight is 2^(s factor - offset), of a score s: one fused operation and one exponential.

    For the maximum m of the row the factor is ``rate``, and the offset m rate as it rounds. What it rounds away
    multiplies all weights of the row alike, and so their sum, and is no error of their mean, if sums are carried from
    one maximum to the next by offsets that are rounded so too. But from 2^digits on it is half a unit and more, and
    could take weights beyond what numbers hold. Where |m| is not below ``beyond`` the factor is therefore ``octave``,
    the next power of two towards 1, whose product with m is exact. That errs by less than the scores do there: these by
    d + 6 units of roundoff of their terms, which are 7 and more.
    """

    rate: float
    beyond: float
    octave: float


LARGEST = 2.0**127
"""Units whose product with log2(e) float32 holds: infinite, it would make NaN of a score of 0."""


def below_overflow(pre: float | None, unit: float) -> tuple[float | None, float]:
    """``score_unit``'s numbers with no unit beyond ``LARGEST``."""
    return (pre, unit) if unit <= LARGEST else ((pre or 1.0) * (unit / 2), 2.0)


def two_parts(number: float, wide: bool = False) -> tuple[float, float]:
    """A number as the sum of two that float32 holds, or as itself and 0 where kernels compute in float64 (``wide``)."""
    if wide:
        return number, 0.0
    high = float(np.float32(number))
    return high, float(np.float32(number - high)) if isfinite(high) else 0.0


def exponents(unit: float, digits: int = 24) -> Exponents:
    """How scores in this unit (``score_unit``) become weights; ``digits``: the binary ones of what holds the scores,
    float32 or float64."""
    rate = unit * log2(e)
    return Exponents(rate, 2.0**digits / rate, 2.0 ** (ceil if rate < 1.0 else floor)(log2(rate)))
