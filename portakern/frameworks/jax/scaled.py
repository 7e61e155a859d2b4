"""The drop-in twin of ``jax.nn.scaled_matmul`` on the scaled_matmul op."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from portakern.api import op
from portakern.errors import SpecError
from portakern.frameworks.jax.arrays import refuse_deleted

__all__ = ["scaled_matmul"]

NAME = "scaled_matmul"


def scaled_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scales: jax.Array,
    rhs_scales: jax.Array,
    preferred_element_type: Any = jnp.float32,
    *,
    precision: str = "ieee",
    implementation: str | None = None,
) -> jax.Array:
    """``jax.nn.scaled_matmul`` on the scaled_matmul op: (lhs lhs_scales) (rhs rhs_scales)^T, a batch of products.

    Args:
      lhs: (B, M, K); rhs: (B, N, K), float8_e4m3fn or float8_e5m2 in any mix, or both int8.
      lhs_scales: (B, M, S); rhs_scales: (B, N, S): one for each K / S elements along K, which S divides. Of any dtype
        that float32 holds: float8_e8m0fnu, 8-bit floats, 16 bits, float32.
      preferred_element_type: float32, bfloat16 or float16.
      precision: of sums of 8-bit floats: "ieee", in float32 as JAX has them; "promoted" and "fast" as the op has them.
      implementation: a portakern backend; None: chosen from the arrays.

    Returns:
      (B, M, N), preferred_element_type. No gradient.

    Raises:
      SpecError: shapes or dtypes that do not agree.
    """
    refuse_deleted(NAME, lhs=lhs, rhs=rhs, lhs_scales=lhs_scales, rhs_scales=rhs_scales)
    lhs, rhs, lhs_scales, rhs_scales = map(jnp.asarray, (lhs, rhs, lhs_scales, rhs_scales))
    width = _width(lhs, rhs, lhs_scales, rhs_scales)
    product = op("scaled_matmul", backend=implementation)
    dtype = jnp.dtype(preferred_element_type).name

    def of_entry(a: jax.Array, b: jax.Array, scale_a: jax.Array, scale_b: jax.Array) -> jax.Array:
        c: jax.Array = product(a, b.T, scale_a, scale_b.T, k_width=width, precision=precision, out_dtype=dtype)
        return c

    arrays = lhs, rhs, lhs_scales.astype(jnp.float32), rhs_scales.astype(jnp.float32)
    try:
        return jnp.stack([of_entry(*(x[z] for x in arrays)) for z in range(len(lhs))])
    except SpecError as e:
        raise SpecError(f"{NAME}: {e} (a is lhs, b is rhs transposed, of each entry)") from e


def _width(lhs: jax.Array, rhs: jax.Array, lhs_scales: jax.Array, rhs_scales: jax.Array) -> int:
    """How many elements along K share a scale; SpecError unless the shapes are JAX's."""
    for name, x in (("lhs", lhs), ("rhs", rhs), ("lhs_scales", lhs_scales), ("rhs_scales", rhs_scales)):
        if x.ndim != 3:
            raise SpecError(f"{NAME}: {name} has shape {x.shape}; expected 3 axes, a batch first: reshape it")
    (batch, _, k), parts = lhs.shape, lhs_scales.shape[2]
    if batch == 0:
        raise SpecError(f"{NAME}: lhs has shape {lhs.shape}; expected an entry or more")
    for name, x, last in (("rhs", rhs, k), ("lhs_scales", lhs_scales, parts), ("rhs_scales", rhs_scales, parts)):
        rows = (rhs if name.startswith("rhs") else lhs).shape[1]
        if x.shape != (batch, rows, last):
            raise SpecError(f"{NAME}: {name} has shape {x.shape}; expected {(batch, rows, last)}, as lhs and rhs say")
    if parts == 0 or k % parts:
        raise SpecError(
            f"{NAME}: lhs_scales has {parts} scales along K, which is {k}; expected a number that divides it"
        )
    return k // parts
