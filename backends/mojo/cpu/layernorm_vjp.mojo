"""Gradients of layer normalisation over the last axis.

    xh = (x - mean) r, h = d_y weight        r = (var + eps)^-1/2
    d_x = r (h - mean h - xh mean(h xh))
    d_weight = sum over rows of d_y xh        d_bias = sum over rows of d_y

Rows are taken in blocks of ``BLOCK``, each of which adds up sums of its own.
"""

from std.math import sqrt

from lib.arrays import At, Layout, Rows
from lib.norms import BLOCK, add_to, block_of, given, moments
from lib.strips import LANES, Strip, load, store, tree_sum


@fieldwise_init
struct Row[acc: DType](TrivialRegisterPassable):
    """A row of each of the arrays; sums over rows at address 0 nobody wants."""

    var x: At[Self.acc]
    var d_y: At[Self.acc]
    var d_x: At[Self.acc]
    var d_weight: Int
    var d_bias: Int


def layernorm_vjp_row[acc: DType](at: Row[acc], weight: Int, n: Int, eps: Float64):
    var found, count = moments(at.x, n), Scalar[acc](n)
    var mean, r = found.mean, 1 / sqrt(found.variance + eps.cast[acc]())
    var sum_h, sum_hx = Strip[acc](0), Strip[acc](0)
    for i in range(0, n, LANES[acc]):
        var h = load(at.d_y, i, n, 0) * given[acc](weight, i, n, 1)
        sum_h += h
        sum_hx = h.fma((load(at.x, i, n, mean) - mean) * r, sum_hx)
    var mean_h, mean_hx = tree_sum(sum_h) / count, tree_sum(sum_hx) / count
    for i in range(0, n, LANES[acc]):
        var xh, g = (load(at.x, i, n, mean) - mean) * r, load(at.d_y, i, n, 0)
        add_to(at.d_weight, i, n, g * xh)
        add_to(at.d_bias, i, n, g)
        store(at.d_x, i, n, r * (g * given[acc](weight, i, n, 1) - mean_h - xh * mean_hx))


def layernorm_vjp_blocks[acc: DType](
    x: Rows, weight: Int, d_y: Rows, d_x: Rows, d_weight: Int, d_bias: Int, n: Int, rows: Int, eps: Float64, space: Int,
    first: Int, last: Int
):
    var one = At[acc](unsafe_from_address=space)
    for block in range(first, last):
        var of_weight, of_bias = block_of[acc](d_weight, block, n), block_of[acc](d_bias, block, n)
        for row in range(block * BLOCK, min((block + 1) * BLOCK, rows)):
            var at = Row(
                x.read(row, n, one), d_y.read(row, n, one.unsafe_offset(n)), d_x.place(row, one), of_weight, of_bias
            )
            layernorm_vjp_row(at, weight, n, eps)
            d_x.write(row, n, at.d_x)


@export("layernorm_vjp")
def layernorm_vjp(
    x: Layout, weight: Int, d_y: Layout, d_x: Layout, d_weight: Int, d_bias: Int, n: Int, rows: Int, eps: Float64,
    space: Int, first: Int, last: Int
) abi("C"):
    comptime for acc in [DType.float32, DType.float64]:
        if Rows(x).is_double() == (acc == DType.float64):
            layernorm_vjp_blocks[acc](
                Rows(x), weight, Rows(d_y), Rows(d_x), d_weight, d_bias, n, rows, eps, space, first, last
            )
