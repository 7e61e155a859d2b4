"""Faults planted in ordinary functions: what a kernel keeps between calls, whose memory it hands out, and sizes,
options and layouts that it takes for others. They are NumPy, so that hundreds of cases take a second.

    python -m tests.mutants.functions                  # every fault on 5 seeds, and the right functions
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import portakern as pk

__all__ = ["EXAMPLES", "PLANTED", "RIGHT", "Planted", "found"]

EXAMPLES = 400


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def softmax(x: Any, *, axis: int = -1) -> Any:
    with np.errstate(all="ignore"):
        e = np.exp(wide(x) - wide(x).max(axis, keepdims=True, initial=-np.inf))
        return np.array(e / e.sum(axis, keepdims=True), x.dtype, order="C")


def layernorm(x: Any, weight: Any = None, bias: Any = None, *, eps: float = 1e-5) -> Any:
    with np.errstate(all="ignore"):
        d = wide(x) - wide(x).sum(-1, keepdims=True) / x.shape[-1] if x.size else wide(x)
        y = d / np.sqrt(np.square(d).sum(-1, keepdims=True) / max(x.shape[-1], 1) + eps)
        y = y if weight is None else y * wide(weight)
        return np.array(y if bias is None else y + wide(bias), x.dtype, order="C")


def rmsnorm(x: Any, weight: Any = None, *, eps: float = 1e-6) -> Any:
    with np.errstate(all="ignore"):
        y = wide(x) / np.sqrt(np.square(wide(x)).sum(-1, keepdims=True) / max(x.shape[-1], 1) + eps)
        return np.array(y if weight is None else y * wide(weight), x.dtype, order="C")


def matmul(a: Any, b: Any) -> Any:
    with np.errstate(all="ignore"):
        return np.array(wide(a) @ wide(b), a.dtype, order="C")


def attention(q: Any, k: Any, v: Any, *, is_causal: bool = False, scale: float | None = None) -> Any:
    group = q.shape[2] // k.shape[2]
    with np.errstate(all="ignore"):
        kk, vv = (np.repeat(wide(x), group, 2) for x in (k, v))
        s = np.einsum("bqhd,bkhd->bhqk", wide(q), kk) * (q.shape[3] ** -0.5 if scale is None else scale)
        n, m = s.shape[2:]
        seen = np.tri(n, m, m - n, dtype=bool) if is_causal else np.ones((n, m), bool)
        s = np.where(seen, s, -np.inf)
        top = s.max(-1, keepdims=True, initial=-np.inf)
        p = np.exp(s - np.where(np.isneginf(top), 0.0, top))
        total = p.sum(-1, keepdims=True)
        p = np.where(total == 0, 0.0, p / total)
        terms = np.where(seen[None, None, :, :, None], p[..., None] * np.moveaxis(vv, 1, 2)[:, :, None], 0.0)
        return np.array(np.moveaxis(terms.sum(3), 1, 2), q.dtype, order="C")


class Planted(NamedTuple):
    """A fault: ``make()`` gives the function with it, in the state of a new process. ``kind`` is what it breaks, empty
    where it may break anything."""

    op: str
    group: str
    what: str
    make: Callable[[], Callable[..., Any]]
    kind: str = "bounds"


PLANTED: list[Planted] = []


def plant(op: str, group: str, what: str, kind: str = "bounds") -> Callable[[Any], Any]:
    def keep(make: Any) -> Any:
        PLANTED.append(Planted(op, group, what, make, kind))
        return make

    return keep


def form(*arrays: Any) -> tuple[Any, ...]:
    return tuple((a.shape, a.dtype) for a in arrays)


# --- state ---


@plant("softmax", "state", "the result is kept by the identity of x")
def _() -> Any:
    kept: list[Any] = [None, None]

    def fn(x: Any) -> Any:
        if kept[0] is not x:
            kept[:] = x, softmax(x)
        return kept[1].copy()

    return fn


@plant("softmax", "state", "from its third call with a form on it gives the first result, as a graph captured by value")
def _() -> Any:
    calls: dict[Any, list[Any]] = {}

    def fn(x: Any) -> Any:
        seen = calls.setdefault(form(x), [])
        seen.append(softmax(x))
        return (seen[0] if len(seen) > 2 else seen[-1]).copy()

    return fn


@plant("softmax", "state", "the maximum is that of the call before, of the same shape")
def _() -> Any:
    tops: dict[Any, Any] = {}

    def fn(x: Any) -> Any:
        with np.errstate(all="ignore"):
            top = tops.setdefault(form(x), wide(x).max(-1, keepdims=True, initial=-np.inf))
            e = np.exp(np.minimum(wide(x) - top, 20))
            return np.array(e / e.sum(-1, keepdims=True), x.dtype, order="C")

    return fn


@plant("matmul", "state", "b is packed once for each object")
def _() -> Any:
    kept: list[Any] = [None, None]

    def fn(a: Any, b: Any) -> Any:
        if kept[0] is not b:
            kept[:] = b, b.copy()
        return matmul(a, kept[1])

    return fn


@plant("matmul", "state", "a is packed once for each address and shape")
def _() -> Any:
    kept: list[Any] = [None, None, None]

    def fn(a: Any, b: Any) -> Any:
        key = a.ctypes.data, a.shape, a.strides, a.dtype
        if kept[0] != key or kept[2] is not a:
            kept[:] = key, a.copy(), a
        return matmul(kept[1], b)

    return fn


@plant("matmul", "state", "sums are added to what the call before left")
def _() -> Any:
    sums: dict[Any, Any] = {}

    def fn(a: Any, b: Any) -> Any:
        with np.errstate(all="ignore"):
            before = sums.get(form(a, b), 0.0)
            sums[form(a, b)] = wide(a) @ wide(b)
            return np.array(before + sums[form(a, b)], a.dtype, order="C")

    return fn


@plant("layernorm", "state", "statistics are kept by the identity of x")
def _() -> Any:
    kept: list[Any] = [None, None]

    def fn(x: Any, weight: Any = None) -> Any:
        if kept[0] is not x:
            kept[:] = x, layernorm(x, weight)
        return kept[1].copy()

    return fn


@plant("layernorm", "state", "eps is that of the first call with a shape")
def _() -> Any:
    kept: dict[Any, float] = {}

    def fn(x: Any, weight: Any = None, bias: Any = None, *, eps: float = 1e-5) -> Any:
        return layernorm(x, weight, bias, eps=kept.setdefault(x.shape[-1], eps))

    return fn


@plant("rmsnorm", "state", "every fifth call with a form gives what the one before it gave")
def _() -> Any:
    calls: dict[Any, list[Any]] = {}

    def fn(x: Any) -> Any:
        seen = calls.setdefault(form(x), [])
        seen.append(seen[-1] if len(seen) % 5 == 4 else rmsnorm(x))
        return seen[-1].copy()

    return fn


@plant("attention", "state", "keys are kept by their identity, as a cache that is never emptied")
def _() -> Any:
    kept: list[Any] = [None] * 4

    def fn(q: Any, k: Any, v: Any) -> Any:
        if kept[0] is not k or kept[2] is not v:
            kept[:] = k, k.copy(), v, v.copy()
        return attention(q, kept[1], kept[3])

    return fn


@plant("softmax", "state", "every second call differs in the last bit", "promises")
def _() -> Any:
    calls = [0]

    def fn(x: Any) -> Any:
        calls[0] += 1
        y = softmax(x)
        return y if calls[0] % 2 or x.dtype != np.float32 else np.nextafter(y, np.float32(0))

    return fn


# --- buffers ---


@plant("softmax", "buffers", "results lie in one buffer for each shape", "promises")
def _() -> Any:
    buffers: dict[Any, Any] = {}

    def fn(x: Any) -> Any:
        out = buffers.setdefault(form(x), np.empty(x.shape, x.dtype))
        out[...] = softmax(x)
        return out

    return fn


@plant("matmul", "buffers", "results are the front of one workspace", "promises")
def _() -> Any:
    space = np.empty(1 << 20, np.uint8)

    def fn(a: Any, b: Any) -> Any:
        c = matmul(a, b)
        out = space[: c.nbytes].view(c.dtype).reshape(c.shape)
        out[...] = c
        return out

    return fn


@plant("layernorm", "buffers", "two buffers take turns", "promises")
def _() -> Any:
    turns: dict[Any, list[Any]] = {}

    def fn(x: Any) -> Any:
        ring = turns.setdefault(form(x), [np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype)])
        ring.reverse()
        ring[0][...] = layernorm(x)
        return ring[0]

    return fn


@plant("softmax", "buffers", "a contiguous x is overwritten with the result", "promises")
def _() -> Any:
    def fn(x: Any) -> Any:
        if not x.flags.c_contiguous:
            return softmax(x)
        x[...] = softmax(x)
        return x

    return fn


@plant("rmsnorm", "buffers", "x is scaled in place, and the result is a copy", "promises")
def _() -> Any:
    def fn(x: Any) -> Any:
        y = rmsnorm(x)
        x[...] = y
        return y

    return fn


@plant("layernorm", "buffers", "a weight of zeros is mended in place", "promises")
def _() -> Any:
    def fn(x: Any, weight: Any = None) -> Any:
        y = layernorm(x, weight)
        if weight is not None:
            weight[...] = np.where(weight == 0, weight.dtype.type(1e-5), weight)
        return y

    return fn


@plant("softmax", "buffers", "one column is handed out as it is", "promises")
def _() -> Any:
    ones: dict[Any, Any] = {}

    def fn(x: Any) -> Any:
        if x.shape[-1] != 1 or not np.isfinite(wide(x)).all():
            return softmax(x)
        return ones.setdefault(form(x), np.ones(x.shape, x.dtype))

    return fn


# --- sizes ---


def sized(op: str, what: str, wrong: Callable[..., Any]) -> None:
    PLANTED.append(Planted(op, "sizes", what, lambda: wrong))


def off(y: Any, where: Any = ...) -> Any:
    y[where] *= y.dtype.type(1.25)
    return y


sized("softmax", "rows of a multiple of 512", lambda x: off(softmax(x)) if x.shape[-1] % 512 == 0 else softmax(x))
sized("softmax", "what lies beyond 1,024", lambda x: off(softmax(x), (..., slice(1024, None))))
sized("softmax", "rows beyond the 1,000th", lambda x: off(softmax(x).reshape(-1, x.shape[-1]), slice(1000, None))
      .reshape(x.shape) if x.size else softmax(x))  # fmt: skip
sized("softmax", "six axes", lambda x: off(softmax(x)) if x.ndim > 5 else softmax(x))
sized("layernorm", "one element beyond a power of two",
      lambda x: off(layernorm(x)) if x.shape[-1] > 256 and (x.shape[-1] - 1) & (x.shape[-1] - 2) == 0
      else layernorm(x))  # fmt: skip
sized("layernorm", "rows longer than 1,500", lambda x: off(layernorm(x)) if x.shape[-1] > 1500 else layernorm(x))
sized("rmsnorm", "rows of a multiple of 256", lambda x: off(rmsnorm(x)) if x.shape[-1] % 256 == 0 else rmsnorm(x))
sized("matmul", "k of a multiple of 256",
      lambda a, b: off(matmul(a, b)) if a.shape[-1] and a.shape[-1] % 256 == 0 else matmul(a, b))  # fmt: skip
sized("matmul", "rows beyond 600", lambda a, b: off(matmul(a, b), (..., slice(600, None), slice(None))))
sized("matmul", "columns beyond 600", lambda a, b: off(matmul(a, b), (..., slice(600, None))))
sized("matmul", "three batch axes and more", lambda a, b: off(matmul(a, b)) if a.ndim > 5 else matmul(a, b))
sized("attention", "keys beyond 600", lambda q, k, v: attention(q, k[:, :600], v[:, :600]))
sized("attention", "heads beyond 40", lambda q, k, v: off(attention(q, k, v), (..., slice(40, None), slice(None))))
sized("attention", "d of 128 and more", lambda q, k, v: off(attention(q, k, v)) if q.shape[3] >= 128
      else attention(q, k, v))  # fmt: skip

# --- options ---


def optioned(op: str, what: str, wrong: Callable[..., Any]) -> None:
    PLANTED.append(Planted(op, "options", what, lambda: wrong))


optioned("softmax", "an axis of -ndim is the last", lambda x, axis=-1: softmax(x, axis=-1 if axis == -x.ndim else axis))
optioned("layernorm", "eps is at most 0.1", lambda x, eps=1e-5: layernorm(x, eps=min(eps, 0.1)))
optioned("layernorm", "an eps of 0 is the default", lambda x, eps=1e-5: layernorm(x, eps=eps or 1e-5))
optioned("rmsnorm", "a large eps is the default", lambda x, eps=1e-6: rmsnorm(x, eps=eps if eps < 1e6 else 1e-6))
optioned(
    "attention", "a scale of 0 is the default", lambda q, k, v, scale=None: attention(q, k, v, scale=scale or None)
)
optioned("attention", "the sign of scale is lost",
         lambda q, k, v, scale=None: attention(q, k, v, scale=None if scale is None else abs(scale)))  # fmt: skip
optioned("attention", "causal masks are aligned at the top left where there are more queries than keys",
         lambda q, k, v, is_causal=False: attention(q, k, v, is_causal=is_causal)
         if q.shape[1] <= k.shape[1] or not is_causal else
         np.concatenate([attention(q[:, : k.shape[1]], k, v, is_causal=True),
                         attention(q[:, k.shape[1] :], k, v)], 1))  # fmt: skip

# --- layouts, and one array given twice ---


def laid(op: str, what: str, wrong: Callable[..., Any]) -> None:
    PLANTED.append(Planted(op, "layouts", what, lambda: wrong))


laid("softmax", "a transposed x is read as it lies",
     lambda x: softmax(x if x.flags.c_contiguous or not x.T.flags.c_contiguous else x.T.reshape(x.shape)))  # fmt: skip
laid("softmax", "every second element is read as every one",
     lambda x: softmax(np.ascontiguousarray(x).reshape(-1)[::-1].reshape(x.shape))
     if x.size and x.strides[-1] == 2 * x.itemsize else softmax(x))  # fmt: skip
laid("layernorm", "a strided weight is read without its stride",
     lambda x, weight=None: layernorm(x, weight if weight is None or weight.flags.c_contiguous else
                                      np.repeat(weight, 2)[: len(weight)]))  # fmt: skip
laid("matmul", "an a that is b is multiplied by its transpose",
     lambda a, b: matmul(a, np.swapaxes(b, -1, -2)) if a is b else matmul(a, b))  # fmt: skip
laid("layernorm", "a bias that is the weight is left out",
     lambda x, weight=None, bias=None: layernorm(x, weight, None if bias is weight else bias))  # fmt: skip
laid("attention", "keys that are the queries see themselves alone",
     lambda q, k, v: attention(q, k, v, is_causal=q is k))  # fmt: skip
laid("matmul", "rows of a sliced b run into each other",
     lambda a, b: matmul(a, b if b.ndim < 2 or b.flags.c_contiguous or b.strides[-1] != b.itemsize or not b.size
                         else np.roll(b, 1, -1)))  # fmt: skip


# --- right, and of unusual kinds: whether they keep the promises as well ---


def pairwise(x: np.ndarray) -> np.ndarray:
    """Sums of the last axis, halves first."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        x = np.concatenate([low + high, rest], -1)
    return x


def kahan(x: np.ndarray) -> np.ndarray:
    total, lost = np.zeros_like(x[..., :1]), np.zeros_like(x[..., :1])
    for i in range(x.shape[-1]):
        y = x[..., i : i + 1] - lost
        new = total + y
        total, lost = new, (new - total) - y
    return total


def softmax_by(add: Callable[[np.ndarray], np.ndarray]) -> Callable[..., Any]:
    def fn(x: Any, *, axis: int = -1) -> Any:
        rows = np.moveaxis(x, axis, -1).astype(np.float64 if x.dtype == np.float64 else np.float32)
        if not x.size:
            return np.zeros(x.shape, x.dtype)
        with np.errstate(all="ignore"):
            e = np.ascontiguousarray(np.exp(rows - rows.max(-1, keepdims=True)))
            return np.array(np.moveaxis(e / add(e), -1, axis), x.dtype, order="C")

    return fn


def in_order(x: np.ndarray) -> np.ndarray:
    """Sums of the last axis, one term after the other."""
    return np.cumsum(x, -1, dtype=x.dtype)[..., -1:] if x.shape[-1] else x.sum(-1, keepdims=True)


def layernorm_in_order(x: Any, weight: Any = None, bias: Any = None, *, eps: float = 1e-5) -> Any:
    kind = np.float64 if x.dtype == np.float64 else np.float32
    with np.errstate(all="ignore"):
        rows, n = x.astype(kind), kind(x.shape[-1])
        d = rows - in_order(rows) / n
        y = d / np.sqrt(in_order(d * d) / n + kind(eps))
        y = y if weight is None else y * weight.astype(kind)
        return np.array(y if bias is None else y + bias.astype(kind), x.dtype, order="C")


def matmul_by(product: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[..., Any]:
    def fn(a: Any, b: Any) -> Any:
        kind = np.float64 if a.dtype == np.float64 else np.float32
        with np.errstate(all="ignore"):
            return np.array(product(a.astype(kind), b.astype(kind)), a.dtype, order="C")

    return fn


def split_k(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    parts = [a[..., i : i + 64] @ b[..., i : i + 64, :] for i in range(0, max(a.shape[-1], 1), 64)]
    return np.sum(parts, 0)


RIGHT: dict[str, tuple[str, Callable[..., Any], bool]] = {
    "pairwise sums": ("softmax", softmax_by(pairwise), True),
    "Kahan sums": ("softmax", softmax_by(kahan), True),
    "sums in order: softmax": ("softmax", softmax_by(in_order), False),
    "sums in order: layernorm": ("layernorm", layernorm_in_order, False),
    "sums in reverse": ("softmax", softmax_by(lambda e: pairwise(e[..., ::-1])), True),
    "float64 inside: softmax": ("softmax", softmax, True),
    "float64 inside: layernorm": ("layernorm", layernorm, True),
    "float64 inside: rmsnorm": ("rmsnorm", rmsnorm, True),
    "float64 inside: attention": ("attention", attention, False),
    "a BLAS": ("matmul", matmul_by(np.matmul), False),
    "split k": ("matmul", matmul_by(split_k), False),
    "k in reverse": ("matmul", matmul_by(lambda a, b: a[..., ::-1] @ b[..., ::-1, :]), False),
}
"""Name -> (op, function, whether it keeps the promises: a BLAS picks a kernel by size)."""


def found(fault: Planted, seed: int, examples: int = EXAMPLES) -> bool:
    """Whether a check says of a fault what it breaks."""
    with np.errstate(all="ignore"):
        report = pk.check(fault.op, fn=fault.make(), max_examples=examples, seed=seed, shrink=False)
    return bool(report.failures) and (not fault.kind or fault.kind in {f.kind for f in report.failures})


def main() -> int:
    start, missed = time.process_time(), 0
    for fault in PLANTED:
        caught = sum(found(fault, seed) for seed in range(5))
        missed += caught < 5
        print(f"{caught} of 5  {fault.op} {fault.group}: {fault.what}", flush=True)
    for name, (op, fn, keeps) in RIGHT.items():
        reports = [pk.check(op, fn=fn, max_examples=EXAMPLES, seed=s, promises=keeps, shrink=False) for s in range(5)]
        wrong = [str(f) for r in reports for f in r.failures]
        missed += bool(wrong)
        print(f"{'passed' if not wrong else 'FAILED'}  {name}", *wrong[:1], flush=True)
    print(f"{len(PLANTED)} faults, {missed} lines not as they should be, {time.process_time() - start:.0f} s CPU")
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
