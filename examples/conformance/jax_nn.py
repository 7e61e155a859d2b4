"""jax.nn.dot_product_attention on a CPU, held to the attention spec.

python examples/conformance/jax_nn.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from portakern.examples.conformance.findings import Finding, finite, overflows, show


@jax.jit(static_argnames=("is_causal", "scale"))
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> jax.Array:
    """The same layout as the spec's.

    jax.nn wants v as wide as k: the narrower gets columns of zeros. Its causal mask is aligned at the top left, ours at
    the bottom right: it goes in as a mask.
    """
    (d, dv), (q_len, kv_len) = (q.shape[3], v.shape[3]), (q.shape[1], k.shape[1])
    q, k, v = (jnp.pad(x, ((0, 0),) * 3 + ((0, max(d, dv) - x.shape[3]),)) for x in (q, k, v))
    mask = jnp.tril(jnp.ones((1, 1, q_len, kv_len), bool), kv_len - q_len) if is_causal else None
    return jax.nn.dot_product_attention(q, k, v, bias, mask, scale=d**-0.5 if scale is None else scale)[..., :dv]


FINDINGS = {
    "float16 under jit": Finding(
        "a product that a CPU lacks is asked for inside try: eagerly the fallback answers, under jax.jit the error "
        "comes later, when the call is lowered",
        '{"dtype":"float16","shapes":{"q":[1,2,1,2],"k":[1,2,1,2],"v":[1,2,1,2]}}',
    ),
    "huge scores under jit": Finding(
        "at scores of 1e10 the row is NaN, eagerly it is right: as if the product were fused into the difference from "
        "the row maximum, which was rounded",
        '{"dtype":"float32","shapes":{"q":[1,1,1,1],"k":[1,2,1,1],"v":[1,2,1,1]},"regime":"very_negative"}',
        lambda q, k, scale, **_: overflows(q, k, scale, limit=2.0**26),
    ),
    "a row that sees no key": Finding(
        "declared, not a fault: masked scores are one large negative number, so a row with nothing but those is the "
        "mean of v",
        '{"dtype":"float32","shapes":{"q":[1,3,1,4],"k":[1,2,1,4],"v":[1,2,1,4]},"options":{"is_causal":true}}',
        lambda q, k, is_causal, **_: is_causal and q.shape[1] > k.shape[1],
    ),
    "a row of -inf": Finding(
        "a row whose bias or scores are all -inf is NaN, where a row that a boolean mask hides is not",
        '{"dtype":"float32","shapes":{"q":[1,1,1,1],"k":[1,1,1,1],"v":[1,1,1,1],"bias":[1,1,1,1]},'
        '"masks":{"bias":"mask"}}',
        lambda q, k, bias, **_: not finite(q, k) or (bias is not None and bool(jnp.isneginf(bias).any())),
    ),
}


if __name__ == "__main__":
    show(attention, FINDINGS, "jax", ("float32", "bfloat16"), 100)
