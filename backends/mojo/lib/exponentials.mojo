"""The exponentials of a row, less its maximum, and their sum."""

from .arrays import At
from .exponential import exp
from .strips import LANES, Strip, load, row_max, tree_sum


def finite_max[acc: DType](x: At[acc], n: Int) -> Scalar[acc]:
    """m = max x, or 0 where that is infinite: inf - inf would be NaN."""
    var m = row_max(x, n)
    return m if abs(m) <= Scalar[acc].MAX_FINITE else 0


def exponentials[acc: DType](x: At[acc], n: Int, m: Scalar[acc]) -> Scalar[acc]:
    """l = sum exp(x - m)."""
    var total = Strip[acc](0)
    for i in range(0, n, LANES[acc]):
        total += exp(load(x, i, n, Scalar[acc].MIN) - m)
    return tree_sum(total)
