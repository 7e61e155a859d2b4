"""Scaled dot-product attention with grouped queries."""

from __future__ import annotations

from math import inf
from typing import Annotated, Literal, NamedTuple, TypeVar

from jaxtyping import Float, Float32, Int

from portakern.options import Range
from portakern.spec import Rule, Tile, spec

A = TypeVar("A")


class AttentionOut(NamedTuple):
    o: Float[A, "batch q_len kv_heads*group dv"]
    lse: Float32[A, "batch kv_heads*group q_len"]


@spec(
    tiling={"block_q": Tile(16, 1024), "block_kv": Tile(16, 1024)},
    returns={"lse": "return_lse"},
    or_float32=("bias",),
    positive=("kv_heads", "group", "d", "dv"),
    empty={"kv_len": {"o": 0.0, "lse": -inf}},
    require=[
        Rule(
            lambda call: (call.arrays["q_segment_ids"] is None) == (call.arrays["kv_segment_ids"] is None),
            "q_segment_ids and kv_segment_ids come together; pass both, or neither",
        )
    ],
    flops=lambda call: 2.0 * call.dims["batch"] * call.dims["kv_heads"] * call.dims["group"] * allowed_pairs(call) * (call.dims["d"] + call.dims["dv"]),
)
def attention(
    q: Float[A, "batch q_len kv_heads*group d"],
    k: Float[A, "batch kv_len kv_heads d"],
    v: Float[A, "batch kv_len kv_heads dv"],
    bias: Float[A, "#batch #kv_heads*group #q_len kv_len"] | None = None,
    q_segment_ids: Int[A, "batch q_len"] | None = None,
    kv_segment_ids: Int[A, "batch kv_len"] | None = None,
    *,
    is_causal: bool = False,
    window: Annotated[tuple[int | None, int | None], Range(0, typical=((3, 0), (None, 2), (5, 5), (0, 0)))] | None = None,
    scale: Annotated[float, Range(typical=(0.125, 1.0, 0.3))] | None = None,
    softcap: Annotated[float, Range(0.0, open=True, typical=(2.0, 30.0))] | None = None,
    precision: Literal["ieee", "tf32"] = "ieee",
    return_lse: bool = False,
) -> AttentionOut:
    """o = softmax(softcap(scale q k^T) + bias, masked) v, one row at a time and never storing the scores (Dao 2023, FlashAttention-2, algorithm 1).

    Args:
      q: (batch, q_len, kv_heads*group, d); k: (batch, kv_len, kv_heads, d); v: (batch, kv_len, kv_heads, dv). Query head h reads key head h // group.
      bias: added to the scaled scores; (batch, heads, q_len, kv_len), where the first three may be 1; q's dtype or float32. -inf masks the pair.
      q_segment_ids, kv_segment_ids: (batch, q_len), (batch, kv_len): a pair is allowed where they are equal. Both or neither.
      is_causal: query i sees keys up to i + kv_len - q_len (aligned at the bottom right: the last query sees every key).
      window: (left, right): query i sees keys from i + kv_len - q_len - left to i + kv_len - q_len + right; None on a side is unbounded.
      scale: None is 1/sqrt(d).
      softcap: c: scores become c tanh(s/c), before the bias.
      precision: for float32 operands, as in matmul.
      return_lse: also return the log-sum-exp.

    Returns:
      o: (batch, q_len, kv_heads*group, dv), q's dtype; with return_lse also lse: (batch, kv_heads*group, q_len), float32, natural log.
      A row that may see no key is zeros, its lse -inf.
    """
    raise NotImplementedError


def allowed_pairs(call) -> float:
    """Number of (query, key) pairs of one head that the causal mask and the window allow; segments and bias are data and do not count."""
    q_len, kv_len = call.dims["q_len"], call.dims["kv_len"]
    left, right = call.options["window"] or (None, None)
    if call.options["is_causal"]:
        right = 0 if right is None else min(right, 0)
    total = 0
    for i in range(kv_len - q_len, kv_len):
        lo = 0 if left is None else max(i - left, 0)
        hi = kv_len if right is None else min(i + right + 1, kv_len)
        total += max(hi - lo, 0)
    return float(total)


