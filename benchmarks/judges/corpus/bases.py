"""Right functions in PyTorch and JAX, in the framework's own operations, computed in float32 where arrays have 16 bits:
what cheats begin from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["JAX", "LIBRARIES", "TORCH", "Library"]


class Library:
    """What the functions need of a framework, under one name in both."""

    name: str

    def __init__(self) -> None:
        self.ops: dict[str, Callable[..., Any]] = {
            "softmax": self.softmax,
            "logsumexp": self.logsumexp,
            "layernorm": self.layernorm,
            "rmsnorm": self.rmsnorm,
            "swiglu": self.swiglu,
            "matmul": self.matmul,
            "attention": self.attention,
        }
        self.without_maximum: dict[str, Callable[..., Any]] = {
            "softmax": lambda x: self.softmax(x, top=self.nothing),
            "logsumexp": lambda x: self.logsumexp(x, top=self.nothing),
            "attention": lambda q, k, v: self.attention(q, k, v, top=self.nothing),
        }

    # --- what differs between the frameworks ---
    def exp(self, x: Any) -> Any:
        raise NotImplementedError

    def log(self, x: Any) -> Any:
        raise NotImplementedError

    def largest(self, x: Any) -> Any:
        """The maximum of the last axis, kept; 0 where it is -inf."""
        raise NotImplementedError

    def added(self, x: Any) -> Any:
        """The sum over the last axis, kept."""
        raise NotImplementedError

    def einsum(self, how: str, *arrays: Any) -> Any:
        raise NotImplementedError

    def product(self, a: Any, b: Any) -> Any:
        raise NotImplementedError

    def cast(self, x: Any, dtype: Any) -> Any:
        """``dtype``: a name, or that of an array."""
        raise NotImplementedError

    def wide(self, x: Any) -> Any:
        return self.cast(x, "float32") if x.dtype.itemsize < 4 else x

    def where_infinite(self, x: Any, value: float) -> Any:
        raise NotImplementedError

    def nothing(self, x: Any) -> Any:
        return 0.0

    def filled(self, shape: tuple[int, ...], dtype: Any, value: float) -> Any:
        raise NotImplementedError

    def with_last(self, x: Any, start: int, value: float) -> Any:
        """A copy whose last axis holds ``value`` from ``start`` on."""
        raise NotImplementedError

    # --- the functions ---
    def softmax(self, x: Any, top: Callable[[Any], Any] | None = None) -> Any:
        rows = self.wide(x)
        e = self.exp(rows - (top or self.largest)(rows))
        return self.cast(e / self.added(e), x.dtype)

    def largest_number(self, x: Any) -> Any:
        """The maximum of the last axis, kept; 0 where it is infinite."""
        return self.where_infinite(self.largest(x), 0.0)

    def logsumexp(self, x: Any, top: Callable[[Any], Any] | None = None) -> Any:
        rows = self.wide(x)
        m = (top or self.largest_number)(rows)
        return self.cast((m + self.log(self.added(self.exp(rows - m))))[..., 0], x.dtype)

    def layernorm(self, x: Any, weight: Any = None, bias: Any = None) -> Any:
        rows = self.wide(x)
        d = rows - self.added(rows) / max(x.shape[-1], 1)
        y = d / (self.added(d * d) / max(x.shape[-1], 1) + 1e-5) ** 0.5
        y = y if weight is None else y * self.wide(weight)
        return self.cast(y if bias is None else y + self.wide(bias), x.dtype)

    def rmsnorm(self, x: Any, weight: Any = None) -> Any:
        rows = self.wide(x)
        y = rows * (1 / (self.added(rows * rows) / max(x.shape[-1], 1) + 1e-6) ** 0.5)
        return self.cast(y if weight is None else y * self.wide(weight), x.dtype)

    def swiglu(self, gate: Any, up: Any) -> Any:
        g = self.wide(gate)
        return self.cast(g / (1 + self.exp(-g)) * self.wide(up), gate.dtype)

    def matmul(self, a: Any, b: Any) -> Any:
        return self.cast(self.product(self.wide(a), self.wide(b)), a.dtype)

    def attention(self, q: Any, k: Any, v: Any, top: Callable[[Any], Any] | None = None) -> Any:
        batch, n, heads, depth = q.shape
        grouped = self.wide(q).reshape(batch, n, k.shape[2], heads // k.shape[2], depth)
        s = self.einsum("bqhgd,bkhd->bhgqk", grouped, self.wide(k)) * depth**-0.5
        p = self.exp(s - (top or self.largest)(s))
        total = self.added(p)
        o = self.einsum("bhgqk,bkhd->bqhgd", p / (total + (total == 0)), self.wide(v))
        return self.cast(o.reshape(batch, n, heads, v.shape[-1]), q.dtype)


class Torch(Library):
    name = "torch"

    def exp(self, x: Any) -> Any:
        return x.exp()

    def log(self, x: Any) -> Any:
        return x.log()

    def largest(self, x: Any) -> Any:
        import torch

        m = x.amax(-1, keepdim=True)
        return torch.where(m == -torch.inf, 0.0, m)

    def added(self, x: Any) -> Any:
        return x.sum(-1, keepdim=True)

    def einsum(self, how: str, *arrays: Any) -> Any:
        import torch

        return torch.einsum(how, *arrays)

    def product(self, a: Any, b: Any) -> Any:
        return a @ b

    def cast(self, x: Any, dtype: Any) -> Any:
        import torch

        return x.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype).contiguous()

    def where_infinite(self, x: Any, value: float) -> Any:
        return x.masked_fill(x.isinf(), value)

    def filled(self, shape: tuple[int, ...], dtype: Any, value: float) -> Any:
        import torch

        return torch.full(shape, value, dtype=dtype)

    def with_last(self, x: Any, start: int, value: float) -> Any:
        y = x.clone()
        y[..., start:] = value
        return y


class Jax(Library):
    name = "jax"

    def exp(self, x: Any) -> Any:
        import jax.numpy as jnp

        return jnp.exp(x)

    def log(self, x: Any) -> Any:
        import jax.numpy as jnp

        return jnp.log(x)

    def largest(self, x: Any) -> Any:
        import jax.numpy as jnp

        m = x.max(-1, keepdims=True)
        return jnp.where(m == -jnp.inf, 0.0, m)

    def added(self, x: Any) -> Any:
        return x.sum(-1, keepdims=True)

    def einsum(self, how: str, *arrays: Any) -> Any:
        import jax.numpy as jnp

        return jnp.einsum(how, *arrays, precision="highest")

    def product(self, a: Any, b: Any) -> Any:
        import jax.numpy as jnp

        return jnp.matmul(a, b, precision="highest")

    def cast(self, x: Any, dtype: Any) -> Any:
        kinds = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
        return x.astype(kinds[dtype] if isinstance(dtype, str) else dtype)

    def where_infinite(self, x: Any, value: float) -> Any:
        import jax.numpy as jnp

        return jnp.where(jnp.isinf(x), value, x)

    def filled(self, shape: tuple[int, ...], dtype: Any, value: float) -> Any:
        import jax.numpy as jnp

        return jnp.full(shape, value, dtype)

    def with_last(self, x: Any, start: int, value: float) -> Any:
        return x.at[..., start:].set(value)


TORCH, JAX = Torch(), Jax()
LIBRARIES: tuple[Library, ...] = (TORCH, JAX)
