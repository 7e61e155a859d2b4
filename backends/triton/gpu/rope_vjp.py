"""Gradient of the rotary position embedding: the kernel of rope, with -sin for sin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from portakern.backends.triton import BACKEND
from portakern.backends.triton.gpu.rope import KNOBS, fit, key, supports, turned

if TYPE_CHECKING:
    from portakern.core.call import Call


@BACKEND.implements("rope_vjp", key=key, fit=fit, supports=supports, knobs=KNOBS, overwrites=True)
def rope_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    return (turned(call, tiling, call.arrays["d_y"], transposed=True),)
