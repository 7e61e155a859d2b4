"""The TPU kernel that JAX ships, in Pallas's TPU interpreter on a CPU, held to the attention spec.

It is ``jax.experimental.pallas.ops.tpu.flash_attention``, the peer ``pallas_flash``.

python examples/conformance/pallas_flash.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

from portakern.examples.conformance.findings import Finding, finite, overflows, show

PEER = "pallas_flash"


def one_block_of_queries(q: jax.Array, k: jax.Array, v: jax.Array, *, is_causal: bool = True) -> jax.Array:
    """Causal self-attention with all queries in one block. The keys get their padding behind, where the mask "
    "hides it."""
    (_, length, _, d), padding = q.shape, -k.shape[1] % 128
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0))) for x in (k, v))
    blocks = BlockSizes(block_q=length, block_k_major=128, block_k=128, block_b=1)
    with pltpu.force_tpu_interpret_mode():
        return flash_attention(q, k, v, causal=is_causal, sm_scale=d**-0.5, block_sizes=blocks).transpose(0, 2, 1, 3)


FINDINGS = {
    "the diagonal in a block's corner": Finding(
        "a causal block of keys is skipped when only its lower left corner lies on the diagonal (below_or_on_diag "
        "compares with > where >= is meant): "
        "with 129 queries in one block, the last one never sees key 128",
        '{"dtype":"float32","shapes":{"q":[1,129,1,8],"k":[1,129,1,8],"v":[1,129,1,8]},"options":{"is_causal":true}}',
        fn=one_block_of_queries,
    ),
    "a row that sees no key": Finding(
        "hidden scores get one large negative number, so a row with nothing but those is a mean of v, over the "
        "blocks of keys that were not skipped",
        '{"dtype":"float32","shapes":{"q":[1,3,1,4],"k":[1,2,1,4],"v":[1,2,1,4]},"options":{"is_causal":true}}',
        lambda q, k, is_causal, **_: is_causal and q.shape[1] > k.shape[1],
    ),
    "NaN behind a mask": Finding(
        "that number is added to the scores and not selected, so NaN in a key that the mask hides reaches every "
        "row of its block",
        '{"dtype":"float32","shapes":{"q":[1,4,1,8],"k":[1,4,1,8],"v":[1,4,1,8]},"options":{"is_causal":true},'
        '"edge":"nan_in_the_last_key"}',
        lambda q, k, **_: not finite(q, k),
    ),
    "a row of -inf": Finding(
        "a row whose bias is all -inf is NaN, if no padding stands beside it",
        '{"dtype":"float32","shapes":{"q":[1,128,1,8],"k":[1,128,1,8],"v":[1,128,1,8],"bias":[1,1,128,128]},'
        '"masks":{"bias":"mask"}}',
        lambda bias, **_: bias is not None and bool(jnp.isneginf(bias).any()),
    ),
    "scores beyond float32": Finding(
        "no kernel promises anything there", where=lambda q, k, scale, **_: overflows(q, k, scale)
    ),
}  # fmt: skip


if __name__ == "__main__":
    show(PEER, FINDINGS, ("float32", "bfloat16"), 60)
