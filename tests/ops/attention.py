"""o = softmax(q k^T scale + bias) v, of the pairs that the masks let see each other, and lse, the logarithm of the
softmax's denominator.
"""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np

from portakern.spec.dtypes import numpy_dtype
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
    Hiding,
    Layer,
    Mapped,
    Near,
    Sample,
    Twin,
)

WITH_LSE = {"return_lse": True}


# ------------------------------------------------------------------------------------------------- the simulated kernel
def simulate(q, k, v, bias=None, *, is_causal=False, scale=None, softcap=None, precision="ieee", return_lse=False,
             block=16, ftz=False, sentinel=None, drop=None, factor=1.0, shift=True, round_q=False, tail=True,
             truncate_p=False, low=None, tanh=np.tanh):  # fmt: skip
    """One pass over tiles of keys with the running maximum m, denominator l and sum of values acc."""
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
        o[b, :, h] = np.where(l == 0, F(0), acc / l)
        lse[b, h] = (m + np.log(l))[:, 0]
    return o, lse if return_lse else None


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
    return qkv(rng, dtype, regime), pick(rng, OPTIONS)


def special(rng, dtype, seed):
    """Every other call has a bias that hides pairs."""
    arrays, options = case(rng, dtype, pick(rng, SWEPT))
    arrays = with_specials(rng, arrays)
    if seed % 2:
        bias = sweep(rng, (1, arrays[0].shape[2], 1, arrays[1].shape[1]), dtype)
        bias[rng.random(bias.shape) < 0.3] = -np.inf
        arrays.append(bias)
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


def typical(rng, dtype, **options):
    arrays = tuple(draw(rng, s, dtype) for s in ((1, 80, 2, 40), (1, 97, 1, 40), (1, 97, 1, 16)))
    return arrays, WITH_LSE | options


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
    options = {
        "is_causal": r.chance(0.5),
        "window": r.pick((None, (1, None), (2, 0))),
        "scale": r.pick((None, 0.5)),
        "softcap": r.pick((None, 2.0)),
    }
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
    },
    corners={
        **{
            f"a maximum that rises by {slope} a key": Corner(rising(slope), WITH_LSE, {"block": 16}, most=0.5)
            for slope in (0.003, 0.03, 0.3)
        },
        "tf32 has its own terms": Corner(near_1_values, WITH_LSE | {"precision": "tf32"}, dtypes=("float32",)),
    },
    large_case=large_case,
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
    },
    derived={
        "no mask": Sample(LARGER),
        "causal": Sample(LARGER, {"is_causal": True}),
        "softcap": Sample(LARGER, {"softcap": 1.5}),
        "scale": Sample(LARGER, {"scale": -0.7}),
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
    },
    mapped={
        "every array": Mapped(
            Sample({"q": (2, 2, 5, 4, 4), "k": (2, 2, 6, 2, 4), "v": (2, 2, 6, 2, 3)}, {"is_causal": True}),
            {"q": 1, "k": 0, "v": 0},
        ),
        "shared keys": Mapped(Sample(BEFORE | {"q": (3, 2, 5, 4, 4)}), {"q": 0}),
        "own bias": Mapped(Sample(BEFORE | {"bias": (2, 1, 4, 1, 6)}), {"bias": 0}),
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
        lambda q, k, v: tuple(x.transpose(1, 2) for x in (q, k, v)),
        sampled="nn.functional.scaled_dot_product_attention",
        refusals={"dropout_p is 0.5; expected 0.0": "dropout is refused"},
        least=13,
    ),
)
