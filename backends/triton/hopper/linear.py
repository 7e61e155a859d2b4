"""The linear layer with what follows it, on Hopper's asynchronous copy engine and matrix unit.

    z[i, j] = sum_k x[i, k] weight[j, k] + bias[j]        y = f(z) + residual

x: (rows, k), weight: (n, k) -> y, and pre, which is z: (rows, n). The product is matmul's of x and weight^T: its tiles,
their order, its sums, and where there are tiles enough its warps with roles (:mod:`._warps`), which write y and pre
while the next tile's operands come. An accumulator meets bias, activation and residual in the registers that it is in;
the residual is read there.

The gradients with respect to x and weight are products of this folder too, as in the portable variant.

Few rows, and sums of 32-bit numbers, are tiles of c^T and of ``linear_kernel``, as matmul has them. A sum over a long k
and few columns goes in matmul's chunks, one program one after another.

Of 8192 x 4096 x 4096 in 16 bits on an H100 the products take 0.35 ms. A multiprocessor multiplies a tile of 128 x 256
in 65536 cycles; what follows takes about 20 instructions an element for either gelu, 5000 cycles that hide behind
nothing but the other warps' products.

Source: the order of tiles in "Matrix Multiplication" of the Triton tutorials (Tillet).
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import HopperProductConfig
from portakern.backends.triton.hopper import _tiles
from portakern.backends.triton.hopper import matmul as products
from portakern.backends.triton.hopper._scratch import Operand, operand
from portakern.backends.triton.hopper.linear_cross_entropy import multiply, refused
from portakern.backends.triton.hopper.matmul import in_chunks
from portakern.backends.triton.launch import accumulator, cdiv, dot_precision, launch, shared_limit
from portakern.backends.triton.layout import fresh
from portakern.backends.triton.lib.linear import finish, gradients, supports_gradient
from portakern.backends.triton.lib.linear_cross_entropy import as_product
from portakern.backends.triton.lib.matmul import products as kind_of
from portakern.backends.triton.lib.matmul import tile_index

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call
    from portakern.core.config import Config


@triton.jit(do_not_specialize=["m", "n", "k", "chunk"])
def linear_kernel(x, weight, bias, residual, y, pre, residual_row, m, n, k, chunk, plan: tl.constexpr):
    """bias, residual and pre may be None."""
    activation: tl.constexpr = plan.activation  # Triton 3.6 hands on no word of a tuple
    tile_m, tile_n = tile_index(tl.program_id(0), tl.cdiv(m, plan.block_m), tl.cdiv(n, plan.block_n), plan.group)
    i, j = tile_m * plan.block_m, tile_n * plan.block_n
    z = in_chunks(x, weight, 0, 0, i, j, 0, tl.cdiv(k, plan.block_k), chunk, plan)
    if plan.swap_ab:
        z = z.T
    row, col = (i + tl.arange(0, plan.block_m)).to(tl.int64), j + tl.arange(0, plan.block_n)
    residual_at = None
    if residual is not None:
        residual_at = (residual + row * residual_row)[:, None] + col[None, :]
    finish(z, bias, 1, residual_at, y, pre, col, col < n, (row * n)[:, None] + col[None, :],
           (row < m)[:, None] & (col < n)[None, :], activation, plan.acc_dtype)  # fmt: skip


def product_of(call: Call) -> Call:
    """The call of matmul that multiplies x, as rows, and weight^T."""
    m, n, k = prod(call.dims["batch"]), call.dims["n"], call.dims["k"]
    return as_product(call, call.arrays["x"], call.arrays["weight"], m, n, k)


def key(call: Call) -> dict[str, str | int]:
    return _tiles.key(product_of(call))


def shared_memory(call: Call, config: HopperProductConfig) -> int:
    """Bytes of shared memory: as matmul's, where warps have roles; else a tile of the sums waits there, which other
    threads write than have multiplied it."""
    if _tiles.warp_specialized(call, config):
        return _tiles.shared_memory(call, config)
    rows, columns, depth, size = config.block_m, config.block_n, config.block_k, _tiles.size_of(call.dtype)
    return config.num_stages * (rows + columns) * depth * size + rows * columns * 4


def fit(call: Call, config: HopperProductConfig) -> HopperProductConfig:
    return _tiles.fit(product_of(call), config, shared_memory, _tiles.on_matrix_unit)


def supports(call: Call, config: HopperProductConfig) -> str | None:
    of = product_of(call)
    if _tiles.warp_specialized(of, config) and not (call.interpret or _tiles.on_matrix_unit(of)):
        return (
            f"warps with roles (warp_specialized={config.warp_specialized}) take products of the matrix unit, which "
            "float32 in ieee is none of; use warp_specialized=0"
        )
    if not call.interpret and not _tiles.warp_specialized(of, config):
        shared, limit = shared_memory(of, config), shared_limit(call.target.arch)
        if shared > limit:
            tile = f"{config.block_m} x {config.block_n} x {config.block_k}"
            return (
                f"{config.num_stages} stages of {tile}, and the sums, take {shared} bytes of shared memory; "
                f"{call.target.arch} has {limit}"
            )
    return _tiles.supports(of, config)


@BACKEND.implements(
    "linear",
    key=key,
    fit=fit,
    supports=supports,
    config=HopperProductConfig,
    same_bits=True,
    ahead=("float16", "bfloat16"),  # docs/porting/linear.md has the times
)
def linear(call: Call, config: HopperProductConfig) -> tuple[Any, ...]:
    x, weight, bias, residual = (call.arrays[name] for name in ("x", "weight", "bias", "residual"))
    m, n, k = prod(call.dims["batch"]), call.dims["n"], call.dims["k"]
    y, pre = (fresh((*x.shape[:-1], n), x.dtype, x.device) if name in call.wants else None for name in ("y", "pre"))
    of = product_of(call)
    along_x, along_w = _tiles.ALONG.get(kind_of(of, of.dtype), (None, None))
    if config.swap_ab:
        along_x, along_w = None, None
    whole = _tiles.copied(of) if _tiles.warp_specialized(of, config) else None
    of_x = operand(call, x.reshape(m, k), 0, (1, m, k), along_x, whole == "a")
    of_weight = operand(call, weight.mT, 0, (1, k, n), along_w, whole == "b")
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else _by_rows(residual.reshape(m, n))
    if _tiles.warp_specialized(of, config):
        _launch_roles(call, of, of_x, of_weight, bias, residual, y, pre, config)
    else:
        _launch(call, of, of_x, of_weight, bias, residual, y, pre, config)
    return y, pre


def _by_rows(x: torch.Tensor) -> torch.Tensor:
    """x, its elements side by side in a row."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch_roles(
    call: Call, product_call: Call, x: Operand, weight: Operand, bias: Any, residual: Any, y: Any, pre: Any,
    config: HopperProductConfig,
) -> None:  # fmt: skip
    from portakern.backends.triton.hopper._warps import linear_by_roles

    m, n, k = (product_call.dims[name] for name in "mnk")
    roles = products.roles_of(product_call, x, weight, (1, m), config)
    launch(linear_by_roles, roles.grid, call, *roles.operands, bias, residual, roles.result(y),
           None if pre is None else roles.result(pre), 0 if residual is None else residual.stride(0), m, n, k,
           plan=roles.plan._replace(activation=call.options["activation"]), num_warps=4,
           enable_fp_fusion=False)  # fmt: skip


def _launch(
    call: Call, product_call: Call, x: Operand, weight: Operand, bias: Any, residual: Any, y: Any, pre: Any,
    config: HopperProductConfig,
) -> None:  # fmt: skip
    m, n, k = (product_call.dims[name] for name in "mnk")
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    how: dict[str, Any] = {"tf32": True} if dot_precision(call) == "tf32" else {}
    of_x = products.described(x, (1, m, k), (block_m, block_k), False, **how)
    of_weight = products.described(weight, (1, k, n), (block_k, block_n), False, **how)
    chunk = cdiv(_tiles.chunk_of(n, k), block_k)
    plan = products.TilePlan(
        block_m, block_n, block_k, config.group, x.across, weight.across, config.swap_ab,
        chunk * block_k < k, dot_precision(call), accumulator(call.dtype), activation=call.options["activation"],
    )  # fmt: skip
    launch(linear_kernel, cdiv(m, block_m) * cdiv(n, block_n), call, of_x, of_weight, bias, residual,
           y, pre, 0 if residual is None else residual.stride(0), m, n, k, chunk, plan=plan,
           num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=False)  # fmt: skip


@BACKEND.implements("linear_vjp", supports=partial(supports_gradient, refusal=refused))
def linear_vjp(call: Call, config: Config) -> tuple[Any, ...]:
    return gradients(call, multiply)
