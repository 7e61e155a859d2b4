"""Cross entropy of logits with integer labels.

    loss = log l + (1 - e) (m - x_t) + e (m - mean x) + z lse^2        lse = m + log l

with l = sum_j exp(x_j - m), m = max x or 0 where that is infinite, t the label, e the label smoothing and z the z-loss.

Sources: Szegedy et al., "Rethinking the inception architecture" (2016), section 7; de Brebisson and Vincent, "The
z-loss" (2016).
"""

from lib.arrays import At, Layout, Rows
from lib.exponential import log
from lib.strips import row_sum
from lib.exponentials import InTwo, exponentials, finite_max, put_at


@fieldwise_init
struct Loss(TrivialRegisterPassable):
    """What the loss of a row is made of, beside its logits."""

    var ignored: Int
    var e: Float64
    var z: Float64


def cross_entropy_rows[acc: DType](
    x: Rows, labels: At[DType.int64], loss: Int, lse: InTwo, n: Int, of: Loss, space: Int, first: Int, last: Int
):
    for row in range(first, last):
        var label = Int(labels[unsafe_offset=row])
        if label == of.ignored:
            lse.put[acc](row, 0, 0)
            put_at[acc](loss, row, 0)
            continue
        var given = x.read(row, n, At[acc](unsafe_from_address=space))
        var m = finite_max(given, n)
        var log_l, wide = log(exponentials(given, n, m).cast[DType.float64]()), m.cast[DType.float64]()
        var inside = label >= 0 and label < n
        var at = given[unsafe_offset=label].cast[DType.float64]() if inside else Float64.MAX - Float64.MAX
        var found = log_l + (1 - of.e) * (wide - at)
        if of.e != 0:
            found += of.e * (wide - row_sum(given, n).cast[DType.float64]() / Float64(n))
        if of.z != 0:
            found += of.z * (wide + log_l) * (wide + log_l)
        lse.put[acc](row, wide, log_l)
        put_at[acc](loss, row, found)


@export("cross_entropy")
def cross_entropy(
    x: Layout, labels: Int, loss: Int, lse: Int, low: Int, n: Int, ignored: Int, e: Float64, z: Float64,
    space: Int, first: Int, last: Int
) abi("C"):
    var in_two, of, at = InTwo(lse, low), Loss(ignored, e, z), At[DType.int64](unsafe_from_address=labels)
    if Rows(x).is_double():
        cross_entropy_rows[DType.float64](Rows(x), at, loss, in_two, n, of, space, first, last)
    else:
        cross_entropy_rows[DType.float32](Rows(x), at, loss, in_two, n, of, space, first, last)
