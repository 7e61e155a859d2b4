"""Gradients of the linear layer with bias, activation and residual, as in the portable variant, by the products of this
folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from portakern.backends.triton import BACKEND
from portakern.backends.triton.gpu import linear_vjp as portable
from portakern.backends.triton.gpu.family import FAMILY
from portakern.backends.triton.gpu.swiglu import KNOBS, key
from portakern.backends.triton.hopper.linear_cross_entropy import multiply, refused
from portakern.core.tilings import default

if TYPE_CHECKING:
    from portakern.core.call import Call


def default_tiling(call: Call) -> Mapping[str, int]:
    """That of the portable variant, whose walk over d_y and pre this is."""
    walk = BACKEND.implementation("linear_vjp", FAMILY)
    assert walk is not None
    return default(walk, call).tiling


@BACKEND.implements(
    "linear_vjp",
    key=key,
    tiling=default_tiling,
    supports=partial(portable.supports, of=refused),
    knobs=KNOBS,
)
def linear_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    return portable.gradients(call, tiling, multiply)
