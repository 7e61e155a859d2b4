"""A linear layer with what follows it: y = f(z) + residual, z = x weight^T + bias.

Tiles are multiplied as in matmul; what follows is computed row by row of a tile, while it is in a cache.
"""

from std.sys import size_of

from lib.activations import activated
from lib.arrays import At, Layout, Rows
from lib.norms import given
from lib.products import COLUMNS, ROWS, Extents, multiply_tile
from lib.strips import LANES, load, store


@fieldwise_init
struct Epilogue(TrivialRegisterPassable):
    """What follows the product: addresses and layouts, 0 for none."""

    var bias: Int
    var residual: Int
    var pre: Int
    var activation: Int


def finish_row[acc: DType](z: At[acc], more: At[acc], y: Rows, to: Epilogue, row: Int, column: Int, n: Int):
    """``more``: memory for n numbers."""
    for i in range(0, n, LANES[acc]):
        store(z, i, n, load(z, i, n, 0) + given[acc](to.bias + column * size_of[acc]() if to.bias else 0, i, n, 0))
    if to.pre:
        Rows(Layout(unsafe_from_address=to.pre)).copy(z, row, column, n)
    for i in range(0, n, LANES[acc]):
        store(z, i, n, activated(load(z, i, n, 0), to.activation))
    if to.residual:
        var residual = Rows(Layout(unsafe_from_address=to.residual)).read(row, n, more, column)
        for i in range(0, n, LANES[acc]):
            store(z, i, n, load(z, i, n, 0) + load(residual, i, n, 0))
    y.copy(z, row, column, n)


def linear_tiles[acc: DType](
    x: Int, weight: Int, y: Rows, to: Epilogue, e: Extents, space: Int, first: Int, last: Int
):
    var across = (e.n + e.block_n - 1) // e.block_n
    var more = At[acc](unsafe_from_address=space)
    var tile = more.unsafe_offset(e.block_n)
    for number in range(first, last):
        var row, column = number // across * e.block_m, number % across * e.block_n
        multiply_tile(
            At[acc](unsafe_from_address=x), At[acc](unsafe_from_address=weight), tile, e, row, column,
        )
        for i in range(min(e.block_m, e.m - row)):
            finish_row(tile.unsafe_offset(i * e.block_n), more, y, to, row + i, column, min(e.block_n, e.n - column))


@export("linear")
def linear(
    x: Int, weight: Int, y: Layout, bias: Int, residual: Int, pre: Int, activation: Int, double: Int,
    m: Int, n: Int, k: Int, block_m: Int, block_n: Int, block_k: Int, space: Int, first: Int, last: Int
) abi("C"):
    var e, to = Extents(m, n, k, block_m, block_n, block_k), Epilogue(bias, residual, pre, activation)
    if double:
        linear_tiles[DType.float64](x, weight, Rows(y), to, e, space, first, last)
    else:
        linear_tiles[DType.float32](x, weight, Rows(y), to, e, space, first, last)
