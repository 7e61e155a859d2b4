"""The twins of ``jax.lax.dot_general``, which libraries of layers take as a function, and of ``jax.lax.ragged_dot``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from portakern.api import op
from portakern.errors import SpecError
from portakern.frameworks.jax.arrays import refuse_deleted
from portakern.frameworks.jax.functions import lowered
from portakern.spec.options import shown

__all__ = ["dot_general", "ragged_dot"]

TF32 = jax.lax.DotAlgorithmPreset.TF32_TF32_F32


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """``jax.lax.dot_general`` on the matmul op, also a ``dot_general`` of flax's layers (nnx and linen).

    The contracted axes are merged, and so are the free axes of each operand. The result is one matrix product, or a
    batch of products.

    Args:
      lhs, rhs: arrays of one dtype, of any shapes that agree.
      dimension_numbers: ((contracted axes of lhs, of rhs), (batch axes of lhs, of rhs)), from 0 up.
      precision: products accumulate in float32 for every ``jax.lax.Precision``; the algorithm TF32_TF32_F32 rounds
        float32 operands to 10 bits; other algorithms are refused by name.
      preferred_element_type: the result's dtype; sums are rounded to it once. None: that of lhs.
      out_sharding: None; the product is computed on the arrays' devices.
      implementation: the name of a portakern backend; None: chosen from the arrays.

    Returns:
      the batch axes, then the free axes of lhs, then those of rhs.

    Raises:
      SpecError: axes, extents or dtypes that do not agree. UnsupportedError: the backend cannot.
    """
    if out_sharding is not None:
        raise SpecError(
            f"dot_general: out_sharding is {shown(out_sharding)}; shard the call with jax.shard_map instead"
        )
    refuse_deleted("dot_general", lhs=lhs, rhs=rhs)
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    contracted, batch = (
        tuple(_axes(side, a.ndim, which) for side, a in zip(pair, (lhs, rhs), strict=True))
        for pair, which in zip(dimension_numbers, ("contracted", "batch"), strict=True)
    )
    for which, (left, right) in (("contracted", contracted), ("batch", batch)):
        extents = [tuple(a.shape[i] for i in axes) for a, axes in ((lhs, left), (rhs, right))]
        if extents[0] != extents[1]:
            raise SpecError(
                f"dot_general: the {which} axes of lhs, {left}, have extents {extents[0]}, and those of rhs, {right}, "
                f"have {extents[1]}; expected the same"
            )
    free = [
        tuple(i for i in range(a.ndim) if i not in (*c, *b))
        for a, c, b in zip((lhs, rhs), contracted, batch, strict=True)
    ]
    lead, m, k, n = (
        tuple(a.shape[i] for i in axes)
        for a, axes in ((lhs, batch[0]), (lhs, free[0]), (lhs, contracted[0]), (rhs, free[1]))
    )
    samples = (math.prod(lead),) if lead else ()
    a = jnp.transpose(lhs, (*batch[0], *free[0], *contracted[0])).reshape(*samples, math.prod(m), math.prod(k))
    b = jnp.transpose(rhs, (*batch[1], *contracted[1], *free[1])).reshape(*samples, math.prod(k), math.prod(n))
    dtype = None if preferred_element_type is None else jnp.dtype(preferred_element_type).name
    product = op("matmul", backend=implementation)(
        a, b, precision=_precision("dot_general", precision), out_dtype=dtype
    )
    return product.reshape(*lead, *m, *n)


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: jax.Array | None = None,
    out_sharding: Any = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """``jax.lax.ragged_dot`` on the grouped_matmul op, with its gradients.

    Args:
      lhs: (m, k), the rows of a group beside each other; rhs: (g, k, n), a matrix for each group, of lhs's dtype.
      group_sizes: (g,), integers: how many rows each group has, 0 and more, at most m together.
      precision, preferred_element_type: as in :func:`dot_general`.
      group_offset: None, as JAX's own kernels have it.
      out_sharding: None; the product is computed on the arrays' devices.
      implementation: the name of a portakern backend; None: chosen from the arrays.

    Returns:
      (m, n). Rows beyond the groups' are zeros, whatever lhs holds there. NaN and infinities stay in their group.

    Raises:
      SpecError: shapes or dtypes that do not agree, group_offset, out_sharding. UnsupportedError: the backend cannot.
    """
    for name, value, instead in (
        ("group_offset", group_offset, "pass the groups' own part of rhs and of lhs instead"),
        ("out_sharding", out_sharding, "shard the call with jax.shard_map instead"),
    ):
        if value is not None:
            raise SpecError(f"ragged_dot: {name} is {shown(value)}; expected None: {instead}")
    refuse_deleted("ragged_dot", lhs=lhs, rhs=rhs, group_sizes=group_sizes)
    lhs, rhs, sizes = jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(group_sizes)
    if not jnp.issubdtype(sizes.dtype, jnp.integer) or sizes.ndim != 1:
        raise SpecError(
            f"ragged_dot: group_sizes is {sizes.dtype} of shape {sizes.shape}; expected integers of shape (g,), how "
            "many rows each group has"
        )
    counted = jnp.int64 if sizes.dtype.itemsize == 8 else jnp.int32
    dtype = None if preferred_element_type is None else jnp.dtype(preferred_element_type).name
    product = op("grouped_matmul", backend=implementation)
    how = {"precision": _precision("ragged_dot", precision), "out_dtype": dtype}
    try:
        return product(lhs, rhs, jnp.cumsum(sizes, dtype=counted), **how)
    except SpecError as e:
        raise SpecError(f"ragged_dot: {e} (a is lhs, b is rhs, group_ends the sums of group_sizes)") from e


def _axes(axes: Sequence[int], ndim: int, which: str) -> tuple[int, ...]:
    """The axes as a tuple.

    Raises:
      SpecError: one that the array does not have, or has twice.
    """
    found = tuple(map(int, axes))
    if any(not 0 <= i < ndim for i in found) or len(set(found)) < len(found):
        raise SpecError(
            f"dot_general: {which} axes are {found}; expected different ones, from 0 up, of an array of {ndim} axes"
        )
    return found


def _precision(function: str, requested: Any) -> str:
    """The op's word for a precision."""
    if requested in (TF32, TF32.name):
        return "tf32"
    refused = lowered(requested)
    if refused is not None:
        raise SpecError(
            f"{function}: precision is {shown(refused)}; sums are as exact as float32 makes them: leave it out, or "
            f"name a jax.lax.Precision, or {TF32.name}"
        )
    return "ieee"
