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


def mean_of[acc: DType](x: At[acc], n: Int) -> Scalar[acc]:
    """The mean, and that of what it leaves: of equal numbers it is that number."""
    var mean = row_sum(x, n) / Scalar[acc](n)
    var rest = Strip[acc](0)
    for i in range(0, n, LANES[acc]):
        rest += load(x, i, n, mean) - mean
    return mean + tree_sum(rest) / Scalar[acc](n)


def variance[acc: DType](x: At[acc], mean: Scalar[acc], n: Int) -> Scalar[acc]:
    var squares = Strip[acc](0)
    for i in range(0, n, LANES[acc]):
        var centred = load(x, i, n, mean) - mean
        squares = centred.fma(centred, squares)
    return tree_sum(squares) / Scalar[acc](n)


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
