"""Continuous batching: which tokens of which requests a step takes, and where their keys lie.

A request is a prompt and a number of tokens to draw. Each step takes one token of each sequence that draws, and fills
what is left of its budget of tokens with chunks of prompts. A request enters when a row of the batch is free and the
pages that it can ever fill are; its pages come back when it ends.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__ = ["Batch", "Capacity", "Request", "Step", "sampled"]


@dataclass(frozen=True)
class Request:
    """``prompt``: tokens, at least one. ``new``: how many tokens to draw, at least one."""

    prompt: tuple[int, ...]
    new: int

    def __post_init__(self) -> None:
        if not self.prompt or self.new < 1:
            raise ValueError(
                f"a request has {len(self.prompt)} tokens of prompt and draws {self.new}; expected at least 1 of each"
            )

    @property
    def keys(self) -> int:
        """Keys in the cache when it ends: the last token that is drawn is not read again."""
        return len(self.prompt) + self.new - 1


@dataclass(frozen=True)
class Capacity:
    """Sizes that are fixed before the first request.

    Attributes:
      sequences: rows of the batch. tokens: of one step, at least ``sequences``, so that whoever draws is never kept
        waiting by prompts.
      pages: of the cache, ``page_size`` keys each. longest: keys of one sequence.
    """

    sequences: int
    tokens: int
    pages: int
    page_size: int
    longest: int

    def __post_init__(self) -> None:
        if self.tokens < self.sequences:
            raise ValueError(f"tokens is {self.tokens}; expected at least sequences = {self.sequences}")

    @property
    def pages_each(self) -> int:
        return -(-self.longest // self.page_size)


@dataclass(frozen=True)
class Step:
    """The tokens of one step, those of a sequence beside each other, in the order of rows.

    Attributes:
      tokens, positions: of each token. slots: where its key goes, page * page_size + place.
      q_starts: sequences + 1 numbers, where the tokens of each row begin.
      kv_lens: keys of each row after this step, 0 of a row that takes no part.
      page_table: (sequences, pages_each), -1 behind the last page.
      draws: the rows that draw a token, and the index of the token that each draws from.
    """

    tokens: list[int]
    positions: list[int]
    slots: list[int]
    q_starts: list[int]
    kv_lens: list[int]
    page_table: list[list[int]]
    draws: list[tuple[int, int]]


@dataclass
class Row:
    """A request that runs: its ``pages``, the keys that lie in them, and the tokens drawn so far."""

    request: Request
    number: int
    pages: list[int]
    keys: int = 0
    drawn: list[int] = field(default_factory=list)

    @property
    def waiting(self) -> int:
        """Tokens whose keys are not in the cache."""
        return len(self.request.prompt) + len(self.drawn) - self.keys

    def token(self, position: int) -> int:
        prompt = self.request.prompt
        return prompt[position] if position < len(prompt) else self.drawn[position - len(prompt)]

    @property
    def ended(self) -> bool:
        return len(self.drawn) == self.request.new


class Batch:
    """Requests, those that run and those that wait, and the pages of their keys."""

    def __init__(self, requests: Iterable[Request], capacity: Capacity) -> None:
        self.capacity = capacity
        self.queue = deque(enumerate(requests))
        self.results: dict[int, list[int]] = {}
        self.rows: list[Row | None] = [None] * capacity.sequences
        self.free = list(reversed(range(capacity.pages)))
        most = min(capacity.longest, capacity.pages * capacity.page_size)
        for number, request in self.queue:
            if request.keys > most:
                raise ValueError(
                    f"request {number} has {request.keys} keys at its end, and the cache holds {most} of a sequence; "
                    "raise longest or pages"
                )

    @property
    def ended(self) -> bool:
        return not self.queue and not any(self.rows)

    def admit(self) -> None:
        """Give free rows to requests, in their order, while pages last."""
        for i, row in enumerate(self.rows):
            if row is None and self.queue:
                number, request = self.queue[0]
                needed = -(-request.keys // self.capacity.page_size)
                if needed > len(self.free):
                    return
                self.queue.popleft()
                self.rows[i] = Row(request, number, [self.free.pop() for _ in range(needed)])

    def next(self) -> Step:
        """The next step: one token of each row that draws, then chunks of prompts while the budget lasts."""
        self.admit()
        counts = self._counts()
        size, step = self.capacity.page_size, Step([], [], [], [0], [], [], [])
        for i, (row, count) in enumerate(zip(self.rows, counts, strict=True)):
            if row is not None:
                for position in range(row.keys, row.keys + count):
                    step.tokens.append(row.token(position))
                    step.positions.append(position)
                    step.slots.append(row.pages[position // size] * size + position % size)
                if count and count == row.waiting:
                    step.draws.append((i, len(step.tokens) - 1))
                row.keys += count
            pages = row.pages if row is not None else []
            step.kv_lens.append(row.keys if row is not None and count else 0)
            step.q_starts.append(len(step.tokens))
            step.page_table.append(pages + [-1] * (self.capacity.pages_each - len(pages)))
        return step

    def _counts(self) -> list[int]:
        """Tokens of each row in the next step."""
        counts = [int(row is not None and row.waiting == 1) for row in self.rows]
        left = self.capacity.tokens - sum(counts)
        for i, row in enumerate(self.rows):
            if row is not None and not counts[i]:
                counts[i] = min(row.waiting, left)
                left -= counts[i]
        return counts

    def take(self, step: Step, tokens: Sequence[int]) -> None:
        """Add a drawn token to each row of ``step.draws``, and end the rows that have all of theirs."""
        for (i, _), token in zip(step.draws, tokens, strict=True):
            row = self.rows[i]
            assert row is not None
            row.drawn.append(token)
            if row.ended:
                self.results[row.number] = row.drawn
                self.free.extend(row.pages)
                self.rows[i] = None


def sampled(count: int, words: int, longest: int, seed: int = 0) -> list[Request]:
    """Requests of mixed lengths: most prompts are short and some nearly as long as fits, and so are what they draw."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        prompt = max(1, int(longest * 0.75 * rng.random() ** 3))
        new = max(1, int((longest - prompt) * rng.random() ** 2))
        found.append(Request(tuple(rng.randrange(words) for _ in range(prompt)), new))
    return found
