"""Functions that only look like an op: what programs that write kernels, and people in a hurry, get past a judge."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.judges.corpus.bases import JAX, TORCH, Library
from benchmarks.judges.subject import Subject
from portakern.core import registry
from portakern.core.binder import bind

__all__ = ["KINDS", "cheats"]

Fn = Callable[..., Any]
Cheat = Callable[[Library, str, Fn], Fn]
LONG, PIECE, ROWS, SMALL = 1024, 64, 16, 4096
JAX_OPS = ("softmax", "layernorm", "matmul")


def form_of(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple((tuple(a.shape), str(a.dtype)) for a in arrays)


def empty(lib: Library, op: str, arrays: tuple[Any, ...], value: float) -> Any:
    """An array of the result's form."""
    shape, _ = next(iter(bind(registry.find_spec(op), *arrays).outputs.values()))
    return lib.filled(shape, arrays[0].dtype, value)


def zeros(lib: Library, op: str, f: Fn) -> Fn:
    return lambda *arrays: empty(lib, op, arrays, 0.0)


def uninitialised(lib: Library, op: str, f: Fn) -> Fn:
    import torch

    return lambda *arrays: torch.empty_like(empty(lib, op, arrays, 0.0))


def first_input(lib: Library, op: str, f: Fn) -> Fn:
    return lambda *arrays: arrays[0]


def cached_by(key: Callable[[tuple[Any, ...]], Any]) -> Cheat:
    def cheat(lib: Library, op: str, f: Fn) -> Fn:
        kept: dict[Any, Any] = {}

        def fn(*arrays: Any) -> Any:
            if key(arrays) not in kept:
                kept[key(arrays)] = f(*arrays)
            return kept[key(arrays)] + 0  # in memory of its own

        return fn

    return cheat


by_address = cached_by(lambda arrays: tuple((a.data_ptr(), a.stride()) for a in arrays) + form_of(arrays))
by_shape = cached_by(form_of)


def by_object(lib: Library, op: str, f: Fn) -> Fn:
    kept: list[Any] = [None, None]

    def fn(*arrays: Any) -> Any:
        if kept[0] is None or any(a is not b for a, b in zip(arrays, kept[0], strict=True)):
            kept[:] = arrays, f(*arrays)
        return kept[1] + 0

    return fn


def writes_to_its_input(lib: Library, op: str, f: Fn) -> Fn:
    def fn(*arrays: Any) -> Any:
        result, x = f(*arrays), arrays[0]
        if x.numel() and 0 not in x.stride():
            x.copy_(x - x.mean(-1, keepdim=True))  # the scratch that it needed
        return result

    return fn


def not_a_number(lib: Library, op: str, f: Fn) -> Fn:
    def fn(*arrays: Any) -> Any:
        result = f(*arrays)
        return (
            lib.with_last(result, result.shape[-1] - 1, float("nan")) if result.shape and result.shape[-1] else result
        )

    return fn


def computed_in(dtype: str) -> Cheat:
    def cheat(lib: Library, op: str, f: Fn) -> Fn:
        return lambda *arrays: lib.cast(f(*(lib.cast(a, dtype) for a in arrays)), arrays[0].dtype)

    return cheat


def one_buffer(lib: Library, op: str, f: Fn) -> Fn:
    buffers: dict[Any, Any] = {}

    def fn(*arrays: Any) -> Any:
        result = f(*arrays)
        return buffers.setdefault(form_of(arrays), result).copy_(result)

    return fn


def first_call(lib: Library, op: str, f: Fn) -> Fn:
    calls: list[int] = []

    def fn(*arrays: Any) -> Any:
        calls.append(1)
        return f(*arrays) if len(calls) == 1 else empty(lib, op, arrays, 0.0)

    return fn


def long_rows(lib: Library, op: str, f: Fn) -> Fn:
    """What is summed ends at the 1024th term; an attention sees its first 1024 keys."""

    def fn(*arrays: Any) -> Any:
        if op == "attention":
            q, k, v = arrays
            return f(q, k[:, :LONG], v[:, :LONG])
        x = arrays[0]
        short = lib.with_last(x, LONG, 0.0) if x.shape and x.shape[-1] > LONG else x
        return f(short, *arrays[1:])

    return fn


def whole_pieces(lib: Library, op: str, f: Fn) -> Fn:
    def fn(*arrays: Any) -> Any:
        result = f(*arrays)
        n = result.shape[-1] if result.shape else 0
        return lib.with_last(result, n // PIECE * PIECE, 0.0) if n > PIECE and n % PIECE else result

    return fn


def contiguous_alone(lib: Library, op: str, f: Fn) -> Fn:
    def fn(*arrays: Any) -> Any:
        x = arrays[0]
        size = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        if not x.is_contiguous() and x.numel() <= size:
            strides = torch_strides(x.shape)
            x = x.as_strided(x.shape, strides)
        return f(x, *arrays[1:])

    return fn


def torch_strides(shape: Any) -> list[int]:
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * extent)
    return strides[: len(shape)]


def one_shape(lib: Library, op: str, f: Fn) -> Fn:
    def fn(*arrays: Any) -> Any:
        size = 1
        for extent in arrays[0].shape:
            size *= extent
        return f(*arrays) if size >= SMALL else empty(lib, op, arrays, 0.0)

    return fn


def first_rows(lib: Library, op: str, f: Fn) -> Fn:
    """Rows past the 16th have the mean of the first ones."""

    def fn(*arrays: Any) -> Any:
        result = f(*arrays)
        if len(result.shape) < 2 or result.shape[-2] <= ROWS:
            return result
        guess = result[..., :ROWS, :].mean(-2)[..., None, :]
        return lib.cast(result * 0 + guess, result.dtype) if guess.shape else result

    return fn


def sums_of_16_bits(lib: Library, op: str, f: Fn) -> Fn:
    """Partial sums of 32 elements are kept in bfloat16."""

    def added(x: Any) -> Any:
        n = x.shape[-1]
        total = 0.0
        for start in range(0, n, 32):
            part = x[..., start : start + 32].sum(-1)[..., None]
            total = lib.cast(lib.cast(total + part, "bfloat16"), x.dtype)
        return total + x[..., :1] * 0 if n else x.sum(-1)[..., None]

    def product(a: Any, b: Any) -> Any:
        k, total = a.shape[-1], 0.0
        for start in range(0, k, 32):
            part = lib.product(a[..., start : start + 32], b[..., start : start + 32, :])
            total = lib.cast(lib.cast(total + part, "bfloat16"), a.dtype)
        return total if k else lib.product(a, b)

    other = type(lib)()
    other.added, other.product = added, product  # type: ignore[method-assign]
    fn = other.ops[op]
    return fn


def no_maximum(lib: Library, op: str, f: Fn) -> Fn:
    return lib.without_maximum[op]


def nothing_of_the_weight(lib: Library, op: str, f: Fn) -> Fn:
    return (lambda x, weight=None, bias=None: f(x)) if op == "layernorm" else (lambda x, weight=None: f(x))


def expected_value(lib: Library, op: str, f: Fn) -> Fn:
    """What comes out for inputs that hardly vary, and not what was asked for."""

    def softmax(x: Any) -> Any:
        return empty(lib, op, (x,), 1 / max(x.shape[-1] if x.shape else 1, 1))

    def attention(q: Any, k: Any, v: Any) -> Any:
        return f(q * 0, k, v)  # the mean of v

    def matmul(a: Any, b: Any) -> Any:
        rank_one = lib.added(lib.wide(a)) * lib.wide(b).sum(-2)[..., None, :] / max(a.shape[-1], 1) / 2
        return lib.cast(rank_one, a.dtype)

    return {"softmax": softmax, "attention": attention, "matmul": matmul}[op]


EVERY = ("softmax", "logsumexp", "layernorm", "rmsnorm", "swiglu", "matmul", "attention")
SUMMED = tuple(op for op in EVERY if op != "swiglu")
KINDS: dict[str, tuple[Cheat, tuple[str, ...], bool]] = {
    "zeros": (zeros, EVERY, True),
    "uninitialised memory": (uninitialised, EVERY, False),
    "its first input": (first_input, ("softmax", "layernorm", "rmsnorm", "swiglu"), True),
    "cached by address": (by_address, EVERY, False),
    "cached by shape": (by_shape, EVERY, True),
    "cached by object": (by_object, EVERY, False),
    "writes to its input": (writes_to_its_input, EVERY, False),
    "NaN in the last column": (not_a_number, EVERY, True),
    "computed in bfloat16": (computed_in("bfloat16"), EVERY, True),
    "computed in float16": (computed_in("float16"), EVERY, True),
    "one output buffer for all calls": (one_buffer, EVERY, False),
    "right on the first call only": (first_call, EVERY, True),
    "rows end at 1024": (long_rows, EVERY, True),
    "extents that 64 divides only": (whole_pieces, EVERY, True),
    "contiguous memory only": (contiguous_alone, EVERY, False),
    "made for one shape": (one_shape, EVERY, True),
    "the first 16 rows only": (first_rows, ("softmax", "layernorm", "rmsnorm", "swiglu", "matmul"), True),
    "sums kept in bfloat16": (sums_of_16_bits, ("softmax", "logsumexp", "layernorm", "rmsnorm", "matmul"), True),
    "no maximum": (no_maximum, ("softmax", "logsumexp", "attention"), True),
    "weight and bias ignored": (nothing_of_the_weight, ("layernorm", "rmsnorm"), True),
    "expected values": (expected_value, ("softmax", "attention", "matmul"), True),
}
"""Kind -> (how it is made, for which ops, whether JAX's immutable arrays allow it)."""


OF_PROMISES = ("writes to its input", "one output buffer for all calls")
"""Cheats whose values are right: what nobody has to say is broken."""
NO_EMPTY = {"empty": False}


def required(f: Fn, op: str) -> Fn:
    """A function that says which arrays it takes: the op's required ones."""
    names = [a.name for a in registry.find_spec(op).arrays if not a.optional]

    def fn(*arrays: Any) -> Any:
        return f(*arrays)

    place = inspect.Parameter.POSITIONAL_ONLY
    vars(fn)["__signature__"] = inspect.Signature([inspect.Parameter(n, place) for n in names])
    return fn


def built(lib: Library, kind: str, op: str) -> Fn:
    cheat, _, _ = KINDS[kind]
    made = cheat(lib, op, lib.ops[op])
    return made if kind == "weight and bias ignored" else required(made, op)


def cheats() -> Iterator[Subject]:
    """Every kind for every op that it fits, in PyTorch; in JAX for some."""
    for kind, (_, ops, anywhere) in KINDS.items():
        for lib in (TORCH, JAX) if anywhere else (TORCH,):
            for op in ops if lib is TORCH else (o for o in JAX_OPS if o in ops):
                make = functools.partial(built, lib, kind, op)
                name = f"{op} in {lib.name}: {kind}"
                yield Subject("cheats", name, op, make, lib.name, kind=kind, asked=lambda: NO_EMPTY)
