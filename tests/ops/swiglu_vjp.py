"""d_gate = d_y up s (1 + gate q), d_up = d_y gate s."""

from __future__ import annotations

from tests.ops._shared import BF16, CHECKED, HALVES, draw, flush, pick, through
from tests.ops.record import Fault, GradientRecord, Hiding, Near, Sample
from tests.ops.swiglu import parts


def simulate(gate, up, d_y, *, base2=True, ftz=False, plain=False, rest=False, flat=False, low=None, factor=1.0,
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


def case(rng, dtype, regime):
    return any_case(rng, dtype, regime, (int(rng.integers(1, 24)), pick(rng, [1, 5, 64, 300, 1024])))


def large_case(rng, dtype, regime):
    return any_case(rng, dtype, regime, (pick(rng, [7, 64]), pick(rng, [257, 1030])))


def arrays(rng, dtype):
    return tuple(draw(rng, (64, 257), dtype) for _ in range(3))


def closing(rng, dtype):
    """Gates where q is small."""
    gate, up, d_y = arrays(rng, dtype)
    return (gate * gate.dtype.type(3) + gate.dtype.type(12)), up, d_y


def past_2_31(gpu):
    rows, n = gpu.big // 256 + 16, 256
    gate, up = (gpu.torch.randn(rows, n, dtype=gpu.torch.bfloat16, device=gpu.device) for _ in range(2))
    picked = gpu.rows_to_sample(rows, n)
    d_y = gpu.sampled(gate, picked)
    outputs = gpu.op("swiglu_vjp")(gate, up, d_y)
    assert outputs[0].numel() > gpu.big
    yield tuple(d[picked] for d in outputs), (gate[picked], up[picked], d_y[picked]), {}


def far(gpu):
    yield gpu.far((4, 300)), *(gpu.normal(4, 300, dtype=gpu.torch.bfloat16) for _ in range(2))


RECORD = GradientRecord(
    op="swiglu_vjp",
    simulate=simulate,
    variants=({}, {"base2": False, "late": True}, {"ftz": True}, {"plain": True}, {"plain": True, "ftz": True}),
    case=case,
    regimes=CHECKED,
    near=Near(lambda rng: arrays(rng, "float32"), off={"d_gate": 2.5e-6, "d_up": 1.4e-6}),
    faults={
        "s alone": Fault(arrays, {"flat": True}, breaks="d_gate"),
        "the slope kept in bfloat16": Fault(arrays, {"low": BF16}, breaks="d_gate"),
        "gradients 1 % off": Fault(arrays, {"factor": 1.01}, breaks="d_up"),
    },
    large_case=large_case,
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
    past_2_31=past_2_31,
    far=far,
)
