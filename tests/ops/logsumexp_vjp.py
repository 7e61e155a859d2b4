"""d_x = d_y p, p = exp(x - m) / sum exp(x - m)."""

from __future__ import annotations

import numpy as np

from tests.ops._shared import BF16, CHECKED, HALVES, draw, flush, pick, positive
from tests.ops.logsumexp import sums
from tests.ops.record import Fault, GradientRecord, Hiding, Near, Sample


def simulate(x, d_y, axis=-1, *, block=None, ftz=False, base2=True, tail=True, low=None, early=False, factor=1.0,
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


def case(rng, dtype, regime):
    return any_case(rng, dtype, regime, int(rng.integers(1, 24)), pick(rng, [1, 5, 64, 300, 1024]))


def large_case(rng, dtype, regime):
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


def far(gpu):
    yield gpu.far((4, 300)), gpu.normal(4, dtype=gpu.torch.bfloat16)
    yield gpu.far((4, 300)).T, gpu.normal(300, dtype=gpu.torch.bfloat16)


RECORD = GradientRecord(
    op="logsumexp_vjp",
    simulate=simulate,
    variants=({}, {"block": 128}, {"base2": False, "early": True}, {"ftz": True}, {"block": 128, "early": True}),
    case=case,
    regimes=CHECKED,
    near=Near(lambda rng: (draw(rng, (40, 64), "float32"), 1 + positive(rng, 40)), off={"d_x": 8e-6}),
    faults={
        "l without the last tile": Fault(arrays, {"tail": False, "block": 16}, breaks="d_x"),
        "l kept in bfloat16": Fault(arrays, {"low": BF16, "block": 16}, breaks="d_x"),
        "d_x 1 % off": Fault(arrays, {"factor": 1.01}, breaks="d_x"),
        "another row's cotangent": Fault(arrays, {"others": True}, breaks="d_x"),
    },
    large_case=large_case,
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
    far=far,
)
