"""d_gate = d_y up D(gate), d_up = d_y gate P(gate), D the slope of g P(g)."""

from __future__ import annotations

import math

import numpy as np

from tests.ops._shared import BF16, CHECKED, HALVES, accumulator, draw, flush, pick, through
from tests.ops.geglu import TANH, C, K, form, share
from tests.ops.record import Fault, GradientRecord, Hiding, Near, Sample


def simulate(gate, up, d_y, approximate="none", *, plain=False, ftz=False, flat=False, cube=3 * C, low=None, factor=1.0,
             late=False):  # fmt: skip
    """``late``: up comes last; ``flat``: the slope without its second term; ``cube``: another factor of g^2 in it."""
    acc = accumulator(gate)
    g, u, d = (flush(a.astype(acc), ftz) for a in (gate, up, d_y))
    near = np.where(np.abs(g) > 40, np.sign(g) * acc(40), g)
    p = share(near, approximate, plain=plain, ftz=ftz)
    if approximate == "tanh":
        q = share(-near, approximate, plain=plain, ftz=ftz)
        second = p * (acc(K) * near * (1 + acc(cube) * near * near) * q)
    else:
        second = near * (np.exp(acc(-0.5) * near * near) * acc(1 / math.sqrt(2 * math.pi)))
    slope = through(p if flat else p + second, low)
    d_gate = flush(d * slope, ftz) * u if late else flush(d * u, ftz) * slope
    d_up = d * flush(g * p, ftz)
    return flush(d_gate * acc(factor), ftz), flush(d_up * acc(factor), ftz)


def any_case(rng, dtype, regime, shape):
    odd = int(rng.integers(4))
    return tuple(draw(rng, shape, dtype, "normal" if i == odd else regime) for i in range(3)), form(rng)


def case(rng, dtype, regime):
    return any_case(rng, dtype, regime, (int(rng.integers(1, 24)), pick(rng, [1, 5, 64, 300])))


def large_case(rng, dtype, regime):
    return any_case(rng, dtype, regime, (pick(rng, [7, 64]), pick(rng, [257, 1030])))


def arrays(rng, dtype):
    return tuple(draw(rng, (64, 257), dtype) for _ in range(3))


def past_2_31(gpu):
    rows, n = gpu.big // 256 + 16, 256
    gate, up = (gpu.torch.randn(rows, n, dtype=gpu.torch.bfloat16, device=gpu.device) for _ in range(2))
    picked = gpu.rows_to_sample(rows, n)
    d_y = gpu.sampled(gate, picked)
    outputs = gpu.op("geglu_vjp")(gate, up, d_y)
    assert outputs[0].numel() > gpu.big
    yield tuple(d[picked] for d in outputs), (gate[picked], up[picked], d_y[picked]), {}


def far(gpu):
    yield gpu.far((4, 300)), *(gpu.normal(4, 300, dtype=gpu.torch.bfloat16) for _ in range(2))


ROWS = {"gate": (64, 1000), "up": (64, 1000), "d_y": (64, 1000)}

RECORD = GradientRecord(
    op="geglu_vjp",
    simulate=simulate,
    variants=({}, {"late": True}, {"ftz": True}),
    case=case,
    regimes=CHECKED,
    near=Near(lambda rng: arrays(rng, "float32"), off={"d_gate": 5.7e-7, "d_up": 4.7e-7}),
    faults={
        "P alone": Fault(arrays, {"flat": True}, breaks="d_gate"),
        "the cube's derivative, once": Fault(arrays, {"cube": C}, TANH, breaks="d_gate"),
        "the slope kept in bfloat16": Fault(arrays, {"low": BF16}, breaks="d_gate"),
        "gradients 1 % off": Fault(arrays, {"factor": 1.01}, breaks="d_up"),
    },
    large_case=large_case,
    typical=lambda rng, dtype: (arrays(rng, dtype), {}),
    hiding={"gradients truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES)},
    small={"one gradient": Sample({"gate": (2, 3), "up": (2, 3), "d_y": (2, 3)}, TANH, wants=("d_up",))},
    usual=(Sample(ROWS), Sample(ROWS, TANH, tiling={"block_rows": 16, "block_n": 128})),
    extents={"batch": 64},
    past_2_31=past_2_31,
    far=far,
)
