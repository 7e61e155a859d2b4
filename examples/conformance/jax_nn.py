"""jax.nn.dot_product_attention on a CPU, the peer ``jax``, held to the attention spec.

python examples/conformance/jax_nn.py
"""

from __future__ import annotations

import jax.numpy as jnp

from portakern.examples.conformance.findings import Finding, finite, overflows, show

PEER = "jax"

FINDINGS = {
    "float16 under jit": Finding(
        "a product that a CPU lacks is asked for inside try: eagerly the fallback answers, under jax.jit the "
        "error comes later, when the call is lowered",
        '{"dtype":"float16","shapes":{"q":[1,2,1,2],"k":[1,2,1,2],"v":[1,2,1,2]}}',
    ),
    "one number in bfloat16": Finding(
        "a product of one number with one number is no product of XLA's on a CPU any more, which refuses the precision "
        "that is asked for",
        '{"dtype":"bfloat16","shapes":{"q":[1,1,1,1],"k":[1,1,1,1],"v":[1,1,1,1]}}',
        lambda q, k, **_: q.dtype == jnp.bfloat16 and q.size == k.size == 1,
    ),
    "huge scores under jit": Finding(
        "at scores of 1e10 the row is NaN, eagerly it is right: as if the product were fused into the difference "
        "from the row maximum, which was rounded",
        '{"dtype":"float32","shapes":{"q":[1,1,1,1],"k":[1,2,1,1],"v":[1,2,1,1]},"regime":"very_negative"}',
        lambda q, k, scale, **_: overflows(q, k, scale, limit=2.0**26),
    ),
    "a row that sees no key": Finding(
        "declared, not a fault: masked scores are one large negative number, so a row with nothing but those is "
        "the mean of v",
        '{"dtype":"float32","shapes":{"q":[1,3,1,4],"k":[1,2,1,4],"v":[1,2,1,4]},"options":{"is_causal":true}}',
        lambda q, k, is_causal, **_: is_causal and q.shape[1] > k.shape[1],
    ),
    "a row of -inf": Finding(
        "a row whose bias or scores are all -inf is NaN, where a row that a boolean mask hides is not",
        '{"dtype":"float32","shapes":{"q":[1,1,1,1],"k":[1,1,1,1],"v":[1,1,1,1],"bias":[1,1,1,1]},'
        '"masks":{"bias":"mask"}}',
        lambda q, k, bias, **_: not finite(q, k) or (bias is not None and bool(jnp.isneginf(bias).any())),
    ),
}  # fmt: skip


if __name__ == "__main__":
    show(PEER, FINDINGS, ("float32", "bfloat16"), 100)
