"""weights = scale s[indices] or these over their sum, of softmax or sigmoid; indices, the k best by s + bias."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

import portakern as pk
from tests.ops._shared import CHECKED, SWEPT, accumulator, draw, flush, normal64, pick, sweep, zeros
from tests.ops.record import Fault, ForwardRecord, GradientRecord, Hiding, Layer, Mapped, Near, Sample

I32, F32 = np.int32, np.float32
WEIGHING = ({"normalize": True}, {}, {"scoring": "sigmoid", "normalize": True, "scale": 2.5}, {"scoring": "sigmoid"})
DEEPSEEK = {"k": 4, "scoring": "sigmoid", "groups": 4, "groups_kept": 2, "normalize": True, "scale": 2.5}


# ------------------------------------------------------------------------------------------------- the simulated kernel
def exp(t, base2, ftz):
    return flush(np.exp2(t * t.dtype.type(np.log2(np.e))) if base2 else np.exp(t), ftz)


def softmax(x, **how):
    with np.errstate(all="ignore"):
        p = exp(x - x.max(-1, keepdims=True), **how)
        return p / p.sum(-1, keepdims=True)


def sigmoid(x, **how):
    p = exp(-np.abs(x), **how)
    return np.where(x >= 0, 1 / (1 + p), p / (1 + p))


def first(key, out, last):
    """Places, the greatest numbers first; ``last``: of equal ones the last."""
    nan = np.isnan(key)
    place = np.broadcast_to(np.arange(key.shape[-1]), key.shape)
    return np.lexsort((-place if last else place, -np.where(nan, 0, key), ~nan, out), -1)


def simulate(logits, bias=None, k=1, scoring="softmax", groups=1, groups_kept=None, normalize=False, scale=1.0, *,
             base2=False, ftz=False, last=False, biased=False, of_best=False, as_zeros=False, more=0, late=0,
             unsorted=False, factor=1.0):  # fmt: skip
    """``last``: of equal experts the last come first; ``biased``: weights have the bias; ``of_best``: a group counts by
    its best expert; ``as_zeros``: experts of groups that are left out have a score of 0; ``more``: groups kept beyond
    those asked for; ``late``: by how much indices are too large; ``unsorted``: in the order of their indices."""
    acc, n = accumulator(logits), logits.shape[-1]
    x, how = logits.astype(acc).reshape(-1, n), {"base2": base2, "ftz": ftz}
    s = (softmax if scoring == "softmax" else sigmoid)(x, **how)
    by = s if bias is None else s + bias.astype(acc)
    out, kept = np.zeros(x.shape, bool), groups if groups_kept is None else groups_kept + more
    if kept < groups:
        total = np.sort(by.reshape(len(x), groups, -1), -1)[..., -(1 if of_best else 2) :].sum(-1)
        order = first(total, np.zeros(total.shape, bool), last)[:, kept:]
        out = np.zeros(total.shape, bool)
        np.put_along_axis(out, order, True, -1)
        out = np.repeat(out, n // groups, -1)
    key = x if bias is None else by
    order = first(np.where(out, 0, key), 0 * out, last) if as_zeros else first(key, out, last)
    indices = np.sort(order[:, :k], -1) if unsorted else order[:, :k]
    chosen, w = np.take_along_axis(x, indices, -1), np.take_along_axis(by if biased else s, indices, -1)
    if normalize:
        w = (
            softmax(chosen, **how)
            if scoring == "softmax" and not biased
            else w / (w.sum(-1, keepdims=True) + acc(1e-20))
        )
    shape = (*logits.shape[:-1], k)
    return (w * acc(scale) * acc(factor)).reshape(shape), (indices + late).reshape(shape)


# ------------------------------------------------------------------------------------------------------- calls on NumPy
def bias_of(rng, x):
    return rng.uniform(-0.5, 0.5, x.shape[-1]).astype(accumulator(x))


def case(rng, dtype, regime):
    groups, width = pick(rng, [1, 1, 2, 5]), pick(rng, [2, 5, 24, 64])
    x = sweep(rng, (int(rng.integers(1, 12)), groups * width), dtype, regime)
    kept = int(rng.integers(1, groups + 1))
    options = {"k": int(rng.integers(1, min(kept * width, 9) + 1)), "groups": groups, "groups_kept": kept}
    return (x, bias_of(rng, x) if rng.integers(2) else None), options | pick(rng, WEIGHING)


def large_case(rng, dtype, regime):
    return (draw(rng, (300, 128), dtype, regime), None), {"k": 4, **pick(rng, WEIGHING)}


def typical(rng, dtype):
    return (draw(rng, (300, 128), dtype), None), {"k": 4, "normalize": True}


def plain(rng, dtype):
    """Each number several times in a row."""
    x = rng.permuted(np.resize(np.arange(-4, 5), (6, 40)), axis=1) / 2
    return x.astype(draw(rng, 1, dtype).dtype), None


def biased(rng, dtype):
    x = draw(rng, (20, 40), dtype)
    return x, bias_of(rng, x)


def low(rng, dtype):
    """All sums are below 0."""
    x, bias = biased(rng, dtype)
    return x, bias - 2


# ------------------------------------------------------------------------------------------------ written another way
def formula(logits, bias=None, k=1, scoring="softmax", groups=1, groups_kept=None, normalize=False, scale=1.0):
    """One token after the other, and one expert: the best of those that are left."""
    n = logits.shape[-1]
    width = n // groups
    weights, indices = np.zeros((*logits.shape[:-1], k)), np.zeros((*logits.shape[:-1], k), np.int64)
    for row in np.ndindex(*logits.shape[:-1]):
        x = logits[row].tolist()
        total = math.fsum(map(math.exp, x))
        s = [math.exp(t) / total if scoring == "softmax" else 1 / (1 + math.exp(-t)) for t in x]
        by = s if bias is None else [a + b for a, b in zip(s, bias.tolist(), strict=True)]
        sums = [sum(sorted(by[g * width : (g + 1) * width])[-2:]) for g in range(groups)]
        keep = sorted(range(groups), key=lambda g: -sums[g])[: groups if groups_kept is None else groups_kept]
        left = sorted((i for i in range(n) if i // width in keep), key=lambda i: -by[i])[:k]
        whole = sum(s[i] for i in left) if normalize else 1
        weights[row], indices[row] = [scale * s[i] / whole for i in left], left
    return weights, indices


def formula_call(shape, given, **options):
    return (normal64(*shape), np.linspace(-0.4, 0.3, shape[-1]) if given else None), options


def in_torch(logits, bias=None, k=1, scoring="softmax", groups=1, groups_kept=None, normalize=False, scale=1.0):
    """As transformers writes it."""
    import torch

    s = torch.softmax(logits, -1) if scoring == "softmax" else torch.sigmoid(logits)
    by = (s if bias is None else s + bias).detach()
    if groups_kept is not None:
        parts = by.unflatten(-1, (groups, -1))
        kept = parts.topk(2, -1)[0].sum(-1).topk(groups_kept, -1)[1]
        out = torch.ones(parts.shape[:-1], dtype=torch.bool).scatter(-1, kept, False)
        by = parts.masked_fill(out[..., None], -torch.inf).flatten(-2)
    indices = torch.topk(by, k, -1)[1]
    w = s.gather(-1, indices)
    return (w / w.sum(-1, keepdim=True) if normalize else w) * scale, indices.int()


def in_jax(logits, bias=None, k=1, scoring="softmax", groups=1, groups_kept=None, normalize=False, scale=1.0):
    import jax

    s = jax.nn.softmax(logits, -1) if scoring == "softmax" else jax.nn.sigmoid(logits)
    by = s if bias is None else s + bias
    if groups_kept is not None:
        parts = by.reshape(*by.shape[:-1], groups, -1)
        total = jax.lax.top_k(parts, 2)[0].sum(-1)
        least = jax.lax.top_k(total, groups_kept)[0][..., -1:]
        by = jax.numpy.where((total >= least)[..., None], parts, -jax.numpy.inf).reshape(by.shape)
    indices = jax.lax.top_k(by, k)[1]
    w = jax.numpy.take_along_axis(s, indices, -1)
    return (w / w.sum(-1, keepdims=True) if normalize else w) * scale, indices


def fuzzed(r, dtype):
    groups, width = r.pick((1, 1, 2, 8)), max(r.extent(), 2)
    kept = int(r.rng.integers(1, groups + 1))
    arrays = {"logits": r.array(dtype, *(r.extent() for _ in range(r.pick((0, 1, 2)))), groups * width)}
    if r.chance(0.5):
        arrays["bias"] = r.array("float64" if dtype == "float64" else "float32", groups * width)
    k = int(r.rng.integers(1, min(kept * width, 40) + 1))
    return arrays, {"k": k, "groups": groups, "groups_kept": kept, **r.pick(WEIGHING)}


def in_layer(op, x, p):
    """Numbers of a token by the weight of its best expert."""
    weight = op(x, k=2, scoring="sigmoid")[0][..., :1]
    return x * (weight.astype(x.dtype) if hasattr(weight, "astype") else weight.to(x.dtype))


# ------------------------------------------------------------------------------------------------------------- on a GPU
def past_2_31(gpu):
    rows, n = gpu.big // 256 + 16, 256
    x = gpu.torch.randn(rows, n, dtype=gpu.torch.bfloat16, device=gpu.device)
    assert x.numel() > gpu.big
    picked = gpu.rows_to_sample(rows, n)
    weights, indices = gpu.op("router")(x, k=4)
    yield (weights[picked], indices[picked]), (x[picked], None), {"k": 4}


def far(gpu):
    yield gpu.far((4, 300)), None


# ------------------------------------------------------------------------------------------------ what users get wrong
def call(*arrays, **options):
    return pk.op("router", backend="reference")(*arrays, **options)


X = zeros(2, 12)
WRONG = {
    "more than there are": (
        lambda: call(X, k=13),
        r"router: k must be no more than the experts of the groups that are",
    ),
    "more than are kept": (
        lambda: call(X, k=4, groups=4, groups_kept=1),
        r"router: k must be no more than the experts",
    ),
    "groups of no size": (lambda: call(X, groups=5), r"router: .*12.*"),
    "more groups than there are": (
        lambda: call(X, groups=2, groups_kept=3),
        r"router: groups_kept must be no more than",
    ),
    "groups of one": (lambda: call(X, groups=12, groups_kept=3), r"router: a group must have two experts at least"),
    "a scoring of another name": (lambda: call(X, scoring="top_k"), r"router: scoring is 'top_k'; expected"),
    "a scale of 0": (lambda: call(X, scale=0.0), r"router: scale is 0.0; expected"),
    "a bias of another length": (lambda: call(X, zeros(3)), r"router: .*bias"),
    "of integers": (lambda: call(X.astype(I32)), r"router: logits is int32; expected one of float32"),
}

FIVE, SIGMOIDS = {"k": 5, "normalize": True}, {"k": 5, "scoring": "sigmoid", "normalize": True}
GROUPED = {"logits": (6, 24), "bias": (24,)}

RECORD = ForwardRecord(
    op="router",
    simulate=simulate,
    variants=({}, {"base2": True}, {"ftz": True}),
    case=case,
    regimes=SWEPT,
    near=Near(lambda rng: plain(rng, "float32"), {"k": 5, "normalize": True}, off={"weights": 6e-6}),
    faults={
        "the last of equal experts": Fault(plain, {"last": True}, FIVE, breaks="indices"),
        "weights that have the bias": Fault(biased, {"biased": True}, SIGMOIDS, breaks="weights"),
        "groups by their best": Fault(biased, {"of_best": True}, DEEPSEEK, breaks="indices"),
        "others as zeros": Fault(low, {"as_zeros": True}, DEEPSEEK, breaks="indices"),
        "a group more": Fault(biased, {"more": 1}, DEEPSEEK, breaks="indices"),
        "not divided": Fault(plain, {"normalize": False}, FIVE, breaks="weights"),
        "not scaled": Fault(biased, {"scale": 1.0}, DEEPSEEK, breaks="weights"),
        "sigmoid for softmax": Fault(plain, {"scoring": "sigmoid"}, FIVE, breaks="weights"),
        "indices counted from 1": Fault(plain, {"late": 1}, FIVE, breaks="indices"),
        "in the order of indices": Fault(plain, {"unsorted": True}, FIVE, breaks="weights"),
    },
    large_case=large_case,
    typical=typical,
    hiding={"weights 5e-6 off": Hiding("typical", {"factor": 1 + 5e-6})},
    small={
        "plain": Sample({"logits": (2, 5)}, {"k": 3, "normalize": True}),
        "not divided": Sample({"logits": (2, 2, 4)}, {"k": 2}),
        "DeepSeek-V3's": Sample({"logits": (2, 8), "bias": (8,)}, {**DEEPSEEK, "k": 2}),
        "sigmoids": Sample({"logits": (6,)}, {"k": 2, "scoring": "sigmoid"}),
    },
    usual=(
        Sample({"logits": (64, 256), "bias": (256,)}, {**DEEPSEEK, "k": 8}),
        Sample({"logits": (40, 60)}, {"k": 6}, tiling={"block_rows": 2}),
        Sample({"logits": (3, 5, 100)}, FIVE),
    ),
    formula=formula,
    formula_calls={
        f"{shape}, {given}, {options}": partial(formula_call, shape, given, **options)
        for shape, given, options in (
            ((3, 9), False, {"k": 4}), ((2, 3, 12), True, {"k": 12}), ((20,), True, SIGMOIDS),
            ((4, 24), True, DEEPSEEK), ((4, 8), False, {"k": 3, "groups": 2, "groups_kept": 1, "normalize": True}),
        )
    },
    formula_tolerance=(1e-14, 0.0),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample(GROUPED, DEEPSEEK),
    lowered={
        "mixtral": Sample({"logits": (40, 8)}, {"k": 2, "normalize": True}),
        "deepseek_v3": Sample({"logits": (40, 256), "bias": (256,)}, {**DEEPSEEK, "k": 8, "groups": 8}),
        "one token": Sample({"logits": (70,)}),
    },
    mapped={
        "tokens": Mapped(Sample({"logits": (5, 3, 12)}, FIVE), {"logits": 1}),
        "experts apart": Mapped(Sample({"logits": (4, 12, 2)}, SIGMOIDS), {"logits": 2}),
    },
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(in_layer),
    extents={"batch": 64, "groups": 4, "width": 16, "k": 4},
    launched=Sample({"logits": (64, 256)}, {"k": 8}),
    past_2_31=past_2_31,
    far=far,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ gradient
def simulate_vjp(logits, indices, d_weights, k=1, scoring="softmax", groups=1, normalize=False, scale=1.0, *,
                 base2=False, ftz=False, late=0, alone=False, whole=False, no_slope=False, factor=1.0):  # fmt: skip
    """``late``: cotangents go as many experts further; ``alone``: what a weight's own expert has, without the sum;
    ``whole``: of sigmoids the sum is over all experts; ``no_slope``: without 1 - s."""
    acc, n = accumulator(logits), logits.shape[-1]
    x, how = logits.astype(acc).reshape(-1, n), {"base2": base2, "ftz": ftz}
    rows, g, chosen = np.arange(len(x))[:, None], np.zeros(x.shape, acc), np.zeros(x.shape, bool)
    at = (indices.reshape(-1, k) + late) % n
    g[rows, at], chosen[rows, at] = d_weights.reshape(-1, k), True
    with np.errstate(all="ignore"):
        if scoring == "softmax":
            h = softmax(np.where(chosen, x, -np.inf) if normalize else x, **how)
            d = h * (g - (0 if alone else (h * g).sum(-1, keepdims=True)))
        else:
            s, q = sigmoid(x, **how), sigmoid(-x, **how)
            h = np.where(chosen | whole, s, 0)
            h = h / (h.sum(-1, keepdims=True) + acc(1e-20)) if normalize else h
            d = h * (g - ((h * g).sum(-1, keepdims=True) if normalize and not alone else 0)) * (1 if no_slope else q)
        d = d * acc(scale) * acc(factor)
    return (
        np.where(chosen, d, 0).reshape(logits.shape) if normalize or scoring != "softmax" else d.reshape(logits.shape),
    )


def chosen(rng, x, k):
    indices = np.argsort(rng.random(x.shape), -1)[..., :k].astype(I32)
    return x, indices, draw(rng, indices.shape, "float64").astype(accumulator(x))


def case_vjp(rng, dtype, regime):
    x = draw(rng, (int(rng.integers(1, 12)), pick(rng, [1, 5, 64, 300])), dtype, regime)
    k = int(rng.integers(1, min(x.shape[1], 20) + 1))
    return chosen(rng, x, k), {"k": k, **pick(rng, WEIGHING)}


def special_vjp(rng, dtype, seed):
    (x, indices, g), options = case_vjp(rng, dtype, "normal")
    g[rng.random(g.shape) < 0.3] = pick(rng, [np.nan, np.inf, -np.inf])
    return (x, indices, g), options


def large_case_vjp(rng, dtype, regime):
    return chosen(rng, draw(rng, (200, 40), dtype, regime), 10), {"k": 10, **pick(rng, WEIGHING)}


def some_vjp(rng, dtype):
    return chosen(rng, draw(rng, (6, 20), dtype), 5)


def past_2_31_vjp(gpu):
    rows, n, k = gpu.big // 256 + 16, 256, 4
    x = gpu.torch.zeros(1, 1, dtype=gpu.torch.bfloat16, device=gpu.device).expand(rows, n)
    indices = gpu.torch.arange(k, device=gpu.device, dtype=gpu.torch.int32).flip(0).expand(rows, k)
    picked, d_weights = gpu.rows_to_sample(rows, n), gpu.normal(rows, k, dtype=gpu.torch.float32)
    d_logits = gpu.op("router_vjp")(x, indices, d_weights, k=k).d_logits
    assert d_logits.numel() > gpu.big
    yield d_logits[picked], (x[picked], indices[picked], d_weights[picked]), {"k": k}


def far_vjp(gpu):
    indices = gpu.torch.zeros(4, 1, dtype=gpu.torch.int32).to(gpu.device)
    yield gpu.far((4, 300)), indices, gpu.normal(4, 1, dtype=gpu.torch.float32)


def with_choice(shape, k):
    return {"logits": shape, "indices": (*shape[:-1], k), "d_weights": (*shape[:-1], k)}


GRADIENT = GradientRecord(
    op="router_vjp",
    simulate=simulate_vjp,
    variants=({}, {"base2": True}, {"ftz": True}),
    case=case_vjp,
    regimes=CHECKED,
    special=special_vjp,
    near=Near(lambda rng: some_vjp(rng, "float32"), FIVE, off={"d_logits": 4e-6}),
    faults={
        "an expert further": Fault(some_vjp, {"late": 1}, FIVE, breaks="d_logits"),
        "without the sum": Fault(some_vjp, {"alone": True}, FIVE, breaks="d_logits"),
        "of all experts": Fault(some_vjp, {"normalize": False}, FIVE, breaks="d_logits"),
        "sigmoids over the sum of all": Fault(some_vjp, {"whole": True}, SIGMOIDS, breaks="d_logits"),
        "without 1 - s": Fault(some_vjp, {"no_slope": True}, SIGMOIDS, breaks="d_logits"),
        "not scaled": Fault(some_vjp, {"scale": 1.0}, {**FIVE, "scale": 2.5}, breaks="d_logits"),
    },
    large_case=large_case_vjp,
    typical=lambda rng, dtype: (large_case_vjp(rng, dtype, "normal")[0], {"k": 10, "normalize": True}),
    hiding={"d_logits 8e-6 off": Hiding("typical", {"factor": 1 + 8e-6}, dtypes=("float32",))},
    small={
        "plain": Sample(with_choice((2, 5), 3), {"k": 3, "normalize": True}),
        "sigmoids": Sample(with_choice((4,), 1), {"scoring": "sigmoid"}),
    },
    usual=(
        Sample(with_choice((64, 256), 8), {**SIGMOIDS, "k": 8}),
        Sample(with_choice((8, 600), 20), {"k": 20}, tiling={"block_rows": 2}),
        Sample(with_choice((20, 60), 3), {"k": 3, "scoring": "sigmoid"}),
        Sample(with_choice((20, 60), 3), {"k": 3, "normalize": True}),
    ),
    extents={"batch": 64, "groups": 1, "width": 64, "k": 1},
    past_2_31=past_2_31_vjp,
    far=far_vjp,
)  # fmt: skip
