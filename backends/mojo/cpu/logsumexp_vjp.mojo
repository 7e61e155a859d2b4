"""Gradient of the logarithm of a sum of exponentials along one axis.

    d_x_j = d_y exp(x_j - m) / l        m = max_j x_j        l = sum_j exp(x_j - m)
"""

from lib.arrays import At, Layout, Rows
from lib.exponentials import softmax_row
from lib.strips import LANES, load, store


def logsumexp_vjp_rows[acc: DType](x: Rows, d_y: Int, d_x: Rows, n: Int, space: Int, first: Int, last: Int):
    for row in range(first, last):
        var out = d_x.place(row, At[acc](unsafe_from_address=space))
        softmax_row(x.read(row, n, At[acc](unsafe_from_address=space)), out, n)
        var g = At[acc](unsafe_from_address=d_y)[unsafe_offset=row]
        for i in range(0, n, LANES[acc]):
            store(out, i, n, load(out, i, n, 0) * g)
        d_x.write(row, n, out)


@export("logsumexp_vjp")
def logsumexp_vjp(x: Layout, d_y: Int, d_x: Layout, n: Int, space: Int, first: Int, last: Int) abi("C"):
    if Rows(x).is_double():
        logsumexp_vjp_rows[DType.float64](Rows(x), d_y, Rows(d_x), n, space, first, last)
    else:
        logsumexp_vjp_rows[DType.float32](Rows(x), d_y, Rows(d_x), n, space, first, last)
