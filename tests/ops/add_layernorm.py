"""residual_out = x + residual, y = layernorm(residual_out).

d_x = d_residual_out + d_x of layernorm at residual_out; its d_weight and d_bias there.
"""

from __future__ import annotations

import numpy as np

import portakern as pk
from tests.ops import layernorm
from tests.ops._added import beside, in_layer, past_2_31, second_cotangent, summed, with_past
from tests.ops._shared import BF16, CHECKED, HALVES, SWEPT, draw, normal64, sweep, zeros
from tests.ops.record import Fault, ForwardRecord, GradientRecord, Hiding, Layer, Mapped, Near, Sample


def simulate(x, residual, weight=None, bias=None, eps=1e-5, *, wide=False, alone=False, ftz=False, **how):
    """``wide``: the sum is normed before it is rounded; ``alone``: x is; the others are layernorm's."""
    normed, stored = summed(x, residual, ftz=ftz, wide=wide, alone=alone)
    return *layernorm.simulate(normed, weight, bias, eps, ftz=ftz, **how), stored


def any_case(arrays, rng, dtype, regime):
    x, *weights = arrays
    return x, beside(x, rng, dtype, regime), *weights


def case(rng, dtype, regime):
    arrays, options = layernorm.case(rng, dtype, regime)
    return any_case(arrays, rng, dtype, regime), options


def large_case(rng, dtype, regime):
    (x, *weights), options = layernorm.large_case(rng, dtype, regime)
    return (x, draw(rng, x.shape, dtype, regime), *weights), options


def two(*shape):
    return lambda rng, dtype="float32": (sweep(rng, shape, dtype), sweep(rng, shape, dtype))


def formula(x, residual, weight=None, bias=None, eps=1e-5):
    total = np.reshape([a + b for a, b in zip(x.ravel(), residual.ravel(), strict=True)], x.shape)
    return *layernorm.formula(total, weight, bias, eps), total


def in_torch(x, residual, weight=None, bias=None, eps=1e-5):
    total = x + residual
    return layernorm.in_torch(total, weight, bias, eps), total


def in_jax(x, residual, weight=None, bias=None, eps=1e-5):
    total = x + residual
    return layernorm.in_jax(total, weight, bias, eps), total


def call(*arrays, **options):
    return pk.op("add_layernorm")(*arrays, **options)


def fuzzed(r, dtype):
    arrays, options = layernorm.fuzzed(r, dtype)
    x = arrays.pop("x")
    return {"x": x, "residual": r.array(dtype, *x.shape)} | arrays, options


X = zeros(2, 3)
WRONG = {
    "another shape": (lambda: call(X, zeros(2, 4)), r"add_layernorm: residual .*expected"),
    "a residual to broadcast": (lambda: call(X, zeros(3)), r"add_layernorm: residual .*expected"),
    "another dtype": (lambda: call(X, X.astype(np.float16)), r"residual is float16 but x is float32"),
    "no residual": (lambda: call(X), r"add_layernorm.*residual"),
    "weight": (lambda: call(X, X, zeros(4)), r"weight axis 0 \(n\) is 4; expected 3"),
    "eps below zero": (lambda: call(X, X, eps=-1.0), r"add_layernorm: eps is -1.0; expected a finite number"),
}

RECORD = ForwardRecord(
    op="add_layernorm",
    simulate=simulate,
    variants=({}, {"block": 128}, {"block": 16}, {"ftz": True}),
    case=case,
    regimes=SWEPT,
    near=Near(two(40, 64), off={"y": 6e-6, "residual_out": 1.2e-7}),
    faults={
        "the sum is not rounded before the norm": Fault(two(4, 40), {"wide": True}, breaks="y", dtypes=HALVES),
        "the residual is forgotten": Fault(two(4, 40), {"alone": True}, breaks="residual_out"),
        "over n - 1": Fault(two(4, 40), {"ddof": 1}, breaks="y"),
        "from raw moments": Fault(
            lambda r, t: (sweep(r, (8, 256), t) + np.float32(3000), sweep(r, (8, 256), t)),
            {"moments": True},
            breaks="y",
            dtypes=("float32",),
        ),
    },
    large_case=large_case,
    typical=lambda rng, dtype: ((draw(rng, (64, 64), dtype), draw(rng, (64, 64), dtype)), {}),
    hiding={
        "results truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "variance over n - 1": Hiding("typical", {"ddof": 1}),
    },
    small={
        "plain": Sample({"x": (2, 3), "residual": (2, 3), "weight": (3,), "bias": (3,)}, {"eps": 1e-2}),
        "no weight": Sample({"x": (2, 3), "residual": (2, 3), "bias": (3,)}),
    },
    derived={
        name: Sample({"x": sample.shapes["x"], "residual": sample.shapes["x"]} | sample.shapes, sample.options)
        for name, sample in layernorm.RECORD.derived.items()
    },
    usual=(
        Sample({"x": (64, 1000), "residual": (64, 1000), "weight": (1000,), "bias": (1000,)}),
        Sample({"x": (64, 1000), "residual": (64, 1000), "weight": (1000,)}, tiling={"block_rows": 16, "block_n": 128}),
        Sample({"x": (4, 8, 384), "residual": (4, 8, 384)}),
    ),
    formula=formula,
    formula_calls={
        f"eps {eps}": lambda eps=eps: (
            (normal64(2, 3, 7) * 3, normal64(2, 3, 7, seed=1), normal64(7), normal64(7, seed=1)),
            {"eps": eps},
        )
        for eps in (0.0, 1e-5, 0.5)
    },
    formula_tolerance=(1e-12, 0),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample({"x": (2, 3, 33), "residual": (2, 3, 33), "weight": (33,), "bias": (33,)}),
    lowered={
        "affine": Sample(
            {"x": (3, 7, 300), "residual": (3, 7, 300), "weight": (300,), "bias": (300,)}, wider=("weight", "bias")
        ),
        "bare": Sample({"x": (33,), "residual": (33,)}),
    },
    mapped={
        "both": Mapped(Sample({"x": (2, 3, 4), "residual": (3, 2, 4), "weight": (4,)}), {"x": 0, "residual": 1}),
        "own weights": Mapped(
            Sample({"x": (2, 3, 4), "residual": (2, 3, 4), "weight": (4, 2)}),
            {"x": 0, "residual": 0, "weight": 1},
            folds=False,
        ),
    },
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(
        lambda op, x, p: in_layer(*op(x, x * p["gate"], p["weight"], p["bias"])),
        lambda width: {"weight": (width,), "bias": (width,), "gate": (width,)},
    ),
    extents={"batch": 2, "n": 128},
    launched=Sample({"x": (64, 512), "residual": (64, 512), "weight": (512,), "bias": (512,)}),
    rows=("x", "x", "weight", "bias"),
    past_2_31=past_2_31("add_layernorm"),
    far=lambda gpu: [(gpu.far((4, 300)), gpu.far((4, 300)))],
)


# ---------------------------------------------------------------------------------------------------------- gradient
def simulate_vjp(residual_out, d_y, weight=None, bias=None, d_residual_out=None, eps=1e-5, *, early=False,
             alone=False, ftz=False, **how):  # fmt: skip
    """``early``: the norm's d_x is rounded before the sum; ``alone``: the other cotangent is forgotten; the others are
    layernorm_vjp's.
    """
    d_x, *sums = layernorm.simulate_vjp(residual_out, d_y, weight, bias, eps, ftz=ftz, **how)
    d_x = d_x.astype(residual_out.dtype).astype(d_x.dtype) if early else d_x
    return with_past(d_x, None if alone else d_residual_out, ftz), *sums


def case_vjp(rng, dtype, regime):
    arrays, options = layernorm.case_vjp(rng, dtype, regime)
    return (*arrays, second_cotangent(rng, dtype, arrays[1])), options


def large_case_vjp(rng, dtype, regime):
    arrays, options = layernorm.large_case_vjp(rng, dtype, regime)
    return (*arrays, second_cotangent(rng, dtype, arrays[1])), options


def arrays(rng, dtype, rows=130, n=40):
    return *layernorm.arrays(rng, dtype, rows, n), draw(rng, (rows, n), dtype)


def near(rng):
    return *layernorm.near(rng), None


def past_2_31_vjp(gpu):
    rows, n = gpu.big // 256 + 16, 256
    picked = gpu.rows_to_sample(rows, n)
    total = gpu.torch.randn(rows, n, dtype=gpu.torch.bfloat16, device=gpu.device)
    d_y, past = (gpu.sampled(total, picked) for _ in range(2))
    weight, bias = (gpu.normal(n, dtype=gpu.torch.bfloat16) for _ in range(2))
    d_x, d_weight, d_bias = gpu.op("add_layernorm_vjp")(total, d_y, weight, bias, past)
    assert d_x.numel() > gpu.big
    yield (d_x[picked], d_weight, d_bias), (total[picked], d_y[picked], weight, bias, past[picked]), {}


def far(gpu):
    weight, bias = (gpu.normal(300, dtype=gpu.torch.bfloat16) for _ in range(2))
    yield gpu.far((4, 300)), gpu.far((4, 300)), weight, bias, gpu.far((4, 300))


GRADIENT = GradientRecord(
    op="add_layernorm_vjp",
    simulate=simulate_vjp,
    variants=({}, {"block": 128}, {"block": 16, "group": 8}, {"group": 1}, {"ftz": True}),
    case=case_vjp,
    regimes=CHECKED,
    least_float64=0.01,
    near=Near(near, off={"d_x": 1e-5, "d_weight": 2e-5, "d_bias": 8e-6}),
    faults={
        "the other cotangent is forgotten": Fault(arrays, {"alone": True}, breaks="d_x"),
        "rounded before the sum": Fault(arrays, {"early": True}, breaks="d_x", dtypes=HALVES),
        "variance over n - 1": Fault(arrays, {"ddof": 1}, breaks="d_weight"),
        "without mean h": Fault(arrays, {"drop": "c1"}, breaks="d_x"),
        "column sums without the last group": Fault(arrays, {"skip_rows": 2}, breaks="d_bias"),
    },
    large_case=large_case_vjp,
    typical=lambda rng, dtype: (arrays(rng, dtype, 100, 70), {}),
    hiding={
        "gradients truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "column sums kept in bfloat16": Hiding("typical", {"low": BF16}, dtypes=("float32",)),
    },
    small={
        "one gradient": Sample(
            {"residual_out": (2, 3), "d_y": (2, 3), "weight": (3,), "bias": (3,)}, wants=("d_weight",)
        ),
        "both cotangents": Sample(
            {"residual_out": (2, 3), "d_y": (2, 3), "weight": (3,), "bias": (3,), "d_residual_out": (2, 3)}
        ),
    },
    usual=(
        Sample(
            {
                "residual_out": (64, 1000),
                "d_y": (64, 1000),
                "weight": (1000,),
                "bias": (1000,),
                "d_residual_out": (64, 1000),
            }
        ),
        Sample(
            {
                "residual_out": (64, 1000),
                "d_y": (64, 1000),
                "weight": (1000,),
                "bias": (1000,),
                "d_residual_out": (64, 1000),
            },
            tiling={"block_rows": 16, "block_n": 128},
        ),
        Sample({"residual_out": (4, 8, 384), "d_y": (4, 8, 384)}),
    ),
    extents={"batch": 2, "n": 128},
    rows=("x", "x", "weight", "bias", "x"),
    past_2_31=past_2_31_vjp,
    far=far,
)
