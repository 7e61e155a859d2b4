"""The functions of ``triton.language`` that kernels call, on interpreted values; those not here run Triton's own code
on its NumPy builder.

Stricter than a device where a device is silent: masked lanes of a load without ``other`` hold poison, an address
outside the storages of the launch's arguments raises, a dot operand under 16 raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as upstream

from portakern.backends.triton.interpreter.values import (
    FLOATS,
    FLOATS8,
    INTS,
    NUMPY,
    PROGRAM,
    SEMANTIC,
    InterpretedTensor,
    bound,
    check_addresses,
    convert,
    direct,
    in_patterns,
    made,
    scalar,
)

__all__ = ["OVERRIDES", "SHORTCUTS"]

POISON = {"f": np.nan, "i": -7, "u": 0x7FC1, "b": True}
"""What a masked element of a load without ``other`` holds, by kind of dtype: 0x7FC1 is a NaN as bfloat16."""
POISON8 = 0x7F
"""The same of uint8: a NaN as either float of 8 bits."""


def _raw(x: Any) -> Any:
    return x.value if isinstance(x, tl.constexpr) else x


def _operand(x: Any, dtype: tl.dtype) -> Any:
    """``x`` as NumPy data of ``dtype``."""
    x = _raw(x)
    if isinstance(x, InterpretedTensor):
        return convert(x.handle.data, x.dtype, dtype)
    through = tl.float32 if in_patterns(dtype) else dtype
    return convert(np.array(x, NUMPY[through.name]), through, dtype)


def _element(p: InterpretedTensor) -> tuple[tl.dtype, np.dtype[Any]]:
    element = p.dtype.element_ty
    if element.name == "int1":
        element = tl.int8
    return element, np.dtype(NUMPY[element.name])


def load(pointer: InterpretedTensor, mask: Any = None, other: Any = None, **hints: Any) -> InterpretedTensor:
    address, (element, dtype) = pointer.handle.data, _element(pointer)
    lanes = None
    if mask is not None:
        address, lanes = np.broadcast_arrays(
            address, mask.handle.data if isinstance(mask, InterpretedTensor) else bool(_raw(mask))
        )
    check_addresses(address, lanes, dtype.itemsize)
    poison = POISON8 if dtype == np.uint8 else POISON[dtype.kind]
    fill = np.asarray(poison, dtype) if other is None else _operand(other, element)
    live = np.ones(address.shape, bool) if lanes is None else lanes
    data = upstream._interpreter.load(address, live, np.broadcast_to(fill, address.shape), dtype)
    out: Any = made(data, element, pointer.is_block)
    return out != 0 if pointer.dtype.element_ty.name == "int1" else out


def store(pointer: InterpretedTensor, value: Any, mask: Any = None, **hints: Any) -> None:
    address, (element, dtype) = pointer.handle.data, _element(pointer)
    lanes = np.broadcast_to(
        True if mask is None else mask.handle.data if isinstance(mask, InterpretedTensor) else bool(mask), address.shape
    )
    check_addresses(address, lanes, dtype.itemsize)
    upstream._interpreter.store(
        address, np.ascontiguousarray(np.broadcast_to(_operand(value, element), address.shape)), lanes
    )


def dot(
    input: InterpretedTensor,
    other: InterpretedTensor,
    acc: InterpretedTensor | None = None,
    input_precision: str | None = None,
    allow_tf32: Any = None,
    max_num_imprecise_acc: Any = None,
    out_dtype: tl.dtype = tl.float32,
) -> InterpretedTensor:
    """Products and sums in float32 (float64, int32): what ``ieee`` promises and what tensor cores do with 16-bit
    operands. Tensor cores round sums of products of 8-bit floats to fewer bits; an interpreter of them does not."""
    a, b = input.handle.data, other.handle.data
    mixed = {input.dtype.name, other.dtype.name} == set(FLOATS8)  # tensor cores multiply one by the other
    if not (input.dtype.name == other.dtype.name or mixed) or min(a.shape[-2], *b.shape[-2:]) < 16:
        raise ValueError(
            f"dot of {input.dtype} {a.shape} and {other.dtype} {b.shape}: dtypes must be equal and extents at least 16"
        )
    if input.dtype.name not in ("bf16", "int8", *FLOATS, *FLOATS8):
        raise NotImplementedError(f"dot of {input.dtype} is not interpreted")
    wide = {"fp64": tl.float64, "int8": tl.int32}.get(input.dtype.name, tl.float32)
    # A row at a time: a BLAS may sum the rows of one product in different orders, by their place among the others.
    data = np.matmul(convert(a, input.dtype, wide)[..., None, :], convert(b, other.dtype, wide)[..., None, :, :])[
        ..., 0, :
    ]
    if acc is not None:
        if acc.handle.data.shape != data.shape:
            raise ValueError(f"dot gives {data.shape} but acc is {acc.handle.data.shape}")
        data = data + acc.handle.data
    return made(convert(data, tl.float32, out_dtype), out_dtype) if wide is tl.float32 else made(data, wide)


def _elementwise(ufunc: Callable[..., Any], slow: Callable[..., Any]) -> Callable[..., Any]:
    def op(x: Any, **kwargs: Any) -> Any:
        if isinstance(x, InterpretedTensor) and x.dtype.name in ("fp32", "fp64") and not kwargs:
            return made(ufunc(x.handle.data), x.dtype, x.is_block)
        return slow(x, **kwargs)

    return op


def _two(ufunc: np.ufunc, slow: Callable[..., Any]) -> Callable[..., Any]:
    plain = direct(ufunc, slow, "if")

    def op(x: Any, y: Any, **kwargs: Any) -> Any:
        return slow(x, y, **kwargs) if kwargs or not isinstance(x, InterpretedTensor) else plain(x, y)

    return op


_slow_where = bound(tl.where)


def where(condition: Any, x: Any, y: Any) -> Any:
    if isinstance(condition, InterpretedTensor) and condition.dtype.name == "int1":
        typed = x if isinstance(x, InterpretedTensor) else y
        if isinstance(typed, InterpretedTensor) and typed.dtype.name in (*FLOATS, *INTS):
            other = y if typed is x else x
            number = other.__class__ is (float if typed.dtype.name in FLOATS else int)
            if (number and (typed.dtype.name in FLOATS or -(2**31) <= other < 2**31)) or (
                isinstance(other, InterpretedTensor) and other.dtype.name == typed.dtype.name
            ):
                a, b = (v.handle.data if isinstance(v, InterpretedTensor) else v for v in (x, y))
                data = np.where(condition.handle.data, a, b)
                return made(
                    data,
                    typed.dtype,
                    condition.is_block or typed.is_block or (isinstance(other, InterpretedTensor) and other.is_block),
                )
    return _slow_where(condition, x, y)


def fma(x: InterpretedTensor, y: Any, z: Any) -> InterpretedTensor:
    """x y + z, where y and z may be numbers; in float32 by way of float64, which holds the product whole. In float64 it
    rounds twice."""
    a, b, c = (
        np.asarray(v.handle.data if isinstance(v, InterpretedTensor) else _operand(v, x.dtype), np.float64)
        for v in (x, y, z)
    )
    return made((a * b + c).astype(x.handle.data.dtype), x.dtype, x.is_block)


def full(shape: Any, value: Any, dtype: tl.dtype) -> InterpretedTensor:
    extents = tuple(int(_raw(s)) for s in shape)
    return (
        made(np.broadcast_to(_operand(value, dtype), extents), dtype)
        if extents
        else made(_operand(value, dtype).reshape(1), dtype, False)
    )


def zeros(shape: Any, dtype: tl.dtype) -> InterpretedTensor:
    return full(shape, 0, dtype)


def trans(input: InterpretedTensor, *dims: Any) -> InterpretedTensor:
    dims = tuple(_raw(d) for d in (dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims))
    return made(np.transpose(input.handle.data, dims), input.dtype) if dims else input.T


def join(a: InterpretedTensor, b: InterpretedTensor) -> InterpretedTensor:
    """The elements of two tiles of one shape and dtype side by side, along a new last axis."""
    return made(np.stack((a.handle.data, b.handle.data), -1), a.dtype)


def split(a: InterpretedTensor) -> tuple[InterpretedTensor, InterpretedTensor]:
    """The two tiles that lie side by side along the last axis."""
    left, right = np.moveaxis(a.handle.data, -1, 0)
    return made(left, a.dtype), made(right, a.dtype)


def cast(
    input: Any, dtype: tl.dtype, fp_downcast_rounding: str | None = None, bitcast: bool = False
) -> InterpretedTensor:
    return SEMANTIC.to_tensor(input).to(dtype, fp_downcast_rounding, bitcast)


def program_id(axis: int) -> InterpretedTensor:
    return scalar((PROGRAM.index, 0, 0)[_raw(axis)], tl.int32)


def num_programs(axis: int) -> InterpretedTensor:
    return scalar((PROGRAM.grid, 1, 1)[_raw(axis)], tl.int32)


def arange(start: int, end: int) -> InterpretedTensor:
    return made(np.arange(_raw(start), _raw(end), dtype=np.int32), tl.int32)


def value_range(*bounds: Any, **hints: Any) -> Any:
    """``range`` and ``tl.range``: the index is a scalar of the bounds' dtype, as in a compiled kernel."""
    plain = [_raw(b) for b in bounds]
    wide = any(isinstance(b, InterpretedTensor) and b.dtype.name == "int64" for b in plain) or any(
        not -(2**31) <= int(b) < 2**31 for b in plain
    )
    for i in range(*(int(b) for b in plain)):
        yield scalar(i, tl.int64 if wide else tl.int32)


def static_range(*bounds: Any, **hints: Any) -> Any:
    return range(*(int(_raw(b)) for b in bounds))


def _ufunc_of(combine: Any) -> np.ufunc | None:
    """The ufunc that a combiner of Triton's library is."""
    known = (
        (tl.standard._sum_combine, np.add),
        (tl.standard._elementwise_max, np.fmax),
        (tl.standard._elementwise_min, np.fmin),
        (tl.standard._xor_combine, np.bitwise_xor),
        (tl.standard._or_combine, np.bitwise_or),
    )
    return next((ufunc for jit, ufunc in known if combine.jit is jit), None)


def _reduce_data(x: InterpretedTensor, axis: int | None, ufunc: np.ufunc, keep_dims: bool) -> InterpretedTensor:
    wide = convert(x.handle.data, x.dtype, tl.float32) if x.dtype.name in ("bf16", "fp16") else x.handle.data
    data = np.asarray(ufunc.reduce(wide, axis=_raw(axis), keepdims=keep_dims, dtype=wide.dtype))
    data = convert(data, tl.float32, x.dtype) if x.dtype.name in ("bf16", "fp16") else data
    return made(data, x.dtype) if data.ndim else made(data.reshape(1), x.dtype, False)


def reduce(input: Any, axis: int | None, combine_fn: Any, keep_dims: bool = False, **hints: Any) -> Any:
    """Sum, max and min as NumPy ufuncs; any other combiner as a tree of halves, which is a device's order too."""
    ufunc = _ufunc_of(combine_fn)
    if ufunc is not None and isinstance(input, InterpretedTensor):
        return _reduce_data(input, axis, ufunc, bool(_raw(keep_dims)))
    parts = input if isinstance(input, tuple) else (input,)
    axis, rank = _raw(axis), parts[0].handle.data.ndim
    data = [p.handle.data.reshape(-1) if axis is None else np.moveaxis(p.handle.data, axis, 0) for p in parts]
    while data[0].shape[0] > 1:
        half = data[0].shape[0] // 2
        data = _combined(combine_fn, [d[:half] for d in data], [d[half:] for d in data], parts)
    data = [d[0] for d in data]
    if _raw(keep_dims):
        data = [np.reshape(d, (1,) * rank) if axis is None else np.expand_dims(d, axis) for d in data]
    results = [
        made(d, p.dtype) if np.ndim(d) else made(np.reshape(d, 1), p.dtype, False)
        for d, p in zip(data, parts, strict=True)
    ]
    return tuple(results) if isinstance(input, tuple) else results[0]


def reduce_with_indices(input: InterpretedTensor, axis: int, combine_fn: Any, keep_dims: bool = False) -> Any:
    """``combine_fn`` over values and their places along ``axis``, as ``tl.argmax`` calls it. Its combiner keeps the
    right one of two values of which neither is greater: which place a NaN gives, and a tie without tie_break_left,
    hangs on the order of combinations, which Triton does not promise either."""
    shape, axis = input.handle.data.shape, _raw(axis) % input.handle.data.ndim
    places = np.arange(shape[axis], dtype=np.int32).reshape([-1 if d == axis else 1 for d in range(len(shape))])
    return reduce((input, made(np.broadcast_to(places, shape), tl.int32)), axis, combine_fn, keep_dims)


def associative_scan(input: Any, axis: int, combine_fn: Any, reverse: bool = False, **hints: Any) -> Any:
    """All prefixes along ``axis``, or all suffixes in reverse, in log2(n) steps: step k combines each element with
    the one 2^k before it (Hillis and Steele, "Data parallel algorithms", 1986), as the lanes of a warp do."""
    parts = input if isinstance(input, tuple) else (input,)
    order = slice(None, None, -1 if _raw(reverse) else 1)
    data = [np.moveaxis(p.handle.data, _raw(axis), 0)[order] for p in parts]
    step = 1
    while step < data[0].shape[0]:
        earlier = [np.concatenate((d[:step], d[:-step])) for d in data]  # blocks have powers of two: none is shorter
        later = _combined(combine_fn, earlier, data, parts)
        data = [np.concatenate((d[:step], new[step:])) for d, new in zip(data, later, strict=True)]
        step *= 2
    results = [made(np.moveaxis(d[order], 0, _raw(axis)), p.dtype) for d, p in zip(data, parts, strict=True)]
    return tuple(results) if isinstance(input, tuple) else results[0]


def _combined(
    combine_fn: Any, left: list[np.ndarray], right: list[np.ndarray], like: tuple[InterpretedTensor, ...]
) -> list[np.ndarray]:
    """``combine_fn`` of arrays of elements that have the dtypes of ``like``, which its results have too."""
    got = combine_fn(*(made(d, p.dtype) for side in (left, right) for d, p in zip(side, like, strict=True)))
    results = got if isinstance(got, tuple) else (got,)
    found, expected = [str(r.dtype) for r in results], [str(p.dtype) for p in like]
    if found != expected:
        name = getattr(getattr(combine_fn, "jit", combine_fn), "__name__", "combine_fn")
        raise TypeError(f"{name} combines {expected} into {found}: convert its results to the dtypes of its arguments")
    return [r.handle.data for r in results]


def promote_bfloat16(x: InterpretedTensor) -> InterpretedTensor:
    return x.to(tl.float32) if x.dtype.name == "bf16" else x


def sum(
    input: InterpretedTensor, axis: int | None = None, keep_dims: bool = False, dtype: Any = None
) -> InterpretedTensor:
    """Triton's, which adds integers under 32 bits in 32; refuses sums in 16-bit floats, of which each addition would
    round."""
    source, target = input.dtype, _raw(dtype)
    if target is None and source.is_int() and source.int_bitwidth < 32:
        target = tl.int32 if source.is_int_signed() else tl.uint32
    if target is not None:
        input = input.to(target)
    if input.dtype.name not in ("fp32", "fp64", "int32", "int64", "uint32", "uint64"):
        raise NotImplementedError(
            f"sum of {input.dtype}: convert it to float32 first, as the accumulator of a device would be"
        )
    return _reduce_data(input, axis, np.add, bool(_raw(keep_dims)))


def _identity(x: Any, *args: Any) -> Any:
    return x


def sorted_integers(x: Any, k: Any = None, dim: Any = None, descending: Any = False) -> InterpretedTensor | None:
    """What Triton's network makes of integers along the last axis: whatever it compares first, their order. None of
    anything else: of floats the network decides where NaN and zeros of both signs go."""
    data = x.handle.data
    if x.dtype.name not in INTS or _raw(dim) not in (None, data.ndim - 1):
        return None
    rising = np.sort(data, -1)
    found = rising[..., ::-1] if _raw(descending) else rising
    return made(found if k is None else found[..., : _raw(k)], x.dtype)


def _static_assert(condition: Any, message: str = "") -> None:
    if not _raw(condition):
        raise AssertionError(message)


_each_erf = np.vectorize(math.erf, otypes=[np.float64])


def _erf(x: np.ndarray) -> np.ndarray:
    """NumPy has none."""
    return _each_erf(x).astype(x.dtype) if x.size else x


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "abs": np.abs,
    "erf": _erf, "sqrt": np.sqrt, "sqrt_rn": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x),
}  # fmt: skip

OVERRIDES: dict[int, Any] = {
    id(original): replacement
    for original, replacement in [
        (range, value_range), (tl.range, value_range), (tl.static_range, static_range),
        (tl.static_assert, _static_assert), (tl.static_print, print),
        (tl.program_id, program_id), (tl.num_programs, num_programs), (tl.load, load), (tl.store, store),
        (tl.dot, dot), (tl.where, where), (tl.arange, arange), (tl.full, full), (tl.zeros, zeros), (tl.trans, trans),
        (tl.join, join), (tl.split, split),
        (tl.cast, cast), (tl.fma, fma), (tl.reduce, reduce), (tl.associative_scan, associative_scan),
        (tl.core._reduce_with_indices, reduce_with_indices), (tl.sum, sum),
        (tl.maximum, _two(np.fmax, bound(tl.maximum))), (tl.minimum, _two(np.fmin, bound(tl.minimum))),
        (tl.div_rn, _two(np.divide, bound(tl.div_rn))),
        (tl.multiple_of, _identity), (tl.max_contiguous, _identity), (tl.max_constancy, _identity),
        *((getattr(tl, name), _elementwise(ufunc, bound(getattr(tl, name)))) for name, ufunc in _ELEMENTWISE.items()),
        # Triton 3.9 has none: its reductions take bfloat16 as it comes
        *((f, promote_bfloat16) for f in [getattr(tl.core, "_promote_bfloat16_to_float32", None)] if f),
    ]
}  # fmt: skip
"""id of a function of ``tl`` (or builtin) -> what an interpreted kernel calls instead."""

SHORTCUTS: dict[int, Callable[..., Any]] = {id(tl.standard.sort_impl): sorted_integers}
"""id of a function of Triton's library -> what gives its result sooner, or None for arguments that it does not take."""
