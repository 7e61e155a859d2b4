"""Cross entropy of the logits of a linear layer on TPUs, a chunk of rows at a time.

    x = h weight^T        loss, lse, lse_low = those of cross_entropy        slope = b weight
    b_j = exp(min(x_j - lse - lse_low, 0)) (1 + 2 z lse) - (1 - e) [j = t] - e / n

hidden h: (*batch, d), weight: (n, d), labels t, loss, lse, lse_low: (*batch), slope: (*batch, d). One chunk after the
other, in a loop of XLA's, ``chunk_rows`` rows have their logits in memory, in hidden's dtype: matmul makes them,
cross_entropy and its gradient b read them, and matmul meets b. No row sees another, so that chunks change no bit.

Source: Hsu et al. 2024, "Liger Kernel", section 3.2, for chunks of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.tpu import cross_entropy as losses
from portakern.backends.pallas.tpu import cross_entropy_vjp as brackets
from portakern.backends.pallas.tpu import matmul as products
from portakern.backends.pallas.tpu._chip import dtype_refused
from portakern.backends.pallas.tpu.family import FAMILY
from portakern.backends.pallas.tpu.layernorm import supports as along_rows
from portakern.core.call import Call
from portakern.core.registry import find_spec
from portakern.core.tilings import default


def inner(call: Call, module: ModuleType, dims: Mapping[str, Any], *arrays: Any) -> tuple[Call, Mapping[str, int]]:
    """The call of another op of this folder, with this one's options, and its tiling."""
    name = module.__name__.rpartition(".")[2]
    spec, implementation = find_spec(name), BACKEND.implementation(name, FAMILY)
    assert implementation is not None
    of = call.replace(
        spec=spec,
        arrays=dict(zip((a.name for a in spec.arrays), arrays, strict=True)),
        options={o.name: call.options.get(o.name, o.default) for o in spec.options},
        dims=dict(dims),
        wants=tuple(o.name for o in spec.outputs),
    )
    return of, default(implementation, of).tiling


def multiply(call: Call, a: Any, b: Any) -> jax.Array:
    """a (m, k) @ b (k, n)."""
    dims = {"batch": (), "m": a.shape[0], "n": b.shape[1], "k": a.shape[1]}
    return products.matmul(*inner(call, products, dims, a, b))[0]


def one_after_another(piece: Callable[..., Any], length: int, *arrays: Any) -> tuple[Any, ...]:
    """``piece`` of parts of so many rows of the arrays, and of what is left of them; its results, joined. A loop holds
    what one part needs, and not what all do."""
    whole = arrays[0].shape[0] // length
    found = []
    if whole == 1:
        found.append(piece(*(x[:length] for x in arrays)))
    elif whole:
        parts = tuple(x[: whole * length].reshape(whole, length, *x.shape[1:]) for x in arrays)
        joined = lax.map(lambda part: piece(*part), parts)
        found.append(tuple(y.reshape(whole * length, *y.shape[2:]) for y in joined))
    if whole * length < arrays[0].shape[0]:
        found.append(piece(*(x[whole * length :] for x in arrays)))
    return found[0] if len(found) == 1 else tuple(jnp.concatenate(parts) for parts in zip(*found, strict=True))


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "n": call.dims["n"]}


def default_tiling(call: Call) -> dict[str, int]:
    """Rows enough that a product reads the weight seldom, and logits that take no more memory than for 2^28 of them."""
    rows = 2048
    while rows > 256 and rows * call.dims["n"] > 2**28:
        rows //= 2
    return {"chunk_rows": rows}


def refused(call: Call, rows: int, n: int, d: int) -> str | None:
    """Why a product of hidden's rows with n classes, or the gradient by their logits, cannot be."""
    reason = dtype_refused(call)
    if reason:
        return reason
    x, numbers = (jax.ShapeDtypeStruct(s, jnp.dtype(t)) for s, t in (((rows, n), call.dtype), ((rows,), "float32")))
    labels = jax.ShapeDtypeStruct((rows,), jnp.dtype("int32"))
    dims = {"batch": (rows,), "n": n}
    makes = {"batch": (), "m": rows, "n": n, "k": d}
    return (
        products.supports(*inner(call, products, makes, x, x))
        or along_rows(*inner(call, losses, dims, x, labels), held=losses.HELD)
        or along_rows(*inner(call, brackets, dims, x, labels, numbers, numbers, numbers), held=brackets.HELD)
    )


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    rows = min(tiling["chunk_rows"], math.prod(call.dims["batch"]))
    return refused(call, rows, call.dims["n"], call.dims["d"]) or refused(call, rows, call.dims["d"], call.dims["n"])


@BACKEND.implements("linear_cross_entropy", key=key, tiling=default_tiling, supports=supports)
def linear_cross_entropy(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array | None, ...]:
    weight, n, sloped = call.arrays["weight"], call.dims["n"], "slope" in call.wants
    hidden, labels = call.arrays["hidden"].reshape(-1, call.dims["d"]), call.arrays["labels"].reshape(-1)

    def piece(h: Any, t: Any) -> tuple[Any, ...]:
        x = multiply(call, h, weight.T)
        dims = {"batch": t.shape, "n": n}
        loss, lse, low = losses.cross_entropy(*inner(call, losses, dims, x, t))
        if not sloped:
            return loss, lse, low
        (b,) = brackets.cross_entropy_vjp(*inner(call, brackets, dims, x, t, lse, jnp.ones_like(lse), low))
        return loss, lse, low, multiply(call, b, weight)

    names = ("loss", "lse", "lse_low", "slope")
    found = dict(zip(names, one_after_another(piece, tiling["chunk_rows"], hidden, labels), strict=False))
    return tuple(found[n].reshape(shape) if n in call.wants else None for n, (shape, _) in call.outputs.items())
