"""Gradient of the cross entropy of logits with integer labels on TPUs, along the last axis.

    d_x_j = d_loss [p_j (1 + 2 z lse) - (1 - e) [j = t] - e / n]        p = exp(min(x - lse - lse_low, 0))

logits x: (*batch, n), labels, lse, lse_low, d_loss: (*batch) -> d_logits: (*batch, n). The grid is (row blocks, 1, n
blocks), see `Walk`; lse and lse_low were saved, so that no element waits for another. A row that is ignored is read and
not used.

block_rows: rows a block holds; block_n: elements of each row a block holds.

Source: the derivative of the formula of cross_entropy.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.common import Refs
from portakern.backends.pallas.tpu._rows import Held, Walk, launched
from portakern.backends.pallas.tpu.cross_entropy import is_label, share_of
from portakern.backends.pallas.tpu.layernorm import in_walks, walk_of
from portakern.core.call import Call

HELD = Held(streamed=2, computed=4)


def kernel(ref: Refs, *, walk: Walk, ignored: int, even: float, z: float, classes: int) -> None:
    """classes: of which a row holds the logits of all, or of the walk's n."""
    _, step = walk.sweep_and_step()
    x, labels = ref.x[...].astype(jnp.float32), ref.labels[...]
    lse, g = walk.turned(ref.lse[...]), walk.turned(ref.d_loss[...])
    apart = x - lse
    if "lse_low" in ref:
        apart -= walk.turned(ref.lse_low[...])
    p = jnp.exp(jnp.minimum(apart, 0.0))
    if z:
        p *= 1.0 + 2.0 * z * lse
    p -= jnp.where(is_label(labels, x, walk, step), 1.0 - even, 0.0)
    if even:
        p -= even / classes
    d_x = jnp.where(walk.turned(labels) == ignored, 0.0, g * p)
    ref.d_x[...] = d_x.astype(ref.d_x.dtype)


@BACKEND.implements("cross_entropy_vjp", **in_walks(HELD))
def cross_entropy_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array]:
    return gradient(call, tiling, call.dims["n"])


def gradient(call: Call, tiling: Mapping[str, int], classes: int) -> tuple[jax.Array]:
    """The gradient by the logits of n of so many classes, by whose places among them the labels go."""
    x, walk = call.arrays["logits"], walk_of(call, tiling)._replace(sweeps=1)
    names = [name for name in ("lse", "lse_low", "d_loss") if call.arrays[name] is not None]
    of_rows = {name: call.arrays[name].astype(jnp.float32) for name in names}
    of_rows["labels"] = call.arrays["labels"].astype(jnp.int32)
    found = launched(
        call,
        partial(kernel, **share_of(call), classes=classes),
        walk,
        HELD,
        rows={"x": x},
        written={"d_x": x.dtype},
        inputs={name: (walk.to_numbers(array), walk.numbers()[1]) for name, array in of_rows.items()},
        statistics=(),
        flops=6,
        transcendentals=x.size,
    )
    return (found["d_x"],)
