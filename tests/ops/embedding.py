"""y[t] = weight[ids[t]]; d_weight[r] = sum of d_y[t] over the tokens t with ids[t] = r."""

from __future__ import annotations

import math

import numpy as np

import portakern as pk
from tests.ops._shared import (
    BF16,
    CHECKED,
    HALVES,
    SWEPT,
    accumulator,
    draw,
    flush,
    normal64,
    pick,
    positive,
    sweep,
    through,
    with_specials,
    zeros,
)
from tests.ops.kv_append import integers_on
from tests.ops.record import Fault, ForwardRecord, GradientRecord, Hiding, Layer, Mapped, Near, Sample, Twin

I32 = np.int32


# ------------------------------------------------------------------------------------------------- the simulated kernel
def simulate(weight, ids, padding_index=None, *, late=0, from_the_end=False, clipped=False, width=None, zeroed=False):
    """``late``: so many rows further; ``from_the_end``: negative ids count from the end; ``clipped``: an id that is no
    row is the nearest that is one; ``width``: only so many numbers of a row are copied; ``zeroed``: the padding row is
    zeros."""
    rows = len(weight)
    at = np.where(ids < 0, ids + rows, ids) if from_the_end else np.clip(ids, 0, rows - 1) if clipped else ids
    there = (at >= 0) & (at < rows)
    y = weight.astype(accumulator(weight))[(np.where(there, at, 0) + late) % rows]
    y[~there] = np.nan
    if width is not None:
        y[..., width:] = 0
    if zeroed:
        y[ids == padding_index] = 0
    return (y,)


# ------------------------------------------------------------------------------------------------------- calls on NumPy
def table(rng, dtype, regime="normal", rows=12, d=20, tokens=30, make=sweep):
    return make(rng, (rows, d), dtype, regime), rng.integers(0, rows, tokens).astype(pick(rng, (np.int32, np.int64)))


def case(rng, dtype, regime):
    rows, d, tokens = (int(rng.integers(1, 40)) for _ in range(3))
    weight, ids = table(rng, dtype, regime, rows, d, tokens)
    return (weight, with_strangers(rng, ids, rows)), pick(rng, ({}, {"padding_index": rows - 1}))


def with_strangers(rng, ids, rows):
    """Ids of which some, in every second call, are no row."""
    strange = rng.choice([-1, -rows, rows, rows + 5], ids.shape)
    return np.where(rng.random(ids.shape) < 0.2 * rng.integers(2), strange, ids).astype(ids.dtype)


def special(rng, dtype, seed):
    """NaN and infinities in the table."""
    arrays, options = case(rng, dtype, pick(rng, SWEPT))
    return (*with_specials(rng, arrays[:1]), arrays[1]), options


def large_case(rng, dtype, regime):
    return table(rng, dtype, regime, 40, 32, 64, make=draw), {}


def some(rng, dtype):
    """Ids of which two are no row, and one is the last."""
    weight, ids = table(rng, dtype)
    ids[:4] = -1, 11, 12, 3
    return weight, ids


# ------------------------------------------------------------------------------------------------ written another way
def formula(weight, ids, padding_index=None):
    y = np.full((*ids.shape, weight.shape[1]), math.nan)
    for t in np.ndindex(ids.shape):
        for r in range(len(weight)):
            if int(ids[t]) == r:
                y[t] = weight[r]
    return (y,)


def in_torch(weight, ids, *, padding_index=None):
    import torch

    there = (ids >= 0) & (ids < len(weight))
    y = torch.nn.functional.embedding(torch.where(there, ids, 0).long(), weight, padding_idx=padding_index)
    return torch.where(there[..., None], y, math.nan).to(weight.dtype)


def in_jax(weight, ids, *, padding_index=None):
    import jax
    import jax.numpy as jnp

    there = (ids >= 0) & (ids < len(weight))
    at = jnp.where(there, ids, 0)
    y = weight[at]
    if padding_index is not None:
        y = jnp.where((at == padding_index)[..., None], jax.lax.stop_gradient(y), y)
    return jnp.where(there[..., None], y, math.nan)


def fuzzed(r, dtype):
    rows, d, tokens = max(r.extent(), 1), r.extent(), r.extent()
    ids = with_strangers(r.rng, r.rng.integers(0, rows, tokens), rows).astype(r.pick(("int32", "int64")))
    return {"weight": r.array(dtype, rows, d), "ids": ids}, {"padding_index": r.pick((None, 0, rows - 1))}


# ------------------------------------------------------------------------------------------------------------- on a GPU
def past_2_31(gpu):
    """The first rows of a table, those about element 2^31, and the last."""
    torch, d = gpu.torch, 512
    rows = gpu.big // d + 16
    weight = torch.randn(rows, d, dtype=torch.bfloat16, device=gpu.device)
    assert weight.numel() > gpu.big
    picked = gpu.rows_to_sample(rows, d)
    ids = torch.arange(len(picked), device=gpu.device)
    yield (gpu.op("embedding")(weight, picked.to(gpu.device)),), (weight[picked], ids), {}


def far(gpu):
    ids = gpu.torch.tensor([3, 0, -1, 2, 3], dtype=gpu.torch.int32, device=gpu.device)
    yield gpu.far((4, 300)), ids


def in_layer(op, x, p):
    """A row of a table for each sample, added to its hidden state."""
    return x + op(p["table"], integers_on(x, np.arange(x.shape[0]) % 2))[:, None, :]


# ------------------------------------------------------------------------------------------------ what users get wrong
def call(*arrays, **options):
    return pk.op("embedding", backend="reference")(*arrays, **options)


W, IDS = zeros(5, 3), np.array([0, 4], I32)
WRONG = {
    "ids first, as in PyTorch": (lambda: call(IDS, W), r"weight is int32; expected one of float32, float16"),
    "ids of floats": (lambda: call(W, zeros(2)), r"ids is float32; expected one of int32, int64: cast it"),
    "ids of bytes": (lambda: call(W, IDS.astype(np.uint8)), r"ids is uint8; expected one of int32, int64: cast it"),
    "a table without rows": (lambda: call(zeros(0, 3), IDS), r"embedding: rows is 0"),
    "padding behind the last row": (
        lambda: call(W, IDS, padding_index=5),
        r"padding_index must be a row of weight, from 0 to rows - 1",
    ),
    "padding that counts from the end": (
        lambda: call(W, IDS, padding_index=-1),
        r"padding_index is -1; expected an integer in \[0, ",
    ),
}


def shapes(rows, tokens, d):
    return {"weight": (rows, d), "ids": tokens}


RECORD = ForwardRecord(
    op="embedding",
    simulate=simulate,
    variants=({},),
    case=case,
    regimes=SWEPT,
    special=special,
    near=None,
    faults={
        "of the row behind": Fault(some, {"late": 1}, breaks="y"),
        "that counts negative ids from the end": Fault(some, {"from_the_end": True}, breaks="y"),
        "that clips ids": Fault(some, {"clipped": True}, breaks="y"),
        "of the first numbers alone": Fault(some, {"width": 16}, breaks="y"),
        "whose padding is zeros": Fault(some, {"zeroed": True}, {"padding_index": 3}, breaks="y"),
    },
    large_case=large_case,
    typical=lambda rng, dtype: (table(rng, dtype), {}),
    hiding={},
    small={
        "tokens": Sample(shapes(4, (5,), 3)),
        "two axes": Sample(shapes(3, (2, 3), 2)),  # a gradient beside padding is no derivative
    },
    derived={"one token": Sample(shapes(3, (), 4))},
    usual=(
        Sample(shapes(50, (40,), 72)),
        Sample(shapes(300, (3, 20), 200)),
        Sample(shapes(9, (130,), 16), {"padding_index": 2}),
    ),
    formula=formula,
    formula_calls={
        "rows, and ids that are none": lambda: ((normal64(4, 3), np.array([[3, 0, -1], [4, 1, 1]])), {}),
        "with padding": lambda: ((normal64(4, 3), np.array([2, 3, 2])), {"padding_index": 2}),
    },
    formula_tolerance=(0.0, 0.0),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample(shapes(20, (4, 9), 33), {"padding_index": 3}),
    lowered={
        "tokens": Sample(shapes(130, (70,), 300)),
        "several axes": Sample(shapes(1000, (2, 3, 5), 128), {"padding_index": 7}),
        "one token": Sample(shapes(17, (), 64)),
    },
    mapped={
        "ids": Mapped(Sample(shapes(4, (3, 5), 3)), {"ids": 0}, folds=False),
        "tables and ids": Mapped(Sample({"weight": (3, 4, 5), "ids": (3, 6)}), {"weight": 0, "ids": 0}, folds=False),
    },
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(in_layer, lambda width: {"table": (2, width)}),
    extents={"rows": 40, "batch": 24, "d": 128},
    launched=Sample(shapes(128, (64,), 512)),
    past_2_31=past_2_31,
    far=far,
    twin=Twin(
        "embedding",
        sampled=None,  # whose samples have the table first
    ),
)


# ------------------------------------------------------------------------------------------------------------- gradient
def simulate_vjp(weight, ids, d_y, padding_index=None, *, chunk=32, ftz=False, low=None, late=0, last=False,
                 overwrites=False, padded=False, from_the_end=False, stale=False):  # fmt: skip
    """Chunks of a row's tokens, and their sums, one after the other. ``low``: sums are kept in a narrower dtype;
    ``late``: gradients lie so many rows further; ``last``: a row's last token is left out, where it has several;
    ``overwrites``: the last token takes all; ``padded``: padding has a gradient; ``from_the_end``: negative ids count
    from the end; ``stale``: rows without tokens hold what was there, ones."""
    rows, acc = len(weight), accumulator(weight)
    d_y, ids = flush(d_y.astype(acc), ftz).reshape(-1, d_y.shape[-1]), ids.reshape(-1)
    ids = np.where(ids < 0, ids + rows, ids) if from_the_end else ids
    d_weight = np.full(weight.shape, 1 if stale else 0, acc)

    def summed(terms):
        total = np.zeros(weight.shape[1], acc)
        for x in terms:
            total = flush(through(total + x, low), ftz)
        return total

    for r in range(rows):
        own = np.flatnonzero(ids == r)
        if len(own) and (padded or r != padding_index):
            own = own[:-1] if last and len(own) > 1 else own[-1:] if overwrites else own
            parts = [summed(d_y[own[i : i + chunk]]) for i in range(0, len(own), chunk)]
            d_weight[(r + late) % rows] = summed(parts)
        elif stale and r == padding_index:
            d_weight[r] = 0
    return (d_weight,)


def case_vjp(rng, dtype, regime):
    rows, d, tokens = int(rng.integers(1, 20)), int(rng.integers(1, 40)), int(rng.integers(1, 140))
    weight, ids = table(rng, dtype, "normal", rows, d, tokens)
    options = pick(rng, ({}, {"padding_index": rows - 1}))
    return (weight, with_strangers(rng, ids, rows), draw(rng, (tokens, d), dtype, regime)), options


def large_case_vjp(rng, dtype, regime):
    weight, ids = table(rng, dtype, "normal", 24, 40, 600)
    return (weight, ids, draw(rng, (600, 40), dtype, regime)), {}


def arrays(rng, dtype, tokens=400):
    """Rows of many tokens; row 3 has some, the last row none."""
    weight, ids = table(rng, dtype, "normal", 9, 40, tokens)
    ids = np.where(ids == 8, 3, ids)
    ids[:2] = 3, -1
    return weight, ids, draw(rng, (tokens, 40), dtype)


def near(rng):
    """One row, of positive cotangents."""
    return positive(rng, 2, 50), np.zeros(64, I32), positive(rng, 64, 50)


def past_2_31_vjp(gpu):
    torch, d = gpu.torch, 512
    rows = gpu.big // d + 16
    weight = torch.empty(1, d, dtype=torch.bfloat16, device=gpu.device).expand(rows, d)
    picked = gpu.rows_to_sample(rows, d).to(gpu.device)
    number = len(picked)
    at = torch.randint(0, number, (500,), device=gpu.device)
    d_y = gpu.normal(500, d, dtype=torch.bfloat16)
    d_weight = gpu.op("embedding_vjp")(weight, picked[at], d_y)
    d_weight = d_weight[0] if isinstance(d_weight, tuple) else d_weight
    assert d_weight.numel() > gpu.big
    yield (d_weight[picked],), (weight[:number], at, d_y), {}


def far_vjp(gpu):
    ids = gpu.torch.tensor([3, 0, -1, 3], device=gpu.device)
    yield gpu.normal(4, 300, dtype=gpu.torch.bfloat16), ids, gpu.far((4, 300))


def with_cotangent(rows, tokens, d):
    return shapes(rows, tokens, d) | {"d_y": (*tokens, d)}


GRADIENT = GradientRecord(
    op="embedding_vjp",
    simulate=simulate_vjp,
    variants=({}, {"chunk": 10**6}, {"chunk": 8}, {"ftz": True}),
    case=case_vjp,
    regimes=CHECKED,
    near=Near(near, off={"d_weight": 8e-6}),
    faults={
        "in the row behind": Fault(arrays, {"late": 1}, breaks="d_weight"),
        "without a row's last token": Fault(arrays, {"last": True}, breaks="d_weight"),
        "of a row's last token alone": Fault(arrays, {"overwrites": True}, breaks="d_weight"),
        "with a gradient of padding": Fault(arrays, {"padded": True}, {"padding_index": 3}, breaks="d_weight"),
        "that counts negative ids from the end": Fault(arrays, {"from_the_end": True}, breaks="d_weight"),
        "that leaves rows without tokens as they were": Fault(arrays, {"stale": True}, breaks="d_weight"),
        "accumulated in bfloat16": Fault(arrays, {"low": BF16}, breaks="d_weight"),
    },
    large_case=large_case_vjp,
    typical=lambda rng, dtype: (arrays(rng, dtype), {}),
    hiding={"d_weight truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES)},
    small={"tokens": Sample(with_cotangent(4, (7,), 3))},
    usual=(
        Sample(with_cotangent(20, (300,), 72)),
        Sample(with_cotangent(300, (3, 40), 200)),
        Sample(with_cotangent(9, (130,), 16), {"padding_index": 2}),
    ),
    extents=RECORD.extents,
    past_2_31=past_2_31_vjp,
    far=far_vjp,
)
