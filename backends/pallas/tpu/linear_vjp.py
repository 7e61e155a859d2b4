"""Gradients of the linear layer with bias, activation and residual on TPUs.

    d_z = d_y f'(pre)        d_x = d_z weight        d_weight = d_z^T x        d_bias = sum over rows of d_z

x: (*batch, k), weight: (n, k), d_y, pre: (*batch, n) -> d_x, d_weight, d_bias: (n). d_z is made element by element, in
blocks as swiglu has them and in x's dtype; without an activation it is d_y. matmul takes the two products, and the
gradient of layernorm's bias the sum over rows.

Source: the derivatives of the formulas of swiglu and geglu, and of the matrix product.
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
from portakern.backends.pallas.tpu import layernorm_vjp as over_rows
from portakern.backends.pallas.tpu import matmul as products
from portakern.backends.pallas.tpu import swiglu_vjp as gated
from portakern.backends.pallas.tpu._chip import dtype_refused
from portakern.backends.pallas.tpu.geglu_vjp import opening
from portakern.backends.pallas.tpu.layernorm import supports as along_rows
from portakern.backends.pallas.tpu.linear_cross_entropy import inner, multiply
from portakern.backends.pallas.tpu.swiglu import element_by_element, open_and_shut
from portakern.backends.pallas.tpu.swiglu import refused as walk_refused
from portakern.core.call import Call


def times_slope(d: Any, z: Any, activation: str) -> Any:
    """d f'(z), in float32."""
    if activation == "relu":
        return jnp.where(z <= 0, 0.0, d)
    if activation == "silu":
        s, q = open_and_shut(z)
        return d * (s * (1.0 + z * q))
    _, slope = opening(z, "tanh" if activation == "gelu_tanh" else "none")
    return d * slope


def kernel(ref: Refs, *, activation: str) -> None:
    d, z = ref.d_y[...].astype(jnp.float32), ref.pre[...].astype(jnp.float32)
    ref.d_z[...] = times_slope(d, z, activation).astype(ref.d_z.dtype)


def walk(call: Call) -> tuple[Call, Mapping[str, int]]:
    """The call with the extents of d_z as the only ones, as ops that go element by element have them, and the tiling of
    such a gradient."""
    dims = {"batch": (math.prod(call.dims["batch"]), call.dims["n"])}
    return call.replace(dims=dims), inner(call, gated, dims, None, None, None)[1]


def cotangent(call: Call) -> jax.Array:
    """d_z, (rows, n)."""
    activation, n = call.options["activation"], call.dims["n"]
    if activation == "none":
        return call.arrays["d_y"].reshape(-1, n)
    (of, tiling), run = walk(call), partial(kernel, activation=activation)
    return element_by_element(of, tiling, run, ("pre", "d_y"), ("d_z",), flops=16)["d_z"]


def summing(call: Call, rows: int) -> tuple[Call, Mapping[str, int]]:
    """The call, still without arrays, whose d_bias is a sum of so many rows, and its tiling."""
    of, tiling = inner(call, over_rows, {"batch": (rows,), "n": call.dims["n"]}, None, None, None, None)
    return of.replace(wants=("d_bias",)), tiling


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    rows, n, k = math.prod(call.dims["batch"]), call.dims["n"], call.dims["k"]
    x, extents = call.arrays["x"], {"d_x": (rows, k, n), "d_weight": (n, k, rows)}
    reason = dtype_refused(call)
    if not reason and call.options["activation"] != "none":
        reason = walk_refused(*walk(call), streamed=3, computed=4)
    for name in call.wants:
        if name in extents and not reason:
            m, columns, depth = extents[name]
            dims = {"batch": (), "m": m, "n": columns, "k": depth}
            reason = products.supports(*inner(call, products, dims, x, x))
    if "d_bias" in call.wants and not reason:
        reason = along_rows(*summing(call, rows), held=over_rows.HELD)
    return reason


@BACKEND.implements("linear_vjp", supports=supports)
def linear_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array | None, ...]:
    x, weight, d_z = call.arrays["x"], call.arrays["weight"], cotangent(call)
    d_x = multiply(call, d_z, weight).reshape(x.shape) if "d_x" in call.wants else None
    d_weight = multiply(call, d_z.T, x.reshape(-1, x.shape[-1])) if "d_weight" in call.wants else None
    d_bias = None
    if "d_bias" in call.wants:
        of, tiles = summing(call, len(d_z))
        of = of.replace(arrays={"x": d_z, "d_y": d_z, "weight": None, "bias": None})
        d_bias = over_rows.layernorm_vjp(of, tiles)[2]
    return d_x, d_weight, d_bias
