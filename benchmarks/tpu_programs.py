"""The programs that ``tpu_cycles.py`` compiles: each case's kernels here, XLA's formula, JAX's flash and splash
kernels.

Formulas are traced on arrays without memory. JAX's kernels get their arrays as they want them, heads first and in whole
blocks (a length of 4000 as one of 4096), and every set of blocks in :data:`BLOCKS`, of which the best counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["BLOCKS", "CASES", "LIKED", "PEERS", "Program"]

HEAD = "batch=1,kv_heads=1,group=1,d=128,dv=128"
CAUSAL = f"{HEAD},q_len=4096,kv_len=4096,is_causal=true"
ROWS = ((8192, 4096), (8192, 8192), (4096, 1000), (1024, 50257))
CASES = {
    "matmul 2048^3": ("matmul", "bfloat16", "m=2048,k=2048,n=2048"),
    "matmul 4096^3": ("matmul", "bfloat16", "m=4096,k=4096,n=4096"),
    "matmul 4096x14336x4096": ("matmul", "bfloat16", "m=4096,k=14336,n=4096"),
    "matmul 4000x4096x3000": ("matmul", "bfloat16", "m=4000,k=4096,n=3000"),
    "matmul 2048^3 float32": ("matmul", "float32", "m=2048,k=2048,n=2048"),
    "attention full": ("attention", "bfloat16", f"{HEAD},q_len=4096,kv_len=4096,is_causal=false"),
    "attention causal": ("attention", "bfloat16", CAUSAL),
    "attention GQA 4 S 8192": (
        "attention", "bfloat16", "batch=1,kv_heads=1,group=4,d=128,dv=128,q_len=8192,kv_len=8192,is_causal=true"
    ),
    "attention d 64": (
        "attention", "bfloat16", "batch=1,kv_heads=1,group=1,d=64,dv=64,q_len=4096,kv_len=4096,is_causal=true"
    ),
    "attention S=4000": ("attention", "bfloat16", f"{HEAD},q_len=4000,kv_len=4000,is_causal=true"),
    "attention window 1024": ("attention", "bfloat16", f"{CAUSAL},window=1024x0"),
    "decode GQA 4": (
        "attention", "bfloat16", "batch=1,kv_heads=8,group=4,d=128,dv=128,q_len=1,kv_len=8192,is_causal=false"
    ),
    "attention backward": ("attention_vjp", "bfloat16", CAUSAL),
    **{
        f"{op} {m}x{n}": (op, "bfloat16", f"shape={m}x{n}" if op.startswith("softmax") else f"batch={m},n={n}")
        for op in ("softmax", "layernorm", "rmsnorm", "softmax_vjp", "layernorm_vjp", "rmsnorm_vjp")
        for m, n in ROWS
    },
}  # fmt: skip
"""Name -> op, dtype, dimensions and options."""

BLOCKS: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "flash": ((1024, 1024, 1024), (1024, 1024, 512)),
    "splash": ((1024, 1024, 1024), (1024, 1024, 512), (512, 512, 512)),
}
"""JAX's kernel -> blocks of queries, of keys, and of keys at a time. Its default of 128 takes several times as long;
512 x 1024, 2048 x 1024 and for flash 512 x 512 were tried on v5e, and are behind throughout."""

LIKED = ("hbm", "anywhere")
"""Where operands of XLA's programs lie: in device memory, or wherever libtpu likes them."""

Program = tuple[str, tuple[int, ...]]
"""Whose program it is, and its blocks."""


def _placed(call: Any) -> Any:
    """A function that gives arrays without memory their place, on the first chip of a topology."""
    import jax
    from jax.experimental import topologies

    from portakern.backends.pallas.tpu.toolchain.compiler import TOPOLOGY

    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY[call.target.arch])
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    return lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _heads_first(call: Any, group: int) -> list[Any]:
    """q, k and v as JAX's kernels want them, ``group`` heads of q for each of k and v; in whole blocks of 512."""
    placed, found = _placed(call), []
    for name in ("q", "k", "v"):
        batch, length, heads, d = call.arrays[name].shape
        heads *= 1 if name == "q" else call.dims["group"] // group
        found.append(placed((batch, heads, -(-length // 512) * 512, d), call.arrays[name].dtype))
    return found


def flash(call: Any, blocks: tuple[int, ...]) -> Any:
    """JAX's flash attention, keys and values repeated for the heads of a group, which it does not know."""
    import jax
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

    sizes = BlockSizes(blocks[0], blocks[1], blocks[2], 1)

    def program(q: Any, k: Any, v: Any) -> Any:
        causal, scale = call.options["is_causal"], q.shape[-1] ** -0.5
        return flash_attention(q, k, v, causal=causal, sm_scale=scale, block_sizes=sizes)

    return jax.jit(program).trace(*_heads_first(call, 1))


def splash(call: Any, blocks: tuple[int, ...]) -> Any:
    """JAX's splash attention; for gradients forward and backward with its fused kernel, of which the second counts."""
    import jax
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as made
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    q, k, v = (jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=x.sharding) for x in _heads_first(
        call, call.dims["group"]
    ))  # fmt: skip
    extents = q.shape[1], k.shape[1]
    mask: Any = masks.FullMask(extents)
    if call.options["is_causal"]:
        mask = masks.CausalMask(extents)
    if call.options["window"]:
        mask = masks.LocalMask(extents, (call.options["window"][0], 0), 0)
    of_q, of_kv, at_a_time = blocks
    sizes = made.BlockSizes(
        of_q, of_kv, at_a_time, block_q_dkv=of_q, block_kv_dkv=of_kv, block_kv_dkv_compute=at_a_time,
        use_fused_bwd_kernel=True,
    )  # fmt: skip
    heads = masks.MultiHeadMask([mask] * q.shape[0])
    kernel = made.make_splash_mha(heads, block_sizes=sizes, head_shards=1, q_seq_shards=1)
    if not call.spec.name.endswith("_vjp"):
        return jax.jit(lambda *xs: kernel(*xs)).trace(q, k, v)
    return jax.jit(lambda d_o, *xs: jax.vjp(kernel, *xs)[1](d_o)).trace(q, q, k, v)


PEERS: Mapping[str, Callable[[Any, tuple[int, ...]], Any]] = {"flash": flash, "splash": splash}


def xla(call: Any) -> Any:
    """The op's formula for XLA, or of a gradient op its derivative."""
    import jax

    if call.spec.name in FORMULAS:
        name, gradient = call.spec.name, ""
    else:
        name, _, gradient = call.spec.name.partition("_")
    formula = FORMULAS[name]
    arrays = [call.arrays[n] for n in INPUTS[name] if call.arrays.get(n) is not None]
    if name == "layernorm" and len(arrays) == 2:
        arrays.append(arrays[-1])  # a gradient does not read the bias
    placed = _placed(call)
    forms_of = [placed(a.shape, a.dtype) for a in arrays]
    if not gradient:
        return jax.jit(lambda *xs: formula(call, *xs)).trace(*forms_of)
    y = jax.eval_shape(lambda *xs: formula(call, *xs), *forms_of)

    def backward(d_y: Any, *xs: Any) -> Any:
        return jax.vjp(lambda *inner: formula(call, *inner), *xs)[1](d_y)

    return jax.jit(backward).trace(placed(y.shape, y.dtype), *forms_of)


def _matmul(call: Any, a: Any, b: Any) -> Any:
    import jax

    precision = jax.lax.Precision.HIGHEST if a.dtype == "float32" else None
    return jax.numpy.matmul(a, b, precision=precision)


def _softmax(call: Any, x: Any) -> Any:
    import jax

    return jax.nn.softmax(x.astype("float32"), call.options.get("axis", -1)).astype(x.dtype)


def _softmax_vjp(call: Any, y: Any, d_y: Any) -> Any:
    """Of what the forward pass stored, as the kernel has it."""
    wide, of_y = y.astype("float32"), d_y.astype("float32")
    return (wide * (of_y - (wide * of_y).sum(call.options.get("axis", -1), keepdims=True))).astype(y.dtype)


def _layernorm(call: Any, x: Any, weight: Any, bias: Any) -> Any:
    import jax

    wide = x.astype("float32")
    centred = wide - wide.mean(-1, keepdims=True)
    r = jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + call.options.get("eps", 1e-5))
    return (centred * r * weight.astype("float32") + bias.astype("float32")).astype(x.dtype)


def _rmsnorm(call: Any, x: Any, weight: Any) -> Any:
    import jax

    wide = x.astype("float32")
    r = jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + call.options.get("eps", 1e-6))
    return (wide * r * weight.astype("float32")).astype(x.dtype)


def _attention(call: Any, q: Any, k: Any, v: Any) -> Any:
    import jax

    causal, window = call.options["is_causal"], call.options.get("window")
    local = tuple(window) if window else None
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, local_window_size=local, implementation="xla")


FORMULAS = {
    "matmul": _matmul, "softmax": _softmax, "softmax_vjp": _softmax_vjp, "layernorm": _layernorm,
    "rmsnorm": _rmsnorm, "attention": _attention,
}  # fmt: skip
INPUTS = {
    "matmul": ("a", "b"), "softmax": ("x",), "softmax_vjp": ("y", "d_y"), "layernorm": ("x", "weight", "bias"),
    "rmsnorm": ("x", "weight"), "attention": ("q", "k", "v"),
}  # fmt: skip
