"""Gradients of root mean square normalisation over the last axis, alone and of a sum.

    xh = x r, h = d_y weight        r = (mean_j x_j^2 + eps)^-1/2
    d_x = r (h - xh mean_j(h_j xh_j)) (+ what else the sum's gradient is)        d_weight = sum over rows of d_y xh

Rows are taken in blocks of ``BLOCK``, each of which adds up a d_weight of its own.
"""

from std.math import sqrt

from lib.arrays import At, Layout, Rows, code_of
from lib.norms import BLOCK, add_to, block_of, given, mean_square
from lib.strips import LANES, Strip, load, store, tree_sum


@fieldwise_init
struct Row[acc: DType](TrivialRegisterPassable):
    """A row of each of the arrays; ``more`` and ``d_weight`` at address 0 are none."""

    var x: At[Self.acc]
    var d_y: At[Self.acc]
    var d_x: At[Self.acc]
    var more: Int
    var d_weight: Int


def rmsnorm_vjp_row[acc: DType, held: DType](at: Row[acc], weight: Int, n: Int, eps: Float64):
    """Where the dtype ``held`` is not the accumulator's, h, and xh where d_weight meets it, are rounded to it."""
    var r, total = 1 / sqrt(mean_square(at.x, n) + eps.cast[acc]()), Strip[acc](0)
    for i in range(0, n, LANES[acc]):
        var h = (load(at.d_y, i, n, 0) * given[acc](weight, i, n, 1)).cast[held]().cast[acc]()
        total = h.fma(load(at.x, i, n, 0) * r, total)
    var mean = tree_sum(total) / Scalar[acc](n)
    for i in range(0, n, LANES[acc]):
        var xh, g = load(at.x, i, n, 0) * r, load(at.d_y, i, n, 0)
        var h = (g * given[acc](weight, i, n, 1)).cast[held]().cast[acc]()
        add_to(at.d_weight, i, n, g * xh.cast[held]().cast[acc]())
        var d_x = r * (h - xh * mean)
        store(at.d_x, i, n, d_x + given[acc](at.more, i, n, 0) if at.more else d_x)


def rmsnorm_vjp_blocks[acc: DType, held: DType](
    x: Rows, weight: Int, d_y: Rows, more: Int, d_x: Rows, d_weight: Int, n: Int, rows: Int, eps: Float64, space: Int,
    first: Int, last: Int
):
    var one = At[acc](unsafe_from_address=space)
    var two, three = one.unsafe_offset(n), one.unsafe_offset(2 * n)
    for block in range(first, last):
        var sums = block_of[acc](d_weight, block, n)
        for row in range(block * BLOCK, min((block + 1) * BLOCK, rows)):
            var other = Int(Rows(Layout(unsafe_from_address=more)).read(row, n, three)) if more else 0
            var at = Row(x.read(row, n, one), d_y.read(row, n, two), d_x.place(row, one), other, sums)
            rmsnorm_vjp_row[acc, held](at, weight, n, eps)
            d_x.write(row, n, at.d_x)


@export("rmsnorm_vjp")
def rmsnorm_vjp(
    x: Layout, weight: Int, d_y: Layout, more: Int, d_x: Layout, d_weight: Int, n: Int, rows: Int, eps: Float64,
    held: Int, space: Int, first: Int, last: Int
) abi("C"):
    comptime for h in [DType.float32, DType.float64, DType.bfloat16, DType.float16]:
        if held == code_of[h]():
            comptime acc = DType.float64 if h == DType.float64 else DType.float32
            rmsnorm_vjp_blocks[acc, h](
                Rows(x), weight, Rows(d_y), more, Rows(d_x), d_weight, n, rows, eps, space, first, last
            )
