"""Softmax over one axis of any strided view.

    y_j = exp(x_j - m) / l        m = max_j x_j        l = sum_j exp(x_j - m)

A row is read for m, its exponentials are stored and added, and the stored ones scaled.
"""

from lib.arrays import At, Form, Rows
from lib.exponential import exp
from lib.strips import LANES, Strip, load, row_max, store, tree_sum


def softmax_row[acc: DType](x: At[acc], y: At[acc], n: Int):
    var m, total = row_max(x, n), Strip[acc](0)
    for i in range(0, n, LANES[acc]):
        var p = exp(load(x, i, n, Scalar[acc].MIN) - m)
        total += p
        store(y, i, n, p)
    var share = 1 / tree_sum(total)
    for i in range(0, n, LANES[acc]):
        store(y, i, n, load(y, i, n, 0) * share)


def softmax_rows[acc: DType](x: Rows, y: Rows, n: Int, room: Int, first: Int, last: Int):
    for row in range(first, last):
        var out = y.place(row, At[acc](unsafe_from_address=room))
        softmax_row(x.read(row, n, At[acc](unsafe_from_address=room)), out, n)
        y.write(row, n, out)


@export("softmax")
def softmax(x: Form, y: Form, n: Int, room: Int, first: Int, last: Int) abi("C"):
    if Rows(x).is_double():
        softmax_rows[DType.float64](Rows(x), Rows(y), n, room, first, last)
    else:
        softmax_rows[DType.float32](Rows(x), Rows(y), n, room, first, last)
