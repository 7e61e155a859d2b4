"""d_x = r (h - xh mean(h xh)), d_weight = sum d_y xh, with h = d_y weight."""

from __future__ import annotations

import numpy as np

from tests.ops import layernorm_vjp
from tests.ops._shared import (
    BF16,
    CHECKED,
    HALVES,
    accumulator,
    draw,
    flush,
    in_blocks,
    long_rows_of_gradients,
    over_rows,
    pick,
    through,
)
from tests.ops.record import Fault, GradientRecord, Hiding, Near, Sample
from tests.ops.rmsnorm import ROUNDINGS, narrow_of


def simulate(x, d_y, weight=None, eps=1e-6, rounding="once", *, block=None, group=64, ftz=False, last=False, over=0,
             drop=False, c2=1.0, low=None, skip_rows=0):  # fmt: skip
    """``last``: r meets mean(h x) after the sum, as where rows are longer than a tile."""
    acc, (n, shape), narrow = accumulator(x), (x.shape[-1], x.shape), narrow_of(x, rounding)
    x, g = (flush(a.reshape(-1, n).astype(acc), ftz) for a in (x, d_y))
    r = acc(1) / np.sqrt(flush(in_blocks(flush(np.square(x), ftz), block or n) / acc(n + over) + acc(eps), ftz))
    xh, h = flush(x * r, ftz), g if weight is None else through(flush(g * flush(weight.astype(acc), ftz), ftz), narrow)
    mean_hx = (in_blocks(flush(h * (x if last else xh), ftz), block or n) / acc(n)) * (r if last else acc(1))
    d_x = r * (h - (acc(0) if drop else xh * (mean_hx * acc(c2))))
    d_weight = through(over_rows(flush(g * through(xh, narrow), ftz), group, skip_rows), low)
    return flush(d_x, ftz).reshape(shape), None if weight is None else flush(d_weight, ftz)


def case(rng, dtype, regime):
    arrays, options = layernorm_vjp.case(rng, dtype, regime)
    return arrays[:3], options | {"rounding": pick(rng, ROUNDINGS)}


def large_case(rng, dtype, regime):
    arrays, options = layernorm_vjp.large_case(rng, dtype, regime)
    return arrays[:3], options | {"rounding": pick(rng, ROUNDINGS)}


def arrays(rng, dtype, rows=130, n=40):
    return layernorm_vjp.arrays(rng, dtype, rows, n)[:3]


def near(rng):
    return tuple(draw(rng, shape, "float32") for shape in ((32, 64), (32, 64), (64,)))


def far(gpu):
    yield gpu.far((4, 300)), gpu.far((4, 300)), gpu.normal(300, dtype=gpu.torch.bfloat16)


RECORD = GradientRecord(
    op="rmsnorm_vjp",
    simulate=simulate,
    variants=(
        {},
        {"block": 128, "last": True},
        {"block": 16, "group": 8},
        {"group": 1},
        {"ftz": True},
        {"ftz": True, "last": True},
    ),
    case=case,
    regimes=CHECKED,
    near=Near(near, off={"d_x": 4e-6, "d_weight": 1.5e-5}),
    faults={
        "mean of squares over n + 1": Fault(arrays, {"over": 1}, breaks="d_weight"),
        "r h alone": Fault(arrays, {"drop": True}, breaks="d_x"),
        "mean(h xh) 10 % off": Fault(arrays, {"c2": 1.1}, breaks="d_x"),
        "another eps": Fault(arrays, {"eps": 1e-2}, breaks="d_x"),
        "rounded once": Fault(
            arrays, {"rounding": "once"}, {"rounding": "before_weight"}, breaks="d_weight", dtypes=HALVES
        ),
        "rounded before the weight": Fault(arrays, {"rounding": "before_weight"}, breaks="d_weight", dtypes=HALVES),
        "d_weight without the last rows": Fault(arrays, {"skip_rows": 2}, breaks="d_weight"),
    },
    large_case=large_case,
    typical=lambda rng, dtype: (arrays(rng, dtype, 100, 70), {}),
    hiding={
        "gradients truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "mean(h xh) 1 % off": Hiding("typical", {"c2": 1.01}, dtypes=("float32",)),
        "d_weight kept in bfloat16": Hiding("typical", {"low": BF16}, dtypes=("float32",)),
    },
    small={"one gradient": Sample({"x": (2, 3), "d_y": (2, 3), "weight": (3,)}, wants=("d_weight",))},
    usual=(
        Sample({"x": (64, 1000), "d_y": (64, 1000), "weight": (1000,)}),
        Sample({"x": (64, 1000), "d_y": (64, 1000), "weight": (1000,)}, tiling={"block_rows": 16, "block_n": 128}),
        Sample({"x": (4, 8, 384), "d_y": (4, 8, 384)}),
    ),
    extents={"batch": 2, "n": 128},
    rows=("x", "x", "weight"),
    past_2_31=long_rows_of_gradients("rmsnorm_vjp"),
    far=far,
)
