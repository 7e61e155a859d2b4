"""torch.nn.functional.scaled_dot_product_attention on a CPU, held to the attention spec.

python examples/conformance/torch_sdpa.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from portakern.examples.conformance.findings import Finding, finite, overflows, show


def sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """The spec's (batch, sequence, heads, d) to torch's (batch, heads, sequence, d) and back.

    torch's causal mask is aligned at the top left, ours at the bottom right: it goes in as a mask.
    """
    q_len, kv_len = q.shape[1], k.shape[1]
    mask: torch.Tensor | None = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len) if is_causal else None
    if bias is not None:
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True).transpose(1, 2).contiguous()


FINDINGS = {
    "no keys": Finding(
        "with kv_len = 0 the output is 0, but NaN where a sum over q overflows or q holds an infinity",
        '{"dtype":"float16","shapes":{"q":[1,1,1,2],"k":[1,0,1,2],"v":[1,0,1,1]},"regime":"large_mean"}',
        lambda k, **_: k.shape[1] == 0,
    ),
    "NaN lost": Finding(
        "a row whose scores are all NaN comes out as 0 when there are few keys, and as NaN when there are many",
        '{"dtype":"float32","shapes":{"q":[1,1,3,1],"k":[1,2,3,1],"v":[1,2,3,1]},"regime":"special",'
        '"edge":"planted_nan_and_inf"}',
        lambda q, k, bias, is_causal, **_: not finite(q, k) and bias is None and not is_causal,
    ),
    "NaN behind a mask": Finding(
        "a mask is added to the scores as -inf, so NaN in a key that the mask hides reaches the row",
        '{"dtype":"float32","shapes":{"q":[1,4,1,8],"k":[1,4,1,8],"v":[1,4,1,8]},"options":{"is_causal":true},'
        '"edge":"nan_in_the_last_key"}',
        lambda q, k, **_: not finite(q, k),
    ),
    "scores beyond float32": Finding(
        "no kernel promises anything there", where=lambda q, k, scale, **_: overflows(q, k, scale)
    ),
    "a bias wider than q": Finding(
        "torch refuses it", where=lambda q, bias, **_: bias is not None and bias.dtype != q.dtype
    ),
}


if __name__ == "__main__":
    show(sdpa, FINDINGS, "torch", ("float32", "float16", "bfloat16"), 300)
