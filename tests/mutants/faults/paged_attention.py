"""Faults planted in the kernels of paged_attention."""

from __future__ import annotations

from tests.mutants.faults import Planted
from tests.mutants.faults._on_host import on_host

FAULTS = {
    "triton": [
        Planted(
            "keys-beyond-128",
            "keys beyond the first 128 of a sequence are dropped",
            old="span = band(top + behind, bottom + behind, left, right, kv_len, plan.block_kv)",
            new="span = band(top + behind, bottom + behind, left, right, tl.minimum(kv_len, 128), plan.block_kv)",
            sample=True,
            edge="many_keys",
            at=(0, 30),
        ),
        Planted(
            "acc-not-rescaled",
            "the sum of values keeps its unit when the maximum grows",
            old="        acc = acc * alpha[:, None]\n",
            new="",
            at=(0, 100),
        ),
        Planted(
            "tiles-at-the-window",
            "tiles of keys begin where the window of their rows begins, which other rows move",
            old="    first, _, _, last = span\n",
            new=(
                "    first, _, _, last = span\n"
                "    if left is not None:\n"
                "        first = tl.minimum(tl.maximum(top + behind - left, 0), last)\n"
                "        span = first, last, last, last\n"
            ),
            small=True,
            at=(0, 100),
        ),
        Planted(
            "slots-behind-the-last-key",
            "slots behind a sequence's last key are read, and 0 times NaN is NaN",
            old="        j_ok = j < keys.kv_len\n",
            new="        j_ok = j < (keys.kv_len + plan.page_size - 1) // plan.page_size * plan.page_size\n",
            gpu=False,
            sample=True,
            edge="slots_of_nobody_hold_nan",
            at=(0, 30),
        ),
        Planted(
            "last-chunk-dropped",
            "a last chunk that is not full is not merged",
            old="tl.cdiv(tl.maximum(hi, 0), work.chunk)",
            new="tl.maximum(hi, 0) // work.chunk",
            within="lib.paged_attention",
            at=(0, 100),
        ),
        Planted(
            "chunks-of-equal-weight",
            "states of chunks are added without regard to their maxima",
            old="acc, l, m = merge((acc, l, m), settled(part), scores)\n",
            new=(
                "acc_part, l_part, m_part = settled(part)\n"
                "                acc, l, m = acc + acc_part, l + l_part, tl.maximum(m, m_part)\n"
            ),
            sample=True,
            edge="a_prompt_onto_many_keys",
            at=(0, 6),
        ),
        Planted(
            "tiles-without-room",
            "a sequence's first tile may be the last of the one before",
            old="extents.group // block_q + s\n",
            new="extents.group // block_q\n",
            at=(0, 100),
        ),
        Planted(
            "causal-off-by-one",
            "a query sees the key after its own",
            old="limits(i + behind, left, right, kv_len)",
            new="limits(i + behind + 1, left, right, kv_len)",
            at=(0, 100),
        ),
        Planted(
            "queries-at-the-first-key",
            "the first query of a sequence stands at the first key, as without a cache",
            old="    behind = kv_len - queries\n",
            new="    behind = 0\n",
            at=(0, 100),
        ),
        Planted(
            "sink-of-each-chunk",
            "the merger of chunks adds the sink once for each chunk that there is room for",
            old="    sink = None if of_heads.sinks is None else sinks_beside(of_heads.sinks, head, s, extents)\n",
            new=(
                "    sink = None if of_heads.sinks is None else sinks_beside(of_heads.sinks, head, s, extents)\n"
                "    if sink is not None:\n"
                "        sink += tl.log(work.chunks * 1.0)\n"
            ),
            within="lib.paged_attention",
            sample=True,
            edge="many_keys_with_sinks",
            at=(0, 12),
        ),
        Planted(
            "sink-of-key-head",
            "query heads of a group take the sink of their key head",
            old="sinks_beside(sinks, tl.reshape(head, [plan.block_q]), s, extents)",
            new="sinks_beside(sinks, tl.reshape(head // extents.group, [plan.block_q]), s, extents)",
            at=(0, 100),
        ),
        Planted(
            "sinks-of-nobody",
            "tokens behind the last sequence have a sink",
            old="mask=(s < extents.sequences) & (head < extents.heads)",
            new="mask=head < extents.heads",
            within="lib.paged_attention",
            sample=True,
            edge="sinks_of_some_tokens",
            at=(0, 12),
        ),
        Planted(
            "scale-of-another-head",
            "keys take the scale of the first key head",
            old="    scale = tl.load(k_scale + kv_head)\n",
            new="    scale = tl.load(k_scale + kv_head * 0)\n",
            sample=True,
            edge="scales_far_apart",
            at=(0, 10),
        ),
        Planted(
            "scale-inverted",
            "dots are divided by the scale",
            old="    scale = tl.load(k_scale + kv_head)\n",
            new="    scale = 1.0 / tl.load(k_scale + kv_head)\n",
            at=(0, 100),
        ),
        Planted(
            "scale-twice",
            "values are scaled twice where chunks are merged",
            old="state = scaled((acc, l, m), of_heads.v_scale, kv_head)",
            new="state = scaled(scaled((acc, l, m), of_heads.v_scale, kv_head), of_heads.v_scale, kv_head)",
            within="lib.paged_attention",
            sample=True,
            edge="many_keys_with_scales",
            at=(0, 12),
        ),
        Planted(
            "scales-of-keys-for-values",
            "values take the scales of keys",
            old="            state = scaled((acc, l, m), cache.v_scale, kv_head)\n",
            new="            state = scaled((acc, l, m), cache.k_scale, kv_head)\n",
            at=(0, 100),
        ),
        Planted(
            "pages-of-values-as-of-keys",
            "pages of values are as far apart as those of keys",
            old="page * keys.v_p",
            new="page * keys.k_p",
            gpu=False,
            at=(0, 100),
        ),
    ],
    "triton/hopper": on_host(
        "_pages",
        {
            "slots behind the last key are read": (
                "decoding",
                "filled = gl.maximum(gl.minimum(kv_len - key // size * size, size), 0)",
                "filled = size",
            ),
            "entries of the table behind the last page are read": (
                "decoding in chunks",
                "mask=key < own.kv_len, other=0)",
                "mask=key >= 0, other=0)",
            ),
            "a tile of keys is all of its first page": ("short pages", "pages[part] * step", "pages[0] * step"),
            "a part of a long page is its first": ("long pages", " + key % size", ""),
            "values come from the pages of the next keys": (
                "decoding",
                "load_pages(v, work.v_step, pages, v_tiles, stage, j - block",
                "load_pages(v, work.v_step, following, v_tiles, stage, j - block",
            ),
            "columns beyond the first line are those of the first": ("prompts", "h, line * LINE]", "h, 0]"),
            "a sequence reads the first one's table": (
                "decoding",
                "table + own.sequence.to(gl.int64) * work.table_row",
                "table + own.sequence.to(gl.int64) * 0",
            ),
            "queries of few rows are not waited for": (
                "decoding in chunks",
                "mbarrier.wait(q_ring.full.index(iteration & 1), iteration // 2)",
                "0",
            ),
            "queries are fetched over those of the unit before the last": (
                "decoding",
                "mbarrier.wait(q_ring.empty.index(buffer), parity ^ 1)",
                "0",
            ),
            "both groups have the first one's queries": (
                "prompts",
                "own.token + g * (plan.rows // plan.heads)",
                "own.token",
            ),
            "rows of the second group see what the first one's see": (
                "prompts",
                "own.position + group * (plan.rows // plan.heads)",
                "own.position",
            ),
            "sums of all chunks are written to the first one's place": (
                "prompts apart",
                "        at = at * work.chunks + own.share\n",
                "        at = at * work.chunks\n",
            ),
            "a walk in chunks forgets those before": (
                "decoding in chunks that are walked",
                "acc, l, m = merge((acc, l, m), part, scores)",
                "acc, l, m = part",
            ),
            "rows behind a sequence's queries are written": ("prompts", "(query < own.queries) & ", ""),
            "heads of the next group are written": ("short pages", " & (of_group < work.group)", ""),
        },
    ),
    "pallas": [
        Planted(
            "keys-beyond-128",
            "keys beyond the first 128 of a sequence are dropped",
            old='"end": (last + paging.keys - 1)',
            new='"end": (jnp.minimum(last, 128) + paging.keys - 1)',
            at=(0, 100),
        ),
        Planted(
            "acc-not-rescaled",
            "the sum of values keeps its unit when the maximum grows",
            old="ref.acc[mine] * across(shrink, v.shape[1])",
            new="ref.acc[mine]",
            at=(0, 100),
        ),
        Planted(
            "slots-behind-the-last-key",
            "slots behind a sequence's last key are read, and 0 times NaN is NaN",
            old="v = jnp.where(positions(v.shape, 0, start) < kv_len, v, jnp.zeros_like(v))",
            new="v = v + 0",
            sample=True,
            edge="slots_of_nobody_hold_nan",
            at=(0, 10),
        ),
        Planted(
            "window-off-by-one",
            "the window is one key short on its left",
            old="key >= place - paging.left",
            new="key > place - paging.left",
            at=(0, 100),
        ),
        Planted(
            "sinks-head-by-head",
            "rows have sinks head by head, and are token by token",
            old="sinks[:, source % paging.group]",
            new="sinks[:, jnp.minimum(quotient(source, paging.group), paging.group - 1)]",
            at=(0, 100),
        ),
        Planted(
            "sink-without-rescale",
            "sums of values are not rescaled by the sink's share",
            old="                o = o * across(share, o.shape[1])\n",
            new="",
            sample=True,
            edge="sinks_above_all_scores",
            at=(0, 10),
        ),
        Planted(
            "sinks-of-nobody",
            "tokens behind the last sequence have a sink",
            old='beside = quotient(source, paging.group) < call.arrays["q_starts"][-1]',
            new="beside = quotient(source, paging.group) >= 0",
            sample=True,
            edge="sinks_of_some_tokens",
            at=(0, 10),
        ),
        Planted(
            "scale-of-another-head",
            "keys take the scale of the first key head",
            old="across(ref.k_scale[head], dots",
            new="across(ref.k_scale[0], dots",
            sample=True,
            edge="scales_far_apart",
            at=(0, 10),
        ),
        Planted(
            "scale-inverted",
            "sums of values are divided by the scale",
            old="o = o * across(ref.v_scale[head], o.shape[1])",
            new="o = o / across(ref.v_scale[head], o.shape[1])",
            sample=True,
            edge="scales_far_apart",
            at=(0, 10),
        ),
        Planted(
            "rows-of-another-token",
            "results are looked up as if each token had one row",
            old="row - starts[owner] * group",
            new="row - starts[owner]",
            at=(0, 100),
        ),
        Planted(
            "pages-of-the-neighbour",
            "the table is read from where the next sequence's pages begin",
            old="table[sequence[tile] * each",
            new="table[(sequence[tile] + 1) * each",
            at=(0, 100),
        ),
    ],
    "pallas/gpu": [
        Planted(
            "values-behind-the-last-key",
            "values behind a sequence's last key stay what they are, and 0 times NaN is NaN",
            old="jnp.where(positions(x.shape, 0, first) < count, x, jnp.zeros_like(x))",
            new="x + 0",
            within="lib.mosaic_gpu.sequences",
        ),
        Planted(
            "pages-of-the-neighbour",
            "a sequence after the first has the pages of the one before",
            old="ref.page_table[tile.start, ",
            new="ref.page_table[jnp.maximum(tile.start - 1, 0), ",
        ),
        Planted(
            "scale-of-another-head",
            "keys and values take the scales of the first key head",
            old="getattr(ref, name)[head] if",
            new="getattr(ref, name)[0 * head] if",
            within="lib.mosaic_gpu.sequences",
        ),
        Planted(
            "scale-inverted",
            "sums of values are divided by the scale",
            old="o * tile.scales[1]",
            new="o / tile.scales[1]",
            within="lib.mosaic_gpu.sequences",
        ),
        Planted(
            "one-page-a-tile",
            "the pages of a tile are all its first one",
            old="ref.page_table[tile.start, jnp.minimum(first + i, last)]",
            new="ref.page_table[tile.start, jnp.minimum(first, last)]",
        ),
    ],
}
