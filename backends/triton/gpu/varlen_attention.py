"""Attention of packed sequences and its gradients, by the loops of ``attention`` and ``attention_vjp``, whose formulas
they compute for each sequence by itself.

A tile begins where its sequence does, so that no bit of a row depends on where its sequence lies. How many tiles a
sequence has is known on the device alone: the grid has the tiles that any lengths may need. With B rows of a tile, the
tiles of the sequence that begins at row b, of number n, are counted from floor(b / B) + n on, which leaves room for
ceil(length / B) of them before those of the next; a program searches its sequence in the starts, and ends at once where
its tile lies behind the sequence's rows. Rows before the first start and from the last one on are sequences too, which
have no keys, or no queries: so every row of a result is written by one program.

The programs are those of attention: one of o, and of d_q, owns a tile of queries, one of d_k and d_v a tile of keys, of
which it walks its sequence's queries from the first one on; one of d_sinks owns a head, and walks the tokens of all
sequences. Nothing is added atomically.

Source of the count of tiles: FlashAttention's variable-length kernels (Dao 2023), which have one grid for the longest
sequence; here it is one for the sum of all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import AttentionGradientsConfig, FewQueriesTilesConfig
from portakern.backends.triton.gpu.attention import head_dim_innermost, nothing, over_keys, settled, visit
from portakern.backends.triton.gpu.attention_vjp import (
    KeyGradients,
    OfQueries,
    Queries,
    visit_keys,
    visit_queries,
)
from portakern.backends.triton.gpu.attention_vjp import fit as fit_gradients
from portakern.backends.triton.gpu.attention_vjp import supports as supports_gradients
from portakern.backends.triton.launch import accumulator, compiler_options, launch, torch_dtype
from portakern.backends.triton.layout import fresh
from portakern.backends.triton.lib import attention as shared
from portakern.backends.triton.lib.attention import (
    ROWS_AT_ONCE,
    Results,
    SinkStrides,
    SinkTile,
    padded,
    rows_plan,
    sinks_of,
    slopes_of,
    statistics,
    store_rows,
    window_of,
)
from portakern.backends.triton.lib.band import band, fold, limits
from portakern.backends.triton.lib.heads import (
    AttentionExtents,
    AttentionPlan,
    AttentionStrides,
    Masks,
    PairMask,
    Scores,
    load_head,
    precision_of,
    rows_of,
    slope_of,
)
from portakern.backends.triton.lib.sequences import Starts, between, mean_sequence, too_many_tiles
from portakern.specs.attention import scale_of
from portakern.specs.varlen_attention import as_attention

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call


class PackedWork(NamedTuple):
    """How programs share a call.

    Attributes:
      tiles: that a head may need. scale: what a sum is multiplied by at last.
      sequences: how many there are; searched: how often they are halved until one is left.
      q_step, kv_step: strides of their starts.
    """

    tiles: int
    scale: float
    sequences: int
    searched: int
    q_step: int
    kv_step: int

    @classmethod
    def of(cls, call: Call, tokens: str, block: int, step: int = 1, scale: float = 1.0) -> PackedWork:
        """Of tiles of ``block`` rows, of which each token has ``step``."""
        sequences = call.dims["sequences"]
        steps = (call.arrays[n].stride(0) for n in ("q_starts", "kv_starts"))
        tiles = call.dims[tokens] * step // block + sequences + 2
        return cls(tiles, scale, sequences, (sequences + 1).bit_length(), *steps)


class PackedMasks(NamedTuple):
    """What scores of packed sequences meet beside q . k: where the sequences begin, and the sinks and slopes of
    heads."""

    starts: Starts
    of_heads: Masks


class OwnTile(NamedTuple):
    """What a program works on: a tile of the rows of one sequence.

    Attributes:
      tile: which of the sequence's; there: whether it has any row.
      q_start, q_len, kv_start, kv_len: where the sequence's queries and keys lie, and how many there are.
    """

    tile: Any
    there: Any
    q_start: Any
    q_len: Any
    kv_start: Any
    kv_len: Any


@triton.jit
def own_tile(index, starts, extents, work, block: tl.constexpr, step, by_key: tl.constexpr):
    """The :class:`OwnTile` of tile ``index``: of ``block`` keys where ``by_key``, else of queries, of which each has
    ``step`` rows."""
    sequences = work.sequences
    if by_key:
        walked, walked_step = starts.keys, work.kv_step
    else:
        walked, walked_step = starts.queries, work.q_step
    low, high = index * 0, index * 0 + sequences + 1
    for _ in range(work.searched):
        middle = (low + high + 1) // 2
        first = tl.load(walked + tl.maximum(middle - 1, 0) * walked_step).to(tl.int32) * step // block + middle
        here = (middle == low) | (first <= index)
        low, high = tl.where(here, middle, low), tl.where(here, high, middle - 1)
    q_start, q_len = between(starts.queries, work.q_step, low, sequences, extents.q_len)
    kv_start, kv_len = between(starts.keys, work.kv_step, low, sequences, extents.kv_len)
    own, own_len = q_start, q_len
    if by_key:
        own, own_len = kv_start, kv_len
    tile = index - (own * step // block + low)
    there = tile * block < own_len * step
    outside = (low == 0) | (low > sequences)  # what lies there on the other side belongs to no sequence either
    if by_key:
        q_len = tl.where(outside, 0, q_len)
    else:
        kv_len = tl.where(outside, 0, kv_len)
    return OwnTile(tile, there, q_start.to(tl.int64), q_len, kv_start.to(tl.int64), kv_len)


@triton.jit
def in_a_sequence(token, starts, work):
    """Whether tokens of queries belong to a sequence: they lie one behind the other."""
    first = tl.load(starts.queries).to(tl.int32)
    return (token >= first) & (token < tl.load(starts.queries + work.sequences * work.q_step).to(tl.int32))


@triton.jit
def own_extents(mine, extents):
    """The extents of a tile's sequence, whose last query stands at its last key."""
    q_len, kv_len = mine.q_len, mine.kv_len
    return AttentionExtents(extents.heads, extents.group, q_len, kv_len, extents.d, extents.dv, kv_len - q_len)


@triton.jit
def varlen_attention_kernel(
    q, k, v, masks, out, scores, window, work, extents, strides, plan: tl.constexpr
):  # fmt: skip
    """A tile of block_q rows of o, and of lse and lse_low unless these are None: of one head, or with ``plan.packed``
    of all heads of a group. ``extents``: of all sequences together; strides are those of a batch of one. ``masks``: the
    sinks of heads, which tokens of no sequence lack, and their slopes."""
    _owners, step = extents.heads, 1
    if plan.packed:
        _owners, step = extents.heads // extents.group, extents.group
    head = (tl.program_id(0) // work.tiles).to(tl.int64) * step
    mine = own_tile(tl.program_id(0) % work.tiles, masks.starts, extents, work, plan.block_q, step, False)
    if not mine.there:
        return
    own = own_extents(mine, extents)
    _, q_s, _, _ = strides.q
    _, k_s, _, _ = strides.k
    _, v_s, _, _ = strides.v
    i, heads, _, _ = rows_of(mine.tile, head, own, plan)
    i_ok, row = i < mine.q_len, i.to(tl.int64)
    q_tile = load_head(q + mine.q_start * q_s, strides.q, 0, heads, row, i_ok, own.d, plan.block_d, plan.ragged_d)
    place = mine.tile, head, head // own.group, 0
    operands = k + mine.kv_start * k_s, v + mine.kv_start * v_s, masks.of_heads
    state = over_keys(visit, nothing(plan), q_tile, place, operands, strides, scores, window, own, plan)
    token = mine.q_start + row
    at_o, at = token * own.heads + heads, heads * extents.q_len + token
    sinks, sink = masks.of_heads.sinks, None
    if sinks is not None:
        beside = in_a_sequence(token, masks.starts, work)
        sink = tl.reshape(tl.load(sinks + (heads + row * 0), mask=beside, other=float("-inf")), [plan.block_q])
    store_rows(out, settled(state), at_o, at, i_ok, scores, own.dv, plan.block_dv, sink)


def key(call: Call) -> dict[str, str | int]:
    return shared.key(as_attention(call))


def fit(call: Call, config: FewQueriesTilesConfig) -> FewQueriesTilesConfig:
    return shared.fit(as_attention(call), config)


def supports(call: Call, config: FewQueriesTilesConfig) -> str | None:
    return too_many_tiles(call) or shared.supports(as_attention(call), config)


def packed_strides(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_o: torch.Tensor | None) -> AttentionStrides:
    """The strides of (tokens, heads, d) as those of a batch of one."""
    of_q, of_k, of_v = ((0, *x.stride()) for x in (q, k, v))
    of_d_o = None if d_o is None else (0, *d_o.stride())
    return AttentionStrides(of_q, of_k, of_v, (0, 0, 0, 0), (0, 0), (0, 0), of_d_o)


def masks_of(call: Call) -> PackedMasks:
    """What scores meet in a call; sinks in the forward pass alone."""
    starts = Starts(call.arrays["q_starts"], call.arrays["kv_starts"])
    sinks = None if call.spec.is_vjp else sinks_of(call)
    return PackedMasks(starts, Masks(None, None, None, None, sinks=sinks, slopes=slopes_of(call)))


@BACKEND.implements("varlen_attention", key=key, fit=fit, supports=supports, config=FewQueriesTilesConfig)
def varlen_attention(call: Call, config: FewQueriesTilesConfig) -> tuple[Any, ...]:
    arrays, dims, options = call.arrays, call.dims, call.options
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    if not call.interpret:
        k, v = head_dim_innermost(k), head_dim_innermost(v)
    plan, how = rows_plan(mean_sequence(call), config)
    step = dims["group"] if plan.packed else 1
    heads = dims["kv_heads"] * dims["group"]
    out = Results(*(
        fresh(shape, torch_dtype(dtype), q.device) if name in call.wants else None
        for name, (shape, dtype) in call.outputs.items()
    ))  # fmt: skip
    scores = Scores.of(as_attention(call))
    window = window_of(options["is_causal"], options["window"], dims["tokens"] + dims["kv_tokens"])
    extents = AttentionExtents(heads, dims["group"], dims["tokens"], dims["kv_tokens"], dims["d"], dims["dv"])
    strides = packed_strides(q, k, v, None)
    work = PackedWork.of(call, "tokens", plan.block_q, step)
    launch(varlen_attention_kernel, work.tiles * (heads // step), call, q, k, v, masks_of(call), out, scores, window,
           work, extents, strides, plan=plan, **how)  # fmt: skip
    return tuple(out)


# ------------------------------------------------------------------------------------------------------------- gradient
@triton.jit
def varlen_attention_vjp_d_q_kernel(
    q, k, v, masks, of_queries, d_q, scores, window, work, extents, strides, plan: tl.constexpr
):
    """A tile of block_q rows of d_q."""
    d_o, shift, low, delta = of_queries
    head = (tl.program_id(0) // work.tiles).to(tl.int64)
    mine = own_tile(tl.program_id(0) % work.tiles, masks.starts, extents, work, plan.block_q, 1, False)
    if not mine.there:
        return
    own = own_extents(mine, extents)
    _, q_s, _, _ = strides.q
    _, k_s, _, _ = strides.k
    _, v_s, _, _ = strides.v
    _, do_s, _, _ = strides.d_o
    i = (mine.tile * plan.block_q + tl.arange(0, plan.block_q))[:, None]
    i_ok, row = i < mine.q_len, i.to(tl.int64)
    q_tile = load_head(q + mine.q_start * q_s, strides.q, 0, head, row, i_ok, own.d, plan.block_d, plan.ragged_d)
    d_o_of = d_o + mine.q_start * do_s
    d_o_tile = load_head(d_o_of, strides.d_o, 0, head, row, i_ok, own.dv, plan.block_dv, plan.ragged_dv)
    at = head * extents.q_len + mine.q_start + row
    shift_i, delta_i = tl.load(shift + at, mask=i_ok, other=0.0), tl.load(delta + at, mask=i_ok, other=0.0)
    low_i = tl.load(low + at, mask=i_ok, other=0.0)

    acc = tl.full([plan.block_q, plan.block_d], 0.0, plan.acc_dtype)
    rows = q_tile, d_o_tile, shift_i, low_i, delta_i
    place = mine.tile, head, head // own.group, 0
    operands = k + mine.kv_start * k_s, v + mine.kv_start * v_s, masks.of_heads
    acc = over_keys(visit_keys, acc, rows, place, operands, strides, scores, window, own, plan)
    dd = tl.arange(0, plan.block_d)[None, :]
    at = ((mine.q_start + row) * own.heads + head) * own.d + dd
    tl.store(d_q + at, (acc * work.scale).to(d_q.dtype.element_ty), mask=i_ok & (dd < own.d))


@triton.jit
def varlen_attention_vjp_d_k_d_v_kernel(
    q, k, v, masks, of_queries, out, scores, window, work, extents, strides, plan: tl.constexpr
):
    """A tile of block_kv rows of d_k and of d_v, of those that ``plan`` wants: head by head of its group it walks the
    tiles of block_q queries of its sequence that see them."""
    d_o, shift, low, delta = of_queries
    left, right = window
    _, q_s, q_h, q_d = strides.q
    _, k_s, _, _ = strides.k
    _, v_s, _, _ = strides.v
    _, do_s, do_h, do_d = strides.d_o
    kv_head = (tl.program_id(0) // work.tiles).to(tl.int64)
    mine = own_tile(tl.program_id(0) % work.tiles, masks.starts, extents, work, plan.block_kv, 1, True)
    if not mine.there:
        return
    q_len, kv_len, d, dv = mine.q_len, mine.kv_len, extents.d, extents.dv
    j = (mine.tile * plan.block_kv + tl.arange(0, plan.block_kv))[:, None]
    j_ok, col = j < kv_len, j.to(tl.int64)
    k_of, v_of = k + mine.kv_start * k_s, v + mine.kv_start * v_s
    k_tile = load_head(k_of, strides.k, 0, kv_head, col, j_ok, d, plan.block_d, plan.ragged_d)
    v_tile = load_head(v_of, strides.v, 0, kv_head, col, j_ok, dv, plan.block_dv, plan.ragged_dv)

    # Key j stands beside query j - (kv_len - q_len), and is seen from as far as queries see, the other way round.
    top = mine.tile * plan.block_kv - (kv_len - q_len)
    bottom = top + tl.minimum(plan.block_kv, kv_len - mine.tile * plan.block_kv) - 1
    span = band(top, bottom, right, left, q_len, plan.block_q)
    lo, hi = limits(j - (kv_len - q_len), right, left, q_len)

    dd, ddv = tl.arange(0, plan.block_d)[None, :], tl.arange(0, plan.block_dv)[None, :]
    d_ok, dv_ok = dd < d, ddv < dv
    dk_acc = tl.full([plan.block_kv, plan.block_d], 0.0, plan.acc_dtype)
    dv_acc = tl.full([plan.block_kv, plan.block_dv], 0.0, plan.acc_dtype)
    for head in range(kv_head * extents.group, kv_head * extents.group + extents.group):
        q_of = q + (mine.q_start * q_s + head * q_h) + dd.to(tl.int64) * q_d
        do_of = d_o + (mine.q_start * do_s + head * do_h) + ddv.to(tl.int64) * do_d
        at = head * extents.q_len + mine.q_start
        queries = Queries(q_of, q_s, d_ok, do_of, do_s, dv_ok, shift + at, low + at, delta + at, q_len)
        slope, position = None, None
        if masks.of_heads.slopes is not None:
            slope, position = slope_of(masks.of_heads.slopes, head, scores), col - (kv_len - q_len)
        pairs = PairMask(j_ok, lo, hi, None, 0, None, None, 0, slope, position)
        state = dk_acc, dv_acc
        dk_acc, dv_acc = fold(visit_queries, state, (k_tile, v_tile), queries, pairs, scores, span, right, plan)

    at = (mine.kv_start + col) * (extents.heads // extents.group) + kv_head
    if plan.want_k:
        tl.store(out.d_k + at * d + dd, (dk_acc * work.scale).to(out.d_k.dtype.element_ty), mask=j_ok & d_ok)
    if plan.want_v:
        tl.store(out.d_v + at * dv + ddv, dv_acc.to(out.d_v.dtype.element_ty), mask=j_ok & dv_ok)


@triton.jit
def varlen_attention_vjp_d_sinks_kernel(
    sinks, lse, lse_low, delta, starts, d_sinks, work, extents, strides, tile: tl.constexpr
):
    """d_sinks of one head, -sum exp(min(sink - lse - lse_low, 0)) delta over the tokens of all sequences, ``rows`` of
    them at a time, one after another. delta: (heads, tokens); rows with lse = -inf add nothing, nor tokens of no
    sequence."""
    head = tl.program_id(0).to(tl.int64)
    lse_h, lse_s = strides.lse
    sink = tl.load(sinks + head).to(tile.acc_dtype)
    total = tl.full([tile.rows], 0.0, tile.acc_dtype)
    for start in range(0, extents.q_len, tile.rows):
        token = start + tl.arange(0, tile.rows)
        ok, row = (token < extents.q_len) & in_a_sequence(token, starts, work), token.to(tl.int64)
        l = tl.load(lse + head * lse_h + row * lse_s, mask=ok, other=float("-inf"))
        rest = tl.full([tile.rows], 0.0, tile.acc_dtype)
        if lse_low is not None:
            low_h, low_s = strides.lse_low
            rest = tl.load(lse_low + head * low_h + row * low_s, mask=ok, other=0.0)
        delta_i = tl.load(delta + head * extents.q_len + row, mask=ok, other=0.0)
        p = tl.exp(tl.minimum((sink - l) - rest, 0.0, propagate_nan=tl.PropagateNan.ALL))
        total -= tl.where(l == float("-inf"), 0.0, p * delta_i)
    tl.store(d_sinks + head, tl.sum(total, 0).to(d_sinks.dtype.element_ty))


def fit_of_gradients(call: Call, config: AttentionGradientsConfig) -> AttentionGradientsConfig:
    return fit_gradients(as_attention(call), config)


def supports_gradients_of(call: Call, config: AttentionGradientsConfig) -> str | None:
    return too_many_tiles(call) or supports_gradients(as_attention(call), config)


def packed_statistics(call: Call, o: torch.Tensor, d_o: torch.Tensor, rate: tuple[float, float]) -> tuple[Any, ...]:
    """(shift, low, delta) of all tokens, (heads, tokens) each: those of a batch of one."""
    one = as_attention(call)
    rows = {n: None if one.arrays[n] is None else one.arrays[n][None] for n in ("lse", "d_lse", "lse_low")}
    shift, low, _, delta = statistics(one.replace(arrays={**one.arrays, **rows}), o[None], d_o[None], rate)
    return shift, low, delta


def sink_gradient(call: Call, delta: torch.Tensor, d_sinks: torch.Tensor | None) -> None:
    """Write d_sinks, unless it is None, from the delta of all tokens."""
    if d_sinks is None:
        return
    dims, (lse, lse_low, starts) = call.dims, (call.arrays[n] for n in ("lse", "lse_low", "q_starts"))
    heads = dims["kv_heads"] * dims["group"]
    extents = AttentionExtents(heads, dims["group"], dims["tokens"], dims["kv_tokens"], dims["d"], dims["dv"])
    strides = SinkStrides(lse.stride(), None if lse_low is None else lse_low.stride())
    launch(varlen_attention_vjp_d_sinks_kernel, heads, call, sinks_of(call), lse, lse_low, delta, Starts(starts, None),
           d_sinks, PackedWork.of(call, "tokens", ROWS_AT_ONCE), extents, strides,
           tile=SinkTile(ROWS_AT_ONCE, accumulator(call.dtype)), num_warps=4)  # fmt: skip


@BACKEND.implements(
    "varlen_attention_vjp", key=key, fit=fit_of_gradients, supports=supports_gradients_of,
    config=AttentionGradientsConfig,
)  # fmt: skip
def varlen_attention_vjp(call: Call, config: AttentionGradientsConfig) -> tuple[Any, ...]:
    dims, options, wants, one = call.dims, call.options, call.wants, as_attention(call)
    q, k, v, o, d_o = (call.arrays[n] for n in ("q", "k", "v", "o", "d_o"))
    if not call.interpret:
        q, k, v, o, d_o = (head_dim_innermost(x) for x in (q, k, v, o, d_o))
    heads, d, dv = dims["kv_heads"] * dims["group"], dims["d"], dims["dv"]
    block_d, block_dv = padded(d), padded(dv)
    scores, rate = Scores.of_gradients(one)
    shift, low, delta = packed_statistics(call, o, d_o, rate)
    out = {
        name: fresh(shape, torch_dtype(dtype), q.device) if name in wants else None
        for name, (shape, dtype) in call.outputs.items()
    }
    sink_gradient(call, delta, out["d_sinks"])
    given = q, k, v, masks_of(call), OfQueries(d_o, shift, low, delta)
    window = window_of(options["is_causal"], options["window"], dims["tokens"] + dims["kv_tokens"])
    extents = AttentionExtents(heads, dims["group"], dims["tokens"], dims["kv_tokens"], d, dv)
    strides = packed_strides(q, k, v, d_o)
    plan = AttentionPlan(config.block_q, config.block_kv, block_d, block_dv, block_d != d, block_dv != dv,
                precision_of(one, config), accumulator(call.dtype))  # fmt: skip
    how, scale = compiler_options(config), scale_of(call)
    if "d_k" in wants or "d_v" in wants:
        work = PackedWork.of(call, "kv_tokens", plan.block_kv, scale=scale)
        own = plan._replace(want_k="d_k" in wants, want_v="d_v" in wants)
        launch(varlen_attention_vjp_d_k_d_v_kernel, work.tiles * dims["kv_heads"], call, *given,
               KeyGradients(out["d_k"], out["d_v"]), scores, window, work, extents, strides, plan=own,
               **how)  # fmt: skip
    if "d_q" in wants:
        work = PackedWork.of(call, "tokens", config.dq_block_q, scale=scale)
        own = plan._replace(block_q=config.dq_block_q, block_kv=config.dq_block_kv)
        launch(varlen_attention_vjp_d_q_kernel, work.tiles * heads, call, *given, out["d_q"], scores, window, work,
               extents, strides, plan=own, **how)  # fmt: skip
    return tuple(out.values())
