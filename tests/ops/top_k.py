"""values[t] = x[indices[t]], the k greatest or least of a row in order; d_x[indices[t]] = d_values[t]."""

from __future__ import annotations

from functools import partial

import numpy as np

import portakern as pk
from tests.ops._shared import CHECKED, SWEPT, accumulator, draw, normal64, pick, sweep, zeros
from tests.ops.record import Fault, ForwardRecord, GradientRecord, Layer, Mapped, Sample

I32 = np.int32


# ------------------------------------------------------------------------------------------------- the simulated kernel
def simulate(x, k=1, largest=True, *, block=None, last=False, nan_least=False, of_sizes=False, unsorted=False,
             tail=True, late=0):  # fmt: skip
    """One block of a row after the other: its numbers join the k best so far, of which again k are kept.

    ``last``: of equal numbers the last come first; ``nan_least``: NaN is the least number; ``of_sizes``: numbers are
    compared without their signs; ``unsorted``: the k numbers are in the order of their places; ``tail``: without it the
    last number of a row is not looked at; ``late``: by how much places are too large.
    """
    n = x.shape[-1]
    wide = x.astype(accumulator(x)).reshape(-1, n)
    nan, size = np.isnan(wide), np.where(np.isnan(wide), 0, np.abs(wide) if of_sizes else wide)
    best = np.zeros((len(wide), 0), np.int64)
    for first in range(0, n, block or n):
        more = np.arange(first, min(first + (block or n), n if tail else max(n - 1, k)))
        best = np.concatenate((best, np.broadcast_to(more, (len(wide), len(more)))), 1)
        s, lost = np.take_along_axis(size, best, 1), np.take_along_axis(nan, best, 1)
        keys = -best if last else best, -s if largest else s, lost != (largest != nan_least)
        best = np.take_along_axis(best, np.lexsort(keys, 1), 1)[:, :k]
    best = np.sort(best, 1) if unsorted else best
    shape = (*x.shape[:-1], k)
    return np.take_along_axis(wide, best, 1).reshape(shape), (best + late).reshape(shape)


# ------------------------------------------------------------------------------------------------------- calls on NumPy
def case(rng, dtype, regime):
    x = sweep(rng, (int(rng.integers(1, 12)), pick(rng, [1, 5, 64, 130, 300])), dtype, regime)
    return (x,), {"k": int(rng.integers(1, min(x.shape[1], 40) + 1)), "largest": bool(rng.integers(2))}


def large_case(rng, dtype, regime):
    return (draw(rng, (300, 64), dtype, regime),), {"k": 4}


def some(rng, dtype):
    """The numbers -8 to 8, each several times in a row, and NaN."""
    x = rng.permuted(np.resize(np.arange(-8, 9), (6, 64)), axis=1).astype(np.float32)
    x[:, 40] = np.nan
    return (x.astype(draw(rng, 1, dtype).dtype),)


def rising(rng, dtype):
    """Each number is greater than those before it."""
    return (np.broadcast_to(np.arange(20, dtype=np.float32), (3, 20)).astype(draw(rng, 1, dtype).dtype),)


# ------------------------------------------------------------------------------------------------ written another way
def formula(x, k=1, largest=True):
    """One number of the result after the other: the first of those that nothing left is better than."""

    def better(a, b):
        if np.isnan(a) or np.isnan(b):
            return np.isnan(a) and not np.isnan(b) if largest else np.isnan(b) and not np.isnan(a)
        return a > b if largest else a < b

    values, indices = np.zeros((*x.shape[:-1], k)), np.zeros((*x.shape[:-1], k), np.int64)
    for row in np.ndindex(*x.shape[:-1]):
        left = list(range(x.shape[-1]))
        for t in range(k):
            place = next(i for i in left if not any(better(x[row][j], x[row][i]) for j in left))
            left.remove(place)
            values[row][t], indices[row][t] = x[row][place], place
    return values, indices


def formula_call(shape, **options):
    x = np.round(normal64(*shape) * 2)  # with ties
    x[..., ::7] = np.nan
    return (x,), options


def in_torch(x, k=1, largest=True):
    import torch

    values, indices = torch.sort(x, dim=-1, descending=largest, stable=True)
    return values[..., :k], indices[..., :k].int()


def in_jax(x, k=1, largest=True):
    import jax.numpy as jnp

    indices = jnp.argsort(-x if largest else x, axis=-1, stable=True)[..., :k]
    return jnp.take_along_axis(x, indices, -1), indices


def fuzzed(r, dtype):
    n = max(r.extent(), 1)
    options = {"k": int(r.rng.integers(1, n + 1)), "largest": r.chance(0.5)}
    return {"x": r.array(dtype, *(r.extent() for _ in range(r.pick((0, 1, 2)))), n)}, options


def in_layer(op, x, p):
    """Distances from the second greatest number."""
    return x - op(x, k=2)[0][..., 1:]


# ------------------------------------------------------------------------------------------------------------- on a GPU
def past_2_31(gpu):
    rows, n = gpu.big // 256 + 16, 256
    x = gpu.torch.randn(rows, n, dtype=gpu.torch.bfloat16, device=gpu.device)
    assert x.numel() > gpu.big
    picked = gpu.rows_to_sample(rows, n)
    values, indices = gpu.op("top_k")(x, k=4)
    yield (values[picked], indices[picked]), (x[picked],), {"k": 4}


def far(gpu):
    yield (gpu.far((4, 300)),)


# ------------------------------------------------------------------------------------------------ what users get wrong
def call(*arrays, **options):
    return pk.op("top_k", backend="reference")(*arrays, **options)


X = zeros(2, 3)
WRONG = {
    "more than there are": (lambda: call(X, k=4), r"top_k: k must be no more than the numbers of a row"),
    "none": (lambda: call(X, k=0), r"top_k: k is 0; expected an integer"),
    "half a number": (lambda: call(X, k=1.5), r"top_k: k is 1.5; expected an integer"),
    "an axis": (lambda: call(X, axis=0), r"top_k.*axis"),
    "of nothing": (lambda: call(zeros(2, 0)), r"top_k: .*n.* is 0"),
    "of integers": (lambda: call(X.astype(I32)), r"top_k: x is int32; expected one of float32"),
    "a word for largest": (lambda: call(X, largest="no"), r"top_k: largest is 'no'; expected"),
}

FIVE, LEAST = {"k": 5}, {"k": 3, "largest": False}

RECORD = ForwardRecord(
    op="top_k",
    simulate=simulate,
    variants=({}, {"block": 16}, {"block": 128}),
    case=case,
    regimes=SWEPT,
    near=None,
    faults={
        "the last of equal numbers": Fault(some, {"last": True}, FIVE, breaks="indices"),
        "the last of equal numbers in blocks": Fault(some, {"last": True, "block": 16}, LEAST, breaks="indices"),
        "NaN as the least number": Fault(some, {"nan_least": True}, FIVE, breaks="values"),
        "NaN as the least number, of the least": Fault(some, {"nan_least": True}, {"k": 64, "largest": False},
                                                       breaks="values"),
        "without signs": Fault(some, {"of_sizes": True}, FIVE, breaks="values"),
        "in the order of places": Fault(some, {"unsorted": True}, FIVE, breaks="values"),
        "without the last number": Fault(rising, {"tail": False}, FIVE, breaks="values"),
        "places counted from 1": Fault(some, {"late": 1}, FIVE, breaks="indices"),
        "the least for the greatest": Fault(some, {"largest": False}, FIVE, breaks="values"),
    },
    large_case=large_case,
    typical=lambda rng, dtype: large_case(rng, dtype, "normal"),
    hiding={},
    small={
        "plain": Sample({"x": (2, 5)}, {"k": 3}),
        "least": Sample({"x": (2, 2, 4)}, {"k": 2, "largest": False}),
        "one row": Sample({"x": (6,)}),
    },
    usual=(
        Sample({"x": (64, 256)}, {"k": 8}),
        Sample({"x": (8, 600)}, {"k": 20}, tiling={"block_rows": 2}),
        Sample({"x": (3, 5, 100)}, LEAST),
    ),
    formula=formula,
    formula_calls={
        f"{shape}, {options}": partial(formula_call, shape, **options)
        for shape, options in (
            ((3, 9), {"k": 4}), ((2, 3, 12), {"k": 12}), ((20,), {"k": 7, "largest": False}), ((4, 8), {}),
            ((3, 9), {"k": 9, "largest": False}),
        )
    },
    formula_tolerance=(0.0, 0.0),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample({"x": (6, 40)}, FIVE),
    lowered={
        "experts": Sample({"x": (40, 256)}, {"k": 8}),
        "long rows": Sample({"x": (5, 3000)}, {"k": 130, "largest": False}),
        "short rows": Sample({"x": (7, 3, 5)}, {"k": 5}),
        "one row": Sample({"x": (70,)}),
    },
    mapped={
        "rows": Mapped(Sample({"x": (5, 3, 12)}, FIVE), {"x": 1}),
        "numbers apart": Mapped(Sample({"x": (4, 12, 2)}, LEAST), {"x": 2}),
    },
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(in_layer),
    extents={"batch": 64, "n": 64, "k": 4},
    launched=Sample({"x": (64, 256)}, {"k": 8}),
    past_2_31=past_2_31,
    far=far,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ gradient
def simulate_vjp(x, indices, d_values, k=1, *, backwards=False, late=0, forgotten=0, flat=False, others=0.0):
    """``late``: cotangents go as many places further; ``forgotten``: of the last cotangents so many go nowhere;
    ``flat``: each row's go to the first; ``others``: what numbers that were not chosen have."""
    acc, n = accumulator(d_values), x.shape[-1]
    d_x = np.full((x.size // n, n), others, acc)
    rows, g = indices.reshape(-1, k), d_values.astype(acc).reshape(-1, k)
    for t in reversed(range(k - forgotten)) if backwards else range(k - forgotten):
        d_x[np.arange(len(rows)) * (not flat), (rows[:, t] + late) % n] = g[:, t]
    return (d_x.reshape(x.shape),)


def chosen(rng, x, k):
    indices = np.argsort(rng.random(x.shape), -1)[..., :k].astype(I32)
    return x, indices, np.asarray(draw(rng, indices.shape, x.dtype.name))


def case_vjp(rng, dtype, regime):
    x = draw(rng, (int(rng.integers(1, 12)), pick(rng, [1, 5, 64, 300])), dtype, regime)
    k = int(rng.integers(1, min(x.shape[1], 40) + 1))
    return chosen(rng, x, k), {"k": k}


def special_vjp(rng, dtype, seed):
    (x, indices, g), options = case_vjp(rng, dtype, pick(rng, CHECKED))
    g[rng.random(g.shape) < 0.3] = pick(rng, [np.nan, np.inf, -np.inf])
    return (x, indices, g), options


def large_case_vjp(rng, dtype, regime):
    return chosen(rng, draw(rng, (200, 20), dtype, regime), 10), {"k": 10}


def some_vjp(rng, dtype):
    return chosen(rng, draw(rng, (6, 20), dtype), 5)


def past_2_31_vjp(gpu):
    rows, n, k = gpu.big // 256 + 16, 256, 4
    x = gpu.torch.zeros(1, 1, dtype=gpu.torch.bfloat16, device=gpu.device).expand(rows, n)
    indices = gpu.torch.arange(k, device=gpu.device, dtype=gpu.torch.int32).flip(0).expand(rows, k)
    picked, d_values = gpu.rows_to_sample(rows, n), gpu.normal(rows, k, dtype=gpu.torch.bfloat16)
    d_x = gpu.op("top_k_vjp")(x, indices, d_values, k=k).d_x
    assert d_x.numel() > gpu.big
    yield d_x[picked], (x[picked], indices[picked], d_values[picked]), {"k": k}


def far_vjp(gpu):
    x, indices = gpu.normal(4, 300, dtype=gpu.torch.bfloat16), gpu.torch.zeros(4, 1, dtype=gpu.torch.int32)
    yield x, indices.to(gpu.device), gpu.far((4, 1))


def with_choice(shape, k):
    return {"x": shape, "indices": (*shape[:-1], k), "d_values": (*shape[:-1], k)}


GRADIENT = GradientRecord(
    op="top_k_vjp",
    simulate=simulate_vjp,
    variants=({}, {"backwards": True}),
    case=case_vjp,
    regimes=CHECKED,
    special=special_vjp,
    near=None,
    faults={
        "a place further": Fault(some_vjp, {"late": 1}, FIVE, breaks="d_x"),
        "without the last cotangent": Fault(some_vjp, {"forgotten": 1}, FIVE, breaks="d_x"),
        "all in the first row": Fault(some_vjp, {"flat": True}, FIVE, breaks="d_x"),
        "what was there before": Fault(some_vjp, {"others": 1.0}, FIVE, breaks="d_x"),
    },
    large_case=large_case_vjp,
    typical=lambda rng, dtype: large_case_vjp(rng, dtype, "normal"),
    hiding={},
    small={"plain": Sample(with_choice((2, 5), 3), {"k": 3}), "one": Sample(with_choice((4,), 1))},
    usual=(
        Sample(with_choice((64, 256), 8), {"k": 8}),
        Sample(with_choice((8, 600), 20), {"k": 20}, tiling={"block_rows": 2}),
    ),
    extents={"batch": 64, "n": 64, "k": 1},
    past_2_31=past_2_31_vjp,
    far=far_vjp,
)  # fmt: skip
