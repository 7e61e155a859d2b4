"""Matrix products of panels: both operands are packed, so that what is multiplied lies side by side, and a tile of the
result is multiplied panel by panel in registers.

Every element is one chain of fused multiply-adds along k, from the first to the last: no tile changes its bits.

Source: Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008).
"""

from std.sys import simd_width_of

from .arrays import DTYPES, At, Rows, code_of

comptime ROWS = 4 if simd_width_of[DType.float32]() == 8 else 8
"""Rows of a register tile: with two registers a row, half of the machine's registers are sums."""

comptime COLUMNS[acc: DType] = 2 * simd_width_of[acc]()
"""Columns of a register tile."""


def pack_panel[acc: DType, P: Int](x: Rows, first: Int, count: Int, k: Int, to: At[acc]):
    """P rows of k numbers, of which ``count`` are rows of x, as k columns of P numbers, zeros beyond them."""
    comptime for dtype in DTYPES:
        comptime if (dtype == DType.float64) == (acc == DType.float64):
            if x.code() == code_of[dtype]():
                var near = count == P and x.start(first + P - 1) - x.start(first) == P - 1
                for i in range(1, P):
                    near = near and x.start(first + i) - x.start(first) == i
                if near:
                    _copy_columns[acc, dtype, P](x.at[dtype](first), x.stride(), k, to)
                else:
                    for i in range(P):
                        var row = x.at[dtype](first + min(i, count - 1))
                        _copy_row[acc, dtype, P](row, x.stride(), k, to, i, i < count)


def _copy_columns[acc: DType, dtype: DType, P: Int](x: At[dtype], step: Int, k: Int, to: At[acc]):
    """Rows that begin beside each other: their columns are copied whole."""
    for p in range(k):
        to.unsafe_store(p * P, x.unsafe_load[width=P](p * step).cast[acc]())


def _copy_row[acc: DType, dtype: DType, P: Int](x: At[dtype], step: Int, k: Int, to: At[acc], i: Int, there: Bool):
    for p in range(k):
        to[unsafe_offset=p * P + i] = x[unsafe_offset=p * step].cast[acc]() if there else Scalar[acc](0)


@fieldwise_init
struct Left[acc: DType](TrivialRegisterPassable):
    """The left operand of a tile of registers: a packed panel, or rows in memory that lie so far apart."""

    var at: At[Self.acc]
    var apart: Int

    @always_inline
    def number[packed: Bool](self, i: Int, p: Int) -> Scalar[Self.acc]:
        comptime if packed:
            return self.at[unsafe_offset=p * ROWS + i]
        else:
            return self.at[unsafe_offset=i * self.apart + p]


def multiply_panels[
    acc: DType, packed: Bool = True
](a: Left[acc], b: At[acc], c: At[acc], width: Int, k: Int, more: Bool):
    """Compute c = a b, or c + a b where there is ``more`` of it: a tile of registers, of rows ``width`` numbers apart.
    """
    comptime W = simd_width_of[acc]()
    var sums = Array[SIMD[acc, W], 2 * ROWS](fill=0)
    if more:
        comptime for i in range(ROWS):
            sums[2 * i] = c.unsafe_load[width=W](i * width)
            sums[2 * i + 1] = c.unsafe_load[width=W](i * width + W)
    for p in range(k):
        var b_0, b_1 = b.unsafe_load[width=W](p * 2 * W), b.unsafe_load[width=W](p * 2 * W + W)
        comptime for i in range(ROWS):
            var a_i = SIMD[acc, W](a.number[packed](i, p))
            sums[2 * i] = a_i.fma(b_0, sums[2 * i])
            sums[2 * i + 1] = a_i.fma(b_1, sums[2 * i + 1])
    comptime for i in range(ROWS):
        c.unsafe_store(i * width, sums[2 * i])
        c.unsafe_store(i * width + W, sums[2 * i + 1])


@fieldwise_init
struct Extents(TrivialRegisterPassable):
    """Rows and columns of a result, the summed dimension, and those of a tile of each."""

    var m: Int
    var n: Int
    var k: Int
    var block_m: Int
    var block_n: Int
    var block_k: Int

    def a_panels(self) -> Int:
        return (self.m + ROWS - 1) // ROWS

    def b_panels[acc: DType](self) -> Int:
        return (self.n + COLUMNS[acc] - 1) // COLUMNS[acc]


def multiply_tile[acc: DType](a: At[acc], b: At[acc], c: At[acc], e: Extents, row: Int, column: Int):
    """The tile of the result that begins at a row and a column, both at the border of a panel, into c, whose rows are
    ``block_n`` numbers apart. A panel of b stays in the first cache while those of a pass by it."""
    var rows, columns = min(e.block_m, e.m - row), min(e.block_n, e.n - column)
    for start in range(0, e.k, e.block_k):
        var k = min(e.block_k, e.k - start)
        for j in range(0, columns, COLUMNS[acc]):
            var b_panel = b.unsafe_offset((column + j) * e.k + start * COLUMNS[acc])
            for i in range(0, rows, ROWS):
                var a_panel = Left[acc](a.unsafe_offset((row + i) * e.k + start * ROWS), 0)
                multiply_panels(a_panel, b_panel, c.unsafe_offset(i * e.block_n + j), e.block_n, k, start > 0)
