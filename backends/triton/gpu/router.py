"""The experts of each token, and their weights.

    s = exp(x - m) / sum exp(x - m) or 1 / (1 + exp(-x)),    order by s + bias, or by x where there is no bias
    w = scale s[indices], or these over their sum

A program owns ``block_rows`` rows and keeps them in registers, each group of experts filled up to a power of two, so
that the groups of a row are one more axis of it. Numbers are compared by ``top_k``'s integers, which order them as
floats: NaN greatest, -0 as 0, and nothing flushed.

* Of a group the two greatest are a maximum, its place, and the maximum of the others; the integers give the numbers
  back, whose sum is a group's. A group is kept if fewer groups than are kept come before it: all pairs are compared.
* Pass t of k finds the greatest of a row, and of equal ones the first, and takes it out: two reductions. A router's k
  is small, and both reductions are of 32 bits, as wide as one of a number and its place together.
* The logits that were chosen are loaded again, k beside each other, and weighed there.

The gradient holds whole rows too: pass t spreads cotangent t to its expert, and then each row is by its formula.

    d_x = scale h (g - sum h g), of softmax; (1 - s) times that, or scale s (1 - s) g, of sigmoids

Source: Liu et al., "DeepSeek-V3 technical report" (2024), sections 2.1.2 and 2.1.3, for bias and groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import RowsConfig, WholeRowsConfig
from portakern.backends.triton.gpu.top_k import turned
from portakern.backends.triton.launch import accumulator, cdiv, lanes, launch, refuse_tile, torch_dtype
from portakern.backends.triton.layout import TensorRows, fresh, pow2_at_least, row_start, walk_rows
from portakern.backends.triton.lib.activations import open_and_shut
from portakern.backends.triton.lib.rows import RowExtents, own_rows, start_of

if TYPE_CHECKING:
    from portakern.core.call import Call

LEAST_SUM = tl.constexpr(1e-20)


class ExpertGroups(NamedTuple):
    """``k`` experts of ``kept`` of ``groups`` groups of ``width`` are chosen."""

    k: int
    groups: int
    width: int
    kept: int


class RouterPlan(NamedTuple):
    """What the kernels are compiled for.

    Attributes:
      block_rows: rows of a tile; groups, width: powers of two that cover the groups and the experts of each; chosen:
        one that covers k.
      flat, unit: of :meth:`TensorRows.known`, of logits; chosen_flat: of indices and cotangents.
      acc_dtype, bits: the floats that are computed in, and integers of their width; most: of turned bits the greatest,
        NaN's; least: no turned bits are less. largest: of ``turned``.
      softmax, normalize, scale: the options; limited: whether some groups are left out.
    """

    block_rows: int
    groups: int
    width: int
    chosen: int
    flat: bool
    unit: int
    chosen_flat: bool
    acc_dtype: tl.dtype
    bits: tl.dtype
    most: int
    least: int
    softmax: bool
    normalize: bool
    limited: bool
    scale: float
    largest: bool = True


@triton.jit
def exponentials(x):
    """exp(x - m) of rows, their sums l, and m, as columns."""
    m = tl.max(x, 1)[:, None]
    p = tl.exp(x - m)
    return p, tl.sum(p, 1)[:, None], m


@triton.jit
def number_of(key, plan: tl.constexpr):
    """The number of turned bits."""
    bits = key ^ ((key >> (63 if plan.bits == tl.int64 else 31)) & plan.most)
    return bits.to(plan.acc_dtype, bitcast=True)


@triton.jit
def in_kept_groups(key, groups, plan: tl.constexpr):
    """Which experts are in the groups with the greatest sums of two."""
    key = tl.reshape(key, [plan.block_rows, plan.groups, plan.width])
    expert = tl.arange(0, plan.width)[None, None, :]
    first = tl.max(key, 2)
    at = tl.min(tl.where(key == first[:, :, None], expert, plan.width), 2)
    second = tl.max(tl.where(expert == at[:, :, None], plan.least, key), 2)

    group = tl.arange(0, plan.groups)
    total = turned(number_of(first, plan) + number_of(second, plan), plan)
    total = tl.where((group < groups.groups)[None, :], total, plan.least)
    mine, other = total[:, :, None], total[:, None, :]
    before = (other > mine) | ((other == mine) & (group[None, None, :] < group[None, :, None]))
    kept = tl.sum(before.to(tl.int32), 2) < groups.kept
    kept = tl.broadcast_to(kept[:, :, None], [plan.block_rows, plan.groups, plan.width])
    return tl.reshape(kept, [plan.block_rows, plan.groups * plan.width])


@triton.jit
def best(key, k, plan: tl.constexpr):
    """The lanes of the k greatest of each row in order, ``chosen`` columns."""
    lane, slot = tl.arange(0, plan.groups * plan.width)[None, :], tl.arange(0, plan.chosen)[None, :]
    found = tl.full([plan.block_rows, plan.chosen], 0, tl.int32)
    for t in range(k):
        top = tl.max(key, 1)[:, None]
        at = tl.min(tl.where(key == top, lane, plan.groups * plan.width), 1)[:, None]
        key = tl.where(lane == at, plan.least, key)
        found = tl.where(slot == t, at, found)
    return found


@triton.jit
def weighed(x, ok, l, m, plan: tl.constexpr):
    """The weights of chosen logits x; l, m: of all of softmax."""
    if plan.softmax:
        if plan.normalize:
            p, l, _ = exponentials(x)
            w = p / l
        else:
            w = tl.exp(x - m) / l
    else:
        w, _ = open_and_shut(x)
        if plan.normalize:
            w = w / (tl.sum(tl.where(ok, w, 0.0), 1)[:, None] + LEAST_SUM)
    return w * plan.scale


@triton.jit
def router_kernel(logits, bias, weights, indices, extents, logits_strides, bias_step, groups, plan: tl.constexpr):
    row, _ = own_rows(extents, plan)
    row_ok = (row < extents.height)[:, None]
    x_row = start_of(logits, row, extents, logits_strides, plan)
    lane = tl.arange(0, plan.groups * plan.width)[None, :]
    group, expert = lane // plan.width, lane % plan.width
    place, known = (group * groups.width + expert).to(tl.int64), (group < groups.groups) & (expert < groups.width)
    x = tl.load(x_row + place * logits_strides.n, mask=row_ok & known, other=float("-inf")).to(plan.acc_dtype)

    l, m, score = 0.0, 0.0, x
    if plan.softmax:
        if plan.limited or not plan.normalize or bias is not None:
            p, l, m = exponentials(x)
            score = p / l
    elif plan.limited or bias is not None:
        score, _ = open_and_shut(x)
    if bias is not None:
        score += tl.load(bias + place * bias_step, mask=known, other=0.0)
    key = tl.where(known, turned(x if bias is None else score, plan), plan.least)
    if plan.limited:
        by_score = key if bias is not None else tl.where(known, turned(score, plan), plan.least)
        key = tl.where(in_kept_groups(by_score, groups, plan), key, plan.least)

    found, t = best(key, groups.k, plan), tl.arange(0, plan.chosen)[None, :]
    place = (found // plan.width * groups.width + found % plan.width).to(tl.int64)
    ok, at = row_ok & (t < groups.k), row[:, None] * groups.k + t
    x = tl.load(x_row + place * logits_strides.n, mask=ok, other=float("-inf")).to(plan.acc_dtype)
    tl.store(weights + at, weighed(x, ok, l, m, plan), mask=ok)
    tl.store(indices + at, place.to(tl.int32), mask=ok)


@triton.jit
def router_vjp_kernel(
    logits, indices, d_weights, d_logits, extents, chosen_extents, logits_strides, indices_strides, d_weights_strides,
    plan: tl.constexpr,
):  # fmt: skip
    row, n = own_rows(extents, plan)
    row_ok = (row < extents.height)[:, None]
    x_row = start_of(logits, row, extents, logits_strides, plan)
    inner = chosen_extents.inner
    i_row = row_start(indices, row, inner, indices_strides.outer, indices_strides.inner, plan.chosen_flat, 1)[:, None]
    g_row = row_start(d_weights, row, inner, d_weights_strides.outer, d_weights_strides.inner, plan.chosen_flat, 1)
    lane = tl.arange(0, plan.width)[None, :].to(tl.int64)
    ok = row_ok & (lane < n)
    x = tl.load(x_row + lane * logits_strides.n, mask=ok, other=float("-inf")).to(plan.acc_dtype)

    g = tl.full([plan.block_rows, plan.width], 0.0, plan.acc_dtype)
    chosen = tl.full([plan.block_rows, plan.width], 0, tl.int1)
    for t in range(chosen_extents.n):
        mine = lane == tl.load(i_row + t * indices_strides.n, mask=row_ok, other=-1)
        more = tl.load(g_row[:, None] + t * d_weights_strides.n, mask=row_ok, other=0.0).to(plan.acc_dtype)
        g, chosen = tl.where(mine, more, g), chosen | mine

    if plan.softmax:
        p, l, _ = exponentials(tl.where(chosen, x, float("-inf")) if plan.normalize else x)
        h = p / l
        d = h * (g - tl.sum(h * g, 1)[:, None])
    else:
        s, q = open_and_shut(x)
        if plan.normalize:
            h = tl.where(chosen, s, 0.0)
            h = h / (tl.sum(h, 1)[:, None] + LEAST_SUM)
            d = q * (h * (g - tl.sum(h * g, 1)[:, None]))
        else:
            d = s * q * g
    d = d * plan.scale
    if plan.normalize or not plan.softmax:
        d = tl.where(chosen, d, 0.0)
    tl.store(d_logits + row[:, None] * n + lane, d.to(d_logits.dtype.element_ty), mask=ok)


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "n": experts(call), "k": call.dims["k"]}


def experts(call: Call) -> int:
    """How many there are."""
    n: int = call.dims["groups"] * call.dims["width"]
    return n


def covered(call: Call) -> tuple[int, int]:
    """Powers of two that cover the groups and the experts of each; groups that are all kept are one."""
    if limited(call):
        return pow2_at_least(call.dims["groups"]), pow2_at_least(call.dims["width"], 2)
    return 1, pow2_at_least(experts(call), 2)


def kept(call: Call) -> int:
    return int(call.options["groups_kept"] or call.dims["groups"])


def limited(call: Call) -> bool:
    """Whether some groups are left out."""
    return not call.spec.is_vjp and kept(call) < call.dims["groups"]


def default_tiling(call: Call) -> WholeRowsConfig:
    """Not measured: a thread has 8 logits of a tile, and a program 4 warps, or as many more as a long row needs."""
    groups, width = covered(call)
    tile = 4 * lanes(call.target.arch) * 8
    return WholeRowsConfig(
        block_rows=max(tile // (groups * width), 1), num_warps=4 if groups * width <= 4 * tile else 16
    )


def supports(call: Call, config: WholeRowsConfig) -> str | None:
    groups, width = covered(call)
    whole = RowsConfig(block_rows=config.block_rows, block_n=groups * width, num_warps=config.num_warps)
    return refuse_tile(call, whole, height(call))


def height(call: Call) -> int:
    """The number of rows."""
    x: int = call.arrays["logits"].numel() // experts(call)
    return x


def plan_of(call: Call, rows: TensorRows, config: WholeRowsConfig, chosen_flat: bool = True) -> RouterPlan:
    groups, width = covered(call)
    wide = call.dtype == "float64"
    return RouterPlan(
        config.block_rows, groups, width, pow2_at_least(call.dims["k"]), **rows.known(call.dtype),
        chosen_flat=chosen_flat, acc_dtype=accumulator(call.dtype), bits=tl.int64 if wide else tl.int32,
        most=2 ** (63 if wide else 31) - 1, least=-(2 ** (63 if wide else 31)),
        softmax=call.options["scoring"] == "softmax", normalize=call.options["normalize"], limited=limited(call),
        scale=call.options["scale"],
    )  # fmt: skip


@BACKEND.implements("router", key=key, tiling=default_tiling, supports=supports, config=WholeRowsConfig)
def router(call: Call, config: WholeRowsConfig) -> tuple[Any, ...]:
    x, bias = call.arrays["logits"], call.arrays["bias"]
    weights, indices = (fresh(shape, torch_dtype(dtype), x.device) for shape, dtype in call.outputs.values())
    (x,), rows = walk_rows(x.ndim - 1, x)
    groups = (call.dims["groups"], call.dims["width"], kept(call)) if limited(call) else (1, experts(call), 1)
    step = 0 if bias is None else bias.stride(0)
    launch(router_kernel, cdiv(rows.height, config.block_rows), call, x, bias, weights, indices,
           RowExtents(rows.height, rows.inner, experts(call)), rows.strides[0], step,
           ExpertGroups(call.dims["k"], *groups), plan=plan_of(call, rows, config),
           num_warps=config.num_warps)  # fmt: skip
    return weights, indices


@BACKEND.implements("router_vjp", key=key, tiling=default_tiling, supports=supports, config=WholeRowsConfig)
def router_vjp(call: Call, config: WholeRowsConfig) -> tuple[Any, ...]:
    x = call.arrays["logits"]
    d_x, axis = fresh(x.shape, x.dtype, x.device), x.ndim - 1
    (x,), rows = walk_rows(axis, x)
    (indices, d_weights), few = walk_rows(axis, call.arrays["indices"], call.arrays["d_weights"])
    launch(router_vjp_kernel, cdiv(rows.height, config.block_rows), call, x, indices, d_weights, d_x,
           RowExtents(rows.height, rows.inner, experts(call)), RowExtents(few.height, few.inner, call.dims["k"]),
           rows.strides[0], *few.strides[:2], plan=plan_of(call, rows, config, few.flat),
           num_warps=config.num_warps)  # fmt: skip
    return (d_x,)
