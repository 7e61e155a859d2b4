"""Sequences that segment ids pack one behind the other, in the forms of other libraries, made once for each pair of
arrays: a benchmark's clock does not hold what a library's users make once for all layers of a model."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from portakern.errors import UnsupportedError

__all__ = ["Documents", "documents", "filling", "kept"]


def kept(make: Callable[..., Any]) -> Callable[..., Any]:
    """``make`` of tensors and other arguments, not made again while the last tensors that came are these, unchanged,
    beside equal other arguments."""
    last: list[Any] = [(), (), None]  # references to the tensors; their versions among the others; what was made

    @functools.wraps(make)
    def once(*args: Any) -> Any:
        tensors = [x for x in args if hasattr(x, "_version")]
        now = tuple(getattr(x, "_version", x) for x in args)
        if now != last[1] or any(of() is not x for of, x in zip(last[0], tensors, strict=True)):
            last[:] = [weakref.ref(x) for x in tensors], now, make(*args)
        return last[2]

    return once


class Documents(NamedTuple):
    """Runs of equal ids, over all sequences of a batch laid one behind the other.

    Attributes:
      starts: (documents + 1,) int32, on the ids' device: the first row of each, and behind the last the number of rows.
      longest: rows of the longest.
    """

    starts: Any
    longest: int


@kept
def documents(q_segment_ids: Any, kv_segment_ids: Any, library: str) -> Documents:
    """The documents of a packed batch.

    Raises:
      UnsupportedError: queries and keys differ in their ids, or an id comes again behind another: no list of documents'
        ends says that.
    """
    import torch

    if q_segment_ids.shape != kv_segment_ids.shape or not torch.equal(q_segment_ids, kv_segment_ids):
        raise UnsupportedError(f"{library} takes documents that queries and keys have in common; these ids differ")
    ids = q_segment_ids
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    if any(len(torch.unique(row)) != int(first.sum()) for row, first in zip(ids, begins, strict=True)):
        raise UnsupportedError(f"{library} takes documents of neighbouring rows; these ids come again behind others")
    starts = torch.nonzero(begins.reshape(-1)).reshape(-1)
    starts = torch.cat([starts, starts.new_tensor([ids.numel()])])
    return Documents(starts.int(), int(starts.diff().max()))


@kept
def filling(starts: Any, tokens: int, library: str) -> Documents:
    """The sequences that cumulative ``starts`` separate.

    Raises:
      UnsupportedError: they do not fill an array of so many ``tokens``: what a library writes elsewhere is not known.
    """
    first, last = (int(x) for x in starts[[0, -1]])
    if (first, last) != (0, tokens):
        raise UnsupportedError(
            f"{library} takes sequences that fill their array; these lie from {first} to {last} of {tokens} tokens"
        )
    return Documents(starts.int(), int(starts.diff().max()))
