"""Faults planted in the kernels of packed attention."""

from __future__ import annotations

from tests.mutants.faults import Planted
from tests.mutants.faults._on_host import on_host

FAULTS = {
    "triton": [
        Planted(
            "keys-beyond-128-dropped",
            "a sequence sees its first 128 keys alone",
            old="    tile = index - (own * step // block + low)\n",
            new="    tile = index - (own * step // block + low)\n    kv_len = tl.minimum(kv_len, 128)\n",
        ),
        Planted(
            "acc-not-rescaled",
            "the sum of values keeps its unit when the maximum grows",
            old="        acc = acc * alpha[:, None]\n",
            new="",
            within="attention",
            at=(0, 100),
        ),
        Planted(
            "tiles-at-the-window",
            "tiles of keys begin where the window of their rows begins, which other rows move",
            old="    span = band(top, bottom, left, right, kv_len, plan.block_kv)\n",
            new=(
                "    span = band(top, bottom, left, right, kv_len, plan.block_kv)\n"
                "    if left is not None:\n"
                "        _, _, _, last = span\n"
                "        span = tl.minimum(tl.maximum(top - left, 0), last), last, last, last\n"
            ),
            small=True,
            within="attention",
            at=(0, 100),
        ),
        Planted(
            "aligned-at-the-first-key",
            "the first query of a sequence stands beside its first key, not the last beside the last",
            old="limits(i + (kv_len - q_len), left, right, kv_len)",
            new="limits(i, left, right, kv_len)",
            within="attention",
        ),
        Planted(
            "tokens-before-the-first-see-keys",
            "queries before the first start see the keys before it",
            old="outside = (low == 0) | (low > sequences)",
            new="outside = low > sequences",
            edge="tokens_of_no_sequence",
            at=(0, 6),
            sample=True,
        ),
        Planted(
            "tokens-behind-the-last-see-keys",
            "queries behind the last sequence see the keys behind it",
            old="outside = (low == 0) | (low > sequences)",
            new="outside = low == 0",
        ),
        Planted(
            "ragged-tile-unwritten",
            "the last tile of a sequence is not computed where it is not full",
            old="there = tile * block < own_len * step",
            new="there = tile * block + block <= own_len * step",
        ),
        Planted(
            "starts-without-stride",
            "starts are read as if they were adjacent",
            old="tl.load(starts + tl.minimum(number, sequences) * step)",
            new="tl.load(starts + tl.minimum(number, sequences))",
            within="lib.sequences",
        ),
        Planted(
            "lse-of-the-first-rows",
            "the log-sum-exp of every sequence goes where the first one's belongs",
            old="heads * extents.q_len + token\n    sinks, sink =",
            new="heads * extents.q_len + row\n    sinks, sink =",
        ),
        Planted(
            "values-of-the-first-sequence",
            "every sequence reads the values of the first",
            old="operands = k + mine.kv_start * k_s, v + mine.kv_start * v_s, masks.of_heads\n    state =",
            new="operands = k + mine.kv_start * k_s, v, masks.of_heads\n    state =",
        ),
        Planted(
            "sink-of-key-head",
            "query heads of a group take the sink of their key head",
            old="tl.load(sinks + (heads + row * 0)",
            new="tl.load(sinks + (heads // extents.group + row * 0)",
        ),
        Planted(
            "sinks-of-no-sequence",
            "tokens before the first sequence have a sink",
            old="return (token >= first) & (token <",
            new="return (token >= 0) & (token <",
            edge="sinks_of_sequences_without_keys",
            at=(0, 8),
            sample=True,
        ),
        Planted(
            "slopes-from-the-first-key",
            "distances count from a sequence's first key on, wherever its queries stand",
            old="extents.d, extents.dv, kv_len - q_len)",
            new="extents.d, extents.dv, kv_len * 0)",
            edge="slopes_of_unequal_sequences",
            at=(0, 8),
            sample=True,
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
            within="attention",
        ),
    ],
    "pallas": [
        Planted(
            "keys-beyond-128-dropped",
            "a sequence sees its first 128 keys alone",
            old="        blocks = beside.row_blocks if self.by_key else beside.key_blocks\n"
            "        first, last = blocks(at, self.own, self.met)\n"
            "        there =",
            new="        blocks = beside.row_blocks if self.by_key else beside.key_blocks\n"
            "        first, last = blocks(at, self.own, self.met)\n"
            "        last = jnp.minimum(last, 127 // self.met)\n"
            "        there =",
        ),
        Planted(
            "aligned-at-the-first-key",
            "the first query of a sequence stands beside its first key, not the last beside the last",
            old="return self.kv_len - quotient(self.rows, self.heads)",
            new="return self.kv_len * 0",
            within="lib.packed",
        ),
        Planted(
            "tokens-of-no-sequence-see-keys",
            "queries before the first start and behind the last sequence see the keys there",
            old="inside = (n > 0) & (n <= sequences) & (within < self.lens[n])",
            new="inside = within < self.lens[n]",
            edge="tokens_of_no_sequence",
            at=(0, 6),
            sample=True,
            within="lib.packed",
        ),
        Planted(
            "left-edge-off-by-one",
            "a window is one key short on its left",
            old="offset > (self.aligned - self.left - 1) * self.heads",
            new="offset > (self.aligned - self.left) * self.heads",
            within="lib.packed",
        ),
        Planted(
            "right-corner",
            "a block whose first query just misses the last key counts as seen whole",
            old="quotient(row, self.heads) + self.aligned + self.right\n        return found",
            new="quotient(row, self.heads) + self.aligned + self.right + 1\n        return found",
            within="lib.packed",
        ),
        Planted(
            "keys-behind-a-sequence",
            "zeros behind a sequence's last key are seen",
            old="found = key + keys <= self.kv_len",
            new="found = key < self.kv_len",
            within="lib.packed",
        ),
        Planted(
            "sink-without-rescale",
            "sums of values are not rescaled by the sink's share",
            old="            o = o * across(share, o.shape[1])\n",
            new="",
            sample=True,
            edge="sinks_above_all_scores",
        ),
        Planted(
            "sinks-of-no-sequence",
            "tokens behind the last sequence have a sink",
            old="return (token >= starts[0]) & (token < starts[-1])",
            new="return token >= starts[0]",
            edge="sinks_of_sequences_without_keys",
            at=(0, 8),
            sample=True,
        ),
        Planted(
            "slopes-of-packed-places",
            "a query stands where it lies among all tokens",
            old="place = token - q_starts[own + 1] + kv_starts[own + 1] - kv_starts[own]",
            new="place = token",
            edge="slopes_of_unequal_sequences",
            at=(0, 8),
            sample=True,
        ),
        Planted(
            "heads-of-a-group-turned",
            "rows of a token take the heads of its group in another order",
            old='return by_head(x[None], self.dims["group"])[0]',
            new='return by_head(x[None, :, ::-1], self.dims["group"])[0][::-1]',
        ),
    ],
    "triton/hopper": on_host(
        "_flash",
        {
            "keys beyond 128 are dropped": (
                "full",
                "span_of(top + before, bottom + before, own, left, right, block)",
                "span_of(top + before, bottom + before, own._replace(kv_len=min(own.kv_len, 128)), left, right, block)",
                2,
            ),
            "the sum of values keeps its unit when the maximum grows": (
                "full",
                "        else:\n            acc = scaled_pieces(acc, alpha)\n",
                "",
            ),
            "the first query of a sequence stands at its first key": (
                "short sequences among one that is long",
                "before = own.kv_len - own.q_len",
                "before = 0",
                2,
            ),
            "every sequence has the queries of the first": (
                "causal",
                "return work.q_start + work.q_len, work.q_len",
                "return work.q_len, work.q_len",
            ),
            "every sequence has the keys of the first": (
                "causal",
                "return work.kv_start + work.kv_len, work.kv_len",
                "return work.kv_len, work.kv_len",
            ),
            "the log-sum-exp of every sequence goes to the first": (
                "full",
                "head.to(gl.int64) * work.tokens + work.q_start",
                "head.to(gl.int64) * work.tokens",
            ),
            "log-sum-exp is written behind the end of a sequence": (
                "short sequences among one that is long",
                "scores, i < own.q_len)",
                "scores, i > -1)",
            ),
            "values of the tile before are not awaited": (
                "full",
                "    unit += 1\n    await_full(ring, unit)\n    for start",
                "    unit += 1\n    for start",
            ),
        },
    )
    + on_host(
        "lib.gluon_sequences",
        {
            "consumers are not told that no tile is left": (
                "causal",
                "    if index >= tiles:\n",
                "    if index < 0:\n",
            ),
            "one head of each sequence has tiles": (
                "causal",
                "gl.load(sequences.schedule) * heads",
                "gl.load(sequences.schedule)",
            ),
        },
    )
    + on_host(
        "lib.gluon",
        {
            "a second piece of scores is left out": ("two pieces", "gl.static_range(1, len(q))", "gl.static_range(0)"),
        },
    ),
    "pallas/gpu": [
        Planted(
            "values-behind-the-last-key",
            "values behind a sequence's last key stay what they are, and 0 times NaN is NaN",
            old="jnp.where(positions(x.shape, 0, first) < count, x, jnp.zeros_like(x))",
            new="x + 0",
            within="lib.mosaic_gpu.sequences",
        ),
        Planted(
            "aligned-at-the-first-key",
            "the first query of a sequence stands beside its first key, not the last beside the last",
            old="return self.kv_len - quotient(self.rows, self.heads)",
            new="return self.kv_len * 0",
            within="lib.packed",
        ),
        Planted(
            "keys-of-the-first-sequence",
            "all sequences have the keys that the array begins with",
            old="rows = pl.ds(tile.start + (tile.first",
            new="rows = pl.ds((tile.first",
        ),
        Planted(
            "last-tile-dropped",
            "the last of several tiles of keys is left out",
            old="jnp.maximum(last - first, 0) + 1, 0)",
            new="jnp.maximum(last - first, 1), 0)",
            within="lib.mosaic_gpu.sequences",
        ),
        Planted(
            "seen-whole",
            "a tile that the mask cuts counts as seen whole if its keys are all there",
            old="& tile.sight.full(row, QUERIES, start, self.block_kv)",
            new="& (row == row)",
            within="lib.mosaic_gpu.sequences",
        ),
    ],
}
