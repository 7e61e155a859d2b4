"""d_logits = d_loss [p (1 + 2 z lse) - (1 - e) [j = t] - e / n], p = exp(min(logits - lse, 0))."""

from __future__ import annotations

import numpy as np

from tests.ops._shared import BF16, CHECKED, HALVES, accumulator, draw, flush, outputs_of, pick, through
from tests.ops.cross_entropy import with_labels
from tests.ops.record import Fault, GradientRecord, Hiding, Near, Sample


def simulate(logits, labels, lse, d_loss, lse_low=None, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, *,
             ftz=False, base2=True, inside=False, low=None, factor=1.0, off=0, all_rows=False,
             plain=False):  # fmt: skip
    """``inside``: e / n joins the target first; ``low``: p kept in a narrower dtype; ``off``: the label's neighbour is
    hit; ``plain``: z is left out."""
    acc, n = accumulator(logits), logits.shape[-1]
    x, g, s = (flush(a.astype(acc), ftz) for a in (logits, d_loss[..., None], lse[..., None]))
    e, z = acc(label_smoothing), acc(0 if plain else z_loss)
    d = np.minimum((x - s) - (acc(0) if lse_low is None else lse_low[..., None].astype(acc)), acc(0))
    p = through(flush(np.exp2(d * acc(np.log2(np.e))) if base2 else np.exp(d), ftz), low)
    p = p * (acc(1) + acc(2) * z * s) if z else p
    hit = np.where(np.arange(n) == (labels[..., None] + off) % n, acc(1) - e, acc(0))
    bracket = p - (hit + e / acc(n)) if inside else p - hit - e / acc(n) if e else p - hit
    counted = np.full(labels.shape, True) if all_rows else labels != ignore_index
    return (np.where(counted[..., None], flush(g * bracket * acc(factor), ftz), acc(0)),)


def saved(x, labels, **options):
    """lse as the forward op stores it."""
    return outputs_of("cross_entropy", x, labels, return_lse=True, **options)[1]


def any_case(rng, dtype, regime, rows, n, ignored=True):
    options = {"label_smoothing": pick(rng, [0.0, 0.1]), "z_loss": pick(rng, [0.0, 1e-4, 0.1])}
    x, labels = with_labels(rng, draw(rng, (rows, n), dtype, regime))
    labels = labels if ignored else np.abs(labels) % n
    wide = "float64" if dtype == "float64" else "float32"
    return (x, labels, saved(x, labels, **options), draw(rng, (rows,), wide)), options


def case(rng, dtype, regime):
    return any_case(rng, dtype, regime, int(rng.integers(1, 24)), pick(rng, [1, 5, 64, 300, 1024]))


def large_case(rng, dtype, regime):
    return any_case(rng, dtype, regime, pick(rng, [7, 64]), pick(rng, [64, 257, 1030]))


def arrays(rng, dtype, **options):
    x, labels = draw(rng, (64, 257), dtype), rng.integers(0, 257, 64)
    wide = "float64" if dtype == "float64" else "float32"
    return x, labels, saved(x, labels, **options), 1 + np.abs(draw(rng, (64,), wide))


def padded(rng, dtype):
    x, labels, lse, d_loss = arrays(rng, dtype)
    return x, np.where(np.arange(64) % 3, labels, -100), lse, d_loss


def past_2_31(gpu):
    rows, n = gpu.big // 256 + 16, 256
    x = gpu.torch.randn(rows, n, dtype=gpu.torch.bfloat16, device=gpu.device)
    labels, picked = gpu.torch.randint(0, n, (rows,), device=gpu.device), gpu.rows_to_sample(rows, n)
    lse, d_loss = (6 + gpu.normal(rows, dtype=gpu.torch.float32) for _ in range(2))
    d_x = gpu.op("cross_entropy_vjp")(x, labels, lse, d_loss)
    d_x = d_x[0] if isinstance(d_x, tuple) else d_x
    assert d_x.numel() > gpu.big
    yield (d_x[picked],), (x[picked], labels[picked], lse[picked], d_loss[picked]), {}


def far(gpu):
    labels = gpu.torch.tensor([0, 299, -100, 7], device=gpu.device)
    yield gpu.far((4, 300)), labels, *(6 + gpu.normal(4, dtype=gpu.torch.float32) for _ in range(2))


SHAPES = {"logits": (64, 1000), "labels": (64,), "lse": (64,), "d_loss": (64,)}

RECORD = GradientRecord(
    op="cross_entropy_vjp",
    simulate=simulate,
    variants=({}, {"base2": False}, {"inside": True}, {"ftz": True}, {"base2": False, "ftz": True}),
    case=case,
    regimes=CHECKED,
    near=Near(lambda rng: arrays(rng, "float32"), off={"d_logits": 2e-6}),
    faults={
        "the class beside the label": Fault(arrays, {"off": 1}, breaks="d_logits"),
        "p kept in bfloat16": Fault(arrays, {"low": BF16}, breaks="d_logits"),
        "1 % off": Fault(arrays, {"factor": 1.01}, breaks="d_logits"),
        "without z": Fault(arrays, {"plain": True}, {"z_loss": 1e-2}, breaks="d_logits"),
        "without smoothing": Fault(arrays, {"label_smoothing": 0.0}, {"label_smoothing": 0.1}, breaks="d_logits"),
        "ignored rows counted": Fault(padded, {"all_rows": True}, breaks="d_logits"),
    },
    large_case=large_case,
    typical=lambda rng, dtype: (arrays(rng, dtype), {}),
    hiding={
        "d_logits truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "d_logits 1.5e-6 off": Hiding("typical", {"factor": 1 + 1.5e-6}, dtypes=("float32",)),
    },
    small={"plain": Sample({"logits": (3, 4), "labels": (3,), "lse": (3,), "d_loss": (3,)})},
    usual=(
        Sample(SHAPES),
        Sample(SHAPES, {"label_smoothing": 0.1, "z_loss": 1e-3}, {"block_rows": 16, "block_n": 128}),
        Sample({"logits": (4, 8, 384), "labels": (4, 8), "lse": (4, 8), "d_loss": (4, 8)}, {"z_loss": 1e-3}),
    ),
    extents={"batch": 2, "n": 128},
    past_2_31=past_2_31,
    far=far,
)
