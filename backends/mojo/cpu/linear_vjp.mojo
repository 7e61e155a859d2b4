"""What precedes the products of a linear layer's gradients: d_z = d_y f'(z), and d_bias, its sum over rows.

Rows are taken in blocks of ``BLOCK``, each of which adds up a d_bias of its own.
"""

from lib.activations import slope_of
from lib.arrays import At, Layout, Rows
from lib.norms import BLOCK, add_to, block_of
from lib.strips import LANES, load, store


def slope_blocks[acc: DType](
    d_y: Rows, z: Int, d_z: Rows, d_bias: Int, activation: Int, n: Int, rows: Int, space: Int, first: Int, last: Int
):
    var one = At[acc](unsafe_from_address=space)
    for block in range(first, last):
        var sums = block_of[acc](d_bias, block, n)
        for row in range(block * BLOCK, min((block + 1) * BLOCK, rows)):
            var out, d = d_z.place(row, one), d_y.read(row, n, one.unsafe_offset(n))
            var at = Rows(Layout(unsafe_from_address=z)).read(row, n, one.unsafe_offset(2 * n)) if z else d
            for i in range(0, n, LANES[acc]):
                var value = slope_of(load(at, i, n, 0), load(d, i, n, 0), activation)
                add_to(sums, i, n, value)
                store(out, i, n, value)


@export("linear_slope")
def linear_slope(
    d_y: Layout, z: Int, d_z: Layout, d_bias: Int, activation: Int, n: Int, rows: Int, space: Int, first: Int, last: Int
) abi("C"):
    """Write d_z, of the accumulator's dtype."""
    if Rows(d_y).is_double():
        slope_blocks[DType.float64](Rows(d_y), z, Rows(d_z), d_bias, activation, n, rows, space, first, last)
    else:
        slope_blocks[DType.float32](Rows(d_y), z, Rows(d_z), d_bias, activation, n, rows, space, first, last)
