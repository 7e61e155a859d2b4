"""Gradient of softmax over one axis, from its result.

    d_x_j = y_j (d_y_j - Delta)        Delta = sum_j y_j d_y_j
"""

from lib.arrays import At, Layout, Rows
from lib.strips import LANES, Strip, load, store, tree_sum


def softmax_vjp_row[acc: DType](y: At[acc], d_y: At[acc], d_x: At[acc], n: Int):
    var total = Strip[acc](0)
    for i in range(0, n, LANES[acc]):
        total = load(y, i, n, 0).fma(load(d_y, i, n, 0), total)
    var delta = tree_sum(total)
    for i in range(0, n, LANES[acc]):
        store(d_x, i, n, load(y, i, n, 0) * (load(d_y, i, n, 0) - delta))


def softmax_vjp_rows[acc: DType](y: Rows, d_y: Rows, d_x: Rows, n: Int, space: Int, first: Int, last: Int):
    var one = At[acc](unsafe_from_address=space)
    for row in range(first, last):
        var out = d_x.place(row, one)
        softmax_vjp_row(y.read(row, n, one), d_y.read(row, n, one.unsafe_offset(n)), out, n)
        d_x.write(row, n, out)


@export("softmax_vjp")
def softmax_vjp(y: Layout, d_y: Layout, d_x: Layout, n: Int, space: Int, first: Int, last: Int) abi("C"):
    if Rows(y).is_double():
        softmax_vjp_rows[DType.float64](Rows(y), Rows(d_y), Rows(d_x), n, space, first, last)
    else:
        softmax_vjp_rows[DType.float32](Rows(y), Rows(d_y), Rows(d_x), n, space, first, last)
