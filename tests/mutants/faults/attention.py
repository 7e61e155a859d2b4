"""Faults planted in the kernels of attention."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "p-truncated",
            "bfloat16 weights are cut instead of rounded to nearest",
            old="        acc = tl.dot(p.to(v_tile.dtype), v_tile,",
            new=(
                "        if v_tile.dtype == tl.bfloat16:\n"
                "            p = (p.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)\n"
                "        acc = tl.dot(p.to(v_tile.dtype), v_tile,"
            ),
            small=True,
        ),
        Planted(
            "scale-off",
            "the default scale is 0.3 % too large",
            old="    pre, unit = score_unit(call)\n",
            new="    pre, unit = score_unit(call)\n    unit *= 1.003\n",
            small=True,
        ),
        Planted(
            "last-key-dropped",
            "the last key of a long row is masked where the tail tile is ragged",
            old="tl.full([block_q, 1], kv_len, tl.int32)",
            new="tl.full([block_q, 1], kv_len - tl.minimum(kv_len // 129, 1), tl.int32)",
        ),
        Planted(
            "causal-edge-at-tile",
            "the first query of a tile sees one key beyond its own where that key ends a tile",
            old="tl.minimum(tl.maximum(top + right + 1, 0), kv_len)\n    inner_first",
            new="tl.minimum(tl.maximum(top + right + 2, 0), kv_len)\n    inner_first",
            small=True,
        ),
        Planted(
            "window-off-by-one",
            "the window is one key short on its left",
            old="limit_lo = i[:, None] + (at - left)",
            new="limit_lo = i[:, None] + (at - left + 1)",
            sample=True,
        ),
        Planted(
            "window-left-unmasked",
            "the tile that holds a window's left edge counts as wholly visible",
            old="inner_first = tl.minimum((lo_all + block_kv - 1) // block_kv * block_kv, last)",
            new="inner_first = tl.minimum(lo_all // block_kv * block_kv, last)",
        ),
        Planted(
            "finite-sentinel",
            "causal, window and tail masks write -1e4 for -inf",
            old='< limit_hi), s, float("-inf"))',
            new="< limit_hi), s, -1e4)",
            small=True,
            sample=True,
        ),
        Planted(
            "no-minus-inf-guard",
            "a tile with no visible key subtracts -inf from -inf",
            old='shift = tl.where(m_new == float("-inf"), 0.0, m_new)',
            new="shift = m_new",
        ),
        Planted(
            "lse-base-2",
            "the log-sum-exp takes its logarithm in base 2",
            old="m * unit + tl.log(l)",
            new="m * unit + tl.log2(l)",
        ),
        Planted(
            "segments-only-on-edges",
            "segments are compared on edge tiles only",
            old='s = tl.where(q_segment == kv_segment, s, float("-inf"))',
            new='if edge:\n                s = tl.where(q_segment == kv_segment, s, float("-inf"))',
        ),
        Planted(
            "acc-bfloat16",
            "the accumulator of o is rounded to bfloat16 after each tile",
            old="input_precision=precision, out_dtype=acc_dtype)\n    return acc, l, m",
            new="input_precision=precision, out_dtype=acc_dtype).to(tl.bfloat16).to(acc_dtype)\n    return acc, l, m",
            small=True,
        ),
        Planted(
            "kv-head-modulo",
            "query head h reads key head h % kv_heads",
            old="(head // group)",
            new="(head % (heads // group))",
            times=2,
        ),
        Planted(
            "rescale-skipped",
            "l and o are not rescaled where the maximum grows by little",
            old="tl.exp2((m - shift) * rate)",
            new="tl.where((m - shift) * rate > -0.01, 1.0, tl.exp2((m - shift) * rate))",
            small=True,
        ),
        Planted(
            "l-not-rescaled",
            "l keeps its unit when the maximum grows in an edge tile",
            old="l = l * alpha + tl.sum(p, 1)",
            new="l = l * (1.0 if edge else alpha) + tl.sum(p, 1)",
        ),
        Planted(
            "bias-stride",
            "a bias that broadcasts over heads is walked as if it had them",
            old="bias += batch * bias_b + head * bias_h",
            new="bias += batch * bias_b + head // group * bias_h",
        ),
        Planted(
            "tanh-range",
            "the tanh fraction is used beyond the range where it converges",
            old="tl.abs(x) < 0.5",
            new="tl.abs(x) < 3.5",
            small=True,
        ),
        Planted(
            "q-prescaled",
            "q is scaled and rounded to its dtype before the dot, where a bias or a softcap follows",
            old=(
                "        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=precision, out_dtype=acc_dtype)\n"
                "        if pre is not None:\n"
                "            s = s * pre"
            ),
            new=(
                "        qs = q_tile\n"
                "        if pre is not None:\n"
                "            qs = (q_tile.to(acc_dtype) * pre).to(q_tile.dtype)\n"
                "        s = tl.dot(qs, tl.trans(k_tile), input_precision=precision, out_dtype=acc_dtype)"
            ),
            small=True,
        ),
        Planted(
            "store-unmasked",
            "lanes of a head dimension beyond dv are written too",
            old="mask=i_ok & (ddv < dv))",
            new="mask=i_ok)",
            gpu=False,
        ),
        Planted(
            "v-tail-unmasked",
            "rows of v beyond the last key are read",
            old="j_ok[:, None], ddv < dv, edge, not whole_dv)",
            new="j_ok[:, None], ddv < dv, False, not whole_dv)",
            gpu=False,
        ),
    ],
    "pallas": [
        Planted(
            "p-truncated",
            "bfloat16 weights are cut instead of rounded to nearest",
            old="        acc_ref[...] = acc_ref[...] * shrink + dot(p.astype(v.dtype),",
            new=(
                "        if v.dtype == jnp.bfloat16:\n"
                "            p = lax.bitcast_convert_type(lax.bitcast_convert_type(p, jnp.int32) & -65536, "
                "jnp.float32)\n"
                "        acc_ref[...] = acc_ref[...] * shrink + dot(p.astype(v.dtype),"
            ),
            small=True,
        ),
        Planted(
            "l-of-rounded-p",
            "l sums the weights after they were rounded to v's dtype",
            old="shrink + jnp.sum(p, axis=1",
            new='shrink + jnp.sum(p.astype(ref["v"].dtype).astype(jnp.float32), axis=1',
            small=True,
        ),
        Planted(
            "causal-top-left",
            "queries stand beside the first keys, not the last",
            old="aligned, far = kv_len - q_len, kv_len + q_len",
            new="aligned, far = 0, kv_len + q_len",
        ),
        Planted(
            "band-left-corner",
            "a block whose last query just misses the first key counts as inside the band",
            old=">= self.first - 1",
            new=">= self.first - 2",
            small=True,
        ),
        Planted(
            "band-right-corner",
            "a block whose first query just misses the last key counts as inside the band",
            old="<= self.last + 1",
            new="<= self.last + 2",
            small=True,
        ),
        Planted(
            "too-few-steps",
            "a band that straddles one block more than its width loses the last",
            old="pl.cdiv(width - 1, self.block_kv) + 1",
            new="pl.cdiv(width, self.block_kv)",
            small=True,
        ),
        Planted(
            "no-minus-inf-guard",
            "a block with no visible key subtracts -inf from -inf",
            old="origin = jnp.where(m_new == -jnp.inf, 0.0, m_new)",
            new="origin = m_new",
        ),
        Planted(
            "finite-sentinel",
            "masks write -0.7 of the largest number for -inf",
            old="s = jnp.where(allowed, s, -jnp.inf)",
            new="s = jnp.where(allowed, s, -0.7 * float(jnp.finfo(jnp.float32).max))",
            small=True,
        ),
        Planted(
            "segments-only-on-edges",
            "segments are compared on edge blocks only",
            old="both(band.allowed(i, j) if edge else None, segments)",
            new="both(band.allowed(i, j), segments) if edge else None",
        ),
        Planted(
            "bias-of-kv-head",
            "the bias follows the key's head",
            old="lambda b, h, i, step: (b, h, i))\n        rows",
            new="lambda b, h, i, step: (b, quotient(h, group), i))\n        rows",
        ),
        Planted(
            "kv-head-modulo",
            "query head h reads key head h % kv_heads",
            old="return b, quotient(h, group), band",
            new="return b, h % k.shape[2], band",
            sample=True,
        ),
        Planted(
            "softcap-pade",
            "tanh is its low-order fraction, clamped",
            old="s = jnp.tanh(s)",
            new="s = jnp.clip(s * (27 + s * s) / (27 + 9 * s * s), -1, 1)",
        ),
        Planted(
            "bias-after-mask",
            "the bias is added after the masks, so that a NaN there is added to -inf",
            old=(
                '        if "bias" in ref:\n'
                '            s = s + ref["bias"][...].astype(jnp.float32)\n'
                '        segments = same_segment(ref["q_segment_ids"], ref["kv_segment_ids"]) if '
                '"q_segment_ids" in ref else None\n'
                "        allowed = both(band.allowed(i, j) if edge else None, segments)\n"
                "        if allowed is not None:\n"
                "            s = jnp.where(allowed, s, -jnp.inf)\n"
            ),
            new=(
                '        segments = same_segment(ref["q_segment_ids"], ref["kv_segment_ids"]) if '
                '"q_segment_ids" in ref else None\n'
                "        allowed = both(band.allowed(i, j) if edge else None, segments)\n"
                "        if allowed is not None:\n"
                "            s = jnp.where(allowed, s, -jnp.inf)\n"
                '        if "bias" in ref:\n'
                "            s = s + jnp.where(positions(s.shape, 1, j * band.block_kv) < band.kv_len, "
                'ref["bias"][...].astype(jnp.float32), 0.0)\n'
            ),
            small=True,
        ),
        Planted(
            "additive-segments",
            "the segment mask adds -inf, so that a NaN or inf in another segment's key stays",
            old="        allowed = both(band.allowed(i, j) if edge else None, segments)\n",
            new=(
                "        if segments is not None:\n"
                "            s += jnp.where(segments, 0.0, -jnp.inf)\n"
                "        allowed = band.allowed(i, j) if edge else None\n"
            ),
            small=True,
        ),
        Planted(
            "acc-bfloat16",
            "the accumulator of o is rounded to bfloat16 after each block",
            old="dot(p.astype(v.dtype), v, (1, 0))",
            new=(
                "dot(p.astype(v.dtype), v, (1, 0))\n"
                "        acc_ref[...] = acc_ref[...].astype(jnp.bfloat16).astype(jnp.float32)"
            ),
            small=True,
        ),
        Planted(
            "scale-of-padded-d",
            "the default scale comes from the head dimension rounded up to 8",
            old="    pre, unit = score_unit(call)\n",
            new="    pre, unit = score_unit(call)\n    unit *= (d / padded(d, 8)) ** 0.5\n",
            small=True,
        ),
    ],
}
