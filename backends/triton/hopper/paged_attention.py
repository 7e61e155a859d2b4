"""Attention over pages for Hopper's copy engine and asynchronous matrix unit, in 16 bits: see ``_pages``.

A kernel before it writes down the units of a call (``lib.paged_units``), programs take them one by one, and where each
chunk of keys has a unit, the portable variant's second kernel merges what they wrote. Few rows a sequence in the mean
have tiles of 32 of them and one group of warps that computes, others tiles of 128 and two.

Calls whose pages are no whole tiles, or parts of one, whose cache the copy engine cannot move, and those with scales
are left to the portable kernel with the tiling of here (``delegate``), which adds up the same numbers in the same
order: a row's bits do not tell which it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from triton.experimental.gluon import language as gl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import PagedFlashConfig
from portakern.backends.triton.descriptors import describe
from portakern.backends.triton.hopper._pages import paged_attention_pages_kernel
from portakern.backends.triton.launch import GLUON, cdiv, launch, shared_limit
from portakern.backends.triton.layout import contiguous_strides, pow2_at_least
from portakern.backends.triton.lib import paged_attention as shared
from portakern.backends.triton.lib.attention import Parts, key, window_of
from portakern.backends.triton.lib.attention_gluon import too_large
from portakern.backends.triton.lib.gluon import Softmax
from portakern.backends.triton.lib.heads import Scores
from portakern.backends.triton.lib.paged_attention import PagedStrides, as_attention, capacity
from portakern.backends.triton.lib.paged_units import scheduled
from portakern.backends.triton.lib.tma import (
    BARRIERS,
    QUERIES,
    REGISTERS,
    in_room,
    movable,
    not_tried,
    paged,
    pages_movable,
    processors,
)
from portakern.core.backend import Drawn

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call

FEW = 32  # rows of a tile where queries are few: each thread has one
MOST_STAGES = 6  # of keys on their way to one group of rows
LEAST_PAGE = 8  # slots: lines of shared memory are swizzled by eights
PRODUCER_REGISTERS = {1: 56, 2: 24}  # consumers -> registers of the thread that copies: what others leave


class PagesPlan(NamedTuple):
    """What the kernel is compiled for.

    ``consumers`` groups of ``rows`` rows, of so many ``heads`` a query, the least power of two that holds a group;
    tiles of block_kv keys, of block_d and block_dv columns, ``stages`` of them on their way; keys of a ``chunk``;
    whether each has a unit (``apart``), whether they are walked one after the other (``by_chunks``), and whether a walk
    meets their borders (``chunked``); slots of a page, and of a box that is copied; ``registers`` of a thread that
    computes, and of the producer's; whether consumers take turns (``pingpong``). Of ``_flash``: o leaves by pointers
    (``o_in_q``), and heads have one piece (``more_d``, ``more_dv``)."""

    consumers: int
    rows: int
    heads: int
    block_kv: int
    block_d: int
    block_dv: int
    stages: int
    chunk: int
    apart: bool
    by_chunks: bool
    chunked: bool
    page_size: int
    box: int
    registers: int
    producer_registers: int
    pingpong: bool
    o_in_q: bool = False
    more_d: int = 0
    more_dv: int = 0


def default_tiling(call: Call) -> dict[str, int]:
    """Tiles of keys as in ``attention``, and chunks as in the portable variant; not measured."""
    wide = max(pow2_at_least(call.dims[n], 64) for n in ("d", "dv"))
    block_kv, warps = (128, 4) if wide <= 128 else (64, 8)
    return {"block_q": 64, "block_kv": block_kv, "num_warps": warps, "num_stages": 3, "split_keys": 1024,
            "pingpong": 0}  # fmt: skip


def plan_of(call: Call, config: PagedFlashConfig) -> PagesPlan:
    dims, block_kv = call.dims, config.block_kv
    block_d, block_dv = (pow2_at_least(dims[n], 64) for n in ("d", "dv"))
    heads, chunk = pow2_at_least(dims["group"]), max(config.split_keys, block_kv)
    few = cdiv(dims["tokens"], max(1, dims["sequences"])) * heads <= FEW
    _, _, apart = shared.programs_of(call, config)
    page, consumers = dims["page_size"], 1 if few else 2
    return PagesPlan(consumers, FEW if few else QUERIES, heads, block_kv, block_d, block_dv,
                     config.num_stages, chunk, apart, few, not few and not apart, page, min(page, block_kv),
                     REGISTERS[2][0], PRODUCER_REGISTERS[consumers], config.pingpong)  # fmt: skip


def staged(plan: PagesPlan, limit: int) -> PagesPlan:
    """As many stages as there is room for where memory is what bounds few rows."""
    while plan.consumers == 1 and plan.stages < MOST_STAGES and shared_bytes(grown(plan)) <= limit:
        plan = grown(plan)
    return plan


def grown(plan: PagesPlan) -> PagesPlan:
    return plan._replace(stages=plan.stages + 1)


def shared_bytes(plan: PagesPlan) -> int:
    """Shared memory that the kernel takes, with two buffers for queries."""
    return 2 * (2 * QUERIES * plan.block_d + plan.stages * plan.block_kv * (plan.block_d + plan.block_dv)) + BARRIERS


def fit(call: Call, config: PagedFlashConfig) -> PagedFlashConfig:
    """Fewer stages, then fewer keys at a time, where shared memory has no room, so few that the portable kernel has
    room for a stage of them too."""
    limit = shared_limit(call.target.arch)
    config = in_room(config, lambda found: shared_bytes(plan_of(call, found)), limit)
    while config.block_kv > 16 and (
        shared_bytes(plan_of(call, config)) > limit or portable(call, config).block_kv < config.block_kv
    ):
        config = config.replace(block_kv=config.block_kv // 2)
    return config


def portable(call: Call, config: PagedFlashConfig) -> PagedFlashConfig:
    """The tiling for the portable kernel: as many stages as it has room for."""
    fitted = shared.fit(call, config)
    assert isinstance(fitted, PagedFlashConfig)
    return fitted


def supports(call: Call, config: PagedFlashConfig) -> str | None:
    dims, plan = call.dims, plan_of(call, config)
    narrow = [n for n in ("k_pages", "v_pages") if call.dtype_of(n) != call.dtype]
    if reason := not_tried(call):
        return reason
    if call.arrays["alibi_slopes"] is not None:
        return "alibi_slopes are given: this kernel takes none"
    if call.dtype not in ("float16", "bfloat16"):
        return f"dtype {call.dtype}: this kernel takes float16 and bfloat16"
    if narrow:
        return f"{narrow[0]} is {call.dtype_of(narrow[0])}: this kernel takes pages of q's dtype, {call.dtype}"
    if dims["d"] % 8 or dims["dv"] % 8 or max(dims["d"], dims["dv"]) > 256:
        return f"head dimensions {dims['d']} and {dims['dv']}: this kernel takes multiples of 8 up to 256"
    if plan.block_kv > 256 or plan.chunk % plan.block_kv:
        return f"block_kv = {plan.block_kv}: expected up to 256 keys, which divide split_keys = {plan.chunk}"
    return too_large(call, plan, shared_bytes(plan)) or shared.supports(call, portable(call, config))


def delegate(call: Call, config: PagedFlashConfig) -> tuple[str, PagedFlashConfig] | None:
    """What the copy engine or these kernels do not take: see above. A sink is a merger's, or the portable kernel's."""
    arrays, plan = call.arrays, plan_of(call, config)
    whole = plan.page_size & (plan.page_size - 1) == 0 and plan.page_size >= LEAST_PAGE
    scaled = any(arrays[n] is not None for n in ("k_scale", "v_scale"))
    alone = arrays["sinks"] is not None and not plan.apart
    moves = all(pages_movable(arrays[n]) for n in ("k_pages", "v_pages"))
    if scaled or alone or not whole or plan.heads > QUERIES or not moves:
        return "gpu", portable(call, config)
    return None


DRAWN = Drawn(("k_scale", "v_scale", "alibi_slopes"), {"d": 8, "dv": 8})


@BACKEND.implements("paged_attention", tiling=default_tiling, key=key, fit=fit, supports=supports,
                    config=PagedFlashConfig, delegate=delegate, drawn=DRAWN, compiled_alone=GLUON)  # fmt: skip
def paged_attention(call: Call, config: PagedFlashConfig) -> tuple[Any, ...]:
    arrays, options, dims = call.arrays, call.options, call.dims
    q, table = movable(arrays["q"]), arrays["page_table"]
    k, v = (x if x.data_ptr() % 16 == 0 else movable(x) for x in (arrays["k_pages"], arrays["v_pages"]))
    plan = staged(plan_of(call, config), shared_limit(call.target.arch))
    _, work, _ = shared.programs_of(call, config)
    out, parts = shared.results_of(call), shared.parts_of(call, work.chunks) if plan.apart else Parts(None, None)
    window = window_of(options["is_causal"], options["window"], dims["tokens"] + capacity(call))
    (of_k, k_step), (of_v, v_step) = (paged(x, plan.box) for x in (k, v))
    queries = plan.consumers * plan.rows // plan.heads
    units = scheduled(call, queries, plan.chunk, work.chunks, plan.apart, window, (k_step, v_step))
    programs = min(units.most * dims["kv_heads"], processors(q.device))
    written = (None, None) if plan.apart else (out.o, out.lse)
    launch(paged_attention_pages_kernel, programs, call, by_group(q, dims["group"], plan), of_k, of_v, table,
           units.schedule, *parts, *written, Softmax(Scores.of(as_attention(call)), window), plan=plan, num_warps=4,
           maxnreg=REGISTERS[2][1], launch_pdl=True)  # fmt: skip
    if plan.apart:
        strides = PagedStrides(q.stride(), k.stride(), v.stride(), table.stride(), arrays["kv_lens"].stride(0),
                               arrays["q_starts"].stride(0))  # fmt: skip
        shared.combine(call, parts, out, window, work, strides, follows=True)
    return out.o, out.lse


def by_group(q: torch.Tensor, group: int, plan: PagesPlan) -> Any:
    """(tokens, heads, d) in tiles of all rows of a group's heads: (1, groups, tokens, group, d)."""
    tokens, heads, d = q.shape
    of_token, of_head, _ = q.stride()
    shape = 1, heads // group, tokens, group, d
    made = contiguous_strides(shape)
    strides = [
        s if extent > 1 else of_a_copy
        for s, extent, of_a_copy in zip((0, group * of_head, of_token, of_head, 1), shape, made, strict=True)
    ]
    block = 1, 1, QUERIES // plan.heads, plan.heads, plan.block_d
    return describe(q, shape, strides, block, gl.NVMMASharedLayout(128, 16, 5))
