"""What the norms of rows share."""

from .arrays import At
from .strips import LANES, Strip, load, row_sum, store, tree_sum

comptime BLOCK = 32
"""Rows whose gradients of a weight are added one after another (``BLOCK`` of launch.py)."""


def mean_square[acc: DType](x: At[acc], n: Int) -> Scalar[acc]:
    var total = Strip[acc](0)
    for i in range(0, n, LANES[acc]):
        var v = load(x, i, n, 0)
        total = v.fma(v, total)
    return tree_sum(total) / Scalar[acc](n)


@fieldwise_init
struct Moments[acc: DType](TrivialRegisterPassable):
    """The mean of a row and its variance."""

    var mean: Scalar[Self.acc]
    var variance: Scalar[Self.acc]


def moments[acc: DType](x: At[acc], n: Int) -> Moments[acc]:
    """Add up x, and then d = x - mean and d^2: the mean of d is what rounding took from the mean. Where that is not
    small beside the deviations themselves, as of equal numbers, these are taken anew from the mean and it."""
    var mean, count = row_sum(x, n) / Scalar[acc](n), Scalar[acc](n)
    var rest, squares = Strip[acc](0), Strip[acc](0)
    for i in range(0, n, LANES[acc]):
        var d = load(x, i, n, mean) - mean
        rest += d
        squares = d.fma(d, squares)
    var off, variance = tree_sum(rest) / count, tree_sum(squares) / count
    if 1024 * off * off <= variance:
        return Moments(mean + off, variance - off * off)
    mean += off
    squares = 0
    for i in range(0, n, LANES[acc]):
        var d = load(x, i, n, mean) - mean
        squares = d.fma(d, squares)
    return Moments(mean, tree_sum(squares) / count)


@always_inline
def given[acc: DType](values: Int, i: Int, n: Int, absent: Scalar[acc]) -> Strip[acc]:
    """A strip of a weight or a bias, which at address 0 is none."""
    return load(At[acc](unsafe_from_address=values), i, n, absent) if values else Strip[acc](absent)


@always_inline
def add_to[acc: DType](sums: Int, i: Int, n: Int, value: Strip[acc]):
    """Add a strip to sums, which at address 0 nobody wants."""
    if sums:
        var at = At[acc](unsafe_from_address=sums)
        store(at, i, n, load(at, i, n, 0) + value)


@always_inline
def block_of[acc: DType](sums: Int, block: Int, n: Int) -> Int:
    """The address of a block's own n sums; 0 where nobody wants any."""
    return Int(At[acc](unsafe_from_address=sums).unsafe_offset(block * n)) if sums else 0
