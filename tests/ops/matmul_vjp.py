"""d_a = d_c b^T and d_b = a^T d_c, each summed over the batch axes along which its operand was broadcast."""

from __future__ import annotations

from functools import partial

import numpy as np

from tests.ops import matmul
from tests.ops._shared import BF16, CHECKED, HALVES, accumulator, draw, in_blocks, pick, positive
from tests.ops.record import DTYPES, Fault, GradientRecord, Hiding, Near, Sample


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


def simulate(a, b, d_c, precision="ieee", *, block=32, ftz=False, after=False, low=None, only_first=False, tail=True,
             cut=False):  # fmt: skip
    """``after``: batch entries are added up after the products, instead of inside them.

    ``cut``: tf32 whatever was asked.
    """
    acc = accumulator(a, b, d_c)
    narrow = max({a.dtype.itemsize, d_c.dtype.itemsize}) < 4 and a.dtype == d_c.dtype
    precision = "tf32" if cut else "ieee" if narrow or acc is np.float64 else precision
    product = partial(matmul.simulate, block=block, precision=precision, ftz=ftz, low=low, tail=tail)
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


def case(rng, dtype, regime):
    arrays = any_case(rng, dtype, regime, [1, 7, 16, 40], BATCHES)
    return arrays, {"precision": "tf32"} if rng.random() < 0.25 else {}


def large_case(rng, dtype, regime):
    return any_case(rng, dtype, regime, [33, 48, 64], BATCHES[:4]), {}


def arrays(rng, dtype):
    return tuple(draw(rng, s, dtype) for s in ((3, 40, 8), (8, 70), (3, 40, 70)))


def past_2_31(gpu):
    rows, k = gpu.big // 512 + 16, 512
    picked = gpu.rows_to_sample(rows, k)
    a = gpu.torch.randn(rows, k, dtype=gpu.torch.bfloat16, device=gpu.device)
    b = gpu.normal(k, 24, dtype=gpu.torch.bfloat16)
    d_c = gpu.sampled(a[:, :24], picked)
    d_a, d_b = gpu.op("matmul_vjp")(a, b, d_c)
    assert d_a.numel() > gpu.big
    yield (d_a[picked], d_b), (a[picked], b, d_c[picked]), {}


def far(gpu):
    yield gpu.far((4, 300)), gpu.normal(300, 20, dtype=gpu.torch.bfloat16), gpu.far((4, 300))[:, :20]


RECORD = GradientRecord(
    op="matmul_vjp",
    simulate=simulate,
    variants=({}, {"block": 16}, {"after": True}, {"ftz": True}),
    case=case,
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
    large_case=large_case,
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
    past_2_31=past_2_31,
    far=far,
)
