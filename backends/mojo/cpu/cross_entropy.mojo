"""Cross entropy of logits with integer labels.

    loss = log l + (1 - e) (m - x_t) + e (m - mean x) + z lse^2        lse = m + log l

with l = sum_j exp(x_j - m), m = max x or 0 where that is infinite, t the label, e the label smoothing and z the z-loss.

Sources: Szegedy et al., "Rethinking the inception architecture" (2016), section 7; de Brebisson and Vincent, "The
z-loss" (2016).
"""

from lib.arrays import At, Form, Rows
from lib.exponential import log
from lib.strips import row_sum
from lib.exponentials import exponentials, finite_max


@fieldwise_init
struct Loss(TrivialRegisterPassable):
    """What the loss of a row is made of, beside its logits."""

    var ignored: Int
    var e: Float64
    var z: Float64


struct Outputs(TrivialRegisterPassable):
    """The loss, the log-sum-exp and what rounding takes from it; an output that nobody wants is None."""

    var loss: Int
    var lse: Int
    var low: Int

    def __init__(out self, loss: Int, lse: Int, low: Int):
        self.loss = loss
        self.lse = lse
        self.low = low

    def put[acc: DType](self, row: Int, loss: Float64, m: Float64, log_l: Float64):
        var lse = (m + log_l).cast[acc]()
        var big = lse.cast[DType.float64]()
        _put(self.loss, row, loss.cast[acc]())
        _put(self.lse, row, lse)
        var behind = big - m  # of m + log l, exactly (Knuth)
        var low = (m - (big - behind)) + (log_l - behind)
        _put(self.low, row, low.cast[acc]() if abs(big) <= Float64.MAX_FINITE else Scalar[acc](0))


def _put[acc: DType](address: Int, row: Int, value: Scalar[acc]):
    if address:
        At[acc](unsafe_from_address=address)[unsafe_offset=row] = value


def cross_entropy_rows[acc: DType](
    x: Rows, labels: At[DType.int64], outputs: Outputs, n: Int, of: Loss, room: Int, first: Int, last: Int
):
    for row in range(first, last):
        var label = Int(labels[unsafe_offset=row])
        if label == of.ignored:
            outputs.put[acc](row, 0, 0, 0)
            continue
        var given = x.read(row, n, At[acc](unsafe_from_address=room))
        var m = finite_max(given, n)
        var log_l, wide = log(exponentials(given, n, m).cast[DType.float64]()), m.cast[DType.float64]()
        var inside = label >= 0 and label < n
        var at = given[unsafe_offset=label].cast[DType.float64]() if inside else Float64.MAX - Float64.MAX
        var loss = log_l + (1 - of.e) * (wide - at)
        if of.e != 0:
            loss += of.e * (wide - row_sum(given, n).cast[DType.float64]() / Float64(n))
        if of.z != 0:
            loss += of.z * (wide + log_l) * (wide + log_l)
        outputs.put[acc](row, loss, wide, log_l)


@export("cross_entropy")
def cross_entropy(
    x: Form, labels: Int, loss: Int, lse: Int, low: Int, n: Int, ignored: Int, e: Float64, z: Float64,
    room: Int, first: Int, last: Int
) abi("C"):
    var outputs, of, at = Outputs(loss, lse, low), Loss(ignored, e, z), At[DType.int64](unsafe_from_address=labels)
    if Rows(x).is_double():
        cross_entropy_rows[DType.float64](Rows(x), at, outputs, n, of, room, first, last)
    else:
        cross_entropy_rows[DType.float32](Rows(x), at, outputs, n, of, room, first, last)
