"""Simulated kernels of gradients, in the accumulator's type and in the order of real ones, and the calls that they are tried on. A keyword plants a fault."""

from __future__ import annotations

from functools import partial

import numpy as np

from portakern.api import op
from portakern.core.oracle import oracle
from portakern.spec.dtypes import numpy_dtype
from portakern.testing.cases import REGIMES as VALUES
from tests.simulated import sim_matmul

DTYPES = ("float32", "float16", "bfloat16")


def draw(rng, shape, dtype, regime="normal"):
    return np.array(VALUES[regime](rng, shape, numpy_dtype(dtype))).astype(numpy_dtype(dtype))


def pick(rng, choices):
    return choices[rng.integers(len(choices))]


def accumulator(*arrays):
    return np.float64 if any(a is not None and a.dtype == np.float64 for a in arrays) else np.float32


def flush(x, on):
    return np.where(np.abs(x) < np.finfo(x.dtype).tiny, x.dtype.type(0), x) if on else x


def in_blocks(values, block, axis=-1):
    """A sum, block after block."""
    parts = [
        values.take(range(j, min(j + block, values.shape[axis])), axis).sum(axis, keepdims=True)
        for j in range(0, values.shape[axis], block)
    ]
    total = np.zeros_like(parts[0])
    for part in parts:
        total = total + part
    return total


def sim_softmax_vjp(y, d_y, axis=-1, block=4096, ftz=False, apart=False, factor=1.0, tail=True, low=None):
    acc = accumulator(y)
    y, g = (flush(np.moveaxis(a, axis, -1).astype(acc), ftz) for a in (y, d_y))
    terms = flush(y * g, ftz)
    delta = in_blocks(terms if tail else terms[..., : terms.shape[-1] // block * block or 1], block)
    delta = delta if low is None else delta.astype(low).astype(acc)
    d_x = flush(y * g, ftz) - flush(y * delta, ftz) if apart else y * (g - delta)
    return (np.moveaxis(flush(d_x * acc(factor), ftz), -1, axis),)


def welford(x, block):
    """Mean and variance by merging blocks (Chan, Golub, LeVeque)."""
    n, acc, mean, m2 = x.shape[-1], x.dtype.type, x.dtype.type(0), x.dtype.type(0)
    for j in range(0, n, block):
        part = x[:, j : j + block]
        here, centre = part.shape[-1], part.mean(-1, keepdims=True)
        delta, share = centre - mean, acc(part.shape[-1] / (j + part.shape[-1]))
        m2 = m2 + np.square(part - centre).sum(-1, keepdims=True) + delta * (delta * (share * acc(j)))
        mean = mean + delta * (share if here else acc(0))
    return mean, m2 / acc(n)


def sim_layernorm_vjp(
    x,
    d_y,
    weight=None,
    bias=None,
    eps=1e-5,
    block=None,
    group=64,
    ftz=False,
    ddof=0,
    drop=None,
    c2=1.0,
    low=None,
    skip_rows=0,
):
    acc, (n, shape) = accumulator(x), (x.shape[-1], x.shape)
    x, g = (flush(a.reshape(-1, n).astype(acc), ftz) for a in (x, d_y))
    if block:
        mean, var = welford(x, block)
    else:
        mean = x.sum(-1, keepdims=True) / acc(n)
        var = flush(np.square(x - mean), ftz).sum(-1, keepdims=True) / acc(n - ddof)
    r = acc(1) / np.sqrt(flush(var + acc(eps), ftz))
    xh, h = (x - mean) * r, g if weight is None else flush(g * flush(weight.astype(acc), ftz), ftz)
    mean_h, mean_hx = (in_blocks(t, block or n) / acc(n) for t in (h, flush(h * xh, ftz)))
    d_x = (
        r * (h - mean_h - xh * (mean_hx * acc(c2)))
        if drop is None
        else r * (h - (mean_h if drop == "c2" else xh * mean_hx))
    )
    sums = []
    for values in (flush(g * xh, ftz), g):
        partial_sums = np.concatenate(
            [in_blocks(values[i : i + group], 1, 0) for i in range(0, len(values) - skip_rows, group)]
            or [values[:1] * 0]
        )
        total = in_blocks(partial_sums, 1, 0)[0]
        sums.append(total if low is None else total.astype(low).astype(acc))
    return (
        flush(d_x, ftz).reshape(shape),
        None if weight is None else flush(sums[0], ftz),
        None if bias is None else flush(sums[1], ftz),
    )


def sim_rmsnorm_vjp(
    x,
    d_y,
    weight=None,
    eps=1e-6,
    block=None,
    group=64,
    ftz=False,
    last=False,
    over=0,
    drop=False,
    c2=1.0,
    low=None,
    skip_rows=0,
):
    """last: r meets mean(h x) after the sum, as where rows are longer than a tile."""
    acc, (n, shape) = accumulator(x), (x.shape[-1], x.shape)
    x, g = (flush(a.reshape(-1, n).astype(acc), ftz) for a in (x, d_y))
    r = acc(1) / np.sqrt(flush(in_blocks(flush(np.square(x), ftz), block or n) / acc(n + over) + acc(eps), ftz))
    xh, h = flush(x * r, ftz), g if weight is None else flush(g * flush(weight.astype(acc), ftz), ftz)
    mean_hx = (in_blocks(flush(h * (x if last else xh), ftz), block or n) / acc(n)) * (r if last else acc(1))
    d_x = r * (h - (acc(0) if drop else xh * (mean_hx * acc(c2))))
    values = flush(g * xh, ftz)
    partial_sums = np.concatenate(
        [in_blocks(values[i : i + group], 1, 0) for i in range(0, len(values) - skip_rows, group)] or [values[:1] * 0]
    )
    total = in_blocks(partial_sums, 1, 0)[0]
    total = total if low is None else total.astype(low).astype(acc)
    return flush(d_x, ftz).reshape(shape), None if weight is None else flush(total, ftz)


def fold(x, shape):
    """Sum over what broadcasting made of ``shape``, one entry after another."""
    while x.ndim > len(shape):
        x = in_blocks(x, 1, 0)[0]
    for axis, extent in enumerate(shape[:-2]):
        x = in_blocks(x, 1, axis) if extent == 1 else x
    return x


def sim_matmul_vjp(
    a, b, d_c, precision="ieee", block=32, ftz=False, after=False, low=None, only_first=False, tail=True, cut=False
):
    acc = accumulator(a, b, d_c)
    narrow = max({a.dtype.itemsize, d_c.dtype.itemsize}) < 4 and a.dtype == d_c.dtype
    precision = "tf32" if cut else "ieee" if narrow or acc is np.float64 else precision
    product = (
        partial(sim_matmul, block=block, precision=precision, ftz=ftz, low=low, tail=tail)
        if acc is np.float32
        else (lambda x, y: (x.astype(acc) @ y.astype(acc),))
    )
    grads = []
    batch = d_c.shape[:-2]
    for name, own in (("a", a), ("b", b)):
        left, right = (d_c, np.swapaxes(b, -1, -2)) if name == "a" else (np.swapaxes(a, -1, -2), d_c)
        left, right = (np.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (left, right))
        if only_first:
            (x,) = product(left, right)
            grads.append(
                x[tuple(0 for _ in range(x.ndim - own.ndim))][
                    tuple(slice(1) if e == 1 else slice(None) for e in own.shape)
                ].reshape(own.shape)
            )
        elif after or not batch:
            grads.append(fold(product(left, right)[0], own.shape))
        else:  # the batch entries that are summed lie one after another along the contraction
            lead = (1,) * (d_c.ndim - own.ndim) + own.shape[:-2]
            axes = [i for i, e in enumerate(lead) if e == 1]
            kept = [i for i, e in enumerate(lead) if e != 1]
            nb = len(batch)
            left = left.transpose(*kept, nb, *axes, nb + 1)
            right = right.transpose(*kept, *axes, nb, nb + 1)
            left = left.reshape(*left.shape[: len(kept) + 1], -1)
            right = right.reshape(*right.shape[: len(kept)], -1, right.shape[-1])
            grads.append(product(left, right)[0].reshape(own.shape))
    return tuple(grads)


SIMS = {
    "softmax_vjp": sim_softmax_vjp,
    "layernorm_vjp": sim_layernorm_vjp,
    "rmsnorm_vjp": sim_rmsnorm_vjp,
    "matmul_vjp": sim_matmul_vjp,
}


def softmax_case(rng, dtype, regime, large=False):
    rows, n = (
        (pick(rng, [1, 7, 64]), pick(rng, [64, 257, 1030]))
        if large
        else (int(rng.integers(1, 24)), pick(rng, [1, 5, 64, 300, 1024]))
    )
    x = draw(rng, (rows, n), dtype, regime)
    x = x if regime != "wide" or rng.random() < 0.5 else draw(rng, (rows, n), dtype)
    y = np.array(oracle(op("softmax").bind(x))[0]).astype(numpy_dtype(dtype))
    return (y, draw(rng, (rows, n), dtype, regime)), {}


def layernorm_case(rng, dtype, regime, large=False):
    rows, n = (
        (pick(rng, [1, 7, 64, 200]), pick(rng, [64, 65, 257]))
        if large
        else (pick(rng, [1, 3, 17, 200]), pick(rng, [1, 5, 64, 300]))
    )
    weight = (
        draw(rng, (n,), pick(rng, [dtype, "float32"]) if dtype != "float64" else dtype, regime if large else "normal")
        if rng.random() < 0.7
        else None
    )
    bias = (
        draw(rng, (n,), pick(rng, [dtype, "float32"]) if dtype != "float64" else dtype) if rng.random() < 0.7 else None
    )
    options = {"eps": 1e-5} if large else {"eps": pick(rng, [1e-5, 1e-12, 0.0, 1e-2])}
    return (
        draw(rng, (rows, n), dtype, regime),
        draw(rng, (rows, n), dtype, pick(rng, ["normal", regime]) if not large else regime),
        weight,
        bias,
    ), options


def rmsnorm_case(rng, dtype, regime, large=False):
    arrays, options = layernorm_case(rng, dtype, regime, large)
    return arrays[:3], options


BATCHES = (((), ()), ((3,), (3,)), ((3,), ()), ((), (5,)), ((2, 1), (1, 3)), ((2, 3), (3,)), ((4, 1), (4, 3)))


def matmul_case(rng, dtype, regime, large=False):
    m, k, n = rng.choice([64, 65, 96, 128], 3) if large else rng.choice([1, 7, 16, 40], 3)
    batch_a, batch_b = pick(rng, BATCHES[:4] if large else BATCHES)
    own = dtype if dtype == "float64" or rng.random() < 0.5 else pick(rng, DTYPES)
    d_c = draw(rng, (*np.broadcast_shapes(batch_a, batch_b), m, n), own, regime)
    return (draw(rng, (*batch_a, m, k), dtype, regime), draw(rng, (*batch_b, k, n), dtype, regime), d_c), {}


CASES = {
    "softmax_vjp": softmax_case,
    "layernorm_vjp": layernorm_case,
    "rmsnorm_vjp": rmsnorm_case,
    "matmul_vjp": matmul_case,
}
VARIANTS = {
    "softmax_vjp": ({}, {"block": 128}, {"apart": True}, {"ftz": True}, {"block": 128, "ftz": True, "apart": True}),
    "layernorm_vjp": ({}, {"block": 128}, {"block": 16, "group": 8}, {"group": 1}, {"ftz": True}),
    "rmsnorm_vjp": (
        {},
        {"block": 128, "last": True},
        {"block": 16, "group": 8},
        {"group": 1},
        {"ftz": True},
        {"ftz": True, "last": True},
    ),
    "matmul_vjp": ({}, {"block": 16}, {"after": True}, {"ftz": True}),
}
