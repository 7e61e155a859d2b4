"""Gradients of the matrix product on TPUs: d_a = d_c b^T and d_b = a^T d_c.

a: (*#batch, m, k), b: (*#batch, k, n), d_c: (*batch, m, n) -> d_a and d_b, of the shapes of a and b. Both are summed
over the batch axes along which their operand was broadcast. A batch axis that is summed is one more factor of the
contraction, folded in beside n (d_a) or m (d_b), so that each gradient is one matmul of this backend. Transposing and
folding are left to XLA.

block_m, block_n, block_k: matmul's blocks, for both products.

Source: the derivative of the matrix product; the products themselves are `matmul`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.tpu import matmul as forward
from portakern.backends.pallas.tpu._chip import dtype_refused
from portakern.core.binder import sibling
from portakern.core.call import Call
from portakern.core.registry import find_spec
from portakern.specs.matmul import batch_axes, product_dtype
from portakern.specs.matmul import matmul as matmul_spec


def product(call: Call, name: str) -> Call:
    """The call of matmul that gives a gradient: (*kept, i, K) times (*kept, K, j).

    K is made of the summed batch axes and, innermost, of n (d_a) or m (d_b).
    """
    rank, dtype = len(call.dims["batch"]), jnp.dtype(product_dtype(call))
    a, b, d_c = (
        x.reshape((1,) * (rank + 2 - x.ndim) + x.shape).astype(dtype)
        for x in (call.arrays[n] for n in ("a", "b", "d_c"))
    )
    left, right = (d_c, jnp.swapaxes(b, -1, -2)) if name == "d_a" else (jnp.swapaxes(a, -1, -2), d_c)
    kept, summed = batch_axes(call, name)
    left_kept, right_kept = ([x.shape[axis] for axis in kept] for x in (left, right))
    left = left.transpose(*kept, rank, *summed, rank + 1).reshape(*left_kept, left.shape[-2], -1)
    right = right.transpose(*kept, *summed, rank, rank + 1).reshape(*right_kept, -1, right.shape[-1])
    return sibling(
        call, find_spec("matmul"), left, right, precision=call.options["precision"], out_dtype=call.outputs[name][1]
    )


def key(call: Call) -> dict[str, str | int]:
    return {**forward.key(call), "dtype": product_dtype(call)}


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    m, n, k, dtype = call.dims["m"], call.dims["n"], call.dims["k"], product_dtype(call)
    refused = dtype_refused(call, dtype, call.dtype_of("d_c"))
    kind = jnp.dtype("float32" if dtype == "float64" else dtype)
    for name, (i, j, summed) in {"d_a": (m, k, n), "d_b": (k, n, m)}.items():
        if name in call.wants and not refused:
            batch = tuple(call.dims["batch"][axis] for axis in batch_axes(call, name)[0])
            contraction = summed * math.prod(call.dims["batch"]) // math.prod(batch)
            inner = call.replace(
                spec=matmul_spec,
                dtype=dtype,
                arrays={
                    "a": jax.ShapeDtypeStruct((*batch, i, contraction), kind),
                    "b": jax.ShapeDtypeStruct((*batch, contraction, j), kind),
                },
                dims={"batch": batch, "m": i, "n": j, "k": contraction},
                options={"precision": call.options["precision"], "out_dtype": call.outputs[name][1]},
            )
            reason = forward.supports(inner, tiling)
            refused = reason and f"{name}: {reason}"
    return refused


def default_tiling(call: Call) -> dict[str, int]:
    return forward.default_tiling(call.replace(dtype=product_dtype(call)))


@BACKEND.implements("matmul_vjp", key=key, tiling=default_tiling, supports=supports)
def matmul_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    def gradient(name: str) -> jax.Array | None:
        if name not in call.wants:
            return None
        (c,) = forward.matmul(product(call, name), tiling)
        return c.reshape(call.outputs[name][0])

    return gradient("d_a"), gradient("d_b")
