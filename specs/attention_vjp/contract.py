"""What attention's gradients are: their signature, their rules and their work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from jaxtyping import Float, Float32, Int

from portakern.spec import spec
from portakern.specs.attention.contract import POSITIVE, SEGMENTS_COME_TOGETHER, TILING, Scale, Softcap, Window, work

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class AttentionGradients(NamedTuple):
    d_q: Float[A, "batch q_len kv_heads*group d"]
    d_k: Float[A, "batch kv_len kv_heads d"]
    d_v: Float[A, "batch kv_len kv_heads dv"]
    d_bias: Float[A, "#batch #kv_heads*group #q_len kv_len"]


def _flops(call: Call) -> float:
    """Scores and dP again, and a product for each gradient."""
    d, dv = call.dims["d"], call.dims["dv"]
    each = {"d_q": d, "d_k": d, "d_v": dv}
    return work(call, d + dv + sum(each.get(name, 0) for name in call.wants))


@spec(
    tiling=TILING,
    or_float32=("bias",),
    masks=("bias",),
    apart=lambda options, wants: () if "d_bias" in wants else ("batch", "kv_heads"),
    positive=POSITIVE,
    require=[SEGMENTS_COME_TOGETHER],
    flops=_flops,
)
def attention_vjp(
    q: Float[A, "batch q_len kv_heads*group d"],
    k: Float[A, "batch kv_len kv_heads d"],
    v: Float[A, "batch kv_len kv_heads dv"],
    o: Float[A, "batch q_len kv_heads*group dv"],
    lse: Float32[A, "batch kv_heads*group q_len"],
    d_o: Float[A, "batch q_len kv_heads*group dv"],
    bias: Float[A, "#batch #kv_heads*group #q_len kv_len"] | None = None,
    q_segment_ids: Int[A, "batch q_len"] | None = None,
    kv_segment_ids: Int[A, "batch kv_len"] | None = None,
    d_lse: Float32[A, "batch kv_heads*group q_len"] | None = None,
    lse_low: Float32[A, "batch kv_heads*group q_len"] | None = None,
    *,
    is_causal: bool = False,
    window: Window | None = None,
    scale: Scale | None = None,
    softcap: Softcap | None = None,
    precision: Literal["ieee", "tf32"] = "ieee",
) -> AttentionGradients:
    """Gradients of attention from its own results, the scores recomputed and never stored.

    The algorithm is FlashAttention-2's backward pass (Dao 2023, algorithm 2). At each pair of a query and a key, with c
    the softcap:

        t = tanh(scale q k^T / c), s = c t + bias;  without a softcap s = scale q k^T + bias
        P = exp(min(s - lse - lse_low, 0)),  Delta = rowsum(d_o * o) - d_lse,  dS = P (d_o v^T - Delta)
        D = dS (1 - t^2);  without a softcap D = dS

    and from these

        d_q = scale D k
        d_k = scale D^T q and d_v = P^T d_o, summed over the query heads of a key head
        d_bias = dS, summed over the axes that bias broadcasts

    At pairs that causal, window or segments mask, P and dS are 0, whatever lse, d_o, v and the rest hold there: select
    after the arithmetic. A row with lse = -inf saw no key: its P is 0. Where bias = -inf, P is 0 as exp gives it. o,
    lse
    and lse_low are taken as they are, rounded. No P exceeds 1, however far rounding moves a score above lse: where
    scores are large that is by whole numbers. Nothing is promised of a pair whose score is above lse by more than that:
    it is the lse of other scores. NaN and inf reach what they meet at allowed pairs. 0 in P or D times a q,
    k or d_o that is NaN or inf, inside a tile, may be NaN; beyond an extent never.

    Args:
      q, k, v, bias, q_segment_ids, kv_segment_ids, is_causal, window, scale, softcap, precision: as in attention.
      o, lse, lse_low: what attention returned; lse_low None is 0.
      d_o, d_lse: cotangents of o (its dtype) and lse (float32); d_lse None is 0.

    Returns:
      d_q, d_k, d_v, d_bias: the shapes and dtypes of q, k, v and bias. A row that saw no key has no gradient and leaves
      none. For 16-bit inputs P and D are rounded to nearest before their products, as P is in attention.
    """
    raise NotImplementedError
