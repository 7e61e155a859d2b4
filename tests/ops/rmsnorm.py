"""y = x / sqrt(mean x^2 + eps) weight."""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np

import portakern as pk
from tests.ops import layernorm
from tests.ops._shared import (
    BF16,
    HALVES,
    SWEPT,
    accumulator,
    draw,
    flush,
    long_rows,
    normal64,
    pick,
    sweep,
    through,
    zeros,
)
from tests.ops.record import Fault, ForwardRecord, Hiding, Layer, Mapped, Near, Sample, Twin


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
        lambda x, weight: (x, tuple(x.shape[-1:]), weight),
        sampled="nn.functional.rms_norm",
        refusals={"eps is -0.5; expected a finite number in float32's range >= 0": "a negative eps is refused"},
        least=5,
    ),
)
