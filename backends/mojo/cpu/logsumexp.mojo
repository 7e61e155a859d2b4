"""Logarithm of a sum of exponentials along one axis of any strided view.

    y = m + log sum_j exp(x_j - m)        m = max_j x_j, or 0 where that is infinite
"""

from lib.arrays import At, Layout, Rows
from lib.exponential import log
from lib.exponentials import exponentials, finite_max


def logsumexp_rows[acc: DType](x: Rows, y: Rows, n: Int, space: Int, first: Int, last: Int):
    for row in range(first, last):
        var given = x.read(row, n, At[acc](unsafe_from_address=space))
        var m = finite_max(given, n)
        var l = exponentials(given, n, m).cast[DType.float64]()
        y.put(row, (m.cast[DType.float64]() + log(l)).cast[acc]())


@export("logsumexp")
def logsumexp(x: Layout, y: Layout, n: Int, space: Int, first: Int, last: Int) abi("C"):
    if Rows(x).is_double():
        logsumexp_rows[DType.float64](Rows(x), Rows(y), n, space, first, last)
    else:
        logsumexp_rows[DType.float32](Rows(x), Rows(y), n, space, first, last)
