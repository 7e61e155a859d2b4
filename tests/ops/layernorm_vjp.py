"""d_x = r (h - mean h - xh mean(h xh)), d_weight = sum d_y xh, d_bias = sum d_y, with h = d_y weight."""

from __future__ import annotations

import numpy as np

from tests.ops._shared import (
    BF16,
    CHECKED,
    HALVES,
    accumulator,
    draw,
    flush,
    in_blocks,
    long_rows_of_gradients,
    over_rows,
    pick,
    through,
)
from tests.ops.record import Fault, GradientRecord, Hiding, Near, Sample


def welford(x, block):
    """Mean and variance by merging blocks (Chan, Golub, LeVeque)."""
    n, acc, mean, m2 = x.shape[-1], x.dtype.type, x.dtype.type(0), x.dtype.type(0)
    for j in range(0, n, block):
        part = x[:, j : j + block]
        here, centre = part.shape[-1], part.mean(-1, keepdims=True)
        delta, share = centre - mean, acc(here / (j + here))
        m2 = m2 + np.square(part - centre).sum(-1, keepdims=True) + delta * (delta * (share * acc(j)))
        mean = mean + delta * share
    return mean, m2 / acc(n)


def simulate(x, d_y, weight=None, bias=None, eps=1e-5, *, block=None, group=64, ftz=False, moments=False, ddof=0,
             drop=None, c2=1.0, low=None, skip_rows=0):  # fmt: skip
    """``group`` rows share a partial sum of d_weight and d_bias."""
    acc, (n, shape) = accumulator(x), (x.shape[-1], x.shape)
    x, g = (flush(a.reshape(-1, n).astype(acc), ftz) for a in (x, d_y))
    if block:
        mean, var = welford(x, block)
    else:
        mean = x.sum(-1, keepdims=True) / acc(n)
        squares = np.square(x if moments else x - mean)
        var = flush(squares, ftz).sum(-1, keepdims=True) / acc(n - ddof) - (np.square(mean) if moments else acc(0))
    r = acc(1) / np.sqrt(flush(var + acc(eps), ftz))
    xh, h = (x - mean) * r, g if weight is None else flush(g * flush(weight.astype(acc), ftz), ftz)
    mean_h, mean_hx = (in_blocks(t, block or n) / acc(n) for t in (h, flush(h * xh, ftz)))
    if drop is None:
        d_x = r * (h - mean_h - xh * (mean_hx * acc(c2)))
    else:
        d_x = r * (h - (mean_h if drop == "c2" else xh * mean_hx))
    d_weight, d_bias = (through(over_rows(values, group, skip_rows), low) for values in (flush(g * xh, ftz), g))
    return (
        flush(d_x, ftz).reshape(shape),
        None if weight is None else flush(d_weight, ftz),
        None if bias is None else flush(d_bias, ftz),
    )


def maybe(rng, n, dtype, regime):
    """weight or bias, in x's dtype or float32, or absent."""
    if rng.random() >= 0.7:
        return None
    return draw(rng, (n,), pick(rng, [dtype, "float32"]) if dtype != "float64" else dtype, regime)


def case(rng, dtype, regime):
    rows, n = pick(rng, [1, 3, 17, 200]), pick(rng, [1, 5, 64, 300])
    weight, bias = maybe(rng, n, dtype, "normal"), maybe(rng, n, dtype, "normal")
    options = {"eps": pick(rng, [1e-5, 1e-12, 0.0, 1e-2])}
    x = draw(rng, (rows, n), dtype, regime)
    return (x, draw(rng, (rows, n), dtype, pick(rng, ["normal", regime])), weight, bias), options


def large_case(rng, dtype, regime):
    rows, n = pick(rng, [1, 7, 64, 200]), pick(rng, [64, 65, 257])
    weight, bias = maybe(rng, n, dtype, regime), maybe(rng, n, dtype, "normal")
    return (*(draw(rng, (rows, n), dtype, regime) for _ in "xg"), weight, bias), {"eps": 1e-5}


def arrays(rng, dtype, rows=130, n=40):
    return (*(draw(rng, (rows, n), dtype) for _ in "xg"), *(draw(rng, (n,), dtype) for _ in "wb"))


def near(rng):
    return draw(rng, (32, 64), "float32"), draw(rng, (32, 64), "float32"), *draw(rng, (2, 64), "float32")


def far_mean(rng, dtype):
    return draw(rng, (8, 256), dtype) + np.float32(3000), draw(rng, (8, 256), dtype), None, None


def far(gpu):
    weight = gpu.normal(300, dtype=gpu.torch.bfloat16)
    yield gpu.far((4, 300)), gpu.far((4, 300)), weight, weight


RECORD = GradientRecord(
    op="layernorm_vjp",
    simulate=simulate,
    variants=({}, {"block": 128}, {"block": 16, "group": 8}, {"group": 1}, {"ftz": True}),
    case=case,
    regimes=CHECKED,
    least_float64=0.01,
    near=Near(near, off={"d_x": 1e-5, "d_weight": 2e-5, "d_bias": 8e-6}),
    faults={
        "variance over n - 1": Fault(arrays, {"ddof": 1}, breaks="d_weight"),
        "without mean(h xh)": Fault(arrays, {"drop": "c2"}, breaks="d_x"),
        "without mean h": Fault(arrays, {"drop": "c1"}, breaks="d_x"),
        "mean(h xh) 10 % off": Fault(arrays, {"c2": 1.1}, breaks="d_x"),
        "another eps": Fault(arrays, {"eps": 1e-2}, breaks="d_x"),
        "column sums without the last group": Fault(arrays, {"skip_rows": 2}, breaks="d_bias"),
        "from raw moments": Fault(far_mean, {"moments": True}, breaks="d_x", dtypes=("float32",)),
    },
    large_case=large_case,
    typical=lambda rng, dtype: (arrays(rng, dtype, 100, 70), {}),
    hiding={
        "gradients truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "mean(h xh) 1 % off": Hiding("typical", {"c2": 1.01}, dtypes=("float32",)),
        "column sums kept in bfloat16": Hiding("typical", {"low": BF16}, dtypes=("float32",)),
    },
    small={"one gradient": Sample({"x": (2, 3), "d_y": (2, 3), "weight": (3,)}, wants=("d_weight",))},
    usual=(
        Sample({"x": (64, 1000), "d_y": (64, 1000), "weight": (1000,), "bias": (1000,)}),
        Sample({"x": (64, 1000), "d_y": (64, 1000), "weight": (1000,)}, tiling={"block_rows": 16, "block_n": 128}),
        Sample({"x": (4, 8, 384), "d_y": (4, 8, 384)}),
    ),
    extents={"batch": 2, "n": 128},
    rows=("x", "x", "weight", "bias"),
    past_2_31=long_rows_of_gradients("layernorm_vjp"),
    far=far,
)
