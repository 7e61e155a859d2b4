"""Cross entropy of logits with integer labels, over the last axis of any strided view, and its gradient.

    loss = log l + (1 - e) (m - x_t) + e (m - mean x) + z lse^2        lse = m + log l
    m = max_j x_j, or 0 where that is infinite        l = sum_j exp(x_j - m)        t: the row's label

A program owns ``block_rows`` rows and reads each once. One that fits in ``tiles`` tiles stays in registers; of a longer
one ``block_n`` elements are taken at a time, by online normalisation, which rescales l whenever m grows. Rows that lie
side by side, as where the classes are the second axis of four, are taken in strips. The label's logit is one more load.
What an ignored row holds counts nowhere. e and z are known to the compiler, which leaves out what they make 0.

    d_x_j = d_loss [p_j (1 + 2 z lse) - (1 - e) [j = t] - e / n]        p = exp(min(x - lse - lse_low, 0))

lse and lse_low were saved, so that no element of the gradient waits for another: a program owns a tile of
``block_rows`` rows by ``block_n`` elements of each. Long rows that lie one after another are one row. Where rows lie
side by side, logits are read along memory and the gradient is written along its own.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), section 3; Szegedy et al.,
"Rethinking the inception architecture" (2016), section 7; Chowdhery et al., "PaLM" (2022), section 5. The gradient is
the derivative of the formula.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import RowsConfig
from portakern.backends.triton.copies import in_order
from portakern.backends.triton.gpu.logsumexp import once_tiling
from portakern.backends.triton.gpu.softmax import key, supports
from portakern.backends.triton.launch import cdiv, refuse_tile
from portakern.backends.triton.layout import result_like
from portakern.backends.triton.lib.columns import lead, side_by_side
from portakern.backends.triton.lib.cross_entropy import (
    gradient_into,
    losses_into,
    numbers,
    tile_brackets,
    tile_turned,
)

if TYPE_CHECKING:
    from portakern.core.call import Call


@BACKEND.implements("cross_entropy", key=key, tiling=once_tiling, supports=supports, config=RowsConfig)
def cross_entropy(call: Call, config: RowsConfig) -> tuple[Any, ...]:
    x = call.arrays["logits"]
    loss, lse, low = (numbers(call, x) if name in call.wants else None for name in ("loss", "lse", "lse_low"))
    losses_into(call, x, in_order(call, call.arrays["labels"]), loss, (lse, low), config)  # small: a number a row
    return loss, lse, low


def gradient_tiling(call: Call) -> RowsConfig:
    x, axis = lead(call)
    return tile_turned(call) if side_by_side(x, axis) else tile_brackets(x.shape[axis], call.target.arch)


def supports_gradient(call: Call, config: RowsConfig) -> str | None:
    n, block_n = call.dims["n"], config.block_n
    return refuse_tile(call, config, call.arrays["labels"].numel() * (cdiv(n, block_n) + (n > block_n)))


@BACKEND.implements(
    "cross_entropy_vjp",
    key=key,
    tiling=gradient_tiling,
    supports=supports_gradient,
    config=RowsConfig,
    overwrites=True,
)
def cross_entropy_vjp(call: Call, config: RowsConfig) -> tuple[Any, ...]:
    x = call.arrays["logits"]
    labels, lse, d_loss = (in_order(call, call.arrays[name]) for name in ("labels", "lse", "d_loss"))
    low = None if call.arrays["lse_low"] is None else in_order(call, call.arrays["lse_low"])
    d_x = result_like(x, call, "d_logits")
    first = call.options["first_class"]
    classes = call.options["classes"] or first + call.dims["n"]
    gradient_into(call, x, labels, (lse, low), d_loss, d_x, config, first, classes)
    return (d_x,)
