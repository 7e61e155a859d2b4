"""Gradients of the cross entropy of the logits of a linear layer, as in the portable variant, by the products of this
folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from portakern.backends.triton import BACKEND
from portakern.backends.triton.hopper.linear_cross_entropy import multiply, refused
from portakern.backends.triton.lib import linear_cross_entropy_vjp as shared
from portakern.backends.triton.lib.linear_cross_entropy import key

if TYPE_CHECKING:
    from portakern.core.call import Call


@BACKEND.implements(
    "linear_cross_entropy_vjp",
    key=key,
    tiling=shared.default_tiling,
    supports=partial(shared.supports, refused=refused),
    overwrites=True,
)
def linear_cross_entropy_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    return shared.in_chunks(call, tiling, multiply)
