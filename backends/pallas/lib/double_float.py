"""Numbers as the sum of two of float32: the log-sum-exp of a row, from which gradients measure its scores.

No operation here is fused with another in a way that would show: products are exact before they are added, since their
factors have 12 binary digits each. Compilers may fuse a product with a sum, and do so in one place and not in another;
none of them takes the sum of two numbers for more than what it rounds to.

Sources: Dekker, "A floating-point technique for extending the available precision" (1971), for products; Knuth, "The
art of computer programming", volume 2, section 4.2.2, theorem B, for sums.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from portakern.core.call import Call
from portakern.specs._exponents import two_parts
from portakern.specs.attention import score_unit

MASK = -(2**12)
"""The bits of a float32 without the last 12, which leave it 12 binary digits."""

LEAST_UNIT, LARGEST_UNIT = 2.0**-40, 2.0**100
"""Units of scores in gradients; see `UnitOf`."""


def added(a: Any, b: Any) -> tuple[Any, Any]:
    """a + b as it rounds, and what that takes from it."""
    total = a + b
    more = total - a
    return total, (a - (total - more)) + (b - more)


def halves(x: Any) -> tuple[Any, Any]:
    """A float32 as the sum of two numbers of 12 binary digits."""
    first = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(MASK), jnp.float32)
    return first, x - first


def known_halves(x: float) -> tuple[float, float]:
    """`halves` of a float32 that is known beforehand."""
    bits = np.float32(x).view(np.int32) & np.int32(MASK)
    first = float(bits.view(np.float32))
    return first, x - first


def in_two(high: Any, low: Any, factor: float, more: Any) -> tuple[Any, Any]:
    """(high + low) factor + more, to twice the precision of float32: as it rounds, and what that takes from it, which
    is 0 where it is not finite. ``low``, ``more``: None for nothing."""
    of_high, of_low = two_parts(factor)
    (a, b), (c, d) = halves(high), known_halves(of_high)
    total, rest = added(a * c, b * c)
    total, lost = added(total, a * d)
    rest += lost + b * d + high * of_low
    plain = high * of_high
    if low is not None:
        rest += low * of_high
    if more is not None:
        plain = plain + more
        total, lost = added(total, more)
        rest += lost
    rounded = total + rest
    finite = jnp.abs(rounded) < jnp.inf
    return jnp.where(finite, rounded, plain), jnp.where(finite, rest - (rounded - total), 0.0)


def beside_sink(high: Any, low: Any, sink: Any) -> tuple[Any, Any, Any]:
    """(share, high, low): what a sink leaves of the mean of the values, 1 / (1 + exp(sink - lse)), and lse with
    exp(sink) in its sum, from the lse of all keys in two numbers. -inf leaves all as it is, to the bit; inf and NaN
    give NaN.

    The exponential is taken of the negative difference, so that neither it nor the share overflows or is lost.
    """
    none = sink == -jnp.inf
    sink = jnp.where(sink < jnp.inf, sink, jnp.nan)
    apart = (sink - high) - low
    above, ratio = apart > 0, jnp.exp(-jnp.abs(apart))
    share = jnp.where(above, ratio, 1.0) / (1.0 + ratio)
    total, rest = added(jnp.where(above, sink, high), jnp.log(1.0 + ratio) + jnp.where(above, 0.0, low))
    rest = jnp.where(jnp.abs(total) < jnp.inf, rest, 0.0)
    return jnp.where(none, 1.0, share), jnp.where(none, high, total), jnp.where(none, low, rest)


class UnitOf(NamedTuple):
    """In which unit gradients keep scores: in that of the forward pass (``score_unit``), so that a score is the number
    that it was there.

    Of units that are next to nothing it is 1, since log l would be too large a number of them, and of huge ones a part
    of them is a power of 2 in the scores, since their inverse would be too small a number.

    pre: what multiplies a dot first, and factor: what multiplies its tanh, None for nothing; unit: the factor that
    takes scores to natural units.
    """

    pre: float | None
    factor: float | None
    unit: float

    @classmethod
    def gradients(cls, call: Call) -> UnitOf:
        pre, unit = score_unit(call)
        softcap = call.options["softcap"]
        if softcap is not None:
            natural = unit < LEAST_UNIT or call.arrays["bias"] is not None
            return cls(pre, softcap, 1.0) if natural else cls(pre, None, unit)
        if unit < LEAST_UNIT:
            return cls((pre or 1.0) * unit, None, 1.0)
        if unit > LARGEST_UNIT:
            power = 2.0 ** math.floor(math.log2(unit))
            return cls((pre or 1.0) * power, None, unit / power)
        return cls(pre, None, unit)
