"""Gradients of attention on Hopper in one pass over the scores, with d_q added up in memory: see ``_flash_unordered``.

Takes what ``attention_vjp`` of ``hopper/attention.py`` takes, at head dimensions up to 128: registers hold no wider
sums beside each other. A call that wants no d_q is that variant's, whose bits never change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton.experimental.gluon import language as gl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import FlashGradientsConfig, UnorderedGradientsConfig
from portakern.backends.triton.descriptors import describe
from portakern.backends.triton.launch import cdiv, launch, shared_limit, torch_dtype
from portakern.backends.triton.layout import fresh, pow2_at_least
from portakern.backends.triton.lib import attention as shared
from portakern.backends.triton.lib import attention_vjp_gluon as ordered
from portakern.backends.triton.lib.gluon import Softmax
from portakern.backends.triton.lib.gluon_gradients import LINE, GradientsPlan
from portakern.backends.triton.lib.tma import QUERIES, REGISTERS, movable, processors, tiled
from portakern.backends.triton.unordered._flash_unordered import (
    GROUPS,
    attention_vjp_unordered_kernel,
    attention_vjp_unordered_round_kernel,
)
from portakern.specs.attention import scale_of, sight

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call

KEYS = QUERIES * GROUPS.value  # of a program
WIDEST = 128  # head dimension
ADDED = "many programs add to it in memory, in the order in which they come"


def plan_of(call: Call, config: UnorderedGradientsConfig) -> GradientsPlan:
    """What the kernel is compiled for."""
    columns = pow2_at_least(max(call.dims["d"], call.dims["dv"]), 64)
    return GradientsPlan(True, GROUPS.value, config.block_q, columns, columns, config.num_stages,
                config.behind, True, True, REGISTERS[GROUPS.value][0],
                shared.flagged(call.dims["dv"]))  # fmt: skip


def shared_bytes(plan: GradientsPlan) -> int:
    """Shared memory that the kernel takes: of keys and queries, two buffers of D, and what of d_q is to leave."""
    return ordered.shared_bytes(plan) + 2 * 2 * KEYS * plan.block + 4 * GROUPS.value * 64 * 64


def without_d_q(call: Call, config: UnorderedGradientsConfig) -> tuple[Call, FlashGradientsConfig]:
    """The call for d_k and d_v alone, and what the ordered kernel is told of its tiles."""
    rest = call.replace(wants=tuple(n for n in call.wants if n != "d_q") or ("d_k", "d_v"))
    tiles = FlashGradientsConfig(block_q=config.block_q, block_kv=config.block_kv, num_stages=config.num_stages,
                                 consumers=GROUPS.value, ahead=0)  # fmt: skip
    return rest, ordered.fit(rest, tiles)


def fit(call: Call, config: UnorderedGradientsConfig) -> UnorderedGradientsConfig:
    """Queries that come by together are as many as give each group of warps half of a d_q of 64 x 128 elements."""
    block = 64 * WIDEST // plan_of(call, config).block_d
    return config if config.block_q == block else config.replace(block_q=block)


def supports(call: Call, config: UnorderedGradientsConfig) -> str | None:
    plan = plan_of(call, config)
    if plan.block_d > WIDEST:
        return (
            f"head dimensions {call.dims['d']} and {call.dims['dv']}: sums of more than {WIDEST} columns of d_k and "
            "d_v have no room beside each other; leave variant= out"
        )
    if plan.block * plan.block_d != 64 * WIDEST:
        return f"tiles of {plan.block} queries at {plan.block_d} columns; expected {64 * WIDEST // plan.block_d}"
    shared = shared_bytes(plan)
    if shared > shared_limit(call.target.arch):
        return (
            f"{plan.stages} stages of {plan.block} queries take {shared} bytes of shared memory; "
            f"{call.target.arch or 'sm_90'} has {shared_limit(call.target.arch)}"
        )
    return ordered.supports(*without_d_q(call, config))


def delegate(call: Call, config: UnorderedGradientsConfig) -> tuple[str, FlashGradientsConfig] | None:
    """Gradients without d_q have no sum that several programs add to: they are the ordered kernel's."""
    return None if "d_q" in call.wants else ("hopper", without_d_q(call, config)[1])


@BACKEND.implements("attention_vjp", key=shared.key, fit=fit, supports=supports, config=UnorderedGradientsConfig,
                    drawn=ordered.DRAWN, delegate=delegate, unordered={"d_q": ADDED})  # fmt: skip
def attention_vjp(call: Call, config: UnorderedGradientsConfig) -> tuple[Any, ...]:
    dims, plan = call.dims, plan_of(call, config)
    batch, q_len, kv_len, kv_heads, group = (dims[n] for n in ("batch", "q_len", "kv_len", "kv_heads", "group"))
    heads = kv_heads * group
    q, k, v, d_o, o = (movable(call.arrays[n]) for n in ("q", "k", "v", "d_o", "o"))
    out = {
        name: fresh(shape, torch_dtype(dtype), q.device) if name in call.wants else None
        for name, (shape, dtype) in call.outputs.items()
    }
    pitch = cdiv(q_len, LINE.value) * LINE.value
    sums = fresh((batch, heads, pitch, plan.block_d), torch_dtype("float32"), q.device)
    scale, (scores, rate) = scale_of(call), ordered.scores_of(call)
    lines, rest, delta = ordered.lines_of(call, o, d_o, rate, sums)
    shared.sink_gradient(call, delta, out["d_sinks"])
    left, right = sight(call)
    tiles = cdiv(kv_len, KEYS) * kv_heads * batch
    seen_by_all = (left, right) == (None, None)
    described = [tiled(x, rows, columns) for x, rows, columns in (
        (k, QUERIES, plan.block_d), (v, QUERIES, plan.block_dv), (q, plan.block, plan.block_d),
        (d_o, plan.block, plan.block_dv))]  # fmt: skip
    results = [None if (x := out[n]) is None else tiled(x, QUERIES, columns)
               for n, columns in (("d_k", plan.block_d), ("d_v", plan.block_dv))]  # fmt: skip
    launch(attention_vjp_unordered_kernel, min(tiles, processors(q.device)) if seen_by_all else tiles, call,
           *described, ordered.in_parts(lines, plan.block), rest,
           ordered.segments_of(call, "kv", "q"), by_halves(sums), *results, Softmax(scores, (right, left), scale),
           plan=plan, num_warps=4, maxnreg=REGISTERS[GROUPS.value][1])  # fmt: skip
    rows = 4096 // plan.block_d
    tiles_q = cdiv(q_len, rows)
    launch(attention_vjp_unordered_round_kernel, tiles_q * heads * batch, call, sums, out["d_q"], scale, tiles_q, heads,
           q_len, pitch, dims["d"], rows=rows, columns=plan.block_d, num_warps=4)  # fmt: skip
    return tuple(out.values())


def by_halves(sums: torch.Tensor) -> Any:
    """The sums of each head in tiles of what a group of warps adds."""
    flat = sums.reshape(-1, sums.shape[-2], 1, sums.shape[-1])
    return describe(flat, flat.shape, flat.stride(), (1, 64, 1, 64), gl.NVMMASharedLayout(128, 32, 4))
