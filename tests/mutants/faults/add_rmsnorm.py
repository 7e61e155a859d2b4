"""Faults planted in the kernels of add_rmsnorm."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "sum-stored-early",
            "a long row's sum is stored as its squares are added up, before the residual, which it may lie over, is "
            "read again",
            old="            squares += tl.sum(s * s, 1)\n",
            new="            tl.store(total + out + at, s.to(total.dtype.element_ty), mask=row_ok & (at < n))\n"
            "            squares += tl.sum(s * s, 1)\n",
            sample=True,
        ),
        Planted(
            "sum-not-rounded",
            "what is normed is the sum before it is rounded",
            old="return total.to(x.dtype.element_ty).to(acc_dtype)",
            new="return total",
            sample=True,
        ),
        Planted(
            "rows-of-x",
            "the residual is read with the rows of x",
            old="start_of(residual, row, extents, strides.residual, tile)",
            new="start_of(residual, row, extents, strides.x, tile)",
            gpu=False,
            small=True,
        ),
        Planted(
            "mean-over-tile",
            "the mean of squares divides by the tile's extent",
            old="inverse_rms(s, n, eps)",
            new="inverse_rms(s, tile.block_n, eps)",
        ),
        Planted(
            "long-sum-of-x",
            "of a long row the sum that is stored is x",
            old="            tl.store(total + out + at, s.to(",
            new="            tl.store(total + out + at, tl.load(x_row + at * strides.x.n, mask=ok).to(",
        ),
        Planted(
            "last-not-summed",
            "the sum of squares of a long row leaves out its last element",
            old="row_ok & (at < n), tile.acc_dtype)",
            new="row_ok & (at < n - 1), tile.acc_dtype)",
        ),
    ],
    "pallas": [
        Planted(
            "mean-over-blocks",
            "the mean of squares divides by the extent of all blocks",
            old="    run = partial(kernel,",
            new="    def over(ref, *, strip, **how):\n"
            "        wide = strip.n + -strip.n % strip.walk.block_n\n"
            "        walk = strip.walk._replace(shape=(*strip.walk.shape[:-1], wide))\n"
            "        return kernel(ref, strip=strip._replace(walk=walk), **how)\n"
            "\n    run = partial(over,",
        ),
        Planted(
            "eps-ignored",
            "eps is always 1e-6",
            old='(kernel, eps=call.options["eps"]',
            new="(kernel, eps=1e-6",
            small=True,
        ),
        Planted(
            "rounding-ignored",
            "x r is never rounded before the weight",
            old='(kernel, eps=call.options["eps"], narrow=rounds_before(call)',
            new='(kernel, eps=call.options["eps"], narrow=False',
            small=True,
        ),
    ],
}
