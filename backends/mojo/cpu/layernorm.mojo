"""Layer normalisation over the last axis.

    y_j = (x_j - mean) r weight_j + bias_j        r = (var + eps)^-1/2        var = mean_j (x_j - mean)^2

Source: Ba, Kiros, Hinton, "Layer normalization" (2016), equations 3 and 4.
"""

from std.math import sqrt

from lib.arrays import At, Layout, Rows
from lib.norms import given, moments
from lib.strips import LANES, load, store


def layernorm_row[acc: DType](x: At[acc], weight: Int, bias: Int, y: At[acc], n: Int, eps: Scalar[acc]):
    var found = moments(x, n)
    var mean, r = found.mean, 1 / sqrt(found.variance + eps)
    for i in range(0, n, LANES[acc]):
        var xh = (load(x, i, n, mean) - mean) * r
        store(y, i, n, xh.fma(given[acc](weight, i, n, 1), given[acc](bias, i, n, 0)))


def layernorm_rows[acc: DType](
    x: Rows, weight: Int, bias: Int, y: Rows, n: Int, eps: Float64, space: Int, first: Int, last: Int
):
    for row in range(first, last):
        var out = y.place(row, At[acc](unsafe_from_address=space))
        var values = x.read(row, n, At[acc](unsafe_from_address=space))
        layernorm_row(values, weight, bias, out, n, eps.cast[acc]())
        y.write(row, n, out)


@export("layernorm")
def layernorm(
    x: Layout, weight: Int, bias: Int, y: Layout, n: Int, eps: Float64, space: Int, first: Int, last: Int
) abi("C"):
    if Rows(x).is_double():
        layernorm_rows[DType.float64](Rows(x), weight, bias, Rows(y), n, eps, space, first, last)
    else:
        layernorm_rows[DType.float32](Rows(x), weight, bias, Rows(y), n, eps, space, first, last)
