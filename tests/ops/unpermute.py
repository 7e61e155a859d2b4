"""y[t] = sum_j weights[t, j] x[positions[t, j]]; its gradients of x and of the weights."""

from __future__ import annotations

import numpy as np

import portakern as pk
from tests.ops._shared import (
    BF16,
    CHECKED,
    HALVES,
    accumulator,
    draw,
    flush,
    in_blocks,
    normal64,
    pick,
    positive,
    through,
    with_specials,
    zeros,
)
from tests.ops.kv_append import integers_on, of_statistics
from tests.ops.record import Fault, ForwardRecord, GradientRecord, Hiding, Layer, Mapped, Near, Sample

I32, F32 = np.int32, np.float32


# ------------------------------------------------------------------------------------------------- the simulated kernel
def simulate(x, positions, weights, *, backwards=False, ftz=False, low=None, last=False, unweighted=False, late=0,
             from_the_end=False, clipped=False):  # fmt: skip
    """One term of all tokens after the other. ``backwards``: the last one first; ``low``: sums are kept in a narrower
    dtype; ``last``: a token's last term is left out; ``unweighted``: weights are 1; ``late``: rows stand so many
    further; ``from_the_end``: negative positions count from the end; ``clipped``: a position that is no row is the
    nearest that is one."""
    acc, (tokens, k), rows = accumulator(x), positions.shape, len(x)
    x, weights = (flush(a.astype(acc), ftz) for a in (x, weights))
    at = np.where(positions < 0, positions + rows, positions) if from_the_end else positions
    at = np.clip(at, 0, rows - 1) if clipped else at
    there, y = (at >= 0) & (at < rows), np.zeros((tokens, x.shape[1]), acc)
    for j in reversed(range(k)) if backwards else range(k - last):
        row = x[(np.where(there[:, j], at[:, j], 0) + late) % rows]
        term = flush(row if unweighted else row * weights[:, j, None], ftz)
        y = flush(through(y + np.where(there[:, j, None], term, 0), low), ftz).astype(acc)
    return (y,)


# ------------------------------------------------------------------------------------------------------- calls on NumPy
def placed(rng, rows, tokens, k, lost=0.2):
    """Positions, of which some are no row."""
    at = rng.permutation(max(rows, tokens * k))[: tokens * k].reshape(tokens, k)
    return np.where((at >= rows) | (rng.random(at.shape) < lost), -1, at).astype(I32)


def terms(rng, dtype, regime="normal", tokens=20, k=4, d=24, spare=3):
    rows = tokens * k + spare
    weights = rng.standard_normal((tokens, k)).astype(of_statistics(dtype))
    return draw(rng, (rows, d), dtype, regime), placed(rng, rows, tokens, k), weights


def case(rng, dtype, regime):
    tokens, k, d = int(rng.integers(1, 20)), int(rng.integers(1, 9)), int(rng.integers(1, 40))
    return terms(rng, dtype, regime, tokens, k, d, int(rng.integers(5))), {}


def special(rng, dtype, seed):
    (x, at, weights), options = case(rng, dtype, pick(rng, CHECKED))
    x, weights = with_specials(rng, (x, weights))
    return (x, at, weights), options


def large_case(rng, dtype, regime):
    return terms(rng, dtype, regime, 60, 4, 40), {}


def some(rng, dtype):
    """The first token has a negative position, and all of the last one's are rows."""
    x, at, weights = terms(rng, dtype)
    at[0, 0], at[-1] = -1, np.where(at[-1] < 0, np.setdiff1d(np.arange(len(x)), at)[: at.shape[1]], at[-1])
    return x, at, weights


def many(rng, dtype):
    """Sums of many terms."""
    return terms(rng, dtype, "normal", 6, 60, 30)


def near(rng):
    """Two positive terms a token."""
    return positive(rng, 80, 50), np.arange(80, dtype=I32).reshape(40, 2), positive(rng, 40, 2)


# ------------------------------------------------------------------------------------------------ written another way
def formula(x, positions, weights):
    y = np.zeros((len(positions), x.shape[1]))
    for t, j in np.ndindex(positions.shape):
        for row in range(len(x)):
            if positions[t, j] == row:
                y[t] = y[t] + weights[t, j] * x[row]
    return (y,)


def formula_call(rows, *positions):
    at = np.array(positions, I32)
    return (normal64(rows, 3), at, normal64(*at.shape, seed=1)), {}


def in_torch(x, positions, weights):
    import torch

    there = (positions >= 0) & (positions < len(x))
    rows = torch.where(there[..., None], x[torch.where(there, positions, 0).long()], 0)
    return (torch.where(there, weights, 0)[..., None] * rows.to(weights.dtype)).sum(1).to(x.dtype)


def in_jax(x, positions, weights):
    import jax.numpy as jnp

    there = (positions >= 0) & (positions < len(x))
    rows = jnp.where(there[..., None], x[jnp.where(there, positions, 0)], 0)
    return (jnp.where(there, weights, 0)[..., None] * rows.astype(weights.dtype)).sum(1).astype(x.dtype)


def fuzzed(r, dtype):
    tokens, k, rows, d = r.extent(), r.extent(), max(r.extent(), 1), r.extent()
    weights = r.array(of_statistics(dtype), tokens, k)
    return {"x": r.array(dtype, rows, d), "positions": placed(r.rng, rows, tokens, k), "weights": weights}, {}


# ------------------------------------------------------------------------------------------------------------- on a GPU
def past_2_31(gpu):
    """The first rows, those about element 2^31, and the last."""
    torch, d = gpu.torch, 512
    rows = gpu.big // d + 16
    x = torch.randn(rows, d, dtype=torch.bfloat16, device=gpu.device)
    assert x.numel() > gpu.big
    picked = gpu.rows_to_sample(rows, d).unique()
    at = picked.to(gpu.device).int()[:, None]
    weights = gpu.normal(len(picked), 1, dtype=torch.float32)
    own = torch.arange(len(picked), device=gpu.device, dtype=torch.int32)[:, None]
    yield (gpu.op("unpermute")(x, at, weights),), (x[picked], own, weights), {}


def far(gpu):
    at = gpu.torch.tensor([[3, 0], [-1, 2], [1, -1]], dtype=gpu.torch.int32, device=gpu.device)
    yield gpu.far((4, 300)), at, gpu.normal(3, 2, dtype=gpu.torch.float32)


def widened(x):
    """An array of torch or JAX in float32, or in float64 where it is that."""
    if hasattr(x, "new_tensor"):
        import torch

        return x.to(torch.promote_types(x.dtype, torch.float32))
    import jax.numpy as jnp

    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def in_layer(op, x, p):
    """Each token and the one that many places further, weighted by a number of its own."""
    batch, length, width = x.shape
    rows, number = x.reshape(-1, width), batch * length
    at = np.arange(number)[:, None]
    positions = integers_on(x, np.where(at < number // 2, at * 2, -1))
    return x + op(rows, positions, widened(rows[:, :1])).reshape(x.shape)


# ------------------------------------------------------------------------------------------------ what users get wrong
def call(*arrays, **options):
    return pk.op("unpermute", backend="reference")(*arrays, **options)


X, AT, W = zeros(5, 3), np.array([[0, 4], [-1, 2]], I32), np.ones((2, 2), F32)
WRONG = {
    "a row twice": (
        lambda: call(X, np.array([[0, 1], [1, 2]], I32), W),
        r"unpermute: positions must name no row twice; pass what permute gave",
    ),
    "positions of floats": (
        lambda: call(X, AT.astype(F32), W),
        r"positions is float32; expected one of int32, int64: cast it",
    ),
    "no weights": (lambda: call(X, AT), r"unpermute.*weights"),
    "a weight for each token": (lambda: call(X, AT, W[:, 0]), r"weights has 1 axis"),
    "weights of 16 bits": (lambda: call(X, AT, W.astype(np.float16)), r"weights is float16; expected float32"),
    "no rows": (lambda: call(X[:0], AT, W), r"unpermute: rows is 0"),
}


def shapes(rows, tokens, k, d):
    return {"x": (rows, d), "positions": (tokens, k), "weights": (tokens, k)}


RECORD = ForwardRecord(
    op="unpermute",
    simulate=simulate,
    variants=({}, {"backwards": True}, {"ftz": True}),
    case=case,
    regimes=CHECKED,
    special=special,
    near=Near(near, off={"y": 5e-7}),
    faults={
        "without a token's last term": Fault(some, {"last": True}, breaks="y"),
        "without weights": Fault(some, {"unweighted": True}, breaks="y"),
        "of the row behind": Fault(some, {"late": 1}, breaks="y"),
        "that counts negative positions from the end": Fault(some, {"from_the_end": True}, breaks="y"),
        "that clips positions": Fault(some, {"clipped": True}, breaks="y"),
        "accumulated in bfloat16": Fault(many, {"low": BF16}, breaks="y"),
    },
    large_case=large_case,
    typical=lambda rng, dtype: (terms(rng, dtype), {}),
    hiding={"y truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES)},
    small={"two experts": Sample(shapes(9, 4, 2, 3)), "one": Sample(shapes(3, 3, 1, 2))},
    usual=(Sample(shapes(90, 40, 2, 72)), Sample(shapes(70, 10, 6, 200)), Sample(shapes(20, 9, 3, 16))),
    formula=formula,
    formula_calls={
        "all rows": lambda: formula_call(6, [5, 0, 1], [2, 3, 4]),
        "positions that are no row": lambda: formula_call(3, [-1, 0], [3, -9], [2, 1]),
    },
    formula_tolerance=(1e-14, 1e-14),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample(shapes(30, 12, 2, 33)),
    lowered={"experts": Sample(shapes(140, 70, 2, 300)), "one row each": Sample(shapes(17, 5, 1, 64))},
    mapped={
        "rows and weights": Mapped(Sample({"x": (3, 9, 5), "positions": (4, 2), "weights": (3, 4, 2)}),
                                   {"x": 0, "weights": 0}, folds=False),
    },
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(in_layer),
    extents={"tokens": 24, "k": 2, "rows": 48, "d": 128},
    launched=Sample(shapes(128, 64, 2, 512)),
    past_2_31=past_2_31,
    far=far,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- gradient
def simulate_vjp(x, positions, weights, d_y, wants=("d_x", "d_weights"), *, block=None, ftz=False, low=None, late=0,
                 unweighted=False, tail=True, stale=False, other=False, shared=False):  # fmt: skip
    """``block``: a dot is summed over as many numbers at a time; ``low``: dots are kept in a narrower dtype; ``late``:
    gradients of rows lie so many further; ``unweighted``: weights are 1; ``tail``: without it the last number is left
    out of dots; ``stale``: rows of no token hold what was there, ones; ``other``: a term has the cotangent of the token
    before; ``shared``: all weights of a token have the first one's gradient."""
    acc, rows = accumulator(x), len(x)
    x, weights, d_y = (flush(a.astype(acc), ftz) for a in (x, weights, d_y))
    d_y = np.roll(d_y, 1, 0) if other else d_y
    d_x, d_weights = np.full(x.shape, 1 if stale else 0, acc), np.zeros(weights.shape, acc)
    for t, j in np.argwhere((positions >= 0) & (positions < rows)):
        at = positions[t, j]
        d_x[(at + late) % rows] = flush(d_y[t] * (acc(1) if unweighted else weights[t, j]), ftz)
        product = flush(x[at] * d_y[t], ftz)[None, : x.shape[1] if tail else -1]
        total = in_blocks(through(product, low), block or product.shape[1])
        d_weights[t, j] = through(total, low).reshape(-1)[0]
    d_weights = np.broadcast_to(d_weights[:, :1], weights.shape) if shared else d_weights
    return tuple(y if name in wants else None for name, y in (("d_x", d_x), ("d_weights", d_weights)))


def case_vjp(rng, dtype, regime):
    (x, at, weights), _ = case(rng, dtype, regime)
    return (x, at, weights, draw(rng, (len(at), x.shape[1]), dtype, regime)), {}


def special_vjp(rng, dtype, seed):
    (x, at, weights, d_y), options = case_vjp(rng, dtype, pick(rng, CHECKED))
    x, weights, d_y = with_specials(rng, (x, weights, d_y))
    return (x, at, weights, d_y), options


def large_case_vjp(rng, dtype, regime):
    x, at, weights = terms(rng, dtype, regime, 40, 4, 40)
    return (x, at, weights, draw(rng, (40, 40), dtype, regime)), {}


def some_vjp(rng, dtype):
    x, at, weights = some(rng, dtype)
    return x, at, weights, draw(rng, (len(at), x.shape[1]), dtype)


def near_vjp(rng):
    x, at, weights = near(rng)
    return x, at, weights, positive(rng, len(at), x.shape[1])


def past_2_31_vjp(gpu):
    torch, d = gpu.torch, 512
    rows = gpu.big // d + 16
    x = torch.ones(1, d, dtype=torch.bfloat16, device=gpu.device).expand(rows, d)
    picked = gpu.rows_to_sample(rows, d).unique()
    at, number = picked.to(gpu.device).int()[:, None], len(picked)
    weights, d_y = gpu.normal(number, 1, dtype=torch.float32), gpu.normal(number, d, dtype=torch.bfloat16)
    d_x, d_weights = gpu.op("unpermute_vjp")(x, at, weights, d_y)
    assert d_x.numel() > gpu.big
    own = torch.arange(number, device=gpu.device, dtype=torch.int32)[:, None]
    yield (d_x[picked], d_weights), (x[:number], own, weights, d_y), {}


def far_vjp(gpu):
    x, at, weights = next(far(gpu))
    yield x, at, weights, gpu.far((3, 300))


def with_cotangent(rows, tokens, k, d):
    return shapes(rows, tokens, k, d) | {"d_y": (tokens, d)}


GRADIENT = GradientRecord(
    op="unpermute_vjp",
    simulate=simulate_vjp,
    variants=({}, {"block": 8}, {"ftz": True}),
    case=case_vjp,
    regimes=CHECKED,
    special=special_vjp,
    near=Near(near_vjp, off={"d_x": 4e-7, "d_weights": 5e-6}),
    faults={
        "in the row behind": Fault(some_vjp, {"late": 1}, breaks="d_x"),
        "without weights": Fault(some_vjp, {"unweighted": True}, breaks="d_x"),
        "without the last number of dots": Fault(some_vjp, {"tail": False}, breaks="d_weights"),
        "that leaves rows of no token as they were": Fault(some_vjp, {"stale": True}, breaks="d_x"),
        "with the cotangent of the token before": Fault(some_vjp, {"other": True}, breaks="d_weights"),
        "of a token's first weight": Fault(some_vjp, {"shared": True}, breaks="d_weights"),
        "accumulated in bfloat16": Fault(some_vjp, {"low": BF16}, breaks="d_weights"),
    },
    large_case=large_case_vjp,
    typical=lambda rng, dtype: (some_vjp(rng, dtype), {}),
    hiding={"d_x truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES)},
    small={"two experts": Sample(with_cotangent(9, 4, 2, 3))},
    usual=(
        Sample(with_cotangent(90, 40, 2, 72)),
        Sample(with_cotangent(70, 10, 6, 200)),
        Sample(with_cotangent(20, 9, 3, 16), wants=("d_weights",)),
    ),
    extents=RECORD.extents,
    past_2_31=past_2_31_vjp,
    far=far_vjp,
)
