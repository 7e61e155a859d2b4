"""What the records of norms of a sum share: how the sum comes about, and the second cotangent of their gradients."""

from __future__ import annotations

import numpy as np

from portakern.spec.dtypes import numpy_dtype
from tests.ops._shared import accumulator, draw, flush, sweep


def summed(x, residual, *, ftz=False, wide=False, alone=False):
    """(what is normed, the sum as it is stored): x + residual, rounded to their dtype.

    ``wide``: what is normed is not rounded; ``alone``: the residual is forgotten.
    """
    acc = accumulator(x)
    terms = [flush(a.astype(acc), ftz) for a in (x, residual)]
    total = terms[0] if alone else flush(terms[0] + terms[1], ftz)
    stored = flush(total.astype(x.dtype).astype(acc), ftz)
    return (total if wide else stored.astype(x.dtype)), stored


def beside(x, rng, dtype, regime="normal"):
    """A residual for x: of the same kind, or its opposite and a little."""
    if rng.random() < 0.25:
        wide = x.astype(np.float64)
        return (-wide * (1 + 2.0**-4 * rng.standard_normal(x.shape))).astype(numpy_dtype(dtype))
    return sweep(rng, x.shape, dtype, regime)


def second_cotangent(rng, dtype, like):
    """That of the sum, or none."""
    return draw(rng, like.shape, dtype) if rng.random() < 0.7 else None


def with_past(d_x, past, ftz):
    """d_x and the second cotangent, before they are rounded."""
    return d_x if past is None else flush(d_x + flush(past.astype(d_x.dtype), ftz), ftz)


def in_layer(y, total):
    """One hidden state of the two results."""
    return y + total


def past_2_31(name):
    """Rows past 2^31 elements of the forward op."""

    def calls(gpu):
        rows, n = gpu.big // 256 + 16, 256
        x, residual = (gpu.torch.randn(rows, n, dtype=gpu.torch.bfloat16, device=gpu.device) for _ in range(2))
        assert x.numel() > gpu.big
        picked = gpu.rows_to_sample(rows, n)
        y, total = gpu.op(name)(x, residual)
        yield (y[picked], total[picked]), (x[picked], residual[picked]), {}

    return calls
