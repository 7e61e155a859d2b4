"""torch.nn.functional.scaled_dot_product_attention on a CPU, the peer ``torch``, held to the attention spec.

python examples/conformance/torch_sdpa.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from portakern.examples.conformance.findings import Finding, finite, overflows, show

PEER = "torch"


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The function as it is: where there are no keys, portakern asks no peer for the zeros."""
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2).contiguous()


FINDINGS = {
    "no keys": Finding(
        "with kv_len = 0 the output is 0, but NaN where a sum over q overflows or q holds an infinity",
        '{"dtype":"float16","shapes":{"q":[1,1,1,2],"k":[1,0,1,2],"v":[1,0,1,1]},"regime":"large_mean"}',
        fn=plain,
    ),
    "NaN lost": Finding(
        "a row whose scores are all NaN comes out as 0 when there are few keys, and as NaN when there are many",
        '{"dtype":"float32","shapes":{"q":[1,1,3,1],"k":[1,2,3,1],"v":[1,2,3,1]},"regime":"special",'
        '"edge":"planted_nan_and_inf"}',
        lambda q, k, bias, is_causal, **_: not finite(q, k) and bias is None and not is_causal,
    ),
    "NaN behind a mask": Finding(
        "a mask is added to the scores as -inf, so NaN in a key that the mask hides reaches the row",
        '{"dtype":"float32","shapes":{"q":[1,3,1,8],"k":[1,4,1,8],"v":[1,4,1,8]},"options":{"is_causal":true},'
        '"edge":"nan_in_the_last_key"}',
        lambda q, k, **_: not finite(q, k),
    ),
    "a negative scale": Finding(
        "hidden scores are -inf before they are scaled, which a negative scale makes +inf",
        '{"dtype":"float32","shapes":{"q":[1,5,1,8],"k":[1,5,1,8],"v":[1,5,1,8]},'
        '"options":{"is_causal":true,"scale":-0.5}}',
        lambda is_causal, scale, bias, **_: scale is not None and scale < 0 and (is_causal or bias is not None),
    ),
    "scores beyond float32": Finding(
        "no kernel promises anything there", where=lambda q, k, scale, **_: overflows(q, k, scale)
    ),
}  # fmt: skip


if __name__ == "__main__":
    show(PEER, FINDINGS, ("float32", "float16", "bfloat16"), 300)
