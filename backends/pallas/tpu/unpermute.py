"""Each token's rows, where positions say that they stand, weighted and summed, on TPUs; and the gradients.

    y[t] = sum_j weights[t, j] x[positions[t, j]]
    d_x[positions[t, j]] = weights[t, j] d_y[t]        d_weights[t, j] = d_y[t] . x[positions[t, j]]

x: (rows, d), positions and weights: (tokens, k) -> y: (tokens, d). The grid is (blocks of tokens, blocks of d, k). A
step takes one term of each token of its block: as in ``embedding``, the rows among which its own lies, by an index map
that reads the position in scalar memory. It is widened, weighted, and added to sums in VMEM, which the last term rounds
and writes. So a token's terms are added in their order. The weight of a term is found by a mask along the lanes.

The gradient of x is such a sum of one term a row: XLA turns positions around, so that each row knows its token and its
weight. The gradient of the weights has the same grid, whose steps add to one column of their block of results.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import EmbeddingConfig
from portakern.backends.pallas.lib.blocks import Refs, even_block, padded, positions
from portakern.backends.pallas.lib.mosaic_tpu.chip import (
    LANES,
    dtype_refused,
    launch,
    off_grid,
    over_vmem,
    sublanes,
    whole_lanes,
)
from portakern.backends.pallas.tpu.embedding import (
    TALL,
    default_tiling,
    key,
    resident,
    rows_of,
    scratch_of,
    too_many_scalars,
    word_of,
)
from portakern.core.call import Call


def term_of_block(ref: Refs, tokens: int, terms: int) -> Any:
    """The rows of the step's term of each token, in float32; zeros where there is none."""
    first, j = pl.program_id(0) * tokens, pl.program_id(2)
    for t in range(tokens):
        row = ref.ids[(first + t) * terms + j]
        ref.found[t : t + 1, :] = jnp.where(row < 0, 0, word_of(ref, t, row))
    return widened(ref.found[...], ref.row0.dtype)


def widened(words: Any, dtype: Any) -> Any:
    """Numbers whose bits stand in words, in float32. Those of bfloat16 are the upper half of it; float16, which TPUs
    lack, is for the interpreter."""
    if dtype == jnp.float16:
        return lax.bitcast_convert_type(words.astype(jnp.int16), dtype).astype(jnp.float32)
    return lax.bitcast_convert_type(words << 16 if dtype.itemsize == 2 else words, jnp.float32)


def kernel(ref: Refs, *, tokens: int, terms: int) -> None:
    """Adds one term of each token."""
    j = pl.program_id(2)
    weights = ref.weights[...]
    weight = jnp.sum(jnp.where(positions(weights.shape, 1, 0) == j, weights, 0.0), 1, keepdims=True)

    @pl.when(j == 0)
    def begin() -> None:
        ref.acc[...] = jnp.zeros_like(ref.acc)

    ref.acc[...] += weight * term_of_block(ref, tokens, terms)

    @pl.when(j == terms - 1)
    def write() -> None:
        ref.y[...] = ref.acc[...].astype(ref.y.dtype)


def dots(ref: Refs, *, tokens: int, terms: int, d: int) -> None:
    """Adds to a column of the results what a block of d has of one term's dots."""
    c, j = pl.program_id(1), pl.program_id(2)

    @pl.when((c == 0) & (j == 0))
    def begin() -> None:
        ref.d_weights[...] = jnp.zeros_like(ref.d_weights)

    x = term_of_block(ref, tokens, terms)
    product = x * ref.d_y[...].astype(jnp.float32)
    product = jnp.where(positions(product.shape, 1, c * product.shape[1]) < d, product, 0.0)
    column = positions(ref.d_weights.shape, 1, 0) == j
    ref.d_weights[...] += jnp.where(column, jnp.sum(product, 1, keepdims=True), 0.0)


def refused(call: Call, config: EmbeddingConfig, terms: int, wide: int) -> str | None:
    """Why steps cannot take one term each, of ``terms`` in all, ``wide`` of each token."""
    dtype, d = jnp.dtype(call.dtype), call.dims["d"]
    tokens, n = sublanes(dtype), even_block(d, config.block_n, LANES)
    return (
        dtype_refused(call)
        or off_grid("block_n", config.block_n, d, LANES)
        or too_many_scalars(4 * (terms + tokens * wide), f"the positions of {terms} rows")
        or over_vmem(call, summing(tokens, n, dtype.itemsize, wide), "block_n")
    )


def summing(tokens: int, n: int, size: int, terms: int) -> int:
    """The VMEM, in bytes, of one step: what embedding's has, words of each row, sums, and the numbers of terms."""
    return resident(tokens, n, size) + 4 * tokens * (2 * n + 2 * whole_lanes(terms))


def scratch(tokens: int, n: int, size: int) -> dict[str, Any]:
    """As embedding's, but for rows of which each number has a word."""
    return scratch_of(tokens, n, size) | {"found": jax.ShapeDtypeStruct((tokens, n), jnp.int32)}


def named(slots: jax.Array, rows: int) -> jax.Array:
    """Positions, and -1 for those that are no row."""
    return jnp.where((slots >= 0) & (slots < rows), slots, -1).astype(jnp.int32)


def weighted_sums(call: Call, config: EmbeddingConfig, x: jax.Array, slots: jax.Array, weights: jax.Array) -> jax.Array:
    """y of rows x; ``slots``: positions, each of which is a row or -1."""
    (number, terms), d, size = slots.shape, x.shape[1], x.dtype.itemsize
    tokens, n = sublanes(x.dtype), even_block(d, config.block_n, LANES)
    spare = ((0, padded(number, tokens) - number), (0, 0))
    _, dtype = call.outputs[call.spec.outputs[0].name]
    found = launch(
        call,
        partial(kernel, tokens=tokens, terms=terms),
        f"portakern_{call.spec.name}",
        (pl.cdiv(number, tokens), pl.cdiv(d, n), terms),
        in_order=1,
        scalars={"ids": jnp.pad(slots, spare, constant_values=-1).reshape(-1)},
        inputs=rows_of(x, tokens, n, lambda t, i, c, j: (i * tokens + t) * terms + j)
        | {
            "weights": (
                jnp.where(slots < 0, 0.0, weights).astype(jnp.float32),
                pl.BlockSpec((tokens, terms), lambda i, c, j, _: (i, 0)),
            )
        },
        outputs={"y": (jax.ShapeDtypeStruct((number, d), dtype), pl.BlockSpec((tokens, n), lambda i, c, j, _: (i, c)))},
        scratch=scratch(tokens, n, size) | {"acc": (tokens, n)},
        vmem=summing(tokens, n, size, terms),
        cost=pl.CostEstimate(
            flops=2 * number * terms * d, transcendentals=0, bytes_accessed=(TALL * terms + 1) * number * d * size
        ),
    )
    return found["y"]


def supports(call: Call, config: EmbeddingConfig) -> str | None:
    return refused(call, config, call.dims["tokens"] * call.dims["k"], call.dims["k"])


@BACKEND.implements("unpermute", key=key, tiling=default_tiling, supports=supports, config=EmbeddingConfig)
def unpermute(call: Call, config: EmbeddingConfig) -> tuple[jax.Array]:
    x, weights = call.arrays["x"], call.arrays["weights"]
    return (weighted_sums(call, config, x, named(call.arrays["positions"], len(x)), weights),)


# ------------------------------------------------------------------------------------------------------------ gradient
def supports_gradient(call: Call, config: EmbeddingConfig) -> str | None:
    return supports(call, config) or refused(call, config, call.dims["rows"], 1)


@BACKEND.implements("unpermute_vjp", key=key, tiling=default_tiling, supports=supports_gradient, config=EmbeddingConfig)
def unpermute_vjp(call: Call, config: EmbeddingConfig) -> tuple[jax.Array | None, ...]:
    x, weights, d_y = (call.arrays[name] for name in ("x", "weights", "d_y"))
    slots, d_x, d_weights = named(call.arrays["positions"], len(x)), None, None
    if "d_x" in call.wants:
        term = jnp.arange(slots.size, dtype=jnp.int32)
        at = jnp.where(slots < 0, len(x), slots).reshape(-1)
        owner = jnp.full(len(x), -1, jnp.int32).at[at].set(term, mode="drop")
        weight = weights.reshape(-1)[jnp.maximum(owner, 0)][:, None]
        d_x = weighted_sums(call, config, d_y, jnp.where(owner < 0, -1, owner // slots.shape[1])[:, None], weight)
    if "d_weights" in call.wants:
        d_weights = jnp.where(slots < 0, 0.0, dots_of(call, config, x, slots, d_y))
    return d_x, d_weights


def dots_of(call: Call, config: EmbeddingConfig, x: jax.Array, slots: jax.Array, d_y: jax.Array) -> jax.Array:
    """A dot of row and cotangent for each term."""
    (number, terms), d, size = slots.shape, x.shape[1], x.dtype.itemsize
    tokens, n = sublanes(x.dtype), even_block(d, config.block_n, LANES)
    spare = ((0, padded(number, tokens) - number), (0, 0))
    found = launch(
        call,
        partial(dots, tokens=tokens, terms=terms, d=d),
        f"portakern_{call.spec.name}_dots",
        (pl.cdiv(number, tokens), pl.cdiv(d, n), terms),
        in_order=2,
        scalars={"ids": jnp.pad(slots, spare, constant_values=-1).reshape(-1)},
        inputs=rows_of(x, tokens, n, lambda t, i, c, j: (i * tokens + t) * terms + j)
        | {"d_y": (d_y, pl.BlockSpec((tokens, n), lambda i, c, j, _: (i, c)))},
        outputs={
            "d_weights": (
                jax.ShapeDtypeStruct((number, terms), jnp.float32),
                pl.BlockSpec((tokens, terms), lambda i, c, j, _: (i, 0)),
            )
        },
        scratch=scratch(tokens, n, size),
        vmem=summing(tokens, n, size, terms),
        cost=pl.CostEstimate(
            flops=2 * number * terms * d, transcendentals=0, bytes_accessed=(TALL * terms + 1) * number * d * size
        ),
    )
    return found["d_weights"]
