"""loss = log l + (1 - e) (m - x_t) + e (m - mean x) + z lse^2, lse = m + log l.

d_logits = d_loss [p (1 + 2 z lse) - (1 - e) [j = t] - e / n], p = exp(min(logits - lse, 0)).
"""

from __future__ import annotations

import math

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
    in_blocks,
    outputs_of,
    pick,
    sweep,
    through,
    zeros,
)
from tests.ops.logsumexp import sums
from tests.ops.record import Fault, ForwardRecord, GradientRecord, Hiding, Layer, Mapped, Near, Sample, Twin


def simulate(logits, labels, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, return_lse=False, *, block=None,
             ftz=False, shift=True, base2=True, tail=True, low=None, off=0, factor=1.0, late=False, all_rows=False,
             more=0.0):  # fmt: skip
    """``off``: the label's neighbour is taken; ``factor``: of e; ``late``: lse - x_t instead; ``all_rows``: none is
    ignored."""
    x, _, m, l = sums(logits, -1, block=block, ftz=ftz, shift=shift, base2=base2, tail=tail, low=low)
    acc, n = l.dtype.type, x.shape[-1]
    e, z = acc(label_smoothing * factor), acc(z_loss)
    log = (np.log2(l) * acc(np.log(2)) if base2 else np.log(l)) + acc(more)
    origin = np.where(np.isinf(m), acc(0), m)
    counted = np.full(labels.shape, True) if all_rows else labels != ignore_index
    at = np.take_along_axis(x, np.where(labels == ignore_index, 0, (labels + off) % n)[..., None], -1)
    lse = origin + log
    loss = lse - (acc(1) - e) * at - e * origin if late else log + (acc(1) - e) * (origin - at)
    if e:
        loss = loss + e * (origin - in_blocks(x, block or n) / acc(n))
    if z:
        loss = loss + z * np.square(lse)
    loss, lse = (np.where(counted, flush(y, ftz)[..., 0], acc(0)) for y in (loss, lse))
    return loss, lse if return_lse else None


def with_labels(rng, x, ignored=-100):
    """x and a label a row, a fifth of them ignored."""
    labels = rng.integers(0, x.shape[-1], x.shape[:-1])
    labels = np.where(rng.random(labels.shape) < 0.2, ignored, labels)
    return x, labels.astype(pick(rng, [np.int32, np.int64]))


def any_options(rng):
    return {
        "label_smoothing": pick(rng, [0.0, 0.1, 1.0]), "z_loss": pick(rng, [0.0, 1e-4, 0.1]),
        "ignore_index": pick(rng, [-100, 0]), "return_lse": True,
    }  # fmt: skip


def case(rng, dtype, regime):
    options = any_options(rng)
    x = sweep(rng, (rng.integers(1, 24), rng.choice([1, 5, 64, 300, 1024])), dtype, regime)
    return with_labels(rng, x, options["ignore_index"]), options


def large_case(rng, dtype, regime):
    options = any_options(rng)
    x = draw(rng, (pick(rng, [700, 1500]), pick(rng, [17, 257])), dtype, regime)
    return with_labels(rng, x, options["ignore_index"]), options


def rows(count, n, spread=1.0):
    """Rows of which none is ignored."""

    def arrays(rng, dtype="float32"):
        x = sweep(rng, (count, n), dtype)
        return x * x.dtype.type(spread), rng.integers(0, n, count)

    return arrays


def padded(rng, dtype):
    return with_labels(rng, sweep(rng, (40, 30), dtype))


def certain(rng, dtype="float32"):
    """The label is far above the others, and all are far from 0."""
    x = (64 + np.round(sweep(rng, (40, 30), "float32"))).astype(np.float32)
    labels = rng.integers(0, 30, 40)
    x[np.arange(40), labels] = 80
    return x.astype(sweep(rng, (1,), dtype).dtype), labels


def formula(logits, labels, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, return_lse=False):
    e, found = label_smoothing, np.zeros((2, *labels.shape))
    for row in np.ndindex(labels.shape):
        x, t = [float(v) for v in logits[row]], int(labels[row])
        if t == ignore_index:
            continue
        lse = math.log(math.fsum(map(math.exp, x)))
        log_p = [v - lse for v in x]
        found[(0, *row)] = -(1 - e) * log_p[t] - e * math.fsum(log_p) / len(x) + z_loss * lse**2
        found[(1, *row)] = lse
    return found[0], found[1] if return_lse else None


def in_torch(logits, labels, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, return_lse=False):
    """PyTorch's own function; z and lse are no part of it."""
    import torch

    wide = logits.double() if logits.dtype == torch.float64 else logits.float()
    labels = torch.as_tensor(labels)
    n, flat = wide.shape[-1], labels.reshape(-1).long()
    loss = torch.nn.functional.cross_entropy(
        wide.reshape(-1, n), flat, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    lse = torch.where(labels == ignore_index, 0, torch.logsumexp(wide, -1))
    loss = loss.reshape(labels.shape) + (z_loss * lse**2 if z_loss else 0)
    return (loss, lse) if return_lse else loss


def in_jax(logits, labels, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, return_lse=False):
    import jax
    import jax.numpy as jnp

    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    counted, log_p = labels != ignore_index, jax.nn.log_softmax(wide)
    at = jnp.take_along_axis(log_p, jnp.where(counted, labels, 0)[..., None], -1)[..., 0]
    lse = jnp.where(counted, jax.nn.logsumexp(wide, -1), 0)
    loss = jnp.where(counted, -(1 - label_smoothing) * at - label_smoothing * log_p.mean(-1) + z_loss * lse**2, 0)
    return (loss, lse) if return_lse else loss


def call(*arrays, **options):
    return pk.op("cross_entropy")(*arrays, **options)


def narrowed(loss, x):
    """In x's dtype, in PyTorch as in JAX."""
    return loss.astype(x.dtype) if hasattr(loss, "astype") else loss.to(x.dtype)


def fuzzed(r, dtype):
    rows, n = r.extent(), r.extent()
    labels = r.rng.integers(0, max(n, 1), rows).astype(r.pick((np.int32, np.int64)))
    return {"logits": r.array(dtype, rows, n), "labels": labels}, {"label_smoothing": r.pick((0.0, 0.1))}


def past_2_31(gpu):
    rows, n = gpu.big // 256 + 16, 256
    x = gpu.torch.randn(rows, n, dtype=gpu.torch.bfloat16, device=gpu.device)
    assert x.numel() > gpu.big
    labels = gpu.torch.randint(0, n, (rows,), device=gpu.device)
    picked = gpu.rows_to_sample(rows, n)
    yield (gpu.op("cross_entropy")(x, labels)[picked], None), (x[picked], labels[picked]), {}


def far(gpu):
    yield gpu.far((4, 300)), gpu.torch.tensor([0, 299, -100, 7], device=gpu.device)


X, T = zeros(2, 3), np.zeros(2, np.int64)
WRONG = {
    "one label": (lambda: call(X, np.zeros(1, np.int64)), r"cross_entropy: labels .*expected"),
    "labels of floats": (lambda: call(X, zeros(2)), r"labels is float32; expected .*int32"),
    "probabilities for labels": (lambda: call(X, X), r"cross_entropy: labels .*expected"),
    "no classes": (lambda: call(zeros(2, 0), T), r"cross_entropy: n is 0"),
    "a label that is no class": (
        lambda: pk.op("cross_entropy", backend="reference")(X, T + 3),
        r"labels must be from 0 to n - 1, or ignore_index",
    ),
    "smoothing beyond 1": (lambda: call(X, T, label_smoothing=1.5), r"label_smoothing is 1.5; expected .*in \[0, 1\]"),
    "an ignored label of none": (lambda: call(X, T, ignore_index=None), r"ignore_index is None; expected an integer"),
}

RECORD = ForwardRecord(
    op="cross_entropy",
    simulate=simulate,
    variants=({}, {"block": 128}, {"base2": False, "block": 1024}, {"ftz": True}),
    case=case,
    regimes=SWEPT,
    near=Near(rows(40, 257), {"return_lse": True}, plant={"more": 1.4e-5}),
    faults={
        "the class beside the label": Fault(rows(4, 40), {"off": 1}, breaks="loss"),
        "without its tail": Fault(rows(4, 140), {"tail": False, "block": 16}, breaks="loss"),
        "without the maximum": Fault(rows(4, 40, 200.0), {"shift": False}, breaks="loss"),
        "adding up in 16 bits": Fault(rows(40, 300), {"low": BF16, "block": 16}, breaks="loss"),
        "1 % of the smoothing": Fault(rows(40, 30), {"factor": 1.01}, {"label_smoothing": 0.5}, breaks="loss"),
        "another z": Fault(rows(40, 30), {"z_loss": 2e-3}, {"z_loss": 1e-3}, breaks="loss"),
        "ignored rows counted": Fault(padded, {"all_rows": True}, breaks="loss"),
        "lse - x_t where the label is certain": Fault(certain, {"late": True}, breaks="loss"),
    },
    large_case=large_case,
    typical=lambda rng, dtype: (rows(1500, 17)(rng, dtype), {}),
    hiding={"l 3e-6 too large": Hiding("typical", {"more": 3e-6}, dtypes=("float32", "bfloat16"))},
    small={
        "plain": Sample({"logits": (3, 4), "labels": (3,)}),
        "smoothed": Sample({"logits": (3, 4), "labels": (3,)}, {"label_smoothing": 0.2, "z_loss": 1e-2}),
        "two axes": Sample({"logits": (2, 3, 4), "labels": (2, 3)}, {"ignore_index": 0}),
    },
    derived={"one row": Sample({"logits": (5,), "labels": ()}, {"label_smoothing": 0.5})},
    usual=(
        Sample({"logits": (64, 1000), "labels": (64,)}),
        Sample({"logits": (64, 1000), "labels": (64,)}, tiling={"block_rows": 16, "block_n": 128}),
        Sample({"logits": (4, 8, 384), "labels": (4, 8)}, {"label_smoothing": 0.1, "z_loss": 1e-3}),
        Sample({"logits": (40, 300), "labels": (40,)}, {"label_smoothing": 0.1}, {"block_rows": 16, "block_n": 128}),
    ),
    formula=formula,
    formula_calls={
        f"e {e}, z {z}": lambda e=e, z=z: (
            with_labels(np.random.default_rng(0), np.random.default_rng(1).standard_normal((2, 9, 7))),
            {"label_smoothing": e, "z_loss": z, "return_lse": True},
        )
        for e, z in ((0.0, 0.0), (0.1, 0.0), (1.0, 0.0), (0.0, 1e-2), (0.3, 1.0))
    },
    formula_tolerance=(1e-13, 1e-13),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample({"logits": (2, 3, 33), "labels": (2, 3)}, {"label_smoothing": 0.1}),
    lowered={
        "rows": Sample({"logits": (70, 300), "labels": (70,)}, {"return_lse": True}),
        "smoothed": Sample({"logits": (700, 300), "labels": (700,)}, {"label_smoothing": 0.1, "z_loss": 1e-4}),
        "one row": Sample({"logits": (33,), "labels": ()}),
    },
    mapped={"both": Mapped(Sample({"logits": (2, 3, 4), "labels": (2, 3)}), {"logits": 0, "labels": 0})},
    wrong=WRONG,
    fuzzed=fuzzed,
    # the label is the first class: the likeliest would be another where rounding changes which it is
    layer=Layer(lambda op, x, p: x - narrowed(op(x, (x * 0).argmax(-1)), x)[..., None]),
    extents={"batch": 2, "n": 128},
    launched=Sample({"logits": (64, 512), "labels": (64,)}),
    past_2_31=past_2_31,
    far=far,
    twin=Twin(
        "cross_entropy",
        sampled="nn.functional.cross_entropy",
        refusals={
            "weight is given; expected None": "a weight of each class is refused",
            "probabilities of classes; expected integers": "targets of probabilities are refused",
        },
        least=8,
    ),
)


# ---------------------------------------------------------------------------------------------------------- gradient
def simulate_vjp(logits, labels, lse, d_loss, lse_low=None, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, *,
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


def case_vjp(rng, dtype, regime):
    return any_case(rng, dtype, regime, int(rng.integers(1, 24)), pick(rng, [1, 5, 64, 300, 1024]))


def large_case_vjp(rng, dtype, regime):
    return any_case(rng, dtype, regime, pick(rng, [7, 64]), pick(rng, [64, 257, 1030]))


def arrays(rng, dtype, **options):
    x, labels = draw(rng, (64, 257), dtype), rng.integers(0, 257, 64)
    wide = "float64" if dtype == "float64" else "float32"
    return x, labels, saved(x, labels, **options), 1 + np.abs(draw(rng, (64,), wide))


def padded_vjp(rng, dtype):
    x, labels, lse, d_loss = arrays(rng, dtype)
    return x, np.where(np.arange(64) % 3, labels, -100), lse, d_loss


def past_2_31_vjp(gpu):
    rows, n = gpu.big // 256 + 16, 256
    x = gpu.torch.randn(rows, n, dtype=gpu.torch.bfloat16, device=gpu.device)
    labels, picked = gpu.torch.randint(0, n, (rows,), device=gpu.device), gpu.rows_to_sample(rows, n)
    lse, d_loss = (6 + gpu.normal(rows, dtype=gpu.torch.float32) for _ in range(2))
    d_x = gpu.op("cross_entropy_vjp")(x, labels, lse, d_loss)
    d_x = d_x[0] if isinstance(d_x, tuple) else d_x
    assert d_x.numel() > gpu.big
    yield (d_x[picked],), (x[picked], labels[picked], lse[picked], d_loss[picked]), {}


def far_vjp(gpu):
    labels = gpu.torch.tensor([0, 299, -100, 7], device=gpu.device)
    yield gpu.far((4, 300)), labels, *(6 + gpu.normal(4, dtype=gpu.torch.float32) for _ in range(2))


SHAPES = {"logits": (64, 1000), "labels": (64,), "lse": (64,), "d_loss": (64,)}

GRADIENT = GradientRecord(
    op="cross_entropy_vjp",
    simulate=simulate_vjp,
    variants=({}, {"base2": False}, {"inside": True}, {"ftz": True}, {"base2": False, "ftz": True}),
    case=case_vjp,
    regimes=CHECKED,
    near=Near(lambda rng: arrays(rng, "float32"), off={"d_logits": 2e-6}),
    faults={
        "the class beside the label": Fault(arrays, {"off": 1}, breaks="d_logits"),
        "p kept in bfloat16": Fault(arrays, {"low": BF16}, breaks="d_logits"),
        "1 % off": Fault(arrays, {"factor": 1.01}, breaks="d_logits"),
        "without z": Fault(arrays, {"plain": True}, {"z_loss": 1e-2}, breaks="d_logits"),
        "without smoothing": Fault(arrays, {"label_smoothing": 0.0}, {"label_smoothing": 0.1}, breaks="d_logits"),
        "ignored rows counted": Fault(padded_vjp, {"all_rows": True}, breaks="d_logits"),
    },
    large_case=large_case_vjp,
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
    past_2_31=past_2_31_vjp,
    far=far_vjp,
)
