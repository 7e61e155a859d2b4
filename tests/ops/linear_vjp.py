"""d_x = d_z weight, d_weight = d_z^T x, d_bias = the sum of d_z over rows, with d_z = d_y f'(pre)."""

from __future__ import annotations

import numpy as np

from tests.ops import geglu_vjp, matmul, swiglu_vjp
from tests.ops._shared import BF16, CHECKED, HALVES, accumulator, draw, flush, in_blocks, outputs_of, pick, through
from tests.ops.linear import ACTIVATIONS, FORMS
from tests.ops.record import Fault, GradientRecord, Hiding, Near, Sample


def cotangent(d_y, pre, activation, *, ftz=False, low=None, identity=False, open_at_0=False):
    """d_y f'(pre). ``low``: the slope kept in a narrower dtype; ``identity``: no slope; ``open_at_0``: relu's there."""
    acc = accumulator(d_y)
    d = flush(d_y.astype(acc), ftz)
    if activation == "none" or identity:
        return d
    z = flush(pre.astype(acc), ftz)
    if activation == "relu":
        return np.where(z < 0 if open_at_0 else z <= 0, acc(0), d)
    one = np.ones_like(d)
    if activation == "silu":
        return d * through(swiglu_vjp.simulate(z, one, one, ftz=ftz)[0], low)
    return d * through(geglu_vjp.simulate(z, one, one, FORMS[activation], ftz=ftz)[0], low)


def simulate(x, weight, d_y, pre=None, bias=None, activation="none", precision="ieee", *, block=32, ftz=False,
             stored=True, tail=True, low=None, of_sum=None, cut=False, identity=False, open_at_0=False,
             group=64):  # fmt: skip
    """``stored``: d_z is rounded to x's dtype; ``of_sum``: what is added up, kept in a narrower dtype; ``group``: rows
    of a partial sum of d_bias; the others: of matmul and of :func:`cotangent`."""
    acc = accumulator(x)
    d_z = cotangent(d_y, pre, activation, ftz=ftz, low=low, identity=identity, open_at_0=open_at_0)
    d_z = through(d_z, x.dtype if stored else None).reshape(-1, len(weight)).astype(acc)
    rows = x.reshape(-1, x.shape[-1]).astype(acc)
    # what is multiplied as 16 bits is no matter of tf32
    kind = "tf32" if cut or (precision == "tf32" and x.dtype == np.float32) else "ieee"
    how = {"block": block, "ftz": ftz, "low": of_sum}
    (d_x,) = matmul.simulate(d_z, weight.astype(acc), kind, **how)
    (d_weight,) = matmul.simulate(d_z.T, rows, kind, tail=tail, **how)
    d_bias = None if bias is None else in_blocks(in_blocks_of(d_z, group), 1, 0)[0]
    return d_x.reshape(x.shape), d_weight, d_bias


def in_blocks_of(values, group):
    """Sums of so many rows at a time."""
    return np.stack([in_blocks(values[i : i + group], 1, 0)[0] for i in range(0, len(values), group)])


def any_case(rng, dtype, regime, m, k, n, activations=ACTIVATIONS):
    x, weight, d_y = (draw(rng, s, dtype, regime) for s in ((m, k), (n, k), (m, n)))
    activation = pick(rng, activations)
    pre = None
    if activation != "none":
        pre = outputs_of("linear", x, weight, activation=activation, return_pre=True)[1]
    return (x, weight, d_y, pre, draw(rng, (n,), dtype)), {"activation": activation}


def case(rng, dtype, regime):
    return any_case(rng, dtype, regime, *(int(e) for e in rng.choice([1, 7, 16, 40], 3)))


def large_case(rng, dtype, regime):
    return any_case(rng, dtype, regime, pick(rng, [24, 40]), pick(rng, [16, 33]), pick(rng, [65, 80]))


def made(activation):
    """Arrays of which z is about 1."""

    def arrays(rng, dtype):
        x, weight, d_y, pre, bias = (draw(rng, s, dtype) for s in ((70, 40), (96, 40), (70, 96), (70, 96), (96,)))
        return x, weight, d_y, None if activation == "none" else pre, bias

    return arrays


def at_the_kink(rng, dtype):
    x, weight, d_y, pre, bias = made("relu")(rng, dtype)
    return x, weight, d_y, np.where(rng.random(pre.shape) < 0.3, pre * 0, pre), bias


def past_2_31(gpu):
    rows, k = gpu.big // 512 + 16, 512
    picked = gpu.rows_to_sample(rows, k)
    x = gpu.torch.randn(rows, k, dtype=gpu.torch.bfloat16, device=gpu.device)
    weight = gpu.normal(24, k, dtype=gpu.torch.bfloat16)
    d_y, options = gpu.sampled(x[:, :24], picked), {"activation": "gelu_tanh"}
    bias = weight[:, 0].contiguous()
    outputs = gpu.op("linear_vjp")(x, weight, d_y, x[:, :24], bias, **options)
    assert outputs[0].numel() > gpu.big
    yield (outputs[0][picked], *outputs[1:]), (x[picked], weight, d_y[picked], x[picked][:, :24], bias), options


def far(gpu):
    x, weight = gpu.far((4, 300)), gpu.normal(20, 300, dtype=gpu.torch.bfloat16)
    yield x, weight, gpu.far((4, 300))[:, :20]


def shapes(m, k, n, pre=True):
    return {"x": (m, k), "weight": (n, k), "d_y": (m, n)} | ({"pre": (m, n)} if pre else {}) | {"bias": (n,)}


GELU = {"activation": "gelu"}

RECORD = GradientRecord(
    op="linear_vjp",
    simulate=simulate,
    variants=({}, {"block": 16}, {"stored": False}, {"ftz": True}, {"group": 1}),
    case=case,
    regimes=CHECKED,
    near=Near(
        lambda rng: tuple(None if a is None else np.abs(a) for a in made("none")(rng, "float32")),
        off={"d_x": 1e-5, "d_weight": 1e-5, "d_bias": 8e-6},
    ),
    faults={
        "no slope": Fault(made("gelu"), {"identity": True}, GELU, breaks="d_x"),
        "a slope of 1 at 0": Fault(at_the_kink, {"open_at_0": True}, {"activation": "relu"}, breaks="d_bias"),
        "the slope kept in bfloat16": Fault(
            made("silu"), {"low": BF16}, {"activation": "silu"}, breaks="d_x", dtypes=("float32", "float16")
        ),
        "rows without their tail": Fault(made("none"), {"tail": False}, breaks="d_weight"),
        "added up in bfloat16": Fault(made("none"), {"of_sum": BF16}, breaks="d_weight"),
    },
    large_case=large_case,
    typical=lambda rng, dtype: (made("none")(rng, dtype), {}),
    hiding={
        "gradients truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "products of tf32 for ieee": Hiding("typical", {"cut": True}, dtypes=("float32",)),
    },
    small={
        "gelu": Sample(shapes(3, 4, 5), GELU),
        "one gradient": Sample(shapes(2, 3, 4, pre=False), wants=("d_weight",)),
    },
    usual=(
        Sample(shapes(64, 200, 96), GELU),
        Sample(shapes(40, 33, 1100), {"activation": "silu"}),
        Sample(shapes(70, 65, 48), {"activation": "relu"}),
        Sample(shapes(70, 65, 48, pre=False)),
    ),
    extents={"batch": 2, "k": 96, "n": 128},
    matrix_units=True,
    past_2_31=past_2_31,
    far=far,
)
