"""The twin of ``jax.numpy.take`` along the first axis, on the embedding op."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from portakern.api import op
from portakern.errors import SpecError, UnsupportedError
from portakern.frameworks.jax.arrays import refuse_deleted
from portakern.spec.options import shown

__all__ = ["take"]


def take(
    a: jax.Array,
    indices: jax.Array,
    axis: int = 0,
    out: None = None,
    mode: str | None = None,
    unique_indices: bool = False,
    indices_are_sorted: bool = False,
    fill_value: Any = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """``jax.numpy.take`` of a table's rows on the embedding op, with its gradient: the lookup of flax's ``Embed``.

    The gradient of a row is the sum over its own indices in their order, and its bits depend on no other.

    Args:
      a: (rows, d), the table, of a float dtype.
      indices: integers of any shape, of 8 to 64 bits but for uint32 and uint64; negative ones count from the end.
      axis: 0.
      out: None.
      mode: what an index gives that is no row: None or "fill": a row of NaN, and nothing to the gradient; "clip": the
        nearest row, negative ones the first; "wrap": the row behind as many rounds.
      unique_indices, indices_are_sorted: promises that nothing here needs.
      fill_value: None: NaN.
      implementation: the name of a portakern backend; None: chosen from the arrays.

    Returns:
      (*indices.shape, d), of a's dtype, with the bits of its rows.

    Raises:
      SpecError: shapes, dtypes or modes that are none of these. UnsupportedError: another axis, out, or fill_value; the
        backend cannot.
    """
    for name, value, expected in (("axis", axis, 0), ("out", out, None), ("fill_value", fill_value, None)):
        if value != expected:
            raise UnsupportedError(f"take: {name} is {shown(value)}; expected {expected}: call jax.numpy.take")
    refuse_deleted("take", a=a, indices=indices)
    a, indices = jnp.asarray(a), jnp.asarray(indices)
    if not jnp.issubdtype(indices.dtype, jnp.integer) or indices.dtype in (jnp.uint32, jnp.uint64):
        raise SpecError(f"take: indices are {indices.dtype}; expected integers that int32 or int64 holds: cast them")
    if a.ndim != 2:
        raise SpecError(f"take: a has shape {a.shape}; expected (rows, d), a table")
    if indices.dtype.itemsize < 4:
        indices = indices.astype(jnp.int32)
    try:
        return op("embedding", backend=implementation)(a, _rows(indices, a.shape[0], mode))
    except SpecError as e:
        raise SpecError(f"take: {e} (weight is a, ids is indices)") from e


def _rows(indices: jax.Array, rows: int, mode: str | None) -> jax.Array:
    """The row of each index, and a number that is none where its row is NaN."""
    if mode == "clip":
        return jnp.clip(indices, 0, rows - 1)
    if mode == "wrap":
        return jnp.mod(indices, rows)
    if mode not in (None, "fill"):
        raise SpecError(f"take: mode is {shown(mode)}; expected None, 'fill', 'clip' or 'wrap'")
    return jnp.where(indices < 0, indices + rows, indices)
