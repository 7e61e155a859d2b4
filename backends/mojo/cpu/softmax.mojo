"""Softmax over one axis of any strided view.

    y_j = exp(x_j - m) / l        m = max_j x_j        l = sum_j exp(x_j - m)
"""

from lib.arrays import At, Layout, Rows
from lib.exponentials import softmax_row


def softmax_rows[acc: DType](x: Rows, y: Rows, n: Int, space: Int, first: Int, last: Int):
    for row in range(first, last):
        var out = y.place(row, At[acc](unsafe_from_address=space))
        softmax_row(x.read(row, n, At[acc](unsafe_from_address=space)), out, n)
        y.write(row, n, out)


@export("softmax")
def softmax(x: Layout, y: Layout, n: Int, space: Int, first: Int, last: Int) abi("C"):
    if Rows(x).is_double():
        softmax_rows[DType.float64](Rows(x), Rows(y), n, space, first, last)
    else:
        softmax_rows[DType.float32](Rows(x), Rows(y), n, space, first, last)
