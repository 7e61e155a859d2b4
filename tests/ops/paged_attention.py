"""o = attention of each sequence's queries over its keys, which a table of pages finds, and lse."""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np

import portakern as pk
from portakern.spec.dtypes import numpy_dtype
from tests.ops import attention
from tests.ops._attention_formulas import formula as attention_formula
from tests.ops._shared import (
    BF16,
    HALVES,
    SWEPT,
    accumulator,
    normal64,
    pick,
    rounded_tanh,
    sweep,
    with_specials,
    zeros,
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
)

WITH_LSE = {"return_lse": True}
I32 = np.int32


def each_sequence(k_pages, v_pages, page_table, kv_lens, q_starts):
    """(tokens, k, v) of the sequences that have queries and keys, these gathered from their pages."""
    for s, length in enumerate(int(n) for n in kv_lens):
        at, tokens = np.arange(length), slice(int(q_starts[s]), int(q_starts[s + 1]))
        page, slot = page_table[s, at // k_pages.shape[1]], at % k_pages.shape[1]
        if length and tokens.start < tokens.stop:
            yield tokens, k_pages[page, slot], v_pages[page, slot]


# ------------------------------------------------------------------------------------------------- the simulated kernel
def simulate(q, k_pages, v_pages, page_table, kv_lens, q_starts, sinks=None, k_scale=None, v_scale=None, slopes=None, *,
             is_causal=True, return_lse=False, furthest=None, scaled="once", **how):  # fmt: skip
    """attention's kernel over the gathered keys of each sequence. ``furthest``: keys beyond so many are forgotten;
    ``scaled``: once, or what is wrong with the scales."""
    F, (tokens, heads, _) = accumulator(q), q.shape
    o, lse = np.zeros((tokens, heads, v_pages.shape[-1]), F), np.full((heads, tokens), -np.inf, F)
    if sinks is not None:
        for s in np.flatnonzero(np.asarray(kv_lens) == 0):
            lse[:, slice(*q_starts[s : s + 2])] = sinks[:, None]
    for of, k, v in each_sequence(k_pages, v_pages, page_table, kv_lens, q_starts):
        dense = q[None, of], k[None, :furthest].astype(q.dtype), v[None, :furthest].astype(q.dtype), sinks, slopes
        scales = [None if x is None else wrongly(scaled)(x.astype(F)) for x in (k_scale, v_scale)]
        o[of], lse[:, of] = by_key_head(*dense, *scales, is_causal=is_causal, **how)
    return o, lse if return_lse else None


def wrongly(scaled):
    """What a fault makes of scales."""
    return {
        "once": lambda x: x, "twice": np.square, "inverted": np.reciprocal, "of another head": lambda x: np.roll(x, 1)
    }[scaled]  # fmt: skip


def by_key_head(q, k, v, sinks, slopes, k_scale, v_scale, *, scale=None, **how):
    """o and lse of one sequence: attention's kernel, of each key head with the scale of its keys; then that of its
    values."""
    group, scale = q.shape[2] // k.shape[2], 1 / np.sqrt(q.shape[3]) if scale is None else scale
    found = []
    for h in range(k.shape[2]):
        heads, key = slice(h * group, (h + 1) * group), slice(h, h + 1)
        own = scale if k_scale is None else scale * k_scale[h]
        dense = q[:, :, heads], k[:, :, key], v[:, :, key]
        beside = (None if x is None else x[heads] for x in (sinks, slopes))
        o, lse = attention.simulate(*dense, None, None, None, *beside, scale=own, return_lse=True, **how)
        found.append((o[0] if v_scale is None else o[0] * v_scale[h], lse[0]))
    return np.concatenate([o for o, _ in found], 1), np.concatenate([lse for _, lse in found], 0)


# ------------------------------------------------------------------------------------------------------- calls on NumPy
def in_pages(rng, *dense, size=None):
    """The call of sequences whose q, k and v are each (1, length, heads, d): in pages in any order, of which one is
    nobody's; slots that hold no key hold 9."""
    size = size or int(rng.choice([1, 5, 16, 64]))
    lens = np.array([k.shape[1] for _, k, _ in dense], I32)
    each = -(-int(lens.max()) // size)
    table = rng.permutation(len(dense) * each + 1)[: len(dense) * each].reshape(len(dense), each).astype(I32)
    pages = [np.full((len(dense) * each + 1, size, *x.shape[2:]), 9, x.dtype) for x in dense[0][1:]]
    for s, (_, k, v) in enumerate(dense):
        at = np.arange(k.shape[1])
        for array, x in zip(pages, (k, v), strict=True):
            array[table[s, at // size], at % size] = x[0]
    starts = np.cumsum([0, *(q.shape[1] for q, _, _ in dense)]).astype(I32)
    return np.concatenate([q[0] for q, _, _ in dense]), *pages, table, lens, starts


def paged(make, size=None):
    """Arrays of attention's from a generator and a dtype, as those of one sequence in pages."""
    return lambda rng, dtype: in_pages(rng, make(rng, dtype), size=size)


def case(rng, dtype, regime):
    """One sequence, or the same after a shorter one."""
    q, k, v = attention.qkv(rng, dtype, regime)
    dense, options = [(q, k, v)], pick(rng, attention.OPTIONS)
    if rng.random() < 0.4:
        dense.insert(0, (q[:, :3], k[:, :7], v[:, :7]))
    own = pick(rng, (dtype, dtype if dtype == "float64" else "float32"))
    sinks = (sweep(rng, q.shape[2:3], own),) if rng.random() < 0.35 else ()
    arrays = *in_pages(rng, *dense), *sinks
    if rng.random() < 0.3:
        arrays = *arrays, *[None] * (7 - len(arrays)), *scales_of(rng, dtype, k.shape[2])
    if rng.random() < 0.25:
        arrays = *arrays, *[None] * (9 - len(arrays)), attention.slopes_of(rng, q, dtype)
    if rng.random() < 0.3:
        narrow = numpy_dtype(pick(rng, ("float8_e4m3fn", "float8_e5m2")))
        with np.errstate(all="ignore"):
            arrays = arrays[0], *(x.astype(narrow) for x in arrays[1:3]), *arrays[3:]
    return arrays, options


def scales_of(rng, dtype, heads):
    own = "float64" if dtype == "float64" else "float32"
    return tuple(np.exp2(rng.uniform(-6, 2, heads)).astype(own) for _ in range(2))


def with_scales(rng, dtype):
    """Two key heads, whose scales differ by much."""
    shapes = (1, 20, 4, 16), (1, 33, 2, 16), (1, 33, 2, 16)
    own = "float64" if dtype == "float64" else "float32"
    arrays = in_pages(rng, [sweep(rng, s, dtype) for s in shapes], size=16)
    return *arrays, None, np.array([0.5, 3.0], own), np.array([4.0, 0.3], own)


def special(rng, dtype, seed):
    """NaN and infinities in queries, keys and values, and in slots of nobody."""
    arrays, options = case(rng, dtype, pick(rng, SWEPT))
    return (*with_specials(rng, arrays[:3]), *arrays[3:]), options


def large_case(rng, dtype, regime):
    arrays, options = attention.large_case(rng, dtype, regime)
    return in_pages(rng, arrays[:3]), options


def typical(rng, dtype, **options):
    arrays, options = attention.typical(rng, dtype, **options)
    return in_pages(rng, arrays, size=16), {"is_causal": False} | options


def with_sinks(rng, dtype, value=None):
    """Sinks near the largest scores, of two heads."""
    arrays, sinks = attention.with_sinks(rng, dtype, value)[:3], attention.with_sinks(rng, dtype, value)[-1]
    return *in_pages(rng, arrays, size=16), sinks


def with_slopes(rng, dtype):
    """Slopes of two heads that leave weight to many keys."""
    arrays = attention.with_slopes(rng, dtype)
    return *in_pages(rng, arrays[:3], size=16), None, None, None, arrays[-1]


drawn = attention.drawn


# ------------------------------------------------------------------------------------------------ written another way
def formula(q, k_pages, v_pages, page_table, kv_lens, q_starts, sinks=None, k_scale=None, v_scale=None,
            slopes=None, return_lse=True, **options):  # fmt: skip
    """attention one scalar at a time, of each sequence."""
    o, lse = np.zeros((*q.shape[:2], v_pages.shape[-1])), np.full(q.shape[1::-1], -math.inf)
    for s in np.flatnonzero(kv_lens == 0) if sinks is not None else ():
        lse[:, slice(*q_starts[s : s + 2])] = sinks[:, None]
    for of, k, v in each_sequence(k_pages, v_pages, page_table, kv_lens, q_starts):
        k, v = (x if s is None else x * s[:, None] for x, s in ((k, k_scale), (v, v_scale)))
        beside = {"sinks": sinks, "slopes": slopes, "is_causal": True}
        found = attention_formula(q[None, of], k[None], v[None], **beside | options)
        o[of], lse[:, of] = found[0][0], found[1][0]
    return o, lse


def formula_call(counts, lens, size, options, sinks=False, scales=False, slopes=False):
    """So many queries and keys of each sequence, and one token of none."""
    rng, each = np.random.default_rng(len(counts)), -(-max(lens) // size)
    table = rng.permutation(len(lens) * each + 1)[1:].reshape(len(lens), each)
    k, v = normal64(len(lens) * each + 1, size, 2, 3), normal64(len(lens) * each + 1, size, 2, 2)
    starts = np.cumsum([0, *counts])
    more = (normal64(4) if sinks else None, *((normal64(2), normal64(2)) if scales else (None, None)))
    more += (normal64(4),) if slopes else ()
    return (normal64(int(starts[-1]) + 1, 4, 3), k, v, table, np.array(lens), starts, *more), WITH_LSE | options


def formula_calls():
    sequences = [((1,), (5,)), ((3, 1, 0, 2), (4, 7, 3, 0)), ((4, 2), (2, 6))]
    options = [{}, {"is_causal": False}, {"window": (1, 0)}, {"window": (2, 1), "is_causal": False}, {"softcap": 1.5},
               {"scale": -0.7}]  # fmt: skip
    for (counts, lens), size, given in itertools.product(sequences, (1, 2, 8), options):
        yield (
            f"{counts} queries of {lens} keys, pages of {size}, {given}",
            partial(formula_call, counts, lens, size, given),
        )
    for counts, lens in sequences:
        yield f"{counts} queries of {lens} keys, sinks", partial(formula_call, counts, lens, 2, {"softcap": 1.5}, True)
        yield f"{counts} queries of {lens} keys, scales", partial(formula_call, counts, lens, 2, {}, False, True)
        yield f"{counts} queries of {lens} keys, slopes", partial(formula_call, counts, lens, 2, {}, slopes=True)


def plain(xp, asarray, wide, narrow, q, k_pages, v_pages, page_table, kv_lens, q_starts, sinks=None, k_scale=None,
          v_scale=None, slopes=None, *, is_causal=True, window=None, scale=None, softcap=None,
          return_lse=False):  # fmt: skip
    """The same with the operations of ``xp``, torch or jax.numpy: each token beside all keys that its sequence has room
    for. Integers may be traced."""
    (tokens, heads, d), (_, size, kv_heads, dv), (number, each) = q.shape, v_pages.shape, page_table.shape
    token, j = asarray(np.arange(tokens)), asarray(np.arange(each * size))
    owner = (q_starts[None] <= token[:, None]).sum(1) - 1
    here = xp.where(owner < number, owner, number - 1)
    kv_len, start = xp.where(owner < number, kv_lens[here], 0), q_starts[here]
    place = token - start + kv_len - (q_starts[here + 1] - start)
    left, right = window or (None, None)
    seen = j[None] < kv_len[:, None]
    seen = seen & (j[None] <= place[:, None]) if is_causal else seen
    seen = seen if left is None else seen & (j[None] >= place[:, None] - left)
    seen = (seen if right is None else seen & (j[None] <= place[:, None] + right))[:, None]
    page = xp.where(page_table < 0, 0, page_table)
    k, v = (x[page].reshape(number, each * size, kv_heads, -1)[here] for x in (k_pages, v_pages))
    s = xp.einsum("tkgd,tjkd->tkgj", wide(q).reshape(tokens, kv_heads, -1, d), wide(k))
    s = (s if k_scale is None else s * k_scale[:, None, None]).reshape(tokens, heads, -1)
    s = s * (d**-0.5 if scale is None else scale)
    s = s if softcap is None else softcap * xp.tanh(s / softcap)
    s = s if slopes is None else s - wide(slopes)[:, None] * abs(place[:, None, None] - j)
    m = xp.amax(xp.where(seen, s, -math.inf), -1)[..., None]
    beside = None if sinks is None else xp.where((owner < number)[:, None], wide(sinks), -math.inf)[..., None]
    m = m if beside is None else xp.maximum(m, beside)
    m = xp.where(xp.isinf(m), 0.0, m)
    p = xp.where(seen, xp.exp(xp.where(seen, s - m, 0.0)), 0.0)
    l = p.sum(-1) + (0.0 if beside is None else xp.exp(beside - m)[..., 0])
    none = l == 0
    weights = narrow(p / xp.where(none, 1.0, l)[..., None], v.dtype).reshape(tokens, kv_heads, -1, each * size)
    o = xp.einsum("tkgj,tjkd->tkgd", weights, v)
    o = (o if v_scale is None else narrow(wide(o) * v_scale[:, None, None], o.dtype)).reshape(tokens, heads, dv)
    lse = xp.where(none, -math.inf, m[..., 0] + xp.log(xp.where(none, 1.0, l)))
    return (o, lse.T) if return_lse else o


def in_torch(q, *arrays, **options):
    import torch

    def wide(x):
        return x.float() if x.dtype.itemsize < 4 else x

    def narrow(x, dtype):
        return x.to(dtype)

    return plain(torch, partial(torch.as_tensor, device=q.device), wide, narrow, q, *arrays, **options)


def in_jax(q, *arrays, **options):
    import jax.numpy as jnp

    def wide(x):
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))

    def narrow(x, dtype):
        return x.astype(dtype)

    return plain(jnp, jnp.asarray, wide, narrow, q, *arrays, **options)


# ------------------------------------------------------------------------------------------------------- random calls
def fuzzed(r, dtype):
    sequences, each, size, heads, d = r.extent(), r.extent(), max(r.extent(), 1), max(r.extent(), 1), max(r.extent(), 1)
    pages, group, ids = sequences * each + 1, int(r.pick((1, 2))), r.pick(("int32", "int64"))
    starts = np.cumsum([0, *(r.rng.integers(0, 3, sequences))])
    arrays = {
        "q": r.array(dtype, int(starts[-1]) + int(r.pick((0, 1))), heads * group, d),
        "k_pages": r.array(dtype, pages, size, heads, d),
        "v_pages": r.array(dtype, pages, size, heads, d),
        "page_table": r.rng.integers(0, pages, (sequences, each)).astype(ids),
        "kv_lens": r.rng.integers(0, each * size + 1, sequences).astype(ids),
        "q_starts": starts.astype(ids),
    }
    if r.chance(0.3) and each:
        own = r.pick((dtype, "float64" if dtype == "float64" else "float32"))
        arrays["sinks"] = r.array(own, heads * group)
    if r.chance(0.3):
        for name in ("k_scale", "v_scale"):
            arrays[name] = r.array("float64" if dtype == "float64" else "float32", heads)
    if r.chance(0.2):
        arrays["alibi_slopes"] = r.array("float64" if dtype == "float64" else "float32", heads * group)
    options = {
        "is_causal": r.chance(0.5),
        "window": r.pick((None, (1, None), (2, 0))),
        "scale": r.pick((None, 0.5)),
        "softcap": r.pick((None, 2.0)),
    }
    return arrays, options | {"return_lse": r.chance(0.5)}


# ------------------------------------------------------------------------------------------------------------- on a GPU
def integers_on(x, *values):
    """Integers beside an array of torch or JAX."""
    if hasattr(x, "new_tensor"):
        import torch

        return tuple(x.new_tensor(v, dtype=torch.int32) for v in values)
    import jax.numpy as jnp

    return tuple(jnp.asarray(v, jnp.int32) for v in values)


def past_2_31(gpu):
    """Sequences in the first pages, in those about element 2^31, and in the last."""
    size, heads, d = 16, 8, 128
    pages = gpu.big // (size * heads * d) + 8
    cache = gpu.normal(pages, size, heads, d, dtype=gpu.torch.bfloat16)
    assert cache.numel() > gpu.big
    edge = gpu.big // (size * heads * d)
    table, lens = [[0, pages - 1], [edge - 1, edge], [pages - 1, 0]], [20, 32, 16]
    q = gpu.normal(6, heads, d, dtype=gpu.torch.bfloat16)
    o = gpu.op("paged_attention")(q, cache, cache, *integers_on(q, table, lens, [0, 2, 4, 6]))
    for s, (row, length) in enumerate(zip(table, lens, strict=True)):
        part = cache[row].contiguous()
        here = slice(2 * s, 2 * s + 2)
        yield o[here].contiguous(), (q[here], part, part, *integers_on(q, [[0, 1]], [length], [0, 2])), {}


def far(gpu):
    cache, q = gpu.far((4, 16, 2, 64)), gpu.normal(3, 4, 64, dtype=gpu.torch.bfloat16)
    yield q, cache, cache, *integers_on(q, [[3, 0], [1, 3]], [30, 17], [0, 1, 3])


def in_layer(op, x, p):
    """Two heads of causal attention of the hidden state with itself, each sample's a page."""
    batch, length, width = x.shape
    heads = x.reshape(batch, length, 2, width // 2)
    integers = integers_on(x, [[b] for b in range(batch)], [length] * batch, [b * length for b in range(batch + 1)])
    return op(heads.reshape(-1, 2, width // 2) / 4, heads / 4, heads, *integers).reshape(x.shape)


# ------------------------------------------------------------------------------------------------ what users get wrong
def call(*arrays, **options):
    return pk.op("paged_attention", backend="reference")(*arrays, **options)


Q, CACHE, TABLE, LENS, STARTS = (
    zeros(3, 4, 8),
    zeros(5, 2, 2, 8),
    zeros(2, 2, dtype=I32),
    zeros(2, dtype=I32),
    I32([0, 1, 3]),
)
WRONG = {
    "starts of sequences alone": (
        lambda: call(Q, CACHE, CACHE, TABLE, LENS, STARTS[:2]),
        r"paged_attention: q_starts axis 0 \(sequences\+1\) is 2; expected 3, as set by page_table axis 0; make them",
    ),
    "starts that fall": (
        lambda: call(Q, CACHE, CACHE, TABLE, LENS, I32([0, 2, 1])),
        r"q_starts must begin with 0, rise, and end within the tokens",
    ),
    "starts that do not begin with 0": (
        lambda: call(Q, CACHE, CACHE, TABLE, LENS, I32([1, 2, 3])),
        r"q_starts must begin with 0, rise, and end within the tokens",
    ),
    "starts beyond the tokens": (
        lambda: call(Q, CACHE, CACHE, TABLE, LENS, I32([0, 2, 4])),
        r"q_starts must begin with 0, rise, and end within the tokens",
    ),
    "more keys than pages have": (
        lambda: call(Q, CACHE, CACHE, TABLE, I32([1, 5]), STARTS),
        r"kv_lens must be from 0 to pages_each \* page_size",
    ),
    "a page that is none": (
        lambda: call(Q, CACHE, CACHE, TABLE + 5, I32([1, 1]), STARTS),
        r"entries of page_table for the pages that they fill from 0 to pages - 1",
    ),
    "sinks of key heads": (
        lambda: call(Q, CACHE, CACHE, TABLE, LENS, STARTS, zeros(2)),
        r"sinks axis 0 \(kv_heads\*group\) is 2; expected 4, as set by",
    ),
    "sinks without pages": (
        lambda: call(Q, CACHE, CACHE, TABLE[:, :0], LENS, STARTS, zeros(4)),
        r"sinks are given and there is no page for a key",
    ),
    "slopes of key heads": (
        lambda: call(Q, CACHE, CACHE, TABLE, LENS, STARTS, alibi_slopes=zeros(2)),
        r"alibi_slopes axis 0 \(kv_heads\*group\) is 2; expected 4, as set by",
    ),
    "scales of query heads": (
        lambda: call(Q, CACHE, CACHE, TABLE, LENS, STARTS, None, zeros(4)),
        r"k_scale axis 0 \(kv_heads\) is 4; expected 2",
    ),
    "pages of integers": (
        lambda: call(Q, CACHE.astype(np.int8), CACHE, TABLE, LENS, STARTS),
        r"k_pages is int8 but q is float32; expected float32 or float8_e4m3fn or float8_e5m2",
    ),
    "a table of floats": (
        lambda: call(Q, CACHE, CACHE, TABLE.astype(np.float32), LENS, STARTS),
        r"page_table is float32; expected one of int32, int64",
    ),
    "a table in one row": (
        lambda: call(Q, CACHE, CACHE, TABLE[0], LENS, STARTS),
        r"page_table has 1 axis, shape \(2,\); expected 2: \(sequences, pages_each\)",
    ),
    "heads first": (
        lambda: call(Q, zeros(5, 2, 3, 8), zeros(5, 2, 3, 8), TABLE, LENS, STARTS),
        r"q axis 1 \(kv_heads\*group\) is 4; expected a multiple of kv_heads = 3",
    ),
    "caches of two page sizes": (
        lambda: call(Q, CACHE, zeros(5, 3, 2, 8), TABLE, LENS, STARTS),
        r"v_pages axis 1 \(page_size\) is 3; expected 2, as set by k_pages axis 1",
    ),
}


def shapes(tokens, sequences, pages, size, each, heads=4, kv_heads=2, d=64, dv=64):
    return {"q": (tokens, heads, d), "k_pages": (pages, size, kv_heads, d), "v_pages": (pages, size, kv_heads, dv),
            "page_table": (sequences, each), "kv_lens": (sequences,), "q_starts": (sequences + 1,)}  # fmt: skip


SMALL = shapes(3, 2, 5, 2, 2, 2, 1, 2, 3)
CHUNKS = shapes(9, 3, 8, 4, 3, 4, 2, 8, 5)

RECORD = ForwardRecord(
    op="paged_attention",
    simulate=simulate,
    variants=({}, {"block": 64}, {"block": 1024}, {"ftz": True}),
    case=case,
    regimes=SWEPT,
    special=special,
    near=Near(
        lambda rng: paged(drawn((1, 80, 1, 40), (1, 97, 1, 40), (1, 97, 1, 16)))(rng, "float32"),
        WITH_LSE | {"is_causal": False},
        plant={"factor": 1 + 4e-5},
    ),
    faults={
        "that drops the last key": Fault(paged(attention.spikes), {"drop": 64}, WITH_LSE | {"is_causal": False}),
        "that forgets keys beyond 64": Fault(
            paged(attention.spikes), {"furthest": 64}, WITH_LSE | {"is_causal": False}
        ),
        "without its tail": Fault(paged(attention.spikes), {"tail": False}, WITH_LSE | {"is_causal": False}),
        "without the maximum": Fault(
            paged(attention.spikes), {"shift": False}, WITH_LSE | {"scale": 1.0, "is_causal": False}
        ),
        "with a sink in the sum twice": Fault(with_sinks, {"sink": "twice"}, WITH_LSE | {"is_causal": False}, EVERY),
        "with a sink that is scaled": Fault(with_sinks, {"sink": "scaled"}, WITH_LSE | {"is_causal": False}, EVERY),
        "with a sink that lse lacks": Fault(with_sinks, {"sink": "not in lse"}, WITH_LSE | {"is_causal": False}, "lse"),
        **{
            f"with scales {how}": Fault(with_scales, {"scaled": how}, WITH_LSE | {"is_causal": False}, EVERY)
            for how in ("twice", "inverted", "of another head")
        },
        **{
            f"with slopes {wrong}": Fault(with_slopes, {"fall": wrong}, WITH_LSE | {"is_causal": False}, EVERY)
            for wrong in ("of the other sign", "from the first query", "of another head")
        },
        "of tf32 products for ieee": Fault(
            paged(attention.near_1_values), {"precision": "tf32"}, WITH_LSE | {"is_causal": False}, EVERY, ("float32",)
        ),
    },
    corners={
        **{
            f"a maximum that rises by {slope} a key": Corner(
                paged(attention.rising(slope), 16), WITH_LSE | {"is_causal": False}, {"block": 16}, most=0.5
            )
            for slope in (0.003, 0.03, 0.3)
        },
    },
    large_case=large_case,
    typical=typical,
    hiding={
        "o truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "P truncated": Hiding("lean towards 0", {"truncate_p": True}, dtypes=HALVES),
        "scale 0.3 % off": Hiding("typical", {"factor": 1.003}),
        "tf32 scores for ieee": Hiding("typical", {"precision": "tf32"}, dtypes=("float32",)),
        "q scaled and rounded": Hiding("typical", {"round_q": True}, dtypes=HALVES),
        "o accumulated in bfloat16": Hiding("typical", {"low": BF16}, dtypes=DTYPES),
        "tanh of 11 bits": Hiding("typical", {"tanh": rounded_tanh}, options={"softcap": 2.0}),
    },
    small={
        "plain": Sample(SMALL),
        "window": Sample(SMALL, {"window": (1, 0), "scale": 0.3}),
        "softcap and lse": Sample(SMALL, {"softcap": 2.0, "return_lse": True}),
        "no mask": Sample(SMALL, {"is_causal": False}),
        "sinks": Sample(SMALL | {"sinks": (2,)}, {"window": (0, 0), "softcap": 2.0}),
        "scales": Sample(SMALL | {"k_scale": (1,), "v_scale": (1,)}, {"softcap": 2.0}),
        "slopes": Sample(SMALL | {"alibi_slopes": (2,)}, {"window": (2, 1), "softcap": 2.0}),
    },
    usual=(
        Sample(shapes(40, 4, 40, 16, 9), WITH_LSE),
        Sample(shapes(90, 2, 12, 64, 5, 8, 2, 48, 48)),
        Sample(shapes(6, 6, 60, 16, 20, 4, 1), {"window": (100, 0)}),
        Sample(shapes(30, 3, 30, 10, 12, 4, 4, 32, 40), {"softcap": 5.0, "is_causal": False}),
        Sample(shapes(4, 2, 90, 16, 80) | {"sinks": (4,)}, WITH_LSE, wider=("sinks",)),
        Sample(shapes(4, 2, 90, 16, 80) | {"alibi_slopes": (4,)}, WITH_LSE),
    ),
    formula=formula,
    formula_calls=dict(formula_calls()),
    formula_tolerance=(1e-12, 1e-14),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample(CHUNKS, {"softcap": 3.0}),
    lowered={
        "chunks": Sample(shapes(100, 3, 20, 16, 9), WITH_LSE),
        "decoding": Sample(shapes(8, 8, 40, 32, 6, 8, 1)),
        "sinks": Sample(shapes(100, 3, 20, 16, 9) | {"sinks": (4,)}, WITH_LSE, wider=("sinks",)),
        "scales": Sample(shapes(100, 3, 20, 16, 9) | {"k_scale": (2,), "v_scale": (2,)}),
        "slopes": Sample(shapes(100, 3, 20, 16, 9) | {"alibi_slopes": (4,)}, WITH_LSE),
        "window": Sample(shapes(40, 4, 40, 16, 9, 4, 4, 80, 80), {"window": (40, 8), "softcap": 20.0}),
        "odd pages": Sample(shapes(20, 2, 30, 5, 9, 4, 4, 32, 32), {"precision": "tf32", "is_causal": False}),
    },
    mapped={
        "queries and caches": Mapped(
            Sample({**CHUNKS, "q": (2, 9, 4, 8), "k_pages": (8, 2, 4, 2, 8), "v_pages": (2, 8, 4, 2, 5)}),
            {"q": 0, "k_pages": 1, "v_pages": 0},
            folds=False,
        ),
    },
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(in_layer),
    extents={
        "tokens": 40,
        "kv_heads": 2,
        "group": 2,
        "d": 64,
        "dv": 64,
        "pages": 24,
        "page_size": 16,
        "sequences": 4,
        "pages_each": 6,
    },
    launched=Sample(shapes(8, 8, 40, 16, 5)),
    matrix_units=True,
    past_2_31=past_2_31,
    far=far,
)
