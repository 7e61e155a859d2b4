"""Gradient of the rotary position embedding on TPUs: the kernel of rope, with -sin for sin."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.tpu.rope import key, supports, turned
from portakern.core.call import Call


@BACKEND.implements("rope_vjp", key=key, supports=supports)
def rope_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array]:
    return (turned(call, tiling, call.arrays["d_y"], transposed=True),)
