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

__all__ = ["OVERRIDES"]

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
        if isinstance(typed, InterpretedTensor) and typed.dtype.name in FLOATS:
            other = y if typed is x else x
            if other.__class__ is float or (
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
    """The ufunc that a combiner of ``tl.sum``, ``tl.max`` or ``tl.min`` is."""
    known = (
        (tl.standard._sum_combine, np.add),
        (tl.standard._elementwise_max, np.fmax),
        (tl.standard._elementwise_min, np.fmin),
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
    axis = _raw(axis)
    data = [p.handle.data.reshape(-1) if axis is None else np.moveaxis(p.handle.data, axis, 0) for p in parts]
    while data[0].shape[0] > 1:
        half = data[0].shape[0] // 2
        got = combine_fn(
            *(
                made(d[s], p.dtype)
                for s in (slice(0, half), slice(half, None))
                for d, p in zip(data, parts, strict=True)
            )
        )
        data = [g.handle.data for g in (got if isinstance(got, tuple) else (got,))]
    results = [
        made(d[0], p.dtype) if np.ndim(d[0]) else made(d.reshape(1), p.dtype, False)
        for d, p in zip(data, parts, strict=True)
    ]
    if _raw(keep_dims):
        results = [made(np.expand_dims(r.handle.data, axis), r.dtype) for r in results]
    return tuple(results) if isinstance(input, tuple) else results[0]


def associative_scan(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("tl.associative_scan is not interpreted")


def _reduction(ufunc: np.ufunc) -> Callable[..., Any]:
    def op(input: InterpretedTensor, axis: int | None = None, keep_dims: bool = False) -> InterpretedTensor:
        if input.dtype.name not in ("fp32", "fp64", "int32", "int64"):
            raise NotImplementedError(
                f"reduction of {input.dtype}: convert it to float32 or int32 first, as the accumulator of a device "
                "would be"
            )
        return _reduce_data(input, axis, ufunc, bool(_raw(keep_dims)))

    return op


def _identity(x: Any, *args: Any) -> Any:
    return x


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
        (tl.sum, _reduction(np.add)), (tl.max, _reduction(np.fmax)), (tl.min, _reduction(np.fmin)),
        (tl.maximum, _two(np.fmax, bound(tl.maximum))), (tl.minimum, _two(np.fmin, bound(tl.minimum))),
        (tl.div_rn, _two(np.divide, bound(tl.div_rn))),
        (tl.multiple_of, _identity), (tl.max_contiguous, _identity), (tl.max_constancy, _identity),
        *((getattr(tl, name), _elementwise(ufunc, bound(getattr(tl, name)))) for name, ufunc in _ELEMENTWISE.items()),
    ]
}  # fmt: skip
"""id of a function of ``tl`` (or builtin) -> what an interpreted kernel calls instead."""
