"""cross_entropy of x = hidden weight^T, and its slope b weight, b the derivative of a row's loss by its logits.

d_hidden = d_loss slope and d_weight = (d_loss b)^T hidden, b the derivative of a row's loss by its logits.
"""

from __future__ import annotations

import math

import numpy as np

import portakern as pk
from tests.ops import cross_entropy, matmul
from tests.ops._shared import (
    BF16,
    CHECKED,
    HALVES,
    SWEPT,
    accumulator,
    draw,
    flush,
    outputs_of,
    pick,
    sweep,
    through,
    zeros,
)
from tests.ops.cross_entropy import narrowed
from tests.ops.record import Fault, ForwardRecord, GradientRecord, Hiding, Layer, Mapped, Near, Sample, Twin


def product(a, b, precision="ieee", **how):
    """A product as matmul's kernels make it; in float64 as NumPy does."""
    if a.dtype == np.float64:
        return a @ b
    return matmul.simulate(a, b, "ieee" if a.dtype != np.float32 else precision, **how)[0]


def logits_of(hidden, weight, precision, stored, **how):
    """In the accumulator's type, as hidden's dtype holds them if ``stored``."""
    x = product(hidden, weight.T, precision, **how)
    return through(x, hidden.dtype) if stored else x


def simulate(hidden, weight, labels, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, precision="ieee",
             keep_logit_gradients=False, return_lse=False, return_slope=False, return_logit_gradients=False, *,
             stored=True, ftz=False, block=32, tail=True, low=None,
             plain=False, loose=False, factor=1.0, cut=False, **how):  # fmt: skip
    """``stored``: logits are rounded to hidden's dtype. ``plain``: the slope without z; ``loose``: of p not rounded to
    hidden's dtype but to half its digits; ``factor``: of the smoothing; ``cut``: tf32 whatever was asked. The others
    are matmul's and cross_entropy's."""
    precision = "tf32" if cut else precision
    of_sums = {"block": block, "ftz": ftz, "tail": tail, "low": low}
    x = logits_of(hidden, weight, precision, stored, **of_sums)
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
    loss, lse = cross_entropy.simulate(x, labels, **options, return_lse=True, ftz=ftz, factor=factor, **how)
    (b,) = cross_entropy.simulate_vjp(
        x,
        labels,
        lse,
        np.ones_like(lse),
        **options,
        ftz=ftz,
        plain=plain,
        **{k: v for k, v in how.items() if k == "off"},
    )
    b = through(b.astype(np.float16 if loose else hidden.dtype), hidden.dtype).astype(hidden.dtype)
    slope = product(b, weight, precision, block=block, ftz=ftz) if return_slope else None
    return loss, lse if return_lse else None, slope, b if return_logit_gradients else None


def arrays_of(rng, dtype, rows, n, d, regime="normal", ignored=-100, make=draw):
    """Hidden states, a weight of which logits are about as large as those, and labels, a fifth of them ignored."""
    hidden = make(rng, (rows, d), dtype, regime)
    weight = make(rng, (n, d), dtype, regime)
    if regime in ("normal", "wide", "rising"):
        weight = (weight.astype(np.float64) / math.sqrt(d)).astype(weight.dtype)
    return (hidden, weight, cross_entropy.with_labels(rng, np.empty((rows, n)), ignored)[1])


def any_options(rng):
    return {**cross_entropy.any_options(rng), "return_slope": True, "return_logit_gradients": True}


def case(rng, dtype, regime):
    options = any_options(rng)
    rows, n, d = int(rng.integers(1, 24)), pick(rng, [1, 5, 64, 130]), pick(rng, [1, 7, 64])
    return arrays_of(rng, dtype, rows, n, d, regime, options["ignore_index"], sweep), options


def large_case(rng, dtype, regime):
    options = any_options(rng)
    rows, n, d = pick(rng, [120, 300]), pick(rng, [17, 65]), pick(rng, [16, 40])
    return arrays_of(rng, dtype, rows, n, d, regime, options["ignore_index"]), options


def typical(rng, dtype):
    hidden, weight, labels = arrays_of(rng, dtype, 400, 65, 40)
    return (hidden, weight, np.abs(labels) % 65), {"return_lse": True, "return_slope": True}


def rows(count, n, d):
    """Rows of which none is ignored."""

    def arrays(rng, dtype="float32"):
        hidden, weight, labels = arrays_of(rng, dtype, count, n, d)
        return hidden, weight, np.abs(labels) % n

    return arrays


def padded(rng, dtype):
    return arrays_of(rng, dtype, 40, 30, 16)


def formula(hidden, weight, labels, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, return_lse=False,
            return_slope=False, return_logit_gradients=False):  # fmt: skip
    e, n = label_smoothing, len(weight)
    loss, lse, slope = np.zeros(labels.shape), np.zeros(labels.shape), np.zeros(hidden.shape)
    brackets = np.zeros((*labels.shape, n))
    for row in np.ndindex(labels.shape):
        t = int(labels[row])
        if t == ignore_index:
            continue
        x = [math.fsum(h * w for h, w in zip(hidden[row], each, strict=True)) for each in weight]
        lse[row] = total = math.log(math.fsum(map(math.exp, x)))
        loss[row] = -(1 - e) * (x[t] - total) - e * (math.fsum(x) / n - total) + z_loss * total**2
        b = [math.exp(v - total) * (1 + 2 * z_loss * total) - (1 - e) * (j == t) - e / n for j, v in enumerate(x)]
        slope[row] = [math.fsum(p * w for p, w in zip(b, column, strict=True)) for column in weight.T]
        brackets[row] = b
    wanted = (True, return_lse, return_slope, return_logit_gradients)
    return tuple(y if asked else None for y, asked in zip((loss, lse, slope, brackets), wanted, strict=True))


def in_torch(hidden, weight, labels, return_slope=False, **options):
    """PyTorch's own functions, a linear layer and a loss; z, lse and the slope are no part of them."""
    import torch

    found = cross_entropy.in_torch(hidden @ weight.T, labels, **options)
    if not return_slope:
        return found
    found = found if isinstance(found, tuple) else (found,)
    with torch.enable_grad():
        leaf = hidden.detach().requires_grad_()
        loss = cross_entropy.in_torch(leaf @ weight.detach().T, labels, **{**options, "return_lse": False})
    return *found, torch.autograd.grad(loss.sum(), leaf)[0]


def in_jax(hidden, weight, labels, **options):
    return cross_entropy.in_jax(hidden @ weight.T, labels, **options)


def call(*arrays, **options):
    return pk.op("linear_cross_entropy")(*arrays, **options)


def fuzzed(r, dtype):
    rows, n, d = r.extent(), r.extent(), r.extent()
    labels = r.rng.integers(0, max(n, 1), rows).astype(r.pick((np.int32, np.int64)))
    arrays = {"hidden": r.array(dtype, rows, d), "weight": r.array(dtype, n, d), "labels": labels}
    return arrays, {"label_smoothing": r.pick((0.0, 0.1)), "precision": r.pick(("ieee", "tf32"))}


def past_2_31(gpu):
    rows, d, n = gpu.big // 256 + 16, 256, 24
    hidden = gpu.torch.randn(rows, d, dtype=gpu.torch.bfloat16, device=gpu.device)
    assert hidden.numel() > gpu.big
    weight = gpu.normal(n, d, dtype=gpu.torch.bfloat16) / 16
    labels, picked = gpu.torch.randint(0, n, (rows,), device=gpu.device), gpu.rows_to_sample(rows, d)
    loss = gpu.op("linear_cross_entropy")(hidden, weight, labels)
    yield (loss[picked],), (hidden[picked], weight, labels[picked]), {}


def far(gpu):
    weight = gpu.normal(20, 300, dtype=gpu.torch.bfloat16) / 16
    yield gpu.far((4, 300)), weight, gpu.torch.tensor([0, 19, -100, 7], device=gpu.device)


H, W, T = zeros(2, 3), zeros(4, 3), np.zeros(2, np.int64)
SHAPES = {"hidden": (3, 5), "weight": (4, 5), "labels": (3,)}
WRONG = {
    "another width": (
        lambda: call(H, zeros(4, 2), T),
        r"weight axis -?1 \(d\) is 2; expected 3, as set by hidden axis -1",
    ),
    "one label": (lambda: call(H, W, np.zeros(1, np.int64)), r"linear_cross_entropy: labels .*expected"),
    "labels of floats": (lambda: call(H, W, zeros(2)), r"labels is float32; expected .*int32"),
    "no classes": (lambda: call(H, zeros(0, 3), T), r"linear_cross_entropy: n is 0"),
    "no width": (lambda: call(zeros(2, 0), zeros(4, 0), T), r"linear_cross_entropy: d is 0"),
    "a label that is no class": (
        lambda: pk.op("linear_cross_entropy", backend="reference")(H, W, T + 4),
        r"labels must be from 0 to n - 1, or ignore_index",
    ),
    "smoothing beyond 1": (
        lambda: call(H, W, T, label_smoothing=1.5),
        r"label_smoothing is 1.5; expected .*in \[0, 1\]",
    ),
}

RECORD = ForwardRecord(
    op="linear_cross_entropy",
    simulate=simulate,
    variants=({}, {"block": 16}, {"stored": False}, {"ftz": True}, {"base2": False}),
    case=case,
    regimes=SWEPT,
    near=Near(
        rows(40, 65, 40),
        {"return_lse": True, "return_slope": True, "return_logit_gradients": True},
        off={"loss": 1e-5, "lse": 1e-5, "slope": 2e-5, "logit_gradients": 1.6e-6},
    ),
    faults={
        "the class beside the label": Fault(rows(4, 40, 16), {"off": 1}, {"return_slope": True}, breaks="loss"),
        "logits without their tail": Fault(rows(4, 40, 70), {"tail": False}, breaks="loss"),
        "logits added up in 16 bits": Fault(rows(40, 30, 300), {"low": BF16}, breaks="loss", dtypes=("float32",)),
        "1 % of the smoothing": Fault(rows(40, 30, 16), {"factor": 1.5}, {"label_smoothing": 0.5}, breaks="loss"),
        "another z": Fault(rows(40, 30, 16), {"z_loss": 1e-1}, {"z_loss": 5e-2}, breaks="loss"),
        "a slope without z": Fault(
            rows(40, 30, 16), {"plain": True}, {"z_loss": 0.5, "return_slope": True}, breaks="slope"
        ),
        "ignored rows counted": Fault(padded, {"all_rows": True}, breaks="loss"),
        "tf32 in place of ieee": Fault(rows(40, 30, 64), {"cut": True}, breaks="loss", dtypes=("float32",)),
    },
    large_case=large_case,
    typical=typical,
    hiding={
        "the slope truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "a slope of brackets of half the digits": Hiding("typical", {"loose": True}, dtypes=("float32",)),
    },
    small={
        "plain": Sample(SHAPES),
        "smoothed": Sample(SHAPES, {"label_smoothing": 0.2, "z_loss": 1e-2}),
        "keeping": Sample(SHAPES, {"keep_logit_gradients": True}),
        "two axes": Sample({"hidden": (2, 2, 3), "weight": (4, 3), "labels": (2, 2)}, {"ignore_index": 0}),
    },
    derived={
        "one row": Sample({"hidden": (5,), "weight": (4, 5), "labels": ()}, {"label_smoothing": 0.5}),
    },
    usual=(
        Sample({"hidden": (64, 96), "weight": (300, 96), "labels": (64,)}),
        Sample({"hidden": (64, 96), "weight": (300, 96), "labels": (64,)}, tiling={"chunk_rows": 16}),
        Sample({"hidden": (4, 8, 64), "weight": (130, 64), "labels": (4, 8)}, {"label_smoothing": 0.1, "z_loss": 1e-3}),
        Sample({"hidden": (40, 33), "weight": (70, 33), "labels": (40,)}, {"return_slope": True}, {"chunk_rows": 16}),
        Sample(
            {"hidden": (40, 33), "weight": (70, 33), "labels": (40,)},
            {"keep_logit_gradients": True},
            {"chunk_rows": 16},
        ),
    ),
    formula=formula,
    formula_calls={
        f"e {e}, z {z}": lambda e=e, z=z: (
            arrays_of(np.random.default_rng(0), "float64", 9, 7, 5),
            {"label_smoothing": e, "z_loss": z}
            | dict.fromkeys(("return_lse", "return_slope", "return_logit_gradients"), True),
        )
        for e, z in ((0.0, 0.0), (0.1, 0.0), (1.0, 0.0), (0.0, 1e-2), (0.3, 1.0))
    },
    formula_tolerance=(1e-13, 1e-13),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample({"hidden": (2, 3, 20), "weight": (33, 20), "labels": (2, 3)}, {"label_smoothing": 0.1}),
    lowered={
        "rows": Sample({"hidden": (70, 130), "weight": (300, 130), "labels": (70,)}, {"return_slope": True}),
        "chunks": Sample({"hidden": (700, 130), "weight": (300, 130), "labels": (700,)}, tiling={"chunk_rows": 256}),
        "one row": Sample({"hidden": (33,), "weight": (40, 33), "labels": ()}),
        "kept": Sample(
            {"hidden": (700, 130), "weight": (300, 130), "labels": (700,)},
            {"return_slope": True, "return_logit_gradients": True},
            tiling={"chunk_rows": 256},
        ),
    },
    mapped={
        "rows": Mapped(Sample({"hidden": (2, 3, 5), "weight": (4, 5), "labels": (2, 3)}), {"hidden": 0, "labels": 0}),
    },
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(
        lambda op, x, p: x - narrowed(op(x, p["w"], (x * 0).argmax(-1)), x)[..., None],  # as in cross_entropy
        lambda width: {"w": (width, width)},
    ),
    extents={"batch": 2, "n": 128, "d": 64},
    launched=Sample({"hidden": (64, 64), "weight": (512, 64), "labels": (64,)}),
    matrix_units=True,
    past_2_31=past_2_31,
    far=far,
    twin=Twin(
        "linear_cross_entropy",
        sampled="nn.functional.linear_cross_entropy",
        refusals={
            "weight is given; expected None": "a weight of each class is refused",
            "axes; expected 2": "a weight of several outputs is refused",
            "linear_bias is given; expected None": "a bias is refused",
            "probabilities of classes; expected integers": "targets of probabilities are refused",
        },
        least=2,
        further=("memory_limit",),
    ),
)


# ---------------------------------------------------------------------------------------------------------- gradient
def simulate_vjp(hidden, weight, labels, lse, slope, d_loss, lse_low=None, logit_gradients=None, ignore_index=-100,
             label_smoothing=0.0, z_loss=0.0, precision="ieee", keep_logit_gradients=False, *, stored=True,
             ftz=False, block=32, tail=True, low=None, cut=False, halves=False, of_sum=None, scaled=1.0,
             **how):  # fmt: skip
    """``halves``: d_weight is the sum of two products that are rounded first; ``of_sum``: kept in a narrower dtype as
    it is added up; ``scaled``: d_hidden; the others are those of the forward op and of cross_entropy_vjp."""
    acc, precision = accumulator(hidden), "tf32" if cut else precision
    among = (labels != ignore_index)[..., None]
    if keep_logit_gradients:
        weighed = np.where(among, flush(hidden.astype(acc), ftz) * flush(d_loss, ftz)[..., None], acc(0))
        met = through(flush(weighed, ftz) * acc(scaled), hidden.dtype).astype(hidden.dtype)
        d_x, rows = (a.reshape(-1, a.shape[-1]) for a in (logit_gradients, met))
    else:
        x = logits_of(hidden, weight, precision, stored, block=block, ftz=ftz)
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
        (d_x,) = cross_entropy.simulate_vjp(x, labels, lse, d_loss, lse_low, **options, ftz=ftz, low=low, **how)
        d_x, rows = (a.reshape(-1, a.shape[-1]) for a in (through(d_x, hidden.dtype).astype(hidden.dtype), hidden))
    sums = {"block": block, "ftz": ftz, "tail": tail, "low": of_sum}
    if halves:
        at = len(rows) // 2
        parts = (through(product(d_x[s].T, rows[s], precision), hidden.dtype) for s in (np.s_[:at], np.s_[at:]))
        d_weight = sum(parts)
    else:
        d_weight = product(np.ascontiguousarray(d_x.T), rows, precision, **(sums if acc is np.float32 else {}))
    d_hidden = flush(slope.astype(acc), ftz) * flush(d_loss, ftz)[..., None] * acc(scaled)
    d_hidden = np.where(among, flush(d_hidden, ftz), acc(0))
    return d_hidden, d_weight


def found_of(hidden, weight, labels, keep=False, **options):
    """What the forward op gives a gradient: lse, slope and, where it is kept, b."""
    every = dict.fromkeys(("return_lse", "return_slope", "return_logit_gradients"), True)
    _, lse, slope, b = outputs_of("linear_cross_entropy", hidden, weight, labels, **every, **options)
    return lse, slope, b if keep else None


def any_case(rng, dtype, regime, rows, n, d):
    options = {"label_smoothing": pick(rng, [0.0, 0.1]), "z_loss": pick(rng, [0.0, 1e-4, 0.1])}
    keep = bool(rng.random() < 0.4)
    hidden, weight, labels = arrays_of(rng, dtype, rows, n, d, regime)
    lse, slope, b = found_of(hidden, weight, labels, keep, **options)
    wide = "float64" if dtype == "float64" else "float32"
    arrays = (hidden, weight, labels, lse, slope, draw(rng, (rows,), wide), None, b)
    return arrays, {**options, "keep_logit_gradients": keep}


def case_vjp(rng, dtype, regime):
    return any_case(rng, dtype, regime, int(rng.integers(1, 24)), pick(rng, [1, 5, 64, 130]), pick(rng, [1, 7, 40]))


def large_case_vjp(rng, dtype, regime):
    return any_case(rng, dtype, regime, pick(rng, [64, 200]), pick(rng, [17, 65]), pick(rng, [16, 40]))


def made(rng, dtype, keep=False, **options):
    """Rows of which none is ignored."""
    hidden, weight, labels = rows(64, 65, 40)(rng, dtype)
    lse, slope, b = found_of(hidden, weight, labels, keep, **options)
    wide = "float64" if dtype == "float64" else "float32"
    return hidden, weight, labels, lse, slope, 1 + np.abs(draw(rng, (64,), wide)), *((None, b) if keep else ())


def kept(rng, dtype):
    return made(rng, dtype, keep=True)


def padded_vjp(rng, dtype):
    hidden, weight, labels, *others = made(rng, dtype)
    return hidden, weight, np.where(np.arange(64) % 3, labels, -100), *others


def past_2_31_vjp(gpu):
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


def far_vjp(gpu):
    weight = gpu.normal(20, 300, dtype=gpu.torch.bfloat16) / 16
    labels = gpu.torch.tensor([0, 19, -100, 7], device=gpu.device)
    yield gpu.far((4, 300)), weight, labels, 4 + gpu.normal(4), gpu.far((4, 300)), gpu.normal(4)


def shapes(rows, n, d):
    of_rows = dict.fromkeys(("labels", "lse", "d_loss"), (rows,))
    return {"hidden": (rows, d), "weight": (n, d), "slope": (rows, d), **of_rows}


GRADIENT = GradientRecord(
    op="linear_cross_entropy_vjp",
    simulate=simulate_vjp,
    variants=({}, {"block": 16}, {"stored": False}, {"base2": False}, {"ftz": True}),
    case=case_vjp,
    regimes=CHECKED,
    near=Near(lambda rng: made(rng, "float32"), off={"d_hidden": 2e-7, "d_weight": 1e-5}),
    faults={
        "the class beside the label": Fault(made, {"off": 1}, breaks="d_weight"),
        "1 % off": Fault(made, {"factor": 1.1}, breaks="d_weight"),
        "without z": Fault(made, {"plain": True}, {"z_loss": 1e-1}, breaks="d_weight"),
        "without smoothing": Fault(made, {"label_smoothing": 0.0}, {"label_smoothing": 0.3}, breaks="d_weight"),
        "ignored rows counted": Fault(padded_vjp, {"all_rows": True}, breaks="d_weight"),
        "rows without their tail": Fault(
            lambda rng, dtype: tuple(x[:50] if len(x) == 64 else x for x in made(rng, dtype)),
            {"tail": False},
            breaks="d_weight",
        ),
        "d_hidden of another cotangent": Fault(made, {"scaled": 1.01}, breaks="d_hidden"),
        "what was kept met by another cotangent": Fault(
            kept, {"scaled": 1.02}, {"keep_logit_gradients": True}, breaks="d_weight"
        ),
    },
    large_case=large_case_vjp,
    typical=lambda rng, dtype: (made(rng, dtype), {}),
    hiding={
        "both truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "products of tf32 for ieee": Hiding("typical", {"cut": True}, dtypes=("float32",)),
        "d_weight added up in bfloat16": Hiding("typical", {"of_sum": BF16, "block": 4}, dtypes=HALVES),
    },
    small={
        "plain": Sample(shapes(3, 4, 5)),
        "kept": Sample({**shapes(3, 4, 5), "logit_gradients": (3, 4)}, {"keep_logit_gradients": True}),
    },
    usual=(
        Sample(shapes(64, 300, 96)),
        Sample(shapes(64, 300, 96), {"label_smoothing": 0.1, "z_loss": 1e-3}, {"chunk_n": 64}),
        Sample(shapes(40, 70, 33), {"z_loss": 1e-3}, {"chunk_n": 16}),
        Sample({**shapes(40, 70, 33), "logit_gradients": (40, 70)}, {"keep_logit_gradients": True}),
    ),
    extents={"batch": 2, "n": 128, "d": 64},
    matrix_units=True,
    past_2_31=past_2_31_vjp,
    far=far_vjp,
)
