"""y[positions[t, j]] = x[t], sorted by indices[t, j]; d_x[t] = sum_j d_y[positions[t, j]]."""

from __future__ import annotations

import numpy as np

import portakern as pk
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
    with_specials,
    zeros,
)
from tests.ops.kv_append import integers_on
from tests.ops.record import Fault, ForwardRecord, GradientRecord, Hiding, Layer, Mapped, Near, Sample
from tests.ops.unpermute import simulate as weighted

I32 = np.int32


# ------------------------------------------------------------------------------------------------- the simulated kernel
def simulate(x, indices, experts=1, *, last_first=False, clipped=False, from_the_end=False, late=0, others=0.0,
             starts=False, width=None):  # fmt: skip
    """One expert after the other takes its pairs. ``last_first``: of one expert the last pair comes first; ``clipped``:
    an index that is no expert is the nearest that is one; ``from_the_end``: negative indices count from the end;
    ``late``: positions are so much too large; ``others``: what rows of no token hold; ``starts``: groups are given by
    where they begin; ``width``: only so many numbers of a row are copied."""
    k, pairs = indices.shape[1], indices.size
    at = np.where(indices < 0, indices + experts, indices) if from_the_end else indices
    at = (np.clip(at, 0, experts - 1) if clipped else at).reshape(-1)
    y, positions, ends = np.full((pairs, x.shape[1]), others, accumulator(x)), np.full(pairs, -1), []
    number = 0
    for expert in range(experts):
        own = np.flatnonzero(at == expert)
        own = own[::-1] if last_first else own
        positions[own] = number + np.arange(len(own)) + late
        y[number : number + len(own)] = x[own // k]
        ends.append(number if starts else number + len(own))
        number += len(own)
    if width is not None:
        y[:, width:] = 0
    return y, positions.reshape(indices.shape), np.array(ends)


# ------------------------------------------------------------------------------------------------------- calls on NumPy
def chosen(rng, tokens, k, experts, lost):
    """Experts, and in place of some an index that is none."""
    strange = rng.choice([-1, -experts, experts, experts + 5], (tokens, k))
    at = np.where(rng.random((tokens, k)) < lost, strange, rng.integers(0, experts, (tokens, k)))
    return at.astype(pick(rng, (np.int32, np.int64)))


def routed(rng, dtype, regime="normal", tokens=20, k=3, d=20, experts=5, make=sweep):
    return make(rng, (tokens, d), dtype, regime), chosen(rng, tokens, k, experts, 0.2)


def case(rng, dtype, regime):
    tokens, k, d, experts = (int(rng.integers(1, most)) for most in (40, 6, 30, 12))
    x = sweep(rng, (tokens, d), dtype, regime)
    return (x, chosen(rng, tokens, k, experts, 0.2 * rng.integers(2))), {"experts": experts}


def special(rng, dtype, seed):
    (x, indices), options = case(rng, dtype, pick(rng, SWEPT))
    return (*with_specials(rng, (x,)), indices), options


def large_case(rng, dtype, regime):
    x, indices = routed(rng, dtype, regime, 60, 3, 32, 70, draw)
    indices = np.where(np.arange(60)[:, None] == 0, 0, indices)  # group ends that differ
    return (x, indices), {"experts": 70}


def some(rng, dtype):
    """Tokens of which two have a negative index, one an expert that there is not, and two the same expert."""
    x, indices = routed(rng, dtype)
    indices[:5, 0] = -1, -2, 5, 3, 3
    return x, indices


# ------------------------------------------------------------------------------------------------ written another way
def formula(x, indices, experts=1):
    """A pair's place is the number of pairs before it: of lower experts, and of its own that came before."""
    flat = [int(i) if 0 <= i < experts else experts for i in indices.reshape(-1)]
    y, positions = np.zeros((len(flat), x.shape[1])), np.full(len(flat), -1)
    for p, expert in enumerate(flat):
        if expert < experts:
            place = sum(other < expert or (other == expert and q < p) for q, other in enumerate(flat))
            positions[p], y[place] = place, x[p // indices.shape[1]]
    ends = [sum(expert <= e for expert in flat) for e in range(experts)]
    return y, positions.reshape(indices.shape), np.array(ends)


def formula_call(experts, *indices):
    return (normal64(len(indices), 3), np.array(indices)), {"experts": experts}


def in_torch(x, indices, experts=1):
    import torch

    expert = torch.where((indices >= 0) & (indices < experts), indices, experts).reshape(-1)
    order = torch.argsort(expert, stable=True)
    there = expert[order] < experts
    y = torch.where(there[:, None], x[order // indices.shape[1]], 0)
    places = torch.where(there, torch.arange(len(order), device=x.device), -1)
    positions = torch.empty_like(order).scatter(0, order, places).reshape(indices.shape)
    numbers = torch.arange(experts, device=x.device)
    return y, positions.int(), (expert[:, None] <= numbers).sum(0).int()


def in_jax(x, indices, experts=1):
    import jax.numpy as jnp

    expert = jnp.where((indices >= 0) & (indices < experts), indices, experts).reshape(-1)
    order = jnp.argsort(expert, stable=True)
    there = expert[order] < experts
    y = jnp.where(there[:, None], x[order // indices.shape[1]], 0)
    positions = jnp.zeros_like(order).at[order].set(jnp.where(there, jnp.arange(len(order)), -1))
    ends = (expert[:, None] <= jnp.arange(experts)).sum(0)
    return y, positions.reshape(indices.shape).astype(jnp.int32), ends.astype(jnp.int32)


def fuzzed(r, dtype):
    tokens, k, d, experts = r.extent(), *(max(r.extent(), 1) for _ in range(3))
    indices = chosen(r.rng, tokens, k, experts, r.pick((0.0, 0.3)))
    return {"x": r.array(dtype, tokens, d), "indices": indices}, {"experts": experts}


# ------------------------------------------------------------------------------------------------------------- on a GPU
def past_2_31(gpu):
    """One expert for all tokens: y is x, of which the first rows, those about element 2^31 and the last are met."""
    torch, d = gpu.torch, 512
    tokens = gpu.big // d + 16
    x = torch.randn(tokens, d, dtype=torch.bfloat16, device=gpu.device)
    assert x.numel() > gpu.big
    picked = gpu.rows_to_sample(tokens, d).unique().to(gpu.device)
    y, positions, ends = gpu.op("permute")(x, torch.zeros(tokens, 1, dtype=torch.int32, device=gpu.device), experts=1)
    assert int(ends) == tokens
    places = torch.searchsorted(picked, positions[picked].long()).int()
    number = torch.full_like(ends, len(picked))
    yield (y[picked], places, number), (x[picked], torch.zeros_like(places)), {"experts": 1}


def far(gpu):
    yield gpu.far((4, 300)), gpu.torch.tensor([[0], [0], [-1], [0]], dtype=gpu.torch.int32, device=gpu.device)


def in_layer(op, x, p):
    """The tokens of even places in front of the others."""
    batch, length, width = x.shape
    indices = integers_on(x, np.arange(batch * length)[:, None] % 2)
    return x + op(x.reshape(-1, width), indices, experts=2)[0].reshape(x.shape)


# ------------------------------------------------------------------------------------------------ what users get wrong
def call(*arrays, **options):
    return pk.op("permute", backend="reference")(*arrays, **options)


X, AT = zeros(2, 3), np.array([[0, 1], [1, 2]])
WRONG = {
    "one index a token, without its axis": (lambda: call(X, AT[:, 0]), r"indices has 1 axis"),
    "no experts": (lambda: call(X, AT, experts=0), r"permute: experts is 0; expected an integer"),
    "weights for indices": (lambda: call(X, zeros(2, 2)), r"indices is float32; expected one of int32, int64"),
    "indices of other tokens": (lambda: call(X, AT[:1]), r"indices axis 0 \(tokens\) is 1; expected 2"),
    "tokens of no numbers": (lambda: call(zeros(2, 0), AT), r"permute: .*d.* is 0"),
    "half an expert": (lambda: call(X, AT, experts=1.5), r"permute: experts is 1.5; expected an integer"),
}


def shapes(tokens, k, d):
    return {"x": (tokens, d), "indices": (tokens, k)}


def of(experts):
    return {"experts": experts}


RECORD = ForwardRecord(
    op="permute",
    simulate=simulate,
    variants=({},),
    case=case,
    regimes=SWEPT,
    special=special,
    near=None,
    faults={
        "the last of an expert first": Fault(some, {"last_first": True}, of(5), breaks="positions"),
        "that clips indices": Fault(some, {"clipped": True}, of(5), breaks="group_ends"),
        "that counts negative indices from the end": Fault(some, {"from_the_end": True}, of(5), breaks="positions"),
        "positions counted from 1": Fault(some, {"late": 1}, of(5), breaks="positions"),
        "with NaN in rows of no token": Fault(some, {"others": np.nan}, of(5), breaks="y"),
        "with starts for ends": Fault(some, {"starts": True}, of(5), breaks="group_ends"),
        "of the first numbers alone": Fault(some, {"width": 16}, of(5), breaks="y"),
    },
    large_case=large_case,
    typical=lambda rng, dtype: (routed(rng, dtype), of(5)),
    hiding={},
    small={
        "two experts each": Sample(shapes(4, 2, 3), of(3)),
        "one": Sample(shapes(3, 1, 2), of(2)),
    },
    usual=(
        Sample(shapes(40, 2, 72), of(8)),
        Sample(shapes(10, 6, 200), of(3)),
        Sample(shapes(70, 1, 16), of(64)),
    ),
    formula=formula,
    formula_calls={
        "two experts each": lambda: formula_call(4, [3, 1], [1, 1], [0, 3]),
        "indices that are none": lambda: formula_call(2, [-1, 0], [2, 1], [-5, 7]),
    },
    formula_tolerance=(0.0, 0.0),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample(shapes(12, 2, 33), of(5)),
    lowered={"experts": Sample(shapes(70, 2, 300), of(8)), "one each": Sample(shapes(17, 1, 64), of(3))},
    mapped={"tokens": Mapped(Sample({"x": (3, 5, 4), "indices": (3, 5, 2)}, of(3)), {"x": 0, "indices": 0},
                             folds=False)},
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(in_layer),
    extents={"tokens": 24, "k": 2, "d": 128, "experts": 6},
    launched=Sample(shapes(64, 2, 512), of(8)),
    past_2_31=past_2_31,
    far=far,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- gradient
def simulate_vjp(d_y, positions, group_ends, experts=1, **faults):
    """unpermute's, whose faults it takes, with weights of 1."""
    return weighted(d_y, positions, np.ones(positions.shape, accumulator(d_y)), **faults)


def placed(rng, d_y, tokens, k, lost):
    """Positions of any order, of which those of some tokens are no row."""
    at = rng.permutation(tokens * k).reshape(tokens, k)
    at = np.where(rng.random(at.shape) < lost, -1, at).astype(I32)
    return d_y, at, np.array([(at >= 0).sum()], I32)


def case_vjp(rng, dtype, regime):
    tokens, k, d = int(rng.integers(1, 20)), int(rng.integers(1, 9)), int(rng.integers(1, 40))
    return placed(rng, draw(rng, (tokens * k, d), dtype, regime), tokens, k, 0.2 * rng.integers(2)), {}


def large_case_vjp(rng, dtype, regime):
    return placed(rng, draw(rng, (240, 40), dtype, regime), 60, 4, 0.1), {}


def some_vjp(rng, dtype):
    """A position of no row, and a last token with all of its own."""
    d_y, at, ends = placed(rng, draw(rng, (80, 24), dtype), 20, 4, 0.0)
    at[0, 0] = -1
    return d_y, at, ends


def many_vjp(rng, dtype):
    return placed(rng, draw(rng, (360, 30), dtype), 6, 60, 0.0)


def near_vjp(rng):
    return placed(rng, positive(rng, 80, 50), 40, 2, 0.0)


def past_2_31_vjp(gpu):
    torch, d = gpu.torch, 512
    tokens = gpu.big // (2 * d) + 16
    d_y = torch.randn(2 * tokens, d, dtype=torch.bfloat16, device=gpu.device)
    assert d_y.numel() > gpu.big
    at = torch.arange(2 * tokens, device=gpu.device, dtype=torch.int32).reshape(tokens, 2)
    picked = gpu.rows_to_sample(tokens, 2 * d).to(gpu.device)
    own, ends = at[: len(picked)], at[:1, 0]
    d_x = gpu.op("permute_vjp")(d_y, at, ends)
    d_x = d_x[0] if isinstance(d_x, tuple) else d_x
    yield (d_x[picked],), (d_y[at[picked].long().reshape(-1)], own, ends), {}


def far_vjp(gpu):
    at = gpu.torch.tensor([[3, 0], [-1, 2]], dtype=gpu.torch.int32, device=gpu.device)
    yield gpu.far((4, 300)), at, at[0, 1:]


def with_positions(tokens, k, d):
    return {"d_y": (tokens * k, d), "positions": (tokens, k), "group_ends": (4,)}


GRADIENT = GradientRecord(
    op="permute_vjp",
    simulate=simulate_vjp,
    variants=({}, {"backwards": True}, {"ftz": True}),
    case=case_vjp,
    regimes=CHECKED,
    near=Near(near_vjp, off={"d_x": 8e-7}),
    faults={
        "without a token's last row": Fault(some_vjp, {"last": True}, breaks="d_x"),
        "of the row behind": Fault(some_vjp, {"late": 1}, breaks="d_x"),
        "that counts negative positions from the end": Fault(some_vjp, {"from_the_end": True}, breaks="d_x"),
        "that clips positions": Fault(some_vjp, {"clipped": True}, breaks="d_x"),
        "accumulated in bfloat16": Fault(many_vjp, {"low": BF16}, breaks="d_x"),
    },
    large_case=large_case_vjp,
    typical=lambda rng, dtype: (some_vjp(rng, dtype), {}),
    hiding={"d_x truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES)},
    small={"two experts each": Sample(with_positions(4, 2, 3), of(4))},
    usual=(Sample(with_positions(40, 2, 72), of(4)), Sample(with_positions(10, 6, 200), of(4))),
    extents=RECORD.extents | {"experts": 1},
    past_2_31=past_2_31_vjp,
    far=far_vjp,
)
