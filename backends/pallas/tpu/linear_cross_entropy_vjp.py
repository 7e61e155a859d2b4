"""Gradients of the cross entropy of the logits of a linear layer on TPUs, a chunk of classes at a time.

    d_hidden = d_loss slope        d_weight_j = sum over rows of d_loss b_j h

hidden h, slope: (*batch, d), weight: (n, d), labels, lse, lse_low, d_loss: (*batch) -> d_hidden: (*batch, d),
d_weight: (n, d).
One chunk after the other, in a loop of XLA's, the logits of all rows for ``chunk_n`` classes are in memory, in hidden's
dtype: matmul makes them, the gradient of cross_entropy makes d_loss b of them, and matmul takes the sum over all rows,
so that it is rounded once. d_hidden is one walk over the slope (`Walk`), in which no element waits for another.

Source: Wijmans et al. 2024, "Cut your losses in large-vocabulary language models", section 4, for logits taken again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.common import Refs
from portakern.backends.pallas.tpu import cross_entropy_vjp as brackets
from portakern.backends.pallas.tpu._rows import Walk, launched
from portakern.backends.pallas.tpu.layernorm import supports as along_rows
from portakern.backends.pallas.tpu.layernorm import walk_of
from portakern.backends.pallas.tpu.linear_cross_entropy import inner, multiply, one_after_another, refused
from portakern.core.call import Call

NONE = -(2**31)
"""The label of a row that is ignored, which no class of a chunk has."""


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype}


def default_tiling(call: Call) -> dict[str, int]:
    return {"chunk_n": 4096}


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    rows, n, d = math.prod(call.dims["batch"]), min(tiling["chunk_n"], call.dims["n"]), call.dims["d"]
    reason = along_rows(*scaling(call), held=brackets.HELD) if "d_hidden" in call.wants else None
    if reason or "d_weight" not in call.wants:
        return reason
    return refused(call, rows, n, d) or refused(call, n, d, rows)


@BACKEND.implements("linear_cross_entropy_vjp", key=key, tiling=default_tiling, supports=supports)
def linear_cross_entropy_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array | None, ...]:
    d_hidden = hidden_gradient(call) if "d_hidden" in call.wants else None
    return d_hidden, weight_gradient(call, tiling) if "d_weight" in call.wants else None


def scaling(call: Call) -> tuple[Call, Mapping[str, int]]:
    """The rows of the slope as those of logits, and the tiling of their gradient, which reads and writes as much."""
    names = ("slope", "labels", "lse", "d_loss", "lse_low")
    dims = {"batch": call.dims["batch"], "n": call.dims["d"]}
    return inner(call, brackets, dims, *(call.arrays[name] for name in names))


def kernel(ref: Refs, *, walk: Walk, ignored: int) -> None:
    d_hidden = walk.turned(ref.d_loss[...]) * ref.slope[...].astype(jnp.float32)
    ignores = walk.turned(ref.labels[...]) == ignored
    ref.d_hidden[...] = jnp.where(ignores, 0.0, d_hidden).astype(ref.d_hidden.dtype)


def hidden_gradient(call: Call) -> jax.Array:
    of, tiles = scaling(call)
    slope, walk = call.arrays["slope"], walk_of(of, tiles)._replace(sweeps=1)
    of_rows = {"labels": call.arrays["labels"].astype(jnp.int32), "d_loss": call.arrays["d_loss"].astype(jnp.float32)}
    found = launched(
        of.replace(spec=call.spec),
        partial(kernel, ignored=call.options["ignore_index"]),
        walk,
        brackets.HELD,
        rows={"slope": slope},
        written={"d_hidden": slope.dtype},
        inputs={name: (walk.to_numbers(array), walk.numbers()[1]) for name, array in of_rows.items()},
        statistics=(),
        flops=1,
        transcendentals=0,
    )
    return found["d_hidden"]


def weight_gradient(call: Call, tiling: Mapping[str, int]) -> jax.Array:
    weight, n = call.arrays["weight"], call.dims["n"]
    hidden = call.arrays["hidden"].reshape(-1, call.dims["d"])
    counted = call.arrays["labels"] != call.options["ignore_index"]
    labels = jnp.where(counted, call.arrays["labels"].astype(jnp.int32), NONE).reshape(-1)
    lse, d_loss, low = (
        None if call.arrays[name] is None else call.arrays[name].reshape(-1) for name in ("lse", "d_loss", "lse_low")
    )
    among = call.replace(options={**call.options, "ignore_index": NONE})

    def piece(w: Any, classes: Any) -> tuple[jax.Array]:
        """``classes``: those of these rows of weight."""
        x = multiply(call, hidden, w.T)
        here = jnp.where(labels == NONE, NONE, labels - classes[0])
        of, tiles = inner(among, brackets, {"batch": labels.shape, "n": len(w)}, x, here, lse, d_loss, low)
        (d_x,) = brackets.gradient(of, tiles, n)
        return (multiply(call, d_x.T, hidden),)

    return one_after_another(piece, tiling["chunk_n"], weight, jnp.arange(n, dtype=jnp.int32))[0]
