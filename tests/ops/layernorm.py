"""y = (x - mean) / sqrt(var + eps) weight + bias.

d_x = r (h - mean h - xh mean(h xh)), d_weight = sum d_y xh, d_bias = sum d_y, with h = d_y weight.
"""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np

import portakern as pk
from tests.ops._shared import (
    BF16,
    CHECKED,
    HALVES,
    SWEPT,
    accumulator,
    draw,
    flush,
    in_blocks,
    long_rows,
    long_rows_of_gradients,
    normal64,
    over_rows,
    pick,
    sweep,
    through,
    zeros,
)
from tests.ops.record import DTYPES, Fault, ForwardRecord, GradientRecord, Hiding, Layer, Mapped, Near, Sample, Twin


def simulate(x, weight=None, bias=None, eps=1e-5, *, block=None, ftz=False, moments=False, ddof=0):
    """Mean and variance of whole rows, or merged from blocks (Chan, Golub, LeVeque)."""
    acc = accumulator(x)
    x, eps, n = flush(x.astype(acc), ftz), acc(eps), x.shape[-1]
    if block:
        mean, m2 = acc(0), acc(0)
        for j in range(0, n, block):
            part = x[..., j : j + block]
            here, centre = part.shape[-1], part.mean(-1, keepdims=True)
            delta = centre - mean
            spread = np.square(part - centre).sum(-1, keepdims=True)
            m2 = m2 + spread + delta * (delta * acc(here / (j + here) * j))
            mean = mean + delta * acc(here / (j + here))
        var = m2 / acc(n)
    else:
        mean = x.sum(-1, keepdims=True) / acc(n)
        squares = flush(np.square(x if moments else x - mean), ftz).sum(-1, keepdims=True)
        var = squares / acc(n) - np.square(mean) if moments else squares / acc(n - ddof)
    y = (x - mean) * (acc(1) / np.sqrt(flush(var + eps, ftz)))
    y = y if weight is None else y * weight.astype(acc)
    return (flush(y if bias is None else y + bias.astype(acc), ftz),)


def rows_and_affine(rng, dtype, regime):
    """x, weight and bias, the last two perhaps absent."""
    n = rng.choice([1, 5, 64, 300, 1024, 4096])
    affine = (
        tuple(sweep(rng, (n,), rng.choice([dtype, "float32"])) for _ in "wb") if rng.random() < 0.7 else (None, None)
    )
    return sweep(rng, (rng.integers(1, 24), n), dtype, regime), *affine


def any_eps(rng):
    return pick(rng, ({}, {"eps": 0.0}, {"eps": 1e-12}))


def case(rng, dtype, regime):
    return rows_and_affine(rng, dtype, regime), any_eps(rng)


def large_case(rng, dtype, regime):
    n = rng.choice([64, 257, 1030])
    affine = (draw(rng, (n,), dtype, regime), draw(rng, (n,), "float32", regime)) if rng.random() < 0.5 else ()
    return (draw(rng, (rng.choice([1, 7, 64]), n), dtype, regime), *affine), {}


def formula(x, weight=None, bias=None, eps=1e-5):
    y, n = np.zeros(x.shape), x.shape[-1]
    for row in np.ndindex(x.shape[:-1]):
        mean = math.fsum(x[row]) / n
        var = math.fsum((t - mean) ** 2 for t in x[row]) / n
        y[row] = [(t - mean) / math.sqrt(var + eps) for t in x[row]]
    return ((y if weight is None else y * weight) + (0 if bias is None else bias),)


def formula_call(affine, eps):
    more = (normal64(7), normal64(7, seed=1)) if affine else (None, None)
    return (normal64(2, 3, 7) * 3 + 5, *more), {"eps": eps}


def in_torch(x, weight=None, bias=None, eps=1e-5):
    import torch

    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def in_jax(x, weight=None, bias=None, eps=1e-5):
    import jax
    import jax.numpy as jnp

    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    y = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + eps)
    y = y.astype(x.dtype) if weight is None else y.astype(x.dtype) * weight
    return y if bias is None else y + bias


def call(*arrays, **options):
    return pk.op("layernorm")(*arrays, **options)


def fuzzed(r, dtype):
    n, given = r.extent(), {}
    for extra in ("weight", "bias"):
        if r.chance(0.5):
            given[extra] = r.array(r.pick((dtype, "float32")) if dtype in HALVES else dtype, n)
    return {"x": r.array(dtype, r.extent(), n), **given}, {"eps": r.pick((1e-5, 1e-2, 1.0))}


X = zeros(2, 3)
WRONG = {
    "no axes": (lambda: call(zeros()), r"layernorm: x has 0 axes, shape \(\); expected at least 1"),
    "weight": (lambda: call(X, zeros(4)), r"layernorm: weight axis 0 \(n\) is 4; expected 3, as set by x axis -1"),
    "a weight too narrow": (
        lambda: call(X.astype(np.float16), zeros(3, dtype=ml_dtypes.bfloat16)),
        r"weight is bfloat16 but x is float16; expected float16 or float32: cast one",
    ),
    "eps below zero": (
        lambda: call(X, eps=-1.0),
        r"layernorm: eps is -1.0; expected a finite number in float32's range >= 0: leave it out for 1e-05",
    ),
    "a positional option": (
        lambda: call(X, None, None, 1e-5),
        r"layernorm\(\) takes from 1 to 3 positional arguments but 4 were given",
    ),
}


def presence(shapes):
    """Calls with and without weight and bias."""
    for shape, weight, bias in itertools.product(shapes, (True, False), (True, False)):
        given = {"weight": shape[-1:]} if weight else {}
        given |= {"bias": shape[-1:]} if bias else {}
        yield f"{shape} {'weight ' * weight}{'bias' * bias}".strip(), Sample({"x": shape, **given}, {"eps": 1e-3})


RECORD = ForwardRecord(
    op="layernorm",
    simulate=simulate,
    variants=({}, {"block": 128}, {"block": 16}, {"ftz": True}),
    case=case,
    regimes=SWEPT,
    near=Near(lambda rng: (sweep(rng, (40, 64), "float32"),), off={"y": 6e-6}),
    faults={
        "over n - 1": Fault(lambda r, t: (sweep(r, (4, 40), t),), {"ddof": 1}),
        "with another eps": Fault(lambda r, t: (sweep(r, (4, 40), t, "wide"),), {"eps": 1e-3}, {"eps": 1e-2}),
        "from raw moments": Fault(
            lambda r, t: (sweep(r, (8, 256), t) + np.float32(3000),), {"moments": True}, dtypes=("float32",)
        ),
    },
    large_case=large_case,
    typical=lambda rng, dtype: ((draw(rng, (64, 64), dtype),), {}),
    hiding={
        "xh truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "variance over n - 1": Hiding("typical", {"ddof": 1}, dtypes=DTYPES),
    },
    small={
        "plain": Sample({"x": (2, 3), "weight": (3,), "bias": (3,)}, {"eps": 1e-2}),
        "no weight": Sample({"x": (2, 3), "bias": (3,)}),
    },
    derived=dict(presence([(4, 6), (2, 3, 5), (7,), (3, 1)])),
    usual=(
        Sample({"x": (64, 1000), "weight": (1000,), "bias": (1000,)}),
        Sample({"x": (64, 1000), "weight": (1000,)}, tiling={"block_rows": 16, "block_n": 128}),
        Sample({"x": (4, 8, 384)}),
    ),
    formula=formula,
    formula_calls={
        f"{'affine ' * affine}eps {eps}": lambda affine=affine, eps=eps: formula_call(affine, eps)
        for affine, eps in itertools.product((False, True), (0.0, 1e-5, 0.5))
    },
    formula_tolerance=(1e-12, 0),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample({"x": (2, 3, 33), "weight": (33,), "bias": (33,)}),
    lowered={
        "affine": Sample({"x": (3, 7, 300), "weight": (300,), "bias": (300,)}, wider=("weight", "bias")),
        "bare": Sample({"x": (33,)}),
    },
    mapped={
        "shared weights": Mapped(Sample({"x": (2, 3, 4), "weight": (4,), "bias": (4,)}), {"x": 0}),
        "own weights": Mapped(Sample({"x": (2, 3, 4), "weight": (4, 2)}), {"x": 0, "weight": 1}, folds=False),
        "only weights": Mapped(Sample({"x": (3, 4), "weight": (2, 4)}), {"weight": 0}, folds=False),
    },
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(lambda op, x, p: op(x, p["weight"], p["bias"]), lambda width: {"weight": (width,), "bias": (width,)}),
    extents={"batch": 2, "n": 128},
    launched=Sample({"x": (64, 512), "weight": (512,), "bias": (512,)}),
    rows=("x", "weight", "bias"),
    past_2_31=long_rows("layernorm"),
    far=lambda gpu: [(gpu.far((4, 300)),)],
    twin=Twin(
        "layer_norm",
        sampled="nn.functional.layer_norm",
        refusals={"eps is -0.5; expected a finite number in float32's range >= 0": "a negative eps is refused"},
        least=5,
    ),
)


# ---------------------------------------------------------------------------------------------------------- gradient
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


def simulate_vjp(x, d_y, weight=None, bias=None, eps=1e-5, *, block=None, group=64, ftz=False, moments=False, ddof=0,
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


def case_vjp(rng, dtype, regime):
    rows, n = pick(rng, [1, 3, 17, 200]), pick(rng, [1, 5, 64, 300])
    weight, bias = maybe(rng, n, dtype, "normal"), maybe(rng, n, dtype, "normal")
    options = {"eps": pick(rng, [1e-5, 1e-12, 0.0, 1e-2])}
    x = draw(rng, (rows, n), dtype, regime)
    return (x, draw(rng, (rows, n), dtype, pick(rng, ["normal", regime])), weight, bias), options


def large_case_vjp(rng, dtype, regime):
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


GRADIENT = GradientRecord(
    op="layernorm_vjp",
    simulate=simulate_vjp,
    variants=({}, {"block": 128}, {"block": 16, "group": 8}, {"group": 1}, {"ftz": True}),
    case=case_vjp,
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
    large_case=large_case_vjp,
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
