"""What the norms of rows share."""

from .arrays import At
from .strips import LANES, Strip, load, tree_sum


def mean_square[acc: DType](x: At[acc], n: Int) -> Scalar[acc]:
    var total = Strip[acc](0)
    for i in range(0, n, LANES[acc]):
        var v = load(x, i, n, 0)
        total = v.fma(v, total)
    return tree_sum(total) / Scalar[acc](n)


@always_inline
def given[acc: DType](values: Int, i: Int, n: Int, absent: Scalar[acc]) -> Strip[acc]:
    """A strip of a weight or a bias, which at address 0 is none."""
    return load(At[acc](unsafe_from_address=values), i, n, absent) if values else Strip[acc](absent)
