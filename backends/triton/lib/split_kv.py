"""Long rows of keys in chunks: how long these are, how what is known of two parts of a row becomes what is known of
both, and when each part has a program of its own.

A chunk is a number of keys that follows from lengths alone, and begins at a multiple of itself. Its state (acc, l, m)
is that of an attention over its keys, and the states of a row's chunks are merged from the first chunk to the last. One
program may do all that, or each chunk have a program: the sums are the same, in the same order. So it may depend on how
many rows there are which of the two happens, and no bit of a row does.

Source: the split of keys as Flash-Decoding has it (Dao, Haziza, Massa, Sizov 2023).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from portakern.backends.triton.configs import AttentionConfig, FewQueriesTilesConfig
from portakern.backends.triton.launch import cdiv
from portakern.backends.triton.layout import pow2_at_least

if TYPE_CHECKING:
    from portakern.core.call import Call

MOST = 16
"""Chunks of a row where no table says otherwise: one row of 8 key heads has 128 programs then, and an H100 132
multiprocessors."""

FEW = 32  # programs that leave most of a GPU idle
ENOUGH = 1024  # programs that occupy a GPU by themselves


@triton.jit
def alike(m, number):
    """A number beside each row's maximum, in its dtype: of two numbers alone a selection is float32."""
    return tl.full(m.shape, number, m.dtype)


@triton.jit
def origin(m, scores):
    """(factor, offset): under the maximum m of a row a score's weight is 2^(s factor - offset). ``exponents`` of the
    spec says why."""
    factor = tl.where(tl.abs(m) < scores.beyond, alike(m, scores.rate), alike(m, scores.octave))
    return factor, tl.where(m == float("-inf"), 0.0, m * factor)  # no key seen so far: -inf - -inf would be NaN


@triton.jit
def shrunk(m, under):
    """What sums of weights under the maximum m are multiplied by, to stand under another one's origin."""
    factor, offset = under
    # The selection keeps compilers from fusing this product with the difference: it has to round as the offset did.
    return tl.exp2(tl.where(m == float("-inf"), m, m * factor) - offset)


@triton.jit
def log_sum(l, m, scores):
    """(high, low): the logarithm of the sum of exp(s), in natural units, from the sum l of weights under the maximum m,
    and what rounding took from it; 0 where it is not finite.

    It is offset natural + log l, or m unit + log l, to twice the precision of a number: gradients measure scores from
    it. The product is exact in two numbers (``fma``), and so is a sum (Knuth, "The art of computer programming", volume
    2, section 4.2.2, theorem B).
    """
    factor, offset = origin(m, scores)
    exact = factor == alike(m, scores.rate)
    of, log = tl.where(exact, offset, m), tl.log(l)
    natural = tl.where(exact, alike(m, scores.natural), alike(m, scores.unit))
    rest = tl.where(exact, alike(m, scores.natural_low), alike(m, scores.unit_low))
    product = plain_product(of, natural)
    rest = tl.fma(of, rest, tl.fma(of, natural, -product))
    total = product + log
    added = total - product
    rest += (product - (total - added)) + (log - added)
    rest = tl.where(tl.abs(total) < float("inf"), rest, 0.0)
    high = total + rest
    return high, tl.where(tl.abs(high) < float("inf"), rest - (high - total), 0.0)


@triton.jit
def beside_sink(high, low, sink):
    """(share, high, low): what a sink leaves of the mean of the values, 1 / (1 + exp(sink - lse)), and lse with
    exp(sink) in its sum, from the lse of all keys in two numbers. -inf leaves all as it is, to the bit; inf and NaN
    give NaN.

    The exponential is taken of the negative difference, so that neither it nor the share overflows or is lost.
    """
    none = sink == float("-inf")
    sink = tl.where(sink < float("inf"), sink, float("nan"))
    apart = (sink - high) - low
    above, ratio = apart > 0.0, tl.exp(-tl.abs(apart))
    share = tl.where(above, ratio, 1.0) / (1.0 + ratio)
    base, more = tl.where(above, sink, high), tl.log(1.0 + ratio) + tl.where(above, 0.0, low)
    total = base + more
    added = total - base
    rest = (base - (total - added)) + (more - added)
    rest = tl.where(tl.abs(total) < float("inf"), rest, 0.0)
    return tl.where(none, 1.0, share), tl.where(none, high, total), tl.where(none, low, rest)


@triton.jit
def plain_product(a, b):
    """a b, rounded before anything is added to it: no compiler fuses a selection with a sum."""
    return tl.where(a == float("-inf"), a, a * b)


@triton.jit
def merge(full, part, scores):
    """The state of all keys, from the states (acc, l, m) of those so far and of those that follow them.

    A part that holds no key changes nothing. The fused operations are written out: which product of two a compiler
    fuses with their sum is its choice, and another kernel's might be another one.
    """
    acc, l, m = full
    acc_part, l_part, m_part = part
    m_new = tl.maximum(m, m_part)
    under = origin(m_new, scores)
    alpha, beta = shrunk(m, under), shrunk(m_part, under)
    acc = tl.fma(acc, tl.broadcast_to(alpha[:, None], acc.shape), acc_part * beta[:, None])
    return acc, tl.fma(l, alpha, l_part * beta), m_new


@triton.jit
def store_part(parts, statistics, state, at, ok, dv, block_dv: tl.constexpr):
    """Write the state of a chunk. ``at``: the place of each row's, as a column; ``ok``: which rows there are."""
    acc, l, m = state
    ddv = tl.arange(0, block_dv)[None, :]
    tl.store(parts + at * dv + ddv, acc, mask=ok & (ddv < dv))
    tl.store(statistics + at * 2, l[:, None], mask=ok)
    tl.store(statistics + at * 2 + 1, m[:, None], mask=ok)


def chunk_length(call: Call, config: FewQueriesTilesConfig) -> int | None:
    """How many keys make a chunk; None where one holds them all, as it does in tilings without splits.

    It follows from the length of the keys, from how many of them a window shows to a query, and from the tiling, whose
    ``min_split_keys`` is the least. Where the tiling has them, up to ``unsplit_keys`` keys are one chunk, and a row has
    up to ``max_splits`` of them, for :data:`MOST`. How many queries, heads or samples there are does not count, so that
    no bit of a row depends on its company.
    """
    if not isinstance(config, AttentionConfig) or "min_split_keys" not in config:
        return None
    kv_len, seen = call.dims["kv_len"], seen_keys(call)
    least = max(config.min_split_keys, config.unsplit_keys) if seen <= config.unsplit_keys else config.min_split_keys
    chunk = max(least, config.block_kv, pow2_at_least(cdiv(seen, config.get("max_splits", MOST))))
    return chunk if chunk < kv_len else None


def seen_keys(call: Call) -> int:
    """How many keys masks show to a query at most."""
    kv_len, (left, right) = call.dims["kv_len"], call.options["window"] or (None, None)
    right = 0 if call.options["is_causal"] else right
    return kv_len if left is None or right is None else min(kv_len, left + right + 1)


def chunks_of_a_tile(call: Call, chunk: int, queries: int) -> int:
    """How many chunks so many adjacent queries see at most."""
    kv_len, (left, right) = call.dims["kv_len"], call.options["window"] or (None, None)
    right = 0 if call.options["is_causal"] else right
    everything = cdiv(kv_len, chunk)
    if left is None or right is None:
        return everything
    return min(everything, (queries + left + right - 2 + chunk) // chunk + 1)


def worth_spreading(call: Call, programs: int, chunks: int) -> bool:
    """Whether each chunk shall have a program: where there are few programs otherwise, and what they write down of
    their parts is little beside the keys and values that they read: a quarter, or half where most of a GPU were idle
    without them."""
    dims = call.dims
    size = 2 if call.dtype in ("float16", "bfloat16") else 4
    written = dims["group"] * dims["q_len"] * chunks * dims["dv"] * 4
    times = 2 if programs <= FEW else 4
    return programs < ENOUGH and times * written <= dims["kv_len"] * (dims["d"] + dims["dv"]) * size
