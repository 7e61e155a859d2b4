"""Root mean square normalisation over the last axis, alone and of a sum.

    y_j = x_j r weight_j        r = (mean_j x_j^2 + eps)^-1/2
    residual_out = x + residual, which is rounded to its dtype and normed

Source: Zhang and Sennrich, "Root mean square layer normalization" (2019), equation 4.
"""

from std.math import sqrt

from lib.arrays import At, Layout, Rows, code_of
from lib.norms import given, mean_square
from lib.strips import LANES, load, store


def rmsnorm_row[acc: DType, held: DType](x: At[acc], weight: Int, y: At[acc], n: Int, eps: Float64):
    """Write y, whose x r is rounded to the dtype ``held`` before it is weighed."""
    var r = 1 / sqrt(mean_square(x, n) + eps.cast[acc]())
    for i in range(0, n, LANES[acc]):
        var xh = (load(x, i, n, 0) * r).cast[held]().cast[acc]()
        store(y, i, n, xh * given[acc](weight, i, n, 1))


def rmsnorm_rows[acc: DType, held: DType](
    x: Rows, weight: Int, y: Rows, n: Int, eps: Float64, space: Int, first: Int, last: Int
):
    for row in range(first, last):
        var out = y.place(row, At[acc](unsafe_from_address=space))
        rmsnorm_row[acc, held](x.read(row, n, At[acc](unsafe_from_address=space)), weight, out, n, eps)
        y.write(row, n, out)


@export("rmsnorm")
def rmsnorm(
    x: Layout, weight: Int, y: Layout, n: Int, eps: Float64, held: Int, space: Int, first: Int, last: Int
) abi("C"):
    comptime for h in [DType.float32, DType.float64, DType.bfloat16, DType.float16]:
        if held == code_of[h]():
            comptime acc = DType.float64 if h == DType.float64 else DType.float32
            rmsnorm_rows[acc, h](Rows(x), weight, Rows(y), n, eps, space, first, last)


def add_rows[acc: DType, stored: DType](
    x: Rows, residual: Rows, total: Rows, n: Int, row: Int, space: At[acc], more: At[acc]
) -> At[acc]:
    """The sum residual_out, as it is stored."""
    var a, b, out = x.read(row, n, space), residual.read(row, n, more), total.place(row, space)
    for i in range(0, n, LANES[acc]):
        store(out, i, n, (load(a, i, n, 0) + load(b, i, n, 0)).cast[stored]().cast[acc]())
    total.write(row, n, out)
    return out


def add_rmsnorm_rows[acc: DType, stored: DType, held: DType](
    x: Rows, residual: Rows, weight: Int, y: Rows, total: Rows, n: Int, eps: Float64, space: Int, first: Int, last: Int
):
    var one = At[acc](unsafe_from_address=space)
    var other = one.unsafe_offset(n)
    for row in range(first, last):
        var added = add_rows[acc, stored](x, residual, total, n, row, one, other)
        var out = y.place(row, other)
        rmsnorm_row[acc, held](added, weight, out, n, eps)
        y.write(row, n, out)


@export("add_rmsnorm")
def add_rmsnorm(
    x: Layout, residual: Layout, weight: Int, y: Layout, total: Layout, n: Int, eps: Float64, before_weight: Int,
    space: Int, first: Int, last: Int
) abi("C"):
    comptime for s in [DType.float32, DType.float64, DType.bfloat16, DType.float16]:
        if Rows(y).code() == code_of[s]():
            comptime acc = DType.float64 if s == DType.float64 else DType.float32
            if before_weight:
                add_rmsnorm_rows[acc, s, s](
                    Rows(x), Rows(residual), weight, Rows(y), Rows(total), n, eps, space, first, last
                )
            else:
                add_rmsnorm_rows[acc, s, acc](
                    Rows(x), Rows(residual), weight, Rows(y), Rows(total), n, eps, space, first, last
                )
