"""Which tiles a band of causal and window masks touches, from either side: queries that see keys, or keys that are seen
by queries."""

import triton
import triton.language as tl


@triton.jit
def band(top, bottom, before, after, length, block: tl.constexpr):
    """Places ``top`` to ``bottom`` each see [place - before, place + after] out of ``length`` (None: all that way).

    Tiles of ``block`` from first to last hold what some of them see, tiles from inner_first to inner_last what all see.
    """
    first, lo_all = top * 0, top * 0
    last, hi_all = first + length, first + length
    if before is not None:
        first, lo_all = tl.maximum(top - before, 0) // block * block, tl.maximum(bottom - before, 0)
    if after is not None:
        last, hi_all = (
            tl.minimum(tl.maximum(bottom + after + 1, 0), length),
            tl.minimum(tl.maximum(top + after + 1, 0), length),
        )
    inner_first = tl.minimum((lo_all + block - 1) // block * block, last)
    inner_last = tl.maximum(hi_all // block * block, inner_first)
    return first, inner_first, inner_last, last


@triton.jit
def within(span, start, end):
    """What lies in [start, end) of the tiles that ``band`` gives. ``start``: where a tile begins."""
    first, inner_first, inner_last, last = span
    first, last = tl.minimum(tl.maximum(first, start), end), tl.minimum(tl.maximum(last, start), end)
    inner_first, inner_last = (
        tl.minimum(tl.maximum(inner_first, start), end),
        tl.minimum(tl.maximum(inner_last, start), end),
    )
    return first, inner_first, inner_last, last


@triton.jit
def limits(position, before, after, length):
    """What each position sees as [lo, hi)."""
    lo, hi = position * 0, position * 0 + length
    if before is not None:
        lo = position - before
    if after is not None:
        hi = tl.minimum(position + after + 1, length)
    return lo, hi


@triton.jit
def inside(position, lo, hi):
    """Which positions lie in the [lo, hi) of each row."""
    return (position[None, :] >= lo) & (position[None, :] < hi)


@triton.jit
def fold(visit: tl.constexpr, state, own, walked, pairs, scores, span, before, plan: tl.constexpr):
    """The state after ``visit`` has walked the ``span`` that ``band`` gives: tiles on the near edge of the band, then
    tiles that every place sees whole, which need no masking, then tiles on its far edge or over the end of what is
    walked.

    There is a near edge only where the band ends ``before`` a place. own: what the program owns, as ``visit`` takes it.
    """
    first, inner_first, inner_last, last = span
    if before is not None:
        state = visit(state, own, walked, pairs, scores, first, inner_first, True, plan)
    state = visit(state, own, walked, pairs, scores, inner_first, inner_last, False, plan)
    return visit(state, own, walked, pairs, scores, inner_last, last, True, plan)
