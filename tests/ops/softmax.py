"""y = exp(x - max x) / sum exp(x - max x) along an axis.

d_x = y (d_y - Delta), Delta = sum y d_y.
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
    in_blocks,
    long_rows,
    long_rows_of_gradients,
    normal64,
    outputs_of,
    pick,
    positive,
    sweep,
    through,
    zeros,
)
from tests.ops.record import Corner, Fault, ForwardRecord, GradientRecord, Hiding, Layer, Mapped, Near, Sample, Twin


def simulate(x, axis=-1, *, block=None, ftz=False, shift=True, base2=True, tail=True, factor=1.0):
    """One pass for the maximum m and the denominator l, rescaled where m grows; one pass for y."""
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
        origin = np.where(new == -np.inf, acc(0), new)
        l = l * exp(m - origin) + exp(part - origin).sum(-1, keepdims=True)
        m = new
    return (np.moveaxis(flush(exp(x - m) / l * acc(factor), ftz), -1, axis),)


def case(rng, dtype, regime):
    x = sweep(rng, (rng.integers(1, 24), rng.choice([1, 5, 64, 300, 1024, 4096])), dtype, regime)
    return (x,), {}


def large_case(rng, dtype, regime):
    return (draw(rng, (rng.choice([1, 7, 64]), rng.choice([64, 257, 1030])), dtype, regime),), {}


def rising(slope):
    """Each tile rescales what came before: the longest chain of roundings that a legal tiling has."""

    def arrays(rng, dtype):
        x = (np.arange(4096) * slope).astype(numpy_dtype(dtype))
        return (np.stack([x, x[::-1]]),)

    return arrays


def formula(x, axis=-1):
    rows = np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis])
    shares = [[math.exp(t) / math.fsum(map(math.exp, row)) for t in row] for row in rows]
    return (np.moveaxis(np.reshape(shares, np.moveaxis(x, axis, -1).shape), -1, axis),)


def in_torch(x, axis=-1):
    import torch

    return torch.softmax(x, axis)


def in_jax(x, axis=-1):
    import jax

    return jax.nn.softmax(x, axis)


def call(*arrays, **options):
    return pk.op("softmax")(*arrays, **options)


def fuzzed(r, dtype):
    shape = [r.extent() for _ in range(int(r.rng.integers(1, 4)))]
    return {"x": r.array(dtype, *shape)}, {"axis": int(r.rng.integers(-len(shape), len(shape)))}


def far(gpu):
    yield (gpu.far((4, 300)),)
    yield (gpu.far((4, 300)).T,)  # the far stride innermost


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no words")


X = zeros(2, 3)
WRONG = {
    "axis too large": (
        lambda: call(X, axis=2),
        r"softmax: axis is 2; expected an integer from -2 to 1: x has shape \(2, 3\)",
    ),
    "axis too small": (lambda: call(X, axis=-3), r"axis is -3; expected an integer from -2 to 1"),
    "axis of none": (
        lambda: call(zeros()),
        r"axis is -1; expected an integer but the array has no axes: x has shape \(\)",
    ),
    "axis as a float": (lambda: call(X, axis=1.0), r"axis is 1.0; expected an integer"),
    "axis as a boolean": (lambda: call(X, axis=True), r"axis is True; expected an integer"),
    "axis as NumPy's boolean": (lambda: call(X, axis=np.bool_(True)), r"axis is np.True_; expected an integer"),
    "axes": (lambda: call(X, axis=(0, 1)), r"axis is \(0, 1\); expected an integer"),
    "a long value": (
        lambda: call(X, axis=[0] * 10**6),
        r"axis is \[0, 0, 0.{50,80}\.\.\. \(list\); expected an integer",
    ),
    "a value without words": (lambda: call(X, axis=Unprintable()), r"axis is a Unprintable; expected an integer"),
}

RECORD = ForwardRecord(
    op="softmax",
    simulate=simulate,
    variants=({}, {"block": 128}, {"base2": False, "block": 1024}, {"ftz": True}),
    case=case,
    regimes=SWEPT,
    near=Near(lambda rng: (sweep(rng, (40, 257), "float32"),), plant={"factor": 1 + 7e-6}),
    faults={
        "without its tail": Fault(lambda r, t: (sweep(r, (4, 300), t),), {"tail": False, "block": 128}),
        "without the maximum": Fault(
            lambda r, t: (sweep(r, (4, 300), t) + numpy_dtype(t).type(200),), {"shift": False}
        ),
        "1 % off": Fault(lambda r, t: (sweep(r, (4, 300), t),), {"factor": 1.01}),
    },
    corners={
        f"a maximum that rises by {slope} a key": Corner(rising(slope), variant={"block": 128})
        for slope in (0.003, 0.03, 0.3)
    },
    large_case=large_case,
    typical=lambda rng, dtype: ((draw(rng, (64, 257), dtype),), {}),
    hiding={
        "y truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "y 3e-6 off": Hiding("typical", {"factor": 1 + 3e-6}, dtypes=("float32",)),
    },
    small={
        "plain": Sample({"x": (2, 3)}),
        "another axis": Sample({"x": (2, 3, 2)}, {"axis": 1}),
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
    formula_tolerance=(1e-14, 0),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample({"x": (3, 9)}, {"axis": 0}),
    lowered={
        "last axis": Sample({"x": (5, 300)}),
        "first axis": Sample({"x": (70, 5, 130)}, {"axis": 0}),
        "one axis": Sample({"x": (700,)}),
    },
    mapped={"another axis": Mapped(Sample({"x": (3, 2, 4)}, {"axis": 0}), {"x": 1})},
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(lambda op, x, p: x * op(x)),
    extents={"shape": 64},
    launched=Sample({"x": (64, 512)}),
    rows=("x",),
    past_2_31=long_rows("softmax"),
    far=far,
    twin=Twin("softmax", sampled="softmax"),
)


# ---------------------------------------------------------------------------------------------------------- gradient
def simulate_vjp(y, d_y, axis=-1, *, block=4096, ftz=False, apart=False, factor=1.0, tail=True, low=None):
    """``apart``: y d_y and y Delta are rounded each, as where a row is read twice."""
    acc = accumulator(y)
    y, g = (flush(np.moveaxis(a.astype(acc), axis, -1), ftz) for a in (y, d_y))
    terms = flush(y * g, ftz)
    delta = in_blocks(terms if tail else terms[..., : terms.shape[-1] // block * block or 1], block)
    delta = through(delta, low)
    d_x = flush(y * g, ftz) - flush(y * delta, ftz) if apart else y * (g - delta)
    return (np.moveaxis(flush(d_x * acc(factor), ftz), -1, axis),)


def of_softmax(x):
    return outputs_of("softmax", x)[0]


def any_case(rng, dtype, regime, shape):
    x = draw(rng, shape, dtype, regime)
    x = x if regime != "wide" or rng.random() < 0.5 else draw(rng, shape, dtype)
    return (of_softmax(x), draw(rng, shape, dtype, regime)), {}


def case_vjp(rng, dtype, regime):
    return any_case(rng, dtype, regime, (int(rng.integers(1, 24)), pick(rng, [1, 5, 64, 300, 1024])))


def large_case_vjp(rng, dtype, regime):
    return any_case(rng, dtype, regime, (pick(rng, [1, 7, 64]), pick(rng, [64, 257, 1030])))


def arrays(rng, dtype):
    return of_softmax(draw(rng, (4, 300), dtype)), draw(rng, (4, 300), dtype) + numpy_dtype(dtype).type(2)


def opposed(rng):
    """A cotangent of one sign in every other element of a row."""
    return of_softmax(draw(rng, (20, 64), "float32")), positive(rng, 20, 64) * np.where(
        np.arange(64) % 2, 1, -1
    ).astype(np.float32)


def far_vjp(gpu):
    yield gpu.far((4, 300)), gpu.far((4, 300))


GRADIENT = GradientRecord(
    op="softmax_vjp",
    simulate=simulate_vjp,
    variants=({}, {"block": 128}, {"apart": True}, {"ftz": True}, {"block": 128, "ftz": True, "apart": True}),
    case=case_vjp,
    regimes=CHECKED,
    near=Near(opposed, off={"d_x": 2e-6}),
    faults={
        "Delta without the last tile": Fault(arrays, {"tail": False, "block": 128}, breaks="d_x"),
        "Delta kept in bfloat16": Fault(arrays, {"low": BF16}, breaks="d_x"),
        "d_x 1 % off": Fault(arrays, {"factor": 1.01}, breaks="d_x"),
    },
    large_case=large_case_vjp,
    typical=lambda rng, dtype: (arrays(rng, dtype), {}),
    hiding={
        "d_x truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "d_x 3e-6 off": Hiding("typical", {"factor": 1 + 3e-6}, dtypes=("float32",)),
    },
    small={"plain": Sample({"y": (2, 3), "d_y": (2, 3)})},
    usual=(
        Sample({"y": (64, 1000), "d_y": (64, 1000)}),
        Sample({"y": (64, 1000), "d_y": (64, 1000)}, tiling={"block_rows": 16, "block_n": 128}),
        Sample({"y": (8, 257, 6), "d_y": (8, 257, 6)}, {"axis": 1}),
        Sample({"y": (40, 300), "d_y": (40, 300)}),
    ),
    extents={"shape": 64},
    rows=("x", "x"),
    past_2_31=long_rows_of_gradients("softmax_vjp", lambda gpu, x: gpu.op("softmax")(x), weighs=False),
    far=far_vjp,
)
