"""Rotary position embedding: each pair (a, b) of a head's numbers, turned by the angle of its token.

    y_a = x_a cos - x_b sin        y_b = x_b cos + x_a sin

Source: Su et al., "RoFormer" (2021), equation 34.
"""

from lib.arrays import At, Layout, Rows
from lib.strips import LANES, load, store


def turn[acc: DType](a: At[acc], b: At[acc], cos: At[acc], sin: At[acc], y_a: At[acc], y_b: At[acc], n: Int):
    for i in range(0, n, LANES[acc]):
        var x_a, x_b, c, s = load(a, i, n, 0), load(b, i, n, 0), load(cos, i, n, 0), load(sin, i, n, 0)
        store(y_a, i, n, x_a * c - x_b * s)
        store(y_b, i, n, x_b * c + x_a * s)


@fieldwise_init
struct Halves(TrivialRegisterPassable):
    """The first and the second numbers of all pairs."""

    var a: Rows
    var b: Rows


def rope_tokens[acc: DType](
    x: Halves, cos: Rows, sin: Rows, y: Halves, n: Int, heads: Int, space: Int, first: Int, last: Int
):
    """A token's heads follow each other, and share its row of the tables."""
    var one = At[acc](unsafe_from_address=space)
    var other, third, fourth = one.unsafe_offset(n), one.unsafe_offset(2 * n), one.unsafe_offset(3 * n)
    for token in range(first, last):
        var c, s = cos.read(token, n, third), sin.read(token, n, fourth)
        for row in range(token * heads, (token + 1) * heads):
            var y_a, y_b = y.a.place(row, one), y.b.place(row, other)
            turn(x.a.read(row, n, one), x.b.read(row, n, other), c, s, y_a, y_b, n)
            y.a.write(row, n, y_a)
            y.b.write(row, n, y_b)


@export("rope")
def rope(
    a: Layout, b: Layout, cos: Layout, sin: Layout, y_a: Layout, y_b: Layout, n: Int, heads: Int,
    space: Int, first: Int, last: Int
) abi("C"):
    var x, y = Halves(Rows(a), Rows(b)), Halves(Rows(y_a), Rows(y_b))
    if x.a.is_double():
        rope_tokens[DType.float64](x, Rows(cos), Rows(sin), y, n, heads, space, first, last)
    else:
        rope_tokens[DType.float32](x, Rows(cos), Rows(sin), y, n, heads, space, first, last)
