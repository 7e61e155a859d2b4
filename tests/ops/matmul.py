"""c = a @ b.

d_a = d_c b^T and d_b = a^T d_c, each summed over the batch axes along which its operand was broadcast.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

import portakern as pk
from tests.ops._shared import (
    BF16,
    CHECKED,
    F32,
    HALVES,
    SWEPT,
    accumulator,
    cut,
    draw,
    flush,
    in_blocks,
    normal64,
    pick,
    positive,
    sweep,
    through,
    whole,
    zeros,
)
from tests.ops.record import (
    DTYPES,
    Corner,
    Fault,
    ForwardRecord,
    GradientRecord,
    Hiding,
    Layer,
    Mapped,
    Near,
    Sample,
    Twin,
)


def simulate(a, b, precision="ieee", out_dtype=None, *, block=32, ftz=False, tail=True, low=None):
    """Products of blocks along k, added up one after another. ``out_dtype`` is for whoever stores c."""
    acc_dtype = accumulator(a, b)
    a, b = (flush(cut(np.ascontiguousarray(x, acc_dtype), precision), ftz) for x in (a, b))
    acc = np.zeros((*a.shape[:-1], b.shape[-1]), acc_dtype)
    stop = a.shape[-1] if tail else a.shape[-1] // block * block
    for k in range(0, stop, block):
        acc = through(flush(acc + a[..., k : k + block] @ b[..., k : k + block, :], ftz), low)
    return (acc,)


def case(rng, dtype, regime):
    m, k, n = rng.integers(1, 48), rng.choice([1, 7, 64, 300, 1024]), rng.integers(1, 48)
    arrays = sweep(rng, (m, k), dtype, regime), sweep(rng, (k, n), dtype, regime)
    return arrays, pick(rng, ({}, {"out_dtype": "float32"}))


def large_case(rng, dtype, regime):
    m, k, n = rng.choice([48, 64, 65, 96], 3)
    arrays = draw(rng, (m, k), dtype, regime), draw(rng, (k, n), dtype, regime)
    return arrays, {} if rng.random() < 0.6 else {"out_dtype": "float32"}


def typical(rng, dtype):
    return (draw(rng, (64, 128), dtype), draw(rng, (128, 64), dtype)), {}


def near_1(rng, dtype):
    """The 10 bits that tf32 keeps are all 0."""
    a = np.full((8, 512), F32(1 + 2.0**-10 - 2.0**-23))
    return a, a.T


def formula(a, b):
    c = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]))
    a, b = (np.broadcast_to(x, (*c.shape[:-2], *x.shape[-2:])) for x in (a, b))
    for *batch, m, n in np.ndindex(c.shape):
        c[(*batch, m, n)] = math.fsum(a[(*batch, m, k)] * b[(*batch, k, n)] for k in range(a.shape[-1]))
    return (c,)


def in_torch(a, b, out_dtype=None):
    import torch

    c = torch.matmul(a, b)
    return c if out_dtype is None else c.to(getattr(torch, out_dtype))


def in_jax(a, b):
    import jax.numpy as jnp

    return jnp.matmul(a, b)


def call(*arrays, **options):
    return pk.op("matmul")(*arrays, **options)


def fuzzed(r, dtype):
    m, k, n, batch = r.extent(), r.extent(), r.extent(), r.extent()
    a, b = ((batch,), (r.pick((1, batch)),)) if r.chance(0.3) else ((), ())
    arrays = {"a": r.array(dtype, *a, m, k), "b": r.array(dtype, *b, k, n)}
    return arrays, {"precision": r.pick(("ieee", "tf32")), "out_dtype": r.pick((None, *DTYPES, "float64"))}


def past_2_31(gpu):
    torch = gpu.torch
    rows, k = gpu.big // 512 + 16, 512
    a = torch.randn(rows, k, dtype=torch.bfloat16, device=gpu.device)
    b = gpu.normal(k, 24, dtype=torch.bfloat16)
    assert a.numel() > gpu.big
    picked = gpu.rows_to_sample(rows, k)
    yield gpu.op("matmul")(a, b)[picked], (a[picked], b), {}
    wide = torch.randn(24, gpu.big // 16 + 16, dtype=torch.bfloat16, device=gpu.device)
    left = b.T[:, :24].contiguous()
    c = gpu.op("matmul")(left, wide)  # 3.2e9 elements of output
    assert c.numel() > gpu.big
    columns = gpu.rows_to_sample(wide.shape[1], 24)
    yield c[:, columns].contiguous(), (left, wide[:, columns].contiguous()), {}


def far(gpu):
    yield gpu.far((4, 300)), gpu.normal(300, 20, dtype=gpu.torch.bfloat16)


M, X = zeros(2, 2), zeros(2, 3)


class Unreadable:
    @property
    def name(self):
        raise RuntimeError("no name")


A_DTYPE = r"expected a floating-point dtype"
WRONG = {
    "least rank": (lambda: call(zeros(2), M), r"a has 1 axis, shape \(2,\); expected at least 2: \(\*#batch, m, k\)"),
    "inner": (
        lambda: call(X, X),
        r"b axis -2 \(k\) is 2; expected 3, as set by a axis -1; make them agree: b is \(\*#batch, k, n\)",
    ),
    "leading axes": (
        lambda: call(zeros(3, 2, 2), zeros(4, 2, 2)),
        r"leading axes \(4,\) of b do not broadcast with \(3,\) of a; make them equal, or 1",
    ),
    "dtypes that differ": (
        lambda: call(M, M.astype(np.float16)),
        r"b is float16 but a is float32; expected float32: cast one of them",
    ),
    "None where it is none": (
        lambda: call(M, M, precision=None),
        r"precision is None; expected one of 'ieee', 'tf32'",
    ),
    "out_dtype": (
        lambda: call(M, M, out_dtype="int8"),
        rf"out_dtype is 'int8'; {A_DTYPE} \(float32, float16, bfloat16, float64\), or None",
    ),
    "out_dtype as a type": (lambda: call(M, M, out_dtype=float), rf"out_dtype is <class 'float'>; {A_DTYPE}"),
    "out_dtype's byte order": (
        lambda: call(M, M, out_dtype=np.dtype(">f4")),
        rf"out_dtype is dtype\('>f4'\); {A_DTYPE}",
    ),
    "out_dtype that raises": (lambda: call(M, M, out_dtype=Unreadable()), r"out_dtype is <.*Unreadable object"),
    "a missing array": (lambda: call(M), r"matmul\(\) missing 1 required positional argument: 'b'; arrays: a, b"),
}

RECORD = ForwardRecord(
    op="matmul",
    simulate=simulate,
    variants=({}, {"block": 16}, {"ftz": True}),
    case=case,
    regimes=SWEPT,
    near=Near(lambda rng: (positive(rng, 40, 64), positive(rng, 64, 40)), off={"c": 1e-5}),
    faults={
        "without its tail": Fault(lambda r, t: (sweep(r, (8, 70), t), sweep(r, (70, 8), t)), {"tail": False}),
        "accumulating in 16 bits": Fault(lambda r, t: (sweep(r, (8, 512), t), sweep(r, (512, 8), t)), {"low": BF16}),
        "tf32 in place of ieee": Fault(
            lambda r, t: (whole(r, (8, 16), t, 2**14), whole(r, (16, 8), t, 2)),
            {"precision": "tf32"},
            dtypes=("float32",),
        ),
    },
    corners={
        "tf32 has its own terms": Corner(near_1, {"precision": "tf32"}, {}, least=0.9, dtypes=("float32",)),
    },
    large_case=large_case,
    typical=typical,
    hiding={
        "c truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "tf32 for ieee": Hiding("typical", {"precision": "tf32"}, dtypes=("float32",)),
        "c accumulated in bfloat16": Hiding("typical", {"low": BF16}),
    },
    small={
        "plain": Sample({"a": (2, 3), "b": (3, 2)}),
        "broadcast": Sample({"a": (2, 1, 2, 3), "b": (3, 3, 1)}),
        "another out_dtype": Sample({"a": (2, 3), "b": (2, 3, 2)}, {"out_dtype": "float32"}),
    },
    derived={
        f"batch {a} and {b}": Sample({"a": (*a, 3, 4), "b": (*b, 4, 5)})
        for a, b in (((), ()), ((3,), (3,)), ((3,), ()), ((), (5,)), ((2, 1), (1, 3)), ((2, 3), (3,)), ((4, 1), (4, 3)))
    },
    usual=(
        Sample({"a": (96, 200), "b": (200, 72)}),
        Sample({"a": (3, 64, 64), "b": (64, 200)}, tiling={"block_m": 64, "block_n": 128, "block_k": 128}),
        Sample({"a": (2, 1, 40, 65), "b": (3, 65, 48)}),
        Sample({"a": (64, 128), "b": (128, 64)}, {"out_dtype": "float32"}),
    ),
    formula=formula,
    formula_calls={"broadcast": lambda: ((normal64(2, 1, 3, 5), normal64(4, 5, 2)), {})},
    formula_tolerance=(1e-14, 0),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample({"a": (2, 5, 7), "b": (7, 4)}),
    lowered={
        "batch": Sample({"a": (2, 130, 200), "b": (200, 70)}),
        "tf32": Sample({"a": (130, 200), "b": (200, 70)}, {"precision": "tf32"}),
    },
    mapped={
        "both": Mapped(Sample({"a": (2, 3, 4), "b": (2, 4, 5)}), {"a": 0, "b": 0}),
        "a shared operand": Mapped(Sample({"a": (3, 4), "b": (4, 5, 2)}), {"b": 2}),
        "unequal batches": Mapped(Sample({"a": (2, 3, 4), "b": (6, 1, 4, 5)}), {"a": 0}),
        "mapped below": Mapped(Sample({"a": (6, 3, 4), "b": (2, 4, 5)}), {"b": 0}),
    },
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(lambda op, x, p: op(x, p["w"]), lambda width: {"w": (width, width)}),
    extents={"batch": 2, "m": 64, "k": 96, "n": 128},
    launched=Sample({"a": (64, 64), "b": (64, 64)}),
    matrix_units=True,
    past_2_31=past_2_31,
    far=far,
    twin=Twin("matmul", sampled="matmul"),
)


# ---------------------------------------------------------------------------------------------------------- gradient
def fold(x, shape):
    """Sum over what broadcasting made of ``shape``, one entry after another."""
    while x.ndim > len(shape):
        x = in_blocks(x, 1, 0)[0]
    for axis, extent in enumerate(shape[:-2]):
        x = in_blocks(x, 1, axis) if extent == 1 else x
    return x


def first_entry(x, shape):
    """What is left of x where sums over batch entries are forgotten."""
    x = x[tuple(0 for _ in range(x.ndim - len(shape)))]
    return x[tuple(slice(1) if extent == 1 else slice(None) for extent in shape)].reshape(shape)


def side_by_side(left, right, shape):
    """Operands whose batch entries that are summed lie one after another along the contraction."""
    lead, nb = (1,) * (left.ndim - len(shape)) + shape[:-2], left.ndim - 2
    summed = [i for i, extent in enumerate(lead) if extent == 1]
    kept = [i for i, extent in enumerate(lead) if extent != 1]
    left, right = left.transpose(*kept, nb, *summed, nb + 1), right.transpose(*kept, *summed, nb, nb + 1)
    return (
        left.reshape(*left.shape[: len(kept) + 1], -1),
        right.reshape(*right.shape[: len(kept)], -1, right.shape[-1]),
    )


def simulate_vjp(
    a, b, d_c, precision="ieee", *, block=32, ftz=False, after=False, low=None, only_first=False, tail=True, cut=False
):
    """``after``: batch entries are added up after the products, instead of inside them.

    ``cut``: tf32 whatever was asked.
    """
    acc = accumulator(a, b, d_c)
    narrow = max({a.dtype.itemsize, d_c.dtype.itemsize}) < 4 and a.dtype == d_c.dtype
    precision = "tf32" if cut else "ieee" if narrow or acc is np.float64 else precision
    product = partial(simulate, block=block, precision=precision, ftz=ftz, low=low, tail=tail)
    if acc is np.float64:
        product = lambda x, y: (x.astype(acc) @ y.astype(acc),)  # noqa: E731
    grads, batch = [], d_c.shape[:-2]
    for name, own in (("a", a), ("b", b)):
        left, right = (d_c, np.swapaxes(b, -1, -2)) if name == "a" else (np.swapaxes(a, -1, -2), d_c)
        left, right = (np.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (left, right))
        if only_first:
            grads.append(first_entry(product(left, right)[0], own.shape))
        elif after or not batch:
            grads.append(fold(product(left, right)[0], own.shape))
        else:
            grads.append(product(*side_by_side(left, right, own.shape))[0].reshape(own.shape))
    return tuple(grads)


BATCHES = (((), ()), ((3,), (3,)), ((3,), ()), ((), (5,)), ((2, 1), (1, 3)), ((2, 3), (3,)), ((4, 1), (4, 3)))


def any_case(rng, dtype, regime, extents, batches):
    m, k, n = rng.choice(extents, 3)
    batch_a, batch_b = pick(rng, batches)
    own = dtype if dtype == "float64" or rng.random() < 0.5 else pick(rng, DTYPES)
    d_c = draw(rng, (*np.broadcast_shapes(batch_a, batch_b), m, n), own, regime)
    return draw(rng, (*batch_a, m, k), dtype, regime), draw(rng, (*batch_b, k, n), dtype, regime), d_c


def case_vjp(rng, dtype, regime):
    arrays = any_case(rng, dtype, regime, [1, 7, 16, 40], BATCHES)
    return arrays, {"precision": "tf32"} if rng.random() < 0.25 else {}


def large_case_vjp(rng, dtype, regime):
    return any_case(rng, dtype, regime, [33, 48, 64], BATCHES[:4]), {}


def arrays(rng, dtype):
    return tuple(draw(rng, s, dtype) for s in ((3, 40, 8), (8, 70), (3, 40, 70)))


def past_2_31_vjp(gpu):
    rows, k = gpu.big // 512 + 16, 512
    picked = gpu.rows_to_sample(rows, k)
    a = gpu.torch.randn(rows, k, dtype=gpu.torch.bfloat16, device=gpu.device)
    b = gpu.normal(k, 24, dtype=gpu.torch.bfloat16)
    d_c = gpu.sampled(a[:, :24], picked)
    d_a, d_b = gpu.op("matmul_vjp")(a, b, d_c)
    assert d_a.numel() > gpu.big
    yield (d_a[picked], d_b), (a[picked], b, d_c[picked]), {}


def far_vjp(gpu):
    yield gpu.far((4, 300)), gpu.normal(300, 20, dtype=gpu.torch.bfloat16), gpu.far((4, 300))[:, :20]


GRADIENT = GradientRecord(
    op="matmul_vjp",
    simulate=simulate_vjp,
    variants=({}, {"block": 16}, {"after": True}, {"ftz": True}),
    case=case_vjp,
    regimes=CHECKED,
    near=Near(
        lambda rng: (positive(rng, 40, 64), positive(rng, 64, 50), positive(rng, 40, 50)),
        off={"d_a": 8e-6, "d_b": 7e-6},
    ),
    faults={
        "the first batch entry alone": Fault(arrays, {"only_first": True}, breaks="d_b"),
        "contraction without its tail": Fault(arrays, {"tail": False, "block": 32}, breaks="d_a"),
        "accumulated in bfloat16": Fault(arrays, {"low": BF16}, breaks="d_b"),
    },
    large_case=large_case_vjp,
    typical=lambda rng, dtype: (arrays(rng, dtype), {}),
    hiding={
        "d_a and d_b truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "products of tf32 for ieee": Hiding("typical", {"cut": True}, dtypes=("float32",)),
    },
    small={"broadcast": Sample({"a": (2, 3), "b": (2, 3, 2), "d_c": (2, 2, 2)})},
    usual=(
        Sample({"a": (96, 200), "b": (200, 72), "d_c": (96, 72)}),
        Sample(
            {"a": (3, 64, 64), "b": (64, 200), "d_c": (3, 64, 200)},
            tiling={"block_m": 64, "block_n": 128, "block_k": 128},
        ),
        Sample({"a": (2, 1, 40, 65), "b": (3, 65, 48), "d_c": (2, 3, 40, 48)}),
        Sample({"a": (40, 65), "b": (2, 3, 65, 48), "d_c": (2, 3, 40, 48)}),
    ),
    extents={"batch": 2, "m": 64, "k": 96, "n": 128},
    matrix_units=True,
    past_2_31=past_2_31_vjp,
    far=far_vjp,
)
