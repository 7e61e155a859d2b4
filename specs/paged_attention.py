"""Attention of the queries of several sequences over keys and values in pages: decoding and prefill in chunks.

    o = softmax(softcap(scale q k^T), masked) v

of each sequence by itself, whose keys a table of pages finds. The layout is that of Kwon et al. 2023, "Efficient Memory
Management for Large Language Model Serving with PagedAttention".
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Float32, Int

from portakern.spec import Rule, Tile, spec
from portakern.spec.dtypes import numpy_dtype
from portakern.spec.tolerance import abs_matmul, beyond_range, magnitude
from portakern.specs.attention import allowed_pairs, attention, options_for
from portakern.specs.attention.contract import Scale, Softcap, Window
from portakern.specs.attention.planting import slopes, usual_slopes
from portakern.specs.attention.scores import scale_of, units_of
from portakern.specs.varlen_attention import beside_a_hidden_key

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


NARROW = ("float8_e4m3fn", "float8_e5m2")
"""Dtypes of a cache beside those of q."""


class PagedAttentionOut(NamedTuple):
    o: Float[A, "tokens kv_heads*group dv"]
    lse: Float32[A, "kv_heads*group tokens"]


def starts_rise(call: Call) -> bool:
    """Whether the queries of sequences follow each other and end within the tokens."""
    starts = call.arrays["q_starts"]
    return bool(starts[0] == 0 and (np.diff(starts) >= 0).all() and starts[-1] <= call.dims["tokens"])


def pages_hold_keys(call: Call) -> bool:
    """Whether the pages of each sequence have room for its keys, and exist."""
    table, lens, dims = call.arrays["page_table"], call.arrays["kv_lens"], call.dims
    if not ((lens >= 0) & (lens <= dims["pages_each"] * dims["page_size"])).all():
        return False
    read = np.arange(dims["pages_each"]) * dims["page_size"] < lens[:, None]
    return bool(((table >= 0) & (table < dims["pages"]))[read].all())


KEYS_BESIDE_A_SINK = Rule(
    lambda call: call.arrays["sinks"] is None or min(call.dims["pages"], call.dims["pages_each"]) > 0,
    "sinks are given and there is no page for a key (pages or pages_each is 0): o would be 0 and lse the sinks; return "
    "these, or pass a page",
)


def visible_pairs(call: Call) -> float:
    """Pairs of a query and a key that masks allow, of one head; of a call without known lengths, the most that there
    can be."""
    lens, starts, dims = call.integers("kv_lens"), call.integers("q_starts"), call.dims
    if lens is None or starts is None:
        return float(dims["tokens"] * _most_keys(call))
    forms = {(int(n), int(keys)) for n, keys in zip(np.diff(starts), lens, strict=True) if n and keys}
    found = {form: allowed_pairs(dense_form(call, *form)) for form in forms}
    return float(sum(found.get((int(n), int(k)), 0.0) for n, k in zip(np.diff(starts), lens, strict=True)))


def _most_keys(call: Call) -> int:
    """How many keys a query sees at most."""
    capacity, (left, right) = call.dims["pages_each"] * call.dims["page_size"], call.options["window"] or (None, None)
    right = 0 if call.options["is_causal"] else right
    return capacity if left is None or right is None else min(capacity, left + 1 + right)


def dense_form(call: Call, q_len: int, kv_len: int) -> Call:
    """The dimensions, options and slopes of the call of attention that a sequence of so many queries and keys is."""
    dims = {n: call.dims[n] for n in ("kv_heads", "group", "d", "dv")}
    return call.replace(
        spec=attention, wants=("o", "lse"), given=None, options=options_for(attention, call),
        arrays=dict.fromkeys(a.name for a in attention.arrays) | {"alibi_slopes": call.arrays["alibi_slopes"]},
        dims={"batch": 1, "q_len": q_len, "kv_len": kv_len, **dims},
    )  # fmt: skip


def keys_read(call: Call) -> float:
    """Keys that some query sees, of one key head, each page counted as often as sequences have it."""
    lens, starts, dims = call.integers("kv_lens"), call.integers("q_starts"), call.dims
    left, _ = call.options["window"] or (None, None)
    if lens is None or starts is None:
        return float(min(dims["sequences"], dims["tokens"]) * dims["pages_each"] * dims["page_size"])
    counts = np.diff(starts)
    seen = lens if left is None else np.minimum(lens, counts + left)
    return float(seen[counts > 0].sum())


def bytes_moved(call: Call) -> float:
    """Queries and results, the keys that are seen, and the integers that lead to them. A page that several sequences
    have may be read once for all."""
    dims, size = call.dims, numpy_dtype(call.dtype).itemsize
    heads, whole = dims["kv_heads"] * dims["group"], float(dims["pages"] * dims["page_size"])
    of_key, of_value = (numpy_dtype(call.dtype_of(n)).itemsize for n in ("k_pages", "v_pages"))
    keys = min(keys_read(call), whole) * dims["kv_heads"] * (dims["d"] * of_key + dims["dv"] * of_value)
    rows = dims["tokens"] * heads * ((dims["d"] + dims["dv"]) * size + (4 if "lse" in call.wants else 0))
    integers = {n: numpy_dtype(call.dtype_of(n)).itemsize for n in ("page_table", "kv_lens", "q_starts")}
    table = keys_read(call) / dims["page_size"] * integers["page_table"]
    return keys + rows + table + dims["sequences"] * (integers["kv_lens"] + integers["q_starts"])


@spec(
    tiling={"block_q": Tile(16, 256), "block_kv": Tile(16, 512)},
    returns={"lse": "return_lse"},
    require=[
        Rule(starts_rise, "q_starts must begin with 0, rise, and end within the tokens", values=True),
        Rule(
            pages_hold_keys,
            "kv_lens must be from 0 to pages_each * page_size, and entries of page_table for the pages that they fill "
            "from 0 to pages - 1",
            values=True,
        ),
        KEYS_BESIDE_A_SINK,
    ],
    or_float32=("sinks",),
    or_dtypes=dict.fromkeys(("k_pages", "v_pages"), NARROW),
    positive=("kv_heads", "group", "d", "dv", "page_size"),
    empty={name: {"o": 0.0, "lse": -inf} for name in ("pages", "pages_each", "sequences")},
    apart=("kv_heads", "sequences"),
    autocast="lower",
    budget="flops",
    typical={
        "tokens": 64,
        "kv_heads": 8,
        "group": 4,
        "d": 128,
        "dv": 128,
        "pages": 4096,
        "page_size": 64,
        "sequences": 64,
        "pages_each": 64,
    },
    flops=lambda call: (
        2.0 * visible_pairs(call) * call.dims["kv_heads"] * call.dims["group"] * (call.dims["d"] + call.dims["dv"])
    ),
    bytes_moved=bytes_moved,
)
def paged_attention(
    q: Float[A, "tokens kv_heads*group d"],
    k_pages: Float[A, "pages page_size kv_heads d"],
    v_pages: Float[A, "pages page_size kv_heads dv"],
    page_table: Int[A, "sequences pages_each"],
    kv_lens: Int[A, "sequences"],
    q_starts: Int[A, "sequences+1"],
    sinks: Float[A, "kv_heads*group"] | None = None,
    k_scale: Float32[A, "kv_heads"] | None = None,
    v_scale: Float32[A, "kv_heads"] | None = None,
    alibi_slopes: Float32[A, "kv_heads*group"] | None = None,
    *,
    is_causal: bool = True,
    window: Window | None = None,
    scale: Scale | None = None,
    softcap: Softcap | None = None,
    precision: Literal["ieee", "tf32"] = "ieee",
    return_lse: bool = False,
) -> PagedAttentionOut:
    """o = attention of each sequence's queries over its keys, which lie in pages that a table names.

    Key j of sequence s is k_pages[page_table[s, j // page_size], j % page_size], for j < kv_lens[s]; its queries are q
    from q_starts[s] to q_starts[s + 1]. One call may hold sequences that decode (one query) and chunks of prompts (some
    queries), in any order. Pages of no sequence, slots behind a sequence's last key, and what the table says behind its
    last page reach nothing, whatever they hold. Sequences may share pages.

    Args:
      q: (tokens, kv_heads*group, d), the queries of one sequence after the other. Query head h reads key head h //
        group.
      k_pages: (pages, page_size, kv_heads, d); v_pages: (pages, page_size, kv_heads, dv), of any strides. Each has q's
        dtype, or float8_e4m3fn or float8_e5m2, whose numbers are taken as they are.
      page_table: (sequences, pages_each), the pages of each sequence in the order of its keys.
      kv_lens: (sequences), how many keys each has, those of its own queries among them; at most pages_each *
        page_size.
      q_starts: (sequences + 1), where the queries of each begin, from 0 on, and where the last one's end; to decode one
        token of each: arange(sequences + 1).
      sinks: (kv_heads*group,): a logit of each query head in its softmax's denominator, as in attention; q's dtype or
        float32. -inf is none, to the bit.
      k_scale, v_scale: (kv_heads,), float32, finite: what the keys, or the values, of a head are multiplied by. None is
        1, to the bit. Keys and values are the exact products: kernels scale scores and sums.
      alibi_slopes: (kv_heads*group,), float32: of each query head, what a score falls by for each key between its key
        and the query's place, as in attention; query i of the n of a sequence stands at key i + kv_len - n.
      is_causal: query i of the n of a sequence sees keys up to i + kv_len - n: the last query stands at the last key.
      window: (left, right): query i sees keys from i + kv_len - n - left to i + kv_len - n + right; None on a side is
        unbounded.
      scale: None is 1/sqrt(d).
      softcap: c: scores become c tanh(s/c).
      precision: for float32 operands, as in attention.
      return_lse: also return the log-sum-exp.

    Returns:
      o: (tokens, kv_heads*group, dv), q's dtype; with return_lse also lse: (kv_heads*group, tokens), float32, natural
      log. A query that sees no key, as the first ones of a sequence of more queries than keys under a causal mask, is
      zeros, its lse the sink, or -inf without one. A token behind the last sequence is zeros too, and has no sink: its
      lse is -inf. A NaN of a key or value reaches the queries that see it. No bit of a query depends on other
      sequences, on the pages that hold its keys, on the table's width, or on how many queries are in its chunk.
    """
    raise NotImplementedError


# ------------------------------------------------------------------------------------------------------------- values
@paged_attention.values("q_starts")
def query_starts(rng, shape, dims, options):
    """One query each where there are enough tokens, or any number, and at times tokens of no sequence."""
    tokens, sequences = dims["tokens"], shape[0] - 1
    if tokens >= sequences and rng.random() < 0.25:
        return np.arange(shape[0])
    ends = np.sort(rng.integers(0, tokens + 1, sequences))
    if sequences and rng.random() < 0.7:
        ends[-1] = tokens
    return np.concatenate([[0], ends])


@paged_attention.values("kv_lens", "q_starts")
def key_lengths(rng, shape, dims, options, q_starts):
    """Mostly as many keys as queries at least; all that there is room for, whole pages, and none too."""
    size, most = dims["page_size"], dims["pages_each"] * dims["page_size"] * (dims["pages"] > 0)
    least = np.minimum(np.diff(q_starts), most)
    pages = np.minimum(size * rng.integers(0, dims["pages_each"] + 1, shape), most)
    kinds = [rng.integers(least, most + 1), np.full(shape, most), pages, rng.integers(0, most + 1, shape),
             np.zeros(shape, int)]  # fmt: skip
    return np.choose(rng.choice(5, shape, p=[0.45, 0.3, 0.1, 0.1, 0.05]), kinds)


@paged_attention.values("page_table")
def page_tables(rng, shape, dims, options):
    """Pages in any order, each once where there are enough."""
    count, pages = int(np.prod(shape)), max(dims["pages"], 1)
    return (rng.permutation(max(count, pages))[:count] % pages).reshape(shape)


def positive_scales(rng, shape, dims, options):
    """What brings the largest number of 8 bits to about 1, and numbers about 1."""
    return np.exp2(rng.uniform(-9, 3, shape))


paged_attention.values("k_scale")(positive_scales)
paged_attention.values("v_scale")(positive_scales)


paged_attention.values("alibi_slopes")(slopes)


@paged_attention.values("q_starts", measured=True)
def equal_chunks(rng, shape, dims, options):
    """As many queries of each sequence."""
    return np.linspace(0, dims["tokens"], shape[0]).astype(int)


@paged_attention.values("kv_lens", "q_starts", measured=True)
def full_pages(rng, shape, dims, options, q_starts):
    """As many keys as the table has room for."""
    return np.full(shape, dims["pages_each"] * dims["page_size"])


@paged_attention.rewrite
def tokens_and_pages_come_along(call, chosen):
    """The tokens of the chosen sequences, and the pages that hold their keys, in the order of their numbers."""
    starts, lens, table = (call.arrays[n] for n in ("q_starts", "kv_lens", "page_table"))
    numbers = chosen["sequences"]
    tokens = [np.arange(starts[s], starts[s + 1]) for s in numbers]
    read = np.arange(table.shape[1]) * call.dims["page_size"] < lens[numbers][:, None]
    used = np.union1d(table[numbers][read], [0]).astype(int)
    renumbered = np.where(read, np.searchsorted(used, table[numbers]), -1)
    return (
        {"tokens": np.concatenate(tokens), "pages": used},
        {"q_starts": np.cumsum([0, *map(len, tokens)]), "page_table": renumbered},
    )


# ------------------------------------------------------------------------------------------------------- each sequence
class Sequence(NamedTuple):
    """One sequence of a call: where its tokens are, the call of attention that it is by itself, and its keys and values
    as the pages hold them: (kv_len, kv_heads, d), (kv_len, kv_heads, dv)."""

    tokens: slice
    call: Call
    stored: tuple[np.ndarray, np.ndarray]


def sequences_of(call: Call) -> Iterator[Sequence]:
    """Those that have queries, and keys or sinks, with their keys gathered from pages and scaled: k (1, kv_len,
    kv_heads, d)."""
    sinks, scales = call.arrays["sinks"], [call.arrays[n] for n in ("k_scale", "v_scale")]
    k, v, table, lens, starts = (call.arrays[n] for n in ("k_pages", "v_pages", "page_table", "kv_lens", "q_starts"))
    size = call.dims["page_size"]
    for s, length in enumerate(int(n) for n in lens):
        tokens = slice(int(starts[s]), int(starts[s + 1]))
        if tokens.start < tokens.stop and (length or sinks is not None):
            at = np.arange(length)
            page, slot = table[s, at // size], at % size
            stored = k[page, slot], v[page, slot]
            with np.errstate(all="ignore"):
                scaled = [x if s is None else x * s[:, None] for x, s in zip(stored, scales, strict=True)]
            arrays = {"q": call.arrays["q"][None, tokens], "k": scaled[0][None], "v": scaled[1][None]}
            form = dense_form(call, tokens.stop - tokens.start, length)
            one = form.replace(arrays={**form.arrays, **arrays, "sinks": sinks})
            yield Sequence(tokens, one if length else beside_a_hidden_key(one), stored)


def _each(call: Call, ref: tuple[Any, ...], fn: Any) -> tuple[Any, ...]:
    """``fn`` of attention for each sequence, 0 for tokens without a sequence or keys: their results are exact."""
    o, lse = ref
    found, found_lse = np.zeros(o.shape), None if lse is None else np.zeros(lse.shape)
    for tokens, part, stored in sequences_of(call):
        of_o, of_lse, _ = fn(part, (o[None, tokens], None if lse is None else lse[None, :, tokens], None), stored)
        found[tokens] = of_o[0]
        if found_lse is not None:
            found_lse[:, tokens] = of_lse[0]
    return found, found_lse


@paged_attention.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """That of attention for each sequence by itself, whose N is the sequence's own number of keys.

    Kernels that keep a state for each chunk of keys and merge the states multiply and add twice more a chunk, and take
    two exponentials: 20u, that is no more than the N u of the chunk's keys where it has 64 or more. A token without a
    sequence, and one of a sequence without keys or sinks, is an exact 0, its lse -inf.

    Numbers of 8 bits are numbers of q's dtype, so that the bound is attention's on them as they are. With scales it is
    attention's on the exact products k' = k k_scale and v' = v v_scale, which float64 holds, and what a kernel does
    that multiplies dots of k by k_scale, and sums of v by v_scale at last:

    A dot errs by the share of |q| |k| that attention gives it, which k_scale makes that share of |q| |k'|; the product
    with k_scale, or k_scale's with the scale, rounds once more: u S, as a dot of one term more does. o takes a product
    more: 2u |o|. What underflows does so before it is scaled: of o n tau |v_scale| more, in all 2 (n |v_scale| + 1) tau
    (where l' is below 1/2 the share g of every weight is more than the weight, and covers what it loses); of a score
    D tau |scale k_scale|, nothing beside ex where that is finite and D |scale k_scale| below 2^98, as it is promised.
    Nothing is promised either where |q| |k| reaches 2^127 before it is scaled, nor of a head whose keys, or a column of
    whose values, have a number in the pages that a matrix unit may read as infinite.
    """
    of_attention: Any = attention.bound

    def of_one(part: Call, one: tuple[Any, ...], stored: tuple[np.ndarray, np.ndarray]) -> tuple[Any, ...]:
        k_scale, v_scale = call.arrays["k_scale"], call.arrays["v_scale"]
        group, n, unit = call.dims["group"], part.dims["kv_len"], units_of(part)
        if k_scale is not None:  # a dot of one term more, and the scale of d terms
            options = {**part.options, "scale": scale_of(part)}
            part = part.replace(dims={**part.dims, "d": part.dims["d"] + 1}, options=options)
        of_o, of_lse, of_low = of_attention(part, one)
        with np.errstate(all="ignore"):
            if v_scale is not None:
                size = np.repeat(np.abs(v_scale), group)[:, None]
                of_o = of_o + 2 * unit.u * magnitude(one[0]) + 2 * (n * size + 1) * unit.tau
                of_o = np.where(np.repeat(beyond_range(stored[1], unit, 0)[0], group, 0), inf, of_o)
            if k_scale is not None and len(stored[0]):
                q, k = (np.swapaxes(x, 0, 1) for x in (part.arrays["q"][0], np.repeat(stored[0], group, 1)))
                far = np.isinf(abs_matmul(q, np.swapaxes(k, 1, 2), unit).max(2))  # (heads, tokens)
                far |= (part.dims["d"] * abs(scale_of(part)) * np.repeat(np.abs(k_scale), group) >= 2.0**98)[:, None]
                of_o = np.where(far.T[..., None], inf, of_o)
                of_lse = None if of_lse is None else np.where(far, inf, of_lse)
        return of_o, of_lse, of_low

    return _each(call, ref, of_one)


@paged_attention.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """That of attention for each sequence by itself."""
    of_attention: Any = attention.spread
    return _each(call, ref, lambda part, one, _: of_attention(part, one))


# --------------------------------------------------------------------------------------------------------------- edges
SMALL = {"tokens": (1, 12), "kv_heads": (1, 2), "group": (1, 3), "d": (1, 20), "dv": (1, 20), "pages": (4, 12),
         "page_size": (1, 9), "sequences": (1, 4), "pages_each": (1, 5)}  # fmt: skip
LONG = {**SMALL, "pages": (8, 20), "page_size": (16, 33), "pages_each": (4, 9), "sequences": (1, 3)}


def slots_read(arrays: dict[str, Any]) -> np.ndarray:
    """(pages, page_size): which slots hold a key of some sequence."""
    k, table, lens = (arrays[n] for n in ("k_pages", "page_table", "kv_lens"))
    read = np.zeros(k.shape[:2], bool)
    for pages, length in zip(table, lens, strict=True):
        at = np.arange(int(length))
        read[pages[at // k.shape[1]], at % k.shape[1]] = True
    return read


@paged_attention.edge(dims=SMALL)
def slots_of_nobody_hold_nan(arrays, rng, options):
    """Pages of no sequence, and slots behind a sequence's last key, reach nothing; nor does the table behind its last
    page."""
    k, v, table, lens = (arrays[n] for n in ("k_pages", "v_pages", "page_table", "kv_lens"))
    read = slots_read(arrays)
    k[~read], v[~read] = rng.choice([np.nan, inf]), np.nan
    table[np.arange(table.shape[1]) * k.shape[1] >= lens[:, None]] = rng.choice([-1, 10**6])


@paged_attention.edge(dims=LONG, smallest_tiles=True)
def tiles_that_end_within_pages(arrays, rng, options):
    """Tiles of keys that begin and end anywhere in a page, before slots that hold NaN."""
    read = slots_read(arrays)
    arrays["k_pages"][~read], arrays["v_pages"][~read] = np.nan, np.nan


@paged_attention.edge(dims={**SMALL, "tokens": (4, 12)}, options={"is_causal": True, "return_lse": True})
def more_queries_than_keys(arrays, rng, options):
    """The first queries of a sequence see nothing under a causal mask: zeros, and an lse of -inf, or the sink."""
    arrays["kv_lens"][...] = np.minimum(arrays["kv_lens"], 2)


@paged_attention.edge(dims=SMALL, options={"return_lse": True})
def sequences_without_keys(arrays, rng, options):
    """Zeros, and an lse of -inf, or the sink, whatever all pages hold."""
    arrays["kv_lens"][...] = 0
    arrays["k_pages"][...], arrays["v_pages"][...] = np.nan, np.nan


@paged_attention.edge(dims={**SMALL, "tokens": (5, 12)}, options={"return_lse": True})
def tokens_of_no_sequence(arrays, rng, options):
    """Tokens behind the last sequence are zeros, their lse -inf, though they hold NaN and others have sinks."""
    arrays["q_starts"][...] = np.minimum(arrays["q_starts"], 3)
    arrays["q"][3:] = np.nan


@paged_attention.edge(dims={**SMALL, "pages": (1, 2), "pages_each": (3, 5)})
def sequences_that_share_pages(arrays, rng, options):
    """As those of one prompt do."""
    arrays["page_table"][...] = 0


@paged_attention.edge(dims={**SMALL, "page_size": (16, 16), "pages_each": (3, 5)}, smallest_tiles=True)
def pages_as_long_as_tiles(arrays, rng, options):
    """Pages of 16 keys, with lengths about their ends."""
    arrays["kv_lens"][...] = rng.choice([15, 16, 17, 32, 33, 48], arrays["kv_lens"].shape)


@paged_attention.edge(dims={**LONG, "tokens": (1, 4)}, options={"window": (20, 0)}, smallest_tiles=True)
def a_window_far_from_the_first_page(arrays, rng, options):
    """Tiles before the window are passed by; one that the window begins in is masked."""
    arrays["kv_lens"][...] = arrays["page_table"].shape[1] * arrays["k_pages"].shape[1]


@paged_attention.edge(dims={**LONG, "pages": (40, 60), "pages_each": (40, 60), "sequences": (1, 2), "tokens": (1, 3)})
def many_keys(arrays, rng, options):
    """More keys than a chunk has that kernels keep a state for, or tiles that a program has."""
    arrays["kv_lens"][...] = arrays["page_table"].shape[1] * arrays["k_pages"].shape[1] - 5


@paged_attention.edge(
    dims={**LONG, "tokens": (200, 240), "kv_heads": (1, 1), "group": (2, 3), "d": (4, 8), "dv": (4, 8),
          "pages": (20, 24), "page_size": (30, 33), "sequences": (1, 1), "pages_each": (20, 24)},
    options={"window": None},
)  # fmt: skip
def a_prompt_onto_many_keys(arrays, rng, options):
    """So many queries that a program walks all chunks of their keys."""
    arrays["q_starts"][...] = [0, len(arrays["q"])]
    arrays["kv_lens"][...] = arrays["page_table"].shape[1] * arrays["k_pages"].shape[1] - 5


@paged_attention.edge(dims={**LONG, "tokens": (1, 4)}, options={"scale": 1.0}, smallest_tiles=True)
def a_maximum_that_rises_late(arrays, rng, options):
    """The last key of each sequence outweighs all before it, after sums of these were made."""
    arrays["q"][...], arrays["k_pages"][...] = 0.25, 0.0
    for pages, length in zip(arrays["page_table"], arrays["kv_lens"], strict=True):
        if length:
            page, slot = divmod(int(length) - 1, arrays["k_pages"].shape[1])
            arrays["k_pages"][pages[page], slot] = 24.0


@paged_attention.edge(dims={**SMALL, "kv_heads": (17, 19), "d": (1, 4), "dv": (1, 4)})
def many_key_heads(arrays, rng, options):
    """More key heads than kernels take at a time, and no multiple of them."""


@paged_attention.edge(dims=SMALL)
def nan_and_inf_of_a_key(arrays, rng, options):
    """They reach the queries that see the key, and no other sequence's."""
    lens = arrays["kv_lens"]
    if lens.any():
        s = rng.choice(np.flatnonzero(lens))
        page, slot = divmod(int(rng.integers(lens[s])), arrays["k_pages"].shape[1])
        name = rng.choice(["k_pages", "v_pages"])
        arrays[name][arrays["page_table"][s, page], slot, 0, 0] = rng.choice([np.nan, inf])


@paged_attention.edge(dims={**SMALL, "tokens": (5, 12)}, given=("sinks",), options={"return_lse": True})
def sinks_of_some_tokens(arrays, rng, options):
    """lse is the sink of a sequence without keys, and -inf of tokens behind the last one."""
    arrays["q_starts"][...] = np.minimum(arrays["q_starts"], 4)
    arrays["kv_lens"][rng.integers(len(arrays["kv_lens"]))] = 0


@paged_attention.edge(dims={**SMALL, "tokens": (5, 12)}, given=("sinks",), options={"return_lse": True})
def odd_sinks(arrays, rng, options):
    """NaN and inf in a sink make all queries of its head NaN, o and lse; -inf is none. Tokens behind the last sequence
    have no sink."""
    arrays["q_starts"][...] = np.minimum(arrays["q_starts"], 4)
    sinks = arrays["sinks"]
    sinks[rng.random(sinks.shape) < 0.4] = -inf
    sinks[rng.integers(sinks.size)] = rng.choice([np.nan, inf, -inf])


@paged_attention.edge(dims=SMALL, given=("sinks",), options={"scale": 0.125, "softcap": None, "return_lse": True})
def sinks_above_all_scores(arrays, rng, options):
    """The sink is the row's maximum, by a little and by much: it is neither scaled nor capped."""
    arrays["sinks"][...] = rng.choice([3.0, 8.0, 30.0], arrays["sinks"].shape)


@paged_attention.edge(
    dims={**LONG, "pages": (40, 60), "pages_each": (40, 60), "sequences": (1, 2), "tokens": (1, 3)},
    given=("sinks",),
    options={"window": None, "return_lse": True},
)
def many_keys_with_sinks(arrays, rng, options):
    """Keys in several chunks: the sink is in the denominator once, not once for each."""
    arrays["kv_lens"][...] = arrays["page_table"].shape[1] * arrays["k_pages"].shape[1] - 5
    arrays["sinks"][...] = 5 + np.abs(arrays["sinks"])


@paged_attention.edge(
    dims={**SMALL, "kv_heads": (2, 3), "d": (8, 20), "dv": (8, 20)},
    given=("k_scale", "v_scale"),
    options={"softcap": None, "scale": 0.3, "return_lse": True},
)
def scales_far_apart(arrays, rng, options):
    """The scales of a head are not those of the next, nor its keys' its values'."""
    heads = np.arange(len(arrays["k_scale"]))
    arrays["k_scale"][...], arrays["v_scale"][...] = 0.25 * 2.0**heads, 4.0 / 3.0**heads


@paged_attention.edge(
    dims={**LONG, "pages": (40, 60), "pages_each": (40, 60), "sequences": (1, 2), "tokens": (1, 3)},
    given=("k_scale", "v_scale"),
    options={"window": None},
)
def many_keys_with_scales(arrays, rng, options):
    """Keys in several chunks: sums are scaled once, when all are merged."""
    arrays["kv_lens"][...] = arrays["page_table"].shape[1] * arrays["k_pages"].shape[1] - 5
    arrays["v_scale"][...] = 3.0 + np.arange(len(arrays["v_scale"]))


# --- slopes ---
@paged_attention.edge(dims=LONG, given=("alibi_slopes",), options={"return_lse": True}, smallest_tiles=True)
def slopes_of_unequal_sequences(arrays, rng, options):
    """Each query stands where its own sequence's keys end, however many pages the table has room for."""
    arrays["alibi_slopes"][...] = usual_slopes(arrays["alibi_slopes"].shape[0])


@paged_attention.edge(dims={**SMALL, "group": (2, 6), "kv_heads": (2, 3)}, given=("alibi_slopes",))
def slopes_of_grouped_heads(arrays, rng, options):
    """Every query head has a slope of its own, also where heads of a group share a tile of rows."""
    arrays["alibi_slopes"][...] = 1.0 / np.arange(1, arrays["alibi_slopes"].shape[0] + 1)


@paged_attention.edge(dims=LONG, given=("alibi_slopes",), options={"is_causal": False, "window": None})
def odd_slopes(arrays, rng, options):
    """NaN reaches the rows of its head that see a key; a huge slope leaves the key at a row's place, or the nearest."""
    arrays["alibi_slopes"][rng.integers(arrays["alibi_slopes"].shape[0])] = rng.choice([np.nan, inf, 1e4, 1e9])


# ---------------------------------------------------------------------------------------------------------------- laws
def _drawn(draw, sequences: int | None = None, keys: int = 80, least: int = 1) -> dict[str, np.ndarray]:
    """Arrays of a call by name: of each sequence ``least`` keys or more and 1 to 4 queries, 2 or more where least is
    not 1, and as many keys at least."""
    sequences = draw.extent(1, 4) if sequences is None else sequences
    size, heads, d = draw.extent(1, 20), draw.extent(1, 2), draw.extent(1, 20, "d")
    each = draw.extent(-(-least // size), -(-keys // size))
    lens = draw.integers(least, size * each, sequences, dtype="int32")
    counts = np.minimum(draw.integers(min(least, 2), 4, sequences, dtype="int32"), lens)
    pages = sequences * each + 2
    table = draw.rng.permutation(pages)[: sequences * each].reshape(sequences, each).astype(np.int32)
    return {"q": draw.normal(int(counts.sum()), heads * 2, d), "k_pages": draw.normal(pages, size, heads, d),
            "v_pages": draw.normal(pages, size, heads, d), "page_table": table, "kv_lens": lens,
            "q_starts": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)}  # fmt: skip


def _alone(x: dict[str, np.ndarray], i: int) -> dict[str, np.ndarray]:
    """The call of a lone sequence in which query i is the only one, and the last."""
    (length,), tokens = x["kv_lens"], len(x["q"])
    return x | {"q": x["q"][i : i + 1], "kv_lens": np.array([length - tokens + i + 1], np.int32),
                "q_starts": np.array([0, 1], np.int32)}  # fmt: skip


@paged_attention.law
def where_pages_lie_does_not_matter(run, draw):
    """Pages that change places, with the table told, give the same bits."""
    x = _drawn(draw)
    order = draw.rng.permutation(len(x["k_pages"]))
    places = np.argsort(order).astype(np.int32)
    moved = {n: x[n][order] for n in ("k_pages", "v_pages")} | {"page_table": places[x["page_table"]]}
    draw.same_bits(run(*(x | moved).values()), run(*x.values()), "pages in another order")


@paged_attention.law
def a_sequence_alone(run, draw):
    """A sequence has the same bits alone, with a table as wide as its keys need, and among others."""
    x = _drawn(draw, keys=700)
    s = draw.extent(0, len(x["kv_lens"]) - 1)
    tokens, width = slice(*x["q_starts"][s : s + 2]), -(-int(x["kv_lens"][s]) // x["k_pages"].shape[1])
    alone = x | {"q": x["q"][tokens], "page_table": x["page_table"][s : s + 1, :width],
                 "kv_lens": x["kv_lens"][s : s + 1],
                 "q_starts": np.array([0, tokens.stop - tokens.start], np.int32)}  # fmt: skip
    draw.same_bits(run(*alone.values()), run(*x.values())[tokens], "a sequence alone")


@paged_attention.law
def a_query_of_a_chunk_alone(run, draw):
    """A query of a chunk has the bits that it has as the last one: a prompt in chunks is the prompt."""
    x = _drawn(draw, 1, keys=700)
    i = draw.extent(0, len(x["q"]) - 1)
    draw.same_bits(run(*_alone(x, i).values()), run(*x.values())[i : i + 1], "a query by itself")


@paged_attention.law
def a_query_of_a_chunk_alone_in_a_window(run, draw):
    """The same under a window, whose first key lies elsewhere in the tiles of a chunk."""
    x, window = _drawn(draw, 1, keys=700, least=300), (draw.extent(70, 250), 0)
    i = draw.extent(1, len(x["q"]) - 1)
    among = run(*x.values(), window=window)[i : i + 1]
    draw.same_bits(run(*_alone(x, i).values(), window=window), among, "a query by itself in a window")


@paged_attention.law
def keys_before_the_window_do_not_matter(run, draw):
    """Other keys and values before all windows of a sequence change no bit."""
    x, left = _drawn(draw, 1, keys=700), draw.extent(0, 30)
    size, first = x["k_pages"].shape[1], int(x["kv_lens"][0]) - len(x["q"]) - left
    at = np.arange(max(first, 0))
    page, slot = x["page_table"][0, at // size], at % size
    others = {n: x[n].copy() for n in ("k_pages", "v_pages")}
    for array in others.values():
        array[page, slot] = draw.normal(len(at), *array.shape[2:])
    windowed = {"window": (left, 0)}
    draw.same_bits(
        run(*(x | others).values(), **windowed), run(*x.values(), **windowed), "other keys before the window"
    )


@paged_attention.law
def slots_of_nobody_do_not_matter(run, draw):
    """NaN in slots that hold no key, and -1 in the table behind the last page, change no bit."""
    x = _drawn(draw)
    read, size = slots_read(x), x["k_pages"].shape[1]
    other = {n: np.where(read[..., None, None], x[n], np.array(np.nan, x[n].dtype)) for n in ("k_pages", "v_pages")}
    behind = np.arange(x["page_table"].shape[1]) * size >= x["kv_lens"][:, None]
    other["page_table"] = np.where(behind, -1, x["page_table"]).astype(np.int32)
    draw.same_bits(run(*(x | other).values()), run(*x.values()), "other slots and entries of nobody")


@paged_attention.law
def integer_types_do_not_matter(run, draw):
    """Tables, lengths and starts in int32 and in int64 give the same bits."""
    x = _drawn(draw)
    wide = {n: x[n].astype(np.int64) for n in ("page_table", "kv_lens", "q_starts")}
    draw.same_bits(run(*(x | wide).values()), run(*x.values()), "integers of the other type")


@paged_attention.law
def a_sink_of_minus_infinity_is_none(run, draw):
    """The same bits, o and lse, of few keys and of many."""
    for x in (_drawn(draw), _drawn(draw, 1, keys=1300, least=1100)):
        none = np.full(x["q"].shape[1], -np.inf, x["q"].dtype)
        found = [run(*x.values(), sinks, return_lse=True) for sinks in (none, None)]
        for name, a, b in zip(("o", "lse"), *found, strict=True):
            draw.same_bits(a, b, f"{name} with sinks of -inf")


@paged_attention.law
def sinks_of_other_heads_and_sequences(run, draw):
    """A head's bits do not depend on the sinks of other heads, and a query's not on others beside its sink."""
    x = _drawn(draw, 1, keys=700)
    sinks, i = draw.normal(x["q"].shape[1]), draw.extent(0, len(x["q"]) - 1)
    other = sinks.copy()
    other[0] += 1
    among = run(*x.values(), sinks)
    draw.same_bits(run(*x.values(), other)[:, 1:], among[:, 1:], "heads from 1 on after sink 0")
    draw.same_bits(run(*_alone(x, i).values(), sinks), among[i : i + 1], "a query by itself with the sinks")


@paged_attention.law
def slopes_in_any_company(run, draw):
    """Slopes of 0 change no bit, o and lse; a head's bits do not depend on other slopes, and a query's not on others
    beside its slope."""
    x = _drawn(draw, 1)
    heads, i = x["q"].shape[1], draw.extent(0, len(x["q"]) - 1)
    of_heads = usual_slopes(heads).astype(np.float64 if draw.dtype == "float64" else np.float32)
    nothing, other = (None, None, None), of_heads.copy()
    found = [run(*x.values(), *nothing, slopes, return_lse=True) for slopes in (of_heads * 0, None)]
    for name, a, b in zip(("o", "lse"), *found, strict=True):
        draw.same_bits(a, b, f"{name} with slopes of 0")
    other[0] *= 2
    among = run(*x.values(), *nothing, of_heads)
    draw.same_bits(run(*x.values(), *nothing, other)[:, 1:], among[:, 1:], "heads from 1 on after the slope of 0")
    draw.same_bits(run(*_alone(x, i).values(), *nothing, of_heads), among[i : i + 1], "a query by itself with slopes")


@paged_attention.law
def pages_of_8_bits_are_their_numbers(run, draw):
    """Keys and values of 8 bits give the bits that they give in q's dtype, with scales too."""
    x = _drawn(draw)
    heads = x["k_pages"].shape[2]
    scales = [np.exp2(draw.rng.uniform(-3, 2, heads)).astype(_of_statistics(draw)) for _ in range(2)]
    for name in NARROW:
        narrow = {n: x[n].astype(numpy_dtype(name)) for n in ("k_pages", "v_pages")}
        wide = {n: a.astype(x[n].dtype) for n, a in narrow.items()}
        found = [run(*(x | pages).values(), None, *scales) for pages in (narrow, wide)]
        draw.same_bits(*found, f"pages of {name}")


def _of_statistics(draw):
    return np.float64 if draw.dtype == "float64" else np.float32


@paged_attention.law
def scales_of_1_are_none(run, draw):
    """To the bit. Scales of a head change no bit of other heads, and a v_scale of 2 doubles o."""
    x = _drawn(draw)
    ones = np.ones(x["k_pages"].shape[2], _of_statistics(draw))
    plain = run(*x.values())
    draw.same_bits(run(*x.values(), None, ones, ones), plain, "scales of 1")
    draw.same_bits(run(*x.values(), None, None, 2 * ones), plain * plain.dtype.type(2), "values that are doubled")
    other = ones.copy()
    other[0] = 3
    group = x["q"].shape[1] // len(ones)
    draw.same_bits(run(*x.values(), None, other, other)[:, group:], plain[:, group:], "scales of the first head")


DIMS = {"tokens": 4, "kv_heads": 2, "group": 2, "d": 4, "dv": 3, "pages": 5, "page_size": 2, "sequences": 2,
        "pages_each": 2}  # fmt: skip
paged_attention.sample("chunks", dims=DIMS)
paged_attention.sample("window_and_lse", dims=DIMS, options={"window": (1, 0), "return_lse": True})
paged_attention.sample("sinks", dims=DIMS, options={"return_lse": True}, given=("sinks",), wider=("sinks",))
paged_attention.sample("slopes", dims=DIMS, options={"return_lse": True}, given=("alibi_slopes",))
paged_attention.sample("scales", dims=DIMS, options={"return_lse": True}, given=("k_scale", "v_scale"))
paged_attention.sample("softcap", dims=DIMS, options={"softcap": 2.0, "scale": 0.4, "is_causal": False})
