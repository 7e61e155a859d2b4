"""residual_out = x + residual, and the codes and scales of rmsnorm(residual_out) in float32."""

from __future__ import annotations

from functools import partial

import portakern as pk
from tests.ops import rmsnorm, rmsnorm_quantize
from tests.ops._added import beside, summed
from tests.ops._codes import E5M2, INT8, TWO, coded, given_back, past_2_31
from tests.ops._shared import BF16, HALVES, SWEPT, draw, normal64, sweep, zeros
from tests.ops.record import Fault, ForwardRecord, Hiding, Layer, Mapped, Near, Sample


def simulate(x, residual, weight=None, eps=1e-6, rounding="once", *, ftz=False, alone=False, wide=False, block=None,
             over=0, low=None, **options):  # fmt: skip
    """``alone``, ``wide``: as in :func:`tests.ops._added.summed`; the others are rmsnorm_quantize's."""
    normed, total = summed(x, residual, ftz=ftz, alone=alone, wide=wide)
    (y,) = rmsnorm.simulate(normed, weight, eps, rounding, ftz=ftz, block=block, over=over, low=low)
    return *coded(y, x, options, ftz=ftz), total


def case(rng, dtype, regime):
    (x, *weights), options = rmsnorm_quantize.case(rng, dtype, regime)
    return (x, beside(x, rng, dtype, regime), *weights), options


def large_case(rng, dtype, regime):
    (x, *weights), options = rmsnorm_quantize.large_case(rng, dtype, regime)
    return (x, draw(rng, x.shape, dtype, regime), *weights), options


def two_and_weight(rng, dtype):
    x, weight = rmsnorm_quantize.rows_and_weight(rng, dtype)
    residual = sweep(rng, x.shape, dtype)
    residual[:, ::16] = 1
    return x, residual, weight


def formula(x, residual, weight=None, eps=1e-6, **options):
    return *rmsnorm_quantize.formula(x + residual, weight, eps, **options), x + residual


def in_torch(x, residual, weight=None, eps=1e-6, **options):
    return *rmsnorm_quantize.in_torch(x + residual, weight, eps, **options), x + residual


def in_jax(x, residual, weight=None, eps=1e-6, **options):
    return *rmsnorm_quantize.in_jax(x + residual, weight, eps, **options), x + residual


def call(*arrays, **options):
    return pk.op("add_rmsnorm_quantize")(*arrays, **options)


def fuzzed(r, dtype):
    arrays, options = rmsnorm_quantize.fuzzed(r, dtype)
    x = arrays.pop("x")
    return {"x": x, "residual": r.array(dtype, *x.shape)} | arrays, options


def in_layer(op, x, p):
    q, scale, total = op(x, x * p["gate"], p["weight"], width=x.shape[-1])
    return given_back(q, scale, x) + total


X, GROUPS = zeros(2, 256), {"width": 32}
WRONG = {
    "another shape": (lambda: call(X, zeros(2, 4)), r"add_rmsnorm_quantize: residual .*expected"),
    "no residual": (lambda: call(X), r"add_rmsnorm_quantize.*residual"),
    "weight": (lambda: call(X, X, zeros(4)), r"weight axis 0 \(n\) is 4; expected 256"),
    "groups of nothing": (lambda: call(X, X, width=0), r"width is 0; expected"),
    "codes of 16 bits": (
        lambda: call(X, X, to="float16"),
        r"to is 'float16'; expected a dtype \(float8_e4m3fn, float8_e5m2, int8\)",
    ),
}


def two(shape, weight=None):
    return {"x": shape, "residual": shape} | ({"weight": (shape[-1],)} if weight else {})


RECORD = ForwardRecord(
    op="add_rmsnorm_quantize",
    simulate=simulate,
    variants=({}, {"block": 128}, {"inverse": True}, {"ftz": True}),
    case=case,
    regimes=SWEPT,
    near=Near(
        lambda rng: (sweep(rng, (40, 64), "float32"), sweep(rng, (40, 64), "float32")),
        {"width": 64},
        off={"scale": 4e-6, "residual_out": 1.2e-7},
    ),
    faults={
        "the sum is not rounded before the norm": Fault(
            two_and_weight, {"wide": True}, GROUPS, breaks="scale", dtypes=HALVES
        ),
        "the residual is forgotten": Fault(two_and_weight, {"alone": True}, GROUPS, breaks="residual_out"),
        "over one more": Fault(two_and_weight, {"over": 1}, GROUPS, breaks="scale"),
        "adding up in 16 bits": Fault(two_and_weight, {"low": BF16, "block": 16}, GROUPS, breaks="scale"),
        "y of 16 bits": Fault(two_and_weight, {"stored": True}, GROUPS, breaks="scale", dtypes=HALVES),
        "a row's scale for each group's": Fault(two_and_weight, {"of_a_row": True}, {"width": 8}, breaks="q"),
        "cut for rounded": Fault(two_and_weight, {"cut": True}, GROUPS, breaks="q"),
        "240 for 448": Fault(two_and_weight, {"most": 240.0}, GROUPS, breaks="scale"),
    },
    large_case=large_case,
    typical=lambda rng, dtype: large_case(rng, dtype, "normal"),
    hiding={"scales six roundings off": Hiding("typical errors are", {"off": 6 * 2.0**-24})},
    small={
        "groups": Sample(two((3, 12), True), {"width": 4, "eps": 1e-2}),
        "tokens": Sample(two((2, 3)), {"width": 3}),
    },
    usual=(
        Sample(two((9, 384), True)),
        Sample(two((40, 200), True), {"width": 200, "to": INT8}),
        Sample(two((4, 8, 300)), {"width": 24, **TWO}),
        Sample(two((16, 1000), True), {"width": 1000, "to": E5M2}, tiling={"block_rows": 32}),
    ),
    formula=formula,
    formula_calls={
        str(options): partial(
            lambda options: ((normal64(2, 3, 12) * 3, normal64(2, 3, 12, seed=1), normal64(12)), options), options
        )
        for options in ({"width": 4}, {"width": 5, "to": INT8, "scale_ub": 1.0}, {"width": 12, **TWO, "eps": 0.5})
    },
    formula_tolerance=(1e-13, 0),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample(two((2, 8, 256), True)),
    lowered={
        "groups": Sample(two((3, 16, 512), True), wider=("weight",)),
        "tokens in int8": Sample(two((40, 640), True), {"width": 640, "to": INT8}),
        "short groups": Sample(two((33, 300)), {"width": 96, **TWO}),
    },
    mapped={
        "both": Mapped(
            Sample({"x": (2, 3, 12), "residual": (3, 2, 12), "weight": (12,)}, {"width": 4}), {"x": 0, "residual": 1}
        ),
        "own weights": Mapped(
            Sample({"x": (2, 3, 12), "residual": (2, 3, 12), "weight": (12, 2)}, {"width": 4}),
            {"x": 0, "residual": 0, "weight": 1},
            folds=False,
        ),
    },
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(in_layer, lambda width: {"weight": (width,), "gate": (width,)}),
    extents={"batch": 2, "n": 256, "width": 128},
    launched=Sample(two((64, 512), True)),
    past_2_31=past_2_31("add_rmsnorm_quantize", 2),
    far=lambda gpu: [(gpu.far((4, 300)), gpu.far((4, 300)))],
)
