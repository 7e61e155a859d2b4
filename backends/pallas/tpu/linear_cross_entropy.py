"""Cross entropy of the logits of a linear layer on TPUs, a chunk of rows at a time, and its gradients, of classes.

    x = h weight^T        loss, lse, lse_low = those of cross_entropy        slope = b weight
    b_j = exp(min(x_j - lse - lse_low, 0)) (1 + 2 z lse) - (1 - e) [j = t] - e / n
    d_hidden = d_loss slope        d_weight_j = sum over rows of d_loss b_j h

hidden h, slope, d_hidden: (*batch, d); weight, d_weight: (n, d); labels t, loss, lse, lse_low, d_loss: (*batch). One
chunk after the other, in a loop of XLA's, has its logits in memory, in hidden's dtype: matmul makes them, cross_entropy
and its gradient b read them, and matmul meets b. Forward, a chunk is ``chunk_rows`` rows: no row sees another, so that
chunks change no bit. In d_weight it is all rows for ``chunk_n`` classes, so that each sum over rows is rounded once.
d_hidden is one walk over the slope (`BlockWalk`), in which no element waits for another.

Sources: Hsu et al. 2024, "Liger Kernel", section 3.2, for chunks of rows; Wijmans et al. 2024, "Cut your losses in
large-vocabulary language models", section 4, for logits taken again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import LogitGradientsConfig, LogitsConfig, RowsConfig
from portakern.backends.pallas.lib.blocks import Refs
from portakern.backends.pallas.lib.mosaic_tpu.chip import dtype_refused
from portakern.backends.pallas.lib.mosaic_tpu.rows import BlockWalk, launched
from portakern.backends.pallas.tpu import cross_entropy as losses
from portakern.backends.pallas.tpu import matmul as products
from portakern.backends.pallas.tpu.family import FAMILY
from portakern.backends.pallas.tpu.layernorm import supports as along_rows
from portakern.backends.pallas.tpu.layernorm import walk_of
from portakern.core.call import Call
from portakern.core.registry import find_spec
from portakern.core.tilings import default


def inner(call: Call, name: str, dims: Mapping[str, Any], *arrays: Any, **options: Any) -> tuple[Call, Any]:
    """The call of another op of this folder, with this one's options but for ``options``, and its tiling."""
    spec, implementation = find_spec(name), BACKEND.implementation(name, FAMILY)
    assert implementation is not None
    of = call.replace(
        spec=spec,
        arrays=dict(zip((a.name for a in spec.arrays), arrays, strict=True)),
        options={o.name: options.get(o.name, call.options.get(o.name, o.default)) for o in spec.options},
        dims=dict(dims),
        wants=tuple(o.name for o in spec.outputs),
    )
    return of, default(implementation, of).tiling


def multiply(call: Call, a: Any, b: Any, stored: str | None = None) -> jax.Array:
    """a (m, k) @ b (k, n), stored in this dtype or in the call's."""
    dims = {"batch": (), "m": a.shape[0], "n": b.shape[1], "k": a.shape[1]}
    return products.matmul(*inner(call, "matmul", dims, a, b, out_dtype=other(call, stored)))[0]


def other(call: Call, stored: str | None) -> str | None:
    """The dtype in which a product is stored as matmul's option has it: None for the call's."""
    return None if stored == call.dtype else stored


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


def default_tiling(call: Call) -> LogitsConfig:
    """Rows enough that a product reads the weight seldom, and logits that take no more memory than for 2^28 of them."""
    rows = 2048
    while rows > 256 and rows * call.dims["n"] > 2**28:
        rows //= 2
    return LogitsConfig(chunk_rows=rows)


def product_refused(call: Call, m: int, n: int, k: int, stored: str | None = None) -> str | None:
    """Why a product of these extents, stored in this dtype or in the call's, cannot be."""
    x = jax.ShapeDtypeStruct((m, k), jnp.dtype(call.dtype))
    dims = {"batch": (), "m": m, "n": n, "k": k}
    return products.supports(*inner(call, "matmul", dims, x, x, out_dtype=other(call, stored)))


def refused(call: Call, rows: int, n: int, d: int, stored: str | None = None) -> str | None:
    """Why a product of hidden's rows with n classes, stored in this dtype or in the call's, or the gradient by their
    logits, cannot be."""
    reason = dtype_refused(call)
    if reason:
        return reason
    x, numbers = (jax.ShapeDtypeStruct(s, jnp.dtype(t)) for s, t in (((rows, n), call.dtype), ((rows,), "float32")))
    labels = jax.ShapeDtypeStruct((rows,), jnp.dtype("int32"))
    dims = {"batch": (rows,), "n": n}
    return (
        product_refused(call, rows, n, d, stored)
        or along_rows(*inner(call, "cross_entropy", dims, x, labels), vmem_use=losses.HELD)
        or along_rows(
            *inner(call, "cross_entropy_vjp", dims, x, labels, numbers, numbers, numbers), vmem_use=losses.GRADIENT_HELD
        )
    )


def supports(call: Call, config: LogitsConfig) -> str | None:
    rows = min(config.chunk_rows, math.prod(call.dims["batch"]))
    return refused(call, rows, call.dims["n"], call.dims["d"]) or refused(call, rows, call.dims["d"], call.dims["n"])


@BACKEND.implements("linear_cross_entropy", key=key, tiling=default_tiling, supports=supports, config=LogitsConfig)
def linear_cross_entropy(call: Call, config: LogitsConfig) -> tuple[jax.Array | None, ...]:
    weight, n, derived = call.arrays["weight"], call.dims["n"], {"slope", "logit_gradients"} & {*call.wants}
    hidden, labels = call.arrays["hidden"].reshape(-1, call.dims["d"]), call.arrays["labels"].reshape(-1)

    def piece(h: Any, t: Any) -> tuple[Any, ...]:
        x = multiply(call, h, weight.T)
        dims = {"batch": t.shape, "n": n}
        loss, lse, low = losses.cross_entropy(*inner(call, "cross_entropy", dims, x, t))
        if not derived:
            return loss, lse, low
        (b,) = losses.cross_entropy_vjp(*inner(call, "cross_entropy_vjp", dims, x, t, lse, jnp.ones_like(lse), low))
        named = {"slope": lambda: multiply(call, b, weight), "logit_gradients": lambda: b}
        return loss, lse, low, *(made() for name, made in named.items() if name in derived)

    names = ("loss", "lse", "lse_low", *(name for name in ("slope", "logit_gradients") if name in derived))
    found = dict(zip(names, one_after_another(piece, config.chunk_rows, hidden, labels), strict=False))
    return tuple(found[n].reshape(shape) if n in call.wants else None for n, (shape, _) in call.outputs.items())


NONE = -(2**31)
"""The label of a row that is ignored, which no class of a chunk has."""


def gradient_key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype}


def gradient_tiling(call: Call) -> LogitGradientsConfig:
    return LogitGradientsConfig(chunk_n=4096)


def supports_gradient(call: Call, config: LogitGradientsConfig) -> str | None:
    rows, n, d = math.prod(call.dims["batch"]), min(config.chunk_n, call.dims["n"]), call.dims["d"]
    stored = call.outputs["d_weight"][1]
    reason = along_rows(*scaling(call), vmem_use=losses.GRADIENT_HELD) if "d_hidden" in call.wants else None
    if reason or "d_weight" not in call.wants:
        return reason
    if call.options["keep_logit_gradients"]:
        along = along_rows(*scaling(call), vmem_use=losses.GRADIENT_HELD)
        return dtype_refused(call) or along or product_refused(call, call.dims["n"], d, rows, stored)
    return refused(call, rows, n, d) or refused(call, n, d, rows, stored)


@BACKEND.implements(
    "linear_cross_entropy_vjp",
    key=gradient_key,
    tiling=gradient_tiling,
    supports=supports_gradient,
    config=LogitGradientsConfig,
)
def linear_cross_entropy_vjp(call: Call, config: LogitGradientsConfig) -> tuple[jax.Array | None, ...]:
    d_hidden = d_weight = None
    if "d_hidden" in call.wants:
        d_hidden = scaled_rows(call, call.arrays["slope"])
    if "d_weight" in call.wants:
        kept = call.options["keep_logit_gradients"]
        d_weight = kept_weight_gradient(call) if kept else weight_gradient(call, config)
    return d_hidden, d_weight


def scaling(call: Call) -> tuple[Call, RowsConfig]:
    """The rows of the slope as those of logits, and the tiling of their gradient, which reads and writes as much."""
    names = ("slope", "labels", "lse", "d_loss", "lse_low")
    dims = {"batch": call.dims["batch"], "n": call.dims["d"]}
    return inner(call, "cross_entropy_vjp", dims, *(call.arrays[name] for name in names))


def scaling_kernel(ref: Refs, *, walk: BlockWalk, ignored: int) -> None:
    y = walk.turned(ref.d_loss[...]) * ref.x[...].astype(jnp.float32)
    ref.y[...] = jnp.where(walk.turned(ref.labels[...]) == ignored, 0.0, y).astype(ref.y.dtype)


def scaled_rows(call: Call, x: Any) -> jax.Array:
    """d_loss x of each row, 0 of one that is ignored; x is of hidden's shape."""
    of, tiles = scaling(call)
    walk = walk_of(of, tiles)._replace(sweeps=1)
    of_rows = {"labels": call.arrays["labels"].astype(jnp.int32), "d_loss": call.arrays["d_loss"].astype(jnp.float32)}
    found = launched(
        of.replace(spec=call.spec),
        partial(scaling_kernel, ignored=call.options["ignore_index"]),
        walk,
        losses.GRADIENT_HELD,
        rows={"x": x},
        written={"y": x.dtype},
        inputs={name: (walk.to_numbers(array), walk.numbers()[1]) for name, array in of_rows.items()},
        statistics=(),
        flops=1,
        transcendentals=0,
    )
    return found["y"]


def kept_weight_gradient(call: Call) -> jax.Array:
    """b^T (d_loss h), b as it was kept."""
    weighed = scaled_rows(call, call.arrays["hidden"]).reshape(-1, call.dims["d"])
    b = call.arrays["logit_gradients"].reshape(-1, call.dims["n"])
    return multiply(call, b.T, weighed, call.outputs["d_weight"][1])


def weight_gradient(call: Call, config: LogitGradientsConfig) -> jax.Array:
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
        of, tiles = inner(among, "cross_entropy_vjp", {"batch": labels.shape, "n": len(w)}, x, here, lse, d_loss, low)
        (d_x,) = losses.gradient(of, tiles, n)
        return (multiply(call, d_x.T, hidden, call.outputs["d_weight"][1]),)

    return one_after_another(piece, config.chunk_n, weight, jnp.arange(n, dtype=jnp.int32))[0]
