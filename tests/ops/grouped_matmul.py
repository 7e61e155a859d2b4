"""c = a b_g for the rows of a that belong to group g; d_a = d_c b_g^T, d_b_g = a_g^T d_c_g."""

from __future__ import annotations

import itertools
import math

import numpy as np

import portakern as pk
from tests.ops import matmul
from tests.ops._shared import (
    BF16,
    CHECKED,
    HALVES,
    SWEPT,
    accumulator,
    draw,
    normal64,
    pick,
    positive,
    sweep,
    whole,
    zeros,
)
from tests.ops.record import (
    DTYPES,
    EVERY,
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

INT = np.int32


# ----------------------------------------------------------------------------------------------------------- the groups
def spans(group_ends):
    """The rows of each group."""
    ends = [0, *(int(x) for x in group_ends)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def simulate(a, b, group_ends, precision="ieee", out_dtype=None, *, late=0, shared=False, tail_rows=True, **of_matmul):
    """matmul's simulated kernel on each group.

    ``late``: groups begin and end so many rows later; ``shared``: the last group has the matrix of the one before;
    ``tail_rows``: False: rows of no group are multiplied with the last matrix.
    """
    c = np.zeros((len(a), b.shape[-1]), accumulator(a, b))
    for g, rows in enumerate(spans(group_ends)):
        own = b[g - 1] if shared and g == len(b) - 1 else b[g]
        start, end = (min(x + late, len(a)) for x in (rows.start, rows.stop))
        if g == len(b) - 1 and not tail_rows:
            end = len(a)
        if start < end:
            (c[start:end],) = matmul.simulate(a[start:end], own, precision, **of_matmul)
    return (c,)


def cut(rng, rows, groups):
    """The ends of so many groups, of which some may be empty, and the last may leave rows."""
    return np.sort(rng.integers(0, rows + 1, groups)).astype(pick(rng, (np.int32, np.int64)))


def case(rng, dtype, regime):
    rows, k, n, groups = rng.integers(1, 48), rng.choice([1, 7, 64, 300, 1024]), rng.integers(1, 48), rng.integers(1, 5)
    ends = cut(rng, rows, groups)
    ends[-1] = max(ends[-1], 1)
    a, b = sweep(rng, (rows, k), dtype, regime), sweep(rng, (groups, k, n), dtype, regime)
    return (a, b, ends), pick(rng, ({}, {"out_dtype": "float32"}))


def large_case(rng, dtype, regime):
    rows, k, n = rng.choice([48, 64, 65, 96], 3)
    a, b = draw(rng, (rows, k), dtype, regime), draw(rng, (2, k, n), dtype, regime)
    return (a, b, np.array([rows // 3, rows], INT)), {} if rng.random() < 0.6 else {"out_dtype": "float32"}


def typical(rng, dtype):
    return (draw(rng, (64, 128), dtype), draw(rng, (2, 128, 64), dtype), np.array([30, 64], INT)), {}


def two(rng, dtype, k=70):
    """Two groups, and rows of none."""
    return sweep(rng, (24, k), dtype), sweep(rng, (2, k, 8), dtype), np.array([9, 20], INT)


def near_1(rng, dtype):
    a, b = matmul.near_1(rng, dtype)
    return a, np.stack([b, b]), np.array([3, 8], INT)


# -------------------------------------------------------------------------------------- the formula and the frameworks
def formula(a, b, group_ends):
    c = np.zeros((len(a), b.shape[-1]))
    for i, j in np.ndindex(c.shape):
        g = sum(i >= end for end in group_ends)
        if g < len(group_ends):
            c[i, j] = math.fsum(a[i, k] * b[g, k, j] for k in range(a.shape[1]))
    return (c,)


def in_torch(a, b, group_ends, out_dtype=None):
    import torch

    found = spans(group_ends.detach().cpu().tolist())
    c = torch.cat(
        [*(a[rows] @ b[g] for g, rows in enumerate(found)), a.new_zeros(len(a) - found[-1].stop, b.shape[-1])]
    )
    return c if out_dtype is None else c.to(getattr(torch, out_dtype))


def in_jax(a, b, group_ends, out_dtype=None):
    import jax.numpy as jnp

    group = (jnp.arange(a.shape[0])[:, None] >= group_ends).sum(1)
    c = sum(jnp.where((group == g)[:, None], a @ b[g], 0) for g in range(b.shape[0]))
    return c.astype(out_dtype or a.dtype)


def call(*arrays, **options):
    return pk.op("grouped_matmul")(*arrays, **options)


def fuzzed(r, dtype):
    rows, k, n, groups = r.extent(), r.extent(), r.extent(), r.extent()
    arrays = {"a": r.array(dtype, rows, k), "b": r.array(dtype, groups, k, n), "group_ends": cut(r.rng, rows, groups)}
    return arrays, {"precision": r.pick(("ieee", "tf32")), "out_dtype": r.pick((None, *DTYPES, "float64"))}


# ------------------------------------------------------------------------------------------------------------- on a GPU
def ends_among(picked, ends):
    """Where groups end among the rows that are picked."""
    return (picked[None, :] < ends[:, None]).sum(1).to(ends.dtype)


def past_2_31(gpu):
    torch = gpu.torch
    rows, k = gpu.big // 512 + 16, 512
    a = torch.randn(rows, k, dtype=torch.bfloat16, device=gpu.device)
    b, ends = gpu.normal(3, k, 24, dtype=torch.bfloat16), gpu.torch.tensor([rows // 3, rows // 3, rows - 5])
    assert a.numel() > gpu.big
    picked = gpu.rows_to_sample(rows, k)
    ends = ends.to(gpu.device)
    yield gpu.op("grouped_matmul")(a, b, ends)[picked], (a[picked], b, ends_among(picked, ends)), {}


def far(gpu):
    ends = gpu.torch.tensor([1, 4], dtype=gpu.torch.int32, device=gpu.device)
    yield gpu.far((4, 300)), gpu.normal(2, 300, 20, dtype=gpu.torch.bfloat16), ends


def in_layer(op, x, p):
    """The first half of all rows and the second have a matrix each."""
    rows = x.reshape(-1, x.shape[-1])
    ends = np.array([len(rows) // 2, len(rows)], INT)
    if type(x).__module__.startswith("torch"):
        import torch

        ends = torch.as_tensor(ends, device=x.device)
    else:
        import jax
        import jax.numpy as jnp

        with jax.ensure_compile_time_eval():  # a constant of the program that is traced, known while it is
            ends = jnp.asarray(ends)
    return op(rows, p["w"], ends).reshape(x.shape)


# ---------------------------------------------------------------------------------------------------------------- wrong
X, M, ENDS = zeros(4, 3), zeros(2, 3, 5), np.array([1, 4], INT)
MUST_RISE = r"group_ends are the rows before which groups end: numbers from 0 to rows, none smaller than the one before"
WRONG = {
    "one matrix": (lambda: call(X, M[0], ENDS), r"b has 2 axes, shape \(3, 5\); expected 3: \(groups, k, n\)"),
    "a batch of rows": (lambda: call(zeros(2, 4, 3), M, ENDS), r"a has 3 axes, shape \(2, 4, 3\); expected 2"),
    "ends of fewer groups": (
        lambda: call(X, M, ENDS[:1]),
        r"group_ends axis 0 \(groups\) is 1; expected 2, as set by b axis 0",
    ),
    "ends as floats": (lambda: call(X, M, X[0, :2]), r"group_ends is float32; expected one of int32, int64: cast it"),
    "inner": (lambda: call(zeros(4, 2), M, ENDS), r"b axis 1 \(k\) is 3; expected 2, as set by a axis 1"),
    "ends that fall": (lambda: call(X, M, ENDS[::-1].copy()), MUST_RISE),
    "ends beyond the rows": (lambda: call(X, M, ENDS + INT(1)), MUST_RISE),
    "ends below 0": (lambda: call(X, M, ENDS - INT(2)), MUST_RISE),
    "dtypes that differ": (
        lambda: call(X, M.astype(np.float16), ENDS),
        r"b is float16 but a is float32; expected float32: cast one of them",
    ),
}
TILES = {"block_m": 64, "block_n": 128, "block_k": 128}


def shapes(rows, groups, k, n):
    return {"a": (rows, k), "b": (groups, k, n), "group_ends": (groups,)}


RECORD = ForwardRecord(
    op="grouped_matmul",
    simulate=simulate,
    variants=({}, {"block": 16}, {"ftz": True}),
    case=case,
    regimes=SWEPT,
    near=Near(
        lambda rng: (positive(rng, 40, 64), positive(rng, 2, 64, 40), np.array([11, 40], INT)),
        off={"c": 1e-5},
    ),
    faults={
        "without its tail": Fault(two, {"tail": False}),
        "a group that begins and ends a row late": Fault(two, {"late": 1}),
        "the matrix of the group before": Fault(two, {"shared": True}),
        "rows of no group multiplied": Fault(two, {"tail_rows": False}),
        "accumulating in 16 bits": Fault(lambda r, t: two(r, t, 512), {"low": BF16}),
        "tf32 in place of ieee": Fault(
            lambda r, t: (whole(r, (8, 16), t, 2**14), whole(r, (2, 16, 8), t, 2), np.array([3, 8], INT)),
            {"precision": "tf32"},
            dtypes=("float32",),
        ),
    },
    corners={
        "tf32 has its own terms": Corner(near_1, {"precision": "tf32"}, {}, least=0.9, dtypes=("float32",)),
    },
    large_case=large_case,
    typical=typical,
    twin=Twin("grouped_mm", sampled=None),  # offs is passed by name
    hiding={
        "c truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "tf32 for ieee": Hiding("typical", {"precision": "tf32"}, dtypes=("float32",)),
        "c accumulated in bfloat16": Hiding("typical", {"low": BF16}),
    },
    small={
        "plain": Sample(shapes(4, 2, 3, 2)),
        "another out_dtype": Sample(shapes(4, 3, 3, 2), {"out_dtype": "float32"}),
    },
    derived={"three groups": Sample(shapes(9, 3, 4, 5))},
    usual=(
        Sample(shapes(96, 4, 200, 72)),
        Sample(shapes(80, 3, 64, 200), tiling=TILES),
        Sample(shapes(40, 9, 65, 48)),
        Sample(shapes(64, 2, 128, 64), {"out_dtype": "float32"}),
    ),
    formula=formula,
    formula_calls={
        "three groups": lambda: ((normal64(7, 5), normal64(3, 5, 2), np.array([2, 2, 6], INT)), {}),
        "no row has a group": lambda: ((normal64(3, 2), normal64(2, 2, 2), np.array([0, 0], INT)), {}),
    },
    formula_tolerance=(1e-13, 1e-15),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample(shapes(9, 3, 7, 4)),
    lowered={
        "groups": Sample(shapes(130, 3, 200, 70)),
        "tf32": Sample(shapes(130, 2, 200, 70), {"precision": "tf32"}),
    },
    mapped={
        "rows": Mapped(Sample(shapes(4, 2, 3, 5) | {"a": (2, 4, 3)}), {"a": 0}, folds=False),
        "every array": Mapped(
            Sample({"a": (2, 4, 3), "b": (2, 2, 3, 5), "group_ends": (2, 2)}),
            {"a": 0, "b": 0, "group_ends": 0},
            folds=False,
        ),
        "matrices": Mapped(Sample(shapes(4, 2, 3, 5) | {"b": (2, 3, 5, 3)}), {"b": 3}, folds=False),
    },
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(in_layer, lambda width: {"w": (2, width, width)}),
    extents={"rows": 64, "groups": 3, "k": 96, "n": 128},
    launched=Sample(shapes(64, 2, 64, 64)),
    matrix_units=True,
    past_2_31=past_2_31,
    far=far,
)


# ------------------------------------------------------------------------------------------------------------- gradient
def simulate_vjp(a, b, group_ends, d_c, precision="ieee", *, cut_to_10=False, late=0, stale=False, **of_matmul):
    """``late``: sums over rows begin so many later. ``cut_to_10``: tf32 whatever was asked. ``stale``: what was in the
    memory of an empty group's gradient, ones, stays there."""
    acc = accumulator(a, b, d_c)
    narrow = max({a.dtype.itemsize, d_c.dtype.itemsize}) < 4 and a.dtype == d_c.dtype
    precision = "tf32" if cut_to_10 else "ieee" if narrow or acc is np.float64 else precision
    d_a, d_b = np.zeros(a.shape, acc), (np.ones if stale else np.zeros)(b.shape, acc)

    def product(x, y):
        if acc is np.float64:
            return x.astype(acc) @ y.astype(acc)
        return matmul.simulate(x, y, precision, **of_matmul)[0]

    for g, rows in enumerate(spans(group_ends)):
        summed = slice(min(rows.start + late, rows.stop), rows.stop)
        if rows.start < rows.stop:
            d_a[rows], d_b[g] = product(d_c[rows], b[g].T), product(a[summed].T, d_c[summed])
    return d_a, d_b


def case_vjp(rng, dtype, regime):
    rows, k, n, groups = *rng.choice([1, 7, 16, 40], 3), rng.integers(1, 4)
    own = dtype if dtype == "float64" or rng.random() < 0.5 else pick(rng, DTYPES)
    a, b = draw(rng, (rows, k), dtype, regime), draw(rng, (groups, k, n), dtype, regime)
    options = {"precision": "tf32"} if rng.random() < 0.25 else {}
    return (a, b, cut(rng, rows, groups), draw(rng, (rows, n), own, regime)), options


def large_case_vjp(rng, dtype, regime):
    rows, k, n = rng.choice([33, 48, 64], 3)
    a, b = draw(rng, (rows, k), dtype, regime), draw(rng, (2, k, n), dtype, regime)
    return (a, b, np.array([rows // 2, rows], INT), draw(rng, (rows, n), dtype, regime)), {}


def arrays(rng, dtype):
    a, b, d_c = (draw(rng, s, dtype) for s in ((96, 40), (2, 40, 70), (96, 70)))
    return a, b, np.array([45, 96], INT), d_c


def with_an_empty_group(rng, dtype):
    a, b, _, d_c = arrays(rng, dtype)
    return a, b, np.array([96, 96], INT), d_c


def past_2_31_vjp(gpu):
    torch, (rows, k) = gpu.torch, (gpu.big // 512 + 16, 512)
    picked = gpu.rows_to_sample(rows, k)
    a = torch.randn(rows, k, dtype=torch.bfloat16, device=gpu.device)
    b = gpu.normal(3, k, 24, dtype=torch.bfloat16)
    ends = torch.tensor([rows // 3, rows // 3, rows], device=gpu.device)
    d_c = gpu.sampled(a[:, :24], picked)
    d_a, d_b = gpu.op("grouped_matmul_vjp")(a, b, ends, d_c)
    assert d_a.numel() > gpu.big
    yield (d_a[picked], d_b), (a[picked], b, ends_among(picked, ends), d_c[picked]), {}


def far_vjp(gpu):
    a, b, ends = next(far(gpu))
    yield a, b, ends, gpu.far((4, 300))[:, :20]


def with_cotangent(rows, groups, k, n):
    return shapes(rows, groups, k, n) | {"d_c": (rows, n)}


GRADIENT = GradientRecord(
    op="grouped_matmul_vjp",
    simulate=simulate_vjp,
    variants=({}, {"block": 16}, {"ftz": True}),
    case=case_vjp,
    regimes=CHECKED,
    near=Near(
        lambda rng: (positive(rng, 40, 64), positive(rng, 2, 64, 50), np.array([18, 40], INT), positive(rng, 40, 50)),
        off={"d_a": 5e-6, "d_b": 4e-6},
    ),
    faults={
        "a group without its first row": Fault(arrays, {"late": 1}, breaks="d_b"),
        "an empty group's gradient left as it was": Fault(with_an_empty_group, {"stale": True}, breaks="d_b"),
        "contraction without its tail": Fault(arrays, {"tail": False, "block": 32}, breaks=EVERY),
        "accumulated in bfloat16": Fault(arrays, {"low": BF16}, breaks="d_b"),
    },
    large_case=large_case_vjp,
    typical=lambda rng, dtype: (arrays(rng, dtype), {}),
    hiding={
        "d_a and d_b truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "products of tf32 for ieee": Hiding("typical", {"cut_to_10": True}, dtypes=("float32",)),
    },
    small={"three groups": Sample(with_cotangent(5, 3, 3, 2))},
    usual=(
        Sample(with_cotangent(96, 4, 200, 72)),
        Sample(with_cotangent(80, 3, 64, 200), tiling=TILES),
        Sample(with_cotangent(40, 9, 65, 48)),
    ),
    extents=RECORD.extents,
    matrix_units=True,
    past_2_31=past_2_31_vjp,
    far=far_vjp,
)
