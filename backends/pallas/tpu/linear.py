"""The linear layer with what follows it on TPUs, one output block at a time, k innermost; and its gradients.

    z = x weight^T + bias        y = f(z) + residual        d_z = d_y f'(pre)
    d_x = d_z weight        d_weight = d_z^T x        d_bias = sum over rows of d_z

x, d_x: (*batch, k); weight, d_weight: (n, k); bias, d_bias: (n); residual, y, pre, which is z, d_y: (*batch, n). The
grid is (row blocks, n blocks, k blocks), as matmul's, whose blocks these are; a block of weight lies as it is in
memory, and the matrix unit takes its transpose. The sum over k is a float32 accumulator in VMEM; the last step adds the
bias to it, applies f and adds the residual, and rounds once.

d_z is made element by element, in blocks as swiglu has them and in x's dtype; without an activation it is d_y. matmul
takes the two products, and the gradient of layernorm's bias the sum over rows.

block_m: rows of a block; block_n: its columns; block_k: the share of k resident at a step.

Source: the blocked product of Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008),
section 4, with VMEM as the cache.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import ProductConfig, RowsConfig
from portakern.backends.pallas.lib.blocks import Refs, even_block
from portakern.backends.pallas.lib.mosaic_tpu.chip import (
    LANES,
    dtype_refused,
    launch,
    off_grid,
    over_vmem,
    sublanes,
    vmem_limit,
)
from portakern.backends.pallas.tpu import layernorm as over_rows
from portakern.backends.pallas.tpu import matmul as products
from portakern.backends.pallas.tpu.geglu import opening, share
from portakern.backends.pallas.tpu.layernorm import supports as along_rows
from portakern.backends.pallas.tpu.linear_cross_entropy import inner, multiply, other
from portakern.backends.pallas.tpu.swiglu import element_by_element, open_and_shut
from portakern.backends.pallas.tpu.swiglu import refused as walk_refused
from portakern.core import targets
from portakern.core.call import Call
from portakern.core.config import Config


def activated(z: Any, activation: str) -> Any:
    """f(z), in float32."""
    if activation == "none":
        return z
    if activation == "relu":
        return jnp.where(z < 0, 0.0, z)
    if activation == "silu":
        s, _ = open_and_shut(z)
        return z * s
    return z * share(z, "tanh" if activation == "gelu_tanh" else "none")


def finish(ref: Refs, z: Any, activation: str) -> None:
    """Write y, and z where it is wanted, from the whole sums of a block, which are ``apart`` in VMEM first where a
    product and what is added to it are to stay two operations."""
    if "apart" in ref:
        ref.apart[...] = z
        z = ref.apart[...]
    if "bias" in ref:
        z = z + ref.bias[...].astype(jnp.float32)
    if "pre" in ref:
        ref.pre[...] = z.astype(ref.pre.dtype)
    y = activated(z, activation)
    if "residual" in ref:
        y = y + ref.residual[...].astype(jnp.float32)
    ref.y[...] = y.astype(ref.y.dtype)


def kernel(ref: Refs, *, activation: str, **of_k: Any) -> None:
    """``of_k``: of matmul's `summed`."""
    products.summed(ref, ref.x, ref.weight, lambda z: finish(ref, z, activation), k_of_b=1, axis=2, **of_k)


def as_product(call: Call) -> Call:
    """The call of matmul that has the same blocks: x (rows, k) times (k, n)."""
    return call.replace(
        arrays={"a": call.arrays["x"], "b": call.arrays["weight"]},
        dims={**call.dims, "batch": (), "m": math.prod(call.dims["batch"])},
    )


def blocks(call: Call, config: ProductConfig) -> tuple[int, int, int]:
    """(block_m, block_n, block_k)."""
    of = as_product(call)
    return products.blocks(of, config, of.dims["m"])


def default_tiling(call: Call) -> ProductConfig:
    """matmul's, where there is room."""
    return with_room(call, products.default_tiling(call))


def fit(call: Call, config: ProductConfig) -> ProductConfig:
    """In place of the default's blocks those of matmul for as many rows."""
    if call.interpret or config != default_tiling(call):
        return config
    return with_room(call, products.fit(as_product(call), products.default_tiling(call)))


def with_room(call: Call, config: ProductConfig) -> ProductConfig:
    """The tiling with fewer rows a block where there would be no room for a residual and pre. It does not follow
    whether these are there: the same row gives the same bits beside any of them."""
    limit = vmem_limit(call) if call.target.arch in targets.HARDWARE else targets.least("tpu", "vmem")
    bm, bn, bk = config.block_m, *(even_block(call.dims[axis], config[f"block_{axis}"], LANES) for axis in "nk")
    while bm > 128 and resident(call, bm, bn, bk, more=2) > limit:
        bm //= 2
    return config.replace(block_m=bm)


def resident(call: Call, bm: int, bn: int, bk: int, more: int | None = None) -> int:
    """The VMEM of one step, in bytes: matmul's, what the epilogue keeps there for want of registers, and two blocks of
    the residual and of pre, as far as these are there; ``more``: of so many such arrays."""
    size = 4 if call.dtype in ("float32", "float64") else 2
    if more is None:
        more = (call.arrays["residual"] is not None) + ("pre" in call.wants)
    kept = products.resident_bytes(bm, bn, bk, size, size, products.at_once(call))
    return kept + (2 * more * size + 4 * numbers_kept(call, bk)) * bm * bn


# Float32 numbers an element of y that libtpu keeps in VMEM while a branch makes f(z) of whole blocks, by chip: the most
# of silu and both forms of gelu beside bias, residual and pre, each there or not. What the product before the branch
# keeps stays where it is, so that the two add up.
OF_F = {"v4": 5, "v5e": 3, "v5p": 3, "v6e": 2, "v7x": 2}


def numbers_kept(call: Call, bk: int) -> int:
    """Float32 numbers an element that the epilogue keeps in VMEM. Where one step meets all of k it is no branch: libtpu
    goes on with the sums as they leave the matrix unit, and keeps less than one."""
    if bk >= call.dims["k"]:
        return 1
    if call.options["activation"] in ("none", "relu"):
        return 2
    return OF_F.get(call.target.arch, max(OF_F.values()))


def kept_apart(call: Call) -> bool:
    """Whether a product that one step makes whole goes through VMEM before anything is added to it.

    Of a product and what is added to it Mosaic makes a product that begins there: each of the six bfloat16 products of
    float32, for each stretch of k that the matrix unit takes, would round a bias far above them, where the op rounds
    it once. 16 bits of y show nothing of that."""
    wide = call.dtype in ("float32", "float64")
    return wide and (call.arrays["bias"] is not None or call.arrays["residual"] is not None)


def supports(call: Call, config: ProductConfig) -> str | None:
    m, n, k = (as_product(call).dims[axis] for axis in "mnk")
    return (
        dtype_refused(call)
        or off_grid("block_m", config.block_m, m, sublanes(call.arrays["x"].dtype))
        or off_grid("block_n", config.block_n, n, LANES)
        or off_grid("block_k", config.block_k, k, LANES)
        or over_vmem(call, resident(call, *blocks(call, config)), "block_m, block_n or block_k")
    )


@BACKEND.implements("linear", key=products.key, tiling=default_tiling, fit=fit, supports=supports, config=ProductConfig)
def linear(call: Call, config: ProductConfig) -> tuple[jax.Array | None, ...]:
    x, weight = call.arrays["x"], call.arrays["weight"]
    shape, dtype = call.outputs["y"]
    m, n, k = math.prod(shape[:-1]), call.dims["n"], call.dims["k"]
    bm, bn, bk = blocks(call, config)
    of_y = pl.BlockSpec((bm, bn), lambda row, column, depth: (row, column))
    inputs: dict[str, Any] = {
        "x": (x.reshape(m, k), pl.BlockSpec((bm, bk), lambda row, column, depth: (row, depth))),
        "weight": (weight, pl.BlockSpec((bn, bk), lambda row, column, depth: (column, depth))),
    }
    if call.arrays["bias"] is not None:
        of_bias = pl.BlockSpec((1, bn), lambda row, column, depth: (0, column))
        inputs["bias"] = (call.arrays["bias"].reshape(1, n), of_bias)
    if call.arrays["residual"] is not None:
        inputs["residual"] = (call.arrays["residual"].reshape(m, n), of_y)
    found = launch(
        call,
        partial(
            kernel,
            k=k,
            few=m < sublanes(jnp.float32),
            few_of_b=n < sublanes(jnp.float32),
            activation=call.options["activation"],
        ),
        "portakern_linear",
        (pl.cdiv(m, bm), pl.cdiv(n, bn), pl.cdiv(k, bk)),
        in_order=1,
        inputs=inputs,
        outputs={name: (jax.ShapeDtypeStruct((m, n), dtype), of_y) for name in call.wants},
        scratch={"acc": (bm, bn)} if pl.cdiv(k, bk) > 1 else {"apart": (bm, bn)} if kept_apart(call) else {},
        vmem=resident(call, bm, bn, bk),
        cost=pl.CostEstimate(
            flops=2 * m * n * k,
            transcendentals=m * n,
            bytes_accessed=x.dtype.itemsize * (m * k * pl.cdiv(n, bn) + n * k * pl.cdiv(m, bm) + 2 * m * n),
        ),
    )
    return tuple(found[name].reshape(shape) if name in found else None for name in ("y", "pre"))


def times_slope(d: Any, z: Any, activation: str) -> Any:
    """d f'(z), in float32."""
    if activation == "relu":
        return jnp.where(z <= 0, 0.0, d)
    if activation == "silu":
        s, q = open_and_shut(z)
        return d * (s * (1.0 + z * q))
    _, slope = opening(z, "tanh" if activation == "gelu_tanh" else "none")
    return d * slope


def slope_kernel(ref: Refs, *, activation: str) -> None:
    d, z = ref.d_y[...].astype(jnp.float32), ref.pre[...].astype(jnp.float32)
    ref.d_z[...] = times_slope(d, z, activation).astype(ref.d_z.dtype)


def walk(call: Call) -> tuple[Call, RowsConfig]:
    """The call with the extents of d_z as the only ones, as ops that go element by element have them, and the tiling of
    such a gradient."""
    dims = {"batch": (math.prod(call.dims["batch"]), call.dims["n"])}
    return call.replace(dims=dims), inner(call, "swiglu_vjp", dims, None, None, None)[1]


def cotangent(call: Call) -> jax.Array:
    """d_z, (rows, n)."""
    activation, n = call.options["activation"], call.dims["n"]
    if activation == "none":
        return call.arrays["d_y"].reshape(-1, n)
    (of, config), run = walk(call), partial(slope_kernel, activation=activation)
    return element_by_element(of, config, run, ("pre", "d_y"), ("d_z",), flops=16)["d_z"]


def summing(call: Call, rows: int) -> tuple[Call, RowsConfig]:
    """The call, still without arrays, whose d_bias is a sum of so many rows, and its tiling."""
    of, config = inner(call, "layernorm_vjp", {"batch": (rows,), "n": call.dims["n"]}, None, None, None, None)
    return of.replace(wants=("d_bias",)), config


def supports_gradient(call: Call, config: Config) -> str | None:
    rows, n, k = math.prod(call.dims["batch"]), call.dims["n"], call.dims["k"]
    x, extents, stored = call.arrays["x"], {"d_x": (rows, k, n), "d_weight": (n, k, rows)}, call.outputs
    reason = dtype_refused(call)
    if not reason and call.options["activation"] != "none":
        reason = walk_refused(*walk(call), streamed=3, computed=4)
    for name in call.wants:
        if name in extents and not reason:
            m, columns, depth = extents[name]
            dims = {"batch": (), "m": m, "n": columns, "k": depth}
            reason = products.supports(*inner(call, "matmul", dims, x, x, out_dtype=other(call, stored[name][1])))
    if "d_bias" in call.wants and not reason:
        reason = along_rows(*summing(call, rows), vmem_use=over_rows.GRADIENT_HELD)
    return reason


@BACKEND.implements("linear_vjp", supports=supports_gradient)
def linear_vjp(call: Call, config: Config) -> tuple[jax.Array | None, ...]:
    x, weight, d_z, stored = call.arrays["x"], call.arrays["weight"], cotangent(call), call.outputs
    d_x = d_weight = d_bias = None
    if "d_x" in call.wants:
        d_x = multiply(call, d_z, weight, stored["d_x"][1]).reshape(x.shape)
    if "d_weight" in call.wants:
        d_weight = multiply(call, d_z.T, x.reshape(-1, x.shape[-1]), stored["d_weight"][1])
    if "d_bias" in call.wants:
        of, tiles = summing(call, len(d_z))
        of = of.replace(arrays={"x": d_z, "d_y": d_z, "weight": None, "bias": None})
        d_bias = over_rows.layernorm_vjp(of, tiles)[2]
    return d_x, d_weight, d_bias
