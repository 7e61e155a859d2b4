"""k_out[slots[t] // page_size, slots[t] % page_size] = rope(k[t]) / k_scale, v_out likewise; other slots stay."""

from __future__ import annotations

from functools import partial

import numpy as np

import portakern as pk
from portakern.spec.dtypes import DTYPES, numpy_dtype
from tests.ops._shared import SWEPT, accumulator, draw, flush, normal64, pick, sweep, with_specials, zeros
from tests.ops.quantize import coded
from tests.ops.record import Fault, ForwardRecord, Layer, Mapped, Sample

I32 = np.int32
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


# ------------------------------------------------------------------------------------------------- the simulated kernel
def simulate(k, v, k_pages, v_pages, slots, cos=None, sin=None, k_scale=None, v_scale=None, interleaved=False, *,
             backwards=False, pages_late=0, swapped=False, from_the_end=False, heads=None, one_array=False,
             forgotten=0, others=None, table_late=0, one_sign=False, inverse=False, ftz=False, **stores):  # fmt: skip
    """One token after the other. ``backwards``: the last one first; ``pages_late``: slots of as many pages further;
    ``swapped``: page and place exchanged; ``from_the_end``: negative slots count from the cache's end; ``heads``: only
    so many are copied; ``one_array``: only k is; ``forgotten``: of the last tokens so many are not copied; ``others``:
    what slots of no token hold then.

    ``table_late``: a token has the tables of as many tokens further; ``one_sign``: sin has one sign for both numbers of
    a pair; ``ftz``: what is subnormal is read as 0 where it is computed with; ``inverse``, ``stores``: as of
    :func:`held`.
    """
    found, (pages, size), acc = [], k_pages.shape[:2], accumulator(k)
    rows = {"k": k.astype(acc), "v": v.astype(acc)}
    if cos is not None:
        tables = (np.roll(flush(x.astype(acc), ftz), -table_late, 0)[:, None] for x in (cos, sin))
        rows["k"] = turn(flush(rows["k"], ftz), *tables, interleaved, one_sign)
    for name, old, scale in (("k", k_pages, k_scale), ("v", v_pages, v_scale)):
        cache = old.astype(acc)
        if old.dtype != k.dtype or scale is not None:
            rows[name] = held(flush(rows[name], ftz), scale, old.dtype.name, inverse, **stores)
        if others is not None:
            cache[...] = others
        last = 0 if one_array and name == "v" else len(slots) - forgotten
        for t in reversed(range(last)) if backwards else range(last):
            slot = int(slots[t])
            if slot < 0:
                if not from_the_end:
                    continue
                slot += pages * size
            if 0 <= slot < pages * size:
                page, place = slot // size, slot % size
                page, place = (place % pages, page % size) if swapped else ((page + pages_late) % pages, place)
                cache[page, place, :heads] = rows[name][t, :heads]
        found.append(cache)
    return tuple(found)


def turn(k, cos, sin, interleaved, one_sign=False):
    pairs, y = cos.shape[-1], k.copy()
    a, b = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (slice(pairs), slice(pairs, 2 * pairs))
    y[..., a] = k[..., a] * cos + k[..., b] * (sin if one_sign else -sin)
    y[..., b] = k[..., b] * cos + k[..., a] * sin
    return y


def held(x, scale, dtype, inverse=False, clips=True, cut=False, multiplied=False, one_scale=False):
    """Numbers as pages are to hold them. ``inverse``: x is multiplied by the inverse of the scale; ``clips``: what is
    beyond the codes is clipped; ``cut``: codes are cut towards 0; ``multiplied``: x is multiplied by the scale;
    ``one_scale``: all heads have that of the first."""
    acc = x.dtype.type
    if scale is not None:
        s = (scale[:1] if one_scale else scale).astype(acc)[:, None]
        x = x * s if multiplied else x * (acc(1) / s) if inverse else x / s
    if DTYPES[dtype].bits > 8:
        return x
    most = DTYPES[dtype].largest
    return coded(np.clip(x, -most, most) if clips else x, dtype, cut)


# ------------------------------------------------------------------------------------------------------- calls on NumPy
def slots_of(rng, tokens, rows, skipped=0.2, dtype=I32):
    """Distinct slots, of which a share are skipped."""
    slots = rng.permutation(rows)[:tokens]
    return np.where(rng.random(tokens) < skipped, -rng.integers(1, 4, tokens), slots).astype(dtype)


def made(rng, dtype, regime="normal", tokens=9, heads=3, d=20, dv=12, pages=5, size=4, make=sweep):
    shapes = (tokens, heads, d), (tokens, heads, dv), (pages, size, heads, d), (pages, size, heads, dv)
    return (*(make(rng, shape, dtype, regime) for shape in shapes), slots_of(rng, tokens, pages * size))


def case(rng, dtype, regime):
    tokens, heads, d, dv, pages, size = (int(rng.integers(1, top)) for top in (12, 4, 40, 40, 6, 9))
    arrays = made(rng, dtype, regime, min(tokens, pages * size), heads, d + 1, dv, pages, size)
    tables, options = (None, None), {}
    if rng.random() < 0.5:
        own = pick(rng, (dtype, of_statistics(dtype)))
        tables, options = tables_of(rng, own, arrays[0]), {"interleaved": bool(rng.integers(2))}
    arrays = narrow(arrays, pick(rng, (E4M3, E5M2))) if rng.random() < 0.5 else arrays
    scales = scales_of(rng, dtype, heads) if rng.random() < 0.4 else (None, None)
    return (*arrays, *tables, *scales), options


def of_statistics(dtype):
    return "float64" if dtype == "float64" else "float32"


def tables_of(rng, dtype, k):
    """cos and sin of any angles, for as many pairs as a head has, or fewer."""
    angle = rng.uniform(-np.pi, np.pi, (len(k), int(rng.integers(1, k.shape[-1] // 2 + 1))))
    return np.cos(angle).astype(numpy_dtype(dtype)), np.sin(angle).astype(numpy_dtype(dtype))


def scales_of(rng, dtype, heads):
    return tuple(np.exp2(rng.uniform(-6, 3, heads)).astype(of_statistics(dtype)) for _ in range(2))


def narrow(arrays, name):
    """A call on pages of 8 bits."""
    k, v, *pages, slots = arrays
    with np.errstate(all="ignore"):
        return k, v, *(x.astype(numpy_dtype(name)) for x in pages), slots


def turned(rng, dtype):
    """Keys of a call, and tables."""
    arrays = some(rng, dtype)
    return *arrays, *tables_of(rng, dtype, arrays[0])


def eight_bits(rng, dtype):
    """A call on pages of 8 bits, with scales that differ by much."""
    own = of_statistics(dtype)
    arrays = narrow(some(rng, dtype), E4M3)
    return *arrays, None, None, np.array([0.05, 1.7, 3.0], own), np.array([4.0, 0.3, 0.002], own)


def special(rng, dtype, seed):
    """NaN and infinities in tokens and in the cache."""
    arrays, options = case(rng, dtype, pick(rng, SWEPT))
    return (*with_specials(rng, arrays[:4]), arrays[4], *with_specials(rng, arrays[5:7]), *arrays[7:]), options


def large_case(rng, dtype, regime):
    return made(rng, dtype, regime, 40, 2, 32, 24, 12, 8, make=draw), {}


def some(rng, dtype):
    """Tokens of which the second is skipped, with slots on no diagonal."""
    *arrays, slots = made(rng, dtype)
    slots[:3] = 1, -3, 18
    slots[3:] = [2, 5, 7, 8, 11, 13]
    return *arrays, slots


# ------------------------------------------------------------------------------------------------ written another way
def formula(k, v, k_pages, v_pages, slots, cos=None, sin=None, k_scale=None, v_scale=None, interleaved=False):
    """Each number of the cache by itself: that of the token which has its slot, or its own."""
    token, pairs = {int(slot): t for t, slot in enumerate(slots) if slot >= 0}, 0 if cos is None else cos.shape[-1]

    def written(new, scale, most, t, head, i):
        x, row = new[t, head, i], new[t, head]
        if new is k and i < 2 * pairs:
            p, second = (i // 2, i % 2) if interleaved else (i % pairs, i // pairs)
            apart = 1 if interleaved else pairs
            x = x * cos[t, p] + row[i - apart] * sin[t, p] if second else x * cos[t, p] - row[i + apart] * sin[t, p]
        return min(max(x if scale is None else x / scale[head], -most), most)

    found = []
    for new, old, scale in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
        out = np.zeros(old.shape)
        most = DTYPES[old.dtype.name].largest if old.dtype.itemsize == 1 else np.inf
        for page, place, head, i in np.ndindex(*old.shape):
            t = token.get(page * old.shape[1] + place)
            out[page, place, head, i] = (
                old[page, place, head, i] if t is None else written(new, scale, most, t, head, i)
            )
        found.append(out)
    return tuple(found)


def formula_call(slots, pages, size, more=0, name="float64", **options):
    """``more``: columns of tables; ``name``: the dtype of the pages, of 8 bits with scales."""
    n = len(slots)
    arrays = normal64(n, 2, 5), normal64(n, 2, 2, seed=1), normal64(pages, size, 2, 5), normal64(pages, size, 2, 2)
    arrays = narrow((*arrays, np.array(slots)), name)
    tables = (normal64(n, more, seed=2), normal64(n, more, seed=3)) if more else (None, None)
    scales = (np.array([0.5, 3.0]), np.array([0.001, 7.0])) if name != "float64" else (None, None)
    return (*arrays, *tables, *scales), options


def plain(xp, wide, stored, k, v, cos, sin, k_scale, v_scale, interleaved, dtypes):
    """The rows to write, in plain operations. ``wide``: an array in what is computed in; ``stored``: it in the dtype of
    its pages, from numbers that these hold."""
    rows = [k, v]
    if cos is not None:
        x, c, s = wide(k), wide(cos)[:, None], wide(sin)[:, None]
        turns, rest = x[..., : 2 * c.shape[-1]], x[..., 2 * c.shape[-1] :]
        a, b = (turns[..., 0::2], turns[..., 1::2]) if interleaved else (
            turns[..., : c.shape[-1]], turns[..., c.shape[-1] :]
        )  # fmt: skip
        both = xp.stack((a * c - b * s, b * c + a * s), -1 if interleaved else -2)
        rows[0] = xp.concatenate((both.reshape(turns.shape), rest), -1)
    found = []
    for x, scale, dtype in zip(rows, (k_scale, v_scale), dtypes, strict=True):
        x = x if scale is None else wide(x) / scale[:, None]
        if (name := str(dtype).removeprefix("torch.")) in (E4M3, E5M2):
            most = DTYPES[name].largest
            x = xp.clip(wide(x), -most, most)
        found.append(stored(x, dtype))
    return found


def in_torch(k, v, k_pages, v_pages, slots, cos=None, sin=None, k_scale=None, v_scale=None, *, interleaved=False):
    import torch

    def wide(x):
        return x if x.dtype == torch.float64 else x.float()

    used, found, pages = slots >= 0, [], (k_pages, v_pages)
    rows = plain(torch, wide, lambda x, dtype: x.to(dtype), k, v, cos, sin, k_scale, v_scale, interleaved,
                 [x.dtype for x in pages])  # fmt: skip
    for new, old in zip(rows, pages, strict=True):
        flat = old.reshape(-1, *new.shape[1:])
        if old.element_size() == 1:  # of which PyTorch copies bytes alone
            flat, new = flat.view(torch.uint8), new.view(torch.uint8)
        out = flat.index_put((slots[used].long(),), new[used]).reshape(old.shape)
        found.append(out.view(old.dtype))
    return tuple(found)


def in_jax(k, v, k_pages, v_pages, slots, cos=None, sin=None, k_scale=None, v_scale=None, *, interleaved=False):
    import jax.numpy as jnp

    found, pages = [], (k_pages, v_pages)
    rows = plain(jnp, lambda x: x.astype(jnp.float32), lambda x, dtype: x.astype(dtype), k, v, cos, sin, k_scale,
                 v_scale, interleaved, [x.dtype for x in pages])  # fmt: skip
    for new, old in zip(rows, pages, strict=True):
        flat = old.reshape(-1, *new.shape[1:])
        at = jnp.where(slots < 0, len(flat), slots)
        found.append(flat.at[at].set(new, mode="drop").reshape(old.shape))
    return tuple(found)


# ------------------------------------------------------------------------------------------------------- random calls
def fuzzed(r, dtype):
    tokens, pages, size = r.extent(), r.extent(), r.extent()
    heads, d, dv = (max(r.extent(), 1) for _ in range(3))
    slots = r.rng.permutation(max(pages * size, tokens))[:tokens]
    slots[(slots >= pages * size) | (r.rng.random(tokens) < 0.2)] = -1
    arrays = {
        "k": r.array(dtype, tokens, heads, d),
        "v": r.array(dtype, tokens, heads, dv),
        "k_pages": r.array(dtype, pages, size, heads, d),
        "v_pages": r.array(dtype, pages, size, heads, dv),
        "slots": slots.astype(r.pick(("int32", "int64"))),
    }
    options = {}
    if d > 1 and r.rng.random() < 0.5:
        tables = tables_of(r.rng, r.pick((dtype, of_statistics(dtype))), arrays["k"])
        arrays |= dict(zip(("cos", "sin"), tables, strict=True))
        options = {"interleaved": r.pick((False, True))}
    for name in ("k", "v"):
        arrays |= {f"{name}_scale": scales_of(r.rng, dtype, heads)[0]} if r.rng.random() < 0.3 else {}
        if r.rng.random() < 0.3:
            arrays[f"{name}_pages"] = arrays[f"{name}_pages"].astype(numpy_dtype(r.pick((E4M3, E5M2))))
    return arrays, options


# ------------------------------------------------------------------------------------------------------------- on a GPU
def integers_on(x, values):
    """Integers beside an array of torch or JAX."""
    if hasattr(x, "new_tensor"):
        import torch

        return x.new_tensor(values, dtype=torch.int32)
    import jax.numpy as jnp

    return jnp.asarray(values, jnp.int32)


def past_2_31(gpu):
    """Tokens in the first pages, in those about element 2^31, and in the last."""
    size, heads, d = 16, 8, 128
    edge = gpu.big // (size * heads * d)
    pages = edge + 8
    cache = gpu.normal(pages, size, heads, d, dtype=gpu.torch.bfloat16)
    assert cache.numel() > gpu.big
    k, v = (gpu.normal(6, heads, d, dtype=gpu.torch.bfloat16) for _ in range(2))
    chosen, places = sorted({0, edge - 1, edge, pages - 1}), [0, 3, 15, 7, 15, -1]
    at = [0, 1, 1, 2, 3, 0]  # which of the chosen pages

    def slots(numbers):
        return integers_on(k, [-1 if i < 0 else numbers[a] * size + i for a, i in zip(at, places, strict=True)])

    found = gpu.op("kv_append")(k, v, cache, cache, slots(chosen))
    part = cache[chosen].contiguous()
    yield tuple(out[chosen].contiguous() for out in found), (k, v, part, part, slots(range(4))), {}


def far(gpu):
    cache, k = gpu.far((4, 16, 2, 64)), gpu.normal(3, 2, 64, dtype=gpu.torch.bfloat16)
    yield k, k, cache, cache, integers_on(k, [63, -1, 2])
    new = gpu.far((3, 2, 64))
    yield new, new, cache, cache, integers_on(k, [0, 63, 17])


def in_layer(op, x, p):
    """The hidden state as keys of two heads, written into a cache of a page a sample, and read back."""
    batch, length, width = x.shape
    rows, cache = x.reshape(-1, 2, width // 2), x.reshape(batch, length, 2, width // 2)
    k_out, _ = op(rows, rows, 0 * cache, 0 * cache, integers_on(x, np.arange(batch * length)))
    return k_out.reshape(x.shape)


# ------------------------------------------------------------------------------------------------ what users get wrong
def call(*arrays, **options):
    return pk.op("kv_append", backend="reference")(*arrays, **options)


K, V, K_PAGES, V_PAGES = zeros(3, 2, 8), zeros(3, 2, 6), zeros(5, 4, 2, 8), zeros(5, 4, 2, 6)
SLOTS = I32([0, -1, 19])
TABLE, ONES = zeros(3, 4), np.ones(2, np.float32)
WRONG = {
    "a slot beyond the cache": (
        lambda: call(K, V, K_PAGES, V_PAGES, I32([0, 1, 20])),
        r"kv_append: slots must be below pages \* page_size",
    ),
    "two tokens of one slot": (
        lambda: call(K, V, K_PAGES, V_PAGES, I32([3, 1, 3])),
        r"slots must be .* no two that are not negative the same; -1 skips a token",
    ),
    "slots of another number of tokens": (
        lambda: call(K, V, K_PAGES, V_PAGES, SLOTS[:2]),
        r"kv_append: slots axis 0 \(tokens\) is 2; expected 3, as set by k axis 0",
    ),
    "a page and a place of each token": (
        lambda: call(K, V, K_PAGES, V_PAGES, zeros(3, 2, dtype=I32)),
        r"slots has 2 axes, shape \(3, 2\); expected 1: \(tokens\)",
    ),
    "slots of floats": (
        lambda: call(K, V, K_PAGES, V_PAGES, SLOTS.astype(np.float32)),
        r"slots is float32; expected one of int32, int64",
    ),
    "values in the cache of keys": (
        lambda: call(K, V, K_PAGES, K_PAGES, SLOTS),
        r"v_pages axis 3 \(dv\) is 8; expected 6, as set by v axis 2",
    ),
    "heads first": (
        lambda: call(K, V, zeros(5, 2, 4, 8), zeros(5, 2, 4, 6), SLOTS),
        r"k_pages axis 2 \(kv_heads\) is 4; expected 2, as set by k axis 1",
    ),
    "a table alone": (
        lambda: call(K, V, K_PAGES, V_PAGES, SLOTS, TABLE),
        r"cos and sin are the two tables of one turn: pass both, or neither",
    ),
    "tables whose halves repeat each other": (
        lambda: call(K, V, K_PAGES, V_PAGES, SLOTS, zeros(3, 8), zeros(3, 8)),
        r"cos and sin have more columns than d / 2 pairs",
    ),
    "a row of tables for each position": (
        lambda: call(K, V, K_PAGES, V_PAGES, SLOTS, zeros(2048, 4), zeros(2048, 4)),
        r"cos axis 0 \(tokens\) is 2048; expected 3, as set by k axis 0",
    ),
    "neighbours of nothing": (
        lambda: call(K, V, K_PAGES, V_PAGES, SLOTS, interleaved=True),
        r"interleaved says which numbers of a head cos and sin turn, and they are not given",
    ),
    "a scale of 0": (
        lambda: call(K, V, K_PAGES, V_PAGES.astype(numpy_dtype(E4M3)), SLOTS, v_scale=0 * ONES),
        r"k_scale and v_scale must be from 2\^-126 to 2\^126",
    ),
    "one scale for all heads": (
        lambda: call(K, V, K_PAGES, V_PAGES.astype(numpy_dtype(E4M3)), SLOTS, v_scale=ONES[:1]),
        r"v_scale axis 0 \(kv_heads\) is 1; expected 2, as set by k axis 1",
    ),
    "pages of integers": (
        lambda: call(K, V, K_PAGES.astype(np.int8), V_PAGES, SLOTS),
        r"k_pages is int8 but k is float32; expected float32 or float8_e4m3fn or float8_e5m2",
    ),
}


def shapes(tokens, pages, size, heads=2, d=64, dv=64):
    return {"k": (tokens, heads, d), "v": (tokens, heads, dv), "k_pages": (pages, size, heads, d),
            "v_pages": (pages, size, heads, dv), "slots": (tokens,)}  # fmt: skip


SMALL = shapes(3, 4, 2, 2, 3, 2)
FEW = shapes(5, 4, 3, 2, 8, 5)


def with_tables(given, pairs):
    return given | dict.fromkeys(("cos", "sin"), (given["slots"][0], pairs))


NEIGHBOURS = {"interleaved": True}

RECORD = ForwardRecord(
    op="kv_append",
    simulate=simulate,
    variants=({}, {"backwards": True}, {"inverse": True}, {"ftz": True}),
    case=case,
    regimes=SWEPT,
    special=special,
    near=None,
    faults={
        "a page further": Fault(some, {"pages_late": 1}, breaks="k_out"),
        "page and place exchanged": Fault(some, {"swapped": True}, breaks="k_out"),
        "that counts negative slots from the end": Fault(some, {"from_the_end": True}, breaks="v_out"),
        "of the first head alone": Fault(some, {"heads": 1}, breaks="k_out"),
        "that copies k alone": Fault(some, {"one_array": True}, breaks="v_out"),
        "that forgets the last token": Fault(some, {"forgotten": 1}, breaks="v_out"),
        "that clears other slots": Fault(some, {"others": 0.0}, breaks="k_out"),
        "with the tables of the next token": Fault(turned, {"table_late": 1}, breaks="k_out"),
        "with one sign of sin": Fault(turned, {"one_sign": True}, breaks="k_out"),
        "of neighbours for halves": Fault(turned, {"interleaved": True}, {"interleaved": False}, breaks="k_out"),
        "multiplied by the scale": Fault(eight_bits, {"multiplied": True}, breaks="k_out"),
        "with one scale for all heads": Fault(eight_bits, {"one_scale": True}, breaks="v_out"),
        "that clips nothing": Fault(eight_bits, {"clips": False}, breaks="v_out"),
        "that cuts codes": Fault(eight_bits, {"cut": True}, breaks="k_out"),
    },
    large_case=large_case,
    typical=lambda rng, dtype: large_case(rng, dtype, "normal"),
    hiding={},
    small={
        "plain": Sample(SMALL),
        "one place a page": Sample(shapes(2, 5, 1, 1, 3, 3)),
        "turned": Sample(with_tables(shapes(3, 4, 2, 2, 5, 2), 2), NEIGHBOURS, wider=("cos", "sin")),
    },
    usual=(
        Sample(with_tables(shapes(20, 24, 16), 32)),
        Sample(with_tables(shapes(7, 5, 9, 3, 33, 20), 10) | {"k_scale": (3,), "v_scale": (3,)}, NEIGHBOURS),
        Sample(shapes(40, 24, 16)),
        Sample(shapes(7, 5, 64, 8, 80, 48)),
        Sample(shapes(100, 30, 5, 3, 33, 20)),
    ),
    formula=formula,
    formula_calls={
        f"slots {slots} of {pages} pages of {size}": partial(formula_call, slots, pages, size)
        for slots, pages, size in (
            ([0], 1, 1), ([5, 0, -1], 3, 2), ([-1, -9], 2, 2), ([3, 2, 1, 0], 2, 2), ([11, -1, 4], 2, 6),
        )
    } | {
        f"{pairs} pairs, {name}, {options}": partial(formula_call, [11, -1, 4], 2, 6, pairs, name, **options)
        for pairs, name, options in (
            (2, "float64", {}), (1, "float64", NEIGHBOURS), (0, E4M3, {}), (2, E5M2, NEIGHBOURS), (1, E4M3, {}),
        )
    },
    formula_tolerance=(1e-15, 1e-15),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample(with_tables(FEW, 3)),
    lowered={
        "decoding": Sample(shapes(8, 40, 32, 8, 128, 128)),
        "one head": Sample(shapes(20, 9, 16, 1, 64, 80)),
        "odd rows": Sample(shapes(7, 5, 3, 3, 33, 20)),
        "turned": Sample(with_tables(shapes(8, 40, 32, 8, 128, 128), 64), wider=("cos", "sin")),
        "neighbours of odd rows": Sample(with_tables(shapes(7, 5, 3, 3, 33, 20), 11), NEIGHBOURS),
    },
    mapped={
        "tokens and caches": Mapped(
            Sample({**FEW, "k": (2, 5, 2, 8), "v": (5, 2, 2, 5), "k_pages": (4, 2, 3, 2, 8),
                    "v_pages": (2, 4, 3, 2, 5)}),
            {"k": 0, "v": 1, "k_pages": 1, "v_pages": 0},
            folds=False,
        ),
    },
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(in_layer),
    extents={"tokens": 24, "kv_heads": 2, "d": 64, "dv": 64, "pages": 12, "page_size": 16, "pairs": 16},
    launched=Sample(shapes(8, 40, 16)),
    past_2_31=past_2_31,
    far=far,
)  # fmt: skip
