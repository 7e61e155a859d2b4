"""d_x = d_residual_out + d_x of rmsnorm at residual_out; d_weight of rmsnorm there."""

from __future__ import annotations

from tests.ops import rmsnorm_vjp
from tests.ops._added import second_cotangent, with_past
from tests.ops._shared import BF16, CHECKED, HALVES, draw
from tests.ops.record import Fault, GradientRecord, Hiding, Near, Sample


def simulate(residual_out, d_y, weight=None, d_residual_out=None, eps=1e-6, rounding="once", *, early=False,
             alone=False, ftz=False, **how):  # fmt: skip
    """``early``: the norm's d_x is rounded before the sum; ``alone``: the other cotangent is forgotten; the others are
    rmsnorm_vjp's.
    """
    d_x, d_weight = rmsnorm_vjp.simulate(residual_out, d_y, weight, eps, rounding, ftz=ftz, **how)
    d_x = d_x.astype(residual_out.dtype).astype(d_x.dtype) if early else d_x
    return with_past(d_x, None if alone else d_residual_out, ftz), d_weight


def case(rng, dtype, regime):
    arrays, options = rmsnorm_vjp.case(rng, dtype, regime)
    return (*arrays, second_cotangent(rng, dtype, arrays[1])), options


def large_case(rng, dtype, regime):
    arrays, options = rmsnorm_vjp.large_case(rng, dtype, regime)
    return (*arrays, second_cotangent(rng, dtype, arrays[1])), options


def arrays(rng, dtype, rows=130, n=40):
    return *rmsnorm_vjp.arrays(rng, dtype, rows, n), draw(rng, (rows, n), dtype)


def near(rng):
    return *rmsnorm_vjp.near(rng), None


def past_2_31(gpu):
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


RECORD = GradientRecord(
    op="add_rmsnorm_vjp",
    simulate=simulate,
    variants=({}, {"block": 128, "last": True}, {"block": 16, "group": 8}, {"ftz": True}, {"ftz": True, "last": True}),
    case=case,
    regimes=CHECKED,
    near=Near(near, off={"d_x": 4e-6, "d_weight": 1.5e-5}),
    faults={
        "the other cotangent is forgotten": Fault(arrays, {"alone": True}, breaks="d_x"),
        "rounded before the sum": Fault(arrays, {"early": True}, breaks="d_x", dtypes=HALVES),
        "mean of squares over n + 1": Fault(arrays, {"over": 1}, breaks="d_weight"),
        "r h alone": Fault(arrays, {"drop": True}, breaks="d_x"),
        "d_weight without the last rows": Fault(arrays, {"skip_rows": 2}, breaks="d_weight"),
    },
    large_case=large_case,
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
    past_2_31=past_2_31,
    far=far,
)
