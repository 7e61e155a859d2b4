"""Attention of sequences that are packed one behind the other in one array, and its gradients.

Each sequence is a call of ``attention`` by itself: its bounds, its typical errors and its masks are those of that call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import inf, log
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Float32, Int

from portakern.spec import Rule, Tile, spec
from portakern.specs._gradients import stored_bounds, stored_spreads
from portakern.specs.attention import allowed, attention, attention_vjp, options_for
from portakern.specs.attention.bounds import error_of_terms
from portakern.specs.attention.contract import POSITIVE, Scale, Softcap, Window
from portakern.specs.attention.pairs import KeyHead, SinkPairs
from portakern.specs.attention.planting import slopes, usual_slopes
from portakern.specs.attention.scores import allowed_pairs, units_of
from portakern.specs.attention.statistics import sink_terms, spread_of_terms

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")

TILING = {"block_q": Tile(16, 1024, of="tokens"), "block_kv": Tile(16, 1024, of="kv_tokens")}
STARTS = ("q_starts", "kv_starts")


def _rise(name: str, tokens: str) -> Rule:
    def holds(call: Call) -> bool:
        starts = call.arrays[name]
        return bool(starts[0] >= 0 and starts[-1] <= call.dims[tokens] and (np.diff(starts) >= 0).all())

    return Rule(
        holds,
        f"{name} are the starts of the sequences and the end of the last one: numbers from 0 to {tokens}, none smaller "
        "than the one before; pass the cumulative sums of the lengths, from 0 on",
        values=True,
    )


STARTS_RISE = [_rise("q_starts", "tokens"), _rise("kv_starts", "kv_tokens")]

KEYS_BESIDE_A_SINK = Rule(
    lambda call: call.arrays["sinks"] is None or call.dims["kv_tokens"] > 0,
    "sinks are given and k has no keys (kv_tokens is 0): o would be 0 and lse the sinks; return these, or pass a key",
)


class VarlenAttentionOut(NamedTuple):
    o: Float[A, "tokens kv_heads*group dv"]
    lse: Float32[A, "kv_heads*group tokens"]


class VarlenAttentionSaved(NamedTuple):
    """What rounding took from lse, as in ``attention``."""

    lse_low: Float32[A, "kv_heads*group tokens"]


# ------------------------------------------------------------------------------------------------------- the sequences
class PackedSequence(NamedTuple):
    """One sequence of a call: where its queries and its keys lie."""

    queries: slice
    keys: slice

    def cut(self, array: Any, dims: Sequence[Any]) -> tuple[slice, ...]:
        """Where an argument or output of the packed call has this sequence."""
        of = {("tokens",): self.queries, ("kv_tokens",): self.keys}
        return tuple(of.get(d.factors, slice(None)) for d in dims[: np.ndim(array)])

    def alone(self, call: Call) -> Call:
        """The call of ``attention``, or of its gradients, that this sequence is: a batch of one. One without keys has a
        key of zeros of another segment, which no query sees."""
        arrays, off = dict(call.arrays), {}
        for a in call.spec.arrays:
            if arrays[a.name] is not None and a.name not in (*STARTS, "sinks", "alibi_slopes"):
                at = self.cut(arrays[a.name], a.dims)
                arrays[a.name] = arrays[a.name][at][None]
                if a.name in call.off:
                    off[a.name] = call.off[a.name][at][None]
        q_len, kv_len = (x.stop - x.start for x in self)
        one = as_attention(call.replace(arrays=arrays, off=off), q_len, kv_len)
        return one if kv_len else beside_a_hidden_key(one)


def as_attention(call: Call, q_len: int | None = None, kv_len: int | None = None) -> Call:
    """The call of ``attention``, or of its gradients, with so many queries and keys, None for all; its arrays have no
    batch axis. What is written for attention reads dimensions and options of it, such as the unit of scores."""
    dims = {n: call.dims[n] for n in ("kv_heads", "group", "d", "dv")}
    dims["batch"], dims["q_len"] = 1, call.dims["tokens"] if q_len is None else q_len
    dims["kv_len"] = call.dims["kv_tokens"] if kv_len is None else kv_len
    to = attention_vjp if call.spec.is_vjp else attention
    arrays = {a.name: call.arrays.get(a.name) for a in to.arrays}
    return call.replace(spec=to, arrays=arrays, dims=dims, options=options_for(to, call), over=())


def beside_a_hidden_key(one: Call) -> Call:
    """A call of ``attention``, or of its gradients, on a batch of one without keys, with one key that no query sees."""
    (_, q_len, _, _), kv_heads = one.arrays["q"].shape, one.dims["kv_heads"]
    keys = {n: np.zeros((1, 1, kv_heads, one.dims[d])) for n, d in (("k", "d"), ("v", "dv"))}
    ids = {"q_segment_ids": np.zeros((1, q_len), np.int32), "kv_segment_ids": np.ones((1, 1), np.int32)}
    return one.replace(arrays={**one.arrays, **keys, **ids}, dims={**one.dims, "kv_len": 1})


def sequences_of(call: Call) -> Iterator[PackedSequence]:
    """The sequences of a call in NumPy that have a query, and a key or sinks. What others have of results is 0, and
    -inf in lse."""
    ends = [[int(x) for x in call.arrays[name]] for name in STARTS]
    sinks = call.arrays["sinks"] is not None
    for (q_start, q_end), (kv_start, kv_end) in zip(*(itertools.pairwise(starts) for starts in ends), strict=True):
        if q_start < q_end and (kv_start < kv_end or sinks):
            yield PackedSequence(slice(q_start, q_end), slice(kv_start, kv_end))


def each_sequence(call: Call, of_one: Any, ref: Any, otherwise: Sequence[float]) -> tuple[Any, ...]:
    """An array for each output that is wanted, of what ``of_one(call of attention, its reference)`` gives for each
    sequence, and their sum of an output without tokens. ``ref``: the packed call's reference, or None; ``otherwise``:
    what stands where no sequence has a query and a key or a sink."""
    outputs = call.spec.outputs
    found = [
        np.full(call.outputs[o.name][0], value) if o.name in call.wants else None
        for o, value in zip(outputs, otherwise, strict=True)
    ]
    for one in sequences_of(call):
        alone = one.alone(call)
        at = [None if x is None else one.cut(x, o.dims) for o, x in zip(outputs, found, strict=True)]
        own = None
        if ref is not None:  # attention has a gradient more, of a bias
            given = {o.name: None if x is None else x[i][None] for o, i, x in zip(outputs, at, ref, strict=True)}
            own = [given.get(o.name) for o in alone.spec.outputs]
        parts = dict(zip((o.name for o in alone.spec.outputs), of_one(alone, own), strict=True))
        for o, whole, i in zip(outputs, found, at, strict=True):
            if whole is not None and o.name == "d_sinks":
                whole += parts[o.name]
            elif whole is not None:  # a sequence without keys has no gradient of the key that none sees
                whole[i] = parts[o.name][0][: whole[i].shape[0]]
    return tuple(found)


def packed_pairs(call: Call) -> float:
    """Pairs of one head that masks allow, of all sequences; where their starts are not known, of one sequence."""
    q_starts, kv_starts = call.integers("q_starts"), call.integers("kv_starts")
    lens = [(call.dims["tokens"], call.dims["kv_tokens"])]
    if q_starts is not None and kv_starts is not None:
        lens = list(zip(np.diff(q_starts).tolist(), np.diff(kv_starts).tolist(), strict=True))
    return sum(allowed_pairs(as_attention(call, q_len, kv_len)) for q_len, kv_len in lens)


def work(call: Call, depth: int) -> float:
    """Floating-point operations: at every pair that is seen, products and sums along ``depth`` elements of heads."""
    return 2.0 * call.dims["kv_heads"] * call.dims["group"] * packed_pairs(call) * depth


# ----------------------------------------------------------------------------------------------------------------- spec
NOTHING = {"o": 0.0, "lse": -inf, "lse_low": 0.0}


@spec(
    tiling=TILING,
    returns={"lse": "return_lse"},
    saved=VarlenAttentionSaved,
    positive=POSITIVE,
    empty={"kv_tokens": NOTHING, "sequences": NOTHING},
    or_float32=("sinks",),
    require=[*STARTS_RISE, KEYS_BESIDE_A_SINK],
    apart=("sequences", "kv_heads"),
    vjp="varlen_attention_vjp",
    autocast="lower",
    budget="flops",
    typical={
        "sequences": 8,
        "kv_heads": 4,
        "group": 4,
        "tokens": 4096,
        "kv_tokens": 4096,
        "d": 128,
        "dv": 128,
        "is_causal": True,
    },
    flops=lambda call: work(call, call.dims["d"] + call.dims["dv"]),
)
def varlen_attention(
    q: Float[A, "tokens kv_heads*group d"],
    k: Float[A, "kv_tokens kv_heads d"],
    v: Float[A, "kv_tokens kv_heads dv"],
    q_starts: Int[A, "sequences+1"],
    kv_starts: Int[A, "sequences+1"],
    sinks: Float[A, "kv_heads*group"] | None = None,
    alibi_slopes: Float32[A, "kv_heads*group"] | None = None,
    *,
    is_causal: bool = False,
    window: Window | None = None,
    scale: Scale | None = None,
    softcap: Softcap | None = None,
    precision: Literal["ieee", "tf32"] = "ieee",
    return_lse: bool = False,
) -> VarlenAttentionOut:
    """o = softmax(softcap(scale q k^T), masked) v for each sequence of a packed batch by itself.

    Sequence s has the queries from q_starts[s] up to q_starts[s + 1] and the keys from kv_starts[s] up to
    kv_starts[s + 1]. Its rows of the results are those of ``attention`` on these alone, to the bit, whatever lies
    beside them. The algorithm is FlashAttention-2's forward pass (Dao 2023, algorithm 1).

    Args:
      q: (tokens, kv_heads*group, d). Query head h reads key head h // group.
      k: (kv_tokens, kv_heads, d); v: (kv_tokens, kv_heads, dv).
      q_starts, kv_starts: (sequences + 1,): cumulative lengths, which rise and may repeat, within 0 and tokens, and 0
        and kv_tokens.
      sinks: (kv_heads*group,): a logit of each query head in its softmax's denominator, as in attention; q's dtype or
        float32. -inf is none, to the bit.
      alibi_slopes: (kv_heads*group,), float32: of each query head, what a score falls by for each key between its key
        and the query's place, as in attention; query i of a sequence stands at key i + kv_len - q_len of its own.
      is_causal: query i of a sequence sees its keys up to i + kv_len - q_len, of that sequence's lengths (aligned at
        the bottom right: its last query sees all its keys).
      window: (left, right): query i sees keys from i + kv_len - q_len - left to i + kv_len - q_len + right; None on a
        side is unbounded.
      scale, softcap, precision, return_lse: as in attention.

    Returns:
      o: (tokens, kv_heads*group, dv), q's dtype; with return_lse also lse: (kv_heads*group, tokens), float32, natural
      log. A row that may see no key is zeros, its lse the sink, or -inf without one: a query of a sequence without
      keys, and a query that the masks hide every key from (with more queries than keys the first ones). A token of no
      sequence, which lies before the first start or from the last one on, is zeros too, and has no sink: its lse is
      -inf. What tokens of no sequence hold reaches nothing, and NaN and infinities stay in their sequence.
    """
    raise NotImplementedError


SMALL = {"tokens": 7, "kv_heads": 2, "group": 2, "d": 4, "kv_tokens": 9, "dv": 3, "sequences": 2}
varlen_attention.sample("packed", dims=SMALL)
varlen_attention.sample(
    "every_mask", dims=SMALL, options={"is_causal": True, "window": (2, None), "return_lse": True, "softcap": 2.0}
)


varlen_attention.sample("sinks", dims=SMALL, options={"return_lse": True}, given=("sinks",), wider=("sinks",))
varlen_attention.sample("slopes", dims=SMALL, options={"is_causal": True, "return_lse": True}, given=("alibi_slopes",))


@varlen_attention.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """``attention``'s of each sequence; of tokens of no sequence nothing rounds."""
    return each_sequence(call, attention.bound, ref, (0.0, 0.0, 0.0))


@varlen_attention.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """``attention``'s of each sequence; nothing is said of other rows, which are exact."""
    return each_sequence(call, attention.spread, ref, (inf, inf, inf))


def with_keys(call: Call, sequences: np.ndarray) -> np.ndarray:
    """These sequences, and of a call with sinks one that has keys."""
    lens = np.diff(call.arrays["kv_starts"])
    if call.arrays["sinks"] is None or lens[sequences].any() or not lens.any():
        return sequences
    return np.union1d(sequences, np.where(lens > 0, lens, lens.max() + 1).argmin())


@varlen_attention.rewrite
def tokens_come_along(call: Call, chosen: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The tokens of the chosen sequences, one sequence behind the other. Where none of them has a key, the shortest
    that has keys comes along: a call without keys refuses sinks."""
    if "sequences" not in chosen:
        return {}, {}
    numbers = with_keys(call, chosen["sequences"])
    rows, starts = {"sequences": numbers}, {}
    for name, tokens in (("q_starts", "tokens"), ("kv_starts", "kv_tokens")):
        of = call.arrays[name]
        lens = of[numbers + 1] - of[numbers]
        own = [np.arange(first, first + n) for first, n in zip(of[numbers], lens, strict=True)]
        rows[tokens] = np.concatenate([np.arange(0), *own])
        starts[name] = np.cumsum([0, *lens])
    return rows, starts


@varlen_attention.locate
def mask_region(call: Call, output: str, index: tuple[int, ...]) -> str:
    """The sequence of the element's token, and how many of its keys, or queries, the token meets."""
    if output == "d_sinks":
        return "a sum over the queries of all sequences"
    of_keys = output in ("d_k", "d_v")
    token = index[1] if output in ("lse", "lse_low") else index[0]
    for one in sequences_of(call):
        rows = one.keys if of_keys else one.queries
        if rows.start <= token < rows.stop:
            pairs = allowed(one.alone(call), 0)
            seen = np.flatnonzero(pairs[:, token - rows.start] if of_keys else pairs[token - rows.start])
            what, others = ("key", "queries") if of_keys else ("query", "keys")
            span = f", {seen[0]} to {seen[-1]}" if seen.size else ""
            return (
                f"{what} {token - rows.start} of the {rows.stop - rows.start} of its sequence meets {seen.size} of "
                f"{pairs.shape[0 if of_keys else 1]} {others}{span}"
            )
    return "a token whose sequence has no pair of a query and a key, or of no sequence"


# --------------------------------------------------------------------------------------------------------------- values
def drawn_lengths(rng: np.random.Generator, tokens: int, sequences: int) -> np.ndarray:
    """Lengths of which the sum is ``tokens``. In two calls of three up to three sequences have them all; they have as
    many each, or any number, or one has most."""
    some = sequences if rng.random() < 1 / 3 else int(rng.integers(1, min(sequences, 3) + 1))
    kind, shares = rng.integers(3), np.zeros(sequences)
    who = rng.permutation(sequences)[:some]
    shares[who] = 1.0 if kind == 0 else rng.exponential(1.0, some)
    if kind == 2:
        shares[who[0]] += 8.0 * some
    ends = np.round(np.cumsum(shares) / shares.sum() * tokens).astype(np.int64)
    return np.diff(ends, prepend=0)


def starts_from(rng: np.random.Generator, lens: np.ndarray) -> np.ndarray:
    """The starts of sequences that fill their array; in every fourth call some tokens at both ends belong to none."""
    starts = np.cumsum([0, *lens])
    if rng.random() < 0.25:
        first, last = np.sort(rng.integers(0, starts[-1] + 1, 2))
        keep = max(1, starts[-1] // 8)
        starts = np.clip(starts, min(first, keep), max(last, starts[-1] - keep))
    return starts


@varlen_attention.values("q_starts")
def drawn_q_starts(rng: np.random.Generator, shape: Any, dims: Any, options: Any) -> np.ndarray:
    if shape[0] == 1:
        return rng.integers(0, dims["tokens"] + 1, 1)
    return starts_from(rng, drawn_lengths(rng, dims["tokens"], shape[0] - 1))


@varlen_attention.values("kv_starts", "q_starts")
def drawn_kv_starts(rng: np.random.Generator, shape: Any, dims: Any, options: Any, q_starts: np.ndarray) -> np.ndarray:
    """In two calls of three a sequence has as many keys as queries, or more, as far as there are keys."""
    if shape[0] == 1:
        return rng.integers(0, dims["kv_tokens"] + 1, 1)
    if rng.random() < 1 / 3:
        return starts_from(rng, drawn_lengths(rng, dims["kv_tokens"], shape[0] - 1))
    lens, left = np.diff(q_starts), dims["kv_tokens"]
    more = drawn_lengths(rng, max(left - int(lens.sum()), 0), len(lens))
    wanted, given = np.where(lens > 0, lens + more, rng.integers(0, 2, len(lens)) * more), np.zeros_like(lens)
    for s in rng.permutation(len(lens)):
        given[s] = min(wanted[s], left)
        left -= given[s]
    return np.cumsum([0, *given])


def _equal_starts(tokens: int, number: int) -> np.ndarray:
    return np.round(np.linspace(0, tokens, number)).astype(np.int64)


varlen_attention.values("alibi_slopes")(slopes)


@varlen_attention.values("q_starts", measured=True)
def equal_q_starts(rng: np.random.Generator, shape: Any, dims: Any, options: Any) -> np.ndarray:
    return _equal_starts(dims["tokens"], shape[0])


@varlen_attention.values("kv_starts", measured=True)
def equal_kv_starts(rng: np.random.Generator, shape: Any, dims: Any, options: Any) -> np.ndarray:
    return _equal_starts(dims["kv_tokens"], shape[0])


# -------------------------------------------------------------------------------------------------------------- corners
def _among(rng: np.random.Generator, starts: np.ndarray) -> int:
    """One of the sequences, of those that have a token where there are any."""
    lens = np.diff(starts)
    return int(rng.choice(np.flatnonzero(lens) if lens.any() else len(lens)))


def _set_starts(starts: np.ndarray, lens: Sequence[int] | np.ndarray, tokens: int) -> None:
    """Sequences of these lengths in turn, the last ones empty where tokens run out."""
    own = np.resize(np.asarray(lens, np.int64), len(starts) - 1)
    starts[...] = np.minimum(np.cumsum([0, *own]), tokens)


def _leave_ends(arrays: dict[str, np.ndarray]) -> None:
    """The first and the last token of each array belong to no sequence."""
    for starts, name in (("q_starts", "q"), ("kv_starts", "k")):
        arrays[starts][...] = np.clip(arrays[starts], 1, arrays[name].shape[0] - 1)


SEVERAL = {"tokens": (20, 90), "kv_tokens": (20, 140), "sequences": (2, 6)}
WHOLE = {"is_causal": False, "window": None}


@varlen_attention.edge(dims=SEVERAL)
def sequences_without_keys(arrays, rng, options):
    """The queries of a sequence without keys are zeros with lse = -inf, or their sink; the sequences beside it are as
    they are."""
    s, starts = _among(rng, arrays["q_starts"]), arrays["kv_starts"]
    starts[s + 1 :] -= starts[s + 1] - starts[s]


@varlen_attention.edge(dims=SEVERAL)
def sequences_without_queries(arrays, rng, options):
    """The keys of a sequence without queries are seen by nobody."""
    s, starts = _among(rng, arrays["kv_starts"]), arrays["q_starts"]
    starts[s + 1 :] -= starts[s + 1] - starts[s]


@varlen_attention.edge(dims=SEVERAL)
def tokens_of_no_sequence(arrays, rng, options):
    """Before the first start, and from the last on: zeros with lse = -inf, and NaN and inf there reach nothing."""
    _leave_ends(arrays)
    for name in ("q", "k", "v"):
        arrays[name][[0, -1]] = rng.choice([np.nan, inf])


@varlen_attention.edge(dims=SEVERAL)
def nan_in_another_sequence(arrays, rng, options):
    """NaN in q, k and v of one sequence stays in its rows."""
    s = _among(rng, arrays["kv_starts"])
    for name, starts in (("q", "q_starts"), ("k", "kv_starts"), ("v", "kv_starts")):
        arrays[name][slice(*arrays[starts][s : s + 2])] = np.nan


@varlen_attention.edge(
    dims={"tokens": (40, 90), "kv_tokens": (2, 30), "sequences": (1, 4)}, options={"is_causal": True}
)
def more_queries_than_keys(arrays, rng, options):
    """Causal masks are aligned at the bottom right of each sequence: its first queries see nothing."""


@varlen_attention.edge(dims=SEVERAL, options={"window": (2, 0), "is_causal": True}, smallest_tiles=True)
def narrow_windows(arrays, rng, options):
    """A window of three keys: whole tiles are skipped, and rows may see none."""


@varlen_attention.edge(dims={"tokens": (128, 160), "kv_tokens": (128, 160), "sequences": (4, 9)}, smallest_tiles=True)
def lengths_at_tile_borders(arrays, rng, options):
    """Sequences of one tile, of one token less and more, and of two: a tile that is dropped, repeated or begun at the
    wrong place shows."""
    _set_starts(arrays["q_starts"], (16, 15, 17, 32), arrays["q"].shape[0])
    _set_starts(arrays["kv_starts"], (17, 32, 16, 15, 33), arrays["k"].shape[0])


@varlen_attention.edge(dims={"tokens": (90, 140), "kv_tokens": (90, 140), "sequences": (8, 20)}, smallest_tiles=True)
def one_long_sequence_among_short_ones(arrays, rng, options):
    """Sequences of one token, and one of all the others."""
    n, where = len(arrays["q_starts"]) - 1, rng.integers(len(arrays["q_starts"]) - 1)
    for starts, name in (("q_starts", "q"), ("kv_starts", "k")):
        lens = np.ones(n, np.int64)
        lens[where] += arrays[name].shape[0] - n
        _set_starts(arrays[starts], lens, arrays[name].shape[0])


@varlen_attention.edge(dims={"tokens": (4, 40), "kv_tokens": (129, 140), "sequences": (1, 1)}, options=WHOLE)
def values_at_tile_borders(arrays, rng, options):
    """All weights are equal and only the keys beside the borders of tiles hold a value; the last tile is ragged."""
    n = arrays["k"].shape[0]
    arrays["q_starts"][...], arrays["kv_starts"][...] = [1, arrays["q"].shape[0]], [1, n]
    arrays["k"][...], arrays["v"][...] = 0, 0
    arrays["v"][[0, 1, 16, 17, 32, 33, 64, 65, 128, n - 1]] = 1


@varlen_attention.edge(
    dims={"tokens": (40, 60), "kv_tokens": (100, 140), "sequences": (1, 2)},
    options={"scale": 1.0, "softcap": None, **WHOLE},
    smallest_tiles=True,
)
def slowly_rising_scores(arrays, rng, options):
    """Every tile raises the maximum by less than a hundredth, so that a rescaling that is left out changes little."""
    arrays["q"][...], arrays["k"][...] = 0, 0
    arrays["q"][..., 0] = 1
    arrays["k"][..., 0] = np.linspace(0, 0.05, arrays["k"].shape[0])[:, None]


@varlen_attention.edge(dims={"group": (3, 8), "kv_heads": (2, 4), "d": (8, 48), "dv": (8, 48)})
def many_query_heads_a_key_head(arrays, rng, options):
    """Query head h reads key head h // group, with head dimensions that no power of two matches."""


@varlen_attention.edge(dims={"tokens": (2, 70), "kv_tokens": (2, 140)}, options={"softcap": None})
def infinite_logits(arrays, rng, options):
    """A +inf logit makes the whole row NaN, o and lse."""
    q, k = arrays["q"], arrays["k"]
    q[rng.choice(len(q), max(1, len(q) // 4), replace=False), :, 0] = inf
    k[..., 0] = 1 + np.abs(k[..., 0])


@varlen_attention.edge(dims={"tokens": (2, 70), "kv_tokens": (2, 140)}, options={"scale": 1.0, "softcap": None})
def logits_of_minus_1e5(arrays, rng, options):
    """Logits near -1e5 beside keys of other sequences stay exact: no finite mask value is that low."""
    q, k = arrays["q"], arrays["k"]
    q[...], k[..., 1:] = 0, 0
    q[..., 0], k[..., 0] = 400, -250 + rng.integers(0, 2, k.shape[:-1])


@varlen_attention.edge(
    dims={"tokens": (40, 70), "kv_tokens": (1, 8), "sequences": (1, 1)},
    options={"scale": 1.0, "softcap": 30.0, "return_lse": True, **WHOLE},
)
def steep_softcap(arrays, rng, options):
    """Every query scores all its keys alike, from 0 to 4 times the softcap."""
    arrays["q"][...], arrays["k"][...] = 0, 0
    arrays["q"][..., 0] = 30 * np.linspace(0, 4, arrays["q"].shape[0])[:, None]
    arrays["k"][..., 0] = 1


# --- sinks ---
@varlen_attention.edge(dims=SEVERAL, given=("sinks",), options={"return_lse": True})
def sinks_of_sequences_without_keys(arrays, rng, options):
    """lse is the sink where a sequence has queries and no key, and -inf of tokens of no sequence."""
    _leave_ends(arrays)
    s, starts = _among(rng, arrays["q_starts"]), arrays["kv_starts"]
    starts[s + 1 :] -= starts[s + 1] - starts[s]


@varlen_attention.edge(dims=SEVERAL, given=("sinks",), options={"return_lse": True})
def odd_sinks(arrays, rng, options):
    """NaN and inf in a sink make all queries of its head NaN, o and lse; -inf is none. Tokens of no sequence have no
    sink."""
    _leave_ends(arrays)
    sinks = arrays["sinks"]
    sinks[rng.random(sinks.shape) < 0.4] = -inf
    sinks[rng.integers(sinks.size)] = rng.choice([np.nan, inf, -inf])


@varlen_attention.edge(
    dims={"tokens": (2, 70), "kv_tokens": (2, 140)},
    given=("sinks",),
    options={"scale": 0.125, "softcap": None, "return_lse": True},
)
def sinks_above_all_scores(arrays, rng, options):
    """The sink is the row's maximum, by a little and by much: it is neither scaled nor capped."""
    arrays["sinks"][...] = rng.choice([3.0, 8.0, 30.0], arrays["sinks"].shape)


# --- slopes ---
@varlen_attention.edge(dims=SEVERAL, given=("alibi_slopes",), options={"return_lse": True}, smallest_tiles=True)
def slopes_of_unequal_sequences(arrays, rng, options):
    """Each query stands where its own sequence's lengths put it, before its first key and behind its last one too."""
    arrays["alibi_slopes"][...] = usual_slopes(arrays["alibi_slopes"].shape[0])


@varlen_attention.edge(
    dims=SEVERAL, given=("alibi_slopes",), options={"is_causal": True, "window": (9, 0)}, smallest_tiles=True
)
def slopes_in_a_window(arrays, rng, options):
    """Distances count from a query's own place also where a window hides most tiles, and rows may see none."""


@varlen_attention.edge(dims={**SEVERAL, "group": (2, 6), "kv_heads": (2, 3)}, given=("alibi_slopes",))
def slopes_of_grouped_heads(arrays, rng, options):
    """Every query head has a slope of its own, also where heads of a group share a tile of rows."""
    arrays["alibi_slopes"][...] = 1.0 / np.arange(1, arrays["alibi_slopes"].shape[0] + 1)


@varlen_attention.edge(dims=SEVERAL, given=("alibi_slopes",))
def odd_slopes(arrays, rng, options):
    """NaN reaches the rows of its head that see a key; a huge slope leaves the key at a row's place, or the nearest."""
    arrays["alibi_slopes"][rng.integers(arrays["alibi_slopes"].shape[0])] = rng.choice([np.nan, inf, 1e4, 1e9])


# ----------------------------------------------------------------------------------------------------------------- laws
def _drawn_starts(draw, number, least=0):
    """Starts of queries and of keys: sequences of up to 40 of each."""
    lens = [[draw.extent(least, 40) for _ in range(number)] for _ in range(2)]
    return tuple(np.cumsum([0, *own]).astype(np.int32) for own in lens)


@varlen_attention.law
def each_sequence_alone(run, draw):
    """A sequence among others has the bits that it has alone."""
    q_starts, kv_starts = _drawn_starts(draw, 4, 1)
    d, options = draw.extent(4, 40, "d"), {"is_causal": bool(draw.extent(0, 1)), "return_lse": True}
    q, k, v = draw.normal(q_starts[-1], 4, d), draw.normal(kv_starts[-1], 2, d), draw.normal(kv_starts[-1], 2, d)
    o, lse = run(q, k, v, q_starts, kv_starts, **options)
    for s in range(4):
        rows, keys = slice(*q_starts[s : s + 2]), slice(*kv_starts[s : s + 2])
        ends = (np.array([0, x.stop - x.start], np.int32) for x in (rows, keys))
        alone = run(q[rows], k[keys], v[keys], *ends, **options)
        draw.same_bits(alone[0], o[rows], f"o of sequence {s} alone")
        draw.same_bits(alone[1], lse[:, rows], f"lse of sequence {s} alone")


@varlen_attention.law
def a_long_sequence_alone_in_a_window(run, draw):
    """A sequence of many queries has the same bits alone and among some of few, beside which kernels may cut queries
    into other tiles: the first key that a tile sees lies elsewhere."""
    q_len, few = draw.extent(130, 200), draw.extent(13, 18)
    q_starts = np.cumsum([0, q_len, *(draw.extent(1, 3) for _ in range(few))]).astype(np.int32)
    kv_len = q_len + draw.extent(60, 200)
    kv_starts = np.cumsum([0, kv_len, *(draw.extent(1, 40) for _ in range(few))]).astype(np.int32)
    d, options = draw.extent(4, 16, "d"), {"window": (draw.extent(70, 130), 0), "return_lse": True}
    q, k, v = draw.normal(q_starts[-1], 4, d), draw.normal(kv_starts[-1], 1, d), draw.normal(kv_starts[-1], 1, d)
    among = run(q, k, v, q_starts, kv_starts, **options)
    alone = run(q[:q_len], k[:kv_len], v[:kv_len], q_starts[:2], kv_starts[:2], **options)
    draw.same_bits(alone[0], among[0][:q_len], "o of a long sequence alone")
    draw.same_bits(alone[1], among[1][:, :q_len], "lse of a long sequence alone")


@varlen_attention.law
def a_sequence_appended(run, draw):
    """One more sequence changes no bit of the others."""
    q_starts, kv_starts = _drawn_starts(draw, 3, 1)
    d, cut, keys = draw.extent(4, 40, "d"), q_starts[-2], kv_starts[-2]
    q, k, v = draw.normal(q_starts[-1], 4, d), draw.normal(kv_starts[-1], 1, d), draw.normal(kv_starts[-1], 1, d)
    if cut and keys:
        fewer = run(q[:cut], k[:keys], v[:keys], q_starts[:-1], kv_starts[:-1])
        draw.same_bits(run(q, k, v, q_starts, kv_starts)[:cut], fewer, "sequences before one that was appended")


@varlen_attention.law
def both_integer_types(run, draw):
    """Starts of 32 and of 64 bits give the same bits."""
    starts = _drawn_starts(draw, 3, 1)
    q, k, v = draw.normal(starts[0][-1], 2, 8), draw.normal(starts[1][-1], 1, 8), draw.normal(starts[1][-1], 1, 8)
    draw.same_bits(run(q, k, v, *(x.astype(np.int64) for x in starts)), run(q, k, v, *starts), "starts of 64 bits")


@varlen_attention.law
def a_sink_of_minus_infinity_is_none(run, draw):
    """The same bits, o and lse, of sequences with keys and without."""
    starts, options = _drawn_starts(draw, 3), {"is_causal": bool(draw.extent(0, 1)), "return_lse": True}
    tokens, kv_tokens = int(starts[0][-1]) + 1, int(starts[1][-1]) + 1
    q, k, v = draw.normal(tokens, 4, 16), draw.normal(kv_tokens, 2, 16), draw.normal(kv_tokens, 2, 16)
    none = np.full(4, -np.inf, q.dtype)
    for name, x, y in zip(("o", "lse"), *(run(q, k, v, *starts, s, **options) for s in (none, None)), strict=True):
        draw.same_bits(x, y, f"{name} with sinks of -inf")


@varlen_attention.law
def sinks_of_other_heads_and_sequences(run, draw):
    """A head's bits do not depend on the sinks of other heads, and a sequence's not on others beside the sinks."""
    q_starts, kv_starts = starts = _drawn_starts(draw, 3, 1)
    q, k, v = draw.normal(starts[0][-1], 4, 16), draw.normal(starts[1][-1], 2, 16), draw.normal(starts[1][-1], 2, 16)
    sinks = draw.normal(4)
    other = sinks.copy()
    other[:2] += 1
    among = run(q, k, v, *starts, sinks)
    draw.same_bits(run(q, k, v, *starts, other)[:, 2:], among[:, 2:], "heads 2 and 3 after sinks 0 and 1")
    rows, keys = slice(*q_starts[1:3]), slice(*kv_starts[1:3])
    ends = (np.array([0, x.stop - x.start], np.int32) for x in (rows, keys))
    draw.same_bits(run(q[rows], k[keys], v[keys], *ends, sinks), among[rows], "a sequence alone with the sinks")


def _slopes(draw):
    """The usual slopes of four heads in the dtype of a call."""
    return usual_slopes(4).astype(np.float64 if draw.dtype == "float64" else np.float32)


@varlen_attention.law
def slopes_of_zero_change_nothing(run, draw):
    """The same bits, o and lse, as without slopes."""
    starts, options = _drawn_starts(draw, 3), {"window": (20, 3), "return_lse": True}
    tokens, kv_tokens = int(starts[0][-1]) + 1, int(starts[1][-1]) + 1
    q, k, v = draw.normal(tokens, 4, 16), draw.normal(kv_tokens, 2, 16), draw.normal(kv_tokens, 2, 16)
    found = (run(q, k, v, *starts, None, x, **options) for x in (_slopes(draw) * 0, None))
    for name, x, y in zip(("o", "lse"), *found, strict=True):
        draw.same_bits(x, y, f"{name} with slopes of 0")


@varlen_attention.law
def slopes_of_other_heads_and_sequences(run, draw):
    """A head's bits do not depend on the slopes of other heads, and a sequence's not on others."""
    q_starts, kv_starts = starts = _drawn_starts(draw, 3, 1)
    q, k, v = draw.normal(starts[0][-1], 4, 16), draw.normal(starts[1][-1], 2, 16), draw.normal(starts[1][-1], 2, 16)
    slopes_of, other = _slopes(draw), _slopes(draw)
    other[:2] *= 2
    among = run(q, k, v, *starts, None, slopes_of)
    draw.same_bits(run(q, k, v, *starts, None, other)[:, 2:], among[:, 2:], "heads 2 and 3 after slopes 0 and 1")
    rows, keys = slice(*q_starts[1:3]), slice(*kv_starts[1:3])
    ends = (np.array([0, x.stop - x.start], np.int32) for x in (rows, keys))
    draw.same_bits(run(q[rows], k[keys], v[keys], *ends, None, slopes_of), among[rows], "a sequence alone with slopes")


@varlen_attention.law
def grouped_heads_equal_repeated_heads(run, draw):
    """Grouped queries are a way to address keys, not another sum."""
    starts = _drawn_starts(draw, 2, 1)
    q, k, v = draw.normal(starts[0][-1], 6, 16), draw.normal(starts[1][-1], 2, 16), draw.normal(starts[1][-1], 2, 16)
    draw.same_bits(run(q, k, v, *starts), run(q, np.repeat(k, 3, 1), np.repeat(v, 3, 1), *starts), "key heads repeated")


# ------------------------------------------------------------------------------------------------------------- gradient
class VarlenAttentionGradients(NamedTuple):
    d_q: Float[A, "tokens kv_heads*group d"]
    d_k: Float[A, "kv_tokens kv_heads d"]
    d_v: Float[A, "kv_tokens kv_heads dv"]
    d_sinks: Float[A, "kv_heads*group"]


def _flops(call: Call) -> float:
    """Scores and dP again, and a product for each gradient. d_sinks wants neither."""
    d, dv = call.dims["d"], call.dims["dv"]
    each = {"d_q": d, "d_k": d, "d_v": dv}
    of_pairs = [name for name in call.wants if name in each]
    return work(call, d + dv + sum(each[name] for name in of_pairs)) if of_pairs else 1.0


NO_GRADIENTS = {"d_q": 0.0, "d_k": 0.0, "d_v": 0.0, "d_sinks": 0.0}


@spec(
    tiling=TILING,
    or_float32=("sinks",),
    apart=lambda options, wants: ("kv_heads",) if "d_sinks" in wants else ("sequences", "kv_heads"),
    positive=POSITIVE,
    empty={"sequences": NO_GRADIENTS},
    require=[*STARTS_RISE, KEYS_BESIDE_A_SINK],
    budget="flops",
    flops=_flops,
)
def varlen_attention_vjp(
    q: Float[A, "tokens kv_heads*group d"],
    k: Float[A, "kv_tokens kv_heads d"],
    v: Float[A, "kv_tokens kv_heads dv"],
    o: Float[A, "tokens kv_heads*group dv"],
    lse: Float32[A, "kv_heads*group tokens"],
    q_starts: Int[A, "sequences+1"],
    kv_starts: Int[A, "sequences+1"],
    d_o: Float[A, "tokens kv_heads*group dv"],
    d_lse: Float32[A, "kv_heads*group tokens"] | None = None,
    lse_low: Float32[A, "kv_heads*group tokens"] | None = None,
    sinks: Float[A, "kv_heads*group"] | None = None,
    alibi_slopes: Float32[A, "kv_heads*group"] | None = None,
    *,
    is_causal: bool = False,
    window: Window | None = None,
    scale: Scale | None = None,
    softcap: Softcap | None = None,
    precision: Literal["ieee", "tf32"] = "ieee",
) -> VarlenAttentionGradients:
    """Gradients of varlen_attention from its own results: for each sequence those of ``attention_vjp`` on it alone, to
    the bit; those of sinks are summed over all sequences.

    The algorithm is FlashAttention-2's backward pass (Dao 2023, algorithm 2).

    Args:
      q, k, v, q_starts, kv_starts, sinks, alibi_slopes, is_causal, window, scale, softcap, precision: as in
        varlen_attention. Slopes have no gradient.
      o, lse, lse_low: what varlen_attention returned; lse_low None is 0.
      d_o, d_lse: cotangents of o (its dtype) and lse (float32); d_lse None is 0.

    Returns:
      d_q, d_k, d_v, d_sinks: the shapes and dtypes of q, k, v and sinks. Zeros for queries that saw no key, for keys
      that no query saw, and for tokens of no sequence, whatever q, k, v, o, lse and the cotangents hold there: nothing
      of it reaches d_sinks either.
    """
    raise NotImplementedError


@varlen_attention_vjp.tolerance
def bound_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """``attention_vjp``'s of each sequence; tokens of other ones have exact zeros. d_sinks is a sum over the queries of
    all sequences: its error is that of attention_vjp's formula for as many rows."""
    found = _of_each(call, attention_vjp.bound, ref, 0.0)
    if ref[3] is None:
        return found
    sums, unit = np.zeros((4, *ref[3].shape)), units_of(call)
    with np.errstate(all="ignore"):
        for head in _key_heads(call):
            sink = SinkPairs.of(head)
            values = [sink.E, np.abs(sink.dS) + sink.E, sink.seen, sink.wild]
            sums[:, head.heads] += [head.by_head(x).sum(1) for x in values]
    of_sinks = error_of_terms(unit, sums, unit.chain(sums[2]))
    return *found[:3], *stored_bounds(call, ref, [*found[:3], of_sinks])[3:]


@varlen_attention_vjp.sigma
def sigma_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """``attention_vjp``'s of each sequence; nothing is said of other tokens, which are exact. d_sinks: the formula of
    attention_vjp for the queries of all sequences."""
    found = _of_each(call, attention_vjp.spread, ref, inf)
    if ref[3] is None:
        return found
    sums, unit, rows = np.zeros((4, *ref[3].shape)), units_of(call), 0
    with np.errstate(all="ignore"):
        for head in _key_heads(call):
            sums[:, head.heads] += [head.by_head(x).sum(1) for x in sink_terms(head)]
            rows += head.call.dims["q_len"] * (head.kv_head == 0)
        of_sinks = spread_of_terms(unit, sums, rows)
    return *found[:3], *stored_spreads(call, ref, [*found[:3], of_sinks])[3:]


def _of_each(call: Call, of_one: Any, ref: tuple[Any, ...], otherwise: float) -> tuple[Any, ...]:
    """What ``of_one`` gives of the gradients that have tokens; None for that of sinks."""
    wants = tuple(name for name in call.wants if name != "d_sinks")
    return each_sequence(call.replace(wants=wants), of_one, (*ref[:3], None), (otherwise,) * 4)


def _key_heads(call: Call) -> Iterator[KeyHead]:
    return (head for one in sequences_of(call) for head in KeyHead.all_of(one.alone(call)))


varlen_attention_vjp.rewrite(tokens_come_along)
varlen_attention_vjp.locate(mask_region)

CORNERS = (
    sequences_without_keys,
    sequences_without_queries,
    nan_in_another_sequence,
    more_queries_than_keys,
    narrow_windows,
    lengths_at_tile_borders,
    one_long_sequence_among_short_ones,
    many_query_heads_a_key_head,
    infinite_logits,
    logits_of_minus_1e5,
    odd_sinks,
    sinks_above_all_scores,
    slopes_of_unequal_sequences,
    slopes_in_a_window,
    slopes_of_grouped_heads,
    odd_slopes,
)
varlen_attention_vjp.edges.update((plant.__name__, varlen_attention.edges[plant.__name__]) for plant in CORNERS)


@varlen_attention_vjp.edge(dims=SEVERAL, given=("d_lse", "sinks"))
def tokens_of_no_sequence_vjp(arrays, rng, options):
    """Before the first start, and from the last on: zeros, and what these tokens hold reaches nothing."""
    _leave_ends(arrays)
    for name in ("q", "k", "v", "d_o"):
        arrays[name][[0, -1]] = rng.choice([np.nan, inf])
    arrays["d_lse"][:, [0, -1]] = np.nan


@varlen_attention_vjp.edge(dims=SEVERAL, given=("d_lse", "sinks"))
def sinks_of_sequences_without_keys_vjp(arrays, rng, options):
    """lse is the sink there, and all of its d_lse the sink's."""
    sinks_of_sequences_without_keys(arrays, rng, options)


@varlen_attention_vjp.edge(
    dims={"tokens": (1100, 1200), "kv_tokens": (1, 4), "sequences": (1, 3), "d": (1, 8), "dv": (1, 8)},
    given=("sinks", "d_lse"),
)
def a_sink_of_many_rows(arrays, rng, options):
    """More rows than a program takes at a time, of which the last ones are few."""


@varlen_attention_vjp.edge(dims=SEVERAL, given=("d_lse",))
def nan_cotangents_of_another_sequence(arrays, rng, options):
    """NaN in the cotangents of one sequence stays in its gradients."""
    s = _among(rng, arrays["q_starts"])
    rows = slice(*arrays["q_starts"][s : s + 2])
    arrays["d_o"][rows], arrays["d_lse"][:, rows] = np.nan, np.nan


@varlen_attention_vjp.edge(dims={"tokens": (2, 70), "kv_tokens": (2, 70)}, given=("d_lse",))
def only_lse_is_used(arrays, rng, options):
    """d_o = 0 and d_lse not: d_q = scale d_lse P k, and d_v = 0."""
    arrays["d_o"][...] = 0


@varlen_attention_vjp.edge(dims={"kv_tokens": (2, 140)}, options={"softcap": 1.0, "scale": 0.3})
def steep_softcap_vjp(arrays, rng, options):
    """Scores on the bend of tanh, where its slope changes most."""


@varlen_attention_vjp.edge(dims={"tokens": (120, 140), "kv_tokens": (20, 60), "sequences": (1, 3)})
def one_hot_cotangents(arrays, rng, options):
    """d_o of one query alone: a tile of queries that is dropped or met twice shows in d_k and d_v."""
    keep = arrays["q_starts"][_among(rng, arrays["q_starts"]) + 1] - 1
    kept = arrays["d_o"][keep].copy()
    arrays["d_o"][...] = 0
    arrays["d_o"][keep] = kept


def _draw_vjp(draw, number):
    """q, k, v, o, lse, q_starts, kv_starts, d_o; o and lse as if from somewhere. lse keeps weights below 1."""
    q_starts, kv_starts = _drawn_starts(draw, number, 1)
    tokens, kv_tokens, d = int(q_starts[-1]), int(kv_starts[-1]), draw.extent(4, 40, "d")
    q, o, d_o = (draw.normal(tokens, 4, d) for _ in range(3))
    k, v = draw.normal(kv_tokens, 2, d), draw.normal(kv_tokens, 2, d)
    lse = draw.rng.uniform(1, 2, (4, tokens)) + log(40)
    return q, k, v, o, lse.astype(np.float64 if draw.dtype == "float64" else np.float32), q_starts, kv_starts, d_o


@varlen_attention_vjp.law
def each_sequence_alone_vjp(run, draw):
    """A sequence among others has the gradients, to the bit, that it has alone."""
    q, k, v, o, lse, q_starts, kv_starts, d_o = arrays = _draw_vjp(draw, 3)
    options = {"is_causal": bool(draw.extent(0, 1))}
    d_q, d_k, d_v = run(*arrays, **options)[:3]
    for s in range(3):
        rows, keys = slice(*q_starts[s : s + 2]), slice(*kv_starts[s : s + 2])
        ends = (np.array([0, x.stop - x.start], np.int32) for x in (rows, keys))
        alone = run(q[rows], k[keys], v[keys], o[rows], lse[:, rows], *ends, d_o[rows], **options)[:3]
        for name, one, all_of in zip(("d_q", "d_k", "d_v"), alone, (d_q[rows], d_k[keys], d_v[keys]), strict=True):
            draw.same_bits(one, all_of, f"{name} of sequence {s} alone")


@varlen_attention_vjp.law
def slopes_in_any_company_vjp(run, draw):
    """Slopes of 0 change no bit, and a sequence among others has the gradients that it has alone."""
    q, k, v, o, lse, q_starts, kv_starts, d_o = arrays = _draw_vjp(draw, 3)
    names, nothing, of_heads = ("d_q", "d_k", "d_v"), (None, None, None), _slopes(draw)
    for name, x, y in zip(names, run(*arrays, *nothing, of_heads * 0), run(*arrays), strict=False):
        draw.same_bits(x, y, f"{name} with slopes of 0")
    among, rows, keys = run(*arrays, *nothing, of_heads), slice(*q_starts[1:3]), slice(*kv_starts[1:3])
    ends = (np.array([0, x.stop - x.start], np.int32) for x in (rows, keys))
    alone = run(q[rows], k[keys], v[keys], o[rows], lse[:, rows], *ends, d_o[rows], *nothing, of_heads)
    for name, x, y, i in zip(names, alone, among, (rows, keys, keys), strict=False):
        draw.same_bits(x, y[i], f"{name} of a sequence alone with slopes")


@varlen_attention_vjp.law
def a_sequence_appended_vjp(run, draw):
    """One more sequence changes no bit of the others' gradients."""
    q, k, v, o, lse, q_starts, kv_starts, d_o = arrays = _draw_vjp(draw, 3)
    rows, keys = slice(q_starts[-2]), slice(kv_starts[-2])
    fewer = run(q[rows], k[keys], v[keys], o[rows], lse[:, rows], q_starts[:-1], kv_starts[:-1], d_o[rows])
    for name, x, y, i in zip(("d_q", "d_k", "d_v"), run(*arrays), fewer, (rows, keys, keys), strict=False):
        draw.same_bits(x[i], y, f"{name} of sequences before one that was appended")


@varlen_attention_vjp.law
def both_integer_types_vjp(run, draw):
    """Starts of 32 and of 64 bits give the same bits."""
    arrays = _draw_vjp(draw, 2)
    wide = [x.astype(np.int64) if x.dtype == np.int32 else x for x in arrays]
    for name, x, y in zip(("d_q", "d_k", "d_v"), run(*wide), run(*arrays), strict=False):
        draw.same_bits(x, y, f"{name} with starts of 64 bits")


@varlen_attention_vjp.law
def no_cotangent_no_gradient(run, draw):
    """d_o = 0: zeros, not what rounding makes of them."""
    *arrays, d_o = _draw_vjp(draw, 2)
    found = run(*arrays, d_o * 0, None, None, draw.normal(4), softcap=3.0)
    for name, x in zip(("d_q", "d_k", "d_v", "d_sinks"), found, strict=True):
        draw.same_bits(np.abs(x), np.zeros_like(x), f"{name} of d_o = 0")


@varlen_attention_vjp.law
def tokens_of_no_sequence_do_not_matter(run, draw):
    """Whatever lse, o and the cotangents of a token in front of all sequences and of one behind them are, gradients
    have the same bits."""
    q, k, v, o, lse, q_starts, kv_starts, d_o = _draw_vjp(draw, 2)
    sinks, found = draw.normal(4), []
    for value in (0.0, 3.0):
        ends = [np.full_like(x[:1], value) for x in (q, o, d_o)]
        q_, o_, d_o_ = (np.concatenate([e, x, e]) for e, x in zip(ends, (q, o, d_o), strict=True))
        lse_ = np.concatenate([np.full_like(lse[:, :1], value), lse, np.full_like(lse[:, :1], value)], 1)
        found.append(run(q_, k, v, o_, lse_, q_starts + 1, kv_starts, d_o_, None, None, sinks))
    for name, x, y in zip(("d_q", "d_k", "d_v", "d_sinks"), *found, strict=True):
        draw.same_bits(x, y, f"{name} beside other tokens of no sequence")


@varlen_attention_vjp.law
def sinks_in_any_company(run, draw):
    """The other gradients know of sinks by lse alone. d_sinks has the same bits asked for alone and of its key head
    alone, and a sink of -inf has none."""
    arrays, sinks = _draw_vjp(draw, 3), draw.normal(4)
    sinks[1] = -np.inf
    among = run(*arrays, None, None, sinks)
    for name, x, y in zip(("d_q", "d_k", "d_v"), among, run(*arrays), strict=False):
        draw.same_bits(x, y, f"{name} of a call with sinks")
    draw.same_bits(run(*arrays, None, None, sinks, wants=("d_sinks",))[3], among[3], "d_sinks alone")
    draw.same_bits(np.abs(among[3][1:2]), np.zeros_like(sinks[:1]), "d_sinks of a sink of -inf")
    q, k, v, o, lse, q_starts, kv_starts, d_o = arrays
    of_head = q[:, 2:], k[:, 1:], v[:, 1:], o[:, 2:], lse[2:], q_starts, kv_starts, d_o[:, 2:]
    draw.same_bits(run(*of_head, None, None, sinks[2:])[3], among[3][2:], "d_sinks of one key head's queries")
