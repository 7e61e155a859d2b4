"""Attention of sequences that are packed one behind the other: what ``attention`` is on each, and its gradients."""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np

import portakern as pk
from tests.ops import attention
from tests.ops._attention_formulas import formula as formula_of_one
from tests.ops._attention_formulas import in_jax as one_in_jax
from tests.ops._attention_formulas import in_torch as one_in_torch
from tests.ops._shared import (
    BF16,
    HALVES,
    SWEPT,
    accumulator,
    draw,
    in_order,
    normal64,
    outputs_of,
    pick,
    rounded_tanh,
    with_specials,
    zeros,
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
INT = np.int32


# ------------------------------------------------------------------------------------------------------- the sequences
def spans(q_starts, kv_starts, keyless=False):
    """(queries, keys) of each sequence that has both; ``keyless``: also of those that have queries alone."""
    ends = (np.asarray(x).astype(int).tolist() for x in (q_starts, kv_starts))
    both = zip(*(itertools.pairwise(x) for x in ends), strict=True)
    return [tuple(slice(*x) for x in (q, k)) for q, k in both if q[0] < q[1] and (keyless or k[0] < k[1])]


def without_keys(q_starts, kv_starts):
    """The queries of each sequence that has no key."""
    return [rows for rows, keys in spans(q_starts, kv_starts, True) if keys.start == keys.stop]


def simulate(q, k, v, q_starts, kv_starts, sinks=None, slopes=None, *, shift_keys=0, join=False, return_lse=False,
             **options):  # fmt: skip
    """``attention``'s simulated kernel on each sequence. ``shift_keys``: that a sequence takes too late; ``join``: all
    sequences are one."""
    F = accumulator(q)
    o, lse = np.zeros((*q.shape[:2], v.shape[2]), F), np.full((q.shape[1], q.shape[0]), -np.inf, F)
    for rows in without_keys(q_starts, kv_starts) if sinks is not None else ():
        lse[:, rows] = sinks[:, None]
    found = spans(q_starts, kv_starts)
    if join:
        found = [tuple(slice(x[0].start, x[-1].stop) for x in zip(*found, strict=True))]
    for rows, keys in found:
        keys = slice(min(keys.start + shift_keys, keys.stop - 1), keys.stop)
        dense = q[None, rows], k[None, keys], v[None, keys], None, None, None, sinks, slopes
        one = attention.simulate(*dense, **options, return_lse=True)
        o[rows], lse[:, rows] = one[0][0], one[1][0]
    return o, lse if return_lse else None


def cut(rng, tokens, sequences):
    """Starts of so many sequences, of which some may be empty."""
    return np.array([0, *np.sort(rng.integers(0, tokens + 1, sequences - 1)), tokens], INT)


def packed(make):
    """A call of attention on a batch of one, ``make(rng, dtype, ...)``, as a packed one of a few sequences: with its
    sinks and slopes, without its bias and segments."""

    def of_several(rng, *args):
        (q, k, v, *more), options = make(rng, *args)
        number = int(rng.integers(1, 4))
        arrays = tuple(x[0] for x in (q, k, v))
        return (*arrays, cut(rng, q.shape[1], number), cut(rng, k.shape[1], number), *more[3:5]), options

    return of_several


def alone(make):
    """Arrays of attention on a batch of one as those of one sequence."""

    def of_one(*args):
        q, k, v = make(*args)[:3]
        return q[0], k[0], v[0], np.array([0, q.shape[1]], INT), np.array([0, k.shape[1]], INT)

    return of_one


def two(rng, dtype, sizes=(20, 33), d=16):
    """Two sequences of as many queries as keys."""
    n, starts = sum(sizes), np.array([0, sizes[0], sum(sizes)], INT)
    return (*(draw(rng, (n, h, d), dtype) for h in (2, 1, 1)), starts, starts)


def two_with_sinks(rng, dtype, value=None):
    """The same with sinks near the largest scores."""
    sinks = rng.uniform(1, 3, 2) if value is None else np.full(2, value)
    return *two(rng, dtype), sinks.astype(np.float32)


def two_with_slopes(rng, dtype):
    """The same with slopes that leave weight to many keys, and fewer queries than keys."""
    arrays = two(rng, dtype)
    q_starts = np.array([0, 9, 30], INT)
    return arrays[0][:30], *arrays[1:3], q_starts, arrays[4], None, slopes_of_two(dtype)


def slopes_of_two(dtype):
    return np.array([0.05, 0.3], "float64" if dtype == "float64" else "float32")


def large_case(rng, dtype, regime):
    """Grouped queries, two or three sequences."""
    options = WITH_LSE | {
        "is_causal": bool(rng.random() < 0.4),
        "softcap": rng.choice([None, None, 2.0, 30.0]),
        "scale": rng.choice([None, None, 0.3, 1.0]),
    }
    lens = [rng.integers(20, 60, rng.integers(2, 4)) for _ in range(2)]
    lens[1] = np.resize(lens[1], len(lens[0]))
    starts = tuple(np.cumsum([0, *n]).astype(INT) for n in lens)
    d, dv, group = rng.choice([16, 40, 64]), rng.choice([16, 40]), rng.choice([1, 2])
    shapes = (starts[0][-1], 2 * group, d), (starts[1][-1], 2, d), (starts[1][-1], 2, dv)
    return (*(draw(rng, shape, dtype, regime) for shape in shapes), *starts), options


def typical(rng, dtype, keys=(180, 400), **options):
    shapes = (100, 2, 40), (keys[1], 1, 40), (keys[1], 1, 16)
    starts = np.array([0, 40, 100], INT), np.array([0, *keys], INT)
    return (*(draw(rng, s, dtype) for s in shapes), *starts), WITH_LSE | options


# ------------------------------------------------------------------------------------- the formula and the frameworks
def formula(q, k, v, q_starts, kv_starts, sinks=None, slopes=None, *, return_lse=True, **options):
    o, lse = np.zeros((*q.shape[:2], v.shape[2])), np.full((q.shape[1], q.shape[0]), -math.inf)
    for rows, keys in spans(q_starts, kv_starts, True):
        one = formula_of_one(q[None, rows], k[None, keys], v[None, keys], sinks=sinks, slopes=slopes, **options)
        o[rows], lse[:, rows] = one[0][0], one[1][0]
    return o, lse


def formula_call(q_starts, kv_starts, options, sinks=False, slopes=False):
    tokens, kv_tokens = q_starts[-1] + 1, kv_starts[-1] + 2
    starts = (np.array(x, INT) for x in (q_starts, kv_starts))
    arrays = normal64(tokens, 4, 3), normal64(kv_tokens, 2, 3), normal64(kv_tokens, 2, 2)
    return (*arrays, *starts, *(normal64(4) if given else None for given in (sinks, slopes))), WITH_LSE | options


def formula_calls():
    starts = {
        "two sequences": ([0, 3, 7], [0, 5, 9]),
        "an empty one of each": ([1, 4, 4, 6], [2, 2, 5, 8]),
        "more queries than keys": ([0, 6], [0, 2]),
        "none": ([2], [1]),
    }
    options = {
        "plain": {},
        "causal": {"is_causal": True},
        "window": {"window": (2, 1), "scale": -0.7},
        "softcap": {"softcap": 1.5, "is_causal": True, "window": (None, 3)},
    }
    calls = {f"{a}, {b}": partial(formula_call, *x, y) for a, x in starts.items() for b, y in options.items()}
    calls |= {f"{a}, sinks": partial(formula_call, *x, options["softcap"], True) for a, x in starts.items()}
    return calls | {
        f"{a}, slopes": partial(formula_call, *x, options["softcap"], False, True) for a, x in starts.items()
    }


def of_each(one, concatenate, fill, q, k, v, q_starts, kv_starts, sinks=None, slopes=None, *, return_lse=False,
            **options):  # fmt: skip
    """``one`` on each sequence, of a library's arrays; tokens of no sequence and of those without keys are zeros, the
    lse of these the sink."""
    o, lse, at = [], [], 0

    def nothing_until(end):
        if at < end:
            o.append(fill((end - at, q.shape[1], v.shape[2]), 0.0))
            lse.append(fill((q.shape[1], end - at), -math.inf))

    for rows, keys in spans(q_starts, kv_starts, sinks is not None):
        nothing_until(rows.start)
        at = rows.stop
        if keys.start == keys.stop:
            o.append(fill((rows.stop - rows.start, q.shape[1], v.shape[2]), 0.0))
            lse.append(sinks[:, None] + fill((q.shape[1], rows.stop - rows.start), 0.0))
            continue
        dense, beside = (q[rows][None], k[keys][None], v[keys][None]), {"sinks": sinks, "slopes": slopes}
        found = one(*dense, **beside, **options, return_lse=True)
        o.append(found[0][0])
        lse.append(found[1][0])
    nothing_until(q.shape[0])
    return (concatenate(o, 0), concatenate(lse, 1)) if return_lse else concatenate(o, 0)


def in_torch(q, k, v, q_starts, kv_starts, sinks=None, slopes=None, **options):
    import torch

    def fill(shape, value):
        return torch.full(shape, value, dtype=q.dtype, device=q.device)

    starts = (x.detach().cpu().numpy() for x in (q_starts, kv_starts))
    return of_each(one_in_torch, torch.cat, fill, q, k, v, *starts, sinks, slopes, **options)


def in_jax(q, k, v, q_starts, kv_starts, sinks=None, slopes=None, **options):
    import jax.numpy as jnp

    def fill(shape, value):
        return jnp.full(shape, value, q.dtype)

    return of_each(one_in_jax, jnp.concatenate, fill, q, k, v, q_starts, kv_starts, sinks, slopes, **options)


# ------------------------------------------------------------------------------------------------------- random calls
def fuzzed(r, dtype):
    tokens, kv_tokens, heads, d = r.extent(), r.extent(), max(r.extent(), 1), max(r.extent(), 1)
    number, ids = int(r.pick((1, 2, 4))), r.pick(("int32", "int64"))
    arrays = {
        "q": r.array(dtype, tokens, heads * int(r.pick((1, 2))), d),
        "k": r.array(dtype, kv_tokens, heads, d),
        "v": r.array(dtype, kv_tokens, heads, d),
        "q_starts": cut(r.rng, tokens, number).astype(ids),
        "kv_starts": cut(r.rng, kv_tokens, number).astype(ids),
    }
    if r.chance(0.3) and kv_tokens:
        own = r.pick((dtype, "float64" if dtype == "float64" else "float32"))
        arrays["sinks"] = r.array(own, arrays["q"].shape[1])
    if r.chance(0.2):
        arrays["alibi_slopes"] = r.array("float64" if dtype == "float64" else "float32", arrays["q"].shape[1])
    options = {
        "is_causal": r.chance(0.5),
        "window": r.pick((None, (1, None), (2, 0))),
        "scale": r.pick((None, 0.5)),
        "softcap": r.pick((None, 2.0)),
    }
    return arrays, options | {"return_lse": r.chance(0.5)}


# ------------------------------------------------------------------------------------------------------------- on a GPU
def starts_on(gpu, *ends):
    return gpu.torch.tensor([0, *ends], dtype=gpu.torch.int32, device=gpu.device)


def past_2_31(gpu):
    heads, d, left = 64, 128, 63
    length = gpu.big // (heads * d) + 64
    q, k, v = (gpu.normal(length, heads, d, dtype=gpu.torch.bfloat16) for _ in range(3))
    starts, band = starts_on(gpu, length), {"is_causal": True, "window": (left, 0)}
    o = gpu.op("varlen_attention")(q, k, v, starts, starts, **band)
    for i in gpu.rows_to_sample(length, heads * d).tolist():
        keys = slice(max(i - left, 0), i + 1)
        part = tuple(t.contiguous() for t in (q[i : i + 1], k[keys], v[keys]))
        yield o[i : i + 1].contiguous(), (*part, starts_on(gpu, 1), starts_on(gpu, keys.stop - keys.start)), {}


def far(gpu):
    q, starts = gpu.far((4, 2, 64)), starts_on(gpu, 1, 4)
    yield q, q, q, starts, starts


def in_layer(op, x, p):
    """Two heads of causal attention of the hidden state with itself, each sample a sequence."""
    heads = x.reshape(-1, 2, x.shape[2] // 2)
    starts = np.arange(x.shape[0] + 1, dtype=np.int32) * x.shape[1]
    if type(x).__module__.startswith("torch"):
        import torch

        starts = torch.as_tensor(starts, device=x.device)
    else:
        import jax
        import jax.numpy as jnp

        with jax.ensure_compile_time_eval():  # a constant of the program that is traced, known while it is
            starts = jnp.asarray(starts)
    return op(heads / 4, heads / 4, heads, starts, starts, is_causal=True).reshape(x.shape)


# ---------------------------------------------------------------------------------------------------------------- wrong
Q, K = zeros(5, 4, 8), zeros(7, 2, 8)
STARTS = np.array([0, 2, 5], INT), np.array([0, 3, 7], INT)


def call(*arrays, **options):
    return pk.op("varlen_attention")(*arrays, **options)


WRONG = {
    "rank": (
        lambda: call(zeros(1, 5, 4, 8), K, K, *STARTS),
        r"varlen_attention: q has 4 axes, shape \(1, 5, 4, 8\); expected 3: \(tokens, kv_heads\*group, d\); reshape it",
    ),
    "starts of other sequences": (
        lambda: call(Q, K, K, STARTS[0], STARTS[1][:2]),
        r"kv_starts axis 0 \(sequences\+1\) is 2; expected 3, as set by q_starts axis 0",
    ),
    "no starts": (
        lambda: call(Q, K, K, zeros(0, dtype=INT), zeros(0, dtype=INT)),
        r"q_starts axis 0 \(sequences\+1\) is 0; expected at least 1",
    ),
    "starts as floats": (
        lambda: call(Q, K, K, zeros(3), STARTS[1]),
        r"q_starts is float32; expected one of int32, int64: cast it",
    ),
    "starts that fall": (
        lambda: call(Q, K, K, np.array([0, 4, 2], INT), STARTS[1]),
        r"q_starts are the starts of the sequences and the end of the last one: numbers from 0 to tokens",
    ),
    "starts beyond the keys": (
        lambda: call(Q, K, K, STARTS[0], np.array([0, 3, 8], INT)),
        r"kv_starts are the starts of the sequences .* from 0 to kv_tokens",
    ),
    "sinks of key heads": (
        lambda: call(Q, K, K, *STARTS, zeros(2)),
        r"sinks axis 0 \(kv_heads\*group\) is 2; expected 4, as set by",
    ),
    "sinks without keys": (
        lambda: call(Q, K[:0], K[:0], STARTS[0], STARTS[1] * 0, zeros(4)),
        r"sinks are given and k has no keys \(kv_tokens is 0\)",
    ),
    "sinks too wide": (
        lambda: call(Q, K, K, *STARTS, zeros(4, dtype=np.float64)),
        r"sinks is float64 but q is float32; expected float32: cast one",
    ),
    "slopes of key heads": (
        lambda: call(Q, K, K, *STARTS, alibi_slopes=zeros(2)),
        r"alibi_slopes axis 0 \(kv_heads\*group\) is 2; expected 4, as set by",
    ),
    "window below zero": (
        lambda: call(Q, K, K, *STARTS, window=(1, -2)),
        r"window is \(1, -2\); expected a tuple of 2 integers >= 0 \(None for no limit\), or None",
    ),
    "softcap of zero": (
        lambda: call(Q, K, K, *STARTS, softcap=0.0),
        r"softcap is 0.0; expected a finite number .*or None",
    ),
}


def shapes(tokens, kv_tokens, heads, kv_heads, d, dv, sequences=2):
    starts = dict.fromkeys(("q_starts", "kv_starts"), (sequences + 1,))
    return {"q": (tokens, heads, d), "k": (kv_tokens, kv_heads, d), "v": (kv_tokens, kv_heads, dv)} | starts


SMALL = shapes(5, 6, 2, 1, 2, 3)
LARGER = shapes(9, 12, 4, 2, 5, 3, 3)
TILES = {"block_q": 128, "block_kv": 128}

RECORD = ForwardRecord(
    op="varlen_attention",
    simulate=simulate,
    variants=attention.RECORD.variants,
    case=packed(attention.case),
    regimes=SWEPT,
    special=packed(
        lambda rng, dtype, seed: (with_specials(rng, (c := attention.case(rng, dtype, pick(rng, SWEPT)))[0][:3]), c[1])
    ),
    near=Near(lambda rng: typical(rng, "float32", (60, 140))[0], WITH_LSE, plant={"factor": 1 + 3e-5}),
    faults={
        "that drops the last key": Fault(alone(attention.spikes), {"drop": 64}, WITH_LSE),
        "without its tail": Fault(alone(attention.spikes), {"tail": False}, WITH_LSE),
        "without the maximum": Fault(alone(attention.spikes), {"shift": False}, WITH_LSE | {"scale": 1.0}),
        "with a sequence that begins a key late": Fault(two, {"shift_keys": 1}, WITH_LSE, EVERY),
        "with sequences that see each other": Fault(two, {"join": True}, WITH_LSE, EVERY),
        "with a sink in the sum twice": Fault(two_with_sinks, {"sink": "twice"}, WITH_LSE, EVERY),
        "with a sink that is scaled": Fault(two_with_sinks, {"sink": "scaled"}, WITH_LSE, EVERY),
        "with a sink that lse lacks": Fault(two_with_sinks, {"sink": "not in lse"}, WITH_LSE, "lse"),
        "with sums of values that ignore the sink": Fault(
            lambda r, t: two_with_sinks(r, t, 9.0), {"sink": "sums not rescaled"}, WITH_LSE, "o"
        ),
        **{
            f"with slopes {wrong}": Fault(two_with_slopes, {"fall": wrong}, WITH_LSE, EVERY)
            for wrong in ("of the other sign", "from the first query", "of another head")
        },
        "with causality across sequences": Fault(two, {"join": True}, WITH_LSE | {"is_causal": True}),
    },
    corners={
        "tf32 has its own terms": Corner(
            alone(attention.near_1_values), WITH_LSE | {"precision": "tf32"}, dtypes=("float32",)
        )
    },
    large_case=large_case,
    typical=typical,
    hiding={
        "o truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "P truncated": Hiding("lean towards 0", {"truncate_p": True}, dtypes=HALVES),
        "scale 0.3 % off": Hiding("typical", {"factor": 1.003}),
        "tf32 scores for ieee": Hiding("typical", {"precision": "tf32"}, dtypes=("float32",)),
        "o accumulated in bfloat16": Hiding("typical", {"low": BF16}, dtypes=DTYPES),
        "tanh of 11 bits": Hiding("typical", {"tanh": rounded_tanh}, options={"softcap": 2.0}),
    },
    small={
        "plain": Sample(SMALL),
        "every mask": Sample(SMALL, {"is_causal": True, "window": (2, None)}),
        "softcap and scale": Sample(SMALL, {"softcap": 2.0, "scale": 0.4}),
        "lse": Sample(SMALL, {"return_lse": True}),
        "sinks": Sample(SMALL | {"sinks": (2,)}, {"window": (0, 0), "softcap": 2.0}),
        "slopes": Sample(SMALL | {"alibi_slopes": (2,)}, {"window": (2, 1), "softcap": 2.0}),
    },
    derived={
        "no mask": Sample(LARGER),
        "causal": Sample(LARGER, {"is_causal": True}),
        "softcap": Sample(LARGER, {"softcap": 1.5}),
        "scale": Sample(LARGER, {"scale": -0.7}),
        "sinks": Sample(LARGER | {"sinks": (4,)}, {"is_causal": True, "softcap": 1.5}),
    },
    usual=(
        Sample(shapes(200, 300, 4, 2, 64, 40, 3), {"return_lse": True}),
        Sample(shapes(260, 260, 4, 4, 48, 48, 2), {"is_causal": True}, TILES),
        Sample(shapes(150, 330, 2, 1, 64, 64, 2), {"window": (100, 30)}, TILES),
        Sample(shapes(90, 300, 4, 2, 32, 32, 5), {"softcap": 5.0}),
        Sample(shapes(120, 200, 4, 2, 32, 32, 3) | {"sinks": (4,)}, WITH_LSE | {"is_causal": True}, wider=("sinks",)),
        Sample(shapes(120, 200, 4, 2, 32, 32, 3) | {"alibi_slopes": (4,)}, WITH_LSE | {"is_causal": True}),
    ),
    formula=formula,
    formula_calls=formula_calls(),
    formula_tolerance=(1e-12, 1e-14),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample(shapes(12, 14, 4, 2, 8, 8, 3), {"softcap": 3.0, "is_causal": True}),
    lowered={
        "causal": Sample(shapes(100, 130, 4, 2, 64, 64), {"is_causal": True, "return_lse": True}),
        "window": Sample(shapes(300, 300, 2, 2, 80, 80, 4), {"window": (40, 8), "softcap": 20.0}),
        "tf32": Sample(shapes(50, 50, 2, 2, 32, 32, 1), {"precision": "tf32"}),
        "sinks": Sample(
            shapes(100, 130, 4, 2, 64, 64) | {"sinks": (4,)}, {"is_causal": True, "return_lse": True}, wider=("sinks",)
        ),
        "slopes": Sample(
            shapes(100, 130, 4, 2, 64, 64) | {"alibi_slopes": (4,)}, {"is_causal": True, "return_lse": True}
        ),
    },
    mapped={
        "every array": Mapped(
            Sample(LARGER | {"q": (2, 9, 4, 5), "k": (12, 2, 2, 5), "v": (2, 12, 2, 3)}, {"is_causal": True}),
            {"q": 0, "k": 1, "v": 0},
            folds=False,
        ),
        "shared keys": Mapped(Sample(LARGER | {"q": (9, 3, 4, 5)}), {"q": 1}, folds=False),
        "own sinks": Mapped(Sample(LARGER | {"sinks": (3, 4)}), {"sinks": 0}, folds=False),
        "own slopes": Mapped(Sample(LARGER | {"alibi_slopes": (3, 4)}), {"alibi_slopes": 0}, folds=False),
    },
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(in_layer),
    extents={"tokens": 64, "kv_tokens": 96, "sequences": 3, "kv_heads": 2, "group": 2, "d": 64, "dv": 64},
    launched=Sample(shapes(64, 64, 4, 4, 64, 64)),
    twin=Twin(
        "varlen_attn",
        sampled=None,
    ),
    matrix_units=True,
    past_2_31=past_2_31,
    far=far,
)


# ------------------------------------------------------------------------------------------------------------- gradient
def simulate_vjp(q, k, v, o, lse, q_starts, kv_starts, d_o, d_lse=None, lse_low=None, sinks=None, slopes=None, *,
                 shift_keys=0, **options):  # fmt: skip
    """``attention_vjp``'s simulated kernel on each sequence. ``shift_keys``: that a sequence takes too late."""
    F = accumulator(q)
    d_q, d_k, d_v, d_sinks = (None if x is None else np.zeros(x.shape, F) for x in (q, k, v, sinks))
    forget, ftz = options.get("forget", ()), options.get("ftz", False)
    for rows in without_keys(q_starts, kv_starts) if sinks is not None else ():
        for h, sink in enumerate(sinks):
            own = None if d_lse is None or "d_lse" in forget else d_lse[h, rows]
            delta = attention.delta_of(d_o[rows, h], o[rows, h], own, F, ftz)
            d_sinks[h] += attention.of_a_sink(F(sink), lse[h, rows].astype(F)[:, None], delta, ftz, forget)
    for rows, keys in spans(q_starts, kv_starts):
        keys = slice(min(keys.start + shift_keys, keys.stop - 1), keys.stop)
        given = q[None, rows], k[None, keys], v[None, keys], o[None, rows], lse[None, :, rows], d_o[None, rows]
        more = (None if x is None else x[None, :, rows] for x in (d_lse, lse_low))
        one = attention.simulate_vjp(*given, None, None, None, *more, sinks, slopes, **options)
        d_q[rows], d_k[keys], d_v[keys] = (x[0] for x in one[:3])
        if sinks is not None:
            d_sinks += one[4]
    return d_q, d_k, d_v, d_sinks


def with_residuals(rng, arrays, options, dtype, regime="normal", lse_too=False):
    """The arguments of the gradient by name: o and lse as the forward oracle gives them, the cotangents drawn."""
    o, lse = outputs_of("varlen_attention", *arrays, **options, return_lse=True)
    names = ("q", "k", "v", "q_starts", "kv_starts", "sinks", "alibi_slopes")[: len(arrays)]
    more = {"o": o, "lse": lse, "d_o": draw(rng, o.shape, dtype, regime)}
    more |= {"d_lse": draw(rng, lse.shape, lse.dtype.name, regime)} if lse_too else {}
    given = {n: x for n, x in zip(names, arrays, strict=True) if x is not None}
    return in_order("varlen_attention_vjp", given | more)


def forward_case(rng, dtype, regime, extents, **more):
    arrays, options = attention.forward_case(rng, dtype, regime, extents, ("normal",), **more)
    number = int(rng.integers(1, 4))
    q, k, v = (arrays[n][0] for n in ("q", "k", "v"))
    beside = (arrays.get(n) for n in ("sinks", "alibi_slopes"))
    return (q, k, v, cut(rng, len(q), number), cut(rng, len(k), number), *beside), options


def case_vjp(rng, dtype, regime, extents=(1, 5, 16, 33, 64)):
    arrays, options = forward_case(rng, dtype, regime, extents)
    return with_residuals(rng, arrays, options, dtype, regime, rng.random() < 0.4), options


def large_case_vjp(rng, dtype, regime):
    """Sinks have one gradient a head: a call with sinks has many heads."""
    if rng.random() < 0.3:
        arrays, options = forward_case(rng, dtype, regime, (16, 33), sinks=1.0, slopes=0.0, heads=((24, 30), (3, 5)))
    else:
        arrays, options = large_case(rng, dtype, regime)
        options.pop("return_lse")
    return with_residuals(rng, arrays, options, dtype, regime, rng.random() < 0.4), options


def special_vjp(rng, dtype, seed):
    """NaN and infinities in the inputs of the forward call, which its outputs then hold too, and in the cotangents."""
    arrays, options = forward_case(rng, dtype, "normal", (1, 5, 16, 33))
    arrays = *with_specials(rng, arrays[:3]), *arrays[3:]
    return with_residuals(rng, arrays, options, dtype, "special", seed % 2 == 0), options


def ordinary(rng, dtype, sinks=None, **options):
    """No mask, grouped queries, a cotangent of lse, two sequences."""
    arrays, _ = typical(rng, dtype)
    arrays = arrays if sinks is None else (*arrays, np.float32(sinks))
    return with_residuals(rng, arrays, options, dtype, lse_too=True)


def ordinary_sinks(rng, dtype):
    """As much weight on the sinks as on the keys; two sequences."""
    starts = np.array([0, 30, 80], INT), np.array([0, 20, 40], INT)
    q, k, v = (draw(rng, shape, dtype) for shape in ((80, 2, 40), (40, 1, 40), (40, 1, 16)))
    return with_residuals(rng, (q, k, v, *starts, np.float32([3, 4])), {}, dtype, lse_too=True)


def ordinary_slopes(rng, dtype):
    """Two heads whose slopes leave weight to many keys; two sequences of more keys than queries."""
    starts = np.array([0, 30, 50], INT), np.array([0, 35, 80], INT)
    q, k, v = (draw(rng, shape, dtype) for shape in ((50, 2, 40), (80, 1, 40), (80, 1, 16)))
    return with_residuals(rng, (q, k, v, *starts, None, slopes_of_two(dtype)), {}, dtype, lse_too=True)


CAP = {"softcap": 2.0}
capped = partial(ordinary, **CAP)


def one_key_matters(rng, dtype):
    """The last of 65 keys takes most of each query's weight."""
    q, k, v, *_ = attention.one_key_matters(rng, dtype)
    starts = np.array([0, q.shape[1]], INT), np.array([0, k.shape[1]], INT)
    return with_residuals(rng, (q[0], k[0], v[0], *starts), {}, dtype)


def nan_without_keys(rng, dtype):
    """NaN in the cotangent of a query without keys, whose lse is the sink: d_sinks of its head is NaN."""
    starts = np.array([0, 2, 5], INT), np.array([0, 0, 4], INT)
    q, k, v = (draw(rng, shape, dtype) for shape in ((5, 2, 16), (4, 1, 16), (4, 1, 8)))
    arrays = with_residuals(rng, (q, k, v, *starts, np.float32([1, 2])), {}, dtype, lse_too=True)
    named = pk.op("varlen_attention_vjp").bind(*arrays).arrays
    named["d_o"][1, 0, 3] = np.nan
    return in_order("varlen_attention_vjp", named)


def past_2_31_vjp(gpu):
    heads, d, left = 64, 128, 63
    length, edge = gpu.big // (heads * d) + 64, gpu.big // (heads * d)
    q, k, v = (gpu.normal(length, heads, d, dtype=gpu.torch.bfloat16) for _ in range(3))
    band, starts = {"is_causal": True, "window": (left, 0)}, starts_on(gpu, length)
    o, lse = gpu.op("varlen_attention")(q, k, v, starts, starts, return_lse=True, **band)
    between = range(left + 1, edge - 2 * left, max(edge // 61, left + 1))
    picked = gpu.torch.tensor([0, *between, edge - 1, length - 1], device=gpu.device)
    assert picked.diff().min() > left  # no key meets two of them
    d_o = gpu.sampled(q, picked)
    d_q, d_k, d_v, _ = gpu.op("varlen_attention_vjp")(q, k, v, o, lse, starts, starts, d_o, **band)
    assert d_k.numel() > gpu.big
    for i in picked.tolist():
        row, keys = slice(i, i + 1), slice(max(i - left, 0), i + 1)
        part = q[row], k[keys], v[keys], o[row], lse[:, row]
        ends = starts_on(gpu, 1), starts_on(gpu, keys.stop - keys.start)
        gradients = tuple(t.contiguous() for t in (d_q[row], d_k[keys], d_v[keys]))
        yield gradients, (*(t.contiguous() for t in part), *ends, d_o[row].contiguous()), {}


def far_vjp(gpu):
    torch = gpu.torch
    q, d_o, lse = gpu.far((4, 4, 64)), gpu.far((4, 4, 64)), gpu.far((4, 4), torch.float32)
    near, starts = gpu.normal(4, 4, 64, dtype=torch.bfloat16), starts_on(gpu, 1, 4)
    for qkv in ((q, near, near), (near, q, q)):
        o, of_rows = gpu.op("varlen_attention")(*qkv, starts, starts, return_lse=True)
        yield *qkv, d_o.copy_(o), lse.copy_(of_rows), starts, starts, d_o  # one far buffer is both o and its cotangent


def saved(tokens, kv_tokens, heads, kv_heads, d, dv, sequences=2):
    """The shapes of what the gradients always take."""
    o = (tokens, heads, dv)
    return shapes(tokens, kv_tokens, heads, kv_heads, d, dv, sequences) | {"o": o, "lse": (heads, tokens), "d_o": o}


GRADIENT = GradientRecord(
    op="varlen_attention_vjp",
    simulate=simulate_vjp,
    variants=attention.GRADIENT.variants,
    case=case_vjp,
    regimes=attention.GRADIENT.regimes,
    telling=attention.GRADIENT.telling,
    special=special_vjp,
    near=Near(lambda rng: ordinary(rng, "float32", (2, 3)), off={"d_sinks": 8.2e-5}, plant={"factor": 1 + 1.8e-5}),
    faults={
        "delta left out": Fault(capped, {"forget": ("delta",)}, CAP),
        "d_lse left out": Fault(capped, {"forget": ("d_lse",)}, CAP),
        "the softcap's slope left out": Fault(capped, {"forget": ("slope",)}, CAP),
        "scale 10 % off": Fault(capped, {"factor": 1.1}, CAP),
        "a key that is dropped": Fault(one_key_matters, {"drop": 64}, breaks=EVERY),
        "d_sinks of the other sign": Fault(ordinary_sinks, {"forget": ("sign",)}, breaks="d_sinks"),
        "d_sinks without Delta's d_lse": Fault(ordinary_sinks, {"forget": ("d_lse",)}, breaks="d_sinks"),
        **{
            f"slopes {wrong}": Fault(ordinary_slopes, {"fall": wrong}, breaks=EVERY)
            for wrong in ("of the other sign", "from the first query", "of another head")
        },
        "a sequence that begins a key late": Fault(capped, {"shift_keys": 1}, CAP, breaks=EVERY),
    },
    corners={"NaN in the cotangent of a query without keys": Corner(nan_without_keys)},
    large_case=large_case_vjp,
    typical=lambda rng, dtype, **options: (ordinary(rng, dtype, **options), options),
    hiding={
        "P truncated": Hiding("lean towards 0", {"truncate_p": True}, dtypes=HALVES),
        "D truncated": Hiding("lean towards 0", {"truncate_ds": True}, dtypes=HALVES),
        "scale 0.3 % off": Hiding("typical", {"factor": 1.003}),
        "accumulated in bfloat16": Hiding("typical", {"low": BF16}),
        "tanh of 11 bits": Hiding("typical", {"tanh": rounded_tanh}, options=CAP, dtypes=("float32",)),
    },
    small={"two gradients": Sample(saved(5, 6, 2, 1, 2, 3), wants=("d_q", "d_v"))},
    usual=(
        Sample(saved(200, 300, 4, 2, 64, 40, 3) | {"d_lse": (4, 200)}),
        Sample(saved(260, 260, 4, 4, 48, 48, 2), {"is_causal": True}, TILES),
        Sample(saved(150, 330, 2, 1, 64, 64, 2), {"window": (100, 30)}, TILES),
        Sample(saved(90, 300, 4, 2, 32, 32, 5), {"softcap": 5.0}),
        Sample(saved(100, 60, 4, 2, 32, 32, 3) | {"d_lse": (4, 100), "sinks": (4,)}, wider=("sinks",)),
        Sample(saved(100, 160, 4, 2, 32, 32, 3) | {"alibi_slopes": (4,)}, {"is_causal": True}),
    ),
    extents=RECORD.extents,
    matrix_units=True,
    past_2_31=past_2_31_vjp,
    far=far_vjp,
)
