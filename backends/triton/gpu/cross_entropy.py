"""Cross entropy of logits with integer labels, over the last axis of any strided view.

    loss = log l + (1 - e) (m - x_t) + e (m - mean x) + z lse^2        lse = m + log l
    m = max_j x_j, or 0 where that is infinite        l = sum_j exp(x_j - m)        t: the row's label

A program owns ``block_rows`` rows and reads each once. One that fits in ``tiles`` tiles stays in registers; of a longer
one ``block_n`` elements are taken at a time, by online normalisation, which rescales l whenever m grows. Rows that lie
side by side, as where the classes are the second axis of four, are taken in strips. The label's logit is one more load.
What an ignored row holds counts nowhere. e and z are known to the compiler, which leaves out what they make 0.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), section 3; Szegedy et al.,
"Rethinking the inception architecture" (2016), section 7; Chowdhery et al., "PaLM" (2022), section 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from portakern.backends.triton import BACKEND
from portakern.backends.triton.copies import in_order
from portakern.backends.triton.gpu.softmax import default_tiling, key, supports
from portakern.backends.triton.lib.cross_entropy import (
    losses_into,
    numbers,
)
from portakern.spec import Tile

if TYPE_CHECKING:
    from portakern.core.call import Call


@BACKEND.implements(
    "cross_entropy", key=key, tiling=default_tiling, supports=supports, knobs={"num_warps": Tile(1, 32)}
)
def cross_entropy(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    x = call.arrays["logits"]
    loss, lse, low = (numbers(call, x) if name in call.wants else None for name in ("loss", "lse", "lse_low"))
    losses_into(call, x, in_order(call, call.arrays["labels"]), loss, (lse, low), tiling)  # small: a number a row
    return loss, lse, low
