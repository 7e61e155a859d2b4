"""Gradients of the gated product, element by element.

    d_gate = d_y up s (1 + gate q), d_up = d_y gate s        s = 1 / (1 + exp(-gate)), q = 1 - s = 1 / (1 + exp(gate))
"""

from lib.arrays import At, Layout, Rows
from lib.exponential import exp
from lib.strips import LANES, load, store


def d_gate_row[acc: DType](gate: At[acc], up: At[acc], d_y: At[acc], d_gate: At[acc], n: Int):
    for i in range(0, n, LANES[acc]):
        var g = load(gate, i, n, 0)
        var slope = (1 + g * (1 / (1 + exp(g)))) * (1 / (1 + exp(-g)))
        store(d_gate, i, n, load(d_y, i, n, 0) * load(up, i, n, 0) * slope)


def d_up_row[acc: DType](gate: At[acc], d_y: At[acc], d_up: At[acc], n: Int):
    for i in range(0, n, LANES[acc]):
        var g = load(gate, i, n, 0)
        store(d_up, i, n, load(d_y, i, n, 0) * (g / (1 + exp(-g))))


def swiglu_vjp_rows[acc: DType](
    gate: Rows, up: Rows, d_y: Rows, d_gate: Int, d_up: Int, n: Int, size: Int, space: Int, first: Int, last: Int
):
    var one = At[acc](unsafe_from_address=space)
    for row in range(first, last):
        var m, spare = min(n, size - row * n), one.unsafe_offset(3 * n)
        var g, d = gate.read(row, m, one), d_y.read(row, m, one.unsafe_offset(2 * n))
        if d_gate:
            var to = Rows(Layout(unsafe_from_address=d_gate))
            var out = to.place(row, spare)
            d_gate_row(g, up.read(row, m, one.unsafe_offset(n)), d, out, m)
            to.write(row, m, out)
        if d_up:
            var to = Rows(Layout(unsafe_from_address=d_up))
            var out = to.place(row, spare)
            d_up_row(g, d, out, m)
            to.write(row, m, out)


@export("swiglu_vjp")
def swiglu_vjp(
    gate: Layout, up: Layout, d_y: Layout, d_gate: Int, d_up: Int, n: Int, size: Int, space: Int, first: Int, last: Int
) abi("C"):
    if Rows(gate).is_double():
        swiglu_vjp_rows[DType.float64](Rows(gate), Rows(up), Rows(d_y), d_gate, d_up, n, size, space, first, last)
    else:
        swiglu_vjp_rows[DType.float32](Rows(gate), Rows(up), Rows(d_y), d_gate, d_up, n, size, space, first, last)
