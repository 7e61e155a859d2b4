"""d_x = d_residual_out + d_x of layernorm at residual_out; its d_weight and d_bias there."""

from __future__ import annotations

from tests.ops import layernorm_vjp
from tests.ops._added import second_cotangent, with_past
from tests.ops._shared import BF16, CHECKED, HALVES, draw
from tests.ops.record import Fault, GradientRecord, Hiding, Near, Sample


def simulate(residual_out, d_y, weight=None, bias=None, d_residual_out=None, eps=1e-5, *, early=False,
             alone=False, ftz=False, **how):  # fmt: skip
    """``early``: the norm's d_x is rounded before the sum; ``alone``: the other cotangent is forgotten; the others are
    layernorm_vjp's.
    """
    d_x, *sums = layernorm_vjp.simulate(residual_out, d_y, weight, bias, eps, ftz=ftz, **how)
    d_x = d_x.astype(residual_out.dtype).astype(d_x.dtype) if early else d_x
    return with_past(d_x, None if alone else d_residual_out, ftz), *sums


def case(rng, dtype, regime):
    arrays, options = layernorm_vjp.case(rng, dtype, regime)
    return (*arrays, second_cotangent(rng, dtype, arrays[1])), options


def large_case(rng, dtype, regime):
    arrays, options = layernorm_vjp.large_case(rng, dtype, regime)
    return (*arrays, second_cotangent(rng, dtype, arrays[1])), options


def arrays(rng, dtype, rows=130, n=40):
    return *layernorm_vjp.arrays(rng, dtype, rows, n), draw(rng, (rows, n), dtype)


def near(rng):
    return *layernorm_vjp.near(rng), None


def past_2_31(gpu):
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


RECORD = GradientRecord(
    op="add_layernorm_vjp",
    simulate=simulate,
    variants=({}, {"block": 128}, {"block": 16, "group": 8}, {"group": 1}, {"ftz": True}),
    case=case,
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
    large_case=large_case,
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
    past_2_31=past_2_31,
    far=far,
)
