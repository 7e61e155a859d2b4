"""Parts of a long call of attention, where what a query sees depends on where it stands, by a mask or slopes, and of
its gradients, where a weight follows from its query, its key and what was saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from portakern.specs.attention.contract import attention, attention_vjp
from portakern.specs.attention.scores import first_place, sight

if TYPE_CHECKING:
    from portakern.core.call import Call


LONG = 16
"""Rows or keys of a stretch."""

Stretch = tuple[Mapping[str, np.ndarray], Mapping[str, Any]]


@attention.stretch
def stretches(call: Call, rng: np.random.Generator) -> Iterator[Stretch]:
    """Of a call in which places count: in others queries stand anywhere."""
    if "q_len" not in call.spec.apart_in(call.options, call.wants, call.present):
        yield from of_queries(call, rng)


def of_queries(call: Call, rng: np.random.Generator) -> Iterator[Stretch]:
    """Queries that follow each other, with all keys that one of them sees: the first, the last, and some between."""
    q_len, kv_len, (left, right) = call.dims["q_len"], call.dims["kv_len"], sight(call)
    before = kv_len - q_len  # keys that stand before the first query, where ``sight`` counts from
    for start, end in _positions(rng, q_len):
        last = kv_len if right is None else min(max(end + before + right, 1), kv_len)
        first = 0 if left is None else min(max(start + before - left, 0), last - 1)
        yield from _stretch(call, (start, end), (first, last))


def of_keys(call: Call, rng: np.random.Generator) -> Iterator[Stretch]:
    """Keys that follow each other, with all queries that see one of them, for sums over queries whose weights are known
    without the other keys."""
    q_len, kv_len, (left, right) = call.dims["q_len"], call.dims["kv_len"], sight(call)
    before = kv_len - q_len
    for first, last in _positions(rng, kv_len):
        start = 0 if right is None else min(max(first - before - right, 0), q_len - 1)
        end = q_len if left is None else max(min(last - before + left, q_len), start + 1)
        yield from _stretch(call, (start, end), (first, last))


def _positions(rng: np.random.Generator, extent: int) -> Iterator[tuple[int, int]]:
    anywhere = int(rng.integers(0, max(extent - LONG, 1)))
    for start in dict.fromkeys((0, anywhere, max(extent - LONG, 0))):
        yield start, min(start + LONG, extent)


def _stretch(call: Call, queries: tuple[int, int], keys: tuple[int, int]) -> Iterator[Stretch]:
    """Both ranges, and where they stand."""
    places = {"q_start": first_place(call) + queries[0], "kv_start": keys[0]}
    yield {"q_len": np.arange(*queries), "kv_len": np.arange(*keys)}, places


# ---------------------------------------------------------------------------------------------------------- gradient
@attention_vjp.stretch
def stretches_vjp(call: Call, rng: np.random.Generator) -> Iterator[Stretch]:
    """d_q sums over keys, d_k and d_v over queries; d_bias has an element a pair, and is compared whole."""
    if call.wants == ("d_q",):
        yield from of_queries(call, rng)
    elif call.wants in (("d_k",), ("d_v",)):
        yield from of_keys(call, rng)
