"""JAX's own functions under ``jax.jit``, as XLA compiles them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portakern.backends.peers.provide import LACKS, provides
from portakern.core.backend import Backend

if TYPE_CHECKING:
    from portakern.core.call import Call

BACKEND = Backend(
    "jax",
    framework="jax",
    peer=True,
    platforms=("cpu", "cuda", "rocm", "tpu"),
    requires=("jax",),
    extra="pallas",
    refusals=(LACKS,),
)
PRECISION = {"ieee": "highest", "tf32": "tensorfloat32"}  # JAX's names


@provides(BACKEND, gradients=False)
def softmax(x: Any, *, axis: int = -1) -> Any:
    import jax

    return jax.nn.softmax(x, axis)


@provides(BACKEND)
def logsumexp(x: Any, *, axis: int = -1) -> Any:
    import jax

    return jax.nn.logsumexp(x, axis)


@provides(BACKEND)
def swiglu(gate: Any, up: Any) -> Any:
    import jax

    return jax.nn.silu(gate) * up


@provides(BACKEND)
def geglu(gate: Any, up: Any, *, approximate: str = "none") -> Any:
    import jax

    return jax.nn.gelu(gate, approximate=approximate == "tanh") * up


@provides(BACKEND)
def matmul(a: Any, b: Any, *, precision: str = "ieee", out_dtype: Any = None) -> Any:
    import jax

    with jax.default_matmul_precision(PRECISION[precision]):
        return jax.numpy.matmul(a, b, preferred_element_type=out_dtype)


@provides(BACKEND)
def grouped_matmul(a: Any, b: Any, group_ends: Any, *, precision: str = "ieee", out_dtype: Any = None) -> Any:
    """JAX counts groups by their sizes."""
    import jax

    sizes = jax.numpy.diff(group_ends.astype("int32"), prepend=0)
    with jax.default_matmul_precision(PRECISION[precision]):
        return jax.lax.ragged_dot(a, b, sizes, preferred_element_type=out_dtype)


@provides(BACKEND, gradients=False)
def embedding(weight: Any, ids: Any, *, padding_index: int | None = None) -> Any:
    """padding_index concerns the gradient alone."""
    return weight.at[ids].get(mode="fill", wrap_negative_indices=False)


@provides(BACKEND, gradients=False)
def embedding_vjp(weight: Any, ids: Any, d_y: Any, *, padding_index: int | None = None) -> Any:
    import jax.numpy as jnp

    at = ids if padding_index is None else jnp.where(ids == padding_index, len(weight), ids)
    return jnp.zeros_like(weight).at[at].add(d_y, mode="drop", wrap_negative_indices=False)


@provides(BACKEND)
def linear(
    x: Any, weight: Any, bias: Any = None, residual: Any = None, *, activation: str = "none", precision: str = "ieee"
) -> Any:
    """As models write it; XLA joins what follows the product."""
    import jax

    functions = {
        "none": lambda z: z,
        "relu": jax.nn.relu,
        "gelu": lambda z: jax.nn.gelu(z, approximate=False),
        "gelu_tanh": lambda z: jax.nn.gelu(z, approximate=True),
        "silu": jax.nn.silu,
    }
    with jax.default_matmul_precision(PRECISION[precision]):
        z = x @ weight.T
    y = functions[activation](z if bias is None else z + bias)
    return y if residual is None else y + residual


SCORES = 2**31
"""Bytes of float32 scores beyond which attention as XLA composes it is refused: it takes minutes of a benchmark to
compile and to run what cannot come near a kernel that keeps no scores, and half of all memory before it fails."""


def holds_scores(call: Call) -> str | None:
    d = call.dims
    scores = 4 * d["batch"] * d["kv_heads"] * d["group"] * d["q_len"] * d["kv_len"]
    if scores <= SCORES:
        return None
    held = f"{scores / 2**30:.0f} GiB"
    return f"its attention holds all scores, here {held}, and more than {SCORES >> 30} are refused; name jax_cudnn"


@provides(BACKEND, refuses=holds_scores)
def attention(
    q: Any,
    k: Any,
    v: Any,
    bias: Any = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    precision: str = "ieee",
) -> Any:
    """jax.nn wants v as wide as k: the narrower gets columns of zeros."""
    import jax

    d, dv = q.shape[3], v.shape[3]
    q, k, v = (jax.numpy.pad(x, ((0, 0),) * 3 + ((0, max(d, dv) - x.shape[3]),)) for x in (q, k, v))
    with jax.default_matmul_precision(PRECISION[precision]):
        o = attend(q, k, v, bias, is_causal, d**-0.5 if scale is None else scale, "xla")
    return o[..., :dv]


def attend(q: Any, k: Any, v: Any, bias: Any, is_causal: bool, scale: float | None, implementation: str) -> Any:
    """Its causal mask is aligned at the top left, the spec's at the bottom right.

    Unless there are as many queries as keys, the spec's goes in as a mask.
    """
    import jax

    (q_len, kv_len), mask = (q.shape[1], k.shape[1]), None
    if is_causal and q_len != kv_len:
        mask, is_causal = jax.numpy.tril(jax.numpy.ones((1, 1, q_len, kv_len), bool), kv_len - q_len), False
    return jax.nn.dot_product_attention(
        q, k, v, bias, mask, scale=scale, is_causal=is_causal, implementation=implementation
    )


@provides(BACKEND, gradients=False, outputs=2)
def top_k(x: Any, *, k: int = 1, largest: bool = True) -> Any:
    """-0 is less than 0 here, and a NaN with its sign set the least. Of the least numbers the signs are turned."""
    import jax

    values, indices = jax.lax.top_k(x if largest else -x, k)
    return values if largest else -values, indices


@provides(BACKEND, gradients=False)
def top_k_vjp(x: Any, indices: Any, d_values: Any, *, k: int = 1) -> Any:
    import jax

    return jax.numpy.put_along_axis(jax.numpy.zeros_like(x), indices, d_values, -1, inplace=False)


@provides(BACKEND, gradients=False, outputs=2)
def quantize(x: Any, *, height: int = 1, width: int = 128, to: str = "float8_e4m3fn") -> Any:
    """As models write it: XLA's conversion makes NaN of what is beyond float8_e4m3fn, so that it is clipped before. Its
    maximum over two axes loses a NaN on CPUs, of which it is asked by itself."""
    import jax.numpy as jnp

    floating = to != "int8"
    most = float((jnp.finfo if floating else jnp.iinfo)(to).max)
    (m, n), a = x.shape, x.astype(jnp.float32)
    a = a.reshape(m // height, height, n // width, width)
    top = jnp.where(jnp.isnan(a).any((1, 3)), jnp.nan, jnp.abs(a).max((1, 3)))
    scale = jnp.where(top == 0, 1.0, jnp.maximum(top / most, 2.0**-126))
    q = jnp.clip(a / scale[:, None, :, None], -most, most).reshape(m, n)
    return (q if floating else jnp.round(q)).astype(to), scale


@provides(BACKEND, gradients=False, outputs=2)
def kv_append(
    k: Any, v: Any, k_pages: Any, v_pages: Any, slots: Any, *, k_scale: Any = None, v_scale: Any = None
) -> Any:
    """A scatter that drops what is beyond the cache; what has 8 bits is clipped before, as quantize's."""
    import jax.numpy as jnp

    found = []
    for x, pages, scale in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
        new = x if scale is None else x.astype(jnp.float32) / scale[:, None]
        if pages.dtype.itemsize == 1:
            most = float(jnp.finfo(pages.dtype).max)
            new = jnp.clip(new.astype(jnp.float32), -most, most)
        new = new.astype(pages.dtype)
        rows = pages.reshape(-1, *new.shape[1:])
        at = jnp.where(slots < 0, len(rows), slots)
        found.append(rows.at[at].set(new, mode="drop").reshape(pages.shape))
    return tuple(found)
