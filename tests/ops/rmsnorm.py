"""y = x / sqrt(mean x^2 + eps) weight.

d_x = r (h - xh mean(h xh)), d_weight = sum d_y xh, with h = d_y weight.
"""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np

import portakern as pk
from tests.ops import layernorm
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
from tests.ops.record import Fault, ForwardRecord, GradientRecord, Hiding, Layer, Mapped, Near, Sample, Twin


def narrow_of(x, rounding):
    """The dtype in which x r meets the weight; None where it is as wide as its sums."""
    return x.dtype if rounding == "before_weight" and x.dtype.itemsize == 2 else None


def simulate(x, weight=None, eps=1e-6, rounding="once", *, block=None, ftz=False, over=0, outside=False, tail=True,
             low=None):  # fmt: skip
    """The squares of a row added up block after block, then one product with the inverse root and one with weight."""
    acc, narrow = accumulator(x), narrow_of(x, rounding)
    x, eps, n = flush(x.astype(acc), ftz), acc(eps), x.shape[-1]
    block, total = block or n, acc(0)
    for j in range(0, n if tail else n // block * block, block):
        total = through(total + flush(np.square(x[..., j : j + block]), ftz).sum(-1, keepdims=True), low)
    mean = total / acc(n + over)
    r = acc(1) / (np.sqrt(mean) + eps if outside else np.sqrt(flush(mean + eps, ftz)))
    xh = through(x * r, narrow)
    return (flush(xh if weight is None else flush(xh, ftz) * flush(weight.astype(acc), ftz), ftz),)


def any_options(rng):
    return layernorm.any_eps(rng) | {"rounding": pick(rng, ROUNDINGS)}


def case(rng, dtype, regime):
    return layernorm.rows_and_affine(rng, dtype, regime)[:2], any_options(rng)


def large_case(rng, dtype, regime):
    arrays, options = layernorm.large_case(rng, dtype, regime)
    return arrays[:2], options | {"rounding": pick(rng, ROUNDINGS)}


def rows_and_weight(rng, dtype):
    return sweep(rng, (4, 40), dtype), sweep(rng, (40,), dtype)


def formula(x, weight=None, eps=1e-6):
    y = np.zeros(x.shape)
    for row in np.ndindex(x.shape[:-1]):
        y[row] = x[row] / math.sqrt(math.fsum(t * t for t in x[row]) / x.shape[-1] + eps)
    return (y if weight is None else y * weight,)


def in_torch(x, weight=None, eps=1e-6):
    import torch

    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def in_jax(x, weight=None, eps=1e-6):
    import jax.numpy as jnp

    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    y = (wide / jnp.sqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)).astype(x.dtype)
    return y if weight is None else y * weight


def call(*arrays, **options):
    return pk.op("rmsnorm")(*arrays, **options)


def fuzzed(r, dtype):
    arrays, options = layernorm.fuzzed(r, dtype)
    return {name: a for name, a in arrays.items() if name != "bias"}, options


X = zeros(2, 3)
ROUNDINGS = ("once", "before_weight")
WRONG = {
    "no axes": (lambda: call(zeros()), r"rmsnorm: x has 0 axes, shape \(\); expected at least 1"),
    "weight": (lambda: call(X, zeros(4)), r"rmsnorm: weight axis 0 \(n\) is 4; expected 3, as set by x axis -1"),
    "a weight too narrow": (
        lambda: call(X.astype(np.float16), zeros(3, dtype=ml_dtypes.bfloat16)),
        r"weight is bfloat16 but x is float16; expected float16 or float32: cast one",
    ),
    "eps below zero": (
        lambda: call(X, eps=-1.0),
        r"rmsnorm: eps is -1.0; expected a finite number in float32's range >= 0: leave it out for 1e-06",
    ),
    "a rounding nobody knows": (
        lambda: call(X, rounding="after"),
        r"rmsnorm: rounding is 'after'; expected one of 'once', 'before_weight'",
    ),
    "eps of PyTorch's default": (lambda: call(X, eps=None), r"rmsnorm: eps is None; expected a finite number"),
}

RECORD = ForwardRecord(
    op="rmsnorm",
    simulate=simulate,
    variants=({}, {"block": 128}, {"block": 16}, {"ftz": True}),
    case=case,
    regimes=SWEPT,
    near=Near(lambda rng: (sweep(rng, (40, 64), "float32"),), off={"y": 4e-6}),
    faults={
        "over one more": Fault(lambda r, t: (sweep(r, (4, 40), t),), {"over": 1}),
        "without its tail": Fault(lambda r, t: (sweep(r, (4, 300), t),), {"tail": False, "block": 128}),
        "adding up in 16 bits": Fault(lambda r, t: (sweep(r, (4, 300), t),), {"low": BF16, "block": 16}),
        "with eps outside the root": Fault(lambda r, t: (sweep(r, (4, 40), t),), {"outside": True}, {"eps": 1e-1}),
        "rounded before the weight": Fault(rows_and_weight, {"rounding": "before_weight"}, dtypes=HALVES),
        "rounded once": Fault(rows_and_weight, {"rounding": "once"}, {"rounding": "before_weight"}, dtypes=HALVES),
    },
    large_case=large_case,
    typical=lambda rng, dtype: ((draw(rng, (64, 64), dtype),), {}),
    hiding={
        "y truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "mean of squares over n + 1": Hiding("typical", {"over": 1}),
    },
    small={
        "plain": Sample({"x": (2, 3), "weight": (3,)}, {"eps": 1e-2}),
        "no weight": Sample({"x": (2, 3)}),
    },
    derived={name: call for name, call in layernorm.RECORD.derived.items() if "bias" not in call.shapes},
    usual=(
        Sample({"x": (64, 1000), "weight": (1000,)}),
        Sample({"x": (64, 1000), "weight": (1000,)}, tiling={"block_rows": 16, "block_n": 128}),
        Sample({"x": (4, 8, 384)}),
    ),
    formula=formula,
    formula_calls={
        f"{'affine ' * affine}eps {eps}": lambda affine=affine, eps=eps: (
            (normal64(2, 3, 7) * 3 + 5, normal64(7) if affine else None),
            {"eps": eps},
        )
        for affine, eps in itertools.product((False, True), (0.0, 1e-6, 0.5))
    },
    formula_tolerance=(1e-13, 0),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample({"x": (2, 3, 33), "weight": (33,)}),
    lowered={
        "affine": Sample({"x": (3, 7, 300), "weight": (300,)}, wider=("weight",)),
        "bare": Sample({"x": (33,)}),
    },
    mapped={
        "shared weight": Mapped(Sample({"x": (2, 3, 4), "weight": (4,)}), {"x": 0}),
        "own weights": Mapped(Sample({"x": (2, 3, 4), "weight": (4, 2)}), {"x": 0, "weight": 1}, folds=False),
    },
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(lambda op, x, p: op(x, p["weight"]), lambda width: {"weight": (width,)}),
    extents={"batch": 2, "n": 128},
    launched=Sample({"x": (64, 512), "weight": (512,)}),
    rows=("x", "weight"),
    past_2_31=long_rows("rmsnorm"),
    far=lambda gpu: [(gpu.far((4, 300)),)],
    twin=Twin(
        "rms_norm",
        sampled="nn.functional.rms_norm",
        refusals={"eps is -0.5; expected a finite number in float32's range >= 0": "a negative eps is refused"},
        least=5,
    ),
)


# ---------------------------------------------------------------------------------------------------------- gradient
def simulate_vjp(x, d_y, weight=None, eps=1e-6, rounding="once", *, block=None, group=64, ftz=False, last=False, over=0,
             drop=False, c2=1.0, low=None, skip_rows=0):  # fmt: skip
    """``last``: r meets mean(h x) after the sum, as where rows are longer than a tile."""
    acc, (n, shape), narrow = accumulator(x), (x.shape[-1], x.shape), narrow_of(x, rounding)
    x, g = (flush(a.reshape(-1, n).astype(acc), ftz) for a in (x, d_y))
    r = acc(1) / np.sqrt(flush(in_blocks(flush(np.square(x), ftz), block or n) / acc(n + over) + acc(eps), ftz))
    xh, h = flush(x * r, ftz), g if weight is None else through(flush(g * flush(weight.astype(acc), ftz), ftz), narrow)
    mean_hx = (in_blocks(flush(h * (x if last else xh), ftz), block or n) / acc(n)) * (r if last else acc(1))
    d_x = r * (h - (acc(0) if drop else xh * (mean_hx * acc(c2))))
    d_weight = through(over_rows(flush(g * through(xh, narrow), ftz), group, skip_rows), low)
    return flush(d_x, ftz).reshape(shape), None if weight is None else flush(d_weight, ftz)


def case_vjp(rng, dtype, regime):
    arrays, options = layernorm.case_vjp(rng, dtype, regime)
    return arrays[:3], options | {"rounding": pick(rng, ROUNDINGS)}


def large_case_vjp(rng, dtype, regime):
    arrays, options = layernorm.large_case_vjp(rng, dtype, regime)
    return arrays[:3], options | {"rounding": pick(rng, ROUNDINGS)}


def arrays(rng, dtype, rows=130, n=40):
    return layernorm.arrays(rng, dtype, rows, n)[:3]


def near(rng):
    return tuple(draw(rng, shape, "float32") for shape in ((32, 64), (32, 64), (64,)))


def far(gpu):
    yield gpu.far((4, 300)), gpu.far((4, 300)), gpu.normal(300, dtype=gpu.torch.bfloat16)


GRADIENT = GradientRecord(
    op="rmsnorm_vjp",
    simulate=simulate_vjp,
    variants=(
        {},
        {"block": 128, "last": True},
        {"block": 16, "group": 8},
        {"group": 1},
        {"ftz": True},
        {"ftz": True, "last": True},
    ),
    case=case_vjp,
    regimes=CHECKED,
    near=Near(near, off={"d_x": 4e-6, "d_weight": 1.5e-5}),
    faults={
        "mean of squares over n + 1": Fault(arrays, {"over": 1}, breaks="d_weight"),
        "r h alone": Fault(arrays, {"drop": True}, breaks="d_x"),
        "mean(h xh) 10 % off": Fault(arrays, {"c2": 1.1}, breaks="d_x"),
        "another eps": Fault(arrays, {"eps": 1e-2}, breaks="d_x"),
        "rounded once": Fault(
            arrays, {"rounding": "once"}, {"rounding": "before_weight"}, breaks="d_weight", dtypes=HALVES
        ),
        "rounded before the weight": Fault(arrays, {"rounding": "before_weight"}, breaks="d_weight", dtypes=HALVES),
        "d_weight without the last rows": Fault(arrays, {"skip_rows": 2}, breaks="d_weight"),
    },
    large_case=large_case_vjp,
    typical=lambda rng, dtype: (arrays(rng, dtype, 100, 70), {}),
    hiding={
        "gradients truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "mean(h xh) 1 % off": Hiding("typical", {"c2": 1.01}, dtypes=("float32",)),
        "d_weight kept in bfloat16": Hiding("typical", {"low": BF16}, dtypes=("float32",)),
    },
    small={"one gradient": Sample({"x": (2, 3), "d_y": (2, 3), "weight": (3,)}, wants=("d_weight",))},
    usual=(
        Sample({"x": (64, 1000), "d_y": (64, 1000), "weight": (1000,)}),
        Sample({"x": (64, 1000), "d_y": (64, 1000), "weight": (1000,)}, tiling={"block_rows": 16, "block_n": 128}),
        Sample({"x": (4, 8, 384), "d_y": (4, 8, 384)}),
    ),
    extents={"batch": 2, "n": 128},
    rows=("x", "x", "weight"),
    past_2_31=long_rows_of_gradients("rmsnorm_vjp"),
    far=far,
)
