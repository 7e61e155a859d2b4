"""What the records of ops share that give their result in codes of 8 bits."""

from __future__ import annotations

import numpy as np

from tests.ops import quantize
from tests.ops._shared import pick, through

E4M3, E5M2, INT8 = quantize.E4M3, quantize.E5M2, quantize.INT8
TWO = {"scales": "power_of_two"}


def coded(y, like, options, *, ftz=False):
    """The codes of y in groups of a width, the last of which may be short, and their scales, by the simulated kernel of
    quantize. ``like``: what the op was given. ``stored``: y is rounded to its dtype first; ``of_a_row``: a row has one
    scale for all of its groups; the others are quantize's."""
    n, options = y.shape[-1], dict(options)
    width, stored, of_a_row = (
        options.pop(k, default) for k, default in (("width", 128), ("stored", 0), ("of_a_row", 0))
    )
    width = min(width, n)
    groups = -(-n // width)
    rows = np.pad(through(y, like.dtype if stored else None).reshape(-1, n), ((0, 0), (0, groups * width - n)))
    height, wide = (1, groups * width) if of_a_row else (1, width)
    q, scale = quantize.simulate(rows, None, height, wide, **options, ftz=ftz)
    scale = np.repeat(scale, groups, 1) if of_a_row else scale
    return q[:, :n].reshape(y.shape), scale.reshape(*y.shape[:-1], groups)


def any_codes(rng, n):
    """Options of a call on rows of n."""
    found = {"width": pick(rng, (n, 1 + int(rng.integers(n)), 128)), "to": pick(rng, (E4M3, E5M2, INT8))}
    found |= {"scales": pick(rng, ("float32", "power_of_two")), "scale_ub": pick(rng, (None, None, 1.0))}
    return found | {"scale_floor": pick(rng, (0.0, 0.0, 0.01))}


def by_formula(y, width=128, **options):
    """One row after the other."""
    n, width = y.shape[-1], min(width, y.shape[-1])
    found = []
    for row in y.reshape(-1, n):
        groups = [row[i : i + width][None] for i in range(0, n, width)]
        found.append([quantize.formula(g, None, 1, g.shape[1], **options) for g in groups])
    q = np.array([np.concatenate([g[0][0] for g in row]) for row in found]).reshape(y.shape)
    return q, np.array([[g[1][0, 0] for g in row] for row in found]).reshape(*y.shape[:-1], -1)


def of_torch(y, width=128, **options):
    """By torch's operations; width divides n."""
    n = y.shape[-1]
    q, scale = quantize.in_torch(y.reshape(-1, n), None, 1, min(width, n), **options)
    return q.reshape(y.shape), scale.reshape(*y.shape[:-1], -1)


def of_jax(y, width=128, **options):
    n = y.shape[-1]
    q, scale = quantize.in_jax(y.reshape(-1, n), None, 1, min(width, n), **options)
    return q.reshape(y.shape), scale.reshape(*y.shape[:-1], -1)


def given_back(q, scale, like):
    """What codes and scales of whole rows give back, as a hidden state."""
    q, scale = (a.astype(like.dtype) if hasattr(a, "astype") else a.to(like.dtype) for a in (q, scale))
    return q * scale


def past_2_31(name, count, affine=True):
    """Rows of an op on ``count`` arrays, and a weight, of more than 2^31 numbers."""

    def parts(gpu):
        rows, n = gpu.big // 4096 + 16, 4096
        first = gpu.torch.randn(rows, n, dtype=gpu.torch.bfloat16, device=gpu.device)
        arrays = [first, *(first.flip(0) for _ in range(count - 1))]
        weight = (gpu.normal(n, dtype=gpu.torch.bfloat16),) if affine else ()
        assert first.numel() > gpu.big
        picked = gpu.rows_to_sample(rows, n)
        found = gpu.op(name)(*arrays, *weight)
        yield tuple(out[picked] for out in found), (*(a[picked] for a in arrays), *weight), {}

    return parts


def any_width(r, n):
    """Options of a random call on rows of n."""
    return {
        "width": r.pick((max(n, 1), 1 + n // 2, 128)),
        "to": r.pick((E4M3, E5M2, INT8)),
        "scales": r.pick(("float32", "power_of_two")),
    }
