"""Faults planted in the kernels of softmax."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "halves-not-joined",
            "the sum of rows in a strip leaves out the second half of the last two numbers",
            old="            t = tl.sum(tl.reshape(t, [2, t.shape[0] // 2, t.shape[1]]), 0)",
            new=(
                "            halves = tl.reshape(t, [2, t.shape[0] // 2, t.shape[1]])\n"
                "            t = tl.sum(halves, 0) if t.shape[0] > 2 else tl.max(halves, 0)"
            ),
            within="lib.columns",
        ),
        Planted(
            "part-cut",
            "a part of a row in a strip lacks its last number",
            old="mask=(a < last) & inside, other",
            new="mask=(a < last - 1) & inside, other",
            small=True,
            within="lib.columns",
        ),
        Planted(
            "part-not-rescaled",
            "the sums of a part's places keep their units when they are added up",
            old="acc = product(acc, tl.exp(tl.minimum(top - finite_or_zero(highest), 0.0)))",
            new="acc = product(acc, tl.full(acc.shape, 1.0, tile.acc_dtype))",
            within="lib.columns",
        ),
        Planted(
            "no-minus-inf-guard",
            "a first tile of nothing but -inf subtracts -inf from -inf",
            old="    shift = finite_or_zero(top)\n    found",
            new="    shift = top\n    found",
            small=True,
            within="lib.rows",
        ),
        Planted(
            "finite-padding",
            "lanes beyond a short row hold -1e4 instead of -inf",
            old='col, ok, float("-inf"), tile.acc_dtype)',
            new="col, ok, -1e4, tile.acc_dtype)",
            small=True,
        ),
        Planted(
            "last-not-summed",
            "the sum of a long row leaves out its last element",
            old="mask=row_ok & (a < n), other",
            new="mask=row_ok & (a < n - 1), other",
            small=True,
            within="lib.rows",
        ),
        Planted(
            "log2e-rounded",
            "exp is exp2 with log2(e) of five digits",
            old="p = [tl.exp(a - m) for a in t]",
            new="p = [tl.exp2((a - m) * 1.4427) for a in t]",
            small=True,
        ),
        Planted(
            "l-not-rescaled",
            "the running sum keeps its unit when the maximum grows",
            old="tl.fma(l, exp_or_zero(tl.minimum(m - shift, 0.0)), found)",
            new="l + found",
            within="lib.rows",
        ),
        Planted(
            "p-rounded-before-sum",
            "the normaliser sums weights already rounded to the output's dtype",
            old='p, l = exponentials(load_tiles(x_row, x_strides.n, col, ok, float("-inf"), tile.acc_dtype))\n',
            new=(
                'p, _ = exponentials(load_tiles(x_row, x_strides.n, col, ok, float("-inf"), tile.acc_dtype))\n'
                "        l = row_sum([a.to(y.dtype.element_ty).to(tile.acc_dtype) for a in p])[:, None]\n"
            ),
            small=True,
        ),
        Planted(
            "store-truncated",
            "a bfloat16 result is cut instead of rounded to nearest",
            old="            tl.store(y_row + col[i] * y_strides.n, (p[i] / l).to",
            new=(
                "            q = p[i] / l\n"
                "            if y.dtype.element_ty == tl.bfloat16:\n"
                "                q = (q.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)\n"
                "            tl.store(y_row + col[i] * y_strides.n, q.to"
            ),
            small=True,
            sample=True,
        ),
        Planted(
            "second-tile-not-summed",
            "the sum of a row in two tiles is that of the first",
            old="        found += tl.sum(tiles[1], 1)",
            new="        found += 0.0 * tl.sum(tiles[1], 1)",
            within="lib.rows",
            sample=True,
        ),
        Planted(
            "second-tile-cut",
            "the second tile of a row lacks the row's last element",
            old="rest < n)",
            new="rest < n - 1)",
            small=True,
            within="lib.rows",
        ),
        Planted(
            "second-maximum-left-out",
            "the largest element of a row in two tiles is looked for in the first, and the exponentials overflow",
            old="        found = tl.maximum(found, tl.max(tiles[1], 1))",
            new="        found = tl.maximum(found, found)",
            small=True,
            within="lib.rows",
        ),
    ],
    "pallas": [
        Planted(
            "no-minus-inf-guard",
            "a first block of nothing but -inf subtracts -inf from -inf",
            old="return jnp.where(m == -jnp.inf, 0.0, m)",
            new="return m",
            small=True,
        ),
        Planted(
            "finite-padding",
            "lanes beyond a row hold -1e4 instead of -inf",
            old="at(ref.x), -jnp.inf)",
            new="at(ref.x), -1e4)",
            small=True,
        ),
        Planted(
            "rounded-twice",
            "weights are rounded to the output's dtype before the division",
            old="jnp.exp(at(ref.x) - m) / l",
            new="jnp.exp(at(ref.x) - m).astype(ref.y.dtype).astype(jnp.float32) / l",
            small=True,
        ),
        Planted(
            "exp-clamped",
            "the exponent is clamped at -20",
            old="jnp.exp(at(ref.x) - m) / l",
            new="jnp.exp(jnp.maximum(at(ref.x) - m, -20.0)) / l",
            small=True,
            sample=True,
            edge="beyond_the_dtype",
        ),
        Planted(
            "l-not-rescaled",
            "the running sum keeps its unit when the maximum grows",
            old="ref.l[...] * jnp.exp(ref.m[...] - shift) + ",
            new="ref.l[...] + ",
        ),
        Planted(
            "last-not-summed",
            "the sum of a long ragged row leaves out its last element",
            old="strip.sums(lambda at: (jnp.exp(at(ref.x) - shift),))",
            new=(
                "strip.sums(lambda at: (jnp.where("
                "jax.lax.broadcasted_iota(jnp.int32, at(ref.x).shape, strip.walk.along)"
                " + strip.step * strip.walk.block_n + at.start < strip.n - (strip.n > 128),"
                " jnp.exp(at(ref.x) - shift), 0.0),))"
            ),
            small=True,
        ),
    ],
    "pallas/gpu": [
        Planted(
            "no-minus-inf-guard",
            "a first chunk of nothing but -inf subtracts -inf from -inf",
            old="return jnp.where(m == -jnp.inf, 0.0, m)",
            new="return m",
            small=True,
        ),
        Planted(
            "finite-padding",
            "lanes beyond a row hold -1e4 instead of -inf",
            old="x = walk.within(x, -jnp.inf)\n",
            new="x = walk.within(x, -1e4)\n",
            small=True,
        ),
        Planted(
            "rounded-twice",
            "weights are rounded to bfloat16 before the division",
            old="return p * walk.spread(1.0 / jnp.sum(p, axis=1))",
            new="return p.astype(jnp.bfloat16).astype(jnp.float32) * walk.spread(1.0 / jnp.sum(p, axis=1))",
            small=True,
            sample=True,
        ),
        Planted(
            "l-not-rescaled",
            "the running sum keeps its unit when the maximum grows",
            old="l_before * jnp.exp(m_before - shift_of(m)) + ",
            new="l_before + ",
        ),
    ],
}
