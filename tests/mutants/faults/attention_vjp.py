"""Faults planted in the kernels of attention_vjp."""

from __future__ import annotations

from tests.mutants.faults import Planted
from tests.mutants.faults._on_host import on_host
from tests.mutants.faults._slopes import SLOPES_VJP
from tests.mutants.faults._starts import STARTS

FAULTS = {
    "triton": [
        *SLOPES_VJP["triton"],
        Planted(
            "float32-d-q-rounded-first",
            "d_q is rounded to the inputs' dtype before it is stored as float32",
            old="(acc * work.scale).to(d_q.dtype.element_ty)",
            new="(acc * work.scale).to(k.dtype.element_ty).to(d_q.dtype.element_ty)",
        ),
        Planted(
            "float32-d-k-rounded-first",
            "d_k is rounded to the inputs' dtype before it is stored as float32",
            old="(dk_acc * work.scale).to(out.d_k.dtype.element_ty)",
            new="(dk_acc * work.scale).to(k.dtype.element_ty).to(out.d_k.dtype.element_ty)",
        ),
        *STARTS["triton"],
        Planted(
            "d-sinks-sign",
            "d_sinks has the other sign",
            old='        total -= tl.where(l == float("-inf")',
            new='        total += tl.where(l == float("-inf")',
            within="lib.attention",
            sample=True,
            edge="a_sink_above_all_scores",
        ),
        Planted(
            "d-sinks-of-one-batch",
            "d_sinks sums the rows of the first batch entry",
            old="range(0, extents.total, tile.rows)",
            new="range(0, extents.q_len, tile.rows)",
            within="lib.attention",
        ),
        Planted(
            "d-sinks-batches-mixed",
            "d_sinks reads the first entry's lse for all",
            old="l = tl.load(lse + batch * lse_b + head * lse_h + row * lse_s, mask=ok",
            new="l = tl.load(lse + head * lse_h + row * lse_s, mask=ok",
            within="lib.attention",
        ),
        Planted(
            "d-sinks-without-last-rows",
            "d_sinks leaves out rows that do not fill a tile",
            old="range(0, extents.total, tile.rows)",
            new="range(0, tl.maximum(extents.total // tile.rows * tile.rows, tile.rows), tile.rows)",
            within="lib.attention",
        ),
        Planted(
            "d-sinks-of-rows-that-see-nothing",
            "rows with an lse of -inf have a weight",
            old='total -= tl.where(l == float("-inf"), 0.0, p * delta_i)',
            new="total -= p * delta_i",
            within="lib.attention",
        ),
        Planted(
            "delta-without-d-lse",
            "Delta leaves out the cotangent of lse",
            old="total -= tl.load(d_lse",
            new="total -= 0.0 * tl.load(d_lse",
            within="lib.attention",
        ),
        Planted(
            "delta-of-rounded-products",
            "Delta sums products that were rounded to the inputs' dtype",
            old="tl.sum(o_tile * d_o_tile, 1)",
            new="tl.sum((o_tile * d_o_tile).to(o.dtype.element_ty).to(tile.acc_dtype), 1)",
            small=True,
            within="lib.attention",
        ),
        Planted(
            "p-truncated",
            "bfloat16 weights are cut instead of rounded to nearest on their way into d_v",
            old="        if plan.want_v:\n            dv = product(p.to(d_o_tile.dtype),",
            new=(
                "        if plan.want_v:\n"
                "            pt = p\n"
                "            if d_o_tile.dtype == tl.bfloat16:\n"
                "                pt = (p.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)\n"
                "            dv = product(pt.to(d_o_tile.dtype),"
            ),
            small=True,
        ),
        Planted(
            "ds-rounded-twice",
            "dS is rounded to the inputs' dtype before the softcap's slope",
            old="        ds = ds * (1.0 - t * t)",
            new="        ds = ds.to(a.dtype).to(plan.acc_dtype) * (1.0 - t * t)",
            small=True,
        ),
        Planted(
            "no-softcap-slope", "the softcap's slope is left out", old="ds = ds * (1.0 - t * t)", new="ds = ds * 1.0"
        ),
        Planted(
            "softcap-slope-in-bias",
            "d_bias takes the softcap's slope, too",
            old="        ds = ds * (1.0 - t * t)\n",
            new="        ds = ds * (1.0 - t * t)\n        d_bias = ds\n",
        ),
        Planted(
            "d-k-scale-off",
            "d_k's scale is 0.3 % too large",
            old="(dk_acc * work.scale)",
            new="(dk_acc * (work.scale * 1.003))",
        ),
        Planted(
            "d-q-scale-twice", "d_q is scaled twice", old="(acc * work.scale)", new="(acc * work.scale * work.scale)"
        ),
        Planted(
            "log2e-rounded",
            "exp is exp2 with log2(e) of five digits",
            old="apart * scores.rate)",
            new="apart * (scores.rate * 1.0000034))",
            small=True,
        ),
        Planted(
            "log2e-before-lse",
            "scores and lse take log2(e)'s factor before their difference, by which the largest overflow",
            old="tl.minimum((s - shift) - low,",
            new="tl.minimum((s * 1.4426950408889634 - shift * 1.4426950408889634) * 0.6931471805599453 - low,",
            small=True,
        ),
        Planted(
            "no-minus-inf-guard",
            "a row that sees no key keeps its lse of -inf",
            old='shift, delta = tl.where(unseen, float("inf"), high)',
            new="shift, delta = high",
            small=True,
            within="lib.attention",
        ),
        Planted(
            "masked-once",
            "dS is not selected again after the arithmetic: what a masked pair's v holds leaks",
            old="tl.where(allowed, d_bias, 0.0), tl.where(allowed, ds, 0.0)",
            new="d_bias, ds",
            small=True,
        ),
        Planted(
            "last-query-dropped",
            "the last of many queries is masked on the edge tiles of d_k and d_v",
            old="allowed = seen(i, i_ok, pairs, edge)",
            new=(
                "allowed = seen(i, i_ok, pairs, edge)\n"
                "        if edge:\n"
                "            allowed = allowed & (i[None, :] < queries.q_len - tl.minimum(queries.q_len // 65, 1))"
            ),
        ),
        Planted(
            "last-head-dropped",
            "d_k and d_v leave out the last query head of a group",
            old="range(kv_head * group, kv_head * group + group)",
            new="range(kv_head * group, kv_head * group + tl.maximum(group - 1, 1))",
        ),
        Planted(
            "kv-head-modulo",
            "query head h reads key head h % kv_heads in d_q",
            old="head // extents.group",
            new="head % (extents.heads // extents.group)",
        ),
        Planted(
            "transposed-band-corner",
            "a tile of queries whose first just misses the last key of a tile counts as wholly seen",
            old="span = band(top, bottom,",
            new="span = band(top, bottom - 1,",
            small=True,
        ),
        Planted(
            "transposed-band-start",
            "the queries that see a tile of keys start one too late",
            old="span = band(top, bottom,",
            new="span = band(top + 1, bottom,",
            small=True,
        ),
        Planted(
            "transposed-window-swapped",
            "keys are seen as far as queries see, not the other way round",
            old="limits(j - (kv_len - q_len), right, left, q_len)",
            new="limits(j - (kv_len - q_len), left, right, q_len)",
        ),
        Planted(
            "segments-only-on-edges",
            "segments are compared on edge tiles only",
            old="allowed = inside(position, pairs.lo, pairs.hi) & allowed",
            new=(
                "allowed = inside(position, pairs.lo, pairs.hi) & allowed\n"
                "        else:\n"
                "            allowed = allowed | ~allowed"
            ),
        ),
        Planted(
            "bias-batch-not-summed",
            "d_bias is that of the first batch entry alone where bias is broadcast over them",
            old="range(sum_batches * sum_heads)",
            new="range(sum_heads)",
        ),
        Planted(
            "bias-last-tile-of-queries",
            "a bias of one row sums all queries but those of the last ragged tile",
            old="    for n in range(sum_batches",
            new=(
                "    if plan.one_row:\n"
                "        last = tl.maximum(last // plan.block_q * plan.block_q, plan.block_q)\n"
                "    for n in range(sum_batches"
            ),
            small=True,
        ),
        Planted(
            "bias-float16",
            "a float32 bias passes through float16",
            old="True, True).to(plan.acc_dtype)",
            new="True, True).to(tl.float16).to(plan.acc_dtype)",
            small=True,
        ),
        Planted(
            "d-q-truncated",
            "a bfloat16 d_q is cut instead of rounded to nearest",
            old="    tl.store(d_q + at, (acc * work.scale)",
            new=(
                "    acc = acc * work.scale\n"
                "    if d_q.dtype.element_ty == tl.bfloat16:\n"
                "        acc = (acc.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)\n"
                "    tl.store(d_q + at, acc"
            ),
            small=True,
        ),
        Planted(
            "acc-bfloat16",
            "the accumulator of d_q is rounded to bfloat16 after each tile",
            old="k_tile, dq, plan)",
            new="k_tile, dq, plan).to(tl.bfloat16).to(plan.acc_dtype)",
            small=True,
        ),
        Planted(
            "k-tail-unmasked",
            "rows of k beyond the last key are read in d_q",
            old="j_ok[:, None], keys.d_ok, edge, plan.ragged_d)",
            new="j_ok[:, None], keys.d_ok, False, plan.ragged_d)",
            gpu=False,
        ),
    ],
    "pallas": [
        *SLOPES_VJP["pallas"],
        *STARTS["pallas"],
        Planted(
            "d-sinks-sign",
            "d_sinks has the other sign",
            old="ref.acc[...] -= jnp.where(lse == -jnp.inf, 0.0, p",
            new="ref.acc[...] += jnp.where(lse == -jnp.inf, 0.0, p",
            sample=True,
            edge="a_sink_above_all_scores",
        ),
        Planted(
            "d-sinks-of-the-last-rows",
            "d_sinks begins its sum anew with each block of rows",
            old=(
                "    @pl.when(step_along(1) == 0)\n    def start() -> None:\n"
                "        ref.acc[...] = jnp.zeros_like(ref.acc)\n\n    lse, low"
            ),
            new="    ref.acc[...] = jnp.zeros_like(ref.acc)\n\n    lse, low",
        ),
        Planted(
            "d-sinks-by-shift",
            "d_sinks takes Delta for lse's other number",
            old="saved.of_rows[:, :, DELTA.start]",
            new="saved.of_rows[:, :, SHIFT.start]",
        ),
        Planted(
            "delta-with-d-lse-added",
            "the cotangent of lse has the wrong sign in Delta",
            old="delta - ref.d_lse",
            new="delta + ref.d_lse",
        ),
        Planted(
            "delta-of-rounded-products",
            "Delta sums products that were rounded to the inputs' dtype",
            old="ref.d_o[...].astype(jnp.float32) * ref.o[...].astype(jnp.float32)",
            new="(ref.d_o[...] * ref.o[...]).astype(jnp.float32)",
            small=True,
        ),
        Planted(
            "no-minus-inf-guard",
            "a row that sees no key keeps its lse of -inf",
            old="jnp.where(unseen, jnp.inf, lse)",
            new="ref.lse[...]",
            small=True,
        ),
        Planted(
            "lse-rounded",
            "lse passes through the inputs' dtype",
            old="jnp.where(unseen, jnp.inf, lse)",
            new="jnp.where(unseen, jnp.inf, lse.astype(ref.o.dtype).astype(jnp.float32))",
        ),
        Planted(
            "p-truncated",
            "bfloat16 weights are cut instead of rounded to nearest on their way into d_v",
            old="            ref.v_acc[...] += dot(p.astype(d_o.dtype), d_o, (1, 0))",
            new=(
                "            cut = p\n"
                "            if d_o.dtype == jnp.bfloat16:\n"
                "                bits = jax.lax.bitcast_convert_type(p, jnp.int32) & -65536\n"
                "                cut = jax.lax.bitcast_convert_type(bits, jnp.float32)\n"
                "            ref.v_acc[...] += dot(cut.astype(d_o.dtype), d_o, (1, 0))"
            ),
            small=True,
        ),
        Planted(
            "ds-rounded-twice",
            "dS is rounded to the inputs' dtype before the softcap's slope",
            old="selected(visible, d_s * slope)",
            new="selected(visible, d_s.astype(ref.q.dtype).astype(jnp.float32) * slope)",
            small=True,
            times=3,
        ),
        Planted(
            "tanh-twice",
            "the softcap's slope takes the tanh of what is one already",
            old="1 - tanh * tanh",
            new="1 - jnp.tanh(tanh) ** 2",
        ),
        Planted(
            "d-q-scale-off",
            "d_q's scale is 0.3 % too large",
            old="(ref.acc[...] * scale)",
            new="(ref.acc[...] * (scale * 1.003))",
            small=True,
        ),
        Planted(
            "heads-not-summed",
            "d_k and d_v start anew at each query head of a group",
            old="pl.when((head == 0) & (step == 0))",
            new="pl.when(step == 0)",
        ),
        Planted(
            "bias-batch-not-summed",
            "d_bias starts anew at each batch entry that it sums",
            old="pl.when((batch == 0) & (head == 0) & (step == 0))",
            new="pl.when((head == 0) & (step == 0))",
        ),
        Planted(
            "bias-queries-not-summed",
            "d_bias of a bias of one row starts anew at each block of queries",
            old="pl.when((batch == 0) & (head == 0) & (step == 0))",
            new="pl.when((batch == 0) & (head == 0))",
            small=True,
        ),
        Planted(
            "bias-as-q",
            "a float32 bias is rounded to q's dtype in d_k, d_v and d_bias",
            old="ref.bias[...].astype(jnp.float32).T",
            new="ref.bias[...].astype(ref.q.dtype).astype(jnp.float32).T",
            small=True,
        ),
        Planted(
            "band-left-corner",
            "a block whose last row just misses the first column counts as inside the band",
            old="band.visit(",
            new="band._replace(first=None if band.first is None else band.first - 1).visit(",
            small=True,
            times=3,
        ),
        Planted(
            "band-right-corner",
            "a block whose first row just misses the last column counts as inside the band",
            old="band.visit(",
            new="band._replace(last=None if band.last is None else band.last + 1).visit(",
            small=True,
            times=3,
        ),
        Planted(
            "band-turned-wrong",
            "the band as keys see it has its bounds in the queries' order",
            old="in (band.last, band.first))",
            new="in (band.first, band.last))",
        ),
        Planted(
            "k-tail-unmasked",
            "rows of k beyond the last key enter d_q",
            old="within(k, 0, j * band.block_kv, band.kv_len) if edge else k",
            new="k",
        ),
        Planted(
            "q-tail-unmasked",
            "rows of q and d_o beyond the last query enter d_k and d_v",
            old="q, d_o = (within(x, 0, i * band.block_kv, band.kv_len) for x in (q, d_o))",
            new="pass",
        ),
        Planted(
            "masked-once",
            "dS is not selected again after the arithmetic: what a masked pair's v holds leaks into d_q",
            old="selected(visible, p * (dot(ref.d_o[...], ref.v[...], (1, 1)) - delta))",
            new="(p * (dot(ref.d_o[...], ref.v[...], (1, 1)) - delta))",
            small=True,
        ),
        Planted(
            "segments-only-on-edges",
            "segments are compared on edge blocks only in d_k, d_v and d_bias",
            old="visible_pairs(ref, band, j, i, edge, by_key=True)",
            new="visible_pairs(ref, band, j, i, edge, by_key=True) if edge else None",
        ),
        Planted(
            "acc-bfloat16",
            "the accumulator of d_k is rounded to bfloat16 after each block",
            old="ref.k_acc[...] += dot(d_dot.astype(q.dtype), q, (1, 0))",
            new=(
                "d_k = ref.k_acc[...] + dot(d_dot.astype(q.dtype), q, (1, 0))\n"
                "            ref.k_acc[...] = d_k.astype(jnp.bfloat16).astype(jnp.float32)"
            ),
        ),
        Planted(
            "at-once-heads-not-summed",
            "the one kernel's d_k and d_v start anew at each query head of a group",
            old="pl.when((head == 0) & (i == 0) & (step == 0))",
            new="pl.when((i == 0) & (step == 0))",
        ),
        Planted(
            "at-once-queries-not-summed",
            "the one kernel's d_k and d_v start anew at each block of queries",
            old="pl.when((head == 0) & (i == 0) & (step == 0))",
            new="pl.when((head == 0) & (step == 0))",
        ),
        Planted(
            "at-once-key-tail",
            "in the one kernel keys beyond the last have weights",
            old="turned(band, q_len)._replace(rows=kv_len)",
            new="turned(band, q_len)",
        ),
        Planted(
            "at-once-q-tail-unmasked",
            "in the one kernel rows of q and d_o beyond the last query enter d_k and d_v",
            old="q, d_o = (within(x, 0, i * band.block_q, turned.kv_len) for x in (q, d_o))",
            new="pass",
        ),
        Planted(
            "at-once-d-q-bfloat16",
            "the one kernel's sum of d_q is rounded to bfloat16 after each block",
            old="ref.q_acc[...] += dot(d_dot, k, (0, 0))",
            new="ref.q_acc[...] = (ref.q_acc[...] + dot(d_dot, k, (0, 0))).astype(jnp.bfloat16).astype(jnp.float32)",
        ),
        Planted(
            "at-once-own-keys",
            "the one kernel adds d_v of every block of keys to those of the first",
            old="ref.v_acc[keys, :] +=",
            new="ref.v_acc[pl.ds(0, band.block_kv), :] +=",
        ),
    ],
    "pallas/gpu": [
        Planted(
            "delta-without-d-lse",
            "the cotangent of lse is left out",
            old='delta = delta - call.arrays["d_lse"]',
            new='delta = delta - 0 * call.arrays["d_lse"]',
            within="lib.mosaic_gpu.pairs",
        ),
        Planted(
            "unscaled-d-q",
            "d_q and d_k lack the scale",
            old='total, width = total if name == "d_v" else total * plan.scale, total.shape[1]',
            new="total, width = total * 1.0, total.shape[1]",
            within="lib.mosaic_gpu.attention_vjp",
        ),
        Planted(
            "one-head-of-the-group",
            "keys are taught by the first query head of their group alone, as often as there are heads",
            old="return self.streamed_head + turn, self.first",
            new="return self.streamed_head, self.first",
            within="lib.mosaic_gpu.pairs",
        ),
        Planted(
            "softcap-slope-dropped",
            "D is dS whatever the softcap",
            old="d_s if t is None else d_s * (1.0 - t * t)",
            new="d_s",
            within="lib.mosaic_gpu.pairs",
        ),
        Planted(
            "band-not-turned",
            "keys see the queries that queries would see of keys",
            old="(None if bound is None else -bound for bound in (band.last, band.first))",
            new="(band.first, band.last)",
            within="lib.mosaic_gpu.pairs",
        ),
        Planted(
            "unmasked-weights",
            "pairs at the edge of the band count",
            old="return tuple(jnp.where(seen, x, unseen) for x in tiles)",
            new="return tiles",
            within="lib.mosaic_gpu.pairs",
        ),
        Planted(
            "border-tile-inside",
            "the first tile that the band cuts through counts as inside it",
            old="band.last + tile.row + 1, 0), size)",
            new="band.last + tile.row + size, 0), size)",
            sample=True,
            edge="window_corners_at_tile_corners",
            within="lib.mosaic_gpu.pairs",
        ),
        Planted(
            "keys-for-values",
            "weights meet q where they should meet d_o",
            old='streamed_buffers[name == "d_v"]',
            new="streamed_buffers[0]",
            gpu=False,  # heads of values may be wider
        ),
    ],
    "triton/hopper": on_host(
        "_flash_gradients",
        {
            "a buffer is handed back while it is read": (
                "causal",
                "        stage = await_full(streamed.ring, unit)\n"
                "        dots, d_p = first_products(own, streamed, stage, plan)\n        d_second",
                "        stage = await_full(streamed.ring, unit)\n"
                "        mbarrier.arrive(streamed.ring.empty.index(before), count=1)\n"
                "        dots, d_p = first_products(own, streamed, stage, plan)\n        d_second",
            ),
            "dP is taken before it is there": (
                "causal",
                "wait(len(d_second) if plan.want_second else 0, deps=[d_p]",
                "wait(2, deps=[d_p]",
            ),
            "dP is taken when one piece of a product is on its way": (
                "two pieces",
                "wait(len(d_second) if plan.want_second else 0, deps=[d_p]",
                "wait(len(d_second) + 1, deps=[d_p]",
            ),
            "a second piece leaves to the columns of the first": (
                "two pieces",
                "column = n * sums[0].shape[1] + ",
                "column = ",
            ),
            "statistics are fetched over some that threads read": (
                "causal",
                "give_back(streamed.ring.empty.index(before), plan.by_key)",
                "give_back(streamed.ring.empty.index(before), False)",
            ),
            "gradients leave before they are seen to be written": (
                "causal",
                "        fence_async_shared()\n        store_head(x, b, i, h, tiles)",
                "        store_head(x, b, i, h, tiles)",
            ),
            "scale is left out": ("wide", "multiplied(d_first, softmax.scale)", "d_first"),
        },
    )
    + on_host(
        "lib.gluon",
        {
            "a second piece is fetched from the columns of the first": (
                "two pieces",
                "load_tile(x[n], [b, i, h, column]",
                "load_tile(x[n], [b, i, h, 0]",
            ),
            "a second piece of scores is left out": ("two pieces", "gl.static_range(1, len(q))", "gl.static_range(0)"),
        },
    )
    + on_host(
        "lib.gluon_gradients",
        {
            "statistics are not waited for": ("causal", " + (8 * block if plan.by_key else 0)", ""),
            "resident rows are fetched over gradients that leave": (
                "programs that stay",
                "mbarrier.wait(resident.ring.empty.index(g), (count & 1) ^ 1)",
                "0",
            ),
            "one head's queries come by for all of its group": (
                "causal",
                "streamed_head, streamed_head + 1)",
                "streamed_head, streamed_head)",
            ),
            "a head's first queries are left out": (
                "causal",
                "where(start < last, start, first)",
                "where(start < last, start, first + block)",
            ),
            "a tile at the edge is taken for one that all see": (
                "causal",
                "(start < own.all_lo) | (start + d",
                "(start > start + d",
                2,
            ),
            "a tile at the edge is walked without masks": (
                "causal",
                "(start < own.all_lo) | (start + plan.block > own.all_hi)",
                "(start < 0)",
            ),
            "no slope of the softcap": ("band", "sloped = p * (1.0 - t * t)", "sloped = p"),
        },
    ),
    "triton/unordered": on_host(
        "_flash_unordered",
        {
            "D is read before both groups have put it there": (
                "causal",
                "        mbarrier.wait(parts.there.index(buffer), filled)\n",
                "",
            ),
            "D of the tile before is read before both groups have put it there": (
                "behind",
                "            mbarrier.wait(parts.there.index(buffer ^ 1), filled ^ buffer ^ 1)\n",
                "",
            ),
            "D of the last tile is read before both groups have put it there": (
                "behind",
                "\n    mbarrier.wait(parts.there.index(buffer ^ 1), filled ^ buffer ^ 1)\n",
                "\n",
            ),
            "a tile's d_q is left out": (
                "causal",
                "\n        add_to_memory(GROUP, context.sums, parts, d_q, position, plan)\n",
                "\n",
            ),
            "the last tile's d_q is left out": (
                "behind",
                "\n    add_to_memory(GROUP, context.sums, parts, d_q, before, plan)\n",
                "\n",
            ),
            "one buffer for all tiles": ("causal", "phase, buffer ^ 1, filled ^ buffer", "phase, buffer, filled"),
            "one buffer for all tiles, behind": (
                "behind",
                "phase, buffer ^ 1, filled ^ buffer",
                "phase, buffer, filled",
            ),
            "a group's keys leave while the other reads them": (
                "programs that stay, wide",
                "        mbarrier.wait(parts.done, count & 1)\n",
                "",
            ),
            "queries are handed back while products read them": (
                "causal",
                "        d_q = query_gradients(GROUP, buffer, ",
                "        mbarrier.arrive(streamed.ring.empty.index(stage), count=1)\n"
                "        d_q = query_gradients(GROUP, buffer, ",
            ),
            "queries are handed back while products behind read them": (
                "behind",
                "        d_first, d_second = warpgroup_mma_wait(0, deps=[d_first, d_second])\n"
                "        mbarrier.arrive(streamed.ring.empty.index(ring_state[0]), count=1)\n",
                "        mbarrier.arrive(streamed.ring.empty.index(ring_state[0]), count=1)\n"
                "        d_first, d_second = warpgroup_mma_wait(0, deps=[d_first, d_second])\n",
            ),
            "both groups compute the first columns": ("causal", "slice(GROUP * 64, 64, 1)", "slice(0, 64, 1)"),
            "both groups compute the first queries": ("causal, narrow", "(buffer * 2 + GROUP)", "(buffer * 2)"),
            "one group's keys are left out": ("causal", "use_acc=g > 0", "use_acc=False"),
            "all heads of a group add to the first": (
                "causal",
                "position = next_tile(position, first, last, plan.block)",
                "position = position[0], next_tile(position, first, last, plan.block)[1]",
                3,
            ),
            "the first tile's place for all": (
                "causal",
                "add_to_memory(GROUP, context.sums, parts, d_q, position, plan)",
                "add_to_memory(GROUP, context.sums, parts, d_q, (position[0], first), plan)",
            ),
            "the first tile's position for all, behind": ("behind", "        before = position\n", ""),
            "a sum's tile is written over before it has left": (
                "causal",
                "    tma.store_wait(0)  # what was in this tile before has left\n",
                "",
            ),
            "scale is left out": ("narrow values", "(d_first * softmax.scale)", "d_first"),
            "the phase of a buffer never changes": ("causal", "buffer ^ 1, filled ^ buffer", "buffer ^ 1, filled"),
        },
    ),
}
