"""o = softmax(q k^T scale + bias) v, of the pairs that the masks let see each other, and lse, the logarithm of the
softmax's denominator.

The gradients of attention from q, k, v, o, lse and the cotangents of o and lse.

With P = exp(min(S - lse, 0)) and Delta = sum d_o o - d_lse: dS = P (d_o v^T - Delta), d_q = dS k scale, d_k = dS^T q
scale and d_v = P^T d_o.
"""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np

from portakern.api import op
from portakern.spec.dtypes import numpy_dtype
from portakern.specs.attention import allowed, first_place
from tests.ops import matmul
from tests.ops._attention_formulas import formula, formula_calls, in_jax, in_torch
from tests.ops._attention_wrong import SHAPES, VALUES
from tests.ops._shared import (
    BF16,
    HALVES,
    SWEPT,
    accumulator,
    draw,
    flush,
    in_order,
    outputs_of,
    pick,
    rounded_tanh,
    sweep,
    through,
    truncate,
    with_specials,
)
from tests.ops.record import (
    DTYPES,
    EVERY,
    Corner,
    Fault,
    ForwardRecord,
    GradientRecord,
    Hiding,
    Layer,
    Mapped,
    Near,
    Sample,
    Twin,
)

WITH_LSE = {"return_lse": True}


# ------------------------------------------------------------------------------------------------- the simulated kernel
def simulate(q, k, v, bias=None, q_ids=None, kv_ids=None, sinks=None, slopes=None, *, is_causal=False, scale=None,
             softcap=None, precision="ieee", return_lse=False, block=16, ftz=False, sentinel=None, drop=None,
             factor=1.0, shift=True, round_q=False, tail=True, truncate_p=False, low=None, tanh=np.tanh, sink="once",
             fall="right"):  # fmt: skip
    """One pass over tiles of keys with the running maximum m, denominator l and sum of values acc; then the sink, whose
    ``sink`` may be what is wrong with it, as ``fall`` of slopes. No segments.
    """
    F = accumulator(q)
    (batch, q_len, heads, depth), (kv_len, kv_heads) = q.shape, k.shape[1:3]
    scale = F((1 / np.sqrt(depth) if scale is None else scale) * factor)
    o, lse = np.empty((batch, q_len, heads, v.shape[-1]), F), np.empty((batch, heads, q_len), F)
    behind = np.arange(q_len)[:, None] + kv_len - q_len
    dot = partial(matmul.simulate, precision=precision, ftz=ftz)
    for b, h in np.ndindex(batch, heads):
        qh, kh, vh = q[b, :, h], k[b, :, h * kv_heads // heads], v[b, :, h * kv_heads // heads]
        qh = (qh * scale).astype(q.dtype) if round_q else qh
        m, l, acc = np.full((q_len, 1), -np.inf, F), np.zeros((q_len, 1), F), np.zeros((q_len, v.shape[-1]), F)
        for j in range(0, kv_len if tail else kv_len // block * block, block):
            here = np.arange(j, min(j + block, kv_len))
            s = dot(qh, kh[here].T, block=depth)[0] * (F(1) if round_q else scale)
            s = s if softcap is None else F(softcap) * tanh(s / F(softcap))
            if slopes is not None:
                s = s - falls(slopes.astype(F), h, here, behind, fall)
            if bias is not None:
                s = s + np.broadcast_to(bias, (batch, heads, q_len, kv_len))[b, h][:, here].astype(F)
            hide = (here > behind) & is_causal | (here == drop)
            s = np.where(hide, -F(np.inf) if sentinel is None else F(sentinel), s)
            new = np.maximum(m, s.max(1, keepdims=True)) if shift else np.zeros_like(m)
            origin = np.where(new == -np.inf, F(0), new)
            p, alpha = flush(np.exp(s - origin), ftz), flush(np.exp(m - origin), ftz)
            l, m = l * alpha + p.sum(1, keepdims=True), new
            stored = truncate(p, v.dtype.name) if truncate_p else p.astype(v.dtype)
            acc = through(acc * alpha + dot(stored, vh[here], block=block)[0], low)
        of_keys = l, m
        if sinks is not None:
            acc, l, m = with_sink(F(sinks[h]) * (scale if sink == "scaled" else F(1)), acc, l, m, sink)
        o[b, :, h] = np.where(l == 0, F(0), acc / l)
        l, m = of_keys if sink == "not in lse" else (l, m)
        lse[b, h] = (m + np.log(l))[:, 0]
    return o, lse if return_lse else None


def falls(slopes, h, keys, places, how):
    """What a head's slope makes scores less by."""
    from_first = np.arange(len(places))[:, None] if how == "from the first query" else places
    of = slopes[h - 1] if how == "of another head" else slopes[h]
    return (-of if how == "of the other sign" else of) * np.abs(from_first - keys).astype(slopes.dtype)


def with_sink(sink, acc, l, m, how):
    """The state with one more score, whose value is 0."""
    new = np.maximum(m, sink)
    origin = np.where(new == -np.inf, np.zeros_like(new), new)
    alpha, p = np.exp(m - origin), np.exp(sink - origin) * (2 if how == "twice" else 1)
    return acc * (1 if how == "sums not rescaled" else alpha), l * alpha + p, new


# ------------------------------------------------------------------------------------------------------- calls on NumPy
def qkv(rng, dtype, regime, kv_len=None, depth=None):
    kv_len, depth = kv_len or rng.choice([1, 5, 64, 200, 500]), depth or rng.choice([1, 8, 40, 64, 128])
    q_len, group, dv = rng.integers(1, 24), rng.integers(1, 3), rng.integers(1, 33)
    qk = regime if regime != "spread" else "wide"
    q = sweep(rng, (1, q_len, group, depth), dtype, qk)
    k = sweep(rng, (1, kv_len, 1, depth), dtype, "normal" if regime == "rising" else regime)
    return q, k, sweep(rng, (1, kv_len, 1, dv), dtype, rng.choice(["normal", qk]))


OPTIONS = tuple(
    WITH_LSE | {"is_causal": causal, "softcap": cap, "scale": scale}
    for causal, cap, scale in itertools.product((False, True), (None, 2.0, 30.0), (None, -0.3, 40.0))
)


def case(rng, dtype, regime):
    """Every third call has sinks, and every fourth slopes."""
    arrays = *qkv(rng, dtype, regime), *[None] * 5
    if rng.random() < 0.25:
        arrays = *arrays[:-1], slopes_of(rng, arrays[0], dtype)
    if rng.random() < 0.35:
        own = pick(rng, (dtype, dtype if dtype == "float64" else "float32"))
        arrays = *arrays[:6], sweep(rng, arrays[0].shape[2:3], own), arrays[7]
    return arrays, pick(rng, OPTIONS)


def slopes_of(rng, q, dtype):
    """Slopes of the heads of q, as models have them or larger."""
    return (2.0 ** rng.uniform(-8, 1, q.shape[2])).astype("float64" if dtype == "float64" else "float32")


def special(rng, dtype, seed):
    """Every other call has a bias that hides pairs."""
    arrays, options = qkv(rng, dtype, pick(rng, SWEPT)), pick(rng, OPTIONS)
    arrays = with_specials(rng, arrays)
    if seed % 2:
        bias = sweep(rng, (1, arrays[0].shape[2], 1, arrays[1].shape[1]), dtype)
        bias[rng.random(bias.shape) < 0.3] = -np.inf
        arrays.append(bias)
    elif seed % 4 == 0:
        arrays += [None, None, None, rng.choice([0.5, -np.inf, np.inf, np.nan], arrays[0].shape[2]).astype(np.float32)]
    return tuple(arrays), options


def large_case(rng, dtype, regime):
    extents = ([33, 48, 65], [48, 65, 97], [16, 40, 64, 128], [16, 40], [1, 2])
    q_len, kv_len, d, dv, group = (rng.choice(x) for x in extents)
    options = WITH_LSE | {
        "is_causal": bool(rng.random() < 0.4),
        "softcap": rng.choice([None, None, 2.0, 30.0]),
        "scale": rng.choice([None, None, 0.3, 1.0]),
    }
    shapes = (1, q_len, 2 * group, d), (1, kv_len, 2, d), (1, kv_len, 2, dv)
    arrays = [draw(rng, shape, dtype, regime) for shape in shapes]
    if rng.random() < 0.4:
        mask = rng.choice(["normal", "mask", "mask_finfo_min", "very_negative"])
        arrays.append(draw(rng, (1, 1, q_len, kv_len), dtype, mask))
    return tuple(arrays), options


def large_case_with_sinks(rng, dtype, regime):
    """A third of them."""
    arrays, options = large_case(rng, dtype, regime)
    if rng.random() < 0.3:
        arrays = *arrays, *[None] * (6 - len(arrays)), draw(rng, (arrays[0].shape[2],), dtype)
    return arrays, options


def typical(rng, dtype, **options):
    arrays = tuple(draw(rng, s, dtype) for s in ((1, 80, 2, 40), (1, 97, 1, 40), (1, 97, 1, 16)))
    return arrays, WITH_LSE | options


def with_sinks(rng, dtype, value=None):
    """Sinks near the largest scores, of two heads."""
    arrays, _ = typical(rng, dtype)
    sinks = rng.uniform(1, 3, 2) if value is None else np.full(2, value)
    return *arrays, None, None, None, sinks.astype(np.float32)


def with_slopes(rng, dtype):
    """Slopes of two heads that leave weight to many keys."""
    arrays, _ = typical(rng, dtype)
    return *arrays, None, None, None, None, np.array([0.05, 0.3], "float64" if dtype == "float64" else "float32")


def drawn(*shapes):
    return lambda rng, dtype: tuple(sweep(rng, shape, dtype) for shape in shapes)


def spikes(rng, dtype, n=65, depth=16, where=64):
    """q, k, v for which each query sees one key alone: o is that key's row of v."""
    to = numpy_dtype(dtype)
    keys = np.eye(depth)[np.arange(n) % depth] * 0
    q, v = np.zeros((1, 4, 1, depth)), rng.standard_normal((1, n, 1, 8))
    keys[where, 0] = q[..., 0] = 30
    return q.astype(to), keys.reshape(1, n, 1, depth).astype(to), v.astype(to)


def rising(slope):
    """Each tile rescales what came before: the longest chain of roundings that a legal tiling has."""

    def arrays(rng, dtype):
        n, to = 4096, numpy_dtype(dtype)
        k = (np.arange(n) * slope).astype(to).reshape(1, n, 1, 1)
        return np.array([1, -1], to).reshape(1, 2, 1, 1), k, sweep(rng, (1, n, 1, 4), dtype, "large mean")

    return arrays


def near_1_values(rng, dtype):
    """Values whose 10 bits that tf32 keeps are all 0."""
    q, k = drawn((1, 40, 2, 64), (1, 200, 1, 64))(rng, dtype)
    return q, k, np.full((1, 200, 1, 4), np.float32(1 + 2.0**-10 - 2.0**-23))


def masked_far(rng, dtype):
    """Scores near -1e5 lose to a sentinel of -1e4; -inf stays below everything."""
    qkv = drawn((1, 8, 1, 16), (1, 8, 1, 16), (1, 8, 1, 4))(rng, dtype)
    return *qkv, np.full((1, 1, 1, 8), -1e5, np.float32)


# ------------------------------------------------------------------------------------------------------- random calls
def fuzzed(r, dtype):
    batch, q_len, kv_len, heads, d = r.extent(), r.extent(), r.extent(), max(r.extent(), 1), max(r.extent(), 1)
    group = int(r.pick((1, 2)))
    arrays = {
        "q": r.array(dtype, batch, q_len, heads * group, d),
        "k": r.array(dtype, batch, kv_len, heads, d),
        "v": r.array(dtype, batch, kv_len, heads, d),
    }
    if r.chance(0.3):
        arrays["bias"] = r.array(dtype, r.pick((1, batch)), r.pick((1, heads * group)), r.pick((1, q_len)), kv_len)
    if r.chance(0.3):
        ids = r.pick(("int32", "int64"))
        for name, n in (("q_segment_ids", q_len), ("kv_segment_ids", kv_len)):
            arrays[name] = r.rng.integers(0, 2, (batch, n)).astype(ids)
    if r.chance(0.3):
        arrays["sinks"] = r.array(r.pick((dtype, "float64" if dtype == "float64" else "float32")), heads * group)
    if r.chance(0.3):
        arrays["alibi_slopes"] = r.array("float64" if dtype == "float64" else "float32", heads * group)
    options = {
        "is_causal": r.chance(0.5),
        "window": r.pick((None, (1, None), (2, 0))),
        "scale": r.pick((None, 0.5)),
        "softcap": r.pick((None, 2.0)),
    }
    if r.chance(0.3):
        options |= {"q_start": r.pick((0, 3, -2)), "kv_start": r.pick((None, 0, 2))}
    if r.chance(0.2) and dtype != "float64":
        options["out_dtype"] = "float32"
    return arrays, options | {"return_lse": r.chance(0.5)}


# ------------------------------------------------------------------------------------------------------------- on a GPU
def past_2_31(gpu):
    heads, d, left = 64, 128, 63
    length = gpu.big // (heads * d) + 64
    q, k, v = (gpu.normal(1, length, heads, d, dtype=gpu.torch.bfloat16) for _ in range(3))
    assert q.numel() > gpu.big
    o = gpu.op("attention")(q, k, v, is_causal=True, window=(left, 0))
    for i in gpu.rows_to_sample(length, heads * d).tolist():
        keys = slice(max(i - left, 0), i + 1)
        part = (q[:, i : i + 1], k[:, keys], v[:, keys])
        yield o[:, i : i + 1].contiguous(), tuple(t.contiguous() for t in part), {}


def far(gpu):
    q = gpu.far((4, 33, 2, 64))
    yield q, q, q


def in_layer(op, x, p):
    """Two heads of causal attention of the hidden state with itself. Scores are near 1: weights that are computed anew
    for the gradients, exp(s - lse), are off by the rounding of scores and lse, which one that keeps them is not.
    """
    heads = x.reshape(*x.shape[:2], 2, -1)
    return op(heads / 4, heads / 4, heads, is_causal=True).reshape(x.shape)


SMALL = {"q": (1, 3, 2, 2), "k": (1, 4, 1, 2), "v": (1, 4, 1, 3)}
MASKS = SMALL | {"bias": (1, 2, 1, 4), "q_segment_ids": (1, 3), "kv_segment_ids": (1, 4)}
LARGER = {"q": (2, 7, 4, 5), "k": (2, 9, 2, 5), "v": (2, 9, 2, 3), "bias": (1, 4, 1, 9)}
BEFORE = {"q": (2, 5, 4, 4), "k": (2, 6, 2, 4), "v": (2, 6, 2, 3)}

RECORD = ForwardRecord(
    op="attention",
    simulate=simulate,
    variants=({}, {"block": 64}, {"block": 1024}, {"ftz": True}),
    case=case,
    regimes=SWEPT,
    special=special,
    near=Near(
        lambda rng: drawn((1, 80, 1, 40), (1, 97, 1, 40), (1, 97, 1, 16))(rng, "float32"),
        WITH_LSE,
        plant={"factor": 1 + 4e-5},
    ),
    faults={
        "that drops the last key": Fault(spikes, {"drop": 64}, WITH_LSE),
        "without its tail": Fault(spikes, {"tail": False}, WITH_LSE),
        "without the maximum": Fault(spikes, {"shift": False}, WITH_LSE | {"scale": 1.0}),
        "with scale 1 % off": Fault(
            lambda r, t: qkv(r, t, "normal", 40, 16), {"factor": 1.01}, WITH_LSE | {"scale": 1.0}
        ),
        "with a finite mask": Fault(
            lambda r, t: qkv(r, t, "normal", 1, 16), {"sentinel": -1e4}, WITH_LSE | {"is_causal": True}
        ),
        "with a mask that data can reach": Fault(
            masked_far, {"sentinel": -1e4}, WITH_LSE | {"is_causal": True}, dtypes=("float32",)
        ),
        "of a query that is scaled and rounded first": Fault(
            drawn((1, 32, 1, 40), (1, 8, 1, 40), (1, 8, 1, 4)), {"round_q": True}, WITH_LSE, "lse", ("bfloat16",)
        ),
        "of tf32 products for ieee": Fault(near_1_values, {"precision": "tf32"}, WITH_LSE, EVERY, ("float32",)),
        "with a sink in the sum twice": Fault(with_sinks, {"sink": "twice"}, WITH_LSE, EVERY),
        "with a sink that is scaled": Fault(with_sinks, {"sink": "scaled"}, WITH_LSE, EVERY),
        "with a sink that lse lacks": Fault(with_sinks, {"sink": "not in lse"}, WITH_LSE, "lse"),
        "with sums that a sink does not rescale": Fault(
            lambda r, t: with_sinks(r, t, 9.0), {"sink": "sums not rescaled"}, WITH_LSE, "o"
        ),
        **{
            f"with slopes {wrong}": Fault(with_slopes, {"fall": wrong}, WITH_LSE, EVERY)
            for wrong in ("of the other sign", "from the first query", "of another head")
        },
    },
    corners={
        **{
            f"a maximum that rises by {slope} a key": Corner(rising(slope), WITH_LSE, {"block": 16}, most=0.5)
            for slope in (0.003, 0.03, 0.3)
        },
        "tf32 has its own terms": Corner(near_1_values, WITH_LSE | {"precision": "tf32"}, dtypes=("float32",)),
    },
    large_case=large_case_with_sinks,
    typical=typical,
    hiding={
        "o truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "P truncated": Hiding("lean towards 0", {"truncate_p": True}, dtypes=HALVES),
        "scale 0.3 % off": Hiding("typical", {"factor": 1.003}),
        "scale 1e-5 off": Hiding("typical", {"factor": 1 + 1e-5}),
        "tf32 scores for ieee": Hiding("typical", {"precision": "tf32"}, dtypes=("float32",)),
        "q scaled and rounded": Hiding("typical", {"round_q": True}, dtypes=HALVES),
        "o accumulated in bfloat16": Hiding("typical", {"low": BF16}, dtypes=DTYPES),
        "tanh of 11 bits": Hiding("typical", {"tanh": rounded_tanh}, options={"softcap": 2.0}),
    },
    small={
        "plain": Sample(SMALL),
        "every mask": Sample(MASKS, {"is_causal": True, "window": (2, None)}),
        "softcap and scale": Sample(SMALL | {"bias": (1, 1, 3, 4)}, {"softcap": 2.0, "scale": 0.4}),
        "lse": Sample(SMALL, {"return_lse": True}),
        "window": Sample(SMALL, {"window": (2, 0), "scale": 0.3}),
        "sinks": Sample(SMALL | {"sinks": (2,)}, {"window": (0, 0), "softcap": 2.0}),
        "starts": Sample(SMALL, {"is_causal": True, "q_start": 6, "kv_start": 5}),
        "slopes": Sample(SMALL | {"alibi_slopes": (2,)}, {"window": (2, 1), "softcap": 2.0}),
    },
    derived={
        "no mask": Sample(LARGER),
        "causal": Sample(LARGER, {"is_causal": True}),
        "softcap": Sample(LARGER, {"softcap": 1.5}),
        "scale": Sample(LARGER, {"scale": -0.7}),
        "sinks": Sample(LARGER | {"sinks": (4,)}, {"is_causal": True, "softcap": 1.5}),
        "starts": Sample(LARGER, {"window": (3, 1), "q_start": 9, "kv_start": 7}),
    },
    usual=(
        Sample({"q": (2, 100, 4, 64), "k": (2, 260, 2, 64), "v": (2, 260, 2, 40)}, {"return_lse": True}),
        Sample(
            {"q": (1, 200, 4, 48), "k": (1, 200, 4, 48), "v": (1, 200, 4, 48)},
            {"is_causal": True},
            {"block_q": 128, "block_kv": 128},
        ),
        Sample(
            {"q": (1, 150, 2, 64), "k": (1, 330, 1, 64), "v": (1, 330, 1, 64)},
            {"window": (100, 30)},
            {"block_q": 128, "block_kv": 128},
        ),
        Sample(
            {"q": (1, 90, 4, 32), "k": (1, 300, 2, 32), "v": (1, 300, 2, 32), "bias": (1, 4, 1, 300)},
            {"softcap": 5.0},
        ),
        Sample(
            {"q": (2, 128, 2, 64), "k": (2, 256, 2, 64), "v": (2, 256, 2, 64)}
            | {"q_segment_ids": (2, 128), "kv_segment_ids": (2, 256)},
        ),
        Sample(
            {"q": (2, 70, 4, 32), "k": (2, 1100, 2, 32), "v": (2, 1100, 2, 32), "sinks": (4,)},
            {"return_lse": True, "window": (1090, 0)},
            wider=("sinks",),
        ),
        Sample(
            {"q": (1, 100, 4, 64), "k": (1, 1100, 2, 64), "v": (1, 1100, 2, 64)},
            {"is_causal": True, "return_lse": True, "q_start": 1500, "kv_start": 700},
        ),
        Sample(
            {"q": (1, 100, 4, 64), "k": (1, 1100, 2, 64), "v": (1, 1100, 2, 64), "alibi_slopes": (4,)},
            {"is_causal": True, "return_lse": True},
        ),
    ),
    formula=formula,
    formula_calls=dict(formula_calls()),
    formula_tolerance=(1e-12, 1e-14),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample(
        {"q": (2, 9, 4, 8), "k": (2, 11, 2, 8), "v": (2, 11, 2, 8), "bias": (1, 4, 1, 11)},
        {"softcap": 3.0, "is_causal": True},
    ),
    lowered={
        "causal": Sample(
            {"q": (2, 100, 4, 64), "k": (2, 130, 2, 64), "v": (2, 130, 2, 64)},
            {"is_causal": True, "return_lse": True},
        ),
        "window": Sample(dict.fromkeys("qkv", (1, 300, 2, 80)), {"window": (40, 8), "softcap": 20.0}),
        "bias": Sample(dict.fromkeys("qkv", (1, 50, 2, 32)) | {"bias": (1, 2, 1, 50)}, wider=("bias",)),
        "segments": Sample(
            dict.fromkeys("qkv", (1, 50, 2, 32)) | dict.fromkeys(("q_segment_ids", "kv_segment_ids"), (1, 50)),
            {"precision": "tf32"},
        ),
        "sinks": Sample(
            {"q": (2, 100, 4, 64), "k": (2, 130, 2, 64), "v": (2, 130, 2, 64), "sinks": (4,)},
            {"is_causal": True, "return_lse": True},
            wider=("sinks",),
        ),
        "starts": Sample(
            {"q": (2, 100, 4, 64), "k": (2, 130, 2, 64), "v": (2, 130, 2, 64)},
            {"window": (40, 0), "return_lse": True, "q_start": 300, "kv_start": 200},
        ),
        "slopes": Sample(
            {"q": (2, 100, 4, 64), "k": (2, 130, 2, 64), "v": (2, 130, 2, 64), "alibi_slopes": (4,)},
            {"is_causal": True, "return_lse": True},
        ),
    },
    mapped={
        "every array": Mapped(
            Sample({"q": (2, 2, 5, 4, 4), "k": (2, 2, 6, 2, 4), "v": (2, 2, 6, 2, 3)}, {"is_causal": True}),
            {"q": 1, "k": 0, "v": 0},
        ),
        "shared keys": Mapped(Sample(BEFORE | {"q": (3, 2, 5, 4, 4)}), {"q": 0}),
        "own bias": Mapped(Sample(BEFORE | {"bias": (2, 1, 4, 1, 6)}), {"bias": 0}),
        "shared sinks": Mapped(Sample(BEFORE | {"q": (3, 2, 5, 4, 4), "sinks": (4,)}), {"q": 0}),
        "own sinks": Mapped(Sample(BEFORE | {"sinks": (3, 4)}), {"sinks": 0}, folds=False),
        "shared slopes": Mapped(Sample(BEFORE | {"q": (3, 2, 5, 4, 4), "alibi_slopes": (4,)}), {"q": 0}),
        "own slopes": Mapped(Sample(BEFORE | {"alibi_slopes": (3, 4)}), {"alibi_slopes": 0}, folds=False),
        "shared bias": Mapped(Sample(BEFORE | {"q": (3, 2, 5, 4, 4), "bias": (1, 4, 1, 6)}), {"q": 0}),
    },
    wrong=SHAPES | VALUES,
    fuzzed=fuzzed,
    layer=Layer(in_layer),
    extents={"batch": 2, "q_len": 64, "kv_len": 96, "kv_heads": 2, "group": 2, "d": 64, "dv": 64},
    launched=Sample(dict.fromkeys("qkv", (1, 64, 4, 64))),
    matrix_units=True,
    past_2_31=past_2_31,
    far=far,
    twin=Twin(
        "scaled_dot_product_attention",
        sampled="nn.functional.scaled_dot_product_attention",
        refusals={"dropout_p is 0.5; expected 0.0": "dropout is refused"},
        least=13,
    ),
)


# ---------------------------------------------------------------------------------------------------------- gradient
FORWARD = ("q", "k", "v", "bias", "q_segment_ids", "kv_segment_ids", "sinks", "alibi_slopes")


# ------------------------------------------------------------------------------------------------- the simulated kernel
def simulate_vjp(*arrays, block_q=16, block_kv=16, ftz=False, drop=None, factor=1.0, truncate_p=False,
                 truncate_ds=False, low=None, tanh=np.tanh, base2=True, forget=(), fall="right",
                 **options):  # fmt: skip
    """One tile of scores at a time.

    ``base2``: exp is exp2 of scores in units of log 2. ``forget``: terms to leave out. ``fall``: what is wrong with
    slopes.
    """
    call = op("attention_vjp").bind(*arrays, **options)
    arrays, options = call.arrays, call.options
    names = "q", "k", "v", "o", "d_o", "lse", "bias", "d_lse", "sinks"
    q, k, v, o, d_o, lse, bias, d_lse, sinks = (arrays[n] for n in names)
    F, (batch, q_len, heads, depth), kv_len = accumulator(q), q.shape, k.shape[1]
    scale = F((1 / np.sqrt(depth) if options["scale"] is None else options["scale"]) * factor)
    d_q, d_k, d_v, d_bias, d_sinks = (None if a is None else np.zeros(a.shape, F) for a in (q, k, v, bias, sinks))
    log2e, slopes = F(np.log2(np.e)), arrays["alibi_slopes"]
    places = np.arange(q_len)[:, None] + first_place(call)

    def dot(a, b):
        return matmul.simulate(a, b, options["precision"], block=a.shape[-1], ftz=ftz)[0]

    def store(x, cut):
        return truncate(x, q.dtype.name) if cut else x.astype(q.dtype)

    for b, h in np.ndindex(batch, heads):
        kv_head = h // call.dims["group"]
        may, row = allowed(call, b), lse[b, h].astype(F)[:, None] * (log2e if base2 else F(1))
        row = np.where(row == -np.inf, F(np.inf), row)  # no key was seen, or none but by a bias of finfo.min
        delta = delta_of(d_o[b, :, h], o[b, :, h], None if d_lse is None or "d_lse" in forget else d_lse[b, h], F, ftz)
        if sinks is not None and not (b and "batch" in forget):
            d_sinks[h] += of_a_sink(F(sinks[h]), lse[b, h].astype(F)[:, None], delta, ftz, forget)
        for i, j in np.ndindex(-(-q_len // block_q), -(-kv_len // block_kv)):
            rows, keys = slice(i * block_q, (i + 1) * block_q), slice(j * block_kv, (j + 1) * block_kv)
            here, qt, gt = may[rows, keys].copy(), q[b, rows, h], d_o[b, rows, h]
            kt, vt = k[b, keys, kv_head], v[b, keys, kv_head]
            if drop is not None and keys.start <= drop < keys.stop:
                here[:, drop - keys.start] = False
            s, slope = dot(qt, kt.T) * scale, F(1)
            if options["softcap"] is not None:
                cap = F(options["softcap"])
                t = tanh(s / cap).astype(F)
                s, slope = cap * t, F(1) if "slope" in forget else F(1) - t * t
            if slopes is not None:
                s = s - falls(slopes.astype(F), h, np.arange(kv_len)[keys], places[rows], fall)
            if bias is not None:
                s = s + np.broadcast_to(bias, (batch, heads, q_len, kv_len))[b, h][rows, keys].astype(F)
            apart = np.minimum((s * log2e if base2 else s) - row[rows], F(0))
            p = np.exp2(apart) if base2 else np.exp(apart)
            ds = flush(p, ftz) * (dot(gt, vt.T) - (0 if "delta" in forget else delta[rows]))
            p, ds, capped = (np.where(here, flush(x, ftz), F(0)) for x in (p, ds, ds * slope))
            stored_p, stored_ds = store(p, truncate_p), store(capped, truncate_ds)
            d_q[b, rows, h] = through(d_q[b, rows, h] + dot(stored_ds, kt), low)
            d_k[b, keys, kv_head] = through(d_k[b, keys, kv_head] + dot(stored_ds.T, qt), low)
            d_v[b, keys, kv_head] = through(d_v[b, keys, kv_head] + dot(stored_p.T, gt), low)
            if bias is not None:
                at = d_bias[b % bias.shape[0], h % bias.shape[1], slice(0, 1) if bias.shape[2] == 1 else rows, keys]
                at += ds.sum(0, keepdims=True) if bias.shape[2] == 1 else ds
    return d_q * scale, d_k * scale, d_v, d_bias, d_sinks


def delta_of(d_o, o, d_lse, F, ftz):
    """Delta of a head's rows, a column."""
    delta = flush(d_o.astype(F) * o.astype(F), ftz).sum(1, keepdims=True)
    return delta if d_lse is None else delta - d_lse.astype(F)[:, None]


def of_a_sink(sink, lse, delta, ftz, forget):
    """What the rows of a batch entry add to the gradient of their head's sink."""
    p = flush(np.exp(np.minimum(sink - lse, np.zeros_like(lse))), ftz)
    total = np.where(lse == -np.inf, np.zeros_like(lse), flush(p * delta, ftz)).sum()
    return total if "sign" in forget else -total


# ---------------------------------------------------------------------------------------------------------------- calls
def with_residuals(rng, arrays, options, dtype, regime="normal", lse_too=False):
    """The arguments of the gradient by name: o and lse as the forward oracle gives them, d_o and perhaps d_lse
    drawn.
    """
    o, lse = outputs_of("attention", *(arrays.get(n) for n in FORWARD), **options, return_lse=True)
    more = {"o": o, "lse": lse, "d_o": draw(rng, o.shape, dtype, regime)}
    return arrays | more | ({"d_lse": draw(rng, lse.shape, lse.dtype.name, regime)} if lse_too else {})


def forward_case(rng, dtype, regime, extents, masks, sinks=0.7, heads=((1, 3), (1, 4)), slopes=0.25):
    """Arrays of a forward call by name, and its options. ``sinks``, ``slopes``: the share of calls that have some, 0
    for an op that has none; ``heads``: the ranges of kv_heads and group."""
    batch, q_len, kv_len = rng.integers(1, 3), pick(rng, extents), pick(rng, extents)
    kv_heads, group = (rng.integers(*span) for span in heads)
    d, dv = pick(rng, (3, 16, 40)), pick(rng, (3, 16, 40))
    drawn = {
        "is_causal": (0.4, (True,)),
        "window": (0.3, ((3, 0), (None, 2), (5, 5), (0, 0))),
        "scale": (0.5, (0.125, 1.0, -0.3)),
        "softcap": (0.4, (2.0, 30.0)),
        "precision": (0.3 * (dtype == "float32"), ("tf32",)),
    }
    options = {name: pick(rng, values) for name, (share, values) in drawn.items() if rng.random() < share}
    shapes = {
        "q": (batch, q_len, kv_heads * group, d),
        "k": (batch, kv_len, kv_heads, d),
        "v": (batch, kv_len, kv_heads, dv),
    }
    arrays = {name: draw(rng, shape, dtype, regime) for name, shape in shapes.items()}
    if rng.random() < 0.6:
        shape = tuple(1 if rng.random() < 0.33 else n for n in (batch, kv_heads * group, q_len)) + (kv_len,)
        own = "float32" if rng.random() < 0.5 and dtype != "float64" else dtype
        arrays["bias"] = draw(rng, shape, own, pick(rng, masks))
    if rng.random() < 0.3:
        ids = ("q_segment_ids", q_len), ("kv_segment_ids", kv_len)
        arrays |= {name: rng.integers(0, 3, (batch, n)) for name, n in ids}
    if rng.random() < sinks:
        own = "float32" if rng.random() < 0.5 and dtype != "float64" else dtype
        arrays["sinks"] = draw(rng, (kv_heads * group,), own)
    if slopes and rng.random() < slopes:
        arrays["alibi_slopes"] = slopes_of(rng, arrays["q"], dtype)
    return arrays, options


def any_case(rng, dtype, regime, extents, masks, **more):
    arrays, options = forward_case(rng, dtype, regime, extents, masks, **more)
    full = with_residuals(rng, arrays, options, dtype, regime, rng.random() < 0.4)
    return in_order("attention_vjp", full), options


SEEN = ("normal", "mask", "very_negative")


def case_vjp(rng, dtype, regime):
    return any_case(rng, dtype, regime, (1, 5, 16, 33, 64), SEEN)


def large_case_vjp(rng, dtype, regime):
    """Sinks have one gradient a head: a call with sinks has many heads."""
    masks = (*SEEN, "mask_finfo_min")
    if rng.random() < 0.3:
        return any_case(rng, dtype, regime, (16, 33), masks, sinks=1.0, heads=((24, 30), (3, 5)))
    return any_case(rng, dtype, regime, (64, 97), masks, sinks=0.0)


def special_vjp(rng, dtype, seed):
    """NaN and infinities in the inputs of the forward call, which its outputs then hold too, and in the cotangents."""
    arrays, options = forward_case(rng, dtype, "normal", (1, 5, 16, 33), SEEN)
    for name in ("q", "k", "v", "bias"):
        if name in arrays and rng.random() < 0.4:
            arrays[name] = arrays[name].copy()
            arrays[name][tuple(rng.integers(n) for n in arrays[name].shape)] = rng.choice([np.nan, np.inf, -np.inf])
    return in_order("attention_vjp", with_residuals(rng, arrays, options, dtype, "special", seed % 2 == 0)), options


def ordinary(rng, dtype, sinks=None, **options):
    """No mask, a float32 bias for each head, grouped queries, a cotangent of lse."""
    q, k, v = (draw(rng, shape, dtype) for shape in ((1, 80, 2, 40), (1, 97, 1, 40), (1, 97, 1, 16)))
    arrays = {"q": q, "k": k, "v": v, "bias": draw(rng, (1, 2, 80, 97), "float32")}
    arrays |= {} if sinks is None else {"sinks": np.float32(sinks)}
    return in_order("attention_vjp", with_residuals(rng, arrays, options, dtype, lse_too=True))


def ordinary_sinks(rng, dtype):
    """As much weight on the sinks as on the keys; two batch entries."""
    q, k, v = (draw(rng, shape, dtype) for shape in ((2, 80, 2, 40), (2, 20, 1, 40), (2, 20, 1, 16)))
    arrays = {"q": q, "k": k, "v": v, "sinks": np.float32([3, 4])}
    return in_order("attention_vjp", with_residuals(rng, arrays, {}, dtype, lse_too=True))


def ordinary_slopes(rng, dtype):
    """Two heads whose slopes leave weight to many keys."""
    arrays = dict(zip(("q", "k", "v"), with_slopes(rng, dtype), strict=False))
    arrays["alibi_slopes"] = with_slopes(rng, dtype)[-1]
    return in_order("attention_vjp", with_residuals(rng, arrays, {}, dtype, lse_too=True))


capped = partial(ordinary, softcap=2.0)
CAP = {"softcap": 2.0}


def one_key_matters(rng, dtype):
    """The last of 65 keys takes most of each query's weight."""
    keys = np.zeros((1, 65, 1, 16))
    keys[:, 64, :, 0] = 3
    arrays = {"q": np.ones((1, 4, 1, 16)), "k": keys, "v": rng.standard_normal((1, 65, 1, 8))}
    arrays = {n: x.astype(numpy_dtype(dtype)) for n, x in arrays.items()}
    return in_order("attention_vjp", with_residuals(rng, arrays, {}, dtype))


def with_finfo_min(rng, dtype):
    """A bias of finfo.min on one query: its keys have weights of 0, or of 1."""
    q, k, v, bias = (draw(rng, shape, dtype) for shape in ((1, 8, 1, 16), (1, 40, 1, 16), (1, 40, 1, 4), (1, 1, 8, 40)))
    bias = bias.astype(np.float32)
    bias[:, :, 3] = np.finfo(np.float32).min
    return in_order("attention_vjp", with_residuals(rng, {"q": q, "k": k, "v": v, "bias": bias}, {}, dtype))


# ------------------------------------------------------------------------------------------------------------- on a GPU
def past_2_31_vjp(gpu):
    heads, d, left = 64, 128, 63
    length, edge = gpu.big // (heads * d) + 64, gpu.big // (heads * d)
    q, k, v = (gpu.normal(1, length, heads, d, dtype=gpu.torch.bfloat16) for _ in range(3))
    band = {"is_causal": True, "window": (left, 0)}
    o, lse = gpu.op("attention")(q, k, v, return_lse=True, **band)
    between = range(left + 1, edge - 2 * left, max(edge // 61, left + 1))
    picked = gpu.torch.tensor([0, *between, edge - 1, length - 1], device=gpu.device)
    assert picked.diff().min() > left  # no key meets two of them
    d_o = gpu.sampled(q[0], picked)[None]
    d_q, d_k, d_v = gpu.op("attention_vjp")(q, k, v, o, lse, d_o, **band)[:3]
    assert d_k.numel() > gpu.big
    for i in picked.tolist():
        row, keys = slice(i, i + 1), slice(max(i - left, 0), i + 1)
        part = (q[:, row], k[:, keys], v[:, keys], o[:, row], lse[..., row], d_o[:, row])
        gradients = (d_q[:, row], d_k[:, keys], d_v[:, keys])
        yield tuple(t.contiguous() for t in gradients), tuple(t.contiguous() for t in part), {}


def far_vjp(gpu):
    torch = gpu.torch
    q, d_o, lse = gpu.far((4, 33, 2, 64)), gpu.far((4, 33, 2, 64)), gpu.far((4, 2, 33), torch.float32)
    near = gpu.normal(4, 33, 2, 64, dtype=torch.bfloat16)
    for qkv in ((q, near, near), (near, q, q)):
        o, of_rows = gpu.op("attention")(*qkv, return_lse=True)
        yield *qkv, d_o.copy_(o), lse.copy_(of_rows), d_o  # one far buffer is both o and its cotangent


def saved(batch, q_len, kv_len, heads, kv_heads, d, dv):
    """The shapes of what attention's gradients always take."""
    o = (batch, q_len, heads, dv)
    k, v = ((batch, kv_len, kv_heads, n) for n in (d, dv))
    return {"q": (batch, q_len, heads, d), "k": k, "v": v, "o": o, "lse": (batch, heads, q_len), "d_o": o}


TILES = {"block_q": 128, "block_kv": 128}

GRADIENT = GradientRecord(
    op="attention_vjp",
    simulate=simulate_vjp,
    variants=(
        {},
        {"block_q": 64, "block_kv": 32},
        {"block_q": 512, "block_kv": 512},
        {"ftz": True},
        {"base2": False},
    ),
    case=case_vjp,
    regimes=(
        "normal",
        "integers",
        "spikes",
        "wide",
        "constant",
        "large_mean",
        "very_negative",
        "near_overflow",
        "subnormal",
        "special",
    ),
    telling=("normal", "integers", "constant"),
    special=special_vjp,
    near=Near(lambda rng: ordinary(rng, "float32", (2, 3)), off={"d_sinks": 4.5e-5}, plant={"factor": 1 + 1.8e-5}),
    faults={
        "delta left out": Fault(capped, {"forget": ("delta",)}, CAP),
        "d_lse left out": Fault(capped, {"forget": ("d_lse",)}, CAP),
        "the softcap's slope left out": Fault(capped, {"forget": ("slope",)}, CAP),
        "scale 3 % off": Fault(capped, {"factor": 1.03}, CAP),
        "scale 10 % off": Fault(capped, {"factor": 1.1}, CAP),
        "a key that is dropped": Fault(one_key_matters, {"drop": 64}, breaks=EVERY),
        "d_sinks of the other sign": Fault(ordinary_sinks, {"forget": ("sign",)}, breaks="d_sinks"),
        "d_sinks of the first batch entry": Fault(ordinary_sinks, {"forget": ("batch",)}, breaks="d_sinks"),
        **{
            f"slopes {wrong}": Fault(ordinary_slopes, {"fall": wrong}, breaks=EVERY)
            for wrong in ("of the other sign", "from the first query", "of another head")
        },
        "d_sinks without Delta's d_lse": Fault(ordinary_sinks, {"forget": ("d_lse",)}, breaks="d_sinks"),
    },
    corners={
        "a bias of finfo.min poisons no key": Corner(with_finfo_min),
        "a bias of finfo.min poisons no key by exp": Corner(with_finfo_min, variant={"base2": False}),
    },
    large_case=large_case_vjp,
    least_z={"d_bias": 0.6},
    typical=lambda rng, dtype, **options: (ordinary(rng, dtype, **options), options),
    hiding={
        "P truncated": Hiding("lean towards 0", {"truncate_p": True}, dtypes=HALVES),
        "D truncated": Hiding("lean towards 0", {"truncate_ds": True}, dtypes=HALVES),
        "scale 0.3 % off": Hiding("typical", {"factor": 1.003}),
        "scale 1e-5 off": Hiding("typical", {"factor": 1 + 1e-5}, dtypes=("float32",)),
        "accumulated in bfloat16": Hiding("typical", {"low": BF16}),
        "tanh of 11 bits": Hiding("typical", {"tanh": rounded_tanh}, options=CAP),
    },
    small={"two gradients": Sample(saved(1, 3, 4, 2, 1, 2, 3), wants=("d_q", "d_v"))},
    usual=(
        Sample(saved(2, 100, 260, 4, 2, 64, 40) | {"d_lse": (2, 4, 100)}),
        Sample(saved(1, 200, 200, 4, 4, 48, 48), {"is_causal": True}, TILES),
        Sample(saved(1, 150, 330, 2, 1, 64, 64), {"window": (100, 30)}, TILES),
        Sample(saved(1, 90, 300, 4, 2, 32, 32) | {"bias": (1, 4, 1, 300)}, {"softcap": 5.0}),
        Sample(saved(2, 128, 256, 2, 2, 64, 64) | {"q_segment_ids": (2, 128), "kv_segment_ids": (2, 256)}),
        Sample(saved(2, 100, 60, 4, 2, 32, 32) | {"d_lse": (2, 4, 100), "sinks": (4,)}, wider=("sinks",)),
        Sample(saved(1, 150, 330, 2, 1, 64, 64), {"is_causal": True, "q_start": 500, "kv_start": 400}),
        Sample(saved(1, 150, 330, 4, 2, 64, 64) | {"alibi_slopes": (4,)}, {"is_causal": True}),
    ),
    extents={"batch": 2, "q_len": 64, "kv_len": 96, "kv_heads": 2, "group": 2, "d": 64, "dv": 64},
    matrix_units=True,
    past_2_31=past_2_31_vjp,
    far=far_vjp,
)
