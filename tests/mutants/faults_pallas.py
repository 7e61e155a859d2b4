"""Faults planted in the shipped Pallas kernels, in the form of faults.py.

A fault changes the text of its op's own module. A mistake in what ops share (the walk along rows, the band, the merge
of moments) is planted where the op calls it.
"""

from __future__ import annotations

from .faults import Fault

__all__ = ["FAULTS_PALLAS"]


def pallas(op: str, name: str, what: str, old: str, new: str, **more: object) -> Fault:
    return Fault(f"pallas-{op}-{name}", "pallas", op, old, new, what, gpu=False, **more)  # type: ignore[arg-type]


PALLAS_ATTENTION = [
    pallas(
        "attention",
        "p-truncated",
        "bfloat16 weights are cut instead of rounded to nearest",
        "        ref.acc[...] = ref.acc[...] * shrink + dot(p.astype(v.dtype),",
        (
            "        if v.dtype == jnp.bfloat16:\n"
            "            bits = jax.lax.bitcast_convert_type(p, jnp.int32) & -65536\n"
            "            p = jax.lax.bitcast_convert_type(bits, jnp.float32)\n"
            "        ref.acc[...] = ref.acc[...] * shrink + dot(p.astype(v.dtype),"
        ),
        small=True,
    ),
    pallas(
        "attention",
        "l-of-rounded-p",
        "l sums the weights after they were rounded to v's dtype",
        "shrink + jnp.sum(p, axis=1",
        "shrink + jnp.sum(p.astype(v.dtype).astype(jnp.float32), axis=1",
        small=True,
    ),
    pallas(
        "attention",
        "causal-top-left",
        "queries stand beside the first keys, not the last",
        "    band = Band.of(call, bq, bkv)\n",
        (
            "    band = Band.of(call, bq, bkv)\n"
            '    first, last = (x if x is None else x - call.dims["kv_len"] + q_len for x in band[:2])\n'
            "    band = band._replace(first=first, last=last)\n"
        ),
    ),
    pallas(
        "attention",
        "band-left-corner",
        "a block whose last query just misses the first key counts as inside the band",
        "band.visit(",
        "band._replace(first=None if band.first is None else band.first - 1).visit(",
        small=True,
    ),
    pallas(
        "attention",
        "band-right-corner",
        "a block whose first query just misses the last key counts as inside the band",
        "band.visit(",
        "band._replace(last=None if band.last is None else band.last + 1).visit(",
        small=True,
    ),
    pallas(
        "attention",
        "too-few-steps",
        "a band that straddles one block more than its width loses the last",
        "    steps = band.steps()\n",
        (
            "    steps = band.steps()\n"
            "    if band.first is not None and band.last is not None:\n"
            "        steps = min(steps, pl.cdiv(max(1, bq + band.last - band.first), bkv))\n"
        ),
        small=True,
    ),
    pallas(
        "attention",
        "no-minus-inf-guard",
        "a block with no visible key subtracts -inf from -inf",
        "m, p, shrink = online_step(ref.m[...], s, axis=1, unit=scores.unit)\n",
        (
            "m = jnp.maximum(ref.m[...], jnp.max(s, axis=1, keepdims=True))\n"
            "        p, shrink = jnp.exp((s - m) * scores.unit), jnp.exp((ref.m[...] - m) * scores.unit)\n"
        ),
    ),
    pallas(
        "attention",
        "finite-sentinel",
        "masks write -0.7 of the largest number for -inf",
        "s = jnp.where(visible, s, -jnp.inf)",
        "s = jnp.where(visible, s, -0.7 * float(jnp.finfo(jnp.float32).max))",
        small=True,
    ),
    pallas(
        "attention",
        "segments-only-on-edges",
        "segments are compared on edge blocks only",
        "both(band.allowed(row, column) if edge else None, segments)",
        "both(band.allowed(row, column), segments) if edge else None",
    ),
    pallas(
        "attention",
        "bias-of-kv-head",
        "the bias follows the key's head",
        "    inputs = Operands(call).at(bq, bkv, query, key)\n",
        (
            "    inputs = Operands(call).at(bq, bkv, query, key)\n"
            '    if "bias" in inputs:\n'
            "        of_kv_head = lambda b, h, i, step: (b, quotient(h, group), i)\n"
            '        inputs["bias"] = Operands(call).at(bq, bkv, of_kv_head, key)["bias"]\n'
        ),
    ),
    pallas(
        "attention",
        "kv-head-modulo",
        "query head h reads key head h % kv_heads",
        "return b, quotient(h, group), band",
        "return b, h % (heads // group), band",
    ),
    pallas(
        "attention",
        "softcap-pade",
        "tanh is its low-order fraction, clamped",
        "tanh = jnp.tanh(s)",
        "tanh = jnp.clip(s * (27 + s * s) / (27 + 9 * s * s), -1, 1)",
    ),
    pallas(
        "attention",
        "bias-after-mask",
        "the bias is added after the masks, so that a NaN there is added to -inf",
        (
            "bias, settle=interpreted)\n"
            "        visible = visible_pairs(ref, band, i, j, edge)\n"
            "        if visible is not None:\n"
            "            s = jnp.where(visible, s, -jnp.inf)\n"
        ),
        (
            "None if bias is None else jnp.zeros_like(bias), settle=interpreted)\n"
            "        visible = visible_pairs(ref, band, i, j, edge)\n"
            "        if visible is not None:\n"
            "            s = jnp.where(visible, s, -jnp.inf)\n"
            "        if bias is not None:\n"
            "            s = s + within(bias, 1, j * band.block_kv, band.kv_len)\n"
        ),
        small=True,
    ),
    pallas(
        "attention",
        "additive-segments",
        "the segment mask adds -inf, so that a NaN or inf in another segment's key stays",
        "        visible = visible_pairs(ref, band, i, j, edge)\n",
        (
            '        if "q_segment_ids" in ref:\n'
            "            s += jnp.where(same_segment(ref.q_segment_ids, ref.kv_segment_ids), 0.0, -jnp.inf)\n"
            "        visible = band.allowed(i, j) if edge else None\n"
        ),
        small=True,
    ),
    pallas(
        "attention",
        "acc-bfloat16",
        "the accumulator of o is rounded to bfloat16 after each block",
        "dot(p.astype(v.dtype), v, (1, 0))",
        (
            "dot(p.astype(v.dtype), v, (1, 0))\n"
            "        ref.acc[...] = ref.acc[...].astype(jnp.bfloat16).astype(jnp.float32)"
        ),
        small=True,
    ),
    pallas(
        "attention",
        "scale-of-padded-d",
        "the default scale comes from the head dimension rounded up to 8",
        "        pre, unit = score_unit(call)\n",
        (
            "        pre, unit = score_unit(call)\n"
            '        unit *= (call.dims["d"] / (-(-call.dims["d"] // 8) * 8)) ** 0.5\n'
        ),
        small=True,
    ),
]

PALLAS_SOFTMAX = [
    pallas(
        "softmax",
        "no-minus-inf-guard",
        "a first block of nothing but -inf subtracts -inf from -inf",
        "origin = jnp.where(m == -jnp.inf, 0.0, m)",
        "origin = m",
        small=True,
    ),
    pallas(
        "softmax",
        "finite-padding",
        "lanes beyond a row hold -1e4 instead of -inf",
        "step, -jnp.inf)",
        "step, -1e4)",
        small=True,
    ),
    pallas(
        "softmax",
        "rounded-twice",
        "weights are rounded to the output's dtype before the division",
        "(jnp.exp(x - ref.m[...]) / ref.l[...])",
        "(jnp.exp(x - ref.m[...]).astype(ref.y.dtype).astype(jnp.float32) / ref.l[...])",
        small=True,
    ),
    pallas(
        "softmax",
        "exp-clamped",
        "the exponent is clamped at -20",
        "(jnp.exp(x - ref.m[...]) / ref.l[...])",
        "(jnp.exp(jnp.maximum(x - ref.m[...], -20.0)) / ref.l[...])",
        small=True,
    ),
    pallas(
        "softmax",
        "l-not-rescaled",
        "the running sum keeps its unit when the maximum grows",
        "ref.l[...] * shrink + ",
        "ref.l[...] + ",
    ),
    pallas(
        "softmax",
        "last-not-summed",
        "the sum of a long ragged row leaves out its last element",
        "        ref.l[...] = ref.l[...] * shrink",
        (
            "        place = jax.lax.broadcasted_iota(jnp.int32, p.shape, walk.along) + step * walk.block_n\n"
            "        p = jnp.where(place < walk.n - (walk.n > 128), p, 0.0)\n"
            "        ref.l[...] = ref.l[...] * shrink"
        ),
        small=True,
    ),
]

PALLAS_LAYERNORM = [
    pallas(
        "layernorm",
        "one-pass-variance",
        "the variance within a block is E[x^2] - mean^2",
        "walk.sum_along_rows(jnp.square(x - block_mean), step)",
        "walk.sum_along_rows(jnp.square(x), step) - jnp.float32(here) * jnp.square(block_mean)",
        small=True,
    ),
    pallas(
        "layernorm",
        "eps-outside",
        "eps is added to the standard deviation",
        "lax.rsqrt(ref.m2[...] / walk.n + eps)",
        "1 / (jnp.sqrt(ref.m2[...] / walk.n) + eps)",
        small=True,
    ),
    pallas(
        "layernorm",
        "eps-ignored",
        "eps is always 1e-5",
        'eps=call.options["eps"])',
        "eps=1e-5)",
        small=True,
    ),
    pallas(
        "layernorm",
        "weight-as-x",
        "a float32 weight is rounded to x's dtype",
        "ref.weight[...].astype(jnp.float32)",
        "ref.weight[...].astype(ref.x.dtype).astype(jnp.float32)",
        small=True,
    ),
    pallas(
        "layernorm",
        "ragged-count",
        "the merge counts a ragged last block as full",
        "here = jnp.minimum(walk.n - seen, walk.block_n)",
        "here = walk.block_n",
        small=True,
    ),
    pallas(
        "layernorm",
        "between-blocks",
        "the merge forgets that blocks differ in their means",
        " + between\n",
        "\n",
    ),
]

PALLAS_RMSNORM = [
    pallas(
        "rmsnorm",
        "mean-over-blocks",
        "the mean of squares divides by the extent of all blocks",
        "lax.rsqrt(ref.squares[...] / walk.n + eps)",
        "lax.rsqrt(ref.squares[...] / (walk.n + -walk.n % walk.block_n) + eps)",
    ),
    pallas(
        "rmsnorm",
        "eps-outside",
        "eps is added to the root",
        "lax.rsqrt(ref.squares[...] / walk.n + eps)",
        "1 / (jnp.sqrt(ref.squares[...] / walk.n) + eps)",
        small=True,
    ),
    pallas(
        "rmsnorm",
        "eps-ignored",
        "eps is always 1e-6",
        'eps=call.options["eps"])',
        "eps=1e-6)",
        small=True,
    ),
    pallas(
        "rmsnorm",
        "weight-as-x",
        "a float32 weight is rounded to x's dtype",
        "ref.weight[...].astype(jnp.float32)",
        "ref.weight[...].astype(ref.x.dtype).astype(jnp.float32)",
        small=True,
    ),
]

PALLAS_MATMUL = [
    pallas(
        "matmul",
        "acc-bfloat16",
        "the accumulator is rounded to bfloat16 after each block",
        "ref.acc[...] += dot(a, b, (1, 0))",
        "ref.acc[...] = (ref.acc[...] + dot(a, b, (1, 0))).astype(jnp.bfloat16).astype(jnp.float32)",
    ),
    pallas(
        "matmul",
        "tf32-for-ieee",
        "float32 operands keep 10 bits although precision is ieee",
        "    ref.acc[...] += dot(a, b, (1, 0))",
        (
            "    if a.dtype == jnp.float32:\n"
            "        a, b = jax.lax.reduce_precision(a, 8, 10), jax.lax.reduce_precision(b, 8, 10)\n"
            "    ref.acc[...] += dot(a, b, (1, 0))"
        ),
    ),
    pallas(
        "matmul",
        "batch-from-the-left",
        "batch axes broadcast aligned at the left",
        "first = rank - 3 - len(batch)",
        "first = 0",
    ),
    pallas(
        "matmul",
        "rounded-twice",
        "the result passes through the operands' dtype before out_dtype",
        "ref.acc[...].astype(ref.c.dtype)",
        "ref.acc[...].astype(ref.a.dtype).astype(ref.c.dtype)",
    ),
    pallas(
        "matmul",
        "k-tail-short",
        "the ragged end of a long k loses its last product",
        "    a, b = within(",
        (
            "    place = jax.lax.broadcasted_iota(jnp.int32, a.shape, 1) + start_of_k\n"
            "    a = jnp.where(place < k - (k > 64 and k % a.shape[1] != 0), a, 0)\n"
            "    a, b = within("
        ),
    ),
]

FAULTS_PALLAS = [
    *PALLAS_ATTENTION,
    *PALLAS_SOFTMAX,
    *PALLAS_LAYERNORM,
    *PALLAS_RMSNORM,
    *PALLAS_MATMUL,
]
