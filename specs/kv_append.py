"""Keys and values of new tokens written into a cache of pages, on the way turned by positions and rounded to 8 bits.

    k_out[slots[t] // page_size, slots[t] % page_size] = rope(k[t]) / k_scale        v_out likewise, of v[t] / v_scale

for each token t whose slot is not negative; every other slot is what it was. Without tables and pages of 8 bits nothing
is computed, and nothing rounds. The layout is that of Kwon et al. 2023, "Efficient Memory Management for Large Language
Model Serving with PagedAttention", and a slot is what ``slot_mapping`` has in vLLM's reshape_and_cache_flash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Float32, Int

from portakern.spec import Rule, spec
from portakern.spec.dtypes import DTYPES, numpy_dtype
from portakern.spec.tolerance import format_of, magnitude, units
from portakern.specs.paged_attention import NARROW, positive_scales
from portakern.specs.quantize import LEAST_SCALE
from portakern.specs.rope import PAIRS_FIT, RotationErrors, pairs_of, rope

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")

ROWS = {"k": "k_pages", "v": "v_pages"}
"""The rows of tokens -> the cache in which they are written."""


class KvAppendOut(NamedTuple):
    k_out: Float[A, "pages page_size kv_heads d"]
    v_out: Float[A, "pages page_size kv_heads dv"]


def slots_are_places(call: Call) -> bool:
    """Whether the slots that are not negative are in the cache, each of one token."""
    slots = call.arrays["slots"]
    used = slots[slots >= 0]
    return bool((used < call.dims["pages"] * call.dims["page_size"]).all() and len(np.unique(used)) == len(used))


def scales_have_inverses(call: Call) -> bool:
    """Whether float32 holds the inverse of each scale."""
    given = [s for s in (call.arrays["k_scale"], call.arrays["v_scale"]) if s is not None]
    return all(bool(((s >= LEAST_SCALE) & (s <= 1 / LEAST_SCALE)).all()) for s in given)


RULES = (
    Rule(
        slots_are_places,
        "slots must be below pages * page_size, and no two that are not negative the same; -1 skips a token",
        values=True,
    ),
    Rule(
        lambda call: (call.arrays["cos"] is None) == (call.arrays["sin"] is None),
        "cos and sin are the two tables of one turn: pass both, or neither for keys that are turned already",
    ),
    Rule(
        lambda call: call.arrays["cos"] is not None or not call.options["interleaved"],
        "interleaved says which numbers of a head cos and sin turn, and they are not given: pass both, or leave it out",
    ),
    PAIRS_FIT,
    Rule(scales_have_inverses, "k_scale and v_scale must be from 2^-126 to 2^126 everywhere", values=True),
)


def numbers_written(call: Call) -> float:
    """Numbers of the results that the call writes: the rows of its tokens, and the whole cache where that is new."""
    return float(sum(_written(call).values()))


def _written(call: Call) -> dict[str, int]:
    """Those of each cache."""
    dims = call.dims
    each = {"k_pages": dims["kv_heads"] * dims["d"], "v_pages": dims["kv_heads"] * dims["dv"]}
    rows = {name: 0 if name in call.over else dims["pages"] * dims["page_size"] for name in each}
    return {name: (dims["tokens"] + rows[name]) * width for name, width in each.items()}


def operations(call: Call) -> float:
    """Six of each pair that is turned. Each number that is written counts as one, though none is made with it."""
    return numbers_written(call) + 6.0 * call.dims["tokens"] * call.dims["kv_heads"] * call.dims["pairs"]


def bytes_moved(call: Call) -> float:
    """Each number that is written is read before, and each slot, and each number of a table."""
    dims = call.dims
    size = {n: numpy_dtype(call.dtype_of(n)).itemsize for n, a in call.arrays.items() if a is not None}
    found = dims["tokens"] * (size["slots"] + dims["pairs"] * (size.get("cos", 0) + size.get("sin", 0)))
    for new, pages in ROWS.items():
        of_tokens = dims["tokens"] * dims["kv_heads"] * dims["d" if new == "k" else "dv"]
        found += 2 * _written(call)[pages] * size[pages] + of_tokens * (size[new] - size[pages])
    return float(found)


@spec(
    tiling={},
    require=RULES,
    or_float32=("cos", "sin"),
    or_dtypes=dict.fromkeys(ROWS.values(), NARROW),
    codes=("k_out", "v_out"),
    positive=("d", "dv", "pairs"),
    aliases={"k_out": "k_pages", "v_out": "v_pages"},
    apart=("kv_heads",),
    budget="flops",
    typical={"tokens": 64, "kv_heads": 8, "d": 128, "dv": 128, "pages": 4096, "page_size": 16, "pairs": 64},
    flops=operations,
    bytes_moved=bytes_moved,
)
def kv_append(
    k: Float[A, "tokens kv_heads d"],
    v: Float[A, "tokens kv_heads dv"],
    k_pages: Float[A, "pages page_size kv_heads d"],
    v_pages: Float[A, "pages page_size kv_heads dv"],
    slots: Int[A, "tokens"],
    cos: Float[A, "tokens pairs"] | None = None,
    sin: Float[A, "tokens pairs"] | None = None,
    k_scale: Float32[A, "kv_heads"] | None = None,
    v_scale: Float32[A, "kv_heads"] | None = None,
    *,
    interleaved: bool = False,
) -> KvAppendOut:
    """The keys and values of new tokens, written into the pages of a cache.

    With ``overwrite=("k_pages", "v_pages")`` the cache itself is written to, and of it the slots of the tokens alone:
    what a server calls. Without, the results are new arrays: the cache is copied.

    With cos and sin keys are turned on their way, as rope turns them, and rounded once, to the dtype of their pages.

    Args:
      k: (tokens, kv_heads, d); v: (tokens, kv_heads, dv), of any strides, such as parts of one product.
      k_pages: (pages, page_size, kv_heads, d); v_pages: (pages, page_size, kv_heads, dv). Each has k's dtype, or
        float8_e4m3fn or float8_e5m2.
      slots: (tokens), where each token goes: its page * page_size + its place in the page, as in vLLM's slot_mapping.
        A token with a negative slot is skipped, as padding is. No slot may be two tokens', or beyond the cache;
        kernels do not read slots to find out: a token beyond the cache is skipped then, and of two tokens with one
        slot either may be there.
      cos, sin: (tokens, P), of k's dtype or float32: the tables of rope, whose row is that of the token and so says its
        position. P is d / 2 or less, one column a pair. None: keys are written as they are.
      k_scale, v_scale: (kv_heads,), float32, from 2^-126 to 2^126: keys, or values, of a head are divided by its scale,
        and what is in the pages is multiplied by it where paged_attention reads them. None is 1, to the bit.
      interleaved: which numbers of a head are a pair, as in rope.

    Returns:
      k_out, v_out: the cache, of its own dtype, with the rows of the tokens. Of pages of k's dtype they are the bits of
      k and v, but for pairs that are turned and heads that are scaled. Pages of 8 bits hold what is nearest to x /
      scale, ties to even, and the largest number of that sign where x / scale is beyond it (448 of float8_e4m3fn, 57344
      of float8_e5m2), as of an infinity; NaN is NaN. All other slots have the bits that they had, NaN and infinities
      too.
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


kv_append.values("k_scale")(positive_scales)
kv_append.values("v_scale")(positive_scales)


# -------------------------------------------------------------------------------------------------------------- bounds
def as_rope(call: Call) -> Call:
    """The call of rope that turns the keys of a call in float64, of one sample whose tokens are the call's."""
    arrays = {"x": call.arrays["k"][None], **{n: call.arrays[n][None] for n in ("cos", "sin")}}
    dims = {n: call.dims[n] for n in ("d", "pairs")}
    return call.replace(spec=rope, arrays=arrays, dims={"batch": 1, "seq": call.dims["tokens"], "heads":
                        call.dims["kv_heads"], **dims}, given={"x": call.dtype_of("k")})  # fmt: skip


def turned(call: Call) -> np.ndarray:
    """Keys in float64 as they are written, before they are divided by a scale."""
    k, cos = call.arrays["k"], call.arrays["cos"]
    if cos is None:
        return np.asarray(k)
    cos, sin, y = cos[:, None], call.arrays["sin"][:, None], np.array(k)
    (a, b), (y_a, y_b) = (pairs_of(x, call.dims["pairs"], call.options["interleaved"]) for x in (k, y))
    y_a[...], y_b[...] = a * cos - b * sin, b * cos + a * sin
    return y


def error_of_turn(call: Call, y: np.ndarray) -> np.ndarray:
    """The bound of the error of ``turned`` keys y before they are stored."""
    if call.arrays["cos"] is None:
        return np.zeros(y.shape)
    error = RotationErrors.of(call.arrays["k"][None], y[None], as_rope(call), units(call)).error[0]
    faint = magnitude(y) < max(units(call).tau, format_of(call.dtype).eta)
    passing = np.arange(y.shape[-1]) >= 2 * call.dims["pairs"]
    return np.where(passing & faint, magnitude(y), error)


def error_of_store(call: Call, name: str, x: np.ndarray, error: np.ndarray) -> np.ndarray:
    """The bound of numbers of rows ``name`` as they are stored, before they are rounded, from that of x."""
    unit, scale, narrow = units(call), call.arrays[f"{name}_scale"], call.dtype_of(ROWS[name]) in NARROW
    if scale is None and not narrow:
        return error
    if scale is None:
        error = error + np.where(magnitude(x) < unit.tau, magnitude(x), 0.0)
    else:
        s = scale[:, None]
        error = error / s * (1 + 5 * unit.u) + 5 * unit.u * magnitude(x / s) + unit.tau * (1 / s + 1)
        x = x / s
    most = DTYPES[call.dtype_of(ROWS[name])].largest if narrow else np.inf
    right, low, high = (np.clip(v, -most, most) for v in (x, x - error, x + error))
    found = np.maximum(high - right, right - low)
    return np.where(np.isposinf(error), np.inf, np.where(np.isfinite(x), found, 0.0))


@kv_append.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bound of a number before it is rounded to the dtype of its pages:

        E of y      E / s (1 + 5u) + 5u |y / s| + tau (1 / s + 1)

    without a scale, and with a scale s. E is rope's before it stores y: 0 without tables, of values, and of what passes
    through but for a number that may flush. The division is 2 ulp, or the inverse is and the product rounds once more:
    5u. y may be read as 0 where it is subnormal, and y / s may flush. Clipping to 8 bits moves no value further from
    another: beyond the largest number a value errs by nothing.

    E being far below a spacing of 16 and of 8 bits, one number is right there but beside ties. Slots of no token, and
    rows that are copied, err by nothing: every number is one of the arguments'.

    Nothing is promised where rope promises nothing.
    """
    slots, size = call.arrays["slots"], call.dims["page_size"]
    used = slots >= 0
    found = []
    for name, out in zip(ROWS, ref, strict=True):
        bound_of = np.zeros(out.shape)
        with np.errstate(all="ignore"):
            x = turned(call) if name == "k" else np.asarray(call.arrays[name])
            error = error_of_turn(call, x) if name == "k" else np.zeros(x.shape)
            bound_of[slots[used] // size, slots[used] % size] = error_of_store(call, name, x, error)[used]
        found.append(bound_of)
    return tuple(found)


@kv_append.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """0: a number is right or wrong, and not measured."""
    return tuple(np.zeros(y.shape) for y in ref)


# --------------------------------------------------------------------------------------------------------------- edges
SMALL = {"tokens": (2, 12), "kv_heads": (1, 3), "d": (2, 20), "dv": (1, 20), "pages": (2, 6), "page_size": (1, 9),
         "pairs": (1, 10)}  # fmt: skip
SCALES = {"given": ("k_scale", "v_scale")}
TABLES = {"given": ("cos", "sin")}


@kv_append.edge(dims=SMALL)
def special_numbers(arrays, rng, options):
    """NaN and infinities of tokens are written as they are, or as the largest number of 8 bits, and those of the cache
    stay."""
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


@kv_append.edge(dims={**SMALL, "kv_heads": (1, 2), "d": (1040, 1100), "pairs": (513, 520)}, **TABLES)
def long_rows_that_are_turned(arrays, rng, options):
    """More pairs of a head than one tile has, and numbers beyond them in some rows."""


@kv_append.edge(dims={**SMALL, "d": (9, 20), "pairs": (1, 4)}, **TABLES)
def numbers_beyond_the_pairs(arrays, rng, options):
    """They pass through, infinities and NaN too, and reach no pair."""
    beyond = arrays["k"][..., 2 * arrays["cos"].shape[-1] :]
    beyond[rng.random(beyond.shape) < 0.5] = rng.choice([np.inf, -np.inf, np.nan])


@kv_append.edge(dims={**SMALL, "d": (4, 20)}, **TABLES)
def special_tables(arrays, rng, options):
    """An infinity or NaN in a row of a table reaches its pair in every head of that token, and nothing else."""
    table = arrays[rng.choice(["cos", "sin"])]
    table[rng.random(table.shape) < 0.2] = rng.choice([np.inf, -np.inf, np.nan])


@kv_append.edge(dims={**SMALL, "d": (4, 20)}, **TABLES)
def cancelling(arrays, rng, options):
    """The products of a turn all but cancel: the error is a share of them, and not of what is left."""
    for name in ("cos", "sin"):
        arrays[name][...] = np.sqrt(0.5)
    a, b = pairs_of(arrays["k"], arrays["cos"].shape[-1], options["interleaved"])
    b[...] = a * (1 + 2.0**-9)


@kv_append.edge(dims={**SMALL, "tokens": (6, 12)}, **TABLES)
def skipped_tokens_between_positions(arrays, rng, options):
    """Rows of tables are those of tokens, of which every other one is skipped; a row that is skipped holds NaN."""
    arrays["slots"][1::2] = -1
    for name in ("k", "cos", "sin"):
        arrays[name][1::2] = np.nan


@kv_append.edge(dims={**SMALL, "d": (8, 20)}, **SCALES)
def beyond_the_codes(arrays, rng, options):
    """Numbers too large for their scale take the last code of their sign."""
    for name in ROWS:
        arrays[name][...] *= 2.0 ** rng.integers(4, 14, arrays[name].shape)
        arrays[f"{name}_scale"][...] = 2.0**-6


@kv_append.edge(dims={**SMALL, "d": (8, 20)}, **SCALES)
def subnormal_codes(arrays, rng, options):
    """Numbers so small beside their scale that codes are subnormal, or 0."""
    for name in ROWS:
        arrays[name][...] *= 2.0 ** -rng.integers(4, 20, arrays[name].shape)
        arrays[f"{name}_scale"][...] = 1.0


@kv_append.edge(dims={**SMALL, "d": (8, 20), "dv": (8, 20)}, absent=("cos", "sin"), **SCALES)
def ties(arrays, rng, options):
    """Numbers half way between two codes, of which the even one is right, of either dtype of 8 bits."""
    for name in ROWS:
        every = np.concatenate(
            [np.arange(256, dtype=np.uint8).view(DTYPES[n].numpy).astype(np.float64) for n in NARROW]
        )
        codes = np.unique(every[np.abs(every) <= DTYPES[NARROW[0]].largest])
        arrays[name][...] = rng.choice((codes[1:] + codes[:-1]) / 2, arrays[name].shape)
        arrays[f"{name}_scale"][...] = 1.0


@kv_append.edge(dims={**SMALL, "kv_heads": (2, 9), "d": (4, 20)}, **SCALES)
def scales_far_apart(arrays, rng, options):
    """The scales of a head are not those of the next, nor its keys' its values'."""
    heads = np.arange(len(arrays["k_scale"]))
    arrays["k_scale"][...], arrays["v_scale"][...] = 0.25 * 2.0**heads, 4.0 / 3.0**heads


# ---------------------------------------------------------------------------------------------------------------- laws
def drawn_call(draw: Any) -> tuple[np.ndarray, ...]:
    """A call's arrays without tables and scales, some of its tokens skipped."""
    tokens, heads, d, dv = draw.extent(1, 12), draw.extent(1, 3), draw.extent(2, 40), draw.extent(1, 40)
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


def of_statistics(draw: Any) -> Any:
    return np.float64 if draw.dtype == "float64" else np.float32


def narrowed(arrays: Any, name: str) -> list[np.ndarray]:
    return [x.astype(numpy_dtype(name)) for x in arrays]


def of_some_dtype(draw: Any, pages: list[np.ndarray]) -> list[np.ndarray]:
    """Pages as wide as keys, or of either dtype of 8 bits."""
    kind = draw.extent(0, 2)
    return narrowed(pages, NARROW[kind]) if kind < 2 else pages


@kv_append.law
def tables_turn_keys_as_rope_does(run, draw):
    """Keys that rope has turned give what tables give, to the bit where nothing rounds: wide pages, and 8 bits."""
    k, v, *pages, slots = drawn_call(draw)
    tokens, _, d = k.shape
    pairs, interleaved = draw.extent(1, d // 2), bool(draw.extent(0, 1))
    k, cos, sin = draw.integers(-2, 2, *k.shape), *(draw.integers(-2, 2, tokens, pairs) for _ in range(2))
    (a, b), rotated = pairs_of(k, pairs, interleaved), np.array(k)
    y_a, y_b = pairs_of(rotated, pairs, interleaved)
    y_a[...], y_b[...] = a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]
    pages = of_some_dtype(draw, pages)
    wanted, _ = run(rotated, v, *pages, slots)
    found, _ = run(k, v, *pages, slots, cos, sin, interleaved=interleaved)
    draw.same_bits(found + 0, wanted + 0, "keys that tables turn")  # a zero of either sign


@kv_append.law
def tokens_with_tables_are_independent(run, draw):
    """A token has the bits among others that it has alone, with its rows of the tables; so has a head of 8 bits."""
    k, v, *pages, slots = drawn_call(draw)
    cos, sin = (draw.normal(len(k), k.shape[-1] // 2) for _ in range(2))
    pages = of_some_dtype(draw, pages)
    order = draw.rng.permutation(len(slots))
    moved = run(k[order], v[order], *pages, slots[order], cos[order], sin[order])
    whole = run(k, v, *pages, slots, cos, sin)
    same(draw, moved, whole, "of tokens in another order")
    h = slice(draw.extent(0, k.shape[1] - 1), None)
    alone = run(k[:, h], v[:, h], *(x[:, :, h] for x in pages), slots, cos, sin)
    same(draw, alone, [x[:, :, h] for x in whole], "of some heads")


@kv_append.law
def powers_of_two_scale_exactly(run, draw):
    """2^e x by a scale of 2^e is x without one, and so is x by a scale of 1, to the bit."""
    k, v, *pages, slots = drawn_call(draw)
    two, pages = 2.0 ** max(draw.extent(-3, 6), 0), of_some_dtype(draw, pages)
    scale = np.full(k.shape[1], two, of_statistics(draw))
    scaled = run(*(x * x.dtype.type(two) for x in (k, v)), *pages, slots, None, None, scale, scale)
    same(draw, scaled, run(k, v, *pages, slots), f"in {pages[0].dtype}, scaled by {two:g}")


@kv_append.law
def numbers_of_8_bits_come_back(run, draw):
    """What pages of 8 bits hold, times a power of two, is written as the same codes by a scale of it, and slots of
    nobody keep theirs."""
    k, v, *pages, slots = drawn_call(draw)
    two, used, size = 2.0 ** draw.extent(0, 3), slots >= 0, pages[0].shape[1]
    scale, name = np.full(k.shape[1], two, of_statistics(draw)), NARROW[draw.extent(0, 1)]
    pages, rows = narrowed(pages, name), narrowed((k, v), name)
    wide = (x.astype(k.dtype) * k.dtype.type(two) for x in rows)
    found = run(*wide, *pages, slots, None, None, scale, scale)
    for out, new, old in zip(found, rows, pages, strict=True):
        wanted = old.copy()
        wanted[slots[used] // size, slots[used] % size] = new[used]
        draw.same_bits(out, wanted, f"of {name}, dequantised and quantised again")


DIMS = {"tokens": 3, "kv_heads": 2, "d": 4, "dv": 3, "pages": 4, "page_size": 2, "pairs": 2}
kv_append.sample("decoding", dims=DIMS)
kv_append.sample("one_place_a_page", dims={**DIMS, "tokens": 2, "kv_heads": 1, "d": 5, "pages": 5, "page_size": 1})
kv_append.sample("turned", dims=DIMS, given=("cos", "sin"), wider=("cos", "sin"))
kv_append.sample("neighbours", dims={**DIMS, "d": 6}, given=("cos", "sin"), options={"interleaved": True})
