"""The gated product of a feed-forward layer, element by element.

    y = gate / (1 + exp(-gate)) up

Source: Shazeer, "GLU variants improve transformer" (2020), equation 5.
"""

from lib.arrays import At, Layout, Rows
from lib.exponential import exp
from lib.strips import LANES, load, store


def swiglu_row[acc: DType](gate: At[acc], up: At[acc], y: At[acc], n: Int):
    for i in range(0, n, LANES[acc]):
        var g = load(gate, i, n, 0)
        store(y, i, n, g / (1 + exp(-g)) * load(up, i, n, 0))


def swiglu_rows[acc: DType](gate: Rows, up: Rows, y: Rows, n: Int, size: Int, space: Int, first: Int, last: Int):
    var one = At[acc](unsafe_from_address=space)
    var other = one.unsafe_offset(n)
    for row in range(first, last):
        var m, out = min(n, size - row * n), y.place(row, one)
        swiglu_row(gate.read(row, m, one), up.read(row, m, other), out, m)
        y.write(row, m, out)


@export("swiglu")
def swiglu(gate: Layout, up: Layout, y: Layout, n: Int, size: Int, space: Int, first: Int, last: Int) abi("C"):
    if Rows(y).is_double():
        swiglu_rows[DType.float64](Rows(gate), Rows(up), Rows(y), n, size, space, first, last)
    else:
        swiglu_rows[DType.float32](Rows(gate), Rows(up), Rows(y), n, size, space, first, last)
