"""The Hopper kernels that JAX ships, ``jax.experimental.pallas.ops.gpu``, through Pallas's Mosaic backend for GPUs.

They come without a choice of tiles. Those here are among the ones that their own files try, the largest that fit.
"""

from __future__ import annotations

import math
from typing import Any

from portakern.backends.peers.provide import LACKS, provides
from portakern.core.backend import Backend
from portakern.core.call import Call

BACKEND = Backend(
    "pallas_mgpu",
    framework="jax",
    peer=True,
    platforms=("cuda",),
    requires=("jax", "jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu"),
    extra="cuda",
    refusals=(LACKS, "the kernel takes", "the kernel has"),
)
HALF = ("float16", "bfloat16")
HOPPER = "sm_90"
TILES = {"m": 256, "n": 128, "k": 64}
ROWS = 128  # of queries a program
SCORES = 2**14  # elements of a block of keys


def _of_hopper(call: Call) -> str | None:
    if call.target.arch != HOPPER:
        return f"the kernel takes {HOPPER}, not {call.target.arch or call.target.platform}"
    if call.dtype not in HALF:
        return f"the kernel takes float16 and bfloat16, not {call.dtype}"
    return None


def product_takes(call: Call) -> str | None:
    """Its tiles divide the extents."""
    uneven = [f"{n} = {call.dims[n]}" for n, tile in TILES.items() if call.dims[n] % tile]
    if call.dims["batch"] or uneven:
        sizes = ", ".join(f"{n} of {tile}" for n, tile in TILES.items())
        return f"the kernel takes one product, multiples in {sizes}; not {', '.join(uneven) or 'a batch'}"
    return _of_hopper(call)


def attention_takes(call: Call) -> str | None:
    """Its tiles divide the lengths, and it does not scale: that is done before, exactly or not at all."""
    d, dv, q_len, kv_len = (call.dims[n] for n in ("d", "dv", "q_len", "kv_len"))
    if d != dv or d not in (64, 128, 256):
        return f"the kernel takes heads of 64, 128 or 256; these are {d} and {dv} wide"
    if q_len % ROWS or kv_len % (SCORES // d) or (call.options["is_causal"] and q_len != kv_len):
        return (
            f"the kernel takes multiples of {ROWS} queries and {SCORES // d} keys, under a causal mask as many of both"
        )
    scale = d**-0.5 if call.options["scale"] is None else call.options["scale"]
    if math.frexp(scale)[0] != 0.5:
        return "the kernel has no scale: q is multiplied before, which is exact for powers of two alone"
    if call.spec.is_vjp and call.options["is_causal"]:
        return "the kernel has no gradients under a causal mask"
    return _of_hopper(call)


@provides(BACKEND, refuses=product_takes, gradients=False)
def matmul(a: Any, b: Any) -> Any:
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as kernels

    along_m = kernels.MatmulDimension.M
    config = kernels.TuningConfig(
        tile_m=TILES["m"] // 2,  # of each of two warpgroups
        tile_n=TILES["n"],
        tile_k=TILES["k"],
        max_concurrent_steps=4,
        grid_minor_dim=along_m,
        grid_tile_width=8,
        wg_dimension=along_m,
    )
    return kernels.matmul(a, b, None, config)


@provides(BACKEND, refuses=attention_takes)
def attention(q: Any, k: Any, v: Any, *, is_causal: bool = False, scale: float | None = None) -> Any:
    from jax.experimental.pallas.ops.gpu import attention_mgpu as kernels

    d = q.shape[3]
    backward = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64)
    config = kernels.TuningConfig(
        block_q=ROWS // 2, block_kv=SCORES // d, max_concurrent_steps=2, causal=is_causal, **backward
    )
    return kernels.attention(q * (d**-0.5 if scale is None else scale), k, v, config)
