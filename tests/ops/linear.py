"""y = f(x weight^T + bias) + residual, f an activation.

d_x = d_z weight, d_weight = d_z^T x, d_bias = the sum of d_z over rows, with d_z = d_y f'(pre).
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

import portakern as pk
from tests.ops import geglu, matmul, swiglu
from tests.ops._shared import (
    BF16,
    CHECKED,
    HALVES,
    SWEPT,
    accumulator,
    draw,
    flush,
    in_blocks,
    normal64,
    outputs_of,
    pick,
    positive,
    sweep,
    through,
    whole,
    zeros,
)
from tests.ops.record import Fault, ForwardRecord, GradientRecord, Hiding, Layer, Mapped, Near, Sample

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
FORMS = {"gelu": "none", "gelu_tanh": "tanh"}


def activated(z, activation, *, plain=False, ftz=False, wrong_way=False):
    """f(z) in z's type. ``plain``: the tanh form as 1 + tanh; ``wrong_way``: the other form of gelu."""
    if activation == "relu":
        return np.where(z < 0, z.dtype.type(0), z)
    if activation == "silu":
        z, s, _ = swiglu.parts(z, base2=False, ftz=ftz, plain=False)
        return flush(z * s, ftz)
    if activation == "none":
        return z
    form = FORMS[activation]
    form = {"none": "tanh", "tanh": "none"}[form] if wrong_way else form
    return flush(z * geglu.share(z, form, plain=plain, ftz=ftz), ftz)


def simulate(x, weight, bias=None, residual=None, activation="none", precision="ieee", return_pre=False, *, block=32,
             ftz=False, tail=True, low=None, plain=False, kept=None, late=False, early=False, rounded=False,
             wrong_way=False, first=False):  # fmt: skip
    """``late``: the bias comes after the activation; ``early``: the residual before it; ``first``: the sum begins at
    the bias, and products follow one by one; ``kept``, ``rounded``: what the activation gives, or is given, rounded to
    a dtype or to x's; the others: of matmul and of :func:`activated`."""
    acc = accumulator(x)
    rows = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
    if first:
        rows = np.concatenate([np.ones((len(rows), 1), rows.dtype), rows], -1)
        weight, bias, block = np.concatenate([bias[:, None], weight], -1), None, 1
    (z,) = matmul.simulate(rows, np.ascontiguousarray(weight.T), precision, block=block, ftz=ftz, tail=tail, low=low)
    z = z.reshape(*x.shape[:-1], len(weight))
    b, r = (acc(0) if term is None else flush(term.astype(acc), ftz) for term in (bias, residual))
    z = flush(z if bias is None or late else z + b, ftz)
    f = activated(through(z + r if early else z, x.dtype if rounded else None), activation, plain=plain, ftz=ftz,
                  wrong_way=wrong_way)  # fmt: skip
    f = through(f + b if late else f, kept)
    y = f if residual is None or early else f + r
    return y, z if return_pre else None


def any_case(rng, draw, dtype, regime, m, k, n):
    arrays = tuple(draw(rng, s, dtype, regime) for s in ((m, k), (n, k), (n,), (m, n)))
    return arrays, {"activation": pick(rng, ACTIVATIONS), "return_pre": bool(rng.random() < 0.5)}


def case(rng, dtype, regime):
    m, k, n = (int(e) for e in (rng.integers(1, 48), pick(rng, [1, 7, 64, 300]), rng.integers(1, 48)))
    (x, weight, bias, residual), options = any_case(rng, sweep, dtype, regime, m, k, n)
    return (x, weight, bias if m % 2 else None, residual if n % 2 else None), options


def large_case(rng, dtype, regime):
    return any_case(rng, draw, dtype, regime, pick(rng, [24, 40]), pick(rng, [64, 96]), pick(rng, [33, 40]))


def full(*extents):
    """x, weight, bias and residual of such a call."""

    def made(rng, dtype):
        m, k, n = extents
        return tuple(sweep(rng, s, dtype) for s in ((m, k), (n, k), (n,), (m, n)))

    return made


def far_above(rng, dtype):
    """x, weight and a bias beside which the products are small."""
    x, weight, bias, _ = full(40, 40, 40)(rng, dtype)
    return x, weight, bias + np.copysign(2**10, bias).astype(bias.dtype)


def typical(rng, dtype):
    return tuple(draw(rng, s, dtype) for s in ((64, 128), (64, 128), (64,), (64, 64))), {"activation": "relu"}


def formula(x, weight, bias=None, residual=None, activation="none", return_pre=True):
    y, pre = (np.zeros((*x.shape[:-1], len(weight))) for _ in range(2))
    for *at, j in np.ndindex(y.shape):
        at = tuple(at)
        z = math.fsum([*(x[at][i] * weight[j][i] for i in range(x.shape[-1])), 0 if bias is None else bias[j]])
        inner = math.sqrt(2 / math.pi) * (z + geglu.C * z**3)
        f = {
            "none": z,
            "relu": max(z, 0.0),
            "gelu": z * 0.5 * math.erfc(-z / math.sqrt(2)),
            "gelu_tanh": z * 0.5 * (1 + math.tanh(inner)),
            "silu": z / (1 + math.exp(-z)),
        }[activation]
        y[(*at, j)], pre[(*at, j)] = f if residual is None else f + residual[(*at, j)], z
    return y, pre


def in_torch(x, weight, bias=None, residual=None, activation="none", return_pre=False):
    from torch.nn import functional

    z = functional.linear(x, weight, bias)
    f = {
        "none": lambda: z,
        "relu": lambda: functional.relu(z),
        "gelu": lambda: functional.gelu(z),
        "gelu_tanh": lambda: functional.gelu(z, approximate="tanh"),
        "silu": lambda: functional.silu(z),
    }[activation]()
    y = f if residual is None else f + residual
    return (y, z) if return_pre else y


def in_jax(x, weight, bias=None, residual=None, activation="none"):
    import jax

    z = x @ weight.T
    z = z if bias is None else z + bias
    f = {
        "none": lambda: z,
        "relu": lambda: jax.nn.relu(z),
        "gelu": lambda: jax.nn.gelu(z, approximate=False),
        "gelu_tanh": lambda: jax.nn.gelu(z, approximate=True),
        "silu": lambda: jax.nn.silu(z),
    }[activation]()
    return f if residual is None else f + residual


def call(*arrays, **options):
    return pk.op("linear")(*arrays, **options)


def fuzzed(r, dtype):
    k, n, batch = r.extent(), r.extent(), [r.extent() for _ in range(int(r.rng.integers(0, 3)))]
    arrays = {"x": r.array(dtype, *batch, k), "weight": r.array(dtype, n, k)}
    if r.chance(0.5):
        arrays["bias"] = r.array(dtype, n)
    if r.chance(0.5):
        arrays["residual"] = r.array(dtype, *batch, n)
    return arrays, {"activation": r.pick(ACTIVATIONS), "precision": r.pick(("ieee", "tf32"))}


def past_2_31(gpu):
    torch = gpu.torch
    rows, k = gpu.big // 512 + 16, 512
    x = torch.randn(rows, k, dtype=torch.bfloat16, device=gpu.device)
    assert x.numel() > gpu.big
    weight, bias = gpu.normal(24, k, dtype=torch.bfloat16) / 16, gpu.normal(24, dtype=torch.bfloat16)
    picked, options = gpu.rows_to_sample(rows, k), {"activation": "gelu_tanh"}
    yield gpu.op("linear")(x, weight, bias, **options)[picked], (x[picked], weight, bias), options
    wide = torch.randn(gpu.big // 16 + 16, 24, dtype=torch.bfloat16, device=gpu.device)
    left, options = gpu.normal(24, 24, dtype=torch.bfloat16), {"activation": "silu"}
    y = gpu.op("linear")(left, wide, **options)  # 3.2e9 elements of output
    assert y.numel() > gpu.big
    columns = gpu.rows_to_sample(wide.shape[0], 24)
    yield y[:, columns].contiguous(), (left, wide[columns]), options


def far(gpu):
    yield gpu.far((4, 300)), gpu.normal(20, 300, dtype=gpu.torch.bfloat16)
    weight, bias = gpu.normal(20, 30, dtype=gpu.torch.bfloat16), gpu.normal(20, dtype=gpu.torch.bfloat16)
    yield gpu.normal(4, 30, dtype=gpu.torch.bfloat16), weight, bias, gpu.far((4, 20))


X, W = zeros(2, 3), zeros(4, 3)
WRONG = {
    "a weight that lies the other way": (lambda: call(X, zeros(3, 4)), r"linear: weight axis 1 \(k\) is 4; expected 3"),
    "another bias": (lambda: call(X, W, zeros(3)), r"linear: bias axis 0 \(n\) is 3; expected 4"),
    "a residual of x's shape": (lambda: call(X, W, None, X), r"linear: residual axis -1 \(n\) is 3; expected 4"),
    "another dtype": (lambda: call(X, W.astype(ml_dtypes.bfloat16)), r"weight is bfloat16 but x is float32"),
    "no columns": (lambda: call(zeros(2, 0), zeros(4, 0)), r"linear: .*k.* is 0"),
    "an activation that there is not": (
        lambda: call(X, W, activation="mish"),
        r"activation is 'mish'; expected one of 'none', 'relu', 'gelu', 'gelu_tanh', 'silu'",
    ),
}
ALL = {"x": (64, 200), "weight": (72, 200), "bias": (72,), "residual": (64, 72)}
SMALL = {"x": (2, 3), "weight": (4, 3), "bias": (4,), "residual": (2, 4)}

RECORD = ForwardRecord(
    op="linear",
    simulate=simulate,
    variants=({}, {"block": 16}, {"ftz": True}, {"plain": True}),
    case=case,
    regimes=SWEPT,
    near=Near(
        lambda rng: (positive(rng, 40, 64), positive(rng, 40, 64), positive(rng, 40)),
        {"activation": "gelu", "return_pre": True},
        off={"y": 1e-5, "pre": 1e-5},
    ),
    faults={
        "without its tail": Fault(full(8, 70, 8), {"tail": False}),
        "the bias after the activation": Fault(full(8, 40, 8), {"late": True}, {"activation": "relu"}, breaks="y"),
        "a sum that begins at the bias": Fault(far_above, {"first": True}, dtypes=("float32",)),
        "the residual before the activation": Fault(
            full(8, 40, 8), {"early": True}, {"activation": "silu"}, breaks="y"
        ),
        "z rounded before the activation": Fault(
            full(40, 64, 40), {"rounded": True}, {"activation": "gelu"}, breaks="y", dtypes=HALVES
        ),
        "the activation rounded before the residual": Fault(
            full(40, 64, 40), {"kept": BF16}, {"activation": "gelu_tanh"}, breaks="y"
        ),
        "the other form of gelu": Fault(
            full(8, 4, 40), {"wrong_way": True}, {"activation": "gelu"}, breaks="y", dtypes=("float32", "float16")
        ),
        "accumulating in 16 bits": Fault(full(8, 300, 8), {"low": BF16}),
        "tf32 in place of ieee": Fault(
            lambda r, t: (whole(r, (8, 16), t, 2**14), whole(r, (8, 16), t, 2)),
            {"precision": "tf32"},
            dtypes=("float32",),
        ),
    },
    large_case=large_case,
    typical=typical,
    hiding={
        "y truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "tf32 for ieee": Hiding("typical", {"precision": "tf32"}, dtypes=("float32",)),
        "y accumulated in bfloat16": Hiding("typical", {"low": BF16}),
    },
    small={
        "plain": Sample({"x": (2, 3), "weight": (4, 3)}),
        "all": Sample(SMALL, {"activation": "gelu"}),
        "residual alone": Sample({"x": (3,), "weight": (4, 3), "residual": (4,)}, {"activation": "gelu_tanh"}),
    },
    derived={
        "silu": Sample(SMALL, {"activation": "silu"}),
        "relu": Sample({"x": (2, 3, 4), "weight": (5, 4), "bias": (5,)}, {"activation": "relu"}),
    },
    usual=(
        Sample(ALL, {"activation": "gelu"}),
        Sample(ALL, {"activation": "gelu_tanh"}, tiling={"block_m": 64, "block_n": 128, "block_k": 128}),
        Sample({"x": (3, 40, 65), "weight": (48, 65), "residual": (3, 40, 48)}, {"activation": "relu"}),
        Sample({"x": (64, 128), "weight": (64, 128), "bias": (64,)}, {"activation": "silu"}),
    ),
    formula=formula,
    formula_calls={
        activation: lambda activation=activation: (
            (normal64(2, 3, 5), normal64(4, 5), normal64(4), normal64(2, 3, 4)),
            {"activation": activation, "return_pre": True},
        )
        for activation in ACTIVATIONS
    },
    formula_tolerance=(1e-12, 1e-14),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample(
        {"x": (2, 5, 7), "weight": (4, 7), "bias": (4,), "residual": (2, 5, 4)}, {"activation": "gelu_tanh"}
    ),
    lowered={
        "all": Sample(
            {"x": (2, 65, 200), "weight": (70, 200), "bias": (70,), "residual": (2, 65, 70)},
            {"activation": "gelu", "return_pre": True},
        ),
        "bare": Sample({"x": (3, 300), "weight": (130, 300)}, {"precision": "tf32"}),
    },
    mapped={
        "x and residual": Mapped(
            Sample({"x": (2, 3, 4), "weight": (5, 4), "bias": (5,), "residual": (3, 2, 5)}, {"activation": "silu"}),
            {"x": 0, "residual": 1},
        ),
        "own weights": Mapped(Sample({"x": (2, 3, 4), "weight": (2, 5, 4)}), {"x": 0, "weight": 0}, folds=False),
    },
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(
        lambda op, x, p: op(x, p["w"], p["b"], x, activation="gelu_tanh"),
        lambda width: {"w": (width, width), "b": (width,)},
    ),
    extents={"batch": 2, "k": 96, "n": 128},
    launched=Sample({"x": (64, 64), "weight": (64, 64), "bias": (64,)}, {"activation": "gelu_tanh"}),
    matrix_units=True,
    past_2_31=past_2_31,
    far=far,
)


# ---------------------------------------------------------------------------------------------------------- gradient
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
        return d * through(swiglu.simulate_vjp(z, one, one, ftz=ftz)[0], low)
    return d * through(geglu.simulate_vjp(z, one, one, FORMS[activation], ftz=ftz)[0], low)


def simulate_vjp(x, weight, d_y, pre=None, bias=None, activation="none", precision="ieee", *, block=32, ftz=False,
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


def any_case_vjp(rng, dtype, regime, m, k, n, activations=ACTIVATIONS):
    x, weight, d_y = (draw(rng, s, dtype, regime) for s in ((m, k), (n, k), (m, n)))
    activation = pick(rng, activations)
    pre = None
    if activation != "none":
        pre = outputs_of("linear", x, weight, activation=activation, return_pre=True)[1]
    return (x, weight, d_y, pre, draw(rng, (n,), dtype)), {"activation": activation}


def case_vjp(rng, dtype, regime):
    return any_case_vjp(rng, dtype, regime, *(int(e) for e in rng.choice([1, 7, 16, 40], 3)))


def large_case_vjp(rng, dtype, regime):
    return any_case_vjp(rng, dtype, regime, pick(rng, [24, 40]), pick(rng, [16, 33]), pick(rng, [65, 80]))


def made(activation):
    """Arrays of which z is about 1."""

    def arrays(rng, dtype):
        x, weight, d_y, pre, bias = (draw(rng, s, dtype) for s in ((70, 40), (96, 40), (70, 96), (70, 96), (96,)))
        return x, weight, d_y, None if activation == "none" else pre, bias

    return arrays


def at_the_kink(rng, dtype):
    x, weight, d_y, pre, bias = made("relu")(rng, dtype)
    return x, weight, d_y, np.where(rng.random(pre.shape) < 0.3, pre * 0, pre), bias


def past_2_31_vjp(gpu):
    rows, k = gpu.big // 512 + 16, 512
    picked = gpu.rows_to_sample(rows, k)
    x = gpu.torch.randn(rows, k, dtype=gpu.torch.bfloat16, device=gpu.device)
    weight = gpu.normal(24, k, dtype=gpu.torch.bfloat16)
    d_y, options = gpu.sampled(x[:, :24], picked), {"activation": "gelu_tanh"}
    bias = weight[:, 0].contiguous()
    outputs = gpu.op("linear_vjp")(x, weight, d_y, x[:, :24], bias, **options)
    assert outputs[0].numel() > gpu.big
    yield (outputs[0][picked], *outputs[1:]), (x[picked], weight, d_y[picked], x[picked][:, :24], bias), options


def far_vjp(gpu):
    x, weight = gpu.far((4, 300)), gpu.normal(20, 300, dtype=gpu.torch.bfloat16)
    yield x, weight, gpu.far((4, 300))[:, :20]


def shapes(m, k, n, pre=True):
    return {"x": (m, k), "weight": (n, k), "d_y": (m, n)} | ({"pre": (m, n)} if pre else {}) | {"bias": (n,)}


GELU = {"activation": "gelu"}

GRADIENT = GradientRecord(
    op="linear_vjp",
    simulate=simulate_vjp,
    variants=({}, {"block": 16}, {"stored": False}, {"ftz": True}, {"group": 1}),
    case=case_vjp,
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
    large_case=large_case_vjp,
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
    past_2_31=past_2_31_vjp,
    far=far_vjp,
)
