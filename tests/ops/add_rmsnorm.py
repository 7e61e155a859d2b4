"""residual_out = x + residual, y = rmsnorm(residual_out).

d_x = d_residual_out + d_x of rmsnorm at residual_out; d_weight of rmsnorm there.
"""

from __future__ import annotations

import numpy as np

import portakern as pk
from tests.ops import rmsnorm
from tests.ops._added import beside, in_layer, past_2_31, second_cotangent, summed, with_past
from tests.ops._shared import BF16, CHECKED, HALVES, SWEPT, draw, normal64, sweep, zeros
from tests.ops.record import Fault, ForwardRecord, GradientRecord, Hiding, Layer, Mapped, Near, Sample


def simulate(x, residual, weight=None, eps=1e-6, rounding="once", *, wide=False, alone=False, ftz=False, **how):
    """``wide``: the sum is normed before it is rounded; ``alone``: x is; the others are rmsnorm's."""
    normed, stored = summed(x, residual, ftz=ftz, wide=wide, alone=alone)
    return *rmsnorm.simulate(normed, weight, eps, rounding, ftz=ftz, **how), stored


def any_case(arrays, rng, dtype, regime):
    x, *weights = arrays
    return x, beside(x, rng, dtype, regime), *weights


def case(rng, dtype, regime):
    arrays, options = rmsnorm.case(rng, dtype, regime)
    return any_case(arrays, rng, dtype, regime), options


def large_case(rng, dtype, regime):
    (x, *weights), options = rmsnorm.large_case(rng, dtype, regime)
    return (x, draw(rng, x.shape, dtype, regime), *weights), options


def two(*shape):
    return lambda rng, dtype="float32": (sweep(rng, shape, dtype), sweep(rng, shape, dtype))


def two_and_weight(rng, dtype):
    return *two(4, 40)(rng, dtype), sweep(rng, (40,), dtype)


def formula(x, residual, weight=None, eps=1e-6):
    total = np.reshape([a + b for a, b in zip(x.ravel(), residual.ravel(), strict=True)], x.shape)
    return *rmsnorm.formula(total, weight, eps), total


def in_torch(x, residual, weight=None, eps=1e-6):
    total = x + residual
    return rmsnorm.in_torch(total, weight, eps), total


def in_jax(x, residual, weight=None, eps=1e-6):
    total = x + residual
    return rmsnorm.in_jax(total, weight, eps), total


def call(*arrays, **options):
    return pk.op("add_rmsnorm")(*arrays, **options)


def fuzzed(r, dtype):
    arrays, options = rmsnorm.fuzzed(r, dtype)
    x = arrays.pop("x")
    return {"x": x, "residual": r.array(dtype, *x.shape)} | arrays, options


X = zeros(2, 3)
WRONG = {
    "another shape": (lambda: call(X, zeros(2, 4)), r"add_rmsnorm: residual .*expected"),
    "a residual to broadcast": (lambda: call(X, zeros(3)), r"add_rmsnorm: residual .*expected"),
    "another dtype": (lambda: call(X, X.astype(np.float16)), r"residual is float16 but x is float32"),
    "no residual": (lambda: call(X), r"add_rmsnorm.*residual"),
    "weight": (lambda: call(X, X, zeros(4)), r"weight axis 0 \(n\) is 4; expected 3"),
    "eps below zero": (lambda: call(X, X, eps=-1.0), r"add_rmsnorm: eps is -1.0; expected a finite number"),
}

RECORD = ForwardRecord(
    op="add_rmsnorm",
    simulate=simulate,
    variants=({}, {"block": 128}, {"block": 16}, {"ftz": True}),
    case=case,
    regimes=SWEPT,
    near=Near(two(40, 64), off={"y": 4e-6, "residual_out": 1.2e-7}),
    faults={
        "the sum is not rounded before the norm": Fault(two(4, 40), {"wide": True}, breaks="y", dtypes=HALVES),
        "the residual is forgotten": Fault(two(4, 40), {"alone": True}, breaks="residual_out"),
        "over one more": Fault(two(4, 40), {"over": 1}, breaks="y"),
        "adding up in 16 bits": Fault(two(4, 300), {"low": BF16, "block": 16}, breaks="y"),
        "rounded before the weight": Fault(two_and_weight, {"rounding": "before_weight"}, breaks="y", dtypes=HALVES),
    },
    large_case=large_case,
    typical=lambda rng, dtype: ((draw(rng, (64, 64), dtype), draw(rng, (64, 64), dtype)), {}),
    hiding={
        "results truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "mean of squares over n + 1": Hiding("typical", {"over": 1}),
    },
    small={
        "plain": Sample({"x": (2, 3), "residual": (2, 3), "weight": (3,)}, {"eps": 1e-2}),
        "no weight": Sample({"x": (2, 3), "residual": (2, 3)}),
    },
    derived={
        name: Sample({"x": sample.shapes["x"], "residual": sample.shapes["x"]} | sample.shapes, sample.options)
        for name, sample in rmsnorm.RECORD.derived.items()
    },
    usual=(
        Sample({"x": (64, 1000), "residual": (64, 1000), "weight": (1000,)}),
        Sample({"x": (64, 1000), "residual": (64, 1000), "weight": (1000,)}, tiling={"block_rows": 16, "block_n": 128}),
        Sample({"x": (4, 8, 384), "residual": (4, 8, 384)}),
    ),
    formula=formula,
    formula_calls={
        f"eps {eps}": lambda eps=eps: ((normal64(2, 3, 7) * 3, normal64(2, 3, 7, seed=1), normal64(7)), {"eps": eps})
        for eps in (0.0, 1e-6, 0.5)
    },
    formula_tolerance=(1e-13, 0),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample({"x": (2, 3, 33), "residual": (2, 3, 33), "weight": (33,)}),
    lowered={
        "affine": Sample({"x": (3, 7, 300), "residual": (3, 7, 300), "weight": (300,)}, wider=("weight",)),
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
        lambda op, x, p: in_layer(*op(x, x * p["gate"], p["weight"])),
        lambda width: {"weight": (width,), "gate": (width,)},
    ),
    extents={"batch": 2, "n": 128},
    launched=Sample({"x": (64, 512), "residual": (64, 512), "weight": (512,)}),
    rows=("x", "x", "weight"),
    past_2_31=past_2_31("add_rmsnorm"),
    far=lambda gpu: [(gpu.far((4, 300)), gpu.far((4, 300)))],
)


# ---------------------------------------------------------------------------------------------------------- gradient
def simulate_vjp(residual_out, d_y, weight=None, d_residual_out=None, eps=1e-6, rounding="once", *, early=False,
             alone=False, ftz=False, **how):  # fmt: skip
    """``early``: the norm's d_x is rounded before the sum; ``alone``: the other cotangent is forgotten; the others are
    rmsnorm_vjp's.
    """
    d_x, d_weight = rmsnorm.simulate_vjp(residual_out, d_y, weight, eps, rounding, ftz=ftz, **how)
    d_x = d_x.astype(residual_out.dtype).astype(d_x.dtype) if early else d_x
    return with_past(d_x, None if alone else d_residual_out, ftz), d_weight


def case_vjp(rng, dtype, regime):
    arrays, options = rmsnorm.case_vjp(rng, dtype, regime)
    return (*arrays, second_cotangent(rng, dtype, arrays[1])), options


def large_case_vjp(rng, dtype, regime):
    arrays, options = rmsnorm.large_case_vjp(rng, dtype, regime)
    return (*arrays, second_cotangent(rng, dtype, arrays[1])), options


def arrays(rng, dtype, rows=130, n=40):
    return *rmsnorm.arrays(rng, dtype, rows, n), draw(rng, (rows, n), dtype)


def near(rng):
    return *rmsnorm.near(rng), None


def past_2_31_vjp(gpu):
    rows, n = gpu.big // 256 + 16, 256
    picked = gpu.rows_to_sample(rows, n)
    total = gpu.torch.randn(rows, n, dtype=gpu.torch.bfloat16, device=gpu.device)
    d_y, past = (gpu.sampled(total, picked) for _ in range(2))
    weight = gpu.normal(n, dtype=gpu.torch.bfloat16)
    d_x, d_weight = gpu.op("add_rmsnorm_vjp")(total, d_y, weight, past)
    assert d_x.numel() > gpu.big
    yield (d_x[picked], d_weight), (total[picked], d_y[picked], weight, past[picked]), {}


def far(gpu):
    yield *(gpu.far((4, 300)) for _ in range(2)), gpu.normal(300, dtype=gpu.torch.bfloat16), gpu.far((4, 300))


GRADIENT = GradientRecord(
    op="add_rmsnorm_vjp",
    simulate=simulate_vjp,
    variants=({}, {"block": 128, "last": True}, {"block": 16, "group": 8}, {"ftz": True}, {"ftz": True, "last": True}),
    case=case_vjp,
    regimes=CHECKED,
    near=Near(near, off={"d_x": 4e-6, "d_weight": 1.5e-5}),
    faults={
        "the other cotangent is forgotten": Fault(arrays, {"alone": True}, breaks="d_x"),
        "rounded before the sum": Fault(arrays, {"early": True}, breaks="d_x", dtypes=HALVES),
        "mean of squares over n + 1": Fault(arrays, {"over": 1}, breaks="d_weight"),
        "r h alone": Fault(arrays, {"drop": True}, breaks="d_x"),
        "d_weight without the last rows": Fault(arrays, {"skip_rows": 2}, breaks="d_weight"),
    },
    large_case=large_case_vjp,
    typical=lambda rng, dtype: (arrays(rng, dtype, 100, 70), {}),
    hiding={
        "gradients truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "d_weight kept in bfloat16": Hiding("typical", {"low": BF16}, dtypes=("float32",)),
    },
    small={
        "one gradient": Sample({"residual_out": (2, 3), "d_y": (2, 3), "weight": (3,)}, wants=("d_weight",)),
        "both cotangents": Sample({"residual_out": (2, 3), "d_y": (2, 3), "weight": (3,), "d_residual_out": (2, 3)}),
    },
    usual=(
        Sample({"residual_out": (64, 1000), "d_y": (64, 1000), "weight": (1000,), "d_residual_out": (64, 1000)}),
        Sample(
            {"residual_out": (64, 1000), "d_y": (64, 1000), "weight": (1000,), "d_residual_out": (64, 1000)},
            tiling={"block_rows": 16, "block_n": 128},
        ),
        Sample({"residual_out": (4, 8, 384), "d_y": (4, 8, 384)}),
    ),
    extents={"batch": 2, "n": 128},
    rows=("x", "x", "weight", "x"),
    past_2_31=past_2_31_vjp,
    far=far,
)
