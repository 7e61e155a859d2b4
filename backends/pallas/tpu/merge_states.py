"""Merge of two attentions over disjoint sets of keys on TPUs, and its gradients.

    o = w_a o_a + w_b o_b        lse = log(exp(lse_a) + exp(lse_b))        w_a = 1 / (1 + exp(lse_b - lse_a))
    d_o_a = w_a d_o              d_lse_a = w_a d_lse + w_a w_b S           S = sum d_o (o_a - o_b) over d

in natural logarithms, w_b = 1 - w_a. o_a, o_b, o, d_o, d_o_a, d_o_b: (*batch, tokens, heads, d) are read and written as
rows (batch, heads, tokens) of d numbers, the order of lse_a, lse_b, lse, d_lse, d_lse_a, d_lse_b: a transposition that
XLA makes and that cancels against attention's own. One number a row lies along lanes, (row blocks, 1, block_rows), and
is turned to a column beside a block. The grid is (row blocks): nothing is carried from step to step, and nothing is
masked, as what lies beyond an array reaches only what is dropped.

block_rows: rows a block holds, with all their numbers.

Source: Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference" (2023).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import TokenRowsConfig
from portakern.backends.pallas.lib.blocks import Refs, row_block
from portakern.backends.pallas.lib.mosaic_tpu.chip import (
    LANES,
    dtype_refused,
    launch,
    off_grid,
    over_vmem,
    sublanes,
    vmem_granted,
    whole_lanes,
)
from portakern.core.call import Call

USUAL_D = 128  # numbers of a head, for which the rows of tables are written


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype}


def height(call: Call) -> int:
    """The number of rows."""
    return math.prod(call.dims["batch"]) * call.dims["heads"] * call.dims["tokens"]


def fit(call: Call, config: TokenRowsConfig) -> TokenRowsConfig:
    """Fewer rows, where they are longer than usual, and no fewer than the native grid has."""
    longer = pl.cdiv(whole_lanes(call.dims["d"]), USUAL_D)
    rows = [v for v in call.spec.tiling["block_rows"].values if v * longer <= config.block_rows]
    least = min(config.block_rows, sublanes(call.dtype))
    return config.replace(block_rows=max([least, *rows]))


class StateRows(NamedTuple):
    """How the grid sees the arrays of a call: ``shape`` (rows, d), in blocks of ``block_rows``."""

    shape: tuple[int, int]
    block_rows: int

    @classmethod
    def of(cls, call: Call, config: TokenRowsConfig) -> StateRows:
        rows = height(call)
        return cls((rows, call.dims["d"]), row_block(call, rows, config.block_rows, sublanes(call.dtype), even=True))

    @property
    def groups(self) -> int:
        return pl.cdiv(self.shape[0], self.block_rows)

    def blocks(self, name: str) -> pl.BlockSpec:
        """The blocks of an array, of one number a row where it is a lse."""
        if "lse" in name:
            return pl.BlockSpec((None, 1, self.block_rows), lambda group: (group, 0, 0))
        return pl.BlockSpec((self.block_rows, self.shape[1]), lambda group: (group, 0))

    def seen(self, name: str, array: Any) -> Any:
        """An array as the grid sees it."""
        if "lse" not in name:
            return jnp.swapaxes(array, -3, -2).reshape(self.shape)
        beyond = self.groups * self.block_rows - self.shape[0]
        numbers = array.reshape(-1)
        return (jnp.pad(numbers, (0, beyond)) if beyond else numbers).reshape(self.groups, 1, self.block_rows)

    def output_shape(self, name: str, dtype: Any) -> jax.ShapeDtypeStruct:
        """A result as the grid writes it."""
        shape = (self.groups, 1, self.block_rows) if "lse" in name else self.shape
        return jax.ShapeDtypeStruct(shape, dtype)

    def back(self, call: Call, name: str, array: Any) -> Any:
        """What the grid wrote, in its own shape."""
        batch, (tokens, heads, d) = call.dims["batch"], (call.dims[n] for n in ("tokens", "heads", "d"))
        if "lse" in name:
            return array.reshape(-1)[: self.shape[0]].reshape(*batch, heads, tokens)
        return jnp.swapaxes(array.reshape(*batch, heads, tokens, d), -3, -2)


def refused(call: Call, config: TokenRowsConfig, streamed: int, computed: int) -> str | None:
    """Why a TPU cannot hold blocks of so many arrays twice, and so many of float32 beside them, or None."""
    rows = StateRows.of(call, config)
    wide = rows.block_rows * whole_lanes(call.dims["d"])
    needed = wide * (2 * streamed * jnp.dtype(call.dtype).itemsize + 4 * computed) + rows.block_rows * 128 * 4 * 6
    return (
        dtype_refused(call)
        or off_grid("block_rows", config.block_rows, height(call), sublanes(call.dtype))
        or over_vmem(call, needed, "block_rows", vmem_granted(call))
    )


def supports(call: Call, config: TokenRowsConfig) -> str | None:
    return refused(call, config, streamed=3, computed=4)


NO_KEYS = -1.0  # in place of the weight of a part without keys, whose o is not read


class PartWeights(NamedTuple):
    """Of each row, along lanes, the weight of each part or NO_KEYS, and the merged lse."""

    w_a: Any
    w_b: Any
    lse: Any

    @classmethod
    def of(cls, lse_a: Any, lse_b: Any) -> PartWeights:
        has_a, has_b = lse_a != -jnp.inf, lse_b != -jnp.inf
        apart = lse_a - lse_b  # NaN where neither has a key, and nobody reads it
        e = jnp.exp(-jnp.abs(apart))
        high = 1.0 / (1.0 + e)
        low, a_leads = e * high, apart >= 0
        grown = jnp.log(1.0 + jnp.where(lse_a == lse_b, 1.0, e))
        return cls(
            jnp.where(has_a, jnp.where(a_leads, high, low), NO_KEYS),
            jnp.where(has_b, jnp.where(a_leads, low, high), NO_KEYS),
            jnp.where(a_leads, lse_a, lse_b) + grown,
        )


def weighed(weight: Any, o: Any) -> Any:
    """Rows times their weights, 0 of parts without keys: select after the product."""
    return jnp.where(weight == NO_KEYS, 0.0, weight * o.astype(jnp.float32))


def strips(ref: Refs) -> Iterator[tuple[slice, PartWeights]]:
    """A block's rows, as many at a time as numbers lie along the lanes of a register, and what is known of each."""
    height = ref.lse_a.shape[1]
    for start in range(0, height, LANES):
        here = slice(start, min(start + LANES, height))
        yield here, PartWeights.of(ref.lse_a[:, here], ref.lse_b[:, here])


def kernel(ref: Refs) -> None:
    for here, shares in strips(ref):
        ref.lse[:, here] = shares.lse
        merged = weighed(shares.w_a.T, ref.o_a[here, :]) + weighed(shares.w_b.T, ref.o_b[here, :])
        ref.o[here, :] = merged.astype(ref.o.dtype)


def gradient_kernel(ref: Refs) -> None:
    """Parts are there where a gradient of a lse is wanted, and d_lse where there is one."""
    for here, shares in strips(ref):
        d = ref.d_o[here, :]
        if "d_o_a" in ref:
            ref.d_o_a[here, :] = weighed(shares.w_a.T, d).astype(ref.d_o_a.dtype)
        if "d_o_b" in ref:
            ref.d_o_b[here, :] = weighed(shares.w_b.T, d).astype(ref.d_o_b.dtype)
        if "o_a" in ref:
            apart = ref.o_a[here, :].astype(jnp.float32) - ref.o_b[here, :].astype(jnp.float32)
            total = jnp.sum(d.astype(jnp.float32) * apart, axis=1, keepdims=True).T
            has_a, has_b = shares.w_a != NO_KEYS, shares.w_b != NO_KEYS
            slope = jnp.where(has_a & has_b, (shares.w_a * shares.w_b) * total, 0.0)
            g = ref.d_lse[:, here] if "d_lse" in ref else jnp.zeros_like(slope)
            if "d_lse_a" in ref:
                ref.d_lse_a[:, here] = jnp.where(has_a, shares.w_a * g + slope, 0.0)
            if "d_lse_b" in ref:
                ref.d_lse_b[:, here] = jnp.where(has_b, shares.w_b * g - slope, 0.0)


def by_rows(
    call: Call, config: TokenRowsConfig, kernel: Any, inputs: tuple[str, ...], flops: int
) -> dict[str, jax.Array]:
    """What a kernel of the named arrays writes by name; so many operations a number."""
    rows = StateRows.of(call, config)
    wide, size = call.arrays["o_a"].dtype, math.prod(rows.shape)
    arrays = sum("lse" not in name for name in (*inputs, *call.wants))
    found = launch(
        call,
        kernel,
        f"portakern_{call.spec.name}",
        (rows.groups,),
        in_order=0,
        inputs={name: (rows.seen(name, call.arrays[name]), rows.blocks(name)) for name in inputs},
        outputs={
            name: (rows.output_shape(name, jnp.float32 if "lse" in name else wide), rows.blocks(name))
            for name in call.wants
        },
        cost=pl.CostEstimate(
            flops=flops * size, transcendentals=2 * rows.shape[0], bytes_accessed=arrays * size * wide.itemsize
        ),
    )
    return {name: rows.back(call, name, array) for name, array in found.items()}


@BACKEND.implements("merge_states", key=key, fit=fit, supports=supports, config=TokenRowsConfig)
def merge_states(call: Call, config: TokenRowsConfig) -> tuple[jax.Array, ...]:
    found = by_rows(call, config, kernel, ("o_a", "lse_a", "o_b", "lse_b"), flops=3)
    return found["o"], found["lse"]


def supports_gradient(call: Call, config: TokenRowsConfig) -> str | None:
    return refused(call, config, streamed=5, computed=4)


@BACKEND.implements("merge_states_vjp", key=key, fit=fit, supports=supports_gradient, config=TokenRowsConfig)
def merge_states_vjp(call: Call, config: TokenRowsConfig) -> tuple[jax.Array | None, ...]:
    slopes = {"d_lse_a", "d_lse_b"} & {*call.wants}
    inputs = ("lse_a", "lse_b", "d_o", *(("o_a", "o_b") if slopes else ()))
    inputs += ("d_lse",) if slopes and call.arrays["d_lse"] is not None else ()
    found = by_rows(call, config, gradient_kernel, inputs, flops=5)
    return tuple(found.get(o.name) for o in call.spec.outputs)
