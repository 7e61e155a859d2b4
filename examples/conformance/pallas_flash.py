"""jax.experimental.pallas.ops.tpu.flash_attention, the TPU kernel that JAX ships, held to the attention spec.

It runs in Pallas's TPU interpreter on a CPU.

python examples/conformance/pallas_flash.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, SegmentIds, flash_attention

from portakern.examples.conformance.findings import Finding, finite, overflows, show


def flash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> jax.Array:
    """The spec's (batch, sequence, heads, d) to the kernel's (batch, heads, sequence, d) and back.

    It wants key lengths that are multiples of 128, v as wide as k, as many key heads as query heads, and its causal
    mask is aligned at the top left. So both sequences get padding in front, up to one multiple of 128, where the two
    alignments agree; segment ids hide the padding. It scales after the bias: the bias goes in divided by the scale.
    """
    (batch, q_len, heads, d), (kv_len, dv) = q.shape, (k.shape[1], v.shape[3])
    scale = d**-0.5 if scale is None else scale
    length, width = -(-max(q_len, kv_len) // 128) * 128, max(d, dv)

    def ready(x: jax.Array) -> jax.Array:
        x = jnp.repeat(x, heads // x.shape[2], axis=2).transpose(0, 2, 1, 3)
        return jnp.pad(x, ((0, 0), (0, 0), (length - x.shape[2], 0), (0, width - x.shape[3])))

    if bias is not None:
        bias = jnp.broadcast_to(bias, (batch, heads, q_len, kv_len)).astype(jnp.float32) / scale
        bias = jnp.pad(bias, ((0, 0), (0, 0), (length - q_len, 0), (length - kv_len, 0)))
    ids = jnp.ones((batch, length), jnp.int32)
    with pltpu.force_tpu_interpret_mode():
        o = flash_attention(
            ready(q),
            ready(k),
            ready(v),
            bias,
            SegmentIds(ids, ids.at[:, : length - kv_len].set(0)),
            causal=is_causal,
            sm_scale=scale,
        )
    return o[:, :, length - q_len :, :dv].transpose(0, 2, 1, 3)


def one_block_of_queries(q: jax.Array, k: jax.Array, v: jax.Array, *, is_causal: bool = True) -> jax.Array:
    """Causal self-attention with all queries in one block.

    The keys get their padding behind, where the causal mask itself hides it.
    """
    (_, length, _, d), padding = q.shape, -k.shape[1] % 128
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0))) for x in (k, v))
    blocks = BlockSizes(block_q=length, block_k_major=128, block_k=128, block_b=1)
    with pltpu.force_tpu_interpret_mode():
        return flash_attention(q, k, v, causal=is_causal, sm_scale=d**-0.5, block_sizes=blocks).transpose(0, 2, 1, 3)


FINDINGS = {
    "the diagonal in a block's corner": Finding(
        "a causal block of keys is skipped when only its lower left corner lies on the diagonal (below_or_on_diag "
        "compares with > where >= is meant): with 129 queries in one block, the last one never sees key 128",
        '{"dtype":"float32","shapes":{"q":[1,129,1,8],"k":[1,129,1,8],"v":[1,129,1,8]},"options":{"is_causal":true}}',
        fn=one_block_of_queries,
    ),
    "extents of 0": Finding("refused", where=lambda q, k, **_: 0 in (*q.shape, *k.shape)),
    "heads wider than 128": Finding(
        "refused unless a multiple of 128", where=lambda q, v, **_: max(q.shape[3], v.shape[3]) > 128
    ),
    "a row that sees no key": Finding(
        "hidden scores get one large negative number, so a row with nothing but those is a mean of v, over the blocks "
        "of keys that were not skipped",
        '{"dtype":"float32","shapes":{"q":[1,3,1,4],"k":[1,2,1,4],"v":[1,2,1,4]},"options":{"is_causal":true}}',
        lambda q, k, is_causal, **_: is_causal and q.shape[1] > k.shape[1],
    ),
    "NaN behind a mask": Finding(
        "that number is added to the scores and not selected, so NaN in a key that the mask hides reaches every row of "
        "its block",
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
}


if __name__ == "__main__":
    show(flash, FINDINGS, "jax", ("float32", "bfloat16"), 60)
