"""Cross entropy of logits with integer labels on TPUs along the last axis, and its gradient, in one sweep over a row.

    loss = log l + (1 - e) (m - x_t) + e (m - mean x) + z lse^2        lse = m + log l
    m = max_j x_j, or 0 where that is infinite        l = sum_j exp(x_j - m)        t: the row's label
    d_x_j = d_loss [p_j (1 + 2 z lse) - (1 - e) [j = t] - e / n]        p = exp(min(x - lse - lse_low, 0))

logits x, d_logits: (*batch, n); labels, loss, lse, lse_low, d_loss: (*batch). lse_low is what rounding takes from lse.
The grid is (row blocks, 1, n blocks), see `BlockWalk`. Each step of the forward kernel merges a block into the running
maximum m of a row and the sum l of exp(x - m), and takes the label's logit where it comes by; the last one puts the
loss together. lse and lse_low are saved, so that in the gradient no element waits for another. A row that is ignored is
read and not used.

block_rows: rows a block holds; block_n: elements of each row a block holds.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), algorithm 3; Szegedy et al.,
"Rethinking the inception architecture" (2016), section 7; Chowdhery et al., "PaLM" (2022), section 5.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import RowsConfig
from portakern.backends.pallas.lib.blocks import Refs
from portakern.backends.pallas.lib.double_float import added
from portakern.backends.pallas.lib.mosaic_tpu.rows import BlockWalk, VmemUse, launched
from portakern.backends.pallas.tpu.layernorm import in_walks, walk_of
from portakern.backends.pallas.tpu.logsumexp import add_to_log_sum, finite_or_zero
from portakern.core.call import Call

NONE = -(2**31)
"""A label that is no class, and none beside the first of a part of them."""

HELD = VmemUse(streamed=1, computed=4)


def is_label(labels: Any, block: Any, walk: BlockWalk, step: Any) -> Any:
    """Whether each element of a block of rows is that of its row's label."""
    column = lax.broadcasted_iota(jnp.int32, block.shape, walk.along) + step * walk.block_n
    return column == walk.turned(labels)


def kernel(ref: Refs, *, walk: BlockWalk, ignored: int, even: float, z: float) -> None:
    _, step = walk.sweep_and_step()
    x = walk.within_rows(ref.x[...].astype(jnp.float32), step, -jnp.inf)
    labels = ref.labels[...]

    @pl.when(step == 0)
    def start() -> None:
        ref.m[...] = jnp.full_like(ref.m, -jnp.inf)
        for statistic in (ref.l, ref.at, ref.total):
            statistic[...] = jnp.zeros_like(statistic)

    add_to_log_sum(ref, walk, x)
    ref.at[...] += jnp.sum(jnp.where(is_label(labels, x, walk, step), x, 0.0), axis=walk.along, keepdims=True)
    if even:
        ref.total[...] += walk.sum_along_rows(x, step)

    @pl.when(step == walk.grid[-1] - 1)
    def finish() -> None:
        shift, log = finite_or_zero(ref.m[...]), jnp.log(ref.l[...])
        loss = log + (1.0 - even) * (shift - ref.at[...])
        if even:
            loss += even * (shift - ref.total[...] / walk.n)
        if z:
            loss += z * jnp.square(shift + log)
        is_class = (labels >= 0) & (labels < walk.n)
        loss = jnp.where(is_class, walk.turned(loss), jnp.nan)  # a label that is no class was not met
        lse, low = added(shift, log)
        low = jnp.where(jnp.abs(lse) < jnp.inf, low, 0.0)
        for name, found in (("loss", loss), ("lse", walk.turned(lse)), ("lse_low", walk.turned(low))):
            if name in ref:
                getattr(ref, name)[...] = jnp.where(labels == ignored, 0.0, found)


@BACKEND.implements("cross_entropy", **in_walks(HELD))
def cross_entropy(call: Call, config: RowsConfig) -> tuple[jax.Array | None, ...]:
    x, walk = call.arrays["logits"], walk_of(call, config)._replace(sweeps=1)  # nothing is read again
    shape, blocks = walk.numbers()
    found = launched(
        call,
        partial(kernel, **share_of(call)),
        walk,
        HELD,
        rows={"x": x},
        inputs={"labels": (walk.to_numbers(call.arrays["labels"].astype(jnp.int32)), blocks)},
        outputs={name: (jax.ShapeDtypeStruct(shape, jnp.float32), blocks) for name in call.wants},
        statistics=("m", "l", "at", "total"),
        flops=6,
        transcendentals=x.size,
    )
    batch = call.dims["batch"]
    return tuple(walk.from_numbers(found[o.name], batch) if o.name in found else None for o in call.spec.outputs)


def share_of(call: Call) -> dict[str, Any]:
    """The options as the kernels take them."""
    options = call.options
    return {"ignored": options["ignore_index"], "even": options["label_smoothing"], "z": options["z_loss"]}


GRADIENT_HELD = VmemUse(streamed=2, computed=4)


def gradient_kernel(ref: Refs, *, walk: BlockWalk, ignored: int, even: float, z: float, classes: int) -> None:
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


@BACKEND.implements("cross_entropy_vjp", **in_walks(GRADIENT_HELD))
def cross_entropy_vjp(call: Call, config: RowsConfig) -> tuple[jax.Array]:
    first, labels = call.options["first_class"], call.arrays["labels"]
    if first:  # counted from the first class that is here; one that is not may be none of these
        counted = labels != call.options["ignore_index"]
        here = jnp.where(counted & (labels >= first), labels.astype(jnp.int32) - first, jnp.where(counted, -1, NONE))
        call = call.replace(arrays={**call.arrays, "labels": here}, options={**call.options, "ignore_index": NONE})
    return gradient(call, config, call.options["classes"] or first + call.dims["n"])


def gradient(call: Call, config: RowsConfig, classes: int) -> tuple[jax.Array]:
    """The gradient by the logits of n of so many classes, by whose places among them the labels go."""
    x, walk = call.arrays["logits"], walk_of(call, config)._replace(sweeps=1)
    names = [name for name in ("lse", "lse_low", "d_loss") if call.arrays[name] is not None]
    of_rows = {name: call.arrays[name].astype(jnp.float32) for name in names}
    of_rows["labels"] = call.arrays["labels"].astype(jnp.int32)
    found = launched(
        call,
        partial(gradient_kernel, **share_of(call), classes=classes),
        walk,
        GRADIENT_HELD,
        rows={"x": x},
        written={"d_x": x.dtype},
        inputs={name: (walk.to_numbers(array), walk.numbers()[1]) for name, array in of_rows.items()},
        statistics=(),
        flops=6,
        transcendentals=x.size,
    )
    return (found["d_x"],)
