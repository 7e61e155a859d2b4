"""The experts of each token on TPUs, and their weights; and the gradient.

    s = exp(x - m) / sum exp(x - m) or 1 / (1 + exp(-x)),    order by s + bias, or by x where there is no bias
    w = scale s[indices], or these over their sum

logits, d_logits: (*batch, experts); weights, indices: (*batch, k). The grid, the blocks and the integers by which
numbers are compared are those of ``top_k``: a step holds some rows whole, and pass t of k finds expert t of each.

Of each group the two greatest are a maximum, its position, and the maximum of the others, over whole rows of which the
group is a part; the integers give the numbers back, whose sum stands at all experts of the group. Passes of the same
kind then keep groups, and all other experts have the least key.

The gradient's pass t puts the cotangent t where its expert is. Then each row is by its formula.

block_rows: rows a block holds, with all their experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import TokenRowsConfig
from portakern.backends.pallas.lib.blocks import Refs, positions
from portakern.backends.pallas.tpu.swiglu import open_and_shut
from portakern.backends.pallas.tpu.top_k import (
    LEAST,
    MOST,
    best,
    bits,
    by_rows,
    column,
    key,
    number,
    refused,
    rows_that_fit,
    spread,
    turned,
)
from portakern.core.call import Call

VALUES = 10
"""Numbers of 32 bits that are held of each logit."""

LEAST_SUM = 1e-20


def exponentials(x: Any) -> tuple[Any, Any, Any]:
    """exp(x - m) of rows, their sums, and m."""
    m = jnp.max(x, axis=1, keepdims=True)
    p = jnp.exp(x - m)
    return p, jnp.sum(p, axis=1, keepdims=True), m


def number_of(key: Any) -> Any:
    """The number of turned bits."""
    return number(key ^ ((key >> 31) & MOST), jnp.float32)


def in_kept_groups(ref: Refs, groups: int, kept: int) -> Any:
    """1 for experts of the groups whose two greatest keys give the greatest sums, 0 for others."""
    shape = ref.key.shape
    n, width = shape[1], np.int32(shape[1] // groups)
    position, nothing = positions(shape, 1, 0), jnp.zeros(shape, jnp.int32)

    def one_group(g: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        totals, of = state
        inside = (position >= g * width) & (position < (g + 1) * width)
        mine = jnp.where(inside, ref.key[...], LEAST)
        first = jnp.max(mine, axis=1, keepdims=True)
        at = jnp.min(jnp.where(inside & (mine == first), position, n), axis=1, keepdims=True)
        second = jnp.max(jnp.where(position == at, LEAST, mine), axis=1, keepdims=True)
        total = turned(number_of(first) + number_of(second), True)
        return jnp.where(inside, total, totals), jnp.where(inside, g, of)

    totals, of = lax.fori_loop(np.int32(0), np.int32(groups), one_group, (nothing, nothing))

    def one_pass(t: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        found, at, chosen = state
        later = (totals < found) | ((totals == found) & (of > at))
        top = jnp.max(jnp.where(later, totals, LEAST), axis=1, keepdims=True)
        at = jnp.min(jnp.where(later & (totals == top), of, groups), axis=1, keepdims=True)
        return top, at, jnp.where(of == at, np.int32(1), chosen)

    rows = shape[0]
    start = jnp.full((rows, 1), MOST), jnp.full((rows, 1), np.int32(-1)), nothing
    return lax.fori_loop(np.int32(0), np.int32(kept), one_pass, start)[2]


def kernel(ref: Refs, *, k: int, groups: int, kept: int, softmax: bool, normalize: bool, scale: float) -> None:
    x, biased = ref.logits[...].astype(jnp.float32), "bias" in ref
    if softmax and (biased or kept < groups or not normalize):
        p, l, m = exponentials(x)
    if biased or kept < groups:
        s = p / l if softmax else open_and_shut(x)[0]
        ref.key[...] = turned(s + ref.bias[...] if biased else s, True)
        if kept < groups:
            chosen = in_kept_groups(ref, groups, kept)
            ref.key[...] = jnp.where(chosen > 0, ref.key[...] if biased else turned(x, True), LEAST)
    if not biased and kept >= groups:
        ref.key[...] = turned(x, True)

    found, places = best(ref, lambda: ref.logits[...], k)
    x = number(found, jnp.float32)
    if softmax:
        if normalize:
            p, l, _ = exponentials(x)
            w = p / l
        else:
            w = jnp.exp(x - m) / l
    else:
        w, _ = open_and_shut(x)
        if normalize:
            w = w / (jnp.sum(w, axis=1, keepdims=True) + LEAST_SUM)
    ref.weights[...] = w * scale
    ref.indices[...] = places


def gradient_kernel(ref: Refs, *, k: int, softmax: bool, normalize: bool, scale: float) -> None:
    shape = ref.d_logits.shape
    position = positions(shape, 1, 0)

    def one_pass(t: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        mine = position == column(ref.indices[...], t)
        return jnp.where(mine, column(bits(ref.d_weights[...]), t), state[0]), jnp.where(mine, np.int32(1), state[1])

    nothing = jnp.zeros(shape, jnp.int32)
    found, marked = spread(k, one_pass, (nothing, nothing))
    x, g, chosen = ref.logits[...].astype(jnp.float32), number(found, jnp.float32), marked > 0
    if softmax:
        p, l, _ = exponentials(jnp.where(chosen, x, -jnp.inf) if normalize else x)
        h = p / l
        d = h * (g - jnp.sum(h * g, axis=1, keepdims=True))
    else:
        s, q = open_and_shut(x)
        if normalize:
            h = jnp.where(chosen, s, 0.0)
            h = h / (jnp.sum(h, axis=1, keepdims=True) + LEAST_SUM)
            d = q * (h * (g - jnp.sum(h * g, axis=1, keepdims=True)))
        else:
            d = s * q * g
    d = d * scale
    if normalize or not softmax:
        d = jnp.where(chosen, d, 0.0)
    ref.d_logits[...] = d.astype(ref.d_logits.dtype)


def default_tiling(call: Call) -> TokenRowsConfig:
    return rows_that_fit(call, VALUES)


def supports(call: Call, config: TokenRowsConfig) -> str | None:
    return refused(call, config, VALUES)


def weighing(call: Call) -> dict[str, Any]:
    """The options of weights."""
    options = call.options
    softmax = options["scoring"] == "softmax"
    return {"k": call.dims["k"], "softmax": softmax, "normalize": options["normalize"], "scale": options["scale"]}


@BACKEND.implements("router", key=key, tiling=default_tiling, supports=supports, config=TokenRowsConfig)
def router(call: Call, config: TokenRowsConfig) -> tuple[jax.Array, ...]:
    groups, bias, shape = call.dims["groups"], call.arrays["bias"], call.outputs["weights"][0]
    one = partial(kernel, groups=groups, kept=call.options["groups_kept"] or groups, **weighing(call))
    forms = {n: jax.ShapeDtypeStruct(shape, dtype) for n, dtype in (("weights", jnp.float32), ("indices", jnp.int32))}
    shared = {} if bias is None else {"bias": bias}
    found = by_rows(call, config, one, {"logits": call.arrays["logits"]}, forms, values=VALUES, shared=shared)
    return found["weights"], found["indices"]


@BACKEND.implements("router_vjp", key=key, tiling=default_tiling, supports=supports, config=TokenRowsConfig)
def router_vjp(call: Call, config: TokenRowsConfig) -> tuple[jax.Array]:
    x, given = call.arrays["logits"], {name: call.arrays[name] for name in ("logits", "indices", "d_weights")}
    form = {"d_logits": jax.ShapeDtypeStruct(x.shape, x.dtype)}
    return (by_rows(call, config, partial(gradient_kernel, **weighing(call)), given, form, values=VALUES)["d_logits"],)
