"""What the kernels of attention and of its gradients share: the groups in which they pass numbers on, and how the rows
of one head are read.

A kernel's numbers come in the groups ``Scores``, ``AttentionExtents``, ``AttentionStrides`` and ``AttentionPlan``, and
in ``window``, a pair: how far to the left and to the right of its own place a query sees, None for all the way. Within
a kernel, ``Keys`` is what a program walks, and ``PairMask`` how what it owns sees that.
"""

from __future__ import annotations

from math import e, log2
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton.configs import PortableTilesConfig
from portakern.backends.triton.launch import dot_precision
from portakern.core import targets
from portakern.specs._exponents import below_overflow, exponents, two_parts
from portakern.specs.attention import score_unit

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call


LOG2E = log2(e)
LEAST_UNIT = 2.0**-40  # of scores in gradients
LARGEST = tl.constexpr((2.0 - 2.0**-10) * 2.0**127)  # of 10 bits


class Scores(NamedTuple):
    """From dot products to weights: q . k ``pre`` is the score, or tanh's argument under a softcap (``pre`` None:
    nothing to multiply by); a weight is 2^((s - m) ``rate``), and ``beyond`` and ``octave`` are of ``exponents``
    of the spec. lse is m ``unit`` + log l, or m rate ``natural`` + log l. The _low of a number is what float32 lacks of
    it. Gradients, which are given lse, take pre, softcap and rate alone, and ``unit`` for what tanh is multiplied by
    (None: nothing). A slope times ``per_unit`` is in the scores' unit (None: it is so already)."""

    pre: float | None
    softcap: float | None
    rate: float | None = None
    unit: float | None = None
    unit_low: float | None = None
    natural: float | None = None
    natural_low: float | None = None
    beyond: float | None = None
    octave: float | None = None
    per_unit: float | None = None

    @classmethod
    def of(cls, call: Call) -> Scores:
        """Those of a forward call."""
        pre, unit = below_overflow(*score_unit(call))
        wide = call.dtype == "float64"
        rate, beyond, octave = exponents(unit, 53 if wide else 24)
        rate, _ = two_parts(rate, wide)
        parts = *two_parts(unit, wide), *two_parts(unit / rate, wide)
        return cls(pre, call.options["softcap"], rate, *parts, beyond, octave, _per_unit(call, unit))

    @classmethod
    def of_gradients(cls, call: Call) -> tuple[Scores, tuple[float, float]]:
        """Those of a call of gradients, with scores in the unit of the forward pass, and by how much (in two parts) lse
        is multiplied to be in it. Of units that are next to nothing, 1: log l is too large a number of them."""
        pre, unit = below_overflow(*score_unit(call))
        softcap, settle = call.options["softcap"], None
        if unit < LEAST_UNIT and softcap is None:
            pre, unit = (pre or 1.0) * unit, 1.0
        elif softcap is not None and (unit < LEAST_UNIT or call.arrays["bias"] is not None):
            settle, unit = softcap, 1.0
        scores = cls(pre, softcap, unit * LOG2E, settle, per_unit=_per_unit(call, unit))
        return scores, two_parts(1.0 / unit, call.dtype == "float64")


def _per_unit(call: Call, unit: float) -> float | None:
    """``Scores.per_unit`` of a call with scores in this unit; of one that is next to nothing a number that is finite,
    of which a slope of 0 makes 0."""
    return None if call.arrays["alibi_slopes"] is None or unit == 1.0 else min(1.0 / unit, 2.0**127)


class AttentionExtents(NamedTuple):
    """``heads`` are those of q, of which ``group`` share one of k and v; ``d`` is the head dimension of q and k, ``dv``
    of v and o; ``first_place`` the key beside which query 0 stands, None where there are no slopes."""

    heads: int
    group: int
    q_len: int
    kv_len: int
    d: int
    dv: int
    first_place: int | None = None


class Masks(NamedTuple):
    """What scores meet beside q . k: a bias, and the segments of queries and keys; the ranges of queries, or in
    gradients of keys, that ``lib.segments`` finds of these; a sink and a slope of each head. Each may be None."""

    bias: Any
    q_segments: Any
    kv_segments: Any
    q_ranges: Any
    kv_ranges: Any = None
    sinks: Any = None
    slopes: Any = None


class AttentionStrides(NamedTuple):
    """Of q, k and v, which are (batch, length, heads, d); of bias, broadcast to (batch, heads, q_len, kv_len); of
    segments, (batch, length). 0 for what is absent. Of gradients those of d_o too, which is as v is."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    bias: tuple[int, ...]
    q_segments: tuple[int, ...]
    kv_segments: tuple[int, ...]
    d_o: tuple[int, ...] | None = None


class AttentionPlan(NamedTuple):
    """What a kernel is compiled for: the extents of its tiles, whether their columns reach past the head dimensions,
    how it multiplies and adds, which of d_k and d_v somebody wants, whether the rows of a tile are of all query heads
    that share a key head (see ``rows_of``), and whether a bias has one row for all queries."""

    block_q: int
    block_kv: int
    block_d: int
    block_dv: int
    ragged_d: bool
    ragged_dv: bool
    precision: str
    acc_dtype: tl.dtype
    want_k: bool = False
    want_v: bool = False
    packed: bool = False
    one_row: bool = False


class Keys(NamedTuple):
    """The keys and values of one head, which a program walks row by row: the addresses of row 0, one for each column of
    a tile; the step to the next row; which columns lie in the head dimension; and how many rows there are."""

    k: Any
    k_s: Any
    d_ok: Any
    v: Any
    v_s: Any
    dv_ok: Any
    kv_len: Any


class PairMask(NamedTuple):
    """How the rows that a program owns see the columns that it walks, beside what q . k says: queries see keys, or keys
    are seen by queries.

    Rows exist where ``row_ok``. A row sees the columns [lo, hi) whose segment equals ``segment``, its own, and adds a
    bias. ``bias`` and ``segments`` are addresses at column 0, from which a step leads to the next column; None where
    there is no bias, or there are no segments. Scores are less by ``slope``, in their unit, times the distance of a
    column from ``position``, where the row stands among the columns; None where there are no slopes.
    """

    row_ok: Any
    lo: Any
    hi: Any
    bias: Any
    bias_step: Any
    segment: Any
    segments: Any
    segment_step: Any
    slope: Any = None
    position: Any = None


def strides_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    segments: tuple[torch.Tensor | None, torch.Tensor | None],
    scores: tuple[int, int, int, int],
) -> AttentionStrides:
    """``segments``: the queries' and the keys', or None twice. ``scores``: the shape that bias is broadcast to."""
    queries, keys = segments
    return AttentionStrides(
        q.stride(),
        k.stride(),
        v.stride(),
        (0, 0, 0, 0) if bias is None else bias.expand(scores).stride(),
        (0, 0) if queries is None else queries.stride(),
        (0, 0) if keys is None else keys.stride(),
    )


@triton.jit
def slope_of(slopes, head, scores):
    """The slope of a head, or of the head of each row, in the unit of scores."""
    slope = tl.load(slopes + head)
    if scores.per_unit is not None:
        slope = slope * scores.per_unit
    return slope


@triton.jit
def lowered(s, slope, position, start, block: tl.constexpr):
    """A tile of scores, less ``slope`` times the distance of each of ``block`` columns, from ``start`` on, from where
    its row stands, ``position``: a column of 64-bit numbers. Numbers that count from the tile are small, and so exact,
    but for distances beyond 2^24. The fused operation is written out, else a compiler chooses between two."""
    own = (position - start).to(s.dtype)
    away = tl.abs(own - tl.arange(0, block)[None, :].to(s.dtype))
    return tl.fma(tl.broadcast_to(-slope, s.shape), away, s)


@triton.jit
def nearest(x):
    """float32 to the nearest of 10 bits; infinities and NaN as they are."""
    return tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def product(a, b, acc, plan: tl.constexpr):
    """acc + a b; a b where acc is None.

    ``plan.precision`` "threefold": of float32 by three products of the matrix unit, which takes 10 bits of an operand.
    With a = a1 + a2 and b = b1 + b2, each part the nearest of 10 bits, a b is a1 b1 + (a1 b2 + a2 b1). What the parts
    lack is 2^-23 of their number at most, and a2 b2, which is left out, 2^-22 of the product: 8 u together, where a
    product of float32 that is rounded errs by 1. a1 and b1 stay finite, so that no infinity comes of the largest
    numbers, and what does come of an infinity is in a2 and b2.
    """
    if plan.precision == "threefold":
        a1, b1 = nearest(tl.clamp(a, -LARGEST, LARGEST)), nearest(tl.clamp(b, -LARGEST, LARGEST))
        a2, b2 = nearest(a - a1), nearest(b - b1)
        both = tl.dot(a2, b1, input_precision="tf32", out_dtype=plan.acc_dtype)
        both = tl.dot(a1, b2, both, input_precision="tf32", out_dtype=plan.acc_dtype)
        both = tl.dot(a1, b1, both, input_precision="tf32", out_dtype=plan.acc_dtype)
        if acc is not None:
            both = acc + both
        return both
    elif acc is None:
        return tl.dot(a, b, input_precision=plan.precision, out_dtype=plan.acc_dtype)
    else:
        return tl.dot(a, b, acc, input_precision=plan.precision, out_dtype=plan.acc_dtype)


def precision_of(call: Call, config: PortableTilesConfig) -> str:
    """How a kernel multiplies: ``input_precision``, or "threefold" (see :func:`product`) where a tiling asks for it,
    of float32 in ieee on NVIDIA's matrix units."""
    precision, hardware = dot_precision(call), targets.family(call.target.arch)
    exact = precision == "ieee" and call.dtype == "float32" and not call.interpret
    may = exact and hardware.platform == "cuda" and "tf32" in hardware.matrix_dtypes
    return "threefold" if may and config.threefold else precision


@triton.jit
def program(tiles, heads):
    """(tile, head, batch entry) of this program; tiles vary fastest."""
    index = tl.program_id(0)
    return index % tiles, (index // tiles % heads).to(tl.int64), (index // tiles // heads).to(tl.int64)


@triton.jit
def rows_of(tile, head, extents, plan: tl.constexpr):
    """(query, head) of each row of a tile, as columns, and (first, last) query of the tile.

    A tile has rows of one head, or of all heads from ``head`` on that share a key head, query by query: where queries
    are few they fill a tile together, and keys are read once for all.
    """
    row = (tile * plan.block_q + tl.arange(0, plan.block_q))[:, None]
    first, last = tile * plan.block_q, tile * plan.block_q + plan.block_q - 1
    if plan.packed:
        last = tl.minimum(last // extents.group, extents.q_len - 1)
        return row // extents.group, head + row % extents.group, first // extents.group, last
    else:
        return row, head, first, tl.minimum(last, extents.q_len - 1)


@triton.jit
def load_tile(ptr, row_ok, col_ok, mask_rows: tl.constexpr, mask_cols: tl.constexpr):
    """Masked lanes read 0, so that memory past an extent, which may hold NaN, meets no product."""
    if mask_rows and mask_cols:
        return tl.load(ptr, mask=row_ok & col_ok, other=0.0)
    elif mask_rows:
        return tl.load(ptr, mask=row_ok, other=0.0)
    elif mask_cols:
        return tl.load(ptr, mask=col_ok, other=0.0)
    else:
        return tl.load(ptr)


@triton.jit
def load_head(x, strides, batch, head, row, row_ok, d, block_d: tl.constexpr, ragged_d: tl.constexpr):
    """Rows of one head of x, which is (batch, length, heads, d), as a tile of block_d columns."""
    x_b, x_s, x_h, x_d = strides
    column = tl.arange(0, block_d)[None, :]
    at = x + (batch * x_b + head * x_h) + (row * x_s + column.to(tl.int64) * x_d)
    return load_tile(at, row_ok, column < d, True, ragged_d)
