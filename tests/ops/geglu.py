"""y = gate P(gate) up, with P(g) = (1 + erf(g / sqrt 2)) / 2 or 1 / (1 + exp(-t)), t = 2 sqrt(2 / pi) (g + C g^3).

d_gate = d_y up D(gate), d_up = d_y gate P(gate), D the slope of g P(g).
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

import portakern as pk
from tests.ops._shared import BF16, CHECKED, HALVES, SWEPT, accumulator, draw, flush, normal64, pick, through, zeros
from tests.ops.record import Fault, ForwardRecord, GradientRecord, Hiding, Layer, Mapped, Near, Sample
from tests.ops.swiglu import pair, two

K, C = 2 * math.sqrt(2 / math.pi), 0.044715
each_erf = np.vectorize(math.erf, otypes=[np.float64])


def share(g, approximate, *, plain=False, ftz=False, cube=C, low=None):
    """P of a gate in the accumulator's type. ``plain``: as 1 + tanh; ``cube``: another C; ``low``: of its argument."""
    acc = g.dtype.type
    if approximate == "none":
        argument = through(g * acc(math.sqrt(0.5)), low)
        return acc(0.5) * (1 + each_erf(argument).astype(g.dtype))
    t = through(flush(acc(K) * g * (1 + acc(cube) * g * g), ftz), low)
    if plain:
        return acc(0.5) * (1 + np.tanh(t / 2))
    e = np.exp(-np.abs(t))
    high = 1 / (1 + e)
    return np.where(t >= 0, high, flush(e * high, ftz))


def simulate(gate, up, approximate="none", *, plain=False, ftz=False, cube=C, low=None, kept=None, factor=1.0):
    """``kept``: gelu kept in a narrower dtype; the others: of :func:`share`."""
    g = flush(gate.astype(accumulator(gate)), ftz)
    gelu = through(flush(g * share(g, approximate, plain=plain, ftz=ftz, cube=cube, low=low), ftz), kept)
    return (flush(gelu * flush(up.astype(g.dtype), ftz) * g.dtype.type(factor), ftz),)


def form(rng):
    return {"approximate": pick(rng, ["none", "tanh"])}


def case(rng, dtype, regime):
    return pair(rng, dtype, regime, (int(rng.integers(1, 24)), pick(rng, [1, 5, 64, 300]))), form(rng)


def large_case(rng, dtype, regime):
    shape = pick(rng, [7, 64]), pick(rng, [257, 1030])
    return tuple(draw(rng, shape, dtype, regime) for _ in range(2)), form(rng)


def formula(gate, up, approximate="none"):
    def gelu(g):
        inner = math.sqrt(2 / math.pi) * (g + C * g**3)
        return g * (0.5 * (1 + math.tanh(inner)) if approximate == "tanh" else 0.5 * math.erfc(-g / math.sqrt(2)))

    y = [gelu(g) * u for g, u in zip(gate.ravel(), up.ravel(), strict=True)]
    return (np.reshape(y, gate.shape),)


def in_torch(gate, up, approximate="none"):
    import torch

    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def in_jax(gate, up, approximate="none"):
    import jax

    return jax.nn.gelu(gate, approximate=approximate == "tanh") * up


def call(*arrays, **options):
    return pk.op("geglu")(*arrays, **options)


def fuzzed(r, dtype):
    shape = [r.extent() for _ in range(int(r.rng.integers(0, 4)))]
    arrays = {"gate": r.array(dtype, *shape), "up": r.array(dtype, *shape)}
    return arrays, {"approximate": r.pick(("none", "tanh"))}


def past_2_31(gpu):
    rows, n = gpu.big // 256 + 16, 256
    gate, up = (gpu.torch.randn(rows, n, dtype=gpu.torch.bfloat16, device=gpu.device) for _ in range(2))
    assert gate.numel() > gpu.big
    picked = gpu.rows_to_sample(rows, n)
    yield gpu.op("geglu")(gate, up)[picked], (gate[picked], up[picked]), {}


def far(gpu):
    yield gpu.far((4, 300)), gpu.normal(4, 300, dtype=gpu.torch.bfloat16)
    yield gpu.far((4, 300)).T, gpu.normal(300, 4, dtype=gpu.torch.bfloat16)


X, TANH = zeros(2, 3), {"approximate": "tanh"}
WRONG = {
    "another shape": (lambda: call(X, zeros(2, 4)), r"geglu: up .*expected"),
    "a shape to broadcast": (lambda: call(X, zeros(3)), r"geglu: up .*expected"),
    "another dtype": (lambda: call(X, X.astype(ml_dtypes.bfloat16)), r"up is bfloat16 but gate is float32"),
    "one array": (lambda: call(X), r"geglu.*up"),
    "JAX's option": (lambda: call(X, X, approximate=True), r"approximate is True; expected one of 'none', 'tanh'"),
}
ROWS = {"gate": (64, 1000), "up": (64, 1000)}

RECORD = ForwardRecord(
    op="geglu",
    simulate=simulate,
    variants=({}, {"plain": True}, {"ftz": True}),
    case=case,
    regimes=SWEPT,
    near=Near(lambda rng: two(40, 64)(rng, "float32"), off={"y": 6.5e-7}),
    faults={
        "the other form": Fault(two(40, 40), {"approximate": "tanh"}, breaks="y", dtypes=("float32",)),
        "another cube": Fault(two(40, 40), {"cube": 0.045}, TANH, breaks="y", dtypes=("float32", "float16")),
        "an argument in bfloat16": Fault(two(40, 40), {"low": BF16}, breaks="y"),
        "gelu kept in bfloat16": Fault(two(40, 40), {"kept": BF16}, breaks="y"),
        "1 % off": Fault(two(4, 40), {"factor": 1.01}, breaks="y"),
    },
    large_case=large_case,
    typical=lambda rng, dtype: (tuple(draw(rng, (64, 257), dtype) for _ in range(2)), {}),
    hiding={"y truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES)},
    small={
        "plain": Sample({"gate": (2, 3), "up": (2, 3)}),
        "tanh": Sample({"gate": (5,), "up": (5,)}, TANH),
    },
    usual=(
        Sample(ROWS),
        Sample(ROWS, TANH, tiling={"block_rows": 16, "block_n": 128}),
        Sample({"gate": (4, 8, 384), "up": (4, 8, 384)}, TANH),
    ),
    formula=formula,
    formula_calls={
        approximate: lambda approximate=approximate: (
            (normal64(3, 7) * 2, normal64(3, 7, seed=1)),
            {"approximate": approximate},
        )
        for approximate in ("none", "tanh")
    },
    formula_tolerance=(1e-12, 1e-15),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample({"gate": (2, 3, 33), "up": (2, 3, 33)}, TANH),
    lowered={
        "rows": Sample({"gate": (70, 300), "up": (70, 300)}),
        "one axis": Sample({"gate": (700,), "up": (700,)}, TANH),
    },
    mapped={"both": Mapped(Sample({"gate": (2, 3, 4), "up": (3, 2, 4)}, TANH), {"gate": 0, "up": 1})},
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(lambda op, x, p: op(x * p["gate"], x), lambda width: {"gate": (width,)}),
    extents={"batch": 64},
    launched=Sample({"gate": (64, 512), "up": (64, 512)}),
    past_2_31=past_2_31,
    far=far,
)


# ---------------------------------------------------------------------------------------------------------- gradient
def simulate_vjp(
    gate,
    up,
    d_y,
    approximate="none",
    *,
    plain=False,
    ftz=False,
    flat=False,
    cube=3 * C,
    low=None,
    factor=1.0,
    late=False,
):
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


def case_vjp(rng, dtype, regime):
    return any_case(rng, dtype, regime, (int(rng.integers(1, 24)), pick(rng, [1, 5, 64, 300])))


def large_case_vjp(rng, dtype, regime):
    return any_case(rng, dtype, regime, (pick(rng, [7, 64]), pick(rng, [257, 1030])))


def arrays(rng, dtype):
    return tuple(draw(rng, (64, 257), dtype) for _ in range(3))


def past_2_31_vjp(gpu):
    rows, n = gpu.big // 256 + 16, 256
    gate, up = (gpu.torch.randn(rows, n, dtype=gpu.torch.bfloat16, device=gpu.device) for _ in range(2))
    picked = gpu.rows_to_sample(rows, n)
    d_y = gpu.sampled(gate, picked)
    outputs = gpu.op("geglu_vjp")(gate, up, d_y)
    assert outputs[0].numel() > gpu.big
    yield tuple(d[picked] for d in outputs), (gate[picked], up[picked], d_y[picked]), {}


def far_vjp(gpu):
    yield gpu.far((4, 300)), *(gpu.normal(4, 300, dtype=gpu.torch.bfloat16) for _ in range(2))


ROWS_vjp = {"gate": (64, 1000), "up": (64, 1000), "d_y": (64, 1000)}

GRADIENT = GradientRecord(
    op="geglu_vjp",
    simulate=simulate_vjp,
    variants=({}, {"late": True}, {"ftz": True}),
    case=case_vjp,
    regimes=CHECKED,
    near=Near(lambda rng: arrays(rng, "float32"), off={"d_gate": 5.7e-7, "d_up": 4.7e-7}),
    faults={
        "P alone": Fault(arrays, {"flat": True}, breaks="d_gate"),
        "the cube's derivative, once": Fault(arrays, {"cube": C}, TANH, breaks="d_gate"),
        "the slope kept in bfloat16": Fault(arrays, {"low": BF16}, breaks="d_gate"),
        "gradients 1 % off": Fault(arrays, {"factor": 1.01}, breaks="d_up"),
    },
    large_case=large_case_vjp,
    typical=lambda rng, dtype: (arrays(rng, dtype), {}),
    hiding={"gradients truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES)},
    small={"one gradient": Sample({"gate": (2, 3), "up": (2, 3), "d_y": (2, 3)}, TANH, wants=("d_up",))},
    usual=(Sample(ROWS_vjp), Sample(ROWS_vjp, TANH, tiling={"block_rows": 16, "block_n": 128})),
    extents={"batch": 64},
    past_2_31=past_2_31_vjp,
    far=far_vjp,
)
