"""k_out[slots[t] // page_size, slots[t] % page_size] = k[t], v_out likewise; other slots stay."""

from __future__ import annotations

from functools import partial

import numpy as np

import portakern as pk
from tests.ops._shared import SWEPT, accumulator, draw, normal64, pick, sweep, with_specials, zeros
from tests.ops.record import Fault, ForwardRecord, Layer, Mapped, Sample

I32 = np.int32


# ------------------------------------------------------------------------------------------------- the simulated kernel
def simulate(k, v, k_pages, v_pages, slots, *, backwards=False, pages_late=0, swapped=False, from_the_end=False,
             heads=None, one_array=False, forgotten=0, others=None):  # fmt: skip
    """One token after the other. ``backwards``: the last one first; ``pages_late``: slots of as many pages further;
    ``swapped``: page and place exchanged; ``from_the_end``: negative slots count from the cache's end; ``heads``: only
    so many are copied; ``one_array``: only k is; ``forgotten``: of the last tokens so many are not copied; ``others``:
    what slots of no token hold then."""
    found, (pages, size) = [], k_pages.shape[:2]
    for new, old in ((k, k_pages), (v, v_pages)):
        cache = old.astype(accumulator(k))
        if others is not None:
            cache[...] = others
        last = 0 if one_array and new is v else len(slots) - forgotten
        for t in reversed(range(last)) if backwards else range(last):
            slot = int(slots[t])
            if slot < 0:
                if not from_the_end:
                    continue
                slot += pages * size
            if 0 <= slot < pages * size:
                page, place = slot // size, slot % size
                page, place = (place % pages, page % size) if swapped else ((page + pages_late) % pages, place)
                cache[page, place, :heads] = new[t, :heads]
        found.append(cache)
    return tuple(found)


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
    return made(rng, dtype, regime, min(tokens, pages * size), heads, d, dv, pages, size), {}


def special(rng, dtype, seed):
    """NaN and infinities in tokens and in the cache."""
    arrays, options = case(rng, dtype, pick(rng, SWEPT))
    return (*with_specials(rng, arrays[:4]), *arrays[4:]), options


def large_case(rng, dtype, regime):
    return made(rng, dtype, regime, 40, 2, 32, 24, 12, 8, make=draw), {}


def some(rng, dtype):
    """Tokens of which the second is skipped, with slots on no diagonal."""
    *arrays, slots = made(rng, dtype)
    slots[:3] = 1, -3, 18
    slots[3:] = [2, 5, 7, 8, 11, 13]
    return *arrays, slots


# ------------------------------------------------------------------------------------------------ written another way
def formula(k, v, k_pages, v_pages, slots):
    """Each number of the cache by itself: that of the token which has its slot, or its own."""
    token = {int(slot): t for t, slot in enumerate(slots) if slot >= 0}
    found = []
    for new, old in ((k, k_pages), (v, v_pages)):
        out = np.zeros(old.shape)
        for page, place, head, i in np.ndindex(*old.shape):
            t = token.get(page * old.shape[1] + place)
            out[page, place, head, i] = old[page, place, head, i] if t is None else new[t, head, i]
        found.append(out)
    return tuple(found)


def formula_call(slots, pages, size):
    n = len(slots)
    arrays = normal64(n, 2, 3), normal64(n, 2, 2, seed=1), normal64(pages, size, 2, 3), normal64(pages, size, 2, 2)
    return (*arrays, np.array(slots)), {}


def in_torch(k, v, k_pages, v_pages, slots):
    used = slots >= 0
    rows, found = slots[used].long(), []
    for new, old in ((k, k_pages), (v, v_pages)):
        flat = old.reshape(-1, *new.shape[1:])
        found.append(flat.index_put((rows,), new[used]).reshape(old.shape))
    return tuple(found)


def in_jax(k, v, k_pages, v_pages, slots):
    import jax.numpy as jnp

    found = []
    for new, old in ((k, k_pages), (v, v_pages)):
        flat = old.reshape(-1, *new.shape[1:])
        rows = jnp.where(slots < 0, len(flat), slots)
        found.append(flat.at[rows].set(new, mode="drop").reshape(old.shape))
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
    return arrays, {}


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
}


def shapes(tokens, pages, size, heads=2, d=64, dv=64):
    return {"k": (tokens, heads, d), "v": (tokens, heads, dv), "k_pages": (pages, size, heads, d),
            "v_pages": (pages, size, heads, dv), "slots": (tokens,)}  # fmt: skip


SMALL = shapes(3, 4, 2, 2, 3, 2)
FEW = shapes(5, 4, 3, 2, 8, 5)

RECORD = ForwardRecord(
    op="kv_append",
    simulate=simulate,
    variants=({}, {"backwards": True}),
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
    },
    large_case=large_case,
    typical=lambda rng, dtype: large_case(rng, dtype, "normal"),
    hiding={},
    small={"plain": Sample(SMALL), "one place a page": Sample(shapes(2, 5, 1, 1, 3, 3))},
    usual=(
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
    },
    formula_tolerance=(0.0, 0.0),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample(FEW),
    lowered={
        "decoding": Sample(shapes(8, 40, 32, 8, 128, 128)),
        "one head": Sample(shapes(20, 9, 16, 1, 64, 80)),
        "odd rows": Sample(shapes(7, 5, 3, 3, 33, 20)),
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
    extents={"tokens": 24, "kv_heads": 2, "d": 64, "dv": 64, "pages": 12, "page_size": 16},
    launched=Sample(shapes(8, 40, 16)),
    past_2_31=past_2_31,
    far=far,
)  # fmt: skip
