"""What attention and its gradients are: their signatures, their rules and their work."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

from jaxtyping import Float, Float32, Int

from portakern.spec import Origin, Rule, Tile, WeightedMean, When, no_narrower, spec
from portakern.spec.options import Float32Result, Range
from portakern.specs.attention.scores import allowed_pairs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from portakern.core.call import Call

A = TypeVar("A")


TILING = {"block_q": Tile(16, 1024, of="q_len"), "block_kv": Tile(16, 1024, of="kv_len")}
POSITIVE = ("kv_heads", "group", "d", "dv")
SEGMENTS_COME_TOGETHER = Rule(
    lambda call: (call.arrays["q_segment_ids"] is None) == (call.arrays["kv_segment_ids"] is None),
    "q_segment_ids and kv_segment_ids come together; pass both, or neither",
)

KEYS_BESIDE_A_SINK = Rule(
    lambda call: call.arrays["sinks"] is None or call.dims["kv_len"] > 0,
    "sinks are given and k has no keys (kv_len is 0): o would be 0 and lse the sinks; return these, or pass a key",
)

MOST_HEADS = 128
"""Key heads of the widest models; a kernel for more is nobody's, and a sequence is often longer."""
HEADS_BEHIND_THE_SEQUENCE = Rule(
    lambda call: call.dims["kv_heads"] <= MOST_HEADS or max(call.dims["q_len"], call.dims["kv_len"]) > MOST_HEADS,
    f"more than {MOST_HEADS} key heads and at most {MOST_HEADS} queries and keys look like PyTorch's layout (batch, "
    "heads, sequence, d); here q, k and v are (batch, sequence, heads, d): pass q.transpose(1, 2), or call "
    "portakern.torch.scaled_dot_product_attention",
)

KEYS_AND_QUERIES_PLACED = Rule(
    lambda call: call.options["kv_start"] is None or call.options["q_start"] is not None,
    "kv_start is given and q_start is not: the last query stands at the last key only of the whole sequence; pass "
    "q_start too (of all queries, the length of all keys less that of all queries)",
)

Start = Annotated[int, Range(-(2**53), 2**53, typical=(0, 5, 40, 100))]


def last_beside_last(dims: Mapping[str, Any]) -> int:
    """Where queries begin without q_start: the last one stands at the last key."""
    return dims["kv_len"] - dims["q_len"]


MASKED = When(lambda options: options["is_causal"] or options["window"] is not None, "with is_causal or window")
PLACED = ("alibi_slopes",)  # arrays by which a score hangs on where its query and its key stand

Window = Annotated[tuple[int | None, int | None], Range(0, typical=((3, 0), (None, 2), (5, 5), (0, 0)))]
Scale = Annotated[float, Range(typical=(0.125, 1.0, 0.3))]
Softcap = Annotated[float, Range(0.0, 1e30, open=True, typical=(2.0, 30.0))]


class AttentionOut(NamedTuple):
    o: Float[A, "batch q_len kv_heads*group dv"]
    lse: Float32[A, "batch kv_heads*group q_len"]


class AttentionSaved(NamedTuple):
    """What rounding took from lse: the log-sum-exp is lse + lse_low to twice the precision, and lse_low 0 where lse is
    not finite. At scores near 1e8 the spacing of float32 is 8, and exp(s - lse) off by a factor of up to e^4."""

    lse_low: Float32[A, "batch kv_heads*group q_len"]


def work(call: Call, depth: int) -> float:
    """Floating-point operations: at every pair that is seen, products and sums along ``depth`` elements of heads."""
    heads = call.dims["kv_heads"] * call.dims["group"]
    return 2.0 * call.dims["batch"] * heads * allowed_pairs(call) * depth


@spec(
    tiling=TILING,
    returns={"lse": "return_lse"},
    saved=AttentionSaved,
    result_dtype={"o": "out_dtype"},
    or_float32=("bias", "sinks"),
    masks=("bias",),
    positive=POSITIVE,
    empty={"kv_len": {"o": 0.0, "lse": -inf, "lse_low": 0.0}},
    require=[SEGMENTS_COME_TOGETHER, KEYS_BESIDE_A_SINK, KEYS_AND_QUERIES_PLACED, no_narrower("out_dtype", "q")],
    doubts=[HEADS_BEHIND_THE_SEQUENCE],
    apart=("batch", "kv_heads", "q_len"),
    merges={"kv_len": WeightedMean("o", by="lse", once=("sinks",))},
    starts={
        "q_len": Origin("q_start", MASKED, last_beside_last, beside=PLACED),
        "kv_len": Origin("kv_start", MASKED, beside=PLACED),
    },
    vjp="attention_vjp",
    autocast="lower",
    typical={
        "batch": 4,
        "kv_heads": 4,
        "group": 4,
        "q_len": 4096,
        "kv_len": 4096,
        "d": 128,
        "dv": 128,
        "is_causal": True,
    },
    flops=lambda call: work(call, call.dims["d"] + call.dims["dv"]),
)
def attention(
    q: Float[A, "batch q_len kv_heads*group d"],
    k: Float[A, "batch kv_len kv_heads d"],
    v: Float[A, "batch kv_len kv_heads dv"],
    bias: Float[A, "#batch #kv_heads*group #q_len kv_len"] | None = None,
    q_segment_ids: Int[A, "batch q_len"] | None = None,
    kv_segment_ids: Int[A, "batch kv_len"] | None = None,
    sinks: Float[A, "kv_heads*group"] | None = None,
    alibi_slopes: Float32[A, "kv_heads*group"] | None = None,
    *,
    is_causal: bool = False,
    window: Window | None = None,
    scale: Scale | None = None,
    softcap: Softcap | None = None,
    precision: Literal["ieee", "tf32"] = "ieee",
    return_lse: bool = False,
    q_start: Start | None = None,
    kv_start: Start | None = None,
    out_dtype: Float32Result | None = None,
) -> AttentionOut:
    """o = softmax(softcap(scale q k^T) - slope |distance| + bias, masked) v, one row at a time and never storing the
    scores.

    The algorithm is FlashAttention-2's forward pass (Dao 2023, algorithm 1). A sink is a learned score of each query
    head (Agarwal et al. 2025, gpt-oss, section 2): the softmax's denominator of each row has exp(sink) besides, so that
    a row may give its keys a weight of less than 1 in all. It is one more key, whose score is the sink, neither scaled
    nor capped, and whose value is 0; every row sees it, whatever masks say.

    Args:
      q: (batch, q_len, kv_heads*group, d). Query head h reads key head h // group.
      k: (batch, kv_len, kv_heads, d); v: (batch, kv_len, kv_heads, dv).
      bias: added to the scaled scores; (batch, heads, q_len, kv_len), where the first three may be 1; q's dtype or
        float32. -inf masks the pair.
      q_segment_ids, kv_segment_ids: (batch, q_len), (batch, kv_len): a pair is allowed where they are equal. Both or
        neither.
      sinks: (kv_heads*group,): a logit of each query head; q's dtype or float32. -inf is none, to the bit. inf and NaN
        make all rows of their head NaN, o and lse, as a score of inf does.
      alibi_slopes: (kv_heads*group,), float32: of each query head, attention with linear biases (Press, Smith and Lewis
        2022). The score of query i and key j, softcapped, is less by slope |i + kv_len - q_len - j| before bias is
        added: distances count from the last query at the last key, as the masks do, and on either side. A slope of 0
        changes no bit. An infinite slope times a distance of 0 is NaN. No array has the products, and nothing is their
        gradient: what asks for that of the slopes is refused.
      is_causal: query i sees keys up to i + kv_len - q_len (aligned at the bottom right: the last query sees every
        key).
      window: (left, right): query i sees keys from i + kv_len - q_len - left to i + kv_len - q_len + right; None on a
        side is unbounded.
      q_start, kv_start: where the first query and the first key stand in a whole of which these are parts: query i at
        q_start + i, key j at kv_start + j. The causal mask, the window and slopes then compare these places, which is
        i + q_start - kv_start for i + kv_len - q_len above. kv_start None is 0, and q_start None the bottom-right
        alignment; kv_start alone is refused. Without a causal mask, a window and slopes they change nothing.
      out_dtype: dtype of o: "float32", as parts want it that are merged and rounded once; None: q's.
      scale: None is 1/sqrt(d).
      softcap: c: scores become c tanh(s/c), before the bias.
      precision: for float32 operands, as in matmul, but that "ieee" may err by 8 units of roundoff in a product, as
        three products of 10 bits do; so either has tf32's range.
      return_lse: also return the log-sum-exp.

    Returns:
      o: (batch, q_len, kv_heads*group, dv), q's dtype or out_dtype; with return_lse also lse: (batch, kv_heads*group,
      q_len), float32, natural log, of the softmax's denominator, a sink included. A row that may see no key is zeros,
      its lse the sink, or -inf without one.
    """
    raise NotImplementedError


SMALL = {"batch": 2, "q_len": 3, "kv_heads": 2, "group": 2, "d": 4, "kv_len": 5, "dv": 3}
attention.sample("grouped", dims=SMALL)
attention.sample(
    "every_mask",
    dims=SMALL,
    options={"is_causal": True, "window": (2, None), "return_lse": True},
    given=("bias", "q_segment_ids", "kv_segment_ids"),
    stretched={"bias": ("batch", "q_len")},
)
attention.sample("softcap_and_scale", dims=SMALL, options={"softcap": 2.0, "scale": 0.4})
attention.sample("wider_bias", dims=SMALL, given=("bias",), wider=("bias",))
attention.sample("float32_result", dims=SMALL, options={"out_dtype": "float32", "return_lse": True})
attention.sample("starts", dims=SMALL, options={"is_causal": True, "q_start": 4, "kv_start": 2})
attention.sample("sinks", dims=SMALL, options={"softcap": 2.0, "return_lse": True}, given=("sinks",), wider=("sinks",))
attention.sample("slopes", dims=SMALL, options={"is_causal": True, "return_lse": True}, given=("alibi_slopes",))


# ---------------------------------------------------------------------------------------------------------- gradient
class AttentionGradients(NamedTuple):
    d_q: Float[A, "batch q_len kv_heads*group d"]
    d_k: Float[A, "batch kv_len kv_heads d"]
    d_v: Float[A, "batch kv_len kv_heads dv"]
    d_bias: Float[A, "#batch #kv_heads*group #q_len kv_len"]
    d_sinks: Float[A, "kv_heads*group"]


def _flops(call: Call) -> float:
    """Scores and dP again, and a product for each gradient. d_sinks wants neither."""
    d, dv = call.dims["d"], call.dims["dv"]
    each = {"d_q": d, "d_k": d, "d_v": dv}
    of_pairs = [name for name in call.wants if name != "d_sinks"]
    return work(call, d + dv + sum(each.get(name, 0) for name in of_pairs)) if of_pairs else 1.0


def _independent(options: Mapping[str, Any], wants: Sequence[str]) -> tuple[str, ...]:
    """d_bias may be summed over batch entries and heads, d_sinks is summed over batch entries."""
    if "d_bias" in wants:
        return ()
    return ("kv_heads",) if "d_sinks" in wants else ("batch", "kv_heads")


@spec(
    tiling=TILING,
    or_float32=("o", "d_o", "bias", "sinks"),
    gradient_dtype=("d_q", "d_k", "d_v", "d_bias", "d_sinks"),
    masks=("bias",),
    apart=_independent,
    positive=POSITIVE,
    require=[SEGMENTS_COME_TOGETHER, KEYS_BESIDE_A_SINK, KEYS_AND_QUERIES_PLACED],
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
    sinks: Float[A, "kv_heads*group"] | None = None,
    alibi_slopes: Float32[A, "kv_heads*group"] | None = None,
    *,
    is_causal: bool = False,
    window: Window | None = None,
    scale: Scale | None = None,
    softcap: Softcap | None = None,
    precision: Literal["ieee", "tf32"] = "ieee",
    q_start: Start | None = None,
    kv_start: Start | None = None,
) -> AttentionGradients:
    """Gradients of attention from its own results, the scores recomputed and never stored.

    The algorithm is FlashAttention-2's backward pass (Dao 2023, algorithm 2). At each pair of a query and a key, with c
    the softcap, and a the slope of the head times the distance, or 0 without alibi_slopes:

        t = tanh(scale q k^T / c), s = c t - a + bias;  without a softcap s = scale q k^T - a + bias
        P = exp(min(s - lse - lse_low, 0)),  Delta = rowsum(d_o * o) - d_lse,  dS = P (d_o v^T - Delta)
        D = dS (1 - t^2);  without a softcap D = dS

    and from these

        d_q = scale D k
        d_k = scale D^T q and d_v = P^T d_o, summed over the query heads of a key head
        d_bias = dS, summed over the axes that bias broadcasts
        d_sinks = -exp(min(sink - lse - lse_low, 0)) Delta, summed over batch entries and queries

    The other gradients know of sinks by lse alone. At pairs that causal, window or segments mask, P and dS are 0,
    whatever lse, d_o, v and the rest hold there: select after the arithmetic. A row with lse = -inf saw no key and
    has no sink: its P is 0. Where bias = -inf, P is 0 as exp gives it. o, lse and lse_low are taken as they are,
    rounded. No P exceeds 1, however far rounding moves a score above lse: where scores are large that is by whole
    numbers. Nothing is promised of a pair whose score is above lse by more than that: it is the lse of other scores.
    NaN and inf reach what they meet at allowed pairs. 0 in P or D times a q, k or d_o that is NaN or inf, inside a
    tile, may be NaN; beyond an extent never.

    Args:
      q, k, v, bias, q_segment_ids, kv_segment_ids, sinks, alibi_slopes, is_causal, window, scale, softcap, precision,
        q_start, kv_start: as in attention. Rows with lse = -inf add nothing to d_sinks. Slopes have no gradient. Of a
        part of the keys o, lse and lse_low are those of the whole: d_q is then the part's share of a sum, d_k and d_v
        are the whole's rows.
      o, lse, lse_low: what attention returned; lse_low None is 0.
      d_o, d_lse: cotangents of o and lse (float32); d_lse None is 0. o and d_o have q's dtype or float32, each its own.
        d_o of float32 beside 16-bit inputs may be rounded to their dtype for products, and is not for Delta.

    Returns:
      d_q, d_k, d_v, d_bias, d_sinks: the shapes and dtypes of q, k, v, bias and sinks. A row that saw no key has no
      gradient and leaves none but d_sinks. For 16-bit inputs P and D are rounded to nearest
      before their products, as P is in attention.
    """
    raise NotImplementedError
