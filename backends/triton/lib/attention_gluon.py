"""What variants of attention for Hopper's copy engine share: what their kernel is compiled for, which tilings fit a
call, and what they refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from portakern.backends.triton.configs import FewQueries, UnsplitConfig, VarlenFlashConfig
from portakern.backends.triton.launch import shared_limit
from portakern.backends.triton.layout import pow2_at_least
from portakern.backends.triton.lib import attention as shared
from portakern.backends.triton.lib import attention_vjp_gluon as gradients
from portakern.backends.triton.lib.split_kv import chunk_length
from portakern.backends.triton.lib.tma import BARRIERS, QUERIES, REGISTERS, in_room, pieces
from portakern.backends.triton.trace import AbstractArray
from portakern.core.backend import Drawn

if TYPE_CHECKING:
    from portakern.core.call import Call

FlashTilesConfig = UnsplitConfig | VarlenFlashConfig
TilesT = TypeVar("TilesT", UnsplitConfig, VarlenFlashConfig)

DRAWN = Drawn(("bias", "alibi_slopes", "out_dtype"), {"d": 8, "dv": 8}, {"q_len": QUERIES + 1})


class FlashPlan(NamedTuple):
    """What the kernel is compiled for.

    ``consumers`` groups of 64 queries; tiles of block_kv keys, of block_d and block_dv columns, and of more_d and
    more_dv columns in a second piece unless that is 0, ``stages`` of them on their way; whether keys come in chunks;
    whether o leaves by way of the memory of q; registers of a consumer's threads. Where there are few queries
    (``_shares``): heads of a group, the least power of two that holds it, and rows that are computed of. ``pingpong``:
    whether consumers take turns to issue products."""

    consumers: int
    block_kv: int
    block_d: int
    block_dv: int
    stages: int
    chunked: bool
    o_in_q: bool
    registers: int
    more_d: int = 0
    more_dv: int = 0
    heads: int = 1
    rows: int = 64
    pingpong: bool = True


def plan_of(call: Call, config: FlashTilesConfig) -> FlashPlan:
    """What the kernel is compiled for. In another library's program heads are padded: o in two pieces is described
    twice, and such a program tells a kernel once of an array that it fills."""
    (block_d, more_d), (block_dv, more_dv) = (
        (pow2_at_least(call.dims[n], 64), 0) if isinstance(call.arrays["q"], AbstractArray)
        else pieces(call.dims[n], "forward")
        for n in ("d", "dv")
    )  # fmt: skip
    chunked, consumers = chunk_length(call, config) is not None, config.consumers
    apart = FlashPlan(consumers, config.block_kv, block_d, block_dv, config.num_stages, chunked, o_in_q=False,
                 registers=REGISTERS[consumers][0], more_d=more_d, more_dv=more_dv,
                 pingpong=config.pingpong)  # fmt: skip
    fits_in_q = block_d == block_dv and more_dv in (0, more_d)
    return apart._replace(o_in_q=fits_in_q and shared_bytes(apart) > shared_limit(call.target.arch))


def shared_bytes(plan: FlashPlan) -> int:
    """Shared memory that the kernel takes."""
    rows, d, dv = plan.consumers * QUERIES, plan.block_d + plan.more_d, plan.block_dv + plan.more_dv
    held = rows * d + plan.stages * plan.block_kv * (d + dv)
    held += 0 if plan.o_in_q else rows * dv
    return 2 * held + BARRIERS


def fit(call: Call, config: TilesT) -> TilesT:
    """Fewer stages, then fewer keys at a time, where shared memory has no room; keys so few that the portable kernel
    has room for a stage of them too."""
    limit = shared_limit(call.target.arch)
    config = in_room(config, lambda found: shared_bytes(plan_of(call, found)), limit)
    while (
        config.block_kv > 16
        and max(shared_bytes(plan_of(call, config)), shared.shared_bytes(call, config.replace(num_stages=1))) > limit
    ):
        config = config.replace(block_kv=config.block_kv // 2)
    return config


def supports(call: Call, config: UnsplitConfig) -> str | None:
    few = shared_bytes(few_plan(call, plan_of(call, config))._replace(o_in_q=True))
    reason, limit = supports_tiles(call, config), shared_limit(call.target.arch)
    if reason is None and config.few_queries != FewQueries.PORTABLE and few > limit:
        return (
            f"few_queries = {config.few_queries}: 2 stages of {config.block_kv} keys take {few} bytes of shared memory "
            f"where queries are few; {call.target.arch or 'sm_90'} has {limit}"
        )
    return reason


def supports_tiles(call: Call, config: TilesT) -> str | None:
    """Why the kernel does not take a call in its tiles of many queries, or the portable kernel in those of few."""
    plan = plan_of(call, config)
    if reason := gradients.refused(call):
        return reason
    if call.arrays["sinks"] is not None:
        return "sinks are given: this kernel takes none"
    if plan.block_kv > 256:
        return f"block_kv = {plan.block_kv}: the matrix unit takes up to 256 keys at a time"
    return too_large(call, plan, shared_bytes(plan)) or shared.supports(call, portable(call, config))


def too_large(call: Call, plan: Any, taken: int) -> str | None:
    """Why tiles of keys do not fit a multiprocessor, of which ``taken`` bytes of shared memory are; a ``plan`` as
    ``FlashPlan`` is."""
    if plan.stages < 2:
        return f"num_stages = {plan.stages}: the next keys need a second buffer; use 2 or more"
    needed = plan.block_kv // 2 + plan.block_kv // 4 + (plan.block_dv + plan.more_dv) // 2
    if needed > plan.registers - 30:
        return (
            f"tiles of {plan.block_kv} keys at head dimension {call.dims['dv']} need some {needed} registers a thread "
            f"for scores and sums; {plan.consumers} consumers have {plan.registers}"
        )
    if taken > shared_limit(call.target.arch):
        return (
            f"{plan.stages} stages of {plan.block_kv} keys take {taken} bytes of shared memory; "
            f"{call.target.arch or 'sm_90'} has {shared_limit(call.target.arch)}"
        )
    return None


def portable(call: Call, config: TilesT) -> TilesT:
    """The tiling for the portable kernel: as many stages as it has room for. Its tiles of heads are powers of two."""
    return config.replace(num_stages=shared.fit(call, config).num_stages)


def key(call: Call) -> dict[str, str | int]:
    """As the portable kernel's, and whether it is ``packed``: documents end within tiles of keys, and of smaller tiles
    less lies outside of them."""
    return shared.key(call) | {"packed": int(call.arrays["q_segment_ids"] is not None)}


def few_plan(call: Call, plan: FlashPlan) -> FlashPlan:
    """A plan with tiles of one piece, for one group of rows that leaves shared memory to keys: memory is what bounds
    few queries."""
    block_d, block_dv = (pow2_at_least(call.dims[n], 64) for n in ("d", "dv"))
    return plan._replace(consumers=1, stages=2, o_in_q=False, block_d=block_d, block_dv=block_dv, more_d=0, more_dv=0)
