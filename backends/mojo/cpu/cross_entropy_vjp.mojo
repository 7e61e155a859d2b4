"""Gradient of the cross entropy of logits with integer labels.

    d_logits_j = d_loss [p_j (1 + 2 z lse) - (1 - e) [j = t] - e / classes]        p = exp(min(x - lse - lse_low, 0))
"""

from std.math import iota

from lib.arrays import At, Layout, Rows
from lib.exponential import exp
from lib.strips import LANES, Strip, load, store


@fieldwise_init
struct Loss(TrivialRegisterPassable):
    """What the loss of a row is made of, beside its logits: those of the classes from ``first_class`` on."""

    var ignored: Int
    var first_class: Int
    var classes: Int
    var e: Float64
    var z: Float64


@fieldwise_init
struct Statistics[acc: DType](TrivialRegisterPassable):
    """What is known of each row: its label, its log-sum-exp in two numbers, and its loss's cotangent."""

    var labels: At[DType.int64]
    var lse: At[Self.acc]
    var low: Int
    var d_loss: At[Self.acc]


def cross_entropy_vjp_rows[acc: DType](
    x: Rows, known: Statistics[acc], d_x: Rows, n: Int, of: Loss, space: Int, first: Int, last: Int
):
    var smooth, hit = (of.e / Float64(of.classes)).cast[acc](), (1 - of.e).cast[acc]()
    for row in range(first, last):
        var label, out = Int(known.labels[unsafe_offset=row]), d_x.place(row, At[acc](unsafe_from_address=space))
        var given = x.read(row, n, At[acc](unsafe_from_address=space))
        var lse, g = known.lse[unsafe_offset=row], known.d_loss[unsafe_offset=row]
        var low = At[acc](unsafe_from_address=known.low)[unsafe_offset=row] if known.low else 0
        var raised = 1 + 2 * of.z.cast[acc]() * lse if of.z != 0 else 1
        for i in range(0, n, LANES[acc]):
            var t = load(given, i, n, 0) - lse - low
            var p = exp(t.gt(0).select(Strip[acc](0), t)) * raised
            var at = iota[DType.int64, LANES[acc]]().eq(Int64(label - of.first_class - i))
            var d = g * (p - at.select(Strip[acc](hit), Strip[acc](0)) - smooth)
            store(out, i, n, Strip[acc](0) if label == of.ignored else d)
        d_x.write(row, n, out)


@export("cross_entropy_vjp")
def cross_entropy_vjp(
    x: Layout, labels: Int, lse: Int, low: Int, d_loss: Int, d_x: Layout, n: Int, ignored: Int, first_class: Int,
    classes: Int, e: Float64, z: Float64, space: Int, first: Int, last: Int
) abi("C"):
    comptime for acc in [DType.float32, DType.float64]:
        if Rows(x).is_double() == (acc == DType.float64):
            var known = Statistics[acc](
                At[DType.int64](unsafe_from_address=labels), At[acc](unsafe_from_address=lse), low,
                At[acc](unsafe_from_address=d_loss)
            )
            var of = Loss(ignored, first_class, classes, e, z)
            cross_entropy_vjp_rows(Rows(x), known, Rows(d_x), n, of, space, first, last)
