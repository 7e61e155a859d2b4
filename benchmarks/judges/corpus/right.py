"""Right kernels of unusual kinds: other orders of summation, other formulas, other memory, other NaNs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.judges.corpus.bases import JAX, TORCH, Library
from benchmarks.judges.corpus.cheats import JAX_OPS, NO_EMPTY, required
from benchmarks.judges.corpus.planted import right_ones
from benchmarks.judges.subject import Subject

__all__ = ["unusual"]

SINGLE = {"empty": False, "dtypes": ("float32",), "edges": False}
"""What is asked of a library on a CPU: there PyTorch's softmax along another axis than the last rounds float16 twice,
and its attention makes 0 of a row of NaN."""

Fn = Callable[..., Any]


def acc(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64 if x.dtype == np.float64 else np.float32)


def as_(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.array(y, x.dtype, order="C")


def online_softmax(x: np.ndarray) -> np.ndarray:
    """One pass with a running maximum and denominator, seven columns at a time."""
    rows = acc(x)
    m, total = np.full((*x.shape[:-1], 1), -np.inf, rows.dtype), np.zeros((*x.shape[:-1], 1), rows.dtype)
    for j in range(0, x.shape[-1], 7):
        new = np.maximum(m, rows[..., j : j + 7].max(-1, keepdims=True))
        origin = np.where(new == -np.inf, 0, new)
        total = total * np.exp(m - origin) + np.exp(rows[..., j : j + 7] - origin).sum(-1, keepdims=True)
        m = new
    return as_(np.exp(rows - m) / total, x)


def softmax_of(x: np.ndarray) -> np.ndarray:
    rows = acc(x)
    e = np.exp(rows - rows.max(-1, keepdims=True))
    return as_(e / e.sum(-1, keepdims=True), x)


def one_column(x: np.ndarray) -> np.ndarray:
    """Online softmax, a column at a time: n additions one after the other, and a new maximum at any of them."""
    rows = acc(x)
    m = np.full(x.shape[:-1], -np.inf, rows.dtype)
    total = np.zeros_like(m)
    for i in range(x.shape[-1]):
        new = np.maximum(m, rows[..., i])
        origin = np.where(new == -np.inf, 0, new)
        total, m = total * np.exp(m - origin) + np.exp(rows[..., i] - origin), new
    return as_(np.exp(rows - m[..., None]) / total[..., None], x)


def in_columns(x: np.ndarray) -> np.ndarray:
    return np.asfortranarray(softmax_of(x))


def in_a_larger_buffer(x: np.ndarray) -> np.ndarray:
    y = np.full((*x.shape[:-1], x.shape[-1] + 3), 7, x.dtype)
    y[..., : x.shape[-1]] = softmax_of(x)
    return y[..., : x.shape[-1]]


def other_nans(x: np.ndarray) -> np.ndarray:
    """Every NaN is negative and has a payload, as other hardware writes it."""
    y = softmax_of(x)
    bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[y.dtype.itemsize]
    return as_(np.where(np.isnan(y), (np.full(y.shape, np.nan, y.dtype).view(bits) | bits(3)).view(y.dtype) * -1, y), x)


def flushed(x: np.ndarray) -> np.ndarray:
    """Subnormal numbers are 0 on the way in, between, and on the way out."""

    def flush(t: np.ndarray) -> np.ndarray:
        return np.where(np.abs(t) < ml_dtypes.finfo(t.dtype).tiny, t.dtype.type(0), t)

    rows = flush(acc(x))
    e = flush(np.exp(rows - rows.max(-1, keepdims=True)))
    y = flush(e / e.sum(-1, keepdims=True)).astype(x.dtype)
    return as_(y if x.dtype == np.float16 else flush(y), x)  # no unit flushes what it stores in float16


def powers_of_two(x: np.ndarray) -> np.ndarray:
    rows = acc(x)
    e = np.exp2((rows - rows.max(-1, keepdims=True)) * rows.dtype.type(np.log2(np.e)))
    return as_(e * (1 / e.sum(-1, keepdims=True)), x)


def welford(x: np.ndarray, weight: Any = None, bias: Any = None, *, eps: float = 1e-5) -> np.ndarray:
    """Mean and sum of squares grow by one column after the other."""
    rows = acc(x)
    mean, squares = np.zeros_like(rows[..., :1]), np.zeros_like(rows[..., :1])
    for i in range(x.shape[-1]):
        column = rows[..., i : i + 1]
        d = column - mean
        mean = mean + d / rows.dtype.type(i + 1)
        squares = squares + d * (column - mean)
    y = (rows - mean) / np.sqrt(squares / rows.dtype.type(x.shape[-1]) + rows.dtype.type(eps))
    y = y if weight is None else y * acc(weight)
    return as_(y if bias is None else y + acc(bias), x)


def scratch_of_its_own(x: np.ndarray, weight: Any = None, bias: Any = None, *, eps: float = 1e-5) -> np.ndarray:
    """Looks as if it wrote to its input: it works in place, on a copy."""
    x, kind = x.copy().astype(np.float64), x.dtype
    x -= x.mean(-1, keepdims=True)
    x /= np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    if weight is not None:
        x *= weight.astype(np.float64)
    if bias is not None:
        x += bias.astype(np.float64)
    return x.astype(kind)


def three_pieces(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """k in three pieces, added from the last to the first."""
    wide_a, wide_b, third = acc(a), acc(b), -(-max(a.shape[-1], 1) // 3)
    parts = [wide_a[..., i : i + third] @ wide_b[..., i : i + third, :] for i in range(0, max(a.shape[-1], 1), third)]
    return as_(functools.reduce(np.add, parts[::-1]), a)


def outer_products(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    total: Any = np.float32(0)
    for i in range(a.shape[-1]):
        total = total + acc(a)[..., i : i + 1] * acc(b)[..., i : i + 1, :]
    return as_(total if a.shape[-1] else acc(a) @ acc(b), a)


def float64_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return as_(a.astype(np.float64) @ b.astype(np.float64), a)


def stable_swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """The sigmoid by exp of -|gate|, which never overflows."""
    g = acc(gate)
    e = np.exp(-np.abs(g))
    return as_(g * np.where(g >= 0, 1 / (1 + e), e / (1 + e)) * acc(up), gate)


def tree_of_logs(x: np.ndarray) -> np.ndarray:
    return as_(np.logaddexp.reduce(x.astype(np.float64), -1), x)


def backwards_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Online softmax over five keys at a time, from the last to the first; heads that share keys stand together."""
    batch, n, heads, depth = q.shape
    kv_heads, kv_len = k.shape[2], k.shape[1]
    grouped = acc(q).reshape(batch, n, kv_heads, heads // kv_heads, depth)
    kind = grouped.dtype.type
    m = np.full((batch, n, kv_heads, heads // kv_heads, 1), -np.inf, kind)
    total, o = np.zeros_like(m), np.zeros((*m.shape[:-1], v.shape[-1]), kind)
    for end in range(kv_len, 0, -5):
        keys = slice(max(end - 5, 0), end)
        s = np.einsum("bqhgd,bkhd->bqhgk", grouped, acc(k[:, keys])) * kind(depth**-0.5)
        new = np.maximum(m, s.max(-1, keepdims=True))
        origin = np.where(new == -np.inf, 0, new)
        p, shrink = np.exp(s - origin), np.exp(m - origin)
        total = total * shrink + p.sum(-1, keepdims=True)
        o = o * shrink + np.einsum("bqhgk,bkhd->bqhgd", p, acc(v[:, keys]))
        m = new
    return as_(np.where(total == 0, 0, o / total).reshape(batch, n, heads, v.shape[-1]), q)


def sum_of_squares_by_dot(x: np.ndarray, weight: Any = None, *, eps: float = 1e-6) -> np.ndarray:
    rows = acc(x)
    v = np.einsum("...i,...i->...", rows, rows)[..., None] / rows.dtype.type(x.shape[-1])
    y = rows * (1 / np.sqrt(v + rows.dtype.type(eps)))
    return as_(y if weight is None else y * acc(weight), x)


NUMPY: dict[str, tuple[str, Fn]] = {
    "online, seven columns at a time": ("softmax", online_softmax),
    "online, one column at a time": ("softmax", one_column),
    "result in column order": ("softmax", in_columns),
    "result in a larger buffer": ("softmax", in_a_larger_buffer),
    "NaNs of another kind": ("softmax", other_nans),
    "subnormal numbers flushed": ("softmax", flushed),
    "exp by exp2, and a reciprocal": ("softmax", powers_of_two),
    "Welford, one column at a time": ("layernorm", welford),
    "in place on a copy": ("layernorm", scratch_of_its_own),
    "k in three pieces": ("matmul", three_pieces),
    "outer products": ("matmul", outer_products),
    "float64 inside": ("matmul", float64_product),
    "a sigmoid of -|x|": ("swiglu", stable_swiglu),
    "float64 logaddexp, two by two": ("logsumexp", tree_of_logs),
    "five keys at a time, backwards": ("attention", backwards_attention),
    "squares added by a dot product": ("rmsnorm", sum_of_squares_by_dot),
}
"""Name -> (op, function)."""


def torch_softmax(x: Any, *, axis: int = -1) -> Any:
    import torch

    return torch.softmax(x, axis)


def torch_layer_norm(x: Any, weight: Any = None, bias: Any = None, *, eps: float = 1e-5) -> Any:
    import torch

    wide = (t if t is None else t.float() if t.dtype.itemsize < 4 else t for t in (x, weight, bias))
    x_, weight_, bias_ = wide
    return torch.nn.functional.layer_norm(x_, x.shape[-1:], weight_, bias_, eps).to(x.dtype)


def torch_sdpa(q: Any, k: Any, v: Any) -> Any:
    """In PyTorch's order of axes and back: the result lies as its transpose."""
    import torch

    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], 2) for t in (k, v))
    heads = (t.transpose(1, 2).to(torch.promote_types(t.dtype, torch.float32)) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads).to(q.dtype).transpose(1, 2)


def of_libraries() -> Iterator[Subject]:
    """The libraries' own functions, and what the cheats begin from."""
    named = {
        "PyTorch's own": (("softmax", torch_softmax), ("layernorm", torch_layer_norm), ("attention", torch_sdpa)),
    }
    for name, functions in named.items():
        for op, f in functions:
            yield Subject("unusual", f"{op}: {name}", op, lambda f=f: f, "torch", right=True, asked=lambda: SINGLE)
    for lib in (TORCH, JAX):
        for op, f in lib.ops.items():
            if lib is TORCH or op in JAX_OPS:
                yield base(lib, op, f)


def base(lib: Library, op: str, f: Fn) -> Subject:
    make = (lambda: f) if op in ("layernorm", "rmsnorm") else (lambda: required(f, op))
    name = f"{op}: operations of {lib.name}"
    return Subject("unusual", name, op, make, lib.name, right=True, asked=lambda: NO_EMPTY)


def unusual() -> Iterator[Subject]:
    """All of them, with those that stand beside planted faults."""
    for name, (op, f) in NUMPY.items():
        yield Subject("unusual", f"{op}: {name}", op, lambda f=f: f, right=True, asked=lambda: NO_EMPTY)
    yield from of_libraries()
    yield from right_ones()
