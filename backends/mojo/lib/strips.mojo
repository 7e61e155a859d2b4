"""Strips: what is loaded, computed and added at once. The numbers of a sum are added strip by strip, lane by lane, and
the lanes by a tree, so that a sum's order depends on its length alone, and its longest chain is n / 32 + 5 or shorter.
"""

from std.sys import simd_width_of, size_of
from std.sys.intrinsics import masked_load, masked_store
from std.math import iota

from .arrays import At

comptime LANES[acc: DType] = max(4 * simd_width_of[acc](), 32)
"""Four registers of the machine, whose additions overlap, and no fewer than the bound of a sum asks for."""

comptime Strip[acc: DType] = SIMD[acc, LANES[acc]]


@always_inline
def load[acc: DType](x: At[acc], i: Int, n: Int, fill: Scalar[acc]) -> Strip[acc]:
    """x_i, x_i+1, ... of n numbers; ``fill`` beyond their end."""
    if i + LANES[acc] <= n:
        return x.unsafe_load[width=LANES[acc]](i)
    return masked_load[LANES[acc]](x.unsafe_offset(i), _inside[acc](i, n), Strip[acc](fill))


@always_inline
def store[acc: DType](y: At[acc], i: Int, n: Int, value: Strip[acc]):
    if i + LANES[acc] <= n:
        y.unsafe_store(i, value)
    else:
        masked_store(value, y.unsafe_offset(i), _inside[acc](i, n))


@always_inline
def _inside[acc: DType](i: Int, n: Int) -> SIMD[DType.bool, LANES[acc]]:
    return iota[DType.int32, LANES[acc]]().lt(Int32(n - i))


@always_inline
def tree_sum[acc: DType, L: Int](x: SIMD[acc, L]) -> Scalar[acc]:
    comptime if L == 1:
        return x[0]
    else:
        return tree_sum(x.slice[L // 2]() + x.slice[L // 2, offset=L // 2]())


def row_max[acc: DType](x: At[acc], n: Int) -> Scalar[acc]:
    """The greatest of n numbers; NaN is passed over, and -inf where there is nothing else."""
    var m = Strip[acc](Scalar[acc].MIN)
    for i in range(0, n, LANES[acc]):
        var v = load(x, i, n, Scalar[acc].MIN)
        m = v.gt(m).select(v, m)
    return m.reduce_max()


def row_sum[acc: DType](x: At[acc], n: Int) -> Scalar[acc]:
    var total = Strip[acc](0)
    for i in range(0, n, LANES[acc]):
        total += load(x, i, n, 0)
    return tree_sum(total)
