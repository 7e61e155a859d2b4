"""Attention on Hopper in one split: a row's keys have one softmax state at any length.

The kernels and what they refuse are those of ``hopper/attention.py``, to which every call is delegated with the tiling
of here. Such a tiling has no splits, and code that can meet no border between two is faster. A row has the same bits in
any company, among few queries too; these are not the bits of the other variants, whose longer rows are split. Where
queries are few a program walks all keys of a group of heads, so decoding belongs to the other variants.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import UnsplitConfig
from portakern.backends.triton.launch import GLUON, cdiv
from portakern.backends.triton.lib import attention_gluon as gluon
from portakern.backends.triton.lib.attention_gluon import DRAWN, key, supports
from portakern.backends.triton.lib.tma import QUERIES

if TYPE_CHECKING:
    from portakern.core.call import Call


LONG = 1 << 14  # keys of a row


def fit(call: Call, config: UnsplitConfig) -> UnsplitConfig:
    """Two consumers where tiles of three would have a sixteenth more rows, of which nobody asks for: three are faster
    by as much or more. A third stage, if there is room, for long rows under a causal mask, whose keys come from memory
    more often. No bit of a row depends on either."""
    two, three = (cdiv(call.dims["q_len"], n * QUERIES) * n * QUERIES for n in (2, 3))
    if config.consumers == 3 and 16 * three > 17 * two:
        config = config.replace(consumers=2)
    if config.num_stages == 2 and call.options["is_causal"] and call.dims["kv_len"] >= LONG:
        config = config.replace(num_stages=3)
    return gluon.fit(call, config)


def delegate(call: Call, config: UnsplitConfig) -> tuple[str, UnsplitConfig]:
    """The variant with these kernels, and the tiling without splits."""
    return "hopper", config


@BACKEND.implements("attention", key=key, fit=fit, supports=supports, config=UnsplitConfig, delegate=delegate,
                    drawn=DRAWN, compiled_alone=GLUON)  # fmt: skip
def attention(call: Call, config: UnsplitConfig) -> tuple[Any, ...]:
    raise AssertionError("every call is delegated")
