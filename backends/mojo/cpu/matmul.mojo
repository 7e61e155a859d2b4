"""Matrix product, batched: c = a b.

Both operands are packed (lib/products.mojo); then each tile of ``block_m`` rows and ``block_n`` columns is computed in
the accumulator's dtype, ``block_k`` products of each element at a time, and rounded once.
"""

from lib.arrays import At, Layout, Rows
from lib.products import COLUMNS, ROWS, Extents, multiply_tile, pack_panel


def pack_panels[acc: DType, P: Int](x: Rows, rows: Int, k: Int, to: Int, first: Int, last: Int):
    """Panels of every matrix of a batch, one after the other, each of P rows but for a matrix's last."""
    var panels = (rows + P - 1) // P
    for panel in range(first, last):
        var matrix, begin = panel // panels, panel % panels * P
        var place = At[acc](unsafe_from_address=to).unsafe_offset(panel * P * k)
        pack_panel[acc, P](x, matrix * rows + begin, min(P, rows - begin), k, place)


@export("panel")
def panel(double: Int, columns: Int) abi("C") -> Int:
    """Rows of a panel of the left operand, or columns of one of the right."""
    if not columns:
        return ROWS
    return COLUMNS[DType.float64] if double else COLUMNS[DType.float32]


@export("pack")
def pack(x: Layout, columns: Int, rows: Int, k: Int, to: Int, first: Int, last: Int) abi("C"):
    comptime for acc in [DType.float32, DType.float64]:
        if Rows(x).is_double() == (acc == DType.float64):
            if columns:
                pack_panels[acc, COLUMNS[acc]](Rows(x), rows, k, to, first, last)
            else:
                pack_panels[acc, ROWS](Rows(x), rows, k, to, first, last)


def matmul_tiles[acc: DType](a: Int, b: Int, c: Rows, e: Extents, space: Int, first: Int, last: Int):
    var down, across = (e.m + e.block_m - 1) // e.block_m, (e.n + e.block_n - 1) // e.block_n
    var tile = At[acc](unsafe_from_address=space)
    for number in range(first, last):
        var matrix, row = number // (down * across), number // across % down * e.block_m
        var column = number % across * e.block_n
        multiply_tile(
            At[acc](unsafe_from_address=a).unsafe_offset(matrix * e.a_panels() * ROWS * e.k),
            At[acc](unsafe_from_address=b).unsafe_offset(matrix * e.b_panels[acc]() * COLUMNS[acc] * e.k),
            tile, e, row, column,
        )
        for i in range(min(e.block_m, e.m - row)):
            c.copy(tile.unsafe_offset(i * e.block_n), matrix * e.m + row + i, column, min(e.block_n, e.n - column))


@export("matmul")
def matmul(
    a: Int, b: Int, c: Layout, double: Int, m: Int, n: Int, k: Int, block_m: Int, block_n: Int, block_k: Int,
    space: Int, first: Int, last: Int
) abi("C"):
    var e = Extents(m, n, k, block_m, block_n, block_k)
    if double:
        matmul_tiles[DType.float64](a, b, Rows(c), e, space, first, last)
    else:
        matmul_tiles[DType.float32](a, b, Rows(c), e, space, first, last)
