"""Attention of packed sequences for Hopper's copy engine and asynchronous matrix unit, in 16 bits, and its gradients.

The kernels' loops are those of ``attention`` without splits (``_flash``). A tile lies in one sequence, of which the
copy engine is told, so that it neither reads nor writes a row of another one (``lib.gluon_sequences``). A kernel before
it writes down which tiles there are, sequences with most keys first (``lib.sequences``), and programs take them one by
one: with nothing to ask the device, and no length that the host knows.

Calls whose sequences have few queries in the mean are left to the portable kernel with the tiling of here
(``delegate``), which adds up the same numbers in the same order: a row's bits do not tell which it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import FewQueriesTilesConfig, FlashGradientsConfig, VarlenFlashConfig
from portakern.backends.triton.hopper._flash import SequenceArrays, varlen_attention_flash_kernel
from portakern.backends.triton.hopper._flash_gradients import (
    SequenceGradientArrays,
    varlen_attention_vjp_gradients_kernel,
    varlen_attention_vjp_pieces_kernel,
)
from portakern.backends.triton.launch import GLUON, launch, torch_dtype
from portakern.backends.triton.layout import fresh
from portakern.backends.triton.lib import attention as shared
from portakern.backends.triton.lib import attention_gluon as gluon
from portakern.backends.triton.lib import attention_vjp_gluon as gradients
from portakern.backends.triton.lib.gluon import Softmax
from portakern.backends.triton.lib.gluon_gradients import LINE
from portakern.backends.triton.lib.heads import Scores
from portakern.backends.triton.lib.sequences import CLAIMED, SORTED, mean_sequence, scheduled, too_many_tiles
from portakern.backends.triton.lib.tma import (
    IN_L2,
    QUERIES,
    REGISTERS,
    TOGETHER,
    in_pieces,
    movable,
    not_tried,
    processors,
    ragged,
)
from portakern.core.backend import Drawn
from portakern.specs.attention import scale_of
from portakern.specs.varlen_attention import as_attention

if TYPE_CHECKING:
    from portakern.core.call import Call

EVERYTHING = 1 << 30  # positions: heads take turns whatever their length, as in attention's gradients


def key(call: Call) -> dict[str, str | int]:
    return shared.key(as_attention(call))


def fit(call: Call, config: VarlenFlashConfig) -> VarlenFlashConfig:
    """Two consumers where tiles of three would have a sixteenth more rows, of which nobody asks for, if all sequences
    have as many queries; and what shared memory has room for. No bit of a row depends on the former."""
    two, three = (-(-mean_sequence(call).dims["q_len"] // (n * QUERIES)) * n for n in (2, 3))
    if config.consumers == 3 and 16 * three > 17 * two:
        config = config.replace(consumers=2)
    return gluon.fit(as_attention(call), config)


def supports(call: Call, config: VarlenFlashConfig) -> str | None:
    return not_tried(call) or too_many_tiles(call) or gluon.supports_tiles(as_attention(call), config)


def delegate(call: Call, config: VarlenFlashConfig) -> tuple[str, FewQueriesTilesConfig] | None:
    """Sequences of few queries, whose tiles would be half empty, and more sequences than are put in order."""
    mean = mean_sequence(call)
    rows, _ = shared.rows_plan(mean, config)
    if rows.packed or mean.dims["q_len"] <= QUERIES or call.dims["sequences"] > SORTED:
        return "gpu", gluon.portable(as_attention(call), config)
    return None


DRAWN = Drawn(("sinks", "alibi_slopes"), {"d": 8, "dv": 8}, {"tokens": 3 * QUERIES}, {"sequences": 2})


@BACKEND.implements("varlen_attention", key=key, fit=fit, supports=supports, config=VarlenFlashConfig,
                    delegate=delegate, drawn=DRAWN, compiled_alone=GLUON)  # fmt: skip
def varlen_attention(call: Call, config: VarlenFlashConfig) -> tuple[Any, ...]:
    dims, options, one = call.dims, call.options, as_attention(call)
    plan = gluon.plan_of(one, config)
    q, k, v = (movable(call.arrays[n]) for n in "qkv")
    o, lse, low = shared.results(call, q)
    window = shared.window_of(options["is_causal"], options["window"], dims["tokens"] + dims["kv_tokens"])
    cached = 0 if window[1] is None else IN_L2 // (2 * (dims["d"] + dims["dv"])) * dims["group"]
    tiles = scheduled(call, False, plan.consumers * QUERIES, window, cached, TOGETHER)
    programs = tiles.most * dims["kv_heads"] * dims["group"]
    if config.persistent:
        programs = min(programs, processors(q.device))
    claims = fresh((programs, CLAIMED.value), torch_dtype("int32"), q.device)
    columns, columns_dv = (plan.block_d, plan.more_d), (plan.block_dv, plan.more_dv)
    described = [in_pieces(x, rows, *of) for x, rows, of in (
        (q, QUERIES, columns), (k, plan.block_kv, columns), (v, plan.block_kv, columns_dv),
        (o, QUERIES, columns_dv))]  # fmt: skip
    launch(varlen_attention_flash_kernel, programs, call, *(piece for x in described for piece in x),
           SequenceArrays(lse, low, tiles.schedule, claims), Softmax(Scores.of(one), window), dims["tokens"],
           plan=plan, num_warps=4, maxnreg=REGISTERS[plan.consumers][1])  # fmt: skip
    return o, lse, low


# ------------------------------------------------------------------------------------------------------------- gradient
def with_a_batch(call: Call) -> Call:
    """The call of attention's gradients, a batch of one, as far as a number of each query is known before: lse, d_lse
    and lse_low have its axis."""
    one = as_attention(call)
    rows = {n: None if one.arrays[n] is None else one.arrays[n][None] for n in ("lse", "d_lse", "lse_low")}
    return one.replace(arrays={**one.arrays, **rows})


def fit_gradients(call: Call, config: FlashGradientsConfig) -> FlashGradientsConfig:
    return gradients.fit(as_attention(call), config)


def supports_gradients(call: Call, config: FlashGradientsConfig) -> str | None:
    if "d_sinks" in call.wants:
        return "the gradient of sinks is asked for: these kernels write none"
    return not_tried(call) or too_many_tiles(call) or gradients.supports(as_attention(call), config)


@BACKEND.implements("varlen_attention_vjp", key=key, fit=fit_gradients, supports=supports_gradients,
                    config=FlashGradientsConfig, drawn=Drawn(("sinks", "alibi_slopes"), {"d": 8, "dv": 8}),
                    compiled_alone=GLUON)  # fmt: skip
def varlen_attention_vjp(call: Call, config: FlashGradientsConfig) -> tuple[Any, ...]:
    dims, options, one = call.dims, call.options, with_a_batch(call)
    q, k, v, d_o, o = (movable(call.arrays[n]) for n in ("q", "k", "v", "d_o", "o"))
    out = {
        name: fresh(shape, torch_dtype(dtype), q.device) if name in call.wants else None
        for name, (shape, dtype) in call.outputs.items()
    }
    scores, rate = gradients.scores_of(one)
    lines, rest, _ = gradients.lines_of(one, o[None], d_o[None], rate, copies=LINE.value)
    left, right = shared.window_of(options["is_causal"], options["window"], dims["tokens"] + dims["kv_tokens"])
    heads = {True: dims["kv_heads"], False: dims["kv_heads"] * dims["group"]}
    for wants, plan in gradients.plans(one, config).items():
        first, second = (out.get(n) if n in wants else None for n in (("d_k", "d_v") if plan.by_key else ("d_q", "")))
        home, guests = ((k, v), (q, d_o)) if plan.by_key else ((q, d_o), (k, v))
        window = (right, left) if plan.by_key else (left, right)
        banded = window != (None, None)
        tiles = scheduled(call, plan.by_key, QUERIES * plan.consumers, window, EVERYTHING if banded else 0, TOGETHER)
        programs = tiles.most * heads[plan.by_key]
        programs = programs if banded else min(programs, processors(q.device))
        claims = fresh((programs, CLAIMED.value), torch_dtype("int32"), q.device)
        columns = (plan.block_d, plan.more_d), (plan.block_dv, plan.more_dv)
        described = [in_pieces(x, rows, *of) for arrays, rows in ((home, QUERIES), (guests, plan.block))
                     for x, of in zip(arrays, columns, strict=True)]  # fmt: skip
        numbers = gradients.in_parts(lines, plan.block) if plan.by_key else lines
        softmax = Softmax(scores, window, scale_of(one))
        compiled = {"plan": plan._replace(packed=True), "num_warps": 4, "maxnreg": REGISTERS[plan.consumers][1]}
        others = SequenceGradientArrays(rest.low, rest.flags, tiles.schedule, claims, None, None)
        if plan.more_d or plan.more_dv:
            launch(varlen_attention_vjp_pieces_kernel, programs, call, *(piece for x in described for piece in x),
                   numbers, others._replace(d_first=first, d_second=second), softmax, **compiled)  # fmt: skip
        else:
            sums = [None if x is None else ragged(x, QUERIES, of[0])
                    for x, of in zip((first, second), columns, strict=True)]  # fmt: skip
            launch(varlen_attention_vjp_gradients_kernel, programs, call, *(x for x, _ in described), numbers, others,
                   *sums, softmax, **compiled)  # fmt: skip
    return tuple(out.values())
