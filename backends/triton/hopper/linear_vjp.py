"""Gradients of the linear layer with bias, activation and residual, as in the portable variant, by the products of this
folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from portakern.backends.triton import BACKEND
from portakern.backends.triton.hopper.linear_cross_entropy import multiply, refused
from portakern.backends.triton.lib import linear_vjp as shared

if TYPE_CHECKING:
    from portakern.core.call import Call


@BACKEND.implements("linear_vjp", supports=partial(shared.supports, of=refused))
def linear_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    return shared.gradients(call, multiply)
