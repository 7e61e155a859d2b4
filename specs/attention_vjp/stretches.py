"""Parts of a long call of attention's gradients: a weight follows from its query, its key and what was saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from portakern.specs.attention.stretches import Stretch, of_keys, of_queries
from portakern.specs.attention_vjp.contract import attention_vjp

if TYPE_CHECKING:
    import numpy as np

    from portakern.core.call import Call


@attention_vjp.stretch
def stretches(call: Call, rng: np.random.Generator) -> Iterator[Stretch]:
    """d_q sums over keys, d_k and d_v over queries; d_bias has an element a pair, and is compared whole."""
    if call.wants == ("d_q",):
        yield from of_queries(call, rng)
    elif call.wants in (("d_k",), ("d_v",)):
        yield from of_keys(call, rng)
