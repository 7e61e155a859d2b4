"""y = x / sqrt(mean x^2 + eps) weight in float32, scale = max |y| / L of a group, q = y / scale rounded to a code."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np

import portakern as pk
from tests.ops import rmsnorm
from tests.ops._codes import (
    E5M2,
    INT8,
    TWO,
    any_codes,
    any_width,
    by_formula,
    coded,
    given_back,
    of_jax,
    of_torch,
    past_2_31,
)
from tests.ops._shared import BF16, HALVES, SWEPT, draw, normal64, sweep, zeros
from tests.ops.record import Fault, ForwardRecord, Hiding, Layer, Mapped, Near, Sample


def simulate(x, weight=None, eps=1e-6, rounding="once", *, ftz=False, block=None, over=0, outside=False, tail=True,
             low=None, **options):  # fmt: skip
    """rmsnorm's kernel, whose result stays in the accumulator's type, and quantize's. Keywords are those of both, and
    of :func:`tests.ops._codes.coded`."""
    how = {"block": block, "over": over, "outside": outside, "tail": tail, "low": low}
    (y,) = rmsnorm.simulate(x, weight, eps, rounding, ftz=ftz, **how)
    return coded(y, x, options, ftz=ftz)


def case(rng, dtype, regime):
    arrays, options = rmsnorm.case(rng, dtype, regime)
    return arrays, options | any_codes(rng, arrays[0].shape[-1])


def large_case(rng, dtype, regime):
    """Rows of different size have one r each; groups of different size their own scales."""
    x = draw(rng, (64, 128), dtype, regime)
    return (x, draw(rng, (128,), dtype)), {"width": 8}


def rows_and_weight(rng, dtype):
    """No row and no group is next to 0."""
    x, weight = sweep(rng, (6, 96), dtype), sweep(rng, (96,), dtype)
    x[:, ::16], weight[::16] = 2, 2
    return x, weight


def some_zeros(rng, dtype):
    x, weight = rows_and_weight(rng, dtype)
    weight[32:64] = 0
    return x, weight


def formula(x, weight=None, eps=1e-6, **options):
    return by_formula(*rmsnorm.formula(x, weight, eps), **options)


def wide(x):
    """Of torch or JAX: what has 16 bits in float32, so that the norm does not round its result."""
    import torch

    if not isinstance(x, torch.Tensor):
        return x.astype("float32") if x.dtype.itemsize < 4 else x
    return x.float() if x.dtype.itemsize < 4 else x


def in_torch(x, weight=None, eps=1e-6, **options):
    return of_torch(rmsnorm.in_torch(wide(x), None if weight is None else wide(weight), eps), **options)


def in_jax(x, weight=None, eps=1e-6, **options):
    return of_jax(rmsnorm.in_jax(wide(x), None if weight is None else wide(weight), eps), **options)


def call(*arrays, **options):
    return pk.op("rmsnorm_quantize")(*arrays, **options)


def fuzzed(r, dtype):
    arrays, options = rmsnorm.fuzzed(r, dtype)
    return arrays, options | any_width(r, arrays["x"].shape[-1])


X = zeros(2, 256)
WRONG = {
    "no axes": (lambda: call(zeros()), r"rmsnorm_quantize: x has 0 axes, shape \(\); expected at least 1"),
    "weight": (lambda: call(X, zeros(4)), r"weight axis 0 \(n\) is 4; expected 256, as set by x axis -1"),
    "a weight too narrow": (
        lambda: call(X.astype(np.float16), zeros(256, dtype=ml_dtypes.bfloat16)),
        r"weight is bfloat16 but x is float16; expected float16 or float32: cast one",
    ),
    "groups of nothing": (lambda: call(X, width=0), r"width is 0; expected"),
    "codes of 16 bits": (
        lambda: call(X, to="float16"),
        r"to is 'float16'; expected a dtype \(float8_e4m3fn, float8_e5m2, int8\)",
    ),
    "a limit of 0": (lambda: call(X, scale_ub=0.0), r"scale_ub is 0.0; expected a finite number"),
    "eps below zero": (lambda: call(X, eps=-1.0), r"rmsnorm_quantize: eps is -1.0; expected a finite number"),
}

GROUPS = {"width": 32}
RECORD = ForwardRecord(
    op="rmsnorm_quantize",
    simulate=simulate,
    variants=({}, {"block": 128}, {"inverse": True}, {"ftz": True}),
    case=case,
    regimes=SWEPT,
    near=Near(lambda rng: (sweep(rng, (40, 64), "float32"),), {"width": 64}, off={"scale": 4e-6}),
    faults={
        "over one more": Fault(rows_and_weight, {"over": 1}, GROUPS, breaks="scale"),
        "adding up in 16 bits": Fault(rows_and_weight, {"low": BF16, "block": 16}, GROUPS, breaks="scale"),
        "with eps outside the root": Fault(rows_and_weight, {"outside": True}, {**GROUPS, "eps": 1e-1}, breaks="scale"),
        "y of 16 bits": Fault(rows_and_weight, {"stored": True}, GROUPS, breaks="scale", dtypes=HALVES),
        "rounded before the weight": Fault(
            rows_and_weight, {"rounding": "before_weight"}, GROUPS, breaks="scale", dtypes=HALVES
        ),
        "the inverse of the scale": Fault(rows_and_weight, {"inverted": True}, GROUPS, breaks="scale"),
        "a row's scale for each group's": Fault(rows_and_weight, {"of_a_row": True}, {"width": 8}, breaks="q"),
        "no clip": Fault(rows_and_weight, {"clips": False}, {**GROUPS, "scale_ub": 0.1}, breaks="q"),
        "cut for rounded": Fault(rows_and_weight, {"cut": True}, GROUPS, breaks="q"),
        "a scale of 0 for zeros": Fault(some_zeros, {"zeros": 0.0}, GROUPS, breaks="scale"),
        "240 for 448": Fault(rows_and_weight, {"most": 240.0}, GROUPS, breaks="scale"),
        "powers of two below": Fault(rows_and_weight, {"floors": True}, {**GROUPS, **TWO}, breaks="scale"),
    },
    large_case=large_case,
    typical=lambda rng, dtype: large_case(rng, dtype, "normal"),
    hiding={"scales six roundings off": Hiding("typical errors are", {"off": 6 * 2.0**-24})},
    small={
        "groups": Sample({"x": (3, 12), "weight": (12,)}, {"width": 4, "eps": 1e-2}),
        "tokens": Sample({"x": (2, 3)}, {"width": 3}),
    },
    usual=(
        Sample({"x": (9, 384), "weight": (384,)}),
        Sample({"x": (40, 200), "weight": (200,)}, {"width": 200, "to": INT8}),
        Sample({"x": (4, 8, 300)}, {"width": 24, **TWO}),
        Sample({"x": (16, 1000), "weight": (1000,)}, {"width": 1000, "to": E5M2}, tiling={"block_rows": 32}),
    ),
    formula=formula,
    formula_calls={
        str(options): partial(lambda options: ((normal64(2, 3, 12) * 3, normal64(12)), options), options)
        for options in (
            {"width": 4}, {"width": 5, "to": INT8, "scale_ub": 1.0}, {"width": 12, **TWO, "eps": 0.5},
            {"width": 4, "scale_floor": 0.5}, {"width": 20, "to": E5M2},
        )
    },
    formula_tolerance=(1e-13, 0),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample({"x": (2, 8, 256), "weight": (256,)}),
    lowered={
        "groups": Sample({"x": (3, 16, 512), "weight": (512,)}, wider=("weight",)),
        "tokens in int8": Sample({"x": (40, 640), "weight": (640,)}, {"width": 640, "to": INT8}),
        "short groups": Sample({"x": (33, 300)}, {"width": 96, **TWO}),
    },
    mapped={
        "shared weight": Mapped(Sample({"x": (2, 3, 12), "weight": (12,)}, {"width": 4}), {"x": 0}),
        "own weights": Mapped(
            Sample({"x": (2, 3, 12), "weight": (12, 2)}, {"width": 4}), {"x": 0, "weight": 1}, folds=False
        ),
    },
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(
        lambda op, x, p: given_back(*op(x, p["weight"], width=x.shape[-1]), x), lambda width: {"weight": (width,)}
    ),
    extents={"batch": 2, "n": 256, "width": 128},
    launched=Sample({"x": (64, 512), "weight": (512,)}),
    past_2_31=past_2_31("rmsnorm_quantize", 1),
    far=lambda gpu: [(gpu.far((4, 300)),)],
)  # fmt: skip
