"""Faults planted in the kernels of attention."""

from __future__ import annotations

from tests.mutants.faults import Planted
from tests.mutants.faults._slopes import SLOPES
from tests.mutants.faults._starts import STARTS

FAULTS = {
    "triton": [
        *SLOPES["triton"],
        Planted(
            "float32-result-rounded-first",
            "o of float32 is rounded to the inputs' dtype on its way",
            old="rows.to(out.o.dtype.element_ty)",
            new="rows.to(tl.bfloat16).to(out.o.dtype.element_ty)",
            within="lib.attention",
        ),
        *STARTS["triton"],
        Planted(
            "sink-of-each-chunk",
            "the merger of chunks adds the sink once for each chunk",
            old="        sink = tl.load(sinks + head)\n",
            new="        sink = tl.load(sinks + head) + tl.log(chunks * 1.0)\n",
            within="lib.attention",
            sample=True,
            edge="decoding_with_sinks",
        ),
        Planted(
            "sink-of-another-head",
            "the merger of chunks takes the sink of the head before",
            old="    sink = None\n    if sinks is not None:\n        sink = tl.load(sinks + head)",
            new="    sink = None\n    if sinks is not None:\n        sink = tl.load(sinks + tl.maximum(head - 1, 0))",
            within="lib.attention",
        ),
        Planted(
            "sink-without-rescale",
            "sums of values are not rescaled by the sink's share",
            old="        rows = rows * share[:, None]\n",
            new="",
            within="lib.attention",
            sample=True,
            edge="sinks_above_all_scores",
        ),
        Planted(
            "sink-scaled",
            "the sink takes the factor of dots",
            old="sink.to(m.dtype)",
            new="sink.to(m.dtype) * scores.unit",
            within="lib.attention",
            times=2,
        ),
        Planted(
            "sink-missing-in-lse",
            "lse is of the keys alone",
            old="            _, total, rest = beside_sink(total, rest, sink.to(m.dtype))\n",
            new="            pass\n",
            within="lib.attention",
        ),
        Planted(
            "sink-of-key-head",
            "query heads of a group take the sink of their key head",
            old="masks.sinks + (heads + row * 0)",
            new="masks.sinks + (heads // extents.group + row * 0)",
        ),
        Planted(
            "sink-infinite-gives-zeros",
            "a sink of inf gives zeros and an lse of inf, not NaN",
            old='    sink = tl.where(sink < float("inf"), sink, float("nan"))\n',
            new="",
            within="lib.split_kv",
        ),
        Planted(
            "sink-of-minus-inf-is-a-score",
            "a sink of -inf beside an lse of -inf gives NaN",
            old='    none = sink == float("-inf")\n',
            new="    none = sink != sink\n",
            within="lib.split_kv",
        ),
        Planted(
            "sink-rest-left-out",
            "lse beside a sink lacks what rounding took from that of the keys",
            old="tl.where(above, 0.0, low)",
            new="tl.where(above, 0.0, 0.0)",
            within="lib.split_kv",
            small=True,
        ),
        Planted(
            "p-truncated",
            "bfloat16 weights are cut instead of rounded to nearest",
            old="        acc = product(p.to(v_tile.dtype), v_tile,",
            new=(
                "        if v_tile.dtype == tl.bfloat16:\n"
                "            p = (p.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)\n"
                "        acc = product(p.to(v_tile.dtype), v_tile,"
            ),
            small=True,
        ),
        Planted(
            "scale-off",
            "the default scale is 0.3 % too large",
            old="    scores = Scores.of(call)\n",
            new=(
                "    scores = Scores.of(call)\n"
                "    scores = scores._replace(rate=scores.rate * 1.003, unit=scores.unit * 1.003)\n"
            ),
            small=True,
        ),
        Planted(
            "last-key-dropped",
            "the last key of a long row is masked where the tail tile is ragged",
            old="limits(i + (kv_len - q_len), left, right, kv_len)",
            new="limits(i + (kv_len - q_len), left, right, kv_len - tl.minimum(kv_len // 129, 1))",
        ),
        Planted(
            "causal-edge-at-tile",
            "the first query of a tile sees one key beyond its own where that key ends a tile",
            old="    return walk(visit, state, own, keys, pairs,",
            new=(
                "    first, inner_first, inner_last, last = span\n"
                "    if right is not None:\n"
                "        seen = tl.minimum(tl.maximum(top + right + 2, 0), kv_len) // plan.block_kv * plan.block_kv\n"
                "        span = first, inner_first, tl.maximum(seen, inner_first), last\n"
                "    return walk(visit, state, own, keys, pairs,"
            ),
            small=True,
        ),
        Planted(
            "window-off-by-one",
            "the window is one key short on its left",
            old="    pairs = PairMask(i_ok, lo, hi,",
            new="    if left is not None:\n        lo += 1\n    pairs = PairMask(i_ok, lo, hi,",
            sample=True,
        ),
        Planted(
            "window-left-unmasked",
            "the tile that holds a window's left edge counts as wholly visible",
            old="    return walk(visit, state, own, keys, pairs,",
            new=(
                "    first, _, _, last = span\n"
                "    if left is not None:\n"
                "        inner_first = tl.minimum(tl.maximum(bottom - left, 0) // plan.block_kv * "
                "plan.block_kv, last)\n"
                "        _, _, seen, _ = band(top, bottom, None, right, kv_len, plan.block_kv)\n"
                "        span = first, inner_first, tl.maximum(seen, inner_first), last\n"
                "    return walk(visit, state, own, keys, pairs,"
            ),
        ),
        Planted(
            "finite-sentinel",
            "causal, window and tail masks write -1e4 for -inf",
            old='inside(j, pairs.lo, pairs.hi), s, float("-inf"))',
            new="inside(j, pairs.lo, pairs.hi), s, -1e4)",
            small=True,
            sample=True,
        ),
        Planted(
            "no-minus-inf-guard",
            "a tile with no visible key subtracts -inf from -inf",
            old="under = origin(m_new, scores)",
            new="under = tl.where(m_new == m_new, scores.rate, 0.0), m_new * scores.rate",
        ),
        Planted(
            "offset-rounded-everywhere",
            "the offset of scores beyond 2^24 is a product that rounds by more than weights can bear",
            old="under = origin(m_new, scores)",
            new=(
                'shift = tl.where(m_new == float("-inf"), 0.0, m_new)\n'
                "        under = scores.rate + shift * 0.0, shift * scores.rate"
            ),
        ),
        Planted(
            "lse-base-2",
            "the log-sum-exp takes its logarithm in base 2",
            old="tl.store(out.lse + at_lse, total[:, None], mask=ok)",
            new="tl.store(out.lse + at_lse, (m * scores.unit + tl.log2(l))[:, None], mask=ok)",
            within="lib.attention",
        ),
        Planted(
            "segments-only-on-edges",
            "segments are compared on edge tiles only",
            old='s = tl.where(pairs.segment == kv_segment, s, float("-inf"))',
            new='if edge:\n                s = tl.where(pairs.segment == kv_segment, s, float("-inf"))',
        ),
        Planted(
            "range-without-last-key",
            "the range of a segment ends before its last key, whose tile is not visited where that key begins it",
            old="tl.where(same, position + 1, 0)",
            new="tl.where(same, position, 0)",
            within="lib.segments",
        ),
        Planted(
            "acc-bfloat16",
            "the accumulator of o is rounded to bfloat16 after each tile",
            old="v_tile, acc, plan)\n    return acc, l, m",
            new="v_tile, acc, plan).to(tl.bfloat16).to(plan.acc_dtype)\n    return acc, l, m",
            small=True,
        ),
        Planted(
            "kv-head-modulo",
            "query head h reads key head h % kv_heads",
            old="head // extents.group",
            new="head % (extents.heads // extents.group)",
        ),
        Planted(
            "rescale-skipped",
            "l and o are not rescaled where the maximum grows by little",
            old="shrunk(m, under)\n",
            new="tl.where(shrunk(m, under) > 0.993, 1.0, shrunk(m, under))\n",
            small=True,
        ),
        Planted(
            "l-not-rescaled",
            "l keeps its unit when the maximum grows in an edge tile",
            old="l = tl.fma(l, tl.broadcast_to(alpha[:, None], l.shape), lane_sums(p))",
            new="l = l * (1.0 if edge else alpha[:, None]) + lane_sums(p)",
        ),
        Planted(
            "bias-stride",
            "a bias that broadcasts over heads is walked as if it had them",
            old="bias += batch * bias_b + heads * bias_h",
            new="bias += batch * bias_b + heads // extents.group * bias_h",
        ),
        Planted(
            "tanh-approx",
            "tanh is right to 11 bits, as the instruction of that name",
            old="return 1.0 - 2.0 * (1.0 / (1.0 + tl.exp2(x * 2.8853900817779268)))",
            new=("return (1.0 - 2.0 * (1.0 / (1.0 + tl.exp2(x * 2.8853900817779268)))).to(tl.float16).to(x.dtype)"),
            small=True,
        ),
        Planted(
            "q-prescaled",
            "q is scaled and rounded to its dtype before the dot, where a bias or a softcap follows",
            old=(
                "    t = product(a, tl.trans(b), None, plan)\n"
                "    if scores.pre is not None:\n"
                "        t = t * scores.pre"
            ),
            new=(
                "    scaled = a\n"
                "    if scores.pre is not None:\n"
                "        scaled = (a.to(plan.acc_dtype) * scores.pre).to(a.dtype)\n"
                "    t = product(scaled, tl.trans(b), None, plan)"
            ),
            small=True,
        ),
        Planted(
            "store-unmasked",
            "lanes of a head dimension beyond dv are written too",
            old="mask=ok & (ddv < dv))",
            new="mask=ok)",
            gpu=False,
            within="lib.attention",
        ),
        Planted(
            "chunks-in-another-unit",
            "states of chunks are merged as if scores were twice as large",
            old="acc, l, m = merge((acc, l, m), settled(part), scores)\n",
            new=(
                "acc, l, m = merge((acc, l, m * 2.0), (part[0], tl.sum(part[1], 1), part[2] * 2.0), scores)\n"
                "            m = m * 0.5\n"
            ),
        ),
        Planted(
            "last-chunk-unmerged",
            "the last of the chunks that have programs of their own is left out of a row",
            old="row_ok & (chunk < chunks)",
            new="row_ok & (chunk < tl.maximum(chunks - 1, 1))",
            within="lib.attention",
        ),
        Planted(
            "packed-rows-by-head",
            "rows of a tile that heads share are taken head by head",
            old="i, heads, _, _ = rows_of(tile, head, extents, plan)",
            new=(
                "i, heads, _, _ = rows_of(tile, head, extents, plan)\n"
                "    if plan.packed:\n"
                "        heads = head + (heads - head + i) % extents.group"
            ),
        ),
        Planted(
            "v-tail-unmasked",
            "rows of v beyond the last key are read",
            old="j_ok[:, None], keys.dv_ok, edge, plan.ragged_dv)",
            new="j_ok[:, None], keys.dv_ok, False, plan.ragged_dv)",
            gpu=False,
        ),
    ],
    "pallas": [
        *SLOPES["pallas"],
        *STARTS["pallas"],
        Planted(
            "sink-without-rescale",
            "sums of values are not rescaled by the sink's share",
            old="            o = o * across(share, o.shape[1])\n",
            new="",
            sample=True,
            edge="sinks_above_all_scores",
        ),
        Planted(
            "sink-missing-in-lse",
            "lse is of the keys alone",
            old='        if "lse" in ref:\n            numbers',
            new='        if "lse" in ref:\n            vars(ref).pop("sinks", None)\n            numbers',
        ),
        Planted(
            "sink-scaled",
            "the sink takes the factor of dots",
            old="ref.sinks[...].T",
            new="ref.sinks[...].T * scores.unit",
        ),
        Planted(
            "sink-of-rows-that-follow",
            "the last step reads the sinks of the rows that follow",
            old="sink_blocks(call, shared, bq, written)",
            new="sink_blocks(call, shared, bq, query)",
        ),
        Planted(
            "sinks-head-by-head",
            "rows have sinks head by head, and are query by query",
            old="jnp.tile(of_groups, (1, q_len, 1))",
            new="jnp.repeat(of_groups, q_len, axis=2)",
        ),
        Planted(
            "sink-infinite-gives-zeros",
            "a sink of inf gives zeros and an lse of inf, not NaN",
            old="    sink = jnp.where(sink < jnp.inf, sink, jnp.nan)\n",
            new="",
            within="lib.double_float",
        ),
        Planted(
            "p-truncated",
            "bfloat16 weights are cut instead of rounded to nearest",
            old="        ref.acc[...] = ref.acc[...] * across(shrink, ref.acc.shape[1]) + dot(p.astype(v.dtype),",
            new=(
                "        if v.dtype == jnp.bfloat16:\n"
                "            bits = jax.lax.bitcast_convert_type(p, jnp.int32) & -65536\n"
                "            p = jax.lax.bitcast_convert_type(bits, jnp.float32)\n"
                "        ref.acc[...] = ref.acc[...] * across(shrink, ref.acc.shape[1]) + dot(p.astype(v.dtype),"
            ),
            small=True,
        ),
        Planted(
            "l-of-rounded-p",
            "l sums the weights after they were rounded to v's dtype",
            old="shrink + jnp.sum(p, axis=1",
            new="shrink + jnp.sum(p.astype(v.dtype).astype(jnp.float32), axis=1",
            small=True,
        ),
        Planted(
            "causal-top-left",
            "queries stand beside the first keys, not the last",
            old="    band = Band.of(call, bq, bkv * parts(call, bq, bkv), shared).closing(q_len)\n",
            new=(
                "    band = Band.of(call, bq, bkv * parts(call, bq, bkv), shared)\n"
                '    first, last = (x if x is None else x - call.dims["kv_len"] + q_len for x in band[:2])\n'
                "    band = band._replace(first=first, last=last)\n"
            ),
        ),
        Planted(
            "band-left-corner",
            "a block whose last query just misses the first key counts as inside the band",
            old="band.visit(",
            new="band._replace(first=None if band.first is None else band.first - 1).visit(",
            small=True,
        ),
        Planted(
            "band-right-corner",
            "a block whose first query just misses the last key counts as inside the band",
            old="band.visit(",
            new="band._replace(last=None if band.last is None else band.last + 1).visit(",
            small=True,
        ),
        Planted(
            "half-left-corner",
            "a half whose last query just misses the first key of a part counts as inside the band",
            old="small.visit(",
            new="small._replace(first=None if small.first is None else small.first - 1).visit(",
            small=True,
        ),
        Planted(
            "half-right-corner",
            "a half whose first query just misses the last key of a part counts as inside the band",
            old="small.visit(",
            new="small._replace(last=None if small.last is None else small.last + 1).visit(",
            small=True,
        ),
        Planted(
            "half-passes-by",
            "a half of the rows passes by the first part of the keys that it sees",
            old="(first <= column) & (column <= last)",
            new="(first < column) & (column <= last)",
        ),
        Planted(
            "half-of-other-rows",
            "the second half of the rows has the mask of the first",
            old="row, column = self.i * self.pieces + piece,",
            new="row, column = self.i * self.pieces,",
        ),
        Planted(
            "too-few-steps",
            "a band that straddles one block more than its width loses the last",
            old="    pairs = batch * heads * rows * min(",
            new=(
                "    if band.first is not None and band.last is not None:\n"
                "        queries = pl.cdiv(bq - 1, shared) + 1\n"
                "        steps = min(steps, pl.cdiv(max(1, queries + band.last - band.first), band.block_kv))\n"
                "    pairs = batch * heads * rows * min("
            ),
            small=True,
        ),
        Planted(
            "no-minus-inf-guard",
            "a block with no visible key subtracts -inf from -inf",
            old="m, p, shrink = online_step(ref.m[...], s, axis=1, unit=scores.unit)\n",
            new=(
                "m = jnp.maximum(ref.m[...], jnp.max(s, axis=1, keepdims=True))\n"
                "        p = jnp.exp((s - across(m, s.shape[1])) * scores.unit)\n"
                "        shrink = jnp.exp((ref.m[...] - m) * scores.unit)\n"
            ),
        ),
        Planted(
            "finite-sentinel",
            "masks write -0.7 of the largest number for -inf",
            old="s = jnp.where(visible, s, -jnp.inf)",
            new="s = jnp.where(visible, s, -0.7 * float(jnp.finfo(jnp.float32).max))",
            small=True,
        ),
        Planted(
            "segments-only-on-edges",
            "segments are compared on edge blocks only",
            old="both(band.allowed(row, column) if edge else None, segments)",
            new="both(band.allowed(row, column), segments) if edge else None",
        ),
        Planted(
            "bias-of-kv-head",
            "the bias follows the key's head",
            old=" | sink_blocks(call, shared, bq, written)\n",
            new=(
                "\n"
                '    if "bias" in inputs:\n'
                "        of_kv_head = lambda b, h, *at: (b, quotient(h, of_keys), query(b, h, *at)[2])\n"
                '        inputs["bias"] = AttentionOperands(call).at(bq, band.block_kv, of_kv_head, key)["bias"]\n'
            ),
        ),
        Planted(
            "kv-head-modulo",
            "query head h reads key head h % kv_heads",
            old="    inputs = AttentionOperands(call, shared)",
            new=(
                '    q = call.arrays["q"].reshape(batch, q_len, shared, heads, d)\n'
                '    q = jnp.swapaxes(q, 2, 3).reshape(call.arrays["q"].shape)\n'
                '    call = call.replace(arrays={**call.arrays, "q": q})\n'
                "    inputs = AttentionOperands(call, shared)"
            ),
            sample=True,
            edge="many_query_heads_a_key_head",
        ),
        Planted(
            "softcap-pade",
            "tanh is its low-order fraction, clamped",
            old="tanh = jnp.tanh(s)",
            new="tanh = jnp.clip(s * (27 + s * s) / (27 + 9 * s * s), -1, 1)",
        ),
        Planted(
            "bias-after-mask",
            "the bias is added after the masks, so that a NaN there is added to -inf",
            old=(
                "(1, 1)), bias, fall)\n"
                "        visible = visible_pairs(ref, keys, i, j, edge)\n"
                "        if visible is not None:\n"
                "            s = jnp.where(visible, s, -jnp.inf)\n"
            ),
            new=(
                "(1, 1)), None if bias is None else jnp.zeros_like(bias), fall)\n"
                "        visible = visible_pairs(ref, keys, i, j, edge)\n"
                "        if visible is not None:\n"
                "            s = jnp.where(visible, s, -jnp.inf)\n"
                "        if bias is not None:\n"
                "            s = s + within(bias, 1, j * bkv, band.kv_len)\n"
            ),
            small=True,
        ),
        Planted(
            "additive-segments",
            "the segment mask adds -inf, so that a NaN or inf in another segment's key stays",
            old="        visible = visible_pairs(ref, keys, i, j, edge)\n",
            new=(
                '        if "q_segment_ids" in ref:\n'
                "            s += jnp.where(same_segment(ref.q_segment_ids, ref.kv_segment_ids), 0.0, -jnp.inf)\n"
                "        visible = keys.allowed(i, j) if edge else None\n"
            ),
            small=True,
        ),
        Planted(
            "acc-bfloat16",
            "the accumulator of o is rounded to bfloat16 after each block",
            old="dot(p.astype(v.dtype), v, (1, 0))",
            new=(
                "dot(p.astype(v.dtype), v, (1, 0))\n"
                "        ref.acc[...] = ref.acc[...].astype(jnp.bfloat16).astype(jnp.float32)"
            ),
            small=True,
        ),
        Planted(
            "scale-of-padded-d",
            "the default scale comes from the head dimension rounded up to 8",
            old='        (pre, unit), softcap = score_unit(call), call.options["softcap"]\n',
            new=(
                '        (pre, unit), softcap = score_unit(call), call.options["softcap"]\n'
                '        unit *= (call.dims["d"] / (-(-call.dims["d"] // 8) * 8)) ** 0.5\n'
            ),
            small=True,
        ),
        Planted(
            "heads-in-one-query",
            "rows of the heads of a group count as queries of their own",
            old="parts(call, bq, bkv), shared).",
            new="parts(call, bq, bkv)).",
        ),
        Planted(
            "last-part-dropped",
            "a step that holds several blocks of keys leaves out the last",
            old="for part in range(self.number):\n            if part < of_last",
            new="for part in range(max(self.number - 1, 1)):\n            if part < of_last",
        ),
        Planted(
            "last-keys-dropped",
            "of the last step the part that keys do not fill is left out",
            old="pl.cdiv(self.band.kv_len % self.band.block_kv, self.bkv)",
            new="self.band.kv_len % self.band.block_kv // self.bkv",
        ),
        Planted(
            "parts-beyond-unmasked",
            "parts of a step that lie wholly beyond the last key count where blocks of their size divide the keys",
            old="pl.when(self.j < band.kv_len // band.block_kv)(partial(self.part, part, edge))",
            new="self.part(part, edge)",
        ),
        Planted(
            "beyond-the-last-key",
            "a window that reaches beyond the last key is taken for one that ends there, as a causal band does",
            old=".closing(q_len)\n",
            new=".closing(0)\n",
        ),
        Planted(
            "second-part-beside-unseen",
            "a first part of the keys that only some rows see wholly is taken for one that all see",
            old="both(self.keys.inside(self.i, column) & (column + 1 <= last), self.full)",
            new="both(column + 1 <= last, self.full)",
        ),
        Planted(
            "span-without-last-tile",
            "the span of a tile of queries ends before the last tile of keys that may hold its segments",
            old="return self.table[index], self.table[index + 1]",
            new="return self.table[index], self.table[index + 1] - 1",
            within="_heads",
        ),
        Planted(
            "ahead-too-early",
            "the next queries are there one step before the last visible block",
            old="band.ahead(index, step, down, order, ",
            new="band.ahead(index, step + 1, down, order, ",
        ),
    ],
    "pallas/gpu": [
        Planted(
            "no-minus-inf-guard",
            "a tile with no visible key subtracts -inf from -inf",
            old="return factor, jnp.where(m == -jnp.inf, 0.0, m * factor)",
            new="return factor, m * factor",
            within="lib.mosaic_gpu.attention",
        ),
        Planted(
            "offset-rounded-everywhere",
            "the offset of scores beyond 2^24 is a product that rounds by more than weights can bear",
            old="jnp.where(jnp.abs(m) < beyond, scale_log2, power_of_two)",
            new="jnp.where(jnp.abs(m) < beyond, scale_log2, scale_log2)",
            within="lib.mosaic_gpu.attention",
        ),
        Planted(
            "band-right-corner",
            "a tile whose first query just misses the last key counts as inside the band",
            old="inside = mine.inside(i, j)",
            new="inside = mine._replace(last=None if mine.last is None else mine.last + 1).inside(i, j)",
            small=True,
            within="lib.mosaic_gpu.flash",
        ),
        Planted(
            "causal-top-left",
            "queries stand beside the first keys, not the last",
            old="        Band.of(call, block_q, block_kv),\n",
            new=(
                "        Band.of(call, block_q, block_kv)._replace(\n"
                '            last=0 if call.options["is_causal"] else Band.of(call, block_q, block_kv).last\n'
                "        ),\n"
            ),
            within="lib.mosaic_gpu.attention",
        ),
        Planted(
            "l-of-rounded-p",
            "l sums the weights of the first keys after they were rounded to v's dtype",
            old="return acc, jnp.sum(p, axis=1), m, p.astype(plan.dtype)",
            new="return acc, jnp.sum(p.astype(plan.dtype).astype(jnp.float32), axis=1), m, p.astype(plan.dtype)",
            small=True,
            within="lib.mosaic_gpu.attention",
        ),
        Planted(
            "acc-not-rescaled",
            "the sum of values keeps its unit when the maximum grows",
            old="    acc = [part * lax.broadcast_in_dim(alpha, part.shape, (0,)) for part in acc]\n",
            new="",
            within="lib.mosaic_gpu.attention",
        ),
        Planted(
            "values-of-these-keys",
            "the weights of the keys before meet the values of these",
            old="multiply_values(ref, plan, last, p, products)",
            new="multiply_values(ref, plan, buffer, p, products)",
            gpu=False,  # these values may not have arrived
            within="lib.mosaic_gpu.attention",
        ),
        Planted(
            "bias-of-first-head",
            "all heads share the bias of the first",
            old="head if heads > 1 else 0",
            new="0",
            within="lib.mosaic_gpu.flash",
        ),
        Planted(
            "additive-segments",
            "the segment mask adds -inf, so that a NaN or inf in another segment's key stays",
            old="s = jnp.where(same_segment(ref.q_ids, ref.kv_ids, tile.batch, rows, keys), s, -jnp.inf)",
            new="s = s + jnp.where(same_segment(ref.q_ids, ref.kv_ids, tile.batch, rows, keys), 0.0, -jnp.inf)",
            small=True,
            within="lib.mosaic_gpu.attention",
        ),
        Planted(
            "softcap-pade",
            "tanh is its low-order fraction, clamped",
            old="s if self.softcap is None else tanh(s)",
            new="s if self.softcap is None else jnp.clip(s * (27 + s * s) / (27 + 9 * s * s), -1, 1)",
            within="lib.mosaic_gpu.attention",
        ),
        Planted(
            "scale-off",
            "the default scale is 0.3 % too large",
            old="    pre, unit = below_overflow(*score_unit(call))\n",
            new="    pre, unit = below_overflow(*score_unit(call))\n    unit *= 1.003\n",
            small=True,
            within="lib.mosaic_gpu.attention",
        ),
    ],
    "pallas/decode": [
        Planted(
            "shares-not-rescaled",
            "the values of a share keep the unit of its own maximum",
            old="acc = (of_elements.elements(before, part) for",
            new="acc = (before + part for",
        ),
        Planted(
            "l-not-rescaled",
            "the sum of a share's weights keeps the unit of its own maximum",
            old="of_row.rows(total.l, share.l)",
            new="total.l + share.l",
            small=True,
        ),
        Planted(
            "no-zero-guard",
            "a row that sees no key in any share divides by 0",
            old="1.0 / jnp.where(total.l == 0.0, 1.0, total.l)",
            new="1.0 / total.l",
        ),
        Planted(
            "rows-are-queries",
            "masks take every row for a query of its own",
            old='Band.of(call, QUERIES, block_kv, dims["group"])',
            new="Band.of(call, QUERIES, block_kv)",
            small=True,
        ),
        Planted(
            "queries-of-heads-mixed",
            "rows of a key head are taken in the order of all heads",
            old="plan.heads, group, plan.d).swapaxes(1, 2)",
            new="plan.heads, group, plan.d)",
        ),
        Planted(
            "segments-by-head",
            "rows have the segments of queries head by head, and are query by query",
            old="jnp.repeat(q_ids, group, axis=1)",
            new="jnp.tile(q_ids, (1, group))",
            small=True,
        ),
        Planted(
            "bias-by-head",
            "rows have the bias of queries head by head, and are query by query",
            old="bias.reshape(batch, heads, group, -1, kv_len).swapaxes(2, 3)",
            new="bias.reshape(batch, heads, group, -1, kv_len)",
            small=True,
        ),
        Planted(
            "lse-without-unit",
            "lse has the maximum in the unit of the scores",
            old='plan.scores.log_sum(found["l"], found["m"])',
            new='{"lse": found["m"] + jnp.log(found["l"]), "lse_low": 0.0 * found["m"]}',
        ),
    ],
}
