"""Rows as models in JAX compute them, in float32 whatever they are stored in, under ``jax.jit``: XLA's own kernels.

``jax.nn.softmax`` itself rounds sums of 16-bit rows to 16 bits, and JAX has no norms of its own.
"""

from __future__ import annotations

from typing import Any

from portakern.backends.peers.provide import LACKS, provides
from portakern.core.backend import Backend

BACKEND = Backend(
    "jax_rows",
    framework="jax",
    peer=True,
    platforms=("cpu", "cuda", "rocm", "tpu"),
    requires=("jax",),
    extra="pallas",
    refusals=(LACKS,),
)


def wide(x: Any) -> Any:
    """x in float32, or in what it has if that is wider."""
    import jax.numpy as jnp

    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@provides(BACKEND, gradients=False)
def softmax(x: Any, *, axis: int = -1) -> Any:
    import jax

    return jax.nn.softmax(wide(x), axis).astype(x.dtype)


@provides(BACKEND, gradients=False)
def softmax_vjp(y: Any, d_y: Any, *, axis: int = -1) -> Any:
    """From what the forward stored: JAX's own gradient wants x, which the call has not."""
    h, g = wide(y), wide(d_y)
    return (h * (g - (h * g).sum(axis, keepdims=True))).astype(y.dtype)


@provides(BACKEND, outputs=2)
def merge_states(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> Any:
    import jax
    import jax.numpy as jnp

    def weighed(o: Any, lse: Any, other: Any) -> Any:
        weight, empty = jax.nn.sigmoid(lse - other), lse == -jnp.inf
        weight, empty = (jnp.swapaxes(x, -1, -2)[..., None] for x in (weight, empty))
        return jnp.where(empty, 0.0, weight * wide(o))

    o = weighed(o_a, lse_a, lse_b) + weighed(o_b, lse_b, lse_a)
    return o.astype(o_a.dtype), jnp.logaddexp(lse_a, lse_b)


@provides(BACKEND)
def layernorm(x: Any, weight: Any = None, bias: Any = None, *, eps: float = 1e-5) -> Any:
    import jax.numpy as jnp
    from jax import lax

    h = wide(x)  # once: what reaches it from several sides is then added in float32
    centred = h - jnp.mean(h, -1, keepdims=True)
    return scaled(x, centred * lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + eps), weight, bias)


@provides(BACKEND)
def rmsnorm(x: Any, weight: Any = None, *, eps: float = 1e-6) -> Any:
    import jax.numpy as jnp
    from jax import lax

    h = wide(x)
    return scaled(x, h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + eps), weight, None)


def scaled(x: Any, y: Any, weight: Any, bias: Any) -> Any:
    """y with a norm's weight and bias, stored as x is."""
    y = y if weight is None else y * wide(weight)
    return (y if bias is None else y + wide(bias)).astype(x.dtype)
