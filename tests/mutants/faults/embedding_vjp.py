"""Faults planted in the kernels of the gradient of embedding."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "negative-ids-from-the-end",
            "the cotangent of a negative id goes to a row counted from the end",
            old="    there = (row >= 0) & (row < extents.rows) & (row != padding)\n",
            new="    row = tl.where((row < 0) & ok, row + extents.rows, row)\n"
            "    there = (row >= 0) & (row < extents.rows) & (row != padding)\n",
        ),
        Planted(
            "padding-with-a-gradient",
            "the padding row has a gradient as any other",
            old=" & (row != padding)\n",
            new="\n",
        ),
        Planted(
            "one-run-short",
            "of the runs that become one the last is not counted",
            old="    tl.store(merged + first + tl.sum(rank, 1), token",
            new="    rank = tl.where(tl.arange(0, WAYS)[None, :] < WAYS - 1, rank, 0)\n"
            "    tl.store(merged + first + tl.sum(rank, 1), token",
        ),
        Planted(
            "search-a-step-short",
            "the search in a run ends a step early",
            old="SortExtents(tokens, rows, run, run.bit_length())",
            new="SortExtents(tokens, rows, run, run.bit_length() - 1)",
        ),
        Planted(
            "starts-a-step-short",
            "the search for where a row's tokens begin ends a step early",
            old="SortExtents(tokens, rows, tokens, tokens.bit_length())",
            new="SortExtents(tokens, rows, tokens, tokens.bit_length() - 1)",
        ),
        Planted(
            "first-chunk-alone",
            "of a row of many tokens the first chunk is summed",
            old="chunks = tl.where(stop - start > CHUNK, (stop - start + CHUNK - 1) // CHUNK, 0)",
            new="chunks = tl.where(stop - start > CHUNK, 1, 0)",
            sample=True,
            edge="counts_beside_chunks",
            at=(0, 10),
        ),
        Planted(
            "last-chunk-dropped",
            "what a row has beyond its last whole chunk is left out",
            old="chunks = tl.where(stop - start > CHUNK, (stop - start + CHUNK - 1) // CHUNK, 0)",
            new="chunks = tl.where(stop - start > CHUNK, (stop - start) // CHUNK, 0)",
        ),
        Planted(
            "chunks-of-windows",
            "chunks begin where windows do, and not where their row does",
            old="start = begin + (late + CHUNK - 1) // CHUNK * CHUNK",
            new="start = begin + late",
        ),
        Planted(
            "one-chunk-of-a-window",
            "of a window whose first segment ends there the chunk that begins behind it is not summed",
            old="& ((begin >= window) == leaving)",
            new="& (leaving == 0)",
        ),
        Planted(
            "a-chunk-of-one-more",
            "a row of one token more than a chunk is summed as if it were one, and as two",
            old="tl.where(stop - start > CHUNK, start, stop)",
            new="tl.where(stop - start > CHUNK + 1, start, stop)",
        ),
        Planted(
            "cotangents-without-gaps",
            "cotangents are read as if the inner dimension were the outer one",
            old="strides.outer, strides.inner, tile.flat",
            new="strides.inner, strides.inner, tile.flat",
            gpu=False,
        ),
        Planted(
            "sums-in-the-cotangents-dtype",
            "each sum is rounded to the cotangent's dtype",
            old="            acc += found[i].to(tile.acc_dtype)\n",
            new="            acc = (acc + found[i].to(tile.acc_dtype)).to(d_y.dtype.element_ty).to(tile.acc_dtype)\n",
        ),
        Planted(
            "every-fifth-token-dropped",
            "of the tokens of a row that are added at a time the last is left out",
            old="for i in tl.static_range(4):\n            acc += found[i].to",
            new="for i in tl.static_range(3):\n            acc += found[i].to",
        ),
    ],
    "pallas": [
        Planted(
            "padding-with-a-gradient",
            "the padding row has a gradient as any other",
            old="nowhere = (row < 0) if padding is None else (row < 0) | (row == padding)",
            new="nowhere = row < 0",
        ),
        Planted(
            "strangers-in-the-first-row",
            "the cotangents of ids that are no row go to the first",
            old="nowhere = (row < 0) if padding is None else (row < 0) | (row == padding)",
            new="nowhere = (row < -1) if padding is None else (row == padding)\n    row = jnp.maximum(row, 0)",
        ),
        Planted(
            "sums-not-begun",
            "a block of rows goes on from the one before",
            old="ref.acc[...] = jnp.zeros_like(ref.acc)",
            new="pl.when(visit == 0)(lambda: ref.acc.__setitem__(..., jnp.zeros_like(ref.acc)))",
        ),
        Planted(
            "empty-blocks-unwritten",
            "a block of rows without tokens is left as it was",
            old="finishes = there & (one == (after - count)[block]), there & (one == after[block] - 1)",
            new="finishes = there & (one == (after - count)[block]), (\n"
            "            there & (one == after[block] - 1) & (end > start)[block]\n        )",
            sample=True,
            edge="no_id_is_a_row",
            at=(0, 6),
        ),
        Planted(
            "cotangents-unsorted",
            "tokens are sorted, and their cotangents are not",
            old='d_y = d_y.at[order].get(mode="promise_in_bounds", unique_indices=True)',
            new="d_y = d_y + 0 * order[:1, None].astype(dtype)",
        ),
        Planted(
            "tokens-of-the-next-rows",
            "a visit adds the tokens of its block that are other rows'",
            old="first, last = (jnp.clip(x[block] - at * block_tokens, 0, block_tokens) for x in (start, end))",
            new="first, last = 0 * block, jnp.clip(end[block] - at * block_tokens, 0, block_tokens)",
        ),
        Planted(
            "sums-in-the-cotangents-dtype",
            "each sum is rounded to the cotangent's dtype",
            old="ref.acc[own, :] += ref.wide[pl.ds(t, 1), :]",
            new="ref.acc[own, :] = (ref.acc[own, :] + ref.wide[pl.ds(t, 1), :]).astype(ref.d_y.dtype)"
            ".astype(jnp.float32)",
        ),
    ],
}
