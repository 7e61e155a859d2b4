"""The rows of tokens sorted by their experts on TPUs, where they went and where experts end; and the gradient.

    y[positions[t, j]] = x[t], where positions sorts the pairs (t, j) by indices[t, j], equal ones as they stand
    d_x[t] = sum_j d_y[positions[t, j]]

XLA sorts the pairs, which are integers, finds where experts end, and turns the order around. The kernel is
``embedding``'s, which gathers the rows of tokens, with zeros for a row of no token. The gradient is ``unpermute`` with
weights of 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import EmbeddingConfig
from portakern.backends.pallas.tpu import embedding as rows
from portakern.backends.pallas.tpu import unpermute as sums
from portakern.core.call import Call


def pairs_of(call: Call) -> int:
    pairs: int = call.dims["tokens"] * call.dims["k"]
    return pairs


def supports(call: Call, config: EmbeddingConfig) -> str | None:
    return rows.refused(call, config, pairs_of(call), f"the tokens of {pairs_of(call)} rows")


@BACKEND.implements("permute", key=rows.key, tiling=rows.default_tiling, supports=supports, config=EmbeddingConfig)
def permute(call: Call, config: EmbeddingConfig) -> tuple[jax.Array, ...]:
    indices, experts, pairs = call.arrays["indices"], call.dims["experts"], pairs_of(call)
    expert = jnp.where((indices >= 0) & (indices < experts), indices, experts).astype(jnp.int32).reshape(-1)
    place = jnp.arange(pairs, dtype=jnp.int32)
    expert, order = lax.sort((expert, place), num_keys=1)
    group_ends = jnp.searchsorted(expert, jnp.arange(experts, dtype=jnp.int32), side="right").astype(jnp.int32)
    there = expert < experts
    positions = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.where(there, place, -1), unique_indices=True)
    token = jnp.where(there, order // call.dims["k"], -1)
    y = rows.gathered(call, config, call.arrays["x"], token, 0.0)
    return y, positions.reshape(indices.shape), group_ends


# ------------------------------------------------------------------------------------------------------------ gradient
def supports_gradient(call: Call, config: EmbeddingConfig) -> str | None:
    return sums.refused(call, config, pairs_of(call), call.dims["k"])


@BACKEND.implements(
    "permute_vjp", key=rows.key, tiling=rows.default_tiling, supports=supports_gradient, config=EmbeddingConfig
)
def permute_vjp(call: Call, config: EmbeddingConfig) -> tuple[jax.Array]:
    d_y = call.arrays["d_y"]
    slots = sums.named(call.arrays["positions"], len(d_y))
    return (sums.weighted_sums(call, config, d_y, slots, jnp.ones(slots.shape, jnp.float32)),)
