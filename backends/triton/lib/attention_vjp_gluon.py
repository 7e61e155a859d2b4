"""Which calls attention's gradients in Gluon take, in which tiles, and their scores' units."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton.experimental.gluon import language as gl

from portakern.backends.triton.configs import FlashGradientsConfig
from portakern.backends.triton.descriptors import describe
from portakern.backends.triton.launch import cdiv, shared_limit, torch_dtype
from portakern.backends.triton.layout import fresh
from portakern.backends.triton.lib import attention as shared
from portakern.backends.triton.lib.gluon import Segments
from portakern.backends.triton.lib.gluon_gradients import LINE, GradientsPlan, LseRest
from portakern.backends.triton.lib.heads import LOG2E, Scores
from portakern.backends.triton.lib.segments import segment_tables
from portakern.backends.triton.lib.tma import BARRIERS, QUERIES, REGISTERS, pieces
from portakern.core.backend import Drawn
from portakern.specs._exponents import LARGEST, two_parts
from portakern.specs.attention import far_from, over_cap, scale_of, score_unit

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call

APART = 128  # columns up to which registers hold two loops
NARROW, TOGETHER_NARROW, TOGETHER_WIDE = 32, 320, 256  # queries of a tile; columns of d_k and d_v beside each other
SPARE = 30  # registers of a consumer's thread for addresses and counters


def plans(call: Call, config: FlashGradientsConfig) -> dict[tuple[str, ...], GradientsPlan]:
    """What the kernel is compiled for, for each launch, by the gradients that it computes."""
    (block_d, more_d), (block_dv, more_dv) = (pieces(call.dims[n], "gradients") for n in ("d", "dv"))
    both, apart = block_d + more_d + block_dv + more_dv, max(block_d, block_dv) <= APART and not more_d + more_dv
    found: dict[tuple[str, ...], GradientsPlan] = {}
    keys = tuple(n for n in ("d_k", "d_v") if n in call.wants)
    if keys:
        of_keys = GradientsPlan(True, config.consumers, config.block_q, block_d, block_dv, config.num_stages,
                    config.ahead and len(keys) == 2, "d_k" in keys, "d_v" in keys,
                    REGISTERS[config.consumers][0], shared.flagged(call.dims["dv"]), more_d, more_dv,
                    apart)  # fmt: skip
        if both <= (TOGETHER_NARROW if config.block_q <= NARROW else TOGETHER_WIDE):
            found[keys] = of_keys
        else:  # registers do not hold the two sums beside each other
            found |= {(n,): of_keys._replace(ahead=False, want_first=n == "d_k", want_second=n == "d_v") for n in keys}
    if "d_q" in call.wants:
        found["d_q",] = GradientsPlan(False, config.dq_consumers, config.dq_block_kv, block_d, block_dv,
                             config.dq_num_stages, False, True, False,
                             REGISTERS[config.dq_consumers][0], shared.flagged(call.dims["dv"]), more_d,
                             more_dv, apart)  # fmt: skip
    return found


def shared_bytes(plan: GradientsPlan) -> int:
    """Shared memory that the kernel takes."""
    rows = plan.consumers * QUERIES + plan.stages * plan.block
    columns = plan.block_d + plan.more_d + plan.block_dv + plan.more_dv
    return rows * (2 * columns + 8 * plan.by_key) + BARRIERS


def registers_of(call: Call, plan: GradientsPlan) -> int:
    """Registers of a consumer's thread for sums, two tiles of numbers, what is rounded of them beside products, and
    the slopes of a softcap, of which a few are on their way to P."""
    sums = (plan.block_d + plan.more_d) * plan.want_first + (plan.block_dv + plan.more_dv) * plan.want_second
    slopes = plan.block // 4 * (call.options["softcap"] is not None)
    return sums // 2 + plan.block + plan.block // 2 * plan.ahead + slopes


def fit(call: Call, config: FlashGradientsConfig) -> FlashGradientsConfig:
    """Smaller tiles where terms of the scores take registers beside them."""
    smaller = {}
    for plan in plans(call, config).values():
        while registers_of(call, plan) > plan.registers - SPARE and plan.block > 32:
            plan = plan._replace(block=plan.block // 2)
        smaller["block_q" if plan.by_key else "dq_block_kv"] = plan.block
    return config.replace(**smaller)


def refused(call: Call) -> str | None:
    """Why attention in Gluon does not take a call, forward or backward, whatever its tiles."""
    dims = call.dims
    if call.dtype not in ("float16", "bfloat16"):
        return f"dtype {call.dtype}: this kernel takes float16 and bfloat16"
    if call.arrays["bias"] is not None:
        return "bias is given: this kernel takes none"
    if call.arrays["alibi_slopes"] is not None:
        return "alibi_slopes are given: this kernel takes none"
    if {dtype for name, (_, dtype) in call.outputs.items() if name in ("o", "d_q", "d_k", "d_v")} != {call.dtype}:
        return "results of float32 are asked for: this kernel writes them in the inputs' dtype"
    if call.spec.is_vjp and {call.dtype_of(name) for name in ("o", "d_o")} != {call.dtype}:
        return "o or d_o is float32: this kernel takes them in the inputs' dtype"
    if dims["d"] % 8 or dims["dv"] % 8 or max(dims["d"], dims["dv"]) > 256:
        return f"head dimensions {dims['d']} and {dims['dv']}: this kernel takes multiples of 8 up to 256"
    return None


def supports(call: Call, config: FlashGradientsConfig) -> str | None:
    dims = call.dims
    if reason := refused(call):
        return reason
    if score_unit(call)[1] > LARGEST:
        return f"scale = {scale_of(call):g}: its product with log2(e) overflows float32 in this kernel"
    for plan in plans(call, config).values():
        if plan.block not in (32, 64, 128):
            return f"tiles of {plan.block} rows: this kernel takes 32, 64 or 128"
        if plan.ahead and plan.stages < 2:
            return f"ahead = 1 with num_stages = {plan.stages}: the next tile needs a second buffer; use 2 or more"
        if registers_of(call, plan) > plan.registers - SPARE:
            return (
                f"tiles of {plan.block} rows at head dimensions {dims['d']} and {dims['dv']} need some "
                f"{registers_of(call, plan)} registers a thread for sums and scores; {plan.consumers} consumers have "
                f"{plan.registers}"
            )
        if shared_bytes(plan) > shared_limit(call.target.arch):
            return (
                f"{plan.stages} stages of {plan.block} rows take {shared_bytes(plan)} bytes of shared memory; "
                f"{call.target.arch or 'sm_90'} has {shared_limit(call.target.arch)}"
            )
    if dims["q_len"] + dims["kv_len"] > 1 << 30:
        return "more than 2^30 queries and keys: positions are 32-bit here"
    return None


def scores_of(call: Call) -> tuple[Scores, tuple[float, float]]:
    """From dot products to weights: a score in its unit, of either sign, times ``rate`` is the exponent, as in the
    forward pass. And by how much, in two parts, lse is multiplied to be in units of the exponent, by the very rate that
    float32 holds."""
    scale, softcap = scale_of(call), call.options["softcap"]
    pre, unit = (None, scale) if softcap is None else (over_cap(scale, softcap), softcap)
    rate, _ = two_parts(unit * LOG2E)
    return Scores(pre, softcap, rate), two_parts(rate / unit if unit else LOG2E)


DRAWN = Drawn(("bias", "alibi_slopes", "gradient_dtype"), {"d": 8, "dv": 8}, narrow=("o", "d_o"))


def segments_of(call: Call, own: str, other: str) -> Segments | None:
    """What kernels are told of the segments of the side that they own, "q" or "kv", among the other's."""
    mine, theirs = (call.arrays[f"{side}_segment_ids"] for side in (own, other))
    if mine is None:
        return None
    return Segments(*segment_tables(call, mine, theirs))


def segments_of_both(call: Call, by_key: set[bool]) -> dict[bool, Segments | None]:
    """What kernels that own queries (False) and keys (True) are told of segments. Where both are launched ids are told
    apart by where they come first among the keys, which is found once."""
    of_queries, of_keys = (call.arrays[f"{side}_segment_ids"] for side in ("q", "kv"))
    if len(by_key) < 2 or of_queries is None:
        return {keys: segments_of(call, *(("kv", "q") if keys else ("q", "kv"))) for keys in by_key}
    queries = segment_tables(call, of_queries, of_keys)
    keys = segment_tables(call, of_keys, of_queries, firsts=False)
    found = Segments(keys.ranges, keys.summaries, own_firsts=queries.firsts, firsts=queries.own_firsts)
    return {False: Segments(*queries), True: found}


def lines_of(
    call: Call, o: torch.Tensor, d_o: torch.Tensor, rate: tuple[float, float], sums: torch.Tensor | None = None,
    copies: int = 1,
) -> tuple[torch.Tensor, LseRest, torch.Tensor]:  # fmt: skip
    """(lines, rest) of ``Sides``, and delta: shift and delta are one array, in lines that the copy engine takes.
    copies: ``LINE`` where parts of lines begin anywhere."""
    batch, q_len, heads, _ = o.shape
    pitch = cdiv(q_len, LINE.value) * LINE.value
    both = fresh((2, copies * batch, heads, pitch), torch_dtype("float32"), o.device)
    _, low, flags, delta = shared.statistics(call, o, d_o, rate, LINE.value, far_from(call), sums, tuple(both), copies)
    assert flags is not None
    return both, LseRest(low, flags), delta


def in_parts(lines: torch.Tensor, length: int) -> Any:
    """Numbers of queries in parts of lines."""
    flat = lines.reshape(-1, lines.shape[-1])
    return describe(flat, flat.shape, flat.stride(), (1, length), gl.NVMMASharedLayout(0, 32, 2))
