"""Faults planted in the shipped kernels: what people get wrong, one replacement of source text each.

A fault says how often its text stands in the kernel today, so that a change to the kernel breaks this table loudly instead of emptying it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FAULTS", "Fault"]


@dataclass(frozen=True)
class Fault:
    """One mutation of one kernel.

    Attributes:
      name: unique; backend, op: whose source is changed.
      old, new: the text and its replacement; times: how often ``old`` occurs there.
      what: the mistake in words.
      small: it adds less than 1e-2 to any element on ordinary N(0, 1) data (``python -m tests.mutants`` measures it).
      gpu: it may also run compiled: it touches no memory outside its arguments there.
    """

    name: str
    backend: str
    op: str
    old: str
    new: str
    what: str
    small: bool = False
    times: int = 1
    gpu: bool = True


def _triton(op: str, name: str, what: str, old: str, new: str, **more: object) -> Fault:
    return Fault(f"triton-{op}-{name}", "triton", op, old, new, what, **more)  # type: ignore[arg-type]


def _pallas(op: str, name: str, what: str, old: str, new: str, **more: object) -> Fault:
    return Fault(f"pallas-{op}-{name}", "pallas", op, old, new, what, gpu=False, **more)  # type: ignore[arg-type]


FOLD = "    return fold(visit, state, own, keys, pairs,"  # in Triton's attention, where the tiles to visit are known
TRITON_ATTENTION = [
    _triton(
        "attention", "p-truncated", "bfloat16 weights are cut instead of rounded to nearest",
        "        acc = tl.dot(p.to(v_tile.dtype), v_tile,",
        "        if v_tile.dtype == tl.bfloat16:\n            p = (p.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)\n"
        "        acc = tl.dot(p.to(v_tile.dtype), v_tile,",
        small=True,
    ),
    _triton(
        "attention", "scale-off", "the default scale is 0.3 % too large",
        "    pre, unit = score_unit(call)\n", "    pre, unit = score_unit(call)\n    unit *= 1.003\n", small=True,
    ),
    _triton(
        "attention", "last-key-dropped", "the last key of a long row is masked where the tail tile is ragged",
        "limits(i + (kv_len - q_len), left, right, kv_len)",
        "limits(i + (kv_len - q_len), left, right, kv_len - tl.minimum(kv_len // 129, 1))",
    ),
    _triton(
        "attention", "causal-edge-at-tile", "the first query of a tile sees one key beyond its own where that key ends a tile",
        FOLD,
        "    first, inner_first, inner_last, last = span\n    if right is not None:\n"
        "        seen = tl.minimum(tl.maximum(top + right + 2, 0), kv_len) // plan.block_kv * plan.block_kv\n"
        "        span = first, inner_first, tl.maximum(seen, inner_first), last\n" + FOLD,
        small=True,
    ),
    _triton(
        "attention", "window-off-by-one", "the window is one key short on its left",
        "    pairs = Pairs(i_ok, lo, hi,", "    if left is not None:\n        lo += 1\n    pairs = Pairs(i_ok, lo, hi,",
    ),
    _triton(
        "attention", "window-left-unmasked", "the tile that holds a window's left edge counts as wholly visible",
        FOLD,
        "    first, _, _, last = span\n    if left is not None:\n"
        "        inner_first = tl.minimum(tl.maximum(bottom - left, 0) // plan.block_kv * plan.block_kv, last)\n"
        "        _, _, seen, _ = band(top, bottom, None, right, kv_len, plan.block_kv)\n"
        "        span = first, inner_first, tl.maximum(seen, inner_first), last\n" + FOLD,
    ),
    _triton("attention", "finite-sentinel", "causal, window and tail masks write -1e4 for -inf", '< pairs.hi), s, float("-inf"))', "< pairs.hi), s, -1e4)", small=True),
    _triton(
        "attention", "no-minus-inf-guard", "a tile with no visible key subtracts -inf from -inf",
        'shift = tl.where(m_new == float("-inf"), 0.0, m_new)', "shift = m_new",
    ),
    _triton("attention", "lse-base-2", "the log-sum-exp takes its logarithm in base 2", "m * scores.unit + tl.log(l)", "m * scores.unit + tl.log2(l)"),
    _triton(
        "attention", "segments-only-on-edges", "segments are compared on edge tiles only",
        's = tl.where(pairs.segment == kv_segment, s, float("-inf"))',
        'if edge:\n                s = tl.where(pairs.segment == kv_segment, s, float("-inf"))',
    ),
    _triton(
        "attention", "acc-bfloat16", "the accumulator of o is rounded to bfloat16 after each tile",
        "out_dtype=plan.acc_dtype)\n    return acc, l, m",
        "out_dtype=plan.acc_dtype).to(tl.bfloat16).to(plan.acc_dtype)\n    return acc, l, m",
        small=True,
    ),
    _triton("attention", "kv-head-modulo", "query head h reads key head h % kv_heads", "head // extents.group", "head % (extents.heads // extents.group)"),
    _triton(
        "attention", "rescale-skipped", "l and o are not rescaled where the maximum grows by little",
        "tl.exp2((m - shift) * scores.rate)",
        "tl.where((m - shift) * scores.rate > -0.01, 1.0, tl.exp2((m - shift) * scores.rate))", small=True,
    ),
    _triton(
        "attention", "l-not-rescaled", "l keeps its unit when the maximum grows in an edge tile",
        "l = l * alpha + tl.sum(p, 1)", "l = l * (1.0 if edge else alpha) + tl.sum(p, 1)",
    ),
    _triton(
        "attention", "bias-stride", "a bias that broadcasts over heads is walked as if it had them",
        "bias += batch * bias_b + head * bias_h", "bias += batch * bias_b + head // extents.group * bias_h",
    ),
    _triton("attention", "tanh-range", "the tanh fraction is used beyond the range where it converges", "tl.abs(x) < 0.5", "tl.abs(x) < 3.5", small=True),
    _triton(
        "attention", "q-prescaled", "q is scaled and rounded to its dtype before the dot, where a bias or a softcap follows",
        "        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=plan.precision, out_dtype=plan.acc_dtype)\n"
        "        if scores.pre is not None:\n            s = s * scores.pre",
        "        qs = q_tile\n        if scores.pre is not None:\n"
        "            qs = (q_tile.to(plan.acc_dtype) * scores.pre).to(q_tile.dtype)\n"
        "        s = tl.dot(qs, tl.trans(k_tile), input_precision=plan.precision, out_dtype=plan.acc_dtype)",
        small=True,
    ),
    _triton(
        "attention", "store-unmasked", "lanes of a head dimension beyond dv are written too",
        "mask=i_ok & (ddv < extents.dv))", "mask=i_ok)", gpu=False,
    ),
    _triton(
        "attention", "v-tail-unmasked", "rows of v beyond the last key are read",
        "j_ok[:, None], keys.dv_ok, edge, plan.ragged_dv)", "j_ok[:, None], keys.dv_ok, False, plan.ragged_dv)",
        gpu=False,
    ),
]  # fmt: skip

TRITON_SOFTMAX = [
    _triton(
        "softmax", "no-minus-inf-guard", "a first tile of nothing but -inf subtracts -inf from -inf",
        'shift = tl.where(m_new == float("-inf"), 0.0, m_new)', "shift = m_new", small=True,
    ),
    _triton(
        "softmax", "finite-padding", "lanes beyond a short row hold -1e4 instead of -inf",
        'ok = row_ok & (col < n)\n        t = tl.load(x_row + col * x_n, mask=ok, other=float("-inf"))', "ok = row_ok & (col < n)\n        t = tl.load(x_row + col * x_n, mask=ok, other=-1e4)",
        small=True,
    ),
    _triton(
        "softmax", "last-not-summed", "the sum of a long row leaves out its last element",
        "mask=row_ok & (start + col < n), other", "mask=row_ok & (start + col < n - 1), other", small=True,
    ),
    _triton("softmax", "log2e-rounded", "exp is exp2 with log2(e) of five digits", "p = tl.exp(t - tl.max(t, 1)[:, None])", "p = tl.exp2((t - tl.max(t, 1)[:, None]) * 1.4427)", small=True),
    _triton("softmax", "l-not-rescaled", "the running sum keeps its unit when the maximum grows", "l = l * tl.exp(m - shift) + ", "l = l + "),
    _triton(
        "softmax", "p-rounded-before-sum", "the normaliser sums weights already rounded to the output's dtype",
        "(p / tl.sum(p, 1)[:, None])", "(p / tl.sum(p.to(y.dtype.element_ty).to(acc_dtype), 1)[:, None])", small=True,
    ),
    _triton(
        "softmax", "store-truncated", "a bfloat16 result is cut instead of rounded to nearest",
        "        tl.store(y_row + col * y_n, (p / tl.sum(p, 1)[:, None]).to",
        "        p = p / tl.sum(p, 1)[:, None]\n        if y.dtype.element_ty == tl.bfloat16:\n"
        "            p = (p.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)\n        tl.store(y_row + col * y_n, p.to",
        small=True,
    ),
]  # fmt: skip

TRITON_LAYERNORM = [
    _triton(
        "layernorm", "one-pass-variance", "the variance is E[x^2] - mean^2",
        "tl.rsqrt(tl.sum(d * d, 1) / n + eps)", "tl.rsqrt(tl.maximum(tl.sum(t * t, 1) / n - mean * mean, 0.0) + eps)", small=True,
    ),
    _triton(
        "layernorm", "padding-in-variance", "lanes beyond the row count in the variance",
        "        d = tl.where(ok, t - mean[:, None], 0.0)\n        r =", "        d = t - mean[:, None]\n        r =",
        small=True,
    ),
    _triton("layernorm", "eps-outside", "eps is added to the standard deviation", "tl.rsqrt(tl.sum(d * d, 1) / n + eps)", "1.0 / (tl.sqrt(tl.sum(d * d, 1) / n) + eps)", small=True),
    _triton("layernorm", "mean-over-tile", "the mean divides by the tile's extent", "mean = tl.sum(t, 1) / n", "mean = tl.sum(t, 1) / block_n"),
    _triton("layernorm", "unbiased-variance", "long rows divide the variance by n - 1", "r = tl.rsqrt(total / n + eps)", "r = tl.rsqrt(total / (n - 1) + eps)", small=True),
    _triton(
        "layernorm", "weight-float16", "the weight passes through float16",
        "tl.load(weight + col * weight_n, mask=col < n, other=0.0).to(acc_dtype)", "tl.load(weight + col * weight_n, mask=col < n, other=0.0).to(tl.float16).to(acc_dtype)", small=True,
    ),
    _triton(
        "layernorm", "long-row-padding", "lanes beyond a long row count in the variance",
        "            d = tl.where(ok, t - mean[:, None], 0.0)\n            total", "            d = t - mean[:, None]\n            total", small=True,
    ),
]  # fmt: skip

TRITON_RMSNORM = [
    _triton("rmsnorm", "mean-over-tile", "the mean of squares divides by the tile's extent", "tl.rsqrt(tl.sum(t * t, 1) / n + eps)", "tl.rsqrt(tl.sum(t * t, 1) / block_n + eps)"),
    _triton("rmsnorm", "eps-outside", "eps is added to the root", "tl.rsqrt(tl.sum(t * t, 1) / n + eps)", "1.0 / (tl.sqrt(tl.sum(t * t, 1) / n) + eps)", small=True),
    _triton("rmsnorm", "squares-rounded", "squares are rounded to x's dtype", "tl.rsqrt(tl.sum(t * t, 1) / n + eps)", "tl.rsqrt(tl.sum((t * t).to(x.dtype.element_ty).to(acc_dtype), 1) / n + eps)", small=True),
    _triton("rmsnorm", "last-not-summed", "the sum of a long row leaves out its last element", "other=0.0).to(acc_dtype)\n            total", "other=0.0).to(acc_dtype)\n            t = tl.where(start + col < n - 1, t, 0.0)\n            total"),
]  # fmt: skip

TRITON_MATMUL = [
    _triton(
        "matmul", "tf32-for-ieee", "float32 operands lose 13 bits although precision is ieee",
        "        acc = tl.dot(at, bt, acc,",
        "        if at.dtype == tl.float32:\n            at = (at.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)\n"
        "            bt = (bt.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)\n        acc = tl.dot(at, bt, acc,",
    ),
    _triton("matmul", "k-tail-unmasked", "one operand is read beyond k", "mask=j_ok & (kk < left)[:, None]", "mask=j_ok", gpu=False),
    _triton("matmul", "group-unclamped", "the last group of row tiles is numbered as if it were full", "min(tiles_m - first_m, group)", "group", gpu=False),
    _triton("matmul", "group-clamped-once", "the last group of row tiles is numbered as if it were full, where it is not the only one", "min(tiles_m - first_m, group)", "min(tiles_m, group)", gpu=False, small=True),
    _triton("matmul", "acc-bfloat16", "the accumulator is rounded to bfloat16 at each step", "input_precision=precision, out_dtype=acc_dtype)\n        a_tile", "input_precision=precision, out_dtype=acc_dtype).to(tl.bfloat16).to(acc_dtype)\n        a_tile"),
    _triton("matmul", "k-tail-short", "the ragged end of k loses its last product", "a_tile, mask=i_ok & (kk < left)", "a_tile, mask=i_ok & (kk < left - (k > 64).to(tl.int64))"),
    _triton("matmul", "batch-stride", "b walks the inner batch axis with a's stride", "inner * b_inner)", "inner * (a_inner if b_inner != 0 else b_inner))", gpu=False),
    _triton("matmul", "rounded-twice", "the result passes through the operands' dtype before out_dtype", "acc.to(c.dtype.element_ty)", "acc.to(a.dtype.element_ty).to(c.dtype.element_ty)"),
    _triton(
        "matmul", "store-truncated", "a bfloat16 result is cut instead of rounded to nearest",
        "    tl.store(c_tile, acc.to(", "    if c.dtype.element_ty == tl.bfloat16:\n        acc = (acc.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)\n    tl.store(c_tile, acc.to(",
    ),
]  # fmt: skip

PALLAS_ATTENTION = [
    _pallas(
        "attention", "p-truncated", "bfloat16 weights are cut instead of rounded to nearest",
        "        acc_ref[...] = acc_ref[...] * shrink + dot(p.astype(v.dtype),",
        "        if v.dtype == jnp.bfloat16:\n            p = lax.bitcast_convert_type(lax.bitcast_convert_type(p, jnp.int32) & -65536, jnp.float32)\n"
        "        acc_ref[...] = acc_ref[...] * shrink + dot(p.astype(v.dtype),",
        small=True,
    ),
    _pallas("attention", "l-of-rounded-p", "l sums the weights after they were rounded to v's dtype", "shrink + jnp.sum(p, axis=1", 'shrink + jnp.sum(p.astype(ref["v"].dtype).astype(jnp.float32), axis=1', small=True),
    _pallas("attention", "causal-top-left", "queries stand beside the first keys, not the last", "aligned, far = kv_len - q_len, kv_len + q_len", "aligned, far = 0, kv_len + q_len"),
    _pallas("attention", "band-left-corner", "a block whose last query just misses the first key counts as inside the band", ">= self.first - 1", ">= self.first - 2", small=True),
    _pallas("attention", "band-right-corner", "a block whose first query just misses the last key counts as inside the band", "<= self.last + 1", "<= self.last + 2", small=True),
    _pallas("attention", "too-few-steps", "a band that straddles one block more than its width loses the last", "pl.cdiv(width - 1, self.block_kv) + 1", "pl.cdiv(width, self.block_kv)", small=True),
    _pallas("attention", "no-minus-inf-guard", "a block with no visible key subtracts -inf from -inf", "origin = jnp.where(m_new == -jnp.inf, 0.0, m_new)", "origin = m_new"),
    _pallas("attention", "finite-sentinel", "masks write -0.7 of the largest number for -inf", "s = jnp.where(allowed, s, -jnp.inf)", "s = jnp.where(allowed, s, -0.7 * float(jnp.finfo(jnp.float32).max))", small=True),
    _pallas("attention", "segments-only-on-edges", "segments are compared on edge blocks only", "both(band.allowed(i, j) if edge else None, segments)", "both(band.allowed(i, j), segments) if edge else None"),
    _pallas("attention", "bias-of-kv-head", "the bias follows the key's head", "lambda b, h, i, step: (b, h, i))\n        rows", "lambda b, h, i, step: (b, quotient(h, group), i))\n        rows"),
    _pallas("attention", "kv-head-modulo", "query head h reads key head h % kv_heads", "return b, quotient(h, group), band", "return b, h % k.shape[2], band"),
    _pallas("attention", "softcap-pade", "tanh is its low-order fraction, clamped", "s = jnp.tanh(s)", "s = jnp.clip(s * (27 + s * s) / (27 + 9 * s * s), -1, 1)"),
    _pallas(
        "attention", "bias-after-mask", "the bias is added after the masks, so that a NaN there is added to -inf",
        '        if "bias" in ref:\n            s = s + ref["bias"][...].astype(jnp.float32)\n        segments = same_segment(ref["q_segment_ids"], ref["kv_segment_ids"]) if "q_segment_ids" in ref else None\n        allowed = both(band.allowed(i, j) if edge else None, segments)\n        if allowed is not None:\n            s = jnp.where(allowed, s, -jnp.inf)\n',
        '        segments = same_segment(ref["q_segment_ids"], ref["kv_segment_ids"]) if "q_segment_ids" in ref else None\n        allowed = both(band.allowed(i, j) if edge else None, segments)\n        if allowed is not None:\n            s = jnp.where(allowed, s, -jnp.inf)\n        if "bias" in ref:\n'
        '            s = s + jnp.where(positions(s.shape, 1, j * band.block_kv) < band.kv_len, ref["bias"][...].astype(jnp.float32), 0.0)\n',
        small=True,
    ),
    _pallas(
        "attention", "additive-segments", "the segment mask adds -inf, so that a NaN or inf in another segment's key stays",
        "        allowed = both(band.allowed(i, j) if edge else None, segments)\n",
        "        if segments is not None:\n            s += jnp.where(segments, 0.0, -jnp.inf)\n        allowed = band.allowed(i, j) if edge else None\n",
        small=True,
    ),
    _pallas("attention", "acc-bfloat16", "the accumulator of o is rounded to bfloat16 after each block", "dot(p.astype(v.dtype), v, (1, 0))", "dot(p.astype(v.dtype), v, (1, 0))\n        acc_ref[...] = acc_ref[...].astype(jnp.bfloat16).astype(jnp.float32)", small=True),
    _pallas("attention", "scale-of-padded-d", "the default scale comes from the head dimension rounded up to 8", "    pre, unit = score_unit(call)\n", "    pre, unit = score_unit(call)\n    unit *= (d / padded(d, 8)) ** 0.5\n", small=True),
]  # fmt: skip

PALLAS_SOFTMAX = [
    _pallas("softmax", "no-minus-inf-guard", "a first block of nothing but -inf subtracts -inf from -inf", "origin = jnp.where(m == -jnp.inf, 0.0, m)", "origin = m", small=True),
    _pallas("softmax", "finite-padding", "lanes beyond a row hold -1e4 instead of -inf", "< n, x, -jnp.inf)", "< n, x, -1e4)", small=True),
    _pallas("softmax", "rounded-twice", "weights are rounded to the output's dtype before the division", "(jnp.exp(x - m_ref[...]) / l_ref[...])", "(jnp.exp(x - m_ref[...]).astype(y_ref.dtype).astype(jnp.float32) / l_ref[...])", small=True),
    _pallas("softmax", "exp-clamped", "the exponent is clamped at -20", "(jnp.exp(x - m_ref[...]) / l_ref[...])", "(jnp.exp(jnp.maximum(x - m_ref[...], -20.0)) / l_ref[...])", small=True),
    _pallas("softmax", "l-not-rescaled", "the running sum keeps its unit when the maximum grows", "l_ref[...] * jnp.exp(m_ref[...] - origin)", "l_ref[...]"),
    _pallas("softmax", "last-not-summed", "the sum of a long ragged row leaves out its last element", "jnp.sum(jnp.exp(x - origin), axis=axis, keepdims=True)", "jnp.sum(jnp.where(positions(x.shape, axis, step * block_n) < n - (n > 128), jnp.exp(x - origin), 0.0), axis=axis, keepdims=True)", small=True),
]  # fmt: skip

PALLAS_LAYERNORM = [
    _pallas("layernorm", "one-pass-variance", "the variance within a block is E[x^2] - mean^2", "total(jnp.square(x - block_mean))", "total(jnp.square(x)) - jnp.float32(here) * jnp.square(block_mean)", small=True),
    _pallas("layernorm", "eps-outside", "eps is added to the standard deviation", "lax.rsqrt(m2[...] / n + eps)", "1 / (jnp.sqrt(m2[...] / n) + eps)", small=True),
    _pallas("layernorm", "eps-ignored", "eps is always 1e-5", 'eps=call.options["eps"])', "eps=1e-5)", small=True),
    _pallas("layernorm", "weight-as-x", "a float32 weight is rounded to x's dtype", '"weight"][...].astype(jnp.float32)', '"weight"][...].astype(ref["x"].dtype).astype(jnp.float32)', small=True),
    _pallas("layernorm", "ragged-count", "the merge counts a ragged last block as full", "here = jnp.minimum(n - seen, block_n)", "here = block_n", small=True),
    _pallas("layernorm", "between-blocks", "the merge forgets that blocks differ in their means", " + delta * (delta * (share * jnp.float32(seen)))", ""),
]  # fmt: skip

PALLAS_RMSNORM = [
    _pallas("rmsnorm", "mean-over-blocks", "the mean of squares divides by the extent of all blocks", "lax.rsqrt(squares[...] / n + eps)", "lax.rsqrt(squares[...] / (n + -n % block_n) + eps)"),
    _pallas("rmsnorm", "eps-outside", "eps is added to the root", "lax.rsqrt(squares[...] / n + eps)", "1 / (jnp.sqrt(squares[...] / n) + eps)", small=True),
    _pallas("rmsnorm", "eps-ignored", "eps is always 1e-6", 'eps=call.options["eps"])', "eps=1e-6)", small=True),
    _pallas("rmsnorm", "weight-as-x", "a float32 weight is rounded to x's dtype", '"weight"][...].astype(jnp.float32)', '"weight"][...].astype(ref["x"].dtype).astype(jnp.float32)', small=True),
]  # fmt: skip

PALLAS_MATMUL = [
    _pallas("matmul", "acc-bfloat16", "the accumulator is rounded to bfloat16 after each block", "acc_ref[...] += dot(a, b, (1, 0))", "acc_ref[...] = (acc_ref[...] + dot(a, b, (1, 0))).astype(jnp.bfloat16).astype(jnp.float32)"),
    _pallas("matmul", "tf32-for-ieee", "float32 operands keep 10 bits although precision is ieee", "    acc_ref[...] += dot(a, b, (1, 0))", "    if a.dtype == jnp.float32:\n        a, b = jax.lax.reduce_precision(a, 8, 10), jax.lax.reduce_precision(b, 8, 10)\n    acc_ref[...] += dot(a, b, (1, 0))"),
    _pallas("matmul", "batch-from-the-left", "batch axes broadcast aligned at the left", "first = rank - 3 - len(batch)", "first = 0"),
    _pallas("matmul", "rounded-twice", "the result passes through the operands' dtype before out_dtype", "acc_ref[...].astype(c_ref.dtype)", "acc_ref[...].astype(a_ref.dtype).astype(c_ref.dtype)"),
    _pallas("matmul", "k-tail-short", "the ragged end of a long k loses its last product", "a = jnp.where(positions(a.shape, 1, step * block_k) < k, a, 0)", "a = jnp.where(positions(a.shape, 1, step * block_k) < k - (k > 64), a, 0)"),
]  # fmt: skip

from .faults_vjp import FAULTS_VJP  # noqa: E402  it needs Fault

FAULTS = (
    TRITON_ATTENTION
    + TRITON_SOFTMAX
    + TRITON_LAYERNORM
    + TRITON_RMSNORM
    + TRITON_MATMUL
    + PALLAS_ATTENTION
    + PALLAS_SOFTMAX
    + PALLAS_LAYERNORM
    + PALLAS_RMSNORM
    + PALLAS_MATMUL
    + FAULTS_VJP
)
