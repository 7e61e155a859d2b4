"""Merge of two attentions over disjoint sets of keys, of any strided views, and its gradients.

    o = w_a o_a + w_b o_b        lse = log(exp(lse_a) + exp(lse_b))        w_a = 1 / (1 + exp(lse_b - lse_a))
    d_o_a = w_a d_o              d_lse_a = w_a d_lse + w_a w_b S           S = sum d_o (o_a - o_b) over d

in natural logarithms, w_b = 1 - w_a. o_a, o_b, o, d_o, d_o_a, d_o_b: (batch, tokens, heads, d); lse_a, lse_b, lse,
d_lse, d_lse_a, d_lse_b: (batch, heads, tokens). A program owns block_rows tokens of one head of one sample, with all d
numbers. It reads the two lse first, and then nothing of a part whose lse is -inf. The larger weight and its part are
selected, so that the order of the parts decides no rounding.

Source: Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference" (2023).
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import TokenRowsConfig
from portakern.backends.triton.launch import accumulator, cdiv, launch, refuse_common
from portakern.backends.triton.layout import aligned, collapse, contiguous_strides, fresh, pow2_at_least
from portakern.spec.dtypes import numpy_dtype

if TYPE_CHECKING:
    from portakern.core.call import Call


USUAL_D = 128  # numbers of a head, for which the rows of tables are written
PARTS = ("o_a", "lse_a", "o_b", "lse_b")


class States(NamedTuple):
    """The arrays of two parts, or their gradients, of which those that are not wanted are None."""

    o_a: Any
    lse_a: Any
    o_b: Any
    lse_b: Any


class StateExtents(NamedTuple):
    """``tiles``: of the tokens of a head."""

    tokens: int
    heads: int
    d: int
    tiles: int


class StateStrides(NamedTuple):
    """Of o_a, o_b, d_o and a result like them along (batch, tokens, heads, d), of lse_a, lse_b, d_lse and a result like
    them along (batch, heads, tokens)."""

    o_a: Any
    lse_a: Any
    o_b: Any
    lse_b: Any
    o: Any
    lse: Any
    d_o: Any = (0, 0, 0, 0)
    d_lse: Any = (0, 0, 0)


class StateTile(NamedTuple):
    """What the kernels are compiled for: the tokens of a program, what covers d, what it computes in, and what divides
    d and every distance between heads and tokens."""

    block_rows: int
    block_d: int
    acc_dtype: tl.dtype
    unit: int


class PartShares(NamedTuple):
    """Of each row the weights, ``pair`` their product, ``e`` = exp(-|lse_a - lse_b|), and whether a has the larger
    weight."""

    high: Any
    low: Any
    e: Any
    a_leads: Any


@triton.jit
def shares_of(lse_a, lse_b):
    """The weights of two parts; equal ones where neither has a key."""
    nothing = (lse_a == float("-inf")) & (lse_b == float("-inf"))
    apart = tl.where(nothing, 0.0, lse_a - lse_b)
    e = tl.exp(-tl.abs(apart))
    high = 1.0 / (1.0 + e)
    return PartShares(high, e * high, e, apart >= 0)


@triton.jit
def merge_states_place(extents, tile: tl.constexpr):
    """(sample, head, tokens, numbers) that this program owns, and which tokens there are."""
    index = tl.program_id(0)
    head = index // extents.tiles
    s = index % extents.tiles * tile.block_rows + tl.arange(0, tile.block_rows)
    d = aligned(extents.d, tile.unit)
    p = tl.arange(0, tile.block_d)
    return (head // extents.heads).to(tl.int64), head % extents.heads, s, p, s < extents.tokens, p < d


@triton.jit
def numbers_at(array, batch, head, s, strides):
    """Where the rows' numbers lie."""
    of_batch, of_heads, of_tokens = strides
    return array + (batch * of_batch + head.to(tl.int64) * of_heads) + s.to(tl.int64) * of_tokens


@triton.jit
def rows_at(array, batch, head, s, p, strides, unit: tl.constexpr):
    """Where the rows lie, as a tile."""
    of_batch, of_tokens, of_heads, of_d = strides
    array += batch * aligned(of_batch, unit) + head.to(tl.int64) * aligned(of_heads, unit)
    return array + (s.to(tl.int64) * aligned(of_tokens, unit))[:, None] + (p.to(tl.int64) * of_d)[None, :]


@triton.jit
def load_numbers(array, batch, head, s, has_token, strides, tile: tl.constexpr):
    """One number a row; -inf of tokens that are not there, of which nothing else is then read."""
    at = numbers_at(array, batch, head, s, strides)
    return tl.load(at, mask=has_token, other=float("-inf")).to(tile.acc_dtype)


@triton.jit
def load_rows(array, batch, head, s, p, ok, strides, tile: tl.constexpr):
    return tl.load(rows_at(array, batch, head, s, p, strides, tile.unit), mask=ok, other=0.0).to(tile.acc_dtype)


@triton.jit
def store_rows(array, values, batch, head, s, p, ok, strides, tile: tl.constexpr):
    tl.store(rows_at(array, batch, head, s, p, strides, tile.unit), values.to(array.dtype.element_ty), mask=ok)


@triton.jit
def merge_states_kernel(o_a, lse_a, o_b, lse_b, o, lse, extents, strides, tile: tl.constexpr):
    batch, head, s, p, has_token, inside = merge_states_place(extents, tile)
    log_a = load_numbers(lse_a, batch, head, s, has_token, strides.lse_a, tile)
    log_b = load_numbers(lse_b, batch, head, s, has_token, strides.lse_b, tile)
    shares = shares_of(log_a, log_b)
    has_a, has_b = (log_a != float("-inf"))[:, None], (log_b != float("-inf"))[:, None]
    a = load_rows(o_a, batch, head, s, p, has_a & inside[None, :], strides.o_a, tile)
    b = load_rows(o_b, batch, head, s, p, has_b & inside[None, :], strides.o_b, tile)
    leads = shares.a_leads[:, None]
    more, less = tl.where(leads, a, b), tl.where(leads, b, a)
    merged = tl.fma(more, tl.broadcast_to(shares.high[:, None], more.shape), less * shares.low[:, None])
    store_rows(o, merged, batch, head, s, p, has_token[:, None] & inside[None, :], strides.o, tile)

    grown = tl.log(1.0 + tl.where(log_a == log_b, 1.0, shares.e))
    total = tl.where(shares.a_leads, log_a, log_b) + grown
    tl.store(numbers_at(lse, batch, head, s, strides.lse), total.to(lse.dtype.element_ty), mask=has_token)


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype}


def block_d(call: Call) -> int:
    return pow2_at_least(call.dims["d"])


def fit(call: Call, config: TokenRowsConfig) -> TokenRowsConfig:
    """As many numbers in more tokens, where heads are shorter than usual; fewer tokens where they are longer, and more
    warps where one row is more than a tile."""
    rows = call.spec.tiling["block_rows"]
    volume = config.block_rows * USUAL_D
    block_rows = pow2_at_least(volume // block_d(call), rows.lo, rows.hi)
    num_warps = min(config.num_warps * max(block_d(call) // volume, 1), 32)
    return config.replace(block_rows=block_rows, num_warps=num_warps)


def programs(call: Call, config: TokenRowsConfig) -> int:
    batch = 1
    for extent in call.dims["batch"]:
        batch *= extent
    return batch * call.dims["heads"] * cdiv(call.dims["tokens"], config.block_rows)


def supports(call: Call, config: TokenRowsConfig) -> str | None:
    tile = config.block_rows * block_d(call)
    name = f"a tile of block_rows = {config.block_rows} rows of {call.dims['d']} numbers"
    if tile > 1 << 20:
        return f"{name} is over Triton's limit of 2^20 elements; use a smaller tile"
    if not call.interpret and tile > config.num_warps * 32 * 32:
        return (
            f"{name} is over 32 numbers a thread of each array at num_warps = {config.num_warps}; use a smaller tile "
            "or more warps"
        )
    return refuse_common(call, config.num_warps, programs(call, config))


def with_one_batch(array: Any, axes: int) -> tuple[Any, tuple[int, ...]]:
    """The array, and its strides as those of (batch, axes). A batch that no stride describes is the one case that
    gathers a copy."""
    extents, (steps,) = collapse(array.shape[:-axes], array.stride()[:-axes])
    if len(extents) > 1:
        return with_one_batch(array.contiguous(), axes)
    return array, (*(steps or (0,)), *array.stride()[-axes:])


class Laid(NamedTuple):
    """The arrays of a call with one batch dimension, and what the kernels take of them."""

    arrays: dict[str, Any]
    extents: StateExtents
    strides: StateStrides
    tile: StateTile

    @classmethod
    def of(cls, call: Call, config: TokenRowsConfig) -> Laid:
        dims = call.dims
        given = {name: x for name, x in call.arrays.items() if x is not None}
        laid = {name: with_one_batch(x, 2 if "lse" in name else 3) for name, x in given.items()}
        arrays = {**call.arrays, **{name: x for name, (x, _) in laid.items()}}
        tokens, heads, d = (dims[name] for name in ("tokens", "heads", "d"))
        of_results = {"o": contiguous_strides((1, tokens, heads, d)), "lse": contiguous_strides((1, heads, tokens))}
        strides = StateStrides(**{name: of for name, (_, of) in laid.items()}, **of_results)
        of_rows = (n for name, of in strides._asdict().items() if of and "lse" not in name for n in of[:-1])
        elements = 16 // numpy_dtype(call.dtype).itemsize
        step = gcd(d, *of_rows)
        extents = StateExtents(tokens, heads, d, cdiv(tokens, config.block_rows))
        unit = 1 if step % elements else elements
        return cls(arrays, extents, strides, StateTile(config.block_rows, block_d(call), accumulator(call.dtype), unit))

    def states(self) -> States:
        return States(*(self.arrays[name] for name in PARTS))


def result(call: Call, name: str) -> Any:
    """Where an output goes, which has the form of a part's o or lse."""
    like = call.arrays["lse_a" if "lse" in name else "o_a"]
    return fresh(like.shape, like.dtype, like.device)


OPTIONS: dict[str, Any] = {"key": key, "fit": fit, "supports": supports, "config": TokenRowsConfig}


@BACKEND.implements("merge_states", **OPTIONS)
def merge_states(call: Call, config: TokenRowsConfig) -> tuple[Any, ...]:
    laid, o, lse = Laid.of(call, config), result(call, "o"), result(call, "lse")
    launch(merge_states_kernel, programs(call, config), call, *laid.states(), o, lse, laid.extents, laid.strides,
           tile=laid.tile, num_warps=config.num_warps)  # fmt: skip
    return o, lse


# ---------------------------------------------------------------------------------------------------------- gradient
@triton.jit
def merge_states_vjp_kernel(d_o, d_lse, states, gradients, extents, strides, tile: tl.constexpr):
    """``gradients``: where those go that are wanted. o_a and o_b are read for those of a lse alone, and where both
    parts have keys."""
    batch, head, s, p, has_token, inside = merge_states_place(extents, tile)
    lse_a = load_numbers(states.lse_a, batch, head, s, has_token, strides.lse_a, tile)
    lse_b = load_numbers(states.lse_b, batch, head, s, has_token, strides.lse_b, tile)
    shares = shares_of(lse_a, lse_b)
    has_a, has_b = lse_a != float("-inf"), lse_b != float("-inf")
    w_a = tl.where(shares.a_leads, shares.high, shares.low)
    w_b = tl.where(shares.a_leads, shares.low, shares.high)
    ok = has_token[:, None] & inside[None, :]
    d = load_rows(d_o, batch, head, s, p, ok, strides.d_o, tile)

    if gradients.o_a is not None:
        of_a = tl.where(has_a[:, None], w_a[:, None] * d, 0.0)
        store_rows(gradients.o_a, of_a, batch, head, s, p, ok, strides.o, tile)
    if gradients.o_b is not None:
        of_b = tl.where(has_b[:, None], w_b[:, None] * d, 0.0)
        store_rows(gradients.o_b, of_b, batch, head, s, p, ok, strides.o, tile)
    if gradients.lse_a is not None or gradients.lse_b is not None:
        both = has_a & has_b
        read = both[:, None] & inside[None, :]
        a = load_rows(states.o_a, batch, head, s, p, read, strides.o_a, tile)
        b = load_rows(states.o_b, batch, head, s, p, read, strides.o_b, tile)
        slope = tl.where(both, (w_a * w_b) * tl.sum(d * (a - b), 1), 0.0)
        g = tl.zeros_like(slope)
        if d_lse is not None:
            g = tl.load(numbers_at(d_lse, batch, head, s, strides.d_lse), mask=has_token, other=0.0).to(tile.acc_dtype)
        if gradients.lse_a is not None:
            of_a = tl.where(has_a, tl.fma(w_a, g, slope), 0.0).to(gradients.lse_a.dtype.element_ty)
            tl.store(numbers_at(gradients.lse_a, batch, head, s, strides.lse), of_a, mask=has_token)
        if gradients.lse_b is not None:
            of_b = tl.where(has_b, tl.fma(w_b, g, -slope), 0.0).to(gradients.lse_b.dtype.element_ty)
            tl.store(numbers_at(gradients.lse_b, batch, head, s, strides.lse), of_b, mask=has_token)


@BACKEND.implements("merge_states_vjp", **OPTIONS)
def merge_states_vjp(call: Call, config: TokenRowsConfig) -> tuple[Any, ...]:
    laid = Laid.of(call, config)
    found = [result(call, f"d_{name}") if f"d_{name}" in call.wants else None for name in PARTS]
    launch(merge_states_vjp_kernel, programs(call, config), call, laid.arrays["d_o"],
           laid.arrays["d_lse"], laid.states(), States(*found), laid.extents, laid.strides, tile=laid.tile,
           num_warps=config.num_warps)  # fmt: skip
    return tuple(found)
