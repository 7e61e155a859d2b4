"""The exponentials of a row, less its maximum, and their sum."""

from .arrays import At
from .exponential import exp
from .strips import LANES, Strip, load, row_max, store, tree_sum


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


def softmax_row[acc: DType](x: At[acc], y: At[acc], n: Int):
    """Write y = exp(x - m) / l: x is read for m, its exponentials are stored and added, and the stored ones scaled.
    """
    var m, total = row_max(x, n), Strip[acc](0)
    for i in range(0, n, LANES[acc]):
        var p = exp(load(x, i, n, Scalar[acc].MIN) - m)
        total += p
        store(y, i, n, p)
    var share = 1 / tree_sum(total)
    for i in range(0, n, LANES[acc]):
        store(y, i, n, load(y, i, n, 0) * share)


@always_inline
def put_at[acc: DType](address: Int, i: Int, value: Float64):
    """Write to an output, which at address 0 nobody wants."""
    if address:
        At[acc](unsafe_from_address=address)[unsafe_offset=i] = value.cast[acc]()


@fieldwise_init
struct InTwo(TrivialRegisterPassable):
    """Where m + log l goes, and where what rounding takes from it."""

    var lse: Int
    var low: Int

    def put[acc: DType](self, i: Int, m: Float64, log_l: Float64):
        var lse = (m + log_l).cast[acc]().cast[DType.float64]()
        var behind = lse - m  # Knuth's sum in two: exact
        var low = (m - (lse - behind)) + (log_l - behind)
        put_at[acc](self.lse, i, lse)
        put_at[acc](self.low, i, low if abs(lse) <= Float64.MAX_FINITE else 0)
