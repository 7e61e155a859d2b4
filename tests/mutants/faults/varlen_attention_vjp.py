"""Faults planted in the kernels of packed attention's gradients."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "first-head-of-a-group-alone",
            "d_k and d_v leave out the last head of their group",
            old="range(kv_head * extents.group, kv_head * extents.group + extents.group)",
            new="range(kv_head * extents.group, kv_head * extents.group + tl.maximum(extents.group - 1, 1))",
        ),
        Planted(
            "key-stands-elsewhere",
            "the pairs of a tile of keys are those of a sequence aligned at its first key",
            old="lo, hi = limits(j - (kv_len - q_len), right, left, q_len)",
            new="lo, hi = limits(j, right, left, q_len)",
        ),
        Planted(
            "window-turned-wrongly",
            "a key is seen from as far to the left as its queries see to the left",
            old="span = band(top, bottom, right, left, q_len, plan.block_q)",
            new="span = band(top, bottom, left, right, q_len, plan.block_q)",
        ),
        Planted(
            "statistics-of-the-first-sequence",
            "every sequence reads the statistics of the first queries",
            old="shift + at, low + at, delta + at, q_len)",
            new="shift + at, low + at, delta + head * extents.q_len, q_len)",
        ),
        Planted(
            "keys-of-no-sequence-have-gradients",
            "keys before the first start and behind the last sequence meet the queries there",
            old="q_len = tl.where(outside, 0, q_len)",
            new="q_len = tl.where(outside, q_len, q_len)",
        ),
        Planted(
            "slopes-of-key-heads",
            "d_k and d_v take the slope of the key head",
            old="slope_of(masks.of_heads.slopes, head, scores), col",
            new="slope_of(masks.of_heads.slopes, kv_head, scores), col",
            edge="slopes_of_grouped_heads",
            at=(0, 8),
            sample=True,
        ),
        Planted(
            "d-sinks-sign",
            "d_sinks has the other sign",
            old='        total -= tl.where(l == float("-inf")',
            new='        total += tl.where(l == float("-inf")',
            sample=True,
            edge="sinks_above_all_scores",
            at=(0, 8),
        ),
        Planted(
            "d-sinks-of-no-sequence",
            "d_sinks sums tokens of no sequence too",
            old="ok, row = (token < extents.q_len) & in_a_sequence(token, starts, work), token.to(tl.int64)",
            new="ok, row = token < extents.q_len, token.to(tl.int64)",
            at=(0, 4),
        ),
        Planted(
            "d-sinks-without-last-rows",
            "d_sinks leaves out rows that do not fill a tile",
            old="range(0, extents.q_len, tile.rows)",
            new="range(0, tl.maximum(extents.q_len // tile.rows * tile.rows, tile.rows), tile.rows)",
            sample=True,
            edge="a_sink_of_many_rows",
            at=(0, 6),
        ),
        Planted(
            "scale-left-out",
            "d_k is not multiplied by the scale",
            old="(dk_acc * work.scale)",
            new="dk_acc",
        ),
        Planted(
            "ds-of-d_q-truncated",
            "ds of d_q is cut to bfloat16 instead of rounded",
            old="dq = product(ds.to(k_tile.dtype), k_tile, dq, plan)",
            new=(
                "if k_tile.dtype == tl.bfloat16:\n"
                "            ds = (ds.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)\n"
                "        dq = product(ds.to(k_tile.dtype), k_tile, dq, plan)"
            ),
            small=True,
            within="attention_vjp",
        ),
    ],
    "pallas": [
        Planted(
            "keys-aligned-at-the-first",
            "the blocks of rows that see a key are those of a sequence aligned at its first key",
            old="first = jnp.maximum(key - self.aligned - self.right, 0) * self.heads",
            new="first = jnp.maximum(key - self.right, 0) * self.heads",
            within="lib.packed",
        ),
        Planted(
            "too-few-rows",
            "a window ends a block of rows too early",
            old="end = jnp.clip((key + count - self.aligned + self.left) * self.heads, 0, self.rows)",
            new="end = jnp.clip((key - self.aligned + self.left) * self.heads, 0, self.rows)",
            within="lib.packed",
        ),
        Planted(
            "statistics-head-by-head",
            "rows take the statistics of a group head by head, not query by query",
            old=".transpose(0, 3, 1, 2)  #",
            new=".transpose(0, 1, 3, 2)  #",
        ),
        Planted(
            "delta-left-out",
            "d_q does not take delta away",
            old="d_s = selected(visible, p * (dot(ref.d_o[...], ref.v[...], (1, 1)) - delta))",
            new="d_s = selected(visible, p * dot(ref.d_o[...], ref.v[...], (1, 1)))",
        ),
        Planted(
            "places-changed",
            "masks take the place of a block of rows for that of the keys, and the other way round",
            old="beside.visible(row, key, shape, self.by_key)",
            new="beside.visible(key, row, shape, self.by_key)",
        ),
        Planted(
            "d-sinks-of-no-sequence",
            "d_sinks sums tokens of no sequence too",
            old="arrays[name] = jnp.where(here, arrays[name], value)",
            new="arrays[name] = jnp.where(here | True, arrays[name], value)",
            at=(0, 4),
        ),
        Planted(
            "scale-left-out",
            "d_k is not multiplied by the scale",
            old="(ref.k_acc[...] * scale)",
            new="(ref.k_acc[...])",
        ),
    ],
    "pallas/gpu": [
        Planted(
            "sequences-see-each-other",
            "all sequences have one id",
            old="jnp.where(there, IDS * s, ",
            new="jnp.where(there, 0 * s, ",
        ),
        Planted(
            "moved-back-from-the-first-place",
            "queries and keys are looked up as if both began with their sequence's places",
            old="begin[own] + (width - lens)[own] + token",
            new="begin[own] + token",
        ),
        Planted(
            "aligned-at-the-first-key",
            "the first query of a sequence stands beside its first key, not the last beside the last",
            old="row = place - begin[s] - (width - lens)[s]\n",
            new="row, width = place - begin[s], lens\n",
        ),
    ],
}
