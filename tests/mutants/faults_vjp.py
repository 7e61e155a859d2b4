"""Faults planted in the shipped backward kernels, in the form of faults.py."""

from __future__ import annotations

from .faults import Fault, _triton

__all__ = ["FAULTS_VJP"]

TRITON_ATTENTION_VJP = [
    _triton("attention_vjp", "delta-without-d-lse", "Delta leaves out the cotangent of lse", "total -= tl.load(d_lse", "total -= 0.0 * tl.load(d_lse"),
    _triton(
        "attention_vjp", "delta-of-rounded-products", "Delta sums products that were rounded to the inputs' dtype",
        "tl.sum(o_tile * d_o_tile, 1)", "tl.sum((o_tile * d_o_tile).to(o.dtype.element_ty).to(acc_dtype), 1)", small=True,
    ),
    _triton(
        "attention_vjp", "p-truncated", "bfloat16 weights are cut instead of rounded to nearest on their way into d_v",
        "        if plan.want_v:\n            dv = tl.dot(p.to(d_o_tile.dtype),",
        "        if plan.want_v:\n            pt = p\n            if d_o_tile.dtype == tl.bfloat16:\n                pt = (p.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)\n"
        "            dv = tl.dot(pt.to(d_o_tile.dtype),",
        small=True,
    ),
    _triton(
        "attention_vjp", "ds-rounded-twice", "dS is rounded to the inputs' dtype before the softcap's slope",
        "        ds = ds * (1.0 - t * t)", "        ds = ds.to(a.dtype).to(plan.acc_dtype) * (1.0 - t * t)",
        small=True,
    ),
    _triton("attention_vjp", "no-softcap-slope", "the softcap's slope is left out", "ds = ds * (1.0 - t * t)", "ds = ds * 1.0"),
    _triton(
        "attention_vjp", "softcap-slope-in-bias", "d_bias takes the softcap's slope, too",
        "        ds = ds * (1.0 - t * t)\n", "        ds = ds * (1.0 - t * t)\n        d_bias = ds\n",
    ),
    _triton("attention_vjp", "d-k-scale-off", "d_k's scale is 0.3 % too large", "(dk_acc * scale)", "(dk_acc * (scale * 1.003))"),
    _triton("attention_vjp", "d-q-scale-twice", "d_q is scaled twice", "(acc * scale)", "(acc * scale * scale)"),
    _triton("attention_vjp", "log2e-rounded", "exp is exp2 with log2(e) of five digits", "1.4426950408889634", "1.4427", small=True),
    _triton(
        "attention_vjp", "log2e-before-lse", "scores and lse take log2(e)'s factor before their difference, by which the largest overflow",
        "(s - shift) * 1.4426950408889634", "s * 1.4426950408889634 - shift * 1.4426950408889634", small=True,
    ),
    _triton("attention_vjp", "no-minus-inf-guard", "a row that sees no key keeps its lse of -inf", 'tl.store(shift + at, tl.where(l == float("-inf"), float("inf"), l)', "tl.store(shift + at, l", small=True),
    _triton(
        "attention_vjp", "masked-once", "dS is not selected again after the arithmetic: what a masked pair's v holds leaks",
        "tl.where(allowed, d_bias, 0.0), tl.where(allowed, ds, 0.0)", "d_bias, ds", small=True,
    ),
    _triton(
        "attention_vjp", "last-query-dropped", "the last of many queries is masked on the edge tiles of d_k and d_v",
        "(i[None, :] < pairs.hi)",
        "(i[None, :] < pairs.hi) & (i[None, :] < queries.q_len - tl.minimum(queries.q_len // 65, 1))",
    ),
    _triton("attention_vjp", "last-head-dropped", "d_k and d_v leave out the last query head of a group", "range(kv_head * group, kv_head * group + group)", "range(kv_head * group, kv_head * group + tl.maximum(group - 1, 1))"),
    _triton("attention_vjp", "kv-head-modulo", "query head h reads key head h % kv_heads in d_q", "head // extents.group", "head % (extents.heads // extents.group)"),
    _triton(
        "attention_vjp", "transposed-band-corner", "a tile of queries whose first just misses the last key of a tile counts as wholly seen",
        "span = band(top, bottom,", "span = band(top, bottom - 1,",
        small=True,
    ),
    _triton(
        "attention_vjp", "transposed-band-start", "the queries that see a tile of keys start one too late",
        "span = band(top, bottom,", "span = band(top + 1, bottom,",
        small=True,
    ),
    _triton("attention_vjp", "transposed-window-swapped", "keys are seen as far as queries see, not the other way round", "limits(j - (kv_len - q_len), right, left, q_len)", "limits(j - (kv_len - q_len), left, right, q_len)"),
    _triton("attention_vjp", "segments-only-on-edges", "segments are compared on edge tiles only", "allowed = allowed & same if edge else same", "allowed = allowed & same if edge else None", times=2),
    _triton("attention_vjp", "bias-batch-not-summed", "d_bias is that of the first batch entry alone where bias is broadcast over them", "range(sum_batches * sum_heads)", "range(sum_heads)"),
    _triton("attention_vjp", "bias-last-tile-of-queries", "a bias of one row sums all queries but those of the last ragged tile", "    for n in range(sum_batches", "    if one_row:\n        last = tl.maximum(last // plan.block_q * plan.block_q, plan.block_q)\n    for n in range(sum_batches", small=True),
    _triton("attention_vjp", "bias-float16", "a float32 bias passes through float16", "True, True).to(plan.acc_dtype)", "True, True).to(tl.float16).to(plan.acc_dtype)", small=True),
    _triton("attention_vjp", "d-q-truncated", "a bfloat16 d_q is cut instead of rounded to nearest", "    tl.store(d_q + at", "    acc = acc * scale\n    scale = 1.0\n    if d_q.dtype.element_ty == tl.bfloat16:\n        acc = (acc.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)\n    tl.store(d_q + at", small=True),
    _triton(
        "attention_vjp", "acc-bfloat16", "the accumulator of d_q is rounded to bfloat16 after each tile",
        "dq, input_precision=plan.precision, out_dtype=plan.acc_dtype)",
        "dq, input_precision=plan.precision, out_dtype=plan.acc_dtype).to(tl.bfloat16).to(plan.acc_dtype)", small=True,
    ),
    _triton(
        "attention_vjp", "k-tail-unmasked", "rows of k beyond the last key are read in d_q",
        "j_ok[:, None], keys.d_ok, edge, plan.ragged_d)", "j_ok[:, None], keys.d_ok, False, plan.ragged_d)", gpu=False,
    ),
]  # fmt: skip

TRITON_SOFTMAX_VJP = [
    _triton(
        "softmax_vjp", "delta-of-rounded-terms", "Delta of a short row sums terms that were rounded to y's dtype",
        "delta = tl.sum(p * g, 1)\n        tl.store", "delta = tl.sum((p * g).to(y.dtype.element_ty).to(acc_dtype), 1)\n        tl.store", small=True,
    ),
    _triton("softmax_vjp", "last-not-summed", "Delta of a long row leaves out its last element", "delta += tl.sum(p * g, 1)", "delta += tl.sum(tl.where(start + col < n - 1, p * g, 0.0), 1)", small=True),
    _triton(
        "softmax_vjp", "delta-bfloat16", "the running Delta of a long row is rounded to bfloat16 after each tile",
        "delta += tl.sum(p * g, 1)", "delta = (delta + tl.sum(p * g, 1)).to(tl.bfloat16).to(acc_dtype)", small=True,
    ),
    _triton(
        "softmax_vjp", "rounded-twice", "the difference is rounded to the result's dtype before it meets y",
        "(p * (g - delta[:, None])).to", "(p * (g - delta[:, None]).to(d_x.dtype.element_ty).to(acc_dtype)).to", times=2, small=True,
    ),
]  # fmt: skip

TRITON_LAYERNORM_VJP = [
    _triton("layernorm_vjp", "hx-mean-over-tile", "mean(h xh) of a short row divides by the tile's extent", "(tl.sum(h * xh, 1) / n)", "(tl.sum(h * xh, 1) / block_n)"),
    _triton(
        "layernorm_vjp", "one-pass-variance", "the variance of a short row is E[x^2] - mean^2",
        "r = tl.rsqrt(tl.sum(d * d, 1) / n + eps)[:, None]", "r = tl.rsqrt(tl.maximum(tl.sum(t * t, 1) / n - (tl.sum(t, 1) / n) * (tl.sum(t, 1) / n), 0.0) + eps)[:, None]", small=True,
    ),
    _triton("layernorm_vjp", "padding-in-variance", "lanes beyond a short row count in the variance", "d = tl.where(ok, t - (tl.sum(t, 1) / n)[:, None], 0.0)", "d = t - (tl.sum(t, 1) / n)[:, None]", small=True),
    _triton("layernorm_vjp", "missing-rows-counted", "rows beyond the last have an xh, where eps = 0 of 0 inf", "xh = tl.where(row_ok, d * r, 0.0)", "xh = d * r", small=True),
    _triton("layernorm_vjp", "weight-float16", "the weight of a short row passes through float16", "mask=lane < n, other=0.0).to(acc_dtype)[None, :]\n    w_sum", "mask=lane < n, other=0.0).to(tl.float16).to(acc_dtype)[None, :]\n    w_sum", small=True),
    _triton("layernorm_vjp", "unbiased-variance", "long rows divide the variance by n - 1", "r = tl.rsqrt(m2 / n + eps)", "r = tl.rsqrt(m2 / (n - 1) + eps)"),
    _triton("layernorm_vjp", "hx-not-moved", "mean(h xh) of a long row forgets that its tiles differ in their means", "tl.sum(h * d, 1) + ((delta - step) * tile_h - step * h_sum)", "tl.sum(h * d, 1)"),
    _triton("layernorm_vjp", "last-group-dropped", "the last of several partial sums is left out", "ok = (row < count) & (col < n)", "ok = (row < count - tl.minimum(count // 2, 1)) & (col < n)", small=True),
    _triton("layernorm_vjp", "d-weight-bfloat16", "d_weight is summed in bfloat16", "w_sum += g * xh", "w_sum = (w_sum + g * xh).to(tl.bfloat16).to(acc_dtype)"),
]  # fmt: skip

TRITON_RMSNORM_VJP = [
    _triton("rmsnorm_vjp", "hx-mean-over-tile", "mean(h xh) of a short row divides by the tile's extent", "(tl.sum(h * xh, 1) / n)", "(tl.sum(h * xh, 1) / block_n)"),
    _triton("rmsnorm_vjp", "missing-rows-counted", "rows beyond the last have an xh, where eps = 0 of 0 inf", "xh = tl.where(row_ok, t * r, 0.0)", "xh = t * r", small=True),
    _triton("rmsnorm_vjp", "last-not-summed", "mean(h xh) of a long row leaves out its last element", "hx += tl.sum(h * t, 1)", "hx += tl.sum(tl.where(col < n - 1, h * t, 0.0), 1)", small=True),
    _triton("rmsnorm_vjp", "weight-float16", "the weight of d_x passes through float16", "mask=lane < n, other=0.0).to(acc_dtype)[None, :]\n    w_sum", "mask=lane < n, other=0.0).to(tl.float16).to(acc_dtype)[None, :]\n    w_sum", small=True),
    _triton("rmsnorm_vjp", "d-weight-bfloat16", "d_weight is summed in bfloat16", "w_sum += g * xh", "w_sum = (w_sum + g * xh).to(tl.bfloat16).to(acc_dtype)"),
]  # fmt: skip

APART = (
    "        inner = product(call, name)\n"
    '        left, right, step = inner.arrays["a"], inner.arrays["b"], call.dims["n" if name == "d_a" else "m"]\n'
    "        parts = [(left[..., at : at + step], right[..., at : at + step, :]) for at in range(0, left.shape[-1], step)]\n"
    '        c = sum(forward.matmul(sibling(call, find_spec("matmul"), x, y, **inner.options), tiling)[0] for x, y in parts)\n'
)
TRITON_MATMUL_VJP = [
    _triton("matmul_vjp", "summed-batches-rounded", "each batch entry's product is rounded before the entries are summed", "        (c,) = forward.matmul(product(call, name), tiling)\n", APART),
    _triton("matmul_vjp", "summed-axes-reversed", "two summed batch axes are folded into the operands in different orders", "right.permute(*kept, *summed, rank, rank + 1)", "right.permute(*kept, *summed[::-1], rank, rank + 1)"),
    _triton("matmul_vjp", "cotangent-as-a", "a wider d_c is rounded to a's dtype first", "torch_dtype(product_dtype(call))\n    a, b", "torch_dtype(call.dtype)\n    a, b"),
    _triton(
        "matmul_vjp", "tf32-for-ieee", "a float32 cotangent loses 13 bits although precision is ieee",
        "    kept, summed = batch_axes(call, name)\n    left =", "    if dtype == torch.float32:\n        left, right = ((x.contiguous().view(torch.int32) & -8192).view(torch.float32) for x in (left, right))\n"
        "    kept, summed = batch_axes(call, name)\n    left =",
    ),
]  # fmt: skip

FAULTS_VJP: list[Fault] = [
    *TRITON_ATTENTION_VJP, *TRITON_SOFTMAX_VJP, *TRITON_LAYERNORM_VJP, *TRITON_RMSNORM_VJP, *TRITON_MATMUL_VJP,
]  # fmt: skip
