"""d_hidden = d_loss slope and d_weight = (d_loss b)^T hidden, b the derivative of a row's loss by its logits."""

from __future__ import annotations

import numpy as np

from tests.ops import cross_entropy_vjp, linear_cross_entropy
from tests.ops._shared import BF16, CHECKED, HALVES, accumulator, draw, flush, outputs_of, pick, through
from tests.ops.linear_cross_entropy import arrays_of, logits_of, product
from tests.ops.record import Fault, GradientRecord, Hiding, Near, Sample


def simulate(hidden, weight, labels, lse, slope, d_loss, lse_low=None, ignore_index=-100, label_smoothing=0.0,
             z_loss=0.0, precision="ieee", *, stored=True, ftz=False, block=32, tail=True, low=None, cut=False,
             halves=False,
             of_sum=None, scaled=1.0, **how):  # fmt: skip
    """``halves``: d_weight is the sum of two products that are rounded first; ``of_sum``: kept in a narrower dtype as
    it is added up; ``scaled``: d_hidden; the others are those of the forward op and of cross_entropy_vjp."""
    acc, precision = accumulator(hidden), "tf32" if cut else precision
    x = logits_of(hidden, weight, precision, stored, block=block, ftz=ftz)
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
    (d_x,) = cross_entropy_vjp.simulate(x, labels, lse, d_loss, lse_low, **options, ftz=ftz, low=low, **how)
    d_x, rows = (a.reshape(-1, a.shape[-1]) for a in (through(d_x, hidden.dtype).astype(hidden.dtype), hidden))
    sums = {"block": block, "ftz": ftz, "tail": tail, "low": of_sum}
    if halves:
        at = len(rows) // 2
        parts = (through(product(d_x[s].T, rows[s], precision), hidden.dtype) for s in (np.s_[:at], np.s_[at:]))
        d_weight = sum(parts)
    else:
        d_weight = product(np.ascontiguousarray(d_x.T), rows, precision, **(sums if acc is np.float32 else {}))
    d_hidden = flush(slope.astype(acc), ftz) * flush(d_loss, ftz)[..., None] * acc(scaled)
    d_hidden = np.where((labels != ignore_index)[..., None], flush(d_hidden, ftz), acc(0))
    return d_hidden, d_weight


def any_case(rng, dtype, regime, rows, n, d):
    options = {"label_smoothing": pick(rng, [0.0, 0.1]), "z_loss": pick(rng, [0.0, 1e-4, 0.1])}
    hidden, weight, labels = arrays_of(rng, dtype, rows, n, d, regime)
    _, lse, slope = outputs_of(
        "linear_cross_entropy", hidden, weight, labels, return_lse=True, return_slope=True, **options
    )
    wide = "float64" if dtype == "float64" else "float32"
    return (hidden, weight, labels, lse, slope, draw(rng, (rows,), wide)), options


def case(rng, dtype, regime):
    return any_case(rng, dtype, regime, int(rng.integers(1, 24)), pick(rng, [1, 5, 64, 130]), pick(rng, [1, 7, 40]))


def large_case(rng, dtype, regime):
    return any_case(rng, dtype, regime, pick(rng, [64, 200]), pick(rng, [17, 65]), pick(rng, [16, 40]))


def made(rng, dtype, **options):
    """Rows of which none is ignored."""
    hidden, weight, labels = linear_cross_entropy.rows(64, 65, 40)(rng, dtype)
    _, lse, slope = outputs_of(
        "linear_cross_entropy", hidden, weight, labels, return_lse=True, return_slope=True, **options
    )
    wide = "float64" if dtype == "float64" else "float32"
    return hidden, weight, labels, lse, slope, 1 + np.abs(draw(rng, (64,), wide))


def padded(rng, dtype):
    hidden, weight, labels, *others = made(rng, dtype)
    return hidden, weight, np.where(np.arange(64) % 3, labels, -100), *others


def past_2_31(gpu):
    rows, d, n = gpu.big // 256 + 16, 256, 24
    hidden = gpu.torch.randn(rows, d, dtype=gpu.torch.bfloat16, device=gpu.device)
    assert hidden.numel() > gpu.big
    weight = gpu.normal(n, d, dtype=gpu.torch.bfloat16) / 16
    labels, picked = gpu.torch.randint(0, n, (rows,), device=gpu.device), gpu.rows_to_sample(rows, d)
    lse, d_loss = 4 + gpu.normal(rows), gpu.torch.zeros(rows, device=gpu.device)
    d_loss[picked] = gpu.normal(len(picked))
    d_hidden, d_weight = gpu.op("linear_cross_entropy_vjp")(hidden, weight, labels, lse, hidden, d_loss)
    some = hidden[picked]
    yield (d_hidden[picked], d_weight), (some, weight, labels[picked], lse[picked], some, d_loss[picked]), {}


def far(gpu):
    weight = gpu.normal(20, 300, dtype=gpu.torch.bfloat16) / 16
    labels = gpu.torch.tensor([0, 19, -100, 7], device=gpu.device)
    yield gpu.far((4, 300)), weight, labels, 4 + gpu.normal(4), gpu.far((4, 300)), gpu.normal(4)


def shapes(rows, n, d):
    of_rows = dict.fromkeys(("labels", "lse", "d_loss"), (rows,))
    return {"hidden": (rows, d), "weight": (n, d), "slope": (rows, d), **of_rows}


RECORD = GradientRecord(
    op="linear_cross_entropy_vjp",
    simulate=simulate,
    variants=({}, {"block": 16}, {"stored": False}, {"base2": False}, {"ftz": True}),
    case=case,
    regimes=CHECKED,
    near=Near(lambda rng: made(rng, "float32"), off={"d_hidden": 2e-7, "d_weight": 1e-5}),
    faults={
        "the class beside the label": Fault(made, {"off": 1}, breaks="d_weight"),
        "1 % off": Fault(made, {"factor": 1.1}, breaks="d_weight"),
        "without z": Fault(made, {"plain": True}, {"z_loss": 1e-1}, breaks="d_weight"),
        "without smoothing": Fault(made, {"label_smoothing": 0.0}, {"label_smoothing": 0.3}, breaks="d_weight"),
        "ignored rows counted": Fault(padded, {"all_rows": True}, breaks="d_weight"),
        "rows without their tail": Fault(
            lambda rng, dtype: tuple(x[:50] if len(x) == 64 else x for x in made(rng, dtype)),
            {"tail": False},
            breaks="d_weight",
        ),
        "d_hidden of another cotangent": Fault(made, {"scaled": 1.01}, breaks="d_hidden"),
    },
    large_case=large_case,
    typical=lambda rng, dtype: (made(rng, dtype), {}),
    hiding={
        "both truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "products of tf32 for ieee": Hiding("typical", {"cut": True}, dtypes=("float32",)),
        "d_weight added up in bfloat16": Hiding("typical", {"of_sum": BF16, "block": 4}, dtypes=HALVES),
    },
    small={"plain": Sample(shapes(3, 4, 5))},
    usual=(
        Sample(shapes(64, 300, 96)),
        Sample(shapes(64, 300, 96), {"label_smoothing": 0.1, "z_loss": 1e-3}, {"chunk_n": 64}),
        Sample(shapes(40, 70, 33), {"z_loss": 1e-3}, {"chunk_n": 16}),
    ),
    extents={"batch": 2, "n": 128, "d": 64},
    matrix_units=True,
    past_2_31=past_2_31,
    far=far,
)
