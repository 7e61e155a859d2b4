"""y = gate / (1 + exp(-gate)) up.

d_gate = d_y up s (1 + gate q), d_up = d_y gate s.
"""

from __future__ import annotations

import math

import ml_dtypes
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
    sweep,
    through,
    zeros,
)
from tests.ops.record import Fault, ForwardRecord, GradientRecord, Hiding, Layer, Mapped, Near, Sample


def parts(gate, *, base2, ftz, plain, scale=1.0):
    """(g, s, q): the gate, 1 / (1 + exp(-g)) and 1 - s in the accumulator's type.

    ``plain``: s from an exp(-g) that may overflow, and q as the sigmoid of -g.
    """
    acc = accumulator(gate)
    g = flush(gate.astype(acc), ftz)

    def exp(t):
        t = t * acc(scale)
        return flush(np.exp2(t * acc(np.log2(np.e))) if base2 else np.exp(t), ftz)

    if plain:
        return g, flush(1 / (1 + exp(-g)), ftz), flush(1 / (1 + exp(g)), ftz)
    e = exp(-np.abs(g))
    high = 1 / (1 + e)
    low = flush(e * high, ftz)
    return g, np.where(g >= 0, high, low), np.where(g >= 0, low, high)


def simulate(gate, up, *, base2=True, ftz=False, plain=False, scale=1.0, low=None, swapped=False, factor=1.0):
    """``low``: silu kept in a narrower dtype; ``scale``: of the argument of exp; ``swapped``: up is the gate."""
    gate, up = (up, gate) if swapped else (gate, up)
    g, s, _ = parts(gate, base2=base2, ftz=ftz, plain=plain, scale=scale)
    silu = through(flush(g * s, ftz), low)
    return (flush(silu * flush(up.astype(g.dtype), ftz) * g.dtype.type(factor), ftz),)


def pair(rng, dtype, regime, shape):
    """A gate and an up; one of the two is ordinary as often as not."""
    odd = int(rng.integers(3))
    return tuple(sweep(rng, shape, dtype, "normal" if i == odd else regime) for i in range(2))


def case(rng, dtype, regime):
    return pair(rng, dtype, regime, (int(rng.integers(1, 24)), pick(rng, [1, 5, 64, 300, 1024]))), {}


def large_case(rng, dtype, regime):
    shape = pick(rng, [7, 64]), pick(rng, [257, 1030])
    return tuple(draw(rng, shape, dtype, regime) for _ in range(2)), {}


def two(*shape):
    return lambda rng, dtype: (sweep(rng, shape, dtype), sweep(rng, shape, dtype))


def formula(gate, up):
    y = [g / (1 + math.exp(-g)) * u for g, u in zip(gate.ravel(), up.ravel(), strict=True)]
    return (np.reshape(y, gate.shape),)


def in_torch(gate, up):
    import torch

    return torch.nn.functional.silu(gate) * up


def in_jax(gate, up):
    import jax

    return jax.nn.silu(gate) * up


def call(*arrays, **options):
    return pk.op("swiglu")(*arrays, **options)


def fuzzed(r, dtype):
    shape = [r.extent() for _ in range(int(r.rng.integers(0, 4)))]
    return {"gate": r.array(dtype, *shape), "up": r.array(dtype, *shape)}, {}


def past_2_31(gpu):
    rows, n = gpu.big // 256 + 16, 256
    gate, up = (gpu.torch.randn(rows, n, dtype=gpu.torch.bfloat16, device=gpu.device) for _ in range(2))
    assert gate.numel() > gpu.big
    picked = gpu.rows_to_sample(rows, n)
    yield gpu.op("swiglu")(gate, up)[picked], (gate[picked], up[picked]), {}


def far(gpu):
    yield gpu.far((4, 300)), gpu.normal(4, 300, dtype=gpu.torch.bfloat16)
    yield gpu.far((4, 300)).T, gpu.normal(300, 4, dtype=gpu.torch.bfloat16)


X = zeros(2, 3)
WRONG = {
    "another shape": (lambda: call(X, zeros(2, 4)), r"swiglu: up .*expected"),
    "a shape to broadcast": (lambda: call(X, zeros(3)), r"swiglu: up .*expected"),
    "another dtype": (lambda: call(X, X.astype(ml_dtypes.bfloat16)), r"up is bfloat16 but gate is float32"),
    "one array": (lambda: call(X), r"swiglu.*up"),
}

RECORD = ForwardRecord(
    op="swiglu",
    simulate=simulate,
    variants=({}, {"base2": False}, {"ftz": True}, {"plain": True}, {"plain": True, "ftz": True}),
    case=case,
    regimes=SWEPT,
    near=Near(lambda rng: two(40, 64)(rng, "float32"), off={"y": 1.8e-6}),
    faults={
        "silu of up": Fault(two(4, 40), {"swapped": True}, breaks="y"),
        "exp of 1.01 gate": Fault(two(40, 40), {"scale": 1.01}, breaks="y"),
        "silu kept in bfloat16": Fault(two(40, 40), {"low": BF16}, breaks="y"),
        "1 % off": Fault(two(4, 40), {"factor": 1.01}, breaks="y"),
    },
    large_case=large_case,
    typical=lambda rng, dtype: (tuple(draw(rng, (64, 257), dtype) for _ in range(2)), {}),
    hiding={
        "y truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "y 6e-7 off": Hiding("typical", {"factor": 1 + 6e-7}, dtypes=("float32",)),
    },
    small={
        "plain": Sample({"gate": (2, 3), "up": (2, 3)}),
        "one axis": Sample({"gate": (5,), "up": (5,)}),
    },
    usual=(
        Sample({"gate": (64, 1000), "up": (64, 1000)}),
        Sample({"gate": (64, 1000), "up": (64, 1000)}, tiling={"block_rows": 16, "block_n": 128}),
        Sample({"gate": (4, 8, 384), "up": (4, 8, 384)}),
    ),
    formula=formula,
    formula_calls={"two axes": lambda: ((normal64(3, 7) * 3, normal64(3, 7, seed=1)), {})},
    formula_tolerance=(1e-14, 0),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample({"gate": (2, 3, 33), "up": (2, 3, 33)}),
    lowered={
        "rows": Sample({"gate": (70, 300), "up": (70, 300)}),
        "one axis": Sample({"gate": (700,), "up": (700,)}),
        "no axis": Sample({"gate": (), "up": ()}),
    },
    mapped={
        "both": Mapped(Sample({"gate": (2, 3, 4), "up": (3, 2, 4)}), {"gate": 0, "up": 1}),
        "shared up": Mapped(Sample({"gate": (2, 3, 4), "up": (3, 4)}), {"gate": 0}),
    },
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(lambda op, x, p: op(x * p["gate"], x), lambda width: {"gate": (width,)}),
    extents={"batch": 64},
    launched=Sample({"gate": (64, 512), "up": (64, 512)}),
    past_2_31=past_2_31,
    far=far,
)


# ---------------------------------------------------------------------------------------------------------- gradient
def simulate_vjp(gate, up, d_y, *, base2=True, ftz=False, plain=False, rest=False, flat=False, low=None, factor=1.0,
             late=False):  # fmt: skip
    """``late``: up comes last; ``rest``: q is 1 - s; ``flat``: the slope without its second term."""
    g, s, q = parts(gate, base2=base2, ftz=ftz, plain=plain)
    u, d = (flush(a.astype(g.dtype), ftz) for a in (up, d_y))
    q = 1 - s if rest else q
    slope = through(s if flat else s * (1 + flush(g * q, ftz)), low)
    d_gate = flush(d * slope, ftz) * u if late else flush(d * u, ftz) * slope
    d_up = d * flush(g * s, ftz)
    return flush(d_gate * g.dtype.type(factor), ftz), flush(d_up * g.dtype.type(factor), ftz)


def any_case(rng, dtype, regime, shape):
    odd = int(rng.integers(4))
    return tuple(draw(rng, shape, dtype, "normal" if i == odd else regime) for i in range(3)), {}


def case_vjp(rng, dtype, regime):
    return any_case(rng, dtype, regime, (int(rng.integers(1, 24)), pick(rng, [1, 5, 64, 300, 1024])))


def large_case_vjp(rng, dtype, regime):
    return any_case(rng, dtype, regime, (pick(rng, [7, 64]), pick(rng, [257, 1030])))


def arrays(rng, dtype):
    return tuple(draw(rng, (64, 257), dtype) for _ in range(3))


def closing(rng, dtype):
    """Gates where q is small."""
    gate, up, d_y = arrays(rng, dtype)
    return (gate * gate.dtype.type(3) + gate.dtype.type(12)), up, d_y


def past_2_31_vjp(gpu):
    rows, n = gpu.big // 256 + 16, 256
    gate, up = (gpu.torch.randn(rows, n, dtype=gpu.torch.bfloat16, device=gpu.device) for _ in range(2))
    picked = gpu.rows_to_sample(rows, n)
    d_y = gpu.sampled(gate, picked)
    outputs = gpu.op("swiglu_vjp")(gate, up, d_y)
    assert outputs[0].numel() > gpu.big
    yield tuple(d[picked] for d in outputs), (gate[picked], up[picked], d_y[picked]), {}


def far_vjp(gpu):
    yield gpu.far((4, 300)), *(gpu.normal(4, 300, dtype=gpu.torch.bfloat16) for _ in range(2))


GRADIENT = GradientRecord(
    op="swiglu_vjp",
    simulate=simulate_vjp,
    variants=({}, {"base2": False, "late": True}, {"ftz": True}, {"plain": True}, {"plain": True, "ftz": True}),
    case=case_vjp,
    regimes=CHECKED,
    near=Near(lambda rng: arrays(rng, "float32"), off={"d_gate": 2.5e-6, "d_up": 1.4e-6}),
    faults={
        "s alone": Fault(arrays, {"flat": True}, breaks="d_gate"),
        "the slope kept in bfloat16": Fault(arrays, {"low": BF16}, breaks="d_gate"),
        "gradients 1 % off": Fault(arrays, {"factor": 1.01}, breaks="d_up"),
    },
    large_case=large_case_vjp,
    typical=lambda rng, dtype: (arrays(rng, dtype), {}),
    hiding={
        "gradients truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "gradients 6e-7 off": Hiding("typical", {"factor": 1 + 6e-7}, dtypes=("float32",)),
    },
    small={"one gradient": Sample({"gate": (2, 3), "up": (2, 3), "d_y": (2, 3)}, wants=("d_up",))},
    usual=(
        Sample({"gate": (64, 1000), "up": (64, 1000), "d_y": (64, 1000)}),
        Sample({"gate": (64, 1000), "up": (64, 1000), "d_y": (64, 1000)}, tiling={"block_rows": 16, "block_n": 128}),
        Sample({"gate": (4, 8, 384), "up": (4, 8, 384), "d_y": (4, 8, 384)}),
    ),
    extents={"batch": 64},
    past_2_31=past_2_31_vjp,
    far=far_vjp,
)
