"""Gradients of the cross entropy of the logits of a linear layer on TPUs, a chunk of classes at a time.

    d_hidden = d_loss slope        d_weight_j = sum over rows of d_loss b_j h

hidden h, slope: (*batch, d), weight: (n, d), labels, lse, d_loss: (*batch) -> d_hidden: (*batch, d), d_weight: (n, d).
One chunk after the other, in a loop of XLA's, the logits of all rows for ``chunk_n`` classes are in memory, in hidden's
dtype: matmul makes them, the gradient of cross_entropy makes d_loss b of them, and matmul takes the sum over all rows,
so that it is rounded once. The product of each row with its cotangent is left to XLA.

Source: Wijmans et al. 2024, "Cut your losses in large-vocabulary language models", section 4, for logits taken again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.tpu import cross_entropy_vjp as brackets
from portakern.backends.pallas.tpu._chip import dtype_refused
from portakern.backends.pallas.tpu.linear_cross_entropy import inner, multiply, one_after_another, refused
from portakern.core.call import Call

NONE = -(2**31)
"""The label of a row that is ignored, which no class of a chunk has."""


def default_tiling(call: Call) -> dict[str, int]:
    return {"chunk_n": 4096}


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    rows, n, d = math.prod(call.dims["batch"]), min(tiling["chunk_n"], call.dims["n"]), call.dims["d"]
    if "d_weight" not in call.wants:
        return dtype_refused(call)
    return refused(call, rows, n, d) or refused(call, n, d, rows)


@BACKEND.implements("linear_cross_entropy_vjp", tiling=default_tiling, supports=supports)
def linear_cross_entropy_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array | None, ...]:
    counted = call.arrays["labels"] != call.options["ignore_index"]
    d_hidden = d_weight = None
    if "d_hidden" in call.wants:
        slope, d_loss = call.arrays["slope"], call.arrays["d_loss"]
        scaled = (slope.astype(d_loss.dtype) * d_loss[..., None]).astype(slope.dtype)
        d_hidden = jnp.where(counted[..., None], scaled, jnp.zeros_like(scaled))
    if "d_weight" in call.wants:
        d_weight = weight_gradient(call, tiling, counted)
    return d_hidden, d_weight


def weight_gradient(call: Call, tiling: Mapping[str, int], counted: Any) -> jax.Array:
    weight, n = call.arrays["weight"], call.dims["n"]
    hidden = call.arrays["hidden"].reshape(-1, call.dims["d"])
    labels = jnp.where(counted, call.arrays["labels"].astype(jnp.int32), NONE).reshape(-1)
    lse, d_loss = (call.arrays[name].reshape(-1) for name in ("lse", "d_loss"))
    among = call.replace(options={**call.options, "ignore_index": NONE})

    def piece(w: Any, classes: Any) -> tuple[jax.Array]:
        """``classes``: those of these rows of weight."""
        x = multiply(call, hidden, w.T)
        here = jnp.where(labels == NONE, NONE, labels - classes[0])
        of, tiles = inner(among, brackets, {"batch": labels.shape, "n": len(w)}, x, here, lse, d_loss)
        (d_x,) = brackets.gradient(of, tiles, n)
        return (multiply(call, d_x.T, hidden),)

    return one_after_another(piece, tiling["chunk_n"], weight, jnp.arange(n, dtype=jnp.int32))[0]
