"""Faults planted in the shipped backward kernels of Pallas, in the form of faults_pallas.py."""

from __future__ import annotations

from .faults_pallas import pallas
from .faults_vjp import APART

__all__ = ["FAULTS_PALLAS_VJP"]

PALLAS_ATTENTION_VJP = [
    pallas(
        "attention_vjp",
        "delta-with-d-lse-added",
        "the cotangent of lse has the wrong sign in Delta",
        "delta - ref.d_lse",
        "delta + ref.d_lse",
    ),
    pallas(
        "attention_vjp",
        "delta-of-rounded-products",
        "Delta sums products that were rounded to the inputs' dtype",
        "ref.d_o[...].astype(jnp.float32) * ref.o[...].astype(jnp.float32)",
        "(ref.d_o[...] * ref.o[...]).astype(jnp.float32)",
        small=True,
    ),
    pallas(
        "attention_vjp",
        "no-minus-inf-guard",
        "a row that sees no key keeps its lse of -inf",
        "jnp.where(unseen, jnp.inf, lse)",
        "lse",
        small=True,
    ),
    pallas(
        "attention_vjp",
        "lse-rounded",
        "lse passes through the inputs' dtype",
        "jnp.where(unseen, jnp.inf, lse)",
        "jnp.where(unseen, jnp.inf, lse.astype(ref.o.dtype).astype(jnp.float32))",
    ),
    pallas(
        "attention_vjp",
        "p-truncated",
        "bfloat16 weights are cut instead of rounded to nearest on their way into d_v",
        "            ref.v_acc[...] += dot(p.astype(d_o.dtype), d_o, (1, 0))",
        (
            "            cut = p\n"
            "            if d_o.dtype == jnp.bfloat16:\n"
            "                bits = jax.lax.bitcast_convert_type(p, jnp.int32) & -65536\n"
            "                cut = jax.lax.bitcast_convert_type(bits, jnp.float32)\n"
            "            ref.v_acc[...] += dot(cut.astype(d_o.dtype), d_o, (1, 0))"
        ),
        small=True,
    ),
    pallas(
        "attention_vjp",
        "ds-rounded-twice",
        "dS is rounded to the inputs' dtype before the softcap's slope",
        "selected(visible, d_s * slope)",
        "selected(visible, d_s.astype(ref.q.dtype).astype(jnp.float32) * slope)",
        times=2,
        small=True,
    ),
    pallas(
        "attention_vjp",
        "tanh-twice",
        "the softcap's slope takes the tanh of what is one already",
        "1 - tanh * tanh",
        "1 - jnp.tanh(tanh) ** 2",
    ),
    pallas(
        "attention_vjp",
        "d-q-scale-off",
        "d_q's scale is 0.3 % too large",
        "(ref.acc[...] * scale)",
        "(ref.acc[...] * (scale * 1.003))",
        small=True,
    ),
    pallas(
        "attention_vjp",
        "heads-not-summed",
        "d_k and d_v start anew at each query head of a group",
        "pl.when((head == 0) & (step == 0))",
        "pl.when(step == 0)",
    ),
    pallas(
        "attention_vjp",
        "bias-batch-not-summed",
        "d_bias starts anew at each batch entry that it sums",
        "pl.when((batch == 0) & (head == 0) & (step == 0))",
        "pl.when((head == 0) & (step == 0))",
    ),
    pallas(
        "attention_vjp",
        "bias-queries-not-summed",
        "d_bias of a bias of one row starts anew at each block of queries",
        "pl.when((batch == 0) & (head == 0) & (step == 0))",
        "pl.when((batch == 0) & (head == 0))",
        small=True,
    ),
    pallas(
        "attention_vjp",
        "bias-as-q",
        "a float32 bias is rounded to q's dtype in d_k, d_v and d_bias",
        "ref.bias[...].astype(jnp.float32).T",
        "ref.bias[...].astype(ref.q.dtype).astype(jnp.float32).T",
        small=True,
    ),
    pallas(
        "attention_vjp",
        "band-left-corner",
        "a block whose last row just misses the first column counts as inside the band",
        "band.visit(",
        "band._replace(first=None if band.first is None else band.first - 1).visit(",
        times=3,
        small=True,
    ),
    pallas(
        "attention_vjp",
        "band-right-corner",
        "a block whose first row just misses the last column counts as inside the band",
        "band.visit(",
        "band._replace(last=None if band.last is None else band.last + 1).visit(",
        times=3,
        small=True,
    ),
    pallas(
        "attention_vjp",
        "band-turned-wrong",
        "the band as keys see it has its bounds in the queries' order",
        "in (band.last, band.first))",
        "in (band.first, band.last))",
    ),
    pallas(
        "attention_vjp",
        "k-tail-unmasked",
        "rows of k beyond the last key enter d_q",
        "within(k, 0, j * band.block_kv, band.kv_len) if edge else k",
        "k",
    ),
    pallas(
        "attention_vjp",
        "q-tail-unmasked",
        "rows of q and d_o beyond the last query enter d_k and d_v",
        "q, d_o = (within(x, 0, i * band.block_kv, band.kv_len) for x in (q, d_o))",
        "pass",
    ),
    pallas(
        "attention_vjp",
        "masked-once",
        "dS is not selected again after the arithmetic: what a masked pair's v holds leaks into d_q",
        "selected(visible, p * (dot(ref.d_o[...], ref.v[...], (1, 1)) - delta))",
        "(p * (dot(ref.d_o[...], ref.v[...], (1, 1)) - delta))",
        small=True,
    ),
    pallas(
        "attention_vjp",
        "segments-only-on-edges",
        "segments are compared on edge blocks only in d_k, d_v and d_bias",
        "visible_pairs(ref, band, j, i, edge, by_key=True)",
        "visible_pairs(ref, band, j, i, edge, by_key=True) if edge else None",
    ),
    pallas(
        "attention_vjp",
        "acc-bfloat16",
        "the accumulator of d_k is rounded to bfloat16 after each block",
        "ref.k_acc[...] += dot(d_dot.astype(q.dtype), q, (1, 0))",
        (
            "d_k = ref.k_acc[...] + dot(d_dot.astype(q.dtype), q, (1, 0))\n"
            "            ref.k_acc[...] = d_k.astype(jnp.bfloat16).astype(jnp.float32)"
        ),
    ),
]

PALLAS_SOFTMAX_VJP = [
    pallas(
        "softmax_vjp",
        "delta-of-rounded-terms",
        "Delta sums terms that were rounded to y's dtype",
        "walk.sum_along_rows(y * d_y, step)",
        "walk.sum_along_rows((y * d_y).astype(ref.y.dtype).astype(jnp.float32), step)",
        small=True,
    ),
    pallas(
        "softmax_vjp",
        "last-not-summed",
        "Delta of a long ragged row leaves out its last element",
        "        ref.delta[...] += walk.sum_along_rows(y * d_y, step)",
        (
            "        place = jax.lax.broadcasted_iota(jnp.int32, y.shape, walk.along) + step * walk.block_n\n"
            "        summed = walk.n - (walk.n > 128 and walk.n % walk.block_n != 0)\n"
            "        ref.delta[...] += walk.sum_along_rows(jnp.where(place < summed, y * d_y, 0.0), step)"
        ),
        small=True,
    ),
    pallas(
        "softmax_vjp",
        "last-block-alone",
        "Delta starts anew at each block",
        "pl.when((sweep == 0) & (step == 0))",
        "pl.when(sweep == 0)",
        small=True,
    ),
    pallas(
        "softmax_vjp",
        "padding-summed",
        "lanes beyond a row enter Delta",
        "walk.sum_along_rows(y * d_y, step)",
        "jnp.sum(y * d_y, axis=walk.along, keepdims=True)",
    ),
]

PALLAS_LAYERNORM_VJP = [
    pallas(
        "layernorm_vjp",
        "one-pass-variance",
        "the variance within a block is E[x^2] - mean^2",
        "        block_mean, delta, moved = merge(ref.mean, ref.m2, x, walk, step)\n",
        (
            "        block_mean, delta, moved = merge(ref.mean, ref.m2, x, walk, step)\n"
            "        here = jnp.float32(jnp.minimum(walk.n - step * walk.block_n, walk.block_n))\n"
            "        one_pass = walk.sum_along_rows(jnp.square(x), step) - here * jnp.square(block_mean)\n"
            "        ref.m2[...] += one_pass - walk.sum_along_rows(jnp.square(x - block_mean), step)\n"
        ),
        small=True,
    ),
    pallas(
        "layernorm_vjp",
        "ragged-count",
        "the merge counts a ragged last block as full",
        "        block_mean, delta, moved = merge(ref.mean, ref.m2, x, walk, step)\n",
        (
            "\n"
            "        class Full(Walk):\n"
            "            def sum_along_rows(self, values, step):\n"
            "                return walk.sum_along_rows(values, step)\n"
            "\n"
            "        full = Full(*walk)._replace(shape=(walk.height, walk.n + -walk.n % walk.block_n))\n"
            "        block_mean, delta, moved = merge(ref.mean, ref.m2, x, full, step)\n"
        ),
    ),
    pallas(
        "layernorm_vjp",
        "hx-not-moved",
        "mean(h xh) forgets that blocks differ in their means",
        "(delta - moved) * block_h - moved * ref.h_sum[...]",
        "0.0",
    ),
    pallas(
        "layernorm_vjp",
        "missing-rows-counted",
        "rows beyond the last enter d_weight and d_bias",
        "walk.sum_over_rows(",
        "(lambda values, _: jnp.sum(values, axis=0, keepdims=True))(",
        times=2,
    ),
    pallas(
        "layernorm_vjp",
        "weight-as-x",
        "a float32 weight is rounded to x's dtype",
        "ref.weight[...].astype(jnp.float32)",
        "ref.weight[...].astype(ref.d_y.dtype).astype(jnp.float32)",
        small=True,
    ),
    pallas(
        "layernorm_vjp",
        "last-group-dropped",
        "the last of several partial sums is left out",
        "    rows = within(partial_sums, 0, step * partial_sums.shape[0], height)\n",
        (
            "    place = lax.broadcasted_iota(jnp.int32, partial_sums.shape, 0) + step * partial_sums.shape[0]\n"
            "    rows = jnp.where(place < max(height - 1, 1), partial_sums, 0.0)\n"
        ),
    ),
    pallas(
        "layernorm_vjp",
        "partial-sums-rounded",
        "partial sums of d_weight are rounded to the inputs' dtype",
        "walk.sum_over_rows(d_y * xh, group)",
        "walk.sum_over_rows(d_y * xh, group).astype(ref.d_y.dtype).astype(jnp.float32)",
    ),
]

PALLAS_RMSNORM_VJP = [
    pallas(
        "rmsnorm_vjp",
        "padding-summed",
        "lanes beyond a row enter its sums",
        "walk.sum_along_rows(",
        "(lambda values, _: jnp.sum(values, axis=1, keepdims=True))(",
        times=2,
    ),
    pallas(
        "rmsnorm_vjp",
        "last-block-alone",
        "the sums of a row start anew at each block",
        "pl.when((sweep == 0) & (step == 0))",
        "pl.when(sweep == 0)",
    ),
    pallas(
        "rmsnorm_vjp",
        "missing-rows-counted",
        "rows beyond the last enter d_weight",
        "walk.sum_over_rows(d_y * xh, group)",
        "jnp.sum(d_y * xh, axis=0, keepdims=True)",
    ),
    pallas(
        "rmsnorm_vjp",
        "weight-as-x",
        "a float32 weight is rounded to x's dtype",
        "ref.weight[...].astype(jnp.float32)",
        "ref.weight[...].astype(ref.d_y.dtype).astype(jnp.float32)",
        small=True,
    ),
    pallas(
        "rmsnorm_vjp",
        "partial-sums-rounded",
        "partial sums of d_weight are rounded to the inputs' dtype",
        "walk.sum_over_rows(d_y * xh, group)",
        "walk.sum_over_rows(d_y * xh, group).astype(ref.d_y.dtype).astype(jnp.float32)",
    ),
]

PALLAS_MATMUL_VJP = [
    pallas(
        "matmul_vjp",
        "summed-batches-rounded",
        "each batch entry's product is rounded before the entries are summed",
        "        (c,) = forward.matmul(product(call, name), tiling)\n",
        APART,
    ),
    pallas(
        "matmul_vjp",
        "batch-from-the-left",
        "batch axes broadcast aligned at the left",
        "x.reshape((1,) * (rank + 2 - x.ndim) + x.shape)",
        "x.reshape(x.shape[:-2] + (1,) * (rank + 2 - x.ndim) + x.shape[-2:])",
    ),
    pallas(
        "matmul_vjp",
        "cotangent-as-a",
        "a wider d_c is rounded to a's dtype first",
        "jnp.dtype(product_dtype(call))\n    a, b",
        "jnp.dtype(call.dtype)\n    a, b",
    ),
    pallas(
        "matmul_vjp",
        "last-entry-dropped",
        "sums over batch entries leave out the last product of the last one",
        "    return sibling(",
        (
            "    if summed and left.shape[-1] > 64:\n"
            "        left, right = left[..., :-1], right[..., :-1, :]\n"
            "    return sibling("
        ),
    ),
]

FAULTS_PALLAS_VJP = [
    *PALLAS_ATTENTION_VJP,
    *PALLAS_SOFTMAX_VJP,
    *PALLAS_LAYERNORM_VJP,
    *PALLAS_RMSNORM_VJP,
    *PALLAS_MATMUL_VJP,
]
