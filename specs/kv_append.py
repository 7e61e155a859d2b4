"""Keys and values of new tokens written into a cache of pages.

    k_out[slots[t] // page_size, slots[t] % page_size] = k[t]        v_out likewise

for each token t whose slot is not negative; every other slot is what it was. Nothing is computed, and nothing rounds.
The layout is that of Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
PagedAttention", and a slot is what ``slot_mapping`` has in vLLM's reshape_and_cache_flash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Int

from portakern.spec import Rule, spec
from portakern.spec.dtypes import numpy_dtype

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class KvAppendOut(NamedTuple):
    k_out: Float[A, "pages page_size kv_heads d"]
    v_out: Float[A, "pages page_size kv_heads dv"]


def slots_are_places(call: Call) -> bool:
    """Whether the slots that are not negative are in the cache, each of one token."""
    slots = call.arrays["slots"]
    used = slots[slots >= 0]
    return bool((used < call.dims["pages"] * call.dims["page_size"]).all() and len(np.unique(used)) == len(used))


def numbers_written(call: Call) -> float:
    """Numbers of the results that the call writes: the rows of its tokens, and the whole cache where that is new. No
    operation is made with them; each counts as one."""
    dims = call.dims
    each = {"k_pages": dims["kv_heads"] * dims["d"], "v_pages": dims["kv_heads"] * dims["dv"]}
    rows = {name: 0 if name in call.over else dims["pages"] * dims["page_size"] for name in each}
    return float(sum((dims["tokens"] + rows[name]) * width for name, width in each.items()))


def bytes_moved(call: Call) -> float:
    """Each number that is written is read before, and each slot is read."""
    slots = call.dims["tokens"] * numpy_dtype(call.dtype_of("slots")).itemsize
    return 2 * numbers_written(call) * numpy_dtype(call.dtype).itemsize + slots


@spec(
    tiling={},
    require=[
        Rule(
            slots_are_places,
            "slots must be below pages * page_size, and no two that are not negative the same; -1 skips a token",
            values=True,
        )
    ],
    positive=("d", "dv"),
    aliases={"k_out": "k_pages", "v_out": "v_pages"},
    apart=("kv_heads",),
    budget="flops",
    typical={"tokens": 64, "kv_heads": 8, "d": 128, "dv": 128, "pages": 4096, "page_size": 16},
    flops=numbers_written,
    bytes_moved=bytes_moved,
)
def kv_append(
    k: Float[A, "tokens kv_heads d"],
    v: Float[A, "tokens kv_heads dv"],
    k_pages: Float[A, "pages page_size kv_heads d"],
    v_pages: Float[A, "pages page_size kv_heads dv"],
    slots: Int[A, "tokens"],
) -> KvAppendOut:
    """The keys and values of new tokens, written into the pages of a cache.

    With ``overwrite=("k_pages", "v_pages")`` the cache itself is written to, and of it the slots of the tokens alone:
    what a server calls. Without, the results are new arrays: the cache is copied.

    Args:
      k: (tokens, kv_heads, d); v: (tokens, kv_heads, dv), of any strides, such as parts of one product.
      k_pages: (pages, page_size, kv_heads, d); v_pages: (pages, page_size, kv_heads, dv).
      slots: (tokens), where each token goes: its page * page_size + its place in the page, as in vLLM's slot_mapping.
        A token with a negative slot is skipped, as padding is. No slot may be two tokens', or beyond the cache;
        kernels do not read slots to find out: a token beyond the cache is skipped then, and of two tokens with one
        slot either may be there.

    Returns:
      k_out, v_out: the cache with the rows of the tokens, the bits of k and v; all other slots have the bits that they
      had, NaN and infinities too.
    """
    raise NotImplementedError


# ------------------------------------------------------------------------------------------------------------- values
@kv_append.values("slots")
def distinct_slots(rng, shape, dims, options):
    """Slots in any order, each once; at times some tokens are skipped, by any negative number, and always those for
    which there is no slot."""
    (tokens,), rows = shape, dims["pages"] * dims["page_size"]
    slots = -rng.integers(1, 2 * rows + 2, tokens)
    share = rng.choice([1.0, 0.7, 0.0], p=[0.6, 0.35, 0.05])
    written = rng.permutation(tokens)[: min(rows, int(np.ceil(share * tokens)))]
    slots[written] = rng.permutation(rows)[: len(written)]
    return slots


@kv_append.values("slots", measured=True)
def scattered_slots(rng, shape, dims, options):
    """One slot in each of as many places of the cache, no token skipped: as where each sequence decodes."""
    (tokens,), rows = shape, dims["pages"] * dims["page_size"]
    slots = np.full(tokens, -1)
    count = min(tokens, rows)
    slots[:count] = rng.permutation(count) * (rows // max(count, 1))
    return slots


# -------------------------------------------------------------------------------------------------------------- bounds
@kv_append.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """0: every number is one of the arguments', copied."""
    return tuple(np.zeros(y.shape) for y in ref)


@kv_append.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """0: nothing rounds."""
    return tuple(np.zeros(y.shape) for y in ref)


# --------------------------------------------------------------------------------------------------------------- edges
SMALL = {"tokens": (2, 12), "kv_heads": (1, 3), "d": (1, 20), "dv": (1, 20), "pages": (2, 6), "page_size": (1, 9)}


@kv_append.edge(dims=SMALL)
def special_numbers(arrays, rng, options):
    """NaN and infinities of tokens are written as they are, and those of the cache stay."""
    for name in ("k", "v", "k_pages", "v_pages"):
        array = arrays[name]
        array[rng.random(array.shape) < 0.3] = rng.choice([np.inf, -np.inf, np.nan])


@kv_append.edge(dims=SMALL)
def skipped_tokens_hold_nan(arrays, rng, options):
    """Half of the tokens are skipped, and hold NaN: it reaches nothing."""
    skipped = rng.random(len(arrays["slots"])) < 0.5
    arrays["slots"][skipped] = rng.choice([-1, -7, -(2**31)])
    arrays["k"][skipped], arrays["v"][skipped] = np.nan, np.nan


@kv_append.edge(dims=SMALL)
def every_token_is_skipped(arrays, rng, options):
    """The cache is what it was."""
    arrays["slots"][...] = -1
    arrays["k"][...], arrays["v"][...] = np.nan, np.nan


@kv_append.edge(dims=SMALL)
def the_first_and_the_last_token_are_skipped(arrays, rng, options):
    """Those between them are written."""
    arrays["slots"][[0, -1]] = -1


@kv_append.edge(dims={**SMALL, "tokens": (0, 0)})
def no_tokens(arrays, rng, options):
    """A step without a new token leaves the cache as it was."""


@kv_append.edge(dims={**SMALL, "tokens": (2, 4), "pages": (3, 6), "page_size": (2, 9)})
def the_first_and_the_last_slot(arrays, rng, options):
    """The cache's own ends."""
    k_pages = arrays["k_pages"]
    arrays["slots"][...] = -1
    arrays["slots"][[-1, 0]] = 0, k_pages.shape[0] * k_pages.shape[1] - 1


@kv_append.edge(dims={**SMALL, "tokens": (9, 12), "pages": (1, 3), "page_size": (1, 3)})
def as_many_tokens_as_slots(arrays, rng, options):
    """Every slot is written, and what is left of the tokens is skipped."""
    slots, rows = arrays["slots"], arrays["k_pages"].shape[0] * arrays["k_pages"].shape[1]
    slots[...] = -1
    slots[rng.permutation(len(slots))[:rows]] = np.arange(rows)


@kv_append.edge(dims={**SMALL, "kv_heads": (3, 9), "d": (250, 300), "dv": (120, 130)})
def long_rows(arrays, rng, options):
    """Rows of more than one tile, of k and of v not as many, and ragged."""


# ---------------------------------------------------------------------------------------------------------------- laws
def drawn_call(draw: Any) -> tuple[np.ndarray, ...]:
    """A call's arrays, some of its tokens skipped."""
    tokens, heads, d, dv = draw.extent(1, 12), draw.extent(1, 3), draw.extent(1, 40), draw.extent(1, 40)
    pages, size = draw.extent(3, 6), draw.extent(4, 9)
    slots = draw.rng.permutation(pages * size)[:tokens]
    slots[draw.rng.random(tokens) < 0.3] = -1
    k, v = draw.normal(tokens, heads, d), draw.normal(tokens, heads, dv)
    return k, v, draw.normal(pages, size, heads, d), draw.normal(pages, size, heads, dv), slots.astype(np.int32)


def same(draw: Any, found: Any, wanted: Any, what: str) -> None:
    for name, got, want in zip(KvAppendOut._fields, found, wanted, strict=True):
        draw.same_bits(got, want, f"{name} {what}")


@kv_append.law
def tokens_may_have_any_order(run, draw):
    """Tokens in another order give the same cache."""
    k, v, *pages, slots = drawn_call(draw)
    order = draw.rng.permutation(len(slots))
    same(draw, run(k[order], v[order], *pages, slots[order]), run(k, v, *pages, slots), "of tokens in another order")


@kv_append.law
def either_width_of_integers(run, draw):
    """int64 slots give the bits of int32."""
    *arrays, slots = drawn_call(draw)
    same(draw, run(*arrays, slots.astype(np.int64)), run(*arrays, slots), "with int64 slots")


@kv_append.law
def one_call_after_the_other(run, draw):
    """Some tokens, and then the others, give what all of them give at once."""
    k, v, *pages, slots = drawn_call(draw)
    cut = draw.extent(0, len(slots))
    first = run(k[:cut], v[:cut], *pages, slots[:cut])
    same(draw, run(k[cut:], v[cut:], *first, slots[cut:]), run(k, v, *pages, slots), "of two calls")


@kv_append.law
def a_skipped_token_changes_nothing(run, draw):
    """A token with a negative slot leaves no trace, and what is written is k and v to the bit."""
    k, v, *pages, slots = drawn_call(draw)
    found, used = run(k, v, *pages, slots), slots >= 0
    same(draw, run(k[used], v[used], *pages, slots[used]), found, "without the tokens that are skipped")
    size = pages[0].shape[1]
    for out, new, old in zip(found, (k, v), pages, strict=True):
        wanted = old.copy()
        wanted[slots[used] // size, slots[used] % size] = new[used]
        draw.same_bits(out, wanted, "of rows and of slots of nobody")


kv_append.sample("decoding", dims={"tokens": 3, "kv_heads": 2, "d": 4, "dv": 3, "pages": 4, "page_size": 2})
kv_append.sample("one_place_a_page", dims={"tokens": 2, "kv_heads": 1, "d": 5, "dv": 5, "pages": 5, "page_size": 1})
