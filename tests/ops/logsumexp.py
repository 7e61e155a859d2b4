"""y = m + log sum exp(x - m) along an axis, m = max x.

d_x = d_y p, p = exp(x - m) / sum exp(x - m).
"""

from __future__ import annotations

import math

import numpy as np

import portakern as pk
from portakern.spec.dtypes import numpy_dtype
from tests.ops._shared import (
    BF16,
    CHECKED,
    HALVES,
    SWEPT,
    accumulator,
    draw,
    flush,
    long_rows,
    normal64,
    pick,
    positive,
    sweep,
    through,
    zeros,
)
from tests.ops.record import Corner, Fault, ForwardRecord, GradientRecord, Hiding, Layer, Mapped, Near, Sample, Twin
from tests.ops.softmax import far, fuzzed, rising


def sums(x, axis, *, block, ftz, shift, base2, tail, low, guarded=np.isinf):
    """(exp, m, l) of rows along the last axis: the maximum and the sum, rescaled where the maximum grows.

    A maximum that is ``guarded`` is not subtracted.
    """
    acc = accumulator(x)
    x = flush(np.moveaxis(x.astype(acc), axis, -1), ftz)

    def exp(t):
        return flush(np.exp2(t * acc(np.log2(np.e))) if base2 else np.exp(t), ftz)

    n = x.shape[-1]
    block = block or n
    m, l = np.full(x.shape[:-1] + (1,), -np.inf, acc), np.zeros(x.shape[:-1] + (1,), acc)
    for j in range(0, n if tail else n // block * block, block):
        part = x[..., j : j + block]
        new = np.maximum(m, part.max(-1, keepdims=True)) if shift else np.zeros_like(m)
        origin = np.where(guarded(new), acc(0), new)
        l = through(l * exp(m - origin) + exp(part - origin).sum(-1, keepdims=True), low)
        m = new
    return x, exp, m, l


def simulate(x, axis=-1, *, block=None, ftz=False, shift=True, base2=True, tail=True, low=None, more=0.0):
    """One pass for the maximum m and the sum l; then its logarithm, by the natural one or that of base 2."""
    _, _, m, l = sums(x, axis, block=block, ftz=ftz, shift=shift, base2=base2, tail=tail, low=low)
    acc = l.dtype.type
    log = np.log2(l) * acc(np.log(2)) if base2 else np.log(l)
    return (flush((np.where(np.isinf(m), acc(0), m) + log + acc(more)).squeeze(-1), ftz),)


def case(rng, dtype, regime):
    return (sweep(rng, (rng.integers(1, 24), rng.choice([1, 5, 64, 300, 1024, 4096])), dtype, regime),), {}


def large_case(rng, dtype, regime):
    """One number a row: many rows, and in bfloat16 short ones, as sums of long ones are too much alike to be told
    apart.
    """
    n = pick(rng, [3, 17] if dtype == "bfloat16" else [17, 257])
    return (draw(rng, (pick(rng, [700, 1500]), n), dtype, regime),), {}


def formula(x, axis=-1):
    rows = np.moveaxis(x, axis, -1)
    found = [math.log(math.fsum(map(math.exp, row))) for row in rows.reshape(-1, x.shape[axis])]
    return (np.reshape(found, rows.shape[:-1]),)


def in_torch(x, axis=-1):
    import torch

    return torch.logsumexp(x, axis)


def in_jax(x, axis=-1):
    import jax

    return jax.nn.logsumexp(x, axis)


def call(*arrays, **options):
    return pk.op("logsumexp")(*arrays, **options)


X = zeros(2, 3)
WRONG = {
    "axis too large": (
        lambda: call(X, axis=2),
        r"logsumexp: axis is 2; expected an integer from -2 to 1: x has shape \(2, 3\)",
    ),
    "axis of none": (lambda: call(zeros()), r"axis is -1; expected an integer but the array has no axes"),
    "axes": (lambda: call(X, axis=(0, 1)), r"axis is \(0, 1\); expected an integer"),
    "integers": (lambda: call(X.astype(np.int32)), r"logsumexp: x is int32; expected one of float32"),
}

RECORD = ForwardRecord(
    op="logsumexp",
    simulate=simulate,
    variants=({}, {"block": 128}, {"base2": False, "block": 1024}, {"ftz": True}),
    case=case,
    regimes=SWEPT,
    near=Near(lambda rng: (sweep(rng, (40, 257), "float32"),), plant={"more": 1.2e-5}),
    faults={
        "without its tail": Fault(lambda r, t: (sweep(r, (4, 140), t),), {"tail": False, "block": 16}, breaks="y"),
        "without the maximum": Fault(
            lambda r, t: (sweep(r, (4, 300), t) + numpy_dtype(t).type(200),), {"shift": False}, breaks="y"
        ),
        "adding up in 16 bits": Fault(
            lambda r, t: (sweep(r, (40, 300), t),),
            {"low": BF16, "block": 16},
            breaks="y",
            dtypes=("float32", "float16"),
        ),
        "1 % more": Fault(lambda r, t: (sweep(r, (40, 8), t) - numpy_dtype(t).type(2.5),), {"more": 0.01}, breaks="y"),
    },
    corners={
        f"a maximum that rises by {slope} a key": Corner(rising(slope), variant={"block": 128})
        for slope in (0.003, 0.03, 0.3)
    },
    large_case=large_case,
    typical=lambda rng, dtype: ((draw(rng, (1500, 17), dtype),), {}),
    hiding={
        "y truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "l 3e-6 too large": Hiding("typical", {"more": 3e-6}, dtypes=("float32",)),
    },
    small={
        "plain": Sample({"x": (2, 3)}),
        "another axis": Sample({"x": (2, 3, 2)}, {"axis": 1}),
        "one axis": Sample({"x": (4,)}),
    },
    derived={f"axis {axis}": Sample({"x": (3, 4, 5)}, {"axis": axis}) for axis in (0, 1, -1)},
    usual=(
        Sample({"x": (64, 1000)}),
        Sample({"x": (64, 1000)}, tiling={"block_rows": 16, "block_n": 128}),
        Sample({"x": (8, 257, 6)}, {"axis": 1}),
        Sample({"x": (40, 300)}),
    ),
    formula=formula,
    formula_calls={f"axis {axis}": lambda axis=axis: ((normal64(3, 4, 5),), {"axis": axis}) for axis in (0, 1, 2, -1)},
    formula_tolerance=(1e-14, 1e-14),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample({"x": (3, 9)}, {"axis": 0}),
    lowered={
        "last axis": Sample({"x": (5, 300)}),
        "many rows": Sample({"x": (700, 300)}),
        "first axis": Sample({"x": (70, 5, 130)}, {"axis": 0}),
        "one axis": Sample({"x": (700,)}),
    },
    mapped={"another axis": Mapped(Sample({"x": (3, 2, 4)}, {"axis": 0}), {"x": 1})},
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(lambda op, x, p: x - op(x)[..., None]),
    extents={"shape": 64},
    launched=Sample({"x": (64, 512)}),
    past_2_31=long_rows("logsumexp"),
    far=far,
    twin=Twin("logsumexp", sampled="logsumexp"),
)


# ---------------------------------------------------------------------------------------------------------- gradient
def simulate_vjp(x, d_y, axis=-1, *, block=None, ftz=False, base2=True, tail=True, low=None, early=False, factor=1.0,
             others=False):  # fmt: skip
    """``early``: d_y meets 1 / l before the weights; ``others``: a row takes the cotangent of the one before."""
    x, exp, m, l = sums(x, axis, block=block, ftz=ftz, shift=True, base2=base2, tail=tail, low=low, guarded=np.isneginf)
    g = flush((np.roll(d_y, 1, 0) if others else d_y).astype(x.dtype)[..., None], ftz)
    p = exp(x - m)
    d_x = flush(g / l, ftz) * p if early else g * flush(p / l, ftz)
    return (np.moveaxis(flush(d_x * x.dtype.type(factor), ftz), -1, axis),)


def any_case(rng, dtype, regime, rows, n):
    x = draw(rng, (rows, n), dtype, regime)
    return (x, draw(rng, (rows,), dtype, regime if rng.random() < 0.5 else "normal")), {}


def case_vjp(rng, dtype, regime):
    return any_case(rng, dtype, regime, int(rng.integers(1, 24)), pick(rng, [1, 5, 64, 300, 1024]))


def large_case_vjp(rng, dtype, regime):
    return any_case(rng, dtype, regime, pick(rng, [1, 7, 64]), pick(rng, [64, 257, 1030]))


def arrays(rng, dtype):
    return draw(rng, (64, 257), dtype), draw(rng, (64,), dtype)


def past_2_31(gpu):
    rows, n = gpu.big // 256 + 16, 256
    x = gpu.torch.randn(rows, n, dtype=gpu.torch.bfloat16, device=gpu.device)
    d_y, picked = gpu.normal(rows, dtype=gpu.torch.bfloat16), gpu.rows_to_sample(rows, n)
    d_x = gpu.op("logsumexp_vjp")(x, d_y)
    d_x = d_x[0] if isinstance(d_x, tuple) else d_x
    assert d_x.numel() > gpu.big
    yield (d_x[picked],), (x[picked], d_y[picked]), {}


def far_vjp(gpu):
    yield gpu.far((4, 300)), gpu.normal(4, dtype=gpu.torch.bfloat16)
    yield gpu.far((4, 300)).T, gpu.normal(300, dtype=gpu.torch.bfloat16)


GRADIENT = GradientRecord(
    op="logsumexp_vjp",
    simulate=simulate_vjp,
    variants=({}, {"block": 128}, {"base2": False, "early": True}, {"ftz": True}, {"block": 128, "early": True}),
    case=case_vjp,
    regimes=CHECKED,
    near=Near(lambda rng: (draw(rng, (40, 64), "float32"), 1 + positive(rng, 40)), off={"d_x": 8e-6}),
    faults={
        "l without the last tile": Fault(arrays, {"tail": False, "block": 16}, breaks="d_x"),
        "l kept in bfloat16": Fault(arrays, {"low": BF16, "block": 16}, breaks="d_x"),
        "d_x 1 % off": Fault(arrays, {"factor": 1.01}, breaks="d_x"),
        "another row's cotangent": Fault(arrays, {"others": True}, breaks="d_x"),
    },
    large_case=large_case_vjp,
    typical=lambda rng, dtype: (arrays(rng, dtype), {}),
    hiding={
        "d_x truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "d_x 3e-6 off": Hiding("typical", {"factor": 1 + 3e-6}, dtypes=("float32",)),
    },
    small={"plain": Sample({"x": (2, 3), "d_y": (2,)})},
    usual=(
        Sample({"x": (64, 1000), "d_y": (64,)}),
        Sample({"x": (64, 1000), "d_y": (64,)}, tiling={"block_rows": 16, "block_n": 128}),
        Sample({"x": (8, 257, 6), "d_y": (8, 6)}, {"axis": 1}),
        Sample({"x": (40, 300), "d_y": (40,)}),
    ),
    extents={"shape": 64},
    past_2_31=past_2_31,
    far=far_vjp,
)
